// scores[row, t] = q[row] . k[t] for int8 K, in integers (VPDPBUSD); K never becomes a float.
//
//   q        = step * (128 * high + low)       two int8 rows, 15 bits: |q - q'| <= step / 2, step = max|q| / 16256
//   k + 128  = an unsigned byte                VPDPBUSD wants one, and xor 0x80 makes it
//   q . k    = step * (128 * (high . (k + 128)) + low . (k + 128) - 128 * sum(128 * high + low))
//
//   64 dims of 4 tokens, 16 dims = 128 bits apart:        transposed by 128 bits:
//   K t      | a0 | a1 | a2 | a3 |                        | a0 | b0 | c0 | d0 |   . high 0 | high 0 | ... broadcast
//   K t+4    | b0 | b1 | b2 | b3 |                        | a1 | b1 | c1 | d1 |   . high 1 | ...
//   K t+8    | c0 | c1 | c2 | c3 |                        | a2 | b2 | c2 | d2 |
//   K t+12   | d0 | d1 | d2 | d3 |                        | a3 | b3 | c3 | d3 |
//   so that an accumulator holds 4 partial sums of each of 4 tokens, and 4 of them reduce to 16 dot products.
//   Two such groups of tokens x rows x (high, low) are accumulated at a time; 4 groups make 16 tokens.
//
//   The sum fits: |q . k| in these units is at most 1024 * 16256 * 127 < 2^31, and what wraps before the last
//   subtraction wraps back.     Prepared query row: | high, whole 64-byte vectors | low, likewise | offset |
#pragma once
#include "score_float.h"

namespace pagedkv {
namespace PAGEDKV_ISA {

constexpr int kMaxIntegerDim = 1024;

static inline int64_t int8_row_bytes(int head_dim) { return (int64_t)((head_dim + 63) / 64) * 64; }

// acc + four products per lane. As an instruction of its own, because GCC 12 moves the accumulators of the
// intrinsic through the stack.
static inline __m512i dot_bytes(__m512i acc, __m512i unsigned_bytes, __m512i signed_bytes) {
    asm("vpdpbusd %2, %1, %0" : "+v"(acc) : "v"(unsigned_bytes), "v"(signed_bytes));
    return acc;
}

// Four tokens, 64 dims (bytes that `mask` leaves out meet zeros in the query), as drawn above.
static inline void load_transposed(const char* const* k, int c, __mmask64 mask, __m512i* x) {
    const __m512i bias = _mm512_set1_epi8((char)0x80);
    __m512i row[4];
    for (int i = 0; i < 4; i++) row[i] = _mm512_xor_si512(_mm512_maskz_loadu_epi8(mask, k[4 * i] + c), bias);
    const __m512i ab01 = _mm512_shuffle_i32x4(row[0], row[1], 0x44);
    const __m512i ab23 = _mm512_shuffle_i32x4(row[0], row[1], 0xee);
    const __m512i cd01 = _mm512_shuffle_i32x4(row[2], row[3], 0x44);
    const __m512i cd23 = _mm512_shuffle_i32x4(row[2], row[3], 0xee);
    x[0] = _mm512_shuffle_i32x4(ab01, cd01, 0x88);
    x[1] = _mm512_shuffle_i32x4(ab01, cd01, 0xdd);
    x[2] = _mm512_shuffle_i32x4(ab23, cd23, 0x88);
    x[3] = _mm512_shuffle_i32x4(ab23, cd23, 0xdd);
}

static inline __m512i sixteen_dims(const char* q) {
    return _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)q));
}

// sums[g][row] of token groups g and g + 1. kDim: head_dim, if the compiler may know it.
template <int kRows, int kDim>
static inline void dot_two_groups(const char* q, int64_t q_bytes, const char* const* k, const Tile* ahead, int t,
                                  int head_dim, __m512i (*sums)[kRows]) {
    if (kDim) head_dim = kDim;
    const int64_t row_bytes = int8_row_bytes(head_dim);
    __m512i high[2][kRows], low[2][kRows];
    for (int g = 0; g < 2; g++)
        for (int r = 0; r < kRows; r++) high[g][r] = low[g][r] = _mm512_setzero_si512();
    for (int c = 0; c < head_dim; c += 64) {
        const __mmask64 mask = head_dim - c >= 64 ? ~(__mmask64)0 : ((__mmask64)1 << (head_dim - c)) - 1;
        if (ahead) prefetch_k(*ahead, t, 8, head_dim, c);
        __m512i x[2][4];
        load_transposed(k, c, mask, x[0]);
        load_transposed(k + 1, c, mask, x[1]);
        for (int i = 0; i < 4; i++)
            for (int r = 0; r < kRows; r++) {
                const char* from = q + r * q_bytes + c + 16 * i;
                const __m512i upper = sixteen_dims(from), lower = sixteen_dims(from + row_bytes);
                for (int g = 0; g < 2; g++) {
                    high[g][r] = dot_bytes(high[g][r], x[g][i], upper);
                    low[g][r] = dot_bytes(low[g][r], x[g][i], lower);
                }
            }
    }
    for (int g = 0; g < 2; g++)
        for (int r = 0; r < kRows; r++)
            sums[g][r] = _mm512_add_epi32(_mm512_slli_epi32(high[g][r], 7), low[g][r]);
}

