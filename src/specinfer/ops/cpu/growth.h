// The growth of several trees by a level: which guesses below their frontiers become nodes, and which nodes are next.
//
// The rule is that of tree_batch.py; tests/reference/growth.py has the same bits: products and sums are rounded one by one. Guesses are ordered by
// the bins of their path probabilities, so that few have to be compared.

#include <algorithm>
#include <numeric>
#include <vector>

static_assert(sizeof(Guess) == 40, "as in growth.py");

static int64_t bin_of(const Growth *g, double path_prob) {  // how many of the falling edges it does not exceed
    int64_t low = 0, high = g->bins - 1;
    while (low < high) {
        const int64_t middle = (low + high) / 2;
        (path_prob <= g->edges[middle] ? low : high) = path_prob <= g->edges[middle] ? middle + 1 : middle;
    }
    return low;
}

// As Calibration.acceptance_prob; 1 in a fixed expansion.
static double acceptance_prob(const Growth *g, const Growing &tree, int64_t rank, double confidence) {
    if (!tree.heights) return 1.0;
    int64_t line = (rank < g->ranks ? rank : g->ranks - 1) * (g->middles_count + 1);
    for (int64_t k = 0; k < g->middles_count; k++) line += g->middles[k] < confidence;
    const volatile double product = tree.slopes[line] * confidence;  // not fused with the sum
    return tree.heights[line] + product;
}

// The open guesses of a tree by bin.
struct Counts {
    const Growth *g;
    std::vector<int64_t> of;
    std::vector<double> expected;
    // Guesses up to the last bin fill the tree: none of a later one is taken. All bins stay open to draws with
    // replacement, which may be no further nodes.
    int64_t num_left = 0, last = 0, up_to = 0;

    explicit Counts(const Growth *growth) : g(growth), of((size_t)g->bins), expected((size_t)g->bins) {}

    void begin(const Growing &tree) {
        std::fill(of.begin(), of.end(), 0);
        num_left = tree.num_left, last = g->bins - 1, up_to = 0;
        for (int64_t i = 0; i < tree.num_open; i++) add(g->open[tree.open_start + i].bin);
    }

    void add(int64_t bin) {
        of[(size_t)bin]++;
        up_to += bin <= last;
        while (!g->draws && last > 0 && up_to - of[(size_t)last] >= num_left) up_to -= of[(size_t)last--];
    }

    bool can_take(double path_prob) const { return last == g->bins - 1 || path_prob > g->edges[last]; }

    // The last bin up to which everything present and expected fits: `reach` [bins] nodes in so many bins below a guess.
    int64_t floor(const double *reach) {
        std::fill(expected.begin(), expected.end(), 0.0);  // whole numbers: exact in any order
        int64_t first = last + 1, fitting = -1;
        for (int64_t bin = last; bin >= 0; bin--) {
            const double count = (double)of[(size_t)bin];
            if (count == 0.0) continue;
            first = bin;
            for (int64_t floor = bin; floor <= last; floor++) expected[(size_t)floor] += count * reach[floor - bin];
        }
        while (fitting < last && expected[(size_t)fitting + 1] <= (double)num_left) fitting++;  // they rise
        return fitting > first ? fitting : first;
    }
};

// Add the guesses below the frontier of a tree that could be taken. `row`: of its first node among the candidates.
static void offer(Growth *g, Growing &tree, int64_t row, Counts &counts) {
    const int64_t width = tree.width < g->columns ? tree.width : g->columns;
    for (int64_t node = tree.first; node < tree.end; node++, row++) {
        const double above = g->path_prob[tree.start + node];
        double least = INFINITY;
        for (int64_t rank = 0; rank < width; rank++) {
            const float confidence = g->sure[row * g->columns + rank];
            const double prob = acceptance_prob(g, tree, rank, confidence);
            const double path_prob = (least = prob < least ? prob : least) * above;
            if (!(path_prob >= tree.min_path_prob) || !counts.can_take(path_prob)) break;  // nor is a later one better
            const int64_t token = g->candidates[row * g->columns + rank], bin = bin_of(g, path_prob);
            if (token < 0) continue;
            g->open[tree.open_start + tree.num_open++] = {path_prob,       token,        confidence,    (int32_t)node,
                                                          (int32_t)g->level, (int32_t)row, (int32_t)rank, (int32_t)bin};
            counts.add(bin);
        }
    }
}

static int64_t known_child(const Growth *g, const Growing &tree, const Guess &guess) {
    for (int64_t node = 1; node < tree.size; node++)
        if (g->parents[tree.start + node] == guess.node && g->tokens[tree.start + node] == guess.token) return node;
    return -1;
}

static void note_draw(Growth *g, const Growing &tree, const Guess &guess, int64_t node) {
    const int64_t place = tree.open_start + g->num_draws[&tree - g->trees]++, draw[] = {node, guess.level, guess.row, guess.rank};
    memcpy(g->draws + 4 * place, draw, sizeof draw);
    g->draw_confidence[place] = guess.confidence;
}

static void append(Growth *g, Growing &tree, const Guess &guess) {
    if (g->draws) {
        const int64_t known = known_child(g, tree, guess);
        note_draw(g, tree, guess, known < 0 ? tree.size : known);
        if (known >= 0) return;
    }
    const int64_t node = tree.size++, at = tree.start + node, above = tree.start + guess.node;
    tree.num_left--;
    g->tokens[at] = guess.token;
    g->parents[at] = guess.node;
    g->path_prob[at] = guess.path_prob;
    g->confidence[at] = guess.confidence;
    g->depths[at] = g->depths[above] + 1;
    if (g->sources) {
        const int64_t source[] = {guess.level, guess.row, guess.rank};
        memcpy(g->sources + 3 * at, source, sizeof source);
    }
    memcpy(g->ancestry + at * g->ancestry_columns, g->ancestry + above * g->ancestry_columns, (size_t)g->ancestry_columns);
    g->ancestry[at * g->ancestry_columns + node] = 1;
}

