// What a step does to the rows of a batch.
//
//   blocks     [rows, width]   the blocks of each sequence, 0 beyond
//   seq_len, committed [rows]  its tokens, and how many of them are final
#include "types.h"

#include <algorithm>

// after Python.h, which has to be first
#include "index.h"
#include "pool.h"

namespace pagedkv {

namespace {

constexpr int64_t kMostTokens = INT64_MAX / 4;  // of a row, so that sums of two and a block fit

// Some rows of the page table; ``open`` is false, with an error set, unless each of them is in it.
struct Batch {
    View table, seq_len, rows;
    int64_t width = 0;

    bool open(PyObject* blocks, PyObject* lengths, PyObject* batch) {
        if (!table.open_whole(blocks, Kind::kInt32, 2) || !seq_len.open_whole(lengths, Kind::kInt64) ||
            !rows.open(batch, Kind::kInt64))
            return false;
        width = table.buffer().shape[1];
        const Strided<int64_t> ids = rows.strided<int64_t>();
        for (int64_t i = 0; i < ids.count; i++)
            if (ids[i] < 0 || ids[i] >= table.count() || ids[i] >= seq_len.count()) {
                refuse("row %lld of a table of %lld", (long long)ids[i], (long long)table.count());
                return false;
            } else if (length(i) < 0 || length(i) > kMostTokens) {
                refuse("row %lld has %lld tokens", (long long)ids[i], (long long)length(i));
                return false;
            }
        return true;
    }

