// The backward pass as the host calls it: addresses, strides and sizes in, errors out as
// exceptions. Knows no Python and no Torch; needs no GPU or driver to be compiled, linked or
// loaded.
#pragma once

#include <cstddef>
#include <cstdint>

#include "../schedule/problem.h"
#include "../schedule/strategy.h"

namespace dash {

enum class DType : int { kBFloat16, kFloat16 };

// A (batch, seqlen, heads, head_dim) tensor in device memory; strides in elements, last dimension
// contiguous. Inputs that TMA reads (q, k, v, dout) need a 16-byte aligned address and strides that
// are multiples of 8 elements.
struct TensorView {
  void* data = nullptr;
  int64_t batch_stride = 0;
  int64_t seq_stride = 0;
  int64_t head_stride = 0;
};

struct LseView {  // (batch, heads, seqlen_q) fp32, strides in elements
  float const* data = nullptr;
  int64_t batch_stride = 0;
  int64_t head_stride = 0;
  int64_t seq_stride = 0;
};

// Columns of q, k, dq and dk, and of v, out, dout and dv.
struct HeadDims {
  int qk = 0;
  int v = 0;
  friend constexpr bool operator==(HeadDims const&, HeadDims const&) = default;
};

// Sequences packed one behind the other along the rows of (total, heads, head_dim) tensors. All
// addresses are device memory and read by the kernels alone: the host never knows a length.
struct PackedSequences {
  int batch = 0;
  int total_q = 0, total_k = 0;
  int const* cu_seqlens_q = nullptr;  // (batch + 1), from 0, not decreasing, at most total_q
  int const* cu_seqlens_k = nullptr;
  int const* seqused_q = nullptr;  // (batch) rows in use of each sequence; null: all
  int const* seqused_k = nullptr;
};

struct BackwardArgs {
  // tile_q and tile_kv as tile_shape(head_dims) gives them. Of a packed call batch 1 and, as
  // lengths, the totals; the window as given.
  Problem problem;
  PackedSequences packed;        // batch 0: a dense call
  bool choose_strategy = false;  // of a packed call: `auto` for each sequence, and group_split 0
  int group_split = 0;           // of a packed call
  int resident_ctas = 0;         // for which `auto` chooses; 0: those of the stream's context
  Strategy strategy{};
  DType dtype = DType::kBFloat16;
  HeadDims head_dims;
  float softmax_scale = 0.f;
  TensorView q, k, v, out, dout;  // read
  LseView lse;                    // read
  LseView dlse;                   // read: a gradient of lse, which enters as delta - dlse; or null
  TensorView dq, dk, dv;          // written
  void* workspace = nullptr;      // device memory, 128-byte aligned, workspace_bytes() long
  size_t workspace_bytes = 0;
  int device = 0;          // the device all addresses belong to; need not be the current one
  void* stream = nullptr;  // a cudaStream_t of that device
  int max_ctas = 0;  // of the main kernel's grid; 0: as many as are resident. Never changes bits
};

struct TileShape {
  int q;
  int kv;
};

// The kernel compiled for head dimensions: the bucket that holds them (64:64, 128:128 or 192:128)
// and its tiles.
HeadDims head_dims_bucket(HeadDims head_dims);
TileShape tile_shape(HeadDims head_dims);

// Bytes of device memory that backward() needs for its own use: the fp32 dQ sums, delta, lse·log2
// e, the turn counters and the sequence table. Linear in tokens and sequences. Reads problem,
// packed, choose_strategy, group_split and head_dims.
size_t workspace_bytes(BackwardArgs const& args);

// Enqueues the whole backward pass on args.stream and returns without synchronising. Throws
// std::invalid_argument for a problem it cannot run and std::runtime_error for a failed CUDA call,
// before anything was enqueued where that can be known.
void backward(BackwardArgs const& args);

// CTAs of the main kernel that are resident together on `device`: what cyclic schedules may count
// on.
int resident_ctas(int device, DType dtype, HeadDims head_dims);

}  // namespace dash
