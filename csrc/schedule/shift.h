// shift: the order for the full mask. The paper's shift, cut into groups of KV tiles: inside a
// group the chains start at rows spaced evenly through the head and wrap around, so no two of them
// want the same q tile in the same slot, and the groups follow one another.
//
// The size of a group and the spacing come from the shape alone (docs/schedules.md):
//   at most kMaxGroup chains, so that a group is resident on every Hopper part;
//   successive turns of a q tile at least two steps apart where the shape allows, because a turn
//   takes about a step to hand over. With GQA a row is `group` steps long, so one row suffices.
//
// Cyclic inside a group; between groups every wait points to a smaller ticket.
#pragma once

#include "schedule.h"

namespace dash {

struct Shift : OneChainATicket {
  static constexpr char const* kName = "shift";
  static constexpr bool kCyclic = true;
  static constexpr int kMaxGroup = 64;

  static constexpr int group_size(Problem const& p) {
    int const spaced = p.group() > 1 ? p.q_tiles() : p.q_tiles() / 2;
    int const most = spaced < 1 ? 1 : spaced < kMaxGroup ? spaced : kMaxGroup;
    int const groups = ceil_div(p.kv_tiles(), most);
    return ceil_div(p.kv_tiles(), groups);
  }

  static constexpr Refusal why_not(Problem const& p, int resident_ctas) {
    if (p.causal) return {Refusal::Reason::kNeedsFullMask};
    // Tickets are taken in order, so while an unfinished group has a ticket left to take, every
    // CTA plays a chain of that group: as many CTAs as chains get through. With one fewer each
    // chain comes to the row whose turn is the missing chain's, and none of them ends.
    int const wanted = group_size(p);
    if (resident_ctas < wanted) {
      return {Refusal::Reason::kNeedsResidentGroup, resident_ctas, wanted};
    }
    return {};
  }

  constexpr int num_ctas(int resident_ctas) const {
    return ctas_of_whole_rounds(num_tickets(), resident_ctas, group_size(problem));
  }

  // By blocks of heads that fill the chip: group 0 of every head of the block, then group 1 of
  // every head, …, so that a group finds its predecessor in the same head finished.
  constexpr Chain chain(Ticket ticket, int) const {
    int const n = problem.kv_tiles();
    int const size = group_size(problem);
    HeadBlock const block =
        block_of(ticket, n, problem.batch * problem.kv_heads, ceil_div(kTicketsInFlight, size));
    int const in_block = ticket - block.first * n;
    int const first = in_block / (block.heads * size) * size;  // KV tile that opens the group
    int const in_group = in_block - block.heads * first;
    int const chains = chains_of_group(first);
    return chain_of(problem, block.first + in_group / chains, first + in_group % chains);
  }

  constexpr int num_rows(Chain const&) const { return problem.q_tiles(); }

  // Row j belongs to the chain that starts at or last before it; that chain reaches it first, then
  // the chain before, and so on around the group.
  constexpr Row row(Chain const& c, int position) const {
    int const first = c.kv_tile - c.kv_tile % group_size(problem);
    int const chains = chains_of_group(first);
    int const spacing = problem.q_tiles() / chains;
    int const chain = c.kv_tile - first;

    int q_tile = chain * spacing + position;
    if (q_tile >= problem.q_tiles()) q_tile -= problem.q_tiles();
    int const owner = q_tile / spacing < chains ? q_tile / spacing : chains - 1;
    int const turn = owner - chain;
    return {q_tile, first + (turn < 0 ? turn + chains : turn)};
  }

 private:
  constexpr int chains_of_group(int first) const {
    int const left = problem.kv_tiles() - first;
    int const size = group_size(problem);
    return left < size ? left : size;
  }
};

static_assert(Schedule<Shift>);

}  // namespace dash
