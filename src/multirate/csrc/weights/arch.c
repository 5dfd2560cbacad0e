#include "arch.h"

#include <string.h>

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

typedef const Arch *(*FindArch)(void);
static const FindArch all[] = {avx512_arch, avx_vnni_arch, avx2_arch, generic_arch};

static const Arch *_Atomic chosen;

const Arch *arch(void) {
    if (!chosen) // threads that come here together choose the same
        for (size_t i = 0; !chosen; i++)
            chosen = all[i]();
    return chosen;
}

const char *mr_arch(void) {
    return arch()->name;
}

int mr_choose_arch(const char *name) {
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        const Arch *found = all[i]();
        if (found && (!name || !strcmp(found->name, name))) {
            chosen = found;
            return 1;
        }
    }
    return 0;
}
