// Norms, and transformer blocks.
//
// All blocks of a model run as one operation, in one parallel region: threads are woken once for each forward pass.
// Results between the steps of a block are rounded to x's dtype, as in model.py.

#pragma once

#include <array>
#include <optional>

#include "attention.h"
#include "delta.h"
#include "experts.h"

namespace fastpath {

// ---------------------------------------------------------------- norms: one thread per row, sums in float32

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
  f32x16 sum = floats(0.0f);
  f32x16 squares = floats(0.0f);
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

// out = x + scale y, where each step is rounded to T. `out` must not be x.
template <class T>
void add_scaled_row(const T* x, const T* y, float scale, T* out, int64_t D) {
  for (int64_t i = 0; i < D; i += LANES) {
    store(out + i, load(y + i, D - i) * floats(scale), D - i);
    store(out + i, load(x + i, D - i) + load(out + i, D - i), D - i);
  }
}

// ---------------------------------------------------------------- blocks

constexpr int64_t MAX_CONV_WIDTH = 16;  // the same as in install.py
constexpr float L2_EPS = 1e-6f;         // the same as in mixers/recurrent.py

inline f32x16 sigmoid(f32x16 x) { return floats(1.0f) / (floats(1.0f) + fast_exp(floats(0.0f) - x)); }

// A causal convolution over the latest tokens, separately in each channel.
struct Convolution {
  int64_t channels = 0;
  int64_t width = 0;
  const float* weight;  // (width,channels)
  const float* bias;    // (channels,) or null

  // How many inputs of each row are stored: as many as a token needs, and 16 more, so that the row can go back.
  int64_t tail_size() const { return DELTA_WINDOW + width - 1; }
};

// The sizes and the vectors of a gated delta net.
struct DeltaNet {
  int64_t n = 0, m = 0, dk = 0, dv = 0;  // key heads, value heads, and their widths
  const float* decay_weight;             // (m,)
  const float* decay_bias;               // (m,)
  const float* norm;                     // (dv,)
};

// The norm before attention or MLP.
struct Norm {
  const float* weight;  // (D,), or null if there is no norm
  const float* bias;    // (D,) of a LayerNorm; null for RMSNorm
};

// The part of a block that is the same in all calls. prepare_block checks it once.
struct PreparedBlock {
  std::vector<Tensor> tensors;  // own the memory that the pointers below refer to
  std::vector<std::shared_ptr<const PreparedLayer>> layers;  // own the memory of the layers below
  at::ScalarType dtype;
  int64_t D, F;
  float eps;
  float residual_scale;     // of the outputs of token mixer and MLP, before they are added to x
  bool post_norm_residual;  // these outputs are added to the normed inputs, not to x
  float layer_scale;        // of the result of the block
  Activation activation;

  // The token mixer: attention; or a gated delta net, if net.m is not 0; or else a short convolution, if conv.channels
  // is not 0. Null where the model has no such norm.
  Layer qkv;  // the input projection of the token mixer; of attention: q, their gates, k, v
  Layer out;
  Norm attention_norm;
  const float* attention_post_norm;  // (D,)
  Convolution conv;                  // of a gated delta net, or a short convolution
  DeltaNet net;

  // Attention:
  int64_t H, K, E;
  int64_t gates;  // query heads that have a gate for their outputs: H or 0
  int64_t window;
  float scale;  // of the products of queries and keys
  bool qk_norm_whole;
  const float* q_norm;  // (E,), or (H*E,) if qk_norm_whole
  const float* k_norm;  // (E,), or (K*E,)
  const float* v_norm;  // (E,)
  bool keys_as_values;  // qkv has no values: they are its keys, before k_norm and RoPE
  bool shares_cache;    // qkv has no keys and no values: an earlier block has written them
  int64_t rope_table;   // which of the tables of cos and sin it uses
  bool only_keys;       // computes only keys and values, and no result: the block has no layer except qkv

  // The MLP, or a sparse MLP, if `experts` is not null.
  Layer up;  // or gate and up
  Layer down;
  Norm mlp_norm;
  const float* mlp_post_norm;  // (D,)
  std::shared_ptr<const PreparedExperts> experts;

  // What adds the block's own input, if P is not 0: see LayerInput of model.py.
  int64_t P;
  Layer own_gate;         // (P,D)
  Layer own_proj;         // (D,P)
  const float* own_norm;  // (D,)
  float mlp_scale() const { return P ? 1.0f : layer_scale; }  // of the result of the MLP

