// Memory that a thread keeps between calls, so that no call asks the system for pages.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstdlib>

namespace pagedkv {

enum ScratchUse { kItemScratch, kCallScratch, kWriteScratch, kNumScratchUses };

struct Buffer {
    char* data = nullptr;
    size_t size = 0;

    bool reserve(size_t bytes) {
        if (bytes <= size) return true;
        std::free(data);
        size = 0;
        bytes = (bytes + 4095) / 4096 * 4096;
        data = (char*)std::aligned_alloc(64, bytes);
        if (data) size = bytes;
        return data != nullptr;
    }
    ~Buffer() { std::free(data); }
};

inline Buffer& thread_scratch(ScratchUse use) {
    static thread_local Buffer buffers[kNumScratchUses];
    return buffers[use];
}

// Hands out aligned pieces of a buffer; without one it only counts bytes.
struct Scratch {
    char* base;
    size_t used = 0;

    template <class T>
    T* take(int64_t count) {
        T* piece = base ? (T*)(base + used) : nullptr;
        used += ((size_t)count * sizeof(T) + 63) / 64 * 64;
        return piece;
    }
};

// Runs `place` twice: to learn the size, then with memory behind it.
struct ScratchLayout {
    template <class Place>
    bool allocate(Buffer& buffer, const Place& place) {
        Scratch count{nullptr};
        place(count);
        if (!buffer.reserve(count.used)) return false;
        Scratch real{buffer.data};
        place(real);
        return true;
    }
};

}  // namespace pagedkv
