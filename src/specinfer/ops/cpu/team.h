// Work shared out among threads that help the caller, but that it never waits for unless they are at a piece of it.
//
// A thread that is not running, because another process has its core, takes no work: the caller does it all. One that
// is stopped amid a piece holds the caller up until it goes on, and pieces are small. Who waits spins for a short
// time, then sleeps, so that its core is free for whom it waits for. What a piece computes must not depend on who
// takes it: results are then the same to the bit with any number of threads.

#pragma once

#include <cstdint>

typedef void (*Chunk)(const void *body, int64_t first, int64_t last);

// chunk(body, first, last) for all of [0, count), `at_once` at a time, on this thread and up to threads - 1 others.
// kind: of what the time depends on beside count; by such work it is measured how many threads are fastest. 0: not.
void share_out(int64_t count, int64_t at_once, int threads, Chunk chunk, const void *body, int64_t kind);

struct NoEnd {
    void operator()() const {}
};

// body(0), ..., body(count - 1), on several threads in any order; End{}() after some of them, on the thread that took them.
template <class End = NoEnd, class Body>
static void in_parallel(int64_t count, int64_t at_once, int threads, const Body &body, int64_t kind = 0) {
    share_out(
        count, at_once, threads,
        [](const void *all, int64_t first, int64_t last) {
            for (int64_t i = first; i < last; i++) (*(const Body *)all)(i);
            End{}();
        },
        &body, kind);
}

// Pieces of such a size that each thread has some eight of them.
static inline int64_t shares(int64_t count, int threads) {
    const int64_t pieces = (int64_t)(threads > 1 ? threads : 1) * 8;
    return count > pieces ? (count + pieces - 1) / pieces : 1;
}
