// Products by instructions that multiply and add several neighbouring numbers at once: pairs of bf16, four or two bytes.

#ifdef DOTS
struct DotBf16 {
    template <int ROWS>
    static void run(Ready ready, const uint8_t *panel, const uint8_t *, int64_t depth, float *result) {
        __m512 low[ROWS], high[ROWS];
        each<ROWS>([&](auto r) ALWAYS {
            low[r] = _mm512_loadu_ps(result + r * WIDTH);
            high[r] = _mm512_loadu_ps(result + r * WIDTH + LANES);
        });
        for (int64_t k = 0; k < depth / 2; k++, panel += 128) {
            fetch_ahead(ready);
            const __m512bh a = (__m512bh)_mm512_loadu_si512(panel), b = (__m512bh)_mm512_loadu_si512(panel + 64);
            each<ROWS>([&](auto r) ALWAYS {
                const __m512bh x = (__m512bh)_mm512_set1_epi32(ready.x[k * ROWS + r]);
                low[r] = _mm512_dpbf16_ps(low[r], x, a);
                high[r] = _mm512_dpbf16_ps(high[r], x, b);
            });
        }
        each<ROWS>([&](auto r) ALWAYS {
            _mm512_storeu_ps(result + r * WIDTH, low[r]);
            _mm512_storeu_ps(result + r * WIDTH + LANES, high[r]);
        });
    }
};
#endif

#ifdef DOTS
// bf16 of e4m3 in the upper byte of each half word: the exponent is put right by a sum. Subnormals are looked up.
static INLINE __m512bh widened_pairs(__m512i words) {
    const __m512i table = _mm512_broadcast_i32x4(_mm_setr_epi16(0, 0x3b00, 0x3b80, 0x3bc0, 0x3c00, 0x3c20, 0x3c40, 0x3c60));
    const __mmask32 is_subnormal = _mm512_testn_epi16_mask(words, _mm512_set1_epi16(0x7800));
    __m512i found = _mm512_and_si512(_mm512_srli_epi16(words, 4), _mm512_set1_epi16(0x07f0));
    found = _mm512_add_epi16(found, _mm512_set1_epi16(0x3c00));
    found = _mm512_mask_permutexvar_epi16(found, is_subnormal, _mm512_srli_epi16(words, 8), table);
    return (__m512bh)_mm512_ternarylogic_epi32(found, words, _mm512_set1_epi16((short)0x8000), 0xf8);  // a | (b & c)
}

struct DotFp8 {
    template <int ROWS>
    static void run(Ready ready, const uint8_t *panel, const uint8_t *scales, int64_t depth, float *result) {
        const uint32_t *x = ready.x;
        for (int64_t left = depth / 128; left; left--, scales += 4 * WIDTH) {
            __m512 low[ROWS], high[ROWS];
            each<ROWS>([&](auto r) ALWAYS { low[r] = high[r] = _mm512_setzero_ps(); });
            for (int64_t k = 0; k < 128; k += 4, panel += 128) {
                fetch_ahead(ready);
                const __m512i a = _mm512_loadu_si512(panel), b = _mm512_loadu_si512(panel + 64);
#pragma GCC unroll 2
                for (int odd = 0; odd < 2; odd++, x += ROWS) {
                    const __m512bh first = widened_pairs(odd ? a : _mm512_slli_epi16(a, 8));
                    const __m512bh second = widened_pairs(odd ? b : _mm512_slli_epi16(b, 8));
                    each<ROWS>([&](auto r) ALWAYS {
                        const __m512bh value = (__m512bh)_mm512_set1_epi32(x[r]);
                        low[r] = _mm512_dpbf16_ps(low[r], value, first);
                        high[r] = _mm512_dpbf16_ps(high[r], value, second);
                    });
                }
            }
            add_whole<ROWS>(scales, (const Floats *)low, (const Floats *)high, result);
        }
    }
};
#endif

#ifdef INT_DOTS
// Adds to each sum the products of four signed bytes of `values` with four unsigned bytes of `codes`.
static INLINE void add_dots(Ints &sums, Ints values, Words codes) {
#if defined(__x86_64__)
    // Not spelled out: GCC keeps the sums of many rows in memory, then.
    sums = (Ints)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)codes, (__m512i)values);
