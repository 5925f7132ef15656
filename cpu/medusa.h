// Medusa heads (drafts/heads.py), greedily, as one operation.

#pragma once

#include <bit>

#include "blocks.h"
#include "checks.h"
#include "sampling.h"

namespace {

// Row `id` of a table of any layout, such as an embedding.
template <class T>
void look_up(const Linear& table, int64_t id, T* out) {
  if (table.bits == 16 && !table.Kb) {
    std::copy_n((const T*)table.weight + id * table.K, table.K, out);
    return;
  }
  const int64_t first = id / LANES * table.Kb, lane = id % LANES;  // the first group of its block
  const uint8_t* bytes = (const uint8_t*)table.weight;
  for (int64_t k = 0; k < table.K; k++) {
    const int64_t group = first + k / GROUP, c = k % GROUP;
    if (table.bits == 16) {
      out[k] = ((const T*)table.weight)[((group * GROUP / 2 + c / 2) * LANES + lane) * 2 + c % 2];
      continue;
    }
    const int64_t at = (id / LANES * table.G + k / GROUP / table.groups_per_scale) * LANES + lane;
    if (table.bits == 8) {
      out[k] = (bytes[((group * 8 + c / 4) * LANES + lane) * 4 + c % 4] - 128) * float(table.scales[at]);
    } else {
      const uint8_t both = bytes[((group * 4 + c % 16 / 4) * LANES + lane) * 4 + c % 4];
      out[k] = (c < 16 ? both & 15 : both >> 4) * float(table.scales[at]) + float(table.mins[at]);
    }
  }
}

// The index of the first of the largest of n numbers.
template <class T>
int64_t first_maximum(const T* x, int64_t n) {
  __m512 most = minus_infinity();
  for (int64_t i = 0; i < n; i += LANES) most = _mm512_max_ps(most, load_or_minus_infinity(x + i, n - i));
  const __m512 largest = _mm512_set1_ps(_mm512_reduce_max_ps(most));
  for (int64_t i = 0; i < n; i += LANES) {
    const __mmask16 equal = _mm512_cmpeq_ps_mask(load_or_minus_infinity(x + i, n - i), largest) & first_lanes(n - i);
    if (equal) return i + std::countr_zero(uint32_t(equal));
  }
  return 0;  // all are NaN
}

// The likeliest k tokens (B,k) that Medusa heads (drafts/heads.py) propose after tokens (B,), from hidden states (B,D), of
// the vocabulary ids (W,). weights: weight, scales and mins of the embedding; weight and scales of gate_up, of down,
// and of the output vectors. sizes: rows of the embedding, F, groupsize of the embedding, groupsize of the others.
Tensor medusa(const Tensor& states, const Tensor& tokens, const Tensor& ids, const c10::List<MaybeTensor>& weights,
              at::IntArrayRef sizes, int64_t k) {
  TORCH_CHECK(states.dim() == 2 && weights.size() == 9 && sizes.size() == 4, "9 weights and 4 sizes were expected");
  const int64_t B = states.size(0), D = states.size(1), V = sizes[0], F = sizes[1], W = ids.numel();
  const std::vector<MaybeTensor> w(weights.begin(), weights.end());
  for (int i : {0, 3, 5, 7}) TORCH_CHECK(w[i], "weight ", i, " is missing");
  const auto dtype = states.scalar_type();
  const Linear table = checked_layer(*w[0], w[1], w[2], {}, dtype, V, D, sizes[2], false);
  const Linear gate_up = checked_layer(*w[3], w[4], {}, {}, dtype, 2 * F, 2 * D, sizes[3], false);
  const Linear down = checked_layer(*w[5], w[6], {}, {}, dtype, D, F, sizes[3], false);
  const Linear output = checked_layer(*w[7], w[8], {}, {}, dtype, W, D, sizes[3], false);
  const Tensor drafted = at::empty({B, k}, tokens.options()), from = states.contiguous();
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
      a.to_up = allocate_input(arena, gate_up, a.x, B), a.to_down = allocate_input(arena, down, a.act, B);
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
          look_up(table, std::clamp<int64_t>(i ? to[b * k + i - 1] : first_tokens[b], 0, V - 1), x + D);
          rms_norm_row(x + D, a.ones, x + D, D, eps);
          prepare_input<T>(gate_up, a.to_up, b, 0, gate_up.Kb);
        });
        matmul<T>(team, gate_up, a.to_up, B, nullptr, a.up), team.barrier();
        by_rows([&](int64_t b) {
          for (int64_t f = 0; f < F; f += LANES) {
            const __mmask16 valid = first_lanes(F - f);
            const __m512 gate = load(a.up + b * 2 * F + f, valid), up = load(a.up + b * 2 * F + F + f, valid);
            const __m512 e = fast_exp(_mm512_sub_ps(_mm512_setzero_ps(), gate));
            const __m512 silu = _mm512_div_ps(gate, _mm512_add_ps(_mm512_set1_ps(1.0f), e));
            store(a.act + b * F + f, _mm512_mul_ps(silu, up), valid);
          }
          prepare_input<T>(down, a.to_down, b, 0, down.Kb);
        });
        T* next = a.state[i % 2];
        matmul<T>(team, down, a.to_down, B, state, next), team.barrier();
        state = next;
        prepare_input_rows<T>(team, output, a.to_output[i % 2], B);
        matmul<T>(team, output, a.to_output[i % 2], B, nullptr, a.logits), team.barrier();
        by_rows([&](int64_t b) { to[b * k + i] = id[first_maximum(a.logits + b * W, W)]; });
      }
    });
  });
  return drafted;
}

}  // namespace
