// The CPU kernels: products of a few rows with bfloat16, 8-bit and 4-bit weights at the speed of memory, norms,
// attention, all blocks of a transformer in one operation, and sampling.
//
// kernels_cpu.py builds this file, packs the weights and declares the operations; kernels.py says what they compute.
// Needs AVX-512 (F, BW, DQ, VL, VNNI, BF16). Read down: numbers, threads, products, norms, attention, blocks, sampling,
// and at the end the operations, which check what they are given.
//
// A matrix has N rows (outputs) and K columns (inputs); x has M rows of K. Decoding is bound by reading weights, so each
// is read once for a whole tile of rows of x, in long streams. Every output is summed in one fixed order, by one thread:
// its bits depend on nothing but its row of x, not on the rows beside it nor on the number of threads.

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/linear.h>
#include <immintrin.h>
#include <omp.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <deque>
#include <limits>
#include <memory>
#include <mutex>
#include <optional>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

namespace {

using at::Tensor;
using bf16 = at::BFloat16;
using half = at::Half;

constexpr int LANES = 16;      // 32-bit numbers in a register
constexpr int GROUP = 32;      // columns that share an activation scale
constexpr int MAX_DECODE_TOKENS = 16;  // new tokens up to which a product is bound by reading its weights
constexpr int AHEAD = 4096;    // bytes that weights are fetched ahead of their use
constexpr int64_t ALONE = 1 << 15;  // weights (or numbers) below which waking other threads costs more than they save

// ---------------------------------------------------------------- numbers of every kind, 16 at a time as float32

inline __mmask16 first(int64_t n) { return n >= LANES ? 0xffff : n <= 0 ? 0 : (1u << n) - 1; }

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

// e^x to float32's precision: 2^n e^r with |r| <= ln(2) / 2. NaN stays NaN.
inline __m512 exponential(__m512 x) {
  x = _mm512_max_ps(_mm512_set1_ps(-110.0f), _mm512_min_ps(_mm512_set1_ps(90.0f), x));  // 0 and infinity from there on
  const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), _MM_FROUND_TO_NEAREST_INT);
  __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);  // ln(2) in two parts
  r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
  __m512 y = _mm512_set1_ps(1.0f / 5040);
  for (float c : {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f})
    y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(c));
  return _mm512_scalef_ps(y, n);
}

inline float exponential(float x) { return _mm512_cvtss_f32(exponential(_mm512_set1_ps(x))); }

// ---------------------------------------------------------------- threads

// The threads that do a piece of work together; each calls the same functions and does its share.
struct Team {
  int thread, all;

  // Calls work(begin, end) with this thread's part of 0..n, a multiple of `grain` long.
  template <class Work>
  void split(int64_t n, int64_t grain, const Work& work) const {
    const int64_t pieces = (n + grain - 1) / grain;
    const int64_t begin = pieces * thread / all * grain, end = std::min(n, pieces * (thread + 1) / all * grain);
    if (begin < end) work(begin, end);
  }

  void wait() const {  // for the others
    if (all > 1) {
#pragma omp barrier
    }
  }
};

// Runs work(team) in as many threads as torch has.
template <class Work>
void together(bool alone, const Work& work) {
  const int threads = alone || omp_in_parallel() ? 1 : omp_get_max_threads();
  if (threads <= 1) return work(Team{0, 1});
#pragma omp parallel num_threads(threads)
  work(Team{omp_get_thread_num(), omp_get_num_threads()});
}

// Hands out parts of one piece of memory, at multiples of 64 bytes. From a null pointer it only counts them.
struct Layout {
  uint8_t* next = nullptr;
  template <class T>
  T* take(int64_t n) {
    T* p = reinterpret_cast<T*>(next);
    next += (n * sizeof(T) + 63) / 64 * 64;
    return p;
  }
};

// What make(layout) lays out, in memory of its own: (what it returned, that memory).
template <class Make>
auto laid_out(const Make& make) {
  Layout counting;
  make(counting);
  const Tensor memory = at::empty({(counting.next - (uint8_t*)nullptr) + 64}, at::kByte);
  Layout layout{memory.data_ptr<uint8_t>()};
  layout.next += -(uintptr_t)layout.next % 64;
  return std::make_pair(make(layout), memory);
}

// ---------------------------------------------------------------- products
//
// Blocks of 16 rows of the matrix, one a lane, by groups of 32 columns: K is filled up to Kb groups, N to Nb blocks.
//   int8  (Nb,Kb,8,16,4) uint8: q + 128 of columns 4j..4j+3 of each row, which is what the 8-bit product wants
//   int4  (Nb,Kb,4,16,4) uint8: columns 4j..4j+3 in the low nibbles, 16+4j..16+4j+3 in the high ones
//   scales and for int4 mins (Nb,G,16) float16
// An activation group of 32 shares a scale as well, so that sums of products are exact in int32 within a group; or with
// exact activations everything is float32.

// A layer: y = x W^T + bias.
struct Linear {
  int64_t N, K;
  int bits;           // 16: W is (N,K) in x's dtype; 8, 4: packed, as said below
  bool exact;         // products of packed weights with x as it is
  const void* weight;
  const void* bias;   // (N,) in x's dtype, or null
  const half *scales, *mins;
  int64_t Kb, G, per_group;  // groups of 32 columns; groups that share a scale, and how many of the former have one

  bool quantizes() const { return bits < 16 && !exact; }
};

// M rows of x, as the product of a layer reads them.
struct Input {
  const void* x;   // (M,K)
  int8_t* q;       // (M,Kb,32), of activations quantized to 8 bits
  float* scale;    // (M,Kb)
  int32_t* start;  // (M,Kb), where sums of 8-bit products begin: -128 times q's sum, since they are of weights + 128
  float* offset;   // (M,Kb), what 4-bit weights' mins are multiplied with: scale times q's sum
  float* wide;     // (M,Kb*32), of exact ones
};

template <int I>
using Int = std::integral_constant<int, I>;

// Weights as they are, (N,K) by rows.
// One step along K: acc += w * x, elementwise. bfloat16 in pairs, 32 at a time, by the instruction made for it.
template <class T>
struct Step {
  static constexpr int WIDTH = LANES;
  using Vector = __m512;
  static Vector take(const T* p, int64_t left) { return load(p, first(left)); }
  static __m512 add(__m512 acc, Vector w, Vector x) { return _mm512_fmadd_ps(w, x, acc); }
};

template <>
struct Step<bf16> {
  static constexpr int WIDTH = 2 * LANES;
  using Vector = __m512bh;
  static Vector take(const bf16* p, int64_t left) {
    const __mmask32 mask = left >= WIDTH ? ~0u : (1u << left) - 1;
    return (__m512bh)_mm512_maskz_loadu_epi16(mask, p);
  }
  static __m512 add(__m512 acc, Vector w, Vector x) { return _mm512_dpbf16_ps(acc, w, x); }
};

// The sum of a register's lanes: i and i + 8 first, then i + 4, i + 2, i + 1.
inline float sum_of_lanes(__m512 x) {
  const __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1));
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

