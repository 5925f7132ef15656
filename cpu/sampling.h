// Sampling, one row of logits at a time. sampling.py has the references.
//
// The weight of a token is exp((x - max) / temperature); weights are never normalized. A row is read once for its
// maximum and log-sum-exp, and once or twice more if a token is drawn from it. A filter (top-k, top-p) first goes over
// the whole row with a cheap bound, and copies the tokens that may pass to a short list. The exact filter, and
// everything after it, works on this list.

#pragma once

#include <ATen/ops/full.h>

#include <bit>
#include <cmath>
#include <vector>

#include "checks.h"

namespace fastpath {

constexpr int BLOCK_VECTORS = 16;  // vectors in a block of logits; row_statistics stores the maxima of each block

// 16 logits from p; lanes from `left` on are -infinity.
template <class T>
inline f32x16 load_or_minus_infinity(const T* p, int64_t left) {
  return left >= LANES ? load(p) : where(first_lanes(left), load(p, left), floats(-INF));
}

// 2^x for x <= 0 with a relative error of 1e-7, in fewer instructions than fast_exp. NaN stays NaN.
inline f32x16 fast_exp2(f32x16 x) {
  x = max(floats(-150.0f), x);  // 0 below
  const f32x16 n = floor(x);
  const f32x16 f = x - n;
  f32x16 y = floats(0.00187757661f);
  for (float c : {0.00898934025f, 0.0558263179f, 0.240153617f, 0.693153073f, 0.999999925f}) y = fma(y, f, floats(c));
  return times_power_of_2(y, n);
}

struct RowStatistics {
  float max;
  float log_sum;  // log(sum(exp(x - max)))
  bool finite;    // `max` is finite, and no x is NaN
};

// The statistics of a row in one pass. Each lane keeps a softmax state: the running maximum m and the running sum l of
// exp(x - m). Writes the maximum of each lane in each block to maxima (blocks,16).
template <class T>
RowStatistics row_statistics(const T* x, int64_t V, float* maxima) {
  const f32x16 log2e = floats(LOG2E);
  f32x16 most = floats(-INF);
  f32x16 m = floats(-std::numeric_limits<float>::max());
  f32x16 l = floats(0.0f);
  auto block = [&](auto&& load_vector) {
    f32x16 xs[BLOCK_VECTORS];
    f32x16 even = floats(-INF);
    f32x16 odd = even;
    f32x16 sums[2] = {floats(0.0f), floats(0.0f)};
#pragma GCC unroll 16
    for (int j = 0; j < BLOCK_VECTORS; j++) xs[j] = load_vector(j);
#pragma GCC unroll 8
    for (int j = 0; j < BLOCK_VECTORS; j += 2) {
      even = max(even, xs[j]);
      odd = max(odd, xs[j + 1]);  // may drop NaN, but the sum keeps it
    }
    const f32x16 here = max(even, odd);
    const f32x16 m_new = max(m, here);
    store(maxima, here);
    maxima += LANES;
    most = max(most, here);
#pragma GCC unroll 16
    for (int j = 0; j < BLOCK_VECTORS; j++) sums[j % 2] = sums[j % 2] + fast_exp2((xs[j] - m_new) * log2e);
    l = fma(l, fast_exp2((m - m_new) * log2e), sums[0] + sums[1]);
    m = m_new;
  };
  constexpr int64_t SIZE = BLOCK_VECTORS * LANES;
  int64_t v = 0;
  for (; v + SIZE <= V; v += SIZE) block([&](int j) { return load(x + v + j * LANES); });
  if (v < V) block([&](int j) { return load_or_minus_infinity(x + v + j * LANES, V - v - j * LANES); });
  const float sum = sum_of_lanes(rounded(l * fast_exp2((m - floats(max_of_lanes(m))) * log2e)));
  const float largest = max_of_lanes(most);
  return {largest, std::log(sum), std::isfinite(largest) && !std::isnan(sum)};
}

// The first index of a row's maximum; maxima come from row_statistics.
template <class T>
int64_t argmax(float max, const T* x, int64_t V, const float* maxima) {
  const f32x16 wanted = floats(max);
  int64_t v = 0;
  while (!equal_lanes(load(maxima), wanted)) {
    maxima += LANES;
    v += BLOCK_VECTORS * LANES;
  }
  for (;; v += LANES)
    if (const Lanes here = equal_lanes(load_or_minus_infinity(x + v, V - v), wanted)) return v + std::countr_zero(here);
}

// The settings of one row, as in sampling.py's Sampling.
struct RowSettings {
  int64_t seed;
  int64_t position;  // of the token that is drawn
  float temperature;
  int64_t top_k;
  float top_p;
  float min_p;
  float repetition;  // penalties
  float frequency;
  float presence;
  const int32_t* counts;   // (V,): twice how often a token was generated, plus 1 if it is in the prompt
  const float* bias;       // (V,), or null
  const int32_t* mask;     // one bit per token, which is set if it may be sampled; or null
  const int64_t* drafted;  // (n_drafted,), the draft tokens before this position
  int64_t n_drafted;

