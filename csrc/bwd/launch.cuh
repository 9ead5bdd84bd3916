// Host side of one instantiation: tensor maps, workspace, the launches.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <atomic>
#include <stdexcept>
#include <string>

#include "../schedule/any_schedule.h"
#include "../schedule/describe.h"
#include "convert_dq.cuh"
#include "kernel.cuh"
#include "kv_parts.cuh"
#include "launch.h"
#include "preprocess.cuh"

namespace dash {

inline void check_cuda(cudaError_t error, char const* call, char const* file, int line) {
  if (error == cudaSuccess) return;
  cudaGetLastError();  // not sticky: the next call must not report this one's failure
  throw std::runtime_error(std::string("dash: ") + call + " failed at " + file + ":" +
                           std::to_string(line) + ": " + cudaGetErrorString(error));
}
#define DASH_CHECK_CUDA(call) ::dash::check_cuda((call), #call, __FILE__, __LINE__)

// Makes a device current for its own lifetime.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device) {
    DASH_CHECK_CUDA(cudaGetDevice(&previous_));
    if (device != previous_) DASH_CHECK_CUDA(cudaSetDevice(device));
  }
  ~DeviceGuard() { cudaSetDevice(previous_); }
  DeviceGuard(DeviceGuard const&) = delete;
  DeviceGuard& operator=(DeviceGuard const&) = delete;

 private:
  int previous_ = 0;
};

// Found at run time, so that the module links to no driver library and loads where there is none.
inline auto tensor_map_encoder() {
  static auto const encode = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found{};
    DASH_CHECK_CUDA(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000,
                                                     cudaEnableDefault, &found));
    if (found != cudaDriverEntryPointSuccess || function == nullptr)
      throw std::runtime_error("dash: the CUDA driver has no cuTensorMapEncodeTiled; update it");
    return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(function);
  }();
  return encode;
}

// A (head_dim, rows, heads, batch) map of a tensor. Batch and head are dimensions of their own, so
// that a box past the end of a sequence reads zeros and never a neighbour.
template <typename Element>
CUtensorMap tensor_map(TensorView const& t, int head_dim, int rows, int heads, int batch,
                       int box_rows) {
  constexpr CUtensorMapDataType kType = std::is_same_v<Element, cutlass::half_t>
                                            ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
                                            : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  constexpr int kRank = 4;
  auto const u64 = [](int64_t x) { return static_cast<cuuint64_t>(x); };
  auto const u32 = [](int x) { return static_cast<cuuint32_t>(x); };
  cuuint64_t const sizes[kRank] = {u64(head_dim), u64(rows), u64(heads), u64(batch)};
  // The stride of a dimension with one element may be anything, except to the encoder.
  auto const bytes = [&](int64_t stride, int size) {
    return size > 1 ? u64(stride) * sizeof(Element) : cuuint64_t{16};
  };
  cuuint64_t const strides[kRank - 1] = {bytes(t.seq_stride, rows), bytes(t.head_stride, heads),
                                         bytes(t.batch_stride, batch)};
  cuuint32_t const box[kRank] = {64, u32(box_rows), 1, 1};
  cuuint32_t const steps[kRank] = {1, 1, 1, 1};
  CUtensorMap map;
  CUresult const result =
      tensor_map_encoder()(&map, kType, kRank, t.data, sizes, strides, box, steps,
                           CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                           CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS)
    throw std::runtime_error("dash: cuTensorMapEncodeTiled failed with error " +
                             std::to_string(static_cast<int>(result)));
  return map;
}

template <typename T>
T* at(void* workspace, int64_t offset) {
  return reinterpret_cast<T*>(static_cast<char*>(workspace) + offset);
}

template <typename Element, typename Config>
PreprocessParams preprocess_params(BackwardArgs const& args) {
  WorkspaceLayout const layout(args.problem, Config::kHeadDim);
  return {.out = args.out,
          .dout = args.dout,
          .dq = args.dq,
          .lse = args.lse,
          .problem = args.problem,
          .head_dim = args.head_dim,
          .lse_log2 = at<float>(args.workspace, layout.lse_log2),
          .minus_delta = at<float>(args.workspace, layout.minus_delta),
          .dq_turns = at<int>(args.workspace, layout.dq_turns),
          .next_ticket = at<int>(args.workspace, layout.next_ticket)};
}

