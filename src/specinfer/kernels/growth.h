// One level of the growth of several trees: the guesses below their frontiers, and which of them become nodes.
//
// The steps are those of expansion.py, to the bit: products and sums are rounded one by one.

#include <algorithm>
#include <vector>

static int64_t bin_of(const Growth *g, double path_prob) {  // how many of the falling edges it does not exceed
    int64_t low = 0, high = g->edges_count;
    while (low < high) {
        const int64_t middle = (low + high) / 2;
        (path_prob <= g->edges[middle] ? low : high) = path_prob <= g->edges[middle] ? middle + 1 : middle;
    }
    return low;
}

// As Calibration.acceptance_prob; 1 in a fixed expansion.
static double acceptance_prob(const Growth *g, int64_t tree, int64_t rank, double confidence) {
    if (!g->heights[tree]) return 1.0;
    int64_t line = 0;
    while (line < g->middles_count && g->middles[line] < confidence) line++;
    line += (rank < g->ranks ? rank : g->ranks - 1) * (g->middles_count + 1);
    const volatile double product = g->slopes[tree][line] * confidence;  // not fused with the sum
    return g->heights[tree][line] + product;
}

// Add the guesses that could be taken. Rows of the candidates are the nodes of the frontiers, tree by tree.
static void offer(Growth *g) {
    int64_t row = 0;
    for (int64_t tree = 0; tree < g->trees; tree++) {
        const int64_t width = g->widths[tree] < g->columns ? g->widths[tree] : g->columns;
        for (int64_t node = g->frontiers[2 * tree]; node < g->frontiers[2 * tree + 1]; node++, row++) {
            const double above = g->path_prob[g->starts[tree] + node];
            double least = INFINITY;
            for (int64_t rank = 0; rank < width; rank++) {
                const float confidence = g->confidence[row * g->columns + rank];
                const double prob = acceptance_prob(g, tree, rank, confidence), path_prob = (least = prob < least ? prob : least) * above;
                const int64_t token = g->candidates[row * g->columns + rank];
                if (token < 0 || !(path_prob >= g->min_path_prob[tree])) continue;
                const int64_t number = g->size++;
                g->guess_tree[number] = tree;
                g->guess_node[number] = node;
                g->guess_token[number] = token;
                g->guess_level[number] = g->level;
                g->guess_row[number] = row;
                g->guess_rank[number] = rank;
                g->guess_bin[number] = bin_of(g, path_prob);
                g->guess_confidence[number] = confidence;
                g->guess_path_prob[number] = path_prob;
                g->open[g->num_open++] = number;
            }
        }
    }
}

// The last bin of a tree up to which everything present and expected fits; `counts` of its open guesses by bin.
static int64_t floor_of(const Growth *g, int64_t tree, const int64_t *counts) {
    std::vector<double> expected((size_t)g->bins);  // whole numbers: exact in any order
    for (int64_t bin = 0; bin < g->bins; bin++)
        if (counts[bin])
            for (int64_t floor = bin; floor < g->bins; floor++)  // above it nothing is
                expected[(size_t)floor] += (double)counts[bin] * g->tables[tree][floor - bin];
    int64_t fitting = -1, first = 0;
    while (fitting + 1 < g->bins && expected[(size_t)fitting + 1] <= (double)g->num_left[tree]) fitting++;  // they rise
    while (first < g->bins && !counts[first]) first++;
    if (first == g->bins) first = 0;
    return fitting > first ? fitting : first;
}

struct Place {  // of a wanted guess among the open ones
    double path_prob;
    int64_t place;
};

// Leave of the wanted guesses of a tree as many as fit, the best ones; of equal ones the first.
static void keep_best(std::vector<Place> &places, int64_t num_left, std::vector<uint8_t> &wanted) {
    if ((int64_t)places.size() <= num_left) return;
    const auto end = places.begin() + num_left;
    std::nth_element(places.begin(), end, places.end(), [](const Place &a, const Place &b) {
        return a.path_prob > b.path_prob || (a.path_prob == b.path_prob && a.place < b.place);
    });
    for (auto one = end; one != places.end(); one++) wanted[(size_t)one->place] = 0;
}

// Which of the open guesses are above the floor of their tree, and fit.
static std::vector<uint8_t> select(const Growth *g) {
    std::vector<int64_t> counts((size_t)(g->trees * g->bins)), last((size_t)g->trees);
    for (int64_t i = 0; i < g->num_open; i++)
        counts[(size_t)(g->guess_tree[g->open[i]] * g->bins + g->guess_bin[g->open[i]])]++;
    for (int64_t tree = 0; tree < g->trees; tree++)
        last[(size_t)tree] = g->tables[tree] ? floor_of(g, tree, &counts[(size_t)(tree * g->bins)]) : g->last_bins[tree];
    std::vector<uint8_t> wanted((size_t)g->num_open);
    std::vector<std::vector<Place>> places((size_t)g->trees);
    for (int64_t i = 0; i < g->num_open; i++) {
        const int64_t number = g->open[i], tree = g->guess_tree[number];
        if (g->guess_bin[number] > last[(size_t)tree]) continue;
        wanted[(size_t)i] = 1;
        places[(size_t)tree].push_back({g->guess_path_prob[number], i});
    }
    for (int64_t tree = 0; tree < g->trees; tree++) keep_best(places[(size_t)tree], g->num_left[tree], wanted);
    return wanted;
}

static void append(Growth *g, int64_t number) {
    const int64_t tree = g->guess_tree[number], start = g->starts[tree], node = g->sizes[tree]++;
    const int64_t at = start + node, above = start + g->guess_node[number];
    g->num_left[tree]--;
    g->guess_child[number] = node;
    g->tokens[at] = g->guess_token[number];
    g->parents[at] = g->guess_node[number];
    g->path_prob[at] = g->guess_path_prob[number];
    g->depths[at] = g->depths[above] + 1;
    memcpy(g->ancestry + at * g->ancestry_columns, g->ancestry + above * g->ancestry_columns, (size_t)g->ancestry_columns);
    g->ancestry[at * g->ancestry_columns + node] = 1;
}

static void grow(Growth *g) {
    offer(g);
    const std::vector<uint8_t> wanted = select(g);
    std::vector<int64_t> ends((size_t)g->trees + 1);  // of each tree's guesses among those taken
    for (int64_t i = 0; i < g->num_open; i++)
        if (wanted[(size_t)i]) ends[(size_t)g->guess_tree[g->open[i]] + 1]++;
    for (size_t tree = 0; tree < (size_t)g->trees; tree++) ends[tree + 1] += ends[tree];
    g->num_taken = ends.back();
    int64_t left = 0;
    for (int64_t i = 0; i < g->num_open; i++) {
        const int64_t number = g->open[i];
        if (wanted[(size_t)i])
            g->taken[ends[(size_t)g->guess_tree[number]]++] = number;
        else
            g->open[left++] = number;
    }
    g->num_open = left;
    for (int64_t i = 0; i < g->num_taken; i++) append(g, g->taken[i]);
}
