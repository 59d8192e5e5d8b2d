// 8 fp32 lanes of AVX2 with FMA and F16C.
#pragma once
#include <immintrin.h>

#include "elements.h"

namespace pagedkv {
namespace PAGEDKV_ISA {

constexpr int kLanes = 8;
typedef __m256 Vec;
typedef __m256 Mask;

static inline Vec zero() { return _mm256_setzero_ps(); }
static inline Vec broadcast(float x) { return _mm256_set1_ps(x); }
static inline Vec load(const float* p) { return _mm256_loadu_ps(p); }
static inline void store(float* p, Vec x) { _mm256_storeu_ps(p, x); }
static inline Vec fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }
static inline Vec add(Vec a, Vec b) { return _mm256_add_ps(a, b); }
static inline Vec sub(Vec a, Vec b) { return _mm256_sub_ps(a, b); }
static inline Vec mul(Vec a, Vec b) { return _mm256_mul_ps(a, b); }
static inline Vec div(Vec a, Vec b) { return _mm256_div_ps(a, b); }
// b where either is NaN
static inline Vec max(Vec a, Vec b) { return _mm256_max_ps(a, b); }
static inline Vec abs(Vec a) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a); }
static inline Mask less(Vec a, Vec b) { return _mm256_cmp_ps(a, b, _CMP_LT_OQ); }
static inline Vec select(Mask m, Vec a, Vec b) { return _mm256_blendv_ps(b, a, m); }

static inline float largest(Vec x) {
    __m128 y = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    y = _mm_max_ps(y, _mm_movehl_ps(y, y));
    return _mm_cvtss_f32(_mm_max_ss(y, _mm_movehdup_ps(y)));
}

static inline __m256i lane_index() { return _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7); }

// lanes whose index i satisfies begin <= i < end
static inline Mask lanes_between(int begin, int end) {
    const __m256i i = lane_index();
    return _mm256_castsi256_ps(_mm256_andnot_si256(_mm256_cmpgt_epi32(_mm256_set1_epi32(begin), i),
                                                   _mm256_cmpgt_epi32(_mm256_set1_epi32(end), i)));
}

static inline Vec widen(const float* p) { return load(p); }
static inline Vec widen_part(const float* p, int n) {
    return _mm256_maskload_ps(p, _mm256_cmpgt_epi32(_mm256_set1_epi32(n), lane_index()));
}

// AVX2 masks no narrow loads, so that the last elements of a row go through a copy
template <class E>
struct Part {
    E e[kLanes];
    Part(const E* p, int n) {
        memset((void*)e, 0, sizeof e);
        memcpy((void*)e, p, (size_t)n * sizeof(E));
    }
};

static inline Vec widen(const Bf16* p) {
    const __m128i x = _mm_loadu_si128((const __m128i*)p);
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(x), 16));
}
static inline Vec widen(const Fp16* p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)); }
static inline Vec widen(const int8_t* p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)));
}
// e4m3 with its fields moved into an fp16 is too small by 2^8, subnormals included
static inline Vec widen(const Fp8* p) {
    const __m128i wide = _mm_cvtepu8_epi16(_mm_loadl_epi64((const __m128i*)p));
    const __m128i magnitude = _mm_and_si128(wide, _mm_set1_epi16(0x7f));
    const __m128i nan = _mm_cmpeq_epi16(magnitude, _mm_set1_epi16(0x7f));
    __m128i half = _mm_or_si128(_mm_slli_epi16(magnitude, 7),
                                _mm_slli_epi16(_mm_and_si128(wide, _mm_set1_epi16(0x80)), 8));
    half = _mm_or_si128(half, _mm_and_si128(nan, _mm_set1_epi16(0x7e00)));
    return _mm256_mul_ps(_mm256_cvtph_ps(half), _mm256_set1_ps(256.0f));
}
template <class E>
static inline Vec widen_part(const E* p, int n) {
    const Part<E> part(p, n);
    return widen(part.e);
}

