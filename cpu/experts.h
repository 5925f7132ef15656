// Sparse layers, as in mixers/experts.py: the router, and the MLPs of the experts that it chooses.
//
// A pass reads only the experts that its tokens have chosen, and reads each of them once. The rows of x are sorted by
// expert: then the rows of an expert are contiguous, and an expert is multiplied like any other matrix. The work of all
// experts together is divided among the threads, one contiguous part for each thread. So most threads read whole
// experts, which are long streams of memory.

#pragma once

#include "checks.h"
#include "matmul.h"

namespace fastpath {

// The activation of an MLP, as config.Config.mlp names it.
struct Activation {
  bool gated;  // the result is multiplied by `up`
  enum { SILU, GELU, RELU2 } kind;
};
constexpr Activation SWIGLU{.gated = true, .kind = Activation::SILU};

inline Activation activation_named(std::string_view name) {
  if (name == "swiglu") return SWIGLU;
  if (name == "geglu") return {.gated = true, .kind = Activation::GELU};
  if (name == "gelu") return {.gated = false, .kind = Activation::GELU};
  TORCH_CHECK(name == "relu2", "activation ", name, " is not known");
  return {.gated = false, .kind = Activation::RELU2};
}

// Applies the activation to hidden units f..end of a row of `up`, (F,) or, if gated, (2F,) with the gate first. SiLU
// and tanh-GELU have the form x sigmoid(z).
template <class T>
void activate_row(const T* up, int64_t F, int64_t f, int64_t end, Activation activation, T* out) {
  if (activation.kind == Activation::RELU2) {
    for (; f < end; f += LANES) {
      const f32x16 x = max(floats(0.0f), load(up + f, F - f));  // NaN stays NaN
      store(out + f, x * x, F - f);
    }
    return;
  }
  for (; f < end; f += LANES) {
    const f32x16 x = load(up + f, F - f);
    // SiLU: z = x. Tanh-GELU: z = 2 sqrt(2/pi) (x + 0.044715 x^3).
    const f32x16 z = activation.kind == Activation::SILU ? x : floats(1.5957691216f) * (x + (x * x) * (x * floats(0.044715f)));
    f32x16 y = x / (floats(1.0f) + fast_exp(floats(0.0f) - z));
    if (activation.gated) y = y * load(up + F + f, F - f);
    store(out + f, y, F - f);
  }
}

constexpr float MIN_SIGMOID_SUM = 1e-6f;  // as in mixers/experts.py

// The part of a sparse layer that is the same in all calls. prepare_experts checks it once.
struct PreparedExperts {
  std::vector<std::shared_ptr<const PreparedLayer>> layers;  // own the memory of the layers below
  at::ScalarType dtype;                                      // of the activations
  int64_t X, k, D, F;
  int64_t shared_F;  // hidden units of the shared expert; 0 if there is none
  bool normalized;   // the weights of the chosen experts are divided by their sum
  bool sigmoid = false;              // the scores are the sigmoids of the logits; otherwise their softmax
  float scale = 1;                   // of the weights
  std::optional<Tensor> choice_bias;  // (X,) float32, added to the scores to choose, or none
  std::optional<Tensor> scales;       // (X,) float32, of the weights of each expert, or none
  // The norms (D,) float32 of what the router and the experts read, if they read x through norms of their own, or none
  std::optional<Tensor> router_norm;
  std::optional<Tensor> norm;
  float eps;
  Activation activation;
  Layer router;      // (X,D) float32; with a shared expert (X+1,D), where the last row is the gate of that expert
  std::vector<Layer> gate_up;  // (2F,D) of each expert; then (2 shared_F,D) of the shared expert, if there is one
  std::vector<Layer> down;     // (D,F) of each expert; then (D,shared_F)

