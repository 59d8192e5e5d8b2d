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

// Four tokens of one row in the 32-bit words that are broadcast; token t in word t / 4 % 4 * 4 + t / 16, as packing
// by 128 bits leaves them.
struct QuantizedWeights {
    uint32_t high[4][kTile / 4], low[4][kTile / 4];
    float step[4];
};

// Lane r of each 128 bits: the largest of the lanes of a[r], as unsigned numbers.
static inline __m512i largest_bits(const __m512i* a) {
    const __m512i ab = _mm512_max_epu32(_mm512_unpacklo_epi32(a[0], a[1]), _mm512_unpackhi_epi32(a[0], a[1]));
    const __m512i cd = _mm512_max_epu32(_mm512_unpacklo_epi32(a[2], a[3]), _mm512_unpackhi_epi32(a[2], a[3]));
    __m512i x = _mm512_max_epu32(_mm512_unpacklo_epi64(ab, cd), _mm512_unpackhi_epi64(ab, cd));
    x = _mm512_max_epu32(x, _mm512_shuffle_i32x4(x, x, 0x4e));
    return _mm512_max_epu32(x, _mm512_shuffle_i32x4(x, x, 0xb1));
}

template <int kRows>
static inline void quantize_weights(const float* p, const float* const* v_scale, int count, QuantizedWeights* q) {
    __m512 w[4][4];
    __m512i top[4];
    for (int r = 0; r < 4; r++) top[r] = _mm512_setzero_si512();
    for (int r = 0; r < kRows; r++)
        for (int i = 0; i < 4; i++) {
            // what lies beyond the last token is no scale
            const __mmask16 valid = lanes_between(0, count - 16 * i);
            w[r][i] = _mm512_maskz_mul_ps(valid, load(p + r * kTile + 16 * i), load(v_scale[i]));
            // the bits of positive floats are in their order, and NaN of either sign is the largest
            top[r] = _mm512_max_epu32(top[r], _mm512_castps_si512(w[r][i]));
        }
    const Vec largest = _mm512_castsi512_ps(largest_bits(top));
    _mm_storeu_ps(q->step, _mm512_castps512_ps128(mul(largest, broadcast(1.0f / 32767.0f))));
    // so small that its inverse would overflow: nothing
    const Vec all = _mm512_maskz_div_ps(_mm512_cmp_ps_mask(largest, broadcast(1e-33f), _CMP_GE_OQ),
                                        broadcast(32767.0f), largest);
    const Vec inverse[4] = {_mm512_permute_ps(all, 0x00), _mm512_permute_ps(all, 0x55),
                            _mm512_permute_ps(all, 0xaa), _mm512_permute_ps(all, 0xff)};
    const __m512i low_bits = _mm512_set1_epi16(127);
    for (int r = 0; r < kRows; r++) {
        __m512i x[4];
        for (int i = 0; i < 4; i++) x[i] = _mm512_cvtps_epi32(mul(w[r][i], inverse[r]));
        const __m512i ab = _mm512_packs_epi32(x[0], x[1]), cd = _mm512_packs_epi32(x[2], x[3]);
        _mm512_storeu_si512(q->high[r], _mm512_packus_epi16(_mm512_srli_epi16(ab, 7), _mm512_srli_epi16(cd, 7)));
        _mm512_storeu_si512(
            q->low[r], _mm512_packus_epi16(_mm512_and_si512(ab, low_bits), _mm512_and_si512(cd, low_bits)));
    }
}

// acc + four products per lane, as in score_int8_vnni.h.
static inline __m512i dot_bytes(__m512i acc, __m512i unsigned_bytes, __m512i signed_bytes) {
    asm("vpdpbusd %2, %1, %0" : "+v"(acc) : "v"(unsigned_bytes), "v"(signed_bytes));
    return acc;
}

