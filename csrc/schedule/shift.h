// shift: the order for the full mask. The paper's shift, with a head's KV tiles cut into circles:
// inside a circle the chains start at q tiles spaced evenly through the head and wrap around, so no
// two of them want the same q tile in the same slot, and the circles follow one another.
//
// The size of a circle and the spacing come from the shape alone (docs/schedules.md):
//   at most kMaxCircle chains, so that a circle is resident on every Hopper part;
//   successive turns of a q tile at least two steps apart where the shape allows, because a turn
//   takes about a step to hand over. With GQA a visit is several steps long, so one suffices.
//
// Cyclic inside a circle; between circles every wait points to a smaller ticket.
#pragma once

#include "schedule.h"

namespace dash {

struct Shift : OneChainATicket {
  static constexpr char const* kName = "shift";
  static constexpr bool kCyclic = true;
  static constexpr int kMaxCircle = 64;

  static constexpr int circle_size(Problem const& p) {
    int const spaced = p.heads_of_chain() > 1 ? p.q_tiles() : p.q_tiles() / 2;
    int const most = spaced < 1 ? 1 : spaced < kMaxCircle ? spaced : kMaxCircle;
    int const circles = ceil_div(p.kv_tiles(), most);
    return ceil_div(p.kv_tiles(), circles);
  }

  static constexpr Refusal why_not(Problem const& p, int resident_ctas) {
    if (p.causal() || p.windowed()) return {Refusal::Reason::kNeedsFullMask, p.windowed()};
    // With one CTA fewer than a circle has chains each of these comes to the q tile whose turn is
    // the missing chain's, and none of them ends.
    int const wanted = circle_size(p);
    if (resident_ctas < wanted) {
      return {Refusal::Reason::kNeedsResidentCircle, resident_ctas, wanted};
    }
    return {};
  }

  constexpr int num_ctas(int resident_ctas) const {
    return ctas_of_whole_rounds(num_tickets(), resident_ctas, circle_size(problem));
  }

  // By blocks of heads that fill the chip: circle 0 of every head of the block, then circle 1 of
  // every head, …, so that a circle finds its predecessor in the same head finished.
  constexpr Chain chain(Ticket ticket, int) const {
    int const n = problem.kv_tiles();
    int const size = circle_size(problem);
    HeadBlock const block = block_of_unit(ticket, n);
    int const in_block = ticket - block.first * n;
    int const first = in_block / (block.heads * size) * size;  // KV tile that opens the circle
    int const in_circles = in_block - block.heads * first;
    int const chains = chains_of_circle(first);
    return chain_of(problem, block.first + in_circles / chains, first + in_circles % chains);
  }

  constexpr int largest_circle() const { return circle_size(problem); }
  constexpr int num_circles() const {
    return problem.batch * problem.kv_slices() * circles_of_head();
  }
  constexpr Ticket first_of_circle(int circle) const {
    int const n = problem.kv_tiles(), size = circle_size(problem);
    HeadBlock const block = block_of_unit(circle, circles_of_head());
    int const in_block = circle - block.first * circles_of_head();
    int const first = in_block / block.heads * size;  // KV tile that opens the circle
    return block.first * n + block.heads * first + in_block % block.heads * chains_of_circle(first);
  }
  constexpr Ticket end_of_circle(Ticket ticket, Chain const& c) const {
    int const in_circle = c.kv_tile % circle_size(problem);
    return ticket - in_circle + chains_of_circle(c.kv_tile - in_circle);
  }

  constexpr int num_legs(Ticket) const { return 1; }
  constexpr int num_visits(Chain const&) const { return problem.q_tiles(); }

  // q tile j belongs to the chain that starts at or last before it; that chain reaches it first,
  // then the chain before, and so on around the circle.
  constexpr Visit visit(Chain const& c, int position) const {
    int const first = c.kv_tile - c.kv_tile % circle_size(problem);
    int const chains = chains_of_circle(first);
    int const spacing = problem.q_tiles() / chains;
    int const chain = c.kv_tile - first;

    int q_tile = chain * spacing + position;
    if (q_tile >= problem.q_tiles()) q_tile -= problem.q_tiles();
    int const owner = q_tile / spacing < chains ? q_tile / spacing : chains - 1;
    int const turn = owner - chain;
    return {q_tile, first + (turn < 0 ? turn + chains : turn)};
  }

 private:
  constexpr int circles_of_head() const {
    return ceil_div(problem.kv_tiles(), circle_size(problem));
  }
  // The block of heads of a unit of launch of which each head has so many.
  constexpr HeadBlock block_of_unit(int unit, int units_of_head) const {
    return block_of(unit, units_of_head, problem.batch * problem.kv_slices(),
                    ceil_div(kTicketsInFlight, circle_size(problem)));
  }
  constexpr int chains_of_circle(int first) const {
    return smaller(problem.kv_tiles() - first, circle_size(problem));
  }
};

static_assert(Schedule<Shift>);

}  // namespace dash
