// descending: the paper's order for the causal mask. KV tiles are launched and added in ascending
// order, but every chain visits its q tiles downwards from the last that sees it. Under the causal
// mask that is the last of all: a long chain begins with the q tiles that a short chain has too. In
// a window chains that start together meet a q tile one after the other, the smaller KV tile first.
//
// Acyclic: in a head the turns ascend with the tickets.
#pragma once

#include "schedule.h"

namespace dash {

struct Descending : OneChainATicket {
  static constexpr char const* kName = "descending";

  static constexpr Refusal why_not(Problem const& p, int) { return unless_banded(p); }

  constexpr Chain chain(Ticket ticket, int) const {
    int const n = problem.kv_tiles();
    return chain_of(problem, ticket / n, ticket % n);
  }

  constexpr Visit visit(Chain const& c, int position) const {
    int const q_tile = problem.end_q_tile(c.kv_tile) - 1 - position;
    return {q_tile, c.kv_tile - problem.first_kv_tile(q_tile)};
  }
};

static_assert(Schedule<Descending>);

}  // namespace dash
