// ascending: the classical order, and the baseline. KV tiles are launched and added in ascending
// order; every chain visits its rows upwards. Full and causal masks.
//
// Acyclic: turn t of a q tile belongs to KV tile t, whose ticket is smaller than KV tile t + 1's.
#pragma once

#include "schedule.h"

namespace dash {

struct Ascending {
  static constexpr char const* kName = "ascending";
  static constexpr bool kCyclic = false;

  Problem problem;

  static constexpr Refusal why_not(Problem const&, int) { return {}; }

  constexpr Ticket num_tickets() const { return static_cast<Ticket>(problem.chains()); }
  constexpr int num_chains(Ticket) const { return 1; }

  constexpr Chain chain(Ticket ticket, int) const {
    int const n = problem.kv_tiles();
    return chain_of(problem, ticket / n, ticket % n);
  }

  constexpr int num_rows(Chain const& c) const {
    return problem.q_tiles() - problem.first_q_tile(c.kv_tile);
  }

  constexpr Row row(Chain const& c, int position) const {
    return {problem.first_q_tile(c.kv_tile) + position, c.kv_tile};
  }
};

static_assert(Schedule<Ascending>);

}  // namespace dash
