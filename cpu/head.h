// The logits of the tokens that may be drawn next, from fewer bytes than the output head has.
//
// Beside the head (V,D) there is a shadow, the same matrix in fewer bits. All logits of the shadow are computed. By the
// inequality of Cauchy and Schwarz, the true logit of a token differs from its shadow's by at most
//
//   |sum_d error[v,d] x[d]| <= norm(error[v] * scale) norm(x / scale)
//
// for any scales > 0, so one number for each token and one for x bound it. Only blocks of 16 tokens in which a token's
// logit plus this bound reaches the best known token are multiplied with the head itself, by the product that the
// whole head has. So the token that is drawn, and its logit, have the same bits as with all logits. Tokens that cannot
// be drawn get -infinity, and `sample` draws from the result as from all logits.
//
// A token is drawn with a temperature if its weight / noise is the largest: see exponential_race in sampling.h. There,
// too, a bound on the weight shows which tokens cannot win. With top-k, the tokens that reach the k-th largest logit are
// needed, and with min-p, those that reach the least weight that passes. Top-p after top-k needs no others.
//
// If the model caps its logits (soft_cap of model.py), the bounds are on logits before the cap. Logits that differ before
// it may be equal after it, so a token is needed if its logit after the cap may reach that of the best token.

#pragma once

#include "checks.h"
#include "sampling.h"

namespace fastpath {

// How much a logit may grow when it is rounded to T, relative to its size.
template <class T>
constexpr float ROUNDING = std::is_same_v<T, float> ? 0x1p-22f : std::is_same_v<T, bf16> ? 0x1.01p-8f : 0x1.01p-11f;
// The distance of the smallest numbers of T, by which it may grow in any case.
template <class T>
constexpr float SMALLEST = std::is_same_v<T, float> || std::is_same_v<T, bf16> ? 0 : 0x1p-24f;

// The settings with which a row of x is drawn.
struct HeadSettings {
  float temperature;  // 0: the token with the largest logit
  int64_t top_k;      // 0: all tokens
  float min_p;
  Noise noise;
  float softcap;  // 0: the logits have none
  // How much soft_cap may change a logit by rounding it, relative to its size and besides; 0 without a cap. It rounds
  // three times; 1e-5 is for the float32 operations here.
  float rounding;
  float smallest;

  bool filters_top_k() const { return temperature > 0 && top_k > 0; }
  // Whether the exponential race is among all tokens.
  bool races() const { return temperature > 0 && top_k <= 0 && !(min_p > 0); }
};

// One row of x, and what is known about its winner. A token that can reach neither `least` nor `best` is not needed.
struct HeadRow : HeadSettings {
  float norm;              // of x / scale
  bool is_finite = false;  // of the shadow; otherwise all blocks are needed
  float least = -INF;      // tokens with smaller logits are not needed, except for the race
  float reference = 0;     // the largest logit of the first block that was multiplied; its weight is 1
  float base = 0;          // the same after the cap, without roundings
  float best = -INF;       // of the race: log2 of the largest known weight / noise
  float offset = 3e38f;    // of the bound on 2^32 u in exponential_race, for `best`; so large that any token can win

  Weights weights() const { return {reference, temperature}; }

  // soft_cap of model.py, without its roundings.
  float after_cap(float logit) const { return softcap > 0 ? softcap * std::tanh(logit / softcap) : logit; }

  // A bound on what soft_cap gives for any logit up to x, roundings included.
  f32x16 most_after_cap(f32x16 x) const {
    if (softcap == 0) return x;
    const f32x16 zero = floats(0.0f), one = floats(1.0f);
    const f32x16 power = fast_exp2(min(x, zero - x) * floats(2 * LOG2E / softcap));
    const f32x16 size = (one - power) / (one + power);  // |tanh(x / softcap)|
    const f32x16 capped = floats(softcap) * (where(at_least(x, zero), size, zero - size) + floats(1e-5f));
    return fma(max(capped, zero - capped), floats(rounding), capped) + floats(smallest);
  }

  float round_down(float x) const { return x - rounding * std::abs(x) - smallest; }

  // Logits below the result are, after soft_cap and its roundings, more than `margin` below this logit after soft_cap.
  float reaching(float logit, float margin = 0) const {
    if (softcap == 0) return logit - margin;
    const float ratio = round_down(round_down(after_cap(logit)) - margin) / softcap;
    return ratio > -1 ? softcap * std::atanh(ratio) : -INF;
  }

