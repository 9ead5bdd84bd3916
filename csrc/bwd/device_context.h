// Which CUDA context a call works in, what that context can hold, and the driver functions that
// this takes. Host only. Nothing here outlives a call but what is known of a context.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <map>
#include <mutex>
#include <stdexcept>
#include <string>
#include <tuple>

namespace dash {

inline void check_cuda(cudaError_t error, char const* call, char const* file, int line) {
  if (error == cudaSuccess) return;
  cudaGetLastError();  // not sticky: the next call must not report this one's failure
  throw std::runtime_error(std::string("dash: ") + call + " failed at " + file + ":" +
                           std::to_string(line) + ": " + cudaGetErrorString(error));
}
#define DASH_CHECK_CUDA(call) ::dash::check_cuda((call), #call, __FILE__, __LINE__)

inline void check_driver(CUresult result, char const* call) {
  if (result == CUDA_SUCCESS) return;
  throw std::runtime_error(std::string("dash: ") + call + " failed with error " +
                           std::to_string(static_cast<int>(result)));
}

// Driver functions, found at run time, so that the module links to no driver library and loads
// where there is none. Types are written out: a header's macros rename what its release replaced.
struct Driver {
  CUresult (*init)(unsigned);
  CUresult (*device_get)(CUdevice*, int);
  CUresult (*primary_retain)(CUcontext*, CUdevice);
  CUresult (*get_current)(CUcontext*);
  CUresult (*push_current)(CUcontext);
  CUresult (*pop_current)(CUcontext*);
  CUresult (*get_device)(CUdevice*);
  CUresult (*get_id)(CUcontext, unsigned long long*);
  decltype(&cuTensorMapEncodeTiled) tensor_map_encode_tiled;
  // Null where the driver is older than 12.5, which can tell no stream's green context.
  CUresult (*stream_get_contexts)(CUstream, CUcontext*, CUgreenCtx*);
  CUresult (*context_from_green)(CUcontext*, CUgreenCtx);
  CUresult (*get_resource)(CUcontext, CUdevResource*, CUdevResourceType);

  static Driver const& get() {
    static Driver const driver;
    return driver;
  }

 private:
  Driver() {
    find(init, "cuInit", 2000);
    check_driver(init(0), "cuInit");
    find(device_get, "cuDeviceGet", 2000);
    find(primary_retain, "cuDevicePrimaryCtxRetain", 7000);
    find(get_current, "cuCtxGetCurrent", 4000);
    find(push_current, "cuCtxPushCurrent", 4000);
    find(pop_current, "cuCtxPopCurrent", 4000);
    find(get_device, "cuCtxGetDevice", 2000);
    find(get_id, "cuCtxGetId", 12000);
    find(tensor_map_encode_tiled, "cuTensorMapEncodeTiled", 12000);
    find(stream_get_contexts, "cuStreamGetCtx", 12050, /*required=*/false);
    find(context_from_green, "cuCtxFromGreenCtx", 12040, /*required=*/false);
    find(get_resource, "cuCtxGetDevResource", 12040, /*required=*/false);
  }

