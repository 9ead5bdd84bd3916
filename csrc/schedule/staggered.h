// staggered: the tickets of several heads interleaved tile by tile, long chains first; q tiles
// visited downwards, KV tiles added in ascending order. Every mask, no residency to ask for.
//
// Two chains of a head that start together want every q tile together, and the later one falls
// behind by one hand-off for good. A head that fills the chip by itself pays that for each of its
// KV tiles before the last of them gets going. With a few of its tiles abreast it pays for those
// alone, once: a CTA that ends a chain starts the head's next one as far behind its neighbour as it
// ended.
//
// Chains abreast read the same q tiles within a few steps of each other, so of Q, dO and dQ only a
// part lives in L2; all of it streams from memory once for all tiles abreast, at 600 TFLOPS 5.6
// TB/s divided by their number. With one q head a chain a hand-off is a visit, and 8 are abreast.
// With GQA it is a part of a visit, and half of a head's tiles are: all of it streams twice, and
// under the causal mask a CTA plays a long chain of a head and then a short one of the same.
//
// Under the causal mask long chains first is the longest-processing-time rule: the launch ends with
// the shortest chains of all, for every number of tiles and of SMs.
//
// Acyclic: in a head the turns ascend with the tickets.
#pragma once

#include "descending.h"

namespace dash {

struct Staggered : OneChainATicket {
  static constexpr char const* kName = "staggered";

  static constexpr Refusal why_not(Problem const&, int) { return {}; }

  // KV tiles of one head in flight. Moves launches, never a turn.
  static constexpr int tiles_abreast(Problem const& p) {
    int const half = p.heads_of_chain() > 1 ? ceil_div(p.kv_tiles(), 2) : 0;
    int const most = half < kTicketsInFlight ? half : kTicketsInFlight;
    return most > kMinTilesAbreast ? most : kMinTilesAbreast;
  }

  constexpr Chain chain(Ticket ticket, int) const {
    return chain_tile_by_tile(problem, ticket, tiles_abreast(problem));
  }

  constexpr Visit visit(Chain const& c, int position) const {
    return Descending{problem}.visit(c, position);
  }
};

static_assert(Schedule<Staggered>);

}  // namespace dash