  // How many heads of a token in qkv are not queries or gates.
  int64_t new_heads() const { return shares_cache ? 0 : (keys_as_values ? 1 : 2) * K; }
};

// One call of a block.
template <class T>
struct Block {
  const PreparedBlock& prepared;
  int64_t M;  // B * S tokens
  const T* x;  // (M,D)
  T* result;   // (M,D), may be x
  const T* own_input;   // (M,P), with own_stride elements between two tokens; or null
  int64_t own_stride;

  // Of attention:
  Attention<T> attention;     // allocate() sets q and out. Other token mixers use its B, S, positions and rows
  const SplitPlan* plan;
  const float* cos;           // (M,E), or null
  const float* sin;           // (M,E), or null
  const float* query_scales;  // (slots,), the factor of a query at each position; or null
  T* k;                       // the caches of `attention`, for writing
  T* v;

  // Of a gated delta net or a short convolution:
  Delta delta;    // allocate() sets its inputs and outputs
  int64_t* base;  // (R,)
  T* tail;        // (R,tail_size+1,channels)
  const std::vector<DeltaRun>* runs;

  Experts<T> experts;  // allocate() sets its inputs and temporary arrays

  // Temporary arrays, from allocate():
  T* normed;      // (M,D)
  T* qkv;         // (M,(H+2K)*E), or what the layer qkv gives
  T* attended;    // (M,H*E), the output of the token mixer before the layer `out`
  T* residual;    // (M,D)
  T* mlp_normed;  // (M,D)
  T* up;          // (M,F or 2F)
  T* act;         // (M,F)
  T* product;     // (M,D), what the token mixer or the MLP adds to x
  T* own_gated;   // (M,P)
  Input to_qkv;
  Input to_out;
  Input to_up;
  Input to_down;
  Input to_own_gate;
  Input to_own_proj;
  std::vector<Workspace> workspaces;  // of each thread
  float* states;                      // of the chunks of attention: see SplitPlan
  T* conv_inputs;                     // (M,channels), the inputs of the convolution
  int64_t conv_stride;                // elements between two tokens of conv_inputs
  float* mixed;                       // (M,channels): q, k and v of the gated delta net
  float* decay;                       // (M,m)
  float* beta;                        // (M,m)
  std::vector<float*> scratch;        // of each thread, for the gated delta net

  void allocate(Arena& arena) {
    const PreparedBlock& p = prepared;
    normed = arena.allocate<T>(M * p.D);
    qkv = arena.allocate<T>(M * p.qkv.N);
    to_qkv = allocate_input(arena, p.qkv, normed, M);
    if (p.only_keys) return;
    attended = arena.allocate<T>(M * p.out.C);
    residual = arena.allocate<T>(M * p.D);
    mlp_normed = arena.allocate<T>(M * p.D);
    product = arena.allocate<T>(M * p.D);
    to_out = allocate_input(arena, p.out, attended, M);
    if (p.experts) {
      experts.allocate(arena, mlp_normed);
    } else {
      up = arena.allocate<T>(M * p.up.N);
      act = arena.allocate<T>(M * p.F);
      to_up = allocate_input(arena, p.up, mlp_normed, M);
      to_down = allocate_input(arena, p.down, act, M);
    }
    if (p.P) {
      own_gated = arena.allocate<T>(M * p.P);
      to_own_gate = allocate_input(arena, p.own_gate, normed, M);
      to_own_proj = allocate_input(arena, p.own_proj, own_gated, M);
    }
    if (p.net.m) return allocate_delta(arena);
    if (p.conv.channels) {
      conv_inputs = arena.allocate<T>(M * p.conv.channels);
      conv_stride = p.conv.channels;
      return;
    }
    workspaces = Workspace::allocate(arena, attention);
    states = plan->allocate(arena, attention);
    attention.q = qkv;
    attention.q_stride = p.qkv.N;
    attention.out = attended;
  }

  void allocate_delta(Arena& arena) {
    const DeltaNet& net = prepared.net;
    const int64_t channels = prepared.conv.channels;
    conv_inputs = qkv;
    conv_stride = prepared.qkv.N;
    mixed = arena.allocate<float>(M * channels);
    decay = arena.allocate<float>(M * net.m);
    beta = arena.allocate<float>(M * net.m);
    delta.q = mixed;
    delta.k = mixed + net.n * net.dk;
    delta.v = mixed + 2 * net.n * net.dk;
    delta.k_stride = delta.v_stride = channels;
    delta.decay = decay;
    delta.beta = beta;
    delta.out = arena.allocate<float>(M * net.m * net.dv);
    scratch.resize(omp_get_max_threads());
    for (float*& one : scratch) one = arena.allocate<float>(delta_scratch(delta));
  }

