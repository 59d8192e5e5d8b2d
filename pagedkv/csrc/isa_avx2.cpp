// Kernels for AVX2 with FMA and F16C.
#include "kernels.h"
#include "target.h"

#if defined(__x86_64__) && defined(__GNUC__)
#include <cmath>
#include <cstring>
#include <immintrin.h>

PAGEDKV_TARGET_BEGIN("avx2,fma,f16c")
#define PAGEDKV_ISA avx2
#include "simd_avx2.h"

#include "kernels_float.h"
PAGEDKV_TARGET_END

namespace pagedkv {
const Kernels* avx2_kernels(int64_t kv_dtype) { return avx2::float_kernels(kv_dtype); }
}  // namespace pagedkv
#else
namespace pagedkv {
const Kernels* avx2_kernels(int64_t) { return nullptr; }
}  // namespace pagedkv
#endif
