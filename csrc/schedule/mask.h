// The mask: which scores exist. The one place that knows it. Schedules ask for tile ranges, the
// tile scheduler for what a step hides, the MMA warpgroups for elements, preprocess for rows
// without keys; the CPU tests compare all of it with a dense matrix of booleans.
//
// A band, aligned bottom-right: query row r sees key columns diagonal(r) - left … diagonal(r) +
// right, as far as they exist. Causal is right = 0.
#pragma once

#include <cstdint>

namespace dash {

constexpr int ceil_div(int a, int b) { return a / b + (a % b != 0); }
constexpr int smaller(int a, int b) { return a < b ? a : b; }
constexpr int larger(int a, int b) { return a > b ? a : b; }

inline constexpr int kUnlimited = -1;  // of a window

// Lengths stay so far below INT_MAX that none of the sums below can overflow.
inline constexpr int kMaxSeqlen = 1 << 30;

struct Mask {
  int seqlen_q = 0;
  int seqlen_k = 0;
  int left = kUnlimited;   // keys before the diagonal's
  int right = kUnlimited;  // keys behind it

  constexpr bool causal() const { return right == 0; }
  constexpr bool windowed() const { return left != kUnlimited || right > 0; }

  // The key column that row r sees last under the causal mask; negative where it sees none.
  constexpr int diagonal(int row) const { return row - seqlen_q + seqlen_k; }

  // Row r sees columns first_column(r) … end_column(r) - 1; none if that is not a range.
  constexpr int first_column(int row) const {
    return left == kUnlimited ? 0 : larger(diagonal(row) - left, 0);
  }
  constexpr int end_column(int row) const {
    return right == kUnlimited ? seqlen_k : smaller(diagonal(row) + right + 1, seqlen_k);
  }

  // Rows 0 … keyless_rows() - 1 see no key; every later one sees the diagonal's or a key beside it.
  constexpr int keyless_rows() const {
    if (seqlen_k == 0) return seqlen_q;
    return right == kUnlimited ? 0 : larger(seqlen_q - seqlen_k - right, 0);
  }
};

// A window that cannot bite is no window: the problem without it, with its order and its bits. The
// causal mask stays what it is even where it hides nothing.
constexpr Mask make_mask(int seqlen_q, int seqlen_k, bool causal, int window_left,
                         int window_right) {
  Mask mask{seqlen_q, seqlen_k, window_left, causal ? 0 : window_right};
  if (mask.left >= seqlen_k - 1) mask.left = kUnlimited;
  if (mask.right > 0 && mask.right >= seqlen_q - 1) mask.right = kUnlimited;
  return mask;
}

// The mask, counted in tiles. A pair of tiles contributes if any of its scores is visible.
struct TiledMask : Mask {
  int tile_q = 0;   // query rows a step
  int tile_kv = 0;  // key rows a chain; a multiple of tile_q

  constexpr int q_tiles() const { return ceil_div(seqlen_q, tile_q); }
  constexpr int kv_tiles() const { return ceil_div(seqlen_k, tile_kv); }

  // The KV tiles that contribute to q tile j are first_kv_tile(j) … end_kv_tile(j) - 1, and their
  // number the adds that dQ tile j receives; 0 where the mask hides every key.
  constexpr int first_kv_tile(int q_tile) const {
    return left == kUnlimited ? 0 : first_column(larger(q_tile * tile_q, keyless_rows())) / tile_kv;
  }
  constexpr int end_kv_tile(int q_tile) const {
    if (right == kUnlimited) return kv_tiles();
    int const columns = end_column(last_row(q_tile));
    return columns <= 0 ? 0 : ceil_div(columns, tile_kv);
  }
  constexpr int kv_tiles_of(int q_tile) const {
    return larger(end_kv_tile(q_tile) - first_kv_tile(q_tile), 0);
  }

  // The q tiles that KV tile i visits are first_q_tile(i) … end_q_tile(i) - 1; none if that is not
  // a range, which without a left window happens for seqlen_q = 0 alone.
  constexpr int first_q_tile(int kv_tile) const {
    if (right == kUnlimited) return 0;
    int const row = kv_tile * tile_kv - seqlen_k + seqlen_q - right;
    return row > 0 ? row / tile_q : 0;
  }
  constexpr int end_q_tile(int kv_tile) const {
    if (left == kUnlimited) return q_tiles();
    int const last_column = smaller((kv_tile + 1) * tile_kv, seqlen_k) - 1;
    int const row = last_column - seqlen_k + seqlen_q;  // on the diagonal; sees the column if ≥ 0
    if (row >= seqlen_q - left) return q_tiles();
    return row + left < 0 ? 0 : (row + left) / tile_q + 1;
  }
  constexpr int q_tiles_of(int kv_tile) const {
    return larger(end_q_tile(kv_tile) - first_q_tile(kv_tile), 0);
  }

  constexpr int last_row(int q_tile) const { return smaller((q_tile + 1) * tile_q, seqlen_q) - 1; }
};

// What one step hides, counted from its tiles' first row and column: row r of the q tile sees
// column c of the KV tile if c < columns, c + first_row <= r and r <= c + last_row.
struct StepMask {
  int columns;
  int first_row;
  int last_row;
  bool hides_right;  // some score by `columns` or `first_row`
  bool hides_left;   // some score by `last_row`
};

constexpr StepMask step_mask(TiledMask const& m, int q_tile, int kv_tile) {
  // The column of the tile's first row's diagonal, from the KV tile's first.
  int const diagonal = m.diagonal(q_tile * m.tile_q) - kv_tile * m.tile_kv;
  int const last_diagonal = m.diagonal(m.last_row(q_tile)) - kv_tile * m.tile_kv;
  int const columns = m.seqlen_k - kv_tile * m.tile_kv;
  bool const limited_left = m.left != kUnlimited, limited_right = m.right != kUnlimited;
  return {
      .columns = columns,
      .first_row = limited_right ? -diagonal - m.right : -m.tile_kv,
      .last_row = limited_left ? m.left - diagonal : m.tile_q,
      .hides_right = columns < m.tile_kv || (limited_right && diagonal + m.right < m.tile_kv - 1),
      .hides_left = limited_left && last_diagonal - m.left > 0};
}

// The first row of the q tile that sees column c of the KV tile by the right-hand side of the band,
// and the last by the left-hand side. No row at all sees a column past the last key.
constexpr int first_visible_row(StepMask const& m, int column, int tile_q) {
  return column < m.columns ? column + m.first_row : tile_q;
}
constexpr int last_visible_row(StepMask const& m, int column) { return column + m.last_row; }

}  // namespace dash
