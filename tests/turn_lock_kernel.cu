// Does the turn lock keep order? Many CTAs take turns on few locks, with random delays, and each
// turn does something that does not commute with its neighbours, so that one exchange changes the
// answer.
//
//   fold  x = x · a + b modulo 2^32 with plain loads and stores under the lock
//   bulk  the dQ protocol: turn 0 stores a tile, the others add theirs by bulk reduction, and
//         another CTA waits for the last turn and reads the sum by plain loads; terms differ by up
//         to 2^48, so that rounding tells the order
//
// Tickets are a random merge of the locks' turns: each wait points to a smaller ticket, so any
// number of CTAs makes progress. Exit code 0: every answer is the one in turn order; 1: some is
// not; 2: the test itself cannot be trusted or CUDA failed. Built with DASH_SKIP_TURNS it must exit
// with 1.
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <vector>

#include "sm90/bulk_reduce.cuh"
#include "sm90/turn_lock.cuh"

namespace {

constexpr int kLocks = 48;
constexpr int kFoldTurns = 400;
constexpr int kFoldElements = 16;
constexpr int kBulkTurns = 100;
constexpr int kTileFloats = 4096;
constexpr int kThreads = 128;
constexpr int kRounds = 4;
constexpr int kMaxDelay = 8192;  // cycles

#define CHECK(call)                                                                  \
  do {                                                                               \
    cudaError_t const error = (call);                                                \
    if (error != cudaSuccess) {                                                      \
      std::printf("%s: %s (line %d)\n", #call, cudaGetErrorString(error), __LINE__); \
      std::exit(2);                                                                  \
    }                                                                                \
  } while (0)

struct Ticket {
  int lock;
  int turn;
};

__host__ __device__ uint32_t mix(uint32_t x) {  // a bijection that looks random
  x = (x ^ (x >> 16)) * 0x7feb352du;
  x = (x ^ (x >> 15)) * 0x846ca68bu;
  return x ^ (x >> 16);
}

__host__ __device__ uint32_t name_of(uint32_t seed, int lock, int turn, int element) {
  return mix(mix(mix(seed + lock) + turn) + element);
}

__host__ __device__ uint32_t factor(uint32_t name) { return mix(name) | 1; }  // odd: invertible
__host__ __device__ uint32_t addend(uint32_t name) { return mix(name ^ 0x9e3779b9u); }

// A float of random sign and fraction with an exponent from -24 to 23.
__host__ __device__ float term(uint32_t name) {
  uint32_t const sign_and_fraction = mix(name) & 0x807fffffu;
  uint32_t const bits = sign_and_fraction | ((103 + mix(name ^ 0x51ed270bu) % 48) << 23);
#ifdef __CUDA_ARCH__
  return __uint_as_float(bits);
#else
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
#endif
}

__device__ void delay(uint32_t seed, int ticket) {
  long long const until = clock64() + mix(seed ^ (ticket * 2654435761u)) % kMaxDelay;
  while (clock64() < until) {
  }
}

__global__ void fold(Ticket const* tickets, int num_tickets, int* next_ticket, int* turn_counters,
                     uint32_t* values, uint32_t seed) {
  if (threadIdx.x != 0) return;
  for (int t; (t = atomicAdd(next_ticket, 1)) < num_tickets;) {
    Ticket const ticket = tickets[t];
    delay(seed, t);
    dash::wait_turn(turn_counters + ticket.lock, ticket.turn);
    for (int e = 0; e < kFoldElements; ++e) {
      uint32_t const name = name_of(seed, ticket.lock, ticket.turn, e);
      uint32_t& value = values[ticket.lock * kFoldElements + e];
      value = value * factor(name) + addend(name);
    }
    dash::pass_turn(turn_counters + ticket.lock, ticket.turn + 1);
  }
}

__global__ void bulk(Ticket const* tickets, int num_tickets, int* next_ticket, int* turn_counters,
                     float* sums, float* finished, uint32_t seed) {
  __shared__ alignas(128) float stage[kTileFloats];
  __shared__ int taken;
  for (;;) {
    if (threadIdx.x == 0) taken = atomicAdd(next_ticket, 1);
    __syncthreads();
    int const t = taken;
    if (t >= num_tickets) break;
    Ticket const ticket = tickets[t];
    for (int e = threadIdx.x; e < kTileFloats; e += kThreads)
      stage[e] = term(name_of(seed, ticket.lock, ticket.turn, e));
    dash::fence_proxy_async_shared();
    __syncthreads();
    float* const sum = sums + ticket.lock * kTileFloats;
    if (threadIdx.x == 0) {
      delay(seed, t);
      int* const counter = turn_counters + ticket.lock;
      if (ticket.turn > 0) dash::wait_turn(counter, ticket.turn);
      if (ticket.turn == 0)
        dash::bulk_store(sum, stage, sizeof stage);
      else
        dash::bulk_reduce_add(sum, stage, sizeof stage);
      dash::bulk_commit();
      dash::bulk_wait_source_read();
      dash::bulk_wait_complete();
      dash::pass_turn(counter, ticket.turn + 1);
    }
    __syncthreads();
  }
  // All tickets are taken by CTAs that run, so each lock's last turn comes.
  for (int lock = blockIdx.x; lock < kLocks; lock += gridDim.x) {
    if (threadIdx.x == 0) dash::wait_last_turn(turn_counters + lock, kBulkTurns);
    __syncthreads();
    for (int e = threadIdx.x; e < kTileFloats; e += kThreads)
      finished[lock * kTileFloats + e] = sums[lock * kTileFloats + e];
  }
}

std::vector<Ticket> random_merge(int turns, uint32_t seed) {
  std::vector<Ticket> tickets;
  for (int i = 0; i < kLocks * turns; ++i) tickets.push_back({i % kLocks, 0});
  std::shuffle(tickets.begin(), tickets.end(), std::mt19937(seed));
  std::vector<int> next(kLocks, 0);
  for (Ticket& ticket : tickets) ticket.turn = next[ticket.lock]++;
  return tickets;
}

[[noreturn]] void no_teeth(char const* what, int lock, int turn) {
  std::printf("%s: turns %d and %d of lock %d may be exchanged\n", what, turn, turn + 1, lock);
  std::exit(2);
}

std::vector<uint32_t> fold_in_order(uint32_t seed) {
  std::vector<uint32_t> values(kLocks * kFoldElements, 0);
  for (int lock = 0; lock < kLocks; ++lock)
    for (int e = 0; e < kFoldElements; ++e)
      for (int turn = 0; turn < kFoldTurns; ++turn) {
        uint32_t const name = name_of(seed, lock, turn, e);
        uint32_t const next = name_of(seed, lock, turn + 1, e);
        // Two neighbours commute exactly if this holds; later factors are odd and hide nothing.
        if (addend(name) * (factor(next) - 1) == addend(next) * (factor(name) - 1))
          no_teeth("fold", lock, turn);
        uint32_t& value = values[lock * kFoldElements + e];
        value = value * factor(name) + addend(name);
      }
  return values;
}

// The sum of one tile, with turns `exchanged` and `exchanged` + 1 in each other's place.
constexpr int kNone = kBulkTurns;
std::vector<float> sum_in_order(uint32_t seed, int lock, int exchanged) {
  std::vector<float> sum(kTileFloats, -0.f);
  for (int place = 0; place < kBulkTurns; ++place) {
    int const turn = place == exchanged ? place + 1 : place == exchanged + 1 ? place - 1 : place;
    for (int e = 0; e < kTileFloats; ++e) sum[e] += term(name_of(seed, lock, turn, e));
  }
  return sum;
}

template <typename T>
T* device_copy(std::vector<T> const& host) {
  T* device;
  CHECK(cudaMalloc(&device, host.size() * sizeof(T)));
  CHECK(cudaMemcpy(device, host.data(), host.size() * sizeof(T), cudaMemcpyHostToDevice));
  return device;
}

template <typename T>
std::vector<T> host_copy(T const* device, size_t count) {
  std::vector<T> host(count);
  CHECK(cudaMemcpy(host.data(), device, count * sizeof(T), cudaMemcpyDeviceToHost));
  return host;
}

int count_different(void const* got, void const* wanted, int count) {
  int different = 0;
  for (int i = 0; i < count; ++i)
    different += std::memcmp(static_cast<char const*>(got) + 4 * i,
                             static_cast<char const*>(wanted) + 4 * i, 4) != 0;
  return different;
}

bool report(char const* what, uint32_t seed, int different, std::vector<int> const& counters,
            int turns) {
  auto const unfinished = std::count_if(counters.begin(), counters.end(),
                                        [turns](int counter) { return counter != turns; });
  std::printf("%s, seed %u: %d values differ, %d locks not passed on to the end\n", what, seed,
              different, static_cast<int>(unfinished));
  return different == 0 && unfinished == 0;
}

bool check_fold(int ctas, uint32_t seed) {
  std::vector<uint32_t> const wanted = fold_in_order(seed);
  std::vector<Ticket> const tickets = random_merge(kFoldTurns, seed);
  Ticket* const device_tickets = device_copy(tickets);
  int* const counters = device_copy(std::vector<int>(kLocks + 1, 0));
  uint32_t* const values = device_copy(std::vector<uint32_t>(wanted.size(), 0));
  fold<<<ctas, 32>>>(device_tickets, static_cast<int>(tickets.size()), counters + kLocks, counters,
                     values, seed);
  CHECK(cudaGetLastError());
  CHECK(cudaDeviceSynchronize());
  auto const got = host_copy(values, wanted.size());
  int const different = count_different(got.data(), wanted.data(), static_cast<int>(got.size()));
  bool const right = report("fold", seed, different, host_copy(counters, kLocks), kFoldTurns);
  for (void* block : {(void*)device_tickets, (void*)counters, (void*)values})
    CHECK(cudaFree(block));
  return right;
}

bool check_bulk(int ctas, uint32_t seed) {
  std::vector<float> wanted;
  for (int lock = 0; lock < kLocks; ++lock) {
    auto const sum = sum_in_order(seed, lock, kNone);
    wanted.insert(wanted.end(), sum.begin(), sum.end());
  }
  for (int turn = 1; turn + 1 < kBulkTurns; turn += 7)  // a sample: each costs a whole sum
    if (auto const other = sum_in_order(seed, 0, turn);
        count_different(other.data(), wanted.data(), kTileFloats) == 0)
      no_teeth("bulk", 0, turn);
  std::vector<Ticket> const tickets = random_merge(kBulkTurns, seed);
  Ticket* const device_tickets = device_copy(tickets);
  int* const counters = device_copy(std::vector<int>(kLocks + 1, 0));
  std::vector<float> const nan(wanted.size(), NAN);  // turn 0 must store, not add
  float* const sums = device_copy(nan);
  float* const finished = device_copy(nan);
  bulk<<<ctas, kThreads>>>(device_tickets, static_cast<int>(tickets.size()), counters + kLocks,
                           counters, sums, finished, seed);
  CHECK(cudaGetLastError());
  CHECK(cudaDeviceSynchronize());
  int const count = static_cast<int>(wanted.size());
  int different = count_different(host_copy(sums, wanted.size()).data(), wanted.data(), count);
  different += count_different(host_copy(finished, wanted.size()).data(), wanted.data(), count);
  bool const right = report("bulk", seed, different, host_copy(counters, kLocks), kBulkTurns);
  for (void* block : {(void*)device_tickets, (void*)counters, (void*)sums, (void*)finished})
    CHECK(cudaFree(block));
  return right;
}

}  // namespace

int main() {
  int sms = 0;
  CHECK(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, 0));
  bool right = true;
  for (uint32_t seed = 1; seed <= kRounds; ++seed) {
    right &= check_fold(4 * sms, seed);
    right &= check_bulk(2 * sms, seed);
  }
  return right ? 0 : 1;
}
