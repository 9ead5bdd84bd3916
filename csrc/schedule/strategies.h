// The table of strategies: one enum value and one case a strategy. Nothing else names them all.
#pragma once

#include "ascending.h"
#include "descending.h"
#include "spt.h"

namespace dash {

enum class Strategy : int { kAscending, kDescending, kSpt };

inline constexpr Strategy kStrategies[] = {Strategy::kAscending, Strategy::kDescending,
                                           Strategy::kSpt};

// Calls f with the schedule type's value for `problem`: f(Ascending{problem}) and so on.
template <typename F>
constexpr decltype(auto) visit_schedule(Strategy strategy, Problem const& problem, F&& f) {
  switch (strategy) {
    case Strategy::kDescending: return f(Descending{problem});
    case Strategy::kSpt: return f(Spt{problem});
    case Strategy::kAscending: break;
  }
  return f(Ascending{problem});
}

}  // namespace dash
