/* Memory nodes of CUDA graphs. The driver takes their memory when an executable graph first runs, which is not hooked,
 * so all that it may come to need is charged when it is made: the sum over its allocation nodes. After an executable is
 * destroyed the device's graph pool may still hold pages; they are trimmed, and what stays is charged. */
#include <stdlib.h>

#include "charge.h"

#define PAGE_BYTES (UINT64_C(2) << 20) /* physical pages behind graph allocations */

typedef struct Exec {
    CUgraphExec handle;
    uint64_t units[MAX_ORDINALS];
    struct Exec *next;
} Exec;

static void lock(void) {
    pthread_mutex_lock(&limiter.graph_lock);
}

static void unlock(void) {
    pthread_mutex_unlock(&limiter.graph_lock);
}

static void add_node(CUgraphNode node, uint64_t *units) {
    CUDA_MEM_ALLOC_NODE_PARAMS params;
    if (DRIVER(cuGraphMemAllocNodeGetParams, node, &params) != CUDA_SUCCESS) return;
    CUdevice ordinal = location_device(params.poolProps.location);
    if (ordinal < 0 || ordinal >= MAX_ORDINALS) return;
    uint64_t pages = params.bytesize / PAGE_BYTES + (params.bytesize % PAGE_BYTES != 0);
    uint64_t more = pages > MAX_UNITS ? MAX_UNITS : pages * (PAGE_BYTES / UNIT_BYTES);
    units[ordinal] = units[ordinal] + more > MAX_UNITS ? MAX_UNITS + 1 : units[ordinal] + more;
}

/* False when the host has no memory for the list of nodes. Children are graphs inside a node. */
static bool add_graph(CUgraph graph, uint64_t *units) {
    size_t num_nodes = 0;
    if (DRIVER(cuGraphGetNodes, graph, NULL, &num_nodes) != CUDA_SUCCESS || num_nodes == 0) return true;
    CUgraphNode *nodes = malloc(num_nodes * sizeof *nodes);
    bool is_whole = nodes && DRIVER(cuGraphGetNodes, graph, nodes, &num_nodes) == CUDA_SUCCESS;
    for (size_t index = 0; is_whole && index < num_nodes; index++) {
        int type = -1;
        CUgraph child;
        DRIVER(cuGraphNodeGetType, nodes[index], &type);
        if (type == CU_GRAPH_NODE_TYPE_MEM_ALLOC) add_node(nodes[index], units);
        if (type == CU_GRAPH_NODE_TYPE_GRAPH &&
            DRIVER(cuGraphChildGraphNodeGetGraph, nodes[index], &child) == CUDA_SUCCESS) {
            is_whole = add_graph(child, units);
        }
    }
    free(nodes);
    return is_whole;
}

/* Per ordinal, under the lock: what live executables may need, and what is charged for them and for the graph pool. */
static uint64_t needed_units(CUdevice ordinal) {
    uint64_t sum = 0;
    for (const Exec *exec = limiter.execs; exec; exec = exec->next) sum += exec->units[ordinal];
    return sum;
}

static uint64_t pool_units(CUdevice ordinal) {
    uint64_t held_bytes = 0;
    DRIVER(cuDeviceGetGraphMemAttribute, ordinal, CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT, &held_bytes);
    return units_of(held_bytes);
}

static void settle(CUdevice ordinal) {
    uint64_t needed = needed_units(ordinal), held = pool_units(ordinal);
    Charge charge = {.device = limiter_device(ordinal), .units = limiter.graph_units[ordinal]};
    charge_correct(&charge, needed > held ? needed : held);
    limiter.graph_units[ordinal] = charge.units;
}

static void release_all(uint64_t *units) {
    for (CUdevice ordinal = 0; ordinal < MAX_ORDINALS; ordinal++) {
        if (units[ordinal]) charge_release(limiter_device(ordinal), units[ordinal]);
    }
}

/* On every device or on none. */
static CUresult reserve_all(const uint64_t *units) {
    uint64_t reserved[MAX_ORDINALS] = {0};
    for (CUdevice ordinal = 0; ordinal < MAX_ORDINALS; ordinal++) {
        int device = units[ordinal] ? limiter_device(ordinal) : NO_LIMIT;
        if (device < 0) continue;
        if (!charge_reserve(device, units[ordinal])) {
            release_all(reserved);
            return CUDA_ERROR_OUT_OF_MEMORY;
        }
        reserved[ordinal] = units[ordinal];
    }
    return CUDA_SUCCESS;
}

