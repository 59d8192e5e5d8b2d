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

// Scales, caps and masks the scores of one row, and returns their maximum.
static inline float mask_row(float* s, const SoftmaxTile& tile, int row, int vectors) {
    const Vec lowest = broadcast(-INFINITY);
    const int begin = tile.begin[row], end = tile.end[row];
    const bool all_visible = begin <= 0 && end >= vectors * kLanes;
    const Vec factor = broadcast(tile.row_factor[row] * (tile.softcap != 0.0f ? 1.0f / tile.softcap : kLog2E));
    const Vec cap = broadcast(tile.softcap * kLog2E);
    Vec top = lowest;
    for (int i = 0; i < vectors; i++) {
        Vec x = mul(load(s + i * kLanes), factor);
        if (tile.k_scale) x = mul(x, load(tile.k_scale + i * kLanes));
        if (tile.softcap != 0.0f) x = mul(tanh(x), cap);
        if (!all_visible) x = select(lanes_between(begin - i * kLanes, end - i * kLanes), x, lowest);
        store(s + i * kLanes, x);
        top = max(x, top);
    }
    return largest(top);
}

// Turns the masked scores of one row into p, and returns their sum. A row that has seen nothing yet, with a
// maximum of -inf, subtracts 0 rather than make inf - inf; exp2(-inf) is 0.
static inline float weigh_row(float* s, float maximum, int vectors) {
    const Vec base = broadcast(maximum == -INFINITY ? 0.0f : maximum);
    Vec total = zero();
    for (int i = 0; i < vectors; i++) {
        const Vec p = exp2(sub(load(s + i * kLanes), base));
        store(s + i * kLanes, p);
        total = add(total, p);
    }
    return sum(total);
}

static void softmax_tile(float* scores, const SoftmaxTile& tile) {
    const int vectors = (tile.count + kTokenGranule - 1) / kTokenGranule * kTokenGranule / kLanes;
    // rows in groups, each step for all of them: the latencies of one row hide behind the others
    for (int first = 0; first < tile.rows; first += kLanes) {
        const int rows = tile.rows - first < kLanes ? tile.rows - first : kLanes;
        float change[kLanes] = {};  // by how much each maximum grows, negated
        for (int r = 0; r < rows; r++) {
            const float before = tile.max[first + r];
            const float here = mask_row(scores + (first + r) * kTile, tile, first + r, vectors);
            const float after = here > before ? here : before;
            change[r] = after == -INFINITY ? 0.0f : before - after;
            tile.max[first + r] = after;
        }
        float alpha[kLanes];
        store(alpha, exp2(load(change)));
        for (int r = 0; r < rows; r++) {
            const float total = weigh_row(scores + (first + r) * kTile, tile.max[first + r], vectors);
            tile.alpha[first + r] = alpha[r];
            tile.sum[first + r] = tile.sum[first + r] * alpha[r] + total;
        }
    }
}

}  // namespace PAGEDKV_ISA
}  // namespace pagedkv