  // to = the norm of `from`, or a copy if there is no norm. Then convert(m) for each row converts it for a product.
  template <class Convert>
  void apply_norm(const Team& team, const T* from, const Norm& norm, T* to, const Convert& convert) const {
    const int64_t D = prepared.D;
    team.split(M, 1, [&](int64_t m, int64_t end) {
      for (; m < end; m++) {
        if (!norm.weight) std::copy(from + m * D, from + (m + 1) * D, to + m * D);
        else if (norm.bias) layer_norm_row(from + m * D, norm.weight, norm.bias, to + m * D, D, prepared.eps);
        else rms_norm_row(from + m * D, norm.weight, to + m * D, D, prepared.eps);
        convert(m);
      }
    });
    team.barrier();
  }

  void apply_norm(const Team& team, const T* from, const Norm& norm, T* to, const Layer& l, const Input& in) const {
    apply_norm(team, from, norm, to, [&](int64_t m) { prepare_input<T>(l, in, m, 0, l.groups()); });
  }

  // to = (from + the product of a layer, after a norm (if post_norm is not null) and the residual scale) * scale.
  void add_product(const Team& team, const Layer& l, const Input& in, const T* from, const float* post_norm,
                   float scale, T* to) const {
    const bool is_sum = !post_norm && prepared.residual_scale == 1.0f && scale == 1.0f;
    T* y = is_sum ? to : product;
    matmul<T>(team, l, in, M, is_sum ? from : nullptr, y);
    team.barrier();
    if (is_sum) return;
    team.split(M, 1, [&](int64_t m, int64_t end) {
      for (; m < end; m++) add_scaled(m, from, y, post_norm, scale, to);
    });
    team.barrier();
  }

  void add_scaled(int64_t m, const T* from, T* y, const float* post_norm, float scale, T* to) const {
    const int64_t D = prepared.D;
    T* row = y + m * D;
    if (post_norm) rms_norm_row(row, post_norm, row, D, prepared.eps);
    add_scaled_row(from + m * D, row, prepared.residual_scale, to + m * D, D);
    if (scale != 1.0f) scale_row(to + m * D, scale, D);
  }

  void run_experts(const Team& team, T* to) const {
    const PreparedBlock& p = prepared;
    apply_norm(team, residual, p.mlp_norm, mlp_normed, [&](int64_t m) { experts.prepare_row(m); });
    experts.run(team);
    const T* from = p.post_norm_residual ? mlp_normed : residual;
    const bool is_sum = !p.mlp_post_norm && p.residual_scale == 1.0f && p.mlp_scale() == 1.0f;
    team.split(M, 1, [&](int64_t m, int64_t end) {
      for (; m < end; m++) {
        experts.add_outputs(m, is_sum ? from + m * p.D : nullptr, (is_sum ? to : product) + m * p.D);
        if (!is_sum) add_scaled(m, from, product, p.mlp_post_norm, p.mlp_scale(), to);
      }
    });
    team.barrier();
  }

