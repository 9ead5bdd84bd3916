// spt (shortest processing time first): FlashAttention-3's deterministic order for the causal mask.
// KV tiles are launched and added from the last to the first, short chains before long ones; every
// chain visits its q tiles upwards from the diagonal. In a window chains that start together meet a
// q tile one after the other, the greater KV tile first.
//
// Acyclic: in a head the turns ascend with the tickets, from the last KV tile.
#pragma once

#include "schedule.h"

namespace dash {

struct Spt : OneChainATicket {
  static constexpr char const* kName = "spt";

  static constexpr Refusal why_not(Problem const& p, int) { return unless_banded(p); }

  constexpr Chain chain(Ticket ticket, int) const {
    int const n = problem.kv_tiles();
    return chain_of(problem, ticket / n, n - 1 - ticket % n);
  }

  constexpr Visit visit(Chain const& c, int position) const {
    int const q_tile = problem.first_q_tile(c.kv_tile) + position;
    return {q_tile, problem.end_kv_tile(q_tile) - 1 - c.kv_tile};
  }
};

static_assert(Schedule<Spt>);

}  // namespace dash