  bool penalizes() const { return repetition != 1 || frequency != 0 || presence != 0; }
  // Which of the 16 tokens from v on may be sampled. v is a multiple of 16.
  Lanes allowed(int64_t v) const { return uint32_t(mask[v / 32]) >> v % 32; }
};

// One thread's temporary arrays for a row. The long arrays are usually used only at the beginning, for the few tokens
// that pass a filter.
struct Scratch {
  float* maxima;       // of row_statistics
  float* x;            // (V,) logits after penalties, biases and masks
  float* kept;         // (V,) logits of the tokens that passed the filters, by ascending id
  int32_t* ids;        // (V,) the ids of these tokens
  int32_t* sort_keys;  // (V,) logits as integers of the same order
  int64_t* masses;     // (V,) weights in fixed point

  static Scratch allocate(Arena& arena, int64_t V) {
    const int64_t padded = (V + 255) / 256 * 256;
    Scratch s;
    s.maxima = arena.allocate<float>(padded / BLOCK_VECTORS);
    s.x = arena.allocate<float>(padded);
    s.kept = arena.allocate<float>(padded);
    s.ids = arena.allocate<int32_t>(padded);
    s.sort_keys = arena.allocate<int32_t>(padded);
    s.masses = arena.allocate<int64_t>(padded);
    return s;
  }
};

// Repetition, frequency and presence penalties. Every operation rounds separately, as in torch.
inline f32x16 penalize(f32x16 x, i32x16 counts, const RowSettings& r) {
  const Lanes seen = above(counts, ints(0));
  const Lanes negative = above(floats(0.0f), x);
  const f32x16 repetition = floats(r.repetition);
  f32x16 y = where(seen & ~negative, x / repetition, x);
  y = where(seen & negative, rounded(x * repetition), y);
  const i32x16 generated_count = counts >> 1;
  y = y - rounded(to_floats(generated_count) * floats(r.frequency));
  return where(above(generated_count, ints(0)), y - floats(r.presence), y);
}

template <class T>
void penalize_row(const T* x, int64_t V, const RowSettings& r, float* out) {
  for (int64_t v = 0; v < V; v += LANES) {
    const i32x16 counts = load_ints(r.counts + v, V - v);
    const f32x16 y = load(x + v, V - v);
    store(out + v, above(counts, ints(0)) ? penalize(y, counts, r) : y, V - v);
  }
  for (int64_t i = 0; i < r.n_drafted; i++) {
    const int64_t id = r.drafted[i];
    if (id < 0) continue;
    const int32_t count = r.counts[id] + 2 * std::count(r.drafted, r.drafted + r.n_drafted, id);
    store(out + id, penalize(floats(float(x[id])), ints(count), r), 1);
  }
}

// The logits after penalties and biases; -infinity for masked tokens.
template <class T>
void adjust_row(const T* x, int64_t V, const RowSettings& r, float* out) {
  const bool penalizes = r.penalizes();
  if (penalizes) penalize_row(x, V, r, out);
  if (!r.bias && !r.mask) return;
  for (int64_t v = 0; v < V; v += LANES) {
    f32x16 y = penalizes ? load(out + v, V - v) : load(x + v, V - v);
    if (r.bias) y = y + load(r.bias + v, V - v);
    if (r.mask) y = where(r.allowed(v), y, floats(-INF));
    store(out + v, y, V - v);
  }
}

// ---------------------------------------------------------------- sampling: filters

// Computes the weights exp((x - max) / temperature) of logits x.
struct Weights {
  float max;
  float inverse;  // 1 / temperature
  Weights(float max, float temperature)
      : max(max), inverse(std::min(1 / temperature, std::numeric_limits<float>::max())) {}
  f32x16 log_of(f32x16 x) const { return (x - floats(max)) * floats(inverse); }
  f32x16 of(f32x16 x) const { return fast_exp(log_of(x)); }
};

// A subset of a row's tokens by ascending id; if ids is null, all tokens.
template <class T>
struct Tokens {
  const T* x;
  const int32_t* ids;
  int64_t n;

