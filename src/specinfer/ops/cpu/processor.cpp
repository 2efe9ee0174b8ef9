// A program that a source install runs to learn which instruction set of this processor to compile: prints its name.

#include "cpu.h"

#include <cstdio>

int main() {
#if defined(__x86_64__)
    puts(has_avx512_bf16()   ? "avx512_bf16"
         : has_avx512_vnni() ? "avx512_vnni"
         : has_avx512()      ? "avx512"
         : has_avx_vnni()    ? "avx_vnni"
         : has_avx2()        ? "avx2"
                             : "");
#elif defined(__aarch64__)
    puts(has_i8mm() ? "neon_i8mm" : has_dotprod() ? "neon_dotprod" : "");
#else
    puts("");
#endif
}
