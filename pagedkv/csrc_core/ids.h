// Block ids of one call: int32 in any stride, never written.
#pragma once
#include <cstdint>
#include <cstring>

namespace pagedkv {

using Block = int32_t;

template <typename T>
struct Strided {
    const char* data = nullptr;
    int64_t stride = sizeof(T);  // bytes
    int64_t count = 0;

    T operator[](int64_t i) const {
        T value;
        std::memcpy(&value, data + i * stride, sizeof(T));
        return value;
    }

    void copy(int64_t first, int64_t number, T* to) const {
        if (stride == sizeof(T))
            std::memcpy(to, data + first * stride, (size_t)number * sizeof(T));
        else
            for (int64_t i = 0; i < number; i++) to[i] = (*this)[first + i];
    }
};

using Ids = Strided<Block>;
using Flags = Strided<uint8_t>;

// Blocks that so many tokens need.
inline int64_t blocks_of(int64_t num_tokens, int64_t block_size) {
    return num_tokens / block_size + (num_tokens % block_size != 0);
}

// The first id outside least..most, or -1 without any; least is 0 or 1.
inline int64_t first_outside(const Ids& ids, Block least, Block most) {
    for (int64_t i = 0; i < ids.count; i++)
        if (ids[i] < least || ids[i] > most) return i;
    return -1;
}

}  // namespace pagedkv
