// Single vectors in and out of fp32: the query, the output, and what is written to the cache.
#pragma once
#include "abi.h"
#include "kernels.h"

namespace pagedkv {
namespace PAGEDKV_ISA {

template <class E>
static void widen_row(const E* from, int n, float* to) {
    int i = 0;
    for (; i + kLanes <= n; i += kLanes) store(to + i, widen(from + i));
    if (i < n) store(to + i, widen_part(from + i, n - i));
}

static void load_row(const void* from, int64_t dtype, int n, float* to) {
    if (dtype == kFp32) widen_row((const float*)from, n, to);
    if (dtype == kBf16) widen_row((const Bf16*)from, n, to);
    if (dtype == kFp16) widen_row((const Fp16*)from, n, to);
}

template <class E>
static void narrow_row(const float* from, int n, E* to) {
    int i = 0;
    for (; i + kLanes <= n; i += kLanes) narrow(to + i, load(from + i));
    if (i < n) {
        E last[kLanes];
        narrow(last, load(from + i));
        memcpy((void*)(to + i), last, (size_t)(n - i) * sizeof(E));
    }
}

static void store_row(const float* from, int64_t dtype, int n, void* to) {
    if (dtype == kFp32) memcpy(to, from, (size_t)n * sizeof(float));
    if (dtype == kBf16) narrow_row(from, n, (Bf16*)to);
    if (dtype == kFp16) narrow_row(from, n, (Fp16*)to);
}

static void add_row(const float* from, float weight, int n, float* to) {
    const Vec factor = broadcast(weight);
    for (int i = 0; i < n; i += kLanes) store(to + i, fma(load(from + i), factor, load(to + i)));
}

// scale = max(absmax / 127, 1e-6), q = x / scale rounded half away from zero: bit for bit what
// pagedkv/quantization.py computes. Division, not a product with the inverse: they differ in the last bit.
static float quantize_row(const float* from, int n, int8_t* to) {
    float absmax = 0.0f;
    for (int i = 0; i < n; i++) {
        const float size = float_of_bits(bits_of_float(from[i]) & 0x7fffffff);
        absmax = size > absmax ? size : absmax;
    }
    float scale = absmax / 127.0f;
    scale = scale < 1e-6f ? 1e-6f : scale;
    for (int i = 0; i < n; i++) {
        const float x = from[i] / scale;
        const int whole = (int)x, twice = (int)((x - (float)whole) * 2.0f), q = whole + twice;
        to[i] = (int8_t)(q > 127 ? 127 : q < -127 ? -127 : q);
    }
    return scale;
}

static int64_t count_non_finite(const float* from, int n) {
    int count = 0;
    for (int i = 0; i < n; i++) count += (bits_of_float(from[i]) & 0x7f800000) == 0x7f800000;
    return count;
}

}  // namespace PAGEDKV_ISA
}  // namespace pagedkv
