// What a Problem's sizes may be, so that no formula of a schedule or a kernel overflows. Host only:
// checked where a Problem is made of what somebody gave.
#pragma once

#include <climits>
#include <cstdint>
#include <stdexcept>
#include <string>

#include "problem.h"

namespace dash {

// Like kMaxSeqlen (mask.h) so far below INT_MAX that neither a tile index times a tile size nor a
// ticket past the last, one for each CTA, can overflow.
inline constexpr int kMaxTiles = 1 << 30;

inline std::invalid_argument wrong(std::string const& name, std::string const& given,
                                   std::string const& wanted) {
  return std::invalid_argument(name + " must be " + wanted + ", got " + given);
}

inline int positive(char const* name, int64_t value, int limit = INT_MAX) {
  if (value <= 0) throw wrong(name, std::to_string(value), "positive");
  if (value > limit) {
    throw wrong(name, std::to_string(value), "at most " + std::to_string(limit));
  }
  return static_cast<int>(value);
}

// Tiles in all, of sizes whose product need not fit 64 bits.
inline void limit_tiles(char const* name, int sequences, int heads, int tiles) {
  int64_t const per_sequence = int64_t{heads} * tiles;
  if (per_sequence <= kMaxTiles && sequences * per_sequence <= kMaxTiles) return;
  throw wrong(
      name,
      std::to_string(sequences) + " * " + std::to_string(heads) + " * " + std::to_string(tiles),
      "at most " + std::to_string(kMaxTiles));
}

// How the sizes of a problem, each of them positive, have to fit together.
inline void check_fits(Problem const& p) {
  if (p.heads % p.kv_heads != 0) {
    throw wrong("heads", std::to_string(p.heads),
                "a multiple of kv_heads (" + std::to_string(p.kv_heads) + ")");
  }
  if (p.group() % p.group_split != 0) {
    throw wrong("group_split", std::to_string(p.group_split),
                "a divisor of heads / kv_heads (" + std::to_string(p.group()) + ")");
  }
  if (p.tile_kv % p.tile_q != 0) {
    throw wrong("tile_kv", std::to_string(p.tile_kv),
                "a multiple of tile_q (" + std::to_string(p.tile_q) + ")");
  }
  limit_tiles("batch * heads * tiles of seqlen_q", p.batch, p.heads, p.q_tiles());
  limit_tiles("batch * kv_heads * group_split * tiles of seqlen_k", p.batch, p.kv_slices(),
              p.kv_tiles());
}

}  // namespace dash