// The same of 16 registers at once, to the bit, in a fifth of the instructions: each step adds halves of what two hold.
inline __m512 sums_of_lanes(const __m512* x) {
  __m512 quarters[4], pairs[2];
#pragma GCC unroll 4
  for (int j = 0; j < 4; j++) {
    const __m512 a = _mm512_add_ps(_mm512_shuffle_f32x4(x[j], x[4 + j], 0x44), _mm512_shuffle_f32x4(x[j], x[4 + j], 0xee));
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

// NT rows of w times MT rows of x. Each of the products has a register of its own, whose lanes are summed at the end.
template <class T, int NT, int MT>
inline void linear_tile(const T* w, const T* x, const T* bias, const T* residual, T* out, int64_t N, int64_t K) {
  using S = Step<T>;
  __m512 acc[MT][NT];
  for (auto& row : acc) std::fill(row, row + NT, _mm512_setzero_ps());
  // Fetched ahead in the order of memory, from which the hardware learns to do the same; not a line of each row in turn.
  const char* ahead = (const char*)w + AHEAD * (NT + 1) / 2;
  auto step = [&](int64_t k, int64_t left) {
    typename S::Vector xs[MT];
#pragma GCC unroll 8
    for (int m = 0; m < MT; m++) xs[m] = S::take(x + m * K + k, left);
#pragma GCC unroll 8
    for (int n = 0; n < NT; n++, ahead += 64) {
      _mm_prefetch(ahead, _MM_HINT_T0);
      const auto row = S::take(w + n * K + k, left);
#pragma GCC unroll 8
      for (int m = 0; m < MT; m++) acc[m][n] = S::add(acc[m][n], row, xs[m]);
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
  constexpr __mmask16 there = (1 << NT) - 1;
  for (int m = 0; m < MT; m++) {
    __m512 y = load(sums[m], there);
    if (bias) y = _mm512_add_ps(y, load(bias, there));
    if (residual) y = _mm512_add_ps(y, load(residual + m * N, there));
    store(out + m * N, y, there);
  }
}

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
  if (M - m >= 2) tile(Int<2>());
  if (M - m >= 1) tile(Int<1>());
}

// One group of x: its scale and the 8-bit numbers; returns their sum.
template <class T>
inline int32_t quantize_group(const T* x, int64_t K, int8_t* q, float* scale) {
  const __m512 lo = load(x, first(K)), hi = load(x + LANES, first(K - LANES));
  const float most = _mm512_reduce_max_ps(_mm512_max_ps(_mm512_abs_ps(lo), _mm512_abs_ps(hi)));
  constexpr int NOT_FINITE = 0x99;  // quiet and signalling NaN, both infinities
  const bool finite = !(_mm512_fpclass_ps_mask(lo, NOT_FINITE) | _mm512_fpclass_ps_mask(hi, NOT_FINITE));
  const bool tiny = most < 1e-30f;  // its inverse would overflow
  *scale = !finite ? std::numeric_limits<float>::quiet_NaN() : tiny ? 0.0f : most / 127;
  const __m512 inverse = _mm512_set1_ps(!finite || tiny ? 0.0f : 127 / most);
  const __m512i a = _mm512_cvtps_epi32(_mm512_maskz_mul_ps(finite ? 0xffff : 0, lo, inverse));
  const __m512i c = _mm512_cvtps_epi32(_mm512_maskz_mul_ps(finite ? 0xffff : 0, hi, inverse));
  _mm_storeu_si128((__m128i*)q, _mm512_cvtepi32_epi8(a));
  _mm_storeu_si128((__m128i*)(q + LANES), _mm512_cvtepi32_epi8(c));
  return _mm512_reduce_add_epi32(_mm512_add_epi32(a, c));
}

inline __m512i four_columns(const int8_t* q) {
  int32_t bytes;
  std::memcpy(&bytes, q, 4);
  return _mm512_set1_epi32(bytes);
}

// One block of 16 rows times MT rows of x quantized to 8 bits.
template <int MT, bool INT4>
inline void block_times_quantized(const Linear& p, int64_t block, const Input& x, int64_t m0, __m512 (&acc)[MT]) {
  const uint8_t* w = (const uint8_t*)p.weight + block * p.Kb * (INT4 ? 256 : 512);
  const half *scales = p.scales + block * p.G * LANES, *mins = INT4 ? p.mins + block * p.G * LANES : nullptr;
  const __m512i nibble = _mm512_set1_epi8(15);
  std::fill(acc, acc + MT, _mm512_setzero_ps());
  for (int64_t b = 0, g = 0, left = p.per_group; b < p.Kb; b++) {
    const int8_t* q[MT];
    __m512i dot[MT];
#pragma GCC unroll 8
    for (int m = 0; m < MT; m++) {
      const int64_t at = (m0 + m) * p.Kb + b;
      q[m] = x.q + at * GROUP;
      dot[m] = INT4 ? _mm512_setzero_si512() : _mm512_set1_epi32(x.start[at]);
    }
    for (int j = 0; j < (INT4 ? 4 : 8); j++, w += 64) {
      const __m512i bytes = _mm512_loadu_si512(w);
      _mm_prefetch(w + AHEAD, _MM_HINT_T0);
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
      if constexpr (INT4) acc[m] = _mm512_fmadd_ps(min, _mm512_set1_ps(x.offset[at]), acc[m]);
    }
    if (--left == 0) g++, left = p.per_group;
  }
}

// The same with x (M,Kb*32) in float32: each weight is unpacked in a register, for all rows of x at once.
template <int MT, bool INT4>
inline void block_times_exact(const Linear& p, int64_t block, const Input& x, int64_t m0, __m512 (&acc)[MT]) {
  const uint8_t* w = (const uint8_t*)p.weight + block * p.Kb * (INT4 ? 256 : 512);
  const half *scales = p.scales + block * p.G * LANES, *mins = INT4 ? p.mins + block * p.G * LANES : nullptr;
  const __m512i low = _mm512_set1_epi32(15), sign = _mm512_set1_epi8(-128);
  const int64_t K = p.Kb * GROUP;
  __m512 other[MT];  // two sums, so that one addition need not wait for the last
  std::fill(acc, acc + MT, _mm512_setzero_ps());
  std::fill(other, other + MT, _mm512_setzero_ps());
  for (int64_t b = 0, g = 0, left = p.per_group; b < p.Kb; b++) {
    const __m512 scale = load(scales + g * LANES);
    const __m512 min = INT4 ? load(mins + g * LANES) : _mm512_setzero_ps();
    const float* column = x.wide + m0 * K + b * GROUP;
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
    if (--left == 0) g++, left = p.per_group;
  }
  for (int m = 0; m < MT; m++) acc[m] = _mm512_add_ps(acc[m], other[m]);
}

inline Input lay_out_input(Layout& layout, const Linear& l, const void* x, int64_t M) {
  Input in{x};
  if (l.quantizes()) {
    in.q = layout.take<int8_t>(M * l.Kb * GROUP);
    in.scale = layout.take<float>(M * l.Kb);
    in.start = layout.take<int32_t>(M * l.Kb);
    in.offset = layout.take<float>(M * l.Kb);
  } else if (l.bits < 16) {
    in.wide = layout.take<float>(M * l.Kb * GROUP);
  }
  return in;
}

// Groups begin..end of row m of x.
template <class T>
void prepare(const Linear& l, const Input& in, int64_t m, int64_t begin, int64_t end) {
  if (l.bits == 16) return;
  const T* x = (const T*)in.x + m * l.K;
  for (int64_t b = begin; b < end; b++) {
    const int64_t k = b * GROUP, left = l.K - k, at = m * l.Kb + b;
    if (l.quantizes()) {
      const int32_t sum = quantize_group(x + k, left, in.q + at * GROUP, in.scale + at);
      in.start[at] = -128 * sum, in.offset[at] = in.scale[at] * sum;
    } else {
      store(in.wide + at * GROUP, load(x + k, first(left)), 0xffff);
      store(in.wide + at * GROUP + LANES, load(x + k + LANES, first(left - LANES)), 0xffff);
    }
  }
}

template <class T>
void prepare_rows(const Team& team, const Linear& l, const Input& in, int64_t M) {
  if (l.bits == 16) return;
  team.split(M, 1, [&](int64_t m, int64_t end) {
    for (; m < end; m++) prepare<T>(l, in, m, 0, l.Kb);
  });
  team.wait();
}

template <int MT, bool INT4, class T>
void packed_tile(const Linear& l, int64_t block, const Input& x, int64_t m0, const T* residual, T* out) {
  __m512 acc[MT];
  if (l.exact)
    block_times_exact<MT, INT4>(l, block, x, m0, acc);
  else
    block_times_quantized<MT, INT4>(l, block, x, m0, acc);
  const int64_t n = block * LANES;
  const __mmask16 there = first(l.N - n);
  for (int m = 0; m < MT; m++) {
    const int64_t at = (m0 + m) * l.N + n;
    if (l.bias) acc[m] = _mm512_add_ps(acc[m], load((const T*)l.bias + n, there));
    if (residual) acc[m] = _mm512_add_ps(acc[m], load(residual + at, there));
    store(out + at, acc[m], there);
  }
}

template <bool INT4, class T>
void packed_blocks(const Linear& l, int64_t block, const Input& x, int64_t m, int64_t stop, const T* residual, T* out) {
  auto tile = [&](auto rows) {
    packed_tile<decltype(rows)::value, INT4>(l, block, x, m, residual, out);
    m += decltype(rows)::value;
  };
  while (m + 8 <= stop) tile(Int<8>());  // rows of x that share a load of weights
  if (stop - m >= 4) tile(Int<4>());
  if (stop - m >= 2) tile(Int<2>());
  if (stop - m >= 1) tile(Int<1>());
}

// This thread's part of out = x W^T + bias + residual, (M,N); residual may be null. The input must be prepared.
template <class T>
void product(const Team& team, const Linear& l, const Input& in, int64_t M, const T* residual, T* out) {
  const int64_t N = l.N, K = l.K;
  if (l.bits == 16) {
    const T *w = (const T*)l.weight, *x = (const T*)in.x, *bias = (const T*)l.bias;
    return team.split(N, 2, [&](int64_t n, int64_t end) {
      auto rows = [&](auto count) {
        constexpr int NT = decltype(count)::value;
        auto at = [&](const T* p) { return p ? p + n : nullptr; };
        linear_rows<T, NT>(w + n * K, x, at(bias), at(residual), out + n, M, N, K);
        n += NT;
      };
      // One stream of memory is faster than several; but with many rows of x, two rows of W share what is read of x.
      while (M > 4 && n + 2 <= end) rows(Int<2>());
      while (n < end) rows(Int<1>());
    });
  }
  for (int64_t start = 0, stop; start < M; start = stop) {
    stop = std::min<int64_t>(M, start + 256);  // of x at a time, which stay in the cache for all blocks
    team.split((N + LANES - 1) / LANES, 1, [&](int64_t block, int64_t end) {
      for (; block < end; block++)
        l.bits == 4 ? packed_blocks<true>(l, block, in, start, stop, residual, out)
                    : packed_blocks<false>(l, block, in, start, stop, residual, out);
    });
  }
}

// ---------------------------------------------------------------- norms: one row, one thread, float32 inside

template <class T>
void rms_norm_row(const T* x, const T* w, T* out, int64_t D, float eps) {
  __m512 squares = _mm512_setzero_ps();
  for (int64_t i = 0; i < D; i += LANES) {
    const __m512 v = load(x + i, first(D - i));
    squares = _mm512_fmadd_ps(v, v, squares);
  }
  const __m512 scale = _mm512_set1_ps(1.0f / std::sqrt(_mm512_reduce_add_ps(squares) / D + eps));
  for (int64_t i = 0; i < D; i += LANES) {
    const __mmask16 m = first(D - i);
    store(out + i, _mm512_mul_ps(_mm512_mul_ps(load(x + i, m), scale), load(w + i, m)), m);
  }
}

template <class T>
void layer_norm_row(const T* x, const T* w, const T* bias, T* out, int64_t D, float eps) {
  __m512 sum = _mm512_setzero_ps(), squares = _mm512_setzero_ps();
  for (int64_t i = 0; i < D; i += LANES) sum = _mm512_add_ps(sum, load(x + i, first(D - i)));
  const __m512 mean = _mm512_set1_ps(_mm512_reduce_add_ps(sum) / D);
  for (int64_t i = 0; i < D; i += LANES) {
    const __mmask16 m = first(D - i);
    const __m512 v = _mm512_maskz_sub_ps(m, load(x + i, m), mean);
    squares = _mm512_fmadd_ps(v, v, squares);
  }
  const __m512 scale = _mm512_set1_ps(1.0f / std::sqrt(_mm512_reduce_add_ps(squares) / D + eps));
  for (int64_t i = 0; i < D; i += LANES) {
    const __mmask16 m = first(D - i);
    const __m512 v = _mm512_mul_ps(_mm512_sub_ps(load(x + i, m), mean), scale);
    store(out + i, _mm512_fmadd_ps(v, load(w + i, m), load(bias + i, m)), m);
  }
}

// ---------------------------------------------------------------- attention
//
// Scores are taken for 16 slots at a time, a lane each: their keys are turned, so that a register holds the same word of
// 16 keys: an element in float32, or two of them in bfloat16. Slots go by chunks, each of which gives a query a softmax
// of its own: the largest score m, the sum l of e^(score - m), and o, the values weighted by these. Chunks are joined in
// order (arXiv:2205.14135): with m the larger of m1 and m2,
//   l = l1 e^(m1-m) + l2 e^(m2-m),   o = o1 e^(m1-m) + o2 e^(m2-m),   and at the end o / l.
// Where chunks begin is fixed, so that a query's bits do not depend on what is beside it nor on the threads, and are the
// same whether its chunks are done in turn (many tokens) or by different threads (few).

constexpr int CHUNK = 64;  // slots
constexpr int TILE = 32;    // queries that share turned keys

template <class T>
struct Attention {
  int64_t B, S, H, K, E, slots;
  const T* q;  // (B,S,H,E)
  int64_t q_stride;  // from token to token
  const T *k, *v;  // (R,K,slots,E)
  const int64_t* pos;   // (B,S)
  const int64_t* rows;  // (B,), or null: 0..B-1
  const float* slopes;  // (H,), or null
  int64_t window;  // the slots that a token sees; all: infinite
  T* out;  // (B,S,H,E)

  static constexpr int PAIRS = std::is_same_v<T, bf16> ? 2 : 1;  // elements in a word
  int64_t group() const { return H / K; }  // query heads that share a key head
  int64_t words() const { return (E + PAIRS * LANES - 1) / (PAIRS * LANES) * LANES; }
  int64_t width() const { return (E + LANES - 1) / LANES * LANES; }
  int64_t stride() const { return width() + LANES; }  // of what is kept for a query: o, then m, then l
  const T* row(const T* cache, int64_t b, int64_t k) const { return cache + ((rows ? rows[b] : b) * K + k) * slots * E; }

  // The slots that some of the tokens begin..end of row b see: first..last, or none if last < first.
  std::pair<int64_t, int64_t> seen(int64_t b, int64_t begin, int64_t end) const {
    int64_t least = slots, most = -1;
    for (int64_t s = begin; s < end; s++) {
      const int64_t p = pos[b * S + s];
      if (p >= 0) least = std::min(least, p), most = std::max(most, p);
    }
    return {std::max<int64_t>(0, least - window + 1), most};
  }
};

// What a thread works in.
struct Workspace {
  uint32_t *queries, *keys;  // (TILE,words), (words,16)
  float* weights;  // (TILE,CHUNK) scores, then e^(score - m)
  float *state, *more;  // (TILE,stride) each

  template <class T>
  static std::vector<Workspace> lay_out(Layout& layout, const Attention<T>& a) {
    std::vector<Workspace> all(omp_get_max_threads());
    for (auto& w : all)
      w = {layout.take<uint32_t>(TILE * a.words()), layout.take<uint32_t>(a.words() * LANES),
           layout.take<float>(TILE * CHUNK), layout.take<float>(TILE * a.stride()),
           layout.take<float>(TILE * a.stride())};
    return all;
  }
};

inline __m512i words_of(const bf16* row, int64_t word, int64_t E) {
  const int64_t left = E - 2 * word;
  return _mm512_maskz_loadu_epi16(left >= 32 ? ~0u : left <= 0 ? 0 : (1u << left) - 1, row + 2 * word);
}
template <class T>
__m512i words_of(const T* row, int64_t word, int64_t E) {
  return _mm512_castps_si512(load(row + word, first(E - word)));
}

// 16 rows of 16 words to 16 columns.
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

// Indices that take 16-bit numbers from..from+16 of two registers in turn.
inline __m512i interleave(int from) {
  const __m512i lanes = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
  const __m512i one = _mm512_add_epi32(lanes, _mm512_set1_epi32(from));
  return _mm512_or_si512(one, _mm512_slli_epi32(_mm512_add_epi32(one, _mm512_set1_epi32(32)), 16));
}

// Query i of row b and key head k is head k * group + i % group of token i / group.
template <class T>
void take_queries(const Attention<T>& a, int64_t b, int64_t k, int64_t begin, int64_t count, const Workspace& w) {
  for (int64_t i = 0; i < count; i++) {
    const int64_t s = (begin + i) / a.group(), h = k * a.group() + (begin + i) % a.group();
    for (int64_t j = 0; j < a.words(); j += LANES)
      _mm512_store_si512(w.queries + i * a.words() + j, words_of(a.q + (b * a.S + s) * a.q_stride + h * a.E, j, a.E));
  }
}

inline void fetch(const void* begin, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += 64) _mm_prefetch((const char*)begin + i, _MM_HINT_T0);
}

// Keys of 16 slots from `slot` on, turned; beyond the last slot that one again, which nothing sees.
template <class T>
void transpose_keys(const Attention<T>& a, const T* keys, int64_t slot, const Workspace& w) {
  const T* rows[LANES];
  for (int i = 0; i < LANES; i++) rows[i] = keys + std::min(slot + i, a.slots - 1) * a.E;
  const int64_t words = a.words(), E = a.E;
  uint32_t* to = w.keys;
  for (int64_t j = 0; j < words; j += LANES, to += LANES * LANES) {
    __m512i r[LANES];
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++) r[i] = words_of(rows[i], j, E);
    transpose(r);
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++) _mm512_store_si512(to + i * LANES, r[i]);
  }
}

