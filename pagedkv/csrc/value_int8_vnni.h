// acc[row] = acc[row] * alpha[row] + sum_t p[row, t] v_scale[t] v[t] for int8 V, four tokens per instruction.
//
//   V t      | a0 a1 a2 a3 ... |  64 columns         bytes of four tokens side by side, two rounds of unpacking:
//   V t+1    | b0 b1 b2 b3 ... |                       | a0 b0 c0 d0 | a1 b1 c1 d1 | ...   16 columns a vector
//   V t+2    | c0 ...          |               times   | w w w w | of t..t+3, broadcast     (VPDPBUSD)
//   V t+3    | d0 ...          |
//
//   w = p * v_scale is carried in units of the tile's largest, W / 32767, as an unsigned high byte and 7 low
//   bits: |w - w'| <= W / 65534. All tokens with high, shift the 16 accumulators by 7 bits, all tokens with
//   low. The sum fits: 64 * 32767 * 127 < 2^31.
#pragma once
#include "score_int8_vnni.h"
#include "value_float.h"

namespace pagedkv {
namespace PAGEDKV_ISA {

// Four tokens of one row in the 32-bit words that are broadcast.
struct QuantizedWeights {
    uint32_t high[4][kTile / 4], low[4][kTile / 4];
    float step[4];
};

static void quantize_weights(const float* p, const float* v_scale, int rows, const Tile& tile,
                             QuantizedWeights* q) {
    for (int r = 0; r < rows; r++) {
        __m512 w[kTile / 16], top = zero();
        __mmask16 nan = 0;
        for (int i = 0; i < tile.padded / 16; i++) {
            // what lies beyond the last token is no scale
            const __mmask16 valid = lanes_between(0, tile.count - 16 * i);
            w[i] = _mm512_maskz_mul_ps(valid, load(p + r * kTile + 16 * i), load(v_scale + 16 * i));
            nan |= _mm512_cmp_ps_mask(w[i], w[i], _CMP_UNORD_Q);
            top = max(w[i], top);
        }
        const float largest_weight = largest(top);
        q->step[r] = nan ? float_of_bits(0x7fc00000) : largest_weight / 32767.0f;
        // so small that its inverse would overflow: nothing
        const __m512 inverse = broadcast(largest_weight < 1e-33f ? 0.0f : 32767.0f / largest_weight);
        for (int i = 0; i < tile.padded / 16; i++) {
            const __m512i x = _mm512_cvtps_epi32(mul(w[i], inverse));
            _mm_storeu_si128((__m128i*)(q->high[r] + 4 * i), _mm512_cvtepi32_epi8(_mm512_srli_epi32(x, 7)));
            _mm_storeu_si128((__m128i*)(q->low[r] + 4 * i),
                             _mm512_cvtepi32_epi8(_mm512_and_si512(x, _mm512_set1_epi32(127))));
        }
    }
}

// acc + four products per lane, as in score_int8_vnni.h.
static inline __m512i dot_bytes(__m512i acc, __m512i unsigned_bytes, __m512i signed_bytes) {
    asm("vpdpbusd %2, %1, %0" : "+v"(acc) : "v"(unsigned_bytes), "v"(signed_bytes));
    return acc;
}

// Where 64 columns of V lie, row t + i for i < 4, and what to ask for meanwhile: as the rows of K, see
// score_int8_vnni.h.
template <int kRowBytes>
struct DenseColumns {
    const Tile& tile;
    int64_t v, near, mid;
    const char* far;
    DenseColumns(const Tile& tile, int column)
        : tile(tile), v(tile.v_head + column), near(tile.next_v_head + column),
          mid(tile.far_v_head + column), far(tile.stretch_v + column * kTile) {}
    const char* row(int t, int i) const { return tile.v[t] + v + i * kRowBytes; }
    void ask(int t, int i) const {
        ask_for(far + (t + i) * 64);
        ask_for(far + (t + i) * 64 + 64);
        const char* const both[] = {tile.far_v[t] + mid, tile.next_v[t] + near};
        for (const char* rows : both) {
            ask_for(rows + i * kRowBytes);
            ask_for(rows + (i + 1) * kRowBytes);
        }
    }
};
struct LooseColumns {
    const Tile& tile;
    int column;
    LooseColumns(const Tile& tile, int column) : tile(tile), column(column) {}
    const char* row(int t, int i) const { return tile.v[t + i] + tile.v_head + column; }
    void ask(int t, int i) const {
        ask_v(tile, t + i, column, 64);
        ask_v(tile, t + i + 1, column, 64);
    }
};

// One pass over all tokens with one part (high or low) of the weights; it asks for rows t + ask, t + ask + 1.
template <int kRows, bool kPart, class Columns>
static inline void add_tokens(const uint32_t (*w)[kTile / 4], const Columns& columns, int padded, __mmask64 mask,
                              int ask, __m512i* acc) {
    for (int t = 0; t < padded; t += 4) {
        __m512i v[4];
        for (int i = 0; i < 4; i++)
            v[i] = kPart ? _mm512_maskz_loadu_epi8(mask, columns.row(t, i)) : _mm512_loadu_si512(columns.row(t, i));
        columns.ask(t, ask);
        const __m512i ab0 = _mm512_unpacklo_epi8(v[0], v[1]), ab1 = _mm512_unpackhi_epi8(v[0], v[1]);
        const __m512i cd0 = _mm512_unpacklo_epi8(v[2], v[3]), cd1 = _mm512_unpackhi_epi8(v[2], v[3]);
        const __m512i x0 = _mm512_unpacklo_epi16(ab0, cd0), x1 = _mm512_unpackhi_epi16(ab0, cd0);
        const __m512i x2 = _mm512_unpacklo_epi16(ab1, cd1), x3 = _mm512_unpackhi_epi16(ab1, cd1);
        for (int r = 0; r < kRows; r++) {
            const __m512i weight = _mm512_set1_epi32((int)w[r][t / 4]);
            acc[4 * r] = dot_bytes(acc[4 * r], weight, x0);
            acc[4 * r + 1] = dot_bytes(acc[4 * r + 1], weight, x1);
            acc[4 * r + 2] = dot_bytes(acc[4 * r + 2], weight, x2);
            acc[4 * r + 3] = dot_bytes(acc[4 * r + 3], weight, x3);
        }
    }
}

// acc[i] holds columns 16 l + 4 i .. + 3 in its 128 bits number l: puts 64 columns in order.
static inline void order_columns(const __m512i* acc, __m512* to) {
    const __m512i a = _mm512_shuffle_i32x4(acc[0], acc[1], 0x44), b = _mm512_shuffle_i32x4(acc[2], acc[3], 0x44);
    const __m512i c = _mm512_shuffle_i32x4(acc[0], acc[1], 0xee), d = _mm512_shuffle_i32x4(acc[2], acc[3], 0xee);
    to[0] = _mm512_cvtepi32_ps(_mm512_shuffle_i32x4(a, b, 0x88));
    to[1] = _mm512_cvtepi32_ps(_mm512_shuffle_i32x4(a, b, 0xdd));
    to[2] = _mm512_cvtepi32_ps(_mm512_shuffle_i32x4(c, d, 0x88));
    to[3] = _mm512_cvtepi32_ps(_mm512_shuffle_i32x4(c, d, 0xdd));
}

template <int kRows, bool kPart, class Columns>
static void value_strip_int8(const QuantizedWeights& w, const Tile& tile, int column, __mmask64 mask,
                             const float* alpha, float* acc, int64_t acc_stride) {
    __m512i a[4 * kRows];
    for (int i = 0; i < 4 * kRows; i++) a[i] = _mm512_setzero_si512();
    const Columns columns(tile, column);
    add_tokens<kRows, kPart>(w.high, columns, tile.padded, mask, 0, a);
    for (int i = 0; i < 4 * kRows; i++) a[i] = _mm512_slli_epi32(a[i], 7);
    add_tokens<kRows, kPart>(w.low, columns, tile.padded, mask, 2, a);
    for (int r = 0; r < kRows; r++) {
        __m512 ordered[4];
        order_columns(a + 4 * r, ordered);
        for (int c = 0; c < 4; c++) {
            float* to = acc + r * acc_stride + column + 16 * c;
            store(to, fma(load(to), broadcast(alpha[r]), mul(ordered[c], broadcast(w.step[r]))));
        }
    }
}

template <int kRows, class Columns>
static void value_rows_int8(const QuantizedWeights& w, const Tile& tile, int v_head_dim,
                            const float* alpha, float* acc, int64_t acc_stride) {
    int column = 0;
    for (; column + 64 <= v_head_dim; column += 64)
        value_strip_int8<kRows, false, Columns>(w, tile, column, 0, alpha, acc, acc_stride);
    if (column < v_head_dim)
        value_strip_int8<kRows, true, Columns>(w, tile, column, ((__mmask64)1 << (v_head_dim - column)) - 1, alpha, acc,
                                      acc_stride);
}

template <class Columns>
static void value_int8_in(const float* p, const float* v_scale, const Tile& tile, const TileShape& shape,
                          const float* alpha, float* acc) {
    QuantizedWeights w;
    for (int row = 0; row < shape.rows;) {
        const int rows = shape.rows - row >= 4 ? 4 : shape.rows - row;
        quantize_weights(p + row * kTile, v_scale, rows, tile, &w);
        float* to = acc + row * shape.acc_stride;
        const float* factors = alpha + row;
        if (rows == 4) value_rows_int8<4, Columns>(w, tile, shape.v_head_dim, factors, to, shape.acc_stride);
        if (rows == 2) value_rows_int8<2, Columns>(w, tile, shape.v_head_dim, factors, to, shape.acc_stride);
        if (rows == 1) value_rows_int8<1, Columns>(w, tile, shape.v_head_dim, factors, to, shape.acc_stride);
        row += rows;
    }
}

static void value_int8(const float* p, const float* v_scale, const Tile& tile, const TileShape& shape,
                       const float* alpha, float* acc) {
    if (tile.is_dense && shape.v_head_dim == 128)
        return value_int8_in<DenseColumns<128>>(p, v_scale, tile, shape, alpha, acc);
    if (tile.is_dense && shape.v_head_dim == 64)
        return value_int8_in<DenseColumns<64>>(p, v_scale, tile, shape, alpha, acc);
    value_int8_in<LooseColumns>(p, v_scale, tile, shape, alpha, acc);
}

}  // namespace PAGEDKV_ISA
}  // namespace pagedkv
