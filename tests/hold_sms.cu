// Holds SMs: CTAs that take almost all of an SM's shared memory and spin. What runs beside them has
// the other SMs only, and gets these when the time is up.
#include <cuda_runtime.h>

namespace {

constexpr int kSharedBytes = 224 * 1024;  // no CTA of dash's main kernel fits beside it

__global__ void hold(long long nanoseconds) {
  long long start, now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(start));
  do {
    __nanosleep(1000);
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  } while (now - start < nanoseconds);
}

}  // namespace

extern "C" int hold_sms(int sms, long long nanoseconds, void* stream) {
  static cudaError_t const ready =
      cudaFuncSetAttribute(hold, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
  if (ready != cudaSuccess) return ready;
  hold<<<sms, 32, kSharedBytes, static_cast<cudaStream_t>(stream)>>>(nanoseconds);
  return cudaGetLastError();
}
