// What each layer reads of a token beside its hidden states: rows of a table, and a projection of its embedding.

// Rows of an embedding [count][size], times a scale: of panels, or of `rows` [vocab][size].
static void embed(const Linear *panels, const void *rows, int type, float scale, const int64_t *ids, float *result,
                  int64_t count, int64_t size, int threads) {
    if (panels)
        unpack_rows(panels, ids, result, count, threads);
    else
        in_parallel(count, 16, threads, [&](int64_t i) {
            const float *whole = (const float *)rows + ids[i] * size;
            const uint16_t *half = (const uint16_t *)rows + ids[i] * size;
            for (int64_t k = 0; k < size; k++)
                result[i * size + k] = type == FP32 ? whole[k] : type == BF16 ? from_bf16(half[k]) : from_fp16(half[k]);
        });
    if (scale != 1.0f)
        for (int64_t k = 0; k < count * size; k++) result[k] *= scale;
}

static void layer_inputs(const LayerInputs *one, const int64_t *ids, const float *hidden, float *result, float *room,
                         int64_t rows, int threads) {
    const int64_t size = one->layers * one->size;
    embed(one->embedding, one->rows, one->type, one->scale, ids, result, rows, size, threads);
    native->linear(one->projection, hidden, room, room + rows * size, rows, STORE, nullptr, threads);
    native->norm(room, one->norm, room, rows * one->layers, one->size, one->eps, threads);
    for (int64_t k = 0; k < rows * size; k++) result[k] += room[k];
}
