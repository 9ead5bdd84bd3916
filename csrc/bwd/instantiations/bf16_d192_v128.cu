#include <cutlass/bfloat16.h>

#include "../kernels.h"
#include "../launch.cuh"

namespace dash {

CompiledKernel const kBf16D192V128 = compiled_kernel<cutlass::bfloat16_t, KernelConfig<192, 128>>();

}  // namespace dash
