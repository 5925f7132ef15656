// The gated delta rule, which kernels.gated_delta specifies.
//
// Each value head of each row has a matrix M (dk,dv). A token t multiplies it by its decay, and adds its key times its
// delta. The update of a token is added while the matrix is read for the next token, so that each token reads and
// writes the matrix once. With u the update before t,
//   W = u.decay M + u.key u.delta^T,   predicted = W^T k_t,   read = W^T q_t
// and then, without another look at the matrix,
//   delta_t = beta_t (v_t - decay_t predicted),   y_t = decay_t read + (q_t . k_t) delta_t
// A head belongs to one thread, which takes the tokens in order. So the bits of a row depend neither on the other rows,
// nor on the number of threads, nor on how its tokens are divided into passes.

#pragma once

#include "checks.h"

namespace fastpath {

constexpr int64_t DELTA_WINDOW = 16;  // that of kernels.py
constexpr int STRIP = VECTOR_BITS == 512 ? 8 : 2;  // vectors of a row of M whose sums the registers hold

// The tokens of one row in a pass.
struct DeltaRun {
  int64_t row, start;           // start: the position of the first token
  std::vector<int64_t> tokens;  // their numbers b * S + s, by ascending position
  int64_t committed() const { return std::max<int64_t>(0, tokens.size() - DELTA_WINDOW); }  // not pending afterwards
};

// The runs of a pass over tokens at positions (B,S) of rows (B,) or 0..B-1. Padding belongs to no run.
inline std::vector<DeltaRun> delta_runs(const int64_t* positions, const int64_t* rows, int64_t B, int64_t S) {
  struct Token {
    int64_t row, position, number;
    auto operator<=>(const Token&) const = default;
  };
  std::vector<Token> tokens;
  for (int64_t i = 0; i < B * S; i++)
    if (positions[i] >= 0) tokens.push_back({rows ? rows[i / S] : i / S, positions[i], i});
  std::sort(tokens.begin(), tokens.end());

  std::vector<DeltaRun> runs;
  for (const Token& token : tokens) {
    if (runs.empty() || runs.back().row != token.row) runs.push_back({token.row, token.position});
    DeltaRun& run = runs.back();
    const int64_t expected = run.start + int64_t(run.tokens.size());
    TORCH_CHECK(token.position == expected, "row ", run.row, " has position ", token.position, ", not ", expected);
    run.tokens.push_back(token.number);
  }
  return runs;
}

// The state of one layer, and the inputs and outputs of one pass.
struct Delta {
  int64_t n, m, dk, dv;  // key heads, value heads, and their widths
  float *matrix, *keys, *deltas, *decays;  // (R,m,dk,dv), (R,W,n,dk), (R,W,m,dv), (R,W,m)
  int64_t* base;                           // (R,)
  const float *q, *k, *v;  // (n,dk), (n,dk), (m,dv) of each token
  int64_t k_stride, v_stride;  // floats between two tokens of q and k, and of v
  const float *decay, *beta;  // (B*S,m)
  float* out;                 // (B*S,m,dv)

  // How many pending updates a run adds first.
  int64_t pending(const DeltaRun& run) const { return run.start ? run.start - base[run.row] : 0; }

