// Writes the sequence table: one CTA of the preprocess kernel, beside the others.
//
// Sequences are ordered by the length of their longest chain, by counting sort, so that the launch
// ends with short ones. Within a class their order is the one in which threads come by: it decides
// when a chain runs, never what it adds.
#pragma once

#include "sequence_table.cuh"

namespace dash {

template <int kThreads>
class TableBuilder {
 public:
  struct Shared {
    int sequences[kChainClasses];  // of each class, then the place of its next one
    int sums[kThreads / kWarp];
    int malformed;
  };

  __device__ TableBuilder(PreprocessParams const& params, Shared& shared, int thread)
      : params_(params), shared_(shared), thread_(thread) {}

  __device__ void run() {
    int const batch = params_.packed.batch;
    for (int c = thread_; c < kChainClasses; c += kThreads) shared_.sequences[c] = 0;
    if (thread_ == 0) shared_.malformed = 0;
    __syncthreads();
    for (int i = thread_; i < batch; i += kThreads) {
      if (is_malformed(i)) shared_.malformed = 1;
      atomicAdd(&shared_.sequences[chain_class(problem_of_sequence(i))], 1);
    }
    __syncthreads();
    places_of_classes();
    for (int i = thread_; i < batch; i += kThreads) {
      Problem const p = problem_of_sequence(i);
      SequenceRecord const r = record(i, p);
      params_.table.group_splits[i] = r.group_split;
      params_.table.records[atomicAdd(&shared_.sequences[chain_class(p)], 1)] = r;
    }
    __syncthreads();
    number_tickets();
  }

 private:
  __device__ bool is_malformed(int i) const {
    PackedSequences const& s = params_.packed;
    auto const bad = [&](int const* cu, int total) {
      return (i == 0 && cu[0] != 0) || cu[i] > cu[i + 1] || cu[i + 1] > total;
    };
    auto const bad_use = [&](int const* used, int const* cu) {
      return used && (used[i] < 0 || used[i] > cu[i + 1] - cu[i]);
    };
    return bad(s.cu_seqlens_q, s.total_q) || bad(s.cu_seqlens_k, s.total_k) ||
           bad_use(s.seqused_q, s.cu_seqlens_q) || bad_use(s.seqused_k, s.cu_seqlens_k);
  }

  __device__ Problem problem_of_sequence(int i) const {
    PackedSequences const& s = params_.packed;
    return problem_of(params_.problem, used_of(s.cu_seqlens_q, s.seqused_q, i, s.batch, s.total_q),
                      used_of(s.cu_seqlens_k, s.seqused_k, i, s.batch, s.total_k));
  }

  __device__ SequenceRecord record(int i, Problem const& p) const {
    PackedSequences const& s = params_.packed;
    int const q_start = clamp_row(s.cu_seqlens_q[i], s.total_q);
    int const k_start = clamp_row(s.cu_seqlens_k[i], s.total_k);
    Choice choice{};
    if (p.seqlen_q > 0 && p.seqlen_k > 0)
      choice = choose_in_pack(p, params_.choose_strategy, params_.strategy, params_.group_split,
                              params_.resident_ctas);
    return {.q_start = q_start,
            .k_start = k_start,
            .seqlen_q = p.seqlen_q,
            .seqlen_k = p.seqlen_k,
            .q_tile = first_tile_of(q_start, i, p.tile_q),
            .kv_tile = first_tile_of(k_start, i, p.tile_kv),
            .strategy = choice.strategy,
            .group_split = choice.group_split};
  }

  __device__ int tickets_of(SequenceRecord const& r) const {
    if (r.seqlen_q == 0 || r.seqlen_k == 0) return 0;
    Problem const p = problem_of(params_.problem, r.seqlen_q, r.seqlen_k, r.group_split);
    return visit_schedule(r.strategy, p, [](auto const& s) { return s.num_tickets(); });
  }

  __device__ void places_of_classes() {
    static_assert(kChainClasses == kThreads, "a class a thread");
    int const mine = shared_.sequences[thread_];
    int const before = sum_before(mine).before;
    shared_.sequences[thread_] = before;
    __syncthreads();
  }

  __device__ void number_tickets() {
    SequenceTable const& table = params_.table;
    int const batch = params_.packed.batch;
    int first = 0;  // of the sequences that follow
    for (int base = 0; base < batch; base += kThreads) {
      int const i = base + thread_;
      Sums const sums = sum_before(i < batch ? tickets_of(table.records[i]) : 0);
      if (i < batch) table.first_tickets[i] = first + sums.before;
      first += sums.all;
    }
    if (thread_ > 0) return;
    *table.malformed = shared_.malformed;
    *table.num_tickets = shared_.malformed ? 0 : first;
  }

  struct Sums {
    int before, all;
  };
  // Of the values of the threads before this one, and of all.
  __device__ Sums sum_before(int value) {
    constexpr uint32_t kAll = 0xffffffff;
    int const lane = thread_ % kWarp, warp = thread_ / kWarp;
    int sum = value;
#pragma unroll
    for (int distance = 1; distance < kWarp; distance *= 2) {
      int const other = __shfl_up_sync(kAll, sum, distance);
      if (lane >= distance) sum += other;
    }
    if (lane == kWarp - 1) shared_.sums[warp] = sum;
    __syncthreads();
    int before = 0, all = 0;
    for (int w = 0; w < kThreads / kWarp; ++w) {
      if (w < warp) before += shared_.sums[w];
      all += shared_.sums[w];
    }
    __syncthreads();
    return {before + sum - value, all};
  }

  PreprocessParams const& params_;
  Shared& shared_;
  int thread_;
};

}  // namespace dash
