// The compiled part of wirings.engine: runs the steps of a network, one image at a time, on a few threads.
#include <chrono>
#include <memory>
#include <new>

#include <stdlib.h>
#include <sys/mman.h>

#include "kernel_table.h"
#include "thread_pool.h"

// The steps of a plan, their memory, and the tensors of a call.
struct KernelArguments {
    const KernelStep *steps;
    float *const *memories, *const *scratches;  // one for each thread, or a single memory
    const float *const *inputs;
    const int64_t *input_sizes;     // numbers of one image
    float *const *outputs;
    const int64_t *output_sizes;
    int32_t count, input_count, output_count;
    int32_t apart;                  // whether each image is computed by one thread, not by all of them
};

namespace {

void run_task(const KernelStep &step, float *memory, float *scratch, int task, const CallerTensors &callers) {
    KERNELS[step.kind].run(step.own, memory, scratch, task, callers);
}

double seconds() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Some images of a call; the arguments are valid as long as it has tasks.
struct KernelCall : KernelArguments {
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
    std::vector<Tasks::Counter> counters;

public:
    OneImageWork(const KernelCall &about, int threads)
        : call(about), tasks(static_cast<size_t>(about.images) * about.count), counters(tasks.size() * (threads + 1)) {
        for (int i = 0; i < call.images; i++) images.emplace_back(call, call.first + i);
        for (size_t t = 0; t < tasks.size(); t++)
            tasks[t].set(call.steps[t % call.count].tasks, threads, &counters[t * (threads + 1)]);
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
    std::vector<Tasks::Counter> counters;
    Tasks tasks;

public:
    ManyImagesWork(const KernelCall &about, int threads) : call(about), counters(threads + 1) {
        for (int i = 0; i < call.images; i++) images.emplace_back(call, call.first + i);
        tasks.set(call.images, threads, counters.data());
    }

    void share(int number) override {
        tasks.share(number, [&](int image) {
            for (int s = 0; s < call.count; s++)
                for (int task = 0; task < call.steps[s].tasks; task++)
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

// The table of kernels; a kind of step is a number below the count.
int wirings_kernel_count() { return KERNEL_COUNT; }
const char *wirings_kernel_name(int kind) { return KERNELS[kind].name; }
int64_t wirings_kernel_bytes(int kind) { return KERNELS[kind].bytes; }

int64_t wirings_scratch(const KernelStep *step) { return KERNELS[step->kind].scratch(step->own); }

// Memory of zeros. Large memory is on large pages if the system has them: maps are far apart, and each page costs a lookup.
// It ends where the maps end, so that sanitizers notice reads beyond.
float *wirings_memory(int64_t floats) {
    const size_t page = size_t{1} << 21, bytes = static_cast<size_t>(floats) * sizeof(float);
    void *memory = nullptr;
    if (posix_memalign(&memory, bytes < page ? LINE * sizeof(float) : page, bytes)) return nullptr;
#ifdef MADV_HUGEPAGE
    if (bytes >= page) madvise(memory, bytes / page * page, MADV_HUGEPAGE);
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

// Run one image after the other on all threads, or each image on one thread. If `times` is not null, the seconds of each
// step are added to it. Returns 0, or 1 if there is not enough memory.
int wirings_run(ThreadPool *pool, const KernelArguments *arguments, int64_t images, double *times) {
    std::lock_guard<std::mutex> lock(pool->using_it);
    for (int64_t first = 0; first < images; first += IMAGES) {
        const int own = static_cast<int>(images - first < IMAGES ? images - first : IMAGES);
        const KernelCall call = {*arguments, first, own, times};
        std::shared_ptr<PoolWork> work;
        try {
            if (arguments->apart)
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
