// Medusa heads (drafts/heads.py), greedily, as one operation.

#pragma once

#include <bit>

#include "blocks.h"
#include "checks.h"

namespace fastpath {

// The index of the first of the largest of n numbers.
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

// The k tokens (B,k) that Medusa heads (drafts/heads.py) propose for each row: each is the likeliest of the draft
// vocabulary. states (B,D): the hidden states that the newest tokens (B,) were sampled from. ids (W,): the draft
// vocabulary's tokens. layers: handles of the model's embedding (V,D), of the heads' gate_up (2F,2D) and down (D,F),
// and of the draft vocabulary's rows of the output head (W,D), whose products with a hidden state are the logits.
Tensor medusa(const Tensor& states, const Tensor& tokens, const Tensor& ids, at::IntArrayRef layers, int64_t k) {
  TORCH_CHECK(states.dim() == 2 && layers.size() == 4, "states (B,D) and 4 layers were expected");
  std::vector<std::shared_ptr<const PreparedLayer>> prepared;
  for (int64_t layer : layers) prepared.push_back(prepared_layers.get(layer));
  const int64_t B = states.size(0), D = states.size(1), V = prepared[0]->layer.N, F = prepared[2]->layer.C;
  const int64_t W = ids.numel();
  const auto dtype = states.scalar_type();
  const Layer table = prepared[0]->checked(dtype, V, D);
  const Layer gate_up = prepared[1]->checked(dtype, 2 * F, 2 * D);
  const Layer down = prepared[2]->checked(dtype, D, F);
  const Layer output = prepared[3]->checked(dtype, W, D);
  const Tensor drafted = at::empty({B, k}, tokens.options());
  const Tensor from = states.contiguous();
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
      a.to_up = allocate_input(arena, gate_up, a.x, B);
      a.to_down = allocate_input(arena, down, a.act, B);
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
          look_up(table.pieces.at(0), std::clamp<int64_t>(i ? to[b * k + i - 1] : first_tokens[b], 0, V - 1), x + D);
          rms_norm_row(x + D, a.ones, x + D, D, eps);
          prepare_input<T>(gate_up, a.to_up, b, 0, gate_up.groups());
        });
        matmul<T>(team, gate_up, a.to_up, B, nullptr, a.up);
        team.barrier();
        by_rows([&](int64_t b) {
          for (int64_t f = 0; f < F; f += LANES) {
            const T* from = a.up + b * 2 * F + f;
            const f32x16 gate = load(from, F - f);
            const f32x16 up = load(from + F, F - f);
            const f32x16 silu = gate / (floats(1.0f) + fast_exp(floats(0.0f) - gate));
            store(a.act + b * F + f, silu * up, F - f);
          }
          prepare_input<T>(down, a.to_down, b, 0, down.groups());
        });
        T* next = a.state[i % 2];
        matmul<T>(team, down, a.to_down, B, state, next);
        team.barrier();
        state = next;
        prepare_input_rows<T>(team, output, a.to_output[i % 2], B);
        matmul<T>(team, output, a.to_output[i % 2], B, nullptr, a.logits);
        team.barrier();
        by_rows([&](int64_t b) { to[b * k + i] = id[first_maximum(a.logits + b * W, W)]; });
      }
    });
  });
  return drafted;
}

}  // namespace fastpath
