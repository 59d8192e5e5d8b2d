// 16 fp32 lanes of AVX-512 (F, BW, DQ, VL).
#pragma once
#include <immintrin.h>

#include "elements.h"

namespace pagedkv {
namespace PAGEDKV_ISA {

constexpr int kLanes = 16;
typedef __m512 Vec;
typedef __mmask16 Mask;

static inline Vec zero() { return _mm512_setzero_ps(); }
static inline Vec broadcast(float x) { return _mm512_set1_ps(x); }
static inline Vec load(const float* p) { return _mm512_loadu_ps(p); }
static inline void store(float* p, Vec x) { _mm512_storeu_ps(p, x); }
static inline Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
static inline Vec add(Vec a, Vec b) { return _mm512_add_ps(a, b); }
static inline Vec sub(Vec a, Vec b) { return _mm512_sub_ps(a, b); }
static inline Vec mul(Vec a, Vec b) { return _mm512_mul_ps(a, b); }
static inline Vec div(Vec a, Vec b) { return _mm512_div_ps(a, b); }
// b where either is NaN
static inline Vec max(Vec a, Vec b) { return _mm512_max_ps(a, b); }
static inline Vec abs(Vec a) { return _mm512_abs_ps(a); }
static inline Mask less(Vec a, Vec b) { return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ); }
static inline Vec select(Mask m, Vec a, Vec b) { return _mm512_mask_blend_ps(m, b, a); }
static inline float largest(Vec x) { return _mm512_reduce_max_ps(x); }

// lanes whose index i satisfies begin <= i < end
static inline Mask lanes_between(int begin, int end) {
    const __m512i i = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    return _mm512_cmpge_epi32_mask(i, _mm512_set1_epi32(begin)) &
           _mm512_cmplt_epi32_mask(i, _mm512_set1_epi32(end));
}

static inline Mask first_lanes(int n) { return (Mask)((1u << n) - 1); }

static inline Vec widen(const float* p) { return load(p); }
static inline Vec widen_part(const float* p, int n) { return _mm512_maskz_loadu_ps(first_lanes(n), p); }

static inline Vec of_bf16(__m256i x) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16));
}
static inline Vec widen(const Bf16* p) { return of_bf16(_mm256_loadu_si256((const __m256i*)p)); }
static inline Vec widen_part(const Bf16* p, int n) {
    return of_bf16(_mm256_maskz_loadu_epi16(first_lanes(n), p));
}

static inline Vec widen(const Fp16* p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }
static inline Vec widen_part(const Fp16* p, int n) {
    return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(first_lanes(n), p));
}

static inline Vec of_int8(__m128i x) { return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(x)); }
static inline Vec widen(const int8_t* p) { return of_int8(_mm_loadu_si128((const __m128i*)p)); }
static inline Vec widen_part(const int8_t* p, int n) {
    return of_int8(_mm_maskz_loadu_epi8(first_lanes(n), p));
}

// e4m3 with its fields moved into an fp16 is too small by 2^8, subnormals included
static inline Vec of_fp8(__m128i x) {
    const __m256i wide = _mm256_cvtepu8_epi16(x), magnitude = _mm256_and_si256(wide, _mm256_set1_epi16(0x7f));
    const Mask nan = _mm256_cmpeq_epi16_mask(magnitude, _mm256_set1_epi16(0x7f));
    __m256i half = _mm256_or_si256(_mm256_slli_epi16(magnitude, 7),
                                   _mm256_slli_epi16(_mm256_and_si256(wide, _mm256_set1_epi16(0x80)), 8));
    half = _mm256_mask_blend_epi16(nan, half, _mm256_set1_epi16(0x7e00));
    return _mm512_mul_ps(_mm512_cvtph_ps(half), _mm512_set1_ps(256.0f));
}
static inline Vec widen(const Fp8* p) { return of_fp8(_mm_loadu_si128((const __m128i*)p)); }
static inline Vec widen_part(const Fp8* p, int n) { return of_fp8(_mm_maskz_loadu_epi8(first_lanes(n), p)); }

