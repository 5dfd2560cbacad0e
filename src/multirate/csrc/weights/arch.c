#include "arch.h"

#include <string.h>
#if defined(__x86_64__)
#include <cpuid.h>
#endif

long lines_ahead(int lanes, int format) {
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx512f")) {
        if (!__builtin_cpu_is("amd"))
            return 64;
        if (__builtin_cpu_supports("avx512vp2intersect")) // Zen 5
            return 240;
        return lanes <= (is_quantised(format) ? 2 : 5) ? 0 : 160;
    }
#endif
    return lanes == 1 ? 0 : lanes <= 3 ? 12 : 64;
}

extern const Vectors generic_vectors, avx2_vectors, avx_vnni_vectors, avx512_vectors,
    avx512_vnni_vectors;

static int everywhere(void) {
    return 1;
}

#if defined(__x86_64__)
#define HAS(feature) __builtin_cpu_supports(feature)

// What some compilers have no name for: a bit of what cpuid leaves in a register.
static int has_f16c(void) {
    unsigned a, b, c, d;
    return __get_cpuid(1, &a, &b, &c, &d) && c >> 29 & 1;
}
static int multiplies_bytes(void) {
    unsigned a, b, c, d;
    return __get_cpuid_count(7, 1, &a, &b, &c, &d) && a >> 4 & 1;
}

static int has_avx2(void) {
    return HAS("avx2") && HAS("fma") && HAS("bmi") && HAS("bmi2") && has_f16c();
}
static int has_avx_vnni(void) {
    return has_avx2() && multiplies_bytes();
}
static int has_avx512(void) {
    return has_avx2() && HAS("avx512f") && HAS("avx512bw") && HAS("avx512dq") && HAS("avx512vl") &&
           HAS("avx512cd");
}
static int has_avx512_vnni(void) {
    return has_avx512() && HAS("avx512vnni");
}
#endif

#if defined(__aarch64__)
static int has_neon(void) { // with dot products
#if defined(__linux__)
    return (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) != 0;
#else
    return 1; // all of Apple's have them
#endif
}
#endif

static const Arch archs[] = {
#if defined(__x86_64__)
    {"avx512_vnni", has_avx512_vnni, &avx512_vnni_vectors, &avx512_vnni_bytes},
    {"avx512", has_avx512, &avx512_vectors, &avx2_bytes},
    {"avx_vnni", has_avx_vnni, &avx_vnni_vectors, &avx_vnni_bytes},
    {"avx2", has_avx2, &avx2_vectors, &avx2_bytes},
#endif
#if defined(__aarch64__)
    {"neon", has_neon, &generic_vectors, &neon_bytes},
#endif
    {"generic", everywhere, &generic_vectors, &generic_bytes},
};

static const Arch *_Atomic chosen;

const Arch *arch(void) {
    if (!chosen) // threads that come here together choose the same
        mr_choose_arch(NULL);
    return chosen;
}

const Vectors *vectors(void) {
    return arch()->vectors;
}

const char *mr_arch(void) {
    return arch()->name;
}

#define ARCHS (int)(sizeof archs / sizeof *archs)

const char *mr_arch_name(int at) {
    return at < ARCHS ? archs[at].name : NULL;
}

int mr_has_arch(int at) {
    return archs[at].here();
}

int mr_choose_arch(const char *name) {
    for (int i = 0; i < ARCHS; i++)
        if ((!name || !strcmp(archs[i].name, name)) && archs[i].here()) {
            chosen = &archs[i];
            return 1;
        }
    return 0;
}

int mr_int12_products(void) {
    return vectors()->short_weights;
}
