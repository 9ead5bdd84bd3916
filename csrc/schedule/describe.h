// Refusals and choices as sentences for people. Host only.
#pragma once

#include <string>

#include "auto.h"

namespace dash {

inline std::string describe(Refusal const& refusal, char const* strategy) {
  std::string const name = std::string("strategy '") + strategy + "' ";
  std::string const given = std::to_string(refusal.given);
  std::string const wanted = std::to_string(refusal.wanted);
  switch (refusal.reason) {
    case Refusal::Reason::kNone: break;
    case Refusal::Reason::kNeedsCausalMask: return name + "needs a causal mask, got a full mask";
    case Refusal::Reason::kNeedsFullMask:
      return name + "needs a full mask, got a " + (refusal.given ? "window" : "causal mask");
    case Refusal::Reason::kNeedsNoWindow:
      return name + "needs a mask without a window, got a window";
    case Refusal::Reason::kNeedsEqualLengths:
      return name + "needs seqlen_q equal to seqlen_k, got seqlen_q " + given + " and seqlen_k " +
             wanted;
    case Refusal::Reason::kNeedsResidentCircle:
      return name + "needs " + wanted +
             " CTAs resident together because its chains wait for each other, got " + given;
  }
  return {};
}

// Why auto chose it, for the problem it was asked about.
inline std::string describe(Choice const& choice, Problem problem, int resident_ctas) {
  problem.group_split = choice.group_split;
  std::string const whose = choice.group_split > 1 ? "chain" : "KV head";
  std::string const shared = "auto: the causal mask, " + std::to_string(problem.heads_of_chain()) +
                             " q heads to a " + whose;
  std::string const alone = "auto: the causal mask, a " + whose + " for each q head";
  switch (choice.rule) {
    case Rule::kWindow: return "auto: a window, whose KV tiles follow each other down the band";
    case Rule::kFullMask: return "auto: the full mask";
    case Rule::kFullNotResident:
      return "auto: the full mask, and " +
             describe(Shift::why_not(problem, resident_ctas), Shift::kName);
    case Rule::kFullTooFarApart:
      return "auto: the full mask, and shift would come back to a q tile after " +
             std::to_string(static_cast<int64_t>(steps_apart_in_shift(problem) + 0.5)) +
             " steps, when L2 has lost it";
    case Rule::kCausal: return alone;
    case Rule::kCausalFewTiles:
      return alone + ", " + std::to_string(problem.kv_tiles()) + " KV tiles a head";
    case Rule::kCausalShared: return shared;
    case Rule::kCausalDrifting:
      return shared + ", so that chains differ by " +
             std::to_string(problem.heads_of_chain() * problem.tile_kv / problem.tile_q) + " steps";
  }
  return {};
}

}  // namespace dash
