// Host side of one instantiation: tensor maps, workspace, the launches.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <stdexcept>
#include <string>

#include "../schedule/any_schedule.h"
#include "../schedule/describe.h"
#include "convert_dq.cuh"
#include "device_context.h"
#include "kernel.cuh"
#include "kv_parts.cuh"
#include "launch.h"
#include "preprocess.cuh"

namespace dash {

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
  auto const encode = Driver::get().tensor_map_encode_tiled;
  check_driver(encode(&map, kType, kRank, t.data, sizes, strides, box, steps,
                      CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                      CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE),
               "cuTensorMapEncodeTiled");
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

// CTAs of the main kernel that the current context holds together.
template <typename Element, typename Config>
int resident_main_ctas() {
  return resident_ctas_here(reinterpret_cast<void const*>(attention_backward<Element, Config>),
                            Config::kThreads, sizeof(SharedStorage<Element, Config>));
}

template <typename Element, typename Config>
int resident_ctas_of(int device) {
  ContextGuard const guard(device, /*stream=*/nullptr);
  return resident_main_ctas<Element, Config>();
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
  ContextGuard const guard(args.device, args.stream);
  int const resident = resident_main_ctas<Element, Config>();
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
