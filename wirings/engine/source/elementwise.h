// Functions and products of single pixels.
#pragma once

#include <cmath>

#include "kernel_step.h"
#include "vector_functions.h"

// `wirings/engine/operations/activation.py` lists them in the same order.
enum Function {
    LEAKY_RELU, ELU, TANH, SIGMOID, SILU, GELU, GELU_TANH, HARDSWISH, HARDSIGMOID, SOFTPLUS, MISH, CLAMP
};

struct FunctionStep {
    const int32_t *in, *out; // the offset of each channel's map
    const int32_t *chunks;   // the channels of one task are chunks[i] to chunks[i + 1]
    ClampRange range;        // of a clamp
    int32_t function;        // a Function
    int32_t height, width, pitch, out_pitch;
    float parameter;         // the slope of a leaky ReLU, the alpha of an ELU
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
static void apply_function(const FunctionStep &step, float *memory, int64_t c) {
    for (int y = 0; y < step.height; y++) {
        const float *row = memory + at(step.in[c], y, step.pitch);
        float *out = memory + at(step.out[c], y, step.out_pitch);
        int x = 0;
        for (; x + LANES <= step.width; x += LANES)
            store(out + x, function_of(KIND, load(row + x), step.parameter, step.range));
        if (x < step.width) {
            V v = V{};
            for (int i = 0; i < step.width - x; i++) v[i] = row[x + i];
            store_part(out + x, function_of(KIND, v, step.parameter, step.range), step.width - x);
        }
    }
}

static void run_function(const FunctionStep &step, float *memory, float *, int task, const CallerTensors &) {
    typedef void (*Apply)(const FunctionStep &, float *, int64_t);
    static const Apply functions[] = {
        apply_function<LEAKY_RELU>, apply_function<ELU>, apply_function<TANH>, apply_function<SIGMOID>,
        apply_function<SILU>, apply_function<GELU>, apply_function<GELU_TANH>, apply_function<HARDSWISH>,
        apply_function<HARDSIGMOID>, apply_function<SOFTPLUS>, apply_function<MISH>, apply_function<CLAMP>,
    };
    for (int64_t c = step.chunks[task]; c < step.chunks[task + 1]; c++) functions[step.function](step, memory, c);
}

struct MultiplyStep {
    const int32_t *in;       // the offset of each channel's map
    const int32_t *factors;  // the offset of each channel's factors, which are a map like it or a single number
    const int32_t *out;      // the offset of each channel's result
    const int32_t *chunks;   // the channels of one task are chunks[i] to chunks[i + 1]
    int32_t single;          // whether each channel has a single factor
    int32_t height, width, pitch, out_pitch;
};

static void run_multiply(const MultiplyStep &step, float *memory, float *, int task, const CallerTensors &) {
    for (int c = step.chunks[task]; c < step.chunks[task + 1]; c++)
        for (int y = 0; y < step.height; y++) {
            const float *a = memory + at(step.in[c], y, step.pitch);
            const float *b = memory + (step.single ? step.factors[c] : at(step.factors[c], y, step.pitch));
            float *out = memory + at(step.out[c], y, step.out_pitch);
            if (step.single)
                for (int x = 0; x < step.width; x++) out[x] = a[x] * b[0];
            else
                for (int x = 0; x < step.width; x++) out[x] = a[x] * b[x];
        }
}

// Maps plus one number for each channel.
struct AddNumbersStep {
    const int32_t *in;       // the offset of each channel's map
    const int32_t *numbers;  // the offset of each channel's number
    const int32_t *out;      // the offset of each channel's result
    const int32_t *chunks;   // the channels of one task are chunks[i] to chunks[i + 1]
    int32_t height, width, pitch, out_pitch;
};

static void run_add_numbers(const AddNumbersStep &step, float *memory, float *, int task, const CallerTensors &) {
    for (int c = step.chunks[task]; c < step.chunks[task + 1]; c++) {
        const float number = memory[step.numbers[c]];
        for (int y = 0; y < step.height; y++) {
            const float *row = memory + at(step.in[c], y, step.pitch);
            float *out = memory + at(step.out[c], y, step.out_pitch);
            for (int x = 0; x < step.width; x++) out[x] = row[x] + number;
        }
    }
}
