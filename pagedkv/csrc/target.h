// Compiles what follows for another instruction set than the rest of the library, up to PAGEDKV_TARGET_END.
//
// Everything between the two lives in a namespace of its own (PAGEDKV_ISA) and uses no inline function of the
// standard library: one compiled there could replace the portable one everywhere and crash an older CPU.
#pragma once

#define PAGEDKV_PRAGMA(text) _Pragma(#text)
#if defined(__clang__)
#define PAGEDKV_TARGET_BEGIN(features) \
    PAGEDKV_PRAGMA(clang attribute push(__attribute__((target(features))), apply_to = function))
#define PAGEDKV_TARGET_END PAGEDKV_PRAGMA(clang attribute pop)
#else
#define PAGEDKV_TARGET_BEGIN(features) \
    PAGEDKV_PRAGMA(GCC push_options) PAGEDKV_PRAGMA(GCC target(features))
#define PAGEDKV_TARGET_END PAGEDKV_PRAGMA(GCC pop_options)
#endif
