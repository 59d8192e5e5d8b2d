// Kernels in plain C++, for CPUs without AVX2 and for other architectures.
#define PAGEDKV_ISA portable
#include "simd_portable.h"

#include "kernels_float.h"

namespace pagedkv {
const Kernels* portable_kernels(int64_t kv_dtype) { return portable::float_kernels(kv_dtype); }
}  // namespace pagedkv