  // Takes the logit of a token into account.
  void learn(int64_t v, float logit) {
    if (filters_top_k()) return;
    // A token passes min-p if its weight, relative to that of the largest logit, is at least min_p; 1e-3 for rounding.
    const bool filters = temperature > 0 && min_p > 0;
    least = std::max(least, reaching(logit, filters ? (1e-3f - std::log(min_p)) / weights().inverse : 0));
    if (!races()) return;
    uint32_t bits[LANES];
    store(bits, noise.bits(ints(v)));
    const float weight = (round_down(after_cap(logit)) - base) * weights().inverse * LOG2E;  // log2 of it
    const float ratio = weight - std::log2(Noise::exponential(bits[0]));
    if (!(ratio > best) || !(ratio < 128)) return;
    best = ratio;
    // For the rounding of weights and noise, 1e-3 more than in exponential_race, and more where they are far from 1.
    offset = (127 + 32 + 2e-3f + 1e-6f * std::abs(best) - best) * 0x1p23f;
  }
};

float kth_largest(const float* x, int64_t n, int64_t k) {
  std::vector<int32_t> keys(n + LANES);
  write_sort_keys(x, n, keys.data());
  return find_threshold(k, keys.data(), nullptr, n).x;
}

template <class T>
struct HeadLogits {
  const Linear& head;    // (N,D)
  const Linear& shadow;  // (N,D)
  const float* norms;    // (V,) of the rows of errors times scales
  int64_t M, V, D;       // V <= N: the tokens that may be drawn are the first V
  int64_t N;
  T* out;  // (M,N)

  // Temporary arrays, from allocate():
  Input to_head;
  Input to_shadow;
  float* near;       // (M,N), the logits of the shadow
  float* maxima;     // (M,blocks), the largest of them in each block; NaN if one is NaN
  HeadRow* rows;     // (M,)
  int64_t* counted;  // (1,), blocks that were multiplied with the head

  int64_t blocks() const { return (V + LANES - 1) / LANES; }

  void allocate(Arena& arena, const Layer& whole_head, const Layer& whole_shadow, const void* x) {
    to_head = allocate_input(arena, whole_head, x, M);
    to_shadow = allocate_input(arena, whole_shadow, x, M);
    near = arena.allocate<float>(M * N);
    maxima = arena.allocate<float>(M * blocks());
    rows = arena.allocate<HeadRow>(M);
    counted = arena.allocate<int64_t>(1);
  }

  // norm(x / scale) of row m, rounded up.
  float scaled_norm(int64_t m, const float* inverse_scales) const {
    double sum = 0;
    for (int64_t b = 0; b < to_shadow.Cb; b++) {
      const int64_t at = to_shadow.at(m, b);
      for (int64_t c = b * GROUP; c < std::min(D, (b + 1) * GROUP); c++) {
        const double x = double(to_shadow.q[at * GROUP + c - b * GROUP]) * to_shadow.scale[at] * inverse_scales[c];
        sum += x * x;
      }
    }
    return float(std::sqrt(sum) * (1 + 1e-6));
  }

  // Multiplies a block with the head, for all rows, and takes its logits into account.
  void multiply(int64_t block, HeadRow* known) const {
    multiply_units<T>(head, to_head, M, block, block + 1, nullptr, out);
    for (int64_t m = 0; m < M; m++)
      if (known[m].is_finite) learn_block(known[m], m, block);
  }

  void learn_block(HeadRow& row, int64_t m, int64_t block) const {
    for (int64_t v = block * LANES; v < std::min(V, (block + 1) * LANES); v++) row.learn(v, out[m * N + v]);
  }

  // Writes the maxima of blocks begin..end of the shadow's logits.
  void find_maxima(int64_t begin, int64_t end) const {
    for (int64_t m = 0; m < M; m++) {
      for (int64_t block = begin; block < end; block++) {
        const int64_t v = block * LANES;
        const f32x16 x = load_or_minus_infinity(near + m * N + v, V - v);
        maxima[m * blocks() + block] = equal_lanes(x, x) == first_lanes(LANES) ? max_of_lanes(x) : NAN;
      }
    }
  }