// Lane 4 l + g of the result = sum of 128 bits number l of group g: tokens in order.
static inline __m512i sum_groups(__m512i a, __m512i b, __m512i c, __m512i d) {
    const __m512i ab = _mm512_add_epi32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
    const __m512i cd = _mm512_add_epi32(_mm512_unpacklo_epi32(c, d), _mm512_unpackhi_epi32(c, d));
    return _mm512_add_epi32(_mm512_unpacklo_epi64(ab, cd), _mm512_unpackhi_epi64(ab, cd));
}

template <int kRows, int kDim>
static void score_rows_int8(const char* q, const Tile& tile, const TileShape& shape, float* scores,
                            bool prefetch) {
    const int64_t row_bytes = int8_row_bytes(shape.head_dim);
    for (int t0 = 0; t0 < tile.padded; t0 += 16) {
        const char* k[16];
        for (int t = 0; t < 16; t++) k[t] = tile.k[t0 + t] + tile.k_head;
        const Tile* ahead = prefetch ? &tile : nullptr;
        __m512i sums[4][kRows];
        dot_two_groups<kRows, kDim>(q, shape.q_bytes, k, ahead, t0, shape.head_dim, sums);
        dot_two_groups<kRows, kDim>(q, shape.q_bytes, k + 2, ahead, t0 + 8, shape.head_dim, sums + 2);
        for (int r = 0; r < kRows; r++) {
            int32_t offset;
            memcpy(&offset, q + r * shape.q_bytes + 2 * row_bytes, sizeof offset);
            const __m512i dots = sum_groups(sums[0][r], sums[1][r], sums[2][r], sums[3][r]);
            store(scores + r * kTile + t0, _mm512_cvtepi32_ps(_mm512_sub_epi32(dots, _mm512_set1_epi32(offset))));
        }
    }
}

template <int kDim>
static void score_int8_dim(const char* q, const Tile& tile, const TileShape& shape, float* scores) {
    int row = 0;
    for (; row + 4 <= shape.rows; row += 4)
        score_rows_int8<4, kDim>(q + row * shape.q_bytes, tile, shape, scores + row * kTile, row == 0);
    q += row * shape.q_bytes;
    if (shape.rows - row == 2) score_rows_int8<2, kDim>(q, tile, shape, scores + row * kTile, row == 0);
    if (shape.rows - row == 1) score_rows_int8<1, kDim>(q, tile, shape, scores + row * kTile, row == 0);
}

static void score_int8(const void* q, const Tile& tile, const TileShape& shape, float* scores) {
    if (shape.head_dim == 128) return score_int8_dim<128>((const char*)q, tile, shape, scores);
    if (shape.head_dim == 64) return score_int8_dim<64>((const char*)q, tile, shape, scores);
    score_int8_dim<0>((const char*)q, tile, shape, scores);
}

static int64_t query_bytes_int8(int head_dim) { return 2 * int8_row_bytes(head_dim) + 64; }

// Returns step, which is NaN for a query that is not finite.
static float prepare_query_int8(const float* q, int head_dim, void* prepared) {
    const int64_t row_bytes = int8_row_bytes(head_dim);
    int8_t *high = (int8_t*)prepared, *low = high + row_bytes;
    memset(prepared, 0, (size_t)query_bytes_int8(head_dim));
    __m512 top = zero();
    __mmask16 nan = 0;
    for (int i = 0; i < head_dim; i += 16) {
        const __m512 x = abs(widen_part(q + i, head_dim - i < 16 ? head_dim - i : 16));
        top = max(x, top);
        nan |= _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    }
    const float absmax = largest(top);
    if (nan || absmax == INFINITY) return float_of_bits(0x7fc00000);
    // below this the step would be subnormal and its inverse infinite
    if (absmax < 1e-30f) return 0.0f;
    const __m512 inverse = broadcast(16256.0f / absmax);
    __m512i sum = _mm512_setzero_si512();
    for (int i = 0; i < head_dim; i += 16) {
        const __m512 x = widen_part(q + i, head_dim - i < 16 ? head_dim - i : 16);
        const __m512i whole = _mm512_cvtps_epi32(mul(x, inverse));
        const __m512i upper = _mm512_srai_epi32(_mm512_add_epi32(whole, _mm512_set1_epi32(64)), 7);
        const __m512i lower = _mm512_sub_epi32(whole, _mm512_slli_epi32(upper, 7));
        _mm_storeu_si128((__m128i*)(high + i), _mm512_cvtepi32_epi8(upper));
        _mm_storeu_si128((__m128i*)(low + i), _mm512_cvtepi32_epi8(lower));
        sum = _mm512_add_epi32(sum, whole);
    }
    const int32_t offset = 128 * _mm512_reduce_add_epi32(sum);
    memcpy(high + 2 * row_bytes, &offset, sizeof offset);
    return absmax / 16256.0f;
}

}  // namespace PAGEDKV_ISA
}  // namespace pagedkv
