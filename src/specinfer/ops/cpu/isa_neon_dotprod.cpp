#if defined(__aarch64__)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("dotprod"))), apply_to = function)
#else
#pragma GCC target("arch=armv8.2-a+dotprod")
#endif
#define ISA_NAME "NEON dotprod"
#define ISA neon_dotprod
#define ROWS_OF_BLOCK 3
#define REGISTER_BYTES 16
#define INT_DOTS
#define DOT_ROWS 3
#define SIGNED_CODES
#include "isa.h"
#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
