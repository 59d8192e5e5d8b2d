// Which lines the kernels ask for, in step with the bytes that they use, so that memory works as evenly as they do.
//
//   | head h: K, V | head h + 1 | head h + 2 | ...        every line is asked for twice: first far ahead, then one
//     computed       near         far                     head ahead. The CPU drops a prefetch when too many are
//                                                         under way; without a second chance the kernel ran into
//   far is the same stretch of the next tile, in the      such lines one by one (bf16 and fp32 were 1.1x slower)
//   order of memory, where blocks lie in one piece       int8 asks a third time in between: it computes for so long
//                                                         that memory idles wherever a line was dropped twice
#pragma once
#include "kernels.h"

namespace pagedkv {
namespace PAGEDKV_ISA {

// For bytes c .. c + 63 of K rows t .. t + tokens - 1.
static inline void ask_k(const Tile& tile, int t, int tokens, int64_t row_bytes, int64_t c) {
    if (tile.stretch_k) {
        const char* line = tile.stretch_k + t * row_bytes + c * tokens;
        for (int i = 0; i < tokens; i++) ask_for(line + 64 * i);
    } else {
        for (int i = 0; i < tokens; i++) ask_for(tile.far_k[t + i] + tile.far_k_head + c);
    }
    for (int i = 0; i < tokens; i++) ask_for(tile.next_k[t + i] + tile.next_k_head + c);
}

// For bytes [column, column + width) of V row t.
static inline void ask_v(const Tile& tile, int t, int64_t column, int64_t width) {
    const char* far = tile.stretch_v ? tile.stretch_v + column * kTile + t * width
                                     : tile.far_v[t] + tile.far_v_head + column;
    for (int64_t i = 0; i < width; i += 64) ask_for(far + i);
    const char* near = tile.next_v[t] + tile.next_v_head + column;
    for (int64_t i = 0; i < width; i += 64) ask_for(near + i);
}

}  // namespace PAGEDKV_ISA
}  // namespace pagedkv