#else
    for (int i = 0; i < 4; i++) {
        const int32x4_t quarter = read<int32x4_t>((const char *)&sums + 16 * i);
        const int8x16_t x = read<int8x16_t>((const char *)&values + 16 * i);
#ifdef SIGNED_CODES
        write((char *)&sums + 16 * i, vdotq_s32(quarter, x, read<int8x16_t>((const char *)&codes + 16 * i)));
#else
        write((char *)&sums + 16 * i, vusdotq_s32(quarter, read<uint8x16_t>((const char *)&codes + 16 * i), x));
#endif
    }
#endif
}

// The levels of 64 codes below 16.
static INLINE Words levels_of(const uint8_t *levels, Words codes) {
#if defined(__x86_64__)
    const __m512i table = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)levels));
    return (Words)_mm512_shuffle_epi8(table, (__m512i)codes);
#else
    const uint8x16_t table = read<uint8x16_t>(levels);
    for (int i = 0; i < 4; i++) {
        char *place = (char *)&codes + 16 * i;
        write(place, vqtbl1q_u8(table, read<uint8x16_t>(place)));
    }
    return codes;
#endif
}

template <int BITS, int GROUP, bool HAS_LEVELS = false>
struct DotInt {
#ifdef SIGNED_CODES
    static const bool IS_SHIFTED = BITS == 8 || HAS_LEVELS;  // with their upper bit turned they are signed: zero is 0
#else
    static const bool IS_SHIFTED = false;
#endif
    template <int ROWS>
    static void run(Ready ready, const uint8_t *panel, const uint8_t *scales, int64_t depth, float *result) {
        const uint32_t mask = BITS == 8 ? 0xffffffffu : 0x0f0f0f0fu, turned = IS_SHIFTED ? 0x80808080u : 0;
        // Where sums should start at another zero than that of the codes, they lack 128 or a zero point of each x.
        const int32_t zero_sums = IS_SHIFTED == is_affine(ready.scaling) ? (IS_SHIFTED ? 128 : 1) : 0;
        const uint32_t *x = ready.x;
        for (int64_t g = 0; g < depth / GROUP; g++) {
            Ints low[ROWS], high[ROWS];
            each<ROWS>([&](auto r) ALWAYS {
                low[r] = high[r] = Ints{} + zero_sums * ready.zeros[g * ROWS + r];
            });
            UpperBits<BITS> upper;
            upper.load(ready, panel);
            for (int64_t k = 0; k < GROUP; k += BITS == 8 ? 4 : 8, panel += 128) {
                fetch_ahead(ready);
                const Words a = read<Words>(panel), b = read<Words>(panel + 64);
#pragma GCC unroll 2
                for (int half = 0; half < (BITS == 8 ? 1 : 2); half++, x += ROWS) {
                    Words c = a >> half * 4 & mask, d = b >> half * 4 & mask;
                    upper.put(c, d);
                    if (HAS_LEVELS) {
                        c = levels_of(ready.levels, c);
                        d = levels_of(ready.levels, d);
                    }
                    c ^= turned;
                    d ^= turned;
                    each<ROWS>([&](auto r) ALWAYS {
                        const Ints value = Ints{} + (int32_t)x[r];
                        add_dots(low[r], value, c);
                        add_dots(high[r], value, d);
                    });
                }
            }
            __builtin_prefetch(scales + scale_bytes(ready.scaling, GROUP, NEST) * g / (NEST / GROUP) + 1024);
            asm volatile("" ::: "memory");  // the sums so far stay in memory: registers are for this group's
            add_scaled<ROWS>(ready, scales_of(scales, ready.scaling, g, GROUP), g, low, high, result);
        }
    }
};
#endif

#ifdef SHORT_DOTS
// The same where instructions add products of bytes to 16 bits: as many as there is room for, before they are widened.
template <int BITS, int GROUP, bool HAS_LEVELS = false>
struct DotInt {
    static const bool IS_BYTE = BITS == 8 || HAS_LEVELS;
    static const int STEPS = GROUP / 4, IN_ROOM = IS_BYTE ? 1 : BITS == 6 ? 2 : BITS == 5 ? 4 : 8;

    // Spelled out: compilers would load them all before the first is needed.
    static INLINE __m256i spread(const uint32_t *x) {
        __m256i result;
        asm volatile("vpbroadcastd %1, %0" : "=x"(result) : "m"(*x));
        return result;
    }

