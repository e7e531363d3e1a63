// The table of kernels: one line for each kind of step, with its struct, its function, and the scratch memory it needs.
//
// To add a kind: write its struct and its function in a file of their own, include it here, and add a line to the table.
#pragma once

#include "attention.h"
#include "bfloat16_linear.h"
#include "cached_attention.h"
#include "copies.h"
#include "edge_sums.h"
#include "elementwise.h"
#include "embedding.h"
#include "experts.h"
#include "fused_node_convolution.h"
#include "group_norm.h"
#include "indexed_tokens.h"
#include "int8_kernels.h"
#include "linear.h"
#include "norms.h"
#include "pooling.h"
#include "recurrent.h"

struct Kernel {
    const char *name;        // the name of the kind in Python
    int64_t bytes;           // the size of its struct
    void (*run)(const void *step, float *memory, float *scratch, int task, const CallerTensors &callers);
    int64_t (*scratch)(const void *step);  // floats of scratch memory for one thread
};

template <class Step>
static int64_t no_scratch(const Step &) {
    return 0;
}

template <class Step, void RUN(const Step &, float *, float *, int, const CallerTensors &),
          int64_t SCRATCH(const Step &) = no_scratch<Step>>
static constexpr Kernel kernel(const char *name) {
    return {name, sizeof(Step),
            [](const void *step, float *memory, float *scratch, int task, const CallerTensors &callers) {
                RUN(*static_cast<const Step *>(step), memory, scratch, task, callers);
            },
            [](const void *step) { return SCRATCH(*static_cast<const Step *>(step)); }};
}

static constexpr Kernel KERNELS[] = {
    kernel<SumsStep, run_sums, sums_scratch>("sums"),
    kernel<NodesStep, run_nodes, nodes_scratch>("nodes"),
    kernel<CopyStep, run_copy>("copy"),
    kernel<GiveStep, run_give>("give"),
    kernel<GatherStep, run_gather>("gather"),
    kernel<PoolStep, run_pool, pool_scratch>("pool"),
    kernel<MeanStep, run_mean>("mean"),
    kernel<LinearStep, run_linear, linear_scratch>("linear"),
    kernel<SparseLinearStep, run_sparse_linear>("sparse_linear"),
    kernel<Bfloat16LinearStep, run_bfloat16_linear, bfloat16_linear_scratch>("bfloat16_linear"),
    kernel<Bfloat16SparseLinearStep, run_bfloat16_sparse_linear, bfloat16_sparse_scratch>("bfloat16_sparse_linear"),
    kernel<FunctionStep, run_function>("function"),
    kernel<MultiplyStep, run_multiply>("multiply"),
    kernel<AddNumbersStep, run_add_numbers>("add_numbers"),
    kernel<InstanceNormStep, run_instance_norm>("instance_norm"),
    kernel<NormStep, run_norm>("norm"),
    kernel<GroupNormStep, run_group_norm>("group_norm"),
    kernel<AttentionStep, run_attention, attention_scratch>("attention"),
    kernel<CachedAttentionStep, run_cached_attention, cached_attention_scratch>("cached_attention"),
    kernel<EmbeddingStep, run_embedding>("embedding"),
    kernel<TopSharesStep, run_top_shares, top_shares_scratch>("top_shares"),
    kernel<RouteStep, run_route, route_scratch>("route"),
    kernel<ExpertUnitsStep, run_expert_units, expert_units_scratch>("expert_units"),
    kernel<ExpertSumsStep, run_expert_sums, expert_sums_scratch>("expert_sums"),
    kernel<IndexedTokensStep, run_indexed_tokens, indexed_tokens_scratch>("indexed_tokens"),
    kernel<RecurrentStep, run_recurrent, recurrent_scratch>("recurrent"),
    kernel<QuantizePixelsStep, run_quantize_pixels>("quantize_pixels"),
    kernel<QuantizeChannelsStep, run_quantize_channels, quantize_scratch>("quantize_channels"),
    kernel<Int8SumsStep, run_int8_sums, int8_scratch>("int8_sums"),
    kernel<Int8LinearStep, run_int8_linear, int8_linear_scratch>("int8_linear"),
};

static constexpr int KERNEL_COUNT = sizeof KERNELS / sizeof *KERNELS;
