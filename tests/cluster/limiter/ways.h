/* Every way to take device memory, and its way back: what the stress and the cost measurement run through. */
#pragma once

#include "../fakes/fake_cuda.h"

typedef struct {
    int kind;
    CUdeviceptr pointer, second;
    size_t size;
} Thing;

typedef struct {
    CUcontext context;
    CUmemoryPool pool;
    CUstream stream;
} Place;

typedef struct {
    const char *name;
    CUresult (*take)(const Place *place, Thing *thing, size_t size);
    CUresult (*give)(const Place *place, Thing *thing);
} Way;

enum { NUM_WAYS = 17 };
extern const Way ways[NUM_WAYS];

/* The primary context of device 0, current from here on, with a stream and a pool. */
CUresult place_open(Place *place);
