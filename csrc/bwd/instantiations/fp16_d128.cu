#include <cutlass/half.h>

#include "../kernels.h"
#include "../launch.cuh"

namespace dash {

CompiledKernel const kFp16D128 = compiled_kernel<cutlass::half_t, KernelConfig<128>>();

}  // namespace dash