// Products of queries i.. with the turned keys.
template <class T, int MT>
void dot_keys(const Attention<T>& a, const Workspace& w, int64_t i, __m512 (&acc)[MT]) {
  __m512 other[MT];  // two sums, so that one addition need not wait for the last
  std::fill(acc, acc + MT, _mm512_setzero_ps());
  std::fill(other, other + MT, _mm512_setzero_ps());
  const int64_t words = a.words();
  auto add = [&](__m512& sum, int64_t j, int m) {
    const __m512i key = _mm512_load_si512(w.keys + j * LANES);
    const __m512i query = _mm512_set1_epi32(w.queries[(i + m) * words + j]);
    if constexpr (a.PAIRS == 2)
      sum = _mm512_dpbf16_ps(sum, (__m512bh)key, (__m512bh)query);
    else
      sum = _mm512_fmadd_ps(_mm512_castsi512_ps(key), _mm512_castsi512_ps(query), sum);
  };
  for (int64_t j = 0; j < words; j += 2) {
#pragma GCC unroll 4
    for (int m = 0; m < MT; m++) add(acc[m], j, m), add(other[m], j + 1, m);
  }
  for (int m = 0; m < MT; m++) acc[m] = _mm512_add_ps(acc[m], other[m]);
}

// o of queries i.., VT registers of it from element e on: the values of slots begin..end, weighted. In bfloat16 by pairs
// of slots, whose weights are bfloat16 as well.
template <class T, int MT, int VT>
void weigh_values(const Attention<T>& a, const T* values, int64_t begin, int64_t end, int64_t ahead,
                  const Workspace& w, int64_t i, int64_t e, float* o) {
  __m512 acc[MT][VT];
  for (auto& row : acc) std::fill(row, row + VT, _mm512_setzero_ps());
  if constexpr (a.PAIRS == 2) {
    for (int64_t slot = begin / 2 * 2; slot < end; slot += 2) {
      if (i == 0) fetch(values + (slot + ahead) * a.E + e, 2 * VT * LANES * sizeof(T));
      __m512i v[VT + 1];
#pragma GCC unroll 4
      for (int j = 0; j < VT; j += 2) {
        const int64_t word = e / 2 + j * LANES / 2;
        const __m512i zero = _mm512_setzero_si512();  // of what is not seen, not even that may be NaN
        const __m512i one = slot < begin ? zero : words_of(values + slot * a.E, word, a.E);
        const __m512i two = slot + 1 < end ? words_of(values + (slot + 1) * a.E, word, a.E) : zero;
        v[j] = _mm512_permutex2var_epi16(one, interleave(0), two);
        v[j + 1] = _mm512_permutex2var_epi16(one, interleave(LANES), two);
      }
#pragma GCC unroll 4
      for (int m = 0; m < MT; m++) {
        const __m512i weight = _mm512_set1_epi32(((const uint32_t*)(w.weights + (i + m) * CHUNK))[slot % CHUNK / 2]);
#pragma GCC unroll 4
        for (int j = 0; j < VT; j++) acc[m][j] = _mm512_dpbf16_ps(acc[m][j], (__m512bh)v[j], (__m512bh)weight);
      }
    }
  } else {
    const __mmask16 there = first(a.E - e - (VT - 1) * LANES);  // in the last register
    for (int64_t slot = begin; slot < end; slot++) {
      if (i == 0) fetch(values + (slot + ahead) * a.E + e, VT * LANES * sizeof(T));
      __m512 v[VT];
#pragma GCC unroll 4
      for (int j = 0; j < VT; j++) v[j] = load(values + slot * a.E + e + j * LANES, j == VT - 1 ? there : 0xffff);
#pragma GCC unroll 4
      for (int m = 0; m < MT; m++) {
        const __m512 weight = _mm512_set1_ps(w.weights[(i + m) * CHUNK + slot % CHUNK]);
#pragma GCC unroll 4
        for (int j = 0; j < VT; j++) acc[m][j] = _mm512_fmadd_ps(weight, v[j], acc[m][j]);
      }
    }
  }
  for (int m = 0; m < MT; m++)
    for (int j = 0; j < VT; j++) store(o + (i + m) * a.stride() + e + j * LANES, acc[m][j], 0xffff);
}

// Calls work(Int<n>(), i) for i = 0.. in steps of n, so that `count` is covered: by 4 as long as possible.
template <class Work>
void by_fours(int64_t count, const Work& work) {
  int64_t i = 0;
  for (; i + 4 <= count; i += 4) work(Int<4>(), i);
  if (count - i == 3) work(Int<3>(), i);
  if (count - i == 2) work(Int<2>(), i);
  if (count - i == 1) work(Int<1>(), i);
}

// One chunk for the `count` queries that the workspace holds, from query `begin` on of row b, key head k; o, m and l of
// each go to found (count,stride).
template <class T>
void attend(const Attention<T>& a, int64_t b, int64_t k, int64_t begin, int64_t count, int64_t chunk,
            const Workspace& w, float* found) {
  const int64_t G = a.group(), P = a.stride(), base = chunk * CHUNK;
  const auto [least, most] = a.seen(b, begin / G, (begin + count - 1) / G + 1);
  const int64_t from = std::max(base, least), to = std::min(base + CHUNK, most + 1);
  const int64_t low = from / LANES * LANES, high = (to + LANES - 1) / LANES * LANES;
  const T *keys = a.row(a.k, b, k), *values = a.row(a.v, b, k);
  const __m512 scale = _mm512_set1_ps(1.0f / std::sqrt(float(a.E)));
  const __m512 nothing = _mm512_set1_ps(-std::numeric_limits<float>::infinity());
  const __m512i lanes = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
  // Memory is asked for a chunk ahead, or for the first chunk at once: without that this takes three times as long.
  const int64_t bytes = LANES * a.E * sizeof(T), ahead = base + CHUNK <= most ? CHUNK : 0;
  if (base <= least) fetch(keys + low * a.E, (to - low) * a.E * sizeof(T));
  for (int64_t slot = low; slot < to; slot += LANES) {
    if (ahead) fetch(keys + (slot + ahead) * a.E, bytes);
    if (base <= least) fetch(values + slot * a.E, bytes);
    transpose_keys(a, keys, slot, w);
    by_fours(count, [&](auto queries, int64_t i) {
      constexpr int MT = decltype(queries)::value;
      __m512 acc[MT];
      dot_keys<T, MT>(a, w, i, acc);
      for (int m = 0; m < MT; m++) {
        const int64_t query = begin + i + m, p = a.pos[b * a.S + query / G];
        const __m512i back = _mm512_sub_epi32(_mm512_set1_epi32(p - slot), lanes);  // from the token to the slot
        acc[m] = _mm512_mul_ps(acc[m], scale);
        if (a.slopes) {
          const __m512 slope = _mm512_set1_ps(a.slopes[k * G + query % G]);
          acc[m] = _mm512_fnmadd_ps(slope, _mm512_cvtepi32_ps(back), acc[m]);
        }
        // As unsigned numbers, what is ahead is further back than anything.
        const __mmask16 visible = _mm512_cmplt_epu32_mask(back, _mm512_set1_epi32(p < 0 ? 0 : a.window));
        acc[m] = _mm512_mask_blend_ps(visible, nothing, acc[m]);
        store(w.weights + (i + m) * CHUNK + slot - base, acc[m], 0xffff);
      }
    });
  }
  for (int64_t i = 0; i < count; i++) {
    float* weights = w.weights + i * CHUNK;
    __m512 most_of_lane = nothing, sum = _mm512_setzero_ps();
    for (int64_t j = low - base; j < high - base; j += LANES)
      most_of_lane = _mm512_max_ps(most_of_lane, load(weights + j));
    const float m = _mm512_reduce_max_ps(most_of_lane);
    const __m512 shift = _mm512_set1_ps(m == -std::numeric_limits<float>::infinity() ? 0.0f : m);
    for (int64_t j = low - base; j < high - base; j += LANES) {
      const __m512 weight = exponential(_mm512_sub_ps(load(weights + j), shift));
      sum = _mm512_add_ps(sum, weight);
      if constexpr (a.PAIRS == 2)
        store((bf16*)weights + j, weight, 0xffff);  // behind what is still to be read
      else
        store(weights + j, weight, 0xffff);
    }
    found[i * P + a.width()] = m;
    found[i * P + a.width() + 1] = _mm512_reduce_add_ps(sum);
  }
  by_fours(a.width() / LANES, [&](auto registers, int64_t e) {
    by_fours(count, [&](auto queries, int64_t i) {
      constexpr int MT = decltype(queries)::value, VT = decltype(registers)::value;
      weigh_values<T, MT, VT>(a, values, from, to, ahead, w, i, e * LANES, found);
    });
  });
}

inline void clear(float* state, int64_t width) {
  std::fill(state, state + width + LANES, 0.0f);
  state[width] = -std::numeric_limits<float>::infinity();
}

inline void join(float* state, const float* more, int64_t width) {
  const float m = std::max(state[width], more[width]);
  if (m == -std::numeric_limits<float>::infinity()) return;
  const float a = exponential(state[width] - m), c = exponential(more[width] - m);
  for (int64_t e = 0; e < width; e += LANES) {
    const __m512 part = _mm512_mul_ps(load(more + e), _mm512_set1_ps(c));
    store(state + e, _mm512_fmadd_ps(load(state + e), _mm512_set1_ps(a), part), 0xffff);
  }
  state[width] = m;
  state[width + 1] = state[width + 1] * a + more[width + 1] * c;
}

