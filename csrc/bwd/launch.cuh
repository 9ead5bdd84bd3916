// Host side of one instantiation: tensor maps, workspace, the launches.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <cmath>
#include <stdexcept>
#include <string>

#include "../schedule/describe.h"
#include "convert_dq.cuh"
#include "device_context.h"
#include "kernel.cuh"
#include "kernels.h"
#include "kv_parts.cuh"
#include "launch.h"
#include "preprocess.cuh"

namespace dash {

// Of a dense tensor: (head_dim, row, batch, 1, head). Batch and head are dimensions of their own,
// so that a box past the end of a sequence reads zeros and never a neighbour. Of a packed one:
// tma.cuh.
struct TensorMapShape {
  cuuint64_t sizes[kTensorRank];
  cuuint64_t strides[kTensorRank - 1];  // bytes
};

inline TensorMapShape dense_shape(TensorView const& t, int head_dim, int rows, int heads, int batch,
                                  int element_bytes) {
  auto const u64 = [](int64_t x) { return static_cast<cuuint64_t>(x); };
  // The stride of a dimension with one element may be anything, except to the encoder.
  auto const bytes = [&](int64_t stride, int size) {
    return size > 1 ? u64(stride * element_bytes) : cuuint64_t{16};
  };
  return {
      {u64(head_dim), u64(rows), u64(batch), 1, u64(heads)},
      {bytes(t.seq_stride, rows), bytes(t.batch_stride, batch), 16, bytes(t.head_stride, heads)}};
}

inline TensorMapShape packed_shape(TensorView const& t, int head_dim, int heads,
                                   int element_bytes) {
  cuuint64_t const row = static_cast<cuuint64_t>(t.seq_stride) * element_bytes;
  cuuint64_t const head = heads > 1 ? static_cast<cuuint64_t>(t.head_stride) * element_bytes : 16;
  constexpr cuuint64_t kRows = kPackedRows;
  return {
      {static_cast<cuuint64_t>(head_dim), kRows, kRows, kRows + 1, static_cast<cuuint64_t>(heads)},
      {row, row, (cuuint64_t{1} << 34) - row, head}};
}

template <typename Element>
CUtensorMap tensor_map(TensorView const& t, TensorMapShape const& shape, int box_rows,
                       int box_columns = 64) {
  constexpr CUtensorMapDataType kType = std::is_same_v<Element, cutlass::half_t>
                                            ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
                                            : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  cuuint32_t const box[kTensorRank] = {static_cast<cuuint32_t>(box_columns),
                                       static_cast<cuuint32_t>(box_rows), 1, 1, 1};
  cuuint32_t const steps[kTensorRank] = {1, 1, 1, 1, 1};
  CUtensorMapSwizzle const swizzle =
      box_columns == 64 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B;
  CUtensorMap map;
  auto const encode = Driver::get().tensor_map_encode_tiled;
  check_driver(encode(&map, kType, kTensorRank, t.data, shape.sizes, shape.strides, box, steps,
                      CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                      CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE),
               "cuTensorMapEncodeTiled");
  return map;
}

template <typename T>
T* at(void* workspace, int64_t offset) {
  return reinterpret_cast<T*>(static_cast<char*>(workspace) + offset);
}

template <typename Config>
CallParams call_params(BackwardArgs const& args) {
  Problem const& p = args.problem;
  WorkspaceSizes const sizes = workspace_sizes(args);
  WorkspaceLayout const layout(sizes, p.tile_q, p.tile_kv, Config::kHeadDims);
  int* const header = at<int>(args.workspace, layout.table_header);
  bool const split = sizes.parts_tiles > 0;
  CallParams params{.problem = p,
                    .packed = args.packed,
                    .table = {.num_tickets = header,
                              .malformed = header + 1,
                              .first_tickets = at<int>(args.workspace, layout.first_tickets),
                              .records = at<SequenceRecord>(args.workspace, layout.records),
                              .group_splits = at<int>(args.workspace, layout.group_splits)},
                    .dq_tiles_of_head = p.q_tiles(),
                    .kv_tiles_of_head = p.kv_tiles(),
                    .head_dims = args.head_dims,
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
                    .dealer = {.next = at<int>(args.workspace, layout.next),
                               .arrivals = at<int>(args.workspace, layout.arrivals),
                               .mode = at<int>(args.workspace, layout.mode),
                               .taken = at<int>(args.workspace, layout.taken)}};
  if (params.is_packed()) {
    params.dq_tiles_of_head = numbered_tiles(args.packed.total_q, args.packed.batch, p.tile_q);
    params.kv_tiles_of_head = numbered_tiles(args.packed.total_k, args.packed.batch, p.tile_kv);
  }
  return params;
}

// KV tiles that no row sees are the first ones.
inline bool has_unseen_kv_tiles(Problem const& p) { return p.q_tiles_of(0) == 0; }

// softmax_scale where something is divided by it: smaller magnitudes leave S the same 0, and lse
// times their inverse would overflow.
inline float scale_to_divide_by(float softmax_scale) {
  constexpr float kSmallest = 1e-30f;
  return std::abs(softmax_scale) < kSmallest ? std::copysign(kSmallest, softmax_scale)
                                             : softmax_scale;
}

template <typename Config>
PreprocessParams preprocess_params(CallParams const& call, BackwardArgs const& args,
                                   int resident_ctas) {
  Problem const& p = args.problem;
  PreprocessParams params{};
  static_cast<CallParams&>(params) = call;
  params.out = args.out;
  params.dout = args.dout;
  params.lse = args.lse;
  params.dlse = args.dlse;
  params.lse_factor =
      Config::kScoresFromLse ? -1.f / scale_to_divide_by(args.softmax_scale) : kLog2E;
  params.choose_strategy = args.choose_strategy;
  params.strategy = args.strategy;
  params.group_split = args.group_split;
  params.resident_ctas = resident_ctas;
  params.squads = call.is_packed() ? 0 : kMostSquads;
  if (call.is_packed()) {  // one tile more a tensor: the rows behind the last sequence
    params.q_blocks =
        p.heads * numbered_tiles(args.packed.total_q, args.packed.batch + 1, p.tile_q);
    params.kv_blocks = numbered_tiles(args.packed.total_k, args.packed.batch + 1, p.tile_kv);
  } else {
    params.q_blocks = static_cast<int>(p.q_tiles_total());
    params.kv_blocks = has_unseen_kv_tiles(p) ? p.batch * p.kv_tiles() : 0;
  }
  return params;
}

template <typename Element, typename Config>
MainParams main_params(CallParams const& call, BackwardArgs const& args) {
  Problem const& p = args.problem;
  auto const shape = [&](TensorView const& t, int head_dim, int rows, int heads) {
    constexpr int kBytes = sizeof(Element);
    return call.is_packed() ? packed_shape(t, head_dim, heads, kBytes)
                            : dense_shape(t, head_dim, rows, heads, p.batch, kBytes);
  };
  HeadDims const dims = args.head_dims;
  MainParams params{};
  static_cast<CallParams&>(params) = call;
  params.q =
      tensor_map<Element>(args.q, shape(args.q, dims.qk, p.seqlen_q, p.heads), Config::kTileQ);
  params.dout =
      tensor_map<Element>(args.dout, shape(args.dout, dims.v, p.seqlen_q, p.heads), Config::kTileQ);
  params.k = tensor_map<Element>(args.k, shape(args.k, dims.qk, p.seqlen_k, p.kv_heads),
                                 Config::kTileKv, Config::kKBoxColumns);
  params.v =
      tensor_map<Element>(args.v, shape(args.v, dims.v, p.seqlen_k, p.kv_heads), Config::kTileKv);
  params.strategy = args.strategy;
  params.scale_log2 = kLog2E * (Config::kScoresFromLse ? scale_to_divide_by(args.softmax_scale)
                                                       : args.softmax_scale);
  if (!call.is_packed())
    visit_schedule(args.strategy, p, [&](auto const& schedule) {
      params.num_tickets = schedule.num_tickets();
      params.num_circles = schedule.num_circles();
      params.squad_size = schedule.largest_circle();
    });
  return params;
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
// wait_for_previous_kernel() itself.
template <typename Kernel, typename Params>
void launch_dependent(Kernel* kernel, Params const& params, cudaLaunchConfig_t config) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &attribute;
  config.numAttrs = 1;
  DASH_CHECK_CUDA(cudaLaunchKernelEx(&config, kernel, params));
}

// The grid of the main kernel, or a refusal before anything is enqueued. `resident`: CTAs that the
// context holds; `model`: that the device does, for which `auto` chooses.
inline int main_grid(BackwardArgs const& args, int resident, int model) {
  if (args.packed.batch == 0) {
    return visit_schedule(args.strategy, args.problem, [&](auto const& schedule) {
      Refusal const refusal = schedule.why_not(args.problem, resident);
      if (refusal) throw std::invalid_argument("dash: " + describe(refusal, schedule.kName));
      int const grid = schedule.num_ctas(resident);
      int const squad = schedule.largest_circle();
      if (squad > 1 && grid / squad >= kMostSquads)
        throw std::invalid_argument("dash: " + std::to_string(grid) +
                                    " CTAs are more than the dealer has squads for");
      return grid;
    });
  }
  int const wanted =
      largest_circle_of_pack(args.problem, args.choose_strategy, args.strategy, model);
  if (resident < wanted)
    throw std::invalid_argument("dash: a packed call needs " + std::to_string(wanted) +
                                " CTAs resident together because chains may wait for each other, "
                                "got " +
                                std::to_string(resident));
  return resident;
}

template <typename Element, typename Config>
void launch_backward(BackwardArgs const& args) {
  ContextGuard const guard(args.device, args.stream);
  int const here = resident_main_ctas<Element, Config>();
  int const ctas = args.max_ctas > 0 && args.max_ctas < here ? args.max_ctas : here;
  int const model = args.resident_ctas > 0 ? args.resident_ctas : here;
  int const grid = main_grid(args, ctas, model);
  CallParams const call = call_params<Config>(args);
  PreprocessParams const before = preprocess_params<Config>(call, args, model);
  MainParams const params = main_params<Element, Config>(call, args);
  auto const stream = static_cast<cudaStream_t>(args.stream);

  int const blocks = before.q_blocks + before.kv_blocks;
  if (call.is_packed())
    preprocess_packed<Element, Config><<<blocks + 1, kPreprocessThreads, 0, stream>>>(before);
  else
    preprocess_dense<Element, Config><<<blocks, kPreprocessThreads, 0, stream>>>(before);
  DASH_CHECK_CUDA(cudaGetLastError());

  cudaLaunchConfig_t config{};
  config.stream = stream;
  config.gridDim = grid;
  config.blockDim = Config::kThreads;
  config.dynamicSmemBytes = sizeof(SharedStorage<Element, Config>);
  launch_dependent(attention_backward<Element, Config>, params, config);

  Problem const& p = args.problem;
  config.gridDim = p.batch * p.heads * call.dq_tiles_of_head;
  config.blockDim = Config::kMmaThreads;
  config.dynamicSmemBytes = 0;
  launch_dependent(convert_dq<Element, Config>, call, config);

  if (call.dk_parts == nullptr) return;
  config.gridDim = p.batch * p.kv_heads * call.kv_tiles_of_head;
  launch_dependent(sum_kv_parts<Element, Config>, call, config);
}

template <typename Element, typename Config>
constexpr CompiledKernel compiled_kernel() {
  return {launch_backward<Element, Config>, resident_ctas_of<Element, Config>};
}

}  // namespace dash
