// What lies between the linear layers of a part of a decoder layer: attention, a convolution and a recurrence, or gates.

enum Activation { PLAIN, SIGMOID, SILU, GELU };

// y *= gates after activation.
template <Activation KIND>
static void open(float *y, const float *gates, int64_t size) {
    for (int64_t k = 0; k < size; k += LANES) {
        const int64_t count = size - k < LANES ? size - k : LANES;
        const Floats gate = numbers_at(gates, FP32, k, count), value = numbers_at(y, FP32, k, count);
        const Floats opened = value * (KIND == SILU      ? silu(gate)
                                       : KIND == GELU    ? gelu(gate)
                                       : KIND == SIGMOID ? 1.0f / (1.0f + exponential(-gate))
                                                         : gate);
        memcpy(y + k, &opened, count * sizeof(float));
    }
}

// y [size]: what becomes of a row of the first linear layer of an MLP; values: what gates alone open.
static void open_row(int opening, const float *row, float *y, int64_t size, const float *values = nullptr) {
    if (opening == SQUARES) {
        for (int64_t k = 0; k < size; k++) y[k] = row[k] > 0 ? row[k] * row[k] : 0;
        return;
    }
    memcpy(y, values ? values : row + size, size * sizeof(float));
    (opening == SILU_HALVES || opening == SILU_OF_INPUTS ? open<SILU> : open<GELU>)(y, row, size);
}

static void scale(float *y, float factor, int64_t size) {
    for (int64_t k = 0; k < size; k++) y[k] *= factor;
}

// A token's row: from each head's queries and gates [2][dim] before keys and values to all queries, these, all gates.
static void move_gates_last(const Attention *layer, float *row) {
    const int64_t dim = layer->dim, size = layer->heads * dim, rest = 2 * layer->kv_heads * dim;
    static thread_local Grown<float> room;
    float *gates = room.hold(size);
    for (int64_t h = 0; h < layer->heads; h++) {
        memcpy(gates + h * dim, row + (2 * h + 1) * dim, dim * sizeof(float));
        memmove(row + h * dim, row + 2 * h * dim, dim * sizeof(float));
    }
    memmove(row + size, row + 2 * size, rest * sizeof(float));
    memcpy(row + size + rest, gates, size * sizeof(float));
}

static void mix_by_attention(const Attention *layer, const Pieces *pieces, const float *cosines, const float *sines,
                             float *rows, int64_t stride, float *result, int threads) {
    const int64_t size = layer->heads * layer->dim, gates = size + 2 * layer->kv_heads * layer->dim;
    if (layer->is_gated)
        in_parallel(pieces->tokens, FEW, threads, [&](int64_t t) { move_gates_last(layer, rows + t * stride); });
    rotate(layer, pieces, cosines, sines, rows, stride, threads);
    attend(layer, pieces, rows, stride, result, threads);
    if (layer->is_gated)
        in_parallel(pieces->tokens, FEW, threads,
                    [&](int64_t t) { open<SIGMOID>(result + t * size, rows + t * stride + gates, size); });
}

static void reorder(const int64_t *order, float *row, int64_t size) {
    static thread_local Grown<float> room;
    float *before = room.hold(size);
    memcpy(before, row, size * sizeof(float));
    for (int64_t k = 0; k < size; k++) row[k] = before[order[k]];
}

static INLINE void store_all(const void *pool, int type, int64_t slot, const float *values, int64_t size) {
    for (int64_t i = 0; i < size; i++) store((void *)pool, type, slot * size + i, values[i]);
}

// room: [tokens of the scan][channels, then heads * rates_of].
static void mix_by_recurrence(const Recurrent *layer, const Pieces *pieces, float *rows, int64_t stride,
                              float *result, float *room, int threads) {
    const Convolution *convolution = &layer->convolution;
    const Recurrence *recurrence = &layer->recurrence;
    const Scan *scan = pieces->scan;
    const int64_t channels = convolution->channels, type = convolution->type;
    const int64_t size = recurrence->heads ? recurrence->heads * recurrence->value_dim : channels;
    in_parallel(pieces->tokens, FEW, threads, [&](int64_t t) {
        float *row = rows + t * stride, *inputs = row + layer->inputs;
        if (layer->order) reorder(layer->order, row, stride);
        if (layer->factors >= 0) open<PLAIN>(inputs, row + layer->factors, channels);
        store_all(convolution->inputs, type, pieces->new_slots[t], inputs, channels);
        store_all(recurrence->stored, type, pieces->new_slots[t], row + layer->steps, layer->num_steps);
    });
    convolve(convolution, pieces->paths, recurrence->heads ? room : result, scan->tokens, threads);
    if (recurrence->heads) recur(recurrence, scan, room, room + scan->tokens * channels, result, threads);
    const auto opens = layer->activates ? open<SILU> : open<PLAIN>;
    in_parallel(pieces->tokens, FEW, threads, [&](int64_t t) {
        float *y = result + t * size;
        const float *gates = rows + t * stride + layer->gates;
        if (layer->opens_first) opens(y, gates, size);
        for (int64_t g = 0; layer->norm && g < size; g += layer->group)
            norm_row(y + g, layer->norm + g, y + g, layer->group, layer->eps);
        if (!layer->opens_first) opens(y, gates, size);
    });
}

// rows: [tokens][of the first linear layer], changed in place; result: [tokens][inputs of the second].
static void mix(const Part *part, const void *mixer, const Pieces *pieces, const float *cosines, const float *sines,
                float *rows, float *result, float *room, int threads) {
    const int64_t stride = part->first->stride, size = part->second->inputs, tokens = pieces->tokens;
    if (part->scales)
        in_parallel(tokens, FEW, threads, [&](int64_t t) { open<PLAIN>(rows + t * stride, part->scales, stride); });
    if (part->between == RECURS)
        mix_by_recurrence((const Recurrent *)mixer, pieces, rows, stride, result, room, threads);
    else if (part->between == ATTENDS)
        mix_by_attention((const Attention *)mixer, pieces, cosines, sines, rows, stride, result, threads);
    else if (part->opening != IN_PANELS)
        in_parallel(tokens, FEW, threads, [&](int64_t t) {
            const bool of_inputs = part->opening == SILU_OF_INPUTS || part->opening == GELU_OF_INPUTS;
            const float *values = of_inputs ? pieces->layer_inputs + t * pieces->layer_stride + part->column : nullptr;
            open_row(part->opening, rows + t * stride, result + t * size, size, values);
        });
    if (part->factor != 1.0f) scale(result, part->factor, tokens * size);
}
