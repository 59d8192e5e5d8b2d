// Huge pages under the cache: attention reads blocks in any order, so that with pages of 4 KB nearly every block is
// another walk through the page tables.
#include "abi.h"

#if defined(_WIN32)
#include <errno.h>
#else
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#endif

PAGEDKV_EXPORT int64_t pagedkv_advise_huge(void* start, int64_t bytes) {
#if defined(MADV_HUGEPAGE)
    // whole pages only: the edges may belong to somebody else
    const uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE);
    const uintptr_t begin = ((uintptr_t)start + page - 1) / page * page;
    const uintptr_t end = ((uintptr_t)start + (uintptr_t)bytes) / page * page;
    if (begin >= end) return 0;
    return madvise((void*)begin, end - begin, MADV_HUGEPAGE) ? errno : 0;
#else
    (void)start;
    (void)bytes;
    return ENOSYS;
#endif
}
