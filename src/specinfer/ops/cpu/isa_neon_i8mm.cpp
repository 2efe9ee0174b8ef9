#if defined(__aarch64__)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("i8mm"))), apply_to = function)
#else
#pragma GCC target("arch=armv8.2-a+i8mm")
#endif
#define ISA_NAME "NEON i8mm"
#define ISA neon_i8mm
#define ROWS_OF_BLOCK 3
#define REGISTER_BYTES 16
#define INT_DOTS
#define DOT_ROWS 3
#include "isa.h"
#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
