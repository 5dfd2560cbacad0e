// RMSNorm and rotary position embedding (norm.c). mr_rms_norm and mr_rotate are in abi.h.
#ifndef MULTIRATE_NORM_H
#define MULTIRATE_NORM_H
#include "tile.h"

// RMSNorm of x [d], of any size, to out, which may be x.
void rms_norm(const float *x, const float *weight, int d, float eps, float *out);

// The same; weight NULL: x as it is.
void read_row(const float *x, const float *weight, int d, float eps, float *out);

// x += factor · RMSNorm(y), all [d]; weight NULL: y as it is.
void add_normed(const float *y, const float *weight, int d, float eps, float factor, float *x);

// 1 / RMS of x [d].
float inverse_rms(const float *x, int d, float eps);
#endif
