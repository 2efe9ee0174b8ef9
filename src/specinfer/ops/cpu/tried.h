// How often drafted tokens of verified trees were tried and accepted, by source, rank and confidence.

static void count_tree(const Tried *t, const TriedTree &tree) {
    std::vector<uint8_t> is_reached((size_t)tree.size);
    std::vector<int64_t> seen((size_t)(tree.ranks ? 0 : tree.size * t->num_sources));  // tokens of a source at a node
    is_reached[0] = 1;
    for (int64_t i = 0; i < tree.path_size; i++) is_reached[(size_t)t->paths[tree.path + i]] = 1;
    const int64_t buckets = t->num_edges + 1, cells = t->ranks * buckets;
    for (int64_t i = tree.nodes ? 0 : 1; i < tree.count; i++) {
        const int64_t node = tree.nodes ? tree.nodes[i] : i, above = tree.parents[node];
        if (above < 0 || !is_reached[(size_t)above]) continue;
        const int64_t source = t->sources[tree.names + (tree.makers ? tree.makers[i] : 0)];
        int64_t rank = tree.ranks ? tree.ranks[i] : seen[(size_t)(above * t->num_sources + source)]++, bucket = 0;
        for (int64_t k = 0; k < t->num_edges; k++) bucket += t->edges[k] < tree.confidence[i];
        rank = rank < t->ranks ? rank : t->ranks - 1;
        double *counts = t->counts + 2 * source * cells + rank * buckets + bucket;
        counts[0] += 1.0;
        if (is_reached[(size_t)node]) counts[cells] += 1.0;
    }
}

static void count_tried(const Tried *t) {
    for (int64_t i = 0; i < t->trees; i++) count_tree(t, t->of[i]);
}