template <typename Element, typename Config>
MainParams main_params(BackwardArgs const& args, int ctas) {
  Problem const& p = args.problem;
  WorkspaceLayout const layout(p, Config::kHeadDim);
  AnySchedule const schedule(args.strategy, p);
  auto const queries = [&](TensorView const& t) {
    return tensor_map<Element>(t, args.head_dim, p.seqlen_q, p.heads, p.batch, Config::kTileQ);
  };
  auto const keys = [&](TensorView const& t) {
    return tensor_map<Element>(t, args.head_dim, p.seqlen_k, p.heads_of_k(), p.batch,
                               Config::kTileKv);
  };
  bool const split = p.group_split > 1;
  return {.q = queries(args.q),
          .dout = queries(args.dout),
          .k = keys(args.k),
          .v = keys(args.v),
          .problem = p,
          .strategy = args.strategy,
          .cyclic = schedule.cyclic(),
          .num_tickets = schedule.num_tickets(),
          .num_ctas = schedule.num_ctas(ctas),
          .q_tiles = p.q_tiles(),
          .group = p.group(),
          .head_dim = args.head_dim,
          .scale_log2 = args.softmax_scale * kLog2E,
          .softmax_scale = args.softmax_scale,
          .dq = args.dq,
          .dk = args.dk,
          .dv = args.dv,
          .lse_log2 = at<float>(args.workspace, layout.lse_log2),
          .minus_delta = at<float>(args.workspace, layout.minus_delta),
          .dq_accum = at<float>(args.workspace, layout.dq_accum),
          .dk_parts = split ? at<float>(args.workspace, layout.dk_parts) : nullptr,
          .dv_parts = split ? at<float>(args.workspace, layout.dv_parts) : nullptr,
          .dq_turns = at<int>(args.workspace, layout.dq_turns),
          .next_ticket = at<int>(args.workspace, layout.next_ticket)};
}

// CTAs of the main kernel that the current device holds together; asked once a device, because the
// answer takes longer than a launch. Also lets the kernel have its shared memory there.
template <typename Element, typename Config>
int resident_on_current_device(int device) {
  constexpr int kRememberedDevices = 64;
  static std::atomic<int> remembered[kRememberedDevices];
  bool const may_remember = device < kRememberedDevices;
  if (may_remember)
    if (int const ctas = remembered[device].load(std::memory_order_relaxed)) return ctas;
  auto* const kernel = attention_backward<Element, Config>;
  constexpr int kSharedBytes = sizeof(SharedStorage<Element, Config>);
  DASH_CHECK_CUDA(
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes));
  int sms = 0, per_sm = 0;
  DASH_CHECK_CUDA(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device));
  DASH_CHECK_CUDA(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&per_sm, kernel, Config::kThreads,
                                                                kSharedBytes));
  if (may_remember) remembered[device].store(sms * per_sm, std::memory_order_relaxed);
  return sms * per_sm;
}

template <typename Element, typename Config>
int resident_ctas_of(int device) {
  DeviceGuard const guard(device);
  return resident_on_current_device<Element, Config>(device);
}

// Launches a kernel that may start while the one before it in the stream still runs: it calls
// wait_for_previous_kernel() itself. A cooperative launch cannot have that and waits.
template <typename Kernel, typename Params>
void launch_dependent(Kernel* kernel, Params const& params, cudaLaunchConfig_t config,
                      bool cooperative = false) {
  cudaLaunchAttribute attribute{};
  if (cooperative) {
    attribute.id = cudaLaunchAttributeCooperative;
    attribute.val.cooperative = 1;
  } else {
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
  }
  config.attrs = &attribute;
  config.numAttrs = 1;
  DASH_CHECK_CUDA(cudaLaunchKernelEx(&config, kernel, params));
}

template <typename Element, typename Config>
void launch_backward(BackwardArgs const& args) {
  DeviceGuard const guard(args.device);
  int const resident = resident_on_current_device<Element, Config>(args.device);
  int const ctas = args.max_ctas > 0 && args.max_ctas < resident ? args.max_ctas : resident;
  visit_schedule(args.strategy, args.problem, [&](auto const& schedule) {
    Refusal const refusal = schedule.why_not(args.problem, ctas);
    if (refusal) throw std::invalid_argument("dash: " + describe(refusal, schedule.kName));
  });
  PreprocessParams const before = preprocess_params<Element, Config>(args);
  MainParams const params = main_params<Element, Config>(args, ctas);
  auto const stream = static_cast<cudaStream_t>(args.stream);
  int const tiles = static_cast<int>(args.problem.q_tiles_total());

  preprocess<Element, Config><<<tiles, kPreprocessThreads, 0, stream>>>(before);
  DASH_CHECK_CUDA(cudaGetLastError());

  cudaLaunchConfig_t config{};
  config.stream = stream;
  config.gridDim = params.num_ctas;
  config.blockDim = Config::kThreads;
  config.dynamicSmemBytes = sizeof(SharedStorage<Element, Config>);
  launch_dependent(attention_backward<Element, Config>, params, config, params.cyclic);

  config.gridDim = tiles;
  config.blockDim = Config::kMmaThreads;
  config.dynamicSmemBytes = 0;
  launch_dependent(convert_dq<Element, Config>, params, config);

  if (args.problem.group_split == 1) return;
  config.gridDim = static_cast<int>(args.problem.chains() / args.problem.group_split);
  launch_dependent(sum_kv_parts<Element, Config>, params, config);
}

}  // namespace dash
