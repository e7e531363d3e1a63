// Experts: layers of which each token takes a few, with a share of each.
#pragma once

#include "edge_sums.h"
#include "elementwise.h"

// ---- the largest shares of each token ----

struct TopSharesStep {
    const int32_t *in, *out; // the offset of each channel's map
    int32_t channels, tokens;
    int32_t count;           // of the channels that each token keeps
    int32_t softmax;         // whether shares are the softmax of the channels; otherwise they are the channels
    int32_t normalized;      // whether what is kept is divided by its sum
    int32_t tiles;           // tasks
};

static int64_t top_shares_scratch(const TopSharesStep &step) { return 3 * int64_t{step.channels} * LANES; }

static void run_top_shares(const TopSharesStep &step, float *memory, float *scratch, int task, const CallerTensors &) {
    const int64_t vectors = ceil_div(step.tokens, LANES);
    float *shares = scratch, *kept = shares + int64_t{step.channels} * LANES, *scores = kept + int64_t{step.channels} * LANES;
    for (int64_t v = cut(vectors, task, step.tiles); v < cut(vectors, task + 1, step.tiles); v++) {
        V most = load(memory + step.in[0] + v * LANES), sum = V{};
        for (int c = 0; c < step.channels; c++) {
            const V x = load(memory + step.in[c] + v * LANES);
            store(shares + int64_t{c} * LANES, x);
            store(scores + int64_t{c} * LANES, x);
            store(kept + int64_t{c} * LANES, V{});
            most = blend(x > most, x, most);
        }
        if (step.softmax) {
            for (int c = 0; c < step.channels; c++) {
                const V e = exp_of(load(shares + int64_t{c} * LANES) - most);
                store(shares + int64_t{c} * LANES, e);
                sum += e;
            }
            for (int c = 0; c < step.channels; c++)
                store(shares + int64_t{c} * LANES, load(shares + int64_t{c} * LANES) / sum);
        }
        for (int i = 0; i < LANES; i++) {
            float total = 0;
            for (int n = 0; n < step.count; n++) {
                int best = -1;
                for (int c = 0; c < step.channels; c++) {
                    const float x = scores[c * LANES + i], y = best < 0 ? x : scores[best * LANES + i];
                    if (kept[c * LANES + i] == 0 && (best < 0 || x > y || (x != x && y == y))) best = c;
                }
                kept[best * LANES + i] = 1;
                total += shares[best * LANES + i];
            }
            for (int c = 0; c < step.channels; c++) {
                float &x = kept[c * LANES + i];
                if (x != 0) x = step.normalized ? shares[c * LANES + i] / total : shares[c * LANES + i];
            }
        }
        const int64_t left = step.tokens - v * LANES;
        for (int c = 0; c < step.channels; c++)
            store_part(memory + step.out[c] + v * LANES, load(kept + int64_t{c} * LANES),
                       static_cast<int>(left < LANES ? left : LANES));
    }
}

// ---- which tokens each expert has ----

// The tokens of each expert, one expert after the other, each from a multiple of LINE on.
struct RoutedTokens {
    int32_t starts, counts;  // the offsets of the number of each expert's first place, and of how many tokens it has
    int32_t tokens, shares;  // the offsets of the token and the share at each place
};

struct RouteStep {
    const int32_t *in;       // the offset of the map of each expert's shares
    RoutedTokens routed;
    int32_t experts, tokens;
    int32_t count;           // of experts that a token has at most
};

static int64_t route_scratch(const RouteStep &step) { return step.tokens; }

static void run_route(const RouteStep &step, float *memory, float *scratch, int, const CallerTensors &) {
    int32_t *starts = reinterpret_cast<int32_t *>(memory + step.routed.starts);
    int32_t *counts = reinterpret_cast<int32_t *>(memory + step.routed.counts);
    int32_t *tokens = reinterpret_cast<int32_t *>(memory + step.routed.tokens);
    int32_t *had = reinterpret_cast<int32_t *>(scratch);
    float *shares = memory + step.routed.shares;
    memset(had, 0, sizeof(int32_t) * step.tokens);
    int32_t place = 0;
    for (int e = 0; e < step.experts; e++) {
        const float *row = memory + step.in[e];
        place = static_cast<int32_t>(ceil_div(place, LINE) * LINE);
        starts[e] = place;
        for (int t = 0; t < step.tokens; t++)
            if (row[t] != 0 && had[t] < step.count) {
                had[t]++;
                tokens[place] = t;
                shares[place++] = row[t];
            }
        counts[e] = place - starts[e];
    }
}

// ---- the units inside of experts ----

