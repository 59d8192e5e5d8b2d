// pagedkv_write_kv: new vectors into the slots of the cache, quantized or rounded on the way.
//
//   source [n, heads, dim]     slots [n]                 values [rows, heads, block_size, dim]
//     vector i, head h    ->   slot = slots[i]      ->     row slot / block_size, head h, offset slot % block_size
//                              negative: nothing
#include <atomic>
#include <cstring>

#include "abi.h"
#include "cpu_features.h"
#include "kernels.h"
#include "scratch.h"
#include "thread_pool.h"
#include "work_items.h"

namespace pagedkv {

namespace {

constexpr int64_t kTokensPerItem = 16;
constexpr int64_t kMinElementsToShare = 256 * 1024;

struct Writing {
    const WriteCall* call;
    const Kernels* kernels;
    bool only_check;  // first pass of int8: nothing is written unless every value is finite
    std::atomic<int64_t> next, bad, failed;
};

// One source vector as fp32.
void load_vector(const Writing& w, int64_t token, int64_t head, float* to) {
    const WriteCall& call = *w.call;
    const int64_t bytes = element_bytes(call.source_dtype);
    const char* from = (const char*)call.source +
                       (token * call.source_stride[0] + head * call.source_stride[1]) * bytes;
    if (call.source_stride[2] == 1) return w.kernels->load_row(from, call.source_dtype, (int)call.dim, to);
    float one[16];
    for (int64_t i = 0; i < call.dim; i++) {
        w.kernels->load_row(from + i * call.source_stride[2] * bytes, call.source_dtype, 1, one);
        to[i] = one[0];
    }
}

void write_vector(const Writing& w, int64_t slot, int64_t head, const float* from, char* packed) {
    const WriteCall& call = *w.call;
    const int64_t row = slot / call.block_size, offset = slot % call.block_size, bytes = element_bytes(call.dtype);
    char* to = (char*)call.values + (row * call.value_stride[0] + head * call.value_stride[1] +
                                     offset * call.value_stride[2]) * bytes;
    char* place = call.value_stride[3] == 1 ? to : packed;
    if (call.dtype == kInt8)
        call.scale[row * call.scale_stride[0] + head * call.scale_stride[1] + offset * call.scale_stride[2]] =
            w.kernels->quantize_row(from, (int)call.dim, (int8_t*)place);
    else
        w.kernels->store_row(from, call.dtype, (int)call.dim, place);
    if (place == packed)
        for (int64_t i = 0; i < call.dim; i++)
            memcpy(to + i * call.value_stride[3] * bytes, packed + i * bytes, (size_t)bytes);
}

void write_items(void* context) {
    Writing& w = *(Writing*)context;
    const WriteCall& call = *w.call;
    Buffer& buffer = thread_scratch(kWriteScratch);
    float* vector = nullptr;
    char* packed = nullptr;
    ScratchLayout layout;
    const auto place = [&](Scratch& scratch) {
        vector = scratch.take<float>(call.dim + 16);
        packed = scratch.take<char>(call.dim * 4);
    };
    if (!layout.allocate(buffer, place)) {
        w.failed.store(1);
        return;
    }
    int64_t bad = 0;
    for (int64_t begin; (begin = w.next.fetch_add(kTokensPerItem)) < call.n;)
        for (int64_t i = begin; i < begin + kTokensPerItem && i < call.n; i++) {
            const int64_t slot = call.slots[i * call.slot_stride];
            if (slot < 0) continue;
            for (int64_t head = 0; head < call.num_heads; head++) {
                load_vector(w, i, head, vector);
                if (w.only_check)
                    bad += w.kernels->count_non_finite(vector, (int)call.dim);
                else
                    write_vector(w, slot, head, vector, packed);
            }
        }
    w.bad.fetch_add(bad);
}

int64_t pass(const WriteCall* call, bool only_check) {
    Writing w{call, choose_kernels(call->isa, kFp32, kFp32, call->dim), only_check, {0}, {0}, {0}};
    const bool share = call->n * call->num_heads * call->dim >= kMinElementsToShare;
    run_on_threads(write_items, &w, share ? (int)call->threads : 1, call->n / kTokensPerItem + 1);
    return w.failed.load() ? -1 : w.bad.load();
}

}  // namespace

}  // namespace pagedkv

PAGEDKV_EXPORT int64_t pagedkv_write_kv(const pagedkv::WriteCall* call) {
    if (call->dtype == pagedkv::kInt8)
        if (const int64_t bad = pagedkv::pass(call, true)) return bad;
    return pagedkv::pass(call, false);
}
