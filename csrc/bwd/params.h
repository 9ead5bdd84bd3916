// What the kernels receive. Host code fills it (launch.cuh); device code only reads it.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "../schedule/problem.h"
#include "../schedule/strategies.h"
#include "launch.h"

namespace dash {

struct MainParams {
  CUtensorMap q, dout;  // boxes of (64 columns, kTileQ rows), 128-byte swizzle
  CUtensorMap k, v;     // boxes of (64 columns, kTileKv rows), 128-byte swizzle
  Problem problem;
  Strategy strategy;
  bool cyclic;         // of the strategy
  Ticket num_tickets;  // of the strategy for this problem
  int num_ctas;        // of the grid
  int q_tiles, group;  // of the problem
  int head_dim;
  float scale_log2;     // softmax_scale · log2 e: turns S into the exponent of 2
  float softmax_scale;  // of dK and dQ
  TensorView dq, dk, dv;
  float const* lse_log2;     // (q tiles in all, kTileQ), padded rows +inf
  float const* minus_delta;  // likewise, padded rows 0
  float* dq_accum;           // (q tiles in all, kDqTileFloats) in fragment order
  float* dk_parts;           // (chains, kTileKv · kHeadDim) in fragment order; null: whole groups
  float* dv_parts;           // likewise
  int* dq_turns;             // (q tiles in all)
  int* next_ticket;
};

struct PreprocessParams {
  TensorView out, dout, dq;
  LseView lse;
  Problem problem;
  int head_dim;
  float* lse_log2;
  float* minus_delta;
  int* dq_turns;
  int* next_ticket;
};

// Where the dq_tile-th of all q tiles lies.
struct TilePlace {
  int q_tile, head, batch;
};
constexpr TilePlace tile_place(int dq_tile, int q_tiles, int heads) {
  return {dq_tile % q_tiles, dq_tile / q_tiles % heads, dq_tile / q_tiles / heads};
}

// One step of a chain. The planner writes it, the loader copies it into the stage that carries the
// step's Q tile. Loader, MMA warpgroups and dQ writers know nothing of schedules beyond this.
struct alignas(16) StepDescriptor {
  int dq_tile;  // index among all q tiles: (batch · heads + head) · q_tiles + q_tile (tile_place)
  int turn;     // when this step may add to the tile's sum
  int flags;
  int q_tile;
  int kv_tile;
  int kv_head;
  int batch;
  int head;
};

enum StepFlag : int {
  kFirstOfChain = 1,  // K and V of a new KV tile arrive; dK and dV start from nothing
  kLastOfChain = 2,   // dK and dV are complete after this step
  kMasked = 4,        // some of the step's scores are hidden by the mask or lie past the last key
  kEndOfWork = 8,     // no step: the CTA is done
};

}  // namespace dash
