// Where the tokens of a tile lie: the only place that follows a block table.
//
//   table row   | 7 | 2 | 9 |              tile of 64 tokens, block_size 16, begins at position 24:
//   block 2     | . . t0 .. t7 |           k[0..7]   = slots 8..15 of block 2
//   block 9     | t8 ...   t23 |           k[8..23]  = slots 0..15 of block 9        and so on
#pragma once
#include <cstdint>

#include "abi.h"
#include "kernels.h"

namespace pagedkv {

// Tokens of a tile that lie in one block.
struct Run {
    int first, count;  // tokens of the tile
    int64_t column;    // of the block table
    const float* k_scale;  // of the run's first token, KV head 0; null without scales
    const float* v_scale;
};

struct TileRows {
    const char* k[kTile];
    const char* v[kTile];
    Run runs[kTile];
    int num_runs, count, padded;
    int64_t begin;  // position of token 0
    bool is_dense;   // each kTokenGranule rows lie side by side
    bool is_scaled;  // there are scales, and those of each kTokenGranule tokens lie side by side
    const float* k_scale[kTile / kTokenGranule];  // if so: of KV head 0, past the last token of any other
    const float* v_scale[kTile / kTokenGranule];

    // Rows of positions [from, end), at most `tokens` of them and at least one. Ids were checked before.
    void fill(const AttendCall& call, int64_t element, int64_t seq, int64_t from, int64_t end, int tokens) {
        const int32_t* table = call.block_tables + seq * call.table_stride[0];
        begin = from;
        count = (int)(end - from < tokens ? end - from : tokens);
        padded = (count + kTokenGranule - 1) / kTokenGranule * kTokenGranule;
        num_runs = 0;
        for (int t = 0; t < count;) {
            const int64_t column = (from + t) / call.block_size, slot = (from + t) % call.block_size;
            const int64_t id = table[column * call.table_stride[1]];
            Run& run = runs[num_runs++];
            run.first = t;
            run.column = column;
            run.count = (int)(call.block_size - slot < count - t ? call.block_size - slot : count - t);
            const char* k_row = (const char*)call.k + (id * call.k_stride[0] + slot * call.k_stride[2]) * element;
            const char* v_row = (const char*)call.v + (id * call.v_stride[0] + slot * call.v_stride[2]) * element;
            for (int i = 0; i < run.count; i++) {
                k[t + i] = k_row + i * call.k_stride[2] * element;
                v[t + i] = v_row + i * call.v_stride[2] * element;
            }
            run.k_scale = run.v_scale = nullptr;
            if (call.k_scale) {
                run.k_scale = call.k_scale + id * call.k_scale_stride[0] + slot * call.k_scale_stride[2];
                run.v_scale = call.v_scale + id * call.v_scale_stride[0] + slot * call.v_scale_stride[2];
            }
            t += run.count;
        }
        const bool in_granules = call.block_size % kTokenGranule == 0 && from % kTokenGranule == 0;
        is_dense = in_granules && count == kTile && call.k_stride[2] == call.head_dim &&
                   call.v_stride[2] == call.v_shape[3];
        is_scaled = in_granules && call.k_scale && call.k_scale_stride[2] == 1 && call.v_scale_stride[2] == 1;
        for (int i = 0, run = 0; is_scaled && i < kTile / kTokenGranule; i++) {
            const int t = i * kTokenGranule < padded ? i * kTokenGranule : padded - kTokenGranule;
            while (t >= runs[run].first + runs[run].count) run++;
            k_scale[i] = runs[run].k_scale + (t - runs[run].first);
            v_scale[i] = runs[run].v_scale + (t - runs[run].first);
        }
        // score kernels read whole granules; what they make of the repeated row is masked
        for (int t = count; t < kTile; t++) {
            k[t] = k[count - 1];
            v[t] = v[count - 1];
        }
    }
};

// The 2 * num_kv_heads stretches of kTile rows that K and V of a whole tile are, in the order of memory: K of the
// first block, its V, K of the second block, and so on.
struct Stretches {
    const TileRows& tile;
    int64_t k_bytes, v_bytes;  // of a stretch
    int per_block, block_size;
    int token = 0, passed = 0;  // first of its block; stretches of its K and V before the next one

