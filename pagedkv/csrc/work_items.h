// How one call is cut into work items that threads claim.
//
//   sequence 0   |--- chunk ---|--- chunk ---|--|        a chunk is a fixed number of tokens that depends on the
//   sequence 1   |--|                                    sequence and the shapes alone: results do not depend on
//   sequence 2   |--- chunk ---|-------|                 the batch or on how many threads there are
//
//   item = (sequence, chunk, range of KV heads)          heads are cut only if there are too few chunks
#pragma once
#include <cstdint>

#include "abi.h"

namespace pagedkv {

int64_t element_bytes(int64_t dtype);

struct Span {  // positions first <= j < end that a sequence reads
    int64_t first, end;
};

struct Item {
    int64_t seq;
    int64_t chunk;       // counted from the first chunk that is read
    int64_t num_chunks;  // of its sequence
    int64_t begin, end;  // positions
    int head_part;
    int head_begin, head_end;
};

class WorkItems {
  public:
    // Checks lengths and block ids on the way.
    Status plan(AttendCall* call);

    int64_t size() const { return num_chunks_ * head_parts_; }
    int64_t num_chunks() const { return num_chunks_; }
    int head_parts() const { return head_parts_; }
    int threads() const { return threads_; }

    Span span(int64_t seq) const;

    // False: there are no more than index items.
    bool at(int64_t index, Item* item) const;

    // Chunks of all sequences before this one: where its partial results lie.
    int64_t chunks_before(int64_t seq) const { return before_[seq]; }

    ~WorkItems();
    WorkItems() = default;
    WorkItems(const WorkItems&) = delete;
    WorkItems& operator=(const WorkItems&) = delete;

  private:
    int64_t chunk_tokens(const AttendCall& call, int64_t length) const;

    const AttendCall* call_ = nullptr;
    int64_t* before_ = nullptr;  // [num_seqs + 1]
    int64_t num_seqs_ = 0, num_chunks_ = 0, kv_bytes_ = 0;
    int head_parts_ = 1, threads_ = 1;
};

}  // namespace pagedkv
