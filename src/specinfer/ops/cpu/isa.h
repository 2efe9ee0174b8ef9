// All that is compiled for one instruction set; included once by each isa_*.cpp, which says what there is.

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
#include "multiply.h"
#include "linear.h"
#include "attention.h"
#include "rotate.h"
#include "choice.h"
#include "walk.h"
#include "toss.h"
#include "recurrence.h"
#include "mix.h"
#include "experts.h"
#include "decoder.h"
extern const Native native = {ISA_NAME, linear, add_low_rank, norm<>, rotate, attend, mix, decode, choose, noise_of, most_probable,
                              walk, toss, convolve, recur};
#ifdef TILES
extern const bool knows_tiles = true;
#else
extern const bool knows_tiles = false;
#endif
}  // namespace ISA
