// One step of a network: which kernel runs, in how many tasks, and on which arguments.
//
// The arguments of a kernel are a struct of its own, which is declared beside it. A class in Python declares the same
// fields in the same order (`wirings/engine/step.py`) and checks what the kernels rely on: fields fit into 32 bits, and
// everything that a step accesses is inside of its memory. Products and sums of fields may not fit into 32 bits, and are
// computed in 64 bits.
//
// The map of a channel is flat: pixel (y, x) is at offset + y · pitch + x. Offsets count floats from the start of the
// memory that all maps share. Maps are surrounded by zeros where a convolution reads beyond their border. A sequence of
// tokens is a map of one row: channel c of token t is at offset[c] + t.
#pragma once

#include "vectors.h"

// `wirings/engine/kernel_step.py` has the same fields in the same order.
struct KernelStep {
    const void *own;         // the struct of its kind
    int32_t kind;            // its place in the table of kernels
    int32_t tasks;           // pieces of work, which may run in any order, and at the same time
};

// The caller's inputs and outputs for one image.
struct CallerTensors {
    const float *const *inputs;
    float *const *outputs;
};

static inline int64_t at(int64_t offset, int64_t y, int64_t pitch) { return offset + y * pitch; }

static inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Where part `i` begins if `whole` things are cut into `parts`.
static inline int64_t cut(int64_t whole, int64_t i, int64_t parts) { return whole * i / parts; }
