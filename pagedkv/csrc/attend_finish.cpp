// From unnormalized rows to out, lse and block_mass.
//
//   chunk 0   max0 sum0 acc0 \                       M = max of all max_c and of the sink
//   chunk 1   max1 sum1 acc1  > out = sum_c w_c acc_c / total      w_c = 2^(max_c - M)
//   sink      max_s   1       /                      total = sum_c w_c sum_c + 2^(sink - M)
#include <cmath>
#include <cstring>

#include "attend.h"

namespace pagedkv {

namespace {

constexpr float kLog2E = 1.44269504089f, kLn2 = 0.69314718056f;

void store_output(const Attention& a, int64_t seq, int token, int q_head, const float* from) {
    const AttendCall& call = *a.call;
    const int64_t bytes = element_bytes(call.q_dtype);
    char* to = (char*)call.out + (seq * call.out_stride[0] + token * call.out_stride[1] +
                                  q_head * call.out_stride[2]) * bytes;
    if (call.out_stride[3] == 1) return a.kernels->store_row(from, call.q_dtype, (int)call.v_shape[3], to);
    float one[16] = {};
    for (int64_t i = 0; i < call.v_shape[3]; i++) {
        one[0] = from[i];
        a.kernels->store_row(one, call.q_dtype, 1, to + i * call.out_stride[3] * bytes);
    }
}

// Turns the logarithms of block sums into shares of the whole.
void finish_block_mass(const Attention& a, int64_t seq, int token, int q_head, float lse2) {
    const AttendCall& call = *a.call;
    if (!call.block_mass) return;
    float* mass = call.block_mass + seq * call.mass_stride[0] + token * call.mass_stride[1] +
                  q_head * call.mass_stride[2];
    for (int64_t b = 0; b < call.max_blocks; b++) {
        float& cell = mass[b * call.mass_stride[3]];
        const Span span = a.items.span(seq);
        const bool read = b * call.block_size < span.end && (b + 1) * call.block_size > span.first;
        cell = read && cell != -INFINITY ? std::exp2(cell - lse2) : 0.0f;
    }
}

}  // namespace

void start_block_mass(const Attention& a, const Item& item) {
    const AttendCall& call = *a.call;
    if (!call.block_mass || item.begin >= item.end) return;
    for (int token = 0; token < call.q_len; token++)
        for (int h = item.head_begin * a.group_size; h < item.head_end * a.group_size; h++)
            for (int64_t b = item.begin / call.block_size; b <= (item.end - 1) / call.block_size; b++)
                call.block_mass[item.seq * call.mass_stride[0] + token * call.mass_stride[1] +
                                h * call.mass_stride[2] + b * call.mass_stride[3]] = -INFINITY;
}

void finish(const Attention& a, int64_t seq, int head, const PartialRows* chunks, int64_t num_chunks,
            float* mixed) {
    const AttendCall& call = *a.call;
    for (int row = 0; row < a.rows; row++) {
        const int token = row / a.group_size, q_head = head * a.group_size + row % a.group_size;
        float top = call.sinks ? call.sinks[q_head * call.sinks_stride] * kLog2E : -INFINITY;
        for (int64_t c = 0; c < num_chunks; c++) top = chunks[c].max[row] > top ? chunks[c].max[row] : top;
        const float base = top == -INFINITY ? 0.0f : top;
        float total = call.sinks ? std::exp2(call.sinks[q_head * call.sinks_stride] * kLog2E - base) : 0.0f;
        float weights[kMostChunks];
        for (int64_t c = 0; c < num_chunks; c++) {
            // a chunk without a visible token has sum 0; one of nothing but NaN keeps its NaN
            weights[c] = chunks[c].max[row] == -INFINITY ? 1.0f : std::exp2(chunks[c].max[row] - base);
            total += chunks[c].sum[row] * weights[c];
        }
        const float inverse = total == 0.0f ? 0.0f : 1.0f / total;
        memset(mixed, 0, (size_t)a.shape.acc_stride * sizeof(float));
        for (int64_t c = 0; c < num_chunks; c++)
            a.kernels->add_row(chunks[c].acc + row * a.shape.acc_stride, weights[c] * inverse,
                               (int)a.shape.acc_stride, mixed);
        a.kernels->order_row(mixed, (int)a.shape.acc_stride);
        store_output(a, seq, token, q_head, mixed);
        if (!call.lse && !call.block_mass) continue;
        const float lse2 = top + std::log2(total);
        if (call.lse)
            call.lse[seq * call.lse_stride[0] + token * call.lse_stride[1] + q_head * call.lse_stride[2]] =
                lse2 * kLn2;
        finish_block_mass(a, seq, token, q_head, lse2);
    }
}

}  // namespace pagedkv
