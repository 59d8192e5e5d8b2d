// The loop that every thread runs: items, tiles, KV heads.
//
//   block of a tile, HND     | head 0 | head 1 | ... | head 7 |      KV heads are the innermost loop: a block is
//   16 slots x 128 x bf16       4 KB      4 KB          4 KB         read as one stretch of 32 KB (NHD: the same
//                                                                   bytes, slot by slot). By heads first it
//   while a tile is computed, the next one is on its way into the  would be pieces of 4 KB: measured at 0.6
//   cache, across items too: in the order of memory where blocks    of the bandwidth
//   lie in one piece, else (tile, head) by (tile, head)
#include <algorithm>
#include <cmath>
#include <cstring>

#include "attend.h"
#include "block_walk.h"
#include "scratch.h"

namespace pagedkv {

namespace {

// What one thread needs besides the call; sliced from one allocation.
struct Workspace {
    float *acc, *max, *sum;  // [num_kv_heads][rows...] for sequences of one chunk
    char* q;                 // [num_kv_heads][rows] prepared query rows
    float* row_factor;       // [num_kv_heads][rows]
    float *alpha, *scores;   // [rows], [rows][kTile]
    int *begin, *end;        // [rows]
    float* row;              // one vector in fp32
    TileRows* tiles;         // this one and the next
    PartialRows* partials;   // [num_kv_heads] of this item
    int64_t q_seq;           // sequence and head part whose query is prepared
    int q_part;
};

bool allocate(const Attention& a, Workspace* w) {
    const int64_t heads = a.call->num_kv_heads, rows = a.shape.rows;
    ScratchLayout layout;
    const auto place = [&](Scratch& scratch) {
        w->acc = scratch.take<float>(heads * rows * a.shape.acc_stride);
        w->max = scratch.take<float>(heads * rows);
        w->sum = scratch.take<float>(heads * rows);
        w->q = scratch.take<char>(heads * rows * a.shape.q_bytes);
        w->row_factor = scratch.take<float>(heads * rows);
        w->alpha = scratch.take<float>(rows);
        w->scores = scratch.take<float>(rows * kTile);
        w->begin = scratch.take<int>(rows);
        w->end = scratch.take<int>(rows);
        w->row = scratch.take<float>(std::max(a.call->head_dim + 16, a.shape.acc_stride));
        w->tiles = scratch.take<TileRows>(2);
        w->partials = scratch.take<PartialRows>(heads);
    };
    w->q_seq = -1;
    return layout.allocate(thread_scratch(kItemScratch), place);
}

void load_query(const Attention& a, int64_t seq, int token, int head, float* to) {
    const AttendCall& call = *a.call;
    const int64_t bytes = element_bytes(call.q_dtype);
    const char* from = (const char*)call.q +
                       (seq * call.q_stride[0] + token * call.q_stride[1] + head * call.q_stride[2]) * bytes;
    if (call.q_stride[3] == 1) return a.kernels->load_row(from, call.q_dtype, (int)call.head_dim, to);
    float one[16];
    for (int64_t i = 0; i < call.head_dim; i++) {
        a.kernels->load_row(from + i * call.q_stride[3] * bytes, call.q_dtype, 1, one);
        to[i] = one[0];
    }
}

void prepare_queries(const Attention& a, const Item& item, Workspace& w) {
    if (w.q_seq == item.seq && w.q_part == item.head_part) return;
    w.q_seq = item.seq;
    w.q_part = item.head_part;
    for (int head = item.head_begin; head < item.head_end; head++) {
        char* q = w.q + head * a.shape.rows * a.shape.q_bytes;
        memset(q + a.rows * a.shape.q_bytes, 0, (size_t)((a.shape.rows - a.rows) * a.shape.q_bytes));
        for (int row = 0; row < a.rows; row++) {
            load_query(a, item.seq, row / a.group_size, head * a.group_size + row % a.group_size, w.row);
            w.row_factor[head * a.shape.rows + row] =
                (float)a.call->scale *
                a.kernels->prepare_query(w.row, (int)a.call->head_dim, q + row * a.shape.q_bytes);
        }
    }
}

PartialRows rows_of(const Attention& a, const Item& item, int head, const Workspace& w) {
    if (item.num_chunks > 1) return a.partial(a.items.chunks_before(item.seq) + item.chunk, head);
    return PartialRows{w.acc + head * a.shape.rows * a.shape.acc_stride, w.max + head * a.shape.rows,
                       w.sum + head * a.shape.rows};
}

void start_rows(const Attention& a, const Item& item, const Workspace& w) {
    for (int head = item.head_begin; head < item.head_end; head++) {
        const PartialRows& rows = w.partials[head] = rows_of(a, item, head, w);
        // else the first tile writes it
        if (item.begin >= item.end)
            memset(rows.acc, 0, (size_t)(a.shape.rows * a.shape.acc_stride) * sizeof(float));
        for (int row = 0; row < a.shape.rows; row++) {
            rows.max[row] = -INFINITY;
            rows.sum[row] = 0.0f;
        }
    }
}

// Which tokens of the tile each query row sees.
void set_visible(const Attention& a, const TileRows& tile, int64_t seq_len, Workspace& w) {
    for (int row = 0; row < a.rows; row++) {
        const int64_t position = seq_len - a.call->q_len + row / a.group_size;
        const int64_t first = a.call->window ? position - a.call->window + 1 : 0;
        const int64_t begin = first - tile.begin, end = position + 1 - tile.begin;
        w.begin[row] = (int)(begin < 0 ? 0 : begin > tile.count ? tile.count : begin);
        w.end[row] = (int)(end < 0 ? 0 : end > tile.count ? tile.count : end);
    }
}

// The scales of one KV head: where they lie, which saves 20 ns a tile, or copied together if they do not lie in
// granules.
struct HeadScales {
    const float* granules[kTile / kTokenGranule];
    alignas(64) float copies[kTile];

