// Kernels other than sums over edges: copies between layouts, pooling, means, linear layers, activations, norms.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>

#include "edge_sums.h"
#include "vector_functions.h"

// Copy maps to another layout. With strides, pixels (y, x) with equal remainders form a map of their own, so that a
// strided convolution reads maps without a stride.
static void run_copy(const KernelStep &step, float *memory, float *, int task, const CallerTensors &callers) {
    const int strip = task / step.chunk_count, chunk = task % step.chunk_count;
    const float *source = step.source < 0 ? memory : callers.inputs[step.source];
    const int64_t most = ceil_div(step.height, step.stride_y);
    const int64_t from = cut(most, strip, step.strips) * step.stride_y, to = cut(most, strip + 1, step.strips) * step.stride_y;
    for (int64_t c = step.chunks[chunk]; c < step.chunks[chunk + 1]; c++) {
        const int32_t *out = step.out + c * step.stride_y * step.stride_x;
        for (int64_t y = from; y < to && y < step.height; y++)
            deal_out(source + at(step.in[c], y, step.pitch), static_cast<int>(y), step.width, step, memory, out);
    }
}

// Copy maps or single numbers to the caller's output.
static void run_give(const KernelStep &step, float *memory, float *, int task, const CallerTensors &callers) {
    float *to = callers.outputs[step.source];
    for (int c = step.chunks[task]; c < step.chunks[task + 1]; c++)
        for (int y = 0; y < step.height; y++)
            memcpy(to + (static_cast<int64_t>(c) * step.height + y) * step.width,
                   memory + at(step.in[c], y, step.pitch), sizeof(float) * step.width);
}

enum { MAX, AVERAGE, AVERAGE_INSIDE, ADAPTIVE_AVERAGE, ADAPTIVE_MAX };

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

static void run_pool(const KernelStep &step, float *memory, float *, int task, const CallerTensors &) {
    const bool adaptive = step.flag >= ADAPTIVE_AVERAGE, most = step.flag == MAX || step.flag == ADAPTIVE_MAX;
    const int strip = task / step.chunk_count, chunk = task % step.chunk_count;
    const int64_t from = cut(step.out_height, strip, step.strips), to = cut(step.out_height, strip + 1, step.strips);
    for (int c = step.chunks[chunk]; c < step.chunks[chunk + 1]; c++)
        for (int64_t y = from; y < to; y++) {
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
                if (!most) value /= static_cast<float>(step.flag == AVERAGE ? rows.size * columns.size : counted);
                out[x] = value;
            }
        }
}

static void run_mean(const KernelStep &step, float *memory, float *, int task, const CallerTensors &) {
    for (int c = step.chunks[task]; c < step.chunks[task + 1]; c++)
        memory[step.out[c]] = mean_of(step, memory + step.in[c]);
}

enum { PANEL = 4 };  // vectors of outputs that a dense linear layer keeps in registers

// Weights are stored by panels of outputs, and by inputs within a panel, so that they are read once, in order.
static void run_linear(const KernelStep &step, float *memory, float *scratch, int task, const CallerTensors &) {
    const float *x = memory + step.in[0];
    if (step.flag) {  // inputs that are not contiguous
        for (int i = 0; i < step.inputs; i++) scratch[i] = memory[step.in[i]];
        x = scratch;
    }
    for (int64_t panel = step.chunks[task]; panel < step.chunks[task + 1]; panel++) {
        const float *w = step.weights + panel * step.inputs * PANEL * LANES;
        V even[PANEL], odd[PANEL];
        for (int v = 0; v < PANEL; v++) {
            even[v] = load(step.bias + (panel * PANEL + v) * LANES);
            odd[v] = V{};
        }
        int64_t i = 0;
        for (; i + 2 <= step.inputs; i += 2, w += 2 * PANEL * LANES) {
            const V a = all(x[i]), b = all(x[i + 1]);
            UNROLLED for (int v = 0; v < PANEL; v++) {
                even[v] += a * load(w + v * LANES);
                odd[v] += b * load(w + (PANEL + v) * LANES);
            }
        }
        if (i < step.inputs)
            for (int v = 0; v < PANEL; v++) even[v] += all(x[i]) * load(w + v * LANES);
        for (int v = 0; v < PANEL; v++) {
            const int64_t first = (panel * PANEL + v) * LANES, left = step.channels - first;
            if (left > 0)
                store_part(memory + step.out[0] + first, limited(even[v] + odd[v], step.activation),
                           static_cast<int>(left < LANES ? left : LANES));
        }
    }
}

// LANES rows at a time, padded to the longest of them; a record has the offsets of their inputs, then their weights.
static void run_sparse_linear(const KernelStep &step, float *memory, float *, int task, const CallerTensors &) {
    for (int64_t slice = step.chunks[task]; slice < step.chunks[task + 1]; slice++) {
        float sum[LANES];
        memcpy(sum, step.bias + slice * LANES, sizeof sum);
        const int32_t *end = step.records + step.starts[slice + 1];
        for (const int32_t *record = step.records + step.starts[slice]; record < end; record += 2 * LANES) {
            float w[LANES];
            memcpy(w, record + LANES, sizeof w);
            for (int i = 0; i < LANES; i++) sum[i] += w[i] * memory[record[i]];
        }
        V v;
        memcpy(&v, sum, sizeof v);
        v = limited(v, step.activation);
        for (int i = 0; i < LANES; i++)
            if (step.out[slice * LANES + i] >= 0) memory[step.out[slice * LANES + i]] = v[i];
    }
}

