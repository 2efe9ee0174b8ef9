// Registers of tiles (AMX), which products and attention use: their shapes, and the steps that both take.

#ifndef TILES
typedef NoEnd EndTiles;
#else
static const int64_t TILE_ROWS = 16, FEW_FOR_TILES = 16;  // rows of whole numbers from which tiles are faster
static const int64_t PITCH = 4 * WIDTH;  // bytes between a panel's rows

enum Tile { SUMS, ACTIVATIONS = 4, WEIGHTS = 6 };  // sums of the first rows, then of the others, of two columns each

struct alignas(64) TileShapes {  // as the processor reads it
    uint8_t palette = 1, start = 0, reserved[14] = {};
    uint16_t bytes[16] = {};  // of a row
    uint8_t rows[16] = {};
};

static thread_local int64_t tiles_shaped;  // rows and words that this thread's tiles have; 0: none

// Makes tiles ready for `rows` rows of activations, and products of `words` of their words at a time. They stay so until
// `EndTiles`: shaping them takes some 95 ns.
static INLINE void shape_tiles(int64_t rows, int64_t words) {
    if (tiles_shaped == rows * 64 + words) return;
    tiles_shaped = rows * 64 + words;
    TileShapes shapes;
    for (int64_t half = 0; half < (rows > TILE_ROWS ? 2 : 1); half++) {
        const uint8_t own = (uint8_t)(half ? rows - TILE_ROWS : rows < TILE_ROWS ? rows : TILE_ROWS);
        for (int64_t column = 0; column < 2; column++) {
            shapes.rows[SUMS + 2 * half + column] = own;
            shapes.bytes[SUMS + 2 * half + column] = 64;
        }
        shapes.rows[ACTIVATIONS + half] = own;
        shapes.bytes[ACTIVATIONS + half] = (uint16_t)(4 * words);
    }
    for (int64_t column = 0; column < 2; column++) {
        shapes.rows[WEIGHTS + column] = (uint8_t)words;
        shapes.bytes[WEIGHTS + column] = 64;
    }
    // Not _tile_loadconfig: to GCC it reads only a part of this, and the rest is never written.
    asm volatile("ldtilecfg %0" ::"m"(shapes));
}

// Others find no tiles in use, and the system has none to save.
struct EndTiles {
    void operator()() const {
        if (tiles_shaped) _tile_release();
        tiles_shaped = 0;
    }
};

// Spelled out, as a tile's number is part of its instruction. body(tile, its first row, its first column).
#define EACH_SUM(TWO, body)                                  \
    body(0, 0, 0) body(1, 0, 16) if (TWO) {                  \
        body(2, 16, 0) body(3, 16, 16)                       \
    }

// Adds the products of activations, a row each `bytes`, with 32 columns of weights, a word's row each `pitch` bytes.
#define ADD_PRODUCTS(TWO, multiply, x, bytes, weights, pitch)         \
    do {                                                              \
        _tile_loadd(6, weights, pitch);                               \
        _tile_loadd(7, (const char *)(weights) + 64, pitch);          \
        _tile_loadd(4, x, bytes);                                     \
        multiply(0, 4, 6);                                            \
        multiply(1, 4, 7);                                            \
        if (TWO) {                                                    \
            _tile_loadd(5, (const char *)(x) + TILE_ROWS * (bytes), bytes); \
            multiply(2, 5, 6);                                        \
            multiply(3, 5, 7);                                        \
        }                                                             \
    } while (0)

#define CLEAR_SUM(tile, row, column) _tile_zero(tile);
#endif