    int64_t count() const { return rows.count(); }
    int64_t row(int64_t i) const { return rows.strided<int64_t>()[i]; }
    Block* entries(int64_t i) const { return table.data<Block>() + row(i) * width; }
    int64_t& length(int64_t i) const { return seq_len.data<int64_t>()[row(i)]; }
};

}  // namespace

PyObject* plan_growth(PyObject*, Arguments arguments, Py_ssize_t count) {
    if (!takes(count, 7)) return nullptr;
    const Pool* pool = pool_in(arguments[0]);
    const Index* index = pool ? index_in(arguments[1]) : nullptr;
    Batch batch;
    View shared;
    int64_t num_tokens;
    if (!index || !to_int64(arguments[5], 0, kMostTokens, &num_tokens) ||
        !batch.open(arguments[2], arguments[3], arguments[4]) || !shared.open_whole(arguments[6], Kind::kInt32, 2))
        return nullptr;
    const int64_t size = index->block_size, room = shared.buffer().shape[1];
    if (shared.count() != 2 || (room && room != batch.count()))
        return refuse("room for %lld tails of %lld rows", (long long)room, (long long)batch.count());
    int64_t longest = 0, num_new = 0, num_shared = 0;
    for (int64_t i = 0; i < batch.count(); i++) {
        const int64_t length = batch.length(i), have = blocks_of(length, size);
        num_new += blocks_of(length + num_tokens, size) - have;
        longest = std::max(longest, length + num_tokens);
        if (!room || length % size == 0) continue;
        const Block tail = have <= batch.width ? batch.entries(i)[have - 1] : -1;
        if (tail < 0 || tail > index->num_blocks || tail > pool->num_blocks)
            return refuse("block %d ends a sequence of %lld tokens", tail, (long long)length);
        if (!index->indexed[tail] && pool->ref_count[tail] <= 1) continue;
        shared.data<int32_t>()[num_shared] = (int32_t)i;
        shared.data<int32_t>()[room + num_shared++] = tail;
    }
    return Py_BuildValue("(LLL)", (long long)longest, (long long)num_new, (long long)num_shared);
}

PyObject* grow_rows(PyObject*, Arguments arguments, Py_ssize_t count) {
    Batch batch;
    View fresh;
    int64_t size, num_tokens;
    if (!takes(count, 6) || !to_int64(arguments[3], 1, INT32_MAX, &size) ||
        !to_int64(arguments[4], 0, kMostTokens, &num_tokens) ||
        !batch.open(arguments[0], arguments[1], arguments[2]) ||
        !fresh.open(arguments[5], Kind::kInt32))
        return nullptr;
    int64_t wanted = 0;
    for (int64_t i = 0; i < batch.count(); i++) {
        const int64_t length = batch.length(i), need = blocks_of(length + num_tokens, size);
        wanted += need - blocks_of(length, size);
        if (need > batch.width) return refuse("%lld blocks in a row of %lld", (long long)need, (long long)batch.width);
    }
    if (wanted != fresh.count()) return refuse("%lld blocks for %lld places", (long long)fresh.count(), (long long)wanted);
    const Ids ids = fresh.strided<Block>();
    int64_t next = 0;
    for (int64_t i = 0; i < batch.count(); i++) {
        int64_t& length = batch.length(i);
        Block* entries = batch.entries(i);
        const int64_t need = std::min(batch.width, blocks_of(length + num_tokens, size));
        // a row that is named twice needs other blocks the second time, but stays inside the arrays
        for (int64_t column = blocks_of(length, size); column < need && next < ids.count; column++)
            entries[column] = ids[next++];
        length += num_tokens;
    }
    Py_RETURN_NONE;
}

PyObject* store_tokens(PyObject*, Arguments arguments, Py_ssize_t count) {
    if (!takes(count, 7)) return nullptr;
    const Index* index = index_in(arguments[0]);
    Batch batch;
    View committed, tokens, full;
    if (!index || !batch.open(arguments[1], arguments[2], arguments[4]) ||
        !committed.open_whole(arguments[3], Kind::kInt64) || !tokens.open(arguments[5], Kind::kInt32) ||
        !full.open_whole(arguments[6], Kind::kInt32))
        return nullptr;
    if (tokens.count() != batch.count() || full.count() != batch.count() ||
        committed.count() != batch.seq_len.count())
        return refuse("%lld rows with %lld tokens", (long long)batch.count(), (long long)tokens.count());
    const Ids ids = tokens.strided<Block>();
    const int64_t size = index->block_size;
    for (int64_t i = 0; i < batch.count(); i++) {
        const int64_t at = committed.data<int64_t>()[batch.row(i)];
        if (at >= batch.length(i)) return PyLong_FromLong(-1);
        const Block block = at >= 0 && at / size < batch.width ? batch.entries(i)[at / size] : 0;
        if (block < 1 || block > index->num_blocks)
            return refuse("block %d holds token %lld of a sequence", block, (long long)at);
    }
    int64_t num_full = 0;
    for (int64_t i = 0; i < batch.count(); i++) {
        const int64_t at = committed.data<int64_t>()[batch.row(i)];
        index->tokens[batch.entries(i)[at / size] * size + at % size] = ids[i];
        if (at % size == size - 1) full.data<int32_t>()[num_full++] = (int32_t)i;
    }
    return PyLong_FromLongLong(num_full);
}

PyObject* commit_row(PyObject*, Arguments arguments, Py_ssize_t count) {
    if (!takes(count, 5)) return nullptr;
    Index* index = index_in(arguments[0]);
    View table, committed, view;
    int64_t row;
    if (!index || !table.open(arguments[1], Kind::kInt32, 2) ||
        !committed.open_whole(arguments[2], Kind::kInt64, table.count()) ||
        !to_int64(arguments[3], 0, table.count() - 1, &row) || !view.open(arguments[4], Kind::kInt32))
        return nullptr;
    int64_t& done = committed.data<int64_t>()[row];
    const int64_t start = done;
    if (start < 0 || start > kMostTokens) return refuse("row %lld has %lld tokens", (long long)row, (long long)start);
    const Ids tokens = view.strided<Block>();
    const Py_buffer& rows = table.buffer();
    const int64_t size = index->block_size, first = start / size, stop = start + tokens.count;
    const int64_t last = blocks_of(stop, size), num_full = stop / size - first;
    if (last > rows.shape[1]) return refuse("%lld blocks in a row of %lld", (long long)last, (long long)rows.shape[1]);
    const Ids entries{table.data<char>() + row * rows.strides[0], rows.strides[1], last};
    const Ids own{entries.data + first * entries.stride, entries.stride, last - first};
    const Block above = first ? entries[first - 1] : kRoot;
    if (!in_range(own, 1, index->num_blocks, "write to")) return nullptr;
    if (above < 0 || above > index->num_blocks || (num_full && !index->known(above)))
        return refuse("cannot continue block %d: it is not indexed", above);
    for (int64_t i = 0, offset = start % size, block = 0; i < tokens.count; offset = 0, block++) {
        const int64_t part = std::min(size - offset, tokens.count - i);
        tokens.copy(i, part, index->row_of(own[block]) + offset);
        i += part;
    }
    if (num_full) {
        if (index->child(above, 0, index->row_of(own[0]))) Py_RETURN_FALSE;
        const Ids full{own.data, own.stride, num_full};
        static const Block no_extra = 0;
        if (!mark(*index, full, 1, "index")) return nullptr;
        index->insert(full, Ids{(const char*)&no_extra, 0, num_full}, above);
    }
    done = stop;
    Py_RETURN_TRUE;
}

}  // namespace pagedkv
