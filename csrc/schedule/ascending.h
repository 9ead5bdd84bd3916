// ascending: the classical order, and the baseline. KV tiles are launched and added in ascending
// order; every chain visits its q tiles upwards. Every mask.
//
// Acyclic: in a head the turns ascend with the tickets.
#pragma once

#include "schedule.h"

namespace dash {

struct Ascending : OneChainATicket {
  static constexpr char const* kName = "ascending";

  static constexpr Refusal why_not(Problem const&, int) { return {}; }

  constexpr Chain chain(Ticket ticket, int) const {
    int const n = problem.kv_tiles();
    return chain_of(problem, ticket / n, ticket % n);
  }

  constexpr Visit visit(Chain const& c, int position) const {
    int const q_tile = problem.first_q_tile(c.kv_tile) + position;
    return {q_tile, c.kv_tile - problem.first_kv_tile(q_tile)};
  }
};

static_assert(Schedule<Ascending>);

}  // namespace dash
