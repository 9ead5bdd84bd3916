#include <cutlass/half.h>

#include "../kernels.h"
#include "../launch.cuh"

namespace dash {

CompiledKernel const kFp16D192V128 = compiled_kernel<cutlass::half_t, KernelConfig<192, 128>>();

}  // namespace dash
