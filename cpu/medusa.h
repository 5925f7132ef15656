// Medusa heads (drafts/heads.py) as one operation, which draws the likeliest tokens.

#pragma once

#include <bit>

#include "blocks.h"
#include "checks.h"

namespace fastpath {

// The index of the largest of n numbers; of equal numbers, the first.
template <class T>
int64_t first_maximum(const T* x, int64_t n) {
  auto load_or_infinity = [&](int64_t i) {  // -infinity beyond the end
    return n - i >= LANES ? load(x + i) : where_below(lane_indices(), ints(n - i), load(x + i, n - i), floats(-INF));
  };
  f32x16 most = floats(-INF);
  for (int64_t i = 0; i < n; i += LANES) most = max(most, load_or_infinity(i));
  const f32x16 largest = floats(max_of_lanes(most));
  for (int64_t i = 0; i < n; i += LANES)
    if (const Lanes equal = equal_lanes(load_or_infinity(i), largest) & first_lanes(n - i))
      return i + std::countr_zero(equal);
  return 0;  // all are NaN
}

// The layers of Medusa heads, with the model's embedding and the draft vocabulary.
struct MedusaLayers {
  Linear embedding;  // (V,D)
  Layer gate_up;     // (2F,2D)
  Layer down;        // (D,F)
  Layer output;      // (W,D), the rows of the output head for the draft vocabulary: its products are the logits
};

// One call of the operation `medusa`.
template <class T>
struct Medusa {
  const MedusaLayers& layers;
  int64_t B, D, F, V, W;
  const T* states;        // (B,D)
  const int64_t* tokens;  // (B,), the newest tokens
  const int64_t* ids;     // (W,), the tokens of the draft vocabulary

  // Temporary arrays, from allocate():
  T* ones;    // (D,), the weight of norms without weights
  T* x;       // (B,2D)
  T* up;      // (B,2F)
  T* act;     // (B,F)
  T* state[2];  // (B,D) each, written in turns
  T* logits;  // (B,W)
  Input to_up;
  Input to_down;
  Input to_output[2];  // of each `state`

  void allocate(Arena& arena) {
    ones = arena.allocate<T>(D);
    x = arena.allocate<T>(B * 2 * D);
    up = arena.allocate<T>(B * 2 * F);
    act = arena.allocate<T>(B * F);
    for (T*& one : state) one = arena.allocate<T>(B * D);
    logits = arena.allocate<T>(B * W);
    to_up = allocate_input(arena, layers.gate_up, x, B);
    to_down = allocate_input(arena, layers.down, act, B);
    for (int i : {0, 1}) to_output[i] = allocate_input(arena, layers.output, state[i], B);
  }

  // x = the norms of the state and of the embedding of the token before, of row b.
  void prepare(int64_t b, const T* state, int64_t token) const {
    const float eps = std::numeric_limits<float>::epsilon();
    T* row = x + b * 2 * D;
    rms_norm_row(state + b * D, ones, row, D, eps);
    look_up(layers.embedding, std::clamp<int64_t>(token, 0, V - 1), row + D);
    rms_norm_row(row + D, ones, row + D, D, eps);
    prepare_input<T>(layers.gate_up, to_up, b, 0, layers.gate_up.groups());
  }

  void activate(int64_t b) const {
    activate_row(up + b * 2 * F, F, 0, F, SWIGLU, act + b * F);
    prepare_input<T>(layers.down, to_down, b, 0, layers.down.groups());
  }

  // drafted (B,k) = the tokens; each head continues from the state and the token of the head before it.
  void run(const Team& team, int64_t k, int64_t* drafted) const {
    auto by_rows = [&](const auto& work) {
      team.split(B, 1, [&](int64_t b, int64_t end) {
        for (; b < end; b++) work(b);
      });
      team.barrier();
    };
    const T* before = states;
    for (int64_t i = 0; i < k; i++) {
      T* next = state[i % 2];
      by_rows([&](int64_t b) { prepare(b, before, i ? drafted[b * k + i - 1] : tokens[b]); });
      matmul<T>(team, layers.gate_up, to_up, B, nullptr, up);
      team.barrier();
      by_rows([&](int64_t b) { activate(b); });
      matmul<T>(team, layers.down, to_down, B, before, next);
      team.barrier();
      prepare_input_rows<T>(team, layers.output, to_output[i % 2], B);
      matmul<T>(team, layers.output, to_output[i % 2], B, nullptr, logits);
      team.barrier();
      by_rows([&](int64_t b) { drafted[b * k + i] = ids[first_maximum(logits + b * W, W)]; });
      before = next;
    }
  }
};

// The k tokens (B,k) that Medusa heads (drafts/heads.py) propose for each row: each is the likeliest of the draft
// vocabulary. states (B,D): the hidden states that the newest tokens (B,) were sampled from. ids (W,): the tokens of
// the draft vocabulary. embedding, gate_up, down and output: handles of the layers in MedusaLayers.
Tensor medusa(const Tensor& states, const Tensor& tokens, const Tensor& ids, int64_t embedding, int64_t gate_up,
              int64_t down, int64_t output, int64_t k) {
  TORCH_CHECK(states.dim() == 2, "states (B,D) were expected, not ", states.sizes());
  const auto table = prepared_layers.get(embedding);
  const auto prepared_up = prepared_layers.get(gate_up);
  const auto prepared_down = prepared_layers.get(down);
  const auto prepared_output = prepared_layers.get(output);
  const int64_t B = states.size(0), D = states.size(1), F = prepared_down->layer.C, V = table->layer.N;
  const int64_t W = ids.numel();
  const auto dtype = states.scalar_type();
  const MedusaLayers layers{
      .embedding = table->checked(dtype, V, D).pieces.at(0),
      .gate_up = prepared_up->checked(dtype, 2 * F, 2 * D),
      .down = prepared_down->checked(dtype, D, F),
      .output = prepared_output->checked(dtype, W, D),
  };
  const Tensor drafted = at::empty({B, k}, tokens.options());
  const Tensor from = states.contiguous();
  dispatch_dtype(states, [&](auto type) {
    using T = decltype(type);
    Medusa<T> call{.layers = layers, .B = B, .D = D, .F = F, .V = V, .W = W};
    call.states = from.const_data_ptr<T>();
    call.tokens = checked(tokens, "tokens", at::kLong, {B}).template const_data_ptr<int64_t>();
    call.ids = checked(ids, "ids", at::kLong, {-1}).template const_data_ptr<int64_t>();
    const auto [arrays, memory] = allocate_together([&](Arena& arena) {
      Medusa<T> one = call;
      one.allocate(arena);
      return one;
    });
    std::fill_n(arrays.ones, D, T(1.0f));
    parallel(false, [&, &arrays = arrays](const Team& team) { arrays.run(team, k, drafted.data_ptr<int64_t>()); });
  });
  return drafted;
}

}  // namespace fastpath