  int64_t multiply_adds(int64_t tokens) const { return tokens * ((router.N + 3 * k * F + 3 * shared_F) * D); }
};

// The matrix (N,C) of expert e in a stack of X matrices. The stack may have several pieces (gate and up), each with the
// same number of rows of every expert. In a packed piece, each expert begins a new block of 16 rows.
inline Layer layer_of_expert(const PreparedLayer& prepared, const Layer& stack, int64_t e, int64_t X, int64_t N) {
  Layer expert{.N = N, .C = stack.C};
  const int64_t rows = N / int64_t(stack.pieces.size());
  const int64_t blocks = (rows + LANES - 1) / LANES;
  for (Linear piece : stack.pieces) {
    TORCH_CHECK(piece.N == X * (piece.format == DENSE ? rows : blocks * LANES) && !piece.bias, "a stack of ", piece.N,
                " rows for ", X, " experts of ", rows);
    int64_t bytes = blocks * piece.block_bytes;
    if (!piece.is_quantized()) bytes = rows * stack.C * c10::elementSize(*prepared.dtype);
    piece.weight = (const uint8_t*)piece.weight + e * bytes;
    piece.N = rows;
    piece.first = expert.pieces.size() * rows;
    piece.stride = N;
    expert.pieces.push_back(piece);
  }
  return expert;
}

// An expert in one call, with the rows of x that it multiplies.
template <class T>
struct ExpertCall {
  const Layer* gate_up;
  const Layer* down;
  int64_t first;  // its first row in the sorted arrays
  int64_t rows;   // how many it has
  int64_t F;      // hidden units
  Input to_up;
  Input to_down;
  T* up;       // (rows,2F)
  T* act;      // (rows,F)
  T* product;  // (rows,D)
};

// A product of an expert with its rows.
template <class T>
struct ExpertProduct {
  const Layer& layer;
  const Input& in;
  T* out;
};

// The part of a converted x for an expert: `rows` rows from row `first` on, in tiles of their own.
template <class T>
Input rows_of(Input in, int64_t first, int64_t rows, int64_t C) {
  const int64_t groups = first * in.Cb;
  in.x = (const T*)in.x + first * C;
  in.M = rows;
  if (in.q) {
    in.q += groups * GROUP;
    in.scale += groups;
    in.sum += groups;
    in.scaled_sum += groups;
    for (int32_t*& sum : in.half_sum) sum += groups;
  }
  if (in.as_float) in.as_float += groups * GROUP;
  return in;
}

// One call of a sparse layer: allocate() before the parallel region; in it prepare_row for each row, run, and
// add_outputs for each row. A choice is one of the k experts of a token; there are M*k of them.
template <class T>
struct Experts {
  const PreparedExperts* p = nullptr;
  int64_t M = 0;             // tokens
  const int64_t* positions;  // (M,): -1 is padding, which uses no expert
  int64_t* counts;  // (X+1,): how many tokens have used each expert; last, how many experts all passes have read

  // Temporary arrays, from allocate():
  const T* input;          // (M,D), of the layer
  T* normed;               // (M,D), its norm, if the layer has one
  const T* x;              // (M,D), what the experts read: `normed`, or `input`
  float* as_float;         // (M,D), what the router reads
  float* logits;           // (M,X), or (M,X+1) with the gate of the shared expert
  float* weights;          // (M,k), of the chosen experts
  int32_t* ids;            // (M,k): the expert of each choice, or -1
  int32_t* sorted_rows;    // (M,k): the row of each choice in the sorted arrays
  int32_t* tokens;         // (M*k,): the token of each sorted row
  int32_t* calls_of_rows;  // (M*k,): the index in `calls` of each sorted row
  int32_t* starts;         // (X+1,): the first sorted row of each expert
  T* sorted;               // (M*k,D), rows of x
  T* up;                   // (M*k,2F)
  T* act;                  // (M*k,F)
  T* product;              // (M*k,D)
  T* shared_up;            // (M,2*shared_F)
  T* shared_act;           // (M,shared_F)
  T* shared_product;       // (M,D)
  Input to_router;
  Input to_up;
  Input to_down;
  Input to_shared_up;
  Input to_shared_down;
  ExpertCall<T>* calls;  // the experts that have any rows, then the shared expert
  int64_t* call_count;   // (1,)

  int64_t choices() const { return M * p->k; }

  // of_layer: (M,D), the input of the layer.
  void allocate(Arena& arena, const T* of_layer) {
    const int64_t R = choices(), D = p->D;
    input = of_layer;
    normed = p->norm ? arena.allocate<T>(M * D) : nullptr;
    x = normed ? normed : input;
    as_float = arena.allocate<float>(M * D);
    logits = arena.allocate<float>(M * p->router.N);
    to_router = allocate_input(arena, p->router, as_float, M);
    weights = arena.allocate<float>(R);
    ids = arena.allocate<int32_t>(R);
    sorted_rows = arena.allocate<int32_t>(R);
    tokens = arena.allocate<int32_t>(R);
    calls_of_rows = arena.allocate<int32_t>(R);
    starts = arena.allocate<int32_t>(p->X + 1);
    sorted = arena.allocate<T>(R * D);
    up = arena.allocate<T>(R * 2 * p->F);
    act = arena.allocate<T>(R * p->F);
    product = arena.allocate<T>(R * D);
    to_up = allocate_input(arena, p->gate_up[0], sorted, R);
    to_down = allocate_input(arena, p->down[0], act, R);
    calls = arena.allocate<ExpertCall<T>>(std::min(p->X, R) + 1);
    call_count = arena.allocate<int64_t>(1);
    if (!p->shared_F) return;
    shared_up = arena.allocate<T>(M * 2 * p->shared_F);
    shared_act = arena.allocate<T>(M * p->shared_F);
    shared_product = arena.allocate<T>(M * D);
    to_shared_up = allocate_input(arena, p->gate_up[p->X], x, M);
    to_shared_down = allocate_input(arena, p->down[p->X], shared_act, M);
  }

