// The one plan of shared memory.
#pragma once

#include "../sm90/mbarrier.cuh"
#include "config.h"
#include "params.h"

namespace dash {

// The sequence that a CTA's tickets are of: a dense call's batch, or one of a pack.
struct ScheduledSequence {
  Problem problem;
  Strategy strategy;
  Ticket first_ticket;
  int q_row, q_slab;  // TMA coordinates of its first row (tma.cuh)
  int k_row, k_slab;
  int k_start;          // its first row of dk and dv
  int q_tile, kv_tile;  // number of its first in a head
};

// The tile scheduler's own: 24 registers a lane do not hold it, and all lanes of its warp read it.
struct SchedulerState {
  ScheduledSequence sequence;
  int place;  // of the sequence in the table
  SquadMember member;
  Ticket ticket, num_tickets;
  int ctas;              // of the grid
  Ticket end_of_circle;  // of the ticket
  int leg, num_legs;     // of the ticket: the next one, and all
  Chain chain;
  int heads_of_chain;
  int step, num_steps;  // of the chain: the first not yet planned, and all
  uint32_t posted;      // steps
};

// Operand tiles are stored as TMA writes them: blocks of 64 columns (of K: kKBoxColumns), each
// (rows, 64) with the 128-byte swizzle, which repeats every 1,024 bytes; hence the alignment.
template <typename Element, typename Config>
struct alignas(1024) SharedStorage {
  Element k[Config::kKSlots][Config::kTileKv * Config::kHeadDim];
  Element v[Config::kTileKv * Config::kHeadDimV];
  Element q[Config::kStages][Config::kTileQ * Config::kHeadDim];
  Element dout[Config::kStages][Config::kTileQ * Config::kHeadDimV];
  Element ds[Config::kDsStages][Config::kTileQ * Config::kTileKv];
  float dq[Config::kDqTileFloats];                  // staging, fragment order
  float lse_log2[Config::kStages][Config::kTileQ];  // as CallParams says
  float minus_delta[Config::kStages][Config::kTileQ];
  SchedulerState scheduler;
  PlannedStep plan[Config::kPlannedSteps];
  StepDescriptor steps[Config::kStages];

  // See barriers.h for who arrives and who waits.
  Mbarrier plan_full[Config::kPlannedSteps], plan_empty[Config::kPlannedSteps];
  Mbarrier k_full[Config::kKSlots], k_empty[Config::kKSlots];
  Mbarrier v_full, v_empty;
  Mbarrier q_full[Config::kStages], q_empty[Config::kStages];
  Mbarrier repair;
  Mbarrier dout_full[Config::kStages], dout_empty[Config::kStages];
  Mbarrier ds_full[Config::kDsStages];
  Mbarrier dq_full[Config::kDqWriters], dq_empty[Config::kDqWriters];
  Mbarrier ds_empty;
};

inline constexpr int kMaxSharedBytes = 227 * 1024;

}  // namespace dash
