// Kernels for AVX-512 (F, BW, DQ, VL).
#include "kernels.h"
#include "target.h"

#if defined(__x86_64__) && defined(__GNUC__)
#include <cmath>
#include <cstring>
#include <immintrin.h>

PAGEDKV_TARGET_BEGIN("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")
#define PAGEDKV_ISA avx512
#include "simd_avx512.h"

#include "kernels_float.h"
PAGEDKV_TARGET_END

namespace pagedkv {
const Kernels* avx512_kernels(int64_t kv_dtype) { return avx512::float_kernels(kv_dtype); }
}  // namespace pagedkv
#else
namespace pagedkv {
const Kernels* avx512_kernels(int64_t) { return nullptr; }
}  // namespace pagedkv
#endif
