#if defined(__x86_64__)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c,avxvnni"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,f16c,avxvnni")
#endif
#define ISA_NAME "AVX-VNNI"
#define ISA avx_vnni
#define ROWS_OF_BLOCK 4  // whose sums of half a panel take 8 of 16 registers
#define REGISTER_BYTES 32
#define SHORT_DOTS
#define AVX_VNNI
#define DOT_ROWS 5     // whose sums of SHORT_COUNT registers take 10 of 16
#define SHORT_COUNT 2
#include "isa.h"
#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
