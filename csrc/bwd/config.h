// What a compiled kernel is: tiles, stages, roles, registers. Pure constexpr, so that the host part
// builds without CUDA; every other file asks here.
#pragma once

#include "../schedule/packing.h"
#include "launch.h"

namespace dash {

inline constexpr int kWarp = 32;
inline constexpr int kWarpgroup = 128;
inline constexpr float kLog2E = 1.4426950408889634f;

// The smallest bucket that holds the head dimensions; TMA fills the columns between with zeros.
constexpr HeadDims bucket_of(HeadDims d) {
  if (d.qk <= 64 && d.v <= 64) return {64, 64};
  if (d.qk <= 128 && d.v <= 128) return {128, 128};
  return {192, 128};
}

template <int kHeadDim_, int kHeadDimV_ = kHeadDim_>
struct KernelConfig {
  static constexpr int kHeadDim = kHeadDim_;    // of q and k
  static constexpr int kHeadDimV = kHeadDimV_;  // of v and dO
  static constexpr HeadDims kHeadDims = {kHeadDim, kHeadDimV};
  static_assert(bucket_of(kHeadDims) == kHeadDims, "not a bucket of head dimensions");

  // 160 registers for dK and dV leave a step another order (mma_wide.cuh).
  static constexpr bool kWide = kHeadDim > 128;

  static constexpr int kTileQ = kHeadDim == 64 ? 128 : 64;
  static constexpr int kTileKv = 128;

  static constexpr int kPlannedSteps = 8;  // steps that the scheduler may be ahead of the loads
  static constexpr int kStages = 2;        // of Q and of dO
  // Where shared memory holds two, the next chain's K is there when this one ends.
  static constexpr int kKSlots = kWide ? 1 : 2;
  static constexpr int kDsStages = kWide ? 1 : 2;  // mma.cuh says why two need no ds_empty

  // Columns of K in a box of TMA, which is as wide as its swizzle. A warpgroup's half of dQ's
  // columns must begin at a box.
  static constexpr int kKBoxColumns = kWide ? 32 : 64;

  // The accumulator of S starts from −lse / softmax_scale, like that of dP from −delta: there are
  // no registers for lse beside S.
  static constexpr bool kScoresFromLse = kWide;

  static constexpr int kMmaWarpgroups = 2;
  static constexpr int kMmaThreads = kMmaWarpgroups * kWarpgroup;
  static constexpr int kMmaWarps = kMmaThreads / kWarp;
  static constexpr int kThreads = kWarpgroup + kMmaThreads;
  static constexpr int kDqWriters = 2;  // alternate over steps: each has two steps for its adds

  // Registers decide where dK of a step is begun (mma.cuh). With a 64-row q tile dS is carried in
  // registers into the next step, and dK opens that. With 128 rows they spill, so dK closes its own
  // step; 64 rows at head dimension 64 are slower by a quarter.
  static constexpr bool kLateDk = kTileQ == 64;

  // Of the conversion of dQ. Said, because for 32 floats a thread ptxas guesses 6 and spills.
  static constexpr int kConvertCtasPerSm = kWide ? 3 : 5;
  static constexpr int kPartsCtasPerSm = kWide ? 1 : 2;  // of the sum of the parts

  static constexpr int kServiceRegisters = 24;  // planner, loader and dQ writers
  static constexpr int kMmaRegisters = 240;

  // dQ of 64 rows is split between the warpgroups by columns, of 128 rows by rows.
  static constexpr bool kDqByColumns = kTileQ == 64;
  static constexpr int kDqTileFloats = kTileQ * kHeadDim;
  static constexpr int kDqFragment = kDqTileFloats / kMmaThreads;  // floats an MMA thread holds

