// The online softmax of one tile, row by row.
//
//   scores[row]  | s0 s1 s2 ... | . . |     '.' is not visible to this row (beyond it, or before its window)
//                  \_ begin       \_ end
//   max' = max(max, s)    p = exp2(s - max')    sum' = sum * alpha + sum(p)    alpha = exp2(max - max')
//
// Scores are in base-2 units: log2(e) is folded into row_factor.
#pragma once
#include <cmath>

#include "kernels.h"

namespace pagedkv {
namespace PAGEDKV_ISA {

constexpr float kLog2E = 1.44269504089f;

// tanh to 2e-7 relative: an odd polynomial near 0, where 1 - 2 / (exp(2x) + 1) would cancel.
static inline Vec tanh(Vec x) {
    const Vec z = mul(x, x), size = abs(x);
    Vec y = broadcast(-6.98409866e-4f);  // a fit of (tanh(x)/x - 1) / x^2 on |x| <= 0.75, error 3e-10
    y = fma(y, z, broadcast(3.09311471e-3f));
    y = fma(y, z, broadcast(-8.68675184e-3f));
    y = fma(y, z, broadcast(2.18363818e-2f));
    y = fma(y, z, broadcast(-5.39652482e-2f));
    y = fma(y, z, broadcast(1.33333230e-1f));
    y = fma(y, z, broadcast(-3.33333333e-1f));
    const Vec near = fma(mul(y, z), x, x);
    // with exp(-2|x|) nothing overflows
    const Vec e = exp2(mul(size, broadcast(-2.0f * kLog2E)));
    const Vec far = div(sub(broadcast(1.0f), e), add(broadcast(1.0f), e));
    return select(less(size, broadcast(0.75f)), near, select(less(x, zero()), sub(zero(), far), far));
}

// Whether a row sees all of so many vectors.
static inline bool sees_all(const SoftmaxTile& tile, int row, int vectors) {
    return tile.begin[row] <= 0 && tile.end[row] >= vectors * kLanes;
}

// Scores of one row, scaled, capped and masked, to x; and the largest, lane by lane. kPlain: all are visible, and
// there is no cap.
template <bool kPlain>
static inline Vec mask_row(const float* s, const SoftmaxTile& tile, int row, int vectors, Vec* x) {
    const Vec lowest = broadcast(-INFINITY);
    const int begin = tile.begin[row], end = tile.end[row];
    const bool is_capped = !kPlain && tile.softcap != 0.0f;
    const Vec factor = broadcast(tile.row_factor[row] * (is_capped ? 1.0f / tile.softcap : kLog2E));
    const Vec cap = broadcast(tile.softcap * kLog2E);
    Vec top = lowest;
    for (int i = 0; i < vectors; i++) {
        x[i] = mul(load(s + i * kLanes), factor);
        if (tile.k_scale) x[i] = mul(x[i], load(scales_at(tile.k_scale, i * kLanes)));
        if (is_capped) x[i] = mul(tanh(x[i]), cap);
        if (!kPlain && !sees_all(tile, row, vectors))
            x[i] = select(lanes_between(begin - i * kLanes, end - i * kLanes), x[i], lowest);
        top = max(x[i], top);
    }
    return top;
}

// Stores p of one row, and returns their sum, lane by lane.
static inline Vec weigh_row(const Vec* x, Vec base, int vectors, float* p) {
    Vec total = zero();
    for (int i = 0; i < vectors; i++) {
        const Vec weight = exp2(sub(x[i], base));
        store(p + i * kLanes, weight);
        total = add(total, weight);
    }
    return total;
}

// A number of each of up to four rows.
static inline Vec load_rows(const float* from, int rows) {
    if (rows == 4) return load_four(from);
    float four[4] = {};
    for (int r = 0; r < rows; r++) four[r] = from[r];
    return load_four(four);
}
static inline void store_rows(float* to, int rows, Vec x) {
    if (rows == 4) return store_four(to, x);
    float four[4];
    store_four(four, x);
    for (int r = 0; r < rows; r++) to[r] = four[r];
}

// Up to four rows, each step for all of them: the latencies of one row hide behind the others. kWhole: four rows
// that see a whole tile; what goes on stays in registers.
template <bool kWhole>
static void softmax_rows(float* scores, const SoftmaxTile& tile, int first, int some_rows, int some_vectors) {
    const int rows = kWhole ? 4 : some_rows, vectors = kWhole ? kTile / kLanes : some_vectors;
    Vec x[4][kTile / kLanes], reduced[4];
    for (int r = rows; r < 4; r++) reduced[r] = zero();
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++)
        reduced[r] = mask_row<kWhole>(scores + (first + r) * kTile, tile, first + r, vectors, x[r]);
    // from here on a row is a lane, and nothing waits for a scalar in memory. A row that has seen nothing yet, with a
    // maximum of -inf, subtracts 0 rather than make inf - inf; exp2(-inf) is 0
    const Vec before = load_rows(tile.max + first, rows), after = max(largest_of_four(reduced), before);
    const Mask has_seen = less(broadcast(-INFINITY), after);
    const Vec base = select(has_seen, after, zero());
    store_rows(tile.max + first, rows, after);
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++)
        reduced[r] = weigh_row(x[r], broadcast_of_four(base, r), vectors, scores + (first + r) * kTile);
    const Vec alpha = exp2(select(has_seen, sub(before, after), zero()));
    store_rows(tile.alpha + first, rows, alpha);
    store_rows(tile.sum + first, rows, fma(load_rows(tile.sum + first, rows), alpha, sums_of_four(reduced)));
}

static void softmax_tile(float* scores, const SoftmaxTile& tile) {
    const int vectors = (tile.count + kTokenGranule - 1) / kTokenGranule * kTokenGranule / kLanes;
    for (int first = 0; first < tile.rows; first += 4) {
        const int rows = tile.rows - first < 4 ? tile.rows - first : 4;
        bool is_whole = rows == 4 && vectors == kTile / kLanes && tile.softcap == 0.0f;
        for (int r = 0; r < rows; r++) is_whole &= sees_all(tile, first + r, vectors);
        if (is_whole)
            softmax_rows<true>(scores, tile, first, rows, vectors);
        else
            softmax_rows<false>(scores, tile, first, rows, vectors);
    }
}

}  // namespace PAGEDKV_ISA
}  // namespace pagedkv
