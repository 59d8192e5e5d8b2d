#include "work_items.h"

#include <algorithm>
#include <cstdlib>

namespace pagedkv {

namespace {

// Short enough to balance few sequences over a few threads, long enough that the partial results
// (group_size * v_head_dim fp32 per chunk and KV head) are under 2 % of the bytes read.
constexpr int64_t kMinChunk = 256;
// A long sequence gets longer chunks: what merges them is one thread per range of heads while others may be idle
// (at 64 chunks 5 % of an int8 call), and yet there must be enough for the threads to share evenly.
constexpr int64_t kMaxChunks = 16;

// Less than this is read before a helper has woken up.
constexpr int64_t kMinBytesToShare = 512 * 1024;

}  // namespace

int64_t element_bytes(int64_t dtype) { return dtype == kFp32 ? 4 : dtype == kInt8 || dtype == kFp8 ? 1 : 2; }

static int64_t round_up(int64_t n, int64_t step) { return (n + step - 1) / step * step; }

WorkItems::~WorkItems() { std::free(before_); }

Span WorkItems::span(int64_t seq) const {
    const AttendCall& call = *call_;
    const int64_t n = call.seq_lens[seq * call.seq_lens_stride];
    // the first query token stands at n - q_len, and sees the window that ends there
    const int64_t first = call.window ? std::max<int64_t>(0, n - call.q_len - call.window + 1) : 0;
    return Span{first, n};
}

int64_t WorkItems::chunk_tokens(const AttendCall& call, int64_t length) const {
    const int64_t rows = call.num_q_heads / call.num_kv_heads * call.q_len;
    const int64_t partial = rows * call.v_shape[3] * 8;  // written once and read once
    const int64_t token = (call.head_dim + call.v_shape[3]) * element_bytes(call.kv_dtype);
    // many rows (MLA) make large partial results: keep them under a quarter of the bytes read
    const int64_t least = std::max(kMinChunk, 4 * partial / token);
    return round_up(std::max(least, length / kMaxChunks), call.block_size);
}

Status WorkItems::plan(AttendCall* call) {
    call_ = call;
    num_seqs_ = call->num_seqs;
    before_ = (int64_t*)std::malloc((size_t)(num_seqs_ + 1) * sizeof(int64_t));
    if (!before_) return kNoMemory;
    before_[0] = 0;
    const int64_t limit = call->max_blocks * call->block_size;
    int64_t tokens = 0;
    for (int64_t seq = 0; seq < num_seqs_; seq++) {
        const int64_t n = call->seq_lens[seq * call->seq_lens_stride];
        if (n < 0 || n > limit) return kBadLength;
        const Span s = span(seq);
        const int32_t* table = call->block_tables + seq * call->table_stride[0];
        const int64_t last = s.end > s.first ? (s.end - 1) / call->block_size : -1;
        for (int64_t b = s.first / call->block_size; b <= last; b++)
            if ((uint64_t)(int64_t)table[b * call->table_stride[1]] >= (uint64_t)call->num_blocks)
                return kBadBlock;
        const int64_t c = chunk_tokens(*call, s.end - s.first);
        const int64_t chunks = s.end > s.first ? (s.end - 1) / c - s.first / c + 1 : 1;
        before_[seq + 1] = before_[seq] + chunks;
        tokens += s.end - s.first;
    }
    num_chunks_ = before_[num_seqs_];
    kv_bytes_ = tokens * call->num_kv_heads * (call->head_dim + call->v_shape[3]) * element_bytes(call->kv_dtype);
    threads_ = kv_bytes_ < kMinBytesToShare ? 1 : (int)std::max<int64_t>(1, call->threads);
    while (threads_ > 1 && head_parts_ < call->num_kv_heads && num_chunks_ * head_parts_ < 2 * threads_)
        head_parts_ = (int)std::min<int64_t>(2 * head_parts_, call->num_kv_heads);
    return kOk;
}

bool WorkItems::at(int64_t index, Item* item) const {
    if (index >= size()) return false;
    const AttendCall& call = *call_;
    const int64_t chunk = index / head_parts_;
    const int part = (int)(index % head_parts_);
    const int64_t seq = std::upper_bound(before_, before_ + num_seqs_ + 1, chunk) - before_ - 1;
    const Span s = span(seq);
    const int64_t c = chunk_tokens(call, s.end - s.first);
    item->seq = seq;
    item->chunk = chunk - before_[seq];
    item->num_chunks = before_[seq + 1] - before_[seq];
    const int64_t start = (s.first / c + item->chunk) * c;
    item->begin = std::max(s.first, start);
    item->end = std::min(s.end, start + c);
    item->head_part = part;
    item->head_begin = (int)(call.num_kv_heads * part / head_parts_);
    item->head_end = (int)(call.num_kv_heads * (part + 1) / head_parts_);
    return true;
}

}  // namespace pagedkv
