// What adapters add to a linear layer: up (down x), of low rank, for the rows of a pass that have an adapter.
//
// The products with `down` come first. Those with `up` are added to a panel's sums before they end, whatever the type
// of the weights: no sum is read again. Each row's sums run in the same order in any pass.

static const int64_t RANKS = 4;          // of `down` that are multiplied with a row at once
static const int64_t DOWN_WORK = 1 << 15;  // products that one thread is done with before another has come

// result[i] = down[i] . x for RANKS neighbouring rows of `down`.
static INLINE void dots_of(const float *down, const float *x, int64_t inputs, float *result) {
    Floats sums[RANKS] = {};
    int64_t k = 0;
    for (; k + LANES <= inputs; k += LANES) {
        const Floats part = read<Floats>(x + k);
        each<RANKS>([&](auto i) ALWAYS { sums[i] += part * read<Floats>(down + i * inputs + k); });
    }
    for (int64_t i = 0; i < RANKS; i++) {
        float rest = 0;
        for (int64_t j = k; j < inputs; j++) rest += x[j] * down[i * inputs + j];
        result[i] = sum_of(sums[i]) + rest;
    }
}

// body(run, its adapter of this layer, its place in the scratch memory).
template <class Body>
static INLINE void each_run(const Runs *runs, int64_t number, const Body &body) {
    float *place = runs->scratch;
    for (int64_t run = 0; run < runs->count; run++) {
        const LowRank &adapter = runs->adapters[run][number];
        if (!adapter.rank) continue;
        body(run, adapter, place);
        place += runs->rows[run] * adapter.rank;
    }
}

// The products of `down` with the rows x [rows][inputs], as kernels read activations: of each block [rank][rows].
static void go_down(const Linear *layer, const float *x, const Runs *runs, int threads) {
    int64_t units = 0, most = 1;
    each_run(runs, layer->number, [&](int64_t run, const LowRank &adapter, float *) {
        units += adapter.rank / RANKS;
        most = runs->rows[run] > most ? runs->rows[run] : most;
    });
    const int64_t at_once = 1 + DOWN_WORK / (most * RANKS * layer->inputs);
    in_parallel(units, at_once, threads, [&](int64_t unit) {
        each_run(runs, layer->number, [&](int64_t run, const LowRank &adapter, float *place) {
            const int64_t rank = unit * RANKS;
            unit -= adapter.rank / RANKS;
            if (rank < 0 || rank >= adapter.rank) return;
            const Blocks blocks(runs->rows[run]);
            const float *row = x + runs->first[run] * layer->inputs;
            for (int64_t b = 0; b < blocks.count; b++) {
                const int64_t count = blocks.rows(b);
                float *ready = place + blocks.first(b) * adapter.rank + rank * count;
                for (int64_t r = 0; r < count; r++, row += layer->inputs) {
                    float result[RANKS];
                    dots_of(adapter.down + rank * layer->inputs, row, layer->inputs, result);
                    for (int64_t i = 0; i < RANKS; i++) ready[i * count + r] = result[i];
                }
            }
        });
    });
}

// sums [rows][WIDTH] += a panel of `up`, times what `go_down` left.
static void go_up(const Linear *layer, int64_t panel, const Runs *runs, float *sums) {
    each_run(runs, layer->number, [&](int64_t run, const LowRank &adapter, float *place) {
        const int64_t from = adapter.ranks[2 * panel], depth = adapter.ranks[2 * panel + 1] - from;
        if (depth <= 0) return;
        const Blocks blocks(runs->rows[run]);
        const float *up = adapter.up + (panel * adapter.rank + from) * WIDTH;
        for (int64_t b = 0; b < blocks.count; b++) {
            const int64_t m = blocks.first(b), count = blocks.rows(b);
            const float *ready = place + m * adapter.rank + from * count;
            const Ready block = {(const uint8_t *)up, 0, (const uint32_t *)ready, nullptr, nullptr};
            kernel_of(FP32, false, count)(block, (const uint8_t *)up, nullptr, depth, sums + (runs->first[run] + m) * WIDTH);
        }
    });
}

// y [rows][outputs] += what adapters add to a layer with inputs x, for layers that are not computed here.
static void add_low_rank(int64_t number, int64_t inputs, int64_t outputs, const float *x, float *y, const Runs *runs,
                         int64_t rows, int threads) {
    const Linear layer = {nullptr, nullptr, nullptr, inputs, outputs, FP32, false, number};
    const int64_t panels = (outputs + WIDTH - 1) / WIDTH;
    go_down(&layer, x, runs, threads);
    in_parallel(panels, shares(panels, threads), threads, [&](int64_t p) {
        static thread_local Totals totals;
        float *sums = totals.of(rows);
        go_up(&layer, p, runs, sums);
        finish(sums, nullptr, y, rows, p * WIDTH, outputs, ADD);
    });
}
