// A decoder layer in one call, in place: Llama's shape, with norms of what is added where there are any.

// hidden += what the linear layer makes of x, normed if there is a norm; room: [rows][hidden].
static void add(const Linear *layer, const float *post_norm, const float *x, float *hidden, float *room, void *rest,
                const Runs *runs, int64_t rows, float eps, int threads) {
    if (!post_norm) return linear(layer, x, hidden, rest, rows, ADD, runs, threads);
    linear(layer, x, room, rest, rows, STORE, runs, threads);
    norm<true>(room, post_norm, hidden, rows, layer->outputs, eps, threads);
}

// mixer: Attention or Recurrent; hidden: [tokens][hidden]; inputs: [tokens][of the first layer] what it reads in place
// of hidden's norm, or null, and may be hidden; room: what `decoder.py` counts; runs: rows with adapters, or null.
static void decode(const Layer *layer, const void *mixer, const Pieces *pieces, const float *cosines,
                   const float *sines, const float *inputs, float *hidden, float *room, const Runs *runs,
                   int threads) {
    const int64_t rows = pieces->tokens, size = layer->hidden;
    float *normed = room, *mixed = normed + rows * size, *attended = mixed + rows * layer->mixed->stride;
    float *opened = attended + rows * layer->output->inputs, *rest = opened + rows * layer->down->inputs;
    if (!inputs) norm(hidden, layer->attention_norm, normed, rows, size, layer->eps, threads);
    linear(layer->mixed, inputs ? inputs : normed, mixed, rest, rows, STORE, runs, threads);
    mix(layer, mixer, pieces, cosines, sines, mixed, attended, rest, threads);
    add(layer->output, layer->attention_post_norm, attended, hidden, normed, rest, runs, rows, layer->eps, threads);
    norm(hidden, layer->mlp_norm, normed, rows, size, layer->eps, threads);
    linear(layer->gated, normed, opened, rest, rows, layer->gate, runs, threads);
    add(layer->down, layer->mlp_post_norm, opened, hidden, normed, rest, runs, rows, layer->eps, threads);
}
