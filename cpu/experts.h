// Sparse layers, as in mixers/experts.py: the router, and the MLPs of the experts that it chooses.
//
// A pass reads only the experts that its tokens have chosen, and each of them once. The rows of x are sorted by their
// experts, so that the rows of one expert stand together, and each expert is multiplied as any other matrix. The work
// of all experts together is divided among the threads, in one piece for each thread: most threads then read whole
// experts, which are long streams of memory.

#pragma once

#include "checks.h"
#include "matmul.h"

namespace fastpath {

// The activation of hidden units f..end of a row of `up` (F or, if gated, 2F: gate, then up): SwiGLU, GeGLU or
// tanh-GELU. All have the form x sigmoid(z).
template <class T>
void activate_row(const T* up, int64_t F, int64_t f, int64_t end, bool gated, bool gelu, T* out) {
  for (; f < end; f += LANES) {
    const f32x16 x = load(up + f, F - f);
    // SwiGLU: z = x. Tanh-GELU: z = 2 sqrt(2/pi) (x + 0.044715 x^3).
    const f32x16 z = !gelu ? x : floats(1.5957691216f) * (x + (x * x) * (x * floats(0.044715f)));
    f32x16 y = x / (floats(1.0f) + fast_exp(floats(0.0f) - z));
    if (gated) y = y * load(up + F + f, F - f);
    store(out + f, y, F - f);
  }
}

// The part of a sparse layer that is the same in all calls. prepare_experts checks it once.
struct PreparedExperts {
  std::vector<std::shared_ptr<const PreparedLayer>> layers;  // own the memory of the layers below
  at::ScalarType dtype;
  int64_t X, k, D, F, shared_F;  // shared_F is 0 if there is no shared expert
  bool normalized;
  Layer router;                     // (X,D) float32; with a shared expert (X+1,D), where the last row is its gate
  std::vector<Layer> gate_up, down;  // of each expert, (2F,D) and (D,F), then those of the shared expert

  int64_t multiply_adds(int64_t tokens) const { return tokens * ((router.N + 3 * k * F + 3 * shared_F) * D); }
};

// The matrix (N,C) of expert e in a stack of X matrices. The stack may have several pieces, each with as many rows of
// every expert. If it is packed, the rows of each expert begin a new block of 16.
inline Layer layer_of_expert(const PreparedLayer& prepared, const Layer& stack, int64_t e, int64_t X, int64_t N) {
  Layer expert{N, stack.C};
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
  const Layer *gate_up, *down;
  int64_t first, rows, F;  // first: the place of its first row among the sorted ones
  Input to_up, to_down;
  T *up, *act, *product;  // (rows,2F), (rows,F), (rows,D)
};

// `rows` rows of a converted x, from row `first` on, which become the first ones of their tile.
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
// add_outputs for each row.
template <class T>
struct Experts {
  const PreparedExperts* p = nullptr;
  int64_t M = 0;
  const int64_t* positions;  // (M,): -1 is padding, which uses no expert
  int64_t* counts;  // (X+1,): how many tokens have used each expert, and for how many experts the weights were read

  // Temporary arrays, from allocate():
  const T* x;               // (M,D)
  float *as_float, *logits;  // (M,D), (M,X or X+1)
  float* weights;           // (M,k)
  int32_t *ids, *places;    // (M,k): the expert of each choice of a token, or -1; its row of the arrays below
  int32_t *tokens, *calls_of_rows;  // (M*k,): the token and the ExpertCall of a row
  int32_t *starts;                // (X+1,): the first row of each expert
  T *sorted, *up, *act, *product;  // (M*k,D), (M*k,2F), (M*k,F), (M*k,D)
  T *shared_up, *shared_act, *shared_product;  // (M,2*shared_F), (M,shared_F), (M,D)
  Input to_router, to_up, to_down, to_shared_up, to_shared_down;
  ExpertCall<T>* calls;
  int64_t* call_count;  // (1,)

  int64_t choices() const { return M * p->k; }

  // normed (M,D): the inputs of the layer.
  void allocate(Arena& arena, const T* normed) {
    const int64_t R = choices(), D = p->D;
    x = normed;
    as_float = arena.allocate<float>(M * D);
    logits = arena.allocate<float>(M * p->router.N);
    to_router = allocate_input(arena, p->router, as_float, M);
    weights = arena.allocate<float>(R);
    ids = arena.allocate<int32_t>(R);
    places = arena.allocate<int32_t>(R);
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
    to_shared_up = allocate_input(arena, p->gate_up[p->X], normed, M);
    to_shared_down = allocate_input(arena, p->down[p->X], shared_act, M);
  }

  // Converts row m of x.
  void prepare_row(int64_t m) const {
    const int64_t D = p->D;
    for (int64_t d = 0; d < D; d += LANES) store(as_float + m * D + d, load(x + m * D + d, D - d), D - d);
    if (p->shared_F) prepare_input<T>(p->gate_up[p->X], to_shared_up, m, 0, p->gate_up[p->X].groups());
  }

