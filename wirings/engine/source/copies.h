// Copies of maps and numbers: between layouts, from the caller's inputs, and to the caller's outputs.
#pragma once

#include "stride_phases.h"

struct CopyStep {
    const int32_t *in;       // the offset of each channel's map, in memory or in a caller's input
    const int32_t *out;      // the offsets of the phases of each channel
    const int32_t *chunks;   // the channels of one task are chunks[i] to chunks[i + 1]
    StridePhases phases;     // of the output
    int32_t chunk_count;
    int32_t strips;          // into which the rows of a map are cut; a task is a strip of a chunk
    int32_t height, width, pitch;
    int32_t source;          // the number of the caller's input; -1 for maps in memory
};

// Copy maps to another layout. With strides, pixels (y, x) with equal remainders form a map of their own, so that a
// strided convolution reads maps without a stride.
static void run_copy(const CopyStep &step, float *memory, float *, int task, const CallerTensors &callers) {
    const int strip = task / step.chunk_count, chunk = task % step.chunk_count;
    const float *source = step.source < 0 ? memory : callers.inputs[step.source];
    const int64_t stride = step.phases.stride_y, most = ceil_div(step.height, stride);
    const int64_t from = cut(most, strip, step.strips) * stride, to = cut(most, strip + 1, step.strips) * stride;
    for (int64_t c = step.chunks[chunk]; c < step.chunks[chunk + 1]; c++) {
        const int32_t *out = step.out + c * step.phases.count();
        for (int64_t y = from; y < to && y < step.height; y++)
            deal_out(source + at(step.in[c], y, step.pitch), static_cast<int>(y), step.width, step.phases, memory, out);
    }
}

struct GiveStep {
    const int32_t *in;       // the offset of each channel's map
    const int32_t *chunks;   // the channels of one task are chunks[i] to chunks[i + 1]
    int32_t height, width, pitch;
    int32_t output;          // the number of the caller's output
};

// Copy maps or single numbers to the caller's output.
static void run_give(const GiveStep &step, float *memory, float *, int task, const CallerTensors &callers) {
    float *to = callers.outputs[step.output];
    for (int c = step.chunks[task]; c < step.chunks[task + 1]; c++)
        for (int y = 0; y < step.height; y++)
            memcpy(to + (static_cast<int64_t>(c) * step.height + y) * step.width,
                   memory + at(step.in[c], y, step.pitch), sizeof(float) * step.width);
}

// Copy numbers one by one: to `rows` rows of `length` from places in memory or in a caller's input.
struct GatherStep {
    const int32_t *places;   // the offset of each number, in memory or in a caller's input
    const int32_t *out;      // the offset of each row, in memory or in a caller's output
    int32_t rows, length;
    int32_t source;          // the number of the caller's input; -1 for memory
    int32_t output;          // the number of the caller's output; -1 for memory
    int32_t tiles;           // tasks
};

static void run_gather(const GatherStep &step, float *memory, float *, int task, const CallerTensors &callers) {
    const float *from = step.source < 0 ? memory : callers.inputs[step.source];
    float *to = step.output < 0 ? memory : callers.outputs[step.output];
    for (int64_t r = cut(step.rows, task, step.tiles); r < cut(step.rows, task + 1, step.tiles); r++) {
        const int32_t *places = step.places + r * step.length;
        float *out = to + step.out[r];
        for (int64_t i = 0; i < step.length; i++) out[i] = from[places[i]];
    }
}
