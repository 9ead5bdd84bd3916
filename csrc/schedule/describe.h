// A Refusal as a sentence for people: which strategy, what it was given, what it wants. Host only.
#pragma once

#include <string>

#include "schedule.h"

namespace dash {

inline std::string describe(Refusal const& refusal, char const* strategy) {
  std::string const name = std::string("strategy '") + strategy + "' ";
  std::string const given = std::to_string(refusal.given);
  std::string const wanted = std::to_string(refusal.wanted);
  switch (refusal.reason) {
    case Refusal::Reason::kNone: break;
    case Refusal::Reason::kNeedsCausalMask: return name + "needs a causal mask, got a full mask";
    case Refusal::Reason::kNeedsFullMask: return name + "needs a full mask, got a causal mask";
    case Refusal::Reason::kNeedsEqualLengths:
      return name + "needs seqlen_q equal to seqlen_k, got seqlen_q " + given + " and seqlen_k " +
             wanted;
    case Refusal::Reason::kNeedsResidentGroup:
      return name + "needs " + wanted +
             " CTAs resident together because its chains wait for each " + "other, got " + given;
  }
  return {};
}

}  // namespace dash
