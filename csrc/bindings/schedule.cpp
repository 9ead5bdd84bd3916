// The schedules, the mask and "auto", as the kernel compiles them, for the plan, the simulator and
// the tests.
#include <optional>
#include <tuple>
#include <vector>

#include "../schedule/describe.h"
#include "keywords.h"

namespace dash {

char const* name_of(Strategy strategy) {
  return visit_schedule(strategy, Problem{},
                        [](auto const& s) { return std::decay_t<decltype(s)>::kName; });
}

Strategy strategy_named(std::string const& name) {
  std::string known;
  for (int number = 0; number < Strategies::kSize; ++number) {
    char const* const candidate = name_of(Strategy{number});
    if (name == candidate) return Strategy{number};
    known += (known.empty() ? "'" : ", '") + std::string(candidate) + "'";
  }
  throw wrong("strategy", "'" + name + "'", "one of " + known);
}

namespace {

// (batch, kv_slice, kv_tile, [(q_tile, turn), …])
using ChainOut = std::tuple<int, int, int, std::vector<std::pair<int, int>>>;

Problem make_problem(py::kwargs const& kwargs) {
  Keywords keywords("Problem", kwargs);
  auto take_positive = [&](char const* name, int limit = INT_MAX) {
    return positive(name, keywords.take<int64_t>(name), limit);
  };
  Problem p;
  p.batch = take_positive("batch");
  p.heads = take_positive("heads");
  p.kv_heads = take_positive("kv_heads");
  int const seqlen_q = take_positive("seqlen_q", kMaxSeqlen);
  int const seqlen_k = take_positive("seqlen_k", kMaxSeqlen);
  bool const causal = keywords.take<bool>("causal");
  int const left = window("window_left", keywords.take<int>("window_left", kUnlimited));
  int const right = window("window_right", keywords.take<int>("window_right", kUnlimited));
  static_cast<Mask&>(p) = make_mask(seqlen_q, seqlen_k, causal, left, right);
  p.tile_q = take_positive("tile_q", 1 << 16);
  p.tile_kv = take_positive("tile_kv", 1 << 16);
  p.group_split = positive("group_split", keywords.take<int>("group_split", 1));
  keywords.expect_empty();
  check_fits(p);
  return p;
}

std::string repr(Problem const& p) {
  auto field = [](char const* name, int value) { return name + std::to_string(value); };
  return field("Problem(batch=", p.batch) + field(", heads=", p.heads) +
         field(", kv_heads=", p.kv_heads) + field(", seqlen_q=", p.seqlen_q) +
         field(", seqlen_k=", p.seqlen_k) + ", causal=" + (p.causal() ? "True" : "False") +
         field(", tile_q=", p.tile_q) + field(", tile_kv=", p.tile_kv) +
         (p.group_split > 1 ? field(", group_split=", p.group_split) : "") +
         (p.left != kUnlimited ? field(", window_left=", p.left) : "") +
         (p.right > 0 ? field(", window_right=", p.right) : "") + ")";
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

// How many CTAs must be resident for the strategy to get through: the tickets of a cyclic
// strategy's circle, and 1 for an acyclic one.
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

int64_t end_of_circle(std::string const& name, Problem const& problem, int64_t index) {
  return visit_schedule(strategy_for(name, problem), problem,
                        [&](auto const& s) { return s.end_of_circle(index, s.chain(index, 0)); });
}

void check_ticket(int64_t index, Ticket tickets) {
  if (index >= 0 && index < tickets) return;
  throw wrong("ticket", std::to_string(index), "in 0 … " + std::to_string(tickets - 1));
}

std::vector<ChainOut> ticket(std::string const& name, Problem const& problem, int64_t index) {
  return visit_schedule(strategy_for(name, problem), problem, [&](auto const& s) {
    check_ticket(index, s.num_tickets());
    std::vector<ChainOut> chains;
    for (int leg = 0; leg < s.num_legs(index); ++leg) {
      Chain const chain = s.chain(index, leg);
      std::vector<std::pair<int, int>> visits;
      visits.reserve(s.num_visits(chain));
      for (int position = 0; position < s.num_visits(chain); ++position) {
        Visit const visit = s.visit(chain, position);
        visits.emplace_back(visit.q_tile, visit.turn);
      }
      chains.emplace_back(chain.batch, chain.kv_slice, chain.kv_tile, std::move(visits));
    }
    return chains;
  });
}

// (batch, kv_slice, kv_tile) of the ticket's chains, which are few where their visits are millions.
std::vector<std::tuple<int, int, int>> chains(std::string const& name, Problem const& problem,
                                              int64_t index) {
  return visit_schedule(strategy_for(name, problem), problem, [&](auto const& s) {
    check_ticket(index, s.num_tickets());
    std::vector<std::tuple<int, int, int>> found;
    for (int leg = 0; leg < s.num_legs(index); ++leg) {
      Chain const chain = s.chain(index, leg);
      found.emplace_back(chain.batch, chain.kv_slice, chain.kv_tile);
    }
    return found;
  });
}

std::tuple<std::string, int, std::string> choose_for_host(Problem const& problem, int resident,
                                                          int group_split) {
  Choice const choice = choose(problem, positive("resident_ctas", resident), group_split);
  return {name_of(choice.strategy), choice.group_split, describe(choice, problem, resident)};
}

}  // namespace

// A schedule's formulas mean nothing for a problem it refuses on any device.
Strategy strategy_for(std::string const& name, Problem const& problem) {
  if (auto const refusal = why_not(name, problem, INT_MAX)) throw std::invalid_argument(*refusal);
  return strategy_named(name);
}

void bind_schedules(py::module_& m) {
  py::class_<Problem>(m, "Problem", "One attention backward, counted in tiles.")
      .def(py::init(&make_problem))
      .def_readonly("batch", &Problem::batch)
      .def_readonly("heads", &Problem::heads)
      .def_readonly("kv_heads", &Problem::kv_heads)
      .def_readonly("seqlen_q", &Problem::seqlen_q)
      .def_readonly("seqlen_k", &Problem::seqlen_k)
      .def_readonly("window_left", &Problem::left, "-1: unlimited.")
      .def_readonly("window_right", &Problem::right, "-1: unlimited; 0: causal.")
      .def_readonly("tile_q", &Problem::tile_q)
      .def_readonly("tile_kv", &Problem::tile_kv)
      .def_readonly("group_split", &Problem::group_split)
      .def_property_readonly("causal", &Problem::causal)
      .def_property_readonly("windowed", &Problem::windowed,
                             "Whether a window bites, beyond the causal mask.")
      .def_property_readonly("keyless_rows", &Problem::keyless_rows,
                             "Query rows 0 … keyless_rows - 1 see no key.")
      .def_property_readonly("q_tiles", &Problem::q_tiles)
      .def_property_readonly("kv_tiles", &Problem::kv_tiles)
      .def_property_readonly("group", &Problem::group, "Query heads of a KV head.")
      .def_property_readonly("kv_slices", &Problem::kv_slices,
                             "KV heads times group_split: what a chain is a KV tile of.")
      .def_property_readonly("heads_of_chain", &Problem::heads_of_chain,
                             "Query heads of a slice of a group.")
      .def_property_readonly("offset", [](Problem const& p) { return p.seqlen_k - p.seqlen_q; })
      .def_property_readonly("chains", &Problem::chains)
      .def("first_column", &Problem::first_column, py::arg("row"))
      .def("end_column", &Problem::end_column, py::arg("row"))
      .def("first_kv_tile", &Problem::first_kv_tile, py::arg("q_tile"))
      .def("end_kv_tile", &Problem::end_kv_tile, py::arg("q_tile"))
      .def("kv_tiles_of", &Problem::kv_tiles_of, py::arg("q_tile"))
      .def("first_q_tile", &Problem::first_q_tile, py::arg("kv_tile"))
      .def("end_q_tile", &Problem::end_q_tile, py::arg("kv_tile"))
      .def("q_tiles_of", &Problem::q_tiles_of, py::arg("kv_tile"))
      .def(
          "step_mask",
          [](Problem const& p, int q_tile, int kv_tile) {
            StepMask const m = step_mask(p, q_tile, kv_tile);
            return std::make_tuple(m.columns, m.first_row, m.last_row, m.hides_right, m.hides_left);
          },
          py::arg("q_tile"), py::arg("kv_tile"),
          "(columns, first_row, last_row, hides_right, hides_left): row r of the q tile sees "
          "column "
          "c of the KV tile if c < columns, c + first_row <= r and r <= c + last_row.")
      .def("__repr__", &repr);

  m.def(
      "strategies",
      [] {
        py::tuple names(Strategies::kSize);
        for (int i = 0; i < Strategies::kSize; ++i) names[i] = name_of(Strategy{i});
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
  m.def("steps_apart_in_shift", &steps_apart_in_shift, py::arg("problem"),
        "Steps between two chains of one of shift's circles at the same q tile, on average.");
  m.def("choose", &choose_for_host, py::arg("problem"), py::arg("resident_ctas"),
        py::arg("group_split") = 0,
        "What strategy 'auto' takes for one sequence of the problem: (strategy, group_split, why). "
        "group_split 0: choose it, too.");
  m.attr("TICKETS_IN_FLIGHT") = kTicketsInFlight;
  m.def("num_tickets", &num_tickets, py::arg("strategy"), py::arg("problem"));
  m.def("num_ctas", &num_ctas, py::arg("strategy"), py::arg("problem"), py::arg("resident_ctas"),
        "CTAs of the main kernel's grid where this many are resident.");
  m.def("end_of_circle", &end_of_circle, py::arg("strategy"), py::arg("problem"), py::arg("ticket"),
        "The first ticket behind the circle of a ticket: those that wait for each other.");
  m.def("chains", &chains, py::arg("strategy"), py::arg("problem"), py::arg("ticket"),
        "(batch, kv_slice, kv_tile) of the ticket's chains.");
  m.def("ticket", &ticket, py::arg("strategy"), py::arg("problem"), py::arg("ticket"),
        "The ticket's chains as played: (batch, kv_slice, kv_tile, [(q_tile, turn), …]).");
}

}  // namespace dash
