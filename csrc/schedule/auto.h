// What strategy "auto" chooses: an order for each problem, by rules, never by a timing. One
// function, asked by the host's plan and, sequence by sequence, by the device.
//
// The rules see one sequence and the number of resident CTAs, so a gradient does not depend on its
// neighbours in the batch. They come from timings of the kernel on an H200, in TFLOPS, head
// dimension 128; figures of one row are of one run, unmarked rows of
// benchmarks/results/h200_9f6b3b7.csv:
//
// | problem                          | shift | symmetric | zigzag | staggered | serpentine | ascending |
// |----------------------------------|-------|-----------|--------|-----------|------------|-----------|
// | full, 512                        | 385   |           |        | 333       |            |           |
// | full, 8k                         | 562   |           |        | 557       |            |           |
// | full, 32k (3cea61a)              | 565   |           |        | 570       |            | 591       |
// | full, 32 over 8, 2k (2e67e29)    | 461   |           |        | 561       |            |           |
// | causal, 4k (6178c30)             |       | 527       | 524    | 502       | 468        |           |
// | causal, 8k (6178c30)             |       | 567       | 567    | 540       | 519        |           |
// | causal, 2k, head_dim 64 (6178c30)|       | 414       | 404    | 348       | 272        |           |
// | causal, 4k, head_dim 64 (6178c30)|       | 454       | 459    | 441       | 389        |           |
// | causal, 32 over 8, 8k (b6a0b36)  |       |           |        | 548       | 535        |           |
// | causal, 28 over 4, 8k            |       | 393       | 392    | 512       | 534        |           |
// | causal, 64 over 8, 4k (b6a0b36)  |       |           |        | 478       | 507        |           |
#pragma once

#include "strategies.h"

