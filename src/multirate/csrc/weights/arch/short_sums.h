// Products of bytes with AVX2 alone, where vpmaddubsw adds two products of unsigned and signed
// bytes in 16 bits. Those hold sixteen products of 4-bit weights (16 · 15 · 127 at most), which are
// all that a lane sums of a block, four of 6 bits and not two of 8 bits: 8-bit weights are split
// into their sizes and signs.
//
// In assembly, because compilers sum in another order, for which they need more registers than
// there are. A row's inputs are loaded once for the two registers of outputs.
#ifndef MULTIRATE_SHORT_SUMS_H
#define MULTIRATE_SHORT_SUMS_H
#include <immintrin.h>

// Whether sums of a block stay in 16 bits, two for each output.
#define SHORT_SUMS(bits) ((bits) == 4)

#define SUMS [s] "+x"(sum[0]), [t] "+x"(sum[1])
#define TEMPORARY [a] "=&x"(a), [b] "=&x"(b)

// Of a row: sum += w · the four inputs at x, in 16 bits.
INLINE void add_four_bit_line(iv *sum, const Line *w, const int32_t *x) {
    iv a, b;
    asm("vpbroadcastd %[x], %[a]\n\t"
        "vpmaddubsw %[a], %[w], %[b]\n\t"
        "vpaddw %[b], %[s], %[s]\n\t"
        "vpmaddubsw %[a], %[v], %[a]\n\t"
        "vpaddw %[a], %[t], %[t]"
        : SUMS, TEMPORARY
        : [w] "x"(w[0]), [v] "x"(w[1]), [x] "m"(*x));
}

// sum += w · the inputs at x + v · those at y.
INLINE void add_pair(iv *sum, const Line *w, const Line *v, const int32_t *x, const int32_t *y,
                     __m256i ones) {
    iv a, b, c, d;
    asm("vpbroadcastd %[x], %[a]\n\t"
        "vpbroadcastd %[y], %[b]\n\t"
        "vpmaddubsw %[a], %[w], %[c]\n\t"
        "vpmaddubsw %[b], %[v], %[d]\n\t"
        "vpaddw %[c], %[d], %[c]\n\t"
        "vpmaddwd %[one], %[c], %[c]\n\t"
        "vpaddd %[c], %[s], %[s]\n\t"
        "vpmaddubsw %[a], %[more_w], %[a]\n\t"
        "vpmaddubsw %[b], %[more_v], %[b]\n\t"
        "vpaddw %[a], %[b], %[a]\n\t"
        "vpmaddwd %[one], %[a], %[a]\n\t"
        "vpaddd %[a], %[t], %[t]"
        : SUMS, TEMPORARY, [c] "=&x"(c), [d] "=&x"(d)
        : [w] "x"(w[0]), [v] "x"(v[0]), [more_w] "x"(w[1]), [more_v] "x"(v[1]), [x] "m"(*x),
          [y] "m"(*y), [one] "xm"(ones));
}

// sum += w · the inputs at x. size: w without its signs.
INLINE void add_byte_line(iv *sum, const Line *w, const Line *size, const int32_t *x,
                          __m256i ones) {
    iv a, b;
    asm("vpbroadcastd %[x], %[a]\n\t"
        "vpsignb %[w], %[a], %[b]\n\t"
        "vpmaddubsw %[b], %[size], %[b]\n\t"
        "vpmaddwd %[one], %[b], %[b]\n\t"
        "vpaddd %[b], %[s], %[s]\n\t"
        "vpsignb %[v], %[a], %[a]\n\t"
        "vpmaddubsw %[a], %[more_size], %[a]\n\t"
        "vpmaddwd %[one], %[a], %[a]\n\t"
        "vpaddd %[a], %[t], %[t]"
        : SUMS, TEMPORARY
        : [w] "x"(w[0]), [v] "x"(w[1]), [size] "x"(size[0]), [more_size] "x"(size[1]),
          [x] "m"(*x), [one] "xm"(ones));
}

INLINE void add_byte_lines(int rows, iv (*sum)[2], const Line *w, const int32_t *x, __m256i ones) {
    Line size[2] = {(Line)_mm256_abs_epi8((__m256i)w[0]), (Line)_mm256_abs_epi8((__m256i)w[1])};
    EACH (n, rows)
        add_byte_line(sum[n], w, size, x + n, ones);
}

// Of each row: sum += w · the four inputs at x + v · the next four. more: not used.
INLINE void add_products(int rows, iv (*sum)[2], iv *more, int bits, const Line *w, const Line *v,
                         const int32_t *x) {
    const __m256i ones = _mm256_set1_epi16(1);
    (void)more;
    if (bits == 8) {
        add_byte_lines(rows, sum, w, x, ones);
        add_byte_lines(rows, sum, v, x + rows, ones);
        return;
    }
    if (SHORT_SUMS(bits)) {
        EACH (n, rows)
            add_four_bit_line(sum[n], w, x + n);
        EACH (n, rows)
            add_four_bit_line(sum[n], v, x + rows + n);
        return;
    }
    EACH (n, rows)
        add_pair(sum[n], w, v, x + n, x + rows + n, ones);
}

// What add_products summed of a block, in 32 bits.
INLINE iv whole_sum(iv sum, int bits) {
    return SHORT_SUMS(bits) ? (iv)_mm256_madd_epi16((__m256i)sum, _mm256_set1_epi16(1)) : sum;
}
#endif
