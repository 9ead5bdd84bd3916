// descending: the paper's order for the causal mask. KV tiles are launched and added in ascending
// order, but every chain visits its rows downwards from the last, which all chains have in common.
// It wins over ascending because a long chain begins with the rows that a short chain has too.
//
// Acyclic: turn t of a q tile belongs to KV tile t, whose ticket is smaller than KV tile t + 1's.
#pragma once

#include "schedule.h"

namespace dash {

struct Descending : OneChainATicket {
  static constexpr char const* kName = "descending";
  static constexpr bool kCyclic = false;

  static constexpr Refusal why_not(Problem const& p, int) { return unless_causal(p); }

  constexpr Chain chain(Ticket ticket, int) const {
    int const n = problem.kv_tiles();
    return chain_of(problem, ticket / n, ticket % n);
  }

  constexpr Row row(Chain const& c, int position) const {
    return {problem.q_tiles() - 1 - position, c.kv_tile};
  }
};

static_assert(Schedule<Descending>);

}  // namespace dash
