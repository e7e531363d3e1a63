// A thread pool that spins. A network that takes a millisecond has a dozen steps, and waking a thread takes longer than
// a step, so threads spin between steps, and for a while between calls.
//
// Nothing waits for a thread, only for work that it has taken: on a busy machine, a thread without a core is late, and
// the others have done its share in the meantime.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include <sched.h>  // GNU extensions for CPU affinity

static inline void pause_a_moment() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield" ::: "memory");
#endif
}

enum { SPINS_TO_YIELD = 500, SPINS_TO_SLEEP = 20000 };

// Tasks that threads take one by one. Each thread first does its own share, in order, so that what it wrote in one step
// is in its cache in the next. Then it helps the others.
//
// Passing a cache line from one core to another may take as long as a small task. So a thread reports all tasks of one
// share at once, and only looks at a share of which nothing is left.
class Tasks {
public:
    struct alignas(64) Counter {
        std::atomic<int> value{0};
    };

private:
    int count = 0, threads = 1;
    Counter *next = nullptr;  // one for each thread, and the number of finished tasks

    int begin(int whose) const { return static_cast<int>(static_cast<int64_t>(count) * whose / threads); }

public:
    // `own` are the counters, one more than threads share the tasks.
    void set(int tasks, int sharers, Counter *own) {
        count = tasks;
        threads = sharers;
        next = own;
    }

    template <class Do>
    void share(int number, Do &&run) {
        for (int i = 0; i < threads; i++) {
            const int whose = (number + i) % threads;
            const int first = begin(whose), last = begin(whose + 1);
            std::atomic<int> &taken = next[whose].value;
            if (i > 0 && taken.load(std::memory_order_relaxed) >= last - first) continue;
            int done = 0;
            for (int task; (task = first + taken.fetch_add(1, std::memory_order_relaxed)) < last; done++) run(task);
            if (done) next[threads].value.fetch_add(done, std::memory_order_release);
        }
    }

    void wait() const {
        for (int spins = 0; next[threads].value.load(std::memory_order_acquire) < count;) {
            pause_a_moment();
            if (++spins >= SPINS_TO_YIELD) sched_yield();  // the others may need this core
        }
    }
};

// Work that all threads share. A late thread may find it finished, and everything but the work object gone.
struct PoolWork {
    virtual ~PoolWork() = default;
    virtual void share(int number) = 0;
};

// On a busy machine, the system may wake a thread on the core that its caller runs on, and leave it there for
// milliseconds. Such a thread moves to another core, after which the system may move it again.
class Seats {
#if defined(__linux__)
    std::unique_ptr<std::atomic<int>[]> cores;

public:
    explicit Seats(int threads) : cores(new std::atomic<int>[threads]) {
        for (int i = 0; i < threads; i++) cores[i] = -1;
    }

    void take(int number) {
        cores[number].store(sched_getcpu(), std::memory_order_relaxed);
        bool shared = false;
        for (int i = 0; i < number; i++) shared |= cores[i].load() == cores[number].load();
        cpu_set_t allowed, other;
        if (!shared || sched_getaffinity(0, sizeof allowed, &allowed)) return;
        other = allowed;
        for (int i = 0; i < number; i++)
            if (const int core = cores[i].load(); core >= 0) CPU_CLR(core, &other);
        if (CPU_COUNT(&other) == 0 || sched_setaffinity(0, sizeof other, &other)) return;
        cores[number].store(sched_getcpu(), std::memory_order_relaxed);
        sched_setaffinity(0, sizeof allowed, &allowed);
    }
#else
public:
    explicit Seats(int) {}
    void take(int) {}
#endif
};

class ThreadPool {
    Seats seats;
    std::shared_ptr<PoolWork> work;
    std::atomic<uint32_t> call{0};
    std::atomic<int> asleep{0};
    std::mutex door;
    std::condition_variable waking;
    bool stopping = false;  // guarded by the door
    std::vector<std::thread> members;

    void serve(int number) {
        uint32_t seen = 0;
        while (true) {
            for (int spins = 0; call.load(std::memory_order_acquire) == seen;) {
                pause_a_moment();
                if (++spins < SPINS_TO_SLEEP) continue;
                std::unique_lock<std::mutex> lock(door);
                asleep.fetch_add(1);
                waking.wait(lock, [&] { return call.load() != seen; });
                asleep.fetch_sub(1);
            }
            std::shared_ptr<PoolWork> now;
            {
                std::lock_guard<std::mutex> lock(door);
                if (stopping) return;
                seen = call.load();
                now = work;
            }
            if (!now) continue;
            seats.take(number);
            now->share(number);
        }
    }

public:
    const int threads;
    std::mutex using_it;

    explicit ThreadPool(int count) : seats(count), threads(count) {
        members.reserve(count);
        try {
            for (int i = 1; i < count; i++) members.emplace_back([this, i] { serve(i); });
        } catch (const std::exception &) {
            // The system provides no more threads, or no memory for them: the existing ones do all the work.
        }
    }

    // Nobody may be running work. Not in a forked process, which has none of the threads.
    ~ThreadPool() {
        {
            std::lock_guard<std::mutex> lock(door);
            stopping = true;
            call.fetch_add(1);
        }
        waking.notify_all();
        for (std::thread &member : members) member.join();
    }

    // Run work on all threads, with the caller as number 0; returns when the caller's share is done.
    void run(const std::shared_ptr<PoolWork> &what) {
        if (threads > 1) {
            seats.take(0);
            {
                std::lock_guard<std::mutex> lock(door);
                work = what;
                call.fetch_add(1);
            }
            if (asleep.load() > 0) waking.notify_all();
        }
        what->share(0);
        if (threads > 1) {
            std::lock_guard<std::mutex> lock(door);
            work.reset();
        }
    }
};
