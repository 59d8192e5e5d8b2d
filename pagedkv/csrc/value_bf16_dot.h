// acc[row] = acc[row] * alpha[row] + sum_t p[row, t] v[t] in bf16, two tokens per instruction (VDPBF16PS).
//
//   V t      | a0 a1 a2 a3 | ...   32 columns        low   | a0 b0 a1 b1 a2 b2 a3 b3 | per 128 bits
//   V t+1    | b0 b1 b2 b3 | ...                     high  | a4 b4 ...               |
//                                                    times | p[t] p[t+1] | broadcast
//   A strip is 64 columns = 4 interleaved vectors x rows accumulators. p is carried as two bf16, high and low,
//   16 bits in all: |p - (high + low)| <= p / 2^17. The columns of an accumulator are put in order at the end.
#pragma once
#include "value_float.h"

namespace pagedkv {
namespace PAGEDKV_ISA {

// Pairs of tokens of one row, high and low parts, as the 32-bit words that are broadcast.
struct PairedWeights {
    uint32_t high[4][kTile / 2], low[4][kTile / 2];
};

static void pair_weights(const float* p, int rows, int padded, PairedWeights* w) {
    for (int r = 0; r < rows; r++)
        for (int t = 0; t < padded; t += 16) {
            const __m512 x = load(p + r * kTile + t);
            const __m256i high = (__m256i)_mm512_cvtneps_pbh(x);
            const __m256i low = (__m256i)_mm512_cvtneps_pbh(sub(x, of_bf16(high)));
            _mm256_storeu_si256((__m256i*)(w->high[r] + t / 2), high);
            _mm256_storeu_si256((__m256i*)(w->low[r] + t / 2), low);
        }
}

// kVecs of 32 columns; part: 0, or how many columns there are of a single, incomplete vector
template <int kRows, int kVecs>
static void value_strip_bf16(const PairedWeights& w, const Tile& tile, int column, int part, bool prefetch,
                             const float* alpha, float* acc, int64_t acc_stride) {
    __m512 a[kRows * kVecs * 2];
    for (int i = 0; i < kRows * kVecs * 2; i++) a[i] = zero();
    for (int t = 0; t < tile.padded; t += 2) {
        const Bf16* v0 = (const Bf16*)(tile.v[t] + tile.v_head) + column;
        const Bf16* v1 = (const Bf16*)(tile.v[t + 1] + tile.v_head) + column;
        __m512bh v[kVecs * 2];
        if (prefetch) {
            ask_v(tile, t, 2 * column, 64 * kVecs);
            ask_v(tile, t + 1, 2 * column, 64 * kVecs);
        }
        for (int c = 0; c < kVecs; c++) {
            const __m512i x = part ? (__m512i)pairs_part(v0, part) : (__m512i)pairs(v0 + 32 * c);
            const __m512i y = part ? (__m512i)pairs_part(v1, part) : (__m512i)pairs(v1 + 32 * c);
            v[2 * c] = (__m512bh)_mm512_unpacklo_epi16(x, y);
            v[2 * c + 1] = (__m512bh)_mm512_unpackhi_epi16(x, y);
        }
        for (int r = 0; r < kRows; r++) {
            const __m512bh high = (__m512bh)_mm512_set1_epi32((int)w.high[r][t / 2]);
            const __m512bh low = (__m512bh)_mm512_set1_epi32((int)w.low[r][t / 2]);
            for (int c = 0; c < 2 * kVecs; c++) {
                __m512& sum = a[r * 2 * kVecs + c];
                sum = _mm512_dpbf16_ps(_mm512_dpbf16_ps(sum, v[c], high), v[c], low);
            }
        }
    }
    const __m512i first = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    const __m512i second = _mm512_setr_epi32(8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
    for (int r = 0; r < kRows; r++)
        for (int c = 0; c < kVecs; c++) {
            const __m512 low = a[r * 2 * kVecs + 2 * c], high = a[r * 2 * kVecs + 2 * c + 1];
            float* to = acc + r * acc_stride + column + 32 * c;
            __m512 x = _mm512_permutex2var_ps(low, first, high), y = _mm512_permutex2var_ps(low, second, high);
            if (alpha) x = fma(load(to), broadcast(alpha[r]), x), y = fma(load(to + 16), broadcast(alpha[r]), y);
            store(to, x);
            store(to + 16, y);
        }
}

template <int kRows>
static void value_rows_bf16(const PairedWeights& w, const Tile& tile, int v_head_dim, bool prefetch,
                            const float* alpha, float* acc, int64_t acc_stride) {
    int column = 0;
    for (; column + 64 <= v_head_dim; column += 64)
        value_strip_bf16<kRows, 2>(w, tile, column, 0, prefetch, alpha, acc, acc_stride);
    for (; column < v_head_dim; column += 32) {
        const int part = v_head_dim - column < 32 ? v_head_dim - column : 0;
        value_strip_bf16<kRows, 1>(w, tile, column, part, prefetch, alpha, acc, acc_stride);
    }
}

static void value_bf16(const float* p, const float* const*, const Tile& tile, const TileShape& shape,
                       const float* alpha, float* acc) {
    PairedWeights w;
    for (int row = 0; row < shape.rows;) {
        const int rows = shape.rows - row >= 4 ? 4 : shape.rows - row;
        pair_weights(p + row * kTile, rows, tile.padded, &w);
        float* to = acc + row * shape.acc_stride;
        const float* factors = alpha ? alpha + row : nullptr;
        if (rows == 4) value_rows_bf16<4>(w, tile, shape.v_head_dim, row == 0, factors, to, shape.acc_stride);
        if (rows == 2) value_rows_bf16<2>(w, tile, shape.v_head_dim, row == 0, factors, to, shape.acc_stride);
        if (rows == 1) value_rows_bf16<1>(w, tile, shape.v_head_dim, row == 0, factors, to, shape.acc_stride);
        row += rows;
    }
}

}  // namespace PAGEDKV_ISA
}  // namespace pagedkv
