// The types of the module, and what their methods share.
#pragma once
#include "view.h"
#include <structmember.h>

#include <new>

namespace pagedkv {

struct Pool;
struct Index;
struct Order;

using Arguments = PyObject* const*;
using Method = PyObject* (*)(PyObject* self, Arguments arguments, Py_ssize_t count);

PyObject* make_pool_type();
PyObject* make_index_type();
PyObject* make_order_type();

// What is inside an object of these types; nullptr, with an error set, for any other object, and for an index
// that was not told where its arrays are.
Pool* pool_in(PyObject* object);
Index* index_in(PyObject* object);
Order* order_in(PyObject* object);

PyObject* are_tokens(PyObject* module, Arguments arguments, Py_ssize_t count);
PyObject* take(PyObject* module, Arguments arguments, Py_ssize_t count);
PyObject* give_up(PyObject* module, Arguments arguments, Py_ssize_t count);
PyObject* cut_row(PyObject* module, Arguments arguments, Py_ssize_t count);
PyObject* plan_growth(PyObject* module, Arguments arguments, Py_ssize_t count);
PyObject* grow_rows(PyObject* module, Arguments arguments, Py_ssize_t count);
PyObject* commit_row(PyObject* module, Arguments arguments, Py_ssize_t count);
PyObject* store_tokens(PyObject* module, Arguments arguments, Py_ssize_t count);

// True if a method got as many arguments as it takes; else a TypeError is set.
bool takes(Py_ssize_t count, Py_ssize_t wanted);

// Whole number that fits; false with an error set.
bool to_int64(PyObject* number, int64_t least, int64_t most, int64_t* value);

// Raise pagedkv.errors.BlockError.
PyObject* refuse(const char* format, ...);

// Marks ids as indexed or not, one by one; if one is marked already, takes it back and raises a BlockError.
bool mark(Index& index, const Ids& ids, uint8_t indexed, const char* verb);

// Marks ids as not indexed, for ``Index::remove``, unless a child of theirs would stay: then a BlockError is raised.
bool mark_forgotten(Index& index, const Ids& ids);

// True if all ids are in least..num_blocks; else a BlockError that says what they are not good for.
bool in_range(const Ids& ids, Block least, Block num_blocks, const char* verb);

inline PyMethodDef method(const char* name, Method function, const char* doc) {
    return {name, (PyCFunction)(void (*)())function, METH_FASTCALL, doc};
}

// One Python object around a T, made empty; T::~T gives up what it holds.
template <typename T>
struct Object {
    PyObject_HEAD
    T value;
};

template <typename T>
T& value_of(PyObject* self) {
    return reinterpret_cast<Object<T>*>(self)->value;
}

// The T of an object of ``type``, or of one derived from it; nullptr, with a TypeError set, for any other.
template <typename T>
T* value_in(PyObject* object, PyObject* type) {
    if (PyObject_TypeCheck(object, (PyTypeObject*)type)) return &value_of<T>(object);
    PyErr_Format(PyExc_TypeError, "need a %s, got a %s", ((PyTypeObject*)type)->tp_name, Py_TYPE(object)->tp_name);
    return nullptr;
}

template <typename T>
PyObject* make_object(PyTypeObject* type, PyObject*, PyObject*) {
    PyObject* self = type->tp_alloc(type, 0);
    if (self) new (&value_of<T>(self)) T();
    return self;
}

template <typename T>
void free_object(PyObject* self) {
    value_of<T>(self).~T();
    PyTypeObject* type = Py_TYPE(self);
    type->tp_free(self);
    Py_DECREF(type);
}

template <typename T>
PyObject* make_type(const char* name, const char* doc, PyMethodDef* methods, PyMemberDef* members) {
    PyType_Slot slots[] = {
        {Py_tp_doc, (void*)doc},
        {Py_tp_new, (void*)make_object<T>},
        {Py_tp_dealloc, (void*)free_object<T>},
        {Py_tp_methods, methods},
        {Py_tp_members, members},
        {0, nullptr},
    };
    PyType_Spec spec = {name, (int)sizeof(Object<T>), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE, slots};
    return PyType_FromSpec(&spec);
}

}  // namespace pagedkv
