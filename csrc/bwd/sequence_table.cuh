// Packed sequences on the device: who is where. Whatever cu_seqlens and seqused hold, rows that are
// computed from them stay inside the tensors.
#pragma once

#include "config.h"
#include "params.h"

namespace dash {

// The rows of one sequence: its space, and how much of it is in use.
struct SequenceRows {
  int start, end;
  int used;
};

// Sequence `index` of batch; index batch: the rows behind the last one, none of them in use.
__device__ __forceinline__ SequenceRows rows_of(int const* cu_seqlens, int const* seqused,
                                                int index, int batch, int total) {
  int const start = clamp_row(cu_seqlens[index], total);
  if (index == batch) return {start, total, 0};
  int const end = larger(clamp_row(cu_seqlens[index + 1], total), start);
  int const space = end - start;
  return {start, end, seqused ? smaller(larger(seqused[index], 0), space) : space};
}

// The greatest index in 0 … count - 1 for which `is_below(index)` holds, asked by a whole warp: it
// holds for 0 and, once it fails, for none behind. 32 questions at a time.
template <typename F>
__device__ __forceinline__ int find_last(int count, F const& is_below) {
  constexpr uint32_t kAll = 0xffffffff;
  int const lane = threadIdx.x % kWarp;
  int first = 0;
  while (count > 1) {
    int const step = (count + kWarp - 1) / kWarp;
    int const at = lane * step;
    uint32_t const below = __ballot_sync(kAll, at < count && is_below(first + at));
    int const last = below == 0 ? 0 : 31 - __clz(static_cast<int>(below));
    first += last * step;
    count = smaller(step, count - last * step);
  }
  return first;
}

// The sequence, or the rows behind the last, whose tile has this number (packing.h).
__device__ __forceinline__ int sequence_of_tile(int const* cu_seqlens, int batch, int total,
                                                int tile, int tile_rows) {
  return find_last(batch + 1, [&](int index) {
    return first_tile_of(clamp_row(cu_seqlens[index], total), index, tile_rows) <= tile;
  });
}

// A q tile of a packed call by its number.
struct PackedTile {
  int sequence;
  SequenceRows rows;
  int tile;  // in its sequence
};
__device__ __forceinline__ PackedTile packed_tile(int const* cu_seqlens, int const* seqused,
                                                  int batch, int total, int number, int tile_rows) {
  int const index = sequence_of_tile(cu_seqlens, batch, total, number, tile_rows);
  SequenceRows const rows = rows_of(cu_seqlens, seqused, index, batch, total);
  return {index, rows, number - first_tile_of(rows.start, index, tile_rows)};
}

// Rows in use on both sides of a sequence; none of the rows behind the last.
__device__ __forceinline__ int used_of(int const* cu_seqlens, int const* seqused, int index,
                                       int batch, int total) {
  return rows_of(cu_seqlens, seqused, index, batch, total).used;
}

}  // namespace dash
