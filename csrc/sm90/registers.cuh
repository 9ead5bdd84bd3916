// setmaxnreg: a warpgroup gives registers back or takes more. All its warps execute it, in one
// branch.
#pragma once

namespace dash {

template <int kRegisters>
__device__ __forceinline__ void release_registers_down_to() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

template <int kRegisters>
__device__ __forceinline__ void take_registers_up_to() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

}  // namespace dash
