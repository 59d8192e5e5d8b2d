// attend(q, k, v, ...): from torch's tensors to pagedkv_attend without a line of Python.
//
//   tensor (a Python object) -> DLTensor: address, dtype, shape and strides as torch has them -> AttendCall
//
// DLPack's exchange table, which torch.Tensor carries from 2.10 on, fills a DLTensor in some 20 ns, while reading
// the sizes of all tensors in Python takes 10 us, and 40 with the caches that a cold call leaves. The structs
// below are DLPack's own (version 1), as far as they are read here.
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <cmath>

#include "abi.h"

namespace pagedkv {

namespace {

enum : int32_t { kOnCpu = 1 };
enum : uint8_t { kInt = 0, kFloat = 2, kBfloat = 4, kFloat8E4m3fn = 10 };

struct DLTensor {
    void* data;
    int32_t device_type, device_id;
    int32_t ndim;
    uint8_t code, bits;
    uint16_t lanes;
    const int64_t* shape;
    const int64_t* strides;
    uint64_t byte_offset;
};

struct ExchangeTable {
    uint32_t major, minor;
    void* previous;
    void* not_used_here[3];
    int (*look)(void* tensor, DLTensor* out);  // borrows; -1 and a Python error if it is none
};

const ExchangeTable* exchange = nullptr;
PyObject *tensor_type = nullptr, *parameter_type = nullptr;  // no other type: subclasses may act on a call
PyObject* is_neg = nullptr;  // torch.Tensor.is_neg: what torch shows is the negative of what memory holds

constexpr int64_t kLargestWindow = INT32_MAX - 8;  // as attention/arguments.py has it

// Where the fields of one tensor of a call go. q_len is 1 where the tensor has no such dimension.
struct Field {
    int64_t* shape;
    int64_t* strides;
    int dims;
};

class Reader {
  public:
    enum : int64_t { kNoDtype = -1, kInt32 = 100 };  // beside the Dtypes of a cache

    bool ok = true;
    int dims = 0;  // of the tensor read last

    // The address; null and nothing written if the object is None or does not fit.
    void* read(PyObject* object, Field field, int64_t* dtype, bool adds_q_len = false) {
        DLTensor x;
        if (!look(object, &x)) return nullptr;
        const int added = adds_q_len && x.ndim == field.dims - 1;
        if (x.ndim != field.dims - added) return fail();
        for (int to = 0, from = 0; to < field.dims; to++) {
            const bool is_added = added && to == 1;
            field.shape[to] = is_added ? 1 : x.shape[from];
            field.strides[to] = is_added ? 0 : x.strides[from];
            from += !is_added;
        }
        *dtype = number_of(x);
        dims = x.ndim;
        return (char*)x.data + x.byte_offset;
    }

    void* read_option(PyObject* object, Field field, int expected, bool adds_q_len = false) {
        if (object == Py_None) {
            for (int i = 0; i < field.dims; i++) field.shape[i] = -1, field.strides[i] = 0;
            return nullptr;
        }
        int64_t dtype = kNoDtype;
        void* data = read(object, field, &dtype, adds_q_len);
        if (dtype != kFp32 || dims != expected) return fail();
        return data;
    }

    void* fail() {
        ok = false;
        return nullptr;
    }

  private:
    bool look(PyObject* object, DLTensor* x) {
        PyObject* const type = (PyObject*)Py_TYPE(object);
        if (type != tensor_type && type != parameter_type) return ok = false;
        const bool is_tensor = exchange->look(object, x) == 0;
        if (!is_tensor) PyErr_Clear();
        if (is_tensor && x->device_type == kOnCpu && x->lanes == 1 && !(x->code != kInt && is_negated(object)))
            return true;
        return ok = false;
    }

    static bool is_negated(PyObject* tensor) {
        PyObject* answer = PyObject_CallFunctionObjArgs(is_neg, tensor, nullptr);
        if (!answer) PyErr_Clear();
        const bool no = answer == Py_False;
        Py_XDECREF(answer);
        return !no;
    }

