// Products of weights and rows of x: the layouts of packed weights, and the products of their tiles.
//
// A packed matrix consists of Nb blocks of 16 rows, a row for each lane; a block consists of Kb groups of 32 columns. N
// and K are padded with zeros. Index j goes over the 16 (bfloat16), 8 (int8) or 4 (int4) registers of a group of a
// block.
//   bfloat16 (Nb,Kb,16,16,2), for AMX: columns 2j and 2j+1
//   int8  (Nb,Kb,8,16,4) uint8: q + 128 of columns 4j..4j+3, because vpdpbusd multiplies unsigned with signed bytes
//   int4  (Nb,Kb,4,16,4) uint8: columns 4j..4j+3 in the low nibbles, columns 16+4j..16+4j+3 in the high nibbles
//   scales, and for int4 also mins: (Nb,G,16) float16
// Activations are quantized to 8 bits, with one scale for each group of 32 columns: the dot product of a group is then
// an exact int32. With `exact`, activations stay as they are, and weights are converted to float32 in registers.

#pragma once

#include <cmath>
#include <cstring>
#include <type_traits>

#include "parallel.h"

#if defined(__AMX_BF16__) && defined(__AMX_INT8__)
#define HAS_AMX
#endif

namespace {

constexpr int GROUP = 32;  // columns of x that share a scale when x is quantized, or that AMX adds at once
constexpr int MAX_DECODE_TOKENS = 16;  // up to so many new tokens a row, reading the weights limits a matrix product
constexpr int PREFETCH_DISTANCE = 4096;  // bytes between the weights in use and those being prefetched
#if defined(__znver4__) || defined(__znver5__)
constexpr auto PREFETCH_TO = _MM_HINT_T0;  // the L1 cache
#else
constexpr auto PREFETCH_TO = _MM_HINT_T1;  // the L2 cache: on Intel, prefetches to L1 delay the loads of x
#endif

// A linear layer: y = x W^T + bias.
struct Linear {
  int64_t N, K;
  int bits;           // 16: W is in x's dtype, (N,K) or packed for AMX; 8 or 4: W is packed, as described above
  bool exact;         // x is not quantized
  const void* weight;
  const void* bias;   // (N,) in x's dtype, or null
  const half *scales, *mins;
  int64_t Kb, G;      // groups of 32 columns (0 if W is (N,K)); weight scales of a row
  int64_t groups_per_scale;  // groups of 32 columns that share a weight scale

  bool quantizes_activations() const { return bits < 16 && !exact; }
};

// M rows of x, converted to what a matrix product reads.
struct Input {
  const void* x;       // (M,K)
  int8_t* q;           // (M,Kb,32), x quantized to 8 bits
  float* scale;        // (M,Kb), x = q * scale
  int32_t* dot_start;  // (M,Kb), -128 * sum(q): cancels the 128 that is added to packed int8 weights
  float* scaled_sum;   // (M,Kb), scale * sum(q): what the min of a group of int4 weights is multiplied by
  float* as_float;     // (M,Kb*32), x in float32, for exact activations
};

template <int I>
using Int = std::integral_constant<int, I>;

bool amx_allowed = false;  // set once, by allow_amx

// One step along K for weights that are not packed: acc += w * x, lane by lane. For bfloat16, vdpbf16ps adds two
// products to each lane.
template <class T>
struct Step {
  static constexpr int WIDTH = LANES;
  using Vector = __m512;
  static Vector load_step(const T* p, int64_t left) { return load(p, first_lanes(left)); }
  static __m512 multiply_add(__m512 acc, Vector w, Vector x) { return _mm512_fmadd_ps(w, x, acc); }
};

template <>
struct Step<bf16> {
  static constexpr int WIDTH = 2 * LANES;
  using Vector = __m512bh;
  static Vector load_step(const bf16* p, int64_t left) {
    const __mmask32 mask = left >= WIDTH ? ~0u : (1u << left) - 1;
    return (__m512bh)_mm512_maskz_loadu_epi16(mask, p);
  }
  static __m512 multiply_add(__m512 acc, Vector w, Vector x) { return _mm512_dpbf16_ps(acc, w, x); }
};

// The lane sums of 16 registers, with the same bits as sum_of_lanes and a fifth of the instructions.
inline __m512 sums_of_lanes(const __m512* x) {
  __m512 quarters[4], pairs[2];
#pragma GCC unroll 4
  for (int j = 0; j < 4; j++) {
    const __m512 a = _mm512_add_ps(_mm512_shuffle_f32x4(x[j], x[4 + j], 0x44),
                                   _mm512_shuffle_f32x4(x[j], x[4 + j], 0xee));
    const __m512 b = _mm512_add_ps(_mm512_shuffle_f32x4(x[8 + j], x[12 + j], 0x44),
                                   _mm512_shuffle_f32x4(x[8 + j], x[12 + j], 0xee));
    quarters[j] = _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
  }
#pragma GCC unroll 2
  for (int i = 0; i < 2; i++) {
    const __m512d a = _mm512_castps_pd(quarters[2 * i]), b = _mm512_castps_pd(quarters[2 * i + 1]);
    pairs[i] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)), _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));
  }
  return _mm512_add_ps(_mm512_shuffle_ps(pairs[0], pairs[1], 0x88), _mm512_shuffle_ps(pairs[0], pairs[1], 0xdd));
}

