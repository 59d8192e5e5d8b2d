// acc[row] = acc[row] * alpha[row] + sum_t p[row, t] v[t], for float V and for int8 widened to fp32.
//
//             v_head_dim -->
//            +-----------------+-----           a strip of kVecs vectors of columns is walked down all tokens
//   V t      | strip | strip   |                with rows x kVecs accumulators in registers; acc in memory is
//   V t+1    |   |   |         |                touched once per strip and tile
//     :      |   v   |         |
//   acc      | a0 a1 |         |
#pragma once
#include "ask_ahead.h"

namespace pagedkv {
namespace PAGEDKV_ISA {

static void keep_order(float*, int) {}

struct Weights {
    const float* p;  // [rows][kTile]
    const Tile* tile;
    int64_t acc_stride;
    bool prefetch;
};

// part: 0, or how many columns there are of a single, incomplete vector
template <class E, int kRows, int kVecs>
static void value_strip(const Weights& w, int column, int part, const float* alpha, float* acc) {
    Vec a[kRows * kVecs];
    for (int i = 0; i < kRows * kVecs; i++) a[i] = zero();
    const Tile& tile = *w.tile;
    for (int t = 0; t < tile.count; t++) {
        const E* v = (const E*)(tile.v[t] + tile.v_head) + column;
        if (w.prefetch) ask_v(tile, t, column * sizeof(E), kVecs * kLanes * sizeof(E));
        Vec values[kVecs];
        for (int c = 0; c < kVecs; c++) values[c] = part ? widen_part(v, part) : widen(v + c * kLanes);
        for (int r = 0; r < kRows; r++) {
            const Vec p = broadcast(w.p[r * kTile + t]);
            for (int c = 0; c < kVecs; c++) a[r * kVecs + c] = fma(p, values[c], a[r * kVecs + c]);
        }
    }
    for (int r = 0; r < kRows; r++)
        for (int c = 0; c < kVecs; c++) {
            float* to = acc + r * w.acc_stride + column + c * kLanes;
            const Vec sum = a[r * kVecs + c];
            store(to, alpha ? fma(load(to), broadcast(alpha[r]), sum) : sum);
        }
}

template <class E, int kRows>
static void value_rows(const Weights& w, int v_head_dim, const float* alpha, float* acc) {
    int column = 0;
    for (; column + 4 * kLanes <= v_head_dim; column += 4 * kLanes)
        value_strip<E, kRows, 4>(w, column, 0, alpha, acc);
    for (; column + kLanes <= v_head_dim; column += kLanes) value_strip<E, kRows, 1>(w, column, 0, alpha, acc);
    if (column < v_head_dim) value_strip<E, kRows, 1>(w, column, v_head_dim - column, alpha, acc);
}

template <class E>
static void value_float(const float* p, const float* const* v_scale, const Tile& tile, const TileShape& shape,
                        const float* alpha, float* acc) {
    float scaled[4 * kTile];
    for (int row = 0; row < shape.rows;) {
        const int rows = shape.rows - row >= 4 ? 4 : shape.rows - row;
        Weights w{p + row * kTile, &tile, shape.acc_stride, row == 0};
        if (v_scale) {
            for (int r = 0; r < rows; r++)
                for (int t = 0; t < tile.count; t++)
                    scaled[r * kTile + t] = w.p[r * kTile + t] * *scales_at(v_scale, t);
            w.p = scaled;
        }
        float* to = acc + row * shape.acc_stride;
        const float* factors = alpha ? alpha + row : nullptr;
        if (rows == 4) value_rows<E, 4>(w, shape.v_head_dim, factors, to);
        if (rows == 2) value_rows<E, 2>(w, shape.v_head_dim, factors, to);
        if (rows == 1) value_rows<E, 1>(w, shape.v_head_dim, factors, to);
        row += rows;
    }
}

}  // namespace PAGEDKV_ISA
}  // namespace pagedkv
