/* Start as many processes at once as the argument says; each takes a context and some memory, and waits until all have.
 * Prints the seconds from the first start until the last was ready. */
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "ways.h"

static double now_s(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec / 1e9;
}

static int run_child(int ready, int go) {
    CUcontext context;
    CUdeviceptr pointer;
    char byte = 1;
    if (cuInit(0) || cuDevicePrimaryCtxRetain(&context, 0) || cuCtxSetCurrent(context)) return 1;
    if (cuMemAlloc_v2(&pointer, 4096) != CUDA_SUCCESS) return 1;
    if (write(ready, &byte, 1) != 1) return 1;
    return read(go, &byte, 1) != 0; /* the end of the file: all are there */
}

static pid_t start_child(int ready, int go) {
    char ready_text[16], go_text[16];
    char *arguments[] = {"starter", "child", ready_text, go_text, NULL};
    snprintf(ready_text, sizeof ready_text, "%d", ready);
    snprintf(go_text, sizeof go_text, "%d", go);
    pid_t child = fork();
    if (child == 0) execv("/proc/self/exe", arguments);
    return child;
}

int main(int argc, char **argv) {
    int ready[2], go[2], status, count = argc > 1 ? atoi(argv[1]) : 0, failed = 0;
    char bytes[4096];
    if (argc > 3 && strcmp(argv[1], "child") == 0) return run_child(atoi(argv[2]), atoi(argv[3]));
    if (pipe(ready) || pipe2(go, 0)) return 2;
    fcntl(go[1], F_SETFD, FD_CLOEXEC);
    double start = now_s();
    for (int index = 0; index < count; index++) start_child(ready[1], go[0]);
    for (int num_ready = 0; num_ready < count;) {
        struct pollfd wait = {.fd = ready[0], .events = POLLIN};
        if (poll(&wait, 1, 20000) != 1) return 3;
        num_ready += (int)read(ready[0], bytes, sizeof bytes);
    }
    printf("%.3f\n", now_s() - start);
    close(go[1]);
    while (wait(&status) > 0) failed += status != 0;
    return failed != 0;
}
