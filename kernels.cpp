// The CPU kernels: matrix products with bfloat16, float16, float32, int8 and int4 weights, norms, attention, all blocks
// of a transformer as one operation, and sampling.
//
// kernels_cpu.py compiles this file and packs the weights. kernels.py and sampling.py declare the operations and say
// what they compute. The processor must have AVX-512 (F, BW, DQ, VL, VNNI, BF16). If it also has AMX, bfloat16 weights
// are packed and multiplied with it, and many rows or queries at once use it for quantized weights and for attention.
// Read down: vector helpers, threads, matrix products, norms, attention, transformer blocks, sampling, and at the end
// the operations, which check their arguments.
//
// A weight matrix has N rows (outputs) and K columns (inputs); x has M rows of K columns. Decoding is limited by memory
// bandwidth, so each weight is read once for a whole tile of rows of x, at consecutive addresses. One thread sums each
// output, in a fixed order. The bits of an output therefore depend only on its own row of x: neither the other rows nor
// the number of threads change them.

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/linear.h>
#include <immintrin.h>
#include <omp.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
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

#if defined(__AMX_BF16__) && defined(__AMX_INT8__)
#define HAS_AMX
#endif

namespace {

using at::Tensor;
using bf16 = at::BFloat16;
using half = at::Half;

constexpr int LANES = 16;               // 32-bit lanes of a 512-bit register
constexpr int GROUP = 32;               // columns of x that share a scale when x is quantized, or that AMX adds at once
constexpr int MAX_DECODE_TOKENS = 16;   // up to so many new tokens a row, reading the weights limits a matrix product
constexpr int PREFETCH_DISTANCE = 4096;  // bytes between the weights in use and those being prefetched
#if defined(__znver4__) || defined(__znver5__)
constexpr auto PREFETCH_TO = _MM_HINT_T0;  // the L1 cache
#else
constexpr auto PREFETCH_TO = _MM_HINT_T1;  // the L2 cache: on Intel, prefetches to L1 delay the loads of x
#endif
constexpr int SPINS = 2000;             // iterations of about 25 ns that a thread waits awake for the others
constexpr int64_t MIN_PARALLEL_WORK = 1 << 15;  // multiply-adds; for fewer, waking threads costs more than it saves
constexpr float INF = std::numeric_limits<float>::infinity();
constexpr float LOG2E = 1.44269504f;  // exp(x) = 2^(x LOG2E)

// ---------------------------------------------------------------- vectors: 16 elements of any dtype, as float32

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

// ---------------------------------------------------------------- threads

// Where the threads of a parallel region wait for each other. A waiting thread spins for some 50 us, which nearly always
// is enough, and then sleeps: while another program has one processor, the thread that it waits for may need this one.
class Barrier {
  alignas(64) std::atomic<int> arrived{0};
  alignas(64) std::atomic<int> phase{0};

 public:
  void wait(int threads) {
    const int now = phase.load(std::memory_order_acquire);
    if (arrived.fetch_add(1, std::memory_order_acq_rel) + 1 == threads) {
      arrived.store(0, std::memory_order_relaxed);
      phase.store(now + 1, std::memory_order_release);
      return phase.notify_all();
    }
    for (int i = 0; i < SPINS; i++, _mm_pause())
      if (phase.load(std::memory_order_acquire) != now) return;
    phase.wait(now, std::memory_order_acquire);
  }
};

// The threads of a parallel region, as one of them sees it. All of them call the same functions.
struct Team {
  int thread, threads;
  Barrier* meeting_point = nullptr;

  // Divides 0..n among the threads, in multiples of `grain`, and calls work(begin, end) for this thread's share.
  template <class Work>
  void split(int64_t n, int64_t grain, const Work& work) const {
    const int64_t pieces = (n + grain - 1) / grain;
    const int64_t begin = pieces * thread / threads * grain, end = std::min(n, pieces * (thread + 1) / threads * grain);
    if (begin < end) work(begin, end);
  }

  void barrier() const {  // returns when all threads have arrived
    if (threads > 1) meeting_point->wait(threads);
  }
};

// Runs work(team) on all of torch's threads, or on the calling thread alone if `serial`.
template <class Work>
void parallel(bool serial, const Work& work) {
  const int threads = serial || omp_in_parallel() ? 1 : omp_get_max_threads();
  if (threads <= 1) return work(Team{0, 1});
  Barrier barrier;
#pragma omp parallel num_threads(threads)
  {
    const Team team{omp_get_thread_num(), omp_get_num_threads(), &barrier};
    work(team);
    team.barrier();  // OpenMP's own at the end of a region never sleeps
  }
}

// A bump allocator: hands out arrays of one piece of memory, aligned to 64 bytes. From a null pointer it counts bytes.
struct Arena {
  uint8_t* next = nullptr;
  template <class T>
  T* allocate(int64_t n) {
    T* p = reinterpret_cast<T*>(next);
    next += (n * sizeof(T) + 63) / 64 * 64;
    return p;
  }
};

// Calls make(arena) twice: first to count the bytes that it needs, then to allocate from a tensor of that size. Returns
// the second call's result and the tensor, which must live as long as the arrays.
template <class Make>
auto allocate_together(const Make& make) {
  Arena counting;
  make(counting);
  const Tensor memory = at::empty({(counting.next - (uint8_t*)nullptr) + 64}, at::kByte);
  Arena arena{memory.data_ptr<uint8_t>()};
  arena.next += -(uintptr_t)arena.next % 64;
  return std::make_pair(make(arena), memory);
}

// ---------------------------------------------------------------- matrix products
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
  const void* x;   // (M,K)
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

// The sum of 16 lanes, in a fixed order: lanes i and i + 8 are added first, then i and i + 4, i + 2, i + 1.
inline float sum_of_lanes(__m512 x) {
  const __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1));
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

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

#ifdef HAS_AMX
// ---------------------------------------------------------------- matrix products with AMX
//
// AMX is a matrix unit of some Intel processors, with eight registers, called tiles, of up to 16 rows of 64 bytes. One
// instruction adds the products of tiles A and B to tile C:
//   A  32 columns of up to 16 rows of x
//   B  a group of a block of weights; its row j holds columns 2j..2j+1 (bfloat16) or 4j..4j+3 (int8) of all 16 outputs
//   C  sums in float32 or int32: a row of x in each row, an output in each column
// Each row of C depends on its own row of A only. Reading bfloat16 weights takes longer than multiplying them with 16
// rows of x, so such a product takes little longer than one with a single row. With quantized weights, each group has
// to be scaled in float32.

constexpr int AMX_PREFETCH_DISTANCE = 2048;  // bytes
constexpr int MIN_AMX_ROWS = 9;  // of x for quantized weights; for fewer, vpdpbusd is faster

// Configures this thread's tiles for a number of rows of x, and for groups of 32 columns in T. Releases them at the end
// of the scope (50 ns). Tiles 0 to 5 are C, tile 6 is A, tile 7 is B.
template <class T>
struct Tiles {
  explicit Tiles(int x_rows) {
    struct alignas(64) {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t bytes_per_row[16] = {64, 64, 64, 64, 64, 64, GROUP * sizeof(T), 64};
      uint8_t rows[16] = {};
    } config;
    std::fill(config.rows, config.rows + 7, x_rows);
    config.rows[7] = GROUP * sizeof(T) / 4;
    asm volatile("" ::"r"(&config) : "memory");  // compilers do not know that the next instruction reads all of it
    _tile_loadconfig(&config);
  }
  ~Tiles() { _tile_release(); }
};

// A block of packed bfloat16 weights times COUNT tiles of rows of x, which begin at x[0], x[1] ...: acc
// (COUNT,rows,16).
template <int COUNT>
void block_dot_amx(const Linear& p, int64_t block, const bf16* const (&x)[COUNT], float (&acc)[COUNT][LANES * LANES]) {
  const bf16* w = (const bf16*)p.weight + block * p.Kb * GROUP * LANES;
// The numbers of tiles are part of the instructions, so these are no loops.
#define FOR_EACH_TILE(STATEMENT)             \
  if constexpr (COUNT > 0) { STATEMENT(0); } \
  if constexpr (COUNT > 1) { STATEMENT(1); } \
  if constexpr (COUNT > 2) { STATEMENT(2); } \
  if constexpr (COUNT > 3) { STATEMENT(3); }
#define ZERO(I) _tile_zero(I)
#define MULTIPLY(I)                                                \
  _tile_loadd(6, x[I] + b * GROUP, p.K * sizeof(bf16)); \
  _tile_dpbf16ps(I, 6, 7)
#define STORE(I) _tile_stored(I, acc[I], 64)
  FOR_EACH_TILE(ZERO)
  for (int64_t b = 0; b < p.Kb; b++, w += GROUP * LANES) {
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) _mm_prefetch((const char*)w + AMX_PREFETCH_DISTANCE + 64 * i, PREFETCH_TO);
    _tile_loadd(7, w, 64);
    FOR_EACH_TILE(MULTIPLY)
  }
  FOR_EACH_TILE(STORE)
#undef FOR_EACH_TILE
#undef ZERO
#undef MULTIPLY
#undef STORE
}

// Prefetches a stream of cache lines. Few prefetches can be under way at a time, so they are spread over the other
// instructions.
struct Ahead {
  const uint8_t* at;
  void prefetch(int lines) {
    for (int i = 0; i < lines; i++, at += 64) _mm_prefetch(at, PREFETCH_TO);
  }
};

constexpr int AMX_GROUPS = 6;  // groups of quantized weights that are multiplied before the first result is stored

// dots[i] (rows,16) = the int32 dot products of group i of rows of q with group i of a block of 8-bit weights.
// Prefetches so many lines for each group.
template <int COUNT>
void multiply_groups(const int8_t* q, int64_t q_stride, const void* const (&weights)[COUNT],
                     __m512i (&dots)[AMX_GROUPS][LANES], Ahead& ahead, int lines) {
  asm volatile("" ::: "memory");  // compilers do not know that tiles are loaded from memory
#define MULTIPLY(I)                          \
  if constexpr (I < COUNT) {                 \
    _tile_zero(I);                           \
    _tile_loadd(6, q + I * GROUP, q_stride); \
    _tile_loadd(7, weights[I], 64);          \
    _tile_dpbsud(I, 6, 7);                   \
    ahead.prefetch(lines / 2);               \
  }
#define STORE(I)                       \
  if constexpr (I < COUNT) {           \
    _tile_stored(I, dots[I], 64);      \
    ahead.prefetch(lines - lines / 2); \
  }
  MULTIPLY(0) MULTIPLY(1) MULTIPLY(2) MULTIPLY(3) MULTIPLY(4) MULTIPLY(5)
  STORE(0) STORE(1) STORE(2) STORE(3) STORE(4) STORE(5)
#undef MULTIPLY
#undef STORE
}

// A block of packed weights times rows m0..m0+rows of x that are quantized to 8 bits: acc (rows,16). The bits are those
// of block_dot_int8.
template <bool INT4>
void block_dot_amx_int8(const Linear& p, int64_t block, const Input& x, int64_t m0, int rows, __m512* acc) {
  constexpr int LINES = INT4 ? 4 : 8;  // cache lines of a group
  const uint8_t* w = (const uint8_t*)p.weight + block * p.Kb * LINES * 64;
  const half *scales = p.scales + block * p.G * LANES, *mins = INT4 ? p.mins + block * p.G * LANES : nullptr;
  const __m512i nibble = _mm512_set1_epi8(15);
  Ahead ahead{w + PREFETCH_DISTANCE};
  __m512i dots[AMX_GROUPS][LANES], unpacked[AMX_GROUPS][8];
  std::fill(acc, acc + rows, _mm512_setzero_ps());
  int64_t b = 0, g = 0, left = p.groups_per_scale;
  auto add_groups = [&](auto groups) {
    constexpr int COUNT = decltype(groups)::value;
    const void* weights[COUNT];
    __m512 scale[COUNT], min[COUNT];
    for (int i = 0; i < COUNT; i++, w += LINES * 64) {
      weights[i] = INT4 ? (const void*)unpacked[i] : w;
      for (int j = 0; INT4 && j < 4; j++) {
        const __m512i bytes = _mm512_loadu_si512(w + 64 * j);
        unpacked[i][j] = _mm512_and_si512(bytes, nibble);
        unpacked[i][4 + j] = _mm512_and_si512(_mm512_srli_epi16(bytes, 4), nibble);
      }
      scale[i] = load(scales + g * LANES), min[i] = INT4 ? load(mins + g * LANES) : _mm512_setzero_ps();
      if (--left == 0) g++, left = p.groups_per_scale;
    }
    multiply_groups<COUNT>(x.q + (m0 * p.Kb + b) * GROUP, p.Kb * GROUP, weights, dots, ahead, LINES / 2);
    for (int m = 0, due = 0; m < rows; m++) {  // the other half of the prefetches is spread evenly over the rows
      for (due += COUNT * LINES / 2; due >= rows; due -= rows) ahead.prefetch(1);
      const int64_t at = (m0 + m) * p.Kb + b;
      __m512 sum = acc[m];
#pragma GCC unroll 6
      for (int i = 0; i < COUNT; i++) {
        const __m512i start = INT4 ? _mm512_setzero_si512() : _mm512_set1_epi32(x.dot_start[at + i]);
        const __m512 step = _mm512_mul_ps(_mm512_set1_ps(x.scale[at + i]), scale[i]);
        sum = _mm512_fmadd_ps(_mm512_cvtepi32_ps(_mm512_add_epi32(dots[i][m], start)), step, sum);
        if constexpr (INT4) sum = _mm512_fmadd_ps(min[i], _mm512_set1_ps(x.scaled_sum[at + i]), sum);
      }
      acc[m] = sum;
    }
    b += COUNT;
  };
  while (b + AMX_GROUPS <= p.Kb) add_groups(Int<AMX_GROUPS>());
  while (b + 2 <= p.Kb) add_groups(Int<2>());
  if (b < p.Kb) add_groups(Int<1>());
}

