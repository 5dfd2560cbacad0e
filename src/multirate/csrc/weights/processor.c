#include "processor.h"

#if defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#endif

#if defined(__x86_64__)
#include <cpuid.h>

// By cpuid's bits: not every compiler has names for all of them.

enum { EAX, EBX, ECX, EDX };
#define BIT(n) (1u << (n))

static int has(unsigned leaf, unsigned part, int place, unsigned bits) {
    unsigned found[4];
    return __get_cpuid_count(leaf, part, &found[EAX], &found[EBX], &found[ECX], &found[EDX]) &&
           (found[place] & bits) == bits;
}

static int system_saves(unsigned registers) {
    if (!has(1, 0, ECX, BIT(27))) // whether it can be asked
        return 0;
    unsigned low, high;
    __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return (low & registers) == registers;
}

int has_avx2(void) {
    return system_saves(BIT(1) | BIT(2)) &&
           has(1, 0, ECX, BIT(12) | BIT(28) | BIT(29)) && // FMA, F16C
           has(7, 0, EBX, BIT(3) | BIT(5) | BIT(8));      // BMI, BMI2
}

int has_avx_vnni(void) {
    return has_avx2() && has(7, 1, EAX, BIT(4));
}

int has_avx512(void) {
    return has_avx2() && system_saves(BIT(5) | BIT(6) | BIT(7)) &&
           has(7, 0, EBX, BIT(16) | BIT(17) | BIT(28) | BIT(30) | BIT(31)); // F, DQ, CD, BW, VL
}

int has_avx512_vnni(void) {
    return has_avx512() && has(7, 0, ECX, BIT(11));
}

static ProcessorKind find_kind(void) {
    if (!has_avx512())
        return OTHER_KIND;
    if (!has(0, 0, EBX, signature_AMD_ebx))
        return INTEL_AVX512;
    return has(7, 0, EDX, BIT(8)) ? AMD_ZEN_5 : AMD_AVX512; // VP2INTERSECT
}
#else
#if defined(__aarch64__)
int has_neon(void) {
#if defined(__linux__)
    return (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) != 0;
#else
    return 1; // all of Apple's have them
#endif
}
#endif

static ProcessorKind find_kind(void) {
    return OTHER_KIND;
}
#endif

ProcessorKind processor_kind(void) {
    static _Atomic ProcessorKind known; // asking takes long in a virtual machine
    if (!known)
        known = find_kind();
    return known;
}