  i32x16 ids_at(int64_t i) const { return ids ? load_ints(ids + i, n - i) : lane_indices() + ints(i); }
};

// Copies the tokens that keep(logits) selects to s.kept and s.ids; `tokens` may already lie there.
template <class T, class Keep>
Tokens<float> collect(Tokens<T> tokens, const Scratch& s, const Keep& keep) {
  int64_t n = 0;
  for (int64_t i = 0; i < tokens.n; i += LANES) {
    const f32x16 x = load(tokens.x + i, tokens.n - i);
    const Lanes kept = keep(x, first_lanes(tokens.n - i));
    if (!kept) continue;
    const i32x16 ids = tokens.ids_at(i);
    store_selected(s.kept + n, kept, x);
    store_selected(s.ids + n, kept, ids);
    n += std::popcount(kept);
  }
  return {s.kept, s.ids, n};
}

// Maps floats to integers with the same order (-0.0 counts as 0.0), and back.
inline i32x16 float_to_sortable(f32x16 x) {
  const i32x16 bits = as_ints(x + floats(0.0f));
  return bits ^ ((bits >> 31) & ints(0x7fffffff));
}

inline float sortable_to_float(int32_t key) { return std::bit_cast<float>(key ^ ((key >> 31) & 0x7fffffff)); }

void write_sort_keys(const float* x, int64_t n, int32_t* sort_keys) {
  for (int64_t i = 0; i < n; i += LANES) store(sort_keys + i, float_to_sortable(load(x + i, n - i)));
}

// 16 weights as integers in units of 2^-40, so that their sums are exact.
inline i64x16 fixed_point(f32x16 weights) { return to_int64(weights * floats(0x1p40f)); }

struct Threshold {
  float x;             // the lowest logit that is kept
  int64_t mass_above;  // the total mass of the logits above x
};

// The highest threshold such that the entries with a key at or above it have a total mass of at least `target`. Without
// masses, each entry counts as 1. All entries together must reach the target. It bisects the range of keys, and keeps
// only the entries inside the remaining range, so that each step is shorter than the step before. It overwrites both
// arrays.
Threshold find_threshold(int64_t target, int32_t* sort_keys, int64_t* masses, int64_t n) {
  i32x16 least = ints(sort_keys[0]);
  i32x16 most = least;
  for (int64_t i = 0; i < n; i += LANES) {
    const i32x16 key = where(first_lanes(n - i), load_ints(sort_keys + i), least);
    least = min(least, key);
    most = max(most, key);
  }
  int64_t low = min_of_lanes(least);
  int64_t high = max_of_lanes(most);
  int64_t above = 0;
  while (low < high) {
    const int32_t middle = (low + high + 1) >> 1;
    const i32x16 bound = ints(middle);
    i64x16 sums = to_int64(floats(0.0f));
    int64_t upper = 0;
    for (int64_t i = 0; i < n; i += LANES) {
      const Lanes in = first_lanes(n - i) & at_least(load_ints(sort_keys + i), bound);
      if (masses) {
        sums = add_selected(sums, in, load_int64(masses + i));
      } else {
        upper += std::popcount(in);
      }
    }
    upper += sum_of_lanes(sums);
    const bool up = above + upper >= target;
    if (up) {
      low = middle;
    } else {
      above += upper;
      high = middle - 1;
    }
    int64_t inside = 0;
    for (int64_t i = 0; i < n; i += LANES) {
      const i32x16 key = load_ints(sort_keys + i);
      const Lanes in = at_least(key, bound);
      const Lanes kept = first_lanes(n - i) & (up ? in : ~in);
      store_selected(sort_keys + inside, kept, key);
      if (masses) store_selected(masses + inside, kept, load_int64(masses + i));
      inside += std::popcount(kept);
    }
    n = inside;
  }
  return {sortable_to_float(low), above};
}

// Keeps the tokens above the threshold, and the first `ties` tokens that equal it.
Tokens<float> keep_above(Tokens<float> tokens, const Scratch& s, float threshold, int64_t ties) {
  return collect(tokens, s, [&](f32x16 x, Lanes valid) -> Lanes {
    Lanes kept = above(x, floats(threshold)) & valid;
    for (Lanes equal = equal_lanes(x, floats(threshold)) & valid; equal && ties > 0; equal &= equal - 1, ties--)
      kept |= equal & -equal;  // the lowest set bit
    return kept;
  });
}

// The cheap bound of this filter is the k-th largest of the row's maxima, which cannot exceed the k-th largest logit.
template <class T>
Tokens<float> keep_top_k(Tokens<T> tokens, const Scratch& s, int64_t k) {
  const int64_t lanes = (tokens.n + BLOCK_VECTORS * LANES - 1) / (BLOCK_VECTORS * LANES) * LANES;
  float least = -std::numeric_limits<float>::max();
  if (k < lanes) {
    write_sort_keys(s.maxima, lanes, s.sort_keys);
    least = std::max(least, find_threshold(k, s.sort_keys, nullptr, lanes).x);
  }
  auto kept = collect(tokens, s, [&](f32x16 x, Lanes valid) -> Lanes { return at_least(x, floats(least)) & valid; });
  if (kept.n <= k) return kept;
  write_sort_keys(kept.x, kept.n, s.sort_keys);
  const Threshold threshold = find_threshold(k, s.sort_keys, nullptr, kept.n);
  return keep_above(kept, s, threshold.x, k - threshold.mass_above);
}

template <class T>
Tokens<float> keep_top_p(Tokens<T> tokens, const Scratch& s, const Weights& weights, float top_p) {
  i64x16 sums = to_int64(floats(0.0f));
  for (int64_t i = 0; i < tokens.n; i += LANES)
    sums = sums + fixed_point(weights.of(load_or_minus_infinity(tokens.x + i, tokens.n - i)));
  const int64_t total = sum_of_lanes(sums);
  const int64_t target = std::max<int64_t>(1, float(total) * top_p);
  // All tokens that weigh less than (total - target) / n weigh less than total - target together, so none is kept.
  const float least = std::max<int64_t>(1, (total - target) / tokens.n) * 0x1p-40f;
  const f32x16 bound = floats(std::log(least) - 1e-4f);
  auto kept = collect(tokens, s, [&](f32x16 x, Lanes valid) -> Lanes {
    return at_least(weights.log_of(x), bound) & valid;
  });
  write_sort_keys(kept.x, kept.n, s.sort_keys);
  for (int64_t i = 0; i < kept.n; i += LANES)
    store(s.masses + i, fixed_point(weights.of(load(kept.x + i, kept.n - i))));
  const Threshold threshold = find_threshold(target, s.sort_keys, s.masses, kept.n);
  // Tokens at the threshold have equal logits, so each has the same mass. The division rounds up.
  const int64_t each = first_lane(fixed_point(weights.of(floats(threshold.x))));
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
  x = uint32_t((x ^ x >> 16) * 0x21F0AAAD);
  x = uint32_t((x ^ x >> 15) * 0x735A2D97);
  return x ^ x >> 15;
}

inline i32x16 scramble(i32x16 x) {
  x = times(x ^ unsigned_shift(x, 16), ints(0x21F0AAAD));
  x = times(x ^ unsigned_shift(x, 15), ints(0x735A2D97));
  return x ^ unsigned_shift(x, 15);
}

// exponential_noise of kernels.py for one seed and position, in two steps: 32 random bits for each token id, and the
// Exponential(1) variate for these bits.
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
  i32x16 bits(i32x16 ids) const { return scramble(scramble(ids ^ ints(keys[0])) ^ ints(keys[1])); }
  static float exponential(uint32_t bits) {
    return -std::log1p(-std::min((float(bits) + 0.5f) * 0x1p-32f, 1 - 0x1p-24f));
  }
};

