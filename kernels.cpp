// The CPU kernels: products of a few rows with bfloat16, 8-bit and 4-bit weights, and norms, at the speed of memory.
//
// kernels_cpu.py builds this file, packs the weights and declares the operations; kernels.py says what they compute.
// Needs AVX-512 (F, BW, DQ, VL, VNNI, BF16).
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
#include <limits>
#include <optional>
#include <type_traits>

namespace {

using at::Tensor;
using bf16 = at::BFloat16;
using half = at::Half;

constexpr int LANES = 16;      // 32-bit numbers in a register
constexpr int GROUP = 32;      // columns that share an activation scale
constexpr int SMALL_S = 16;    // new tokens up to which a product is bound by reading its weights
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

// Calls work(begin, end) on parts of 0..n, in as many threads as torch has, each part a multiple of `grain` long.
template <class Work>
void parallel(int64_t n, int64_t grain, bool alone, const Work& work) {
  const int64_t pieces = (n + grain - 1) / grain;
  const int threads = alone || omp_in_parallel() ? 1 : std::min<int64_t>(omp_get_max_threads(), pieces);
  if (threads <= 1) return work(int64_t(0), n);
#pragma omp parallel num_threads(threads)
  {
    const int64_t t = omp_get_thread_num(), all = omp_get_num_threads();
    const int64_t begin = pieces * t / all * grain, end = std::min(n, pieces * (t + 1) / all * grain);
    if (begin < end) work(begin, end);
  }
}

// ---------------------------------------------------------------- linear: weights as they are, (N,K) by rows

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

// NT rows of w times MT rows of x. Each of the products has a register of its own, whose lanes are summed at the end.
template <class T, int NT, int MT>
inline void linear_tile(const T* w, const T* x, const T* bias, T* out, int64_t N, int64_t K) {
  using S = Step<T>;
  __m512 acc[NT][MT];
  for (auto& row : acc) std::fill(row, row + MT, _mm512_setzero_ps());
  auto step = [&](int64_t k, int64_t left) {
    typename S::Vector xs[MT];
#pragma GCC unroll 8
    for (int m = 0; m < MT; m++) xs[m] = S::take(x + m * K + k, left);
#pragma GCC unroll 8
    for (int n = 0; n < NT; n++) {
      _mm_prefetch((const char*)(w + n * K + k) + AHEAD, _MM_HINT_T0);
      const auto row = S::take(w + n * K + k, left);
#pragma GCC unroll 8
      for (int m = 0; m < MT; m++) acc[n][m] = S::add(acc[n][m], row, xs[m]);
    }
  };
  int64_t k = 0;
  for (; k + S::WIDTH <= K; k += S::WIDTH) step(k, S::WIDTH);
  if (k < K) step(k, K - k);
  for (int n = 0; n < NT; n++)
    for (int m = 0; m < MT; m++)
      out[m * N + n] = T(_mm512_reduce_add_ps(acc[n][m]) + (bias ? float(bias[n]) : 0.0f));
}

template <class T, int NT>
void linear_rows(const T* w, const T* x, const T* bias, T* out, int64_t M, int64_t N, int64_t K) {
  int64_t m = 0;
  for (; m + 4 <= M; m += 4) linear_tile<T, NT, 4>(w, x + m * K, bias, out + m * N, N, K);
  if (M - m == 3) linear_tile<T, NT, 3>(w, x + m * K, bias, out + m * N, N, K);
  if (M - m == 2) linear_tile<T, NT, 2>(w, x + m * K, bias, out + m * N, N, K);
  if (M - m == 1) linear_tile<T, NT, 1>(w, x + m * K, bias, out + m * N, N, K);
}

template <class T>
void linear_small(const T* w, const T* x, const T* bias, T* out, int64_t M, int64_t N, int64_t K) {
  parallel(N, 4, N * K < ALONE, [&](int64_t begin, int64_t end) {
    int64_t n = begin;
    auto at = [&](auto* p) { return p ? p + n : nullptr; };
    // For one row of x each row of w by itself: one stream of memory is faster than several.
    for (; M > 1 && n + 4 <= end; n += 4) linear_rows<T, 4>(w + n * K, x, at(bias), out + n, M, N, K);
    for (; n < end; n++) linear_rows<T, 1>(w + n * K, x, at(bias), out + n, M, N, K);
  });
}

// ---------------------------------------------------------------- linear_int8, linear_int4: packed weights
//
// Blocks of 16 rows of the matrix, one a lane, by groups of 32 columns: K is filled up to Kb groups, N to Nb blocks.
//   int8  (Nb,Kb,8,16,4) uint8: q + 128 of columns 4j..4j+3 of each row, which is what the 8-bit product wants
//   int4  (Nb,Kb,4,16,4) uint8: columns 4j..4j+3 in the low nibbles, 16+4j..16+4j+3 in the high ones
//   scales and for int4 mins (Nb,G,16) float16
// An activation group of 32 shares a scale as well, so that sums of products are exact in int32 within a group; or with
// exact activations everything is float32.

struct Packed {
  const uint8_t* weight;
  const half* scales;
  const half* mins;  // null: int8
  int64_t Kb, G, per_group;  // per_group: groups of 32 columns that share a scale
  int64_t block_bytes() const { return Kb * (mins ? 256 : 512); }
};

// Rows of x as the products read them.
struct Quantized {
  const int8_t* q;    // (M,Kb,32)
  const float* scale;  // (M,Kb)
  const int32_t* sum;  // (M,Kb) of q
};

template <class T>
void quantize_row(const T* x, int64_t K, int64_t Kb, int8_t* q, float* scale, int32_t* sum) {
  for (int64_t b = 0; b < Kb; b++, x += GROUP, K -= GROUP, q += GROUP) {
    const __m512 lo = load(x, first(K)), hi = load(x + LANES, first(K - LANES));
    const float most = _mm512_reduce_max_ps(_mm512_max_ps(_mm512_abs_ps(lo), _mm512_abs_ps(hi)));
    constexpr int NOT_FINITE = 0x99;  // quiet and signalling NaN, both infinities
    const bool finite = !(_mm512_fpclass_ps_mask(lo, NOT_FINITE) | _mm512_fpclass_ps_mask(hi, NOT_FINITE));
    const bool tiny = most < 1e-30f;  // its inverse would overflow
    scale[b] = !finite ? std::numeric_limits<float>::quiet_NaN() : tiny ? 0.0f : most / 127;
    const __m512 inverse = _mm512_set1_ps(!finite || tiny ? 0.0f : 127 / most);
    const __m512i a = _mm512_cvtps_epi32(_mm512_maskz_mul_ps(finite ? 0xffff : 0, lo, inverse));
    const __m512i c = _mm512_cvtps_epi32(_mm512_maskz_mul_ps(finite ? 0xffff : 0, hi, inverse));
    _mm_storeu_si128((__m128i*)q, _mm512_cvtepi32_epi8(a));
    _mm_storeu_si128((__m128i*)(q + LANES), _mm512_cvtepi32_epi8(c));
    sum[b] = _mm512_reduce_add_epi32(_mm512_add_epi32(a, c));
  }
}

inline __m512i four_columns(const int8_t* q) {
  int32_t bytes;
  std::memcpy(&bytes, q, 4);
  return _mm512_set1_epi32(bytes);
}

// One block of 16 rows times MT rows of x quantized to 8 bits.
template <int MT, bool INT4>
inline void block_times_quantized(const Packed& p, int64_t block, const Quantized& x, int64_t m0, __m512 (&acc)[MT]) {
  const uint8_t* w = p.weight + block * p.block_bytes();
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
      dot[m] = INT4 ? _mm512_setzero_si512() : _mm512_set1_epi32(-128 * x.sum[at]);
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
      if constexpr (INT4) acc[m] = _mm512_fmadd_ps(min, _mm512_set1_ps(x.scale[at] * x.sum[at]), acc[m]);
    }
    if (--left == 0) g++, left = p.per_group;
  }
}

