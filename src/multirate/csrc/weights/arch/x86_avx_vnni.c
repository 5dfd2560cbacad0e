#include "x86_avx2.c"
