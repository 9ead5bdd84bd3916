// Packed sequences: where each one's rows, tiles and tickets lie. Pure functions of cu_seqlens,
// shared by the kernels that need them and the workspace that must hold them.
//
// Tiles are numbered through the batch without a prefix sum: a sequence that starts at row s with
// index b has its first tile at floor(s / tile) + b, which leaves room for a ragged last tile of
// each sequence before it. The rows behind the last sequence are numbered as one more of them.
#pragma once

#include "auto.h"

namespace dash {

// A box of a packed tensor's rows is addressed so that it ends with its sequence (tma.cuh): the
// total of rows stays below this.
inline constexpr int kMaxTotalRows = 1 << 30;

constexpr int first_tile_of(int start, int index, int tile) { return start / tile + index; }
// Tiles that are numbered in all, one more than the last number of a sequence's.
constexpr int numbered_tiles(int total_rows, int batch, int tile) {
  return first_tile_of(total_rows, batch, tile);
}

// A row of cu_seqlens, whatever it holds.
constexpr int clamp_row(int row, int total_rows) { return smaller(larger(row, 0), total_rows); }

// What the sequence table says of one sequence, 32 bytes. Its problem and places follow from that.
struct SequenceRecord {
  int q_start, k_start;    // first row
  int seqlen_q, seqlen_k;  // rows in use
  int q_tile, kv_tile;     // number of the first
  Strategy strategy;
  int group_split;
};

// The problem of a sequence. `call` has what all sequences of a call share; the window is as the
// caller gave it, because whether it bites depends on the sequence.
constexpr Problem problem_of(Problem const& call, int seqlen_q, int seqlen_k, int group_split = 1) {
  Problem p = call;
  static_cast<Mask&>(p) = make_mask(seqlen_q, seqlen_k, call.causal(), call.left, call.right);
  p.batch = 1;
  p.group_split = group_split;
  return p;
}

// Order and slices of a sequence: the ones of a dense call of this sequence alone.
constexpr Choice choose_in_pack(Problem const& one, bool choose_strategy, Strategy strategy,
                                int group_split, int resident_ctas) {
  if (choose_strategy) return choose(one, resident_ctas, group_split);
  return {strategy, group_split > 0 ? group_split : 1, {}};
}

// The most slices that choose() cuts a group into for any length: those for 8,192 tokens, because
// up to there a call of 8,192 tokens has at least as many chains, and beyond it more. A window may
// bite in some sequences and in others not.
constexpr int most_slices(Problem const& call) {
  constexpr int kTokens = 8192;
  Problem unlimited = call;
  unlimited.left = kUnlimited;
  unlimited.right = call.causal() ? 0 : kUnlimited;
  int const without = choose_group_split(problem_of(unlimited, kTokens, kTokens));
  return call.windowed() && call.group() % 2 == 0 ? larger(without, 2) : without;
}

// The most tickets that may wait for each other in a packed call, whatever its lengths.
constexpr int largest_circle_of_pack(Problem const& call, bool choose_strategy, Strategy strategy,
                                     int resident_ctas) {
  if (!choose_strategy) return strategy == kStrategyOf<Shift> ? Shift::kMaxCircle : 1;
  // What no sequence is given where it is not resident need not be resident. A window that bites in
  // no sequence leaves the full or the causal mask.
  int const shift = call.causal() ? 1 : Shift::kMaxCircle;
  int const symmetric = call.causal() ? ceil_div(rules::symmetric_max_kv_tiles(call), 2) : 1;
  return smaller(larger(shift, symmetric), resident_ctas);
}

// Sequences are launched by the length of their longest chain, long ones first, in classes of an
// eighth of an octave: 0 for the longest, kChainClasses - 1 for none. It moves no bit.
inline constexpr int kChainClasses = 256;

constexpr int chain_class(Problem const& p) {
  if (p.seqlen_q == 0 || p.seqlen_k == 0) return kChainClasses - 1;
  // In the middle of the sequence: a window's chains are shorter at both ends.
  int const visits = larger(p.q_tiles_of(0), p.q_tiles_of(p.kv_tiles() / 2));
  int octave = 0;
  while (visits >> octave > 1) ++octave;
  int const eighth = octave >= 3 ? (visits >> (octave - 3)) & 7 : (visits << (3 - octave)) & 7;
  return kChainClasses - 2 - (octave * 8 + eighth);
}

}  // namespace dash
