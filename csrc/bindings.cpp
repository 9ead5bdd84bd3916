// The module dash._C: structs of addresses and sizes in, errors out. The only file that knows
// Python; it includes no Torch header, so one build serves every torch release.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <climits>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bwd/launch.h"
#include "schedule/describe.h"
#include "schedule/strategies.h"

namespace py = pybind11;

namespace dash {
namespace {

#ifdef DASH_WITH_KERNELS
constexpr bool kHasKernels = true;
#else
constexpr bool kHasKernels = false;
#endif

// Lengths stay so far below INT_MAX that a tile index times a tile size cannot overflow.
constexpr int kMaxSeqlen = 1 << 30;

// (batch, kv_head, kv_tile, [(q_tile, turn), …])
using ChainOut = std::tuple<int, int, int, std::vector<std::pair<int, int>>>;

std::invalid_argument wrong(std::string const& name, std::string const& given,
                            std::string const& wanted) {
  return std::invalid_argument(name + " must be " + wanted + ", got " + given);
}

int positive(char const* name, int value, int limit = INT_MAX) {
  if (value <= 0) throw wrong(name, std::to_string(value), "positive");
  if (value > limit) {
    throw wrong(name, std::to_string(value), "at most " + std::to_string(limit));
  }
  return value;
}

// Keyword arguments by name; every error names the argument.
class Keywords {
 public:
  Keywords(char const* function, py::kwargs kwargs)
      : function_(function), left_(std::move(kwargs)) {}

  template <typename T>
  T take(char const* name) {
    if (!left_.contains(name)) {
      throw py::type_error(std::string(function_) + "() needs the keyword argument '" + name + "'");
    }
    py::object const value = left_.attr("pop")(name);
    try {
      return value.cast<T>();
    } catch (py::cast_error const&) {
      throw wrong(std::string(function_) + "() argument '" + name + "'",
                  std::string(py::repr(value)), "a " + py::type_id<T>());
    }
  }

  bool has(char const* name) const { return left_.contains(name); }

  void expect_empty() const {
    for (auto const& item : left_) {
      throw py::type_error(std::string(function_) + "() got an unexpected keyword argument " +
                           std::string(py::repr(item.first)));
    }
  }

