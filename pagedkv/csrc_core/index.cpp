#include "index.h"

#include <algorithm>
#include <cstring>

namespace pagedkv {

namespace {

constexpr int64_t kMostChildren = 64;  // that ``best_child`` looks at

uint64_t mixed(uint64_t state, uint64_t word) {
    state = (state ^ word) * 0x9E3779B97F4A7C15u;
    return state ^ (state >> 29);
}

}  // namespace

uint64_t Index::hash(Block above, Block key, const Block* row) const {
    uint64_t state = mixed(seed, (uint64_t)(uint32_t)above << 32 | (uint32_t)key);
    for (int64_t i = 0; i + 1 < block_size; i += 2) {
        uint64_t word;
        std::memcpy(&word, row + i, sizeof word);
        state = mixed(state, word);
    }
    if (block_size % 2) state = mixed(state, (uint32_t)row[block_size - 1]);
    state *= 0xD6E8FEB86659FD93u;
    return (state ^ (state >> 32)) * 0xD6E8FEB86659FD93u & hash_mask;
}

bool Index::equal(Block block, Block above, Block key, const Block* row) const {
    return parent[block] == above && extra[block] == key &&
           !std::memcmp(row_of(block), row, (size_t)block_size * sizeof(Block));
}

Block Index::child(Block above, Block key, const Block* row) const {
    const Block newest = first_child[above];
    if (!newest || equal(newest, above, key, row)) return newest;
    if (!next[newest]) return 0;
    return table.find(hash(above, key, row), [&](Block block) { return equal(block, above, key, row); });
}

int64_t Index::match(const Rows& rows, Block above, Block* found) const {
    for (int64_t i = 0; i < rows.count; i++) {
        above = child(above, rows.extra[i], rows.row(i));
        if (!above) return i;
        found[i] = above;
    }
    return rows.count;
}

Block Index::best_child(const Block* row, int64_t length, Block key, Block above, int64_t* shared) const {
    Block best = 0;
    *shared = 0;
    Block block = first_child[above];
    for (int64_t looked = 0; block && looked < kMostChildren; looked++, block = next[block]) {
        if (extra[block] != key) continue;
        const int64_t equal = std::mismatch(row, row + length, row_of(block)).first - row;
        if (equal > *shared) {
            best = block;
            *shared = equal;
        }
    }
    return best;
}

void Index::link(Block block, Block above) {
    const Block second = first_child[above];
    parent[block] = above;
    next[block] = second;
    prev[block] = 0;
    first_child[above] = block;
    if (second) {
        prev[second] = block;
        enter(second);
    }
}

void Index::unlink(Block block) {
    const Block after = next[block], before = prev[block];
    if (before) {
        leave(block);
        next[before] = after;
    } else {
        first_child[parent[block]] = after;
        if (after) leave(after);  // the newest now
    }
    if (after) prev[after] = before;
}

void Index::insert(const Ids& ids, const Ids& keys, Block above) {
    for (int64_t i = 0; i < ids.count; i++) {
        const Block block = ids[i];
        extra[block] = keys[i];
        indexed[block] = 1;
        first_child[block] = 0;
        link(block, above);
        above = block;
    }
    size += ids.count;
}

int64_t Index::grow(const Ids& ids, const Ids& parents, uint8_t* grown) {
    int64_t count = 0;
    for (int64_t i = 0; i < ids.count; i++) {
        const Block block = ids[i], above = parents[i];
        grown[i] = above != kRoot && !first_child[above] && !indexed[block];
        if (!grown[i]) continue;
        extra[block] = 0;
        indexed[block] = 1;
        first_child[block] = 0;
        link(block, above);
        count++;
    }
    size += count;
    return count;
}

void Index::remove(const Ids& ids) {
    for (int64_t i = 0; i < ids.count; i++) {
        unlink(ids[i]);
        indexed[ids[i]] = 0;
    }
    size -= ids.count;
}

void Index::rename(Block from, Block to) {
    std::memcpy(row_of(to), row_of(from), (size_t)block_size * sizeof(Block));
    extra[to] = extra[from];
    if (!indexed[from]) return;
    // what is in the table is there under its parent's name
    if (in_table(from)) leave(from);
    for (Block c = first_child[from]; c; c = next[c])
        if (in_table(c)) leave(c);
    indexed[from] = 0;
    indexed[to] = 1;
    parent[to] = parent[from];
    first_child[to] = first_child[from];
    next[to] = next[from];
    prev[to] = prev[from];
    if (next[to]) prev[next[to]] = to;
    (prev[to] ? next[prev[to]] : first_child[parent[to]]) = to;
    for (Block c = first_child[to]; c; c = next[c]) parent[c] = to;
    for (Block c = first_child[to]; c; c = next[c])
        if (in_table(c)) enter(c);
    if (in_table(to)) enter(to);
}

void Index::rebuild_table() {
    std::fill_n(table.entries, table.mask + 1, 0);
    for (Block block = 1; block <= num_blocks; block++)
        if (indexed[block] && in_table(block)) enter(block);
}

int64_t Index::walk(Block block, Block* found, int64_t room) const {
    int64_t n = 0;
    for (Block at = first_child[block]; at;) {
        if (n == room) return -1;
        found[n++] = at;
        if (first_child[at]) {
            at = first_child[at];
            continue;
        }
        while (at != block && !next[at]) at = parent[at];
        if (at == block) break;
        at = next[at];
    }
    return n;
}

int64_t Index::depth(Block block) const {
    int64_t n = 0;
    for (; block != kRoot && n <= size; block = parent[block]) n++;
    return n;
}

}  // namespace pagedkv