// NT rows of w times MT rows of x. Each of the MT * NT sums has its own register, whose lanes are added at the end.
template <class T, int NT, int MT>
inline void linear_tile(const T* w, const T* x, const T* bias, const T* residual, T* out, int64_t N, int64_t K) {
  using S = Step<T>;
  __m512 acc[MT][NT];
  for (auto& row : acc) std::fill(row, row + NT, _mm512_setzero_ps());
  // Prefetches go through memory in ascending order, not row by row in turn, so the hardware prefetcher follows too.
  const char* ahead = (const char*)w + PREFETCH_DISTANCE * (NT + 1) / 2;
  auto step = [&](int64_t k, int64_t left) {
    typename S::Vector xs[MT];
#pragma GCC unroll 8
    for (int m = 0; m < MT; m++) xs[m] = S::load_step(x + m * K + k, left);
#pragma GCC unroll 8
    for (int n = 0; n < NT; n++, ahead += 64) {
      _mm_prefetch(ahead, PREFETCH_TO);
      const auto row = S::load_step(w + n * K + k, left);
#pragma GCC unroll 8
      for (int m = 0; m < MT; m++) acc[m][n] = S::multiply_add(acc[m][n], row, xs[m]);
    }
  };
  int64_t k = 0;
  for (; k + S::WIDTH <= K; k += S::WIDTH) step(k, S::WIDTH);
  if (k < K) step(k, K - k);
  alignas(64) float sums[MT][NT];
  if constexpr (MT * NT == LANES) {
    _mm512_store_ps(sums[0], sums_of_lanes(acc[0]));
  } else {
    for (int m = 0; m < MT; m++)
      for (int n = 0; n < NT; n++) sums[m][n] = sum_of_lanes(acc[m][n]);
  }
  constexpr __mmask16 valid = (1 << NT) - 1;
  for (int m = 0; m < MT; m++) {
    __m512 y = load(sums[m], valid);
    if (bias) y = _mm512_add_ps(y, load(bias, valid));
    if (residual) y = _mm512_add_ps(y, load(residual + m * N, valid));
    store(out + m * N, y, valid);
  }
}