  // The k experts of token m with the largest logits; of equal logits, those with the lower numbers. They are kept
  // sorted while all logits are read.
  void choose(int64_t m) const {
    const float* logit = logits + m * p->router.N;
    const int64_t k = p->k;
    int32_t* id = ids + m * k;
    float* weight = weights + m * k;
    std::fill(weight, weight + k, -INF), std::fill(id, id + k, 0);
    if (positions[m] < 0) return std::fill(id, id + k, -1);
    for (int64_t e = 0; e < p->X; e++) {
      if (!(logit[e] > weight[k - 1])) continue;
      int64_t at = k - 1;
      for (; at > 0 && logit[e] > weight[at - 1]; at--) {
        weight[at] = weight[at - 1];
        id[at] = id[at - 1];
      }
      weight[at] = logit[e];
      id[at] = e;
    }
    const float largest = weight[0];
    float total = 0;
    for (int64_t e = 0; !p->normalized && e < p->X; e++) total += std::exp(logit[e] - largest);
    for (int64_t i = 0; i < k; i++) {
      weight[i] = std::exp(weight[i] - largest);
      total += p->normalized ? weight[i] : 0;
    }
    for (int64_t i = 0; i < k; i++) weight[i] /= total;
  }

  // Sorts the rows by their experts, and lists the experts that have any.
  void plan() const {
    const int64_t R = choices(), D = p->D;
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
      calls[n++] = {&p->gate_up[e], &p->down[e], first, rows, p->F, rows_of<T>(to_up, first, rows, D),
                    rows_of<T>(to_down, first, rows, p->F), up + first * 2 * p->F, act + first * p->F,
                    product + first * D};
    }
    counts[p->X] += n;
    for (int64_t c = 0; c < R; c++) {
      if (ids[c] < 0) continue;
      places[c] = starts[ids[c]]++;  // now the next row of the expert
      tokens[places[c]] = c / p->k;
    }
    if (p->shared_F)
      calls[n++] = {&p->gate_up[p->X], &p->down[p->X], 0, M, p->shared_F, to_shared_up, to_shared_down, shared_up,
                    shared_act, shared_product};
    *call_count = n;
  }

  // This thread's share of the products of all experts. of(call, multiply) calls multiply(layer, input, out). Threads
  // share the work by an estimate of what a block of 16 weight rows costs: the rows of x, and its bytes, which take as
  // long as READING rows.
  template <class Of>
  void multiply_all(const Team& team, const Of& of) const {
    constexpr int64_t READING = 4;
    auto for_pieces = [&](const auto& work) {
      int64_t start = 0;
      for (int64_t i = 0; i < *call_count; i++)
        of(calls[i], [&](const Layer& layer, const Input& in, T* out) {
          for (const Linear& piece : layer.pieces) {
            const int64_t cost = (in.M + READING) * (piece.format == DENSE ? 1 : LANES);
            work(piece, in, out, start, cost);
            start += cost * units(piece);
          }
        });
      return start;
    };
    const int64_t total = for_pieces([](auto&&...) {});
    const int64_t from = total * team.thread / team.threads;
    const int64_t to = total * (team.thread + 1) / team.threads;
    for_pieces([&](const Linear& piece, const Input& in, T* out, int64_t start, int64_t cost) {
      const int64_t n = units(piece);
      const int64_t step = grain(piece);
      auto unit_at = [&](int64_t place) {  // the first unit that begins there or later
        if (place >= start + n * cost) return n;
        return std::max<int64_t>(0, place - start) / cost / step * step;
      };
      const int64_t begin = unit_at(from);
      const int64_t end = unit_at(to);
      if (begin < end) multiply_units<T>(piece, in, in.M, begin, end, nullptr, out);
    });
  }

  // All that comes after prepare_row, up to the outputs of the experts.
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
    const int64_t rows = starts[p->X - 1];  // after `plan`, the end of the last expert's rows
    team.split(rows, 1, [&](int64_t row, int64_t end) {
      for (; row < end; row++) {
        const ExpertCall<T>& call = calls[calls_of_rows[row]];
        const T* from = x + tokens[row] * D;
        std::copy(from, from + D, sorted + row * D);
        prepare_input<T>(*call.gate_up, call.to_up, row - call.first, 0, call.gate_up->groups());
      }
    });
    team.barrier();
    multiply_all(team, [](const auto& call, const auto& multiply) { multiply(*call.gate_up, call.to_up, call.up); });
    team.barrier();
    for (int64_t i = 0; i < *call_count; i++) {
      const ExpertCall<T>& call = calls[i];
      const int64_t F = call.F;
      const int64_t groups = (F + GROUP - 1) / GROUP;
      team.split(call.rows * groups, 1, [&](int64_t at, int64_t end) {
        for (; at < end; at++) {
          const int64_t m = at / groups;
          const int64_t group = at % groups;
          activate_row(call.up + m * 2 * F, F, group * GROUP, std::min(F, (group + 1) * GROUP), true, false,
                       call.act + m * F);
          prepare_input<T>(*call.down, call.to_down, m, group, group + 1);
        }
      });
    }
    team.barrier();
    multiply_all(team, [](const auto& call, const auto& multiply) { multiply(*call.down, call.to_down, call.product); });
    team.barrier();
  }

  // out = from (or 0, if it is null) + the output of the layer for token m.
  void add_outputs(int64_t m, const T* from, T* out) const {
    const int64_t D = p->D;
    const int64_t k = p->k;
    const float gate = p->shared_F ? 1 / (1 + std::exp(-logits[m * p->router.N + p->X])) : 0;
    for (int64_t d = 0; d < D; d += LANES) {
      f32x16 y = floats(0.0f);
      for (int64_t c = m * k; c < (m + 1) * k && ids[c] >= 0; c++)
        y = fma(load(product + places[c] * D + d, D - d), floats(weights[c]), y);
      if (p->shared_F) y = fma(load(shared_product + m * D + d, D - d), floats(gate), y);
      if (from) y = y + load(from + d, D - d);
      store(out + d, y, D - d);
    }
  }
};

}  // namespace fastpath
