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

static inline bool takes_most(const PoolStep &step) { return step.pooling == MAX || step.pooling == ADAPTIVE_MAX; }
static inline bool is_adaptive(const PoolStep &step) { return step.pooling >= ADAPTIVE_AVERAGE; }

static inline PoolWindow pool_rows(const PoolStep &step, int64_t y) {
    return is_adaptive(step) ? adaptive_window(y, step.height, step.out_height)
        : pool_window(y * step.stride_y - step.pad_y, step.kernel_y, step.dilate_y, step.height, step.pad_y);
}
static inline PoolWindow pool_columns(const PoolStep &step, int64_t x) {
    return is_adaptive(step) ? adaptive_window(x, step.width, step.out_width)
        : pool_window(x * step.stride_x - step.pad_x, step.kernel_x, step.dilate_x, step.width, step.pad_x);
}

static inline bool larger(float a, float b) { return a > b || std::isnan(a); }  // NaN is kept, as in PyTorch
static inline V largest(V a, V b) { return ((a > b) | (a != a)) ? a : b; }

// One row of the output, pixel by pixel.
static void pool_pixels(const PoolStep &step, const float *map, int64_t y, float *out) {
    const bool most = takes_most(step);
    const PoolWindow rows = pool_rows(step, y);
    for (int64_t x = 0; x < step.out_width; x++) {
        const PoolWindow columns = pool_columns(step, x);
        float value = most ? -std::numeric_limits<float>::infinity() : 0;
        int64_t counted = 0;
        for (int64_t v = rows.from; v < rows.to; v += step.dilate_y) {
            if (v < 0 || v >= step.height) continue;
            const float *row = map + at(0, v, step.pitch);
            float sum = 0;  // row by row, since small numbers are lost in long sums
            for (int64_t u = columns.from; u < columns.to; u += step.dilate_x) {
                if (u < 0 || u >= step.width) continue;
                if (most)
                    value = larger(row[u], value) ? row[u] : value;
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

// Windows of a stride of 1 or 2 are pooled in vectors: first the rows of a window, with padding on both sides, in scratch
// memory, then its columns.
static inline bool in_vectors(const PoolStep &step) {
    return !is_adaptive(step) && step.stride_x <= 2 && step.out_width >= LANES / 2 && step.kernel_x <= LANES;
}

// Floats of a row with its padding, and of what the last vectors read after it.
static inline int64_t padded_row(const PoolStep &step) {
    const int64_t read = (int64_t{step.out_width} + LANES) * step.stride_x + int64_t{step.kernel_x - 1} * step.dilate_x + 2 * LANES;
    return std::max(read, int64_t{step.pad_x} + step.width + LANES);
}

static int64_t pool_scratch(const PoolStep &step) {
    return in_vectors(step) ? padded_row(step) + step.out_width + LANES : 0;
}

template <bool MOST, int STRIDE>
static void pool_vectors(const PoolStep &step, const float *map, int64_t y, const float *counts, float *padded, float *out) {
    const PoolWindow rows = pool_rows(step, y);
    float *const inside = padded + step.pad_x;
    const auto combine = [](V a, V b) { return MOST ? largest(b, a) : a + b; };
    int64_t counted = 0;
    for (int64_t v = rows.from; v < rows.to; v += step.dilate_y) {
        if (v < 0 || v >= step.height) continue;
        const float *row = map + at(0, v, step.pitch);
        for (int64_t x = 0; x < step.width; x += LANES) {
            const int n = static_cast<int>(std::min<int64_t>(LANES, step.width - x));
            store_part(inside + x, counted ? combine(load(inside + x), load(row + x)) : load(row + x), n);
        }
        counted++;
    }
    const V none = all(MOST ? -std::numeric_limits<float>::infinity() : 0);
    for (int64_t x = 0; counted == 0 && x < step.width; x++) inside[x] = none[0];
    const float rows_counted = static_cast<float>(step.pooling == AVERAGE ? rows.size : counted);
    for (int64_t x = 0; x < step.out_width; x += LANES) {
        V value = none;
        for (int64_t k = 0; k < step.kernel_x; k++) {
            const float *from = padded + x * STRIDE + k * step.dilate_x;
            value = combine(value, STRIDE == 1 ? load(from) : evens(load(from), load(from + LANES)));
        }
        if (!MOST) value /= all(rows_counted) * load(counts + x);
        store_part(out + x, value, static_cast<int>(std::min<int64_t>(LANES, step.out_width - x)));
    }
}

static void run_pool(const PoolStep &step, float *memory, float *scratch, int task, const CallerTensors &) {
    const bool most = takes_most(step), vectors = in_vectors(step);
    float *const counts = scratch + (vectors ? padded_row(step) : 0);
    if (vectors) {
        std::fill(scratch, counts, most ? -std::numeric_limits<float>::infinity() : 0.f);
        for (int64_t x = 0; x < step.out_width; x++) {
            const PoolWindow columns = pool_columns(step, x);
            const int64_t inside = std::min(columns.to, int64_t{step.width}) - std::max(columns.from, int64_t{0});
            counts[x] = static_cast<float>(step.pooling == AVERAGE ? columns.size : inside);
        }
    }
    const auto run = step.stride_x == 1 ? (most ? pool_vectors<true, 1> : pool_vectors<false, 1>)
                                        : (most ? pool_vectors<true, 2> : pool_vectors<false, 2>);
    for (int64_t c = step.chunks[task]; c < step.chunks[task + 1]; c++)
        for (int64_t y = 0; y < step.out_height; y++) {
            const float *map = memory + step.in[c];
            float *out = memory + at(step.out[c], y, step.out_pitch);
            if (vectors)
                run(step, map, y, counts, scratch, out);
            else
                pool_pixels(step, map, y, out);
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
