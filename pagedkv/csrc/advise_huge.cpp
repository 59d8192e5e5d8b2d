// Huge pages under the cache: attention reads blocks in any order, so that with pages of 4 KB nearly every block is
// another walk through the page tables.
#include "advise_huge.h"

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstring>

#include "abi.h"

#if defined(_WIN32)
#include <errno.h>
#else
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#endif

namespace pagedkv {

namespace {

struct Range {
    std::atomic<uintptr_t> begin, end;
};
constexpr unsigned kRanges = 32;  // a storage asks for two per kind of layer
Range ranges[kRanges];
std::atomic<unsigned> num_ranges{0};

// Linux takes the advice even if it gives no huge pages to anybody.
bool are_given() {
    char modes[64] = "";
    if (FILE* file = std::fopen("/sys/kernel/mm/transparent_hugepage/enabled", "r")) {
        if (!std::fgets(modes, sizeof modes, file)) modes[0] = 0;
        std::fclose(file);
    }
    return modes[0] && !std::strstr(modes, "[never]");
}

void remember(uintptr_t begin, uintptr_t end) {
    Range& range = ranges[num_ranges.fetch_add(1) % kRanges];
    range.end = 0;  // empty meanwhile
    range.begin = begin;
    range.end = end;
}

}  // namespace

bool has_huge_pages(const void* start) {
    const unsigned known = std::min(num_ranges.load(), kRanges);
    for (unsigned i = 0; i < known; i++)
        if (ranges[i].begin <= (uintptr_t)start && (uintptr_t)start < ranges[i].end) return true;
    return false;
}

}  // namespace pagedkv

PAGEDKV_EXPORT int64_t pagedkv_advise_huge(void* start, int64_t bytes) {
#if defined(MADV_HUGEPAGE)
    // whole pages only: the edges may belong to somebody else
    const uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE);
    const uintptr_t begin = ((uintptr_t)start + page - 1) / page * page;
    const uintptr_t end = ((uintptr_t)start + (uintptr_t)bytes) / page * page;
    if (begin >= end) return 0;
    if (!pagedkv::are_given()) return ENOSYS;
    if (madvise((void*)begin, end - begin, MADV_HUGEPAGE)) return errno;
    pagedkv::remember(begin, end);
    return 0;
#else
    (void)start;
    (void)bytes;
    return ENOSYS;
#endif
}
