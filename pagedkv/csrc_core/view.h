// Array arguments through the buffer protocol: no numpy is needed to build, and any array will do.
#pragma once
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "ids.h"

namespace pagedkv {

enum class Kind { kInt32, kInt64, kByte, kUInt64 };  // kByte: bool or uint8

class View {
  public:
    View() = default;
    View(const View&) = delete;
    View& operator=(const View&) = delete;
    ~View() { close(); }

    // False, with a TypeError set, unless ``array`` is one of this kind with ``ndim`` dimensions.
    bool open(PyObject* array, Kind kind, int ndim = 1);

    // The same, for arrays that are written: in C order, and of this many items in all, or of any number.
    bool open_whole(PyObject* array, Kind kind, int64_t count, int ndim = 1);
    bool open_whole(PyObject* array, Kind kind, int ndim = 1);

    void close() {
        if (buffer_.obj) PyBuffer_Release(&buffer_);
    }

    int64_t count() const { return buffer_.shape[0]; }
    const Py_buffer& buffer() const { return buffer_; }

    template <typename T>
    T* data() const {
        return static_cast<T*>(buffer_.buf);
    }

    template <typename T>
    Strided<T> strided() const {
        return {static_cast<const char*>(buffer_.buf), buffer_.strides[0], buffer_.shape[0]};
    }

  private:
    bool get(PyObject* array, int flags, Kind kind, int ndim);

    Py_buffer buffer_{};
};

}  // namespace pagedkv