 private:
  char const* function_;
  py::dict left_;
};

Problem make_problem(py::kwargs const& kwargs) {
  Keywords keywords("Problem", kwargs);
  auto take_positive = [&](char const* name, int limit = INT_MAX) {
    return positive(name, keywords.take<int>(name), limit);
  };
  Problem p;
  p.batch = take_positive("batch");
  p.heads = take_positive("heads");
  p.kv_heads = take_positive("kv_heads");
  p.seqlen_q = take_positive("seqlen_q", kMaxSeqlen);
  p.seqlen_k = take_positive("seqlen_k", kMaxSeqlen);
  p.causal = keywords.take<bool>("causal");
  p.tile_q = take_positive("tile_q", 1 << 16);
  p.tile_kv = take_positive("tile_kv", 1 << 16);
  if (keywords.has("group_split")) p.group_split = take_positive("group_split");
  keywords.expect_empty();
  if (p.heads % p.kv_heads != 0) {
    throw wrong("heads", std::to_string(p.heads),
                "a multiple of kv_heads (" + std::to_string(p.kv_heads) + ")");
  }
  if (p.kv_heads % p.group_split != 0) {
    throw wrong("kv_heads", std::to_string(p.kv_heads),
                "a multiple of group_split (" + std::to_string(p.group_split) + ")");
  }
  if (p.tile_kv % p.tile_q != 0) {
    throw wrong("tile_kv", std::to_string(p.tile_kv),
                "a multiple of tile_q (" + std::to_string(p.tile_q) + ")");
  }
  if (p.chains() > INT_MAX) {
    throw wrong("batch * kv_heads * kv_tiles", std::to_string(p.chains()),
                "at most " + std::to_string(INT_MAX));
  }
  return p;
}

std::string repr(Problem const& p) {
  auto field = [](char const* name, int value) { return name + std::to_string(value); };
  return field("Problem(batch=", p.batch) + field(", heads=", p.heads) +
         field(", kv_heads=", p.kv_heads) + field(", seqlen_q=", p.seqlen_q) +
         field(", seqlen_k=", p.seqlen_k) + ", causal=" + (p.causal ? "True" : "False") +
         field(", tile_q=", p.tile_q) + field(", tile_kv=", p.tile_kv) +
         (p.group_split > 1 ? field(", group_split=", p.group_split) : "") + ")";
}

char const* name_of(Strategy strategy) {
  return visit_schedule(strategy, Problem{},
                        [](auto const& s) { return std::decay_t<decltype(s)>::kName; });
}

Strategy strategy_named(std::string const& name) {
  std::string known;
  for (Strategy strategy : kStrategies) {
    if (name == name_of(strategy)) return strategy;
    known += (known.empty() ? "'" : ", '") + std::string(name_of(strategy)) + "'";
  }
  throw wrong("strategy", "'" + name + "'", "one of " + known);
}

std::optional<std::string> why_not(std::string const& name, Problem const& problem, int resident) {
  return visit_schedule(strategy_named(name), problem,
                        [&](auto const& s) -> std::optional<std::string> {
                          using S = std::decay_t<decltype(s)>;
                          Refusal const refusal = S::why_not(problem, resident);
                          if (!refusal) return std::nullopt;
                          return describe(refusal, S::kName);
                        });
}

// A schedule's formulas mean nothing for a problem it refuses on any device.
Strategy strategy_for(std::string const& name, Problem const& problem) {
  if (auto const refusal = why_not(name, problem, INT_MAX)) throw std::invalid_argument(*refusal);
  return strategy_named(name);
}

// How many CTAs must be resident for the strategy to get through: the chains of a cyclic strategy's
// group, and 1 for an acyclic one.
int resident_ctas_needed(std::string const& name, Problem const& problem) {
  return visit_schedule(strategy_for(name, problem), problem, [&](auto const& s) {
    Refusal const refusal = std::decay_t<decltype(s)>::why_not(problem, 0);
    return refusal ? refusal.wanted : 1;
  });
}

int64_t num_tickets(std::string const& name, Problem const& problem) {
  return visit_schedule(strategy_for(name, problem), problem,
                        [](auto const& s) { return s.num_tickets(); });
}

int num_ctas(std::string const& name, Problem const& problem, int resident) {
  return visit_schedule(strategy_for(name, problem), problem, [&](auto const& s) {
    return s.num_ctas(positive("resident_ctas", resident));
  });
}

std::vector<ChainOut> ticket(std::string const& name, Problem const& problem, int64_t index) {
  return visit_schedule(strategy_for(name, problem), problem, [&](auto const& s) {
    if (index < 0 || index >= s.num_tickets()) {
      throw wrong("ticket", std::to_string(index), "in 0 … " + std::to_string(s.num_tickets() - 1));
    }
    std::vector<ChainOut> chains;
    for (int part = 0; part < s.num_chains(index); ++part) {
      Chain const chain = s.chain(index, part);
      std::vector<std::pair<int, int>> rows;
      rows.reserve(s.num_rows(chain));
      for (int position = 0; position < s.num_rows(chain); ++position) {
        Row const row = s.row(chain, position);
        rows.emplace_back(row.q_tile, row.turn);
      }
      chains.emplace_back(chain.batch, chain.kv_head, chain.kv_tile, std::move(rows));
    }
    return chains;
  });
}

DType dtype_named(std::string const& name) {
  if (name == "bfloat16") return DType::kBFloat16;
  if (name == "float16") return DType::kFloat16;
  throw wrong("dtype", "'" + name + "'", "'bfloat16' or 'float16'");
}

using Address = std::tuple<uintptr_t, int64_t, int64_t, int64_t>;

TensorView tensor_view(Address const& a) {
  auto const [data, batch_stride, seq_stride, head_stride] = a;
  return {reinterpret_cast<void*>(data), batch_stride, seq_stride, head_stride};
}

LseView lse_view(Address const& a) {
  auto const [data, batch_stride, head_stride, seq_stride] = a;
  return {reinterpret_cast<float const*>(data), batch_stride, head_stride, seq_stride};
}

BackwardArgs make_backward_args(py::kwargs const& kwargs) {
  Keywords keywords("backward", kwargs);
  auto take_tensor = [&](char const* name) { return tensor_view(keywords.take<Address>(name)); };
  BackwardArgs args;
  args.problem = keywords.take<Problem>("problem");
  args.strategy = strategy_named(keywords.take<std::string>("strategy"));
  args.dtype = dtype_named(keywords.take<std::string>("dtype"));
  args.head_dim = keywords.take<int>("head_dim");
  args.softmax_scale = keywords.take<float>("softmax_scale");
  args.q = take_tensor("q");
  args.k = take_tensor("k");
  args.v = take_tensor("v");
  args.out = take_tensor("out");
  args.dout = take_tensor("dout");
  args.lse = lse_view(keywords.take<Address>("lse"));
  args.dq = take_tensor("dq");
  args.dk = take_tensor("dk");
  args.dv = take_tensor("dv");
  args.workspace = reinterpret_cast<void*>(keywords.take<uintptr_t>("workspace"));
  args.workspace_bytes = keywords.take<size_t>("workspace_bytes");
  args.device = keywords.take<int>("device");
  args.stream = reinterpret_cast<void*>(keywords.take<uintptr_t>("stream"));
  if (keywords.has("max_ctas")) {
    args.max_ctas = positive("max_ctas", keywords.take<int>("max_ctas"));
  }
  keywords.expect_empty();
  return args;
}

void require_kernels(char const* function) {
  if (!kHasKernels) {
    throw std::runtime_error(std::string("dash._C.") + function +
                             "() needs the CUDA kernels, and this dash was built without nvcc; "
                             "rebuild it where nvcc 12.5 or later is on PATH");
  }
}

void call_backward(py::kwargs const& kwargs) {
  BackwardArgs const args = make_backward_args(kwargs);
  require_kernels("backward");
  if constexpr (kHasKernels) {
    py::gil_scoped_release release;
    backward(args);
  }
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

void bind_schedules(py::module_& m) {
  py::class_<Problem>(m, "Problem", "One attention backward, counted in tiles.")
      .def(py::init(&make_problem))
      .def_readonly("batch", &Problem::batch)
      .def_readonly("heads", &Problem::heads)
      .def_readonly("kv_heads", &Problem::kv_heads)
      .def_readonly("seqlen_q", &Problem::seqlen_q)
      .def_readonly("seqlen_k", &Problem::seqlen_k)
      .def_readonly("causal", &Problem::causal)
      .def_readonly("tile_q", &Problem::tile_q)
      .def_readonly("tile_kv", &Problem::tile_kv)
      .def_readonly("group_split", &Problem::group_split)
      .def_property_readonly("q_tiles", &Problem::q_tiles)
      .def_property_readonly("kv_tiles", &Problem::kv_tiles)
      .def_property_readonly("group", &Problem::group)
      .def_property_readonly("offset", &Problem::offset)
      .def_property_readonly("chains", &Problem::chains)
      .def("kv_tiles_of", &Problem::kv_tiles_of, py::arg("q_tile"))
      .def("first_q_tile", &Problem::first_q_tile, py::arg("kv_tile"))
      .def("__repr__", &repr);

  m.def(
      "strategies",
      [] {
        py::tuple names(std::size(kStrategies));
        for (size_t i = 0; i < std::size(kStrategies); ++i) names[i] = name_of(kStrategies[i]);
        return names;
      },
      "Names of all strategies, in table order.");
  m.def(
      "is_cyclic",
      [](std::string const& strategy) {
        return visit_schedule(strategy_named(strategy), Problem{},
                              [](auto const& s) { return std::decay_t<decltype(s)>::kCyclic; });
      },
      py::arg("strategy"), "Whether chains wait for each other in both directions.");
  m.def("why_not", &why_not, py::arg("strategy"), py::arg("problem"), py::arg("resident_ctas"),
        "None where the strategy may run the problem, else a sentence that says why not.");
  m.def("resident_ctas_needed", &resident_ctas_needed, py::arg("strategy"), py::arg("problem"),
        "The smallest number of resident CTAs that why_not accepts.");
  m.def("serpentine_block", &Serpentine::tiles_abreast, py::arg("problem"),
        "KV tiles of a head that serpentine plays in one direction.");
  m.attr("TICKETS_IN_FLIGHT") = kTicketsInFlight;
  m.def("num_tickets", &num_tickets, py::arg("strategy"), py::arg("problem"));
  m.def("num_ctas", &num_ctas, py::arg("strategy"), py::arg("problem"), py::arg("resident_ctas"),
        "CTAs of the main kernel's grid where this many are resident.");
  m.def("ticket", &ticket, py::arg("strategy"), py::arg("problem"), py::arg("ticket"),
        "The ticket's chains as played: (batch, kv_head, kv_tile, [(q_tile, turn), …]).");
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
  m.def("workspace_bytes", &workspace_bytes, py::arg("problem"), py::arg("head_dim"));
  m.def("resident_ctas", &call_resident_ctas, py::arg("device_index"), py::arg("dtype"),
        py::arg("head_dim"), "CTAs of the main kernel that are resident together on the device.");
  m.def(
      "backward", &call_backward,
      "Enqueues the backward pass. Keywords: problem, strategy, dtype, head_dim, softmax_scale; "
      "q, k, v, out, dout, dq, dk, dv as (address, batch_stride, seq_stride, head_stride) and lse "
      "as (address, batch_stride, head_stride, seq_stride), in elements; workspace, "
      "workspace_bytes, device, stream; optional max_ctas, which bounds the main kernel's grid.");
}

}  // namespace
}  // namespace dash

PYBIND11_MODULE(_C, m) {
  m.doc() = "dash's schedules and kernels";
  dash::bind_schedules(m);
  dash::bind_backward(m);
}