// A block of packed weights times rows m..stop of x that are quantized, in tiles of min(M,16) rows. `out` must not be
// `residual`, because the last tile overlaps the one before it, and computes the same bits again.
template <bool INT4, class T>
void packed_block_amx_int8(const Linear& l, int64_t block, const Input& x, int64_t m, int64_t stop, int64_t M,
                           const T* residual, T* out) {
  const int rows = std::min<int64_t>(M, LANES);
  for (; m < stop; m += rows) {
    const int64_t first = std::min(m, M - rows);
    __m512 acc[LANES];
    block_dot_amx_int8<INT4>(l, block, x, first, rows, acc);
    for (int i = 0; i < rows; i++) finish_outputs(l, block, first + i, acc[i], residual, out);
  }
}

// A block of packed bfloat16 weights times rows m..stop of x, in tiles of min(M,16) rows. `out` must not be `residual`,
// because the last tile overlaps the one before it, and computes the same bits again.
void packed_block_amx(const Linear& l, int64_t block, const Input& x, int64_t m, int64_t stop, int64_t M,
                      const bf16* residual, bf16* out) {
  const int64_t rows = std::min<int64_t>(M, LANES);
  auto multiply_tiles = [&](auto count) {
    constexpr int COUNT = decltype(count)::value;
    const bf16* x_tiles[COUNT];
    int64_t first[COUNT];
    alignas(64) float acc[COUNT][LANES * LANES];
    for (int i = 0; i < COUNT; i++, m += rows) {
      first[i] = std::min(m, M - rows);
      x_tiles[i] = (const bf16*)x.x + first[i] * l.K;
    }
    block_dot_amx<COUNT>(l, block, x_tiles, acc);
    for (int i = 0; i < COUNT; i++)
      for (int r = 0; r < rows; r++) finish_outputs(l, block, first[i] + r, load(acc[i] + r * LANES), residual, out);
  };
  while (stop - m > 3 * rows) multiply_tiles(Int<4>());
  while (m < stop) multiply_tiles(Int<1>());
}
#endif

// This thread's share of out (M,N) = x W^T + bias + residual; residual may be null, but not `out`. Call
// prepare_input_rows before.
template <class T>
void matmul(const Team& team, const Linear& l, const Input& in, int64_t M, const T* residual, T* out) {
  const int64_t N = l.N, K = l.K;
  if (l.bits == 16 && !l.Kb) {
    const T *w = (const T*)l.weight, *x = (const T*)in.x, *bias = (const T*)l.bias;
    return team.split(N, 2, [&](int64_t n, int64_t end) {
      auto rows = [&](auto count) {
        constexpr int NT = decltype(count)::value;
        auto at = [&](const T* p) { return p ? p + n : nullptr; };
        linear_rows<T, NT>(w + n * K, x, at(bias), at(residual), out + n, M, N, K);
        n += NT;
      };
      // One row of W at a time reads memory fastest. With more rows of x, several rows of W at a time save reads of x.
      while (M >= 8 && n + 2 <= end) rows(Int<2>());  // times 8 rows of x
      while (M > 2 && n + 4 <= end) rows(Int<4>());  // times 4 rows of x
      while (n < end) rows(Int<1>());
    });
  }
  auto by_blocks = [&](const auto& run_block) {
    for (int64_t start = 0, stop; start < M; start = stop) {
      stop = std::min<int64_t>(M, start + 256);  // 256 rows of x stay in the L2 cache for all blocks of W
      team.split((N + LANES - 1) / LANES, 1, [&](int64_t block, int64_t end) {
        for (; block < end; block++) run_block(block, start, stop);
      });
    }
  };
#ifdef HAS_AMX
  if constexpr (std::is_same_v<T, bf16>) {
    if (l.bits == 16) {
      const Tiles<bf16> tiles(std::clamp<int64_t>(M, 1, LANES));
      return by_blocks([&](int64_t block, int64_t start, int64_t stop) {
        packed_block_amx(l, block, in, start, stop, M, residual, out);
      });
    }
  }
  if (amx_allowed && l.quantizes_activations() && M >= MIN_AMX_ROWS) {
    const Tiles<int8_t> tiles(std::min<int64_t>(M, LANES));
    return by_blocks([&](int64_t block, int64_t start, int64_t stop) {
      l.bits == 4 ? packed_block_amx_int8<true>(l, block, in, start, stop, M, residual, out)
                  : packed_block_amx_int8<false>(l, block, in, start, stop, M, residual, out);
    });
  }
#endif
  by_blocks([&](int64_t block, int64_t start, int64_t stop) {
    l.bits == 4 ? packed_block<true>(l, block, in, start, stop, residual, out)
                : packed_block<false>(l, block, in, start, stop, residual, out);
  });
}

// ---------------------------------------------------------------- norms: one thread a row, sums in float32

template <class T>
void rms_norm_row(const T* x, const T* w, T* out, int64_t D, float eps) {
  __m512 squares = _mm512_setzero_ps();
  for (int64_t i = 0; i < D; i += LANES) {
    const __m512 v = load(x + i, first_lanes(D - i));
    squares = _mm512_fmadd_ps(v, v, squares);
  }
  const __m512 scale = _mm512_set1_ps(1.0f / std::sqrt(_mm512_reduce_add_ps(squares) / D + eps));
  for (int64_t i = 0; i < D; i += LANES) {
    const __mmask16 m = first_lanes(D - i);
    store(out + i, _mm512_mul_ps(_mm512_mul_ps(load(x + i, m), scale), load(w + i, m)), m);
  }
}

template <class T>
void layer_norm_row(const T* x, const T* w, const T* bias, T* out, int64_t D, float eps) {
  __m512 sum = _mm512_setzero_ps(), squares = _mm512_setzero_ps();
  for (int64_t i = 0; i < D; i += LANES) sum = _mm512_add_ps(sum, load(x + i, first_lanes(D - i)));
  const __m512 mean = _mm512_set1_ps(_mm512_reduce_add_ps(sum) / D);
  for (int64_t i = 0; i < D; i += LANES) {
    const __mmask16 m = first_lanes(D - i);
    const __m512 v = _mm512_maskz_sub_ps(m, load(x + i, m), mean);
    squares = _mm512_fmadd_ps(v, v, squares);
  }
  const __m512 scale = _mm512_set1_ps(1.0f / std::sqrt(_mm512_reduce_add_ps(squares) / D + eps));
  for (int64_t i = 0; i < D; i += LANES) {
    const __mmask16 m = first_lanes(D - i);
    const __m512 v = _mm512_mul_ps(_mm512_sub_ps(load(x + i, m), mean), scale);
    store(out + i, _mm512_fmadd_ps(v, load(w + i, m), load(bias + i, m)), m);
  }
}

// ---------------------------------------------------------------- attention
//
// FlashAttention (arXiv:2205.14135). The cache is processed in chunks of 64 slots. For each chunk a query has a softmax
// state: the largest score m, the sum l of e^(score - m), and acc, the sum of e^(score - m) * value. The states of two
// chunks are merged by
//   m = max(m1, m2),   l = l1 e^(m1-m) + l2 e^(m2-m),   acc = acc1 e^(m1-m) + acc2 e^(m2-m)
// and the output is acc / l. Chunks begin at multiples of 64 and are merged in ascending order. The bits of an output
// therefore depend neither on the other queries nor on whether one thread computes all chunks (prefill) or several
// threads share them (decode).
//
// Scores are computed for 16 slots at a time, one in each lane: their keys are transposed, so that a register holds the
// same 32-bit word of 16 keys. A word is one element in float32, or two in bfloat16.

constexpr int CHUNK = 64;       // slots
constexpr int QUERY_TILE = 32;  // queries that share the transposed keys

// What computes the products of queries with keys, and of weights with values. If AMX is allowed, bfloat16 uses AMX for
// many queries, and FLOAT for few, because AMX needs half a microsecond to wake up. Both give the same bits: FLOAT adds
// up 32 products at a time, those with even and those with odd index apart, as AMX does.
enum Products {
  FLOAT,  // float32, after a conversion
  PAIRS,  // vdpbf16ps
  AMX,
};
constexpr int MIN_AMX_QUERIES = 8;

constexpr int elements_per_word(Products products) { return products == FLOAT ? 1 : 2; }

template <class T>
struct Attention {
  int64_t B, S, H, K, E, slots;
  const T* q;                // (B,S,H,E)
  int64_t q_stride;          // elements between two tokens of q
  const T *k, *v;            // (R,K,slots,E)
  const int64_t* positions;  // (B,S)
  const int64_t* rows;       // (B,), or null for rows 0..B-1
  const float* slopes;       // (H,), or null
  int64_t window;            // a token sees so many of the latest slots
  T* out;                    // (B,S,H,E)

  int64_t group() const { return H / K; }  // query heads that share a key head
  int64_t width() const { return (E + LANES - 1) / LANES * LANES; }  // elements of acc, padded to whole registers
  int64_t words(Products products) const {  // of a query or key, padded as well
    return (width() / elements_per_word(products) + LANES - 1) / LANES * LANES;
  }
  int64_t stride() const { return width() + LANES; }  // floats of a state: acc (width), m, l, padding
  const T* cache_row(const T* cache, int64_t b, int64_t k) const {
    return cache + ((rows ? rows[b] : b) * K + k) * slots * E;
  }

  // (first, last) of the slots that at least one of the tokens begin..end of row b sees; last = -1 if all are padding.
  std::pair<int64_t, int64_t> visible_slots(int64_t b, int64_t begin, int64_t end) const {
    int64_t least = slots, most = -1;
    for (int64_t s = begin; s < end; s++) {
      const int64_t p = positions[b * S + s];
      if (p >= 0) least = std::min(least, p), most = std::max(most, p);
    }
    return {std::max<int64_t>(0, least - window + 1), most};
  }
};

// One thread's temporary arrays.
struct Workspace {
  uint32_t *queries, *keys;    // (QUERY_TILE,words), (words,16)
  int32_t* positions;          // (QUERY_TILE,), of the queries
  float* slopes;               // (QUERY_TILE,), of the queries; 0 without ALiBi
  uint32_t* values;            // (CHUNK/2,2*words) pairs of values, for AMX
  float* weights;              // (QUERY_TILE,CHUNK) products, then e^(score - m)
  float *state, *chunk_state;  // (QUERY_TILE,stride) each

  template <class T>
  static std::vector<Workspace> allocate(Arena& arena, const Attention<T>& a) {
    std::vector<Workspace> all(omp_get_max_threads());
    for (auto& w : all)
      w = {arena.allocate<uint32_t>(QUERY_TILE * a.words(FLOAT)), arena.allocate<uint32_t>(a.words(FLOAT) * LANES),
           arena.allocate<int32_t>(QUERY_TILE), arena.allocate<float>(QUERY_TILE),
           arena.allocate<uint32_t>(CHUNK * a.words(AMX)), arena.allocate<float>(QUERY_TILE * CHUNK),
           arena.allocate<float>(QUERY_TILE * a.stride()), arena.allocate<float>(QUERY_TILE * a.stride())};
    return all;
  }
};

// In its scope, denormal numbers count as zero, as operands and as results.
struct FlushDenormals {
  const unsigned before = _mm_getcsr();
  explicit FlushDenormals(bool enabled) {
    if (enabled) _mm_setcsr(before | _MM_FLUSH_ZERO_ON | _MM_DENORMALS_ZERO_ON);
  }
  ~FlushDenormals() { _mm_setcsr(before); }
};

inline __m512 rounded_to_bf16(__m512 x) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(x)), 16));
}