  static_assert(kTileKv % kTileQ == 0, "schedules count whole q tiles in a KV tile");
  static_assert(kTileKv == 64 * kMmaWarpgroups, "each MMA warpgroup owns 64 rows of the KV tile");
  static_assert(2 + kDqWriters <= kWarpgroup / kWarp, "service roles are warps of one warpgroup");
  static_assert(kStages % kDqWriters == 0,
                "a dQ writer must see every phase of the stages it reads: its steps are every "
                "kDqWriters-th, so its stages must repeat");
  // setmaxnreg deals from what the CTA was launched with: 65,536 / threads, rounded down to a
  // multiple of 8. One register more a thread (32 + 240 + 240) and the last warpgroup waits
  // forever.
  static constexpr int kLaunchRegisters = 65536 / kThreads / 8 * 8;
  static_assert(kServiceRegisters + kMmaWarpgroups * kMmaRegisters <=
                    kThreads / kWarpgroup * kLaunchRegisters,
                "registers of all warpgroups fit what the CTA is launched with");
};

// The same problem with tiles that the compiler knows: dividing by them is a shift.
template <typename Config>
constexpr Problem with_tiles(Problem p) {
  p.tile_q = Config::kTileQ;
  p.tile_kv = Config::kTileKv;
  return p;
}

inline constexpr HeadDims kMaxHeadDims = {192, 128};

// Calls `visit` with the KernelConfig of a bucket.
template <typename Visit>
constexpr auto visit_config(HeadDims bucket, Visit const& visit) {
  if (bucket == HeadDims{64, 64}) return visit(KernelConfig<64>{});
  if (bucket == HeadDims{128, 128}) return visit(KernelConfig<128>{});
  return visit(KernelConfig<192, 128>{});
}

// What the workspace has to hold.
struct WorkspaceSizes {
  int64_t dq_tiles = 0;     // in all heads
  int64_t parts_tiles = 0;  // KV tiles of all slices, where groups may be split
  int sequences = 0;        // of a packed call
  int squads = 0;           // of a dense call: at most
};

// Circles that a squad's first member may be ahead of its others (dealer.cuh).
inline constexpr int kCirclesAhead = 16;

// Of two CTAs or more each, of more CTAs than any Hopper part holds.
inline constexpr int kMostSquads = 128;

inline WorkspaceSizes workspace_sizes(BackwardArgs const& args) {
  Problem const& p = args.problem;
  if (args.packed.batch == 0)
    return {.dq_tiles = p.q_tiles_total(),
            .parts_tiles = p.group_split > 1 ? p.chains() : 0,
            .squads = kMostSquads};
  PackedSequences const& s = args.packed;
  int const slices = args.group_split > 0   ? args.group_split
                     : args.choose_strategy ? most_slices(p)
                                            : 1;
  int64_t const kv_tiles = numbered_tiles(s.total_k, s.batch, p.tile_kv);
  return {.dq_tiles = int64_t{p.heads} * numbered_tiles(s.total_q, s.batch, p.tile_q),
          .parts_tiles = slices > 1 ? kv_tiles * p.kv_heads * slices : 0,
          .sequences = s.batch};
}

// The workspace: one block of device memory, cut once, here. Offsets in bytes.
struct WorkspaceLayout {
  static constexpr int64_t kAlignment = 1024;

  int64_t next = 0;           // int32: of the dealer, like the next two
  int64_t arrivals = 0;       // int32
  int64_t mode = 0;           // int32
  int64_t taken = 0;          // int32, kCirclesAhead for each squad
  int64_t dq_turns = 0;       // int32 for each q tile
  int64_t lse_log2 = 0;       // fp32 for each row of each q tile, padded to whole tiles
  int64_t minus_delta = 0;    // likewise
  int64_t dq_accum = 0;       // fp32 q tiles in fragment order (dq_fragment.cuh)
  int64_t dk_parts = 0;       // fp32 KV tiles in fragment order (kv_parts.cuh)
  int64_t dv_parts = 0;       // likewise
  int64_t table_header = 0;   // int32: num_tickets, malformed
  int64_t first_tickets = 0;  // int32 for each sequence
  int64_t records = 0;        // a SequenceRecord for each sequence
  int64_t group_splits = 0;   // int32 for each sequence
  int64_t bytes = 0;

  constexpr WorkspaceLayout(WorkspaceSizes const& sizes, int tile_q, int tile_kv, HeadDims bucket) {
    int64_t const floats = sizeof(float), ints = sizeof(int);
    int64_t const rows = sizes.dq_tiles * tile_q, kv_rows = sizes.parts_tiles * tile_kv;
    auto const take = [this](int64_t size) {
      int64_t const at = bytes;
      bytes += (size + kAlignment - 1) / kAlignment * kAlignment;
      return at;
    };
    next = take(ints);
    arrivals = take(ints);
    mode = take(ints);
    taken = take(sizes.squads * kCirclesAhead * ints);
    dq_turns = take(sizes.dq_tiles * ints);
    lse_log2 = take(rows * floats);
    minus_delta = take(rows * floats);
    dq_accum = take(rows * bucket.qk * floats);
    dk_parts = take(kv_rows * bucket.qk * floats);
    dv_parts = take(kv_rows * bucket.v * floats);
    table_header = take(sizes.sequences > 0 ? 2 * ints : 0);
    first_tickets = take(sizes.sequences * ints);
    records = take(sizes.sequences * static_cast<int64_t>(sizeof(SequenceRecord)));
    group_splits = take(sizes.sequences * ints);
  }
};

}  // namespace dash
