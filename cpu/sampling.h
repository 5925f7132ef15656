// Sampling, one row of logits at a time. sampling.py has the references.
//
// Weights are exp((x - max) / temperature) and are never normalized. A row is read once for its maximum and
// log-sum-exp, and once or twice more if a token is drawn from it. A filter first goes over the whole row with a cheap
// bound, and copies the tokens that may pass it to a short list; the exact filter, and all that follows, work on this
// list.

#pragma once

#include <ATen/ops/full.h>

#include <cmath>
#include <vector>

#include "checks.h"

namespace fastpath {

constexpr int BLOCK_VECTORS = 16;  // vectors in a block of logits; row_statistics stores the maxima of each block
inline __m512 minus_infinity() { return _mm512_set1_ps(-INF); }

// 16 logits from p; lanes from `left` on are -infinity.
template <class T>
inline __m512 load_or_minus_infinity(const T* p, int64_t left) {
  return left >= LANES ? load(p) : _mm512_mask_mov_ps(minus_infinity(), first_lanes(left), load(p, left));
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
    store(maxima, here), maxima += LANES;
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
    const __m512 y = load(x + v, V - v);
    store(out + v, _mm512_test_epi32_mask(counts, counts) ? penalize(y, counts, r) : y, V - v);
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
    const __m512i all = (__m512i)(lane_indices() + ints(i));
    return ids ? _mm512_maskz_loadu_epi32(first_lanes(n - i), ids + i) : all;
  }
};

