// A schedule chosen at run time. One value the producer warp holds instead of an instantiation of
// its loop for each strategy: each question is one switch, so the code that loads tiles exists once
// and its registers do not depend on the strategy.
#pragma once

#include "strategies.h"

namespace dash {

class AnySchedule {
  template <typename F>  // before its uses: its return type is deduced
  constexpr decltype(auto) ask(F&& f) const {
    return visit_schedule(strategy_, problem_, f);
  }

 public:
  constexpr AnySchedule(Strategy strategy, Problem const& problem)
      : problem_(problem), strategy_(strategy) {}

  constexpr bool cyclic() const {
    return ask([](auto const& s) { return s.kCyclic; });
  }
  constexpr Ticket num_tickets() const {
    return ask([](auto const& s) { return s.num_tickets(); });
  }
  constexpr int num_ctas(int resident_ctas) const {
    return ask([&](auto const& s) { return s.num_ctas(resident_ctas); });
  }
  constexpr int num_chains(Ticket ticket) const {
    return ask([&](auto const& s) { return s.num_chains(ticket); });
  }
  constexpr Chain chain(Ticket ticket, int i) const {
    return ask([&](auto const& s) { return s.chain(ticket, i); });
  }
  constexpr int num_rows(Chain const& c) const {
    return ask([&](auto const& s) { return s.num_rows(c); });
  }
  constexpr Row row(Chain const& c, int position) const {
    return ask([&](auto const& s) { return s.row(c, position); });
  }

 private:
  Problem const& problem_;
  Strategy strategy_;
};

}  // namespace dash
