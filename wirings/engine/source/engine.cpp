// The compiled part of wirings.engine: runs the steps of a network, one image at a time, on a few threads.
#include <chrono>
#include <memory>
#include <new>

#include <stdlib.h>
#include <sys/mman.h>

#include "fused_node_convolution.h"
#include "channel_kernels.h"
#include "group_norm.h"
#include "thread_pool.h"
#include "token_kernels.h"

namespace {

typedef void (*Run)(const KernelStep &, float *memory, float *scratch, int task, const CallerTensors &);

// By kind of step.
const Run KERNELS[] = {run_sums, run_nodes, run_copy, run_pool, run_mean, run_linear, run_sparse_linear, run_function,
                       run_instance_norm, run_multiply, run_give, run_norm, run_attention, run_embedding, run_gather,
                       run_cached_attention, run_group_norm, run_add_numbers};

void run_task(const KernelStep &step, float *memory, float *scratch, int task, const CallerTensors &callers) {
    KERNELS[step.kind](step, memory, scratch, task, callers);
}

double seconds() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// The arguments of a call, which are valid as long as it has tasks.
struct KernelCall {
    const KernelStep *steps;
    int count;
    float *const *memories, *const *scratches;
    const float *const *inputs;
    const int64_t *input_sizes;
    int input_count;
    float *const *outputs;
    const int64_t *output_sizes;
    int output_count;
    int64_t first;  // image
    int images;
    double *times;
};

// The inputs and outputs of one image.
class Image {
    std::vector<const float *> in;
    std::vector<float *> out;

public:
    Image(const KernelCall &call, int64_t image) {
        for (int i = 0; i < call.input_count; i++) in.push_back(call.inputs[i] + image * call.input_sizes[i]);
        for (int i = 0; i < call.output_count; i++) out.push_back(call.outputs[i] + image * call.output_sizes[i]);
    }
    CallerTensors callers() const { return {in.data(), out.data()}; }
};

// One image after the other, with the tasks of each step on all threads.
class OneImageWork : public PoolWork {
    const KernelCall call;
    std::vector<Image> images;
    std::vector<Tasks> tasks;  // image by image, step by step

public:
    OneImageWork(const KernelCall &about, int threads) : call(about), tasks(static_cast<size_t>(about.images) * about.count) {
        for (int i = 0; i < call.images; i++) {
            images.emplace_back(call, call.first + i);
            for (int s = 0; s < call.count; s++)
                tasks[static_cast<size_t>(i) * call.count + s].set(call.steps[s].strips * call.steps[s].chunk_count, threads);
        }
    }

    void share(int number) override {
        double before = number == 0 && call.times ? seconds() : 0;
        for (size_t t = 0; t < tasks.size(); t++) {
            const size_t s = t % call.count;
            tasks[t].share(number, [&](int task) {
                const CallerTensors callers = images[t / call.count].callers();
                run_task(call.steps[s], call.memories[0], call.scratches[number], task, callers);
            });
            tasks[t].wait();
            if (number == 0 && call.times) {
                const double now = seconds();
                call.times[s] += now - before;
                before = now;
            }
        }
    }
};

// Each image on one thread, with separate memory.
class ManyImagesWork : public PoolWork {
    const KernelCall call;
    std::vector<Image> images;
    Tasks tasks;

public:
    ManyImagesWork(const KernelCall &about, int threads) : call(about) {
        for (int i = 0; i < call.images; i++) images.emplace_back(call, call.first + i);
        tasks.set(call.images, threads);
    }

    void share(int number) override {
        tasks.share(number, [&](int image) {
            for (int s = 0; s < call.count; s++)
                for (int task = 0; task < call.steps[s].strips * call.steps[s].chunk_count; task++)
                    run_task(call.steps[s], call.memories[number], call.scratches[number], task,
                             images[image].callers());
        });
        tasks.wait();
    }
};

}  // namespace

extern "C" {

int wirings_lanes() { return LANES; }
int wirings_block() { return BLOCK; }
int wirings_tile(int block) { return block == 1 ? TILE : DENSE_TILE; }
int wirings_panel() { return PANEL * LANES; }
int64_t wirings_step_bytes() { return sizeof(KernelStep); }

// The size of the struct of a kind of step; 0 if it has none.
int64_t wirings_own_bytes(int kind) {
    switch (kind) {
        case NORM: return sizeof(NormStep);
        case ATTENTION: return sizeof(AttentionStep);
        case EMBEDDING: return sizeof(EmbeddingStep);
        case GATHER: return sizeof(GatherStep);
        case CACHED_ATTENTION: return sizeof(CachedAttentionStep);
        case GROUP_NORM: return sizeof(GroupNormStep);
        default: return 0;
    }
}

int64_t wirings_scratch(const KernelStep *step) {
    if (step->kind == NODES) return scratch_of(*step);
    if (step->kind == SUMS && step->flag) return step->block * ceil_div(step->length, LANES) * LANES;
    if (step->kind == ATTENTION) return int64_t{static_cast<const AttentionStep *>(step->own)->others} * ATTENTION_TILE * LANES;
    if (step->kind == CACHED_ATTENTION) return static_cast<const CachedAttentionStep *>(step->own)->capacity;
    return step->kind == LINEAR ? step->inputs : 0;
}

// Memory of zeros, on large pages if the system has them: maps are far apart, and each page costs a lookup.
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

// Null if there is not enough memory. No exception may leave this library, since it would terminate the process.
ThreadPool *wirings_pool(int threads) {
    try {
        return new ThreadPool(threads);
    } catch (const std::bad_alloc &) {
        return nullptr;
    }
}

void wirings_free_pool(ThreadPool *pool) { delete pool; }

constexpr int IMAGES = 1024;  // images that are scheduled at a time, since each takes memory for its tasks

// Run one image after the other on all threads, with one memory, or each image on one thread, with a memory per thread.
// If `times` is not null, the seconds of each step are added to it. Returns 0, or 1 if there is not enough memory.
int wirings_run(ThreadPool *pool, const KernelStep *steps, int count, float *const *memories, float *const *scratches,
                 const float *const *inputs, const int64_t *input_sizes, int input_count, float *const *outputs,
                 const int64_t *output_sizes, int output_count, int64_t images, int apart, double *times) {
    std::lock_guard<std::mutex> lock(pool->using_it);
    for (int64_t first = 0; first < images; first += IMAGES) {
        const int own = static_cast<int>(images - first < IMAGES ? images - first : IMAGES);
        const KernelCall call = {steps, count, memories, scratches, inputs, input_sizes, input_count,
                           outputs, output_sizes, output_count, first, own, times};
        std::shared_ptr<PoolWork> work;
        try {
            if (apart)
                work = std::make_shared<ManyImagesWork>(call, pool->threads);
            else
                work = std::make_shared<OneImageWork>(call, pool->threads);
        } catch (const std::bad_alloc &) {
            return 1;
        }
        pool->run(work);
    }
    return 0;
}

}  // extern "C"