  // QK-norm, RoPE (arXiv:2104.09864) and the scale of queries, in place; then keys and values are copied to the caches,
  // values with their norm. The heads of a token in qkv are queries, gates, keys and values, in this order.
  void rotate_and_cache(const Team& team) const {
    const auto& a = attention;
    const int64_t E = a.E;
    const int64_t first_key = a.H + prepared.gates;
    const int64_t per_token = first_key + prepared.new_heads();
    if (prepared.qk_norm_whole) {
      team.split(M, 1, [&](int64_t m, int64_t end) {
        for (; m < end; m++) {
          T* q = qkv + m * per_token * E;
          T* k = q + first_key * E;
          rms_norm_row(q, prepared.q_norm, q, a.H * E, prepared.eps);
          if (prepared.k_norm) rms_norm_row(k, prepared.k_norm, k, a.K * E, prepared.eps);
        }
      });
      team.barrier();
    }
    team.split(M * per_token, 1, [&](int64_t at, int64_t end) {
      for (; at < end; at++) {
        const int64_t m = at / per_token;
        const int64_t h = at % per_token;
        if (h >= a.H && h < first_key) continue;  // a gate
        T* head = qkv + at * E;
        const float* weight = h < a.H ? prepared.q_norm : prepared.k_norm;
        const int64_t row = a.rows ? a.rows[m / a.S] : m / a.S;
        const int64_t slot = a.positions[m] < 0 ? a.slots - 1 : a.positions[m];  // padding goes to the scratch slot
        const int64_t in_cache = ((row * a.K + (h - first_key) % a.K) * a.slots + slot) * E;  // of a key or value
        const bool is_value = h >= first_key + a.K;
        if (is_value || (prepared.keys_as_values && h >= first_key)) {
          if (prepared.v_norm) rms_norm_row(head, prepared.v_norm, v + in_cache, E, prepared.eps);
          else std::copy(head, head + E, v + in_cache);
          if (is_value) continue;
        }
        if (weight && !prepared.qk_norm_whole) rms_norm_row(head, weight, head, E, prepared.eps);
        if (cos) rotate(head, cos + m * E, sin + m * E, E);
        if (h >= first_key) std::copy(head, head + E, k + in_cache);
        else if (query_scales) scale_row(head, query_scales[slot], E);
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
      const f32x16 a = load(x + e, n);
      const f32x16 b = load(x + half + e, n);
      store(x + e, fma(a, load(cos + e, n), b * load(sin + e, n)), n);
      store(x + half + e, fma(b, load(cos + half + e, n), a * load(sin + half + e, n)), n);
    }
  }

  // Multiplies the outputs of attention by the sigmoid of their gates.
  void apply_gates(const Team& team) const {
    const int64_t width = prepared.H * prepared.E;
    team.split(M, 1, [&](int64_t m, int64_t end) {
      for (; m < end; m++) {
        T* y = attended + m * width;
        const T* gate = qkv + m * prepared.qkv.N + width;
        for (int64_t i = 0; i < width; i += LANES)
          store(y + i, load(y + i, width - i) * sigmoid(load(gate + i, width - i)), width - i);
      }
    });
    team.barrier();
  }

  // ---------------------------------------------------------------- the convolution, as in mixers/recurrent.py

  // Stores the latest inputs of the convolution of each row.
  void write_tail(const Team& team) const {
    const Convolution& conv = prepared.conv;
    team.split(runs->size(), 1, [&](int64_t i, int64_t end) {
      for (; i < end; i++) {
        const DeltaRun& run = (*runs)[i];
        const int64_t count = run.tokens.size();
        for (int64_t t = std::max<int64_t>(0, count - conv.tail_size()); t < count; t++) {
          const T* from = conv_inputs + run.tokens[t] * conv_stride;
          std::copy(from, from + conv.channels, tail_of(run.row, run.start + t));
        }
      }
    });
    team.barrier();
  }

  T* tail_of(int64_t row, int64_t position) const {
    const Convolution& conv = prepared.conv;
    return tail + (row * (conv.tail_size() + 1) + position % conv.tail_size()) * conv.channels;
  }

  // What the convolution reads for a token: the inputs of the latest `width` tokens, or null before the first position.
  using ConvWindow = std::array<const T*, MAX_CONV_WIDTH>;
  ConvWindow window_of(int64_t m) const {
    const int64_t s = m % attention.S;
    const int64_t row = attention.rows ? attention.rows[m / attention.S] : m / attention.S;
    ConvWindow inputs;
    for (int64_t back = 0; back < prepared.conv.width; back++) {
      const int64_t position = attention.positions[m] - back;
      const T*& from = inputs[prepared.conv.width - 1 - back];
      if (position < 0) from = nullptr;
      else from = s >= back ? conv_inputs + (m - back) * conv_stride : tail_of(row, position);
    }
    return inputs;
  }

  // The result of the convolution in 16 channels, or in `count` of them if there are fewer.
  f32x16 convolve(const ConvWindow& inputs, int64_t channel, int64_t count) const {
    const Convolution& conv = prepared.conv;
    f32x16 y = conv.bias ? load(conv.bias + channel, count) : floats(0.0f);
    for (int64_t j = 0; j < conv.width; j++) {
      const float* weight = conv.weight + j * conv.channels + channel;
      if (inputs[j]) y = fma(load(inputs[j] + channel, count), load(weight, count), y);
    }
    return y;
  }

  // Runs `mix`, which reads the tail, and stores the inputs of the pass in the tail. In a pass of few tokens, several
  // batch rows may have tokens of the same row, so all of them are written before any is read. A longer pass may have
  // more tokens than fit into the tail, so it writes at the end.
  template <class Mix>
  void with_tail(const Team& team, const Mix& mix) const {
    const bool is_short = attention.S <= DELTA_WINDOW;
    if (is_short) write_tail(team);
    mix();
    if (!is_short) write_tail(team);
  }

  // ---------------------------------------------------------------- the short convolution, as in mixers/recurrent.py

  // Calls work(m, channel, count) for all tokens, in steps of 16 channels; `count` is how many channels are left.
  template <class Work>
  void for_channels(const Team& team, const Work& work) const {
    const int64_t D = prepared.conv.channels;
    const int64_t pieces = (D + LANES - 1) / LANES;
    team.split(M * pieces, 1, [&](int64_t at, int64_t end) {
      for (; at < end; at++) work(at / pieces, at % pieces * LANES, D - at % pieces * LANES);
    });
    team.barrier();
  }

  void run_short_conv(const Team& team) const {
    const int64_t D = prepared.conv.channels;
    // qkv has a gate of the inputs, a gate of the outputs, and the inputs.
    for_channels(team, [&](int64_t m, int64_t channel, int64_t count) {
      const T* gate = qkv + m * prepared.qkv.N + channel;
      store(conv_inputs + m * D + channel, load(gate, count) * load(gate + 2 * D, count), count);
    });
    with_tail(team, [&] {
      for_channels(team, [&](int64_t m, int64_t channel, int64_t count) {
        f32x16 y = floats(0.0f);  // the result for padding
        if (attention.positions[m] >= 0) y = convolve(window_of(m), channel, count);
        store(attended + m * D + channel, load(qkv + m * prepared.qkv.N + D + channel, count) * y, count);
      });
    });
    team.split(runs->size(), 1, [&](int64_t i, int64_t end) {
      for (; i < end; i++) base[(*runs)[i].row] = (*runs)[i].start + (*runs)[i].committed();
    });
  }

  // ---------------------------------------------------------------- the gated delta net, as in mixers/recurrent.py

  // mixed = q, k and v of all tokens: the convolution, SiLU, and then q and k are scaled to fixed lengths. It also
  // computes decay and beta.
  void mix(const Team& team) const {
    const DeltaNet& net = prepared.net;
    const int64_t heads = 2 * net.n + net.m;
    team.split(M * heads, 1, [&](int64_t at, int64_t end) {
      for (; at < end; at++) {
        const int64_t m = at / heads;
        const int64_t head = at % heads;
        if (attention.positions[m] < 0) continue;
        if (head < 2 * net.n) mix_head(m, head * net.dk, net.dk, head < net.n ? 1 / std::sqrt(float(net.dk)) : 1.0f);
        else mix_head(m, 2 * net.n * net.dk + (head - 2 * net.n) * net.dv, net.dv, 0.0f);
      }
    });
    team.split(M, 1, [&](int64_t m, int64_t end) {
      for (; m < end; m++) {
        const T* from = qkv + m * prepared.qkv.N + prepared.conv.channels + net.m * net.dv;
        for (int64_t h = 0; h < net.m; h++) {
          const float step = float(from[net.m + h]) + net.decay_bias[h];
          const float softplus = step > 20 ? step : std::log1p(std::exp(step));  // as in torch
          beta[m * net.m + h] = 1 / (1 + std::exp(-float(from[h])));
          decay[m * net.m + h] = std::exp(net.decay_weight[h] * softplus);
        }
      }
    });
    team.barrier();
  }

  // Computes channels first..first + width of token m, one head. If length is not 0, the head is scaled to this length.
  void mix_head(int64_t m, int64_t first, int64_t width, float length) const {
    const ConvWindow inputs = window_of(m);
    float* out = mixed + m * prepared.conv.channels + first;
    f32x16 squares = floats(0.0f);
    for (int64_t i = 0; i < width; i += LANES) {
      f32x16 y = convolve(inputs, first + i, width - i);
      y = y * sigmoid(y);
      squares = fma(y, y, squares);
      store(out + i, y, width - i);
    }
    if (length == 0) return;
    const f32x16 scale = floats(length / std::sqrt(sum_of_lanes(squares) + L2_EPS));
    for (int64_t i = 0; i < width; i += LANES) store(out + i, load(out + i, width - i) * scale, width - i);
  }

  // attended = the norm of the output of each head, times SiLU of its gate.
  void apply_delta_gates(const Team& team) const {
    const DeltaNet& net = prepared.net;
    team.split(M * net.m, 1, [&](int64_t at, int64_t end) {
      for (; at < end; at++) {
        const int64_t m = at / net.m;
        const int64_t head = at % net.m;
        float* y = delta.out + at * net.dv;
        T* to = attended + at * net.dv;
        if (attention.positions[m] < 0) {
          std::fill(to, to + net.dv, T(0.0f));
          continue;
        }
        const T* gate = qkv + m * prepared.qkv.N + prepared.conv.channels + head * net.dv;
        rms_norm_row(y, net.norm, y, net.dv, prepared.eps);
        for (int64_t i = 0; i < net.dv; i += LANES) {
          const f32x16 g = load(gate + i, net.dv - i);
          store(to + i, load(y + i, net.dv - i) * g * sigmoid(g), net.dv - i);
        }
      }
    });
    team.barrier();
  }

  void run_delta_net(const Team& team) const {
    with_tail(team, [&] { mix(team); });
    run_delta(team, delta, *runs, scratch[team.thread]);
    team.barrier();
    apply_delta_gates(team);
  }

  // act = the activation of `up`. Then converts it for the down projection.
  void activate(const Team& team) const {
    const int64_t F = prepared.F;
    const int64_t groups = (F + GROUP - 1) / GROUP;
    team.split(M * groups, 1, [&](int64_t at, int64_t end) {
      for (; at < end; at++) {
        const int64_t m = at / groups;
        const int64_t group = at % groups;
        activate_row(up + m * prepared.up.N, F, group * GROUP, std::min(F, (group + 1) * GROUP), prepared.activation,
                     act + m * F);
        prepare_input<T>(prepared.down, to_down, m, group, group + 1);
      }
    });
    team.barrier();
  }

  void run(const Team& team) const {
    const PreparedBlock& p = prepared;
    team.begin(NORM);
    apply_norm(team, x, p.attention_norm, normed, p.qkv, to_qkv);
    team.begin(QKV);
    matmul<T>(team, p.qkv, to_qkv, M, nullptr, qkv);
    team.barrier();
    team.begin(p.conv.channels ? RECURRENT : ATTENTION);
    if (p.net.m) {
      run_delta_net(team);
    } else if (p.conv.channels) {
      run_short_conv(team);
    } else {
      rotate_and_cache(team);
      if (p.only_keys) return;
      run_attention(team, attention, *plan, workspaces[team.thread], states);
      if (p.gates) apply_gates(team);
    }
    team.begin(OUT);
    prepare_input_rows<T>(team, p.out, to_out, M);
    add_product(team, p.out, to_out, p.post_norm_residual ? normed : x, p.attention_post_norm, 1.0f, residual);
    team.begin(p.experts ? EXPERTS : NORM);
    T* to = p.P ? normed : result;  // the result of the MLP
    if (p.experts) run_experts(team, to);
    else run_mlp(team, to);
    if (p.P) add_own_input(team);
  }

  void run_mlp(const Team& team, T* to) const {
    const PreparedBlock& p = prepared;
    apply_norm(team, residual, p.mlp_norm, mlp_normed, p.up, to_up);
    team.begin(UP);
    matmul<T>(team, p.up, to_up, M, nullptr, up);
    team.barrier();
    activate(team);
    team.begin(DOWN);
    const T* from = p.post_norm_residual ? mlp_normed : residual;
    add_product(team, p.down, to_down, from, p.mlp_post_norm, p.mlp_scale(), to);
  }

  // result = (normed + the norm of own_proj(gelu(own_gate(normed)) * own_input)) * the scale of the block.
  void add_own_input(const Team& team) const {
    const PreparedBlock& p = prepared;
    prepare_input_rows<T>(team, p.own_gate, to_own_gate, M);
    matmul<T>(team, p.own_gate, to_own_gate, M, nullptr, own_gated);
    team.barrier();
    team.split(M, 1, [&](int64_t m, int64_t end) {
      for (; m < end; m++) {
        T* row = own_gated + m * p.P;
        const T* own = own_input + m * own_stride;
        activate_row(row, p.P, 0, p.P, Activation{.gated = false, .kind = Activation::GELU}, row);
        for (int64_t i = 0; i < p.P; i += LANES) store(row + i, load(row + i, p.P - i) * load(own + i, p.P - i), p.P - i);
        prepare_input<T>(p.own_proj, to_own_proj, m, 0, p.own_proj.groups());
      }
    });
    team.barrier();
    add_product(team, p.own_proj, to_own_proj, normed, p.own_norm, p.layer_scale, result);
  }
};

}  // namespace fastpath
