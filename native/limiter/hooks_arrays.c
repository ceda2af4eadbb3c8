/* CUDA arrays and mipmaps. Their layout is the driver's secret; what they take is estimated from above in the tiles
 * that textures are laid out in: 64 bytes by 8 rows. Sparse arrays and those mapped later take memory only through
 * cuMemCreate. */
#include "charge.h"

enum { TILE_BYTES = 64, TILE_ROWS = 8 };

/* Bytes of one element with all of its channels; the planar and the block-compressed formats count a little more than
 * they are. An unknown format counts as the largest known. */
static size_t element_bytes(int format, unsigned num_channels) {
    size_t channels = num_channels ? num_channels : 1;
    switch (format) {
        case 0x01: case 0x08: return channels;                     /* 8-bit integers */
        case 0x02: case 0x09: case 0x10: return 2 * channels;      /* 16-bit integers, half */
        case 0x03: case 0x0a: case 0x20: return 4 * channels;      /* 32-bit integers, float */
        case 0xc0: case 0xc6: return 1;                            /* normalised 8-bit, 1, 2 and 4 channels */
        case 0xc1: case 0xc7: case 0xc3: case 0xc9: return 2;
        case 0xc2: case 0xc8: case 0xc4: case 0xca: case 0x50: return 4;
        case 0xc5: case 0xcb: return 8;                            /* normalised 16-bit, 4 channels */
        default: break;
    }
    bool is_block_compressed = format >= 0x91 && format <= 0x9d;   /* at most 16 bytes for 4 by 4 elements */
    bool is_planar_8_bit = format == 0xb0 || format == 0xa2;       /* NV12, NV16: at most 2 bytes for all planes */
    if (is_block_compressed) return 1;
    if (is_planar_8_bit) return 2;
    return 4 * (channels > 4 ? channels : 4);
}

static size_t round_up(size_t value, size_t multiple) {
    return value > SIZE_MAX - multiple ? SIZE_MAX : (value + multiple - 1) / multiple * multiple;
}

static size_t product(size_t a, size_t b) {
    size_t result;
    return __builtin_mul_overflow(a, b, &result) ? SIZE_MAX : result;
}

static size_t array_bytes(const CUDA_ARRAY3D_DESCRIPTOR *shape) {
    if (shape->Flags & (CUDA_ARRAY3D_SPARSE | CUDA_ARRAY3D_DEFERRED_MAPPING)) return 0;
    size_t row = round_up(product(shape->Width, element_bytes(shape->Format, shape->NumChannels)), TILE_BYTES);
    size_t rows = shape->Height ? round_up(shape->Height, TILE_ROWS) : 1;
    return product(product(row, rows), shape->Depth ? shape->Depth : 1);
}

static size_t half(size_t extent) {
    return extent > 1 ? extent / 2 : extent;
}

/* Levels halve; a layered or cubemap array keeps its depth, and counting it halved would be too little. */
static size_t mipmap_bytes(const CUDA_ARRAY3D_DESCRIPTOR *shape, unsigned num_levels) {
    CUDA_ARRAY3D_DESCRIPTOR level = *shape;
    size_t total = 0;
    for (unsigned index = 0; index < num_levels && index < 8 * sizeof(size_t); index++) {
        size_t bytes = array_bytes(&level);
        total = bytes > SIZE_MAX - total ? SIZE_MAX : total + bytes;
        level.Width = half(level.Width);
        level.Height = half(level.Height);
    }
    return total;
}

CUresult cuArrayCreate_v2(CUarray *array, const CUDA_ARRAY_DESCRIPTOR *descriptor) {
    Charge charge;
    CUDA_ARRAY3D_DESCRIPTOR shape = {0};
    if (descriptor) {
        shape = (CUDA_ARRAY3D_DESCRIPTOR){descriptor->Width, descriptor->Height, 0, descriptor->Format,
                                          descriptor->NumChannels, 0};
    }
    CUresult result = charge_here(&charge, array_bytes(&shape));
    if (result != CUDA_SUCCESS) return result;
    result = DRIVER(cuArrayCreate_v2, array, descriptor);
    return charge_settle(&charge, result, KIND_ARRAY, array);
}

CUresult cuArray3DCreate_v2(CUarray *array, const CUDA_ARRAY3D_DESCRIPTOR *descriptor) {
    Charge charge;
    CUresult result = charge_here(&charge, descriptor ? array_bytes(descriptor) : 0);
    if (result != CUDA_SUCCESS) return result;
    result = DRIVER(cuArray3DCreate_v2, array, descriptor);
    return charge_settle(&charge, result, KIND_ARRAY, array);
}

CUresult cuArrayDestroy(CUarray array) {
    Freeing freeing = free_begin(KIND_ARRAY, (uint64_t)(uintptr_t)array);
    return free_end(freeing, DRIVER(cuArrayDestroy, array));
}

CUresult cuMipmappedArrayCreate(CUmipmappedArray *array, const CUDA_ARRAY3D_DESCRIPTOR *descriptor, unsigned levels) {
    Charge charge;
    CUresult result = charge_here(&charge, descriptor ? mipmap_bytes(descriptor, levels) : 0);
    if (result != CUDA_SUCCESS) return result;
    result = DRIVER(cuMipmappedArrayCreate, array, descriptor, levels);
    return charge_settle(&charge, result, KIND_MIPMAP, array);
}

CUresult cuMipmappedArrayDestroy(CUmipmappedArray array) {
    Freeing freeing = free_begin(KIND_MIPMAP, (uint64_t)(uintptr_t)array);
    return free_end(freeing, DRIVER(cuMipmappedArrayDestroy, array));
}
