// Packed sequences: what preprocess writes into the sequence table, computed on the host for the
// plan and the tests, and the packed backward pass.
#include <algorithm>
#include <tuple>
#include <vector>

#include "../bwd/launch.h"
#include "../schedule/packing.h"
#include "backward_args.h"
#include "keywords.h"

namespace dash {
namespace {

struct StrategyWish {
  bool choose;
  Strategy strategy;
};

StrategyWish wish_named(std::string const& name) {
  if (name == "auto") return {true, {}};
  Strategy const strategy = strategy_named(name);
  if (strategy == kStrategyOf<SymmetricShift>)
    throw wrong("strategy", "'symmetric_shift'",
                "'auto' or a strategy that accepts every length: whether symmetric_shift may run "
                "depends on each sequence");
  return {false, strategy};
}

// What all sequences of a call share.
Problem take_call(Keywords& keywords, PackedSequences& packed) {
  auto const take_positive = [&](char const* name) {
    return positive(name, keywords.take<int>(name));
  };
  packed.batch = take_positive("batch");
  Problem p;
  p.batch = 1;
  p.heads = take_positive("heads");
  p.kv_heads = take_positive("kv_heads");
  if (p.heads % p.kv_heads != 0)
    throw wrong("heads", std::to_string(p.heads),
                "a multiple of kv_heads (" + std::to_string(p.kv_heads) + ")");
  auto const take_total = [&](char const* name) {
    int const total = keywords.take<int>(name);
    if (total < 0 || total >= kMaxTotalRows)
      throw wrong(name, std::to_string(total), "from 0 to " + std::to_string(kMaxTotalRows - 1));
    return total;
  };
  packed.total_q = take_total("total_q");
  packed.total_k = take_total("total_k");
  bool const causal = keywords.take<bool>("causal");
  p.seqlen_q = packed.total_q;
  p.seqlen_k = packed.total_k;
  p.left = window("window_left", keywords.take<int>("window_left", kUnlimited));
  int const right = window("window_right", keywords.take<int>("window_right", kUnlimited));
  p.right = causal ? 0 : right;
  return p;
}

void take_wish(Keywords& keywords, BackwardArgs& args) {
  StrategyWish const wish = wish_named(keywords.take<std::string>("strategy", "auto"));
  args.choose_strategy = wish.choose;
  args.strategy = wish.strategy;
  args.group_split = keywords.take<int>("group_split", 0);
  int const group = args.problem.group();
  if (args.group_split < 0 || (args.group_split > 0 && group % args.group_split != 0))
    throw wrong("group_split", std::to_string(args.group_split),
                "0 or a divisor of heads / kv_heads (" + std::to_string(group) + ")");
}

void take_shape(Keywords& keywords, BackwardArgs& args) {
  args.problem = take_call(keywords, args.packed);
  take_wish(keywords, args);
  args.head_dims.qk = keywords.take<int>("head_dim");
  args.head_dims.v = keywords.take<int>("head_dim_v", args.head_dims.qk);
  TileShape const tiles = tile_shape(args.head_dims);
  args.problem.tile_q = tiles.q;
  args.problem.tile_kv = tiles.kv;
}

size_t packed_workspace_bytes(py::kwargs const& kwargs) {
  Keywords keywords("varlen_workspace_bytes", kwargs);
  BackwardArgs args;
  take_shape(keywords, args);
  keywords.expect_empty();
  return workspace_bytes(args);
}

int packed_resident_ctas_needed(py::kwargs const& kwargs) {
  Keywords keywords("varlen_resident_ctas_needed", kwargs);
  BackwardArgs args;
  take_shape(keywords, args);
  int const resident = positive("resident_ctas", keywords.take<int>("resident_ctas"));
  keywords.expect_empty();
  return largest_circle_of_pack(args.problem, args.choose_strategy, args.strategy, resident);
}

void call_backward_varlen(py::kwargs const& kwargs) {
  Keywords keywords("backward_varlen", kwargs);
  BackwardArgs args;
  take_shape(keywords, args);
  auto const take_ints = [&](char const* name) {
    return reinterpret_cast<int const*>(keywords.take<uintptr_t>(name));
  };
  args.packed.cu_seqlens_q = take_ints("cu_seqlens_q");
  args.packed.cu_seqlens_k = take_ints("cu_seqlens_k");
  args.packed.seqused_q = take_ints("seqused_q");
  args.packed.seqused_k = take_ints("seqused_k");
  args.resident_ctas = keywords.take<int>("resident_ctas", 0);
  take_tensors(keywords, args);
  take_launch(keywords, args);
  keywords.expect_empty();
  enqueue(args, "backward_varlen");
}

// (sequence's problem, strategy name, group_split) in launch order, for given lengths.
using PackedOut = std::tuple<int, Problem, std::string, int>;

std::vector<PackedOut> packed_order(Problem const& call, std::vector<std::pair<int, int>> lengths,
                                    std::string const& name, int group_split, int resident) {
  StrategyWish const wish = wish_named(name);
  std::vector<PackedOut> order;
  for (size_t i = 0; i < lengths.size(); ++i) {
    auto const [seqlen_q, seqlen_k] = lengths[i];
    if (seqlen_q <= 0 || seqlen_k <= 0) continue;  // no ticket
    Problem p = problem_of(call, seqlen_q, seqlen_k);
    Choice const choice = choose_in_pack(p, wish.choose, wish.strategy, group_split, resident);
    p.group_split = choice.group_split;
    order.emplace_back(static_cast<int>(i), p, name_of(choice.strategy), choice.group_split);
  }
  std::stable_sort(order.begin(), order.end(), [](PackedOut const& a, PackedOut const& b) {
    return chain_class(std::get<1>(a)) < chain_class(std::get<1>(b));
  });
  return order;
}

}  // namespace

void bind_packing(py::module_& m) {
  m.attr("MAX_TOTAL_ROWS") = kMaxTotalRows;
  m.def(
      "varlen_order", &packed_order, py::arg("call"), py::arg("lengths"),
      py::arg("strategy") = "auto", py::arg("group_split") = 0, py::arg("resident_ctas") = 132,
      "Launch order of packed sequences with (seqlen_q, seqlen_k) `lengths`, empty ones left out: "
      "(index, problem, strategy, group_split). `call` has heads, mask and tiles.");
  m.def("varlen_workspace_bytes", &packed_workspace_bytes,
        "Keywords: batch, heads, kv_heads, total_q, total_k, causal, head_dim; optional "
        "head_dim_v, window_left, window_right, strategy, group_split.");
  m.def("varlen_resident_ctas_needed", &packed_resident_ctas_needed,
        "CTAs that a packed call asks to be resident, whatever its lengths. Keywords as of "
        "varlen_workspace_bytes, and resident_ctas, for which 'auto' chooses.");
  m.def("backward_varlen", &call_backward_varlen,
        "Enqueues the backward pass of packed sequences. Keywords as of varlen_workspace_bytes; "
        "cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k as addresses of int32 on the device, the "
        "last two or 0; dtype, softmax_scale; q, k, v, out, dout, dq, dk, dv as (address, "
        "row_stride, head_stride) and lse as (address, head_stride, row_stride), in elements; "
        "workspace, workspace_bytes, device, stream; optional dlse, as lse, max_ctas and "
        "resident_ctas.");
}

}  // namespace dash