// Where 64 columns of 16 rows of V lie, and what to ask for meanwhile: as the rows of K, see score_int8_vnni.h.
template <int kRowBytes>
struct DenseColumns {
    const char *v, *near, *mid, *far;
    DenseColumns(const Tile& tile, int t0, int column)
        : v(tile.v[t0] + tile.v_head + column), near(tile.next_v[t0] + tile.next_v_head + column),
          mid(tile.far_v[t0] + tile.far_v_head + column), far(tile.stretch_v + column * kTile + t0 * 64) {}
    const char* row(int t) const { return v + t * kRowBytes; }
    void ask(int t) const {
        ask_for(far + t * 64);
        ask_for(far + t * 64 + 64);
        const char* const both[] = {mid, near};
        for (const char* rows : both) {
            ask_for(rows + t * kRowBytes);
            ask_for(rows + t * kRowBytes + kRowBytes);
        }
    }
};
struct LooseColumns {
    const Tile& tile;
    int t0, column;
    LooseColumns(const Tile& tile, int t0, int column) : tile(tile), t0(t0), column(column) {}
    const char* row(int t) const { return tile.v[t0 + t] + tile.v_head + column; }
    void ask(int t) const {
        ask_v(tile, t0 + t, column, 64);
        ask_v(tile, t0 + t + 1, column, 64);
    }
};

// Four tokens of 64 columns, side by side as in the drawing. In four steps, as in score_int8_vnni.h.
template <bool kPart, class Columns>
struct Interleaving {
    __m512i x[4], ab0, ab1, cd0, cd1;

    __attribute__((always_inline)) inline void step(int i, const Columns& columns, int t, __mmask64 mask) {
        if (i < 2) {
            const __m512i a = row(columns.row(t + 2 * i), mask), b = row(columns.row(t + 2 * i + 1), mask);
            (i ? cd0 : ab0) = _mm512_unpacklo_epi8(a, b);
            (i ? cd1 : ab1) = _mm512_unpackhi_epi8(a, b);
        } else {
            const __m512i ab = i == 2 ? ab0 : ab1, cd = i == 2 ? cd0 : cd1;
            x[2 * i - 4] = _mm512_unpacklo_epi16(ab, cd);
            x[2 * i - 3] = _mm512_unpackhi_epi16(ab, cd);
        }
    }

    static __m512i row(const char* v, __mmask64 mask) {
        return kPart ? _mm512_maskz_loadu_epi8(mask, v) : _mm512_loadu_si512(v);
    }
};

// One pass over all tokens with one part (high or low) of the weights; of four rows it asks for two, the first or
// the last. `now` holds the first tokens, before and afterwards.
template <int kRows, bool kPart, class Columns>
__attribute__((always_inline)) static inline void add_tokens(const uint32_t (*w)[kTile / 4], const Tile& tile,
                                                             int column, __mmask64 mask, int ask,
                                                             Interleaving<kPart, Columns>& now, __m512i* acc) {
    for (int t0 = 0; t0 < tile.padded; t0 += 16) {
        const Columns v(tile, t0, column), after(tile, t0 + 16 < tile.padded ? t0 + 16 : 0, column);
        const uint32_t* words = w[0] + t0 / 16;
        asm("" : "+r"(words));  // as in score_int8_vnni.h
        for (int t = 0; t < 16; t += 4) {
            Interleaving<kPart, Columns> then;
            v.ask(t + ask);
#pragma GCC unroll 4
            for (int i = 0; i < 4; i++) {
                then.step(i, t < 12 ? v : after, t < 12 ? t + 4 : 0, mask);
                if (i >= kRows) continue;
                const __m512i weight = _mm512_set1_epi32((int)words[i * (kTile / 4) + t]);
#pragma GCC unroll 4
                for (int j = 0; j < 4; j++) acc[4 * i + j] = dot_bytes(acc[4 * i + j], weight, now.x[j]);
            }
#pragma GCC unroll 4
            for (int j = 0; j < 4; j++) now.x[j] = then.x[j];
        }
    }
}

