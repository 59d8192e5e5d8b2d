// The table of float kernels of one instruction set.
#pragma once
#include "abi.h"
#include "read_stretch.h"
#include "rows.h"
#include "score_float.h"
#include "softmax.h"
#include "value_float.h"

namespace pagedkv {
namespace PAGEDKV_ISA {

template <class E>
struct FloatKernels {
    static const Kernels table;
};
template <class E>
const Kernels FloatKernels<E>::table = {query_bytes_float, prepare_query_float, score_float<E>, softmax_tile,
                                        value_float<E>,    keep_order,          load_row,       store_row,
                                        add_row,           quantize_row,        read_stretch,   count_non_finite};

static const Kernels* float_kernels(int64_t kv_dtype) {
    switch (kv_dtype) {
        case kFp32: return &FloatKernels<float>::table;
        case kBf16: return &FloatKernels<Bf16>::table;
        case kFp16: return &FloatKernels<Fp16>::table;
        case kInt8: return &FloatKernels<int8_t>::table;
        case kFp8: return &FloatKernels<Fp8>::table;
    }
    return nullptr;
}

}  // namespace PAGEDKV_ISA
}  // namespace pagedkv