// 16 words of a query, key or value, from word number `word` on; elements from E on are zero.
template <Products P, class T>
__m512i load_words(const T* row, int64_t word, int64_t E) {
  if constexpr (P == FLOAT) return _mm512_castps_si512(load(row + word, first_lanes(E - word)));
  const int64_t left = E - 2 * word;
  return _mm512_maskz_loadu_epi16(left >= 32 ? ~0u : left <= 0 ? 0 : (1u << left) - 1, row + 2 * word);
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

// Copies queries begin..begin+count to the workspace, with their positions and slopes. The queries of row b and key
// head k are numbered by token, then by head of the group: query i is head k * group + i % group of token i / group.
template <Products P, class T>
void load_queries(const Attention<T>& a, int64_t b, int64_t k, int64_t begin, int64_t count, const Workspace& w) {
  for (int64_t i = 0; i < count; i++) {
    const int64_t s = (begin + i) / a.group(), h = k * a.group() + (begin + i) % a.group();
    w.positions[i] = a.positions[b * a.S + s], w.slopes[i] = a.slopes ? a.slopes[h] : 0.0f;
    const T* query = a.q + (b * a.S + s) * a.q_stride + h * a.E;
    for (int64_t j = 0; j < a.words(P); j += LANES)
      _mm512_store_si512(w.queries + i * a.words(P) + j, load_words<P>(query, j, a.E));
  }
}

// Always inlined: otherwise GCC finds that the function computes nothing, and removes the calls.
[[gnu::always_inline]] inline void prefetch(const void* begin, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += 64) _mm_prefetch((const char*)begin + i, _MM_HINT_T0);
}

// w.keys = the keys of 16 slots from `slot` on, transposed. Beyond the end of the cache the last slot is repeated; the
// causal mask hides it.
template <Products P, class T>
void transpose_keys(const Attention<T>& a, const T* keys, int64_t slot, const Workspace& w) {
  const T* rows[LANES];
  for (int i = 0; i < LANES; i++) rows[i] = keys + std::min(slot + i, a.slots - 1) * a.E;
  const int64_t words = a.words(P), E = a.E;
  uint32_t* to = w.keys;
  for (int64_t j = 0; j < words; j += LANES, to += LANES * LANES) {
    __m512i r[LANES];
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++) r[i] = load_words<P>(rows[i], j, E);
    transpose(r);
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++) _mm512_store_si512(to + i * LANES, r[i]);
  }
}

// acc = dot products of queries i..i+MT with the 16 transposed keys.
template <Products P, class T, int MT>
void dot_keys(const Attention<T>& a, const Workspace& w, int64_t i, __m512 (&acc)[MT]) {
  std::fill(acc, acc + MT, _mm512_setzero_ps());
  const int64_t words = a.words(P);
  auto add = [&](__m512& sum, int64_t j, int m) {
    const __m512i key = _mm512_load_si512(w.keys + j * LANES);
    const __m512i query = _mm512_set1_epi32(w.queries[(i + m) * words + j]);
    if constexpr (P == PAIRS)
      sum = _mm512_dpbf16_ps(sum, (__m512bh)key, (__m512bh)query);
    else
      sum = _mm512_fmadd_ps(_mm512_castsi512_ps(key), _mm512_castsi512_ps(query), sum);
  };
  for (int64_t start = 0; start < words; start += GROUP) {
    __m512 even[MT], odd[MT];
    std::fill(even, even + MT, _mm512_setzero_ps());
    std::fill(odd, odd + MT, _mm512_setzero_ps());
    for (int64_t j = start; j < std::min(start + GROUP, words); j += 2) {
#pragma GCC unroll 4
      for (int m = 0; m < MT; m++) add(even[m], j, m), add(odd[m], j + 1, m);
    }
    for (int m = 0; m < MT; m++) acc[m] = _mm512_add_ps(acc[m], _mm512_add_ps(even[m], odd[m]));
  }
}

// A chunk of slots, and the tile of queries that attends to it.
template <class T>
struct ChunkTile {
  const T *keys, *values;      // of row b and key head k, from slot 0 on
  int64_t b, k, begin, count;  // queries begin..begin+count of row b and key head k
  int64_t base;                // the first slot of the chunk
  int64_t from, to;            // some of the queries see slots from..to
  bool is_first;               // there is no visible chunk before it, so nothing has been prefetched
  int64_t ahead;               // how many slots ahead to prefetch; 0 in the last chunk

  int64_t low() const { return from / LANES * LANES; }  // scores are computed from this slot on
};

// 16 words of the values of `slot` and slot + 1, from word number `word` on, as pairs of the two: the first and the
// second 16. Zeros in place of slots that no query sees, which may hold NaN.
inline void load_value_pairs(const Attention<bf16>& a, const ChunkTile<bf16>& c, int64_t slot, int64_t word,
                             __m512i& first, __m512i& second) {
  auto words_of = [&](int64_t slot) {
    const bool is_seen = slot >= c.from && slot < c.to;
    return is_seen ? load_words<PAIRS>(c.values + slot * a.E, word, a.E) : _mm512_setzero_si512();
  };
  const __m512i one = words_of(slot), two = words_of(slot + 1);
  first = _mm512_permutex2var_epi16(one, interleave(0), two);
  second = _mm512_permutex2var_epi16(one, interleave(LANES), two);
}

// Step 3 of a chunk, with FLOAT: acc = the weighted sum of the values, for queries i..i+MT and VT registers from
// element e on.
template <class T, int MT, int VT>
[[gnu::noinline]] void add_values(const Attention<T>& a, const Workspace& w, const ChunkTile<T>& c, int64_t i,
                                  int64_t e, float* states) {
  const __mmask16 valid = first_lanes(a.E - e - (VT - 1) * LANES);  // of the last register
  __m512 acc[MT][VT], even_sum[MT][VT];
  for (auto& row : acc) std::fill(row, row + VT, _mm512_setzero_ps());
  for (int64_t group = c.from / GROUP * GROUP; group < c.to; group += GROUP) {
    const int64_t begin = std::max(group, c.from), end = std::min(group + GROUP, c.to);
    for (int odd = 0; odd < 2; odd++) {
      __m512 sum[MT][VT];
      for (auto& row : sum) std::fill(row, row + VT, _mm512_setzero_ps());
      for (int64_t slot = begin + (begin + odd) % 2; slot < end; slot += 2) {
        if (i == 0) prefetch(c.values + (slot + c.ahead) * a.E + e, VT * LANES * sizeof(T));
        __m512 v[VT];
#pragma GCC unroll 4
        for (int j = 0; j < VT; j++) v[j] = load(c.values + slot * a.E + e + j * LANES, j == VT - 1 ? valid : 0xffff);
#pragma GCC unroll 4
        for (int m = 0; m < MT; m++) {
          const __m512 weight = _mm512_set1_ps(w.weights[(i + m) * CHUNK + slot % CHUNK]);
#pragma GCC unroll 4
          for (int j = 0; j < VT; j++) sum[m][j] = _mm512_fmadd_ps(weight, v[j], sum[m][j]);
        }
      }
      for (int m = 0; m < MT; m++)
        for (int j = 0; j < VT; j++) {
          if (odd)
            acc[m][j] = _mm512_add_ps(acc[m][j], _mm512_add_ps(even_sum[m][j], sum[m][j]));
          else
            even_sum[m][j] = sum[m][j];
        }
    }
  }
  for (int m = 0; m < MT; m++)
    for (int j = 0; j < VT; j++) store(states + (i + m) * a.stride() + e + j * LANES, acc[m][j], 0xffff);
}

// The same with PAIRS, two slots at a time.
template <int MT, int VT>
[[gnu::noinline]] void add_value_pairs(const Attention<bf16>& a, const Workspace& w, const ChunkTile<bf16>& c,
                                       int64_t i, int64_t e, float* states) {
  __m512 acc[MT][VT];
  for (auto& row : acc) std::fill(row, row + VT, _mm512_setzero_ps());
  for (int64_t slot = c.from / 2 * 2; slot < c.to; slot += 2) {
    if (i == 0) prefetch(c.values + (slot + c.ahead) * a.E + e, 2 * VT * LANES * sizeof(bf16));
    __m512i v[VT + 1];
#pragma GCC unroll 4
    for (int j = 0; j < VT; j += 2) load_value_pairs(a, c, slot, e / 2 + j * LANES / 2, v[j], v[j + 1]);
#pragma GCC unroll 4
    for (int m = 0; m < MT; m++) {
      const __m512i weight = _mm512_set1_epi32(((const uint32_t*)(w.weights + (i + m) * CHUNK))[slot % CHUNK / 2]);
#pragma GCC unroll 4
      for (int j = 0; j < VT; j++) acc[m][j] = _mm512_dpbf16_ps(acc[m][j], (__m512bh)v[j], (__m512bh)weight);
    }
  }
  for (int m = 0; m < MT; m++)
    for (int j = 0; j < VT; j++) store(states + (i + m) * a.stride() + e + j * LANES, acc[m][j], 0xffff);
}

#ifdef HAS_AMX
// out (count,16) = a (count,32*steps) times b, whose steps are tiles of 16 pairs of bfloat16. Strides are in bytes. The
// tile of the last rows may overlap the one before it.
void multiply_tiles(const void* a, int64_t a_stride, const void* b, int64_t b_stride, int64_t steps, float* out,
                    int64_t out_stride, int64_t count) {
  asm volatile("" ::: "memory");  // compilers do not know that tiles are loaded from memory
  const int64_t rows = std::min<int64_t>(count, LANES);
  for (int64_t i = 0; i < count; i += rows) {
    const int64_t first = std::min(i, count - rows);
    _tile_zero(0);
    for (int64_t step = 0; step < steps; step++) {
      _tile_loadd(6, (const char*)a + first * a_stride + step * 64, a_stride);
      _tile_loadd(7, (const char*)b + step * LANES * b_stride, b_stride);
      _tile_dpbf16ps(0, 6, 7);
    }
    _tile_stored(0, (char*)out + first * out_stride, out_stride);
  }
}

// The same with AMX, for all queries, 32 slots at a time.
void add_values_amx(const Attention<bf16>& a, const Workspace& w, const ChunkTile<bf16>& c, float* states) {
  const int64_t words = a.words(AMX), begin = c.from / GROUP * GROUP, end = (c.to + GROUP - 1) / GROUP * GROUP;
  uint32_t* pairs = w.values;
  for (int64_t slot = begin; slot < end; slot += 2) {
    if (slot < c.to) prefetch(c.values + (slot + c.ahead) * a.E, 2 * a.E * sizeof(bf16));
    for (int64_t word = 0; word < words; word += LANES, pairs += 2 * LANES) {
      __m512i low, high;
      load_value_pairs(a, c, slot, word, low, high);
      _mm512_store_si512(pairs, low), _mm512_store_si512(pairs + LANES, high);
    }
  }
  for (int64_t e = 0; e < a.width(); e += LANES)
    multiply_tiles((const bf16*)w.weights + begin % CHUNK, CHUNK * sizeof(float), w.values + e,
                   2 * words * sizeof(uint32_t), (end - begin) / GROUP, states + e, a.stride() * sizeof(float),
                   c.count);
}
#endif

// Divides 0..count into steps of 4 and a last one of 1 to 3: calls work(Int<n>(), i) for each step i..i+n.
template <class Work>
void by_fours(int64_t count, const Work& work) {
  int64_t i = 0;
  for (; i + 4 <= count; i += 4) work(Int<4>(), i);
  if (count - i == 3) work(Int<3>(), i);
  if (count - i == 2) work(Int<2>(), i);
  if (count - i == 1) work(Int<1>(), i);
}

// Step 1 of a chunk: w.weights = the dot products of queries and keys.
template <Products P, class T>
[[gnu::always_inline]] inline void chunk_products(const Attention<T>& a, const Workspace& w, const ChunkTile<T>& c) {
  // Without these prefetches attention takes three times as long.
  const int64_t bytes = LANES * a.E * sizeof(T);
  if (c.is_first) prefetch(c.keys + c.low() * a.E, (c.to - c.low()) * a.E * sizeof(T));
  for (int64_t slot = c.low(); slot < c.to; slot += LANES) {
    if (c.ahead) prefetch(c.keys + (slot + c.ahead) * a.E, bytes);
    if (c.is_first) prefetch(c.values + slot * a.E, bytes);
    transpose_keys<P>(a, c.keys, slot, w);
    float* products = w.weights + slot - c.base;
#ifdef HAS_AMX
    if constexpr (P == AMX) {
      multiply_tiles(w.queries, a.words(P) * sizeof(uint32_t), w.keys, LANES * sizeof(uint32_t), a.words(P) / LANES,
                     products, CHUNK * sizeof(float), c.count);
      continue;
    }
#endif
    by_fours(c.count, [&](auto queries, int64_t i) {
      constexpr int MT = decltype(queries)::value;
      __m512 acc[MT];
      dot_keys<P, T, MT>(a, w, i, acc);
      for (int m = 0; m < MT; m++) store(products + (i + m) * CHUNK, acc[m], 0xffff);
    });
  }
}

