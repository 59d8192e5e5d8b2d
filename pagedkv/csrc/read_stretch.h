// Reads bytes and does nothing with them but what keeps the compiler from dropping the loads.
//
//   data   | 64 B | 64 B | 64 B | 64 B | ...   one load each, into four independent maxima
//   ahead  | ask  | ask  | ask  | ask  | ...   the stretch that comes next is on its way meanwhile
#pragma once
#include "kernels.h"

namespace pagedkv {
namespace PAGEDKV_ISA {

static float read_stretch(const char* data, const char* ahead, int64_t bytes) {
    constexpr int kStep = 4 * kLanes * (int)sizeof(float);
    Vec top[4] = {zero(), zero(), zero(), zero()};
    for (int64_t i = 0; i + kStep <= bytes; i += kStep) {
        for (int j = 0; j < kStep; j += 64) ask_for(ahead + i + j);
        for (int j = 0; j < 4; j++) top[j] = max(load((const float*)(data + i) + j * kLanes), top[j]);
    }
    return largest(max(max(top[0], top[1]), max(top[2], top[3])));
}

}  // namespace PAGEDKV_ISA
}  // namespace pagedkv
