#include <cutlass/half.h>

#include "../kernels.h"
#include "../launch.cuh"

namespace dash {

void backward_fp16_d64(BackwardArgs const& args) {
  launch_backward<cutlass::half_t, KernelConfig<64>>(args);
}

int resident_ctas_fp16_d64(int device) {
  return resident_ctas_of<cutlass::half_t, KernelConfig<64>>(device);
}

}  // namespace dash