    // The codes of step `i` of a group, and of the 8 columns at `place`, as bytes.
    static INLINE __m256i codes_at(const uint8_t *place, int i, __m256i levels) {
        const auto load = [&](int64_t line) ALWAYS { return _mm256_loadu_si256((const __m256i *)(place + line * 128)); };
        if (BITS == 8) return load(i);
        const __m256i both = load((UpperBits<BITS>::ANY ? 1 : 0) + i / 2);
        __m256i codes = _mm256_and_si256(i % 2 ? _mm256_srli_epi16(both, 4) : both, _mm256_set1_epi8(15));
        if (UpperBits<BITS>::ANY) {
            const __m256i mask = _mm256_set1_epi8((char)(UpperBits<BITS>::MASK & 0xff));
            const __m256i upper = _mm256_and_si256(_mm256_srli_epi32(load(0), i * (BITS - 4)), mask);
            codes = _mm256_or_si256(codes, _mm256_slli_epi16(upper, 4));
        }
        return HAS_LEVELS ? _mm256_shuffle_epi8(levels, codes) : codes;
    }

    // sums [ROWS][COUNT] of a group += its products with the columns of COUNT registers at `place`.
    template <int ROWS, int COUNT>
    static INLINE void add_group(const uint32_t *x, const uint8_t *place, __m256i levels, __m256i *sums) {
        each<STEPS / IN_ROOM>([&](auto part) ALWAYS {
            __m256i some[ROWS * COUNT];
            each<IN_ROOM>([&](auto i) ALWAYS {
                constexpr int step = part * IN_ROOM + i;
                __m256i codes[COUNT], sizes[COUNT];
                each<COUNT>([&](auto j) ALWAYS {
                    sizes[j] = codes[j] = codes_at(place + j * 32, step, levels);
                    if (!IS_BYTE) return;
                    codes[j] = _mm256_xor_si256(codes[j], _mm256_set1_epi8((char)0x80));  // signed now
                    sizes[j] = _mm256_abs_epi8(codes[j]);
                });
                each<ROWS>([&](auto r) ALWAYS {
                    const __m256i value = spread(x + step * ROWS + r);
                    each<COUNT>([&](auto j) ALWAYS {
                        __m256i &sum = some[r * COUNT + j];
                        const __m256i turned = IS_BYTE ? _mm256_sign_epi8(value, codes[j]) : value;
                        const __m256i products = _mm256_maddubs_epi16(sizes[j], turned);
                        sum = i == 0 ? products : _mm256_add_epi16(sum, products);
                        asm("" : "+x"(sum));  // in this order, or registers run out
                    });
                });
            });
            each<ROWS * COUNT>([&](auto i) ALWAYS {
                sums[i] = _mm256_add_epi32(sums[i], _mm256_madd_epi16(some[i], _mm256_set1_epi16(1)));
            });
        });
    }

    template <int ROWS>
    static void run(Ready ready, const uint8_t *panel, const uint8_t *scales, int64_t depth, float *result) {
        constexpr int COUNT = ROWS <= 3 ? 2 : 1;
        const int64_t bytes = GROUP * WIDTH * BITS / 8;
        const bool affine = is_affine(ready.scaling);
        const __m128i own = HAS_LEVELS ? _mm_loadu_si128((const __m128i *)ready.levels) : _mm_setzero_si128();
        const __m256i levels = _mm256_broadcastsi128_si256(own);
        // Of bytes, which are signed here, 128 is zero: sums that should start at another zero lack 128 of each x.
        const int32_t zero_sums = IS_BYTE == affine ? (IS_BYTE ? 128 : 1) : 0;
        const uint32_t *x = ready.x;
        for (int64_t g = 0; g < depth / GROUP; g++, panel += bytes, x += STEPS * ROWS) {
            for (int64_t i = 0; i < bytes; i += 128) fetch_ahead(ready);
            Ints low[ROWS], high[ROWS];
            each<WIDTH / REGISTER / COUNT>([&](auto turn) ALWAYS {
                __m256i sums[ROWS * COUNT];
                each<ROWS * COUNT>([&](auto i) ALWAYS {
                    sums[i] = _mm256_set1_epi32(zero_sums * ready.zeros[g * ROWS + i / COUNT]);
                });
                add_group<ROWS, COUNT>(x, panel + turn * COUNT * 32, levels, sums);
                each<ROWS * COUNT>([&](auto i) ALWAYS {
                    constexpr int number = turn * COUNT + i % COUNT;
                    (number < 2 ? low : high)[i / COUNT].part[number % 2] = (Ints::Part)sums[i];
                });
            });
            add_scaled<ROWS>(ready, scales_of(scales, ready.scaling, g, GROUP), g, low, high, result);
        }
    }
};
#endif