// NT rows of w times all M rows of x, in tiles of up to 8 rows.
template <class T, int NT>
void linear_rows(const T* w, const T* x, const T* bias, const T* residual, T* out, int64_t M, int64_t N, int64_t K) {
  int64_t m = 0;
  auto tile = [&](auto rows) {
    constexpr int MT = decltype(rows)::value;
    linear_tile<T, NT, MT>(w, x + m * K, bias, residual ? residual + m * N : nullptr, out + m * N, N, K);
    m += MT;
  };
  while (NT == 2 && m + 8 <= M) tile(Int<8>());
  while (m + 4 <= M) tile(Int<4>());
  if (M - m == 3) tile(Int<3>());
  if (M - m == 2) tile(Int<2>());
  if (M - m == 1) tile(Int<1>());
}

// Quantizes a group of up to 32 columns of x to 8 bits; returns sum(q). Any NaN or infinity makes the scale NaN.
template <class T>
inline int32_t quantize_group(const T* x, int64_t K, int8_t* q, float* scale) {
  const __m512 lo = load(x, first_lanes(K)), hi = load(x + LANES, first_lanes(K - LANES));
  const float most = _mm512_reduce_max_ps(_mm512_max_ps(_mm512_abs_ps(lo), _mm512_abs_ps(hi)));
  constexpr int NOT_FINITE = 0x99;  // quiet and signalling NaN, both infinities
  const bool finite = !(_mm512_fpclass_ps_mask(lo, NOT_FINITE) | _mm512_fpclass_ps_mask(hi, NOT_FINITE));
  const bool tiny = most < 1e-30f;  // its inverse would overflow
  *scale = !finite ? NAN : tiny ? 0.0f : most / 127;
  const __m512 inverse = _mm512_set1_ps(!finite || tiny ? 0.0f : 127 / most);
  const __m512i a = _mm512_cvtps_epi32(_mm512_maskz_mul_ps(finite ? 0xffff : 0, lo, inverse));
  const __m512i c = _mm512_cvtps_epi32(_mm512_maskz_mul_ps(finite ? 0xffff : 0, hi, inverse));
  _mm_storeu_si128((__m128i*)q, _mm512_cvtepi32_epi8(a));
  _mm_storeu_si128((__m128i*)(q + LANES), _mm512_cvtepi32_epi8(c));
  return _mm512_reduce_add_epi32(_mm512_add_epi32(a, c));
}

// Four bytes of q, copied to every lane.
inline __m512i four_columns(const int8_t* q) {
  int32_t bytes;
  std::memcpy(&bytes, q, 4);
  return _mm512_set1_epi32(bytes);
}

// A block of 16 packed weight rows times MT rows of x that are quantized to 8 bits.
template <int MT, bool INT4>
inline void block_dot_int8(const Linear& p, int64_t block, const Input& x, int64_t m0, __m512 (&acc)[MT]) {
  const uint8_t* w = (const uint8_t*)p.weight + block * p.Kb * (INT4 ? 256 : 512);
  const half *scales = p.scales + block * p.G * LANES, *mins = INT4 ? p.mins + block * p.G * LANES : nullptr;
  const __m512i nibble = _mm512_set1_epi8(15);
  std::fill(acc, acc + MT, _mm512_setzero_ps());
  for (int64_t b = 0, g = 0, left = p.groups_per_scale; b < p.Kb; b++) {
    const int8_t* q[MT];
    __m512i dot[MT];
#pragma GCC unroll 8
    for (int m = 0; m < MT; m++) {
      const int64_t at = (m0 + m) * p.Kb + b;
      q[m] = x.q + at * GROUP;
      dot[m] = INT4 ? _mm512_setzero_si512() : _mm512_set1_epi32(x.dot_start[at]);
    }
    for (int j = 0; j < (INT4 ? 4 : 8); j++, w += 64) {
      const __m512i bytes = _mm512_loadu_si512(w);
      _mm_prefetch(w + PREFETCH_DISTANCE, PREFETCH_TO);
      if constexpr (INT4) {
        const __m512i low = _mm512_and_si512(bytes, nibble);
        const __m512i high = _mm512_and_si512(_mm512_srli_epi16(bytes, 4), nibble);
#pragma GCC unroll 8
        for (int m = 0; m < MT; m++) {
          dot[m] = _mm512_dpbusd_epi32(dot[m], low, four_columns(q[m] + 4 * j));
          dot[m] = _mm512_dpbusd_epi32(dot[m], high, four_columns(q[m] + 16 + 4 * j));
        }
      } else {
#pragma GCC unroll 8
        for (int m = 0; m < MT; m++) dot[m] = _mm512_dpbusd_epi32(dot[m], bytes, four_columns(q[m] + 4 * j));
      }
    }
    const __m512 scale = load(scales + g * LANES);
    const __m512 min = INT4 ? load(mins + g * LANES) : _mm512_setzero_ps();
#pragma GCC unroll 8
    for (int m = 0; m < MT; m++) {
      const int64_t at = (m0 + m) * p.Kb + b;
      const __m512 step = _mm512_mul_ps(_mm512_set1_ps(x.scale[at]), scale);
      acc[m] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dot[m]), step, acc[m]);
      if constexpr (INT4) acc[m] = _mm512_fmadd_ps(min, _mm512_set1_ps(x.scaled_sum[at]), acc[m]);
    }
    if (--left == 0) g++, left = p.groups_per_scale;
  }
}

