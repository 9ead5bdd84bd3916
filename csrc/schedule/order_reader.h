// A schedule's order of one sequence as a stream of words: what a fingerprint hashes, a block at a
// time, so that it never lies in memory whole. Host only.
//
// Chains come by (kv_slice, kv_tile), whatever their tickets: kv_slice, kv_tile, number of visits,
// and then either
//   visits  q_tile and turn of each;
//   runs    q_tile, turn, step of q_tile, step of turn, visits: the longest runs of even steps.
// Both say the same. Runs are few, where visits grow with the square of the length.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <vector>

#include "strategies.h"

namespace dash {

class OrderReader {
 public:
  OrderReader(Strategy strategy, Problem const& problem, bool as_runs)
      : problem_(problem), strategy_(strategy), as_runs_(as_runs) {
    if (problem.batch != 1) throw std::invalid_argument("an order is read of a batch of 1");
    places_.resize(problem.chains());
    visit_schedule(strategy_, problem_, [&](auto const& s) {
      for (Ticket ticket = 0; ticket < s.num_tickets(); ++ticket) {
        for (int leg = 0; leg < s.num_legs(ticket); ++leg) {
          Chain const c = s.chain(ticket, leg);
          places_[int64_t{c.kv_slice} * problem_.kv_tiles() + c.kv_tile] = {ticket, leg};
        }
      }
    });
  }

  // The visits of all chains.
  int64_t visits() const {
    int64_t all = 0;
    visit_schedule(strategy_, problem_, [&](auto const& s) {
      for (Place const& place : places_) all += s.num_visits(s.chain(place.ticket, place.leg));
    });
    return all;
  }

  // Writes the next words, at most `size`, which is at least 8; 0 words at the end.
  size_t read(int64_t* words, size_t size) {
    return visit_schedule(strategy_, problem_, [&](auto const& s) { return read(s, words, size); });
  }

 private:
  struct Place {
    Ticket ticket;
    int leg;
  };

  static constexpr size_t kMostAtOnce = 5;

  template <typename S>
  size_t read(S const& s, int64_t* words, size_t size) {
    size_t n = 0;
    for (; next_ < places_.size(); ++next_, in_chain_ = false) {
      Chain const chain = s.chain(places_[next_].ticket, places_[next_].leg);
      int const visits = s.num_visits(chain);
      if (n + kMostAtOnce > size) return n;
      if (!in_chain_) {
        for (int64_t const word : {chain.kv_slice, chain.kv_tile, visits}) words[n++] = word;
        in_chain_ = true;
        position_ = 0;
      }
      while (position_ < visits) {
        if (n + kMostAtOnce > size) return n;
        n += as_runs_ ? write_run(s, chain, visits, words + n) : write_visit(s, chain, words + n);
      }
    }
    return n;
  }

  template <typename S>
  size_t write_visit(S const& s, Chain const& chain, int64_t* words) {
    Visit const visit = s.visit(chain, position_++);
    words[0] = visit.q_tile;
    words[1] = visit.turn;
    return 2;
  }

  template <typename S>
  size_t write_run(S const& s, Chain const& chain, int visits, int64_t* words) {
    int const first = position_++;
    Visit const from = s.visit(chain, first);
    int q_step = 0, turn_step = 0;
    for (Visit last = from; position_ < visits; ++position_) {
      Visit const visit = s.visit(chain, position_);
      int const q_by = visit.q_tile - last.q_tile, turn_by = visit.turn - last.turn;
      if (position_ == first + 1) {
        q_step = q_by;
        turn_step = turn_by;
      } else if (q_by != q_step || turn_by != turn_step) {
        break;
      }
      last = visit;
    }
    words[0] = from.q_tile;
    words[1] = from.turn;
    words[2] = q_step;
    words[3] = turn_step;
    words[4] = position_ - first;
    return kMostAtOnce;
  }

  Problem problem_;
  Strategy strategy_;
  bool as_runs_;
  std::vector<Place> places_;  // of each chain, by (kv_slice, kv_tile)
  size_t next_ = 0;            // chain
  bool in_chain_ = false;      // whether its first words are written
  int position_ = 0;           // in it
};

}  // namespace dash