  // Multiplies the block of the token that would be drawn from the shadow's logits of row m.
  void guess(int64_t m) const {
    HeadRow& row = rows[m];
    const float* all = maxima + m * blocks();
    int64_t first = 0;
    bool has_nan = false;
    for (int64_t block = 0; block < blocks(); block++) {
      has_nan |= std::isnan(all[block]);
      if (all[block] > all[first]) first = block;
    }
    row.is_finite = !has_nan && std::isfinite(all[first]);
    if (!row.is_finite) return;
    if (row.filters_top_k()) return guess_top_k(row, m);
    const float* x = near + m * N;
    int64_t likeliest = first * LANES;
    while (x[likeliest] != all[first]) likeliest++;
    const int64_t block = likeliest / LANES;
    multiply_units<T>(head, to_head, M, block, block + 1, nullptr, out);
    row.reference = -INF;
    for (int64_t v = block * LANES; v < std::min(V, (block + 1) * LANES); v++)
      row.reference = std::max<float>(row.reference, out[m * N + v]);
    row.base = row.after_cap(row.reference);
    row.is_finite = std::isfinite(row.reference);
    if (!row.is_finite) return;
    learn_block(row, m, block);
    if (!row.races()) return;
    const int64_t winner = exponential_race(Tokens<float>{x, nullptr, V}, row.weights(), 0, row.noise, likeliest);
    if (winner / LANES != block) multiply(winner / LANES, rows);
  }

  // Multiplies the blocks with the largest logits of the shadow, of which top_k logits are certainly reached.
  void guess_top_k(HeadRow& row, int64_t m) const {
    const int64_t k = std::min(row.top_k, V);
    const float* all = maxima + m * blocks();
    const float cut = kth_largest(all, blocks(), std::min(k, blocks()));
    std::vector<float> known;
    for (int64_t block = 0; block < blocks() && int64_t(known.size()) < k * LANES; block++) {
      if (all[block] < cut) continue;
      multiply_units<T>(head, to_head, M, block, block + 1, nullptr, out);
      for (int64_t v = block * LANES; v < std::min(V, (block + 1) * LANES); v++) {
        known.push_back(out[m * N + v]);
        row.is_finite &= std::isfinite(known.back());
      }
    }
    if (row.is_finite)
      row.least = row.reaching(kth_largest(known.data(), known.size(), std::min<int64_t>(k, known.size())));
  }

  // Whether row m needs a token of a block.
  bool needs(const HeadRow& row, int64_t m, int64_t block) const {
    if (!row.is_finite) return true;
    const int64_t v = block * LANES;
    const f32x16 x = fma(load(norms + v, V - v), floats(row.norm), load(near + m * N + v, V - v));
    // Also after rounding to T:
    const f32x16 bound = fma(max(x, floats(0.0f) - x), floats(ROUNDING<T>), x) + floats(SMALLEST<T>);
    const Lanes real = first_lanes(V - v);
    // The comparisons are such that NaN is needed.
    if (real & (~above(floats(row.least), bound))) return true;
    if (!row.races()) return false;
    // As in exponential_race.
    const f32x16 slope = floats(std::min(row.weights().inverse * (LOG2E * 0x1p23f), 3e38f));
    const f32x16 certain = floats((127 + 33) * 0x1p23f);  // the bits of 2^33, which is above all random numbers
    const f32x16 difference = row.most_after_cap(bound) - floats(row.base);
    const i32x16 most = to_ints(min(fma(difference, slope, floats(row.offset)), certain));
    Lanes candidates = real & at_least(most, as_ints(floats(0.5f)));
    if (!candidates) return false;
    const i32x16 random = row.noise.bits(lane_indices() + ints(v));
    return candidates & at_least(as_floats(most), unsigned_to_floats(random));
  }

