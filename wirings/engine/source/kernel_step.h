// One step of a network; `wirings/engine/kernel_step.py` has the same fields in the same order.
//
// The map of a channel is flat: pixel (y, x) is at offset + y · pitch + x. Offsets count floats from the start of the
// memory that all maps share. Maps are surrounded by zeros where a convolution reads beyond their border.
//
// Python checks that fields fit into 32 bits. Products and sums of fields may not, and are computed in 64 bits.
#pragma once

#include "vectors.h"

enum StepKind { SUMS, NODES, COPY, POOL, MEAN, LINEAR, SPARSE_LINEAR, FUNCTION, INSTANCE_NORM, MULTIPLY, GIVE,
                NORM, ATTENTION, EMBEDDING, GATHER, CACHED_ATTENTION, GROUP_NORM, ADD_NUMBERS };

// Maps may be cut into bands of rows, one for each thread, in separate memory, so that what a thread works on stays in
// its cache. A band also holds the few rows of its neighbours that the next step reads.
struct Strip {
    int32_t from, to;               // rows of the output
    int32_t band, first;            // the band of the inputs, and the row of the map at which it begins
    int32_t out_band, out_first;
};

struct KernelStep {
    // Sums over edges. Rows (output channels) are in groups of `block` that share a list of records: the offset of an
    // input map plus that of the place within the kernel, then a weight for each row.
    const int32_t *starts;   // where the records of each group begin, in words; one more than there are groups
    const int32_t *records;
    const float *bias;       // one per row
    const int32_t *out;      // the offset of the map of each row; -1 for rows that only pad a group
    const int32_t *mask;     // all ones for pixels of the output, zero for the zeros between rows; or null
    const int32_t *chunks;   // the groups of one task are chunks[i] to chunks[i + 1]
    // Fused node convolutions: a depthwise 3 × 3 convolution follows the sums.
    const float *kernels;    // nine per row
    const float *kernel_bias;  // one per row
    const struct Strip *strip;  // one for each of `strips`
    const int32_t *kept;     // the first row of each band of the output, and the row after its last; or null
    // Other kernels.
    const int32_t *in;       // offsets of input maps or numbers
    const int32_t *in2;
    const float *weights;
    const float *weights2;

    const void *own;         // the struct of kinds that have one; see token_kernels.h

    ClampRange activation, activation2;
    int32_t kind, block, tile, chunk_count, strips;
    int32_t length;          // pixels of the flat output, including zeros between rows; for nodes, see `make_phases`
    int32_t height, width, pitch;              // of the input maps
    int32_t out_height, out_width, out_pitch;
    int32_t stride_y, stride_x, kernel_y, kernel_x, pad_y, pad_x, dilate_y, dilate_x;
    int32_t channels, inputs;
    int32_t flag;            // depends on the kind
    int32_t source;          // the number of the caller's input or output; -1 for none
    int32_t bands;
    float scale;
    int64_t band_floats;     // from the memory of one band to that of the next
};

// The caller's inputs and outputs for one image.
struct CallerTensors {
    const float *const *inputs;
    float *const *outputs;
};

static inline int64_t at(int64_t offset, int64_t y, int64_t pitch) { return offset + y * pitch; }

static inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Where part `i` begins if `whole` things are cut into `parts`.
static inline int64_t cut(int64_t whole, int64_t i, int64_t parts) { return whole * i / parts; }
