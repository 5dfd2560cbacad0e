#include "arch.h"

#include "processor.h"

#include <string.h>

long lines_ahead(int lanes, int format) {
    switch (processor_kind()) {
    case INTEL_AVX512:
        return 64;
    case AMD_ZEN_5:
        return 240;
    case AMD_AVX512:
        return lanes <= (is_quantised(format_of(format)) ? 2 : 5) ? 0 : 160;
    default:
        return lanes == 1 ? 0 : is_quantised(format_of(format)) ? 32 : lanes <= 3 ? 12 : 64;
    }
}

extern const Vectors generic_vectors, avx2_vectors, avx_vnni_vectors, avx512_vectors,
    avx512_vnni_vectors;

static int everywhere(void) {
    return 1;
}

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
