// The compiled part of wirings.engine: runs the steps of a network, one image at a time, on a few threads.
#include <chrono>
#include <memory>
#include <new>

#include <stdlib.h>
#include <sys/mman.h>

#include "nodes.h"
#include "others.h"
#include "pool.h"

namespace {

struct alignas(64) Counter {
    std::atomic<int> next{0};
};

void run_task(const Step &step, float *memory, float *scratch, int task, const Callers &callers) {
    switch (step.kind) {
        case SUMS: return run_sums(step, memory, scratch, task);
        case NODES: return run_nodes(step, memory, scratch, task, callers);
        case COPY: return run_copy(step, memory, scratch, task, callers);
        case POOL: return run_pool(step, memory, scratch, task, callers);
        case MEAN: return run_mean(step, memory, scratch, task, callers);
        case LINEAR: return run_linear(step, memory, scratch, task, callers);
        case SPARSE_LINEAR: return run_sparse_linear(step, memory, scratch, task, callers);
        case FUNCTION: return run_function(step, memory, scratch, task, callers);
        case INSTANCE_NORM: return run_instance_norm(step, memory, scratch, task, callers);
        case MULTIPLY: return run_multiply(step, memory, scratch, task, callers);
        case GIVE: return run_give(step, memory, scratch, task, callers);
    }
}

// Each thread does its own part of the tasks, in order, so that what it wrote in one step lies in its cache in the
// next; then it helps the others.
void run_share(const Step &step, float *memory, float *scratch, const Callers &callers, Counter *counters, int number,
               int threads) {
    const int tasks = step.strips * step.chunk_count;
    for (int i = 0; i < threads; i++) {
        const int whose = (number + i) % threads;
        const int first = tasks * whose / threads, last = tasks * (whose + 1) / threads;
        for (int task; (task = first + counters[whose].next.fetch_add(1, std::memory_order_relaxed)) < last;)
            run_task(step, memory, scratch, task, callers);
    }
}

double seconds() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}  // namespace

extern "C" {

int wirings_lanes() { return LANES; }
int wirings_block() { return BLOCK; }
int wirings_tile(int block) { return block == 1 ? TILE : DENSE_TILE; }
int wirings_panel() { return PANEL * LANES; }
int64_t wirings_step_bytes() { return sizeof(Step); }

int64_t wirings_scratch(const Step *step) {
    if (step->kind == NODES) return scratch_of(*step);
    if (step->kind == SUMS && step->flag) return int64_t{step->block} * ceil_div(step->length, LANES) * LANES;
    return step->kind == LINEAR ? step->inputs : 0;
}

// Zeros, on large pages where the system has them: maps lie far apart, and each page costs a look-up.
float *wirings_memory(int64_t floats) {
    const size_t page = size_t{1} << 21, bytes = (static_cast<size_t>(floats) * sizeof(float) + page - 1) / page * page;
    void *memory = nullptr;
    if (posix_memalign(&memory, page, bytes ? bytes : page)) return nullptr;
#ifdef MADV_HUGEPAGE
    madvise(memory, bytes, MADV_HUGEPAGE);
#endif
    memset(memory, 0, bytes);
    return static_cast<float *>(memory);
}

void wirings_free(float *memory) { free(memory); }

Pool *wirings_pool(int threads) { return new (std::nothrow) Pool(threads); }

// Images one after the other, each on all threads (memories has one), or each on one thread (a memory for every thread).
// `times`, where it is given, gets the seconds of every step added.
void wirings_run(Pool *pool, const Step *steps, int count, float *const *memories, float *const *scratches,
                 const float *const *inputs, const int64_t *input_sizes, int input_count, float *const *outputs,
                 const int64_t *output_sizes, int output_count, int images, int apart, double *times) {
    std::lock_guard<std::mutex> lock(pool->using_it);
    const int threads = pool->threads;
    const auto of_image = [&](int image, const float **in, float **out) {
        for (int i = 0; i < input_count; i++) in[i] = inputs[i] + image * input_sizes[i];
        for (int i = 0; i < output_count; i++) out[i] = outputs[i] + image * output_sizes[i];
    };
    const std::unique_ptr<const float *[]> ins(new const float *[static_cast<size_t>(input_count) * threads]);
    const std::unique_ptr<float *[]> outs(new float *[static_cast<size_t>(output_count) * threads]);
    if (apart) {
        std::atomic<int> next{0};
        pool->run([&](int number) {
            const float **in = ins.get() + number * input_count;
            float **out = outs.get() + number * output_count;
            for (int image; (image = next.fetch_add(1)) < images;) {
                of_image(image, in, out);
                for (int s = 0; s < count; s++)
                    for (int task = 0; task < steps[s].strips * steps[s].chunk_count; task++)
                        run_task(steps[s], memories[number], scratches[number], task, {in, out});
            }
        });
        return;
    }
    const std::unique_ptr<Counter[]> counters(new Counter[static_cast<size_t>(count) * images * threads]);
    pool->run([&](int number) {
        const float **in = ins.get() + number * input_count;
        float **out = outs.get() + number * output_count;
        for (int image = 0; image < images; image++) {
            of_image(image, in, out);
            double before = times && number == 0 ? seconds() : 0;
            for (int s = 0; s < count; s++) {
                Counter *own = counters.get() + (static_cast<int64_t>(image) * count + s) * threads;
                run_share(steps[s], memories[0], scratches[number], {in, out}, own, number, threads);
                pool->barrier.wait(threads);
                if (times && number == 0) {
                    const double now = seconds();
                    times[s] += now - before;
                    before = now;
                }
            }
        }
    });
}

}  // extern "C"
