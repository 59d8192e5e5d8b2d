#include "types.h"

#include <algorithm>

// after Python.h, which has to be first
#include "pool.h"

namespace pagedkv {

namespace {

struct PoolObject {
    Pool pool;
    View ref_count, state, free_stack, seen;
};

PyObject* the_type = nullptr;

Pool& pool_of(PyObject* self) { return value_of<PoolObject>(self).pool; }

PyObject* answer(bool done) {
    // what was refused is told in the words of the numpy engine
    PyErr_Clear();
    return PyBool_FromLong(done);
}

PyObject* attach(PyObject* self, Arguments arguments, Py_ssize_t count) {
    PoolObject& object = value_of<PoolObject>(self);
    int64_t num_blocks;
    if (!takes(count, 5) || !to_int64(arguments[0], 1, INT32_MAX - 1, &num_blocks)) return nullptr;
    if (!object.ref_count.open_whole(arguments[1], Kind::kInt32, num_blocks + 1) ||
        !object.state.open_whole(arguments[2], Kind::kByte, num_blocks + 1) ||
        !object.free_stack.open_whole(arguments[3], Kind::kInt32, num_blocks) ||
        !object.seen.open_whole(arguments[4], Kind::kInt32, num_blocks + 1)) {
        object.pool = Pool();
        return nullptr;
    }
    Pool& pool = object.pool;
    const int64_t num_free = pool.num_free, num_cached = pool.num_cached;
    pool = Pool();
    pool.num_blocks = (Block)num_blocks;
    pool.ref_count = object.ref_count.data<Block>();
    pool.state = object.state.data<uint8_t>();
    pool.free_stack = object.free_stack.data<Block>();
    pool.seen = object.seen.data<int32_t>();
    pool.num_free = num_free;
    pool.num_cached = num_cached;
    std::fill_n(pool.seen, num_blocks + 1, 0);  // the stamps start anew
    Py_RETURN_NONE;
}

PyObject* acquire(PyObject* self, Arguments arguments, Py_ssize_t count) {
    if (!takes(count, 3)) return nullptr;
    View fresh, shared, victims;
    if (!fresh.open_whole(arguments[0], Kind::kInt32) || !shared.open(arguments[1], Kind::kInt32) ||
        !victims.open(arguments[2], Kind::kInt32))
        return answer(false);
    return answer(pool_of(self).acquire(fresh.data<Block>(), fresh.count(), shared.strided<Block>(),
                                        victims.strided<Block>()));
}

// Fills ``cached`` with those that became cached, and returns how many; -1 with nothing changed.
int64_t release(Pool& pool, const Ids& ids, const Flags& retain, Block* cached) {
    int64_t count = 0;
    const bool done = pool.release(ids, [&](int64_t i, Block id) {
        if (retain[i]) cached[count++] = id;
        return retain[i] != 0;
    });
    return done ? count : -1;
}

PyObject* release(PyObject* self, Arguments arguments, Py_ssize_t count) {
    if (!takes(count, 3)) return nullptr;
    View ids, retain, cached;
    int64_t kept = -1;
    if (ids.open(arguments[0], Kind::kInt32) && retain.open(arguments[1], Kind::kByte) &&
        cached.open_whole(arguments[2], Kind::kInt32) && retain.count() == ids.count() &&
        retain.buffer().format[0] == '?' && cached.count() == ids.count())
        kept = release(pool_of(self), ids.strided<Block>(), retain.strided<uint8_t>(), cached.data<Block>());
    PyErr_Clear();
    return PyLong_FromLongLong(kept);
}

PyObject* evict(PyObject* self, Arguments arguments, Py_ssize_t count) {
    if (!takes(count, 1)) return nullptr;
    View ids;
    return answer(ids.open(arguments[0], Kind::kInt32) && pool_of(self).evict(ids.strided<Block>()));
}

PyObject* check(PyObject* self, Arguments arguments, Py_ssize_t count) {
    View ids;
    int64_t least, most;
    if (!takes(count, 3) || !to_int64(arguments[1], 0, 2, &least) || !to_int64(arguments[2], 0, 2, &most))
        return nullptr;
    if (!ids.open(arguments[0], Kind::kInt32)) return nullptr;
    return PyLong_FromLongLong(pool_of(self).check(ids.strided<Block>(), (uint8_t)least, (uint8_t)most));
}

PyMethodDef methods[] = {
    method("_attach", attach, "_attach(num_blocks, ref_count, state, free_stack, seen)"),
    method("_acquire", acquire, "_acquire(fresh, shared, victims) -> bool: whether it was done"),
    method("_release", release, "_release(ids, retain, cached) -> int: how many became cached, or -1"),
    method("_evict", evict, "_evict(ids) -> bool: whether it was done"),
    method("_check", check, "_check(ids, least, most) -> int: how many are in state least, or -1"),
    {},
};

constexpr Py_ssize_t kPool = offsetof(Object<PoolObject>, value) + offsetof(PoolObject, pool);

PyMemberDef members[] = {
    {"_num_free", T_PYSSIZET, kPool + (Py_ssize_t)offsetof(Pool, num_free), 0, nullptr},
    {"_num_cached", T_PYSSIZET, kPool + (Py_ssize_t)offsetof(Pool, num_cached), 0, nullptr},
    {},
};

}  // namespace

PyObject* make_pool_type() {
    return the_type = make_type<PoolObject>("pagedkv._core.Pool", "States and ref counts of blocks.", methods, members);
}

Pool* pool_in(PyObject* object) {
    PoolObject* found = value_in<PoolObject>(object, the_type);
    return found ? &found->pool : nullptr;
}

}  // namespace pagedkv