// Step 2: w.weights = e^(score - m), rounded to bfloat16 if T is; m and l of each query go to states. The scores are
// q k / sqrt(E) - slope * distance, -infinity where a query must not look.
template <Products P, class T>
[[gnu::always_inline]] inline void chunk_softmax(const Attention<T>& a, const Workspace& w, const ChunkTile<T>& c,
                                                 float* states) {
  const int64_t low = c.low() - c.base, high = (c.to - c.base + LANES - 1) / LANES * LANES;
  const __m512 scale = _mm512_set1_ps(1.0f / std::sqrt(float(a.E)));
  for (int64_t i = 0; i < c.count; i++) {
    float* weights = w.weights + i * CHUNK;
    const int64_t p = w.positions[i];
    const __m512i window = _mm512_set1_epi32(p < 0 ? 0 : a.window);
    const __m512 slope = _mm512_set1_ps(w.slopes[i]);
    __m512 max = _mm512_set1_ps(-INF), sum = _mm512_setzero_ps();
    for (int64_t j = low; j < high; j += LANES) {
      const __m512i distance = _mm512_sub_epi32(_mm512_set1_epi32(p - c.base - j), lane_indices());
      __m512 score = _mm512_mul_ps(load(weights + j), scale);
      if (a.slopes) score = _mm512_fnmadd_ps(slope, _mm512_cvtepi32_ps(distance), score);
      // Future slots wrap around to huge unsigned distances, so they are masked as well.
      score = _mm512_mask_blend_ps(_mm512_cmplt_epu32_mask(distance, window), _mm512_set1_ps(-INF), score);
      max = _mm512_max_ps(max, score);
      store(weights + j, score, 0xffff);
    }
    const float m = _mm512_reduce_max_ps(max);
    const __m512 shift = _mm512_set1_ps(m == -INF ? 0.0f : m);
    for (int64_t j = low; j < high; j += LANES) {
      const __m512 weight = fast_exp(_mm512_sub_ps(load(weights + j), shift));
      sum = _mm512_add_ps(sum, weight);
      if constexpr (P == FLOAT)
        store(weights + j, std::is_same_v<T, bf16> ? rounded_to_bf16(weight) : weight, 0xffff);
      else
        store((bf16*)weights + j, weight, 0xffff);  // overwrites only scores that have been read
    }
    if constexpr (P == AMX) {  // it multiplies whole groups of 32 slots
      for (int64_t j = low / GROUP * GROUP; j < low; j += LANES) store((bf16*)weights + j, _mm512_setzero_ps(), 0xffff);
      if (high % GROUP) store((bf16*)weights + high, _mm512_setzero_ps(), 0xffff);
    }
    states[i * a.stride() + a.width()] = m;
    states[i * a.stride() + a.width() + 1] = _mm512_reduce_add_ps(sum);
  }
}

// An empty state: m = -infinity, l = 0, acc = 0.
inline void clear_state(float* state, int64_t width) {
  std::fill(state, state + width + LANES, 0.0f);
  state[width] = -INF;
}

// The softmax state (acc, m, l) of a tile of queries over one chunk, to states (count,stride). The queries must be in
// the workspace already. (Which of the three steps are inlined here makes 3 % of attention's time.)
template <Products P, class T>
void attend_chunk(const Attention<T>& a, int64_t b, int64_t k, int64_t begin, int64_t count, int64_t chunk,
                  const Workspace& w, float* states) {
  const auto [first, last] = a.visible_slots(b, begin / a.group(), (begin + count - 1) / a.group() + 1);
  const int64_t base = chunk * CHUNK;
  ChunkTile<T> c{a.cache_row(a.k, b, k), a.cache_row(a.v, b, k), b, k, begin, count, base};
  c.from = std::max(base, first), c.to = std::min(base + CHUNK, last + 1);
  c.is_first = base <= first, c.ahead = base + CHUNK <= last ? CHUNK : 0;
  if (c.from >= c.to) {  // none of the queries sees this chunk, which other queries of their row see
    for (int64_t i = 0; i < count; i++) clear_state(states + i * a.stride(), a.width());
    return;
  }
  chunk_products<P>(a, w, c);
  chunk_softmax<P>(a, w, c, states);
#ifdef HAS_AMX
  if constexpr (P == AMX) return add_values_amx(a, w, c, states);
#endif
  by_fours(a.width() / LANES, [&](auto registers, int64_t e) {
    by_fours(count, [&](auto queries, int64_t i) {
      constexpr int MT = decltype(queries)::value, VT = decltype(registers)::value;
      if constexpr (P == FLOAT)
        add_values<T, MT, VT>(a, w, c, i, e * LANES, states);
      else if constexpr (P == PAIRS)
        add_value_pairs<MT, VT>(a, w, c, i, e * LANES, states);
    });
  });
}

// Calls work(Int<P>()) with the Products for a tile of so many queries.
template <class T, class Work>
void choose_products(int64_t queries, const Work& work) {
  if constexpr (std::is_same_v<T, bf16>) {
    if (!amx_allowed) return work(Int<PAIRS>());
#ifdef HAS_AMX
    if (queries >= MIN_AMX_QUERIES) {
      const Tiles<bf16> tiles(std::min<int64_t>(queries, LANES));
      return work(Int<AMX>());
    }
#endif
  }
  work(Int<FLOAT>());
}

inline void merge_state(float* state, const float* other, int64_t width) {
  const float m = std::max(state[width], other[width]);
  if (m == -INF) return;
  const float a = fast_exp(state[width] - m), c = fast_exp(other[width] - m);
  for (int64_t e = 0; e < width; e += LANES) {
    const __m512 part = _mm512_mul_ps(load(other + e), _mm512_set1_ps(c));
    store(state + e, _mm512_fmadd_ps(load(state + e), _mm512_set1_ps(a), part), 0xffff);
  }
  state[width] = m;
  state[width + 1] = state[width + 1] * a + other[width + 1] * c;
}

template <class T>
void write_output(const float* state, int64_t width, T* out, int64_t E) {
  const float l = state[width + 1];
  const __m512 inverse = _mm512_set1_ps(l == 0 ? 0.0f : 1 / l);  // padding sees no slot and gives zeros
  for (int64_t e = 0; e < E; e += LANES) store(out + e, _mm512_mul_ps(load(state + e), inverse), first_lanes(E - e));
}

// Prefill: a thread computes all chunks of a tile of queries. Consecutive tiles go to different threads, because later
// tiles see more slots.
template <class T>
void attention_by_queries(const Team& team, const Attention<T>& a, const Workspace& w) {
  const int64_t G = a.group(), queries = a.S * G, tiles = (queries + QUERY_TILE - 1) / QUERY_TILE;
  const int64_t stride = a.stride();
  for (int64_t item = team.thread; item < a.B * a.K * tiles; item += team.threads) {
    const int64_t b = item / (a.K * tiles), k = item / tiles % a.K, begin = item % tiles * QUERY_TILE;
    const int64_t count = std::min<int64_t>(QUERY_TILE, queries - begin);
    const auto [least, most] = a.visible_slots(b, begin / G, (begin + count - 1) / G + 1);
    for (int64_t i = 0; i < count; i++) clear_state(w.state + i * stride, a.width());
    choose_products<T>(count, [&](auto products) {
      constexpr Products P = Products(decltype(products)::value);
      load_queries<P>(a, b, k, begin, count, w);
      for (int64_t chunk = least / CHUNK; chunk * CHUNK <= most; chunk++) {
        attend_chunk<P>(a, b, k, begin, count, chunk, w, w.chunk_state);
        for (int64_t i = 0; i < count; i++) merge_state(w.state + i * stride, w.chunk_state + i * stride, a.width());
      }
    });
    for (int64_t i = 0; i < count; i++) {
      const int64_t s = (begin + i) / G, h = k * G + (begin + i) % G;
      write_output(w.state + i * stride, a.width(), a.out + ((b * a.S + s) * a.H + h) * a.E, a.E);
    }
  }
}

// Decode with few rows (flash-decoding): the threads share the chunks of all rows and heads (attend_split), and then
// merge the states of the chunks (merge_split). An item is one chunk of one key head of one row.
struct SplitPlan {
  bool enabled;  // otherwise attention_by_queries is used, and there are no items
  std::vector<int64_t> first_chunk, first_item;  // of each row

  template <class T>
  explicit SplitPlan(const Attention<T>& a) : first_item{0} {
    const int64_t tiles = (a.S * a.group() + QUERY_TILE - 1) / QUERY_TILE;
    enabled = a.S <= MAX_DECODE_TOKENS && a.B * a.K * tiles < 8 * omp_get_max_threads();
    for (int64_t b = 0; b < a.B && enabled; b++) {
      const auto [least, most] = a.visible_slots(b, 0, a.S);
      first_chunk.push_back(least / CHUNK);
      first_item.push_back(first_item.back() + (most < 0 ? 0 : most / CHUNK - least / CHUNK + 1) * a.K);
    }
  }

  int64_t items() const { return first_item.back(); }

  template <class T>
  float* allocate(Arena& arena, const Attention<T>& a) const {
    return arena.allocate<float>(items() * a.S * a.group() * a.stride());
  }
};

template <class T>
void attend_split(const Team& team, const Attention<T>& a, const SplitPlan& plan, const Workspace& w, float* states) {
  const int64_t queries = a.S * a.group();
  const auto& first_item = plan.first_item;
  team.split(plan.items(), 1, [&](int64_t item, int64_t end) {
    for (; item < end; item++) {
      const int64_t b = std::upper_bound(first_item.begin(), first_item.end(), item) - first_item.begin() - 1;
      const int64_t chunks = (first_item[b + 1] - first_item[b]) / a.K, i = item - first_item[b];
      for (int64_t begin = 0; begin < queries; begin += QUERY_TILE) {
        const int64_t count = std::min<int64_t>(QUERY_TILE, queries - begin);
        float* to = states + (item * queries + begin) * a.stride();
        choose_products<T>(count, [&](auto products) {
          constexpr Products P = Products(decltype(products)::value);
          load_queries<P>(a, b, i / chunks, begin, count, w);
          attend_chunk<P>(a, b, i / chunks, begin, count, plan.first_chunk[b] + i % chunks, w, to);
        });
      }
    }
  });
}

template <class T>
void merge_split(const Team& team, const Attention<T>& a, const SplitPlan& plan, const Workspace& w,
                 const float* states) {
  const int64_t queries = a.S * a.group(), G = a.group();
  team.split(a.B * a.S * a.H, 1, [&](int64_t at, int64_t end) {
    for (; at < end; at++) {
      const int64_t b = at / (a.S * a.H), s = at / a.H % a.S, h = at % a.H;
      const int64_t first = plan.first_item[b], chunks = (plan.first_item[b + 1] - first) / a.K;
      clear_state(w.state, a.width());
      for (int64_t item = first + h / G * chunks, last = item + chunks; item < last; item++)
        merge_state(w.state, states + (item * queries + s * G + h % G) * a.stride(), a.width());
      write_output(w.state, a.width(), a.out + at * a.E, a.E);
    }
  });
}

template <class T>
void run_attention(const Team& team, const Attention<T>& a, const SplitPlan& plan, const Workspace& w, float* states) {
  const FlushDenormals flush(std::is_same_v<T, bf16>);  // as AMX does
  if (plan.enabled) {
    attend_split(team, a, plan, w, states), team.barrier();
    merge_split(team, a, plan, w, states);
  } else {
    attention_by_queries(team, a, w);
  }
  team.barrier();
}

// ---------------------------------------------------------------- transformer blocks
//
// All blocks of a model run as one operation, in one parallel region: threads are woken once for each forward pass.
// Results between the steps of a block are rounded to x's dtype, as in model.py.

// What a block's calls have in common. prepare_block checks it once.
struct PreparedBlock {
  std::vector<std::optional<Tensor>> tensors;  // own the memory that the pointers below refer to
  at::ScalarType dtype;
  int64_t H, K, E, D, F, window;
  Linear qkv, out, up, down;
  const void *attention_norm[2], *mlp_norm[2];  // weight and bias; RMSNorm has no bias
  const void *q_norm, *k_norm;                  // null where the model has none
  float eps;
  bool gated, post_norm_residual;
};

// One call of a block.
template <class T>
struct Block {
  const PreparedBlock& prepared;
  const SplitPlan& plan;
  Attention<T> attention;  // allocate() fills in q and out
  int64_t M;  // B * S tokens
  const float *cos, *sin;  // (M,E), or null
  T *k, *v;  // the caches of `attention`, for writing
  const T* x;  // (M,D)
  T* result;  // (M,D), may be x

  // Temporary arrays, from allocate():
  T *normed, *qkv, *attended;           // (M,D), (M,(H+2K)*E), (M,H*E)
  T *residual, *mlp_normed, *up, *act;  // (M,D), (M,D), (M,F or 2F), (M,F)
  Input to_qkv, to_out, to_up, to_down;
  std::vector<Workspace> workspaces;
  float* states;