template <class T>
void finish(const float* state, int64_t width, T* out, int64_t E) {
  const float l = state[width + 1];
  const __m512 inverse = _mm512_set1_ps(l == 0 ? 0.0f : 1 / l);  // padding sees nothing
  for (int64_t e = 0; e < E; e += LANES) store(out + e, _mm512_mul_ps(load(state + e), inverse), first(E - e));
}

// Many tokens: a thread takes a tile of queries through all of its chunks. Tiles are dealt out in turn, for the later
// ones see more.
template <class T>
void attention_of_many(const Team& team, const Attention<T>& a, const Workspace& w) {
  const int64_t G = a.group(), queries = a.S * G, tiles = (queries + TILE - 1) / TILE, P = a.stride();
  for (int64_t item = team.thread; item < a.B * a.K * tiles; item += team.all) {
    const int64_t b = item / (a.K * tiles), k = item / tiles % a.K, begin = item % tiles * TILE;
    const int64_t count = std::min<int64_t>(TILE, queries - begin);
    const auto [least, most] = a.seen(b, begin / G, (begin + count - 1) / G + 1);
    take_queries(a, b, k, begin, count, w);
    for (int64_t i = 0; i < count; i++) clear(w.state + i * P, a.width());
    for (int64_t chunk = least / CHUNK; chunk * CHUNK <= most; chunk++) {
      attend(a, b, k, begin, count, chunk, w, w.more);
      for (int64_t i = 0; i < count; i++) join(w.state + i * P, w.more + i * P, a.width());
    }
    for (int64_t i = 0; i < count; i++) {
      const int64_t s = (begin + i) / G, h = k * G + (begin + i) % G;
      finish(w.state + i * P, a.width(), a.out + ((b * a.S + s) * a.H + h) * a.E, a.E);
    }
  }
}

// Few tokens of few rows: threads share the chunks of all rows and heads (`attend_parts`), then join them (`join_parts`).
struct Parts {
  bool few;  // else there are none
  std::vector<int64_t> first_chunk, first_item;  // of each row; an item is a chunk of a key head of a row

  template <class T>
  explicit Parts(const Attention<T>& a) : first_item{0} {
    const int64_t tiles = (a.S * a.group() + TILE - 1) / TILE;
    few = a.S <= MAX_DECODE_TOKENS && a.B * a.K * tiles < 8 * omp_get_max_threads();
    for (int64_t b = 0; b < a.B && few; b++) {
      const auto [least, most] = a.seen(b, 0, a.S);
      first_chunk.push_back(least / CHUNK);
      first_item.push_back(first_item.back() + (most < 0 ? 0 : most / CHUNK - least / CHUNK + 1) * a.K);
    }
  }

  int64_t items() const { return first_item.back(); }

  template <class T>
  float* lay_out(Layout& layout, const Attention<T>& a) const {
    return layout.take<float>(items() * a.S * a.group() * a.stride());
  }
};

template <class T>
void attend_parts(const Team& team, const Attention<T>& a, const Parts& parts, const Workspace& w, float* found) {
  const int64_t queries = a.S * a.group();
  const auto& first_item = parts.first_item;
  team.split(parts.items(), 1, [&](int64_t item, int64_t end) {
    for (; item < end; item++) {
      const int64_t b = std::upper_bound(first_item.begin(), first_item.end(), item) - first_item.begin() - 1;
      const int64_t chunks = (first_item[b + 1] - first_item[b]) / a.K, i = item - first_item[b];
      for (int64_t begin = 0; begin < queries; begin += TILE) {
        const int64_t count = std::min<int64_t>(TILE, queries - begin);
        take_queries(a, b, i / chunks, begin, count, w);
        attend(a, b, i / chunks, begin, count, parts.first_chunk[b] + i % chunks, w,
               found + (item * queries + begin) * a.stride());
      }
    }
  });
}

template <class T>
void join_parts(const Team& team, const Attention<T>& a, const Parts& parts, const Workspace& w, const float* found) {
  const int64_t queries = a.S * a.group(), G = a.group();
  team.split(a.B * a.S * a.H, 1, [&](int64_t at, int64_t end) {
    for (; at < end; at++) {
      const int64_t b = at / (a.S * a.H), s = at / a.H % a.S, h = at % a.H;
      const int64_t first = parts.first_item[b], chunks = (parts.first_item[b + 1] - first) / a.K;
      clear(w.state, a.width());
      for (int64_t item = first + h / G * chunks, last = item + chunks; item < last; item++)
        join(w.state, found + (item * queries + s * G + h % G) * a.stride(), a.width());
      finish(w.state, a.width(), a.out + at * a.E, a.E);
    }
  });
}

template <class T>
void attend_all(const Team& team, const Attention<T>& a, const Parts& parts, const Workspace& w, float* found) {
  if (parts.few) {
    attend_parts(team, a, parts, w, found), team.wait();
    join_parts(team, a, parts, w, found);
  } else {
    attention_of_many(team, a, w);
  }
  team.wait();
}

// ---------------------------------------------------------------- blocks
//
// Norm, attention and MLP of a few tokens, for all blocks in one operation, so that threads are woken once for a model.
// Between steps numbers are kept in x's dtype, as in model.py.

// What stays the same from call to call: checked once, by prepare_block.
struct Layer {
  std::vector<std::optional<Tensor>> tensors;  // keep the memory that the pointers below show
  at::ScalarType dtype;
  int64_t H, K, E, D, F, window;
  Linear qkv, out, up, down;
  const void *attention_norm[2], *mlp_norm[2], *q_norm, *k_norm;  // weight and, of a LayerNorm, bias
  float eps;
  bool gated, post_norm_residual;
};

template <class T>
struct Block {
  const Layer& layer;
  const Parts& parts;
  Attention<T> attention;  // all but q and out
  int64_t M;  // B S tokens
  const float *cos, *sin;  // (M,E), or null
  T *k, *v;  // the caches again, to be written
  const T* x;  // (M,D)
  T* result;  // (M,D), may be x

  struct Buffers {
    T *h, *qkv, *y, *x, *h2, *up, *act;  // (M,D), (M,(H+2K)E), (M,H E), (M,D), (M,D), (M,F or 2F), (M,F)
    Input to_qkv, to_out, to_up, to_down;
    std::vector<Workspace> workspaces;
    float* found;
  } b;

  void lay_out(Layout& layout) {
    const Layer& l = layer;
    b.h = layout.take<T>(M * l.D), b.qkv = layout.take<T>(M * l.qkv.N), b.y = layout.take<T>(M * l.out.K);
    b.x = layout.take<T>(M * l.D), b.h2 = layout.take<T>(M * l.D);
    b.up = layout.take<T>(M * l.up.N), b.act = layout.take<T>(M * l.F);
    b.to_qkv = lay_out_input(layout, l.qkv, b.h, M), b.to_out = lay_out_input(layout, l.out, b.y, M);
    b.to_up = lay_out_input(layout, l.up, b.h2, M), b.to_down = lay_out_input(layout, l.down, b.act, M);
    b.workspaces = Workspace::lay_out(layout, attention);
    b.found = parts.lay_out(layout, attention);
    attention.q = b.qkv, attention.q_stride = l.qkv.N, attention.out = b.y;
  }

  void norm_and_prepare(const Team& team, const T* from, const void* const (&weights)[2], T* to, const Linear& l,
                        const Input& in) const {
    const T *weight = (const T*)weights[0], *bias = (const T*)weights[1];
    const int64_t D = layer.D;
    team.split(M, 1, [&](int64_t m, int64_t end) {
      for (; m < end; m++) {
        bias ? layer_norm_row(from + m * D, weight, bias, to + m * D, D, layer.eps)
             : rms_norm_row(from + m * D, weight, to + m * D, D, layer.eps);
        prepare<T>(l, in, m, 0, l.Kb);
      }
    });
    team.wait();
  }

  // Queries and keys are normed and turned to their positions; keys and values go to the cache.
  void place_heads(const Team& team) const {
    const auto& a = attention;
    const int64_t E = a.E, per_token = a.H + 2 * a.K;
    team.split(M * per_token, 1, [&](int64_t at, int64_t end) {
      for (; at < end; at++) {
        const int64_t m = at / per_token, h = at % per_token;
        T* head = b.qkv + at * E;
        const T* weight = (const T*)(h < a.H ? layer.q_norm : layer.k_norm);
        if (h < a.H + a.K) {
          if (weight) rms_norm_row(head, weight, head, E, layer.eps);
          if (cos) rotate(head, cos + m * E, sin + m * E, E);
        }
        if (h < a.H) continue;
        const int64_t row = a.rows ? a.rows[m / a.S] : m / a.S, slot = a.pos[m] < 0 ? a.slots - 1 : a.pos[m];
        T* cache = h < a.H + a.K ? k : v;
        std::copy(head, head + E, cache + ((row * a.K + (h - a.H) % a.K) * a.slots + slot) * E);
      }
    });
    team.wait();
  }

  static void rotate(T* x, const float* cos, const float* sin, int64_t E) {
    const int64_t half = E / 2;
    for (int64_t e = 0; e < half; e += LANES) {
      const __mmask16 m = first(half - e);
      const __m512 a = load(x + e, m), b = load(x + half + e, m);
      store(x + e, _mm512_fmadd_ps(a, load(cos + e, m), _mm512_mul_ps(b, load(sin + e, m))), m);
      store(x + half + e, _mm512_fmadd_ps(b, load(cos + half + e, m), _mm512_mul_ps(a, load(sin + half + e, m))), m);
    }
  }

  // SwiGLU or tanh-GELU of what the first product of the MLP gave.
  void activate(const Team& team) const {
    const __m512 one = _mm512_set1_ps(1.0f);
    const int64_t F = layer.F, groups = (F + GROUP - 1) / GROUP;
    team.split(M * groups, 1, [&](int64_t at, int64_t end) {
      for (; at < end; at++) {
        const int64_t m = at / groups, group = at % groups;
        for (int64_t f = group * GROUP; f < std::min(F, (group + 1) * GROUP); f += LANES) {
          const __mmask16 there = first(F - f);
          const T* from = b.up + m * layer.up.N + f;
          const __m512 x = load(from, there);
          const __m512 cube = _mm512_mul_ps(_mm512_mul_ps(x, x), _mm512_mul_ps(x, _mm512_set1_ps(0.044715f)));
          // x sigmoid(z), which tanh-GELU is as well, with z = 2 sqrt(2/pi) (x + 0.044715 x^3)
          const __m512 z = layer.gated ? x : _mm512_mul_ps(_mm512_set1_ps(1.5957691216f), _mm512_add_ps(x, cube));
          __m512 y = _mm512_div_ps(x, _mm512_add_ps(one, exponential(_mm512_sub_ps(_mm512_setzero_ps(), z))));
          if (layer.gated) y = _mm512_mul_ps(y, load(from + F, there));
          store(b.act + m * F + f, y, there);
        }
        prepare<T>(layer.down, b.to_down, m, group, group + 1);
      }
    });
    team.wait();
  }

  void run(const Team& team) const {
    const Workspace& w = b.workspaces[team.thread];
    const Layer& l = layer;
    norm_and_prepare(team, x, l.attention_norm, b.h, l.qkv, b.to_qkv);
    product<T>(team, l.qkv, b.to_qkv, M, nullptr, b.qkv), team.wait();
    place_heads(team);
    attend_all(team, attention, parts, w, b.found);
    prepare_rows<T>(team, l.out, b.to_out, M);
    product<T>(team, l.out, b.to_out, M, l.post_norm_residual ? b.h : x, b.x), team.wait();
    norm_and_prepare(team, b.x, l.mlp_norm, b.h2, l.up, b.to_up);
    product<T>(team, l.up, b.to_up, M, nullptr, b.up), team.wait();
    activate(team);
    product<T>(team, l.down, b.to_down, M, l.post_norm_residual ? b.h2 : b.x, result), team.wait();
  }
};

