// Whether the tensors of a call fit together.
#pragma once
#include "abi.h"

namespace pagedkv {

// Of the shapes, strides and options, all that pagedkv_attend relies on. Python words the error: this only says
// that there is one, for a fraction of the time that looking at every tensor takes there.
bool fits(const AttendCall& call);

}  // namespace pagedkv
