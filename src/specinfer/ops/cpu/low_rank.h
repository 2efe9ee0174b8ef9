// What adapters add to a linear layer: up (down x), of low rank, for the rows of a pass that have an adapter.
//
// The products with `down` come first. Those with `up` are added to a panel's sums before they end, whatever the type
// of the weights: no sum is read again. Each row's sums run in the same order in any pass.

static const int64_t RANKS = 4;            // of `down` that are multiplied with rows at once
static const int64_t DOWN_WORK = 1 << 15;  // products that one thread is done with before another has come

static INLINE Floats widened(const float *place) { return read<Floats>(place); }
static INLINE Floats widened(const uint16_t *place) { return vectors_from_bf16(place); }
static INLINE float widened_one(float value) { return value; }
static INLINE float widened_one(uint16_t bits) { return from_bf16(bits); }

// result [ROWS][rank]: RANKS neighbouring rows of `down` times ROWS rows of x.
template <int64_t ROWS, class Number>
static INLINE void dots_of(const Number *down, const float *x, int64_t inputs, float *result, int64_t rank) {
    Floats sums[ROWS * RANKS] = {};
    int64_t k = 0;
    for (; k + LANES <= inputs; k += LANES) {
        Floats parts[ROWS];
        each<ROWS>([&](auto r) ALWAYS { parts[r] = read<Floats>(x + r * inputs + k); });
        each<RANKS>([&](auto i) ALWAYS {
            const Floats weights = widened(down + i * inputs + k);
            each<ROWS>([&](auto r) ALWAYS { sums[r * RANKS + i] += parts[r] * weights; });
        });
    }
    for (int64_t r = 0; r < ROWS; r++)
        for (int64_t i = 0; i < RANKS; i++) {
            float rest = 0;
            for (int64_t j = k; j < inputs; j++) rest += x[r * inputs + j] * widened_one(down[i * inputs + j]);
            result[r * rank + i] = sum_of(sums[r * RANKS + i]) + rest;
        }
}

template <class Number>
static void go_down(const Number *down, const float *x, int64_t inputs, int64_t rows, float *result, int64_t rank) {
    int64_t r = 0;
    for (; r + 2 <= rows; r += 2) dots_of<2>(down, x + r * inputs, inputs, result + r * rank, rank);
    if (r < rows) dots_of<1>(down, x + r * inputs, inputs, result + r * rank, rank);
}

// sums [ROWS][WIDTH], of which half a panel: += up [depth][LANES] times `low` [ROWS][rank].
template <int64_t ROWS, class Number>
static INLINE void rows_up(const Number *up, const float *low, int64_t depth, int64_t rank, float *sums) {
    Floats totals[ROWS];
    each<ROWS>([&](auto r) ALWAYS { totals[r] = read<Floats>(sums + r * WIDTH); });
    for (int64_t k = 0; k < depth; k++) {
        const Floats weights = widened(up + k * LANES);
        each<ROWS>([&](auto r) ALWAYS { totals[r] += weights * low[r * rank + k]; });
    }
    each<ROWS>([&](auto r) ALWAYS { write(sums + r * WIDTH, totals[r]); });
}

template <class Number>
static void go_up(const Number *up, const float *low, int64_t depth, int64_t rank, float *sums, int64_t rows) {
    int64_t r = 0;
    for (; r + 4 <= rows; r += 4) rows_up<4>(up, low + r * rank, depth, rank, sums + r * WIDTH);
    for (; r < rows; r++) rows_up<1>(up, low + r * rank, depth, rank, sums + r * WIDTH);
}

// body(run, its adapter of this layer, its place in the scratch memory: [rows][rank]).
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

// The products of `down` with x [rows][inputs].
static void all_down(const Linear *layer, const float *x, const Runs *runs, int threads) {
    const int64_t inputs = layer->inputs;
    int64_t units = 0, most = 1;
    each_run(runs, layer->number, [&](int64_t run, const LowRank &adapter, float *) {
        units += adapter.rank / RANKS;
        most = runs->rows[run] > most ? runs->rows[run] : most;
    });
    const int64_t at_once = 1 + DOWN_WORK / (most * RANKS * inputs);
    in_parallel(units, at_once, threads, [&](int64_t unit) {
        each_run(runs, layer->number, [&](int64_t run, const LowRank &adapter, float *place) {
            const int64_t rank = unit * RANKS, rows = runs->rows[run];
            unit -= adapter.rank / RANKS;
            if (rank < 0 || rank >= adapter.rank) return;
            const float *first = x + runs->first[run] * inputs;
            if (adapter.type == BF16)
                go_down((const uint16_t *)adapter.down + rank * inputs, first, inputs, rows, place + rank, adapter.rank);
            else
                go_down((const float *)adapter.down + rank * inputs, first, inputs, rows, place + rank, adapter.rank);
        });
    });
}

// sums [rows][WIDTH] of a panel += `up`, times what `all_down` left.
static void panel_up(const Linear *layer, int64_t panel, const Runs *runs, float *sums) {
    each_run(runs, layer->number, [&](int64_t run, const LowRank &adapter, float *place) {
        for (int64_t half = 0; half < 2; half++) {
            const int32_t *block = adapter.blocks + (panel * 2 + half) * 3;
            const int64_t depth = block[1], start = block[2] * LANES, rows = runs->rows[run];
            float *own = sums + runs->first[run] * WIDTH + half * LANES;
            if (adapter.type == BF16)
                go_up((const uint16_t *)adapter.up + start, place + block[0], depth, adapter.rank, own, rows);
            else
                go_up((const float *)adapter.up + start, place + block[0], depth, adapter.rank, own, rows);
        }
    });
}

// Fetch what `panel_up` will read, while the panel itself is multiplied.
static void fetch_up(const Linear *layer, int64_t panel, const Runs *runs) {
    each_run(runs, layer->number, [&](int64_t, const LowRank &adapter, float *) {
        const int32_t *block = adapter.blocks + panel * 6;  // the two blocks of a panel are neighbours
        const int64_t size = adapter.type == BF16 ? 2 : 4, bytes = (block[1] + block[4]) * LANES * size;
        const uint8_t *first = (const uint8_t *)adapter.up + block[2] * LANES * size;
        for (int64_t b = 0; b < bytes; b += 64) __builtin_prefetch(first + b, 0, 2);
    });
}

// y [rows][outputs] += what adapters add to a layer with inputs x, for layers that are not computed here.
LOCAL void add_low_rank(int64_t number, int64_t inputs, int64_t outputs, const float *x, float *y, const Runs *runs,
                         int64_t rows, int threads) {
    Linear layer = {};
    layer.inputs = inputs;
    layer.number = number;
    const int64_t panels = (outputs + WIDTH - 1) / WIDTH;
    all_down(&layer, x, runs, threads);
    in_parallel(panels, shares(panels, threads), threads, [&](int64_t p) {
        float *sums = zero_sums(rows);
        panel_up(&layer, p, runs, sums);
        finish(sums, nullptr, y, rows, p * WIDTH, outputs, outputs, ADD);
    });
}
