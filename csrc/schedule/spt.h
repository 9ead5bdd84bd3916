// spt (shortest processing time first): FlashAttention-3's deterministic order for the causal mask.
// KV tiles are launched and added from the last to the first, short chains before long ones; every
// chain visits its rows upwards from the diagonal. Any seqlen_q and seqlen_k.
//
// Acyclic: turn t of q tile j belongs to KV tile kv_tiles_of(j) - 1 - t, and greater KV tiles have
// smaller tickets.
#pragma once

#include "schedule.h"

namespace dash {

struct Spt : OneChainATicket {
  static constexpr char const* kName = "spt";
  static constexpr bool kCyclic = false;

  static constexpr Refusal why_not(Problem const& p, int) { return unless_causal(p); }

  constexpr Chain chain(Ticket ticket, int) const {
    int const n = problem.kv_tiles();
    return chain_of(problem, ticket / n, n - 1 - ticket % n);
  }

  constexpr Row row(Chain const& c, int position) const {
    int const q_tile = problem.first_q_tile(c.kv_tile) + position;
    return {q_tile, problem.kv_tiles_of(q_tile) - 1 - c.kv_tile};
  }
};

static_assert(Schedule<Spt>);

}  // namespace dash
