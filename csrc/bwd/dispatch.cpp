// From a runtime problem to a compiled kernel: checks what the kernels assume, then calls the
// instantiation for (dtype, head dimension bucket).
#include <limits>
#include <stdexcept>
#include <string>

#include "config.h"
#include "kernels.h"
#include "launch.h"

namespace dash {

namespace {

constexpr size_t kWorkspaceAlignment = 128;  // of bulk copies; its parts lie 1,024 bytes apart

[[noreturn]] void reject(std::string const& what) { throw std::invalid_argument("dash: " + what); }

}  // namespace

HeadDims head_dims_bucket(HeadDims d) {
  auto const check = [](int head_dim, int most, char const* name) {
    if (head_dim < 8 || head_dim > most || head_dim % 8 != 0)
      reject(std::string(name) + " is " + std::to_string(head_dim) +
             "; wanted a multiple of 8 from 8 to " + std::to_string(most));
  };
  check(d.qk, kMaxHeadDims.qk, "head_dim");
  check(d.v, kMaxHeadDims.v, "head_dim_v");
  return bucket_of(d);
}

TileShape tile_shape(HeadDims head_dims) {
  return visit_config(head_dims_bucket(head_dims),
                      [](auto config) { return TileShape{config.kTileQ, config.kTileKv}; });
}

size_t workspace_bytes(BackwardArgs const& args) {
  Problem const& p = args.problem;
  HeadDims const bucket = head_dims_bucket(args.head_dims);
  return static_cast<size_t>(
      WorkspaceLayout(workspace_sizes(args), p.tile_q, p.tile_kv, bucket).bytes);
}

#ifdef DASH_WITH_KERNELS

namespace {

// What TMA asks of a tensor map, and vector loads and stores of a row: 16-byte aligned address and
// strides. The stride of a dimension with one element is never used.
void check_vectors(TensorView const& t, char const* name, int batch, int rows, int heads) {
  if (t.data == nullptr) reject(std::string(name) + " has a null address");
  if (reinterpret_cast<uintptr_t>(t.data) % 16 != 0)
    reject(std::string(name) + " must start at a 16-byte aligned address");
  auto const check_stride = [&](int64_t stride, int size) {
    if (size > 1 && (stride % 8 != 0 || stride <= 0))
      reject(std::string(name) + " has stride " + std::to_string(stride) +
             "; wanted a positive multiple of 8 elements");
  };
  check_stride(t.batch_stride, batch);
  check_stride(t.seq_stride, rows);
  check_stride(t.head_stride, heads);
}

void check_packed(PackedSequences const& s) {
  if (s.cu_seqlens_q == nullptr) reject("cu_seqlens_q has a null address");
  if (s.cu_seqlens_k == nullptr) reject("cu_seqlens_k has a null address");
  auto const check_total = [](int total, char const* name) {
    if (total < 0 || total >= kMaxTotalRows)
      reject(std::string(name) + " is " + std::to_string(total) + "; wanted less than " +
             std::to_string(kMaxTotalRows));
  };
  check_total(s.total_q, "total_q");
  check_total(s.total_k, "total_k");
}

void check(BackwardArgs const& args) {
  Problem const& p = args.problem;
  TileShape const tiles = tile_shape(args.head_dims);
  if (p.tile_q != tiles.q || p.tile_kv != tiles.kv)
    reject("problem has tiles " + std::to_string(p.tile_q) + " x " + std::to_string(p.tile_kv) +
           "; the kernel for head_dim " + std::to_string(args.head_dims.qk) + " and head_dim_v " +
           std::to_string(args.head_dims.v) + " has " + std::to_string(tiles.q) + " x " +
           std::to_string(tiles.kv));
  WorkspaceSizes const sizes = workspace_sizes(args);
  constexpr int64_t kMost = std::numeric_limits<int>::max();
  if (p.chains() > kMost || sizes.dq_tiles > kMost || sizes.parts_tiles > kMost)
    reject("problem has more than 2^31 - 1 tiles");
  if (args.packed.batch > 0) check_packed(args.packed);
  check_vectors(args.q, "q", p.batch, p.seqlen_q, p.heads);
  check_vectors(args.k, "k", p.batch, p.seqlen_k, p.kv_heads);
  check_vectors(args.v, "v", p.batch, p.seqlen_k, p.kv_heads);
  check_vectors(args.dout, "dout", p.batch, p.seqlen_q, p.heads);
  check_vectors(args.out, "out", p.batch, p.seqlen_q, p.heads);  // read sixteen bytes at a time
  check_vectors(args.dq, "dq", p.batch, p.seqlen_q, p.heads);    // written sixteen bytes at a time
  check_vectors(args.dk, "dk", p.batch, p.seqlen_k, p.kv_heads);
  check_vectors(args.dv, "dv", p.batch, p.seqlen_k, p.kv_heads);
  if (args.lse.data == nullptr || reinterpret_cast<uintptr_t>(args.lse.data) % sizeof(float) != 0)
    reject("softmax_lse must start at a 4-byte aligned address");
  if (reinterpret_cast<uintptr_t>(args.dlse.data) % sizeof(float) != 0)
    reject("dlse must start at a 4-byte aligned address");
  size_t const needed = workspace_bytes(args);
  if (args.workspace == nullptr || args.workspace_bytes < needed)
    reject("workspace has " + std::to_string(args.workspace_bytes) + " bytes; wanted " +
           std::to_string(needed));
  if (reinterpret_cast<uintptr_t>(args.workspace) % kWorkspaceAlignment != 0)
    reject("workspace must start at a " + std::to_string(kWorkspaceAlignment) +
           "-byte aligned address");
}

}  // namespace

namespace {

CompiledKernel const& kernel_for(DType dtype, HeadDims head_dims) {
  HeadDims const bucket = head_dims_bucket(head_dims);
  bool const bf16 = dtype == DType::kBFloat16;
  if (bucket == HeadDims{64, 64}) return bf16 ? kBf16D64 : kFp16D64;
  if (bucket == HeadDims{128, 128}) return bf16 ? kBf16D128 : kFp16D128;
  return bf16 ? kBf16D192V128 : kFp16D192V128;
}

}  // namespace

void backward(BackwardArgs const& args) {
  check(args);
  kernel_for(args.dtype, args.head_dims).backward(args);
}

int resident_ctas(int device, DType dtype, HeadDims head_dims) {
  return kernel_for(dtype, head_dims).resident_ctas(device);
}

// Without kernels backward() and resident_ctas() do not exist: the bindings say what is missing.
#endif

}  // namespace dash
