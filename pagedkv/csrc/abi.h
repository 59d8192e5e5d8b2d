// The C interface of the native CPU backend, as pagedkv/native.py and attend_tensors.cpp call it.
//
// Every field is 8 bytes wide (pointer, int64 or double), so that Python packs a call with one format string.
// Strides count elements, except where they say bytes. Nothing here keeps a pointer after the call returns.
#pragma once
#include <cstdint>

#if defined(__GNUC__)
#define PAGEDKV_EXPORT extern "C" __attribute__((visibility("default")))
#else
#define PAGEDKV_EXPORT extern "C"
#endif

namespace pagedkv {

// Raised whenever a struct or the meaning of a field changes; Python refuses a library of another number.
constexpr int64_t kAbiVersion = 3;

enum Dtype : int64_t { kFp32 = 0, kBf16 = 1, kFp16 = 2, kInt8 = 3, kFp8 = 4 };

enum Isa : int64_t { kAuto = 0, kPortable = 1, kAvx2 = 2, kAvx512 = 3, kAvx512Dot = 4 };

enum Status : int64_t { kOk = 0, kBadLength = 1, kBadBlock = 2, kNoMemory = 3, kNoKernel = 4, kDoesNotFit = 5 };

struct AttendCall {
    const void* q;                // [num_seqs, q_len, num_q_heads, head_dim]
    const void* k;                // [num_blocks, num_kv_heads, block_size, head_dim], last stride 1
    const void* v;                // [num_blocks, num_kv_heads, block_size, v_head_dim], last stride 1
    const float* k_scale;         // [num_blocks, num_kv_heads, block_size], int8 only
    const float* v_scale;         // likewise
    const int32_t* block_tables;  // [num_seqs, max_blocks]
    const int32_t* seq_lens;      // [num_seqs]
    const float* sinks;           // [num_q_heads], or null
    void* out;                    // [num_seqs, q_len, num_q_heads, v_head_dim], dtype of q
    float* lse;                   // [num_seqs, q_len, num_q_heads], or null
    float* block_mass;            // [num_seqs, q_len, num_q_heads, max_blocks], or null
    // shape and strides of each tensor as it has them, -1 for what is not given; attend_check.cpp compares them
    int64_t num_seqs, q_len, num_q_heads, head_dim, q_stride[4];
    int64_t num_blocks, num_kv_heads, block_size, k_head_dim, k_stride[4];
    int64_t v_shape[4], v_stride[4];
    int64_t table_rows, max_blocks, table_stride[2];
    int64_t num_lens, seq_lens_stride;
    int64_t out_shape[4], out_stride[4];
    int64_t k_scale_shape[3], k_scale_stride[3];
    int64_t v_scale_shape[3], v_scale_stride[3];
    int64_t num_sinks, sinks_stride;
    int64_t lse_shape[3], lse_stride[3];
    int64_t mass_shape[4], mass_stride[4];
    int64_t q_dtype, kv_dtype;
    int64_t window;               // 0: none
    int64_t threads;              // at most so many, the caller's among them
    int64_t isa;                  // kAuto, or one to force
    double scale, softcap;        // softcap 0: none
};

struct ReadCall {
    const void* k;
    const void* v;  // null: k only
    const int32_t* block_tables;
    const int32_t* seq_lens;
    int64_t num_seqs, block_size;
    int64_t k_block_bytes, v_block_bytes;    // contiguous bytes that are read of each block
    int64_t k_block_stride, v_block_stride;  // bytes between blocks
    int64_t table_stride, threads;
};

struct WriteCall {
    void* values;             // [num_rows, num_heads, block_size, dim]
    float* scale;             // [num_rows, num_heads, block_size], int8 only
    const void* source;       // [n, num_heads, dim], fp32, bf16 or fp16
    const int64_t* slots;     // [n], block * block_size + offset; negative: writes nothing
    int64_t n, num_heads, block_size, dim;
    int64_t value_stride[4], scale_stride[3], source_stride[3], slot_stride;
    int64_t dtype, source_dtype, threads, isa;
};

}  // namespace pagedkv

PAGEDKV_EXPORT int64_t pagedkv_abi_version();

// Best instruction set of this CPU that was compiled in, as an Isa.
PAGEDKV_EXPORT int64_t pagedkv_best_isa();

// Fills out, lse and block_mass. A Status; nothing is written unless it is kOk or kNoMemory.
PAGEDKV_EXPORT int64_t pagedkv_attend(pagedkv::AttendCall* call);

// Reads every byte of the blocks that attention would read, in the same order on the same threads, and does
// nothing with them: the ceiling that the benchmark compares with. Returns a checksum.
PAGEDKV_EXPORT uint64_t pagedkv_read_blocks(const pagedkv::ReadCall* call);

// Stores vectors, quantizing to int8 on the way. Returns how many values are NaN or infinite: unless that is 0
// nothing was written (int8 only; float dtypes take any value).
PAGEDKV_EXPORT int64_t pagedkv_write_kv(const pagedkv::WriteCall* call);

// Asks for huge pages under [start, start + bytes). 0, or errno.
PAGEDKV_EXPORT int64_t pagedkv_advise_huge(void* start, int64_t bytes);

// GOMP_parallel of the OpenMP runtime that computes for torch, so that calls run on its threads; null: on our own.
PAGEDKV_EXPORT void pagedkv_use_team(void* gomp_parallel);
