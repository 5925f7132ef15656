// The gated delta rule, which mixers.recurrent.gated_delta specifies.
//
// Each value head of each row has a matrix M (dk,dv). A token t multiplies it by its decay, and adds its key times its
// delta. The update of a token is applied while the matrix is read for the next token, so that each token reads and
// writes the matrix once. If u is the update before t,
//   W = u.decay M + u.key u.delta^T,   predicted = W^T k_t,   read = W^T q_t
// and then, without reading the matrix again,
//   delta_t = beta_t (v_t - decay_t predicted),   y_t = decay_t read + (q_t . k_t) delta_t
//
// After a pass, the updates of its last tokens, up to 16 (DELTA_WINDOW), are pending: they are stored, but not applied
// to the matrix in memory, so that the row can go back to before any of these tokens. The next pass first applies the
// updates of the tokens before its own.
//
// One thread computes a head, token after token. So the bits of a row depend neither on the other rows, nor on the
// number of threads, nor on how its tokens are divided into passes.

#pragma once

#include "checks.h"

namespace fastpath {

constexpr int64_t DELTA_WINDOW = 16;  // the same as in kernels.py
// M is processed in strips of columns, whose width is given in vectors. The sums of a strip fit in the registers.
constexpr int STRIP = VECTOR_BITS == 512 ? 8 : 2;         // for one token: M is streamed from memory
constexpr int CACHED_STRIP = VECTOR_BITS == 512 ? 4 : 1;  // for several: the strip stays in the L1 cache

// The tokens of one row in a pass.
struct DeltaRun {
  int64_t row;
  int64_t start;                // the position of the first token
  std::vector<int64_t> tokens;  // their numbers b * S + s, by ascending position

