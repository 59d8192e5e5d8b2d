// Kernels for AVX-512 with dot products of bytes (VNNI) and of bf16.
//
// The CPU must have VNNI; the bf16 kernels are chosen only where it has AVX512-BF16 as well (cpu_features.cpp).
#include "kernels.h"
#include "target.h"

#if defined(__x86_64__) && defined(__GNUC__)
#include <cmath>
#include <cstring>
#include <immintrin.h>

PAGEDKV_TARGET_BEGIN("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")
#define PAGEDKV_ISA avx512_dot
#include "simd_avx512.h"

#include "read_stretch.h"
#include "rows.h"
#include "score_int8_vnni.h"
#include "softmax.h"
#include "value_int8_vnni.h"
PAGEDKV_TARGET_END

PAGEDKV_TARGET_BEGIN("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512bf16")
#include "score_bf16_dot.h"
#include "value_bf16_dot.h"
PAGEDKV_TARGET_END

namespace pagedkv {

namespace {
const Kernels kInt8Kernels = {
    avx512_dot::query_bytes_int8, avx512_dot::prepare_query_int8, avx512_dot::score_int8,
    avx512_dot::softmax_tile,     avx512_dot::value_int8,         avx512_dot::order_row_int8,
    avx512_dot::load_row,         avx512_dot::store_row,          avx512_dot::add_row,
    avx512_dot::quantize_row,     avx512_dot::read_stretch,       avx512_dot::count_non_finite,
};
const Kernels kBf16Kernels = {
    avx512_dot::query_bytes_bf16, avx512_dot::prepare_query_bf16, avx512_dot::score_bf16,
    avx512_dot::softmax_tile,     avx512_dot::value_bf16,         avx512_dot::keep_order,
    avx512_dot::load_row,         avx512_dot::store_row,          avx512_dot::add_row,
    avx512_dot::quantize_row,     avx512_dot::read_stretch,       avx512_dot::count_non_finite,
};
}  // namespace

const Kernels* avx512_dot_kernels(int64_t kv_dtype, bool q_is_bf16, int head_dim) {
    if (kv_dtype == kInt8 && head_dim <= avx512_dot::kMaxIntegerDim) return &kInt8Kernels;
    if (kv_dtype == kBf16 && q_is_bf16) return &kBf16Kernels;
    return nullptr;
}

}  // namespace pagedkv
#else
namespace pagedkv {
const Kernels* avx512_dot_kernels(int64_t, bool, int) { return nullptr; }
}  // namespace pagedkv
#endif