// Draws a token: argmax(weight / Exponential(1)) is a sample from the normalized weights. Tokens whose weight is below
// min_p are left out. `winner` is the likeliest token, which no filter drops. The lowest id wins a tie.
//
// Since noise = -log(1 - u) >= u, a token can win only if u <= weight / best, where best is the largest ratio so far.
// Most tokens fail this test, before any logarithm is computed. The test compares 2^32 u with an upper bound of
// 2^32 weight / best. Write this product as 2^y, and n = floor(y). The bound is 2^n (1 + y - n) >= 2^y, because as a
// float32 its bits are simply (y + 127) 2^23.
template <class T>
int64_t exponential_race(Tokens<T> tokens, const Weights& weights, float min_p, const Noise& noise, int64_t winner) {
  alignas(64) uint32_t bits[LANES];
  alignas(64) float xs[LANES];
  store(bits, noise.bits(ints(winner)));
  float best = 1 / Noise::exponential(bits[0]);  // the likeliest token weighs 1
  const float scale = LOG2E * 0x1p23f;
  const f32x16 slope = floats(std::min(weights.inverse * scale, 3e38f));
  const f32x16 max = floats(weights.max);
  auto offset_of_best = [&] { return floats((127 + 32 + 1e-3f - std::log2(best)) * 0x1p23f); };
  const i32x16 half = as_ints(floats(0.5f));  // the smallest possible value of 2^32 u
  f32x16 offset = offset_of_best();
  for (int64_t i = 0; i < tokens.n; i += LANES) {
    const i32x16 bound = to_ints(fma(load(tokens.x + i, tokens.n - i) - max, slope, offset));
    Lanes candidates = first_lanes(tokens.n - i) & at_least(bound, half);
    if (!candidates) continue;
    const i32x16 random = noise.bits(tokens.ids_at(i));
    candidates &= at_least(as_floats(bound), unsigned_to_floats(random));
    if (!candidates) continue;
    store(bits, random);
    store(xs, weights.of(load(tokens.x + i, tokens.n - i)));
    for (; candidates; candidates &= candidates - 1) {
      const int lane = std::countr_zero(candidates);
      const int64_t id = tokens.ids ? tokens.ids[i + lane] : i + lane;
      const float ratio = xs[lane] / Noise::exponential(bits[lane]);
      if (xs[lane] < min_p || !(ratio > best || (ratio == best && id < winner))) continue;
      best = ratio;
      winner = id;
      offset = offset_of_best();
    }
  }
  return winner;
}

