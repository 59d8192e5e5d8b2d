// scores[row, t] = q[row] . k[t], for float K of any width and for int8 widened to fp32.
//
//              chunk of kLanes dims -->           a register block: rows x tokens accumulators = kLanes
//            +------+------+------+---            (AVX-512: 4 x 4, 2 x 8 or 1 x 16), each holding kLanes
//   K t      |  k0  |      |      |               partial sums. One K load serves all rows, one q load all
//   K t+1    |  k1  |      |      |               tokens. At the end of the rows one transposing addition
//            +------+------+------+---            leaves every dot product in a lane of its own.
//   q row 0  |  a00   a01  ..  (fma)
//   q row 1  |  a10   a11  ..
#pragma once
#include "ask_ahead.h"

namespace pagedkv {
namespace PAGEDKV_ISA {

template <int kRows>
constexpr int tokens_per_block() { return kLanes / kRows; }

template <class E, int kRows>
static void score_rows(const float* q, const Tile& tile, const TileShape& shape, float* scores,
                       bool prefetch) {
    constexpr int kTokens = tokens_per_block<kRows>();
    const int64_t stride = shape.q_bytes / (int64_t)sizeof(float);
    const int whole = shape.head_dim / kLanes * kLanes, rest = shape.head_dim - whole;
    for (int t0 = 0; t0 < tile.padded; t0 += kTokens) {
        const E* k[kTokens];
        Vec acc[kRows * kTokens];
        for (int t = 0; t < kTokens; t++) {
            k[t] = (const E*)(tile.k[t0 + t] + tile.k_head);
        }
        for (int i = 0; i < kRows * kTokens; i++) acc[i] = zero();
        for (int c = 0; c < whole; c += kLanes) {
            // widened elements are smaller than a vector: a line every so many vectors
            if (prefetch && c * sizeof(E) % 64 == 0)
                ask_k(tile, t0, kTokens, shape.head_dim * sizeof(E), c * sizeof(E));
            Vec kv[kTokens];
            for (int t = 0; t < kTokens; t++) kv[t] = widen(k[t] + c);
            for (int r = 0; r < kRows; r++) {
                const Vec qv = load(q + r * stride + c);
                for (int t = 0; t < kTokens; t++) acc[r * kTokens + t] = fma(qv, kv[t], acc[r * kTokens + t]);
            }
        }
        if (rest)
            for (int t = 0; t < kTokens; t++) {
                const Vec kv = widen_part(k[t] + whole, rest);
                for (int r = 0; r < kRows; r++)
                    acc[r * kTokens + t] = fma(load(q + r * stride + whole), kv, acc[r * kTokens + t]);
            }
        float dots[kLanes];
        store(dots, sums(acc));
        for (int r = 0; r < kRows; r++)
            memcpy(scores + r * kTile + t0, dots + r * kTokens, kTokens * sizeof(float));
    }
}

template <class E>
static void score_float(const void* q, const Tile& tile, const TileShape& shape, float* scores) {
    int row = 0;
    for (; row + 4 <= shape.rows; row += 4)
        score_rows<E, 4>((const float*)((const char*)q + row * shape.q_bytes), tile, shape,
                         scores + row * kTile, row == 0);
    const float* rest = (const float*)((const char*)q + row * shape.q_bytes);
    if (shape.rows - row == 2) score_rows<E, 2>(rest, tile, shape, scores + row * kTile, row == 0);
    if (shape.rows - row == 1) score_rows<E, 1>(rest, tile, shape, scores + row * kTile, row == 0);
}

// A prepared float query row is fp32 with zeros up to a whole vector, so that a tail needs no mask on it.
static int64_t query_bytes_float(int head_dim) { return (int64_t)((head_dim + 15) / 16) * 64; }

static float prepare_query_float(const float* q, int head_dim, void* prepared) {
    memset(prepared, 0, (size_t)query_bytes_float(head_dim));
    memcpy(prepared, q, (size_t)head_dim * sizeof(float));
    return 1.0f;
}

}  // namespace PAGEDKV_ISA
}  // namespace pagedkv
