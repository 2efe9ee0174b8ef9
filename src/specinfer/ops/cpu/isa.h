// All that is compiled for one instruction set; included once by each isa_*.cpp, which says what there is.
//
// A source is compiled whole, or in four parts side by side, which ISA_PART selects: products (1), attention of heads up
// to 128 wide (2), the rest (3), and attention of wider heads (4). A part takes less time and memory of the compiler.

#if !defined(ISA_PART)
#define ISA_PART 0
#define LOCAL static
#else
#define LOCAL  // other parts call it
#endif

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#include "panels.h"
#include "team.h"
#include "types.h"

namespace ISA {
#include "vectors.h"
#include "layer.h"
#include "tiles.h"
#if ISA_PART == 0 || ISA_PART == 1
#include "multiply.h"
#include "linear.h"
#include "peak.h"
#else
int64_t multiply_from_registers(int64_t steps, float *result);
void linear(const Linear *layer, const float *x, float *y, void *room, int64_t rows, int32_t ending, const Runs *runs,
            int threads);
void add_low_rank(int64_t number, int64_t inputs, int64_t outputs, const float *x, float *y, const Runs *runs,
                  int64_t rows, int threads);
#endif
#if ISA_PART == 0 || ISA_PART == 2 || ISA_PART == 4
#include "attention.h"
#else
void attend(const Attention *layer, const Pieces *pieces, const float *queries, int64_t stride, float *result, int threads);
#endif
#if ISA_PART == 0 || ISA_PART == 3
#include "rotate.h"
#include "choice.h"
#include "walk.h"
#include "stochastic_walk.h"
#include "recurrence.h"
#include "mix.h"
#include "experts.h"
#include "decoder.h"
extern const Native native = {ISA_NAME, linear, add_low_rank, norm<>, rotate, attend, mix, decode, choose, noise_of, most_probable,
                              walk, walk_stochastic, convolve, recur, multiply_from_registers};
#ifdef TILES
extern const bool knows_tiles = true;
#else
extern const bool knows_tiles = false;
#endif
#endif
}  // namespace ISA
