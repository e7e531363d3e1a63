// Attention of tokens to others.
#pragma once

#include "kernel_step.h"
#include "vector_functions.h"

struct AttentionHead {
    int32_t query, key, value, out;  // its first channel of the queries, keys, values and results
    int32_t size;            // channels of its queries and keys
    int32_t value_size;      // channels of its values and results
};

struct AttentionStep {
    const int32_t *queries, *keys, *values, *out;  // the offset of each channel's map
    const AttentionHead *heads;
    const float *mask;       // what is added to the scores, (mask_heads, tokens, others); or null
    const float *window_mask;  // what is added to the scores of each sequence, (rows, tokens, others); or null
    int32_t head_count;
    int32_t mask_heads;      // 1 if all heads have the same mask
    int32_t tokens;          // of the queries
    int32_t others;          // tokens of the keys and values
    int32_t pitch, other_pitch, out_pitch;  // of the queries, of the keys and values, and of the results
    int32_t tiles;           // tasks per head and sequence
    int32_t causal;          // whether a token sees itself and those before it only
    int32_t bias;            // the input that is added to the scores, (bias_heads, bias_tokens, others); -1 for none
    int32_t bias_heads;      // 1 if all heads have the same
    int32_t bias_tokens;     // 1 if all tokens have the same
    float scale;             // of the scores
};

constexpr int ATTENTION_TILE = REGISTERS == 32 ? 3 : 2;  // vectors of queries
constexpr int ATTENTION_BLOCK = REGISTERS == 32 ? 8 : 4;  // other tokens, or channels of the values
constexpr int ATTENTION_RUN = 1024;  // other tokens that are summed at a time, since small numbers are lost in long sums

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
    for (int start = 0; start < last; start += ATTENTION_RUN) {
        const int stop = last - start < ATTENTION_RUN ? last : start + ATTENTION_RUN;
        V part[N];
        for (int v = 0; v < N; v++) part[v] = V{};
        for (int s = start; s < stop; s++)
            UNROLLED for (int v = 0; v < N; v++) {
                float *place = scores + (int64_t{s} * N + v) * LANES;
                const V e = exp_of(load(place) - most[v]);
                part[v] += e;
                store(place, e);
            }
        for (int v = 0; v < N; v++) total[v] += part[v];
    }
    V share[N];
    for (int v = 0; v < N; v++) share[v] = blend(total[v] == V{}, V{}, all(1.0f) / total[v]);  // no token is visible
    for (int c = 0; c < head.value_size; c += ATTENTION_BLOCK) {
        const int own = head.value_size - c < ATTENTION_BLOCK ? head.value_size - c : ATTENTION_BLOCK;
        const float *rows[ATTENTION_BLOCK];
        for (int b = 0; b < ATTENTION_BLOCK; b++)
            rows[b] = memory + step.values[head.value + c + (b < own ? b : 0)] + other_row;
        V whole[ATTENTION_BLOCK][ATTENTION_TILE];
        for (int b = 0; b < ATTENTION_BLOCK; b++)
            for (int v = 0; v < N; v++) whole[b][v] = V{};
        for (int start = 0; start < last; start += ATTENTION_RUN) {
            multiply_block<N>(
                last - start < ATTENTION_RUN ? last - start : ATTENTION_RUN,
                [&](int s) { return [&rows, start, s](int b) { return rows[b][start + s]; }; },
                [&](int s) { return scores + int64_t{start + s} * N * LANES; }, sums);
            for (int b = 0; b < ATTENTION_BLOCK; b++)
                for (int v = 0; v < N; v++) whole[b][v] += sums[b][v];
        }
        for (int b = 0; b < own; b++)
            for (int v = 0; v < N; v++) {
                const int left = tokens - v * LANES;
                if (left > 0)
                    store_part(to + step.out[head.out + c + b] + row * step.out_pitch + from + v * LANES,
                               whole[b][v] * share[v], left < LANES ? left : LANES);
            }
    }
}

static int64_t attention_scratch(const AttentionStep &step) { return int64_t{step.others} * ATTENTION_TILE * LANES; }

static void run_attention(const AttentionStep &step, float *memory, float *scratch, int task, const CallerTensors &callers) {
    const int64_t vectors = ceil_div(step.tokens, LANES);
    const int64_t tile = task % step.tiles, number = task / step.tiles % step.head_count;
    const int64_t row = task / step.tiles / step.head_count;
    const AttentionHead &head = step.heads[number];
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