// A block of 16 packed weight rows times MT rows of x in float32. Each weight is unpacked once, for all MT rows.
template <int MT, bool INT4>
inline void block_dot_float(const Linear& p, int64_t block, const Input& x, int64_t m0, __m512 (&acc)[MT]) {
  const uint8_t* w = (const uint8_t*)p.weight + block * p.Kb * (INT4 ? 256 : 512);
  const half *scales = p.scales + block * p.G * LANES, *mins = INT4 ? p.mins + block * p.G * LANES : nullptr;
  const __m512i low = _mm512_set1_epi32(15), sign = _mm512_set1_epi8(-128);
  const int64_t K = p.Kb * GROUP;
  __m512 other[MT];  // two sums, so that one addition need not wait for the last
  std::fill(acc, acc + MT, _mm512_setzero_ps());
  std::fill(other, other + MT, _mm512_setzero_ps());
  for (int64_t b = 0, g = 0, left = p.groups_per_scale; b < p.Kb; b++) {
    const __m512 scale = load(scales + g * LANES);
    const __m512 min = INT4 ? load(mins + g * LANES) : _mm512_setzero_ps();
    const float* column = x.as_float + m0 * K + b * GROUP;
    for (int j = 0; j < (INT4 ? 4 : 8); j++, w += 64) {
      __m512i bytes = _mm512_loadu_si512(w);
      if constexpr (!INT4) bytes = _mm512_xor_si512(bytes, sign);
#pragma GCC unroll 4
      for (int c = 0; c < 4; c++) {
        if constexpr (INT4) {
          const __m512i q = _mm512_and_si512(_mm512_srli_epi32(bytes, 8 * c), low);
          const __m512i r = _mm512_and_si512(_mm512_srli_epi32(bytes, 8 * c + 4), low);
          const __m512 a = _mm512_fmadd_ps(_mm512_cvtepi32_ps(q), scale, min);
          const __m512 d = _mm512_fmadd_ps(_mm512_cvtepi32_ps(r), scale, min);
#pragma GCC unroll 8
          for (int m = 0; m < MT; m++) {
            acc[m] = _mm512_fmadd_ps(a, _mm512_set1_ps(column[m * K + 4 * j + c]), acc[m]);
            other[m] = _mm512_fmadd_ps(d, _mm512_set1_ps(column[m * K + 16 + 4 * j + c]), other[m]);
          }
        } else {
          const __m512i q = _mm512_srai_epi32(_mm512_slli_epi32(bytes, 24 - 8 * c), 24);
          const __m512 a = _mm512_mul_ps(_mm512_cvtepi32_ps(q), scale);
#pragma GCC unroll 8
          for (int m = 0; m < MT; m++) {
            __m512& sum = c % 2 ? other[m] : acc[m];
            sum = _mm512_fmadd_ps(a, _mm512_set1_ps(column[m * K + 4 * j + c]), sum);
          }
        }
      }
    }
    if (--left == 0) g++, left = p.groups_per_scale;
  }
  for (int m = 0; m < MT; m++) acc[m] = _mm512_add_ps(acc[m], other[m]);
}