// ---------------------------------------------------------------- sampling: sampling.py's, one row of logits at a time
//
// Weights are exp((x - max) / temperature), never normalized. A row is read once for its maximum and log-sum-exp, and
// once or twice more if it is to be drawn from. Filters copy the tokens that they keep to a short list, on which all
// that follows works: a pass over the whole row only drops what is certainly out.

constexpr int BLOCK_VECTORS = 16;  // vectors of a row that are surveyed together
inline __m512 minus_infinity() { return _mm512_set1_ps(-std::numeric_limits<float>::infinity()); }

// x from p, the lanes from `left` on minus infinity.
template <class T>
inline __m512 load_or_minus_infinity(const T* p, int64_t left) {
  return left >= LANES ? load(p) : _mm512_mask_mov_ps(minus_infinity(), first(left), load(p, first(left)));
}

// 2^x for x <= 0 with a relative error of 1e-7. Fewer instructions than `exponential`.
inline __m512 power_of_two(__m512 x) {
  const __m512 f = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);  // x - floor(x)
  __m512 y = _mm512_set1_ps(0.00187757661f);
  for (float c : {0.00898934025f, 0.0558263179f, 0.240153617f, 0.693153073f, 0.999999925f})
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(c));
  return _mm512_scalef_ps(y, x);
}

struct Survey {
  float max;
  float log_sum;  // log(sum(exp(x - max)))
  bool finite;    // max is, and no x is NaN
};

// One pass over a row. Softmax state for each lane: running maximum m, running sum l of exp(x - m). maxima (blocks,16):
// of each lane in each block.
template <class T>
Survey survey(const T* x, int64_t V, float* maxima) {
  const __m512 log2e = _mm512_set1_ps(1.44269504f);
  __m512 max = minus_infinity(), m = _mm512_set1_ps(-std::numeric_limits<float>::max()), l = _mm512_setzero_ps();
  auto block = [&](auto&& take) {
    __m512 xs[BLOCK_VECTORS], even = minus_infinity(), odd = minus_infinity(), sums[2] = {};
#pragma GCC unroll 16
    for (int j = 0; j < BLOCK_VECTORS; j++) xs[j] = take(j);
#pragma GCC unroll 8
    for (int j = 0; j < BLOCK_VECTORS; j += 2) {
      even = _mm512_max_ps(even, xs[j]), odd = _mm512_max_ps(odd, xs[j + 1]);  // NaN shows in the sum
    }
    const __m512 here = _mm512_max_ps(even, odd), m_new = _mm512_max_ps(m, here);
    _mm512_storeu_ps(maxima, here), maxima += LANES;
    max = _mm512_max_ps(max, here);
#pragma GCC unroll 16
    for (int j = 0; j < BLOCK_VECTORS; j++)
      sums[j % 2] = _mm512_add_ps(sums[j % 2], power_of_two(_mm512_mul_ps(_mm512_sub_ps(xs[j], m_new), log2e)));
    l = _mm512_fmadd_ps(l, power_of_two(_mm512_mul_ps(_mm512_sub_ps(m, m_new), log2e)), _mm512_add_ps(sums[0], sums[1]));
    m = m_new;
  };
  constexpr int64_t SIZE = BLOCK_VECTORS * LANES;
  int64_t v = 0;
  for (; v + SIZE <= V; v += SIZE) block([&](int j) { return load(x + v + j * LANES); });
  if (v < V) block([&](int j) { return load_or_minus_infinity(x + v + j * LANES, V - v - j * LANES); });
  const float top = _mm512_reduce_max_ps(m);
  l = _mm512_mul_ps(l, power_of_two(_mm512_mul_ps(_mm512_sub_ps(m, _mm512_set1_ps(top)), log2e)));
  const float sum = sum_of_lanes(l);
  const float largest = _mm512_reduce_max_ps(max);
  return {largest, std::log(sum), std::isfinite(largest) && !std::isnan(sum)};
}

// The first place of a row's maximum.
template <class T>
int64_t place_of(float max, const T* x, int64_t V, const float* maxima) {
  const __m512 wanted = _mm512_set1_ps(max);
  int64_t v = 0;
  while (!_mm512_cmp_ps_mask(load(maxima), wanted, _CMP_EQ_OQ)) maxima += LANES, v += BLOCK_VECTORS * LANES;
  for (;; v += LANES)
    if (const __mmask16 here = _mm512_cmp_ps_mask(load_or_minus_infinity(x + v, V - v), wanted, _CMP_EQ_OQ))
      return v + __builtin_ctz(here);
}

// What a row asks for, as in sampling.py's Sampling.
struct Request {
  int64_t seed, top_k, position;
  float temperature, top_p, min_p, repetition, frequency, presence;
  const int32_t* counts;
  const int64_t* drafted;  // before this place
  int64_t n_drafted;

  bool penalizes() const { return repetition != 1 || frequency != 0 || presence != 0; }
};

// Memory that a thread needs for a row. The longer arrays are written as far as they are used.
struct Scratch {
  float* maxima;     // of the survey
  float* x;          // (V,) logits after penalties
  float* kept;       // (V,) logits of the tokens that are left, ids in ascending order
  int32_t* ids;      // (V,)
  uint32_t* orders;  // (V,)
  int64_t* masses;   // (V,)

  static Scratch lay_out(Layout& layout, int64_t V) {
    const int64_t padded = (V + 255) / 256 * 256;
    Scratch s{layout.take<float>(padded / BLOCK_VECTORS), layout.take<float>(padded), layout.take<float>(padded)};
    s.ids = layout.take<int32_t>(padded), s.orders = layout.take<uint32_t>(padded);
    s.masses = layout.take<int64_t>(padded);
    return s;
  }
};

// Each operation is rounded, as in torch: explicit rounding keeps the compiler from fusing them.
inline __m512 penalize(__m512 x, __m512i counts, const Request& r) {
  constexpr int NEAREST = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  const __mmask16 seen = _mm512_cmpgt_epi32_mask(counts, _mm512_setzero_si512());
  const __mmask16 negative = _mm512_cmp_ps_mask(x, _mm512_setzero_ps(), _CMP_LT_OQ);
  const __m512 repetition = _mm512_set1_ps(r.repetition);
  __m512 y = _mm512_mask_div_ps(x, seen & ~negative, x, repetition);
  y = _mm512_mask_mul_ps(y, seen & negative, x, repetition);
  const __m512i times = _mm512_srai_epi32(counts, 1);
  const __mmask16 answered = _mm512_cmpgt_epi32_mask(times, _mm512_setzero_si512());
  const __m512 of_times = _mm512_mul_round_ps(_mm512_cvtepi32_ps(times), _mm512_set1_ps(r.frequency), NEAREST);
  y = _mm512_sub_round_ps(y, of_times, NEAREST);
  return _mm512_mask_sub_ps(y, answered, y, _mm512_set1_ps(r.presence));
}

template <class T>
void penalize_row(const T* x, int64_t V, const Request& r, float* out) {
  for (int64_t v = 0; v < V; v += LANES) {
    const __mmask16 there = first(V - v);
    const __m512i counts = _mm512_maskz_loadu_epi32(there, r.counts + v);
    const __m512 y = load(x + v, there);
    store(out + v, _mm512_test_epi32_mask(counts, counts) ? penalize(y, counts, r) : y, there);
  }
  for (int64_t i = 0; i < r.n_drafted; i++) {
    const int64_t id = r.drafted[i];
    if (id < 0) continue;
    const int32_t count = r.counts[id] + 2 * std::count(r.drafted, r.drafted + r.n_drafted, id);
    store(out + id, penalize(_mm512_set1_ps(float(x[id])), _mm512_set1_epi32(count), r), 1);
  }
}

// ---------------------------------------------------------------- sampling: filters

// Weights of logits: exp((x - max) / temperature).
struct Weights {
  __m512 max, inverse;
  Weights(float max, float temperature)
      : max(_mm512_set1_ps(max)),
        inverse(_mm512_set1_ps(std::min(1 / temperature, std::numeric_limits<float>::max()))) {}
  __m512 log_of(__m512 x) const { return _mm512_mul_ps(_mm512_sub_ps(x, max), inverse); }
  __m512 of(__m512 x) const { return exponential(log_of(x)); }
};

// Tokens of a row, ids ascending: all of them if ids is null.
template <class T>
struct Tokens {
  const T* x;
  const int32_t* ids;
  int64_t n;

  __m512i ids_at(int64_t i) const {
    const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    return ids ? _mm512_maskz_loadu_epi32(first(n - i), ids + i) : _mm512_add_epi32(lanes, _mm512_set1_epi32(i));
  }
};

// Copies the tokens for which keep(x) says so to s.kept and s.ids, where they may come from.
template <class T, class Keep>
Tokens<float> collect(Tokens<T> tokens, const Scratch& s, const Keep& keep) {
  int64_t n = 0;
  for (int64_t i = 0; i < tokens.n; i += LANES) {
    const __mmask16 there = first(tokens.n - i);
    const __m512 x = load(tokens.x + i, there);
    const __mmask16 kept = keep(x, there);
    if (!kept) continue;
    const int count = __builtin_popcount(kept);
    const __m512i ids = tokens.ids_at(i);
    _mm512_mask_storeu_ps(s.kept + n, first(count), _mm512_maskz_compress_ps(kept, x));
    _mm512_mask_storeu_epi32(s.ids + n, first(count), _mm512_maskz_compress_epi32(kept, ids));
    n += count;
  }
  return {s.kept, s.ids, n};
}

// Integers in the same order as these floats, -0.0 as 0.0; and back.
inline __m512i sortable(__m512 x) {
  const __m512i bits = _mm512_castps_si512(_mm512_add_ps(x, _mm512_setzero_ps()));
  return _mm512_xor_si512(bits, _mm512_or_si512(_mm512_srai_epi32(bits, 31), _mm512_set1_epi32(1 << 31)));
}