  // Computes row m of x, and converts it for the router and the shared expert.
  void prepare_row(int64_t m) const {
    const int64_t D = p->D;
    if (p->norm) {
      rms_norm_row(input + m * D, p->norm->template const_data_ptr<float>(), normed + m * D, D, p->eps);
      rms_norm_row(input + m * D, p->router_norm->template const_data_ptr<float>(), as_float + m * D, D, p->eps);
    } else {
      for (int64_t d = 0; d < D; d += LANES) store(as_float + m * D + d, load(x + m * D + d, D - d), D - d);
    }
    if (p->shared_F) prepare_input<T>(p->gate_up[p->X], to_shared_up, m, 0, p->gate_up[p->X].groups());
  }

  // The logit of an expert, or its sigmoid.
  float score(float logit) const { return p->sigmoid ? 1 / (1 + std::exp(-logit)) : logit; }

  // Chooses the k experts of token m with the largest scores plus biases; if they are equal, the expert with the lower
  // number. An insertion sort keeps the best k while all logits are read. Their weights are a softmax or the scores.
  void choose(int64_t m) const {
    const float* logit = logits + m * p->router.N;
    const int64_t k = p->k;
    int32_t* id = ids + m * k;
    float* weight = weights + m * k;
    std::fill(weight, weight + k, -INF);
    std::fill(id, id + k, positions[m] < 0 ? -1 : 0);
    if (positions[m] < 0) return;
    const float* bias = p->choice_bias ? p->choice_bias->template const_data_ptr<float>() : nullptr;
    for (int64_t e = 0; e < p->X; e++) {
      const float preference = score(logit[e]) + (bias ? bias[e] : 0);
      if (!(preference > weight[k - 1])) continue;
      int64_t at = k - 1;
      for (; at > 0 && preference > weight[at - 1]; at--) {
        weight[at] = weight[at - 1];
        id[at] = id[at - 1];
      }
      weight[at] = preference;
      id[at] = e;
    }
    const float total = p->sigmoid ? sigmoid_weights(logit, id, weight) : softmax_weights(logit, weight);
    const float* scale = p->scales ? p->scales->template const_data_ptr<float>() : nullptr;
    for (int64_t i = 0; i < k; i++) weight[i] = weight[i] / total * (scale ? scale[id[i]] : 1) * p->scale;
  }

  // Replaces the largest logits in `weight` by their exponentials. Returns what they are divided by.
  float softmax_weights(const float* logit, float* weight) const {
    const float largest = weight[0];
    float total = 0;
    if (!p->normalized) {
      for (int64_t e = 0; e < p->X; e++) total += std::exp(logit[e] - largest);
    }
    for (int64_t i = 0; i < p->k; i++) {
      weight[i] = std::exp(weight[i] - largest);
      if (p->normalized) total += weight[i];
    }
    return total;
  }

  // Writes the scores of the chosen experts to `weight`. Returns what they are divided by.
  float sigmoid_weights(const float* logit, const int32_t* id, float* weight) const {
    float total = 0;
    for (int64_t i = 0; i < p->k; i++) {
      weight[i] = score(logit[id[i]]);
      total += weight[i];
    }
    return p->normalized ? total + MIN_SIGMOID_SUM : 1;
  }

  // Sorts the choices by expert (a counting sort), and lists the experts that have any.
  void plan() const {
    const int64_t R = choices(), D = p->D, F = p->F;
    std::fill(starts, starts + p->X + 1, 0);
    for (int64_t c = 0; c < R; c++)
      if (ids[c] >= 0) starts[ids[c] + 1]++;
    for (int64_t e = 0; e < p->X; e++) {
      counts[e] += starts[e + 1];
      starts[e + 1] += starts[e];
    }
    int64_t n = 0;
    for (int64_t e = 0; e < p->X; e++) {
      const int64_t first = starts[e];
      const int64_t rows = starts[e + 1] - first;
      if (!rows) continue;
      std::fill(calls_of_rows + first, calls_of_rows + first + rows, n);
      calls[n++] = {
          .gate_up = &p->gate_up[e],
          .down = &p->down[e],
          .first = first,
          .rows = rows,
          .F = F,
          .to_up = rows_of<T>(to_up, first, rows, D),
          .to_down = rows_of<T>(to_down, first, rows, F),
          .up = up + first * 2 * F,
          .act = act + first * F,
          .product = product + first * D,
      };
    }
    counts[p->X] += n;
    for (int64_t c = 0; c < R; c++) {
      if (ids[c] < 0) continue;
      sorted_rows[c] = starts[ids[c]]++;  // now the row of this expert's next choice
      tokens[sorted_rows[c]] = c / p->k;
    }
    if (p->shared_F) {
      calls[n++] = {
          .gate_up = &p->gate_up[p->X],
          .down = &p->down[p->X],
          .first = 0,
          .rows = M,
          .F = p->shared_F,
          .to_up = to_shared_up,
          .to_down = to_shared_down,
          .up = shared_up,
          .act = shared_act,
          .product = shared_product,
      };
    }
    *call_count = n;
  }

