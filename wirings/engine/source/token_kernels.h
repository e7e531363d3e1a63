// Kernels for tokens: norms over channels, attention, embeddings, and other orders of dimensions.
//
// A sequence of tokens is a map of one row: channel c of token t is at offset[c] + t. Every kind of step has a struct of
// its own, which `wirings/engine/token_steps.py` declares with the same fields in the same order.
#pragma once

#include <cmath>

#include "kernel_step.h"
#include "vector_functions.h"

// ---- norms over the channels of each pixel ----

struct NormStep {
    const int32_t *in, *out;  // the offset of each channel's map
    const float *scale, *shift;
    int32_t channels, height, width, pitch, out_pitch;
    int32_t features;         // channels of the norm, those that are always zero and missing included
    int32_t centered;         // whether the mean is subtracted
    int32_t tiles;            // tasks per row
    float epsilon;
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

static void run_norm(const KernelStep &any, float *memory, float *, int task, const CallerTensors &) {
    const NormStep &step = *static_cast<const NormStep *>(any.own);
    if (step.height == 1 && step.width == 1) return norm_one(step, memory);
    const int64_t y = task / step.tiles, tile = task % step.tiles, vectors = ceil_div(step.width, LANES);
    const int64_t first = cut(vectors, tile, step.tiles), last = cut(vectors, tile + 1, step.tiles);
    for (int64_t v = first; v < last; v += NORM_TILE) {
        const int64_t end = (v + NORM_TILE < last ? v + NORM_TILE : last) * LANES;
        norm_pixels(step, memory, y, v * LANES, end < step.width ? end : step.width);
    }
}

// ---- attention ----

struct AttentionStep {
    const int32_t *queries, *keys, *values, *out;  // the offset of each channel's map
    const int32_t *heads;     // for each head: the first channel of its queries, keys, values and results, and two sizes
    const float *mask;        // (1 or heads, tokens, others), or null
    const float *window_mask;  // (rows, tokens, others), or null
    int32_t head_count, mask_heads;
    int32_t rows;             // independent sequences
    int32_t tokens, others;   // queries, and keys with values
    int32_t pitch, other_pitch, out_pitch;
    int32_t tiles;            // tasks per head and sequence
    int32_t causal;
    int32_t bias, bias_heads, bias_tokens;  // the caller's input that is added to the scores; -1 for none
    float scale;
};

struct AttentionHead {
    int32_t query, key, value, out, size, value_size;
};

constexpr int ATTENTION_TILE = REGISTERS == 32 ? 3 : 2;  // vectors of queries
constexpr int ATTENTION_BLOCK = REGISTERS == 32 ? 8 : 4;  // other tokens, or channels of the values

// sums[b][v] = Σ_i one(i)(b) · two(i)[v]: rows of numbers times vectors.
template <int N, class One, class Two>
static inline void multiply_block(int count, One &&one, Two &&two, V (&sums)[ATTENTION_BLOCK][ATTENTION_TILE]) {
    for (int b = 0; b < ATTENTION_BLOCK; b++)
        for (int v = 0; v < N; v++) sums[b][v] = V{};
    for (int i = 0; i < count; i++) {
        const float *x = two(i);
        const auto number = one(i);
        V own[ATTENTION_TILE];
        UNROLLED for (int v = 0; v < N; v++) own[v] = load(x + v * LANES);
        UNROLLED for (int b = 0; b < ATTENTION_BLOCK; b++) {
            const V w = all(number(b));
            UNROLLED for (int v = 0; v < N; v++) sums[b][v] += w * own[v];
        }
    }
}

// One head and N vectors of queries, from token `from`. `scores` has N vectors for each other token.
template <int N>
static void attend(const AttentionStep &step, const AttentionHead &head, int number, const float *memory, float *to,
                   float *scores, int64_t row, int from, const float *bias) {
    const int64_t in_row = row * step.pitch + from, other_row = row * step.other_pitch;
    const int last = step.causal && from + N * LANES < step.others ? from + N * LANES : step.others;
    const int tokens = step.tokens - from < N * LANES ? step.tokens - from : N * LANES;
    const float *mask = step.mask
        ? step.mask + (step.mask_heads > 1 ? int64_t{number} * step.tokens * step.others : 0) : nullptr;
    const float *windows = step.window_mask ? step.window_mask + row * step.tokens * step.others : nullptr;
    V most[N];
    for (int v = 0; v < N; v++) most[v] = all(-3.4028234663852886e38f);
    V sums[ATTENTION_BLOCK][ATTENTION_TILE];
    I token;
    for (int i = 0; i < LANES; i++) token[i] = from + i;
    for (int s = 0; s < last; s += ATTENTION_BLOCK) {
        const int own = last - s < ATTENTION_BLOCK ? last - s : ATTENTION_BLOCK;
        multiply_block<N>(
            head.size,
            [&](int d) {  // rows have whole lines, so that keys after the last one can be read
                const float *key = memory + step.keys[head.key + d] + other_row + s;
                return [key](int b) { return key[b]; };
            },
            [&](int d) { return memory + step.queries[head.query + d] + in_row; }, sums);
        for (int b = 0; b < own; b++)
            UNROLLED for (int v = 0; v < N; v++) {
                V x = sums[b][v] * all(step.scale);
                if (mask || bias || windows) {
                    V added = V{};
                    for (int i = 0; i < LANES && v * LANES + i < tokens; i++) {
                        const int64_t t = from + v * LANES + i;
                        if (mask) added[i] += mask[t * step.others + s + b];
                        if (windows) added[i] += windows[t * step.others + s + b];
                        if (bias) added[i] += bias[(step.bias_tokens > 1 ? t * step.others : 0) + s + b];
                    }
                    x += added;
                }
                if (step.causal) x = blend(token + v * LANES < s + b, all(-__builtin_inff()), x);
                most[v] = blend(x > most[v], x, most[v]);
                store(scores + (int64_t{s + b} * N + v) * LANES, x);
            }
    }
    V total[N];
    for (int v = 0; v < N; v++) total[v] = V{};
    for (int s = 0; s < last; s++)
        UNROLLED for (int v = 0; v < N; v++) {
            float *place = scores + (int64_t{s} * N + v) * LANES;
            const V e = exp_of(load(place) - most[v]);
            total[v] += e;
            store(place, e);
        }
    V share[N];
    for (int v = 0; v < N; v++) share[v] = blend(total[v] == V{}, V{}, all(1.0f) / total[v]);  // no token is visible
    for (int c = 0; c < head.value_size; c += ATTENTION_BLOCK) {
        const int own = head.value_size - c < ATTENTION_BLOCK ? head.value_size - c : ATTENTION_BLOCK;
        const float *rows[ATTENTION_BLOCK];
        for (int b = 0; b < ATTENTION_BLOCK; b++)
            rows[b] = memory + step.values[head.value + c + (b < own ? b : 0)] + other_row;
        multiply_block<N>(
            last, [&](int s) { return [&rows, s](int b) { return rows[b][s]; }; },
            [&](int s) { return scores + int64_t{s} * N * LANES; }, sums);
        for (int b = 0; b < own; b++)
            for (int v = 0; v < N; v++) {
                const int left = tokens - v * LANES;
                if (left > 0)
                    store_part(to + step.out[head.out + c + b] + row * step.out_pitch + from + v * LANES,
                               sums[b][v] * share[v], left < LANES ? left : LANES);
            }
    }
}

static void run_attention(const KernelStep &any, float *memory, float *scratch, int task, const CallerTensors &callers) {
    const AttentionStep &step = *static_cast<const AttentionStep *>(any.own);
    const int64_t vectors = ceil_div(step.tokens, LANES);
    const int64_t tile = task % step.tiles, number = task / step.tiles % step.head_count;
    const int64_t row = task / step.tiles / step.head_count;
    const AttentionHead &head = reinterpret_cast<const AttentionHead *>(step.heads)[number];
    const float *bias = step.bias < 0 ? nullptr
        : callers.inputs[step.bias] + (step.bias_heads > 1 ? number * step.bias_tokens * step.others : 0);
    const int64_t first = cut(vectors, tile, step.tiles), last = cut(vectors, tile + 1, step.tiles);
    for (int64_t v = first; v < last;) {
        const int from = static_cast<int>(v * LANES), own = static_cast<int>(number);
        switch (last - v < ATTENTION_TILE ? last - v : ATTENTION_TILE) {
            case 1: attend<1>(step, head, own, memory, memory, scratch, row, from, bias); v += 1; break;
            case 2: attend<2>(step, head, own, memory, memory, scratch, row, from, bias); v += 2; break;
            default:
                attend<ATTENTION_TILE>(step, head, own, memory, memory, scratch, row, from, bias);
                v += ATTENTION_TILE;
        }
    }
}

// ---- embeddings and other orders ----

struct EmbeddingStep {
    const float *table;       // (rows, channels)
    const int32_t *out;
    int32_t channels, tokens, source, tiles;
};

static void run_embedding(const KernelStep &any, float *memory, float *, int task, const CallerTensors &callers) {
    const EmbeddingStep &step = *static_cast<const EmbeddingStep *>(any.own);
    const char *ids = reinterpret_cast<const char *>(callers.inputs[step.source]);
    const int64_t first = cut(step.tokens, task, step.tiles), last = cut(step.tokens, task + 1, step.tiles);
    for (int64_t t = first; t < last; t++) {
        int64_t id;
        memcpy(&id, ids + t * 8, 8);
        const float *row = step.table + id * step.channels;
        for (int c = 0; c < step.channels; c++) memory[step.out[c] + t] = row[c];
    }
}

// Copy numbers one by one: to `rows` rows of `length` from places in memory or in a caller's input.
struct GatherStep {
    const int32_t *places;    // of each number
    const int32_t *out;       // of each row
    int32_t rows, length, source, give, tiles;
};

static void run_gather(const KernelStep &any, float *memory, float *, int task, const CallerTensors &callers) {
    const GatherStep &step = *static_cast<const GatherStep *>(any.own);
    const float *from = step.source < 0 ? memory : callers.inputs[step.source];
    float *to = step.give < 0 ? memory : callers.outputs[step.give];
    for (int64_t r = cut(step.rows, task, step.tiles); r < cut(step.rows, task + 1, step.tiles); r++) {
        const int32_t *places = step.places + r * step.length;
        float *out = to + step.out[r];
        for (int64_t i = 0; i < step.length; i++) out[i] = from[places[i]];
    }
}

// ---- attention of one token to those before it, whose keys and values are kept ----

// The memory for keys and values is one of the caller's inputs: the keys as (channels, capacity), then the values of one
// head after the other, as (capacity, channels). The step adds those of the token at `position`, another input, and
// reads all up to there.
struct CachedAttentionStep {
    const int32_t *queries, *keys, *values, *out;  // offsets of single numbers
    const int32_t *heads;     // as for attention
    int32_t groups;           // heads of keys and values
    int32_t sharing;          // heads of queries for each of them
    int32_t key_channels, capacity, cache, position;
    float scale;
};

constexpr int VALUE_TILE = 4;  // vectors of channels

static void run_cached_attention(const KernelStep &any, float *memory, float *scores, int task, const CallerTensors &callers) {
    const CachedAttentionStep &step = *static_cast<const CachedAttentionStep *>(any.own);
    float *keys = const_cast<float *>(callers.inputs[step.cache]);
    float *values = keys + int64_t{step.key_channels} * step.capacity;
    int64_t now;
    memcpy(&now, callers.inputs[step.position], 8);
    const AttentionHead *heads = reinterpret_cast<const AttentionHead *>(step.heads) + int64_t{task} * step.sharing;
    for (int d = 0; d < heads->size; d++)
        keys[int64_t{heads->key + d} * step.capacity + now] = memory[step.keys[heads->key + d]];
    float *own = values + int64_t{heads->value} * step.capacity;
    for (int c = 0; c < heads->value_size; c++) own[now * heads->value_size + c] = memory[step.values[heads->value + c]];
    const int64_t count = now + 1;
    for (int h = 0; h < step.sharing; h++) {
        const AttentionHead &head = heads[h];
        float most = -3.4028234663852886e38f;
        for (int64_t s = 0; s < count; s += LANES) {  // the capacity is a multiple of LANES
            V sum = V{}, other = V{};
            int d = 0;
            for (; d + 2 <= head.size; d += 2) {
                sum += all(memory[step.queries[head.query + d]]) * load(keys + int64_t{head.key + d} * step.capacity + s);
                other += all(memory[step.queries[head.query + d + 1]]) * load(keys + int64_t{head.key + d + 1} * step.capacity + s);
            }
            if (d < head.size)
                sum += all(memory[step.queries[head.query + d]]) * load(keys + int64_t{head.key + d} * step.capacity + s);
            store(scores + s, (sum + other) * all(step.scale));
        }
        for (int64_t s = 0; s < count; s++) most = scores[s] > most ? scores[s] : most;
        float total = 0;
        for (int64_t s = 0; s < count; s += LANES) {
            const int left = static_cast<int>(count - s < LANES ? count - s : LANES);
            V e = exp_of(load(scores + s) - all(most));
            if (left < LANES) e = masked(e, count_up() < left);
            store(scores + s, e);
            for (int i = 0; i < left; i++) total += e[i];
        }
        const float share = 1 / total;
        for (int c = 0; c < head.value_size; c += VALUE_TILE * LANES) {
            V sum[VALUE_TILE] = {};
            for (int64_t t = 0; t < count; t++) {  // reads beyond the head, and beyond the values, are not used
                const V weight = all(scores[t]);
                UNROLLED for (int v = 0; v < VALUE_TILE; v++)
                    sum[v] += weight * load(own + t * head.value_size + c + v * LANES);
            }
            for (int i = 0; i < VALUE_TILE * LANES && c + i < head.value_size; i++)
                memory[step.out[head.out + c + i]] = sum[i / LANES][i % LANES] * share;
        }
    }
}
