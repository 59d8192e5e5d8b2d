// Whether huge pages were asked for at an address, lately, and probably given.
#pragma once

namespace pagedkv {

bool has_huge_pages(const void* start);

}  // namespace pagedkv
