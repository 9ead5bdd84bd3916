// descending: the paper's order for the causal mask. KV tiles are launched and added in ascending
// order, but every chain visits its rows downwards from the last, which all chains have in common.
// It wins over ascending because a long chain's first rows are the ones that a short chain also has.
//
// Acyclic: turn t of a q tile belongs to KV tile t, whose ticket is smaller than KV tile t + 1's.
#pragma once

#include "schedule.h"

namespace dash {

struct Descending {
  static constexpr char const* kName = "descending";
  static constexpr bool kCyclic = false;

  Problem problem;

  static constexpr Refusal why_not(Problem const& p, int) {
    return p.causal ? Refusal{} : Refusal{Refusal::Reason::kNeedsCausalMask};
  }

  constexpr int64_t num_tickets() const { return problem.chains(); }
  constexpr int num_chains(int64_t) const { return 1; }

  constexpr Chain chain(int64_t ticket, int) const {
    int const n = problem.kv_tiles();
    return chain_of(problem, ticket / n, static_cast<int>(ticket % n));
  }

  constexpr int num_rows(Chain const& c) const {
    return problem.q_tiles() - problem.first_q_tile(c.kv_tile);
  }

  constexpr Row row(Chain const& c, int position) const {
    return {problem.q_tiles() - 1 - position, c.kv_tile};
  }
};

static_assert(Schedule<Descending>);

}  // namespace dash
