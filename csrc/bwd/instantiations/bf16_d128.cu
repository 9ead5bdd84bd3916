#include <cutlass/bfloat16.h>

#include "../kernels.h"
#include "../launch.cuh"

namespace dash {

void backward_bf16_d128(BackwardArgs const& args) {
  launch_backward<cutlass::bfloat16_t, KernelConfig<128>>(args);
}

int resident_ctas_bf16_d128(int device) {
  return resident_ctas_of<cutlass::bfloat16_t, KernelConfig<128>>(device);
}

}  // namespace dash
