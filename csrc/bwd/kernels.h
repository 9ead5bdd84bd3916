// The compiled kernels, one an instantiation file. Declared without CUDA types.
#pragma once

#include "launch.h"

namespace dash {

struct CompiledKernel {
  void (*backward)(BackwardArgs const& args);
  int (*resident_ctas)(int device);
};

extern CompiledKernel const kBf16D64, kFp16D64;
extern CompiledKernel const kBf16D128, kFp16D128;
extern CompiledKernel const kBf16D192V128, kFp16D192V128;

}  // namespace dash
