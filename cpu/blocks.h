// Norms, and transformer blocks.
//
// All blocks of a model run as one operation, in one parallel region: threads are woken once for each forward pass.
// Results between the steps of a block are rounded to x's dtype, as in model.py.

#pragma once

#include <optional>

#include "attention.h"
#include "checks.h"

namespace fastpath {

// ---------------------------------------------------------------- norms: one thread a row, sums in float32

// W is the type of the weights: T or float.
template <class T, class W>
void rms_norm_row(const T* x, const W* w, T* out, int64_t D, float eps) {
  f32x16 squares = floats(0.0f);
  for (int64_t i = 0; i < D; i += LANES) {
    const f32x16 v = load(x + i, D - i);
    squares = fma(v, v, squares);
  }
  const f32x16 scale = floats(1.0f / std::sqrt(sum_of_lanes(squares) / D + eps));
  for (int64_t i = 0; i < D; i += LANES) store(out + i, load(x + i, D - i) * scale * load(w + i, D - i), D - i);
}

template <class T, class W>
void layer_norm_row(const T* x, const W* w, const W* bias, T* out, int64_t D, float eps) {
  f32x16 sum = floats(0.0f), squares = floats(0.0f);
  for (int64_t i = 0; i < D; i += LANES) sum = sum + load(x + i, D - i);
  const float mean = sum_of_lanes(sum) / D;
  for (int64_t i = 0; i < D; i += LANES) {
    const f32x16 v = first_of(load(x + i, D - i) - floats(mean), D - i);
    squares = fma(v, v, squares);
  }
  const f32x16 scale = floats(1.0f / std::sqrt(sum_of_lanes(squares) / D + eps));
  for (int64_t i = 0; i < D; i += LANES) {
    const f32x16 v = (load(x + i, D - i) - floats(mean)) * scale;
    store(out + i, fma(v, load(w + i, D - i), load(bias + i, D - i)), D - i);
  }
}

// out = x + scale y, where each step is rounded to T. out is not x.
template <class T>
void add_scaled_row(const T* x, const T* y, float scale, T* out, int64_t D) {
  for (int64_t i = 0; i < D; i += LANES) {
    store(out + i, load(y + i, D - i) * floats(scale), D - i);
    store(out + i, load(x + i, D - i) + load(out + i, D - i), D - i);
  }
}

// ---------------------------------------------------------------- blocks

// The part of a block that is the same in all calls. prepare_block checks it once.
struct PreparedBlock {
  std::vector<MaybeTensor> norms;  // own the memory that the pointers below refer to, as `layers` do
  std::vector<std::shared_ptr<const PreparedLayer>> layers;
  at::ScalarType dtype;
  int64_t H, K, E, D, F, window;
  Layer qkv, out, up, down;
  // Null where the model has none.
  const float *attention_norm[2], *mlp_norm[2];  // weight and bias; RMSNorm has no bias
  const float *q_norm, *k_norm, *attention_post_norm, *mlp_post_norm;
  // scale: of attention's scores. residual_scale: what the outputs of attention and MLP are multiplied
  // by before they are added to x.
  float scale, eps, residual_scale;
  bool gated, gelu, qk_norm_whole, post_norm_residual;
  int64_t rope_table;  // which of the tables of cos and sin it uses
};

// One call of a block.
template <class T>
struct Block {
  const PreparedBlock& prepared;
  const SplitPlan& plan;
  Attention<T> attention;  // allocate() fills in q and out
  int64_t M;  // B * S tokens
  const float *cos, *sin;  // (M,E), or null
  const float* query_scales;  // for each slot, the factor of a query at this position; or null
  T *k, *v;  // the caches of `attention`, for writing
  const T* x;  // (M,D)
  T* result;  // (M,D), may be x

  // Temporary arrays, from allocate():
  T *normed, *qkv, *attended;           // (M,D), (M,(H+2K)*E), (M,H*E)
  T *residual, *mlp_normed, *up, *act;  // (M,D), (M,D), (M,F or 2F), (M,F)
  T* product;                           // (M,D), what attention or MLP adds to x
  Input to_qkv, to_out, to_up, to_down;
  std::vector<Workspace> workspaces;
  float* states;  // of attention's chunks: see SplitPlan

  void allocate(Arena& arena) {
    const PreparedBlock& p = prepared;
    normed = arena.allocate<T>(M * p.D), qkv = arena.allocate<T>(M * p.qkv.N);
    attended = arena.allocate<T>(M * p.out.C);
    residual = arena.allocate<T>(M * p.D), mlp_normed = arena.allocate<T>(M * p.D);
    up = arena.allocate<T>(M * p.up.N), act = arena.allocate<T>(M * p.F);
    product = arena.allocate<T>(M * p.D);
    to_qkv = allocate_input(arena, p.qkv, normed, M), to_out = allocate_input(arena, p.out, attended, M);
    to_up = allocate_input(arena, p.up, mlp_normed, M), to_down = allocate_input(arena, p.down, act, M);
    workspaces = Workspace::allocate(arena, attention);
    states = plan.allocate(arena, attention);
    attention.q = qkv, attention.q_stride = p.qkv.N, attention.out = attended;
  }