// rounded to nearest even; NaN becomes 0x7fc0
static inline void narrow(Bf16* p, Vec x) {
    const __m512i bits = _mm512_castps_si512(x);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    __m512i r = _mm512_srli_epi32(_mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff))), 16);
    r = _mm512_mask_mov_epi32(r, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), _mm512_set1_epi32(0x7fc0));
    _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16(r));
}
static inline void narrow(Fp16* p, Vec x) {
    _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

// 2^x for x <= 0; relative error below 2e-7; NaN stays NaN
static inline Vec exp2(Vec x) {
    x = _mm512_max_ps(_mm512_set1_ps(-150.0f), x);
    const Vec whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const Vec f = _mm512_sub_ps(x, whole);
    Vec y = broadcast(1.53533620e-4f);  // a fit of 2^f on |f| <= 0.5, error 2e-9, exact at 0
    y = fma(y, f, broadcast(1.33988750e-3f));
    y = fma(y, f, broadcast(9.61843692e-3f));
    y = fma(y, f, broadcast(5.55033237e-2f));
    y = fma(y, f, broadcast(2.40226477e-1f));
    y = fma(y, f, broadcast(6.93147182e-1f));
    y = fma(y, f, broadcast(1.0f));
    return _mm512_scalef_ps(y, whole);
}

//  a[0]  lanes ----->        four registers at a time: neighbours within 128 bits, then across them;
//  a[1]  lanes ----->        15 additions and 30 shuffles for all 16 sums
//   :                  lane i of the result = sum of the lanes of a[i]
static inline Vec quads(Vec a, Vec b, Vec c, Vec d) {
    const Vec ab = add(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
    const Vec cd = add(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
    return add(_mm512_shuffle_ps(ab, cd, 0x44), _mm512_shuffle_ps(ab, cd, 0xee));
}
// Four numbers in every four lanes: sums of the lanes of a[0..3] or the largest of them, and what softmax.h keeps of
// four rows. In memory they are four floats.
static inline Vec load_four(const float* p) { return _mm512_broadcast_f32x4(_mm_loadu_ps(p)); }
static inline void store_four(float* p, Vec x) { _mm_storeu_ps(p, _mm512_castps512_ps128(x)); }
static inline Vec broadcast_of_four(Vec x, int i) {
    const Vec low = i & 1 ? _mm512_permute_ps(x, 0x55) : _mm512_permute_ps(x, 0x00);
    const Vec high = i & 1 ? _mm512_permute_ps(x, 0xff) : _mm512_permute_ps(x, 0xaa);
    return i & 2 ? high : low;
}
static inline Vec sums_of_four(const Vec* a) {
    const Vec x = quads(a[0], a[1], a[2], a[3]), y = add(x, _mm512_shuffle_f32x4(x, x, 0x4e));
    return add(y, _mm512_shuffle_f32x4(y, y, 0xb1));
}
static inline Vec largest_of_four(const Vec* a) {
    const Vec ab = max(_mm512_unpacklo_ps(a[0], a[1]), _mm512_unpackhi_ps(a[0], a[1]));
    const Vec cd = max(_mm512_unpacklo_ps(a[2], a[3]), _mm512_unpackhi_ps(a[2], a[3]));
    const Vec x = max(_mm512_shuffle_ps(ab, cd, 0x44), _mm512_shuffle_ps(ab, cd, 0xee));
    const Vec y = max(x, _mm512_shuffle_f32x4(x, x, 0x4e));
    return max(y, _mm512_shuffle_f32x4(y, y, 0xb1));
}
static inline Vec sums(const Vec* a) {
    const Vec w = quads(a[0], a[1], a[2], a[3]), x = quads(a[4], a[5], a[6], a[7]);
    const Vec y = quads(a[8], a[9], a[10], a[11]), z = quads(a[12], a[13], a[14], a[15]);
    const Vec wx = add(_mm512_shuffle_f32x4(w, x, 0x88), _mm512_shuffle_f32x4(w, x, 0xdd));
    const Vec yz = add(_mm512_shuffle_f32x4(y, z, 0x88), _mm512_shuffle_f32x4(y, z, 0xdd));
    return add(_mm512_shuffle_f32x4(wx, yz, 0x88), _mm512_shuffle_f32x4(wx, yz, 0xdd));
}

}  // namespace PAGEDKV_ISA
}  // namespace pagedkv