    Stretches(const AttendCall& call, int64_t element, const TileRows& tile)
        : tile(tile), k_bytes(kTile * call.head_dim * element), v_bytes(kTile * call.v_shape[3] * element),
          per_block((int)(call.block_size * call.num_kv_heads / kTile)), block_size((int)call.block_size) {}

    const char* next() {
        const bool is_k = passed < per_block;
        const char* stretch =
            is_k ? tile.k[token] + passed * k_bytes : tile.v[token] + (passed - per_block) * v_bytes;
        if (++passed == 2 * per_block) passed = 0, token += block_size;
        return stretch;
    }
};

// Two tiles of one KV head should not crowd the first-level cache out: wide rows get shorter tiles.
inline int tile_tokens(const AttendCall& call, int64_t element) {
    constexpr int64_t kMaxHeadBytes = 48 * 1024;
    return kTile * (call.head_dim + call.v_shape[3]) * element > kMaxHeadBytes ? kTile / 2 : kTile;
}

// Bytes from the first to the last element of a block, all KV heads; 0 if another block lies in between.
inline int64_t block_span(const AttendCall& call, const int64_t* stride, int64_t dim, int64_t element) {
    const int64_t last = (call.num_kv_heads - 1) * stride[1] + (call.block_size - 1) * stride[2] + dim;
    return last <= stride[0] ? last * element : 0;
}

// Asks for one line of every page of positions [from, end), so that the addresses of its pages
// are known when its lines are asked for: a prefetch that has to walk the page tables holds up those behind it.
// Blocks lie anywhere, so that nearly each of them is another walk. The work is shared by `steps` calls. It pays with
// small pages (bf16 1.2x faster); with huge ones it only holds up (bf16 0.97x, int8 0.95x).
inline void touch_pages(const AttendCall& call, int64_t element, int64_t seq, int64_t from, int64_t end,
                        int step, int steps) {
    if (from >= end) return;
    const int32_t* table = call.block_tables + seq * call.table_stride[0];
    const int64_t first = from / call.block_size;
    const int64_t last = (end - 1) / call.block_size;
    for (int64_t entry = step; entry < 2 * (last - first + 1); entry += steps) {
        const int64_t id = table[(first + entry / 2) * call.table_stride[1]];
        const bool is_v = entry % 2;
        const int64_t* stride = is_v ? call.v_stride : call.k_stride;
        const int64_t span = block_span(call, stride, is_v ? call.v_shape[3] : call.head_dim, element);
        const char* block = (const char*)(is_v ? call.v : call.k) + id * stride[0] * element;
        for (int64_t i = 0; i < span; i += 4096) ask_for(block + i);
        if (call.k_scale) {
            const float* scale = is_v ? call.v_scale + id * call.v_scale_stride[0]
                                      : call.k_scale + id * call.k_scale_stride[0];
            for (int64_t i = 0; i < call.num_kv_heads * call.block_size; i += 16) ask_for(scale + i);
        }
    }
}

// Whether blocks of K and V each lie in one piece, which makes whole stretches, and two tiles of all KV heads fit
// a cache of 1 MB. Then a tile is asked for in the order of memory, which is up to 1.1x faster than by heads.
inline bool has_stretches(const AttendCall& call, int64_t element) {
    constexpr int64_t kMaxTileBytes = 256 * 1024;
    const int64_t heads = call.num_kv_heads, block = call.block_size;
    const auto in_one_piece = [&](const int64_t* stride, int64_t dim) {
        const bool hnd = stride[2] == dim && stride[1] == block * dim;
        const bool nhd = stride[1] == dim && stride[2] == heads * dim;
        return (hnd || nhd) && dim * element % 64 == 0;
    };
    return call.k != call.v && kTile % block == 0 && block * heads % kTile == 0 &&
           kTile * heads * (call.head_dim + call.v_shape[3]) * element <= kMaxTileBytes &&
           in_one_piece(call.k_stride, call.head_dim) && in_one_piece(call.v_stride, call.v_shape[3]);
}

}  // namespace pagedkv
