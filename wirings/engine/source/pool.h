// A few threads that wait for work with their eyes open. A network of a millisecond has a dozen steps, and a thread
// that sleeps takes longer to wake than a step lasts; so threads spin between steps, and for a while between calls.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#include <sched.h>
#include <unistd.h>

static inline void pause_a_moment() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield" ::: "memory");
#endif
}

enum { SPINS_TO_YIELD = 2000, SPINS_TO_SLEEP = 20000 };

class Barrier {
    std::atomic<int> arrived{0}, round{0};

public:
    void wait(int threads) {
        if (threads == 1) return;
        const int now = round.load(std::memory_order_relaxed);
        if (arrived.fetch_add(1, std::memory_order_acq_rel) + 1 == threads) {
            arrived.store(0, std::memory_order_relaxed);
            round.store(now + 1, std::memory_order_release);
            return;
        }
        for (int spins = 0; round.load(std::memory_order_acquire) == now;) {
            pause_a_moment();
            if (++spins >= SPINS_TO_YIELD) sched_yield();  // the others may need this core
        }
    }
};

class Pool {
    std::vector<std::thread> workers;
    std::function<void(int)> job;
    std::atomic<uint32_t> call{0};
    std::atomic<int> running{0}, asleep{0};
    std::atomic<bool> ending{false};
    std::mutex sleeping;
    std::condition_variable waking;

    void work(int number) {
        uint32_t seen = 0;
        while (true) {
            int spins = 0;
            while (call.load(std::memory_order_acquire) == seen) {
                pause_a_moment();
                if (++spins < SPINS_TO_SLEEP) continue;
                std::unique_lock<std::mutex> lock(sleeping);
                asleep.fetch_add(1);
                waking.wait(lock, [&] { return call.load() != seen; });
                asleep.fetch_sub(1);
                break;
            }
            seen = call.load(std::memory_order_acquire);
            if (ending.load()) return;
            job(number);
            running.fetch_sub(1, std::memory_order_acq_rel);
        }
    }

    void start() {
        call.fetch_add(1);
        if (asleep.load() > 0) {
            std::lock_guard<std::mutex> lock(sleeping);
            waking.notify_all();
        }
    }

public:
    const int threads;
    const pid_t process = getpid();
    std::mutex using_it;
    Barrier barrier;

    explicit Pool(int count) : threads(count) {
        for (int i = 1; i < count; i++) workers.emplace_back([this, i] { work(i); });
    }

    ~Pool() {
        ending = true;
        start();
        for (auto &worker : workers) worker.join();
    }

    // Let every thread do it, the caller as number 0; returns when all have.
    void run(std::function<void(int)> what) {
        job = std::move(what);
        running.store(threads - 1, std::memory_order_release);
        if (threads > 1) start();
        job(0);
        for (int spins = 0; running.load(std::memory_order_acquire) > 0;) {
            pause_a_moment();
            if (++spins >= SPINS_TO_YIELD) sched_yield();
        }
    }
};