inline float from_sortable(uint32_t order) {
  const uint32_t bits = order >> 31 ? order ^ (1u << 31) : ~order;
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

void write_orders(const float* x, int64_t n, uint32_t* orders) {
  for (int64_t i = 0; i < n; i += LANES)
    _mm512_mask_storeu_epi32(orders + i, first(n - i), sortable(load(x + i, first(n - i))));
}

// Weights in fixed point, so that sums of them are exact; the lower and the upper eight of sixteen.
inline std::pair<__m512i, __m512i> fixed_point(__m512 weights) {
  const __m512 scaled = _mm512_mul_ps(weights, _mm512_set1_ps(0x1p40f));
  return {_mm512_cvttps_epi64(_mm512_castps512_ps256(scaled)), _mm512_cvttps_epi64(_mm512_extractf32x8_ps(scaled, 1))};
}

struct Edge {
  float x;        // the lowest logit of the run
  int64_t above;  // the mass of those that are larger
};

// The shortest run of the largest entries whose masses (null: 1 each) reach target, which all of them do. Halves the
// range in which the run ends until it is one number, and keeps only what lies in it. Overwrites both arrays.
Edge run_to(int64_t target, uint32_t* orders, int64_t* masses, int64_t n) {
  __m512i least = _mm512_set1_epi32(orders[0]), most = least;
  for (int64_t i = 0; i < n; i += LANES) {
    const __m512i order = _mm512_loadu_si512(orders + i);
    least = _mm512_mask_min_epu32(least, first(n - i), least, order);
    most = _mm512_mask_max_epu32(most, first(n - i), most, order);
  }
  uint32_t low = _mm512_reduce_min_epu32(least), high = _mm512_reduce_max_epu32(most);
  int64_t above = 0;
  while (low < high) {
    const uint32_t middle = low + (high - low) / 2 + 1;
    const __m512i bound = _mm512_set1_epi32(middle);
    __m512i sums = _mm512_setzero_si512();
    int64_t upper = 0;
    for (int64_t i = 0; i < n; i += LANES) {
      const __mmask16 in = _mm512_mask_cmpge_epu32_mask(first(n - i), _mm512_loadu_si512(orders + i), bound);
      if (!masses) {
        upper += __builtin_popcount(in);
        continue;
      }
      sums = _mm512_mask_add_epi64(sums, in, sums, _mm512_loadu_si512(masses + i));
      sums = _mm512_mask_add_epi64(sums, in >> 8, sums, _mm512_loadu_si512(masses + i + 8));
    }
    upper += _mm512_reduce_add_epi64(sums);
    const bool up = above + upper >= target;
    up ? low = middle : (above += upper, high = middle - 1);
    int64_t inside = 0;
    for (int64_t i = 0; i < n; i += LANES) {
      const __m512i order = _mm512_loadu_si512(orders + i);
      const __mmask16 there = first(n - i), in = _mm512_cmpge_epu32_mask(order, bound);
      const __mmask16 kept = there & (up ? in : ~in);
      const int lower = __builtin_popcount(kept & 0xff), count = __builtin_popcount(kept);
      _mm512_storeu_si512(orders + inside, _mm512_maskz_compress_epi32(kept, order));
      if (masses) {
        const __m512i a = _mm512_loadu_si512(masses + i), b = _mm512_loadu_si512(masses + i + 8);
        _mm512_storeu_si512(masses + inside, _mm512_maskz_compress_epi64(kept, a));
        _mm512_storeu_si512(masses + inside + lower, _mm512_maskz_compress_epi64(kept >> 8, b));
      }
      inside += count;
    }
    n = inside;
  }
  return {from_sortable(low), above};
}

// Keeps what is above the edge, and of those that lie on it the first `ties`.
Tokens<float> keep_run(Tokens<float> tokens, const Scratch& s, float edge, int64_t ties) {
  return collect(tokens, s, [&, edge = _mm512_set1_ps(edge)](__m512 x, __mmask16 there) -> __mmask16 {
    const __mmask16 equal = _mm512_mask_cmp_ps_mask(there, x, edge, _CMP_EQ_OQ);
    const int count = std::min<int64_t>(__builtin_popcount(equal), ties);
    ties -= count;
    return _mm512_mask_cmp_ps_mask(there, x, edge, _CMP_GT_OQ) | _pdep_u32((1u << count) - 1, equal);
  });
}

// maxima are those of the row's survey: the k-th largest of them is at most the k-th largest logit.
template <class T>
Tokens<float> keep_top_k(Tokens<T> tokens, const Scratch& s, int64_t k) {
  const int64_t lanes = (tokens.n + BLOCK_VECTORS * LANES - 1) / (BLOCK_VECTORS * LANES) * LANES;
  float least = -std::numeric_limits<float>::max();
  if (k < lanes) {
    write_orders(s.maxima, lanes, s.orders);
    least = std::max(least, run_to(k, s.orders, nullptr, lanes).x);
  }
  auto kept = collect(tokens, s, [&](__m512 x, __mmask16 there) {
    return _mm512_mask_cmp_ps_mask(there, x, _mm512_set1_ps(least), _CMP_GE_OQ);
  });
  if (kept.n <= k) return kept;
  write_orders(kept.x, kept.n, s.orders);
  const Edge edge = run_to(k, s.orders, nullptr, kept.n);
  return keep_run(kept, s, edge.x, k - edge.above);
}

template <class T>
Tokens<float> keep_top_p(Tokens<T> tokens, const Scratch& s, const Weights& weights, float top_p) {
  __m512i sums = _mm512_setzero_si512();
  for (int64_t i = 0; i < tokens.n; i += LANES) {
    const auto [low, high] = fixed_point(weights.of(load_or_minus_infinity(tokens.x + i, tokens.n - i)));
    sums = _mm512_add_epi64(sums, _mm512_add_epi64(low, high));
  }
  const int64_t total = _mm512_reduce_add_epi64(sums);
  const int64_t target = std::max<int64_t>(1, float(total) * top_p);
  // All that weigh less than (total - target) / n make up less than total - target, so they are out.
  const float least = std::max<int64_t>(1, (total - target) / tokens.n) * 0x1p-40f;
  const __m512 bound = _mm512_set1_ps(std::log(least) - 1e-4f);
  auto kept = collect(tokens, s, [&](__m512 x, __mmask16 there) {
    return _mm512_mask_cmp_ps_mask(there, weights.log_of(x), bound, _CMP_GE_OQ);
  });
  write_orders(kept.x, kept.n, s.orders);
  for (int64_t i = 0; i < kept.n; i += LANES) {
    const auto [low, high] = fixed_point(weights.of(load(kept.x + i, first(kept.n - i))));
    _mm512_storeu_si512(s.masses + i, low), _mm512_storeu_si512(s.masses + i + 8, high);
  }
  const Edge edge = run_to(target, s.orders, s.masses, kept.n);
  const int64_t each = _mm_cvtsi128_si64(_mm512_castsi512_si128(fixed_point(weights.of(_mm512_set1_ps(edge.x))).first));
  return keep_run(kept, s, edge.x, (target - edge.above + each - 1) / each);
}

// Calls use(tokens), which are those that top-k and top-p leave.
template <class T, class Use>
void filter(const T* x, int64_t V, const Request& r, const Scratch& s, const Weights& weights, const Use& use) {
  const Tokens<T> all{x, nullptr, V};
  const bool some = r.top_k > 0 && r.top_k < V;
  if (!some && r.top_p >= 1) return use(all);
  if (!some) return use(keep_top_p(all, s, weights, r.top_p));
  const auto kept = keep_top_k(all, s, r.top_k);
  use(r.top_p < 1 ? keep_top_p(kept, s, weights, r.top_p) : kept);
}

// ---------------------------------------------------------------- sampling: noise and the draw

inline uint64_t scramble(uint64_t x) {
  x = uint32_t((x ^ x >> 16) * 0x21F0AAAD), x = uint32_t((x ^ x >> 15) * 0x735A2D97);
  return x ^ x >> 15;
}

inline __m512i scramble(__m512i x) {
  x = _mm512_mullo_epi32(_mm512_xor_si512(x, _mm512_srli_epi32(x, 16)), _mm512_set1_epi32(0x21F0AAAD));
  x = _mm512_mullo_epi32(_mm512_xor_si512(x, _mm512_srli_epi32(x, 15)), _mm512_set1_epi32(0x735A2D97));
  return _mm512_xor_si512(x, _mm512_srli_epi32(x, 15));
}

// sampling.py's exponential_noise of a seed and position, in two steps: 32 random bits, and what they stand for.
struct Noise {
  uint64_t keys[2];

  Noise(int64_t seed, int64_t position) {
    const uint64_t starts[2] = {0x3C6EF372, 0x1B873593};
    for (int i = 0; i < 2; i++) {
      uint64_t key = (uint64_t(seed) & 0xFFFFFFFF) ^ starts[i];
      for (uint64_t value : {uint64_t(seed) >> 32, uint64_t(position), uint64_t(0)}) key = scramble(key) ^ value;
      keys[i] = scramble(key);
    }
  }
  __m512i bits(__m512i ids) const {
    const __m512i once = scramble(_mm512_xor_si512(ids, _mm512_set1_epi32(keys[0])));
    return scramble(_mm512_xor_si512(once, _mm512_set1_epi32(keys[1])));
  }
  static float exponential(uint32_t bits) {
    return -std::log1p(-std::min((float(bits) + 0.5f) * 0x1p-32f, 1 - 0x1p-24f));
  }
};

// argmax(weight / noise), of equals the lowest id, of the tokens that min_p leaves; `likeliest` is among them.
//
// noise = -log(1 - u) >= u, so a token can win only if u <= weight / best, the best so far: most fail that before any
// logarithm is taken. It is tested with an upper bound of 2^32 weight / best, by which 2^y <= 2^n (1 + y - n), n =
// floor(y): the float whose bits are (y + 127) 2^23.
template <class T>
int64_t race(Tokens<T> tokens, const Weights& weights, float min_p, const Noise& noise, int64_t likeliest) {
  alignas(64) uint32_t bits[LANES];
  alignas(64) float xs[LANES];
  const __m512i of_likeliest = noise.bits(_mm512_set1_epi32(likeliest));
  float best = 1 / Noise::exponential(_mm512_cvtsi512_si32(of_likeliest));
  const float scale = 1.44269504f * 0x1p23f;
  const __m512 slope = _mm512_set1_ps(std::min(_mm512_cvtss_f32(weights.inverse) * scale, 3e38f));
  auto start = [&] { return _mm512_set1_ps((127 + 32 + 1e-3f - std::log2(best)) * 0x1p23f); };
  const __m512i half = _mm512_castps_si512(_mm512_set1_ps(0.5f));  // the smallest of 2^32 u
  __m512 offset = start();
  for (int64_t i = 0; i < tokens.n; i += LANES) {
    const __mmask16 there = first(tokens.n - i);
    const __m512 x = load(tokens.x + i, there);
    const __m512i bound = _mm512_cvtps_epi32(_mm512_fmadd_ps(_mm512_sub_ps(x, weights.max), slope, offset));
    __mmask16 hopeful = _mm512_mask_cmpge_epi32_mask(there, bound, half);
    if (!hopeful) continue;
    const __m512i ids = tokens.ids_at(i), random = noise.bits(ids);
    const __m512 u = _mm512_cvtepu32_ps(random);
    hopeful = _mm512_mask_cmp_ps_mask(hopeful, u, _mm512_castsi512_ps(bound), _CMP_LE_OQ);
    if (!hopeful) continue;
    _mm512_store_si512(bits, random);
    _mm512_store_ps(xs, weights.of(x));
    for (; hopeful; hopeful &= hopeful - 1) {
      const int lane = __builtin_ctz(hopeful);
      const int64_t id = tokens.ids ? tokens.ids[i + lane] : i + lane;
      const float ratio = xs[lane] / Noise::exponential(bits[lane]);
      if (xs[lane] < min_p || !(ratio > best || (ratio == best && id < likeliest))) continue;
      best = ratio, likeliest = id, offset = start();
    }
  }
  return likeliest;
}

// ---------------------------------------------------------------- sampling: rows

// draw(x, survey) for the row as it is, or after penalties.
template <class T, class Draw>
void with_penalties(const T* x, int64_t V, const Request& r, const Survey& raw, const Scratch& s, const Draw& draw) {
  if (!r.penalizes()) return draw(x, raw);
  penalize_row(x, V, r, s.x);
  draw((const float*)s.x, survey(s.x, V, s.maxima));
}

template <class T>
void sample_row(const T* x, int64_t V, const Request& r, const Scratch& s, int64_t& id, float& logprob) {
  const Survey raw = survey(x, V, s.maxima);
  id = -1, logprob = std::numeric_limits<float>::quiet_NaN();
  with_penalties(x, V, r, raw, s, [&](const auto* x, const Survey& top) {
    if (!top.finite) return;
    id = place_of(top.max, x, V, s.maxima);
    if (!(r.temperature > 0)) return;
    const Weights weights(top.max, r.temperature);
    filter(x, V, r, s, weights, [&](auto tokens) {
      id = race(tokens, weights, r.min_p, Noise(r.seed, r.position), id);
    });
  });
  if (id >= 0) logprob = (float(x[id]) - raw.max) - raw.log_sum;
}

template <class T>
void probabilities_row(const T* x, int64_t V, const Request& r, const Scratch& s, float* out) {
  std::fill(out, out + V, 0.0f);
  with_penalties(x, V, r, survey(x, V, s.maxima), s, [&](const auto* x, const Survey& top) {
    if (!top.finite) return std::fill(out, out + V, std::numeric_limits<float>::quiet_NaN());
    if (!(r.temperature > 0)) return void(out[place_of(top.max, x, V, s.maxima)] = 1);
    const Weights weights(top.max, r.temperature);
    filter(x, V, r, s, weights, [&](auto tokens) {
      __m512d sums = _mm512_setzero_pd();
      for (int64_t i = 0; i < tokens.n; i += LANES) {
        const __mmask16 there = first(tokens.n - i);
        __m512 w = weights.of(load(tokens.x + i, there));
        w = _mm512_maskz_mov_ps(_mm512_mask_cmp_ps_mask(there, w, _mm512_set1_ps(r.min_p), _CMP_GE_OQ), w);
        sums = _mm512_add_pd(sums, _mm512_cvtps_pd(_mm512_castps512_ps256(w)));
        sums = _mm512_add_pd(sums, _mm512_cvtps_pd(_mm512_extractf32x8_ps(w, 1)));
        _mm512_mask_i32scatter_ps(out, there, tokens.ids_at(i), w, 4);
      }
      const float sum = _mm512_reduce_add_pd(sums);
      for (int64_t v = 0; v < V; v++) out[v] /= sum;
    });
  });
}

// ---------------------------------------------------------------- the operations

template <class Work>
void by_dtype(const Tensor& x, const Work& work) {
  if (x.scalar_type() == at::kBFloat16) return work(bf16());
  if (x.scalar_type() == at::kHalf) return work(half());
  TORCH_CHECK(x.scalar_type() == at::kFloat, "expected bfloat16, float16 or float32, got ", x.scalar_type());
  work(float());
}

using MaybeTensor = std::optional<Tensor>;

template <class T>
const T* data(const MaybeTensor& t) {
  return t ? t->const_data_ptr<T>() : nullptr;
}

// What must be contiguous, of this dtype and these sizes (-1: any), so that it can be read by its pointer.
const Tensor& checked(const Tensor& t, const char* name, at::ScalarType dtype, at::IntArrayRef sizes) {
  bool fits = t.scalar_type() == dtype && t.dim() == int64_t(sizes.size()) && t.is_contiguous();
  for (size_t i = 0; fits && i < sizes.size(); i++) fits = sizes[i] == -1 || t.size(i) == sizes[i];
  TORCH_CHECK(fits, name, ": expected ", sizes, " in ", dtype, ", contiguous; got ", t.sizes(), " in ", t.scalar_type(),
              t.is_contiguous() ? "" : ", not contiguous");
  return t;
}

const MaybeTensor& checked(const MaybeTensor& t, const char* name, at::ScalarType dtype, at::IntArrayRef sizes) {
  if (t) checked(*t, name, dtype, sizes);
  return t;
}

// A layer of N outputs for x of K columns; weights without scales are plain, those with mins have 4 bits.
Linear checked_layer(const Tensor& weight, const MaybeTensor& scales, const MaybeTensor& mins, const MaybeTensor& bias,
                     at::ScalarType dtype, int64_t N, int64_t K, int64_t groupsize, bool exact) {
  Linear l{N, K, !scales ? 16 : mins ? 4 : 8, exact || dtype == at::kFloat, weight.const_data_ptr()};
  l.bias = checked(bias, "bias", dtype, {N}) ? bias->const_data_ptr() : nullptr;
  if (!scales) {
    checked(weight, "weight", dtype, {N, K});
    return l;
  }
  const int64_t Nb = (N + LANES - 1) / LANES;
  l.Kb = (K + GROUP - 1) / GROUP;
  TORCH_CHECK(groupsize >= K || (groupsize > 0 && groupsize % GROUP == 0), "groups of ", groupsize,
              " columns are no multiple of 32");
  l.per_group = groupsize >= K ? l.Kb : groupsize / GROUP;
  l.G = (l.Kb + l.per_group - 1) / l.per_group;
  checked(weight, "packed weight", at::kByte, {Nb, l.Kb, mins ? 4 : 8, LANES, 4});
  l.scales = checked(*scales, "scales", at::kHalf, {Nb, l.G, LANES}).const_data_ptr<half>();
  l.mins = data<half>(checked(mins, "mins", at::kHalf, {Nb, l.G, LANES}));
  return l;
}

Tensor with_width(const Tensor& x, int64_t width) {
  auto sizes = x.sizes().vec();
  sizes.back() = width;
  return at::empty(sizes, x.options());
}

Tensor run_layer(const Tensor& x, const Linear& l) {
  const Tensor xs = x.contiguous(), out = with_width(x, l.N);
  const int64_t M = l.K ? x.numel() / l.K : 0;
  by_dtype(x, [&](auto type) {
    using T = decltype(type);
    auto [in, memory] = laid_out([&](Layout& layout) { return lay_out_input(layout, l, xs.const_data_ptr<T>(), M); });
    together(l.N * l.K * (l.bits == 16 ? 1 : M) < ALONE, [&, &in = in](const Team& team) {
      prepare_rows<T>(team, l, in, M);
      product<T>(team, l, in, M, nullptr, out.data_ptr<T>());
    });
  });
  return out;
}

Tensor linear(const Tensor& x, const Tensor& weight, const MaybeTensor& bias) {
  if (x.dim() > 2 && x.size(-2) > MAX_DECODE_TOKENS) return at::linear(x, weight, bias);  // bound by arithmetic
  const Tensor w = weight.contiguous();
  return run_layer(x, checked_layer(w, {}, {}, bias, x.scalar_type(), w.size(0), x.size(-1), 0, true));
}

Tensor linear_int8(const Tensor& x, const Tensor& weight, const Tensor& scales, int64_t groupsize,
                   const MaybeTensor& bias, int64_t N, bool exact) {
  return run_layer(x, checked_layer(weight, scales, {}, bias, x.scalar_type(), N, x.size(-1), groupsize, exact));
}

Tensor linear_int4(const Tensor& x, const Tensor& weight, const Tensor& scales, const Tensor& mins, int64_t groupsize,
                   const MaybeTensor& bias, int64_t N, bool exact) {
  return run_layer(x, checked_layer(weight, scales, mins, bias, x.scalar_type(), N, x.size(-1), groupsize, exact));
}

template <class Row>
Tensor norm(const Tensor& x, const Row& row) {
  const int64_t D = x.size(-1);
  const Tensor xs = x.contiguous(), out = at::empty(x.sizes(), x.options());
  by_dtype(x, [&](auto type) {
    using T = decltype(type);
    const T* from = xs.const_data_ptr<T>();
    T* to = out.data_ptr<T>();
    together(x.numel() < ALONE, [&](const Team& team) {
      team.split(D ? x.numel() / D : 0, 1, [&](int64_t m, int64_t end) {
        for (; m < end; m++) row(from + m * D, to + m * D, D);
      });
    });
  });
  return out;
}

Tensor rms_norm(const Tensor& x, const Tensor& weight, double eps) {
  checked(weight, "weight", x.scalar_type(), {x.size(-1)});
  return norm(x, [&]<class T>(const T* from, T* to, int64_t D) {
    rms_norm_row(from, weight.const_data_ptr<T>(), to, D, float(eps));
  });
}

Tensor layer_norm(const Tensor& x, const Tensor& weight, const Tensor& bias, double eps) {
  checked(weight, "weight", x.scalar_type(), {x.size(-1)});
  checked(bias, "bias", x.scalar_type(), {x.size(-1)});
  return norm(x, [&]<class T>(const T* from, T* to, int64_t D) {
    layer_norm_row(from, weight.const_data_ptr<T>(), bias.const_data_ptr<T>(), to, D, float(eps));
  });
}

// Everything but q and out.
template <class T>
Attention<T> checked_attention(int64_t B, int64_t S, int64_t H, const Tensor& k_cache, const Tensor& v_cache,
                               const Tensor& input_pos, const MaybeTensor& rows, const MaybeTensor& slopes,
                               std::optional<int64_t> window) {
  checked(k_cache, "k_cache", c10::CppTypeToScalarType<T>::value, {-1, -1, -1, -1});
  checked(v_cache, "v_cache", k_cache.scalar_type(), k_cache.sizes());
  const int64_t R = k_cache.size(0), K = k_cache.size(1), slots = k_cache.size(2);
  TORCH_CHECK(K > 0 && H % K == 0, H, " query heads are no multiple of ", K, " key heads");
  TORCH_CHECK(slots < (1 << 30) && (rows || B <= R), "a cache of ", k_cache.sizes(), " for ", B, " rows");
  const int64_t* pos = checked(input_pos, "input_pos", at::kLong, {B, S}).const_data_ptr<int64_t>();
  const int64_t* row = data<int64_t>(checked(rows, "rows", at::kLong, {B}));
  checked(slopes, "slopes", at::kFloat, {H});
  for (int64_t i = 0; i < B * S; i++) TORCH_CHECK(pos[i] >= -1 && pos[i] < slots, "position ", pos[i], " of ", slots);
  for (int64_t i = 0; row && i < B; i++) TORCH_CHECK(row[i] >= 0 && row[i] < R, "row ", row[i], " of ", R);
  Attention<T> a{B, S, H, K, k_cache.size(3), slots};
  a.k = k_cache.const_data_ptr<T>(), a.v = v_cache.const_data_ptr<T>();
  a.pos = pos, a.rows = row, a.slopes = data<float>(slopes);
  a.window = std::min(window.value_or(slots), slots);
  return a;
}

Tensor attention(const Tensor& q, const Tensor& k_cache, const Tensor& v_cache, const Tensor& input_pos,
                 const MaybeTensor& rows, const MaybeTensor& slopes, std::optional<int64_t> window) {
  const Tensor qs = q.contiguous(), out = at::empty(q.sizes(), q.options());
  by_dtype(q, [&](auto type) {
    using T = decltype(type);
    const Tensor at = input_pos.contiguous();
    auto a = checked_attention<T>(q.size(0), q.size(1), q.size(2), k_cache, v_cache, at, rows, slopes, window);
    TORCH_CHECK(q.size(3) == a.E, "queries of width ", q.size(3), ", keys of ", a.E);
    a.q = qs.const_data_ptr<T>(), a.q_stride = a.H * a.E, a.out = out.data_ptr<T>();
    const Parts parts(a);
    auto [b, memory] = laid_out([&](Layout& layout) {
      return std::make_pair(Workspace::lay_out(layout, a), parts.lay_out(layout, a));
    });
    together(a.B * a.S * a.H * a.E < ALONE / CHUNK, [&, &b = b](const Team& team) {
      attend_all(team, a, parts, b.first[team.thread], b.second);
    });
  });
  return out;
}

// The arguments of sample and probabilities: logits (B,S,V), what stands behind a row's place, and checks.
struct Sampling {
  Tensor logits, rows, position, drafted;
  at::TensorList settings;  // seed, temperature, top_k, top_p, min_p, repetition, frequency, presence, counts
  int64_t B, S, V;

  Sampling(const Tensor& x, const Tensor& rows, const Tensor& position, const Tensor& drafted, at::TensorList settings)
      : logits(x.stride(-1) == 1 ? x : x.contiguous()), rows(rows.contiguous()), position(position.contiguous()),
        drafted(drafted.contiguous()), settings(settings) {
    TORCH_CHECK(x.dim() == 3 && x.size(2) > 0 && x.size(2) < INT32_MAX, "logits (B,S,V) expected, got ", x.sizes());
    B = x.size(0), S = x.size(1), V = x.size(2);
    checked(this->rows, "rows", at::kLong, {B}), checked(this->position, "position", at::kLong, {B});
    checked(this->drafted, "drafted", at::kLong, {B, std::max<int64_t>(0, S - 1)});
    const int64_t R = settings[0].numel();
    const char* names[] = {"seed", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "frequency_penalty",
                           "presence_penalty"};
    for (int i = 0; i < 8; i++) checked(settings[i], names[i], i == 0 || i == 2 ? at::kLong : at::kFloat, {R});
    checked(settings[8], "counts", at::kInt, {R, -1});
    TORCH_CHECK(settings[8].size(1) >= V, "counts of ", settings[8].size(1), " tokens for logits of ", V);
    for (int64_t b = 0; b < B; b++) {
      const int64_t row = this->rows.const_data_ptr<int64_t>()[b];
      TORCH_CHECK(row >= 0 && row < R, "row ", row, " of ", R);
    }
    for (int64_t i = 0; i < this->drafted.numel(); i++) {
      const int64_t id = this->drafted.const_data_ptr<int64_t>()[i];
      TORCH_CHECK(id < V, "drafted token ", id, " of ", V);
    }
  }

  bool is_padding(int64_t b) const { return position.const_data_ptr<int64_t>()[b] <= 0; }

  Request request(int64_t b, int64_t place) const {
    const int64_t row = rows.const_data_ptr<int64_t>()[b], at = position.const_data_ptr<int64_t>()[b] + place;
    auto of = [&](int i) { return settings[i].const_data_ptr<float>()[row]; };
    auto whole = [&](int i) { return settings[i].const_data_ptr<int64_t>()[row]; };
    const int32_t* counts = settings[8].const_data_ptr<int32_t>() + row * settings[8].size(1);
    const int64_t* tokens = drafted.const_data_ptr<int64_t>() + b * std::max<int64_t>(0, S - 1);
    return {whole(0), whole(2), at, of(1), of(3), of(4), of(5), of(6), of(7), counts, tokens, place};
  }

  // Calls work(x, request, scratch, place among B * S) for all that is no padding; threads share the places.
  template <class Work>
  void for_each(const Work& work) const {
    std::vector<int64_t> places;
    for (int64_t i = 0; i < B * S; i++)
      if (!is_padding(i / S)) places.push_back(i);
    const int64_t n = places.size();
    const int threads = n <= 1 ? 1 : omp_get_max_threads();
    auto [scratch, memory] = laid_out([&](Layout& layout) {
      std::vector<Scratch> all;
      for (int i = 0; i < threads; i++) all.push_back(Scratch::lay_out(layout, V));
      return all;
    });
    by_dtype(logits, [&](auto type) {
      const auto* x = logits.const_data_ptr<decltype(type)>();
      together(n <= 1 || n * V < ALONE, [&, &scratch = scratch](const Team& team) {
        team.split(n, 1, [&](int64_t i, int64_t end) {
          for (; i < end; i++) {
            const int64_t b = places[i] / S, s = places[i] % S;
            work(x + b * logits.stride(0) + s * logits.stride(1), request(b, s), scratch[team.thread], places[i]);
          }
        });
      });
    });
  }
};

#define SAMPLING_ARGUMENTS                                                                                        \
  const Tensor &logits, const Tensor &rows, const Tensor &position, const Tensor &drafted, const Tensor &seed,    \
      const Tensor &temperature, const Tensor &top_k, const Tensor &top_p, const Tensor &min_p,                   \
      const Tensor &repetition, const Tensor &frequency, const Tensor &presence, const Tensor &counts
#define SAMPLING_SETTINGS {seed, temperature, top_k, top_p, min_p, repetition, frequency, presence, counts}

std::tuple<Tensor, Tensor> sample(SAMPLING_ARGUMENTS) {
  const Tensor settings[] = SAMPLING_SETTINGS;
  const Sampling all(logits, rows, position, drafted, settings);
  const Tensor ids = at::full({all.B, all.S}, -1, rows.options());
  const Tensor logprobs = at::full({all.B, all.S}, std::numeric_limits<float>::quiet_NaN(), temperature.options());
  auto *id = ids.data_ptr<int64_t>();
  auto *logprob = logprobs.data_ptr<float>();
  all.for_each([&](const auto* x, const Request& r, const Scratch& s, int64_t i) {
    sample_row(x, all.V, r, s, id[i], logprob[i]);
  });
  return {ids, logprobs};
}

Tensor probabilities(SAMPLING_ARGUMENTS) {
  const Tensor settings[] = SAMPLING_SETTINGS;
  const Sampling all(logits, rows, position, drafted, settings);
  const Tensor probs = at::empty({all.B, all.S, all.V}, temperature.options());
  float* out = probs.data_ptr<float>();
  for (int64_t b = 0; b < all.B; b++)
    if (all.is_padding(b)) std::fill(out + b * all.S * all.V, out + (b + 1) * all.S * all.V, 0.0f);
  all.for_each([&](const auto* x, const Request& r, const Scratch& s, int64_t i) {
    probabilities_row(x, all.V, r, s, out + i * all.V);
  });
  return probs;
}

std::mutex layers_lock;
std::vector<std::shared_ptr<const Layer>> layers;  // by the numbers that prepare_block gave

// Returns a number that stands for a block in `blocks`. weights: of the two norms weight and bias, then q_norm, k_norm,
// then of qkv, out, up (or gate and up) and down each weight, scales, mins, bias. sizes: H, K, E, F, the four layers'
// groupsizes.
int64_t prepare_block(const c10::List<MaybeTensor>& weights, at::IntArrayRef sizes, std::optional<int64_t> window,
                      double eps, bool gated, bool post_norm_residual, bool exact) {
  TORCH_CHECK(weights.size() == 22 && sizes.size() == 8, "22 weights and 8 sizes were expected");
  auto made = std::make_shared<Layer>();
  Layer& l = *made;
  auto& w = l.tensors;
  w.assign(weights.begin(), weights.end());
  for (int i : {0, 2, 6, 10, 14, 18}) TORCH_CHECK(w[i], "weight ", i, " is missing");
  l.dtype = w[0]->scalar_type(), l.D = w[0]->numel();
  l.H = sizes[0], l.K = sizes[1], l.E = sizes[2], l.F = sizes[3];
  l.window = window.value_or(std::numeric_limits<int64_t>::max());
  auto vector = [&](int i, int64_t size) {
    return checked(w[i], "weight of a norm", l.dtype, {size}) ? w[i]->const_data_ptr() : nullptr;
  };
  auto linear = [&](int i, int64_t N, int64_t columns) {
    const auto* t = &w[6 + 4 * i];
    return checked_layer(*t[0], t[1], t[2], t[3], l.dtype, N, columns, sizes[4 + i], exact);
  };
  l.qkv = linear(0, (l.H + 2 * l.K) * l.E, l.D), l.out = linear(1, l.D, l.H * l.E);
  l.up = linear(2, gated ? 2 * l.F : l.F, l.D), l.down = linear(3, l.D, l.F);
  for (int i = 0; i < 2; i++) l.attention_norm[i] = vector(i, l.D), l.mlp_norm[i] = vector(2 + i, l.D);
  l.q_norm = vector(4, l.E), l.k_norm = vector(5, l.E);
  l.eps = eps, l.gated = gated, l.post_norm_residual = post_norm_residual;
  const std::lock_guard lock(layers_lock);
  layers.push_back(std::move(made));
  return layers.size() - 1;
}

void release_blocks(at::IntArrayRef numbers) {
  const std::lock_guard lock(layers_lock);
  for (int64_t i : numbers) layers.at(i).reset();
}

Tensor blocks(const Tensor& x, const Tensor& input_pos, const MaybeTensor& rows, const MaybeTensor& cos,
              const MaybeTensor& sin, const MaybeTensor& slopes, at::TensorList k_caches, at::TensorList v_caches,
              at::IntArrayRef numbers) {
  TORCH_CHECK(x.dim() == 3 && k_caches.size() == numbers.size() && v_caches.size() == numbers.size(),
              "x (B,S,D) and two caches a block were expected");
  std::vector<std::shared_ptr<const Layer>> these;
  {
    const std::lock_guard lock(layers_lock);
    for (int64_t i : numbers) {
      TORCH_CHECK(i >= 0 && i < int64_t(layers.size()) && layers[i], "there is no block ", i);
      these.push_back(layers[i]);
    }
  }
  const int64_t B = x.size(0), S = x.size(1), D = x.size(2);
  const Tensor xs = x.contiguous(), at = input_pos.contiguous(), result = at::empty(x.sizes(), x.options());
  by_dtype(x, [&](auto type) {
    using T = decltype(type);
    std::vector<Block<T>> all;
    std::deque<Parts> parts;  // of the blocks' windows
    int64_t window = -1, work = 0;
    for (size_t i = 0; i < these.size(); i++) {
      const Layer& l = *these[i];
      auto a = checked_attention<T>(B, S, l.H, k_caches[i], v_caches[i], at, rows, slopes, l.window);
      TORCH_CHECK(l.dtype == x.scalar_type() && l.D == D && l.K == a.K && l.E == a.E, "block ", numbers[i], " has D ",
                  l.D, ", K ", l.K, ", E ", l.E, " in ", l.dtype, ", not x ", x.sizes(), " in ", x.scalar_type(),
                  ", k_cache ", k_caches[i].sizes());
      if (l.window != window || a.slots != all.back().attention.slots) parts.emplace_back(a), window = l.window;
      Block<T> block{l, parts.back(), a, B * S};
      block.cos = data<float>(checked(cos, "cos", at::kFloat, {B, S, 1, l.E}));
      block.sin = data<float>(checked(sin, "sin", at::kFloat, {B, S, 1, l.E}));
      block.k = k_caches[i].data_ptr<T>(), block.v = v_caches[i].data_ptr<T>();
      block.x = i ? result.data_ptr<T>() : xs.const_data_ptr<T>(), block.result = result.data_ptr<T>();
      all.push_back(block);
      work += B * S * (l.qkv.N * D + l.out.K * D + l.up.N * D + l.F * D);
    }
    // One piece of memory, that each block uses anew.
    auto lay_out = [&](Layout from) {
      Layout furthest = from;
      for (auto& block : all) {
        Layout layout = from;
        block.lay_out(layout);
        furthest.next = std::max(furthest.next, layout.next);
      }
      return furthest;
    };
    const auto [furthest, memory] = laid_out([&](Layout& layout) { return layout = lay_out(layout); });
    together(work < ALONE, [&](const Team& team) {
      for (const auto& block : all) block.run(team);
    });
  });
  return result;
}

}  // namespace

// kernels.py and sampling.py declare their schemas.
TORCH_LIBRARY_IMPL(fastpath, CPU, m) {
  m.impl("linear", &linear);
  m.impl("linear_int8", &linear_int8);
  m.impl("linear_int4", &linear_int4);
  m.impl("rms_norm", &rms_norm);
  m.impl("layer_norm", &layer_norm);
  m.impl("attention", &attention);
  m.impl("sample", &sample);
  m.impl("probabilities", &probabilities);
  m.impl("blocks", &blocks);
  m.impl("prepare_block", &prepare_block);
}

TORCH_LIBRARY_IMPL(fastpath, CompositeImplicitAutograd, m) {
  m.impl("release_blocks", &release_blocks);  // has no tensors to tell a device by
}
