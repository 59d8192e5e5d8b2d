// Element types of K and V as they lie in memory, for overloads of widen().
#pragma once
#include <cstdint>
#include <cstring>

namespace pagedkv {

struct Bf16 { uint16_t bits; };
struct Fp16 { uint16_t bits; };
struct Fp8 { uint8_t bits; };  // e4m3fn: no infinity, NaN is 0x7f and 0xff

}  // namespace pagedkv

namespace pagedkv {
namespace PAGEDKV_ISA {

static inline float float_of_bits(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

static inline uint32_t bits_of_float(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

static inline float to_float(float x) { return x; }
static inline float to_float(int8_t x) { return (float)x; }
static inline float to_float(Bf16 x) { return float_of_bits((uint32_t)x.bits << 16); }

static inline float to_float(Fp16 x) {
    const uint32_t sign = (uint32_t)(x.bits & 0x8000) << 16, magnitude = x.bits & 0x7fff;
    if (magnitude >= 0x7c00) return float_of_bits(sign | 0x7f800000 | (magnitude & 0x3ff) << 13);
    // as an fp32 with the same fields the value is too small by 2^112, subnormals included
    return float_of_bits(sign | magnitude << 13) * float_of_bits((112 + 127) << 23);
}

// rounded to nearest even
static inline Fp16 to_fp16(float x) {
    const uint32_t bits = bits_of_float(x), sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
    uint32_t half;
    if (magnitude > 0x7f800000) half = 0x7e00;                         // NaN
    else if (magnitude >= 0x477ff000) half = 0x7c00;                   // rounds to 2^16 or is beyond it
    else if (magnitude < 0x38800000) {                                 // subnormal: the addition rounds
        half = bits_of_float(float_of_bits(magnitude) + 0.5f) - 0x3f000000;
    } else half = (magnitude - 0x38000000 + 0xfff + (magnitude >> 13 & 1)) >> 13;
    return Fp16{(uint16_t)(sign | half)};
}

static inline float to_float(Fp8 x) {
    const uint32_t sign = (uint32_t)(x.bits & 0x80) << 24, magnitude = x.bits & 0x7f;
    if (magnitude == 0x7f) return float_of_bits(sign | 0x7fc00000);
    return float_of_bits(sign | magnitude << 20) * float_of_bits((120 + 127) << 23);
}

}  // namespace PAGEDKV_ISA
}  // namespace pagedkv
