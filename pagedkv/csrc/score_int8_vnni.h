// scores[row, t] = q[row] . k[t] for int8 K, in integers (VPDPBUSD); K never becomes a float.
//
//   q        = step * (128 * high + low)       two int8 rows, 15 bits: |q - q'| <= step / 2, step = max|q| / 16256
//   k + 128  = an unsigned byte                VPDPBUSD wants one, and xor 0x80 makes it
//   q . k    = step * (128 * (high . (k + 128)) + low . (k + 128) - 128 * sum(128 * high + low))
//
//   32 dims of 16 tokens:                        transposed in words of 4 dims:
//   K t      | w0 | w1 | ... | w7 |                x0   | t: w0 | t+1: w0 | ... | t+15: w0 |    . q word 0, broadcast
//   K t+1    | w0 | w1 | ... | w7 |                x1   | t: w1 | t+1: w1 | ...
//      :                                            :                                       so that an accumulator
//   K t+15   | w0 | ...                            x7   | ...        holds one row's products with 16 tokens, done
//
//   The sum fits: |q . k| in these units is at most 1024 * 16256 * 127 < 2^31, and what wraps on the way
//   wraps back.     Prepared query row: | high, whole 64-byte vectors | low, likewise | offset |
#pragma once
#include "score_float.h"

namespace pagedkv {
namespace PAGEDKV_ISA {

constexpr int kMaxIntegerDim = 1024;

static inline int64_t int8_row_bytes(int head_dim) { return (int64_t)((head_dim + 63) / 64) * 64; }

static int64_t query_bytes_int8(int head_dim) { return 2 * int8_row_bytes(head_dim) + 64; }

// Where 16 rows of K lie, and what to ask for meanwhile: rows side by side, where every address is a base and a
// constant, or rows anywhere.
template <int kRowBytes>
struct DenseRows {
    const char *k, *near, *mid, *far;
    DenseRows(const Tile& tile, int t0, int)
        : k(tile.k[t0] + tile.k_head), near(tile.next_k[t0] + tile.next_k_head),
          mid(tile.far_k[t0] + tile.far_k_head), far(tile.stretch_k + t0 * kRowBytes) {}
    const char* row(int t) const { return k + t * kRowBytes; }
    // two lines of 16 rows: the lines of these dims of rows t and t + 1, or as many
    void ask(int t, int c) const {
        const int line = c / 32 * 8 + t % 8;
        const char* const all[] = {far, mid, near};
        for (const char* rows : all) {
            ask_for(rows + 64 * line);
            ask_for(rows + 64 * line + 64);
        }
    }
};
struct LooseRows {
    const Tile& tile;
    int t0, head_dim;
    LooseRows(const Tile& tile, int t0, int head_dim) : tile(tile), t0(t0), head_dim(head_dim) {}
    const char* row(int t) const { return tile.k[t0 + t] + tile.k_head; }
    void ask(int t, int c) const { ask_k(tile, t0 + t, 2, head_dim, c / 64 * 64); }
};

// acc + four products per lane; the signed bytes are one word of memory for all lanes. As an instruction of its
// own, because GCC 12 moves the accumulators of the intrinsic through the stack.
typedef int32_t Word __attribute__((may_alias));
static inline __m512i dot_bytes(__m512i acc, __m512i unsigned_bytes, const char* word) {
    asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(acc) : "v"(unsigned_bytes), "m"(*(const Word*)word));
    return acc;
}

static inline __m256i load_dims(const char* k, __mmask32 mask, bool whole) {
    return whole ? _mm256_loadu_si256((const __m256i*)k) : _mm256_maskz_loadu_epi8(mask, k);
}

// The way of 32 dims of 16 tokens to x[i], i < 8, with dims 4 i .. 4 i + 3 of token t in lane t. In eight steps of
// up to eight instructions, so that they go between the dot products of what came before: shuffles run beside them
// at no cost, but only as many instructions ahead as the CPU looks.
struct Transposing {
    __m512i x[8], y[2][4];

    template <class Rows>
    __attribute__((always_inline)) inline void step(int i, const Rows& k, int c, __mmask32 mask, bool whole) {
        __m512i* const z = y[i / 2 % 2];
        if (i < 4) {
            const __m512i ab = rows(k.row(i), k.row(i + 4), c, mask, whole);
            const __m512i cd = rows(k.row(i + 8), k.row(i + 12), c, mask, whole);
            y[0][i] = _mm512_shuffle_i32x4(ab, cd, 0x88);
            y[1][i] = _mm512_shuffle_i32x4(ab, cd, 0xdd);
        } else if (i % 2 == 0) {
            const __m512i ab0 = _mm512_unpacklo_epi32(z[0], z[1]), ab1 = _mm512_unpackhi_epi32(z[0], z[1]);
            const __m512i cd0 = _mm512_unpacklo_epi32(z[2], z[3]), cd1 = _mm512_unpackhi_epi32(z[2], z[3]);
            z[0] = ab0, z[1] = ab1, z[2] = cd0, z[3] = cd1;
        } else {
            __m512i* const to = x + i / 2 % 2 * 4;
            to[0] = _mm512_unpacklo_epi64(z[0], z[2]), to[1] = _mm512_unpackhi_epi64(z[0], z[2]);
            to[2] = _mm512_unpacklo_epi64(z[1], z[3]), to[3] = _mm512_unpackhi_epi64(z[1], z[3]);
        }
    }

