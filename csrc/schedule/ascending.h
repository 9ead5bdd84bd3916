// ascending: the classical order, and the baseline. KV tiles are launched and added in ascending
// order; every chain visits its rows upwards. Full and causal masks.
//
// Acyclic: turn t of a q tile belongs to KV tile t, whose ticket is smaller than KV tile t + 1's.
#pragma once

#include "schedule.h"

namespace dash {

struct Ascending : OneChainATicket {
  static constexpr char const* kName = "ascending";
  static constexpr bool kCyclic = false;

  static constexpr Refusal why_not(Problem const&, int) { return {}; }

  constexpr Chain chain(Ticket ticket, int) const {
    int const n = problem.kv_tiles();
    return chain_of(problem, ticket / n, ticket % n);
  }

  constexpr Row row(Chain const& c, int position) const {
    return {problem.first_q_tile(c.kv_tile) + position, c.kv_tile};
  }
};

static_assert(Schedule<Ascending>);

}  // namespace dash
