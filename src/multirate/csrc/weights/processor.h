// What this processor has.
#ifndef MULTIRATE_PROCESSOR_H
#define MULTIRATE_PROCESSOR_H

#if defined(__x86_64__)
// Whether it has an instruction set, and the system saves its registers.
int has_avx2(void);
int has_avx_vnni(void);
int has_avx512(void);
int has_avx512_vnni(void);
#elif defined(__aarch64__)
int has_neon(void); // with dot products
#endif

// Kinds that differ in what they fetch from memory by themselves (arch.h, lines_ahead).
typedef enum { OTHER_KIND = 1, INTEL_AVX512, AMD_AVX512, AMD_ZEN_5 } ProcessorKind;
ProcessorKind processor_kind(void);
#endif
