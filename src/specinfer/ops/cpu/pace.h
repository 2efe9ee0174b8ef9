// How many threads are fastest at present: measured while they work, for another process may have some of the cores.
//
// Work is counted in what its chunks take at best on one core, so that stretches of different work compare: a rate is
// then a number of cores. For one stretch now and then half or twice as many threads are tried; tries that do not
// help become rare, down to some 0.5 % of the time.

#pragma once

#include <algorithm>
#include <cstdint>

class Pace {
    static constexpr int64_t STRETCH = 20'000'000, SOON = 100'000'000, LATE = 4'000'000'000;  // nanoseconds
    static constexpr double BETTER = 1.1, WORSE = 0.75;  // smaller differences are chance
    static constexpr size_t KINDS = 1024;

    struct Kind {
        uint64_t name;
        double best;  // nanoseconds of a chunk
    };
    Kind kinds[KINDS] = {};
    int most = 0, usual = 0, tried = 0;   // threads; tried: 0 if none are
    bool tries_more = false;
    double usual_rate = 0, work = 0;
    int64_t elapsed = 0, next_try = 0, pause = SOON;

    void end_stretch(int64_t now) {
        const double rate = work / (double)elapsed;
        work = 0, elapsed = 0;
        if (tried) {
            const bool helps = rate > BETTER * usual_rate;
            if (helps) usual = tried, usual_rate = rate;
            pause = helps ? SOON : std::min(2 * pause, LATE);
            next_try = now + pause;
            tried = 0;
            return;
        }
        if (rate < WORSE * usual_rate) pause = SOON, next_try = now;  // something has changed
        usual_rate = rate;
        if (now < next_try) return;
        tries_more = usual == most ? false : usual == 1 || !tries_more;
        tried = tries_more ? std::min(2 * usual, most) : usual / 2;
    }

  public:
    // How many to use, of so many at most.
    int threads(int allowed) {
        if (allowed != most) *this = Pace(), most = usual = allowed;
        return tried ? tried : usual;
    }

    // A kind of work in that many chunks took from `started` to `now`; this thread did `own` of them until `own_end`.
    void count(uint64_t name, int64_t chunks, int64_t own, int64_t started, int64_t own_end, int64_t now) {
        Kind &kind = kinds[(name * 0x9e3779b97f4a7c15u) >> 54];
        if (kind.name != name) kind = {name, 1e300};
        if (own) kind.best = std::min(kind.best, (double)(own_end - started) / (double)own);
        if (kind.best == 1e300) return;
        work += (double)chunks * kind.best;
        elapsed += now - started;
        if (elapsed >= STRETCH) end_stretch(now);
    }
};
