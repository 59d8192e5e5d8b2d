// Calls that concern the pool, the index and the order at once: what a manager with LRU and without events does
// for a sequence. All ids are checked before anything changes.
#include "types.h"

#include <algorithm>

// after Python.h, which has to be first
#include "index.h"
#include "order.h"
#include "pool.h"

namespace pagedkv {

namespace {

struct Parts {
    Pool* pool = nullptr;
    Index* index = nullptr;
    Order* order = nullptr;

    // False, with an error set, if these are no parts of one manager.
    bool open(Arguments arguments) {
        pool = pool_in(arguments[0]);
        index = pool ? index_in(arguments[1]) : nullptr;
        order = index ? order_in(arguments[2]) : nullptr;
        if (!order) return false;
        if (index->num_blocks == pool->num_blocks && order->num_blocks == pool->num_blocks) return true;
        refuse("a pool of %d blocks with an index of %d and an order of %d", pool->num_blocks, index->num_blocks,
               order->num_blocks);
        return false;
    }

    // Drops a reference each; at zero what is indexed goes to the newest end of the order, the rest is free.
    bool give_up(const Ids& ids) {
        return pool->release(ids, [this](int64_t, Block id) {
            if (index->indexed[id]) order->push(id);
            return index->indexed[id] != 0;
        });
    }
};

}  // namespace

PyObject* take(PyObject*, Arguments arguments, Py_ssize_t count) {
    Parts parts;
    View fresh, shared;
    if (!takes(count, 5) || !parts.open(arguments) || !fresh.open_whole(arguments[3], Kind::kInt32) ||
        !shared.open(arguments[4], Kind::kInt32))
        return nullptr;
    Pool& pool = *parts.pool;
    const Ids held = shared.strided<Block>();
    if (!in_range(held, 1, pool.num_blocks, "share")) return nullptr;
    if (pool.num_free < 0) return PyLong_FromLong(-1);  // somebody wrote to the counts
    const int64_t num_evicted = std::max<int64_t>(0, fresh.count() - pool.num_free);
    Block* last = fresh.data<Block>() + fresh.count() - num_evicted;
    if (parts.order->first(num_evicted, held, last) < num_evicted) return PyLong_FromLong(-1);
    const Ids victims{(const char*)last, sizeof(Block), num_evicted};
    if (!mark_forgotten(*parts.index, victims)) return nullptr;
    if (!pool.acquire(fresh.data<Block>(), fresh.count(), held, victims)) {
        for (int64_t i = 0; i < num_evicted; i++) parts.index->indexed[last[i]] = 1;
        return PyLong_FromLong(-1);
    }
    parts.index->remove(victims);
    parts.order->discard(held);
    parts.order->discard(victims);
    return PyLong_FromLongLong(num_evicted);
}

PyObject* give_up(PyObject*, Arguments arguments, Py_ssize_t count) {
    Parts parts;
    View ids;
    if (!takes(count, 4) || !parts.open(arguments) || !ids.open(arguments[3], Kind::kInt32)) return nullptr;
    return PyBool_FromLong(parts.give_up(ids.strided<Block>()));
}

PyObject* cut_row(PyObject*, Arguments arguments, Py_ssize_t count) {
    Parts parts;
    View table, seq_len, committed;
    int64_t row, length;
    // numbers first: what turns into one may run code that changes the parts
    if (!takes(count, 8) || !to_int64(arguments[6], 0, INT64_MAX, &row) ||
        !to_int64(arguments[7], 0, INT64_MAX, &length) || !parts.open(arguments) ||
        !table.open_whole(arguments[3], Kind::kInt32, 2) ||
        !seq_len.open_whole(arguments[4], Kind::kInt64, table.count()) ||
        !committed.open_whole(arguments[5], Kind::kInt64, table.count()))
        return nullptr;
    if (row >= table.count()) return refuse("row %lld of a table of %lld", (long long)row, (long long)table.count());
    int64_t &had = seq_len.data<int64_t>()[row], &done = committed.data<int64_t>()[row];
    const int64_t width = table.buffer().shape[1], size = parts.index->block_size;
    if (length > had) return refuse("cannot cut %lld tokens to %lld", (long long)had, (long long)length);
    const int64_t keep = blocks_of(length, size), gone = blocks_of(had, size) - keep;
    if (keep + gone > width)
        return refuse("a table of %lld blocks a row for a sequence of %lld", (long long)width, (long long)(keep + gone));
    Block* entries = table.data<Block>() + row * width + keep;
    const Ids deepest_first{(const char*)(entries + gone - 1), -(int64_t)sizeof(Block), gone};
    if (!parts.give_up(deepest_first)) Py_RETURN_FALSE;
    std::fill_n(entries, gone, 0);
    had = length;
    done = std::min(done, length);
    Py_RETURN_TRUE;
}

}  // namespace pagedkv
