// Blocks from the least to the most recently used: a ring of links through block 0, which is no block.
//
//   next:  0 -> oldest -> ... -> newest -> 0        next[b] is kNowhere for a block that is not in the order
#pragma once
#include "ids.h"

namespace pagedkv {

struct Order {
    static constexpr Block kNowhere = -1;

    Block num_blocks = -1;  // without arrays
    Block* next = nullptr;
    Block* prev = nullptr;
    uint8_t* kept = nullptr;  // all 0 between calls

    bool holds(Block id) const { return next[id] != kNowhere; }

    void push(const Ids& ids) {
        for (int64_t i = 0; i < ids.count; i++) push(ids[i]);
    }

    void push(Block id) {
        drop(id);
        link(id, prev[0], 0);
    }

    void discard(const Ids& ids) {
        for (int64_t i = 0; i < ids.count; i++)
            if (ids[i]) drop(ids[i]);
    }

    // Up to ``count`` of the oldest that are not in ``keep``.
    int64_t first(int64_t count, const Ids& keep, Block* found) {
        for (int64_t i = 0; i < keep.count; i++) kept[keep[i]] = 1;
        int64_t n = 0;
        for (Block id = next[0]; id && n < count; id = next[id])
            if (!kept[id]) found[n++] = id;
        for (int64_t i = 0; i < keep.count; i++) kept[keep[i]] = 0;
        return n;
    }

    // ``to``, which is not in the order, stands where ``from`` stood, if that was in it.
    void rename(Block from, Block to) {
        if (!holds(from)) return;
        const Block before = prev[from], after = next[from];
        next[from] = kNowhere;
        link(to, before, after);
    }

  private:
    void link(Block id, Block before, Block after) {
        next[id] = after;
        prev[id] = before;
        next[before] = id;
        prev[after] = id;
    }

    void drop(Block id) {
        if (!holds(id)) return;
        next[prev[id]] = next[id];
        prev[next[id]] = prev[id];
        next[id] = kNowhere;
    }
};

}  // namespace pagedkv
