// Vectors: 16 elements of any dtype, as float32 in the lanes of a 512-bit register.

#pragma once

#include <ATen/core/Tensor.h>
#include <immintrin.h>

#include <cstdint>
#include <limits>

namespace fastpath {

using at::Tensor;
using bf16 = at::BFloat16;
using half = at::Half;

constexpr int LANES = 16;  // 32-bit lanes of a 512-bit register
constexpr float INF = std::numeric_limits<float>::infinity();
constexpr float LOG2E = 1.44269504f;  // exp(x) = 2^(x LOG2E)

// A mask of the first n lanes; of all lanes for n >= 16, of none for n <= 0.
inline __mmask16 first_lanes(int64_t n) { return n >= LANES ? 0xffff : n <= 0 ? 0 : (1u << n) - 1; }

inline __m512i lane_indices() { return _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15); }

inline __m512 load(const float* p, __mmask16 m = 0xffff) { return _mm512_maskz_loadu_ps(m, p); }
inline __m512 load(const half* p, __mmask16 m = 0xffff) { return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(m, p)); }
inline __m512 load(const bf16* p, __mmask16 m = 0xffff) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(m, p)), 16));
}

inline void store(float* p, __m512 x, __mmask16 m) { _mm512_mask_storeu_ps(p, m, x); }
inline void store(half* p, __m512 x, __mmask16 m) {
  _mm256_mask_storeu_epi16(p, m, _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
inline void store(bf16* p, __m512 x, __mmask16 m) {
  _mm256_mask_storeu_epi16(p, m, (__m256i)_mm512_cvtneps_pbh(x));
}

// exp(x) to float32 precision, as 2^n e^r with |r| <= ln(2) / 2 and a polynomial for e^r. NaN stays NaN.
inline __m512 fast_exp(__m512 x) {
  x = _mm512_max_ps(_mm512_set1_ps(-110.0f), _mm512_min_ps(_mm512_set1_ps(90.0f), x));  // 0 and infinity beyond
  const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(LOG2E)), _MM_FROUND_TO_NEAREST_INT);
  __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);  // ln(2) is split into two parts (Cody-Waite)
  r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
  __m512 y = _mm512_set1_ps(1.0f / 5040);
  for (float c : {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f})
    y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(c));
  return _mm512_scalef_ps(y, n);
}

inline float fast_exp(float x) { return _mm512_cvtss_f32(fast_exp(_mm512_set1_ps(x))); }

// The sum of 16 lanes, in a fixed order: lanes i and i + 8 are added first, then i and i + 4, i + 2, i + 1.
inline float sum_of_lanes(__m512 x) {
  const __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1));
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

// Always inlined: otherwise GCC finds that the function computes nothing, and removes the calls.
[[gnu::always_inline]] inline void prefetch(const void* begin, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += 64) _mm_prefetch((const char*)begin + i, _MM_HINT_T0);
}

// ---------------------------------------------------------------- rounding and rearranging

inline __m512 rounded_to_bf16(__m512 x) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(x)), 16));
}

// 16 words of two bfloat16 elements each, as float32: the first elements, and the second ones.
inline void split_pairs(__m512i words, __m512& first, __m512& second) {
  first = _mm512_castsi512_ps(_mm512_slli_epi32(words, 16));
  second = _mm512_castsi512_ps(_mm512_and_si512(words, _mm512_set1_epi32(0xffff0000)));
}

// Puts 32 elements, of which x has the even and y the odd ones, back in order.
inline void join_pairs(__m512& x, __m512& y) {
  const __m512i half = _mm512_srli_epi32(lane_indices(), 1);
  const __m512i odd = _mm512_slli_epi32(_mm512_and_si512(lane_indices(), _mm512_set1_epi32(1)), 4);
  const __m512i low = _mm512_or_si512(half, odd), high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
  const __m512 first = _mm512_permutex2var_ps(x, low, y);
  y = _mm512_permutex2var_ps(x, high, y);
  x = first;
}

// Transposes 16 registers of 16 words.
inline void transpose(__m512i (&r)[16]) {
  __m512i t[16];
#pragma GCC unroll 16
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
  }
#pragma GCC unroll 16
  for (int i = 0; i < 16; i += 4) {
    r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
#pragma GCC unroll 16
  for (int i = 0; i < 4; i++) {
    t[i] = _mm512_shuffle_i32x4(r[i], r[4 + i], 0x88);  // quarters 0 and 2
    t[4 + i] = _mm512_shuffle_i32x4(r[i], r[4 + i], 0xdd);  // 1 and 3
    t[8 + i] = _mm512_shuffle_i32x4(r[8 + i], r[12 + i], 0x88);
    t[12 + i] = _mm512_shuffle_i32x4(r[8 + i], r[12 + i], 0xdd);
  }
#pragma GCC unroll 16
  for (int i = 0; i < 4; i++) {
    r[i] = _mm512_shuffle_i32x4(t[i], t[8 + i], 0x88);
    r[4 + i] = _mm512_shuffle_i32x4(t[4 + i], t[12 + i], 0x88);
    r[8 + i] = _mm512_shuffle_i32x4(t[i], t[8 + i], 0xdd);
    r[12 + i] = _mm512_shuffle_i32x4(t[4 + i], t[12 + i], 0xdd);
  }
}

// Indices for _mm512_permutex2var_epi16 that interleave the 16-bit elements from..from+16 of two registers.
inline __m512i interleave(int from) {
  const __m512i one = _mm512_add_epi32(lane_indices(), _mm512_set1_epi32(from));
  return _mm512_or_si512(one, _mm512_slli_epi32(_mm512_add_epi32(one, _mm512_set1_epi32(32)), 16));
}

}  // namespace fastpath