  // This thread's share of the products of all experts; product_of(call) is the ExpertProduct of a call. Threads share
  // the work by an estimate of what a block of 16 weight rows costs: one for each row of x, and READING for reading the
  // weights.
  template <class ProductOf>
  void multiply_all(const Team& team, const ProductOf& product_of) const {
    constexpr int64_t READING = 4;
    // Calls work for each piece of each product; `start` is the cost of all pieces before. Returns the cost of all.
    auto for_pieces = [&](const auto& work) {
      int64_t start = 0;
      for (int64_t i = 0; i < *call_count; i++) {
        const ExpertProduct<T> y = product_of(calls[i]);
        for (const Linear& piece : y.layer.pieces) {
          const int64_t cost = (y.in.M + READING) * (piece.format == DENSE ? 1 : LANES);  // of a unit
          work(piece, y.in, y.out, start, cost);
          start += cost * units(piece);
        }
      }
      return start;
    };
    const int64_t total = for_pieces([](auto&&...) {});
    const int64_t from = total * team.thread / team.threads;
    const int64_t to = total * (team.thread + 1) / team.threads;
    for_pieces([&](const Linear& piece, const Input& in, T* out, int64_t start, int64_t cost) {
      const int64_t n = units(piece);
      const int64_t step = grain(piece);
      auto unit_at = [&](int64_t point) {  // the unit that contains this point of the total cost
        if (point >= start + n * cost) return n;
        return std::max<int64_t>(0, point - start) / cost / step * step;
      };
      const int64_t begin = unit_at(from);
      const int64_t end = unit_at(to);
      if (begin < end) multiply_units<T>(piece, in, in.M, begin, end, nullptr, out);
    });
  }

  // Everything between prepare_row and add_outputs.
  void run(const Team& team) const {
    matmul<float>(team, p->router, to_router, M, nullptr, logits);
    team.barrier();
    team.split(M, 1, [&](int64_t m, int64_t end) {
      for (; m < end; m++) choose(m);
    });
    team.barrier();
    if (team.thread == 0) plan();
    team.barrier();

    const int64_t D = p->D;
    const int64_t rows = starts[p->X - 1];  // `plan` has moved this to the end of all rows
    team.split(rows, 1, [&](int64_t row, int64_t end) {
      for (; row < end; row++) {
        const ExpertCall<T>& call = calls[calls_of_rows[row]];
        const T* of_token = x + tokens[row] * D;
        std::copy(of_token, of_token + D, sorted + row * D);
        prepare_input<T>(*call.gate_up, call.to_up, row - call.first, 0, call.gate_up->groups());
      }
    });
    team.barrier();
    multiply_all(team, [](const auto& call) { return ExpertProduct<T>{*call.gate_up, call.to_up, call.up}; });
    team.barrier();
    for (int64_t i = 0; i < *call_count; i++) {
      const ExpertCall<T>& call = calls[i];
      const int64_t F = call.F;
      const int64_t groups = (F + GROUP - 1) / GROUP;
      team.split(call.rows * groups, 1, [&](int64_t at, int64_t end) {
        for (; at < end; at++) {
          const int64_t m = at / groups;
          const int64_t group = at % groups;
          activate_row(call.up + m * 2 * F, F, group * GROUP, std::min(F, (group + 1) * GROUP), p->activation,
                       call.act + m * F);
          prepare_input<T>(*call.down, call.to_down, m, group, group + 1);
        }
      });
    }
    team.barrier();
    multiply_all(team, [](const auto& call) { return ExpertProduct<T>{*call.down, call.to_down, call.product}; });
    team.barrier();
  }

  // out = the output of the layer for token m, plus `residual` if it is not null.
  void add_outputs(int64_t m, const T* residual, T* out) const {
    const int64_t D = p->D;
    const int64_t k = p->k;
    const float gate = p->shared_F ? 1 / (1 + std::exp(-logits[m * p->router.N + p->X])) : 0;
    for (int64_t d = 0; d < D; d += LANES) {
      f32x16 y = floats(0.0f);
      for (int64_t c = m * k; c < (m + 1) * k && ids[c] >= 0; c++)
        y = fma(load(product + sorted_rows[c] * D + d, D - d), floats(weights[c]), y);
      if (p->shared_F) y = fma(load(shared_product + m * D + d, D - d), floats(gate), y);
      if (residual) y = y + load(residual + d, D - d);
      store(out + d, y, D - d);
    }
  }
};

}  // namespace fastpath
