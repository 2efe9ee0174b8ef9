// A part of a decoder layer, in place: norm, a linear layer, what lies between, and another, added to hidden states.

// hidden += what the second linear layer makes of x, normed if there is a norm; sum: see Sum; room: [rows][hidden].
static void add(const Part *part, const float *x, float *hidden, float *sum, float *room, void *rest, const Runs *runs,
                int64_t rows, int threads) {
    if (!part->post_norm) return linear(part->second, x, hidden, rest, rows, ADD, runs, threads);
    linear(part->second, x, room, rest, rows, STORE, runs, threads);
    add_normed(part, room, hidden, sum, rows, threads);
}

// y [rows][size] times the sigmoid of what the linear layer makes of x: one number for each row.
static void open_rows(const Linear *gate, const float *x, float *y, float *room, const Runs *runs, int64_t rows,
                      int64_t size, int threads) {
    linear(gate, x, room, room + rows, rows, STORE, runs, threads);
    for (int64_t t = 0; t < rows; t++) scale(y + t * size, 1.0f / (1.0f + expf(-room[t])), size);
}

static void add_part(const Part *part, const void *mixer, const Pieces *pieces, const float *cosines, const float *sines,
                     const float *inputs, float *hidden, float *room, const Runs *runs, int threads) {
    const int64_t rows = pieces->tokens, size = part->hidden;
    float *normed = room, *sum = normed + rows * size, *mixed = sum + (part->sum ? rows * size : 0);
    if (!inputs && part->norm) norm(hidden, part->norm, normed, rows, size, part->eps, threads);
    const float *x = inputs ? inputs : part->skips_norm ? hidden : normed;
    if (part->between == SELECTS)
        return add_experts(part, (const Experts *)mixer, x, hidden, sum, mixed, rows, threads);
    const bool at_once = part->between == OPENS && part->opening == IN_PANELS;
    const int64_t width = part->second->inputs;
    float *result = mixed + (at_once ? 0 : rows * part->first->stride), *rest = result + rows * width;
    linear(part->first, x, at_once ? result : mixed, rest, rows, part->ending, runs, threads);
    mix(part, mixer, pieces, cosines, sines, mixed, result, rest, threads);
    if (part->gate) open_rows(part->gate, x, result, rest, runs, rows, width, threads);
    add(part, result, hidden, sum, normed, rest, runs, rows, threads);
}

// mixer: Attention, Recurrent, Experts or null; hidden: [tokens][hidden]; inputs: [tokens][of the first layer] what it
// reads in place of hidden's norm, or null, and may be hidden; room: what `layer_part.py` counts, of which the first
// part is what the part before it has read, and the second the sum that this part and the one before it make; runs: rows
// with adapters, or null.
static void decode(const Part *part, const void *mixer, const Pieces *pieces, const float *cosines, const float *sines,
                   const float *inputs, float *hidden, float *room, const Runs *runs, int threads) {
    const int64_t size = part->hidden;
    add_part(part, mixer, pieces, cosines, sines, inputs, hidden, room, runs, threads);
    if (part->hidden_factor != 1.0f)
        in_parallel(pieces->tokens, FEW, threads, [&](int64_t t) { scale(hidden + t * size, part->hidden_factor, size); });
}
