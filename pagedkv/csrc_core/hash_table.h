// Open addressing, linear probing, and deletion that shifts back, so that no tombstones pile up.
//
//   entry = high half of the hash << 32 | block, 0 for none; its home is the high half modulo the capacity
//
// An entry is a candidate only: the caller compares what it stands for.
#pragma once
#include "ids.h"

namespace pagedkv {

struct HashTable {
    uint64_t* entries = nullptr;
    uint64_t mask = 0;  // capacity - 1; the capacity is a power of 2 above the number of blocks

    template <typename Equal>
    Block find(uint64_t hash, Equal equal) const {
        const uint64_t high = hash >> 32;
        for (uint64_t i = high & mask; entries[i]; i = (i + 1) & mask)
            if (entries[i] >> 32 == high && equal((Block)(uint32_t)entries[i])) return (Block)(uint32_t)entries[i];
        return 0;
    }

    void add(uint64_t hash, Block block) {
        uint64_t i = (hash >> 32) & mask;
        while (entries[i]) i = (i + 1) & mask;
        entries[i] = (hash >> 32 << 32) | (uint32_t)block;
    }

    void remove(uint64_t hash, Block block) {
        const uint64_t entry = (hash >> 32 << 32) | (uint32_t)block;
        uint64_t hole = (hash >> 32) & mask;
        while (entries[hole] && entries[hole] != entry) hole = (hole + 1) & mask;
        if (!entries[hole] && !search_everywhere(block, &hole)) return;
        for (uint64_t i = (hole + 1) & mask; entries[i]; i = (i + 1) & mask) {
            const uint64_t home = (entries[i] >> 32) & mask;
            // may move back to the hole unless its home lies behind the hole
            if (((i - home) & mask) >= ((i - hole) & mask)) {
                entries[hole] = entries[i];
                hole = i;
            }
        }
        entries[hole] = 0;
    }

  private:
    // Only for a block whose tokens somebody has overwritten: what stays here forever would fill the table.
    bool search_everywhere(Block block, uint64_t* at) const {
        for (uint64_t i = 0; i <= mask; i++)
            if (entries[i] && (uint32_t)entries[i] == (uint32_t)block) {
                *at = i;
                return true;
            }
        return false;
    }
};

}  // namespace pagedkv
