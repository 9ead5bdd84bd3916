// The backward pass: addresses, strides and sizes in, errors out.
#include <cstdint>
#include <optional>
#include <tuple>

#include "../bwd/launch.h"
#include "backward_args.h"
#include "keywords.h"

namespace dash {
namespace {

#ifdef DASH_WITH_KERNELS
constexpr bool kHasKernels = true;
constexpr char const* kCudaVersion = DASH_CUDA_VERSION;
#else
constexpr bool kHasKernels = false;
constexpr char const* kCudaVersion = "";
#endif

DType dtype_named(std::string const& name) {
  if (name == "bfloat16") return DType::kBFloat16;
  if (name == "float16") return DType::kFloat16;
  throw wrong("dtype", "'" + name + "'", "'bfloat16' or 'float16'");
}

HeadDims head_dims_of(int head_dim, std::optional<int> head_dim_v) {
  return {head_dim, head_dim_v.value_or(head_dim)};
}

using Packed = std::tuple<uintptr_t, int64_t, int64_t>;

TensorView take_view(Keywords& keywords, char const* name) {
  auto const [data, row_stride, head_stride] = keywords.take<Packed>(name);
  return {reinterpret_cast<void*>(data), 0, row_stride, head_stride};
}

LseView take_lse(Keywords& keywords, char const* name) {
  auto const [data, head_stride, row_stride] = keywords.take<Packed>(name);
  return {reinterpret_cast<float const*>(data), 0, head_stride, row_stride};
}

void require_kernels(char const* function) {
  if (!kHasKernels) {
    throw std::runtime_error(std::string("dash._C.") + function +
                             "() needs the CUDA kernels, and this dash was built without nvcc; "
                             "rebuild it where nvcc 12.5 or later is on PATH");
  }
}

using Batched = std::tuple<uintptr_t, int64_t, int64_t, int64_t>;

TensorView view_of(Batched const& t) {
  auto const [data, batch_stride, seq_stride, head_stride] = t;
  return {reinterpret_cast<void*>(data), batch_stride, seq_stride, head_stride};
}

LseView lse_view_of(Batched const& t) {
  auto const [data, batch_stride, head_stride, seq_stride] = t;
  return {reinterpret_cast<float const*>(data), batch_stride, head_stride, seq_stride};
}

// By position on the way from dash.ops: to look a keyword up takes longer than to check its value.
void call_backward(Problem const& problem, std::string const& strategy, std::string const& dtype,
                   int head_dim, float softmax_scale, Batched const& q, Batched const& k,
                   Batched const& v, Batched const& out, Batched const& dout, Batched const& lse,
                   Batched const& dq, Batched const& dk, Batched const& dv, uintptr_t workspace,
                   size_t workspace_bytes, int device, uintptr_t stream,
                   std::optional<int> max_ctas, std::optional<Batched> const& dlse,
                   std::optional<int> head_dim_v) {
  BackwardArgs args;
  args.problem = problem;
  args.strategy = strategy_named(strategy);
  args.dtype = dtype_named(dtype);
  args.head_dims = head_dims_of(head_dim, head_dim_v);
  args.softmax_scale = softmax_scale;
  args.q = view_of(q);
  args.k = view_of(k);
  args.v = view_of(v);
  args.out = view_of(out);
  args.dout = view_of(dout);
  args.lse = lse_view_of(lse);
  if (dlse) args.dlse = lse_view_of(*dlse);
  args.dq = view_of(dq);
  args.dk = view_of(dk);
  args.dv = view_of(dv);
  args.workspace = reinterpret_cast<void*>(workspace);
  args.workspace_bytes = workspace_bytes;
  args.device = device;
  args.stream = reinterpret_cast<void*>(stream);
  if (max_ctas) args.max_ctas = positive("max_ctas", *max_ctas);
  enqueue(args, "backward");
}

size_t dense_workspace_bytes(Problem const& problem, int head_dim, std::optional<int> head_dim_v) {
  BackwardArgs args;
  args.problem = problem;
  args.head_dims = head_dims_of(head_dim, head_dim_v);
  return workspace_bytes(args);
}

int call_resident_ctas(int device, std::string const& dtype, int head_dim,
                       std::optional<int> head_dim_v) {
  DType const type = dtype_named(dtype);
  require_kernels("resident_ctas");
  if constexpr (kHasKernels) {
    py::gil_scoped_release release;
    return resident_ctas(device, type, head_dims_of(head_dim, head_dim_v));
  }
  return 0;
}

}  // namespace

void take_tensors(Keywords& keywords, BackwardArgs& args) {
  args.q = take_view(keywords, "q");
  args.k = take_view(keywords, "k");
  args.v = take_view(keywords, "v");
  args.out = take_view(keywords, "out");
  args.dout = take_view(keywords, "dout");
  args.lse = take_lse(keywords, "lse");
  if (keywords.has("dlse")) args.dlse = take_lse(keywords, "dlse");
  args.dq = take_view(keywords, "dq");
  args.dk = take_view(keywords, "dk");
  args.dv = take_view(keywords, "dv");
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
  m.attr("CUDA_VERSION") = kCudaVersion;
  auto const head_dim_v = py::arg("head_dim_v") = py::none();  // None: that of q and k
  m.def(
      "head_dim_bucket",
      [](int head_dim, std::optional<int> v) {
        HeadDims const bucket = head_dims_bucket(head_dims_of(head_dim, v));
        return std::make_tuple(bucket.qk, bucket.v);
      },
      py::arg("head_dim"), head_dim_v,
      "Head dimensions of q and k and of v that the kernel for these is compiled for.");
  m.def(
      "tile_shape",
      [](int head_dim, std::optional<int> v) {
        TileShape const tile = tile_shape(head_dims_of(head_dim, v));
        return std::make_tuple(tile.q, tile.kv);
      },
      py::arg("head_dim"), head_dim_v,
      "(tile_q, tile_kv) of the kernel compiled for head dimensions.");
  m.def("workspace_bytes", &dense_workspace_bytes, py::arg("problem"), py::arg("head_dim"),
        head_dim_v);
  m.def("resident_ctas", &call_resident_ctas, py::arg("device_index"), py::arg("dtype"),
        py::arg("head_dim"), head_dim_v,
        "CTAs of the main kernel that are resident together on the device.");
  m.def("backward", &call_backward, py::arg("problem"), py::arg("strategy"), py::arg("dtype"),
        py::arg("head_dim"), py::arg("softmax_scale"), py::arg("q"), py::arg("k"), py::arg("v"),
        py::arg("out"), py::arg("dout"), py::arg("lse"), py::arg("dq"), py::arg("dk"),
        py::arg("dv"), py::arg("workspace"), py::arg("workspace_bytes"), py::arg("device"),
        py::arg("stream"), py::arg("max_ctas") = py::none(), py::arg("dlse") = py::none(),
        head_dim_v,
        "Enqueues the backward pass. q, k, v, out, dout, dq, dk, dv are (address, batch_stride, "
        "seq_stride, head_stride), lse and dlse (address, batch_stride, head_stride, seq_stride), "
        "in elements; dlse is a gradient of lse, or None; max_ctas bounds the main kernel's grid. "
        "Private to dash: addresses and strides "
        "are checked for what the kernels need, and trusted to lie inside tensors.");
}

}  // namespace dash
