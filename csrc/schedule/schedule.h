// What a schedule is. Visit order, accumulation order and launch order are one type, because a
// valid triple is a property of the three together (docs/schedules.md).
//
// A schedule is a small value made from a Problem. It answers pure questions; the producer warp
// asks them on the device, the plan and the tests ask the same compiled code on the host. The
// producer has few registers, so every answer is computed anew, in integers of 32 bits.
//
//   ticket  a unit of launch. CTAs take tickets 0, 1, 2, … from an atomic counter and play each to
//           its end.
//   chain   one KV tile's run over the q tiles that see it, unbroken: dK and dV stay in registers.
//           A ticket is one chain, or several legs of a chain each.
//   visit   of a chain to a q tile; with GQA it is a step for each q head of the chain, heads
//           innermost, before the chain moves on.
//   turn    the place of the chain's KV tile in the q tile's sum: 0, 1, 2, … without gaps.
//   circle  tickets whose chains wait for each other in both directions.
#pragma once

#include <concepts>

#include "problem.h"

namespace dash {

// How many tickets a launch order assumes in flight when it decides which heads to interleave. It
// moves launches, never a turn, so a part with more or fewer SMs computes the same bits.
inline constexpr int kTicketsInFlight = 128;

// Narrow, because the producer warp divides by it: problems of 2^31 tiles or more are rejected.
using Ticket = int;

struct Chain {
  int batch;
  int kv_slice;  // a KV head, or a slice of its group
  int kv_tile;
  int leg;  // which of its ticket's chains this is
};

// The chain of `kv_tile` in a head, which here and below is a KV slice, numbered through the batch.
constexpr Chain chain_of(Problem const& problem, int head, int kv_tile, int leg = 0) {
  int const slices = problem.kv_slices();
  return {head / slices, head % slices, kv_tile, leg};
}

// Heads first … first + heads - 1, whose tickets a launch order interleaves.
struct HeadBlock {
  int first;
  int heads;
};

// The block of a ticket when heads are launched in blocks of `block` and each has `tickets`. The
// last block takes the remaining heads too: alone they would leave most of the chip idle to its
// end.
constexpr HeadBlock block_of(Ticket ticket, int tickets, int all_heads, int block) {
  int const last = all_heads < block ? 0 : all_heads / block - 1;
  if (last == 0) return {0, all_heads};  // a product of more heads than there are may not fit
  int const mine = ticket / (block * tickets);
  if (mine < last) return {mine * block, block};
  return {last * block, all_heads - last * block};
}

// With fewer of a head's tiles in flight than these, its q tiles stream from memory too often.
inline constexpr int kMinTilesAbreast = 8;

// The chain of a ticket when heads are launched in blocks with the tickets of a block interleaved
// tile by tile, KV tiles ascending. A block has as many heads as leave each of them `tiles_abreast`
// of the tickets in flight.
constexpr Chain chain_tile_by_tile(Problem const& problem, Ticket ticket, int tiles_abreast) {
  int const n = problem.kv_tiles();
  HeadBlock const block =
      block_of(ticket, n, problem.batch * problem.kv_slices(), kTicketsInFlight / tiles_abreast);
  int const in_block = ticket - block.first * n;
  return chain_of(problem, block.first + in_block % block.heads, in_block / block.heads);
}

struct Visit {
  int q_tile;
  int turn;
};

// Why a schedule may not run a problem. `given` and `wanted` are what the sentence quotes.
struct Refusal {
  enum class Reason {
    kNone,
    kNeedsCausalMask,
    kNeedsFullMask,  // given: whether there is a window
    kNeedsNoWindow,
    kNeedsEqualLengths,    // given: seqlen_q, wanted: seqlen_k
    kNeedsResidentCircle,  // given: CTAs that can be resident, wanted: tickets of a circle
  };
  Reason reason = Reason::kNone;
  int given = 0;
  int wanted = 0;

  constexpr explicit operator bool() const { return reason != Reason::kNone; }
};

// For orders that make no sense where every chain has the same visits.
constexpr Refusal unless_banded(Problem const& p) {
  return p.causal() || p.windowed() ? Refusal{} : Refusal{Refusal::Reason::kNeedsCausalMask};
}

// The grid of a launch: the CTAs that can be resident, as far as there are tickets for them.
constexpr int ctas_for(Ticket tickets, int resident_ctas) {
  return tickets < resident_ctas ? tickets : resident_ctas;
}

// The grid where all tickets are equally long, so that the launch takes whole rounds of it: the
// smallest with as few rounds as the largest is as fast by count, and up to 5% faster on the chip
// (docs/performance.md). As a multiple of the circle it lets none straddle two rounds.
constexpr int ctas_of_whole_rounds(Ticket tickets, int resident_ctas, int circle) {
  int const most = ctas_for(tickets, resident_ctas);
  int const rounds = (tickets - 1) / most + 1;
  int const fewest = ceil_div((tickets - 1) / rounds + 1, circle) * circle;
  return fewest < most ? fewest : most;
}

// What acyclic schedules share: a ticket is one chain, which visits all the q tiles that see it,
// and every wait points to a smaller ticket.
struct OneChainATicket {
  static constexpr bool kCyclic = false;

  Problem problem;

  constexpr Ticket num_tickets() const { return static_cast<Ticket>(problem.chains()); }
  constexpr int num_ctas(int resident_ctas) const { return ctas_for(num_tickets(), resident_ctas); }
  constexpr int num_legs(Ticket) const { return 1; }
  constexpr int num_visits(Chain const& c) const { return problem.q_tiles_of(c.kv_tile); }
  constexpr int largest_circle() const { return 1; }
  constexpr int num_circles() const { return num_tickets(); }
  constexpr Ticket first_of_circle(int circle) const { return circle; }
  constexpr Ticket end_of_circle(Ticket ticket, Chain const&) const { return ticket + 1; }
};

template <typename S>
concept Schedule = requires(S const s, Problem const p, Chain const c, Ticket ticket, int i) {
  { S::kName } -> std::convertible_to<char const*>;
  // Cyclic: why_not() demands a CTA for each ticket of a circle, and no CTA holds two of them (the
  // second would wait behind the first, which waits for it). docs/schedules.md, "Progress".
  { S::kCyclic } -> std::convertible_to<bool>;
  { S::why_not(p, /*resident_ctas=*/i) } -> std::same_as<Refusal>;
  { S{p} };
  { s.num_tickets() } -> std::same_as<Ticket>;
  { s.num_ctas(/*resident_ctas=*/i) } -> std::same_as<int>;  // of the grid: changes no bits
  { s.largest_circle() } -> std::same_as<int>;
  { s.num_circles() } -> std::same_as<int>;
  { s.first_of_circle(/*circle=*/i) } -> std::same_as<Ticket>;
  // The first ticket behind the circle of a ticket, whose chains c is one of.
  { s.end_of_circle(ticket, c) } -> std::same_as<Ticket>;
  { s.num_legs(ticket) } -> std::same_as<int>;
  { s.chain(ticket, /*leg=*/i) } -> std::same_as<Chain>;
  { s.num_visits(c) } -> std::same_as<int>;
  { s.visit(c, /*position=*/i) } -> std::same_as<Visit>;
};

}  // namespace dash
