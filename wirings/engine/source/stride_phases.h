// Phases: pixels (y, x) with equal remainders by the stride form a map of their own, so that a strided convolution is a
// sum over maps without a stride.
#pragma once

#include "kernel_step.h"

enum { MAX_STRIDE = 16 };

// Distribute the pixels of a row over as many rows as the stride; those that are null are left out.
static inline void deal_out(const float *row, int width, int stride, float *const *to) {
    if (stride == 1) {
        if (to[0]) memcpy(to[0], row, sizeof(float) * width);
        return;
    }
    if (stride == 2 && to[0] && to[1]) {
        int64_t x = 0, half = 0;
        for (; x + 2 * LANES <= width; x += 2 * LANES, half += LANES) {
            const V a = load(row + x), b = load(row + x + LANES);
            store(to[0] + half, evens(a, b));
            store(to[1] + half, odds(a, b));
        }
        for (; x + 2 <= width; x += 2, half++) {
            to[0][half] = row[x];
            to[1][half] = row[x + 1];
        }
        if (x < width) to[0][half] = row[x];
        return;
    }
    for (int phase = 0; phase < stride; phase++) {
        if (!to[phase]) continue;
        int64_t x = phase, i = 0;
        for (; stride == 2 && x + 2 * LANES <= width; x += 2 * LANES, i += LANES)
            store(to[phase] + i, evens(load(row + x), load(row + x + LANES)));
        for (; x < width; x += stride, i++) to[phase][i] = row[x];
    }
}

// The phases of a map. With strides of 1, there is one, which is the map.
struct StridePhases {
    int32_t stride_y, stride_x;
    int32_t pitch;           // of a phase

    int64_t count() const { return int64_t{stride_y} * stride_x; }
};

// Distribute row y of a map over its phases, which are at the offsets `out`; -1 for those that nothing reads.
static inline void deal_out(const float *row, int y, int width, const StridePhases &phases, float *memory, const int32_t *out) {
    float *to[MAX_STRIDE];
    for (int x = 0; x < phases.stride_x; x++) {
        const int32_t offset = out[y % phases.stride_y * phases.stride_x + x];
        to[x] = offset < 0 ? nullptr : memory + at(offset, y / phases.stride_y, phases.pitch);
    }
    deal_out(row, width, phases.stride_x, to);
}

// A caller's input that a step reads in place: it computes the phases of the rows that it needs in scratch memory.
struct CallerPhases {
    int32_t source;          // the number of the input; -1 for none
    int32_t channels, height, width;
    int32_t stride_y, stride_x;
    int32_t above, below;    // rows of the phases that are read above the first row of the sums, and below the last
    int32_t floats;          // of one phase in scratch memory
    int32_t zeros;           // floats before each phase that are zero; 0 if there is no input

    // Floats of scratch memory.
    int64_t size() const { return source < 0 ? 0 : int64_t{channels} * stride_y * stride_x * floats + zeros; }
};

// Compute the phases that rows `top` to `bottom` of the sums read, with zeros around them, in scratch memory. They have
// the pitch of the sums, and begin with the row `above` the top.
static void make_phases(const CallerPhases &caller, int64_t pitch, const float *input, float *scratch, int top, int bottom) {
    const int height = caller.height, width = caller.width, sy = caller.stride_y, sx = caller.stride_x;
    const int64_t first = int64_t{top} - caller.above, last = int64_t{bottom} + caller.below;
    for (int64_t c = 0; c < caller.channels; c++)
        for (int py = 0; py < sy; py++) {
            float *maps[MAX_STRIDE];
            for (int px = 0; px < sx; px++) {
                maps[px] = scratch + ((c * sy + py) * sx + px) * caller.floats;
                memset(maps[px] - caller.zeros, 0, sizeof(float) * caller.zeros);
            }
            for (int64_t y = first; y < last; y++) {
                const int64_t row = y * sy + py;
                float *to[MAX_STRIDE];
                for (int px = 0; px < sx; px++) {
                    to[px] = maps[px] + at(0, y - first, pitch);
                    const int64_t filled = row >= 0 && row < height ? ceil_div(width - px, sx) : 0;
                    memset(to[px] + filled, 0, sizeof(float) * (pitch - filled));
                }
                if (row >= 0 && row < height) deal_out(input + at(0, c * height + row, width), width, sx, to);
            }
        }
}
