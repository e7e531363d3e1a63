// Pooling, and means of maps.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>

#include "kernel_step.h"
#include "row_sums.h"

enum PoolKind {
    MAX,
    AVERAGE,           // of all pixels in a window, including padding
    AVERAGE_INSIDE,    // of those that are not padding
    ADAPTIVE_AVERAGE,  // of windows that cover the map
    ADAPTIVE_MAX,
};

struct PoolStep {
    const int32_t *in, *out; // the offset of each channel's map
    const int32_t *chunks;   // the channels of one task are chunks[i] to chunks[i + 1]
    int32_t pooling;         // a PoolKind
    int32_t height, width, pitch;
    int32_t out_height, out_width, out_pitch;
    int32_t kernel_y, kernel_x, stride_y, stride_x, pad_y, pad_x;  // 0 for adaptive pooling
    int32_t dilate_y, dilate_x;
};

// The pixels that one output pixel pools along one dimension, and their number, padding included.
struct PoolWindow {
    int64_t from, to, size;
};

static inline PoolWindow adaptive_window(int64_t i, int64_t pixels, int64_t outputs) {
    const int64_t from = cut(pixels, i, outputs), to = ceil_div((i + 1) * pixels, outputs);
    return {from, to, to - from};
}

static inline PoolWindow pool_window(int64_t from, int64_t kernel, int64_t dilation, int64_t pixels, int64_t padding) {
    const int64_t to = from + kernel * dilation;
    return {from, to, std::min(to, pixels + padding) - from};
}

static void run_pool(const PoolStep &step, float *memory, float *, int task, const CallerTensors &) {
    const bool adaptive = step.pooling >= ADAPTIVE_AVERAGE, most = step.pooling == MAX || step.pooling == ADAPTIVE_MAX;
    for (int c = step.chunks[task]; c < step.chunks[task + 1]; c++)
        for (int64_t y = 0; y < step.out_height; y++) {
            float *out = memory + at(step.out[c], y, step.out_pitch);
            const PoolWindow rows = adaptive ? adaptive_window(y, step.height, step.out_height)
                : pool_window(y * step.stride_y - step.pad_y, step.kernel_y, step.dilate_y, step.height, step.pad_y);
            for (int64_t x = 0; x < step.out_width; x++) {
                const PoolWindow columns = adaptive ? adaptive_window(x, step.width, step.out_width)
                    : pool_window(x * step.stride_x - step.pad_x, step.kernel_x, step.dilate_x, step.width, step.pad_x);
                float value = most ? -std::numeric_limits<float>::infinity() : 0;
                int64_t counted = 0;
                for (int64_t v = rows.from; v < rows.to; v += step.dilate_y) {
                    if (v < 0 || v >= step.height) continue;
                    const float *row = memory + at(step.in[c], v, step.pitch);
                    float sum = 0;  // row by row, since small numbers are lost in long sums
                    for (int64_t u = columns.from; u < columns.to; u += step.dilate_x) {
                        if (u < 0 || u >= step.width) continue;
                        if (most)
                            value = row[u] > value || std::isnan(row[u]) ? row[u] : value;
                        else
                            sum += row[u];
                        counted++;
                    }
                    if (!most) value += sum;
                }
                if (!most) value /= static_cast<float>(step.pooling == AVERAGE ? rows.size * columns.size : counted);
                out[x] = value;
            }
        }
}

struct MeanStep {
    const int32_t *in;       // the offset of each channel's map
    const int32_t *out;      // the offset of each channel's mean
    const int32_t *chunks;   // the channels of one task are chunks[i] to chunks[i + 1]
    int32_t height, width, pitch;
    float share;             // of one pixel in the mean
};

static void run_mean(const MeanStep &step, float *memory, float *, int task, const CallerTensors &) {
    for (int c = step.chunks[task]; c < step.chunks[task + 1]; c++) {
        float sum = 0;
        for (int y = 0; y < step.height; y++) sum += sum_of(memory + at(step.in[c], y, step.pitch), step.width);
        memory[step.out[c]] = sum * step.share;
    }
}
