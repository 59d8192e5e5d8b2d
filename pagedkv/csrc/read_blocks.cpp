// The read ceiling: the same blocks, in the same order, on the same threads as attention, and nothing else.
//
//   tile of 64 tokens = 4 blocks of 16:   k: block 7, 2, 9, 4   v: block 7, 2, 9, 4   then the next tile,
//   each block one contiguous stretch, each line asked for one tile ahead, as the kernels do
#include <atomic>

#include "abi.h"
#include "advise_huge.h"
#include "cpu_features.h"
#include "kernels.h"
#include "thread_pool.h"

namespace pagedkv {

namespace {

constexpr int64_t kBlocksPerItem = 16;  // claimed at a time: 256 tokens of 16-token blocks, a chunk

constexpr int64_t kPagesAhead = 4;

struct Reading {
    const ReadCall* call;
    std::atomic<int64_t> next;
    std::atomic<int> sum;
    bool touches_pages;
    float (*stretch)(const char*, const char*, int64_t);
};

float read_block(const Reading& r, const char* pool, int64_t id, int64_t next, int64_t later, int64_t stride,
                 int64_t bytes) {
    for (int64_t i = 0; r.touches_pages && i < bytes; i += 4096) ask_for(pool + later * stride + i);
    return r.stretch(pool + id * stride, pool + next * stride, bytes);
}

void read_items(void* context) {
    Reading& r = *(Reading*)context;
    const ReadCall& call = *r.call;
    float sum = 0;
    int64_t item = r.next.fetch_add(1);
    int64_t passed = 0;  // items of the sequences before
    for (int64_t seq = 0; seq < call.num_seqs; seq++) {
        const int64_t blocks = (call.seq_lens[seq] + call.block_size - 1) / call.block_size;
        const int64_t items = (blocks + kBlocksPerItem - 1) / kBlocksPerItem;
        const int32_t* table = call.block_tables + seq * call.table_stride;
        for (; item < passed + items; item = r.next.fetch_add(1)) {
            const int64_t begin = (item - passed) * kBlocksPerItem;
            const int64_t end = begin + kBlocksPerItem < blocks ? begin + kBlocksPerItem : blocks;
            for (int64_t b = begin; b < end; b++) {
                // the next block's lines, and small pages of the one some blocks later, as attention asks for them
                const int64_t id = table[b], next = table[b + 1 < blocks ? b + 1 : b];
                const int64_t later = table[b + kPagesAhead < blocks ? b + kPagesAhead : b];
                sum += read_block(r, (const char*)call.k, id, next, later, call.k_block_stride,
                                  call.k_block_bytes);
                if (call.v)
                    sum += read_block(r, (const char*)call.v, id, next, later, call.v_block_stride,
                                      call.v_block_bytes);
            }
        }
        passed += items;
    }
    r.sum.fetch_add(sum > 0);
}

}  // namespace

}  // namespace pagedkv

PAGEDKV_EXPORT uint64_t pagedkv_read_blocks(const pagedkv::ReadCall* call) {
    using namespace pagedkv;
    const bool is_huge = has_huge_pages(call->k) && (!call->v || has_huge_pages(call->v));
    Reading reading{call, {0}, {0}, !is_huge, choose_kernels(kAuto, kFp32, kFp32, 1)->read_stretch};
    run_on_threads(read_items, &reading, (int)call->threads, INT64_MAX);
    return reading.sum.load();
}