enum Function {
    LEAKY_RELU, ELU, TANH, SIGMOID, SILU, GELU, GELU_TANH, HARDSWISH, HARDSIGMOID, SOFTPLUS, MISH, CLAMP
};

static inline float softplus(float x) { return x > 20 ? x : std::log1p(std::exp(x)); }

// Functions that are rare, number by number.
template <class Of>
static inline V each(V x, Of &&of) {
    for (int i = 0; i < LANES; i++) x[i] = of(x[i]);
    return x;
}

static inline V function_of(int kind, V x, float a, const ClampRange &range) {
    const V zero = V{}, one = all(1.0f);
    switch (kind) {
        case LEAKY_RELU: return blend(x > zero, x, all(a) * x);
        case ELU: return each(x, [&](float v) { return v > 0 ? v : a * std::expm1(v); });
        case TANH: return tanh_of(x);
        case SIGMOID: return sigmoid_of(x);
        case SILU: return x * sigmoid_of(x);
        case GELU: return all(0.5f) * x * (one + erf_of(x * all(0.70710678118654752f)));
        // 1 + tanh(u) = 2 · sigmoid(2u), which loses no digits where the tanh is near -1
        case GELU_TANH: return x * sigmoid_of(all(1.59576912160573071f) * (x + all(0.044715f) * x * x * x));
        case HARDSWISH: return each(x, [](float v) { return v <= -3 ? 0 : v >= 3 ? v : v * (v + 3) / 6; });
        case HARDSIGMOID: return each(x, [](float v) { return v <= -3 ? 0 : v >= 3 ? 1 : (v + 3) / 6; });
        case SOFTPLUS: return each(x, softplus);
        case MISH: return x * tanh_of(each(x, softplus));
        default: return limited(x, range);
    }
}

template <int KIND>
static void apply_function(const KernelStep &step, float *memory, int64_t c) {
    for (int y = 0; y < step.height; y++) {
        const float *row = memory + at(step.in[c], y, step.pitch);
        float *out = memory + at(step.out[c], y, step.out_pitch);
        int x = 0;
        for (; x + LANES <= step.width; x += LANES)
            store(out + x, function_of(KIND, load(row + x), step.scale, step.activation));
        if (x < step.width) {
            V v = V{};
            for (int i = 0; i < step.width - x; i++) v[i] = row[x + i];
            store_part(out + x, function_of(KIND, v, step.scale, step.activation), step.width - x);
        }
    }
}

static void run_function(const KernelStep &step, float *memory, float *, int task, const CallerTensors &) {
    typedef void (*Apply)(const KernelStep &, float *, int64_t);
    static const Apply functions[] = {
        apply_function<LEAKY_RELU>, apply_function<ELU>, apply_function<TANH>, apply_function<SIGMOID>,
        apply_function<SILU>, apply_function<GELU>, apply_function<GELU_TANH>, apply_function<HARDSWISH>,
        apply_function<HARDSIGMOID>, apply_function<SOFTPLUS>, apply_function<MISH>, apply_function<CLAMP>,
    };
    for (int64_t c = step.chunks[task]; c < step.chunks[task + 1]; c++) functions[step.flag](step, memory, c);
}

static void run_instance_norm(const KernelStep &step, float *memory, float *, int task, const CallerTensors &) {
    const bool flat = step.pitch == step.width && step.out_pitch == step.width;  // a map is one long row
    const int height = flat ? 1 : step.height;
    const int64_t width = flat ? int64_t{step.height} * step.width : step.width;
    const float pixels = static_cast<float>(step.height) * static_cast<float>(step.width);
    for (int c = step.chunks[task]; c < step.chunks[task + 1]; c++) {
        float sum = 0, squares = 0;
        for (int y = 0; y < height; y++) sum += sum_of(memory + at(step.in[c], y, step.pitch), width);
        const float mean = sum / pixels;
        for (int y = 0; y < height; y++)
            squares += sum_of(memory + at(step.in[c], y, step.pitch), width,
                              [&](V v) { return (v - all(mean)) * (v - all(mean)); });
        const float times = step.weights[c] / std::sqrt(squares / pixels + step.scale);
        const V factor = all(times), plus = all(step.weights2[c] - mean * times);
        for (int y = 0; y < height; y++) {
            const float *row = memory + at(step.in[c], y, step.pitch);
            float *out = memory + at(step.out[c], y, step.out_pitch);
            for (int64_t x = 0; x < width; x += LANES) {
                const int n = static_cast<int>(width - x < LANES ? width - x : LANES);
                store_part(out + x, limited(load(row + x) * factor + plus, step.activation), n);
            }
        }
    }
}

static void run_multiply(const KernelStep &step, float *memory, float *, int task, const CallerTensors &) {
    for (int c = step.chunks[task]; c < step.chunks[task + 1]; c++)
        for (int y = 0; y < step.height; y++) {
            const float *a = memory + at(step.in[c], y, step.pitch);
            const float *b = memory + (step.flag ? step.in2[c] : at(step.in2[c], y, step.pitch));
            float *out = memory + at(step.out[c], y, step.out_pitch);
            if (step.flag)
                for (int x = 0; x < step.width; x++) out[x] = a[x] * b[0];
            else
                for (int x = 0; x < step.width; x++) out[x] = a[x] * b[x];
        }
}
