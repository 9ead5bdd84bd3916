// symmetric_shift: the paper's balanced order for the causal mask, seqlen_q equal to seqlen_k. One
// ticket plays KV tile i and then its mirror n - 1 - i, so that all tickets are equally long.
//
// In blocks of one KV tile's q tiles (visited upwards), half = n / 2:
//
//        KV tile  0 1 2 | 3 4 5      1 rectangle  KV tiles below wide, shifted: all blocks
//   block 0       2     |                         half … n - 1, starting at half + i, wrapping
//         1       2 2   |            2 lower      KV tile i: blocks i … half - 1
//         2       2 2 2 |            3 upper      the mirror: blocks n - 1 … n - 1 - i, downwards
//         3       1 1 1 | 3
//         4       1 1 1 | 3 3        wide = n - half is half for even n. For odd n the middle tile
//         5       1 1 1 | 3 3 3      is a ticket by itself whose chain is all rectangle.
//
// A ragged last block is visited by every chain of the rectangle and by every mirror, so it makes
// them shorter by the same q tiles and no turn earlier than the one before it.
//
// Cyclic inside the rectangle; the triangles wait for tickets of the same head only.
#pragma once

#include "schedule.h"

namespace dash {

struct SymmetricShift {
  static constexpr char const* kName = "symmetric_shift";
  static constexpr bool kCyclic = true;

  Problem problem;

  static constexpr Refusal why_not(Problem const& p, int resident_ctas) {
    if (p.windowed()) return {Refusal::Reason::kNeedsNoWindow};
    if (!p.causal()) return {Refusal::Reason::kNeedsCausalMask};
    if (p.seqlen_q != p.seqlen_k) {
      return {Refusal::Reason::kNeedsEqualLengths, p.seqlen_q, p.seqlen_k};
    }
    // As for shift: each ticket of a head plays the rectangle to its end only after every other has
    // begun it.
    int const wanted = ceil_div(p.kv_tiles(), 2);
    if (resident_ctas < wanted) {
      return {Refusal::Reason::kNeedsResidentCircle, resident_ctas, wanted};
    }
    return {};
  }

  constexpr Ticket num_tickets() const { return problem.batch * problem.kv_slices() * wide(); }

  constexpr int num_ctas(int resident_ctas) const {
    return ctas_of_whole_rounds(num_tickets(), resident_ctas, wide());
  }

  constexpr int largest_circle() const { return wide(); }
  constexpr int num_circles() const { return problem.batch * problem.kv_slices(); }
  constexpr Ticket first_of_circle(int circle) const { return circle * wide(); }
  constexpr Ticket end_of_circle(Ticket ticket, Chain const&) const {
    return (ticket / wide() + 1) * wide();
  }

  constexpr int num_legs(Ticket ticket) const { return ticket % wide() < half() ? 2 : 1; }

  constexpr Chain chain(Ticket ticket, int leg) const {
    int const i = ticket % wide();
    return chain_of(problem, ticket / wide(), leg == 0 ? i : problem.kv_tiles() - 1 - i, leg);
  }

  constexpr int num_visits(Chain const& c) const {
    return problem.q_tiles() - c.kv_tile * q_tiles_of_block();
  }

  constexpr Visit visit(Chain const& c, int position) const {
    int const q = q_tiles_of_block();
    if (c.leg == 1) return upper(c.kv_tile, position);
    int const rectangle = problem.q_tiles() - half() * q;  // its q tiles
    if (position >= rectangle) {
      int const in_triangle = position - rectangle;
      return {c.kv_tile * q + in_triangle, in_triangle / q};
    }
    int q_tile = (half() + c.kv_tile) * q + position;
    if (q_tile >= problem.q_tiles()) q_tile -= rectangle;
    int const turn = q_tile / q - half() - c.kv_tile;
    return {q_tile, turn < 0 ? turn + wide() : turn};
  }

 private:
  // KV tiles add in ascending order, after all of the rectangle's.
  constexpr Visit upper(int kv_tile, int position) const {
    int const q = q_tiles_of_block();
    int const last_block = (problem.kv_tiles() - 1) * q;  // its first q tile
    int const after_last = position - (problem.q_tiles() - last_block);
    if (after_last < 0) return {last_block + position, kv_tile};
    return {last_block - (after_last / q + 1) * q + after_last % q, kv_tile};
  }

  constexpr int half() const { return problem.kv_tiles() / 2; }
  constexpr int wide() const { return problem.kv_tiles() - half(); }
  constexpr int q_tiles_of_block() const { return problem.tile_kv / problem.tile_q; }
};

static_assert(Schedule<SymmetricShift>);

}  // namespace dash