// rounded to nearest even; NaN becomes 0x7fc0
static inline void narrow(Bf16* p, Vec x) {
    const __m256i bits = _mm256_castps_si256(x);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    __m256i r = _mm256_srli_epi32(_mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
    r = _mm256_blendv_epi8(r, _mm256_set1_epi32(0x7fc0), _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q)));
    _mm_storeu_si128((__m128i*)p, _mm_packus_epi32(_mm256_castsi256_si128(r), _mm256_extracti128_si256(r, 1)));
}
static inline void narrow(Fp16* p, Vec x) {
    _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

// 2^x for x <= 0; relative error below 2e-7; NaN stays NaN; below 2^-126 it is 0
static inline Vec exp2(Vec x) {
    const Mask tiny = less(x, broadcast(-126.0f));
    x = _mm256_max_ps(broadcast(-126.0f), x);
    const Vec whole = _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const Vec f = _mm256_sub_ps(x, whole);
    Vec y = broadcast(1.53533620e-4f);  // a fit of 2^f on |f| <= 0.5, error 2e-9, exact at 0
    y = fma(y, f, broadcast(1.33988750e-3f));
    y = fma(y, f, broadcast(9.61843692e-3f));
    y = fma(y, f, broadcast(5.55033237e-2f));
    y = fma(y, f, broadcast(2.40226477e-1f));
    y = fma(y, f, broadcast(6.93147182e-1f));
    y = fma(y, f, broadcast(1.0f));
    const __m256i exponent = _mm256_add_epi32(_mm256_cvtps_epi32(whole), _mm256_set1_epi32(127));
    y = _mm256_mul_ps(y, _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23)));
    return select(tiny, zero(), y);
}

// lane i of the result = sum of the lanes of a[i]
static inline Vec quads(Vec a, Vec b, Vec c, Vec d) {
    const Vec ab = add(_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b));
    const Vec cd = add(_mm256_unpacklo_ps(c, d), _mm256_unpackhi_ps(c, d));
    return add(_mm256_shuffle_ps(ab, cd, 0x44), _mm256_shuffle_ps(ab, cd, 0xee));
}
// Four numbers in every four lanes: sums of the lanes of a[0..3] or the largest of them, and what softmax.h keeps of
// four rows. In memory they are four floats.
static inline Vec load_four(const float* p) { return _mm256_broadcast_ps((const __m128*)p); }
static inline void store_four(float* p, Vec x) { _mm_storeu_ps(p, _mm256_castps256_ps128(x)); }
static inline Vec broadcast_of_four(Vec x, int i) { return _mm256_permutevar_ps(x, _mm256_set1_epi32(i)); }
static inline Vec sums_of_four(const Vec* a) {
    const Vec x = quads(a[0], a[1], a[2], a[3]);
    return add(x, _mm256_permute2f128_ps(x, x, 0x01));
}
static inline Vec largest_of_four(const Vec* a) {
    const Vec ab = max(_mm256_unpacklo_ps(a[0], a[1]), _mm256_unpackhi_ps(a[0], a[1]));
    const Vec cd = max(_mm256_unpacklo_ps(a[2], a[3]), _mm256_unpackhi_ps(a[2], a[3]));
    const Vec x = max(_mm256_shuffle_ps(ab, cd, 0x44), _mm256_shuffle_ps(ab, cd, 0xee));
    return max(x, _mm256_permute2f128_ps(x, x, 0x01));
}
static inline Vec sums(const Vec* a) {
    const Vec low = quads(a[0], a[1], a[2], a[3]), high = quads(a[4], a[5], a[6], a[7]);
    return add(_mm256_permute2f128_ps(low, high, 0x20), _mm256_permute2f128_ps(low, high, 0x31));
}

}  // namespace PAGEDKV_ISA
}  // namespace pagedkv