// The same with x (M,Kb*32) in float32: each weight is unpacked in a register, for all rows of x at once.
template <int MT, bool INT4>
inline void block_times_exact(const Packed& p, int64_t block, const float* x, int64_t m0, __m512 (&acc)[MT]) {
  const uint8_t* w = p.weight + block * p.block_bytes();
  const half *scales = p.scales + block * p.G * LANES, *mins = INT4 ? p.mins + block * p.G * LANES : nullptr;
  const __m512i low = _mm512_set1_epi32(15), sign = _mm512_set1_epi8(-128);
  const int64_t K = p.Kb * GROUP;
  __m512 other[MT];  // two sums, so that one addition need not wait for the last
  std::fill(acc, acc + MT, _mm512_setzero_ps());
  std::fill(other, other + MT, _mm512_setzero_ps());
  for (int64_t b = 0, g = 0, left = p.per_group; b < p.Kb; b++) {
    const __m512 scale = load(scales + g * LANES);
    const __m512 min = INT4 ? load(mins + g * LANES) : _mm512_setzero_ps();
    const float* column = x + m0 * K + b * GROUP;
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

template <int MT, bool INT4, class T, class X>
inline void packed_tile(const Packed& p, int64_t block, const X& x, int64_t m0, const T* bias, T* out, int64_t N) {
  __m512 acc[MT];
  if constexpr (std::is_same_v<X, Quantized>)
    block_times_quantized<MT, INT4>(p, block, x, m0, acc);
  else
    block_times_exact<MT, INT4>(p, block, x, m0, acc);
  const int64_t n = block * LANES;
  const __mmask16 there = first(N - n);
  for (int m = 0; m < MT; m++) {
    if (bias) acc[m] = _mm512_add_ps(acc[m], load(bias + n, there));
    store(out + (m0 + m) * N + n, acc[m], there);
  }
}

template <bool INT4, class T, class X>
void packed_product(const Packed& p, const X& x, const T* bias, T* out, int64_t M, int64_t N) {
  constexpr int TILE = 8;  // rows of x that share a load of weights
  const int64_t blocks = (N + LANES - 1) / LANES;
  const int64_t rows = std::min<int64_t>(M, 256);  // of x at a time, which stay in the cache for all blocks
  for (int64_t start = 0; start < M; start += rows) {
    const int64_t stop = std::min(M, start + rows);
    parallel(blocks, 1, N * p.Kb * GROUP * (stop - start) < ALONE, [&](int64_t begin, int64_t end) {
      for (int64_t block = begin; block < end; block++) {
        int64_t m = start;
        for (; m + TILE <= stop; m += TILE) packed_tile<TILE, INT4>(p, block, x, m, bias, out, N);
        if (stop - m >= 4) packed_tile<4, INT4>(p, block, x, m, bias, out, N), m += 4;
        if (stop - m >= 2) packed_tile<2, INT4>(p, block, x, m, bias, out, N), m += 2;
        if (stop - m >= 1) packed_tile<1, INT4>(p, block, x, m, bias, out, N);
      }
    });
  }
}

template <class T>
void packed_linear(const Packed& p, const T* x, const T* bias, T* out, int64_t M, int64_t N, int64_t K, bool exact) {
  const int64_t Kp = p.Kb * GROUP;
  const bool alone = M * K < ALONE;
  const Tensor scratch = at::empty({exact ? 4 * M * Kp : M * (Kp + 8 * p.Kb)}, at::kByte);
  uint8_t* at = scratch.data_ptr<uint8_t>();
  if (exact) {
    float* wide = reinterpret_cast<float*>(at);  // (M,Kp)
    parallel(M, 1, alone, [&](int64_t begin, int64_t end) {
      for (int64_t m = begin; m < end; m++)
        for (int64_t k = 0; k < Kp; k += LANES) store(wide + m * Kp + k, load(x + m * K + k, first(K - k)), 0xffff);
    });
    return p.mins ? packed_product<true, T, const float*>(p, wide, bias, out, M, N)
                  : packed_product<false, T, const float*>(p, wide, bias, out, M, N);
  }
  float* scale = reinterpret_cast<float*>(at);
  int32_t* sum = reinterpret_cast<int32_t*>(scale + M * p.Kb);
  int8_t* q = reinterpret_cast<int8_t*>(sum + M * p.Kb);
  parallel(M, 1, alone, [&](int64_t begin, int64_t end) {
    for (int64_t m = begin; m < end; m++)
      quantize_row(x + m * K, K, p.Kb, q + m * Kp, scale + m * p.Kb, sum + m * p.Kb);
  });
  const Quantized quantized{q, scale, sum};
  return p.mins ? packed_product<true>(p, quantized, bias, out, M, N)
                : packed_product<false>(p, quantized, bias, out, M, N);
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

// ---------------------------------------------------------------- the operations

template <class Work>
void by_dtype(const Tensor& x, const Work& work) {
  if (x.scalar_type() == at::kBFloat16) return work(bf16());
  if (x.scalar_type() == at::kHalf) return work(half());
  TORCH_CHECK(x.scalar_type() == at::kFloat, "expected bfloat16, float16 or float32, got ", x.scalar_type());
  work(float());
}

Tensor empty_like_with(const Tensor& x, int64_t width) {
  auto sizes = x.sizes().vec();
  sizes.back() = width;
  return at::empty(sizes, x.options());
}

template <class T>
const T* data(const std::optional<Tensor>& t) {
  return t ? t->const_data_ptr<T>() : nullptr;
}

std::optional<Tensor> checked(const std::optional<Tensor>& t, const Tensor& x, int64_t size) {
  if (!t) return t;
  TORCH_CHECK(t->scalar_type() == x.scalar_type() && t->dim() == 1 && t->size(0) == size, "a vector of ", size, " in ",
              x.scalar_type(), " was expected, got ", t->sizes(), " in ", t->scalar_type());
  return t->contiguous();
}

Tensor linear(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias) {
  if (x.dim() > 2 && x.size(-2) > SMALL_S) return at::linear(x, weight, bias);  // bound by arithmetic
  const int64_t N = weight.size(0), K = weight.size(1);
  TORCH_CHECK(x.size(-1) == K && weight.scalar_type() == x.scalar_type(), "linear: x is ", x.sizes(), " in ",
              x.scalar_type(), ", weight ", weight.sizes(), " in ", weight.scalar_type());
  const Tensor xs = x.contiguous(), w = weight.contiguous(), out = empty_like_with(x, N);
  const auto b = checked(bias, x, N);
  by_dtype(x, [&](auto type) {
    using T = decltype(type);
    linear_small(w.const_data_ptr<T>(), xs.const_data_ptr<T>(), data<T>(b), out.data_ptr<T>(), x.numel() / K, N, K);
  });
  return out;
}

Tensor linear_packed(const Tensor& x, const Tensor& weight, const Tensor& scales, const std::optional<Tensor>& mins,
                     int64_t groupsize, const std::optional<Tensor>& bias, int64_t N, bool exact) {
  const int64_t K = x.size(-1), Kb = (K + GROUP - 1) / GROUP, Nb = (N + LANES - 1) / LANES, G = scales.size(1);
  const int64_t bytes = mins ? 256 : 512;
  TORCH_CHECK(weight.numel() == Nb * Kb * bytes && weight.scalar_type() == at::kByte && weight.is_contiguous(),
              "packed weights of ", N, " rows and ", K, " columns were expected, got ", weight.sizes());
  for (const Tensor* t : {&scales, mins ? &*mins : &scales})
    TORCH_CHECK(t->dim() == 3 && t->size(0) == Nb && t->size(1) == G && t->size(2) == LANES && t->is_contiguous() &&
                    t->scalar_type() == at::kHalf, "packed scales are ", t->sizes(), " in ", t->scalar_type());
  TORCH_CHECK(groupsize >= K || groupsize % GROUP == 0, "groups of ", groupsize, " columns are no multiple of 32");
  const int64_t per_group = groupsize >= K ? Kb : groupsize / GROUP;
  TORCH_CHECK((Kb + per_group - 1) / per_group == G, "groups of ", groupsize, " of ", K, " columns are not ", G);
  const Tensor xs = x.contiguous(), out = empty_like_with(x, N);
  const auto b = checked(bias, x, N);
  const Packed packed{weight.const_data_ptr<uint8_t>(), scales.const_data_ptr<half>(), data<half>(mins),
                      Kb, G, per_group};
  by_dtype(x, [&](auto type) {
    using T = decltype(type);
    const bool in_full = exact || std::is_same_v<T, float>;
    packed_linear(packed, xs.const_data_ptr<T>(), data<T>(b), out.data_ptr<T>(), x.numel() / K, N, K, in_full);
  });
  return out;
}

Tensor linear_int8(const Tensor& x, const Tensor& weight, const Tensor& scales, int64_t groupsize,
                   const std::optional<Tensor>& bias, int64_t N, bool exact) {
  return linear_packed(x, weight, scales, std::nullopt, groupsize, bias, N, exact);
}

Tensor linear_int4(const Tensor& x, const Tensor& weight, const Tensor& scales, const Tensor& mins, int64_t groupsize,
                   const std::optional<Tensor>& bias, int64_t N, bool exact) {
  return linear_packed(x, weight, scales, mins, groupsize, bias, N, exact);
}

template <class Row>
Tensor norm(const Tensor& x, const Row& row) {
  const int64_t D = x.size(-1);
  const Tensor xs = x.contiguous(), out = at::empty(x.sizes(), x.options());
  by_dtype(x, [&](auto type) {
    using T = decltype(type);
    const T* from = xs.const_data_ptr<T>();
    T* to = out.data_ptr<T>();
    parallel(D ? x.numel() / D : 0, 1, x.numel() < ALONE, [&](int64_t begin, int64_t end) {
      for (int64_t m = begin; m < end; m++) row(from + m * D, to + m * D, D);
    });
  });
  return out;
}

Tensor rms_norm(const Tensor& x, const Tensor& weight, double eps) {
  const Tensor w = *checked(weight, x, x.size(-1));
  return norm(x, [&]<class T>(const T* from, T* to, int64_t D) {
    rms_norm_row(from, w.const_data_ptr<T>(), to, D, float(eps));
  });
}

Tensor layer_norm(const Tensor& x, const Tensor& weight, const Tensor& bias, double eps) {
  const Tensor w = *checked(weight, x, x.size(-1)), b = *checked(bias, x, x.size(-1));
  return norm(x, [&]<class T>(const T* from, T* to, int64_t D) {
    layer_norm_row(from, w.const_data_ptr<T>(), b.const_data_ptr<T>(), to, D, float(eps));
  });
}

}  // namespace

TORCH_LIBRARY(fastpath, m) {
  m.def("linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor");
  m.def("linear_int8(Tensor x, Tensor weight, Tensor scales, int groupsize, Tensor? bias, int N, bool exact) -> Tensor");
  m.def("linear_int4(Tensor x, Tensor weight, Tensor scales, Tensor mins, int groupsize, Tensor? bias, int N, bool exact)"
        " -> Tensor");
  m.def("rms_norm(Tensor x, Tensor weight, float eps) -> Tensor");
  m.def("layer_norm(Tensor x, Tensor weight, Tensor bias, float eps) -> Tensor");
}

TORCH_LIBRARY_IMPL(fastpath, CPU, m) {
  m.impl("linear", &linear);
  m.impl("linear_int8", &linear_int8);
  m.impl("linear_int4", &linear_int4);
  m.impl("rms_norm", &rms_norm);
  m.impl("layer_norm", &layer_norm);
}