inline Input allocate_input(Arena& arena, const Linear& l, const void* x, int64_t M) {
  Input in{x};
  if (l.quantizes_activations()) {
    in.q = arena.allocate<int8_t>(M * l.Kb * GROUP);
    in.scale = arena.allocate<float>(M * l.Kb);
    in.dot_start = arena.allocate<int32_t>(M * l.Kb);
    in.scaled_sum = arena.allocate<float>(M * l.Kb);
  } else if (l.bits < 16) {
    in.as_float = arena.allocate<float>(M * l.Kb * GROUP);
  }
  return in;
}

// Converts groups begin..end of row m of x.
template <class T>
void prepare_input(const Linear& l, const Input& in, int64_t m, int64_t begin, int64_t end) {
  if (l.bits == 16) return;
  const T* x = (const T*)in.x + m * l.K;
  for (int64_t b = begin; b < end; b++) {
    const int64_t k = b * GROUP, left = l.K - k, at = m * l.Kb + b;
    if (l.quantizes_activations()) {
      const int32_t sum = quantize_group(x + k, left, in.q + at * GROUP, in.scale + at);
      in.dot_start[at] = -128 * sum, in.scaled_sum[at] = in.scale[at] * sum;
    } else {
      store(in.as_float + at * GROUP, load(x + k, first_lanes(left)), 0xffff);
      store(in.as_float + at * GROUP + LANES, load(x + k + LANES, first_lanes(left - LANES)), 0xffff);
    }
  }
}

template <class T>
void prepare_input_rows(const Team& team, const Linear& l, const Input& in, int64_t M) {
  if (l.bits == 16) return;
  team.split(M, 1, [&](int64_t m, int64_t end) {
    for (; m < end; m++) prepare_input<T>(l, in, m, 0, l.Kb);
  });
  team.barrier();
}

// Adds bias and residual to 16 outputs of row m of x, and stores them.
template <class T>
inline void finish_outputs(const Linear& l, int64_t block, int64_t m, __m512 y, const T* residual, T* out) {
  const int64_t n = block * LANES, at = m * l.N + n;
  const __mmask16 valid = first_lanes(l.N - n);
  if (l.bias) y = _mm512_add_ps(y, load((const T*)l.bias + n, valid));
  if (residual) y = _mm512_add_ps(y, load(residual + at, valid));
  store(out + at, y, valid);
}

// A block of packed weights times rows m0..m0+MT of x, plus bias and residual.
template <int MT, bool INT4, class T>
void packed_tile(const Linear& l, int64_t block, const Input& x, int64_t m0, const T* residual, T* out) {
  __m512 acc[MT];
  if (l.exact)
    block_dot_float<MT, INT4>(l, block, x, m0, acc);
  else
    block_dot_int8<MT, INT4>(l, block, x, m0, acc);
  for (int m = 0; m < MT; m++) finish_outputs(l, block, m0 + m, acc[m], residual, out);
}

// A block of packed weights times rows m..stop of x.
template <bool INT4, class T>
void packed_block(const Linear& l, int64_t block, const Input& x, int64_t m, int64_t stop, const T* residual, T* out) {
  auto tile = [&](auto rows) {
    packed_tile<decltype(rows)::value, INT4>(l, block, x, m, residual, out);
    m += decltype(rows)::value;
  };
  while (m + 8 <= stop) tile(Int<8>());
  if (stop - m >= 4) tile(Int<4>());
  if (stop - m >= 2) tile(Int<2>());
  if (stop - m >= 1) tile(Int<1>());
}

}  // namespace
