// Programmatic dependent launch: a kernel starts while the one before it in the stream still runs.
// Without the launch attribute both do nothing.
#pragma once

namespace dash {

// The kernels this one depends on have completed and their writes are visible. Owed before the
// first access to anything they wrote.
__device__ __forceinline__ void wait_for_previous_kernel() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}

// The next kernel may be launched as soon as every CTA has said so, on SMs that have room for it.
__device__ __forceinline__ void allow_next_kernel() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

}  // namespace dash
