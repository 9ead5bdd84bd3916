#include <cutlass/half.h>

#include "../kernels.h"
#include "../launch.cuh"

namespace dash {

CompiledKernel const kFp16D64 = compiled_kernel<cutlass::half_t, KernelConfig<64>>();

}  // namespace dash
