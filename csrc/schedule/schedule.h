// What a schedule is. Visit order, accumulation order and launch order are one type, because a valid
// triple is a property of the three together (shared/SCHEDULES.md §4).
//
// A schedule is a small value made from a Problem. It answers pure questions; the producer warp asks
// them on the device, the plan and the tests ask the same compiled code on the host.
//
//   ticket  a unit of launch. CTAs take tickets 0, 1, 2, … from an atomic counter and play each to its end.
//   chain   one KV tile's run over the q tiles that see it, unbroken: dK and dV stay in registers.
//   row     one q tile of a chain; with GQA a row is played once for each q head of the group, heads
//           innermost, before the chain moves to its next row.
//   turn    the place of the chain's KV tile in the q tile's sum: 0, 1, 2, … without gaps.
#pragma once

#include <concepts>

#include "problem.h"

namespace dash {

struct Chain {
  int batch;
  int kv_head;
  int kv_tile;
  int part;  // which of its ticket's chains this is, for schedules that play several in one ticket
};

// The chain of `kv_tile` in a head, heads being numbered through the batch: batch · kv_heads + kv_head.
constexpr Chain chain_of(Problem const& problem, int64_t head, int kv_tile, int part = 0) {
  return {static_cast<int>(head / problem.kv_heads), static_cast<int>(head % problem.kv_heads),
          kv_tile, part};
}

struct Row {
  int q_tile;
  int turn;
};

// Why a schedule may not run a problem. `given` and `wanted` are what the sentence quotes.
struct Refusal {
  enum class Reason {
    kNone,
    kNeedsCausalMask,
    kNeedsFullMask,
    kNeedsEqualLengths,   // given: seqlen_q, wanted: seqlen_k
    kNeedsWholeTiles,     // given: seqlen, wanted: a multiple of tile_kv
    kNeedsMoreQTiles,     // given: q tiles, wanted: at least this many
    kNeedsResidentGroup,  // given: CTAs that can be resident, wanted: chains that wait for each other
  };
  Reason reason = Reason::kNone;
  int given = 0;
  int wanted = 0;

  constexpr explicit operator bool() const { return reason != Reason::kNone; }
};

template <typename S>
concept Schedule = requires(S const s, Problem const p, Chain const c, int64_t ticket, int i) {
  { S::kName } -> std::convertible_to<char const*>;
  // Cyclic: chains of a group wait for each other in both directions, so the group must be resident
  // together and the launch is cooperative. Acyclic: every wait points to a smaller ticket.
  { S::kCyclic } -> std::convertible_to<bool>;
  { S::why_not(p, /*resident_ctas=*/i) } -> std::same_as<Refusal>;
  { S{p} };
  { s.num_tickets() } -> std::same_as<int64_t>;
  { s.num_chains(ticket) } -> std::same_as<int>;        // chains in this ticket
  { s.chain(ticket, i) } -> std::same_as<Chain>;        // the i-th of them
  { s.num_rows(c) } -> std::same_as<int>;               // q tiles this chain visits
  { s.row(c, /*position=*/i) } -> std::same_as<Row>;    // the q tile at a position, and its turn
};

}  // namespace dash