  // A norm before attention or MLP, if there is one, and the conversion of its result for the layer l.
  void norm(const Team& team, const T* from, const float* const (&weights)[2], T* to, const Layer& l,
            const Input& in) const {
    const float *weight = weights[0], *bias = weights[1];
    const int64_t D = prepared.D;
    team.split(M, 1, [&](int64_t m, int64_t end) {
      for (; m < end; m++) {
        if (!weight) std::copy(from + m * D, from + (m + 1) * D, to + m * D);
        else if (bias) layer_norm_row(from + m * D, weight, bias, to + m * D, D, prepared.eps);
        else rms_norm_row(from + m * D, weight, to + m * D, D, prepared.eps);
        prepare_input<T>(l, in, m, 0, l.groups());
      }
    });
    team.barrier();
  }

  // to = from + the product of a layer, which may have a norm and a scale.
  void add_product(const Team& team, const Layer& l, const Input& in, const T* from, const float* post_norm,
                   T* to) const {
    const bool is_sum = !post_norm && prepared.residual_scale == 1.0f;
    T* y = is_sum ? to : product;
    matmul<T>(team, l, in, M, is_sum ? from : nullptr, y), team.barrier();
    if (is_sum) return;
    const int64_t D = prepared.D;
    team.split(M, 1, [&](int64_t m, int64_t end) {
      for (; m < end; m++) {
        T* row = y + m * D;
        if (post_norm) rms_norm_row(row, post_norm, row, D, prepared.eps);
        add_scaled_row(from + m * D, row, prepared.residual_scale, to + m * D, D);
      }
    });
    team.barrier();
  }

  // QK-norm, RoPE (arXiv:2104.09864) and the scale of queries, in place; then keys and values are copied to the caches.
  void rotate_and_cache(const Team& team) const {
    const auto& a = attention;
    const int64_t E = a.E, per_token = a.H + 2 * a.K;
    if (prepared.qk_norm_whole) {
      team.split(M, 1, [&](int64_t m, int64_t end) {
        for (; m < end; m++) {
          T *q = qkv + m * per_token * E, *k = q + a.H * E;
          rms_norm_row(q, prepared.q_norm, q, a.H * E, prepared.eps);
          rms_norm_row(k, prepared.k_norm, k, a.K * E, prepared.eps);
        }
      });
      team.barrier();
    }
    team.split(M * per_token, 1, [&](int64_t at, int64_t end) {
      for (; at < end; at++) {
        const int64_t m = at / per_token, h = at % per_token;
        T* head = qkv + at * E;
        const float* weight = h < a.H ? prepared.q_norm : prepared.k_norm;
        if (h < a.H + a.K) {
          if (weight && !prepared.qk_norm_whole) rms_norm_row(head, weight, head, E, prepared.eps);
          if (cos) rotate(head, cos + m * E, sin + m * E, E);
        }
        const int64_t slot = a.positions[m] < 0 ? a.slots - 1 : a.positions[m];  // padding goes to the scratch slot
        if (h < a.H) {
          if (query_scales) scale_row(head, query_scales[slot], E);
          continue;
        }
        const int64_t row = a.rows ? a.rows[m / a.S] : m / a.S;
        T* cache = h < a.H + a.K ? k : v;
        std::copy(head, head + E, cache + ((row * a.K + (h - a.H) % a.K) * a.slots + slot) * E);
      }
    });
    team.barrier();
  }

  static void scale_row(T* x, float scale, int64_t E) {
    for (int64_t e = 0; e < E; e += LANES) store(x + e, load(x + e, E - e) * floats(scale), E - e);
  }

  static void rotate(T* x, const float* cos, const float* sin, int64_t E) {
    const int64_t half = E / 2;
    for (int64_t e = 0; e < half; e += LANES) {
      const int64_t n = half - e;
      const f32x16 a = load(x + e, n), b = load(x + half + e, n);
      store(x + e, fma(a, load(cos + e, n), b * load(sin + e, n)), n);
      store(x + half + e, fma(b, load(cos + half + e, n), a * load(sin + half + e, n)), n);
    }
  }

  // act = SwiGLU, GeGLU or tanh-GELU of up, and its conversion for the down projection. All have the form x sigmoid(z).
  void activate(const Team& team) const {
    const int64_t F = prepared.F, groups = (F + GROUP - 1) / GROUP;
    team.split(M * groups, 1, [&](int64_t at, int64_t end) {
      for (; at < end; at++) {
        const int64_t m = at / groups, group = at % groups;
        for (int64_t f = group * GROUP; f < std::min(F, (group + 1) * GROUP); f += LANES) {
          const T* from = up + m * prepared.up.N + f;
          const f32x16 x = load(from, F - f);
          // SwiGLU: z = x. Tanh-GELU: z = 2 sqrt(2/pi) (x + 0.044715 x^3).
          const f32x16 z = !prepared.gelu ? x : floats(1.5957691216f) * (x + (x * x) * (x * floats(0.044715f)));
          f32x16 y = x / (floats(1.0f) + fast_exp(floats(0.0f) - z));
          if (prepared.gated) y = y * load(from + F, F - f);
          store(act + m * F + f, y, F - f);
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
    add_product(team, p.out, to_out, p.post_norm_residual ? normed : x, p.attention_post_norm, residual);
    norm(team, residual, p.mlp_norm, mlp_normed, p.up, to_up);
    matmul<T>(team, p.up, to_up, M, nullptr, up), team.barrier();
    activate(team);
    add_product(team, p.down, to_down, p.post_norm_residual ? mlp_normed : residual, p.mlp_post_norm, result);
  }
};

}  // namespace fastpath
