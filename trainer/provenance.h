// provenance.h - what this program was built from: for --version, the log header and checkpoints. The Makefile passes GIT_HASH and
// BUILD_FLAGS as quoted text.
#pragma once
#include "../kernels/base.h"

#ifndef GIT_HASH
#define GIT_HASH "unknown"
#endif
#ifndef BUILD_FLAGS
#define BUILD_FLAGS "unknown"
#endif

const char* provenance_git(void) { return GIT_HASH; }
const char* provenance_flags(void) { return BUILD_FLAGS; }

const char* provenance_compiler(void) {
#if defined(__CUDACC__)
#define PROVENANCE_TEXT(x) #x
#define PROVENANCE_VERSION(major, minor) "nvcc " PROVENANCE_TEXT(major) "." PROVENANCE_TEXT(minor) ", host "
    return PROVENANCE_VERSION(__CUDACC_VER_MAJOR__, __CUDACC_VER_MINOR__) __VERSION__;
#elif defined(__clang__)
    return __VERSION__; // begins with a vendor and "Clang"
#else
    return "gcc " __VERSION__;
#endif
}
