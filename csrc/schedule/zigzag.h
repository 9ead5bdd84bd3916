// zigzag: a balanced order for the causal mask without cyclic waits. Half of the heads play spt
// (short chains first, upwards), the other half its mirror (long chains first, downwards). Blocks
// of the two kinds alternate, with the tickets of a block's heads interleaved tile by tile, so a
// CTA that ends a chain of length l next takes one of about length n + 1 - l. Any lengths.
//
// A head is mirrored if its KV slice index is odd, which is a property of its own sequence: the
// batch decides only when a head is launched, never in which order it adds.
//
// Acyclic: in a head the turns ascend with the tickets, from the last KV tile or from the first.
#pragma once

#include "descending.h"
#include "spt.h"

namespace dash {

struct Zigzag : OneChainATicket {
  static constexpr char const* kName = "zigzag";

  static constexpr Refusal why_not(Problem const& p, int) { return unless_banded(p); }

  // Of an odd number of KV heads one more is plain than mirrored. The surplus goes first: the
  // launch then ends with a mirrored block, whose last tickets are the shortest chains of all.
  constexpr Chain chain(Ticket ticket, int) const {
    int const n = problem.kv_tiles();
    int const surplus = problem.kv_slices() % 2 * problem.batch;
    int const surplus_tickets = surplus * n;
    if (ticket < surplus_tickets) {
      return chain_in_block(ticket, surplus, /*first_plain=*/0, /*kinds=*/1);
    }
    return chain_in_block(ticket - surplus_tickets, problem.kv_slices() / 2 * problem.batch,
                          surplus,
                          /*kinds=*/2);
  }

  constexpr Visit visit(Chain const& c, int position) const {
    return mirrored(c.kv_slice) ? Descending{problem}.visit(c, position)
                                : Spt{problem}.visit(c, position);
  }

 private:
  // A block's tickets fill the chip twice, because chains pair up well only while they outnumber
  // the CTAs. Where a chain has few steps for the number of chains (one q tile per KV tile, or
  // seqlen_q the shorter), a head's turns follow each other closely: then fewer of its chains in
  // flight together, which means more heads.
  constexpr int heads_of_block() const {
    int const half_steps = ceil_div(problem.q_tiles() * problem.heads_of_chain(), 2);
    int const n = problem.kv_tiles();
    return ceil_div(2 * kTicketsInFlight, n < half_steps ? n : half_steps);
  }

  static constexpr bool mirrored(int kv_slice) { return kv_slice % 2 != 0; }

  // `heads` of each kind, in blocks: a plain one, and with two kinds a mirrored one after it. Heads
  // of a kind are numbered through the batch, plain ones from `first_plain`.
  constexpr Chain chain_in_block(Ticket ticket, int heads, int first_plain, int kinds) const {
    int const n = problem.kv_tiles();
    HeadBlock const block = block_of(ticket, kinds * n, heads, heads_of_block());
    int const in_blocks = ticket - kinds * block.first * n;
    bool const mirror = in_blocks >= block.heads * n;
    int const in_block = mirror ? in_blocks - block.heads * n : in_blocks;
    int const head = block.first + in_block % block.heads + (mirror ? 0 : first_plain);
    int const tile = in_block / block.heads;

    int const heads_of_kind = (problem.kv_slices() + (mirror ? 0 : 1)) / 2;  // in one sequence
    return {head / heads_of_kind, head % heads_of_kind * 2 + (mirror ? 1 : 0),
            mirror ? tile : n - 1 - tile, 0};
  }
};

static_assert(Schedule<Zigzag>);

}  // namespace dash
