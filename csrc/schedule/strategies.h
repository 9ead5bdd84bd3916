// The list of strategies: one line each. Nothing else names them all.
#pragma once

#include <cstddef>
#include <type_traits>

#include "ascending.h"
#include "descending.h"
#include "serpentine.h"
#include "shift.h"
#include "spt.h"
#include "staggered.h"
#include "strategy.h"
#include "symmetric_shift.h"
#include "zigzag.h"

namespace dash {

template <Schedule... S>
struct ScheduleList {
  static constexpr int kSize = sizeof...(S);

  template <typename Wanted>
  static constexpr Strategy number_of() {
    int number = 0;
    bool const found = ((std::is_same_v<Wanted, S> || (++number, false)) || ...);
    static_assert((std::is_same_v<Wanted, S> || ...), "not in the list");
    return Strategy{found ? number : 0};
  }

  template <typename F>
  static constexpr decltype(auto) visit(Strategy strategy, Problem const& problem, F&& f) {
    return visit_from<F, S...>(static_cast<int>(strategy), problem, f);
  }

 private:
  template <typename F, Schedule First, Schedule... Rest>
  static constexpr decltype(auto) visit_from(int number, Problem const& problem, F& f) {
    if constexpr (sizeof...(Rest) > 0)
      if (number != 0) return visit_from<F, Rest...>(number - 1, problem, f);
    return f(First{problem});
  }
};

using Strategies =
    ScheduleList<Ascending, Descending, Spt, Shift, SymmetricShift, Zigzag, Staggered, Serpentine>;

template <typename S>
inline constexpr Strategy kStrategyOf = Strategies::number_of<S>();

// Calls f with the schedule type's value for `problem`: f(Ascending{problem}) and so on.
template <typename F>
constexpr decltype(auto) visit_schedule(Strategy strategy, Problem const& problem, F&& f) {
  return Strategies::visit(strategy, problem, f);
}

}  // namespace dash
