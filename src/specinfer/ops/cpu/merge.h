// The union of the trees of several drafters, for each of several requests, and which of its nodes are kept.
//
// Products and sums are rounded one by one, as in tests/reference/pruning.py.

static double calibrated(const Merge *m, const double *heights, const double *slopes, int64_t rank, double confidence) {
    int64_t line = 0;
    while (line < m->middles_count && m->middles[line] < confidence) line++;
    line += (rank < m->ranks ? rank : m->ranks - 1) * (m->middles_count + 1);
    const volatile double product = slopes[line] * confidence;  // not fused with the sum
    return heights[line] + product;
}

// The union of one request's trees.
struct Union {
    const Merge *m;
    int64_t first_tree, last_tree, largest;
    std::vector<int64_t> tokens, parents, first_child, last_child, next_sibling;
    std::vector<int64_t> draw_nodes, draws;  // node in the union and number of each draw, in the order of the trees

    Union(const Merge *merge, int64_t request)
        : m(merge), first_tree(m->first_tree[request]), last_tree(m->first_tree[request + 1]), largest(first_tree) {
        for (int64_t tree = first_tree; tree < last_tree; tree++)
            if (size_of(tree) > size_of(largest)) largest = tree;
        std::vector<std::vector<int64_t>> places((size_t)(last_tree - first_tree));
        place_of(largest, places[(size_t)(largest - first_tree)]);  // its nodes keep their numbers
        for (int64_t tree = first_tree; tree < last_tree; tree++)
            if (tree != largest) place_of(tree, places[(size_t)(tree - first_tree)]);
        for (int64_t tree = first_tree; tree < last_tree; tree++)
            for (int64_t draw = m->first_draw[tree]; draw < m->first_draw[tree + 1]; draw++) {
                draw_nodes.push_back(places[(size_t)(tree - first_tree)][(size_t)m->draw_nodes[draw]]);
                draws.push_back(draw);
            }
    }

    int64_t size() const { return (int64_t)tokens.size(); }
    int64_t size_of(int64_t tree) const { return m->first_node[tree + 1] - m->first_node[tree]; }

    // Find or add the nodes of a tree.
    void place_of(int64_t tree, std::vector<int64_t> &places) {
        const int64_t first = m->first_node[tree], count = size_of(tree);
        if (tokens.empty()) add(m->tokens[first], -1);
        places.push_back(0);
        for (int64_t node = 1; node < count; node++) {
            const int64_t above = places[(size_t)m->parents[first + node]], token = m->tokens[first + node];
            int64_t child = first_child[(size_t)above];
            while (child >= 0 && tokens[(size_t)child] != token) child = next_sibling[(size_t)child];
            places.push_back(child >= 0 ? child : add(token, above));
        }
    }

    int64_t add(int64_t token, int64_t above) {
        const int64_t node = size();
        tokens.push_back(token);
        parents.push_back(above);
        for (std::vector<int64_t> *links : {&first_child, &last_child, &next_sibling}) links->push_back(-1);
        if (above >= 0) {
            int64_t &last = last_child[(size_t)above];
            (last < 0 ? first_child[(size_t)above] : next_sibling[(size_t)last]) = node;
            last = node;
        }
        return node;
    }

    // The probability that one of the drafters of each node is right about it, as if they were independent.
    void weigh(std::vector<double> &alone) const {
        std::vector<double> missed((size_t)size(), 1.0);
        std::vector<int64_t> seen((size_t)(size() * m->sources_count));  // draws of a source below a node so far
        for (size_t i = 0; i < draws.size(); i++) {
            const int64_t node = draw_nodes[i], source = m->sources[draws[i]];
            const int64_t above = parents[(size_t)node] < 0 ? 0 : parents[(size_t)node];
            const int64_t rank = seen[(size_t)(above * m->sources_count + source)]++;
            missed[(size_t)node] *=
                1.0 - calibrated(m, m->heights[source], m->slopes[source], rank, m->confidence[draws[i]]);
        }
        for (const double one : missed) alone.push_back(1.0 - one);
    }

    // The place of each node among its siblings, the most probable first; of equal ones the first.
    std::vector<int64_t> rank(const std::vector<double> &alone) const {
        std::vector<int64_t> ranks((size_t)size());
        for (size_t above = 0; above < tokens.size(); above++)
            for (int64_t one = first_child[above]; one >= 0; one = next_sibling[(size_t)one])
                for (int64_t other = next_sibling[(size_t)one]; other >= 0; other = next_sibling[(size_t)other])
                    ranks[(size_t)(alone[(size_t)other] > alone[(size_t)one] ? one : other)]++;
        return ranks;
    }

    // As many nodes as fit, the most probable paths; no node is likelier than its parent.
    std::vector<uint8_t> keep(int64_t request, const std::vector<double> &alone, const std::vector<int64_t> &ranks) const {
        std::vector<double> path_prob((size_t)size(), 1.0);
        for (size_t node = 1; node < tokens.size(); node++)
            path_prob[node] = calibrated(m, m->rival_heights[request], m->rival_slopes[request], ranks[node], alone[node]) *
                              path_prob[(size_t)parents[node]];
        std::vector<int64_t> order(tokens.size());
        std::iota(order.begin(), order.end(), 0);
        const auto end = order.begin() + std::min(m->capacities[request], size());
        std::nth_element(order.begin() + 1, end, order.end(), [&](int64_t a, int64_t b) {
            const double left = path_prob[(size_t)a], right = path_prob[(size_t)b];
            return left > right || (left == right && a < b);
        });
        std::vector<uint8_t> kept(tokens.size());
        for (auto one = order.begin(); one != end; one++)
            kept[(size_t)*one] = *one == 0 || path_prob[(size_t)*one] >= m->min_path_prob[request];
        return kept;
    }
};

// Write the tree of a request behind what is written before; returns the next free place of a draw.
static int64_t write_union(Merge *m, int64_t request, int64_t draw) {
    const Union all(m, request);
    std::vector<double> alone;
    std::vector<int64_t> ranks, places((size_t)all.size(), -1);
    std::vector<uint8_t> kept((size_t)all.size(), 1);
    if (m->capacities[request] > 0) {
        all.weigh(alone);
        ranks = all.rank(alone);
        kept = all.keep(request, alone, ranks);
    }
    int64_t node = m->result_first[request];
    const int64_t root = node;
    for (size_t i = 0; i < kept.size(); i++) {
        const int64_t above = i ? places[(size_t)all.parents[i]] : -1;
        if (!kept[i] || (i && above < 0)) continue;
        places[i] = node - root;
        m->result_tokens[node] = all.tokens[i];
        m->result_parents[node] = above;
        m->result_depths[node] = i ? m->result_depths[root + above] + 1 : 0;
        if (!ranks.empty()) m->result_ranks[node] = ranks[i], m->result_alone[node] = alone[i];
        node++;
    }
    m->result_first[request + 1] = node;
    for (size_t i = 0; i < all.draws.size(); i++) {
        if (places[(size_t)all.draw_nodes[i]] < 0) continue;
        m->result_draw_nodes[draw] = places[(size_t)all.draw_nodes[i]];
        m->result_draws[draw++] = all.draws[i];
    }
    return m->result_first_draw[request + 1] = draw;
}

static void merge(Merge *m) {
    m->result_first[0] = m->result_first_draw[0] = 0;
    int64_t draw = 0;
    for (int64_t request = 0; request < m->requests; request++) draw = write_union(m, request, draw);
}
