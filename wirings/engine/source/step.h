// One step of a network, as Python describes it; `wirings/engine/steps.py` has the same fields in the same order.
//
// A channel's map is flat: pixel (y, x) lies at its offset + y · pitch + x. Offsets count floats from the start of the
// memory that all maps share. Where a convolution reaches over a map's border, zeros lie around it.
//
// A field fits into 32 bits, which Python checks; a product or a sum of fields may not, and is taken in 64.
#pragma once

#include "vectors.h"

enum Kind { SUMS, NODES, COPY, POOL, MEAN, LINEAR, SPARSE_LINEAR, FUNCTION, INSTANCE_NORM, MULTIPLY, GIVE };

// Maps may be cut into bands of rows, one for each thread, that lie in memory of their own: what a thread works on then
// stays in its own cache. A band also holds the few rows beside it that the next step reads.
struct Strip {
    int32_t from, to;               // rows of the output
    int32_t band, first;            // where the inputs lie: which band, and the row of the map that it begins with
    int32_t out_band, out_first;
};

struct Step {
    // Sums over edges. Rows (output channels) come in groups of `block`, whose rows share their list of records: the
    // offset of an input map, moved by the place within the kernel, then a weight for each row.
    const int32_t *starts;   // of a group's records, in words; one more than there are groups
    const int32_t *records;
    const float *bias;       // one a row
    const int32_t *out;      // the offset of each row's map; -1 for rows that only fill a group up
    const int32_t *mask;     // all ones or zero for each pixel of the output: zeros between rows stay zeros; or null
    const int32_t *chunks;   // groups of one task: from chunks[i] to chunks[i + 1]
    // Nodes: a depthwise 3 × 3 convolution follows.
    const float *kernels;    // nine a row
    const float *kernel_bias;  // one a row
    const struct Strip *strip;  // one for each of `strips`
    const int32_t *kept;     // the first row and the one after the last that each band of the output holds; or null
    // The others.
    const int32_t *in;       // offsets of input maps or numbers
    const int32_t *in2;
    const float *weights;
    const float *weights2;

    Activation activation, activation2;
    int32_t kind, block, tile, chunk_count, strips;
    int32_t length;          // pixels of the flat output, zeros between rows included; of nodes: see `make_phases`
    int32_t height, width, pitch;              // of the input maps
    int32_t out_height, out_width, out_pitch;
    int32_t stride_y, stride_x, kernel_y, kernel_x, pad_y, pad_x, dilate_y, dilate_x;
    int32_t channels, inputs;
    int32_t flag;            // what it means is said where it is used
    int32_t source;          // the number of the caller's input or output; -1: none
    int32_t bands;
    float scale;
    int64_t band_floats;     // from a band's memory to the next one's
};

// Memory of the caller: one image's inputs and outputs.
struct Callers {
    const float *const *inputs;
    float *const *outputs;
};

static inline int64_t at(int64_t offset, int64_t y, int64_t pitch) { return offset + y * pitch; }

static inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Where part `i` begins of `whole` things that are cut into `parts`.
static inline int64_t cut(int64_t whole, int64_t i, int64_t parts) { return whole * i / parts; }
