#include "types.h"
// after Python.h, which has to be first
#include "index.h"

namespace pagedkv {

namespace {

struct IndexObject {
    Index index;
    View tokens, extra, indexed, parent, first_child, next, prev, table;
};

PyObject* the_type = nullptr;

Index& index_of(PyObject* self) { return value_of<IndexObject>(self).index; }

PyObject* attach(PyObject* self, Arguments arguments, Py_ssize_t count) {
    IndexObject& object = value_of<IndexObject>(self);
    Index& index = object.index;
    index.num_blocks = -1;  // until all is there, no id is in range
    int64_t num_blocks, block_size;
    if (!takes(count, 12) || !to_int64(arguments[0], 0, INT32_MAX - 1, &num_blocks) ||
        !to_int64(arguments[1], 1, INT32_MAX, &block_size))
        return nullptr;
    const int64_t rows = num_blocks + 1;
    if (!object.tokens.open_whole(arguments[2], Kind::kInt32, rows * block_size, 2) ||
        !object.extra.open_whole(arguments[3], Kind::kInt32, rows) ||
        !object.indexed.open_whole(arguments[4], Kind::kByte, rows) ||
        !object.parent.open_whole(arguments[5], Kind::kInt32, rows) ||
        !object.first_child.open_whole(arguments[6], Kind::kInt32, rows) ||
        !object.next.open_whole(arguments[7], Kind::kInt32, rows) ||
        !object.prev.open_whole(arguments[8], Kind::kInt32, rows) ||
        !object.table.open_whole(arguments[9], Kind::kUInt64))
        return nullptr;
    const int64_t capacity = object.table.count();
    if (capacity <= num_blocks || capacity & (capacity - 1))
        return refuse("a table of %lld entries for %lld blocks", (long long)capacity, (long long)num_blocks);
    const uint64_t seed = PyLong_AsUnsignedLongLongMask(arguments[10]);
    const uint64_t mask = PyLong_AsUnsignedLongLongMask(arguments[11]);
    if (PyErr_Occurred()) return nullptr;
    index.block_size = block_size;
    index.tokens = object.tokens.data<Block>();
    index.extra = object.extra.data<Block>();
    index.indexed = object.indexed.data<uint8_t>();
    index.parent = object.parent.data<Block>();
    index.first_child = object.first_child.data<Block>();
    index.next = object.next.data<Block>();
    index.prev = object.prev.data<Block>();
    index.table = {object.table.data<uint64_t>(), (uint64_t)capacity - 1};
    index.seed = seed;
    index.hash_mask = mask;
    index.num_blocks = (Block)num_blocks;
    Py_RETURN_NONE;
}

PyObject* rebuild(PyObject* self, Arguments, Py_ssize_t count) {
    if (!takes(count, 0)) return nullptr;
    if (index_of(self).num_blocks < 0) return refuse("the index has no blocks yet");
    index_of(self).rebuild_table();
    Py_RETURN_NONE;
}

// ``number`` as the id of an indexed block, or of the root.
bool to_known(const Index& index, PyObject* number, Block* block) {
    int64_t id;
    if (!to_int64(number, INT32_MIN, INT32_MAX, &id)) return false;
    *block = (Block)id;
    if (id >= 0 && id <= index.num_blocks && index.known(*block)) return true;
    refuse("block %lld is not indexed", (long long)id);
    return false;
}

PyObject* match(PyObject* self, Arguments arguments, Py_ssize_t count) {
    const Index& index = index_of(self);
    View tokens, extra, found;
    Block above;
    if (!takes(count, 4) || !tokens.open(arguments[0], Kind::kInt32, 2) || !extra.open(arguments[1], Kind::kInt32) ||
        !to_known(index, arguments[2], &above) || !found.open_whole(arguments[3], Kind::kInt32))
        return nullptr;
    const Py_buffer& rows = tokens.buffer();
    if (rows.shape[1] != index.block_size || extra.count() != tokens.count() || found.count() != tokens.count())
        return refuse("%lld rows of %lld tokens with %lld extra keys, blocks have %lld tokens", tokens.count(),
                      (long long)rows.shape[1], extra.count(), (long long)index.block_size);
    if (rows.strides[1] != (Py_ssize_t)sizeof(Block)) return PyLong_FromLong(-1);
    const Rows wanted{tokens.data<char>(), rows.strides[0], tokens.count(), extra.strided<Block>()};
    return PyLong_FromLongLong(index.match(wanted, above, found.data<Block>()));
}

PyObject* best_child(PyObject* self, Arguments arguments, Py_ssize_t count) {
    const Index& index = index_of(self);
    View row;
    int64_t key, least, shared;
    Block above;
    if (!takes(count, 4) || !row.open(arguments[0], Kind::kInt32) ||
        !to_int64(arguments[1], INT32_MIN, INT32_MAX, &key) || !to_known(index, arguments[2], &above) ||
        !to_int64(arguments[3], INT64_MIN, INT64_MAX, &least))
        return nullptr;
    if (row.count() > index.block_size)
        return refuse("%lld tokens, blocks have %lld", row.count(), (long long)index.block_size);
    if (row.buffer().strides[0] != (Py_ssize_t)sizeof(Block) && row.count() > 1) return PyLong_FromLong(-1);
    const Block best = index.best_child(row.data<Block>(), row.count(), (Block)key, above, &shared);
    return shared < (least > 1 ? least : 1) ? Py_BuildValue("(ii)", 0, 0) : Py_BuildValue("(iL)", best, (long long)shared);
}

PyObject* is_leaf(PyObject* self, PyObject* number) {
    Block block;
    if (!to_known(index_of(self), number, &block)) return nullptr;
    return PyBool_FromLong(!index_of(self).first_child[block]);
}

PyObject* parent(PyObject* self, PyObject* number) {
    Block block;
    if (!to_known(index_of(self), number, &block)) return nullptr;
    return PyLong_FromLong(index_of(self).parent[block]);
}

}  // namespace

bool mark(Index& index, const Ids& ids, uint8_t indexed, const char* verb) {
    if (!in_range(ids, 1, index.num_blocks, verb)) return false;
    for (int64_t i = 0; i < ids.count; i++) {
        if (index.indexed[ids[i]] != indexed) {
            index.indexed[ids[i]] = indexed;
            continue;
        }
        const Block wrong = ids[i];
        while (i--) index.indexed[ids[i]] = !indexed;
        refuse("cannot %s block %d: it is %s", verb, wrong, indexed ? "indexed" : "not indexed");
        return false;
    }
    return true;
}

bool mark_forgotten(Index& index, const Ids& ids) {
    if (!mark(index, ids, 0, "forget")) return false;
    for (int64_t i = 0; i < ids.count; i++)
        for (Block child = index.first_child[ids[i]]; child; child = index.next[child])
            if (index.indexed[child]) {
                for (int64_t j = 0; j < ids.count; j++) index.indexed[ids[j]] = 1;
                refuse("cannot forget block %d: block %d continues it", ids[i], child);
                return false;
            }
    return true;
}

namespace {

PyObject* insert(PyObject* self, Arguments arguments, Py_ssize_t count) {
    Index& index = index_of(self);
    View ids, extra;
    Block above;
    if (!takes(count, 3) || !ids.open(arguments[0], Kind::kInt32) || !extra.open(arguments[1], Kind::kInt32) ||
        !to_known(index, arguments[2], &above))
        return nullptr;
    if (ids.count() != extra.count()) return refuse("%lld ids with %lld extra keys", ids.count(), extra.count());
    if (!mark(index, ids.strided<Block>(), 1, "index")) return nullptr;
    index.insert(ids.strided<Block>(), extra.strided<Block>(), above);
    Py_RETURN_NONE;
}

PyObject* grow(PyObject* self, Arguments arguments, Py_ssize_t count) {
    Index& index = index_of(self);
    View ids, parents, grown;
    if (!takes(count, 3) || !ids.open(arguments[0], Kind::kInt32) || !parents.open(arguments[1], Kind::kInt32) ||
        !grown.open_whole(arguments[2], Kind::kByte) ||
        !in_range(ids.strided<Block>(), 1, index.num_blocks, "index") ||
        !in_range(parents.strided<Block>(), 0, index.num_blocks, "continue"))
        return nullptr;
    if (ids.count() != parents.count() || ids.count() != grown.count())
        return refuse("%lld ids with %lld parents", ids.count(), parents.count());
    const Ids above = parents.strided<Block>();
    for (int64_t i = 0; i < above.count; i++)
        if (!index.known(above[i])) return refuse("cannot continue block %d: it is not indexed", above[i]);
    return PyLong_FromLongLong(index.grow(ids.strided<Block>(), above, grown.data<uint8_t>()));
}

PyObject* remove(PyObject* self, Arguments arguments, Py_ssize_t count) {
    Index& index = index_of(self);
    View view;
    if (!takes(count, 1) || !view.open(arguments[0], Kind::kInt32)) return nullptr;
    if (!mark_forgotten(index, view.strided<Block>())) return nullptr;
    index.remove(view.strided<Block>());
    Py_RETURN_NONE;
}

PyObject* rename(PyObject* self, Arguments arguments, Py_ssize_t count) {
    Index& index = index_of(self);
    View from, to;
    if (!takes(count, 2) || !from.open(arguments[0], Kind::kInt32) || !to.open(arguments[1], Kind::kInt32))
        return nullptr;
    const Ids old_ids = from.strided<Block>(), new_ids = to.strided<Block>();
    if (!in_range(old_ids, 1, index.num_blocks, "rename") || !in_range(new_ids, 1, index.num_blocks, "rename"))
        return nullptr;
    if (old_ids.count != new_ids.count) return refuse("got %lld old ids and %lld new", old_ids.count, new_ids.count);
    for (int64_t i = 0; i < old_ids.count; i++) index.rename(old_ids[i], new_ids[i]);
    Py_RETURN_NONE;
}

PyObject* walk(PyObject* self, Arguments arguments, Py_ssize_t count) {
    const Index& index = index_of(self);
    View found;
    Block block;
    if (!takes(count, 2) || !to_known(index, arguments[0], &block) || !found.open_whole(arguments[1], Kind::kInt32))
        return nullptr;
    const int64_t n = index.walk(block, found.data<Block>(), found.count());
    return n < 0 ? refuse("more than %lld blocks behind block %d", found.count(), block) : PyLong_FromLongLong(n);
}

PyObject* depth(PyObject* self, Arguments arguments, Py_ssize_t count) {
    Block block;
    if (!takes(count, 1) || !to_known(index_of(self), arguments[0], &block)) return nullptr;
    return PyLong_FromLongLong(index_of(self).depth(block));
}

PyObject* climb(PyObject* self, Arguments arguments, Py_ssize_t count) {
    const Index& index = index_of(self);
    View path;
    Block block;
    if (!takes(count, 2) || !to_known(index, arguments[0], &block) || !path.open_whole(arguments[1], Kind::kInt32))
        return nullptr;
    for (int64_t i = path.count(); i-- && block != kRoot; block = index.parent[block]) path.data<Block>()[i] = block;
    Py_RETURN_NONE;
}

PyMethodDef methods[] = {
    method("_attach", attach,
           "_attach(num_blocks, block_size, tokens, extra, indexed, parent, first_child, next, prev, table, seed, "
           "hash_mask)"),
    method("_rebuild", rebuild, "_rebuild(): fill an empty table from the links"),
    method("_match", match, "_match(tokens, extra, parent, found) -> int: how many hit, -1 for rows with gaps"),
    method("_best_child", best_child, "_best_child(row, extra, parent, at_least) -> (id, shared), -1 for gaps"),
    {"is_leaf", is_leaf, METH_O, "Tell whether no indexed block continues this one. Cost: O(1)."},
    {"parent", parent, METH_O, "The block before this one, 0 for the first of a branch. Cost: O(1)."},
    method("_insert", insert, "_insert(ids, extra, parent)"),
    method("_grow", grow, "_grow(ids, parents, grown) -> int: how many have grown"),
    method("_remove", remove, "_remove(ids)"),
    method("_rename", rename, "_rename(old, new)"),
    method("_walk", walk, "_walk(block, found) -> int: how many are behind it, parents and newest first"),
    method("_depth", depth, "_depth(block) -> int"),
    method("_climb", climb, "_climb(block, path): fill in from the end"),
    {},
};

constexpr Py_ssize_t kIndex = offsetof(Object<IndexObject>, value) + offsetof(IndexObject, index);

PyMemberDef members[] = {
    {"_size", T_PYSSIZET, kIndex + (Py_ssize_t)offsetof(Index, size), 0, nullptr},
    {},
};

}  // namespace

PyObject* make_index_type() {
    return the_type = make_type<IndexObject>("pagedkv._core.Index", "Blocks found by content.", methods, members);
}

Index* index_in(PyObject* object) {
    IndexObject* found = value_in<IndexObject>(object, the_type);
    if (found && found->index.num_blocks < 0) {
        refuse("the index has no blocks yet");
        return nullptr;
    }
    return found ? &found->index : nullptr;
}

}  // namespace pagedkv
