#include <cutlass/half.h>

#include "../kernels.h"
#include "../launch.cuh"

namespace dash {

void backward_fp16_d128(BackwardArgs const& args) {
  launch_backward<cutlass::half_t, KernelConfig<128>>(args);
}

int resident_ctas_fp16_d128(int device) {
  return resident_ctas_of<cutlass::half_t, KernelConfig<128>>(device);
}

}  // namespace dash
