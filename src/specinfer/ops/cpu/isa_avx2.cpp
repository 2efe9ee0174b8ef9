#if defined(__x86_64__)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,f16c")
#endif
#define ISA_NAME "AVX2"
#define ISA avx2
#define ROWS_OF_BLOCK 4  // whose sums of half a panel take 8 of 16 registers
#define REGISTER_BYTES 32
#define SHORT_DOTS
#define DOT_ROWS 4     // whose sums of SHORT_COUNT registers take 8 of 16
#define SHORT_COUNT 2
#include "isa.h"
#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
