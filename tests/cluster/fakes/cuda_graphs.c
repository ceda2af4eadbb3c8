/* Graphs as far as memory goes: an executable takes its memory at its first launch, and leaves it to the device's graph
 * pool when it is destroyed; a trim frees what no executable uses. */
#include <stdlib.h>

#include "fake_cuda.h"

#define PAGE_BYTES (UINT64_C(2) << 20)
enum { NUM_NODES = 64 };

struct CUgraphNode_st {
    int type, device;
    size_t size;
    CUgraph child;
};

struct CUgraph_st {
    size_t num_nodes;
    struct CUgraphNode_st nodes[NUM_NODES];
};

struct CUgraphExec_st {
    uint64_t bytes[BOARD_DEVICES];
    bool is_launched;
};

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static uint64_t reserved[BOARD_DEVICES], in_use[BOARD_DEVICES];

CUresult cuGraphCreate(CUgraph *graph, unsigned flags) {
    (void)flags;
    *graph = calloc(1, sizeof **graph);
    return CUDA_SUCCESS;
}

CUresult cuGraphDestroy(CUgraph graph) {
    free(graph);
    return CUDA_SUCCESS;
}

static CUresult add_node(CUgraphNode *node, CUgraph graph, struct CUgraphNode_st value) {
    if (graph->num_nodes == NUM_NODES) return CUDA_ERROR_INVALID_VALUE;
    graph->nodes[graph->num_nodes] = value;
    if (node) *node = &graph->nodes[graph->num_nodes];
    graph->num_nodes++;
    return CUDA_SUCCESS;
}

CUresult cuGraphAddMemAllocNode(CUgraphNode *node, CUgraph graph, const CUgraphNode *dependencies, size_t count,
                                CUDA_MEM_ALLOC_NODE_PARAMS *params) {
    (void)dependencies, (void)count;
    struct CUgraphNode_st value = {CU_GRAPH_NODE_TYPE_MEM_ALLOC, params->poolProps.location.id, params->bytesize, NULL};
    params->dptr = UINT64_C(0x6f0000000000) + graph->num_nodes * PAGE_BYTES;
    return add_node(node, graph, value);
}

CUresult cuGraphAddChildGraphNode(CUgraphNode *node, CUgraph graph, const CUgraphNode *dependencies, size_t count,
                                  CUgraph child) {
    (void)dependencies, (void)count;
    return add_node(node, graph, (struct CUgraphNode_st){CU_GRAPH_NODE_TYPE_GRAPH, 0, 0, child});
}

/* CUDA_ERROR_NOT_FOUND: this stream is not being captured. */
CUresult fake_capture(CUstream stream, CUdeviceptr *pointer, size_t size) {
    if ((uintptr_t)stream <= CU_STREAM_PER_THREAD || !stream->capturing) return CUDA_ERROR_NOT_FOUND;
    CUDA_MEM_ALLOC_NODE_PARAMS params = {.bytesize = size};
    params.poolProps.location = (CUmemLocation){CU_MEM_LOCATION_TYPE_DEVICE, stream->context->device};
    CUresult result = cuGraphAddMemAllocNode(NULL, stream->capturing, NULL, 0, &params);
    *pointer = params.dptr;
    return result;
}

CUresult cuGraphGetNodes(CUgraph graph, CUgraphNode *nodes, size_t *num_nodes) {
    for (size_t index = 0; nodes && index < *num_nodes; index++) nodes[index] = &graph->nodes[index];
    *num_nodes = graph->num_nodes;
    return CUDA_SUCCESS;
}

CUresult cuGraphNodeGetType(CUgraphNode node, int *type) {
    *type = node->type;
    return CUDA_SUCCESS;
}

CUresult cuGraphChildGraphNodeGetGraph(CUgraphNode node, CUgraph *graph) {
    *graph = node->child;
    return CUDA_SUCCESS;
}

CUresult cuGraphMemAllocNodeGetParams(CUgraphNode node, CUDA_MEM_ALLOC_NODE_PARAMS *params) {
    *params = (CUDA_MEM_ALLOC_NODE_PARAMS){.bytesize = node->size};
    params->poolProps.location = (CUmemLocation){CU_MEM_LOCATION_TYPE_DEVICE, node->device};
    return CUDA_SUCCESS;
}

static void add_bytes(CUgraph graph, uint64_t *bytes) {
    for (size_t index = 0; index < graph->num_nodes; index++) {
        const struct CUgraphNode_st *node = &graph->nodes[index];
        if (node->type == CU_GRAPH_NODE_TYPE_GRAPH) add_bytes(node->child, bytes);
        else bytes[node->device] += round_to(node->size, PAGE_BYTES);
    }
}

CUresult cuGraphInstantiateWithFlags(CUgraphExec *exec, CUgraph graph, unsigned long long flags) {
    (void)flags;
    if (!graph) return CUDA_ERROR_INVALID_VALUE;
    *exec = calloc(1, sizeof **exec);
    add_bytes(graph, (*exec)->bytes);
    return CUDA_SUCCESS;
}

CUresult cuGraphInstantiate(CUgraphExec *exec, CUgraph graph, CUgraphNode *error, char *log, size_t log_size) {
    (void)error, (void)log, (void)log_size;
    return cuGraphInstantiateWithFlags(exec, graph, 0);
}

CUresult cuGraphInstantiate_v2(CUgraphExec *exec, CUgraph graph, CUgraphNode *error, char *log, size_t log_size) {
    return cuGraphInstantiate(exec, graph, error, log, log_size);
}

CUresult cuGraphInstantiateWithParams(CUgraphExec *exec, CUgraph graph, void *params) {
    (void)params;
    return cuGraphInstantiateWithFlags(exec, graph, 0);
}

CUresult cuGraphInstantiateWithParams_ptsz(CUgraphExec *exec, CUgraph graph, void *params) {
    return cuGraphInstantiateWithParams(exec, graph, params);
}

static bool take(CUgraphExec exec) {
    for (int device = 0; device < BOARD_DEVICES; device++) {
        uint64_t cached = reserved[device] - in_use[device];
        uint64_t more = exec->bytes[device] > cached ? exec->bytes[device] - cached : 0;
        if (more && !board_take(device, more)) return false;
        reserved[device] += more;
        in_use[device] += exec->bytes[device];
    }
    return true;
}

CUresult cuGraphLaunch(CUgraphExec exec, CUstream stream) {
    (void)stream;
    fake_lock(&mutex);
    if (!exec->is_launched) exec->is_launched = take(exec);
    pthread_mutex_unlock(&mutex);
    return exec->is_launched ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult cuGraphExecDestroy(CUgraphExec exec) {
    if (!exec) return CUDA_ERROR_INVALID_VALUE;
    fake_lock(&mutex);
    for (int device = 0; exec->is_launched && device < BOARD_DEVICES; device++) in_use[device] -= exec->bytes[device];
    pthread_mutex_unlock(&mutex);
    free(exec);
    return CUDA_SUCCESS;
}

CUresult cuDeviceGraphMemTrim(CUdevice device) {
    fake_lock(&mutex);
    if (reserved[device] > in_use[device]) board_give(device, reserved[device] - in_use[device]);
    reserved[device] = in_use[device];
    pthread_mutex_unlock(&mutex);
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetGraphMemAttribute(CUdevice device, int attribute, void *value) {
    fake_lock(&mutex);
    *(uint64_t *)value = attribute == CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT ? reserved[device] : in_use[device];
    pthread_mutex_unlock(&mutex);
    return CUDA_SUCCESS;
}