/* `exec` is NULL for a graph without memory nodes, which is most of them: nothing is kept for it. */
static CUresult prepare(CUgraph graph, Exec **exec) {
    uint64_t units[MAX_ORDINALS] = {0}, any = 0;
    *exec = NULL;
    if (limiter_state() != STATE_LIMITED) return CUDA_SUCCESS;
    if (!add_graph(graph, units)) return CUDA_ERROR_OUT_OF_MEMORY;
    for (int ordinal = 0; ordinal < MAX_ORDINALS; ordinal++) any |= units[ordinal];
    if (!any) return CUDA_SUCCESS;
    *exec = calloc(1, sizeof **exec);
    CUresult result = *exec ? reserve_all(units) : CUDA_ERROR_OUT_OF_MEMORY;
    for (int ordinal = 0; *exec && ordinal < MAX_ORDINALS; ordinal++) (*exec)->units[ordinal] = units[ordinal];
    if (result != CUDA_SUCCESS) free(*exec);
    return result;
}

static CUresult finish(Exec *exec, CUresult result, const CUgraphExec *handle) {
    if (!exec) return result;
    if (result != CUDA_SUCCESS) {
        release_all(exec->units);
        free(exec);
        return result;
    }
    lock();
    exec->handle = *handle;
    exec->next = limiter.execs;
    limiter.execs = exec;
    for (int ordinal = 0; ordinal < MAX_ORDINALS; ordinal++) limiter.graph_units[ordinal] += exec->units[ordinal];
    unlock();
    return result;
}

#define INSTANTIATE(name, ...)                                       \
    Exec *counted;                                                   \
    CUresult result = prepare(graph, &counted);                      \
    if (result != CUDA_SUCCESS) return result;                       \
    return finish(counted, DRIVER(name, exec, graph, __VA_ARGS__), exec)

CUresult cuGraphInstantiate(CUgraphExec *exec, CUgraph graph, CUgraphNode *error, char *log, size_t log_size) {
    INSTANTIATE(cuGraphInstantiate, error, log, log_size);
}

CUresult cuGraphInstantiate_v2(CUgraphExec *exec, CUgraph graph, CUgraphNode *error, char *log, size_t log_size) {
    INSTANTIATE(cuGraphInstantiate_v2, error, log, log_size);
}

CUresult cuGraphInstantiateWithFlags(CUgraphExec *exec, CUgraph graph, unsigned long long flags) {
    INSTANTIATE(cuGraphInstantiateWithFlags, flags);
}

CUresult cuGraphInstantiateWithParams(CUgraphExec *exec, CUgraph graph, void *params) {
    INSTANTIATE(cuGraphInstantiateWithParams, params);
}

CUresult cuGraphInstantiateWithParams_ptsz(CUgraphExec *exec, CUgraph graph, void *params) {
    INSTANTIATE(cuGraphInstantiateWithParams_ptsz, params);
}

static Exec *take_exec(CUgraphExec handle) {
    for (Exec **link = &limiter.execs; *link; link = &(*link)->next) {
        Exec *exec = *link;
        if (exec->handle != handle) continue;
        *link = exec->next;
        return exec;
    }
    return NULL;
}

/* Under one lock with the driver's call, since the handle may be given out again right after it. */
CUresult cuGraphExecDestroy(CUgraphExec handle) {
    if (limiter_state() != STATE_LIMITED) return DRIVER(cuGraphExecDestroy, handle);
    lock();
    CUresult result = DRIVER(cuGraphExecDestroy, handle);
    Exec *exec = result == CUDA_SUCCESS ? take_exec(handle) : NULL;
    for (CUdevice ordinal = 0; exec && ordinal < MAX_ORDINALS; ordinal++) {
        if (!exec->units[ordinal]) continue;
        DRIVER(cuDeviceGraphMemTrim, ordinal);
        settle(ordinal);
    }
    free(exec);
    unlock();
    return result;
}

CUresult cuDeviceGraphMemTrim(CUdevice ordinal) {
    if (limiter_state() != STATE_LIMITED || limiter_device(ordinal) < 0) return DRIVER(cuDeviceGraphMemTrim, ordinal);
    lock();
    CUresult result = DRIVER(cuDeviceGraphMemTrim, ordinal);
    settle(ordinal);
    unlock();
    return result;
}