    // As a Dtype, kInt32, or kNoDtype.
    static int64_t number_of(const DLTensor& x) {
        if (x.code == kFloat && x.bits == 32) return kFp32;
        if (x.code == kFloat && x.bits == 16) return kFp16;
        if (x.code == kBfloat && x.bits == 16) return kBf16;
        if (x.code == kFloat8E4m3fn && x.bits == 8) return kFp8;
        if (x.code == kInt && x.bits == 8) return kInt8;
        return x.code == kInt && x.bits == 32 ? (int64_t)kInt32 : kNoDtype;
    }
};

enum Argument {
    kQ, kK, kV, kTables, kLens, kScale, kKScale, kVScale, kWindow, kSinks, kSoftcap, kOut, kLse, kMass, kThreads,
    kAskedIsa, kNumArguments
};

bool read_tensors(PyObject* const* given, AttendCall* call) {
    Reader reader;
    int64_t dtypes[6];
    for (int64_t& dtype : dtypes) dtype = Reader::kNoDtype;
    call->q = reader.read(given[kQ], {&call->num_seqs, call->q_stride, 4}, &dtypes[0], true);
    const int dims = reader.dims;
    call->out = reader.read(given[kOut], {call->out_shape, call->out_stride, 4}, &dtypes[1], true);
    if (!reader.ok || reader.dims != dims) return false;
    call->k = reader.read(given[kK], {&call->num_blocks, call->k_stride, 4}, &dtypes[2]);
    call->v = reader.read(given[kV], {call->v_shape, call->v_stride, 4}, &dtypes[3]);
    call->block_tables = (int32_t*)reader.read(given[kTables], {&call->table_rows, call->table_stride, 2}, &dtypes[4]);
    call->seq_lens = (int32_t*)reader.read(given[kLens], {&call->num_lens, &call->seq_lens_stride, 1}, &dtypes[5]);
    call->k_scale = (float*)reader.read_option(given[kKScale], {call->k_scale_shape, call->k_scale_stride, 3}, 3);
    call->v_scale = (float*)reader.read_option(given[kVScale], {call->v_scale_shape, call->v_scale_stride, 3}, 3);
    call->sinks = (float*)reader.read_option(given[kSinks], {&call->num_sinks, &call->sinks_stride, 1}, 1);
    call->lse = (float*)reader.read_option(given[kLse], {call->lse_shape, call->lse_stride, 3}, dims - 1, true);
    call->block_mass = (float*)reader.read_option(given[kMass], {call->mass_shape, call->mass_stride, 4}, dims, true);
    call->q_dtype = dtypes[0];
    call->kv_dtype = dtypes[2];
    return reader.ok && dtypes[0] >= kFp32 && dtypes[0] <= kFp16 && dtypes[1] == dtypes[0] && dtypes[2] >= kFp32 &&
           dtypes[2] <= kFp8 && dtypes[3] == dtypes[2] && dtypes[4] == Reader::kInt32 && dtypes[5] == Reader::kInt32;
}

bool read_numbers(PyObject* const* given, AttendCall* call) {
    const bool has_scale = given[kScale] != Py_None;
    call->scale = has_scale ? PyFloat_AsDouble(given[kScale]) : std::pow((double)call->head_dim, -0.5);
    call->softcap = given[kSoftcap] == Py_None ? 0 : PyFloat_AsDouble(given[kSoftcap]);
    call->window = given[kWindow] == Py_None ? 0 : PyLong_AsLongLong(given[kWindow]);
    call->threads = PyLong_AsLongLong(given[kThreads]);
    call->isa = PyLong_AsLongLong(given[kAskedIsa]);
    if (PyErr_Occurred()) return PyErr_Clear(), false;
    if (given[kWindow] == Py_True || given[kWindow] == Py_False) return false;
    if (given[kSoftcap] != Py_None && !(call->softcap > 0)) return false;
    return given[kWindow] == Py_None || (call->window > 0 && call->window <= kLargestWindow);
}

PyObject* attend(PyObject*, PyObject* const* given, Py_ssize_t count) {
    if (count != kNumArguments) return PyErr_Format(PyExc_TypeError, "attend takes %d arguments", kNumArguments);
    AttendCall call;
    int64_t status = kDoesNotFit;
    if (exchange && read_tensors(given, &call) && read_numbers(given, &call)) {
        Py_BEGIN_ALLOW_THREADS
        status = pagedkv_attend(&call);
        Py_END_ALLOW_THREADS
    }
    return PyLong_FromLongLong(status);
}

PyObject* use_exchange(PyObject*, PyObject* arguments) {
    PyObject *capsule, *tensor, *parameter, *negated;
    if (!PyArg_ParseTuple(arguments, "OOOO", &capsule, &tensor, &parameter, &negated)) return nullptr;
    const auto* table = (const ExchangeTable*)PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
    if (!table) return nullptr;
    if (table->major != 1) return PyErr_Format(PyExc_ImportError, "DLPack %u, not 1", (unsigned)table->major);
    exchange = table;
    tensor_type = Py_NewRef(tensor);
    parameter_type = Py_NewRef(parameter);
    is_neg = Py_NewRef(negated);
    Py_RETURN_NONE;
}

PyMethodDef methods[] = {
    {"attend", (PyCFunction)(void (*)(void))attend, METH_FASTCALL, "A Status, see attention/cpu_backend.py."},
    {"use_exchange", use_exchange, METH_VARARGS,
     "(torch.Tensor.__dlpack_c_exchange_api__, torch.Tensor, torch.nn.Parameter, torch.Tensor.is_neg)"},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef module = {PyModuleDef_HEAD_INIT, "_native", nullptr, 0, methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace

}  // namespace pagedkv

PyMODINIT_FUNC PyInit__native() { return PyModule_Create(&pagedkv::module); }
