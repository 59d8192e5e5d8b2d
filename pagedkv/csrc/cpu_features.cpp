#include "cpu_features.h"

namespace pagedkv {

namespace {

Isa detect() {
#if defined(__x86_64__) && defined(__GNUC__)
    __builtin_cpu_init();
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                      __builtin_cpu_supports("f16c");
    const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    if (avx512 && __builtin_cpu_supports("avx512vnni")) return kAvx512Dot;
    if (avx512) return kAvx512;
    if (avx2) return kAvx2;
#endif
    return kPortable;
}

// AMD multiplies pairs of bf16 at the rate of an fp32 FMA; on Intel that instruction is about 5x slower
// than one, so that widening to fp32 wins there.
bool bf16_dot_is_fast() {
#if defined(__x86_64__) && defined(__GNUC__)
    __builtin_cpu_init();
    static const bool fast = __builtin_cpu_supports("avx512bf16") && __builtin_cpu_is("amd");
    return fast;
#else
    return false;
#endif
}

}  // namespace

Isa best_isa() {
    static const Isa best = detect();
    return best;
}

const Kernels* choose_kernels(int64_t isa, int64_t kv_dtype, int64_t q_dtype, int64_t head_dim) {
    if (isa > best_isa()) return nullptr;
    if (isa == kAuto) isa = best_isa();
    if (isa == kAvx512Dot) {
        const bool q_is_bf16 = q_dtype == kBf16 && bf16_dot_is_fast();
        if (const Kernels* dot = avx512_dot_kernels(kv_dtype, q_is_bf16, (int)head_dim)) return dot;
        isa = kAvx512;
    }
    if (isa == kAvx512) return avx512_kernels(kv_dtype);
    if (isa == kAvx2) return avx2_kernels(kv_dtype);
    return portable_kernels(kv_dtype);
}

}  // namespace pagedkv

PAGEDKV_EXPORT int64_t pagedkv_best_isa() { return pagedkv::best_isa(); }
PAGEDKV_EXPORT int64_t pagedkv_abi_version() { return pagedkv::kAbiVersion; }
