// One attention call as its threads see it.
#pragma once
#include <atomic>

#include "abi.h"
#include "kernels.h"
#include "work_items.h"

namespace pagedkv {

constexpr int kMostChunks = 256;  // more than work_items.cpp makes of any sequence

// Rows of one KV head, unnormalized: what a chunk leaves behind, and what is merged.
struct PartialRows {
    float* acc;  // [rows][acc_stride]
    float* max;  // [rows] base-2
    float* sum;  // [rows]
};

struct Attention {
    const AttendCall* call;
    const Kernels* kernels;
    WorkItems items;
    TileShape shape;      // rows here are the padded ones
    int rows;             // group_size * q_len, row = token * group_size + head of the group
    int group_size;
    int64_t element;      // bytes of an element of K and V
    int tile_tokens;      // tokens of a full tile, at most kTile; see block_walk.h
    bool has_stretches;   // see block_walk.h
    bool touches_pages;   // likewise
    float* partials;      // [chunks][num_kv_heads] of partial_floats(), only of sequences with more than one chunk
    std::atomic<int64_t> next_item;
    std::atomic<int>* unfinished;  // [num_seqs][head_parts] chunks

    int64_t partial_floats() const { return shape.rows * (shape.acc_stride + 2); }

    PartialRows partial(int64_t chunk, int head) const {
        float* base = partials + (chunk * call->num_kv_heads + head) * partial_floats();
        return PartialRows{base, base + shape.rows * shape.acc_stride, base + shape.rows * (shape.acc_stride + 1)};
    }
};

// Claims items until there are none left. Runs on every thread of the call.
void work(Attention& attention);

// Writes out, lse and block_mass of KV head `head` of a sequence from the partial results of its chunks.
// mixed: scratch of acc_stride floats.
void finish(const Attention& attention, int64_t seq, int head, const PartialRows* chunks, int64_t num_chunks,
            float* mixed);

// Logarithms of block sums are kept in block_mass until lse is known.
void start_block_mass(const Attention& attention, const Item& item);

}  // namespace pagedkv
