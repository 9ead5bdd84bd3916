// The table of strategies: one enum value and one case a strategy. Nothing else names them all.
#pragma once

#include "ascending.h"
#include "descending.h"
#include "serpentine.h"
#include "shift.h"
#include "spt.h"
#include "staggered.h"
#include "symmetric_shift.h"
#include "zigzag.h"

namespace dash {

enum class Strategy : int {
  kAscending,
  kDescending,
  kSpt,
  kShift,
  kSymmetricShift,
  kZigzag,
  kStaggered,
  kSerpentine
};

inline constexpr Strategy kStrategies[] = {
    Strategy::kAscending,      Strategy::kDescending, Strategy::kSpt,       Strategy::kShift,
    Strategy::kSymmetricShift, Strategy::kZigzag,     Strategy::kStaggered, Strategy::kSerpentine};

// Calls f with the schedule type's value for `problem`: f(Ascending{problem}) and so on.
template <typename F>
constexpr decltype(auto) visit_schedule(Strategy strategy, Problem const& problem, F&& f) {
  switch (strategy) {
    case Strategy::kDescending: return f(Descending{problem});
    case Strategy::kSpt: return f(Spt{problem});
    case Strategy::kShift: return f(Shift{problem});
    case Strategy::kSymmetricShift: return f(SymmetricShift{problem});
    case Strategy::kZigzag: return f(Zigzag{problem});
    case Strategy::kStaggered: return f(Staggered{problem});
    case Strategy::kSerpentine: return f(Serpentine{problem});
    case Strategy::kAscending: break;
  }
  return f(Ascending{problem});
}

}  // namespace dash