// Copies the tokens that keep(logits, valid lanes) selects to s.kept and s.ids; `tokens` may already lie there.
template <class T, class Keep>
Tokens<float> collect(Tokens<T> tokens, const Scratch& s, const Keep& keep) {
  int64_t n = 0;
  for (int64_t i = 0; i < tokens.n; i += LANES) {
    const __mmask16 valid = first_lanes(tokens.n - i);
    const __m512 x = load(tokens.x + i, tokens.n - i);
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
    _mm512_mask_storeu_epi32(sort_keys + i, first_lanes(n - i), float_to_sortable(load(x + i, n - i)));
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
    const auto [low, high] = fixed_point(weights.of(load(kept.x + i, kept.n - i)));
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
    const __m512 x = load(tokens.x + i, tokens.n - i);
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
        __m512 w = weights.of(load(tokens.x + i, tokens.n - i));
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

// The arguments of `sample` and `probabilities` in the order of their schema in sampling.py. Everything below uses their
// names. register_kernels compares the names with those of the schema.
#define SAMPLING_NAMES                                                                                      \
  logits, rows, position, drafted, seed, temperature, top_k, top_p, min_p, repetition_penalty,              \
      frequency_penalty, presence_penalty, counts
#define SAMPLING_ARGUMENTS                                                                                  \
  const Tensor &logits, const Tensor &rows, const Tensor &position, const Tensor &drafted,                  \
      const Tensor &seed, const Tensor &temperature, const Tensor &top_k, const Tensor &top_p,              \
      const Tensor &min_p, const Tensor &repetition_penalty, const Tensor &frequency_penalty,               \
      const Tensor &presence_penalty, const Tensor &counts

// These arguments after checks, and B, S and V of the logits (B,S,V).
struct Sampling {
  Tensor logits, rows, position, drafted, seed, temperature, top_k, top_p, min_p;
  Tensor repetition_penalty, frequency_penalty, presence_penalty, counts;
  int64_t B, S, V;

  explicit Sampling(SAMPLING_ARGUMENTS)
      : logits(logits.stride(-1) == 1 ? logits : logits.contiguous()), rows(rows.contiguous()),
        position(position.contiguous()), drafted(drafted.contiguous()), seed(seed), temperature(temperature),
        top_k(top_k), top_p(top_p), min_p(min_p), repetition_penalty(repetition_penalty),
        frequency_penalty(frequency_penalty), presence_penalty(presence_penalty), counts(counts) {
    const auto sizes = logits.sizes();
    TORCH_CHECK(sizes.size() == 3 && sizes[2] > 0 && sizes[2] < INT32_MAX, "logits (B,S,V) expected, got ", sizes);
    B = sizes[0], S = sizes[1], V = sizes[2];
    checked(this->rows, "rows", at::kLong, {B}), checked(this->position, "position", at::kLong, {B});
    checked(this->drafted, "drafted", at::kLong, {B, -1});
    TORCH_CHECK(this->drafted.size(1) >= S - 1, this->drafted.size(1), " drafted tokens for ", S, " positions");
    const int64_t R = seed.numel();
    checked(seed, "seed", at::kLong, {R}), checked(temperature, "temperature", at::kFloat, {R});
    checked(top_k, "top_k", at::kLong, {R}), checked(top_p, "top_p", at::kFloat, {R});
    checked(min_p, "min_p", at::kFloat, {R});
    checked(repetition_penalty, "repetition_penalty", at::kFloat, {R});
    checked(frequency_penalty, "frequency_penalty", at::kFloat, {R});
    checked(presence_penalty, "presence_penalty", at::kFloat, {R});
    checked(counts, "counts", at::kInt, {R, -1});
    TORCH_CHECK(counts.size(1) >= V, "counts of ", counts.size(1), " tokens for logits of ", V);
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
    const int64_t row = rows.const_data_ptr<int64_t>()[b], n = drafted.size(1);
    auto float_of = [&](const Tensor& setting) { return setting.const_data_ptr<float>()[row]; };
    auto int_of = [&](const Tensor& setting) { return setting.const_data_ptr<int64_t>()[row]; };
    RowSettings r;
    r.seed = int_of(seed), r.top_k = int_of(top_k);
    r.position = position.const_data_ptr<int64_t>()[b] + place;
    r.temperature = float_of(temperature), r.top_p = float_of(top_p), r.min_p = float_of(min_p);
    r.repetition = float_of(repetition_penalty), r.frequency = float_of(frequency_penalty);
    r.presence = float_of(presence_penalty);
    r.counts = counts.const_data_ptr<int32_t>() + row * counts.size(1);
    r.drafted = drafted.const_data_ptr<int64_t>() + b * n, r.n_drafted = std::max<int64_t>(0, n - S + 1 + place);
    return r;
  }

  // Calls work(logits, settings, scratch, index in B * S) for every position that is not padding; threads share them.
  template <class Work>
  void for_each(const Work& work) const {
    std::vector<int64_t> places;
    for (int64_t i = 0; i < B * S; i++)
      if (!is_padding(i / S)) places.push_back(i);
    const int64_t n = places.size();
    const int threads = n <= 1 ? 1 : omp_get_max_threads();
    auto allocated = allocate_together([&](Arena& arena) {
      std::vector<Scratch> all;
      for (int i = 0; i < threads; i++) all.push_back(Scratch::allocate(arena, V));
      return all;
    });
    std::vector<Scratch>& scratch = allocated.first;
    dispatch_dtype(logits, [&](auto type) {
      const auto* x = logits.const_data_ptr<decltype(type)>();
      parallel(n <= 1 || n * V < MIN_PARALLEL_WORK, [&](const Team& team) {
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

std::tuple<Tensor, Tensor> sample(SAMPLING_ARGUMENTS) {
  const Sampling all(SAMPLING_NAMES);
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
  const Sampling all(SAMPLING_NAMES);
  const Tensor probs = at::empty({all.B, all.S, all.V}, temperature.options());
  float* out = probs.data_ptr<float>();
  for (int64_t b = 0; b < all.B; b++)
    if (all.is_padding(b)) std::fill(out + b * all.S * all.V, out + (b + 1) * all.S * all.V, 0.0f);
  all.for_each([&](const auto* x, const RowSettings& r, const Scratch& s, int64_t i) {
    probabilities_row(x, all.V, r, s, out + i * all.V);
  });
  return probs;
}

}  // namespace fastpath
