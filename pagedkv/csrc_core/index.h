// A tree of blocks, found by content: parent, extra key and tokens, always compared in full.
//
//   first_child[p]          newest child of p -> next -> ... -> oldest -> 0        (prev the other way)
//                                  |               |
//   found by                   first look      hash table
//
// Nearly every block is its parent's only child, so that most are found, added and removed without a hash.
#pragma once
#include "hash_table.h"
#include "ids.h"

namespace pagedkv {

constexpr Block kRoot = 0;

struct Rows {  // contents to look for: n rows of block_size tokens, each row without gaps
    const char* tokens = nullptr;
    int64_t stride = 0;  // bytes
    int64_t count = 0;
    Ids extra;

    const Block* row(int64_t i) const { return (const Block*)(tokens + i * stride); }
};

struct Index {
    Block num_blocks = -1;  // without arrays not even the root is in range
    int64_t block_size = 0;
    Block* tokens = nullptr;  // [num_blocks + 1, block_size]
    Block* extra = nullptr;
    uint8_t* indexed = nullptr;
    Block *parent = nullptr, *first_child = nullptr, *next = nullptr, *prev = nullptr;
    HashTable table;
    int64_t size = 0;
    uint64_t seed = 0;
    uint64_t hash_mask = ~(uint64_t)0;  // 0 lets all keys collide, for tests

    bool known(Block block) const { return block == kRoot || indexed[block]; }
    Block* row_of(Block block) const { return tokens + (int64_t)block * block_size; }

    Block child(Block above, Block key, const Block* row) const;
    int64_t match(const Rows& rows, Block above, Block* found) const;
    Block best_child(const Block* row, int64_t length, Block key, Block above, int64_t* shared) const;

    void insert(const Ids& ids, const Ids& keys, Block above);
    int64_t grow(const Ids& ids, const Ids& parents, uint8_t* grown);
    void remove(const Ids& ids);
    void rename(Block from, Block to);
    void rebuild_table();

    // Everything behind ``block``, parents first, newest children first; -1 if that is more than ``room``.
    int64_t walk(Block block, Block* found, int64_t room) const;
    int64_t depth(Block block) const;

  private:
    uint64_t hash(Block above, Block key, const Block* row) const;
    uint64_t hash_of(Block block) const { return hash(parent[block], extra[block], row_of(block)); }
    bool equal(Block block, Block above, Block key, const Block* row) const;
    bool in_table(Block block) const { return prev[block] != 0; }
    void link(Block block, Block above);
    void unlink(Block block);
    void enter(Block block) { table.add(hash_of(block), block); }
    void leave(Block block) { table.remove(hash_of(block), block); }
};

}  // namespace pagedkv
