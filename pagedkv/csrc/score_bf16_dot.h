// scores[row, t] = q[row] . k[t] in bf16: pairs of products, exact in fp32, summed in fp32 (VDPBF16PS).
//
//              32 dims -->                        as score_float.h, with twice the dims per instruction and
//            +------+------+---                   no widening: 4 rows x 4 tokens, 2 x 8 or 1 x 16 accumulators
//   K t      |  k0  |      |                      of 16 partial sums. The query is bf16 already, so nothing
//   q row 0  |  a00   ..   (dot pairs)            is rounded.
#pragma once
#include "score_float.h"

namespace pagedkv {
namespace PAGEDKV_ISA {

static inline __m512bh pairs(const void* p) {
    __m512i x = _mm512_loadu_si512(p);
    return (__m512bh)x;
}
static inline __m512bh pairs_part(const void* p, int n) {
    __m512i x = _mm512_maskz_loadu_epi16((__mmask32)((1ull << n) - 1), p);
    return (__m512bh)x;
}

template <int kRows>
static void score_rows_bf16(const char* q, const Tile& tile, const TileShape& shape, float* scores,
                            bool prefetch) {
    constexpr int kTokens = 16 / kRows;
    const int whole = shape.head_dim / 32 * 32, rest = shape.head_dim - whole;
    for (int t0 = 0; t0 < tile.padded; t0 += kTokens) {
        const Bf16* k[kTokens];
        __m512 acc[16];
        for (int t = 0; t < kTokens; t++) {
            k[t] = (const Bf16*)(tile.k[t0 + t] + tile.k_head);
        }
        for (int i = 0; i < 16; i++) acc[i] = zero();
        for (int c = 0; c < whole; c += 32) {
            if (prefetch) ask_k(tile, t0, kTokens, shape.head_dim * 2, c * 2);
            __m512bh kv[kTokens];
            for (int t = 0; t < kTokens; t++) kv[t] = pairs(k[t] + c);
            for (int r = 0; r < kRows; r++) {
                const __m512bh qv = pairs(q + r * shape.q_bytes + c * 2);
                for (int t = 0; t < kTokens; t++)
                    acc[r * kTokens + t] = _mm512_dpbf16_ps(acc[r * kTokens + t], qv, kv[t]);
            }
        }
        if (rest)
            for (int t = 0; t < kTokens; t++) {
                const __m512bh kv = pairs_part(k[t] + whole, rest);
                for (int r = 0; r < kRows; r++)
                    acc[r * kTokens + t] = _mm512_dpbf16_ps(acc[r * kTokens + t],
                                                            pairs(q + r * shape.q_bytes + whole * 2), kv);
            }
        float dots[16];
        store(dots, sums(acc));
        for (int r = 0; r < kRows; r++)
            memcpy(scores + r * kTile + t0, dots + r * kTokens, kTokens * sizeof(float));
    }
}

static void score_bf16(const void* q, const Tile& tile, const TileShape& shape, float* scores) {
    int row = 0;
    for (; row + 4 <= shape.rows; row += 4)
        score_rows_bf16<4>((const char*)q + row * shape.q_bytes, tile, shape, scores + row * kTile, row == 0);
    const char* rest = (const char*)q + row * shape.q_bytes;
    if (shape.rows - row == 2) score_rows_bf16<2>(rest, tile, shape, scores + row * kTile, row == 0);
    if (shape.rows - row == 1) score_rows_bf16<1>(rest, tile, shape, scores + row * kTile, row == 0);
}

static int64_t query_bytes_bf16(int head_dim) { return (int64_t)((head_dim + 31) / 32) * 64; }

static float prepare_query_bf16(const float* q, int head_dim, void* prepared) {
    memset(prepared, 0, (size_t)query_bytes_bf16(head_dim));
    store_row(q, kBf16, head_dim, prepared);  // exact: it came from bf16
    return 1.0f;
}

}  // namespace PAGEDKV_ISA
}  // namespace pagedkv
