#include "types.h"
// after Python.h, which has to be first
#include "order.h"

namespace pagedkv {

namespace {

struct OrderObject {
    Order order;
    View next, prev, kept;
};

PyObject* the_type = nullptr;

Order& order_of(PyObject* self) { return value_of<OrderObject>(self).order; }

PyObject* attach(PyObject* self, Arguments arguments, Py_ssize_t count) {
    OrderObject& object = value_of<OrderObject>(self);
    object.order = Order();
    int64_t num_blocks;
    if (!takes(count, 4) || !to_int64(arguments[0], 0, INT32_MAX - 1, &num_blocks)) return nullptr;
    if (!object.next.open_whole(arguments[1], Kind::kInt32, num_blocks + 1) ||
        !object.prev.open_whole(arguments[2], Kind::kInt32, num_blocks + 1) ||
        !object.kept.open_whole(arguments[3], Kind::kByte, num_blocks + 1))
        return nullptr;
    object.order = {(Block)num_blocks, object.next.data<Block>(), object.prev.data<Block>(),
                    object.kept.data<uint8_t>()};
    Py_RETURN_NONE;
}

PyObject* push(PyObject* self, Arguments arguments, Py_ssize_t count) {
    View ids;
    if (!takes(count, 1) || !ids.open(arguments[0], Kind::kInt32) ||
        !in_range(ids.strided<Block>(), 1, order_of(self).num_blocks, "order"))
        return nullptr;
    order_of(self).push(ids.strided<Block>());
    Py_RETURN_NONE;
}

PyObject* discard(PyObject* self, Arguments arguments, Py_ssize_t count) {
    View ids;
    if (!takes(count, 1) || !ids.open(arguments[0], Kind::kInt32) ||
        !in_range(ids.strided<Block>(), 0, order_of(self).num_blocks, "discard"))
        return nullptr;
    order_of(self).discard(ids.strided<Block>());
    Py_RETURN_NONE;
}

PyObject* first(PyObject* self, Arguments arguments, Py_ssize_t count) {
    View keep, found;
    if (!takes(count, 2) || !keep.open(arguments[0], Kind::kInt32) || !found.open_whole(arguments[1], Kind::kInt32) ||
        !in_range(keep.strided<Block>(), 0, order_of(self).num_blocks, "keep"))
        return nullptr;
    if (order_of(self).num_blocks < 0) return refuse("the order has no blocks yet");
    return PyLong_FromLongLong(order_of(self).first(found.count(), keep.strided<Block>(), found.data<Block>()));
}

PyObject* rename(PyObject* self, Arguments arguments, Py_ssize_t count) {
    View from, to;
    if (!takes(count, 2) || !from.open(arguments[0], Kind::kInt32) || !to.open(arguments[1], Kind::kInt32))
        return nullptr;
    Order& order = order_of(self);
    const Ids old_ids = from.strided<Block>(), new_ids = to.strided<Block>();
    if (!in_range(old_ids, 1, order.num_blocks, "rename") || !in_range(new_ids, 1, order.num_blocks, "rename"))
        return nullptr;
    if (old_ids.count != new_ids.count) return refuse("got %lld old ids and %lld new", old_ids.count, new_ids.count);
    for (int64_t i = 0; i < old_ids.count; i++) order.rename(old_ids[i], new_ids[i]);
    Py_RETURN_NONE;
}

PyMethodDef methods[] = {
    method("_attach", attach, "_attach(num_blocks, next, prev, kept)"),
    method("_push", push, "_push(ids): to the newest end"),
    method("_discard", discard, "_discard(ids)"),
    method("_first", first, "_first(keep, found) -> int: how many were found, at most len(found)"),
    method("_rename", rename, "_rename(old, new): new ids, none of them here, in the places of old ones"),
    {},
};

PyMemberDef members[] = {{}};

}  // namespace

PyObject* make_order_type() {
    return the_type = make_type<OrderObject>("pagedkv._core.Order", "Blocks by their last use.", methods, members);
}

Order* order_in(PyObject* object) {
    OrderObject* found = value_in<OrderObject>(object, the_type);
    return found ? &found->order : nullptr;
}

}  // namespace pagedkv
