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

#endif

#if defined(INT_DOTS) || defined(SHORT_DOTS)
// Products of codes with rounded activations. The sums of a group are whole numbers, exact in any order.
//
// A block's rows are multiplied DOT_ROWS at a time with 256 k's of a panel, which the nearest cache holds for the next
// ones. Their sums of a group stay in registers; where there are enough, so do those of all groups.
template <int BITS, int GROUP, bool HAS_LEVELS = false>
struct DotInt {
    static const bool IS_BYTE = BITS == 8 || HAS_LEVELS;
    static const int STEPS = GROUP / 4, LINE = 4 * WIDTH;  // LINE: bytes of a step, or of two that share bytes
    static const int64_t BYTES = GROUP * WIDTH * BITS / 8;
    // Where the upper bit of codes is turned, they are signed: their zero is 0.
#if (defined(INT_DOTS) || defined(AVX_VNNI)) && !defined(SIGNED_CODES)
    static const bool IS_SIGNED = false;
#else
    static const bool IS_SIGNED = IS_BYTE;
#endif

    struct Inputs {  // of some rows and k's
        const uint8_t *panel;
        const uint32_t *x;      // [groups][stride][STEPS]
        const float *scales;    // [groups][stride]
        const int32_t *zeros;   // [groups][stride] as in Ready
        int64_t stride, groups;
        const GroupScales *columns;  // [groups]
        const uint8_t *levels;
    };

    // Whether sums should start at another zero than that of the codes: they lack 128 or the zero point of each x.
    static constexpr bool starts_at_zero(bool affine) { return IS_SIGNED != affine; }

    template <bool AFFINE>
    static INLINE int32_t first_sum(const Inputs &inputs, int64_t place) {
        if (starts_at_zero(AFFINE)) return 0;
        return AFFINE ? 128 * (int32_t)read<float>(inputs.zeros + place) : inputs.zeros[place];
    }

    // result += sums of a group times its scales; all are of some columns.
    template <bool AFFINE, class Vector, class Sum>
    static INLINE Vector scaled(const Inputs &inputs, int64_t place, Sum sum, Vector own, Vector added, Vector result) {
        const Vector scale = Vector{} + inputs.scales[place], numbers = converted<Vector>(sum);
        if (!AFFINE) return multiplied_and_added(numbers, own * scale, result);
        const Vector x = Vector{} + read<float>(inputs.zeros + place);
        return multiplied_and_added(multiplied_and_added(numbers, own, added * x), scale, result);
    }

#ifdef INT_DOTS
    template <int ROWS, bool AFFINE>
    static INLINE void add_products(const Inputs &inputs, Ready *ready, float *result) {
        const uint32_t mask = BITS == 8 ? 0xffffffffu : 0x0f0f0f0fu, turned = IS_SIGNED ? 0x80808080u : 0;
        const uint8_t *panel = inputs.panel;
        Sums<ROWS> total;
        if (WIDE_REGISTERS) total.load(result);
        for (int64_t g = 0; g < inputs.groups; g++) {
            Ints low[ROWS], high[ROWS];
            each<ROWS>([&](auto r) ALWAYS {
                low[r] = high[r] = Ints{} + first_sum<AFFINE>(inputs, g * inputs.stride + r);
            });
            UpperBits<BITS> upper;
            upper.load(panel);
            const uint32_t *x = inputs.x + g * inputs.stride * STEPS;
            for (int64_t k = 0; k < GROUP; k += BITS == 8 ? 4 : 8, panel += LINE) {
                if (ready) fetch_ahead(*ready);
                const Words a = read<Words>(panel), b = read<Words>(panel + 64);
#pragma GCC unroll 2
                for (int half = 0; half < (BITS == 8 ? 1 : 2); half++, x++) {
                    Words c = a >> half * 4 & mask, d = b >> half * 4 & mask;
                    upper.put(c, d);
                    if (HAS_LEVELS) {
                        c = levels_of(inputs.levels, c);
                        d = levels_of(inputs.levels, d);
                    }
                    c ^= turned;
                    d ^= turned;
                    each<ROWS>([&](auto r) ALWAYS {
                        const Ints value = Ints{} + (int32_t)x[r * STEPS];
                        add_dots(low[r], value, c);
                        add_dots(high[r], value, d);
                    });
                }
            }
            const GroupScales &columns = inputs.columns[g];
            if (!WIDE_REGISTERS) asm volatile("" ::: "memory");  // registers are for the sums of a group
            each<ROWS>([&](auto r) ALWAYS {
                float *place = result + r * WIDTH;
                const auto add = [&](auto sum, Floats own, Floats added, Floats &kept, float *place) ALWAYS {
                    const Floats before = WIDE_REGISTERS ? kept : read<Floats>(place);
                    kept = scaled<AFFINE>(inputs, g * inputs.stride + r, sum, own, added, before);
                    if (!WIDE_REGISTERS) write(place, kept);
                };
                add(low[r], columns.low, columns.low_added, total.low[r], place);
                add(high[r], columns.high, columns.high_added, total.high[r], place + LANES);
            });
        }
        if (WIDE_REGISTERS) total.store(result);
    }
#else
    // Spelled out: compilers would load them all before the first is needed.
    static INLINE __m256i spread(const uint32_t *x) {
        __m256i result;
        asm volatile("vpbroadcastd %1, %0" : "=x"(result) : "m"(*x));
        return result;
    }

