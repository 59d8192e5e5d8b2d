// What an instruction set provides: four kernels on one tile, called through a table of pointers.
//
//            head_dim                 one tile: up to 64 tokens of one sequence and one KV head,
//          +-----------+              whose rows lie wherever their blocks lie
//   token  |  K row t  | <- k[t]
//          +-----------+              score    scores[row, t] = q[row] . k[t]
//               ...                   softmax  p[row, t] = exp2(scores - max), running max and sum
//          +-----------+              value    acc[row] = acc[row] * alpha[row] + sum_t p[row, t] v[t]
//   token  |  V row t  | <- v[t]
//          +-----------+              row: one of group_size * q_len query rows that share the KV head
#pragma once
#include <cstdint>

namespace pagedkv {

constexpr int kTile = 64;        // tokens of a tile: rows of p and scores are this long
constexpr int kTokenGranule = 16;  // score kernels read whole multiples of this many rows

// Asks for a line, into the second-level cache. The empty statement keeps GCC from taking a function that does
// nothing else for one without effect, whose calls it may drop.
__attribute__((always_inline)) static inline void ask_for(const void* line) {
    __builtin_prefetch(line, 0, 2);
    asm volatile("");
}

struct Tile {
    const char* const* k;  // row t of K is k[t] + k_head, for t < padded; rows past count repeat a valid one
    const char* const* v;
    int64_t k_head, v_head;
    const char* const* next_k;  // rows of the KV head that follows, to be asked for (ask_ahead.h); always readable
    const char* const* next_v;
    int64_t next_k_head, next_v_head;
    const char* const* far_k;  // and of the one after it
    const char* const* far_v;
    int64_t far_k_head, far_v_head;
    const char* stretch_k;  // or one contiguous stretch of kTile rows instead of far, if not null
    const char* stretch_v;
    bool is_dense;  // there are stretches, and each kTokenGranule rows lie side by side, here, in next and in far
    int count;   // tokens
    int padded;  // count rounded up to kTokenGranule
};

// The scale of token t, and of those behind it in its granule.
static inline const float* scales_at(const float* const* scales, int t) {
    return scales[t / kTokenGranule] + t % kTokenGranule;
}

struct TileShape {
    int rows;         // query rows, padded so that rows % 4 is 0, 1 or 2
    int head_dim;
    int v_head_dim;
    int64_t q_bytes;  // bytes between prepared query rows
    int64_t acc_stride;  // floats between rows of acc
};

struct SoftmaxTile {
    int rows;                 // true rows, without padding
    int count;
    const float* row_factor;  // [rows] from the prepared query, times the scale of the logits
    const float* const* k_scale;  // of each kTokenGranule tokens, or null
    const int* begin;         // [rows] tokens begin <= t < end of the tile are visible
    const int* end;
    float softcap;            // 0: none
    float* max;               // [rows] running maximum in base-2 units, -inf before the first token
    float* sum;               // [rows] running sum of exp2(score - max)
    float* alpha;             // [rows] out: factor that what was accumulated before must take
};

struct Kernels {
    // bytes of one prepared query row, a multiple of 64
    int64_t (*query_bytes)(int head_dim);
    // q [head_dim] fp32 -> the form that score reads; returns the factor that a raw score must take
    float (*prepare_query)(const float* q, int head_dim, void* prepared);
    void (*score)(const void* q, const Tile& tile, const TileShape& shape, float* scores);
    // turns scores into p, in place
    void (*softmax)(float* scores, const SoftmaxTile& tile);
    // p [rows][kTile]; v_scale of each kTokenGranule tokens, all of kTile readable, or null; alpha [rows], or null
    // for the first tile, which finds nothing in acc
    void (*value)(const float* p, const float* const* v_scale, const Tile& tile, const TileShape& shape,
                  const float* alpha, float* acc);
    // acc as value keeps it, n floats of a row and a multiple of 64, into the order of columns
    void (*order_row)(float* acc, int n);
    // n elements of a float dtype -> fp32; writes whole vectors, up to 16 elements
    void (*load_row)(const void* from, int64_t dtype, int n, float* to);
    // fp32 -> n elements of a float dtype, rounded to nearest even; reads whole vectors
    void (*store_row)(const float* from, int64_t dtype, int n, void* to);
    // to += weight * from, n floats; reads and writes whole vectors, up to 16 floats
    void (*add_row)(const float* from, float weight, int n, float* to);
    // fp32 -> int8; returns the scale
    float (*quantize_row)(const float* from, int n, int8_t* to);
    // touches every byte, for the read ceiling
    float (*read_stretch)(const char* data, const char* ahead, int64_t bytes);
    // how many of n are NaN or infinite
    int64_t (*count_non_finite)(const float* from, int n);
};

// null: this library or CPU has no such kernels
const Kernels* portable_kernels(int64_t kv_dtype);
const Kernels* avx2_kernels(int64_t kv_dtype);
const Kernels* avx512_kernels(int64_t kv_dtype);
// q_is_bf16: the dot product of bf16 needs a query that is bf16 already
const Kernels* avx512_dot_kernels(int64_t kv_dtype, bool q_is_bf16, int head_dim);

}  // namespace pagedkv