  // How many of these tokens are not pending after the pass.
  int64_t committed() const { return std::max<int64_t>(0, tokens.size() - DELTA_WINDOW); }
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

// How many tokens of a row are pending when a run begins. `base` is the position of the first of them, for each row.
inline int64_t pending_tokens(const DeltaRun& run, const int64_t* base) {
  return run.start ? run.start - base[run.row] : 0;
}

inline void check_pending(const std::vector<DeltaRun>& runs, const int64_t* base) {
  for (const DeltaRun& run : runs) {
    const int64_t count = pending_tokens(run, base);
    TORCH_CHECK(count >= 0 && count <= DELTA_WINDOW, "row ", run.row, " cannot go on at position ", run.start,
                ": its state is that of ", run.start - count);
  }
}

// The state of one layer, and the inputs and outputs of one pass.
struct Delta {
  int64_t n, m, dk, dv;  // key heads, value heads, and their widths
  float* matrix;         // (R,m,dk,dv)
  float* keys;           // (R,W,n,dk), of the pending updates; W is DELTA_WINDOW
  float* deltas;         // (R,W,m,dv)
  float* decays;         // (R,W,m)
  int64_t* base;         // (R,), the position of the first pending token
  const float* q;        // (n,dk) of each token
  const float* k;        // (n,dk) of each token
  const float* v;        // (m,dv) of each token
  int64_t k_stride;      // floats between two tokens of q, and of k
  int64_t v_stride;      // floats between two tokens of v
  const float* decay;    // (B*S,m)
  const float* beta;     // (B*S,m)
  float* out;            // (B*S,m,dv)
};

// An update of a matrix. If the key is null, there is none.
struct DeltaUpdate {
  float decay;
  const float* key;    // (dk,)
  const float* delta;  // (dv,), from the first column of the strip on
};

// Goes once over a strip of M, which is V vectors wide; its last vector has `last` columns. UPDATES: `to` = `from` with
// the update. READS: predicted and read = the products with a key and a query. A stride is the distance of two rows.
template <int V, bool UPDATES, bool READS>
void sweep(const float* from, int64_t from_stride, float* to, int64_t to_stride, int64_t last, int64_t dk,
           const DeltaUpdate& update, const float* key, const float* query, f32x16 (&predicted)[V], f32x16 (&read)[V]) {
  f32x16 delta[V];
  const f32x16 decay = floats(update.decay);
  const auto width = [&](int i) { return i == V - 1 ? last : LANES; };
#pragma GCC unroll 8
  for (int i = 0; i < V; i++) {
    predicted[i] = read[i] = floats(0.0f);
    if (UPDATES) delta[i] = load(update.delta + i * LANES, width(i));
  }
  for (int64_t row = 0; row < dk; row++, from += from_stride, to += to_stride) {
    const f32x16 u = floats(UPDATES ? update.key[row] : 0.0f);
    const f32x16 k = floats(READS ? key[row] : 0.0f);
    const f32x16 q = floats(READS ? query[row] : 0.0f);
#pragma GCC unroll 8
    for (int i = 0; i < V; i++) {
      f32x16 w = load(from + i * LANES, width(i));
      if (UPDATES) w = fma(u, delta[i], w * decay);
      store(to + i * LANES, w, width(i));
      if (READS) {
        predicted[i] = fma(k, w, predicted[i]);
        read[i] = fma(q, w, read[i]);
      }
    }
  }
}

inline float dot(const float* a, const float* b, int64_t n) {
  f32x16 sum = floats(0.0f);
  for (int64_t i = 0; i < n; i += LANES) sum = fma(load(a + i, n - i), load(b + i, n - i), sum);
  return sum_of_lanes(sum);
}

// The floats that a thread needs for `run_head`: a strip, and one delta.
inline int64_t delta_scratch(const Delta& d) { return (d.dk + 1) * STRIP * LANES; }

// Computes columns begin..begin + 16 V of one value head of a run. Columns do not depend on each other.
template <int V>
void run_strip(const Delta& d, const DeltaRun& run, int64_t head, int64_t begin, int64_t last, float* scratch) {
  constexpr int64_t WIDTH = V * LANES;
  const int64_t dk = d.dk;
  const int64_t dv = d.dv;
  const int64_t key_head = head % d.n;
  const int64_t committed = run.committed();
  const int64_t count = run.tokens.size();
  const int64_t pending = pending_tokens(run, d.base);
  float* matrix = d.matrix + (run.row * d.m + head) * dk * dv + begin;
  float* strip = scratch;
  float* own_delta = scratch + dk * WIDTH;
  f32x16 predicted[V];
  f32x16 read[V];
  const auto window = [&](float* parts, int64_t i, int64_t heads, int64_t h, int64_t width) {
    return parts + ((run.row * DELTA_WINDOW + i) * heads + h) * width;
  };
  const auto width = [&](int i) { return i == V - 1 ? last : LANES; };

  if (!run.start)
    for (int64_t row = 0; row < dk; row++)
      for (int i = 0; i < V; i++) store(matrix + row * dv + i * LANES, floats(0.0f), width(i));
  // The first sweep reads the matrix. With several tokens, the sweeps write to a strip in the cache, which is copied to
  // the matrix when it has all updates that are not pending after the pass.
  const float* from = matrix;
  float* to = count > 1 ? strip : matrix;
  int64_t from_stride = dv;
  const int64_t to_stride = count > 1 ? WIDTH : dv;

  // Applies the pending updates except the last one, which the first token applies.
  DeltaUpdate update{1.0f, nullptr, nullptr};
  for (int64_t i = 0; i < pending; i++) {
    if (i) {
      sweep<V, true, false>(from, from_stride, to, to_stride, last, dk, update, nullptr, nullptr, predicted, read);
      from = to;
      from_stride = to_stride;
    }
    update.decay = *window(d.decays, i, d.m, head, 1);
    update.key = window(d.keys, i, d.n, key_head, dk);
    update.delta = window(d.deltas, i, d.m, head, dv) + begin;
  }
  for (int64_t t = 0; t < count; t++) {
    const int64_t token = run.tokens[t];
    const float* q = d.q + token * d.k_stride + key_head * dk;
    const float* k = d.k + token * d.k_stride + key_head * dk;
    const float* v = d.v + token * d.v_stride + head * dv + begin;
    const float decay = d.decay[token * d.m + head];
    const float beta = d.beta[token * d.m + head];
    if (update.key) sweep<V, true, true>(from, from_stride, to, to_stride, last, dk, update, k, q, predicted, read);
    else sweep<V, false, true>(from, from_stride, to, to_stride, last, dk, update, k, q, predicted, read);
    from = to;
    from_stride = to_stride;
    if (t == committed && count > 1)
      for (int64_t row = 0; row < dk; row++)
        for (int i = 0; i < V; i++)
          store(matrix + row * dv + i * LANES, load(strip + row * WIDTH + i * LANES, width(i)), width(i));

    float* delta = t < committed ? own_delta : window(d.deltas, t - committed, d.m, head, dv) + begin;
    float* y = d.out + (token * d.m + head) * dv + begin;
    const f32x16 product = floats(dot(q, k, dk));
    for (int i = 0; i < V; i++) {
      const f32x16 new_delta = floats(beta) * fnma(floats(decay), predicted[i], load(v + i * LANES, width(i)));
      store(delta + i * LANES, new_delta, width(i));
      store(y + i * LANES, fma(product, new_delta, floats(decay) * read[i]), width(i));
    }
    update = {decay, k, delta};
  }
}

// Computes one value head of a run, in strips of V vectors.
template <int V>
void run_head(const Delta& d, const DeltaRun& run, int64_t head, float* scratch) {
  int64_t i = 0;
  for (; i + V * LANES <= d.dv; i += V * LANES) run_strip<V>(d, run, head, i, LANES, scratch);
  for (; i < d.dv; i += LANES) run_strip<1>(d, run, head, i, std::min<int64_t>(LANES, d.dv - i), scratch);
  // All strips have read the pending decays.
  for (int64_t t = run.committed(); t < int64_t(run.tokens.size()); t++)
    d.decays[(run.row * DELTA_WINDOW + t - run.committed()) * d.m + head] = d.decay[run.tokens[t] * d.m + head];
}

// This thread's share of a pass. `scratch` is the thread's own.
inline void run_delta(const Team& team, const Delta& d, const std::vector<DeltaRun>& runs, float* scratch) {
  team.split(runs.size() * d.m, 1, [&](int64_t i, int64_t end) {
    for (; i < end; i++) {
      const DeltaRun& run = runs[i / d.m];
      if (run.tokens.size() == 1) run_head<STRIP>(d, run, i % d.m, scratch);
      else run_head<CACHED_STRIP>(d, run, i % d.m, scratch);
    }
  });
  team.barrier();  // now all value heads have read the pending keys, which are overwritten here
  team.split(runs.size(), 1, [&](int64_t i, int64_t end) {
    for (; i < end; i++) {
      const DeltaRun& run = runs[i];
      const int64_t committed = run.committed();
      const int64_t width = d.n * d.dk;
      for (int64_t t = committed; t < int64_t(run.tokens.size()); t++) {
        const float* k = d.k + run.tokens[t] * d.k_stride;
        std::copy(k, k + width, d.keys + (run.row * DELTA_WINDOW + t - committed) * width);
      }
      d.base[run.row] = run.start + committed;
    }
  });
}

}  // namespace fastpath