  void check(const std::vector<DeltaRun>& runs) const {
    for (const DeltaRun& run : runs) {
      const int64_t count = pending(run);
      TORCH_CHECK(count >= 0 && count <= DELTA_WINDOW, "row ", run.row, " cannot go on at position ", run.start,
                  ": its state is that of ", run.start - count);
    }
  }
};

// An update of a matrix; none if the key is null.
struct DeltaUpdate {
  float decay;
  const float *key, *delta;
};

// Columns begin..begin + 16 V of `to` = `from` with the update, and of predicted and read, for one key and one query.
// With a null key they are left alone. `last`: the columns of the last vector.
template <int V>
void sweep_strip(const float* from, float* to, int64_t begin, int64_t last, int64_t dk, int64_t dv,
                 const DeltaUpdate& update, const float* key, const float* query, float* predicted, float* read) {
  f32x16 delta[V], sum_k[V], sum_q[V];
  const f32x16 decay = floats(update.decay);
  const auto width = [&](int i) { return i == V - 1 ? last : LANES; };
  for (int i = 0; i < V; i++) {
    sum_k[i] = sum_q[i] = floats(0.0f);
    if (update.key) delta[i] = load(update.delta + begin + i * LANES, width(i));
  }
  for (int64_t row = 0; row < dk; row++) {
    const f32x16 k = floats(key ? key[row] : 0.0f), q = floats(key ? query[row] : 0.0f);
    const f32x16 u = floats(update.key ? update.key[row] : 0.0f);
    for (int i = 0; i < V; i++) {
      const int64_t at = row * dv + begin + i * LANES;
      f32x16 w = load(from + at, width(i));
      if (update.key) w = fma(u, delta[i], w * decay);
      store(to + at, w, width(i));
      sum_k[i] = fma(k, w, sum_k[i]), sum_q[i] = fma(q, w, sum_q[i]);
    }
  }
  for (int i = 0; key && i < V; i++) {
    store(predicted + begin + i * LANES, sum_k[i], width(i));
    store(read + begin + i * LANES, sum_q[i], width(i));
  }
}

inline void sweep(const float* from, float* to, int64_t dk, int64_t dv, const DeltaUpdate& update, const float* key,
                  const float* query, float* predicted, float* read) {
  int64_t begin = 0;
  for (; begin + STRIP * LANES <= dv; begin += STRIP * LANES)
    sweep_strip<STRIP>(from, to, begin, LANES, dk, dv, update, key, query, predicted, read);
  for (; begin < dv; begin += LANES)
    sweep_strip<1>(from, to, begin, std::min<int64_t>(LANES, dv - begin), dk, dv, update, key, query, predicted, read);
}

inline float dot(const float* a, const float* b, int64_t n) {
  f32x16 sum = floats(0.0f);
  for (int64_t i = 0; i < n; i += LANES) sum = fma(load(a + i, n - i), load(b + i, n - i), sum);
  return sum_of_lanes(sum);
}

// The floats that a thread needs for `run_head`.
inline int64_t delta_scratch(const Delta& d) { return d.dk * d.dv + 3 * d.dv; }

// One value head of a run.
inline void run_head(const Delta& d, const DeltaRun& run, int64_t head, float* scratch) {
  const int64_t dk = d.dk, dv = d.dv, key_head = head % d.n, committed = run.committed(), pending = d.pending(run);
  float* matrix = d.matrix + (run.row * d.m + head) * dk * dv;
  float* later = scratch;  // the matrix after tokens that are pending
  float *predicted = scratch + dk * dv, *read = predicted + dv, *own_delta = read + dv;
  const auto window = [&](float* parts, int64_t i, int64_t heads, int64_t h, int64_t width) {
    return parts + ((run.row * DELTA_WINDOW + i) * heads + h) * width;
  };

  if (!run.start) std::fill(matrix, matrix + dk * dv, 0.0f);
  DeltaUpdate update{1.0f, nullptr, nullptr};
  for (int64_t i = 0; i < pending; i++) {
    if (i) sweep(matrix, matrix, dk, dv, update, nullptr, nullptr, nullptr, nullptr);
    update = {*window(d.decays, i, d.m, head, 1), window(d.keys, i, d.n, key_head, dk),
              window(d.deltas, i, d.m, head, dv)};
  }
  for (int64_t t = 0; t < int64_t(run.tokens.size()); t++) {
    const int64_t token = run.tokens[t];
    const float *q = d.q + token * d.k_stride + key_head * dk, *k = d.k + token * d.k_stride + key_head * dk;
    const float* v = d.v + token * d.v_stride + head * dv;
    const float decay = d.decay[token * d.m + head], beta = d.beta[token * d.m + head];
    sweep(t <= committed + 1 ? matrix : later, t <= committed ? matrix : later, dk, dv, update, k, q, predicted, read);

    float* delta = own_delta;
    if (t >= committed) {
      delta = window(d.deltas, t - committed, d.m, head, dv);
      *window(d.decays, t - committed, d.m, head, 1) = decay;
    }
    float* y = d.out + (token * d.m + head) * dv;
    const float product = dot(q, k, dk);
    for (int64_t i = 0; i < dv; i += LANES) {
      const int64_t left = dv - i;
      const f32x16 p = load(predicted + i, left), r = load(read + i, left);
      const f32x16 new_delta = floats(beta) * fnma(floats(decay), p, load(v + i, left));
      store(delta + i, new_delta, left);
      store(y + i, fma(floats(product), new_delta, floats(decay) * r), left);
    }
    update = {decay, k, delta};
  }
}

// This thread's share of a pass. `scratch` is the thread's own.
inline void run_delta(const Team& team, const Delta& d, const std::vector<DeltaRun>& runs, float* scratch) {
  team.split(runs.size() * d.m, 1, [&](int64_t i, int64_t end) {
    for (; i < end; i++) run_head(d, runs[i / d.m], i % d.m, scratch);
  });
  team.barrier();  // several value heads have read the pending keys of one key head
  team.split(runs.size(), 1, [&](int64_t i, int64_t end) {
    for (; i < end; i++) {
      const DeltaRun& run = runs[i];
      const int64_t committed = run.committed(), width = d.n * d.dk;
      for (int64_t t = committed; t < int64_t(run.tokens.size()); t++) {
        const float* k = d.k + run.tokens[t] * d.k_stride;
        std::copy(k, k + width, d.keys + (run.row * DELTA_WINDOW + t - committed) * width);
      }
      d.base[run.row] = run.start + committed;
    }
  });
}

}  // namespace fastpath
