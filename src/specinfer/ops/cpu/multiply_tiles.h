// Products of up to 32 rows by AMX tiles: 2 by 2 tiles of 16 rows and 16 columns of sums.
//
// A tile instruction adds up 32 k's of bf16 apart before it adds them to a sum, so layers of bf16 and fp8 use tiles for
// any number of rows: a row's result does not depend on its neighbours. Sums of whole numbers are exact in any order.

#ifdef TILES
#define LOAD_SUM(tile, row, column) _tile_loadd(tile, result + (row) * WIDTH + (column), PITCH);
#define STORE_SUM(tile, row, column) _tile_stored(tile, sums + (row) * WIDTH + (column), PITCH);

template <bool TWO>
struct TilesBf16 {
    static const int64_t WORDS = 16, BYTES = WORDS * PITCH;

    static void run(Ready ready, const uint8_t *panel, const uint8_t *, int64_t depth, float *result) {
        float *sums = result;
        const uint32_t *x = ready.x;
        shape_tiles(ready.rows, WORDS);
        EACH_SUM(TWO, LOAD_SUM)
        for (int64_t left = depth / 2; left > 0; left -= WORDS, panel += BYTES, x += ready.rows * WORDS) {
            fetch_ahead(ready, WORDS);
            alignas(64) uint8_t last[BYTES];
            if (left < WORDS) {
                memset(last, 0, BYTES);
                memcpy(last, panel, left * PITCH);
                panel = last;
                asm volatile("" ::: "memory");
            }
            ADD_PRODUCTS(TWO, _tile_dpbf16ps, x, 4 * WORDS, panel, PITCH);
        }
        EACH_SUM(TWO, STORE_SUM)
        asm volatile("" ::: "memory");
    }
};

template <bool TWO>
struct TilesFp8 {
    static void run(Ready ready, const uint8_t *panel, const uint8_t *scales, int64_t depth, float *result) {
        const uint32_t *x = ready.x;
        alignas(64) float sums[2 * TILE_ROWS * WIDTH];
        alignas(64) uint8_t widened[16 * PITCH];
        shape_tiles(ready.rows, 16);
        for (int64_t left = depth / 128; left; left--, scales += 4 * WIDTH) {
            EACH_SUM(TWO, CLEAR_SUM)
            for (int64_t part = 0; part < 4; part++, x += ready.rows * 16) {
                for (int64_t i = 0; i < 8; i++, panel += 128) {
                    fetch_ahead(ready);
                    const __m512i a = _mm512_loadu_si512(panel), b = _mm512_loadu_si512(panel + 64);
                    uint8_t *place = widened + 2 * i * PITCH;
                    write(place, widened_pairs(_mm512_slli_epi16(a, 8)));
                    write(place + 64, widened_pairs(_mm512_slli_epi16(b, 8)));
                    write(place + PITCH, widened_pairs(a));
                    write(place + PITCH + 64, widened_pairs(b));
                }
                asm volatile("" ::: "memory");
                ADD_PRODUCTS(TWO, _tile_dpbf16ps, x, 64, widened, PITCH);
            }
            EACH_SUM(TWO, STORE_SUM)
            asm volatile("" ::: "memory");
            for (int64_t r = 0; r < ready.rows; r++) {
                const Floats low = read<Floats>(sums + r * WIDTH), high = read<Floats>(sums + r * WIDTH + LANES);
                add_whole<1>(scales, &low, &high, result + r * WIDTH);
            }
        }
    }
};

template <bool TWO, int BITS, int GROUP, bool HAS_LEVELS = false>
struct TilesInt {
    static const int64_t WORDS = GROUP / 4;

    // codes [WORDS][WIDTH][4] of a group, from `panel` on, which is moved to the next group.
    static INLINE void spread(Ready &ready, const uint8_t *&panel, uint8_t *codes) {
        UpperBits<BITS> upper;
        if (upper.ANY) fetch_ahead(ready);
        upper.load(panel);
        for (int64_t k = 0; k < GROUP; k += 8, panel += 128) {
            fetch_ahead(ready);
            const Words a = read<Words>(panel), b = read<Words>(panel + 64);
            each<2>([&](auto half) ALWAYS {
                Words c = a >> half * 4 & 0x0f0f0f0fu, d = b >> half * 4 & 0x0f0f0f0fu;
                upper.put(c, d);
                uint8_t *place = codes + (k / 4 + half) * PITCH;
                write(place, HAS_LEVELS ? levels_of(ready.levels, c) : c);
                write(place + 64, HAS_LEVELS ? levels_of(ready.levels, d) : d);
            });
        }
        asm volatile("" ::: "memory");
    }

    static void run(Ready ready, const uint8_t *panel, const uint8_t *scales, int64_t depth, float *result) {
        const uint32_t *x = ready.x;
        alignas(64) int32_t sums[2 * TILE_ROWS * WIDTH];
        alignas(64) uint8_t codes[BITS == 8 ? 64 : WORDS * PITCH];
        shape_tiles(ready.rows, WORDS);
        for (int64_t g = 0; g < depth / GROUP; g++, x += ready.rows * WORDS) {
            const uint8_t *weights = codes;
            if constexpr (BITS == 8) {
                weights = panel;
                for (int64_t i = 0; i < WORDS; i++, panel += PITCH) fetch_ahead(ready);
            } else
                spread(ready, panel, codes);
            EACH_SUM(TWO, CLEAR_SUM)
            ADD_PRODUCTS(TWO, _tile_dpbsud, x, 4 * WORDS, weights, PITCH);
            EACH_SUM(TWO, STORE_SUM)
            asm volatile("" ::: "memory");
            __builtin_prefetch(scales + scale_bytes(ready.scaling, GROUP, NEST) * g / (NEST / GROUP) + 1024);
            const GroupScales own = scales_of(scales, ready.scaling, g, GROUP);
            const auto add = [&](auto affine) ALWAYS {
                for (int64_t r = 0; r < ready.rows; r++) {
                    const int64_t at = g * ready.rows + r;
                    const int32_t *place = sums + r * WIDTH, zero = affine ? 0 : ready.zeros[at];
                    const Ints low = read<Ints>(place) + zero, high = read<Ints>(place + LANES) + zero;
                    add_scaled_row<affine>(ready, own, at, low, high, result + r * WIDTH);
                }
            };
            is_affine(ready.scaling) ? add(std::true_type{}) : add(std::false_type{});
        }
    }
};

template <bool TWO>
static Multiply of_tiles(int type) {
    switch (type) {
        case BF16: return TilesBf16<TWO>::run;
        case FP8: return TilesFp8<TWO>::run;
        case INT8: return TilesInt<TWO, 8, 64>::run;
        case INT8_OF_32: return TilesInt<TWO, 8, 32>::run;
        case INT6: return TilesInt<TWO, 6, 16>::run;
        case INT5: return TilesInt<TWO, 5, 32>::run;
        case LEVELS4: return TilesInt<TWO, 4, 32, true>::run;
        case LEVELS4_OF_16: return TilesInt<TWO, 4, 16, true>::run;
        default: return TilesInt<TWO, 4, 32>::run;
    }
}
#endif