    const float* const* at(const TileRows& tile, const float* const* in_place, const float* Run::*scale,
                           const int64_t* stride, int head) {
        if (!(tile.runs[0].*scale)) return nullptr;
        if (!tile.is_scaled) copy(tile, scale, stride, head);
        for (int i = 0; i < kTile / kTokenGranule; i++)
            granules[i] = tile.is_scaled ? in_place[i] + head * stride[1] : copies + i * kTokenGranule;
        return granules;
    }

    void copy(const TileRows& tile, const float* Run::*scale, const int64_t* stride, int head) {
        for (int i = 0; i < tile.num_runs; i++)
            for (int t = 0; t < tile.runs[i].count; t++)
                copies[tile.runs[i].first + t] = (tile.runs[i].*scale)[head * stride[1] + t * stride[2]];
    }
};

// Asks for all of the first tile of a thread, which nothing before it could: faster than to run into each row.
void prefetch_first(const Attention& a, const Item& item, const TileRows& tile) {
    const AttendCall& call = *a.call;
    for (int head = item.head_begin; head < item.head_end; head++)
        for (int t = 0; t < tile.count; t++) {
            const char* k = tile.k[t] + head * call.k_stride[1] * a.element;
            const char* v = tile.v[t] + head * call.v_stride[1] * a.element;
            for (int64_t i = 0; i < call.head_dim * a.element; i += 64) ask_for(k + i);
            for (int64_t i = 0; i < call.v_shape[3] * a.element; i += 64) ask_for(v + i);
        }
}

// Two heads ahead: one head ahead int8 took 1.03 times as long, as these lines are asked for but once.
void prefetch_scales(const AttendCall& call, const TileRows& tile, int head) {
    if (!call.k_scale) return;
    for (int i = 0; tile.is_scaled && i < kTile / kTokenGranule; i++) {
        ask_for(tile.k_scale[i] + head * call.k_scale_stride[1]);
        ask_for(tile.v_scale[i] + head * call.v_scale_stride[1]);
    }
    if (tile.is_scaled) return;
    for (int i = 0; i < tile.num_runs; i++) {
        ask_for(tile.runs[i].k_scale + head * call.k_scale_stride[1]);
        ask_for(tile.runs[i].v_scale + head * call.v_scale_stride[1]);
    }
}

// Adds the logarithm of each block's part of the sum to what block_mass holds of it.
void add_block_mass(const Attention& a, const Item& item, const TileRows& tile, int head, const PartialRows& rows,
                    const float* p) {
    const AttendCall& call = *a.call;
    if (!call.block_mass) return;
    for (int row = 0; row < a.rows; row++) {
        const int q_head = head * a.group_size + row % a.group_size;
        float* mass = call.block_mass + item.seq * call.mass_stride[0] +
                      row / a.group_size * call.mass_stride[1] + q_head * call.mass_stride[2];
        for (int i = 0; i < tile.num_runs; i++) {
            float sum = 0.0f;
            for (int t = 0; t < tile.runs[i].count; t++) sum += p[row * kTile + tile.runs[i].first + t];
            if (sum == 0.0f) continue;
            float& cell = mass[tile.runs[i].column * call.mass_stride[3]];
            const float here = rows.max[row] + std::log2(sum), top = cell > here ? cell : here;
            cell = cell == -INFINITY ? here : top + std::log2(std::exp2(cell - top) + std::exp2(here - top));
        }
    }
}

void run_tile(const Attention& a, const Item& item, int head, const TileRows& rows, const Tile& tile,
              Workspace& w) {
    const AttendCall& call = *a.call;
    const PartialRows& partial = w.partials[head];
    HeadScales k_scale, v_scale;
    SoftmaxTile softmax{a.rows, rows.count, w.row_factor + head * a.shape.rows, nullptr, w.begin, w.end,
                        (float)call.softcap, partial.max, partial.sum, w.alpha};
    softmax.k_scale = k_scale.at(rows, rows.k_scale, &Run::k_scale, call.k_scale_stride, head);
    const float* const* folded = v_scale.at(rows, rows.v_scale, &Run::v_scale, call.v_scale_stride, head);
    a.kernels->score(w.q + head * a.shape.rows * a.shape.q_bytes, tile, a.shape, w.scores);
    a.kernels->softmax(w.scores, softmax);
    const float* kept = rows.begin == item.begin ? nullptr : w.alpha;
    a.kernels->value(w.scores, folded, tile, a.shape, kept, partial.acc);
    add_block_mass(a, item, rows, head, partial, w.scores);
}

// A KV head of a tile, and where its rows lie from those of the first one.
struct TileHead {
    const TileRows* rows;
    int head;
    int64_t k, v;
};

// Touches the pages of the tile after the next, in this item or the one that follows.
void touch_ahead(const Attention& a, const Item& item, const Item* next, int64_t begin, int head) {
    const bool here = begin + 2 * a.tile_tokens < item.end;
    if (!here && !next) return;
    const int64_t passed = begin + a.tile_tokens < item.end ? 0 : a.tile_tokens;  // of the next item
    const int64_t from = here ? begin + 2 * a.tile_tokens : next->begin + passed;
    const int64_t end = here ? item.end : next->end, tile_end = from + a.tile_tokens;
    touch_pages(*a.call, a.element, here ? item.seq : next->seq, from, tile_end < end ? tile_end : end,
                head - item.head_begin, item.head_end - item.head_begin);
}

// current: which of the two tiles holds the item's first one. Returns which holds the next item's.
int run_item(const Attention& a, const Item& item, const Item* next, int current, Workspace& w) {
    const AttendCall& call = *a.call;
    const int64_t n = call.seq_lens[item.seq * call.seq_lens_stride];
    prepare_queries(a, item, w);
    start_rows(a, item, w);
    start_block_mass(a, item);
    for (int64_t begin = item.begin; begin < item.end; begin += a.tile_tokens, current ^= 1) {
        const TileRows& rows = w.tiles[current];
        TileRows& ahead = w.tiles[current ^ 1];
        const bool last = begin + a.tile_tokens >= item.end;
        int ahead_head = item.head_begin, ahead_end = item.head_end;
        if (!last) {
            ahead.fill(call, a.element, item.seq, begin + a.tile_tokens, item.end, a.tile_tokens);
        } else if (next && next->begin < next->end) {
            ahead.fill(call, a.element, next->seq, next->begin, next->end, a.tile_tokens);
            ahead_head = next->head_begin;
            ahead_end = next->head_end;
        } else {
            ahead = rows;  // nothing follows: asks for lines that are here already
        }
        // whole tiles, aligned with their blocks, of all KV heads
        const bool by_stretches = a.has_stretches && a.items.head_parts() == 1 && ahead.count == kTile &&
                                  rows.count == kTile && ahead.begin % call.block_size == 0;
        set_visible(a, rows, n, w);
        const int64_t k_head = call.k_stride[1] * a.element, v_head = call.v_stride[1] * a.element;
        // KV heads as they follow each other, on into the next tile
        const auto head_at = [&](int head) {
            const bool here = head < item.head_end;
            const int of = here ? head : std::min(ahead_head + head - item.head_end, ahead_end - 1);
            return TileHead{here ? &rows : &ahead, of, of * k_head, of * v_head};
        };
        TileHead now = head_at(item.head_begin), near = head_at(item.head_begin + 1);
        Stretches stretches(call, a.element, ahead);
        const bool is_dense = by_stretches && rows.is_dense && ahead.is_dense;
        for (int head = item.head_begin; head < item.head_end; head++) {
            const TileHead far = head_at(head + 2);
            Tile tile{rows.k, rows.v, now.k, now.v, near.rows->k, near.rows->v, near.k, near.v,
                      far.rows->k, far.rows->v, far.k, far.v, nullptr, nullptr, is_dense, rows.count, rows.padded};
            if (by_stretches) tile.stretch_k = stretches.next(), tile.stretch_v = stretches.next();
            if (a.touches_pages) touch_ahead(a, item, next, begin, head);
            prefetch_scales(call, *far.rows, far.head);
            run_tile(a, item, head, rows, tile, w);
            now = near;
            near = far;
        }
    }
    return current;
}

void finish_item(Attention& a, const Item& item, const Workspace& w) {
    if (item.num_chunks == 1) {
        for (int head = item.head_begin; head < item.head_end; head++)
            finish(a, item.seq, head, &w.partials[head], 1, w.row);
        return;
    }
    std::atomic<int>& unfinished = a.unfinished[item.seq * a.items.head_parts() + item.head_part];
    if (unfinished.fetch_sub(1, std::memory_order_acq_rel) != 1) return;
    PartialRows chunks[kMostChunks];
    for (int head = item.head_begin; head < item.head_end; head++) {
        for (int64_t c = 0; c < item.num_chunks; c++)
            chunks[c] = a.partial(a.items.chunks_before(item.seq) + c, head);
        finish(a, item.seq, head, chunks, item.num_chunks, w.row);
    }
}

}  // namespace

void work(Attention& a) {
    Workspace w;
    if (!allocate(a, &w)) return;  // another thread does the items; the caller checks that all were done
    Item item, next;
    bool has_item = a.items.at(a.next_item.fetch_add(1), &item);
    int current = 0;
    if (has_item && item.begin < item.end) {
        w.tiles[0].fill(*a.call, a.element, item.seq, item.begin, item.end, a.tile_tokens);
        prefetch_first(a, item, w.tiles[0]);
    }
    while (has_item) {
        // claimed one ahead, so that its first tile is prefetched during the last one of this
        const bool has_next = a.items.at(a.next_item.fetch_add(1), &next);
        const bool was_empty = item.begin >= item.end;
        current = run_item(a, item, has_next ? &next : nullptr, current, w);
        if (was_empty && has_next && next.begin < next.end)
            w.tiles[current].fill(*a.call, a.element, next.seq, next.begin, next.end, a.tile_tokens);
        finish_item(a, item, w);
        item = next;
        has_item = has_next;
    }
}

}  // namespace pagedkv
