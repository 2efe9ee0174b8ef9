// What a core can do: products of four-bit codes, or of floats where codes are multiplied as floats, by a loop that
// loads nothing. Returns the number of multiply-adds; a result is written so that no compiler leaves the loop out.

LOCAL int64_t multiply_from_registers(int64_t steps, float *result) {
#if defined(INT_DOTS)
    constexpr int SUMS = 2 * DOT_ROWS, EACH = 64;
    Ints sums[SUMS] = {};
    const Words codes = Words{} + 0x03020100u;
    for (int64_t step = 0; step < steps; step++)
        each<SUMS>([&](auto i) ALWAYS { add_dots(sums[i], Ints{} + 0x01010101, codes); });
    each<SUMS>([&](auto i) ALWAYS { write(result, converted<Floats>(sums[i])); });
#elif defined(SHORT_DOTS)
    constexpr int SUMS = DOT_ROWS * SHORT_COUNT, EACH = 32;
    __m256i sums[SUMS] = {}, codes = _mm256_set1_epi8(3);
    for (int64_t step = 0; step < steps; step++)
        each<SUMS>([&](auto i) ALWAYS {
            asm volatile("" : "+x"(codes));  // or products are computed once
#ifdef AVX_VNNI
            sums[i] = _mm256_dpbusd_avx_epi32(sums[i], codes, _mm256_set1_epi8(1));
#else
            sums[i] = _mm256_add_epi16(sums[i], _mm256_maddubs_epi16(codes, _mm256_set1_epi8(1)));
#endif
            asm volatile("" : "+x"(sums[i]));
        });
    each<SUMS>([&](auto i) ALWAYS { write(result, sums[i]); });
#else
    constexpr int SUMS = REGISTERS / 2, EACH = REGISTER;
    Register sums[SUMS] = {};
    for (int64_t step = 0; step < steps; step++)
        each<SUMS>([&](auto i) ALWAYS { sums[i] = multiplied_and_added(Register{} + 0.5f, Register{} + 0.25f, sums[i]); });
    each<SUMS>([&](auto i) ALWAYS { write(result, sums[i]); });
#endif
    return steps * SUMS * EACH;
}
