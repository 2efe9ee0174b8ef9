// The threads that share_out() calls on: started at the first need, kept asleep between calls.

#include "team.h"

#include "pace.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#if defined(__unix__) || defined(__APPLE__)
#include <pthread.h>
#include <strings.h>
#endif

namespace {

// How long to spin for what is expected soon: a thread that sleeps takes as long to wake. As OpenMP's threads do it
// where OMP_WAIT_POLICY is set.
int64_t spin_nanoseconds() {
    const char *policy = getenv("OMP_WAIT_POLICY");
    if (policy && !strcasecmp(policy, "passive")) return 0;
    if (policy && !strcasecmp(policy, "active")) return INT64_MAX;
    return 100000;
}

const int64_t SPIN = spin_nanoseconds();

void pause_briefly() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

int64_t nanoseconds() {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Whether `is_true` became so while spinning.
template <class Condition>
bool spin_until(const Condition &is_true) {
    if (is_true()) return true;
    if (SPIN == 0) return false;
    const int64_t started = nanoseconds();
    do
        for (int i = 0; i < 64; i++) {
            if (is_true()) return true;
            pause_briefly();
        }
    while (nanoseconds() - started < SPIN);
    return false;
}

// Where one thread waits for a condition that others make true before they call wake().
class Waiter {
    std::mutex mutex;
    std::condition_variable woken;
    std::atomic<bool> sleeps{false};

  public:
    template <class Condition>
    void wait(const Condition &is_true) {
        if (spin_until(is_true)) return;
        std::unique_lock<std::mutex> lock(mutex);
        for (sleeps = true; !is_true(); sleeps = true) woken.wait(lock, [&] { return !sleeps; });
        sleeps = false;
    }
    // The lock is taken only on behalf of who sleeps: nobody else can be stopped with it.
    void wake() {
        if (!sleeps || !sleeps.exchange(false)) return;
        { std::lock_guard<std::mutex> lock(mutex); }  // until it sleeps indeed
        woken.notify_one();
    }
};

class Team {
    static constexpr uint32_t OPEN = 1u << 31, ONE_ALLOWED = 1u << 16, INSIDE = ONE_ALLOWED - 1;
    static constexpr int MOST = 1 << 14;  // threads

    std::atomic_flag is_taken = ATOMIC_FLAG_INIT;
    std::vector<std::unique_ptr<Waiter>> helpers;
    Chunk chunk;  // of the work that is open: these do not change while a helper is inside
    const void *body;
    int64_t count, at_once;
    alignas(64) std::atomic<int64_t> next{0};    // of the count, to be taken
    alignas(64) std::atomic<uint32_t> state{0};  // OPEN, how many helpers are allowed, how many are inside
    alignas(64) std::atomic<uint32_t> posted{0};  // works so far
    Waiter caller;
    Pace pace;

    uint64_t name_of(int64_t kind) const {
        return (uint64_t)(uintptr_t)chunk ^ (uint64_t)count << 40 ^ (uint64_t)at_once << 20 ^ (uint64_t)kind << 4;
    }

    int64_t take_chunks() {
        int64_t number = 0;
        for (int64_t first; (first = next.fetch_add(at_once, std::memory_order_relaxed)) < count; number++)
            chunk(body, first, std::min(first + at_once, count));
        return number;
    }

    void help(uint32_t number, Waiter *waiter) {
        uint32_t seen = 0;
        for (;;) {
            waiter->wait([&] { return posted.load() != seen; });
            seen = posted.load();
            uint32_t now = state.load();
            bool is_inside = false;
            while (!is_inside && (now & OPEN) && number < (now & ~OPEN) / ONE_ALLOWED)
                is_inside = state.compare_exchange_weak(now, now + 1);
            if (!is_inside) continue;
            take_chunks();
            if (((state.fetch_sub(1) - 1) & (OPEN | INSIDE)) == 0) caller.wake();
        }
    }

    void hire(size_t wanted) {
        try {
            while (helpers.size() < wanted) {
                auto waiter = std::make_unique<Waiter>();
                std::thread(&Team::help, this, (uint32_t)helpers.size(), waiter.get()).detach();
                helpers.push_back(std::move(waiter));
            }
        } catch (const std::system_error &) {  // as many as the system gives
        }
    }

    // With so many helpers; how many chunks the caller did, and when it ended them.
    std::pair<int64_t, int64_t> work_with(int wanted) {
        hire((size_t)wanted);
        next.store(0);
        state.store(OPEN | (uint32_t)wanted * ONE_ALLOWED);
        posted++;
        for (size_t i = 0; i < helpers.size() && i < (size_t)wanted; i++) helpers[i]->wake();
        const int64_t own = take_chunks(), own_end = nanoseconds();
        state.fetch_and(~OPEN);  // who has not come is not needed
        caller.wait([&] { return (state.load() & INSIDE) == 0; });
        return {own, own_end};
    }

  public:
    void share_out(int64_t all, int64_t some, int threads, Chunk what, const void *with, int64_t kind) {
        if (threads < 2 || all <= some || is_taken.test_and_set(std::memory_order_acquire)) {
            what(with, 0, all);  // alone; another thread of the process has the helpers
            return;
        }
        const int64_t chunks = (all + some - 1) / some, started = nanoseconds();
        const int wanted = (int)std::min<int64_t>({pace.threads(threads) - 1, chunks - 1, MOST});
        chunk = what, body = with, count = all, at_once = some;
        if (wanted > 0) {
            const auto [own, own_end] = work_with(wanted);
            if (kind) pace.count(name_of(kind), chunks, own, started, own_end, nanoseconds());
        } else {
            what(with, 0, all);
            const int64_t now = nanoseconds();
            if (kind) pace.count(name_of(kind), chunks, chunks, started, now, now);
        }
        is_taken.clear(std::memory_order_release);
    }
};

// Never destroyed: its threads run until the process ends. A forked child has none of them, and makes its own.
Team *team = [] {
#if defined(__unix__) || defined(__APPLE__)
    pthread_atfork(nullptr, nullptr, [] { team = new Team(); });
#endif
    return new Team();
}();

}  // namespace

void share_out(int64_t count, int64_t at_once, int threads, Chunk chunk, const void *body, int64_t kind) {
    team->share_out(count, at_once, threads, chunk, body, kind);
}