  void allocate(Arena& arena) {
    const PreparedBlock& p = prepared;
    normed = arena.allocate<T>(M * p.D), qkv = arena.allocate<T>(M * p.qkv.N);
    attended = arena.allocate<T>(M * p.out.K);
    residual = arena.allocate<T>(M * p.D), mlp_normed = arena.allocate<T>(M * p.D);
    up = arena.allocate<T>(M * p.up.N), act = arena.allocate<T>(M * p.F);
    to_qkv = allocate_input(arena, p.qkv, normed, M), to_out = allocate_input(arena, p.out, attended, M);
    to_up = allocate_input(arena, p.up, mlp_normed, M), to_down = allocate_input(arena, p.down, act, M);
    workspaces = Workspace::allocate(arena, attention);
    states = plan.allocate(arena, attention);
    attention.q = qkv, attention.q_stride = p.qkv.N, attention.out = attended;
  }

  void norm(const Team& team, const T* from, const void* const (&weights)[2], T* to, const Linear& l,
                        const Input& in) const {
    const T *weight = (const T*)weights[0], *bias = (const T*)weights[1];
    const int64_t D = prepared.D;
    team.split(M, 1, [&](int64_t m, int64_t end) {
      for (; m < end; m++) {
        bias ? layer_norm_row(from + m * D, weight, bias, to + m * D, D, prepared.eps)
             : rms_norm_row(from + m * D, weight, to + m * D, D, prepared.eps);
        prepare_input<T>(l, in, m, 0, l.Kb);
      }
    });
    team.barrier();
  }

  // QK-norm and RoPE (arXiv:2104.09864), in place; then keys and values are copied to the caches.
  void rotate_and_cache(const Team& team) const {
    const auto& a = attention;
    const int64_t E = a.E, per_token = a.H + 2 * a.K;
    team.split(M * per_token, 1, [&](int64_t at, int64_t end) {
      for (; at < end; at++) {
        const int64_t m = at / per_token, h = at % per_token;
        T* head = qkv + at * E;
        const T* weight = (const T*)(h < a.H ? prepared.q_norm : prepared.k_norm);
        if (h < a.H + a.K) {
          if (weight) rms_norm_row(head, weight, head, E, prepared.eps);
          if (cos) rotate(head, cos + m * E, sin + m * E, E);
        }
        if (h < a.H) continue;
        const int64_t row = a.rows ? a.rows[m / a.S] : m / a.S;
        const int64_t slot = a.positions[m] < 0 ? a.slots - 1 : a.positions[m];  // padding goes to the scratch slot
        T* cache = h < a.H + a.K ? k : v;
        std::copy(head, head + E, cache + ((row * a.K + (h - a.H) % a.K) * a.slots + slot) * E);
      }
    });
    team.barrier();
  }

  static void rotate(T* x, const float* cos, const float* sin, int64_t E) {
    const int64_t half = E / 2;
    for (int64_t e = 0; e < half; e += LANES) {
      const __mmask16 m = first_lanes(half - e);
      const __m512 a = load(x + e, m), b = load(x + half + e, m);
      store(x + e, _mm512_fmadd_ps(a, load(cos + e, m), _mm512_mul_ps(b, load(sin + e, m))), m);
      store(x + half + e, _mm512_fmadd_ps(b, load(cos + half + e, m), _mm512_mul_ps(a, load(sin + half + e, m))), m);
    }
  }

  // act = SwiGLU or tanh-GELU of up, and its conversion for the down projection. Both are of the form x sigmoid(z).
  void activate(const Team& team) const {
    const __m512 one = _mm512_set1_ps(1.0f);
    const int64_t F = prepared.F, groups = (F + GROUP - 1) / GROUP;
    team.split(M * groups, 1, [&](int64_t at, int64_t end) {
      for (; at < end; at++) {
        const int64_t m = at / groups, group = at % groups;
        for (int64_t f = group * GROUP; f < std::min(F, (group + 1) * GROUP); f += LANES) {
          const __mmask16 valid = first_lanes(F - f);
          const T* from = up + m * prepared.up.N + f;
          const __m512 x = load(from, valid);
          const __m512 cube = _mm512_mul_ps(_mm512_mul_ps(x, x), _mm512_mul_ps(x, _mm512_set1_ps(0.044715f)));
          // SwiGLU: z = x. Tanh-GELU: z = 2 sqrt(2/pi) (x + 0.044715 x^3).
          const __m512 z = prepared.gated ? x : _mm512_mul_ps(_mm512_set1_ps(1.5957691216f), _mm512_add_ps(x, cube));
          __m512 y = _mm512_div_ps(x, _mm512_add_ps(one, fast_exp(_mm512_sub_ps(_mm512_setzero_ps(), z))));
          if (prepared.gated) y = _mm512_mul_ps(y, load(from + F, valid));
          store(act + m * F + f, y, valid);
        }
        prepare_input<T>(prepared.down, to_down, m, group, group + 1);
      }
    });
    team.barrier();
  }

  void run(const Team& team) const {
    const Workspace& w = workspaces[team.thread];
    const PreparedBlock& p = prepared;
    norm(team, x, p.attention_norm, normed, p.qkv, to_qkv);
    matmul<T>(team, p.qkv, to_qkv, M, nullptr, qkv), team.barrier();
    rotate_and_cache(team);
    run_attention(team, attention, plan, w, states);
    prepare_input_rows<T>(team, p.out, to_out, M);
    matmul<T>(team, p.out, to_out, M, p.post_norm_residual ? normed : x, residual), team.barrier();
    norm(team, residual, p.mlp_norm, mlp_normed, p.up, to_up);
    matmul<T>(team, p.up, to_up, M, nullptr, up), team.barrier();
    activate(team);
    matmul<T>(team, p.down, to_down, M, p.post_norm_residual ? mlp_normed : residual, result), team.barrier();
  }
};

// ---------------------------------------------------------------- sampling: one row of logits at a time
//
// sampling.py has the references. Weights are exp((x - max) / temperature) and are never normalized. A row is read once
// for its maximum and log-sum-exp, and once or twice more if a token is drawn from it. A filter first goes over the
// whole row with a cheap bound, and copies the tokens that may pass it to a short list; the exact filter, and all that
// follows, work on this list.

constexpr int BLOCK_VECTORS = 16;  // vectors in a block of logits; row_statistics stores the maxima of each block
inline __m512 minus_infinity() { return _mm512_set1_ps(-INF); }

// 16 logits from p; lanes from `left` on are -infinity.
template <class T>
inline __m512 load_or_minus_infinity(const T* p, int64_t left) {
  return left >= LANES ? load(p) : _mm512_mask_mov_ps(minus_infinity(), first_lanes(left), load(p, first_lanes(left)));
}

// 2^x for x <= 0 with a relative error of 1e-7, in fewer instructions than fast_exp.
inline __m512 fast_exp2(__m512 x) {
  const __m512 f = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);  // x - floor(x)
  __m512 y = _mm512_set1_ps(0.00187757661f);
  for (float c : {0.00898934025f, 0.0558263179f, 0.240153617f, 0.693153073f, 0.999999925f})
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(c));
  return _mm512_scalef_ps(y, x);
}

struct RowStatistics {
  float max;
  float log_sum;  // log(sum(exp(x - max)))
  bool finite;    // max is finite and no x is NaN
};

// The statistics of a row in one pass. Each lane keeps a softmax state: the running maximum m and the running sum l of
// exp(x - m). Writes the maximum of each lane in each block to maxima (blocks,16).
template <class T>
RowStatistics row_statistics(const T* x, int64_t V, float* maxima) {
  const __m512 log2e = _mm512_set1_ps(LOG2E);
  __m512 max = minus_infinity(), m = _mm512_set1_ps(-std::numeric_limits<float>::max()), l = _mm512_setzero_ps();
  auto block = [&](auto&& load_vector) {
    __m512 xs[BLOCK_VECTORS], even = minus_infinity(), odd = minus_infinity(), sums[2] = {};
#pragma GCC unroll 16
    for (int j = 0; j < BLOCK_VECTORS; j++) xs[j] = load_vector(j);
#pragma GCC unroll 8
    for (int j = 0; j < BLOCK_VECTORS; j += 2) {
      even = _mm512_max_ps(even, xs[j]), odd = _mm512_max_ps(odd, xs[j + 1]);  // may drop NaN, but the sum keeps it
    }
    const __m512 here = _mm512_max_ps(even, odd), m_new = _mm512_max_ps(m, here);
    _mm512_storeu_ps(maxima, here), maxima += LANES;
    max = _mm512_max_ps(max, here);
#pragma GCC unroll 16
    for (int j = 0; j < BLOCK_VECTORS; j++)
      sums[j % 2] = _mm512_add_ps(sums[j % 2], fast_exp2(_mm512_mul_ps(_mm512_sub_ps(xs[j], m_new), log2e)));
    l = _mm512_fmadd_ps(l, fast_exp2(_mm512_mul_ps(_mm512_sub_ps(m, m_new), log2e)), _mm512_add_ps(sums[0], sums[1]));
    m = m_new;
  };
  constexpr int64_t SIZE = BLOCK_VECTORS * LANES;
  int64_t v = 0;
  for (; v + SIZE <= V; v += SIZE) block([&](int j) { return load(x + v + j * LANES); });
  if (v < V) block([&](int j) { return load_or_minus_infinity(x + v + j * LANES, V - v - j * LANES); });
  const float top = _mm512_reduce_max_ps(m);
  l = _mm512_mul_ps(l, fast_exp2(_mm512_mul_ps(_mm512_sub_ps(m, _mm512_set1_ps(top)), log2e)));
  const float sum = sum_of_lanes(l);
  const float largest = _mm512_reduce_max_ps(max);
  return {largest, std::log(sum), std::isfinite(largest) && !std::isnan(sum)};
}

// The first index of a row's maximum; maxima come from row_statistics.
template <class T>
int64_t argmax(float max, const T* x, int64_t V, const float* maxima) {
  const __m512 wanted = _mm512_set1_ps(max);
  int64_t v = 0;
  while (!_mm512_cmp_ps_mask(load(maxima), wanted, _CMP_EQ_OQ)) maxima += LANES, v += BLOCK_VECTORS * LANES;
  for (;; v += LANES)
    if (const __mmask16 here = _mm512_cmp_ps_mask(load_or_minus_infinity(x + v, V - v), wanted, _CMP_EQ_OQ))
      return v + __builtin_ctz(here);
}

// The settings of one row, as in sampling.py's Sampling.
struct RowSettings {
  int64_t seed, top_k, position;
  float temperature, top_p, min_p, repetition, frequency, presence;
  const int32_t* counts;
  const int64_t* drafted;  // (n_drafted,) draft tokens before this position
  int64_t n_drafted;

  bool penalizes() const { return repetition != 1 || frequency != 0 || presence != 0; }
};

// One thread's temporary arrays for a row. The memory of the long arrays is touched only as far as tokens are left.
struct Scratch {
  float* maxima;     // of row_statistics
  float* x;          // (V,) logits after penalties
  float* kept;          // (V,) logits of the tokens that passed the filters, by ascending id
  int32_t* ids;         // (V,) the ids of these tokens
  uint32_t* sort_keys;  // (V,) logits as integers of the same order
  int64_t* masses;      // (V,) weights in fixed point

  static Scratch allocate(Arena& arena, int64_t V) {
    const int64_t padded = (V + 255) / 256 * 256;
    Scratch s{arena.allocate<float>(padded / BLOCK_VECTORS), arena.allocate<float>(padded)};
    s.kept = arena.allocate<float>(padded);
    s.ids = arena.allocate<int32_t>(padded), s.sort_keys = arena.allocate<uint32_t>(padded);
    s.masses = arena.allocate<int64_t>(padded);
    return s;
  }
};

// Repetition, frequency and presence penalties. Every operation is rounded by itself, as in torch: an explicit rounding
// mode keeps the compiler from contracting a product and a sum to one fused multiply-add.
inline __m512 penalize(__m512 x, __m512i counts, const RowSettings& r) {
  constexpr int NEAREST = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  const __mmask16 seen = _mm512_cmpgt_epi32_mask(counts, _mm512_setzero_si512());
  const __mmask16 negative = _mm512_cmp_ps_mask(x, _mm512_setzero_ps(), _CMP_LT_OQ);
  const __m512 repetition = _mm512_set1_ps(r.repetition);
  __m512 y = _mm512_mask_div_ps(x, seen & ~negative, x, repetition);
  y = _mm512_mask_mul_ps(y, seen & negative, x, repetition);
  const __m512i generated_count = _mm512_srai_epi32(counts, 1);
  const __mmask16 generated = _mm512_cmpgt_epi32_mask(generated_count, _mm512_setzero_si512());
  const __m512 frequency = _mm512_set1_ps(r.frequency);
  const __m512 frequency_penalty = _mm512_mul_round_ps(_mm512_cvtepi32_ps(generated_count), frequency, NEAREST);
  y = _mm512_sub_round_ps(y, frequency_penalty, NEAREST);
  return _mm512_mask_sub_ps(y, generated, y, _mm512_set1_ps(r.presence));
}

