// A decoder layer of Llama's shape in one call, in place.

// hidden: [tokens][hidden]; room: what `decoder.py` counts, for each token.
static void decode(const Layer *layer, const Attention *attention, const Pieces *pieces, const float *cosines,
                   const float *sines, float *hidden, float *room, int threads) {
    const int64_t rows = pieces->tokens, size = layer->hidden;
    float *normed = room, *qkv = normed + rows * size, *attended = qkv + rows * layer->qkv->outputs;
    float *opened = attended + rows * layer->output->inputs, *rest = opened + rows * layer->down->inputs;
    norm(hidden, layer->attention_norm, normed, rows, size, layer->eps, threads);
    linear(layer->qkv, normed, qkv, rest, rows, STORE, threads);
    rotate(attention, pieces, cosines, sines, qkv, threads);
    attend(attention, pieces, qkv, layer->qkv->outputs, attended, threads);
    linear(layer->output, attended, hidden, rest, rows, ADD, threads);
    norm(hidden, layer->mlp_norm, normed, rows, size, layer->eps, threads);
    linear(layer->gated, normed, opened, rest, rows, GATED, threads);
    linear(layer->down, opened, hidden, rest, rows, ADD, threads);
}
