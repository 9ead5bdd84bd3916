#include <cutlass/bfloat16.h>

#include "../kernels.h"
#include "../launch.cuh"

namespace dash {

CompiledKernel const kBf16D64 = compiled_kernel<cutlass::bfloat16_t, KernelConfig<64>>();

}  // namespace dash