template <class T>
void penalize_row(const T* x, int64_t V, const RowSettings& r, float* out) {
  for (int64_t v = 0; v < V; v += LANES) {
    const __mmask16 valid = first_lanes(V - v);
    const __m512i counts = _mm512_maskz_loadu_epi32(valid, r.counts + v);
    const __m512 y = load(x + v, valid);
    store(out + v, _mm512_test_epi32_mask(counts, counts) ? penalize(y, counts, r) : y, valid);
  }
  for (int64_t i = 0; i < r.n_drafted; i++) {
    const int64_t id = r.drafted[i];
    if (id < 0) continue;
    const int32_t count = r.counts[id] + 2 * std::count(r.drafted, r.drafted + r.n_drafted, id);
    store(out + id, penalize(_mm512_set1_ps(float(x[id])), _mm512_set1_epi32(count), r), 1);
  }
}

// ---------------------------------------------------------------- sampling: filters

// Computes the weights exp((x - max) / temperature) of logits x.
struct Weights {
  __m512 max, inverse;
  Weights(float max, float temperature)
      : max(_mm512_set1_ps(max)),
        inverse(_mm512_set1_ps(std::min(1 / temperature, std::numeric_limits<float>::max()))) {}
  __m512 log_of(__m512 x) const { return _mm512_mul_ps(_mm512_sub_ps(x, max), inverse); }
  __m512 of(__m512 x) const { return fast_exp(log_of(x)); }
};

// A subset of a row's tokens by ascending id; if ids is null, all tokens.
template <class T>
struct Tokens {
  const T* x;
  const int32_t* ids;
  int64_t n;

  __m512i ids_at(int64_t i) const {
    const __m512i lanes = lane_indices();
    return ids ? _mm512_maskz_loadu_epi32(first_lanes(n - i), ids + i) : _mm512_add_epi32(lanes, _mm512_set1_epi32(i));
  }
};

// Copies the tokens that keep(logits, valid lanes) selects to s.kept and s.ids; `tokens` may already lie there.
template <class T, class Keep>
Tokens<float> collect(Tokens<T> tokens, const Scratch& s, const Keep& keep) {
  int64_t n = 0;
  for (int64_t i = 0; i < tokens.n; i += LANES) {
    const __mmask16 valid = first_lanes(tokens.n - i);
    const __m512 x = load(tokens.x + i, valid);
    const __mmask16 kept = keep(x, valid);
    if (!kept) continue;
    const int count = __builtin_popcount(kept);
    const __m512i ids = tokens.ids_at(i);
    _mm512_mask_storeu_ps(s.kept + n, first_lanes(count), _mm512_maskz_compress_ps(kept, x));
    _mm512_mask_storeu_epi32(s.ids + n, first_lanes(count), _mm512_maskz_compress_epi32(kept, ids));
    n += count;
  }
  return {s.kept, s.ids, n};
}

// Maps floats to unsigned integers of the same order (-0.0 counts as 0.0), and back.
inline __m512i float_to_sortable(__m512 x) {
  const __m512i bits = _mm512_castps_si512(_mm512_add_ps(x, _mm512_setzero_ps()));
  return _mm512_xor_si512(bits, _mm512_or_si512(_mm512_srai_epi32(bits, 31), _mm512_set1_epi32(1 << 31)));
}

