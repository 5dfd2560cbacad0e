// RMSNorm and rotation in place.
#include "vectors.h"

void mr_rms_norm(float *x, const float *weight, int d, float eps) {
    vectors()->read_row(x, weight, d, eps, x);
}

void mr_rotate(float *x, const float *cos, const float *sin, int d) {
    vectors()->rotate(x, cos, sin, d);
}
