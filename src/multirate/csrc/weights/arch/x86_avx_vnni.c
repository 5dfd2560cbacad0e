// Quantised weights on processors that multiply bytes in registers of 256 bits (AVX-VNNI).
#include "../arch.h"

#if defined(__x86_64__)
#pragma GCC push_options
#pragma GCC target("avx2,f16c,fma,avxvnni")

#define ADD_PAIR(n)                                                                                \
    a##n = _mm256_dpbusd_avx_epi32(a##n, w, WORD(x[n]));                                           \
    a##n = _mm256_dpbusd_avx_epi32(a##n, v, WORD(x[n + lanes]));
#define ADD_PAIR_8 ADD_PAIR
#include "avx2_passes.h"
FORMAT(q8_0, 8, 8, START, START_128)
FORMATS
#pragma GCC pop_options

const Arch *avx_vnni_arch(void) {
    static const Arch found = {"avx_vnni", LANES_256, quantise, PRODUCTS};
    return __builtin_cpu_supports("avxvnni") && __builtin_cpu_supports("fma") &&
                   __builtin_cpu_supports("f16c")
               ? &found
               : NULL;
}
#else
const Arch *avx_vnni_arch(void) {
    return NULL;
}
#endif
