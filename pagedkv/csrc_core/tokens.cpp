#include "types.h"

namespace pagedkv {

// Whether an array needs no conversion to be token ids: int32 side by side, none of them negative.
PyObject* are_tokens(PyObject*, Arguments arguments, Py_ssize_t count) {
    if (!takes(count, 1)) return nullptr;
    View view;
    if (!view.open(arguments[0], Kind::kInt32) || view.buffer().strides[0] != 4) {
        PyErr_Clear();
        Py_RETURN_FALSE;
    }
    const int32_t* ids = view.data<int32_t>();
    int32_t all = 0;
    for (int64_t i = 0; i < view.count(); i++) all |= ids[i];
    return PyBool_FromLong(all >= 0);
}

}  // namespace pagedkv