// Open guesses of a bin, but for its `spare` worst ones; of equal ones the first are better.
static std::vector<uint8_t> best_of(const Guess *open, int64_t num_open, int64_t bin, int64_t spare) {
    std::vector<uint8_t> is_best((size_t)num_open);
    std::vector<int64_t> places;
    for (int64_t i = 0; i < num_open; i++)
        if (open[i].bin == bin) places.push_back(i);
    const auto end = places.end() - spare;
    std::nth_element(places.begin(), end, places.end(), [&](int64_t a, int64_t b) {
        return open[a].path_prob > open[b].path_prob || (open[a].path_prob == open[b].path_prob && a < b);
    });
    for (auto place = places.begin(); place != end; place++) is_best[(size_t)*place] = 1;
    return is_best;
}

// Make nodes of the open guesses up to a bin: all, or of too many only the best ones.
static void take(Growth *g, Growing &tree, Counts &counts, int64_t bin) {
    Guess *open = g->open + tree.open_start;
    int64_t last = bin < counts.last ? bin : counts.last, spare = -tree.num_left, left = 0;
    for (int64_t k = 0; k <= last; k++) spare += counts.of[(size_t)k];
    while (last > 0 && spare >= counts.of[(size_t)last]) spare -= counts.of[(size_t)last--];
    std::vector<uint8_t> is_best;
    if (spare > 0) is_best = best_of(open, tree.num_open, last, spare);
    for (int64_t i = 0; i < tree.num_open; i++) {
        const Guess guess = open[i];
        if (guess.bin < last || (guess.bin == last && (spare <= 0 || is_best[(size_t)i])))
            append(g, tree, guess);
        else if (guess.bin <= counts.last)
            open[left++] = guess;
    }
    tree.num_open = left;
}

// Expected nodes of a subtree down to so many bins below its root, [bins], as SubtreeSize has them.
static const double *reach_of(const Growth *g, const double *by_rank, int64_t num_levels) {
    struct Known {
        std::vector<int64_t> steps;
        std::vector<double> counts, reach;  // [levels][bins]
    };
    static thread_local std::vector<Known> known;
    const size_t bins = (size_t)g->bins;
    std::vector<int64_t> steps;
    for (int64_t rank = 0; rank < g->ranks; rank++) steps.push_back(bin_of(g, by_rank[rank]));
    auto one = std::find_if(known.begin(), known.end(), [&](const Known &other) { return other.steps == steps; });
    if (one == known.end()) {
        if (known.size() >= 32) known.clear();  // probabilities drift slowly
        one = known.insert(known.end(), {steps, {}, {}});
    }
    for (size_t level = one->reach.size() / bins; level <= (size_t)num_levels; level++) {
        one->counts.resize((level + 1) * bins);
        one->reach.resize((level + 1) * bins);
        double *now = &one->counts[level * bins];
        now[0] = 1.0;
        for (const int64_t step : steps)
            if (level && step < g->bins - 1)
                for (int64_t bin = step; bin < g->bins; bin++) now[bin] += now[bin - step - g->bins];
        std::partial_sum(now, now + bins, &one->reach[level * bins]);
    }
    return &one->reach[(size_t)num_levels * bins];
}

// Finish a level: its nodes become the frontier, unless no node may be added below them.
static void advance(const Growth *g, Growing &tree) {
    tree.levels++;
    const bool goes_on = tree.num_left > 0 && tree.levels < tree.max_depth;
    tree.first = goes_on ? tree.end : tree.size, tree.end = tree.size;
    tree.width = tree.num_left < g->breadth ? tree.num_left : g->breadth;
    if (goes_on && tree.fixed) tree.width = tree.fixed[tree.levels];
}

// As TreeBatch.extend.
static void grow(Growth *g) {
    double min_gain = INFINITY, gain = 0.0;
    std::vector<Growing *> best_first;
    Counts counts(g);
    const double *by_rank = nullptr, *reach = nullptr;
    int64_t row = 0, num_levels = 0;
    for (Growing *tree = g->trees; tree < g->trees + g->count; tree++) {
        if (tree->first == tree->end) continue;
        counts.begin(*tree);
        offer(g, *tree, row, counts);
        row += tree->end - tree->first;
        const int64_t to_come = tree->max_depth - tree->levels - 1;
        if (!tree->fixed && (tree->by_rank != by_rank || to_come != num_levels))  // mostly that of the tree before
            reach = reach_of(g, by_rank = tree->by_rank, num_levels = to_come);
        take(g, *tree, counts, tree->fixed ? g->bins : counts.floor(reach));
        advance(g, *tree);
        if (tree->fixed) continue;
        best_first.push_back(tree);
        double sum = 0.0;
        for (int64_t node = tree->first; node < tree->end; node++) sum += g->path_prob[tree->start + node];
        gain += tree->by_rank[0] * sum;
        min_gain = tree->min_gain < min_gain ? tree->min_gain : min_gain;
    }
    for (Growing *tree : best_first) {
        if (min_gain > 0 && gain < min_gain) tree->first = tree->end;
        if (tree->first < tree->end || !tree->num_left) continue;
        counts.begin(*tree);
        take(g, *tree, counts, g->bins);  // what is left of the budget, from the open guesses
    }
    g->level++;
}
