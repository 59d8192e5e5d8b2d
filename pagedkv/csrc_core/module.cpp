#include <cstdarg>

#include "types.h"

namespace pagedkv {

constexpr long kVersion = 4;  // as pagedkv.core.VERSION

static PyObject* block_error = nullptr;

bool takes(Py_ssize_t count, Py_ssize_t wanted) {
    if (count == wanted) return true;
    PyErr_Format(PyExc_TypeError, "takes %zd arguments, got %zd", wanted, count);
    return false;
}

bool to_int64(PyObject* number, int64_t least, int64_t most, int64_t* value) {
    PyObject* whole = PyNumber_Index(number);
    if (!whole) return false;
    int overflow;
    *value = PyLong_AsLongLongAndOverflow(whole, &overflow);
    const bool fits = !overflow && *value >= least && *value <= most;
    if (!fits && !PyErr_Occurred())
        PyErr_Format(block_error, "%S is not in %lld..%lld", whole, (long long)least, (long long)most);
    Py_DECREF(whole);
    return fits;
}

PyObject* refuse(const char* format, ...) {
    va_list arguments;
    va_start(arguments, format);
    PyErr_FormatV(block_error, format, arguments);
    va_end(arguments);
    return nullptr;
}

bool in_range(const Ids& ids, Block least, Block num_blocks, const char* verb) {
    const int64_t i = first_outside(ids, least, num_blocks);
    if (i >= 0) refuse("cannot %s block %d: ids are 1..%d", verb, ids[i], num_blocks);
    return i < 0;
}

static PyMethodDef functions[] = {
    method("are_tokens", are_tokens, "Whether an array is int32, contiguous, of one dimension, and nowhere negative."),
    method("take", take, "take(pool, index, order, fresh, shared) -> int: how many were evicted, or -1"),
    method("give_up", give_up, "give_up(pool, index, order, ids) -> bool: whether it was done"),
    method("cut_row", cut_row,
           "cut_row(pool, index, order, blocks, seq_len, committed, row, num_tokens) -> bool: whether it was done"),
    method("plan_growth", plan_growth,
           "plan_growth(pool, index, blocks, seq_len, rows, num_tokens, shared) -> (longest, num_new, num_shared)"),
    method("grow_rows", grow_rows, "grow_rows(blocks, seq_len, rows, block_size, num_tokens, fresh)"),
    method("commit_row", commit_row,
           "commit_row(index, blocks, committed, row, tokens) -> bool: False if an equal block is indexed already"),
    method("store_tokens", store_tokens,
           "store_tokens(index, blocks, seq_len, committed, rows, tokens, full) -> int: how many are full, or -1"),
    {nullptr, nullptr, 0, nullptr}};

static PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_core", "Bookkeeping of blocks: states, contents and order.", -1, functions, nullptr,
    nullptr, nullptr, nullptr};

static bool add_type(PyObject* module, const char* name, PyObject* type) {
    return type && !PyModule_AddObject(module, name, type);
}

static bool fill(PyObject* module) {
    PyObject* errors = PyImport_ImportModule("pagedkv.errors");
    if (!errors) return false;
    block_error = PyObject_GetAttrString(errors, "BlockError");
    Py_DECREF(errors);
    return block_error && !PyModule_AddIntConstant(module, "VERSION", kVersion) &&
           add_type(module, "Pool", make_pool_type()) && add_type(module, "Index", make_index_type()) &&
           add_type(module, "Order", make_order_type());
}

}  // namespace pagedkv

PyMODINIT_FUNC PyInit__core() {
    PyObject* module = PyModule_Create(&pagedkv::definition);
    if (module && !pagedkv::fill(module)) Py_CLEAR(module);
    return module;
}
