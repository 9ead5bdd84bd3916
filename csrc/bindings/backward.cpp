// The backward pass: addresses, strides and sizes in, errors out.
#include <cstdint>
#include <tuple>

#include "../bwd/launch.h"
#include "backward_args.h"
#include "keywords.h"

namespace dash {
namespace {

#ifdef DASH_WITH_KERNELS
constexpr bool kHasKernels = true;
#else
constexpr bool kHasKernels = false;
#endif

DType dtype_named(std::string const& name) {
  if (name == "bfloat16") return DType::kBFloat16;
  if (name == "float16") return DType::kFloat16;
  throw wrong("dtype", "'" + name + "'", "'bfloat16' or 'float16'");
}

TensorView take_view(Keywords& keywords, char const* name, bool batched) {
  if (batched) {
    using Batched = std::tuple<uintptr_t, int64_t, int64_t, int64_t>;
    auto const [data, batch_stride, seq_stride, head_stride] = keywords.take<Batched>(name);
    return {reinterpret_cast<void*>(data), batch_stride, seq_stride, head_stride};
  }
  using Packed = std::tuple<uintptr_t, int64_t, int64_t>;
  auto const [data, row_stride, head_stride] = keywords.take<Packed>(name);
  return {reinterpret_cast<void*>(data), 0, row_stride, head_stride};
}

LseView take_lse(Keywords& keywords, bool batched) {
  if (batched) {
    using Batched = std::tuple<uintptr_t, int64_t, int64_t, int64_t>;
    auto const [data, batch_stride, head_stride, seq_stride] = keywords.take<Batched>("lse");
    return {reinterpret_cast<float const*>(data), batch_stride, head_stride, seq_stride};
  }
  using Packed = std::tuple<uintptr_t, int64_t, int64_t>;
  auto const [data, head_stride, row_stride] = keywords.take<Packed>("lse");
  return {reinterpret_cast<float const*>(data), 0, head_stride, row_stride};
}

void require_kernels(char const* function) {
  if (!kHasKernels) {
    throw std::runtime_error(std::string("dash._C.") + function +
                             "() needs the CUDA kernels, and this dash was built without nvcc; "
                             "rebuild it where nvcc 12.5 or later is on PATH");
  }
}

void call_backward(py::kwargs const& kwargs) {
  Keywords keywords("backward", kwargs);
  BackwardArgs args;
  args.problem = keywords.take<Problem>("problem");
  args.strategy = strategy_named(keywords.take<std::string>("strategy"));
  args.head_dim = keywords.take<int>("head_dim");
  take_tensors(keywords, args, /*batched=*/true);
  take_launch(keywords, args);
  keywords.expect_empty();
  enqueue(args, "backward");
}

size_t dense_workspace_bytes(Problem const& problem, int head_dim) {
  BackwardArgs args;
  args.problem = problem;
  args.head_dim = head_dim;
  return workspace_bytes(args);
}

int call_resident_ctas(int device, std::string const& dtype, int head_dim) {
  DType const type = dtype_named(dtype);
  require_kernels("resident_ctas");
  if constexpr (kHasKernels) {
    py::gil_scoped_release release;
    return resident_ctas(device, type, head_dim);
  }
  return 0;
}

}  // namespace

void take_tensors(Keywords& keywords, BackwardArgs& args, bool batched) {
  args.q = take_view(keywords, "q", batched);
  args.k = take_view(keywords, "k", batched);
  args.v = take_view(keywords, "v", batched);
  args.out = take_view(keywords, "out", batched);
  args.dout = take_view(keywords, "dout", batched);
  args.lse = take_lse(keywords, batched);
  args.dq = take_view(keywords, "dq", batched);
  args.dk = take_view(keywords, "dk", batched);
  args.dv = take_view(keywords, "dv", batched);
}

void take_launch(Keywords& keywords, BackwardArgs& args) {
  args.dtype = dtype_named(keywords.take<std::string>("dtype"));
  args.softmax_scale = keywords.take<float>("softmax_scale");
  args.workspace = reinterpret_cast<void*>(keywords.take<uintptr_t>("workspace"));
  args.workspace_bytes = keywords.take<size_t>("workspace_bytes");
  args.device = keywords.take<int>("device");
  args.stream = reinterpret_cast<void*>(keywords.take<uintptr_t>("stream"));
  if (keywords.has("max_ctas")) {
    args.max_ctas = positive("max_ctas", keywords.take<int>("max_ctas"));
  }
}

void enqueue(BackwardArgs const& args, char const* function) {
  require_kernels(function);
  if constexpr (kHasKernels) {
    py::gil_scoped_release release;
    backward(args);
  }
}

void bind_backward(py::module_& m) {
  m.attr("HAS_KERNELS") = kHasKernels;
  m.def("head_dim_bucket", &head_dim_bucket, py::arg("head_dim"));
  m.def(
      "tile_shape",
      [](int head_dim) {
        TileShape const tile = tile_shape(head_dim);
        return std::make_tuple(tile.q, tile.kv);
      },
      py::arg("head_dim"), "(tile_q, tile_kv) of the kernel compiled for a head dimension.");
  m.def("workspace_bytes", &dense_workspace_bytes, py::arg("problem"), py::arg("head_dim"));
  m.def("resident_ctas", &call_resident_ctas, py::arg("device_index"), py::arg("dtype"),
        py::arg("head_dim"), "CTAs of the main kernel that are resident together on the device.");
  m.def(
      "backward", &call_backward,
      "Enqueues the backward pass. Keywords: problem, strategy, dtype, head_dim, softmax_scale; "
      "q, k, v, out, dout, dq, dk, dv as (address, batch_stride, seq_stride, head_stride) and lse "
      "as (address, batch_stride, head_stride, seq_stride), in elements; workspace, "
      "workspace_bytes, device, stream; optional max_ctas, which bounds the main kernel's grid.");
}

}  // namespace dash
