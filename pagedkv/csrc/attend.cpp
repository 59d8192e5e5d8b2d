// pagedkv_attend: checks, plans, shares the items out, waits.
//
//   check lengths and ids -> choose kernels -> cut into items -> threads claim items (attend_item.cpp)
//                                                               -> the last chunk of a head merges and writes
//                                                                  (attend_finish.cpp)
#include "attend.h"

#include <algorithm>
#include <new>

#include "advise_huge.h"
#include "attend_check.h"
#include "block_walk.h"
#include "cpu_features.h"
#include "scratch.h"
#include "thread_pool.h"

namespace pagedkv {

namespace {

void job(void* context) { work(*(Attention*)context); }

void set_shapes(Attention& a, const AttendCall& call) {
    a.call = &call;
    a.element = element_bytes(call.kv_dtype);
    a.group_size = (int)(call.num_q_heads / call.num_kv_heads);
    a.rows = (int)(a.group_size * call.q_len);
    a.shape.rows = a.rows % 4 == 3 ? a.rows + 1 : a.rows;
    a.shape.head_dim = (int)call.head_dim;
    a.shape.v_head_dim = (int)call.v_shape[3];
    a.shape.q_bytes = a.kernels->query_bytes((int)call.head_dim);
    a.shape.acc_stride = (call.v_shape[3] + 63) / 64 * 64;
    a.tile_tokens = tile_tokens(call, a.element);
    a.has_stretches = a.tile_tokens == kTile && has_stretches(call, a.element);
    a.touches_pages = !has_huge_pages(call.k) || !has_huge_pages(call.v);
    a.next_item.store(0);
}

bool allocate(Attention& a) {
    const int64_t counters = a.call->num_seqs * a.items.head_parts();
    const bool merges = a.items.num_chunks() > a.call->num_seqs;
    const int64_t partials = merges ? a.items.num_chunks() * a.call->num_kv_heads * a.partial_floats() : 0;
    ScratchLayout layout;
    const auto place = [&](Scratch& scratch) {
        a.unfinished = scratch.take<std::atomic<int>>(counters);
        a.partials = scratch.take<float>(partials);
    };
    if (!layout.allocate(thread_scratch(kCallScratch), place)) return false;
    for (int64_t i = 0; i < counters; i++) {
        const int64_t seq = i / a.items.head_parts();
        const int64_t chunks = a.items.chunks_before(seq + 1) - a.items.chunks_before(seq);
        new (&a.unfinished[i]) std::atomic<int>((int)chunks);
    }
    return true;
}

}  // namespace

}  // namespace pagedkv

PAGEDKV_EXPORT int64_t pagedkv_attend(pagedkv::AttendCall* call) {
    using namespace pagedkv;
    if (!fits(*call)) return kDoesNotFit;
    Attention a;
    a.kernels = choose_kernels(call->isa, call->kv_dtype, call->q_dtype, call->head_dim);
    if (!a.kernels) return kNoKernel;
    const Status status = a.items.plan(call);
    if (status != kOk) return status;
    set_shapes(a, *call);
    if (!allocate(a)) return kNoMemory;
    run_on_threads(job, &a, a.items.threads(), a.items.size());
    // a thread without memory claims nothing and leaves the items to the others
    return a.next_item.load() < a.items.size() ? kNoMemory : kOk;
}
