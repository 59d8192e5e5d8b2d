// Which instruction sets this CPU and its operating system offer.
#pragma once
#include "abi.h"
#include "kernels.h"

namespace pagedkv {

Isa best_isa();

// Kernels for a call: the forced instruction set, or the best that has them. Null if there are none.
const Kernels* choose_kernels(int64_t isa, int64_t kv_dtype, int64_t q_dtype, int64_t head_dim);

}  // namespace pagedkv