  void run(const Team& team, const Layer& whole_head, const Layer& whole_shadow, const float* inverse_scales) const {
    team.begin(SHADOW);
    prepare_input_rows<T>(team, whole_head, to_head, M);
    prepare_input_rows<T>(team, whole_shadow, to_shadow, M);
    team.split(M, 1, [&](int64_t m, int64_t end) {
      for (; m < end; m++) rows[m].norm = scaled_norm(m, inverse_scales);
    });
    team.split(M * N, LANES, [&](int64_t i, int64_t end) { std::fill(out + i, out + end, T(-INF)); });
    team.split(units(shadow), grain(shadow), [&](int64_t begin, int64_t end) {
      multiply_units<float>(shadow, to_shadow, M, begin, end, nullptr, near);
      find_maxima(begin, std::min(end, blocks()));
    });
    team.barrier();
    team.begin(HEAD);
    if (team.thread == 0)
      for (int64_t m = 0; m < M; m++) guess(m);
    team.barrier();
    team.split(blocks(), 1, [&](int64_t block, int64_t end) {
      std::vector<HeadRow> known(rows, rows + M);
      int64_t count = 0;
      for (; block < end; block++) {
        bool is_needed = false;
        for (int64_t m = 0; m < M && !is_needed; m++) is_needed = needs(known[m], m, block);
        if (!is_needed) continue;
        multiply(block, known.data());
        count++;
      }
      __atomic_add_fetch(counted, count, __ATOMIC_RELAXED);
    });
    team.barrier();
    team.begin(NONE);
  }
};

// A row w of G groups of 32 weights in blocks of F, which is Q4_0 or Q5_0: a scale in float16, the highest bits of 32
// levels if they have five, their lower four bits. Returns the norms of w * scale and of what is rounded away * scale.
template <class F>
std::pair<float, float> quantize_row(const float* w, const float* scale, int64_t G, uint8_t* block) {
  constexpr float LEVELS = F::OFFSET;  // from -LEVELS to LEVELS - 1
  double size = 0, error = 0;
  for (int64_t g = 0; g < G; g++, w += 32, scale += 32, block += F::BYTES) {
    float largest = 0;
    for (int c = 0; c < 32; c++) largest = std::max(largest, std::abs(w[c]));
    const at::Half stored(largest / (LEVELS - 0.5f));
    const float step = stored, inverse = 1 / std::max(step, 1e-30f);
    uint8_t levels[32];
    float sizes = 0, errors = 0;
    for (int c = 0; c < 32; c++) {
      const float level = std::min(std::max(std::nearbyint(w[c] * inverse), -LEVELS), LEVELS - 1);
      levels[c] = uint8_t(level + LEVELS);
      const float difference = (w[c] - level * step) * scale[c];
      sizes += w[c] * scale[c] * w[c] * scale[c];
      errors += difference * difference;
    }
    size += sizes, error += errors;
    std::memcpy(block, &stored, 2);
    std::memset(block + 2, 0, F::BYTES - 2);
    if (F::OFFSET == 16)
      for (int c = 0; c < 32; c++) block[2 + c / 8] |= levels[c] >> 4 << c % 8;
    for (int c = 0; c < 16; c++) block[F::BYTES - 16 + c] = (levels[c] & 15) | levels[16 + c] << 4;
  }
  return {float(std::sqrt(size)), float(std::sqrt(error))};
}

// The rows of a head (N,D) in blocks of 4 or 5 bits, (N,bytes); and the norms of quantize_row, (N,2). scale (D,).
std::tuple<Tensor, Tensor> quantize_head(int64_t layer, int64_t bits, const Tensor& scale) {
  const auto prepared = prepared_layers.get(layer);
  const Layer& l = prepared->layer;
  TORCH_CHECK(l.pieces.size() == 1 && l.pieces[0].is_quantized(), "a quantized head was expected");
  TORCH_CHECK(bits == 4 || bits == 5, bits, " bits");
  const int64_t G = (l.C + 31) / 32;
  const Tensor blocks = at::empty({l.N, G * (bits == 4 ? Q4_0::BYTES : Q5_0::BYTES)}, at::kByte);
  const Tensor norms = at::empty({l.N, 2}, at::kFloat);
  std::vector<float> scales(G * 32);
  std::memcpy(scales.data(), checked(scale, "scale", at::kFloat, {l.C}).const_data_ptr(), l.C * sizeof(float));
  parallel(false, [&](const Team& team) {
    team.split(l.N, 16, [&](int64_t n, int64_t end) {
      std::vector<float> w(G * 32);
      for (; n < end; n++) {
        look_up(l.pieces[0], n, w.data());
        auto* to = norms.data_ptr<float>() + 2 * n;
        uint8_t* block = blocks.data_ptr<uint8_t>() + n * blocks.size(1);
        const auto& quantize = bits == 4 ? quantize_row<Q4_0> : quantize_row<Q5_0>;
        std::tie(to[0], to[1]) = quantize(w.data(), scales.data(), G, block);
      }
    });
  });
  return {blocks, norms};
}

// Applies soft_cap of model.py, by the same operations, to all logits except -infinity.
template <class T>
void apply_soft_cap(const Tensor& logits, double softcap) {
  T* x = logits.data_ptr<T>();
  const int64_t n = logits.numel();
  std::vector<int64_t> known;
  for (int64_t i = 0; i < n; i += LANES) {
    Lanes lanes = first_lanes(n - i) & ~equal_lanes(load(x + i, n - i), floats(-INF));
    for (; lanes; lanes &= lanes - 1) known.push_back(i + std::countr_zero(lanes));
  }
  const Tensor few = at::empty({int64_t(known.size())}, logits.options());
  for (size_t i = 0; i < known.size(); i++) few.data_ptr<T>()[i] = x[known[i]];
  const Tensor capped = few.div(softcap).tanh().mul(softcap);
  for (size_t i = 0; i < known.size(); i++) x[known[i]] = capped.const_data_ptr<T>()[i];
}

// The logits (M,N) of x (M,D) that may be drawn, and -infinity for all others. head, shadow: handles of layers (N,D).
// norms (V,) and inverse_scales (D,): see above. temperature, seed, top_k, min_p and position (M,): of the tokens that
// are drawn. counts (2,): the blocks that were multiplied with the head, and all blocks, are added to it. softcap: of
// the logits, or 0.
Tensor head_logits(const Tensor& x, int64_t head, int64_t shadow, const Tensor& norms, const Tensor& inverse_scales,
                   const Tensor& temperature, const Tensor& seed, const Tensor& top_k, const Tensor& min_p,
                   const Tensor& position, const Tensor& counts, double softcap) {
  TORCH_CHECK(x.dim() == 2, "x (M,D) was expected, not ", x.sizes());
  const int64_t M = x.size(0), D = x.size(1);
  const auto prepared_head = prepared_layers.get(head);
  const auto prepared_shadow = prepared_layers.get(shadow);
  const Layer whole_head = prepared_head->checked(x.scalar_type(), -1, D);
  const int64_t N = whole_head.N, V = norms.size(0);
  const Layer whole_shadow = prepared_shadow->checked(x.scalar_type(), N, D);
  TORCH_CHECK(0 < V && V <= N, V, " norms for ", N, " tokens");
  TORCH_CHECK(whole_head.pieces.size() == 1 && whole_head.pieces[0].quantizes_activations() && !whole_head.pieces[0].bias,
              "a quantized head without bias, and activations that are quantized");
  TORCH_CHECK(softcap >= 0, softcap, " as a soft cap");
  TORCH_CHECK(whole_shadow.pieces.size() == 1 && whole_shadow.pieces[0].quantizes_activations(), "a quantized shadow");
  const Tensor xs = x.contiguous();
  const Tensor out = at::empty({M, N}, x.options());
  const float* scales = checked(inverse_scales, "inverse_scales", at::kFloat, {D}).const_data_ptr<float>();
  const float* temperatures = checked(temperature, "temperature", at::kFloat, {M}).const_data_ptr<float>();
  const int64_t* seeds = checked(seed, "seed", at::kLong, {M}).const_data_ptr<int64_t>();
  const int64_t* top_ks = checked(top_k, "top_k", at::kLong, {M}).const_data_ptr<int64_t>();
  const float* min_ps = checked(min_p, "min_p", at::kFloat, {M}).const_data_ptr<float>();
  const int64_t* positions = checked(position, "position", at::kLong, {M}).const_data_ptr<int64_t>();
  int64_t* total = checked(counts, "counts", at::kLong, {2}).data_ptr<int64_t>();
  dispatch_dtype(x, [&](auto type) {
    using T = decltype(type);
    HeadLogits<T> call{.head = whole_head.pieces[0], .shadow = whole_shadow.pieces[0], .M = M, .V = V, .D = D, .N = N};
    call.norms = checked(norms, "norms", at::kFloat, {V}).template const_data_ptr<float>();
    call.out = out.data_ptr<T>();
    const auto [arrays, memory] = allocate_together([&](Arena& arena) {
      HeadLogits<T> one = call;
      one.allocate(arena, whole_head, whole_shadow, xs.const_data_ptr<T>());
      return one;
    });
    const float cap = softcap;
    for (int64_t m = 0; m < M; m++)
      new (arrays.rows + m) HeadRow{{.temperature = temperatures[m], .top_k = top_ks[m], .min_p = min_ps[m],
                                     .noise = Noise(seeds[m], positions[m]), .softcap = cap,
                                     .rounding = cap > 0 ? 3.1f * ROUNDING<T> + 1e-5f : 0,
                                     .smallest = cap > 0 ? 2 * (cap + 1) * SMALLEST<T> : 0}};
    *arrays.counted = 0;
    parallel(false, [&, &arrays = arrays](const Team& team) { arrays.run(team, whole_head, whole_shadow, scales); });
    total[0] += *arrays.counted;
    total[1] += arrays.blocks();
    if (softcap > 0) apply_soft_cap<T>(out, softcap);
  });
  return out;
}

}  // namespace fastpath