// Vector i of 64 columns holds 16 l + 4 i .. + 3 in its 128 bits number l, as unpacking by 128 bits leaves them: acc
// stays so, and only what is written out is put in order.
static void order_row_int8(float* acc, int n) {
    for (float* x = acc; x < acc + n; x += 64) {
        const __m512 x0 = load(x), x1 = load(x + 16), x2 = load(x + 32), x3 = load(x + 48);
        const __m512 a = _mm512_shuffle_f32x4(x0, x1, 0x44), b = _mm512_shuffle_f32x4(x2, x3, 0x44);
        const __m512 c = _mm512_shuffle_f32x4(x0, x1, 0xee), d = _mm512_shuffle_f32x4(x2, x3, 0xee);
        store(x, _mm512_shuffle_f32x4(a, b, 0x88)), store(x + 16, _mm512_shuffle_f32x4(a, b, 0xdd));
        store(x + 32, _mm512_shuffle_f32x4(c, d, 0x88)), store(x + 48, _mm512_shuffle_f32x4(c, d, 0xdd));
    }
}

template <int kRows, bool kPart, class Columns>
static void value_strip_int8(const QuantizedWeights& w, const Tile& tile, int column, __mmask64 mask,
                             const float* alpha, float* acc, int64_t acc_stride) {
    __m512i a[4 * kRows];
#pragma GCC unroll 16
    for (int i = 0; i < 4 * kRows; i++) a[i] = _mm512_setzero_si512();
    Interleaving<kPart, Columns> first;
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) first.step(i, Columns(tile, 0, column), 0, mask);
    add_tokens<kRows>(w.high, tile, column, mask, 0, first, a);
#pragma GCC unroll 16
    for (int i = 0; i < 4 * kRows; i++) a[i] = _mm512_slli_epi32(a[i], 7);
    add_tokens<kRows>(w.low, tile, column, mask, 2, first, a);
#pragma GCC unroll 4
    for (int r = 0; r < kRows; r++)
#pragma GCC unroll 4
        for (int c = 0; c < 4; c++) {
            float* to = acc + r * acc_stride + column + 16 * c;
            const __m512 sum = mul(_mm512_cvtepi32_ps(a[4 * r + c]), broadcast(w.step[r]));
            store(to, alpha ? fma(load(to), broadcast(alpha[r]), sum) : sum);
        }
}

template <int kRows, class Columns>
static void value_rows_int8(const float* p, const float* const* v_scale, const Tile& tile, const TileShape& shape,
                            const float* alpha, float* acc) {
    QuantizedWeights w;
    quantize_weights<kRows>(p, v_scale, tile.count, &w);
    int column = 0;
    for (; column + 64 <= shape.v_head_dim; column += 64)
        value_strip_int8<kRows, false, Columns>(w, tile, column, 0, alpha, acc, shape.acc_stride);
    if (column == shape.v_head_dim) return;
    const __mmask64 mask = ((__mmask64)1 << (shape.v_head_dim - column)) - 1;
    value_strip_int8<kRows, true, Columns>(w, tile, column, mask, alpha, acc, shape.acc_stride);
}

template <class Columns>
static void value_int8_in(const float* p, const float* const* v_scale, const Tile& tile, const TileShape& shape,
                          const float* alpha, float* acc) {
    for (int row = 0; row < shape.rows;) {
        const int rows = shape.rows - row >= 4 ? 4 : shape.rows - row;
        const float* weights = p + row * kTile;
        float* to = acc + row * shape.acc_stride;
        const float* factors = alpha ? alpha + row : nullptr;
        if (rows == 4) value_rows_int8<4, Columns>(weights, v_scale, tile, shape, factors, to);
        if (rows == 2) value_rows_int8<2, Columns>(weights, v_scale, tile, shape, factors, to);
        if (rows == 1) value_rows_int8<1, Columns>(weights, v_scale, tile, shape, factors, to);
        row += rows;
    }
}

static void value_int8(const float* p, const float* const* v_scale, const Tile& tile, const TileShape& shape,
                       const float* alpha, float* acc) {
    if (tile.is_dense && shape.v_head_dim == 128)
        return value_int8_in<DenseColumns<128>>(p, v_scale, tile, shape, alpha, acc);
    if (tile.is_dense && shape.v_head_dim == 64)
        return value_int8_in<DenseColumns<64>>(p, v_scale, tile, shape, alpha, acc);
    value_int8_in<LooseColumns>(p, v_scale, tile, shape, alpha, acc);
}

}  // namespace PAGEDKV_ISA
}  // namespace pagedkv
