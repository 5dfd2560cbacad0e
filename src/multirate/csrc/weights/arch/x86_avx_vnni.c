// Quantised weights on processors that multiply bytes in registers of 256 bits (AVX-VNNI).
#include "../arch.h"

#define ADD_PAIR(n)                                                                                \
    a##n = _mm256_dpbusd_avx_epi32(a##n, w, WORD(x[n]));                                           \
    a##n = _mm256_dpbusd_avx_epi32(a##n, v, WORD(x[n + lanes]));
#define ADD_PAIR_8 ADD_PAIR
#include "avx2_passes.h"
FORMAT(q8_0, 8, 8, START, START_128)
FORMATS

const Bytes avx_vnni_bytes = {LANES_256, quantise, PRODUCTS};
