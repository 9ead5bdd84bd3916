// The pointwise mathematics between the products, on accumulator fragments of S^T and dP^T.
//
// A fragment of 4·G floats holds, for g < G: rows r and r + 8 (key columns of the problem) by
// columns 8g and 8g + 1 counted from the thread's own first column (query rows):
//   [4g] = (r, 8g)   [4g + 1] = (r, 8g + 1)   [4g + 2] = (r + 8, 8g)   [4g + 3] = (r + 8, 8g + 1)
#pragma once

#include <cutlass/numeric_conversion.h>

namespace dash {

__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// The fragment's columns of a vector in shared memory; here and below `vector` points at the
// thread's first column.
template <int kColumns>
__device__ __forceinline__ void load_columns(float (&x)[kColumns], float const* vector) {
#pragma unroll
  for (int i = 0; i < kColumns; i += 2) {
    float2 const pair = *reinterpret_cast<float2 const*>(vector + 4 * i);
    x[i] = pair.x;
    x[i + 1] = pair.y;
  }
}

// S becomes P = 2^(S·scale_log2 − lse_log2).
template <int kSize>
__device__ __forceinline__ void probabilities(float (&s)[kSize], float const (&lse_log2)[kSize / 2],
                                              float scale_log2) {
#pragma unroll
  for (int i = 0; i < kSize; ++i)
    s[i] = exp2_approx(fmaf(s[i], scale_log2, -lse_log2[i / 4 * 2 + i % 2]));
}

// The same where S started from −lse / softmax_scale.
template <int kSize>
__device__ __forceinline__ void probabilities(float (&s)[kSize], float scale_log2) {
#pragma unroll
  for (int i = 0; i < kSize; ++i) s[i] = exp2_approx(s[i] * scale_log2);
}

// Hides scores by clearing P, not by S = −inf: that stays right for a negative or zero scale, and
// it removes what exp(0 − lse) made of zero-filled key columns, which overflows for lse < −88.
// first_*: the first visible column of the fragment's upper and lower row, from the thread's own.
template <int kSize>
__device__ __forceinline__ void hide_before(float (&p)[kSize], int first_upper, int first_lower) {
#pragma unroll
  for (int i = 0; i < kSize; i += 4) {
    if (2 * i < first_upper) p[i] = 0.f;
    if (2 * i + 1 < first_upper) p[i + 1] = 0.f;
    if (2 * i < first_lower) p[i + 2] = 0.f;
    if (2 * i + 1 < first_lower) p[i + 3] = 0.f;
  }
}

// The same behind the last visible column.
template <int kSize>
__device__ __forceinline__ void hide_after(float (&p)[kSize], int last_upper, int last_lower) {
#pragma unroll
  for (int i = 0; i < kSize; i += 4) {
    if (2 * i > last_upper) p[i] = 0.f;
    if (2 * i + 1 > last_upper) p[i + 1] = 0.f;
    if (2 * i > last_lower) p[i + 2] = 0.f;
    if (2 * i + 1 > last_lower) p[i + 3] = 0.f;
  }
}

// Every row of the fragment becomes the columns of a vector in shared memory.
template <int kSize>
__device__ __forceinline__ void set_columns(float (&x)[kSize], float const* vector) {
#pragma unroll
  for (int i = 0; i < kSize; i += 4) {
    float2 const pair = *reinterpret_cast<float2 const*>(vector + 2 * i);
    x[i] = x[i + 2] = pair.x;
    x[i + 1] = x[i + 3] = pair.y;
  }
}

// dP − delta becomes dS = P ∘ (dP − delta), not yet scaled by softmax_scale.
template <int kSize>
__device__ __forceinline__ void score_gradients(float (&dp)[kSize], float const (&p)[kSize]) {
#pragma unroll
  for (int i = 0; i < kSize; ++i) dp[i] *= p[i];
}

// Two fp32 values to one register of two 16-bit elements, round to nearest even.
template <typename Element>
__device__ __forceinline__ uint32_t pack(float low, float high) {
  cutlass::NumericArrayConverter<Element, float, 2> convert;
  cutlass::Array<Element, 2> const pair = convert(cutlass::Array<float, 2>{low, high});
  return reinterpret_cast<uint32_t const&>(pair);
}

template <typename Element>
__device__ __forceinline__ float2 unpack(uint32_t packed) {
  auto const& pair = reinterpret_cast<cutlass::Array<Element, 2> const&>(packed);
  return make_float2(static_cast<float>(pair[0]), static_cast<float>(pair[1]));
}

// The same from P in 16 bit, as dV has it, where there are no registers for the other.
template <typename Element, int kSize>
__device__ __forceinline__ void score_gradients(float (&dp)[kSize],
                                                uint32_t const (&p)[kSize / 2]) {
#pragma unroll
  for (int i = 0; i < kSize / 2; ++i) {
    float2 const pair = unpack<Element>(p[i]);
    dp[2 * i] *= pair.x;
    dp[2 * i + 1] *= pair.y;
  }
}

// A fragment in 16 bit. The order of the accumulator fragment is that of the A operand fragment of
// the next product: pairs of columns become pairs of k.
template <typename Element, int kSize>
__device__ __forceinline__ void to_operand(uint32_t (&packed)[kSize / 2], float const (&x)[kSize]) {
#pragma unroll
  for (int i = 0; i < kSize / 2; ++i) packed[i] = pack<Element>(x[2 * i], x[2 * i + 1]);
}

}  // namespace dash
