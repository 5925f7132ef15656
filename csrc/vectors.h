// Vectors: 16 elements of any dtype, as float32 in the lanes of a 512-bit register.

#pragma once

#include <ATen/core/Tensor.h>
#include <immintrin.h>

#include <cstdint>
#include <limits>

namespace {

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

}  // namespace
