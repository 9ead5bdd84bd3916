#include <cutlass/bfloat16.h>

#include "../kernels.h"
#include "../launch.cuh"

namespace dash {

void backward_bf16_d64(BackwardArgs const& args) {
  launch_backward<cutlass::bfloat16_t, KernelConfig<64>>(args);
}

int resident_ctas_bf16_d64(int device) {
  return resident_ctas_of<cutlass::bfloat16_t, KernelConfig<64>>(device);
}

}  // namespace dash
