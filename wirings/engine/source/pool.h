// A few threads that wait for work with their eyes open. A network of a millisecond has a dozen steps, and a thread
// that sleeps takes longer to wake than a step lasts; so threads spin between steps, and for a while between calls.
//
// Nobody waits for a thread, only for work that it has taken: on a busy machine a thread that gets no core is late, and
// the others have done its share meanwhile.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

#include <sched.h>  // GNU's, which knows cores

static inline void pause_a_moment() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield" ::: "memory");
#endif
}

enum { SPINS_TO_YIELD = 500, SPINS_TO_SLEEP = 20000 };

// Tasks that threads take one by one. Each thread does its own part of them, in order, so that what it wrote in one step
// lies in its cache in the next; then it helps the others.
class Tasks {
    struct alignas(64) Counter {
        std::atomic<int> value{0};
    };
    int count = 0, threads = 1;
    std::unique_ptr<Counter[]> next;  // one for each thread, and how many tasks are done

    int begin(int whose) const { return static_cast<int>(static_cast<int64_t>(count) * whose / threads); }

public:
    void set(int tasks, int sharers) {
        count = tasks;
        threads = sharers;
        next.reset(new Counter[sharers + 1]);
    }

    template <class Do>
    void share(int number, Do &&run) {
        for (int i = 0; i < threads; i++) {
            const int whose = (number + i) % threads;
            const int first = begin(whose), last = begin(whose + 1);
            for (int task; (task = first + next[whose].value.fetch_add(1, std::memory_order_relaxed)) < last;) {
                run(task);
                next[threads].value.fetch_add(1, std::memory_order_release);
            }
        }
    }

    void wait() const {
        for (int spins = 0; next[threads].value.load(std::memory_order_acquire) < count;) {
            pause_a_moment();
            if (++spins >= SPINS_TO_YIELD) sched_yield();  // the others may need this core
        }
    }
};

// Something that all threads do together. A thread that comes late may find it done, and everything but itself gone.
struct Work {
    virtual ~Work() = default;
    virtual void share(int number) = 0;
};

// On a busy machine the system may wake a thread on the very core that its caller runs on, and leave it there for
// milliseconds. A thread that finds itself so moves to another core, and may be anywhere again from there.
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

class Pool {
    Seats seats;
    std::shared_ptr<Work> work;
    std::atomic<uint32_t> call{0};
    std::atomic<int> asleep{0};
    std::mutex door;
    std::condition_variable waking;

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
            std::shared_ptr<Work> now;
            {
                std::lock_guard<std::mutex> lock(door);
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

    // It is never taken down: networks share it, and it sleeps when they do.
    explicit Pool(int count) : seats(count), threads(count) {
        try {
            for (int i = 1; i < count; i++) std::thread([this, i] { serve(i); }).detach();
        } catch (const std::system_error &) {
            // The system gives no more threads: those that there are do all the work.
        }
    }

    // Let every thread share in it, the caller as number 0; returns when the caller's share returns.
    void run(const std::shared_ptr<Work> &what) {
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
