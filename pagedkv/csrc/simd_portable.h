// 4 fp32 lanes in plain C++, which compilers map to whatever the machine has (SSE2, NEON, VSX, or scalars).
#pragma once
#include <cmath>

#include "elements.h"

namespace pagedkv {
namespace PAGEDKV_ISA {

constexpr int kLanes = 4;
struct Vec { float x[kLanes]; };
struct Mask { bool x[kLanes]; };

#define PAGEDKV_LANES for (int i = 0; i < kLanes; i++)

static inline Vec broadcast(float x) { return Vec{{x, x, x, x}}; }
static inline Vec zero() { return broadcast(0.0f); }
static inline Vec load(const float* p) { Vec r; memcpy(&r, p, sizeof r); return r; }
static inline void store(float* p, Vec x) { memcpy(p, &x, sizeof x); }
static inline Vec fma(Vec a, Vec b, Vec c) { PAGEDKV_LANES c.x[i] += a.x[i] * b.x[i]; return c; }
static inline Vec add(Vec a, Vec b) { PAGEDKV_LANES a.x[i] += b.x[i]; return a; }
static inline Vec sub(Vec a, Vec b) { PAGEDKV_LANES a.x[i] -= b.x[i]; return a; }
static inline Vec mul(Vec a, Vec b) { PAGEDKV_LANES a.x[i] *= b.x[i]; return a; }
static inline Vec div(Vec a, Vec b) { PAGEDKV_LANES a.x[i] /= b.x[i]; return a; }
// b where either is NaN
static inline Vec max(Vec a, Vec b) { PAGEDKV_LANES a.x[i] = a.x[i] > b.x[i] ? a.x[i] : b.x[i]; return a; }
static inline Vec abs(Vec a) { PAGEDKV_LANES a.x[i] = std::fabs(a.x[i]); return a; }
static inline Mask less(Vec a, Vec b) { Mask m; PAGEDKV_LANES m.x[i] = a.x[i] < b.x[i]; return m; }
static inline Vec select(Mask m, Vec a, Vec b) { PAGEDKV_LANES a.x[i] = m.x[i] ? a.x[i] : b.x[i]; return a; }
static inline float sum(Vec a) { return (a.x[0] + a.x[1]) + (a.x[2] + a.x[3]); }
static inline float largest(Vec a) {
    float m = a.x[0];
    for (int i = 1; i < kLanes; i++) m = m > a.x[i] ? m : a.x[i];
    return m;
}

// lanes whose index i satisfies begin <= i < end
static inline Mask lanes_between(int begin, int end) {
    Mask m;
    PAGEDKV_LANES m.x[i] = begin <= i && i < end;
    return m;
}

template <class E>
static inline Vec widen(const E* p) {
    Vec r;
    PAGEDKV_LANES r.x[i] = to_float(p[i]);
    return r;
}
template <class E>
static inline Vec widen_part(const E* p, int n) {
    Vec r;
    PAGEDKV_LANES r.x[i] = i < n ? to_float(p[i]) : 0.0f;
    return r;
}

// rounded to nearest even; NaN becomes 0x7fc0
static inline void narrow(Bf16* p, Vec x) {
    PAGEDKV_LANES {
        const uint32_t bits = bits_of_float(x.x[i]);
        p[i].bits = x.x[i] != x.x[i] ? 0x7fc0 : (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
    }
}
static inline void narrow(Fp16* p, Vec x) { PAGEDKV_LANES p[i] = to_fp16(x.x[i]); }

// 2^x for x <= 0; relative error below 2e-7; NaN stays NaN; below 2^-126 it is 0
static inline Vec exp2(Vec x) {
    PAGEDKV_LANES {
        const float a = x.x[i], clamped = a < -126.0f ? -126.0f : a;
        const int whole = clamped == clamped ? (int)(clamped - 0.5f) : 0;  // a <= 0: rounds to nearest
        const float f = clamped - (float)whole;
        float y = 1.53533620e-4f;  // a fit of 2^f on |f| <= 0.5, error 2e-9, exact at 0
        y = y * f + 1.33988750e-3f;
        y = y * f + 9.61843692e-3f;
        y = y * f + 5.55033237e-2f;
        y = y * f + 2.40226477e-1f;
        y = y * f + 6.93147182e-1f;
        y = y * f + 1.0f;
        y *= float_of_bits((uint32_t)(whole + 127) << 23);
        x.x[i] = a < -126.0f ? 0.0f : y;
    }
    return x;
}

// lane i of the result = sum of the lanes of a[i], or the largest of them
static inline Vec sums(const Vec* a) {
    Vec r;
    PAGEDKV_LANES r.x[i] = sum(a[i]);
    return r;
}
static inline Vec largest_of_four(const Vec* a) {
    Vec r;
    PAGEDKV_LANES r.x[i] = largest(a[i]);
    return r;
}

// What softmax.h keeps of four rows: a vector here, several times the same four lanes in wider ones.
static inline Vec sums_of_four(const Vec* a) { return sums(a); }
static inline Vec load_four(const float* p) { return load(p); }
static inline void store_four(float* p, Vec x) { store(p, x); }
static inline Vec broadcast_of_four(Vec x, int i) { return broadcast(x.x[i]); }

#undef PAGEDKV_LANES

}  // namespace PAGEDKV_ISA
}  // namespace pagedkv
