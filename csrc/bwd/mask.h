// Which scores exist. Pure index arithmetic, shared by the producer (which steps need masking) and
// the MMA warpgroups (which elements).
#pragma once

#include "../schedule/problem.h"

namespace dash {

// True if some score of this step is hidden: its KV tile has columns past the last key, or the
// diagonal passes through or above the tile.
constexpr bool step_needs_mask(Problem const& p, int q_tile, int kv_tile) {
  int const last_column = (kv_tile + 1) * p.tile_kv - 1;
  if (last_column >= p.seqlen_k) return true;
  return p.causal && last_column > q_tile * p.tile_q + p.offset();
}

// The first row of a q tile (counted from the tile's start) that key column `column` contributes
// to; not below kTileQ if there is none in this tile.
constexpr int first_visible_row(Problem const& p, int q_tile, int column) {
  if (column >= p.seqlen_k) return p.tile_q;
  return p.causal ? column - p.offset() - q_tile * p.tile_q : 0;
}

}  // namespace dash
