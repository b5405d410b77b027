// FASTENC_BEGIN_TARGET and FASTENC_END_TARGET enclose functions that may use the instructions named by FASTENC_TARGET.
// Headers are included before them, so that no function of a header is compiled for one instruction set and then linked
// into code for another.
#pragma once

#define FASTENC_PRAGMA(text) _Pragma(#text)
#if !defined(FASTENC_TARGET)
#define FASTENC_BEGIN_TARGET
#define FASTENC_END_TARGET
#elif defined(__clang__)
#define FASTENC_TARGET_PRAGMA(target_) FASTENC_PRAGMA(clang attribute push(__attribute__((target(target_))), apply_to = function))
#define FASTENC_BEGIN_TARGET FASTENC_TARGET_PRAGMA(FASTENC_TARGET)
#define FASTENC_END_TARGET _Pragma("clang attribute pop")
#else
#define FASTENC_TARGET_PRAGMA(target_) _Pragma("GCC push_options") FASTENC_PRAGMA(GCC target(target_))
#define FASTENC_BEGIN_TARGET FASTENC_TARGET_PRAGMA(FASTENC_TARGET)
#define FASTENC_END_TARGET _Pragma("GCC pop_options")
#endif
