// What the kernels receive, and what the main kernel's roles pass to each other. Host code fills
// the parameters (launch.cuh); device code only reads them.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "../schedule/packing.h"
#include "dealer.cuh"
#include "launch.h"

namespace dash {

// The sequences of a packed call, in launch order: written by preprocess, read by the main kernel.
struct SequenceTable {
  int* num_tickets;    // of all sequences; 0 where cu_seqlens is malformed
  int* malformed;      // not zero: cu_seqlens does not start at 0, decreases, or leaves the tensor
  int* first_tickets;  // (batch), ascending
  SequenceRecord* records;  // (batch)
  int* group_splits;        // (batch), in the order of cu_seqlens; read by the sum of the parts
};

// What all kernels of a call share.
struct CallParams {
  // A dense call's problem. Of a packed call: heads, mask and tiles, which its sequences share.
  Problem problem;
  PackedSequences packed;  // batch 0: a dense call
  SequenceTable table;     // of a packed call
  int dq_tiles_of_head;    // numbered in one head: of a sequence, or of all sequences of a pack
  int kv_tiles_of_head;    // likewise
  HeadDims head_dims;
  float softmax_scale;
  TensorView dq, dk, dv;
  // (dq tiles in all, kTileQ), rows that see no key or do not exist: +inf. Where scores start from
  // it (KernelConfig::kScoresFromLse), −lse / softmax_scale, and there what makes P = 0.
  float* lse_log2;
  float* minus_delta;  // likewise, 0
  float* dq_accum;     // (dq tiles in all, kDqTileFloats) in fragment order
  float* dk_parts;     // (chains, kTileKv · kHeadDim) in fragment order, of split groups
  float* dv_parts;     // (chains, kTileKv · kHeadDimV), likewise
  int* dq_turns;       // (dq tiles in all)
  DealerCounters dealer;

  __host__ __device__ bool is_packed() const { return packed.batch > 0; }
};

struct MainParams : CallParams {
  CUtensorMap q, dout;  // boxes of (64 columns, kTileQ rows), 128-byte swizzle
  CUtensorMap k;        // boxes of (kKBoxColumns, kTileKv rows), swizzled as wide as they are
  CUtensorMap v;        // boxes of (64 columns, kTileKv rows), 128-byte swizzle
  Strategy strategy;    // of a dense call
  Ticket num_tickets;   // likewise
  int num_circles;      // likewise
  int squad_size;       // likewise: the largest circle
  float scale_log2;     // softmax_scale · log2 e: turns S into the exponent of 2
};

struct PreprocessParams : CallParams {
  TensorView out, dout;
  LseView lse, dlse;        // dlse may be null
  float lse_factor;         // of lse in lse_log2: log2 e or −1 / softmax_scale
  int q_blocks, kv_blocks;  // CTAs for q tiles and, behind them, for KV tiles that may need zeros
  int squads;               // of a dense call
  bool choose_strategy;     // of a packed call, for each sequence
  Strategy strategy;        // else
  int group_split;          // 0: choose
  int resident_ctas;
};

// Which of a CTA's q tiles or KV tiles lies where.
struct TilePlace {
  int tile, head, batch;
};
constexpr TilePlace tile_place(int index, int tiles, int heads) {
  return {index % tiles, index / tiles % heads, index / tiles / heads};
}

// One step of a chain, as MMA warpgroups and dQ writers see it. They know nothing of schedules,
// sequences or masks beyond this.
struct alignas(16) StepDescriptor {
  int dq_tile;  // among all q tiles: of the ordered sum, its turn counter, lse and delta
  int turn;     // when this step may add to the tile's sum
  int flags;
  int columns;  // of the KV tile that exist; with the next two the step's mask (StepMask)
  int first_row;
  int last_row;
  int kv_row;      // of the KV tile's first, in dk and dv
  int batch;       // in dk and dv
  int kv_head;     // likewise
  int parts_tile;  // of dk_parts and dv_parts, or negative: whole groups
  int unused[2];
};

// The same with where TMA finds the step's tiles. Row r of a sequence is at coordinates
// (… row … + r, … slab …): tma.cuh says what a slab is.
struct alignas(16) PlannedStep {
  StepDescriptor step;
  int q_row, q_slab, head;
  int k_row, k_slab, kv_head;
  int keyless_rows;  // of the q tile, from its first: nothing in them is read for its value
};

enum StepFlag : int {
  kFirstOfChain = 1,  // K and V of a new KV tile arrive; dK and dV start from nothing
  kLastOfChain = 2,   // dK and dV are complete after this step
  kHidesRight = 4,    // scores hidden by the band's right-hand side or past the last key
  kHidesLeft = 8,     // by its left-hand side
  kKeylessRows = 16,  // the q tile opens with rows that see no key
  kEndOfWork = 32,    // no step: the CTA is done
};

}  // namespace dash