struct ExpertUnitsStep {
    const int32_t *in;       // the offset of the map of each channel of the tokens
    const int32_t *out;      // the offset of the map of each unit, with the tokens of all experts by place
    EdgeGroups edges;        // for each expert, groups of units; if they are gated, each is followed by that of their factors
    ClampRange range;        // of a clamp
    RoutedTokens routed;
    int32_t channels, units;
    int32_t groups;          // groups of units of each expert
    int32_t gated;           // whether units are multiplied by factors
    int32_t function;        // a Function
    int32_t pieces;          // tasks for each expert
    int32_t pitch;           // of the expert's own tokens, for each channel
};

static int64_t expert_units_scratch(const ExpertUnitsStep &step) {
    return (int64_t{step.channels} + 2 * BLOCK) * step.pitch;
}

static void run_expert_units(const ExpertUnitsStep &step, float *memory, float *scratch, int task, const CallerTensors &) {
    const int64_t expert = task / step.pieces, piece = task % step.pieces, block = step.edges.block;
    const int32_t start = reinterpret_cast<const int32_t *>(memory + step.routed.starts)[expert];
    const int32_t count = reinterpret_cast<const int32_t *>(memory + step.routed.counts)[expert];
    const int32_t *tokens = reinterpret_cast<const int32_t *>(memory + step.routed.tokens) + start;
    if (!count) return;
    const int64_t vectors = ceil_div(count, LANES);
    for (int64_t c = 0; c < step.channels; c++) {
        const float *row = memory + step.in[c];
        float *own = scratch + c * step.pitch;
        for (int i = 0; i < count; i++) own[i] = row[tokens[i]];
        for (int64_t i = count; i < vectors * LANES; i++) own[i] = 0;
    }
    float *rows = scratch + int64_t{step.channels} * step.pitch, *to[2 * BLOCK];
    for (int64_t b = 0; b < 2 * block; b++) to[b] = rows + b * step.pitch;
    for (int64_t g = cut(step.groups, piece, step.pieces); g < cut(step.groups, piece + 1, step.pieces); g++) {
        const int64_t group = (expert * step.groups + g) * (step.gated ? 2 : 1);
        sum_group(step.edges, group, scratch, to, nullptr, vectors);
        if (step.gated) sum_group(step.edges, group + 1, scratch, to + block, nullptr, vectors);
        for (int64_t b = 0; b < block && g * block + b < step.units; b++)
            for (int64_t v = 0; v < vectors; v++) {
                V x = function_of(step.function, load(to[b] + v * LANES), 1.0f, step.range);
                if (step.gated) x *= load(to[block + b] + v * LANES);
                store(memory + step.out[g * block + b] + start + v * LANES, x);
            }
    }
}

// ---- the results of experts, added up ----

struct ExpertSumsStep {
    const int32_t *out;      // the offset of the map of each channel
    EdgeGroups edges;        // for each expert, groups of channels, which read units by place
    RoutedTokens routed;
    int32_t experts, channels, tokens;
    int32_t groups;          // groups of channels of each expert
    int32_t tiles;           // tasks
    int32_t pitch;           // of the results of one expert
};

static int64_t expert_sums_scratch(const ExpertSumsStep &step) { return int64_t{BLOCK} * step.pitch; }

static void run_expert_sums(const ExpertSumsStep &step, float *memory, float *scratch, int task, const CallerTensors &) {
    const int64_t block = step.edges.block;
    const int32_t *starts = reinterpret_cast<const int32_t *>(memory + step.routed.starts);
    const int32_t *counts = reinterpret_cast<const int32_t *>(memory + step.routed.counts);
    float *to[BLOCK];
    for (int64_t b = 0; b < block; b++) to[b] = scratch + b * step.pitch;
    for (int64_t g = cut(step.groups, task, step.tiles); g < cut(step.groups, task + 1, step.tiles); g++) {
        for (int64_t b = 0; b < block && g * block + b < step.channels; b++)
            memset(memory + step.out[g * block + b], 0, sizeof(float) * step.tokens);
        for (int64_t e = 0; e < step.experts; e++) {
            if (!counts[e]) continue;
            const int32_t *tokens = reinterpret_cast<const int32_t *>(memory + step.routed.tokens) + starts[e];
            const float *shares = memory + step.routed.shares + starts[e];
            sum_group(step.edges, e * step.groups + g, memory + starts[e], to, nullptr, ceil_div(counts[e], LANES));
            for (int64_t b = 0; b < block && g * block + b < step.channels; b++) {
                float *out = memory + step.out[g * block + b];
                for (int i = 0; i < counts[e]; i++) out[tokens[i]] += shares[i] * to[b][i];
            }
        }
    }
}
