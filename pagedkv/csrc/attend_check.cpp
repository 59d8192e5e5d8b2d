// The checks of one call, as pagedkv/attention/arguments.py describes them.
//
//   q [num_seqs, q_len, num_q_heads, head_dim]       k, v [num_blocks, num_kv_heads, block_size, *]
//   out, lse, block_mass: like q, but for the last   k_scale, v_scale: like k without its last, int8 and only then
#include "attend_check.h"

#include <cmath>
#include <cstring>

namespace pagedkv {

namespace {

constexpr int64_t kMaxQueryLen = 8;

bool same(const int64_t* a, const int64_t* b, int n) { return memcmp(a, b, n * sizeof(int64_t)) == 0; }

// No two entries share memory as those of an expanded tensor do.
bool writable(const int64_t* shape, const int64_t* stride, int n) {
    for (int i = 0; i < n; i++)
        if (shape[i] > 1 && stride[i] == 0) return false;
    return true;
}

bool like_query(const AttendCall& call, const int64_t* shape, const int64_t* stride, int n) {
    return same(shape, &call.num_seqs, 3) && writable(shape, stride, n);
}

bool cache_fits(const AttendCall& call) {
    const int64_t* k = &call.num_blocks;
    if (!same(k, call.v_shape, 3) || call.k_head_dim != call.head_dim) return false;
    if (call.num_kv_heads < 1 || call.block_size < 1 || call.head_dim < 1 || call.v_shape[3] < 1) return false;
    if (call.num_q_heads < 1 || call.num_q_heads % call.num_kv_heads) return false;
    if (call.k_stride[3] != 1 && call.head_dim != 1) return false;
    if (call.v_stride[3] != 1 && call.v_shape[3] != 1) return false;
    if (call.kv_dtype == kInt8) return same(call.k_scale_shape, k, 3) && same(call.v_scale_shape, k, 3);
    return call.k_scale_shape[0] < 0 && call.v_scale_shape[0] < 0;
}

bool options_fit(const AttendCall& call) {
    return call.window >= 0 && std::isfinite(call.scale) && call.softcap >= 0 && std::isfinite(call.softcap);
}

}  // namespace

bool fits(const AttendCall& call) {
    if (call.q_len < 1 || call.q_len > kMaxQueryLen || !cache_fits(call) || !options_fit(call)) return false;
    if (call.table_rows != call.num_seqs || call.num_lens != call.num_seqs) return false;
    if (!like_query(call, call.out_shape, call.out_stride, 4) || call.out_shape[3] != call.v_shape[3]) return false;
    if (call.num_sinks >= 0 && call.num_sinks != call.num_q_heads) return false;
    if (call.lse_shape[0] >= 0 && !like_query(call, call.lse_shape, call.lse_stride, 3)) return false;
    return call.mass_shape[0] < 0 || (like_query(call, call.mass_shape, call.mass_stride, 4) &&
                                      call.mass_shape[3] == call.max_blocks);
}

}  // namespace pagedkv
