// States and ref counts of blocks, over arrays that Python made and may read.
//
//   free_stack   | 9 | 8 | 5 | . | . |      the last one is handed out first
//                 '-- num_free --'
//   seen         the stamp of the call that named a block last: naming it twice in one call shows
#pragma once
#include "ids.h"

namespace pagedkv {

enum State : uint8_t { kFree = 0, kCached = 1, kActive = 2 };  // as pagedkv.block_pool numbers them

struct Pool {
    Block num_blocks = 0;
    Block* ref_count = nullptr;
    uint8_t* state = nullptr;
    Block* free_stack = nullptr;
    int32_t* seen = nullptr;
    int64_t num_free = 0, num_cached = 0;
    int32_t stamp = 0;  // below 0: the numpy engine, which shares ``seen``, writes 0 and more

    // How many ids are in the state ``least``; -1 if one is foreign, repeated or not in least..most.
    int64_t check(const Ids& ids, uint8_t least, uint8_t most);

    // Fills ``fresh`` and takes references on ``shared``; false, with nothing changed, if an id is wrong.
    bool acquire(Block* fresh, int64_t num_new, const Ids& shared, const Ids& victims);

    // Drops a reference each; at zero ``keep(i, id)`` says whether the block is cached from now on, or free.
    // False, with nothing changed, if an id is wrong.
    template <typename Keep>
    bool release(const Ids& ids, Keep keep) {
        if (check(ids, kActive, kActive) < 0 || num_free + ids.count > num_blocks) return false;
        for (int64_t i = 0; i < ids.count; i++) {
            const Block id = ids[i];
            if (--ref_count[id]) continue;
            if (keep(i, id)) {
                state[id] = kCached;
                num_cached++;
            } else {
                state[id] = kFree;
                free_stack[num_free++] = id;
            }
        }
        return true;
    }

    bool evict(const Ids& ids);

  private:
    int64_t check_unseen(const Ids& ids, uint8_t least, uint8_t most);
    void next_stamp();
};

}  // namespace pagedkv