  template <typename Function>
  static void find(Function& function, char const* name, unsigned version, bool required = true) {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result{};
    cudaError_t const error =
        cudaGetDriverEntryPointByVersion(name, &found, version, cudaEnableDefault, &result);
    if (error != cudaSuccess || result != cudaDriverEntryPointSuccess) found = nullptr;
    if (found == nullptr) cudaGetLastError();
    if (found == nullptr && required)
      throw std::runtime_error(std::string("dash: the CUDA driver has no ") + name + "; update it");
    function = reinterpret_cast<Function>(found);
  }
};

// The primary context of a device, where PyTorch's memory is. Retained once and for all: whoever
// has memory there keeps it alive anyway.
inline CUcontext primary_context(int device) {
  static std::mutex mutex;
  static std::map<int, CUcontext> retained;
  std::lock_guard const lock(mutex);
  CUcontext& context = retained[device];
  if (context != nullptr) return context;
  Driver const& driver = Driver::get();
  CUdevice handle{};
  check_driver(driver.device_get(&handle, device), "cuDeviceGet");
  check_driver(driver.primary_retain(&context, handle), "cuDevicePrimaryCtxRetain");
  return context;
}

// The context that a launch into `stream` belongs to. A stream that was created has one, a green
// context's too. The default streams are those of the calling thread's green context or, PyTorch
// knowing no other, of the device's primary context.
inline CUcontext context_of(int device, CUstream stream, CUcontext current) {
  Driver const& driver = Driver::get();
  bool const is_default =
      stream == nullptr || stream == CU_STREAM_LEGACY || stream == CU_STREAM_PER_THREAD;
  CUcontext const primary = primary_context(device);
  if (is_default && (current == nullptr || current == primary)) return primary;
  if (driver.stream_get_contexts == nullptr) return primary;
  CUcontext context = nullptr;
  CUgreenCtx green = nullptr;
  // A green context has no per-thread default stream: then this fails, and launching will, too.
  if (driver.stream_get_contexts(stream, &context, &green) != CUDA_SUCCESS) return primary;
  bool const of_device = context == primary;  // of a green context: its device's primary one
  if (green != nullptr && (of_device || !is_default)) {
    check_driver(driver.context_from_green(&context, green), "cuCtxFromGreenCtx");
    return context;
  }
  return is_default ? primary : context;
}

// Makes the context of a launch current for its own lifetime, if it is not: a thread that never
// called CUDA has none. What was current is current again afterwards, none included; the runtime's
// cudaSetDevice would leave the primary context in its place.
class ContextGuard {
 public:
  ContextGuard(int device, void* stream) {
    Driver const& driver = Driver::get();
    CUcontext current = nullptr;
    check_driver(driver.get_current(&current), "cuCtxGetCurrent");
    CUcontext const wanted = context_of(device, static_cast<CUstream>(stream), current);
    if (wanted == current) return;
    check_driver(driver.push_current(wanted), "cuCtxPushCurrent");
    CUdevice now = -1;
    driver.get_device(&now);
    if (now != device) {  // ordinals, of the runtime as of the driver
      pop();
      throw std::invalid_argument("dash: the stream is of device " + std::to_string(now) +
                                  "; wanted a stream of device " + std::to_string(device) +
                                  ", where the tensors are");
    }
    pushed_ = true;
  }
  ~ContextGuard() {
    if (pushed_) pop();
  }
  ContextGuard(ContextGuard const&) = delete;
  ContextGuard& operator=(ContextGuard const&) = delete;

 private:
  static void pop() {
    CUcontext popped = nullptr;
    Driver::get().pop_current(&popped);
  }

  bool pushed_ = false;
};

// CTAs of a kernel that the current context holds together: a green context has a part of the SMs.
// Also lets the kernel have its shared memory there, which a context of its own is asked anew.
// Remembered by context, because the answer takes longer than a launch.
inline int resident_ctas_here(void const* kernel, int threads, int shared_bytes) {
  using Key = std::tuple<unsigned long long, CUcontext, void const*>;
  static std::mutex mutex;
  static std::map<Key, int> remembered;
  Driver const& driver = Driver::get();
  CUcontext context = nullptr;
  unsigned long long id = 0;  // an address may come back when a context has gone, an id does not
  check_driver(driver.get_current(&context), "cuCtxGetCurrent");
  check_driver(driver.get_id(context, &id), "cuCtxGetId");
  std::lock_guard const lock(mutex);
  int& ctas = remembered[{id, context, kernel}];
  if (ctas > 0) return ctas;

  DASH_CHECK_CUDA(
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes));
  CUdevice device = 0;
  check_driver(driver.get_device(&device), "cuCtxGetDevice");
  int sms = 0, per_sm = 0;
  DASH_CHECK_CUDA(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device));
  CUdevResource part{};
  if (driver.get_resource != nullptr &&
      driver.get_resource(context, &part, CU_DEV_RESOURCE_TYPE_SM) == CUDA_SUCCESS &&
      part.sm.smCount > 0 && static_cast<int>(part.sm.smCount) < sms)
    sms = static_cast<int>(part.sm.smCount);
  DASH_CHECK_CUDA(
      cudaOccupancyMaxActiveBlocksPerMultiprocessor(&per_sm, kernel, threads, shared_bytes));
  return ctas = sms * per_sm;
}

}  // namespace dash
