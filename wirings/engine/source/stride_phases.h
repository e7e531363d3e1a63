// Phases: pixels (y, x) with equal remainders by the stride form a map of their own, so that a strided convolution is a
// sum over maps without a stride.
#pragma once

#include "kernel_step.h"

enum { MAX_STRIDE = 16 };

// Distribute the pixels of a row over as many rows as the stride.
static inline void deal_out(const float *row, int width, int stride, float *const *to) {
    if (stride == 1) {
        memcpy(to[0], row, sizeof(float) * width);
        return;
    }
    if (stride == 2) {
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
    for (int phase = 0; phase < stride; phase++)
        for (int64_t x = phase, i = 0; x < width; x += stride, i++) to[phase][i] = row[x];
}

// Distribute row y of a map over the phases at `out`.
static inline void deal_out(const float *row, int y, int width, const KernelStep &step, float *memory, const int32_t *out) {
    float *to[MAX_STRIDE];
    for (int x = 0; x < step.stride_x; x++)
        to[x] = memory + at(out[y % step.stride_y * step.stride_x + x], y / step.stride_y, step.out_pitch);
    deal_out(row, width, step.stride_x, to);
}

// Compute the phases of a caller's input that rows `top` to `bottom` of a convolution read, with zeros around them, in
// scratch memory: `flag` floats each, which begin with `length` zeros and the row `pad_y` above `top`.
static void make_phases(const KernelStep &step, const float *input, float *scratch, int top, int bottom) {
    const int height = step.kernel_y, width = step.kernel_x, sy = step.dilate_y, sx = step.dilate_x;
    const int64_t first = int64_t{top} - step.pad_y, last = int64_t{bottom} + step.pad_x, pitch = step.pitch;
    for (int64_t c = 0; c < step.inputs; c++)
        for (int py = 0; py < sy; py++) {
            float *maps[MAX_STRIDE];
            for (int px = 0; px < sx; px++) {
                maps[px] = scratch + ((c * sy + py) * sx + px) * step.flag;
                memset(maps[px] - step.length, 0, sizeof(float) * step.length);
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