inline float sortable_to_float(uint32_t key) {
  const uint32_t bits = key >> 31 ? key ^ (1u << 31) : ~key;
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

void write_sort_keys(const float* x, int64_t n, uint32_t* sort_keys) {
  for (int64_t i = 0; i < n; i += LANES)
    _mm512_mask_storeu_epi32(sort_keys + i, first_lanes(n - i), float_to_sortable(load(x + i, first_lanes(n - i))));
}

// 16 weights as integers in units of 2^-40, so that their sums are exact; lanes 0..7 and lanes 8..15.
inline std::pair<__m512i, __m512i> fixed_point(__m512 weights) {
  const __m512 scaled = _mm512_mul_ps(weights, _mm512_set1_ps(0x1p40f));
  return {_mm512_cvttps_epi64(_mm512_castps512_ps256(scaled)), _mm512_cvttps_epi64(_mm512_extractf32x8_ps(scaled, 1))};
}

struct Threshold {
  float x;             // the lowest logit that is kept
  int64_t mass_above;  // the total mass of the logits above x
};

// The highest threshold at which the entries with a key at or above it have a total mass of at least `target`. Without
// masses each entry counts 1. All entries together must reach the target. Bisects the range of keys, and keeps only the
// entries inside the remaining range, so that each step is shorter than the one before. Overwrites both arrays.
Threshold find_threshold(int64_t target, uint32_t* sort_keys, int64_t* masses, int64_t n) {
  __m512i least = _mm512_set1_epi32(sort_keys[0]), most = least;
  for (int64_t i = 0; i < n; i += LANES) {
    const __m512i key = _mm512_loadu_si512(sort_keys + i);
    least = _mm512_mask_min_epu32(least, first_lanes(n - i), least, key);
    most = _mm512_mask_max_epu32(most, first_lanes(n - i), most, key);
  }
  uint32_t low = _mm512_reduce_min_epu32(least), high = _mm512_reduce_max_epu32(most);
  int64_t above = 0;
  while (low < high) {
    const uint32_t middle = low + (high - low) / 2 + 1;
    const __m512i bound = _mm512_set1_epi32(middle);
    __m512i sums = _mm512_setzero_si512();
    int64_t upper = 0;
    for (int64_t i = 0; i < n; i += LANES) {
      const __mmask16 in = _mm512_mask_cmpge_epu32_mask(first_lanes(n - i), _mm512_loadu_si512(sort_keys + i), bound);
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
      const __m512i key = _mm512_loadu_si512(sort_keys + i);
      const __mmask16 valid = first_lanes(n - i), in = _mm512_cmpge_epu32_mask(key, bound);
      const __mmask16 kept = valid & (up ? in : ~in);
      const int lower = __builtin_popcount(kept & 0xff), count = __builtin_popcount(kept);
      _mm512_storeu_si512(sort_keys + inside, _mm512_maskz_compress_epi32(kept, key));
      if (masses) {
        const __m512i a = _mm512_loadu_si512(masses + i), b = _mm512_loadu_si512(masses + i + 8);
        _mm512_storeu_si512(masses + inside, _mm512_maskz_compress_epi64(kept, a));
        _mm512_storeu_si512(masses + inside + lower, _mm512_maskz_compress_epi64(kept >> 8, b));
      }
      inside += count;
    }
    n = inside;
  }
  return {sortable_to_float(low), above};
}

// Keeps the tokens above the threshold, and the first `ties` of those that equal it.
Tokens<float> keep_above(Tokens<float> tokens, const Scratch& s, float threshold, int64_t ties) {
  return collect(tokens, s, [&, threshold = _mm512_set1_ps(threshold)](__m512 x, __mmask16 valid) -> __mmask16 {
    const __mmask16 equal = _mm512_mask_cmp_ps_mask(valid, x, threshold, _CMP_EQ_OQ);
    const int count = std::min<int64_t>(__builtin_popcount(equal), ties);
    ties -= count;
    return _mm512_mask_cmp_ps_mask(valid, x, threshold, _CMP_GT_OQ) | _pdep_u32((1u << count) - 1, equal);
  });
}

// The k-th largest of the row's maxima is a lower bound of the k-th largest logit: the cheap bound of this filter.
template <class T>
Tokens<float> keep_top_k(Tokens<T> tokens, const Scratch& s, int64_t k) {
  const int64_t lanes = (tokens.n + BLOCK_VECTORS * LANES - 1) / (BLOCK_VECTORS * LANES) * LANES;
  float least = -std::numeric_limits<float>::max();
  if (k < lanes) {
    write_sort_keys(s.maxima, lanes, s.sort_keys);
    least = std::max(least, find_threshold(k, s.sort_keys, nullptr, lanes).x);
  }
  auto kept = collect(tokens, s, [&](__m512 x, __mmask16 valid) {
    return _mm512_mask_cmp_ps_mask(valid, x, _mm512_set1_ps(least), _CMP_GE_OQ);
  });
  if (kept.n <= k) return kept;
  write_sort_keys(kept.x, kept.n, s.sort_keys);
  const Threshold threshold = find_threshold(k, s.sort_keys, nullptr, kept.n);
  return keep_above(kept, s, threshold.x, k - threshold.mass_above);
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
  // Tokens that weigh less than (total - target) / n have less than total - target together, so none of them is kept.
  const float least = std::max<int64_t>(1, (total - target) / tokens.n) * 0x1p-40f;
  const __m512 bound = _mm512_set1_ps(std::log(least) - 1e-4f);
  auto kept = collect(tokens, s, [&](__m512 x, __mmask16 valid) {
    return _mm512_mask_cmp_ps_mask(valid, weights.log_of(x), bound, _CMP_GE_OQ);
  });
  write_sort_keys(kept.x, kept.n, s.sort_keys);
  for (int64_t i = 0; i < kept.n; i += LANES) {
    const auto [low, high] = fixed_point(weights.of(load(kept.x + i, first_lanes(kept.n - i))));
    _mm512_storeu_si512(s.masses + i, low), _mm512_storeu_si512(s.masses + i + 8, high);
  }
  const Threshold threshold = find_threshold(target, s.sort_keys, s.masses, kept.n);
  const __m512i masses = fixed_point(weights.of(_mm512_set1_ps(threshold.x))).first;
  const int64_t each = _mm_cvtsi128_si64(_mm512_castsi512_si128(masses));  // the mass of a token at the threshold
  return keep_above(kept, s, threshold.x, (target - threshold.mass_above + each - 1) / each);
}

// Calls use(tokens) with the tokens that pass top-k and top-p.
template <class T, class Use>
void filter(const T* x, int64_t V, const RowSettings& r, const Scratch& s, const Weights& weights, const Use& use) {
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

// kernels.py's exponential_noise for one seed and position, in two steps: 32 random bits for each token id, and the
// Exponential(1) variate that they stand for.
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

// Draws a token: argmax(weight / Exponential(1)) is a sample from the normalized weights. Tokens whose weight is below
// min_p are left out; `likeliest`, the token of the largest weight, never is. The lowest id wins a tie.
//
// Since noise = -log(1 - u) >= u, a token can win only if u <= weight / best, where best is the largest ratio so far.
// Most tokens fail this test, before any logarithm is computed. The test replaces 2^32 weight / best = 2^y by an upper
// bound, 2^n (1 + y - n) with n = floor(y): the float whose bits are (y + 127) 2^23.
template <class T>
int64_t exponential_race(Tokens<T> tokens, const Weights& weights, float min_p, const Noise& noise, int64_t likeliest) {
  alignas(64) uint32_t bits[LANES];
  alignas(64) float xs[LANES];
  const __m512i bits_of_likeliest = noise.bits(_mm512_set1_epi32(likeliest));
  float best = 1 / Noise::exponential(_mm512_cvtsi512_si32(bits_of_likeliest));
  const float scale = LOG2E * 0x1p23f;
  const __m512 slope = _mm512_set1_ps(std::min(_mm512_cvtss_f32(weights.inverse) * scale, 3e38f));
  auto offset_of_best = [&] { return _mm512_set1_ps((127 + 32 + 1e-3f - std::log2(best)) * 0x1p23f); };
  const __m512i half = _mm512_castps_si512(_mm512_set1_ps(0.5f));  // the smallest possible value of 2^32 u
  __m512 offset = offset_of_best();
  for (int64_t i = 0; i < tokens.n; i += LANES) {
    const __mmask16 valid = first_lanes(tokens.n - i);
    const __m512 x = load(tokens.x + i, valid);
    const __m512i bound = _mm512_cvtps_epi32(_mm512_fmadd_ps(_mm512_sub_ps(x, weights.max), slope, offset));
    __mmask16 candidates = _mm512_mask_cmpge_epi32_mask(valid, bound, half);
    if (!candidates) continue;
    const __m512i ids = tokens.ids_at(i), random = noise.bits(ids);
    const __m512 u = _mm512_cvtepu32_ps(random);
    candidates = _mm512_mask_cmp_ps_mask(candidates, u, _mm512_castsi512_ps(bound), _CMP_LE_OQ);
    if (!candidates) continue;
    _mm512_store_si512(bits, random);
    _mm512_store_ps(xs, weights.of(x));
    for (; candidates; candidates &= candidates - 1) {
      const int lane = __builtin_ctz(candidates);
      const int64_t id = tokens.ids ? tokens.ids[i + lane] : i + lane;
      const float ratio = xs[lane] / Noise::exponential(bits[lane]);
      if (xs[lane] < min_p || !(ratio > best || (ratio == best && id < likeliest))) continue;
      best = ratio, likeliest = id, offset = offset_of_best();
    }
  }
  return likeliest;
}

// ---------------------------------------------------------------- sampling: rows

// Calls draw(logits, statistics) with the row after penalties; `raw` are the statistics before them.
template <class T, class Draw>
void with_penalties(const T* x, int64_t V, const RowSettings& r, const RowStatistics& raw, const Scratch& s,
                    const Draw& draw) {
  if (!r.penalizes()) return draw(x, raw);
  penalize_row(x, V, r, s.x);
  draw((const float*)s.x, row_statistics(s.x, V, s.maxima));
}

template <class T>
void sample_row(const T* x, int64_t V, const RowSettings& r, const Scratch& s, int64_t& id, float& logprob) {
  const RowStatistics raw = row_statistics(x, V, s.maxima);
  id = -1, logprob = NAN;
  with_penalties(x, V, r, raw, s, [&](const auto* x, const RowStatistics& top) {
    if (!top.finite) return;
    id = argmax(top.max, x, V, s.maxima);
    if (!(r.temperature > 0)) return;
    const Weights weights(top.max, r.temperature);
    filter(x, V, r, s, weights, [&](auto tokens) {
      id = exponential_race(tokens, weights, r.min_p, Noise(r.seed, r.position), id);
    });
  });
  if (id >= 0) logprob = (float(x[id]) - raw.max) - raw.log_sum;
}

template <class T>
void probabilities_row(const T* x, int64_t V, const RowSettings& r, const Scratch& s, float* out) {
  std::fill(out, out + V, 0.0f);
  with_penalties(x, V, r, row_statistics(x, V, s.maxima), s, [&](const auto* x, const RowStatistics& top) {
    if (!top.finite) return std::fill(out, out + V, NAN);
    if (!(r.temperature > 0)) return void(out[argmax(top.max, x, V, s.maxima)] = 1);
    const Weights weights(top.max, r.temperature);
    filter(x, V, r, s, weights, [&](auto tokens) {
      __m512d sums = _mm512_setzero_pd();
      for (int64_t i = 0; i < tokens.n; i += LANES) {
        const __mmask16 valid = first_lanes(tokens.n - i);
        __m512 w = weights.of(load(tokens.x + i, valid));
        w = _mm512_maskz_mov_ps(_mm512_mask_cmp_ps_mask(valid, w, _mm512_set1_ps(r.min_p), _CMP_GE_OQ), w);
        sums = _mm512_add_pd(sums, _mm512_cvtps_pd(_mm512_castps512_ps256(w)));
        sums = _mm512_add_pd(sums, _mm512_cvtps_pd(_mm512_extractf32x8_ps(w, 1)));
        _mm512_mask_i32scatter_ps(out, valid, tokens.ids_at(i), w, 4);
      }
      const float sum = _mm512_reduce_add_pd(sums);
      for (int64_t v = 0; v < V; v++) out[v] /= sum;
    });
  });
}

// ---------------------------------------------------------------- the operations

template <class Work>
void dispatch_dtype(const Tensor& x, const Work& work) {
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

// Checks that a tensor is contiguous and has this dtype and these sizes (-1: any size), and returns it.
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

// A linear layer of N outputs and K inputs. Weights without scales are (N,K) in x's dtype, with mins they are int4.
Linear checked_layer(const Tensor& weight, const MaybeTensor& scales, const MaybeTensor& mins, const MaybeTensor& bias,
                     at::ScalarType dtype, int64_t N, int64_t K, int64_t groupsize, bool exact) {
  Linear l{N, K, !scales ? 16 : mins ? 4 : 8, exact || dtype == at::kFloat, weight.const_data_ptr()};
  l.bias = checked(bias, "bias", dtype, {N}) ? bias->const_data_ptr() : nullptr;
  if (!scales && weight.dim() == 2) {
    checked(weight, "weight", dtype, {N, K});
    return l;
  }
  const int64_t Nb = (N + LANES - 1) / LANES;
  l.Kb = (K + GROUP - 1) / GROUP;
  if (!scales) {
    TORCH_CHECK(amx_allowed && dtype == at::kBFloat16, "packed bfloat16 weights need AMX and bfloat16 activations");
    TORCH_CHECK(N % LANES == 0 && K % GROUP == 0, "packed bfloat16 weights of ", N, " rows and ", K, " columns");
    checked(weight, "packed weight", dtype, {Nb, l.Kb, GROUP / 2, LANES, 2});
    return l;
  }
  TORCH_CHECK(groupsize >= K || (groupsize > 0 && groupsize % GROUP == 0), "groups of ", groupsize,
              " columns are no multiple of 32");
  l.groups_per_scale = groupsize >= K ? l.Kb : groupsize / GROUP;
  l.G = (l.Kb + l.groups_per_scale - 1) / l.groups_per_scale;
  checked(weight, "packed weight", at::kByte, {Nb, l.Kb, mins ? 4 : 8, LANES, 4});
  l.scales = checked(*scales, "scales", at::kHalf, {Nb, l.G, LANES}).const_data_ptr<half>();
  l.mins = data<half>(checked(mins, "mins", at::kHalf, {Nb, l.G, LANES}));
  return l;
}

Tensor empty_with_width(const Tensor& x, int64_t width) {
  auto sizes = x.sizes().vec();
  sizes.back() = width;
  return at::empty(sizes, x.options());
}

Tensor run_layer(const Tensor& x, const Linear& l) {
  const Tensor xs = x.contiguous(), out = empty_with_width(x, l.N);
  const int64_t M = l.K ? x.numel() / l.K : 0;
  dispatch_dtype(x, [&](auto type) {
    using T = decltype(type);
    const T* from = xs.const_data_ptr<T>();
    auto [in, memory] = allocate_together([&](Arena& arena) { return allocate_input(arena, l, from, M); });
    parallel(l.N * l.K * (l.bits == 16 ? 1 : M) < MIN_PARALLEL_WORK, [&, &in = in](const Team& team) {
      prepare_input_rows<T>(team, l, in, M);
      matmul<T>(team, l, in, M, nullptr, out.data_ptr<T>());
    });
  });
  return out;
}

Tensor linear(const Tensor& x, const Tensor& weight, const MaybeTensor& bias) {
  if (x.dim() > 2 && x.size(-2) > MAX_DECODE_TOKENS) return at::linear(x, weight, bias);  // prefill
  const Tensor w = weight.contiguous();
  return run_layer(x, checked_layer(w, {}, {}, bias, x.scalar_type(), w.size(0), x.size(-1), 0, true));
}

Tensor linear_bfloat16(const Tensor& x, const Tensor& weight, const MaybeTensor& bias, int64_t N) {
  return run_layer(x, checked_layer(weight, {}, {}, bias, x.scalar_type(), N, x.size(-1), 0, true));
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
  dispatch_dtype(x, [&](auto type) {
    using T = decltype(type);
    const T* from = xs.const_data_ptr<T>();
    T* to = out.data_ptr<T>();
    parallel(x.numel() < MIN_PARALLEL_WORK, [&](const Team& team) {
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

// Checks the arguments of attention; q and out are still missing in what it returns.
template <class T>
Attention<T> checked_attention(int64_t B, int64_t S, int64_t H, const Tensor& k_cache, const Tensor& v_cache,
                               const Tensor& input_pos, const MaybeTensor& rows, const MaybeTensor& slopes,
                               std::optional<int64_t> window) {
  checked(k_cache, "k_cache", c10::CppTypeToScalarType<T>::value, {-1, -1, -1, -1});
  checked(v_cache, "v_cache", k_cache.scalar_type(), k_cache.sizes());
  const int64_t R = k_cache.size(0), K = k_cache.size(1), slots = k_cache.size(2);
  TORCH_CHECK(K > 0 && H % K == 0, H, " query heads are no multiple of ", K, " key heads");
  TORCH_CHECK(slots < (1 << 30) && (rows || B <= R), "a cache of ", k_cache.sizes(), " for ", B, " rows");
  const int64_t* positions = checked(input_pos, "input_pos", at::kLong, {B, S}).const_data_ptr<int64_t>();
  const int64_t* row = data<int64_t>(checked(rows, "rows", at::kLong, {B}));
  checked(slopes, "slopes", at::kFloat, {H});
  for (int64_t i = 0; i < B * S; i++)
    TORCH_CHECK(positions[i] >= -1 && positions[i] < slots, "position ", positions[i], " of ", slots);
  for (int64_t i = 0; row && i < B; i++) TORCH_CHECK(row[i] >= 0 && row[i] < R, "row ", row[i], " of ", R);
  Attention<T> a{B, S, H, K, k_cache.size(3), slots};
  a.k = k_cache.const_data_ptr<T>(), a.v = v_cache.const_data_ptr<T>();
  a.positions = positions, a.rows = row, a.slopes = data<float>(slopes);
  a.window = std::min(window.value_or(slots), slots);
  return a;
}

Tensor attention(const Tensor& q, const Tensor& k_cache, const Tensor& v_cache, const Tensor& input_pos,
                 const MaybeTensor& rows, const MaybeTensor& slopes, std::optional<int64_t> window) {
  const Tensor qs = q.contiguous(), out = at::empty(q.sizes(), q.options());
  dispatch_dtype(q, [&](auto type) {
    using T = decltype(type);
    const Tensor at = input_pos.contiguous();
    auto a = checked_attention<T>(q.size(0), q.size(1), q.size(2), k_cache, v_cache, at, rows, slopes, window);
    TORCH_CHECK(q.size(3) == a.E, "queries of width ", q.size(3), ", keys of ", a.E);
    a.q = qs.const_data_ptr<T>(), a.q_stride = a.H * a.E, a.out = out.data_ptr<T>();
    const SplitPlan plan(a);
    auto [b, memory] = allocate_together([&](Arena& arena) {
      return std::make_pair(Workspace::allocate(arena, a), plan.allocate(arena, a));
    });
    parallel(a.B * a.S * a.H * a.E < MIN_PARALLEL_WORK / CHUNK, [&, &b = b](const Team& team) {
      run_attention(team, a, plan, b.first[team.thread], b.second);
    });
  });
  return out;
}

// The checked arguments of `sample` and `probabilities`; logits are (B,S,V). sampling.py describes them.
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

  RowSettings row_settings(int64_t b, int64_t place) const {
    const int64_t row = rows.const_data_ptr<int64_t>()[b], at = position.const_data_ptr<int64_t>()[b] + place;
    auto float_at = [&](int i) { return settings[i].const_data_ptr<float>()[row]; };
    auto int_at = [&](int i) { return settings[i].const_data_ptr<int64_t>()[row]; };
    const int32_t* counts = settings[8].const_data_ptr<int32_t>() + row * settings[8].size(1);
    const int64_t* tokens = drafted.const_data_ptr<int64_t>() + b * std::max<int64_t>(0, S - 1);
    return {int_at(0),   int_at(2),   at,          float_at(1), float_at(3), float_at(4),
            float_at(5), float_at(6), float_at(7), counts,      tokens,      place};
  }

  // Calls work(logits, settings, scratch, index in B * S) for every position that is not padding; threads share them.
  template <class Work>
  void for_each(const Work& work) const {
    std::vector<int64_t> places;
    for (int64_t i = 0; i < B * S; i++)
      if (!is_padding(i / S)) places.push_back(i);
    const int64_t n = places.size();
    const int threads = n <= 1 ? 1 : omp_get_max_threads();
    auto [scratch, memory] = allocate_together([&](Arena& arena) {
      std::vector<Scratch> all;
      for (int i = 0; i < threads; i++) all.push_back(Scratch::allocate(arena, V));
      return all;
    });
    dispatch_dtype(logits, [&](auto type) {
      const auto* x = logits.const_data_ptr<decltype(type)>();
      parallel(n <= 1 || n * V < MIN_PARALLEL_WORK, [&, &scratch = scratch](const Team& team) {
        team.split(n, 1, [&](int64_t i, int64_t end) {
          for (; i < end; i++) {
            const int64_t b = places[i] / S, s = places[i] % S;
            work(x + b * logits.stride(0) + s * logits.stride(1), row_settings(b, s), scratch[team.thread], places[i]);
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
  const Tensor logprobs = at::full({all.B, all.S}, NAN, temperature.options());
  auto *id = ids.data_ptr<int64_t>();
  auto *logprob = logprobs.data_ptr<float>();
  all.for_each([&](const auto* x, const RowSettings& r, const Scratch& s, int64_t i) {
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
  all.for_each([&](const auto* x, const RowSettings& r, const Scratch& s, int64_t i) {
    probabilities_row(x, all.V, r, s, out + i * all.V);
  });
  return probs;
}

std::mutex prepared_lock;
std::vector<std::shared_ptr<const PreparedBlock>> prepared_blocks;  // a handle is an index

// Returns a handle of a block for the operation `blocks`. weights: weight and bias of the two norms; q_norm and k_norm;
// weight, scales, mins and bias of qkv, of out, of up (or gate and up), and of down. sizes: H, K, E, F, and the
// groupsizes of these four layers.
int64_t prepare_block(const c10::List<MaybeTensor>& weights, at::IntArrayRef sizes, std::optional<int64_t> window,
                      double eps, bool gated, bool post_norm_residual, bool exact) {
  TORCH_CHECK(weights.size() == 22 && sizes.size() == 8, "22 weights and 8 sizes were expected");
  auto made = std::make_shared<PreparedBlock>();
  PreparedBlock& p = *made;
  auto& w = p.tensors;
  w.assign(weights.begin(), weights.end());
  for (int i : {0, 2, 6, 10, 14, 18}) TORCH_CHECK(w[i], "weight ", i, " is missing");
  p.dtype = w[0]->scalar_type(), p.D = w[0]->numel();
  p.H = sizes[0], p.K = sizes[1], p.E = sizes[2], p.F = sizes[3];
  p.window = window.value_or(std::numeric_limits<int64_t>::max());
  auto vector = [&](int i, int64_t size) {
    return checked(w[i], "weight of a norm", p.dtype, {size}) ? w[i]->const_data_ptr() : nullptr;
  };
  auto linear = [&](int i, int64_t N, int64_t columns) {
    const auto* t = &w[6 + 4 * i];
    return checked_layer(*t[0], t[1], t[2], t[3], p.dtype, N, columns, sizes[4 + i], exact);
  };
  p.qkv = linear(0, (p.H + 2 * p.K) * p.E, p.D), p.out = linear(1, p.D, p.H * p.E);
  p.up = linear(2, gated ? 2 * p.F : p.F, p.D), p.down = linear(3, p.D, p.F);
  for (int i = 0; i < 2; i++) p.attention_norm[i] = vector(i, p.D), p.mlp_norm[i] = vector(2 + i, p.D);
  p.q_norm = vector(4, p.E), p.k_norm = vector(5, p.E);
  p.eps = eps, p.gated = gated, p.post_norm_residual = post_norm_residual;
  const std::lock_guard lock(prepared_lock);
  prepared_blocks.push_back(std::move(made));
  return prepared_blocks.size() - 1;
}

void release_blocks(at::IntArrayRef handles) {
  const std::lock_guard lock(prepared_lock);
  for (int64_t i : handles) prepared_blocks.at(i).reset();
}

Tensor blocks(const Tensor& x, const Tensor& input_pos, const MaybeTensor& rows, const MaybeTensor& cos,
              const MaybeTensor& sin, const MaybeTensor& slopes, at::TensorList k_caches, at::TensorList v_caches,
              at::IntArrayRef handles) {
  TORCH_CHECK(x.dim() == 3 && k_caches.size() == handles.size() && v_caches.size() == handles.size(),
              "x (B,S,D) and two caches a block were expected");
  std::vector<std::shared_ptr<const PreparedBlock>> prepared;
  {
    const std::lock_guard lock(prepared_lock);
    for (int64_t i : handles) {
      TORCH_CHECK(i >= 0 && i < int64_t(prepared_blocks.size()) && prepared_blocks[i], "there is no block ", i);
      prepared.push_back(prepared_blocks[i]);
    }
  }
  const int64_t B = x.size(0), S = x.size(1), D = x.size(2);
  const Tensor xs = x.contiguous(), at = input_pos.contiguous(), result = at::empty(x.sizes(), x.options());
  dispatch_dtype(x, [&](auto type) {
    using T = decltype(type);
    std::vector<Block<T>> all;
    std::deque<SplitPlan> plans;  // one for consecutive blocks of the same window; a deque does not move its elements
    int64_t window = -1, work = 0;
    for (size_t i = 0; i < prepared.size(); i++) {
      const PreparedBlock& p = *prepared[i];
      auto a = checked_attention<T>(B, S, p.H, k_caches[i], v_caches[i], at, rows, slopes, p.window);
      TORCH_CHECK(p.dtype == x.scalar_type() && p.D == D && p.K == a.K && p.E == a.E, "block ", handles[i], " has D ",
                  p.D, ", K ", p.K, ", E ", p.E, " in ", p.dtype, ", not x ", x.sizes(), " in ", x.scalar_type(),
                  ", k_cache ", k_caches[i].sizes());
      if (p.window != window || a.slots != all.back().attention.slots) plans.emplace_back(a), window = p.window;
      Block<T> block{p, plans.back(), a, B * S};
      block.cos = data<float>(checked(cos, "cos", at::kFloat, {B, S, 1, p.E}));
      block.sin = data<float>(checked(sin, "sin", at::kFloat, {B, S, 1, p.E}));
      block.k = k_caches[i].data_ptr<T>(), block.v = v_caches[i].data_ptr<T>();
      block.x = i ? result.data_ptr<T>() : xs.const_data_ptr<T>(), block.result = result.data_ptr<T>();
      all.push_back(block);
      work += B * S * (p.qkv.N * D + p.out.K * D + p.up.N * D + p.F * D);
    }
    // All blocks use the same memory, since they run one after the other.
    auto allocate_blocks = [&](Arena from) {
      Arena furthest = from;
      for (auto& block : all) {
        Arena arena = from;
        block.allocate(arena);
        furthest.next = std::max(furthest.next, arena.next);
      }
      return furthest;
    };
    const auto [furthest, memory] = allocate_together([&](Arena& arena) { return arena = allocate_blocks(arena); });
    parallel(work < MIN_PARALLEL_WORK, [&](const Team& team) {
      for (const auto& block : all) block.run(team);
    });
  });
  return result;
}

// Row `id` of a table of any layout, such as an embedding.
template <class T>
void look_up(const Linear& table, int64_t id, T* out) {
  if (table.bits == 16 && !table.Kb) {
    std::copy_n((const T*)table.weight + id * table.K, table.K, out);
    return;
  }
  const int64_t first = id / LANES * table.Kb, lane = id % LANES;  // the first group of its block
  const uint8_t* bytes = (const uint8_t*)table.weight;
  for (int64_t k = 0; k < table.K; k++) {
    const int64_t group = first + k / GROUP, c = k % GROUP;
    if (table.bits == 16) {
      out[k] = ((const T*)table.weight)[((group * GROUP / 2 + c / 2) * LANES + lane) * 2 + c % 2];
      continue;
    }
    const int64_t at = (id / LANES * table.G + k / GROUP / table.groups_per_scale) * LANES + lane;
    if (table.bits == 8) {
      out[k] = (bytes[((group * 8 + c / 4) * LANES + lane) * 4 + c % 4] - 128) * float(table.scales[at]);
    } else {
      const uint8_t both = bytes[((group * 4 + c % 16 / 4) * LANES + lane) * 4 + c % 4];
      out[k] = (c < 16 ? both & 15 : both >> 4) * float(table.scales[at]) + float(table.mins[at]);
    }
  }
}

// The index of the first of the largest of n numbers.
template <class T>
int64_t first_maximum(const T* x, int64_t n) {
  __m512 most = minus_infinity();
  for (int64_t i = 0; i < n; i += LANES) most = _mm512_max_ps(most, load_or_minus_infinity(x + i, n - i));
  const __m512 largest = _mm512_set1_ps(_mm512_reduce_max_ps(most));
  for (int64_t i = 0; i < n; i += LANES) {
    const __mmask16 equal = _mm512_cmpeq_ps_mask(load_or_minus_infinity(x + i, n - i), largest) & first_lanes(n - i);
    if (equal) return i + std::countr_zero(uint32_t(equal));
  }
  return 0;  // all are NaN
}

// The likeliest k tokens (B,k) that Medusa heads (medusa.py) propose after tokens (B,), from hidden states (B,D), of
// the vocabulary ids (W,). weights: weight, scales and mins of the embedding; weight and scales of gate_up, of down,
// and of the output vectors. sizes: rows of the embedding, F, groupsize of the embedding, groupsize of the others.
Tensor medusa(const Tensor& states, const Tensor& tokens, const Tensor& ids, const c10::List<MaybeTensor>& weights,
              at::IntArrayRef sizes, int64_t k) {
  TORCH_CHECK(states.dim() == 2 && weights.size() == 9 && sizes.size() == 4, "9 weights and 4 sizes were expected");
  const int64_t B = states.size(0), D = states.size(1), V = sizes[0], F = sizes[1], W = ids.numel();
  const std::vector<MaybeTensor> w(weights.begin(), weights.end());
  for (int i : {0, 3, 5, 7}) TORCH_CHECK(w[i], "weight ", i, " is missing");
  const auto dtype = states.scalar_type();
  const Linear table = checked_layer(*w[0], w[1], w[2], {}, dtype, V, D, sizes[2], false);
  const Linear gate_up = checked_layer(*w[3], w[4], {}, {}, dtype, 2 * F, 2 * D, sizes[3], false);
  const Linear down = checked_layer(*w[5], w[6], {}, {}, dtype, D, F, sizes[3], false);
  const Linear output = checked_layer(*w[7], w[8], {}, {}, dtype, W, D, sizes[3], false);
  const Tensor drafted = at::empty({B, k}, tokens.options()), from = states.contiguous();
  const int64_t* first_tokens = checked(tokens, "tokens", at::kLong, {B}).const_data_ptr<int64_t>();
  const int64_t* id = checked(ids, "ids", at::kLong, {-1}).const_data_ptr<int64_t>();
  int64_t* to = drafted.data_ptr<int64_t>();
  dispatch_dtype(states, [&](auto type) {
    using T = decltype(type);
    struct Arrays {
      T *ones, *x, *up, *act, *state[2], *logits;  // (D,), (B,2D), (B,2F), (B,F), (B,D) each, (B,W)
      Input to_up, to_down, to_output[2];
    };
    const auto [arrays, memory] = allocate_together([&](Arena& arena) {
      Arrays a{arena.allocate<T>(D),
               arena.allocate<T>(B * 2 * D),
               arena.allocate<T>(B * 2 * F),
               arena.allocate<T>(B * F),
               {arena.allocate<T>(B * D), arena.allocate<T>(B * D)},
               arena.allocate<T>(B * W)};
      a.to_up = allocate_input(arena, gate_up, a.x, B), a.to_down = allocate_input(arena, down, a.act, B);
      for (int i : {0, 1}) a.to_output[i] = allocate_input(arena, output, a.state[i], B);
      return a;
    });
    const Arrays& a = arrays;
    std::fill_n(a.ones, D, T(1.0f));
    const float eps = std::numeric_limits<float>::epsilon();
    parallel(false, [&](const Team& team) {
      const T* state = from.const_data_ptr<T>();
      for (int64_t i = 0; i < k; i++) {
        auto by_rows = [&](const auto& work) {
          team.split(B, 1, [&](int64_t b, int64_t end) {
            for (; b < end; b++) work(b);
          });
          team.barrier();
        };
        by_rows([&](int64_t b) {
          T* x = a.x + b * 2 * D;
          rms_norm_row(state + b * D, a.ones, x, D, eps);
          look_up(table, std::clamp<int64_t>(i ? to[b * k + i - 1] : first_tokens[b], 0, V - 1), x + D);
          rms_norm_row(x + D, a.ones, x + D, D, eps);
          prepare_input<T>(gate_up, a.to_up, b, 0, gate_up.Kb);
        });
        matmul<T>(team, gate_up, a.to_up, B, nullptr, a.up), team.barrier();
        by_rows([&](int64_t b) {
          for (int64_t f = 0; f < F; f += LANES) {
            const __mmask16 valid = first_lanes(F - f);
            const __m512 gate = load(a.up + b * 2 * F + f, valid), up = load(a.up + b * 2 * F + F + f, valid);
            const __m512 e = fast_exp(_mm512_sub_ps(_mm512_setzero_ps(), gate));
            const __m512 silu = _mm512_div_ps(gate, _mm512_add_ps(_mm512_set1_ps(1.0f), e));
            store(a.act + b * F + f, _mm512_mul_ps(silu, up), valid);
          }
          prepare_input<T>(down, a.to_down, b, 0, down.Kb);
        });
        T* next = a.state[i % 2];
        matmul<T>(team, down, a.to_down, B, state, next), team.barrier();
        state = next;
        prepare_input_rows<T>(team, output, a.to_output[i % 2], B);
        matmul<T>(team, output, a.to_output[i % 2], B, nullptr, a.logits), team.barrier();
        by_rows([&](int64_t b) { to[b * k + i] = id[first_maximum(a.logits + b * W, W)]; });
      }
    });
  });
  return drafted;
}

// Returns whether AMX is used from now on: whether it is allowed and this library was compiled for it.
bool allow_amx(bool allowed) {
#ifdef HAS_AMX
  return amx_allowed = allowed;
#else
  return false;
#endif
}

}  // namespace

// kernels.py and sampling.py declare the schemas of these operations.
TORCH_LIBRARY_IMPL(fastpath, CPU, m) {
  m.impl("linear", &linear);
  m.impl("linear_bfloat16", &linear_bfloat16);
  m.impl("linear_int8", &linear_int8);
  m.impl("linear_int4", &linear_int4);
  m.impl("rms_norm", &rms_norm);
  m.impl("layer_norm", &layer_norm);
  m.impl("attention", &attention);
  m.impl("sample", &sample);
  m.impl("probabilities", &probabilities);
  m.impl("blocks", &blocks);
  m.impl("prepare_block", &prepare_block);
  m.impl("medusa", &medusa);
}

TORCH_LIBRARY_IMPL(fastpath, CompositeImplicitAutograd, m) {
  // These have no tensor whose device could be dispatched on.
  m.impl("release_blocks", &release_blocks);
  m.impl("allow_amx", &allow_amx);
}
