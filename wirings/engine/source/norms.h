// Norms: over the pixels of each channel, and over the channels of each pixel.
#pragma once

#include <algorithm>
#include <cmath>

#include "kernel_step.h"
#include "row_sums.h"

// ---- over the pixels of each channel ----

struct InstanceNormStep {
    const int32_t *in, *out; // the offset of each channel's map
    const float *scale, *shift;  // one per channel
    const int32_t *chunks;   // the channels of one task are chunks[i] to chunks[i + 1]
    int32_t height, width, pitch, out_pitch;
    float epsilon;           // added to the variance
};

static void run_instance_norm(const InstanceNormStep &step, float *memory, float *, int task, const CallerTensors &) {
    const bool flat = step.pitch == step.width && step.out_pitch == step.width;  // a map is one long row
    const int height = flat ? 1 : step.height;
    const int64_t width = flat ? int64_t{step.height} * step.width : step.width;
    const float pixels = static_cast<float>(step.height) * static_cast<float>(step.width);
    for (int c = step.chunks[task]; c < step.chunks[task + 1]; c++) {
        float sum = 0, off = 0, squares = 0;
        for (int y = 0; y < height; y++) sum += sum_of(memory + at(step.in[c], y, step.pitch), width);
        const float mean = sum / pixels;
        for (int y = 0; y < height; y++)
            add_moments(memory + at(step.in[c], y, step.pitch), width, mean, off, squares);
        // What the first sum and rounding have lost of the mean: it would shift all numbers of the map alike.
        const float correction = off / pixels;
        const float variance = std::max(squares / pixels - correction * correction, 0.0f);
        const float times = step.scale[c] / std::sqrt(variance + step.epsilon);
        // The mean is subtracted first: within one shift, digits of channels that hardly vary would be lost.
        const V middle = all(mean), factor = all(times), plus = all(step.shift[c] - correction * times);
        for (int y = 0; y < height; y++) {
            const float *row = memory + at(step.in[c], y, step.pitch);
            float *out = memory + at(step.out[c], y, step.out_pitch);
            for (int64_t x = 0; x < width; x += LANES) {
                const int n = static_cast<int>(width - x < LANES ? width - x : LANES);
                store_part(out + x, (load(row + x) - middle) * factor + plus, n);
            }
        }
    }
}

// ---- over the channels of each pixel ----

struct NormStep {
    const int32_t *in, *out; // the offset of each channel's map
    const float *scale, *shift;  // one per channel
    int32_t channels;
    int32_t height, width, pitch, out_pitch;
    int32_t features;        // channels of the norm, those that are always zero and missing included
    int32_t centered;        // whether the mean is subtracted
    int32_t tiles;           // tasks per row
    float epsilon;           // added to the variance
};

constexpr int NORM_TILE = 4;  // vectors of pixels

// One row from pixel `from` to `to`, which are NORM_TILE vectors or fewer.
static void norm_pixels(const NormStep &step, float *memory, int64_t y, int64_t from, int64_t to) {
    const int64_t in_row = y * step.pitch + from, out_row = y * step.out_pitch + from;
    const int vectors = static_cast<int>(ceil_div(to - from, LANES));
    const V each = all(1.0f / static_cast<float>(step.features));
    V mean[NORM_TILE] = {}, squares[NORM_TILE] = {};
    if (step.centered) {
        for (int c = 0; c < step.channels; c++)
            for (int v = 0; v < vectors; v++) mean[v] += load(memory + step.in[c] + in_row + v * LANES);
        const V missing = all(static_cast<float>(step.features - step.channels));
        for (int v = 0; v < vectors; v++) {
            mean[v] *= each;
            squares[v] = missing * mean[v] * mean[v];
        }
    }
    for (int c = 0; c < step.channels; c++)
        for (int v = 0; v < vectors; v++) {
            const V x = load(memory + step.in[c] + in_row + v * LANES) - mean[v];
            squares[v] += x * x;
        }
    V factor[NORM_TILE];
    for (int v = 0; v < vectors; v++) {
        const V variance = squares[v] * each + all(step.epsilon);
        for (int i = 0; i < LANES; i++) factor[v][i] = 1.0f / std::sqrt(variance[i]);
    }
    for (int c = 0; c < step.channels; c++) {
        const V scale = all(step.scale[c]), shift = all(step.shift[c]);
        for (int v = 0; v < vectors; v++) {
            const V x = (load(memory + step.in[c] + in_row + v * LANES) - mean[v]) * factor[v] * scale + shift;
            const int64_t left = to - from - v * LANES;
            store_part(memory + step.out[c] + out_row + v * LANES, x, static_cast<int>(left < LANES ? left : LANES));
        }
    }
}

// One pixel: the channels are single numbers.
static void norm_one(const NormStep &step, float *memory) {
    const float each = 1.0f / static_cast<float>(step.features);
    float mean = 0, squares = 0;
    if (step.centered) {
        for (int c = 0; c < step.channels; c++) mean += memory[step.in[c]];
        mean *= each;
        squares = static_cast<float>(step.features - step.channels) * mean * mean;
    }
    for (int c = 0; c < step.channels; c++) {
        const float x = memory[step.in[c]] - mean;
        squares += x * x;
    }
    const float factor = 1.0f / std::sqrt(squares * each + step.epsilon);
    for (int c = 0; c < step.channels; c++)
        memory[step.out[c]] = (memory[step.in[c]] - mean) * factor * step.scale[c] + step.shift[c];
}

static void run_norm(const NormStep &step, float *memory, float *, int task, const CallerTensors &) {
    if (step.height == 1 && step.width == 1) return norm_one(step, memory);
    const int64_t y = task / step.tiles, tile = task % step.tiles, vectors = ceil_div(step.width, LANES);
    const int64_t first = cut(vectors, tile, step.tiles), last = cut(vectors, tile + 1, step.tiles);
    for (int64_t v = first; v < last; v += NORM_TILE) {
        const int64_t end = (v + NORM_TILE < last ? v + NORM_TILE : last) * LANES;
        norm_pixels(step, memory, y, v * LANES, end < step.width ? end : step.width);
    }
}