namespace dash {

enum class Rule : int {
  kWindow,           // neighbouring KV tiles follow each other down the band
  kFullMask,         // shift
  kFullNotResident,  // the circle of shift has more chains than CTAs are resident
  kFullTooFarApart,  // shift comes back to a q tile when L2 has lost it
  kCausal,           // a chain for each q head: zigzag keeps every SM busy to the end
  kCausalFewTiles,   // the same with so few KV tiles that symmetric_shift is ahead
  kCausalShared,     // several q heads a chain
  kCausalDrifting,   // the same, and neighbouring chains differ by many steps
};

struct Choice {
  Strategy strategy{};
  int group_split = 1;
  Rule rule{};
};

namespace rules {

// How many steps apart the chains of a circle of shift may come to a q tile. Four steps of 132
// CTAs, with 64 KB each of Q, dO and sums, are 34 MB, and an H200's L2 of 50 MB was seen to hold
// them (full mask, 16k, head dimension 128: 576 TFLOPS against staggered's 559).
inline constexpr int kShiftMaxStepsApart = 4;

// By how many steps the chains of neighbouring KV tiles may differ before staggered's drift costs
// more than serpentine's blocks: at 8 both are even, at 14 and 16 serpentine is 0 to 8% ahead.
// Where other kernels hold SMs meanwhile it is 7 to 16% behind, which no rule can know.
inline constexpr int kStaggeredMaxSteps = 8;

// Whole rounds of symmetric_shift's tickets over the rounds that their number would fill. Simulated
// with 10 heads at 4k, 1.24 in a batch of two: 16% behind zigzag; with 12 and 16 heads, 1.03: even.
inline constexpr double kSymmetricMaxRounds = 1.05;

// KV tiles of one head up to which symmetric_shift is ahead of zigzag, by the q tiles of a KV tile.
// Two (head dimension 128): 0 to 3% from 4 to 32 tiles. One (64): 2 to 5% from 4 to 16 tiles,
// behind from 32 on. Beyond, where they are about even, zigzag's tickets are half as long and of
// unequal length, so that few heads leave no round of the grid half empty.
constexpr int symmetric_max_kv_tiles(Problem const& p) {
  return p.tile_kv / p.tile_q > 1 ? 32 : 16;
}

// Sequences that a call is taken to hold, where a rule asks whether chains or tickets fill the
// chip. Groups are split where these have too few chains. Slices cost an fp32 write and read of dK
// and dV each, 5% of a call at 8k and 20% at 1k; too few chains, a multiple of it.
constexpr double sequences_at_once(Problem const& p) {
  constexpr double kTokensAtOnce = 8192.0;
  double const sequences = kTokensAtOnce / p.seqlen_k;
  return sequences > 1.0 ? sequences : 1.0;
}

constexpr double rounds_up(double x) {
  double const whole = static_cast<double>(static_cast<int64_t>(x));
  return whole < x ? whole + 1.0 : whole;
}

// Rounds that symmetric_shift's tickets take of the CTAs, over those they would fill.
constexpr double symmetric_rounds(Problem const& p, int resident_ctas) {
  double const tickets = SymmetricShift{p}.num_tickets() * sequences_at_once(p);
  double const rounds = tickets / resident_ctas;
  return rounds_up(rounds) / rounds;
}

constexpr bool symmetric_shift_is_ahead(Problem const& p, int resident_ctas) {
  return p.kv_tiles() > 1 && p.kv_tiles() <= symmetric_max_kv_tiles(p) &&
         !SymmetricShift::why_not(p, resident_ctas) &&
         symmetric_rounds(p, resident_ctas) <= kSymmetricMaxRounds;
}

// serpentine's blocks must fill a round of CTAs.
constexpr bool serpentine_fills(Problem const& p, int resident_ctas) {
  return resident_ctas >= kTicketsInFlight && kTicketsInFlight % Serpentine::tiles_abreast(p) == 0;
}

// A band: chains of neighbouring KV tiles follow each other, upwards in spt, downwards in
// descending. TFLOPS on an H200, windows of keys to the left under the causal mask, of one run for
// a group of rows (115a60b):
//
// | window of length, heads, dim  | descending | spt | zigzag | staggered | in 2: descending | spt |
// |-------------------------------|------------|-----|--------|-----------|------------------|-----|
// | 128 of 4,096, 16, 128         | 139        | 139 | 142    | 145       |                  |     |
// | 1,024 of 8,192, 16, 128       | 416        | 445 | 436    | 434       |                  |     |
// | 4,096 of 8,192, 16, 128       | 455        | 564 | 552    | 537       |                  |     |
// | 4,096 of 32,768, 16, 128      | 574        | 571 | 560    | 550       |                  |     |
// | 1,024 of 8,192, 32, 64        | 258        | 341 | 395    | 390       |                  |     |
// | 4,096 of 8,192, 32, 64        | 270        | 479 | 498    | 473       |                  |     |
// | 128 of 4,096, 32 over 8, 128  | 151        | 150 | 148    | 148       | 132              | 132 |
// | 1,024 of 8,192, 32 over 8, 128| 381        | 353 | 349    | 356       | 420              | 421 |
// | 4,096 of 8,192, 32 over 8, 128| 480        | 420 | 417    | 455       | 515              | 527 |
// | 4,096 of 32k, 32 over 8, 128  | 444        | 434 | 447    | 460       | 516              | 515 |
// | 1,024 of 8,192, 64 over 8, 64 | 349        | 325 | 328    | 331       | 371              | 396 |
// | 4,096 of 8,192, 64 over 8, 64 | 432        | 381 | 379    | 399       | 472              | 466 |
constexpr bool is_narrow(Problem const& p) {
  constexpr int kNarrow = 6;  // visits of a chain
  return p.q_tiles_of(p.kv_tiles() / 2) <= kNarrow;
}

constexpr Strategy for_window(Problem const& p) {
  if (p.heads_of_chain() > 1)
    return p.group_split == 1 ? kStrategyOf<Descending> : kStrategyOf<Spt>;
  if (is_narrow(p)) return kStrategyOf<Staggered>;
  return p.tile_kv == p.tile_q ? kStrategyOf<Zigzag> : kStrategyOf<Spt>;
}

// With fewer q heads a chain, a q tile comes round again while L2 has it. Slices cost an fp32 write
// and read of dK and dV each, too much for a chain of few visits.
constexpr int least_slices(Problem const& p) {
  return p.windowed() && !is_narrow(p) && p.group() % 2 == 0 ? 2 : 1;
}

}  // namespace rules

// Steps between two chains of one of shift's circles at the same q tile, on average.
constexpr double steps_apart_in_shift(Problem const& p) {
  return static_cast<double>(p.q_tiles()) / Shift::circle_size(p) * p.heads_of_chain();
}

// Into how many slices to cut the q heads of a KV head: the fewest that give a batch of 8,192
// tokens a chain for each SM, with the causal mask two, because its chains are of unequal length.
// So KV heads are split from three down (causal) or where there is one (full), up to 8k; later
// where a sequence is longer. `p` is one sequence, with whole groups.
constexpr int choose_group_split(Problem const& p) {
  double const wanted = p.causal() ? 2 * kTicketsInFlight : kTicketsInFlight;
  double const chains = static_cast<double>(p.chains()) * rules::sequences_at_once(p);
  int slices = rules::least_slices(p);
  for (; slices < p.group() && slices < wanted; ++slices)
    if (p.group() % slices == 0 && chains * slices >= wanted) return slices;
  // From here on any divisor will do, and a group may have a billion heads: try the other factor.
  for (int heads = p.group() / slices; heads > 1; --heads)
    if (p.group() % heads == 0) return p.group() / heads;
  return p.group();
}

// The strategy for one sequence, its groups split as they will be.
constexpr Choice choose_strategy(Problem const& p, int resident_ctas) {
  auto const take = [&](Strategy strategy, Rule rule) {
    return Choice{strategy, p.group_split, rule};
  };
  if (p.windowed()) return take(rules::for_window(p), Rule::kWindow);
  if (!p.causal()) {
    if (Shift::why_not(p, resident_ctas))
      return take(kStrategyOf<Staggered>, Rule::kFullNotResident);
    if (steps_apart_in_shift(p) <= rules::kShiftMaxStepsApart)
      return take(kStrategyOf<Shift>, Rule::kFullMask);
    bool const one_at_a_time = p.heads_of_chain() == 1 && p.kv_tiles() >= kTicketsInFlight;
    return take(one_at_a_time ? kStrategyOf<Ascending> : kStrategyOf<Staggered>,
                Rule::kFullTooFarApart);
  }
  if (p.heads_of_chain() == 1) {
    return rules::symmetric_shift_is_ahead(p, resident_ctas)
               ? take(kStrategyOf<SymmetricShift>, Rule::kCausalFewTiles)
               : take(kStrategyOf<Zigzag>, Rule::kCausal);
  }
  int const steps = p.heads_of_chain() * p.tile_kv / p.tile_q;
  return steps > rules::kStaggeredMaxSteps && rules::serpentine_fills(p, resident_ctas)
             ? take(kStrategyOf<Serpentine>, Rule::kCausalDrifting)
             : take(kStrategyOf<Staggered>, Rule::kCausalShared);
}

// Strategy and slices for one sequence. `group_split` 0 is a wish for the best number.
constexpr Choice choose(Problem one, int resident_ctas, int group_split = 0) {
  one.batch = 1;
  one.group_split = 1;
  one.group_split = group_split > 0 ? group_split : choose_group_split(one);
  return choose_strategy(one, resident_ctas);
}

}  // namespace dash
