// Vectors of 16 elements: the small set of types and functions that all kernels are written with.
//
//   f32x16  16 float32 elements    i32x16  16 int32 elements    u8x64  64 bytes, four for each of 16 lanes
//   i64x16  16 int64 elements      Lanes   one bit per lane, which is set if the lane is selected
//
// One file for each vector width defines them with the processor's instructions: vectors_avx512.h (a vector is one
// register of 512 bits) and vectors_avx2.h (two registers of 256 bits). cpu/build.py sets VECTOR_BITS to choose one.
// All other files are written once, and add numbers in the same order on every processor. (A vectors_neon.h, with four
// registers of 128 bits, would be a third such file. Besides these files, barrier.h, the prefetches, FlushDenormals in
// attention.h and the code for AMX contain x86 instructions.)
//
// An array of vectors is kept in registers only if all loops over it are unrolled (#pragma GCC unroll), also those
// that clear it and read it at the end. Otherwise it is stored to memory at every step, which made attention 1.5 times
// slower.

#pragma once

#include <ATen/core/Tensor.h>
#include <immintrin.h>

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

namespace fastpath {

using at::Tensor;
using bf16 = at::BFloat16;
using half = at::Half;

using Lanes = uint16_t;

constexpr int LANES = 16;
constexpr float INF = std::numeric_limits<float>::infinity();
constexpr float LOG2E = 1.44269504f;  // exp(x) = 2^(x LOG2E)

// The first n lanes: all for n >= 16, none for n <= 0.
inline Lanes first_lanes(int64_t n) { return n >= LANES ? 0xffff : n <= 0 ? 0 : (1u << n) - 1; }

}  // namespace fastpath

#if VECTOR_BITS == 512
#include "vectors_avx512.h"
#elif VECTOR_BITS == 256
#include "vectors_avx2.h"
#endif

namespace fastpath {

inline i32x16 load_ints(const int32_t* p, int64_t n = LANES) { return as_ints(load((const float*)p, n)); }
inline i32x16 where(Lanes lanes, i32x16 yes, i32x16 no) {
  return as_ints(where(lanes, as_floats(yes), as_floats(no)));
}

// exp(x) to float32 precision, as 2^n e^r with |r| <= ln(2) / 2 and a polynomial for e^r. NaN stays NaN.
inline f32x16 fast_exp(f32x16 x) {
  x = max(floats(-110.0f), min(floats(90.0f), x));  // beyond these limits, the result is 0 or infinity
  const f32x16 n = round_to_integers(x * floats(LOG2E));
  f32x16 r = fnma(n, floats(0.693359375f), x);  // ln(2) is split into two parts (Cody-Waite)
  r = fnma(n, floats(-2.12194440e-4f), r);
  f32x16 y = floats(1.0f / 5040);
  for (float c : {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f}) y = fma(y, r, floats(c));
  return times_power_of_2(y, n);
}

inline float fast_exp(float x) { return first_lane(fast_exp(floats(x))); }

// This must be inlined: otherwise GCC finds that the function computes nothing, and removes its calls.
[[gnu::always_inline]] inline void prefetch(const void* begin, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += 64) _mm_prefetch((const char*)begin + i, _MM_HINT_T0);
}

// Converts 16 words, each of two bfloat16 elements, to float32: the first element of each word, and the second.
inline void split_pairs(i32x16 words, f32x16& first, f32x16& second) {
  first = as_floats(words << 16);
  second = as_floats(words & ints(0xffff0000));
}

// RMSNorm of a row, with sums in float32. W and Out are T or float.
template <class T, class W, class Out>
void rms_norm_row(const T* x, const W* w, Out* out, int64_t D, float eps) {
  f32x16 squares = floats(0.0f);
  for (int64_t i = 0; i < D; i += LANES) {
    const f32x16 v = load(x + i, D - i);
    squares = fma(v, v, squares);
  }
  const f32x16 scale = floats(1.0f / std::sqrt(sum_of_lanes(squares) / D + eps));
  for (int64_t i = 0; i < D; i += LANES) store(out + i, load(x + i, D - i) * scale * load(w + i, D - i), D - i);
}

}  // namespace fastpath
