#include "pool.h"

#include <algorithm>

namespace pagedkv {

void Pool::next_stamp() {
    if (stamp == INT32_MIN) {
        std::fill_n(seen, (int64_t)num_blocks + 1, 0);
        stamp = 0;
    }
    stamp--;
}

int64_t Pool::check_unseen(const Ids& ids, uint8_t least, uint8_t most) {
    int64_t in_least = 0;
    for (int64_t i = 0; i < ids.count; i++) {
        const Block id = ids[i];
        if (id < 1 || id > num_blocks || seen[id] == stamp) return -1;
        seen[id] = stamp;
        if (state[id] < least || state[id] > most) return -1;
        in_least += state[id] == least;
    }
    return in_least;
}

int64_t Pool::check(const Ids& ids, uint8_t least, uint8_t most) {
    next_stamp();
    return check_unseen(ids, least, most);
}

bool Pool::acquire(Block* fresh, int64_t num_new, const Ids& shared, const Ids& victims) {
    if (num_free < 0 || num_free > num_blocks) return false;  // somebody wrote to the counts
    const int64_t from_stack = std::min(num_new, num_free);
    if (victims.count != num_new - from_stack) return false;
    // one stamp for both, so that nothing is shared and evicted
    const int64_t revived = check(shared, kCached, kActive);
    if (revived < 0 || check_unseen(victims, kCached, kCached) < 0) return false;
    for (int64_t i = 0; i < shared.count; i++) {
        ref_count[shared[i]]++;
        state[shared[i]] = kActive;
    }
    for (int64_t i = 0; i < num_new; i++) {
        const Block id = i < from_stack ? free_stack[num_free - 1 - i] : victims[i - from_stack];
        fresh[i] = id;
        ref_count[id] = 1;
        state[id] = kActive;
    }
    num_free -= from_stack;
    num_cached -= victims.count + revived;
    return true;
}

bool Pool::evict(const Ids& ids) {
    if (check(ids, kCached, kCached) < 0 || num_free + ids.count > num_blocks) return false;
    for (int64_t i = 0; i < ids.count; i++) {
        state[ids[i]] = kFree;
        free_stack[num_free++] = ids[i];
    }
    num_cached -= ids.count;
    return true;
}

}  // namespace pagedkv