    static __m512i rows(const char* a, const char* b, int c, __mmask32 mask, bool whole) {
        const __m512i both = _mm512_inserti64x4(_mm512_castsi256_si512(load_dims(a + c, mask, whole)),
                                                load_dims(b + c, mask, whole), 1);
        return _mm512_xor_si512(_mm512_set1_epi8((char)0x80), both);
    }
};

static inline __mmask32 mask_of_dims(int left) { return left >= 32 ? ~(__mmask32)0 : ((__mmask32)1 << left) - 1; }

// kDim: head_dim, if the compiler may know it.
template <int kRows, int kDim, bool kAsk, class Rows>
static void score_rows_int8(const char* q, const Tile& tile, const TileShape& shape, float* scores) {
    const int head_dim = kDim ? kDim : shape.head_dim;
    const int64_t row_bytes = int8_row_bytes(head_dim), q_bytes = query_bytes_int8(head_dim);
    Transposing now;
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++)
        now.step(i, Rows(tile, 0, head_dim), 0, mask_of_dims(head_dim), kDim || head_dim >= 32);
    for (int t0 = 0; t0 < tile.padded; t0 += 16) {
        const Rows k(tile, t0, head_dim), after(tile, t0 + 16 < tile.padded ? t0 + 16 : t0, head_dim);
        // else GCC 12 computes the address of every word of the query beforehand, and keeps them on the stack
        asm("" : "+r"(q));
        __m512i high[kRows], low[kRows];
        for (int r = 0; r < kRows; r++) {
            high[r] = _mm512_setzero_si512();
            low[r] = _mm512_set1_epi32(*(const Word*)(q + r * q_bytes + 2 * row_bytes));
        }
        const auto add_dims = [&](int c) __attribute__((always_inline)) {
            const int next = c + 32 < head_dim ? c + 32 : 0, left = head_dim - next;
            Transposing then;
#pragma GCC unroll 8
            for (int i = 0; i < 8; i++) {
                if (kAsk && i % 2 == 0) k.ask(c % 64 / 4 + i, c);
                then.step(i, next ? k : after, next, mask_of_dims(left), kDim || left >= 32);
                for (int r = 0; r < kRows; r++) {
                    const char* from = q + r * q_bytes + c + 4 * i;
                    high[r] = dot_bytes(high[r], now.x[i], from);
                    low[r] = dot_bytes(low[r], now.x[i], from + row_bytes);
                }
            }
            for (int i = 0; i < 8; i++) now.x[i] = then.x[i];
        };
#pragma GCC unroll 4
        for (int c = 0; c < kDim; c += 32) add_dims(c);
        for (int c = kDim; c < head_dim; c += 32) add_dims(c);
        for (int r = 0; r < kRows; r++) {
            const __m512i dots = _mm512_add_epi32(_mm512_slli_epi32(high[r], 7), low[r]);
            store(scores + r * kTile + t0, _mm512_cvtepi32_ps(dots));
        }
    }
}

template <int kDim, class Rows>
static void score_int8_dim(const char* q, const Tile& tile, const TileShape& shape, float* scores) {
    int row = 0;
    if (shape.rows >= 4) score_rows_int8<4, kDim, true, Rows>(q, tile, shape, scores), row = 4;
    for (; row + 4 <= shape.rows; row += 4)
        score_rows_int8<4, kDim, false, Rows>(q + row * shape.q_bytes, tile, shape, scores + row * kTile);
    q += row * shape.q_bytes;
    if (shape.rows - row == 2) score_rows_int8<2, kDim, true, Rows>(q, tile, shape, scores + row * kTile);
    if (shape.rows - row == 1) score_rows_int8<1, kDim, true, Rows>(q, tile, shape, scores + row * kTile);
}

static void score_int8(const void* q, const Tile& tile, const TileShape& shape, float* scores) {
    if (tile.is_dense && shape.head_dim == 128)
        return score_int8_dim<128, DenseRows<128>>((const char*)q, tile, shape, scores);
    if (tile.is_dense && shape.head_dim == 64)
        return score_int8_dim<64, DenseRows<64>>((const char*)q, tile, shape, scores);
    score_int8_dim<0, LooseRows>((const char*)q, tile, shape, scores);
}

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
    const int32_t offset = -128 * _mm512_reduce_add_epi32(sum);
    memcpy(high + 2 * row_bytes, &offset, sizeof offset);
    return absmax / 16256.0f;
}

}  // namespace PAGEDKV_ISA
}  // namespace pagedkv
