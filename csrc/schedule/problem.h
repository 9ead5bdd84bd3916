// One attention backward, counted in tiles. Everything a schedule may depend on is here, and
// nothing else is: no SM count, no clock, no state that depends on the batch.
#pragma once

#include <cstdint>

#include "mask.h"

namespace dash {

struct Problem : TiledMask {
  int batch = 0;
  int heads = 0;     // query heads
  int kv_heads = 0;  // divides heads

  // The query heads that share a KV head, its group, may be cut into this many slices, each with
  // chains of its own: then chains are no longer fewer than SMs. A divisor of group().
  int group_split = 1;

  constexpr int group() const { return heads / kv_heads; }
  constexpr int kv_slices() const { return kv_heads * group_split; }
  constexpr int heads_of_chain() const { return heads / kv_slices(); }

  constexpr int64_t q_tiles_total() const { return int64_t{batch} * heads * q_tiles(); }
  constexpr int64_t chains() const { return int64_t{batch} * kv_slices() * kv_tiles(); }
};

}  // namespace dash