    // The codes of step `i` of a group, and of the 8 columns at `place`, as bytes.
    static INLINE __m256i codes_at(const uint8_t *place, int i, __m256i levels) {
        const auto load = [&](int64_t line) ALWAYS { return _mm256_loadu_si256((const __m256i *)(place + line * LINE)); };
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

    // sums [ROWS][COUNT] of a group: its products with the columns of COUNT registers at `place`.
#ifdef AVX_VNNI
    template <int ROWS, int COUNT>
    static INLINE void multiply_group(const uint32_t *x, const uint8_t *place, __m256i levels, __m256i *sums) {
        each<STEPS>([&](auto step) ALWAYS {
            __m256i codes[COUNT];
            each<COUNT>([&](auto j) ALWAYS { codes[j] = codes_at(place + j * 32, step, levels); });
            each<ROWS>([&](auto r) ALWAYS {
                const __m256i value = spread(x + r * STEPS + step);
                each<COUNT>([&](auto j) ALWAYS {
                    __m256i &sum = sums[r * COUNT + j];
                    sum = _mm256_dpbusd_avx_epi32(step == 0 ? _mm256_setzero_si256() : sum, codes[j], value);
                    asm("" : "+x"(sum));  // in this order, or registers run out
                });
            });
        });
    }
#else
    // Products of bytes are added to 16 bits: as many as there is room for, before they are widened.
    static const int IN_ROOM = IS_BYTE ? 1 : BITS == 6 ? 2 : BITS == 5 ? 4 : 8;

    template <int ROWS, int COUNT>
    static INLINE void multiply_group(const uint32_t *x, const uint8_t *place, __m256i levels, __m256i *sums) {
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
                    const __m256i value = spread(x + r * STEPS + step);
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
                const __m256i wide = _mm256_madd_epi16(some[i], _mm256_set1_epi16(1));
                sums[i] = part == 0 ? wide : _mm256_add_epi32(sums[i], wide);
            });
        });
    }
#endif

    template <int ROWS, bool AFFINE>
    static INLINE void add_products(const Inputs &inputs, Ready *ready, float *result) {
        constexpr int COUNT = SHORT_COUNT;
        const __m128i table = HAS_LEVELS ? _mm_loadu_si128((const __m128i *)inputs.levels) : _mm_setzero_si128();
        const __m256i levels = _mm256_broadcastsi128_si256(table);
        for (int64_t g = 0; g < inputs.groups; g++) {
            const uint8_t *panel = inputs.panel + g * BYTES;
            if (ready) for (int64_t i = 0; i < BYTES; i += LINE) fetch_ahead(*ready);
            const float *own = (const float *)(inputs.columns + g);
            each<WIDTH / REGISTER / COUNT>([&](auto number) ALWAYS {
                constexpr int64_t turn = number * COUNT;
                __m256i sums[ROWS * COUNT];
                multiply_group<ROWS, COUNT>(inputs.x + g * inputs.stride * STEPS, panel + turn * 32, levels, sums);
                each<ROWS>([&](auto r) ALWAYS {
                    const int64_t at = g * inputs.stride + r;
                    const RegisterInts first = RegisterInts{} + first_sum<AFFINE>(inputs, at);
                    each<COUNT>([&](auto j) ALWAYS {
                        const int64_t column = (turn + j) * REGISTER;
                        float *to = result + r * WIDTH + column;
                        const RegisterInts sum = (RegisterInts)sums[r * COUNT + j];
                        write(to, scaled<AFFINE>(inputs, at, starts_at_zero(AFFINE) ? sum : sum + first, read<Register>(own + column),
                                                 read<Register>(own + WIDTH + column), read<Register>(to)));
                    });
                });
            });
        }
    }
#endif

    // The rows are as many as ROWS, or fewer.
    template <int ROWS>
    static INLINE void add_rows(int64_t rows, const Inputs &inputs, bool affine, Ready *ready, float *result) {
        if constexpr (ROWS > 1)
            if (rows < ROWS) return add_rows<ROWS - 1>(rows, inputs, affine, ready, result);
        affine ? add_products<ROWS, true>(inputs, ready, result) : add_products<ROWS, false>(inputs, ready, result);
    }

    static void run(Ready ready, const uint8_t *panel, const uint8_t *scales, int64_t depth, float *result) {
        const bool affine = is_affine(ready.scaling);
        const int64_t rows = ready.rows, parts = (rows + DOT_ROWS - 1) / DOT_ROWS;
        for (int64_t k = 0; k < depth; k += NEST) {
            const int64_t first = k / GROUP, groups = (depth - k < NEST ? depth - k : NEST) / GROUP;
            GroupScales columns[NEST / GROUP];
            const uint8_t *ahead = scales + scale_bytes(ready.scaling, GROUP, k) + 1024;
            for (int64_t i = 0; i < scale_bytes(ready.scaling, GROUP, NEST); i += 64) __builtin_prefetch(ahead + i);
            for (int64_t g = 0; g < groups; g++) columns[g] = scales_of(scales, ready.scaling, first + g, GROUP);
            for (int64_t part = 0, r = 0; part < parts; part++) {
                const int64_t count = (rows - r) / (parts - part), place = first * rows + r;
                const Inputs inputs = {panel + first * BYTES, ready.x + k / 4 * rows + r * STEPS, ready.scales + place, ready.zeros + place,
                                       rows, groups, columns, ready.levels};
                add_rows<DOT_ROWS>(count, inputs, affine, part ? nullptr : &ready, result + r * WIDTH);
                r += count;
            }
        }
    }
};
#endif
