// How long two threads on the first two cores take to pass a number to each other and back, in nanoseconds.
#include <atomic>
#include <chrono>
#include <cstdio>
#include <thread>

#include <sched.h>

static void stay_on(int core) {
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(core, &set);
    sched_setaffinity(0, sizeof set, &set);
}

int main() {
    constexpr int TIMES = 100000;
    std::atomic<int> number{0};
    std::thread other([&] {
        stay_on(1);
        for (int i = 0; i < TIMES; i++) {
            while (number.load() != 2 * i + 1) {}
            number.store(2 * i + 2);
        }
    });
    stay_on(0);
    const auto start = std::chrono::steady_clock::now();
    for (int i = 0; i < TIMES; i++) {
        number.store(2 * i + 1);
        while (number.load() != 2 * i + 2) {}
    }
    const std::chrono::duration<double, std::nano> taken = std::chrono::steady_clock::now() - start;
    other.join();
    std::printf("%.0f\n", taken.count() / TIMES);
}