// ---------------------------------------------------------------- sampling: rows

// Calls draw(logits, statistics) with the row after adjust_row. `raw`: the statistics before it.
template <class T, class Draw>
void with_adjustments(const T* x, int64_t V, const RowSettings& r, const RowStatistics& raw, const Scratch& s,
                      const Draw& draw) {
  if (!r.penalizes() && !r.bias && !r.mask) return draw(x, raw);
  adjust_row(x, V, r, s.x);
  draw((const float*)s.x, row_statistics(s.x, V, s.maxima));
}

// Samples a token, and its log-probability before any adjustment. If the row is not finite: -1 and NaN.
template <class T>
void sample_row(const T* x, int64_t V, const RowSettings& r, const Scratch& s, int64_t& id, float& logprob) {
  const RowStatistics raw = row_statistics(x, V, s.maxima);
  id = -1;
  logprob = NAN;
  with_adjustments(x, V, r, raw, s, [&](const auto* x, const RowStatistics& top) {
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

// The probabilities that sample_row draws with.
template <class T>
void probabilities_row(const T* x, int64_t V, const RowSettings& r, const Scratch& s, float* out) {
  std::fill(out, out + V, 0.0f);
  with_adjustments(x, V, r, row_statistics(x, V, s.maxima), s, [&](const auto* x, const RowStatistics& top) {
    if (!top.finite) return std::fill(out, out + V, NAN);
    if (!(r.temperature > 0)) return void(out[argmax(top.max, x, V, s.maxima)] = 1);
    const Weights weights(top.max, r.temperature);
    filter(x, V, r, s, weights, [&](auto tokens) {
      double sums[8] = {};
      for (int64_t i = 0; i < tokens.n; i += LANES) {
        f32x16 w = weights.of(load(tokens.x + i, tokens.n - i));
        w = where(first_lanes(tokens.n - i) & at_least(w, floats(r.min_p)), w, floats(0.0f));
        alignas(64) float ws[LANES];
        store(ws, w);
        for (int lane = 0; lane < 8; lane++) sums[lane] = sums[lane] + ws[lane] + ws[lane + 8];
        for (int lane = 0; lane < std::min<int64_t>(LANES, tokens.n - i); lane++)
          out[tokens.ids ? tokens.ids[i + lane] : i + lane] = ws[lane];
      }
      for (int step : {4, 2, 1})
        for (int lane = 0; lane < step; lane++) sums[lane] += sums[lane + step];
      const float sum = sums[0];
      for (int64_t v = 0; v < V; v++) out[v] /= sum;
    });
  });
}

// ---------------------------------------------------------------- the operations

// The arguments of `sample` and `probabilities` in the order of their schema in sampling.py. Everything below uses
// their names. register_kernels compares these names with the schema.
#define SAMPLING_NAMES                                                                                      \
  logits, rows, position, drafted, seed, temperature, top_k, top_p, min_p, repetition_penalty,              \
      frequency_penalty, presence_penalty, counts, biased, logit_bias, masks, mask_start
#define SAMPLING_ARGUMENTS                                                                                  \
  const Tensor &logits, const Tensor &rows, const Tensor &position, const Tensor &drafted,                  \
      const Tensor &seed, const Tensor &temperature, const Tensor &top_k, const Tensor &top_p,              \
      const Tensor &min_p, const Tensor &repetition_penalty, const Tensor &frequency_penalty,               \
      const Tensor &presence_penalty, const Tensor &counts, const Tensor &biased, const Tensor &logit_bias, \
      const Tensor &masks, const Tensor &mask_start

// These arguments after checks. R is the number of rows that have settings.
struct Sampling {
  Tensor logits;              // (B,S,V)
  Tensor rows;                // (B,), the row of settings of each batch row
  Tensor position;            // (B,), of the first token that is drawn; 0 or less is padding
  Tensor drafted;             // (B,S-1 or more)
  Tensor seed;                // (R,)
  Tensor temperature;         // (R,)
  Tensor top_k;               // (R,)
  Tensor top_p;               // (R,)
  Tensor min_p;               // (R,)
  Tensor repetition_penalty;  // (R,)
  Tensor frequency_penalty;   // (R,)
  Tensor presence_penalty;    // (R,)
  Tensor counts;              // (R,V or more)
  Tensor biased;              // (R,), whether a row uses logit_bias
  Tensor logit_bias;          // (R,V or more)
  Tensor masks;               // (R,positions,words), one bit per token
  Tensor mask_start;          // (R,), the position of a row's first mask; -1 if it has none
  int64_t B, S, V;

  explicit Sampling(SAMPLING_ARGUMENTS)
      : logits(logits.stride(-1) == 1 ? logits : logits.contiguous()), rows(rows.contiguous()),
        position(position.contiguous()), drafted(drafted.contiguous()), seed(seed), temperature(temperature),
        top_k(top_k), top_p(top_p), min_p(min_p), repetition_penalty(repetition_penalty),
        frequency_penalty(frequency_penalty), presence_penalty(presence_penalty), counts(counts), biased(biased),
        logit_bias(logit_bias), masks(masks), mask_start(mask_start) {
    const auto sizes = logits.sizes();
    TORCH_CHECK(sizes.size() == 3 && sizes[2] > 0 && sizes[2] < INT32_MAX, "logits (B,S,V) expected, got ", sizes);
    B = sizes[0];
    S = sizes[1];
    V = sizes[2];
    checked(this->rows, "rows", at::kLong, {B});
    checked(this->position, "position", at::kLong, {B});
    checked(this->drafted, "drafted", at::kLong, {B, -1});
    TORCH_CHECK(this->drafted.size(1) >= S - 1, this->drafted.size(1), " drafted tokens for ", S, " positions");
    const int64_t R = seed.numel();
    checked(seed, "seed", at::kLong, {R});
    checked(temperature, "temperature", at::kFloat, {R});
    checked(top_k, "top_k", at::kLong, {R});
    checked(top_p, "top_p", at::kFloat, {R});
    checked(min_p, "min_p", at::kFloat, {R});
    checked(repetition_penalty, "repetition_penalty", at::kFloat, {R});
    checked(frequency_penalty, "frequency_penalty", at::kFloat, {R});
    checked(presence_penalty, "presence_penalty", at::kFloat, {R});
    checked(counts, "counts", at::kInt, {R, -1});
    TORCH_CHECK(counts.size(1) >= V, "counts of ", counts.size(1), " tokens for logits of ", V);
    checked(biased, "biased", at::kBool, {R});
    checked(logit_bias, "logit_bias", at::kFloat, {R, -1});
    TORCH_CHECK(logit_bias.size(1) >= V, "biases of ", logit_bias.size(1), " tokens for logits of ", V);
    checked(masks, "masks", at::kInt, {R, -1, -1});
    checked(mask_start, "mask_start", at::kLong, {R});
    TORCH_CHECK(masks.size(2) * 32 >= V, "masks of ", masks.size(2), " words for logits of ", V);
    for (int64_t b = 0; b < B; b++) {
      const int64_t row = this->rows.const_data_ptr<int64_t>()[b];
      TORCH_CHECK(row >= 0 && row < R, "row ", row, " of ", R);
      const int64_t mask = first_mask(b);
      TORCH_CHECK(mask < 0 || is_padding(b) || mask + S <= masks.size(1), "no mask for position ", mask + S - 1);
    }
    for (int64_t i = 0; i < this->drafted.numel(); i++) {
      const int64_t id = this->drafted.const_data_ptr<int64_t>()[i];
      TORCH_CHECK(id < V, "drafted token ", id, " of ", V);
    }
  }

  bool is_padding(int64_t b) const { return position.const_data_ptr<int64_t>()[b] <= 0; }

  // The index of the mask that the first position of batch row b uses; -1 if its row has no masks.
  int64_t first_mask(int64_t b) const {
    const int64_t start = mask_start.const_data_ptr<int64_t>()[rows.const_data_ptr<int64_t>()[b]];
    return start < 0 ? -1 : std::max<int64_t>(0, position.const_data_ptr<int64_t>()[b] - start);
  }

  // The settings for position s of batch row b.
  RowSettings row_settings(int64_t b, int64_t s) const {
    const int64_t row = rows.const_data_ptr<int64_t>()[b];
    const int64_t n = drafted.size(1);
    auto float_of = [&](const Tensor& setting) { return setting.const_data_ptr<float>()[row]; };
    auto int_of = [&](const Tensor& setting) { return setting.const_data_ptr<int64_t>()[row]; };
    RowSettings r;
    r.seed = int_of(seed);
    r.top_k = int_of(top_k);
    r.position = position.const_data_ptr<int64_t>()[b] + s;
    r.temperature = float_of(temperature);
    r.top_p = float_of(top_p);
    r.min_p = float_of(min_p);
    r.repetition = float_of(repetition_penalty);
    r.frequency = float_of(frequency_penalty);
    r.presence = float_of(presence_penalty);
    r.counts = counts.const_data_ptr<int32_t>() + row * counts.size(1);
    const bool has_bias = biased.const_data_ptr<bool>()[row];
    r.bias = has_bias ? logit_bias.const_data_ptr<float>() + row * logit_bias.size(1) : nullptr;
    const int64_t mask = first_mask(b) < 0 ? -1 : row * masks.size(1) + first_mask(b) + s;
    r.mask = mask < 0 ? nullptr : masks.const_data_ptr<int32_t>() + mask * masks.size(2);
    r.drafted = drafted.const_data_ptr<int64_t>() + b * n;
    r.n_drafted = std::max<int64_t>(0, n - S + 1 + s);
    return r;
  }

  // Calls work(logits, settings, scratch, index in B * S) for every position that is not padding. The threads share the
  // positions.
  template <class Work>
  void for_each(const Work& work) const {
    std::vector<int64_t> indices;  // b * S + s
    for (int64_t i = 0; i < B * S; i++)
      if (!is_padding(i / S)) indices.push_back(i);
    const int64_t n = indices.size();
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
            const int64_t b = indices[i] / S;
            const int64_t s = indices[i] % S;
            work(x + b * logits.stride(0) + s * logits.stride(1), row_settings(b, s), scratch[team.thread], indices[i]);
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
