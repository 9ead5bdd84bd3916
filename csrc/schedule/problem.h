// One attention backward, counted in tiles. Everything a schedule may depend on is here, and
// nothing else is: no SM count, no clock, no state that depends on the batch.
#pragma once

#include <cstdint>

namespace dash {

constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }

struct Problem {
  int batch = 0;
  int heads = 0;     // query heads
  int kv_heads = 0;  // divides heads; a head of K counts once for each part of its group
  int seqlen_q = 0;
  int seqlen_k = 0;
  bool causal = false;  // bottom-right aligned: query row r sees key columns 0 … r + offset()
  int tile_q = 0;       // query rows a step
  int tile_kv = 0;      // key rows a chain; a multiple of tile_q

  // Query heads that share a head of K may be cut into this many parts, each with chains of its
  // own: then K has fewer chains than SMs no longer. A schedule sees one KV head for each part.
  int group_split = 1;

  constexpr int group() const { return heads / kv_heads; }  // query heads that share a KV head
  constexpr int heads_of_k() const { return kv_heads / group_split; }
  constexpr int q_tiles() const { return ceil_div(seqlen_q, tile_q); }
  constexpr int kv_tiles() const { return ceil_div(seqlen_k, tile_kv); }
  constexpr int offset() const { return seqlen_k - seqlen_q; }

  // The KV tiles that contribute to q tile j are 0 … kv_tiles_of(j) - 1. They are also the turns of
  // its sum, so this is the number of adds dQ tile j receives; 0 where the mask hides every key.
  constexpr int kv_tiles_of(int q_tile) const {
    if (!causal) return kv_tiles();
    int const rows_end = (q_tile + 1) * tile_q < seqlen_q ? (q_tile + 1) * tile_q : seqlen_q;
    int const columns = rows_end + offset();
    if (columns <= 0) return 0;
    int const tiles = ceil_div(columns, tile_kv);
    return tiles < kv_tiles() ? tiles : kv_tiles();
  }

  // The q tiles that KV tile i visits are first_q_tile(i) … q_tiles() - 1. Never empty for
  // seqlen_q > 0: the last query row sees every key.
  constexpr int first_q_tile(int kv_tile) const {
    if (!causal) return 0;
    int const row = kv_tile * tile_kv - offset();
    return row > 0 ? row / tile_q : 0;
  }

  constexpr int64_t q_tiles_total() const { return int64_t{batch} * heads * q_tiles(); }
  constexpr int64_t chains() const { return int64_t{batch} * kv_heads * kv_tiles(); }
};

}  // namespace dash
