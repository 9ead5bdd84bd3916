// staggered: the tickets of several heads interleaved tile by tile, long chains first; rows down,
// KV tiles added in ascending order. Full and causal masks, any seqlen_q and seqlen_k, no residency
// to ask for.
//
// Two chains of a head that start together want every q tile together, and the later one falls
// behind by one hand-off for good. A head that fills the chip by itself pays that for each of its
// KV tiles before the last of them gets going. With kTilesAbreast of its tiles in flight it pays
// for those alone, once: a CTA that ends a chain starts the head's next one as far behind its
// neighbour as it ended.
//
// Chains abreast read the same rows within a few steps of each other, so of Q, dO and dQ only a
// window lives in L2; all of it streams from memory once for each kTilesAbreast KV tiles, at 600
// TFLOPS 5.6 TB/s divided by kTilesAbreast.
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
  static constexpr bool kCyclic = false;
  static constexpr int kTilesAbreast = 8;  // KV tiles of one head in flight

  static constexpr Refusal why_not(Problem const&, int) { return {}; }

  constexpr Chain chain(Ticket ticket, int) const {
    return chain_tile_by_tile(problem, ticket, kTilesAbreast);
  }

  constexpr Row row(Chain const& c, int position) const {
    return Descending{problem}.row(c, position);
  }
};

static_assert(Schedule<Staggered>);

}  // namespace dash
