// Products of bytes with AVX2 alone, whose vpmaddubsw adds two products of unsigned and signed
// bytes in 16 bits. Inputs are within ±127 (byte_rows.h). A 16-bit sum holds all sixteen products
// of a block that it gets with 4-bit weights (16 · 15 · 127), or four with 6-bit weights. It cannot
// hold two with unsigned 8-bit weights, so those are split into size and sign.
//
// In assembly, because compilers reorder the sums and then spill registers.
#ifndef MULTIRATE_AVX2_PRODUCTS_H
#define MULTIRATE_AVX2_PRODUCTS_H

// Whether a block is summed in 16 bits. Each output then has two sums.
#define SHORT_SUMS(bits) ((bits) == 4)

// For each row, adds w · the four inputs at x, in 16 bits.
INLINE void add_four_bit_lines(int rows, iv (*sum)[2], const Line *w, const int32_t *x) {
    EACH (n, rows) {
        iv a, b;
        asm("vpbroadcastd %[x], %[a]\n\t"
            "vpmaddubsw %[a], %[w0], %[b]\n\t"
            "vpaddw %[b], %[s0], %[s0]\n\t"
            "vpmaddubsw %[a], %[w1], %[a]\n\t"
            "vpaddw %[a], %[s1], %[s1]"
            : [s0] "+&x"(sum[n][0]), [s1] "+&x"(sum[n][1]), [a] "=&x"(a), [b] "=&x"(b)
            : [w0] "x"(w[0]), [w1] "x"(w[1]), [x] "m"(x[n]));
    }
}

// For each row, adds w · the four inputs at x + v · the next four, which 16 bits hold together.
INLINE void add_two_lines(int rows, iv (*sum)[2], const Line *w, const Line *v, const int32_t *x) {
    const __m256i ones = _mm256_set1_epi16(1);
    EACH (n, rows) {
        iv a, b, c, d;
        asm("vpbroadcastd %[x], %[a]\n\t"
            "vpbroadcastd %[y], %[b]\n\t"
            "vpmaddubsw %[a], %[w0], %[c]\n\t"
            "vpmaddubsw %[b], %[v0], %[d]\n\t"
            "vpaddw %[c], %[d], %[c]\n\t"
            "vpmaddwd %[one], %[c], %[c]\n\t"
            "vpaddd %[c], %[s0], %[s0]\n\t"
            "vpmaddubsw %[a], %[w1], %[a]\n\t"
            "vpmaddubsw %[b], %[v1], %[b]\n\t"
            "vpaddw %[a], %[b], %[a]\n\t"
            "vpmaddwd %[one], %[a], %[a]\n\t"
            "vpaddd %[a], %[s1], %[s1]"
            : [s0] "+&x"(sum[n][0]), [s1] "+&x"(sum[n][1]), [a] "=&x"(a), [b] "=&x"(b),
              [c] "=&x"(c), [d] "=&x"(d)
            : [w0] "x"(w[0]), [w1] "x"(w[1]), [v0] "x"(v[0]), [v1] "x"(v[1]), [x] "m"(x[n]),
              [y] "m"(x[rows + n]), [one] "xm"(ones));
    }
}

// For each row, adds w · the four inputs at x: the sizes of w by inputs with the signs of w.
INLINE void add_eight_bit_lines(int rows, iv (*sum)[2], const Line *w, const int32_t *x) {
    const __m256i ones = _mm256_set1_epi16(1), size0 = _mm256_abs_epi8((__m256i)w[0]),
                  size1 = _mm256_abs_epi8((__m256i)w[1]);
    EACH (n, rows) {
        iv a, b;
        asm("vpbroadcastd %[x], %[a]\n\t"
            "vpsignb %[w0], %[a], %[b]\n\t"
            "vpmaddubsw %[b], %[size0], %[b]\n\t"
            "vpmaddwd %[one], %[b], %[b]\n\t"
            "vpaddd %[b], %[s0], %[s0]\n\t"
            "vpsignb %[w1], %[a], %[a]\n\t"
            "vpmaddubsw %[a], %[size1], %[a]\n\t"
            "vpmaddwd %[one], %[a], %[a]\n\t"
            "vpaddd %[a], %[s1], %[s1]"
            : [s0] "+&x"(sum[n][0]), [s1] "+&x"(sum[n][1]), [a] "=&x"(a), [b] "=&x"(b)
            : [w0] "x"(w[0]), [w1] "x"(w[1]), [size0] "x"(size0), [size1] "x"(size1), [x] "m"(x[n]),
              [one] "xm"(ones));
    }
}

// As that of passes.h; `more` is not used.
INLINE void add_products(int rows, iv (*sum)[2], iv *more, int bits, const Line *w, const Line *v,
                         const int32_t *x) {
    (void)more;
    if (bits == 8) {
        add_eight_bit_lines(rows, sum, w, x);
        add_eight_bit_lines(rows, sum, v, x + rows);
    } else if (SHORT_SUMS(bits)) {
        add_four_bit_lines(rows, sum, w, x);
        add_four_bit_lines(rows, sum, v, x + rows);
    } else {
        add_two_lines(rows, sum, w, v, x);
    }
}

// What add_products summed of a block, in 32 bits.
INLINE iv whole_sum(iv sum, int bits) {
    return SHORT_SUMS(bits) ? (iv)_mm256_madd_epi16((__m256i)sum, _mm256_set1_epi16(1)) : sum;
}
#endif
