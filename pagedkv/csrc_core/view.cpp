#include "view.h"

namespace pagedkv {

namespace {

bool is_of(const Py_buffer& buffer, Kind kind) {
    const char* format = buffer.format ? buffer.format : "B";
    if (!format[0] || format[1]) return false;  // a byte order that is not this machine's has a prefix
    switch (kind) {
        case Kind::kInt32: return buffer.itemsize == 4 && (format[0] == 'i' || format[0] == 'l');
        case Kind::kInt64: return buffer.itemsize == 8 && (format[0] == 'l' || format[0] == 'q');
        case Kind::kByte: return buffer.itemsize == 1 && (format[0] == '?' || format[0] == 'B');
        case Kind::kUInt64: return buffer.itemsize == 8 && (format[0] == 'L' || format[0] == 'Q');
    }
    return false;
}

const char* name(Kind kind) {
    switch (kind) {
        case Kind::kInt32: return "int32";
        case Kind::kInt64: return "int64";
        case Kind::kByte: return "bool or uint8";
        case Kind::kUInt64: return "uint64";
    }
    return "?";
}

}  // namespace

bool View::get(PyObject* array, int flags, Kind kind, int ndim) {
    close();
    if (PyObject_GetBuffer(array, &buffer_, flags | PyBUF_FORMAT)) {
        buffer_.obj = nullptr;
        return false;
    }
    if (buffer_.ndim == ndim && is_of(buffer_, kind)) return true;
    PyErr_Format(PyExc_TypeError, "need an array of %s with %d dimensions, got format %s with %d", name(kind), ndim,
                 buffer_.format ? buffer_.format : "B", buffer_.ndim);
    close();
    return false;
}

bool View::open(PyObject* array, Kind kind, int ndim) { return get(array, PyBUF_STRIDED_RO, kind, ndim); }

bool View::open_whole(PyObject* array, Kind kind, int ndim) {
    return get(array, PyBUF_C_CONTIGUOUS | PyBUF_WRITABLE, kind, ndim);
}

bool View::open_whole(PyObject* array, Kind kind, int64_t count, int ndim) {
    if (!open_whole(array, kind, ndim)) return false;
    if (buffer_.len == count * buffer_.itemsize) return true;
    PyErr_Format(PyExc_ValueError, "need an array of %lld items, got %lld", (long long)count,
                 (long long)(buffer_.len / buffer_.itemsize));
    close();
    return false;
}

}  // namespace pagedkv
