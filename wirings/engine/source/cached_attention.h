// Attention of one token to those before it, whose keys and values are kept.
#pragma once

#include "attention.h"

// The memory for keys and values is one of the caller's inputs: the keys as (channels, capacity), then the values of one
// head after the other, as (capacity, channels). The step adds those of the token at `position`, another input, and
// reads all up to there.
struct CachedAttentionStep {
    const int32_t *queries, *keys, *values, *out;  // offsets of single numbers
    const AttentionHead *heads;  // `sharing` heads for each task
    int32_t sharing;         // heads of queries for each head of keys and values
    int32_t key_channels;    // of all heads
    int32_t capacity;        // tokens that there is memory for, a multiple of LANES
    int32_t cache;           // the number of the input with the keys and values
    int32_t position;        // the number of the input with the position
    float scale;             // of the scores
};

constexpr int VALUE_TILE = 4;  // vectors of channels

static int64_t cached_attention_scratch(const CachedAttentionStep &step) { return step.capacity; }

static void run_cached_attention(const CachedAttentionStep &step, float *memory, float *scores, int task, const CallerTensors &callers) {
    float *keys = const_cast<float *>(callers.inputs[step.cache]);
    float *values = keys + int64_t{step.key_channels} * step.capacity;
    int64_t now;
    memcpy(&now, callers.inputs[step.position], 8);
    const AttentionHead *heads = step.heads + int64_t{task} * step.sharing;
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
        for (int64_t start = 0; start < count; start += ATTENTION_RUN) {
            float part = 0;
            for (int64_t s = start; s < count && s < start + ATTENTION_RUN; s += LANES) {
                const int left = static_cast<int>(count - s < LANES ? count - s : LANES);
                V e = exp_of(load(scores + s) - all(most));
                if (left < LANES) e = masked(e, count_up() < left);
                store(scores + s, e);
                for (int i = 0; i < left; i++) part += e[i];
            }
            total += part;
        }
        const float share = 1 / total;
        for (int c = 0; c < head.value_size; c += VALUE_TILE * LANES) {
            V sum[VALUE_TILE] = {};
            for (int64_t start = 0; start < count; start += ATTENTION_RUN) {
                const int64_t stop = count - start < ATTENTION_RUN ? count : start + ATTENTION_RUN;
                V part[VALUE_TILE] = {};
                for (int64_t t = start; t < stop; t++) {  // reads beyond the head, and the values, are not used
                    const V weight = all(scores[t]);
                    UNROLLED for (int v = 0; v < VALUE_TILE; v++)
                        part[v] += weight * load(own + t * head.value_size + c + v * LANES);
                }
                for (int v = 0; v < VALUE_TILE; v++) sum[v] += part[v];
            }
            for (int i = 0; i < VALUE_TILE * LANES && c + i < head.value_size; i++)
                memory[step.out[head.out + c + i]] = sum[i / LANES][i % LANES] * share;
        }
    }
}
