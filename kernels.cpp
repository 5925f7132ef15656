// The CPU kernels: products of a few rows with bfloat16, 8-bit and 4-bit weights at the speed of memory, norms,
// attention, and all blocks of a transformer in one operation.
//
// kernels_cpu.py builds this file, packs the weights and declares the operations; kernels.py says what they compute.
// Needs AVX-512 (F, BW, DQ, VL, VNNI, BF16). Read down: numbers, threads, products, norms, attention, blocks, and at the
// end the operations, which check what they are given.
//
// A matrix has N rows (outputs) and K columns (inputs); x has M rows of K. Decoding is bound by reading weights, so each
// is read once for a whole tile of rows of x, in long streams. Every output is summed in one fixed order, by one thread:
// its bits depend on nothing but its row of x, not on the rows beside it nor on the number of threads.

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
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

// As kernels.py's, by 11, 11 and 10 bits. order and mass (B,C), target (B,1); rows are shared among threads.
Tensor nucleus(const Tensor& order, const Tensor& mass, const Tensor& target) {
  const int64_t B = order.size(0), C = order.size(1);
  const Tensor orders = order.contiguous(), masses = mass.contiguous(), targets = target.contiguous();
  checked(orders, "order", at::kLong, {-1, -1}), checked(masses, "mass", at::kLong, {B, C});
  checked(targets, "target", at::kLong, {B, 1});
  const Tensor out = at::empty({B, C}, order.options().dtype(at::kBool));
  auto row = [&](const int64_t* order, const int64_t* mass, int64_t target, bool* kept) {
    std::vector<int32_t> inside(C);  // those that are equal to the lowest in the bits looked at so far; at first all are
    int64_t left = C, above = 0;  // how many that are; the mass of those that are larger
    for (const auto [shift, size] : {std::pair(21, 2048), std::pair(10, 2048), std::pair(0, 1024)}) {
      auto entry = [&, all = shift == 21](int64_t n) { return all ? n : inside[n]; };
      auto bucket_of = [&, shift = shift, size = size](int64_t i) { return (order[i] >> shift) & (size - 1); };
      int64_t histogram[4][2048] = {};  // of every fourth, so that one sum need not wait for the last
      for (int64_t n = 0; n < left; n++) histogram[n % 4][bucket_of(entry(n))] += mass[entry(n)];
      int64_t edge = size - 1;  // the bucket in which target is reached
      auto total = [&] { return histogram[0][edge] + histogram[1][edge] + histogram[2][edge] + histogram[3][edge]; };
      for (; edge > 0 && above + total() < target; edge--) above += total();
      int64_t kept_inside = 0;
      for (int64_t n = 0; n < left; n++) {
        const int64_t i = entry(n), bucket = bucket_of(i);
        kept[i] = bucket > edge;
        inside[kept_inside] = i;
        kept_inside += bucket == edge;
      }
      left = kept_inside;
    }
    inside.resize(left);
    for (int32_t i : inside) kept[i] = above < target, above += mass[i];
  };
  together(B == 1, [&](const Team& team) {
    team.split(B, 1, [&](int64_t b, int64_t end) {
      for (; b < end; b++)
        row(orders.const_data_ptr<int64_t>() + b * C, masses.const_data_ptr<int64_t>() + b * C,
            targets.const_data_ptr<int64_t>()[b], out.data_ptr<bool>() + b * C);
    });
  });
  return out;
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

// kernels.py declares their schemas.
TORCH_LIBRARY_FRAGMENT(fastpath, m) {
  m.def("nucleus(Tensor order, Tensor mass, Tensor target) -> Tensor");
}

TORCH_LIBRARY_IMPL(fastpath, CPU, m) {
  m.impl("linear", &linear);
  m.impl("linear_int8", &linear_int8);
  m.impl("linear_int4", &linear_int4);
  m.impl("rms_norm", &rms_norm);
  m.impl("layer_norm", &layer_norm);
  m.impl("attention", &attention);
  m.impl("nucleus", &nucleus);
  m.impl("blocks", &blocks);
  m.impl("prepare_block", &prepare_block);
}

TORCH_LIBRARY_IMPL(fastpath, CompositeImplicitAutograd, m) {
  m.impl("release_blocks", &release_blocks);  // has no tensors to tell a device by
}
