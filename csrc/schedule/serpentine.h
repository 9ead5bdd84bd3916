// serpentine: staggered with the KV tiles of a head in blocks that visit their q tiles downwards
// and upwards in turn. For the causal mask with GQA, where staggered's chains drift apart.
//
// Chains that start together, long ones first, end apart: each of a head's is group · q tiles of a
// KV tile steps shorter than the one before. The next ones therefore start that far apart, and if
// they start from the last q tile, too, each step finds that L2 has lost the q tile since the chain
// before came by. Going up, a chain starts on its diagonal: shorter than the one before by just the
// q tiles by which it starts later, it joins the others where they are, and all end together. Then
// the next block goes down.
//
// A block is what a head has in flight when one sequence fills kTicketsInFlight, so blocks end with
// a round of CTAs on a chip of 128 to 140 SMs and few idle. With fewer SMs a block's last chains
// have yet to start when the next block's come up to the diagonal and wait for them. No SM count
// and no batch decides the order; where it pays is for the plan to know.
//
// Acyclic: in a head the turns ascend with the tickets.
#pragma once

#include "ascending.h"
#include "descending.h"

namespace dash {

struct Serpentine : OneChainATicket {
  static constexpr char const* kName = "serpentine";

  static constexpr Refusal why_not(Problem const& p, int) { return unless_banded(p); }

  // KV tiles of one head in flight, which make a block. At least two blocks a head, or no chain
  // would go up.
  static constexpr int tiles_abreast(Problem const& p) {
    int const fair = kTicketsInFlight / p.kv_slices();
    int const half = ceil_div(p.kv_tiles(), 2);
    int const wanted = fair < kMinTilesAbreast ? kMinTilesAbreast : fair;
    return wanted < half ? wanted : half;
  }

  constexpr Chain chain(Ticket ticket, int) const {
    return chain_tile_by_tile(problem, ticket, tiles_abreast(problem));
  }

  constexpr Visit visit(Chain const& c, int position) const {
    bool const upwards = c.kv_tile / tiles_abreast(problem) % 2 != 0;
    return upwards ? Ascending{problem}.visit(c, position) : Descending{problem}.visit(c, position);
  }
};

static_assert(Schedule<Serpentine>);

}  // namespace dash
