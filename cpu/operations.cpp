// The CPU kernels: matrix products with bfloat16, float16 and float32 weights and with every quantized format, norms,
// attention, all blocks of a transformer as one operation, sampling, and Medusa heads.
//
// This file defines the operations, which check their arguments and divide the work among the threads. kernels.py and
// sampling.py declare them and say what they compute. cpu/build.py compiles this file and matmul.cpp for the
// instruction set of the processor. cpu/layers.py packs weights.
//
// Read this file last. The order is:
//   vectors.h, formats.h                   vectors of 16 elements; how quantized weights lie in memory
//   parallel.h, barrier.h, profile.h       threads, and where their time goes
//   dots.h, products.h                     the products of a few rows of x, which decoding needs: begin here
//   prefill.h, matmul.h, matmul.cpp        the products of many rows, AMX, and the choice of a product
//   checks.h                               layers and their handles
//   experts.h, attention.h, delta.h        the parts of a block
//   blocks.h                               a block
//   sampling.h, medusa.h, mtp.h            everything else
//
// A weight matrix has N rows (outputs) and C columns (inputs); x has M rows of C columns. Decoding is limited by memory
// bandwidth, so each weight is read once for a whole tile of rows of x, at consecutive addresses. One thread sums each
// output, in a fixed order. The bits of an output therefore depend only on its own row of x: neither the other rows nor
// the number of threads change them.

#include <ATen/ops/empty.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <deque>
#include <tuple>

#include "attention.h"
#include "blocks.h"
#include "checks.h"
#include "delta.h"
#include "experts.h"
#include "head.h"
#include "medusa.h"
#include "mtp.h"
#include "sampling.h"

using namespace fastpath;

namespace {

// An uninitialized tensor with the sizes of x except for the last one, the width.
Tensor empty_with_width(const Tensor& x, int64_t width) {
  auto sizes = x.sizes().vec();
  sizes.back() = width;
  return at::empty(sizes, x.options());
}

// x W^T + bias, for x (...,C).
Tensor run_layer(const Tensor& x, const Layer& l) {
  const Tensor xs = x.contiguous();
  const Tensor out = empty_with_width(x, l.N);
  const int64_t M = l.C ? x.numel() / l.C : 0;
  dispatch_dtype(x, [&](auto type) {
    using T = decltype(type);
    const T* from = xs.const_data_ptr<T>();
    auto [in, memory] = allocate_together([&](Arena& arena) { return allocate_input(arena, l, from, M); });
    parallel(l.N * l.C * (l.any(&Linear::is_quantized) ? M : 1) < MIN_PARALLEL_WORK, [&, &in = in](const Team& team) {
      prepare_input_rows<T>(team, l, in, M);
      matmul<T>(team, l, in, M, nullptr, out.data_ptr<T>());
    });
  });
  return out;
}

Tensor linear(const Tensor& x, const Tensor& weight, const MaybeTensor& bias) {
  bool torch_is_faster = x.dim() > 2 && x.size(-2) > MAX_DECODE_TOKENS;  // in prefill
#ifndef HAS_BF16_PRODUCTS
  torch_is_faster = torch_is_faster && x.scalar_type() != at::kBFloat16;  // on a processor that cannot multiply it
#endif
  if (torch_is_faster) return at::linear(x, weight, bias);
  const int64_t N = weight.size(0), C = x.size(-1);
  return run_layer(x, make_layer("dense", weight.contiguous(), bias, N, C, 0, true).checked(x.scalar_type(), N, C));
}

int64_t prepare_layer(const std::string& format, const Tensor& weight, const MaybeTensor& bias, int64_t N, int64_t C,
                      int64_t groupsize, bool exact) {
  return prepared_layers.add(make_layer(format, weight, bias, N, C, groupsize, exact));
}

int64_t stack_layers(at::IntArrayRef layers, const MaybeTensor& bias) {
  std::vector<std::shared_ptr<const PreparedLayer>> prepared;
  for (int64_t layer : layers) prepared.push_back(prepared_layers.get(layer));
  return prepared_layers.add(stack(prepared, bias));
}

// Packs the parts of a matrix (N,C), in the order of formats.py, to `to`, which has packed_bytes bytes. A part may have
// any dtype, and has N rows.
void pack_layer(const std::string& format, at::TensorList parts, int64_t C, int64_t groupsize, const Tensor& to) {
  const int64_t N = parts.at(0).size(0), Cb = (C + GROUP - 1) / GROUP;
  checked(to, "packed weight", at::kByte, {packed_bytes(format, N, C, groupsize)});
  Source source{.N = N, .C = C, .groupsize = groupsize};
  TORCH_CHECK(parts.size() <= 3, "a format with ", parts.size(), " parts");
  for (size_t i = 0; i < parts.size(); i++) {
    TORCH_CHECK(parts[i].dim() == 2 && parts[i].size(0) == N && parts[i].is_contiguous(), "part ", i, ": ",
                parts[i].sizes());
    source.parts[i] = (const uint8_t*)parts[i].const_data_ptr();
    source.row_bytes[i] = parts[i].size(1) * parts[i].itemsize();
  }
  with_format(checked_format(format, C, groupsize), [&](auto f) {
    using F = decltype(f);
    TORCH_CHECK(parts.size() == F::PARTS, F::NAME, " has ", F::PARTS, " parts, not ", parts.size());
    if constexpr (F::PARTS == 1)
      TORCH_CHECK(source.row_bytes[0] == (C + F::COLUMNS - 1) / F::COLUMNS * F::BYTES, F::NAME, ": ",
                  source.row_bytes[0], " bytes for ", C, " columns");
    const int64_t per_scale = groups_per_scale(groupsize, C);
    const int64_t bytes = packed_block_bytes<F>(Cb, per_scale);
    uint8_t* out = to.data_ptr<uint8_t>();
    parallel(N * C < MIN_PARALLEL_WORK, [&](const Team& team) {
      team.split((N + LANES - 1) / LANES, 1, [&](int64_t block, int64_t end) {
        for (; block < end; block++) pack_block<F>(source, block, Cb, per_scale, out + block * bytes);
      });
    });
  });
}

// The rows of a quantized table for these tokens, (...,C) float32.
Tensor embed_packed(const Tensor& tokens, int64_t layer, int64_t C) {
  const auto prepared = prepared_layers.get(layer);
  const Layer& l = prepared->layer;
  const bool is_table = l.pieces.size() == 1 && l.pieces[0].is_quantized() && l.C == C;
  TORCH_CHECK(is_table, "a quantized table (N,", C, ") was expected");
  const Tensor ids = checked(tokens.contiguous(), "tokens", at::kLong, tokens.sizes());
  auto sizes = tokens.sizes().vec();
  sizes.push_back(l.C);
  const Tensor out = at::empty(sizes, tokens.options().dtype(at::kFloat));
  const int64_t* id = ids.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < ids.numel(); i++) TORCH_CHECK(id[i] >= 0 && id[i] < l.N, "token ", id[i], " of ", l.N);
  parallel(ids.numel() * l.C < MIN_PARALLEL_WORK, [&](const Team& team) {
    team.split(ids.numel(), 1, [&](int64_t i, int64_t end) {
      for (; i < end; i++) look_up(l.pieces[0], id[i], out.data_ptr<float>() + i * l.C);
    });
  });
  return out;
}

Tensor linear_packed(const Tensor& x, int64_t layer, int64_t N) {
  const auto prepared = prepared_layers.get(layer);
  return run_layer(x, prepared->checked(x.scalar_type(), N, x.size(-1)));
}

void release_layers(at::IntArrayRef layers) { prepared_layers.release(layers); }

// Applies row(from, to, D), a norm of a row of D elements, to all rows of x.
template <class Row>
Tensor norm(const Tensor& x, const Row& row) {
  const int64_t D = x.size(-1);
  const Tensor xs = x.contiguous();
  const Tensor out = at::empty(x.sizes(), x.options());
  dispatch_dtype(x, [&](auto type) {
    using T = decltype(type);
    const T* from = xs.const_data_ptr<T>();
    T* to = out.data_ptr<T>();
    parallel(x.numel() < MIN_PARALLEL_WORK, [&](const Team& team) {
      team.split(D ? x.numel() / D : 0, 1, [&](int64_t m, int64_t end) {
        for (; m < end; m++) row(from + m * D, to + m * D, D);
      });
    });
  });
  return out;
}

Tensor rms_norm(const Tensor& x, const Tensor& weight, double eps) {
  const bool in_float = weight.scalar_type() == at::kFloat;  // of any x
  checked(weight, "weight", in_float ? at::kFloat : x.scalar_type(), {x.size(-1)});
  return norm(x, [&]<class T>(const T* from, T* to, int64_t D) {
    if (in_float) rms_norm_row(from, weight.const_data_ptr<float>(), to, D, float(eps));
    else rms_norm_row(from, weight.const_data_ptr<T>(), to, D, float(eps));
  });
}

Tensor layer_norm(const Tensor& x, const Tensor& weight, const Tensor& bias, double eps) {
  checked(weight, "weight", x.scalar_type(), {x.size(-1)});
  checked(bias, "bias", x.scalar_type(), {x.size(-1)});
  return norm(x, [&]<class T>(const T* from, T* to, int64_t D) {
    layer_norm_row(from, weight.const_data_ptr<T>(), bias.const_data_ptr<T>(), to, D, float(eps));
  });
}

// Checks the arguments of attention. The caller sets q and out of the result.
template <class T>
Attention<T> checked_attention(int64_t B, int64_t S, int64_t H, const Tensor& k_cache, const Tensor& v_cache,
                               const Tensor& input_pos, const MaybeTensor& rows, const MaybeTensor& slopes,
                               std::optional<int64_t> window, double scale) {
  checked(k_cache, "k_cache", c10::CppTypeToScalarType<T>::value, {-1, -1, -1, -1});
  checked(v_cache, "v_cache", k_cache.scalar_type(), k_cache.sizes());
  const int64_t R = k_cache.size(0), K = k_cache.size(1), slots = k_cache.size(2);
  TORCH_CHECK(K > 0 && H % K == 0, H, " query heads are not a multiple of ", K, " key heads");
  TORCH_CHECK(slots < (1 << 30) && (rows || B <= R), "a cache of ", k_cache.sizes(), " for ", B, " rows");
  const int64_t* positions = checked(input_pos, "input_pos", at::kLong, {B, S}).const_data_ptr<int64_t>();
  const int64_t* row = data<int64_t>(checked(rows, "rows", at::kLong, {B}));
  checked(slopes, "slopes", at::kFloat, {H});
  for (int64_t i = 0; i < B * S; i++)
    TORCH_CHECK(positions[i] >= -1 && positions[i] < slots, "position ", positions[i], " of ", slots);
  for (int64_t i = 0; row && i < B; i++) TORCH_CHECK(row[i] >= 0 && row[i] < R, "row ", row[i], " of ", R);
  Attention<T> a{.B = B, .S = S, .H = H, .K = K, .E = k_cache.size(3), .slots = slots};
  a.k = k_cache.const_data_ptr<T>();
  a.v = v_cache.const_data_ptr<T>();
  a.positions = positions;
  a.rows = row;
  a.slopes = data<float>(slopes);
  a.window = std::min(window.value_or(slots), slots);
  a.scale = scale;
  return a;
}

Tensor attention(const Tensor& q, const Tensor& k_cache, const Tensor& v_cache, const Tensor& input_pos,
                 const MaybeTensor& rows, const MaybeTensor& slopes, std::optional<int64_t> window, double scale) {
  const Tensor qs = q.contiguous();
  const Tensor out = at::empty(q.sizes(), q.options());
  dispatch_dtype(q, [&](auto type) {
    using T = decltype(type);
    const Tensor at = input_pos.contiguous();
    auto a = checked_attention<T>(q.size(0), q.size(1), q.size(2), k_cache, v_cache, at, rows, slopes, window, scale);
    TORCH_CHECK(q.size(3) == a.E, "queries of width ", q.size(3), ", keys of ", a.E);
    a.q = qs.const_data_ptr<T>();
    a.q_stride = a.H * a.E;
    a.out = out.data_ptr<T>();
    const SplitPlan plan(a);
    auto [b, memory] = allocate_together([&](Arena& arena) {
      return std::make_pair(Workspace::allocate(arena, a), plan.allocate(arena, a));
    });
    parallel(a.B * a.S * a.H * a.E < MIN_PARALLEL_WORK / CHUNK, [&, &b = b](const Team& team) {
      run_attention(team, a, plan, b.first[team.thread], b.second);
    });
  });
  return out;
}

// The state of a gated delta net, as in recurrent.DeltaState. The caller sets the inputs and outputs of the result.
Delta checked_delta(const Tensor& matrix, const Tensor& base, const Tensor& keys, const Tensor& deltas,
                    const Tensor& decays) {
  const int64_t R = checked(matrix, "matrix", at::kFloat, {-1, -1, -1, -1}).size(0);
  const int64_t m = matrix.size(1);
  Delta d{.m = m, .dk = matrix.size(2), .dv = matrix.size(3)};
  d.n = checked(keys, "keys", at::kFloat, {R, DELTA_WINDOW, -1, d.dk}).size(2);
  TORCH_CHECK(d.n > 0 && m % d.n == 0, m, " value heads are not a multiple of ", d.n, " key heads");
  d.matrix = matrix.data_ptr<float>();
  d.keys = keys.data_ptr<float>();
  d.deltas = checked(deltas, "deltas", at::kFloat, {R, DELTA_WINDOW, m, d.dv}).data_ptr<float>();
  d.decays = checked(decays, "decays", at::kFloat, {R, DELTA_WINDOW, m}).data_ptr<float>();
  d.base = checked(base, "base", at::kLong, {R}).data_ptr<int64_t>();
  return d;
}

// The runs of a pass over a state of R rows, after checks.
std::vector<DeltaRun> checked_runs(const Tensor& input_pos, const MaybeTensor& rows, int64_t R) {
  const int64_t B = checked(input_pos, "input_pos", at::kLong, {-1, -1}).size(0);
  const int64_t* row = data<int64_t>(checked(rows, "rows", at::kLong, {B}));
  auto runs = delta_runs(input_pos.const_data_ptr<int64_t>(), row, B, input_pos.size(1));
  for (const auto& run : runs) TORCH_CHECK(run.row >= 0 && run.row < R, "row ", run.row, " of ", R);
  return runs;
}

Tensor gated_delta(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& log_decay, const Tensor& beta,
                   const Tensor& matrix, const Tensor& base, const Tensor& keys, const Tensor& deltas,
                   const Tensor& decays, const Tensor& input_pos, const MaybeTensor& rows) {
  Delta d = checked_delta(matrix, base, keys, deltas, decays);
  const Tensor at = input_pos.contiguous();
  const Tensor qs = q.contiguous();
  const Tensor ks = k.contiguous();
  const Tensor vs = v.contiguous();
  const Tensor bs = beta.contiguous();
  const Tensor out = at::zeros(v.sizes(), v.options());
  const int64_t B = at.size(0), S = at.size(1);
  d.q = checked(qs, "q", at::kFloat, {B, S, d.n, d.dk}).const_data_ptr<float>();
  d.k = checked(ks, "k", at::kFloat, {B, S, d.n, d.dk}).const_data_ptr<float>();
  d.v = checked(vs, "v", at::kFloat, {B, S, d.m, d.dv}).const_data_ptr<float>();
  d.k_stride = d.n * d.dk;
  d.v_stride = d.m * d.dv;
  const Tensor decay = checked(log_decay.contiguous(), "log_decay", at::kFloat, {B, S, d.m}).exp();
  d.decay = decay.const_data_ptr<float>();
  d.beta = checked(bs, "beta", at::kFloat, {B, S, d.m}).const_data_ptr<float>();
  d.out = out.data_ptr<float>();

  const auto runs = checked_runs(at, rows, matrix.size(0));
  check_pending(runs, d.base);
  auto [scratch, memory] = allocate_together([&](Arena& arena) {
    std::vector<float*> all(omp_get_max_threads());
    for (auto& one : all) one = arena.allocate<float>(delta_scratch(d));
    return all;
  });
  parallel(B * S * d.m * d.dk * d.dv < MIN_PARALLEL_WORK, [&, &scratch = scratch](const Team& team) {
    run_delta(team, d, runs, scratch[team.thread]);
  });
  return out;
}

Handles<PreparedExperts> prepared_experts;

// Returns a handle of the experts of a sparse layer, of which each token uses k of X. The arguments are handles:
//   router          (X,D); with a shared expert (X+1,D), where the last row is the gate of that expert
//   gate_up, down   (2F,D) and (D,F) of each expert, expert after expert
//   shared_gate_up  and shared_down, of the shared expert, or None
// normalized: the weights of the chosen experts are divided by their sum. dtype: of the activations. scoring, and
// choice_bias (X,) or None, and scale: see config.Experts.
int64_t prepare_experts(int64_t router, int64_t gate_up, int64_t down, std::optional<int64_t> shared_gate_up,
                        std::optional<int64_t> shared_down, int64_t X, int64_t k, bool normalized,
                        at::ScalarType dtype, std::string_view scoring, const MaybeTensor& choice_bias, double scale) {
  TORCH_CHECK(0 < k && k <= X, k, " of ", X, " experts");
  TORCH_CHECK(shared_gate_up.has_value() == shared_down.has_value(), "a shared expert has gate_up and down");
  PreparedExperts p{.dtype = dtype, .X = X, .k = k, .normalized = normalized};
  p.sigmoid = scoring == "sigmoid";
  p.scale = scale;
  if (choice_bias) {
    p.choice_bias = checked(*choice_bias, "choice_bias", at::kFloat, {X}).clone();
  }
  auto prepared = [&](int64_t handle) { return p.layers.emplace_back(prepared_layers.get(handle)); };
  const auto prepared_router = prepared(router);
  const auto prepared_up = prepared(gate_up);
  const auto prepared_down = prepared(down);
  p.D = prepared_router->layer.C;
  p.F = prepared_down->layer.C;
  p.router = prepared_router->checked(at::kFloat, X + shared_down.has_value(), p.D);
  const Layer all_up = prepared_up->checked(dtype, -1, p.D);
  const Layer all_down = prepared_down->checked(dtype, -1, p.F);
  for (int64_t e = 0; e < X; e++) {
    p.gate_up.push_back(layer_of_expert(*prepared_up, all_up, e, X, 2 * p.F));
    p.down.push_back(layer_of_expert(*prepared_down, all_down, e, X, p.D));
  }
  if (shared_down) {
    const auto prepared_shared = prepared(*shared_down);
    p.shared_F = prepared_shared->layer.C;
    p.gate_up.push_back(prepared(*shared_gate_up)->checked(dtype, 2 * p.shared_F, p.D));
    p.down.push_back(prepared_shared->checked(dtype, p.D, p.shared_F));
  }
  return prepared_experts.add(std::move(p));
}

void release_experts(at::IntArrayRef handles) { prepared_experts.release(handles); }

// experts.SparseMLP as one operation. x (B,S,D); input_pos (B,S): -1 is padding, which uses no expert; counts (X+1,):
// see SparseMLP.set_counts; handle: from prepare_experts.
Tensor sparse_mlp(const Tensor& x, const Tensor& input_pos, const Tensor& counts, int64_t handle) {
  const auto prepared = prepared_experts.get(handle);
  const PreparedExperts& p = *prepared;
  TORCH_CHECK(x.dim() == 3 && x.size(2) == p.D && x.scalar_type() == p.dtype, "x (B,S,", p.D, ") in ", p.dtype,
              " expected, not ", x.sizes(), " in ", x.scalar_type());
  const int64_t M = x.size(0) * x.size(1);
  const Tensor xs = x.contiguous();
  const Tensor at = input_pos.contiguous();
  const Tensor out = at::empty(x.sizes(), x.options());
  dispatch_dtype(x, [&](auto type) {
    using T = decltype(type);
    Experts<T> call{.p = &p, .M = M};
    call.positions = checked(at, "input_pos", at::kLong, {x.size(0), x.size(1)}).template const_data_ptr<int64_t>();
    call.counts = checked(counts, "counts", at::kLong, {p.X + 1}).template data_ptr<int64_t>();
    const auto [experts, memory] = allocate_together([&](Arena& arena) {
      Experts<T> one = call;
      one.allocate(arena, xs.const_data_ptr<T>());
      return one;
    });
    parallel(p.multiply_adds(M) < MIN_PARALLEL_WORK, [&, &experts = experts](const Team& team) {
      team.split(M, 1, [&](int64_t m, int64_t end) {
        for (; m < end; m++) experts.prepare_row(m);
      });
      team.barrier();
      experts.run(team);
      team.split(M, 1, [&](int64_t m, int64_t end) {
        for (; m < end; m++) experts.add_outputs(m, nullptr, out.data_ptr<T>() + m * p.D);
      });
    });
  });
  return out;
}

Handles<PreparedBlock> prepared_blocks;

// A weight of a norm or another vector, in float32, which `p` owns from now on. Null if it is None.
const float* keep_floats(PreparedBlock& p, const MaybeTensor& vector, const char* name, at::IntArrayRef sizes) {
  if (!vector) return nullptr;
  p.tensors.push_back(vector->to(at::kFloat));
  return checked(p.tensors.back(), name, at::kFloat, sizes).const_data_ptr<float>();
}

// A layer (N,C), which `p` owns from now on.
Layer keep_layer(PreparedBlock& p, std::optional<int64_t> handle, int64_t N, int64_t C) {
  TORCH_CHECK(handle, "a block without a layer of ", N, " outputs and ", C, " inputs");
  return p.layers.emplace_back(prepared_layers.get(*handle))->checked(p.dtype, N, C);
}

// The MLP, or the experts.
void keep_mlp(PreparedBlock& p, std::optional<int64_t> up, std::optional<int64_t> down,
              std::optional<int64_t> experts) {
  if (experts) {
    p.experts = prepared_experts.get(*experts);
    TORCH_CHECK(p.experts->D == p.D && p.experts->dtype == p.dtype, "experts of D ", p.experts->D, " in ",
                p.experts->dtype, ", a block of D ", p.D, " in ", p.dtype);
    return;
  }
  TORCH_CHECK(down, "a block has an MLP or experts");
  p.F = prepared_layers.get(*down)->layer.C;
  p.up = keep_layer(p, up, p.activation.gated ? 2 * p.F : p.F, p.D);
  p.down = keep_layer(p, down, p.D, p.F);
}

// Returns a handle of a block for the operation `blocks`. The fields of PreparedBlock explain the arguments. Each token
// mixer has its own arguments; for other mixers, they are 0 or None. Layers are handles.
int64_t prepare_block(
    at::ScalarType dtype, double eps, double residual_scale, bool post_norm_residual, double layer_scale,
    std::string_view activation,
    // The norms before and after the token mixer and the MLP, and the layers. A sparse block has `experts` and neither
    // up nor down. A block with no layer except qkv only writes keys and values.
    const MaybeTensor& attention_norm, const MaybeTensor& attention_norm_bias, const MaybeTensor& attention_post_norm,
    const MaybeTensor& mlp_norm, const MaybeTensor& mlp_norm_bias, const MaybeTensor& mlp_post_norm, int64_t qkv,
    std::optional<int64_t> out, std::optional<int64_t> up, std::optional<int64_t> down, std::optional<int64_t> experts,
    // Attention:
    int64_t H, int64_t K, int64_t E, int64_t gates, double scale, std::optional<int64_t> window, int64_t rope_table,
    bool qk_norm_whole, const MaybeTensor& q_norm, const MaybeTensor& k_norm, const MaybeTensor& v_norm,
    bool keys_as_values, bool shares_cache,
    // What adds the block's own input:
    std::optional<int64_t> own_gate, std::optional<int64_t> own_proj, const MaybeTensor& own_norm,
    // A gated delta net or a short convolution: its weight is (width,channels).
    const MaybeTensor& conv_weight, const MaybeTensor& conv_bias,
    // A gated delta net:
    int64_t n, int64_t m, int64_t dk, int64_t dv, const MaybeTensor& decay_weight, const MaybeTensor& decay_bias,
    const MaybeTensor& delta_norm) {
  PreparedBlock p{};
  p.dtype = dtype;
  p.D = prepared_layers.get(qkv)->layer.C;
  p.eps = eps;
  p.residual_scale = residual_scale;
  p.post_norm_residual = post_norm_residual;
  p.layer_scale = layer_scale;
  p.activation = activation_named(activation);
  p.attention_norm.weight = keep_floats(p, attention_norm, "attention_norm", {p.D});
  p.attention_norm.bias = keep_floats(p, attention_norm_bias, "attention_norm_bias", {p.D});
  p.attention_post_norm = keep_floats(p, attention_post_norm, "attention_post_norm", {p.D});
  p.mlp_norm.weight = keep_floats(p, mlp_norm, "mlp_norm", {p.D});
  p.mlp_norm.bias = keep_floats(p, mlp_norm_bias, "mlp_norm_bias", {p.D});
  p.mlp_post_norm = keep_floats(p, mlp_post_norm, "mlp_post_norm", {p.D});

  int64_t qkv_width;    // outputs of qkv
  int64_t mixed_width;  // inputs of out
  if (conv_weight) {
    p.conv.width = conv_weight->size(0);
    p.conv.channels = conv_weight->size(-1);
    TORCH_CHECK(p.conv.width <= MAX_CONV_WIDTH, "a convolution over ", p.conv.width, " positions");
    p.conv.weight = keep_floats(p, conv_weight, "conv_weight", {p.conv.width, p.conv.channels});
    p.conv.bias = keep_floats(p, conv_bias, "conv_bias", {p.conv.channels});
    qkv_width = 3 * p.conv.channels;
    mixed_width = p.conv.channels;
  } else {
    p.H = H;
    p.K = K;
    p.E = E;
    p.gates = gates;
    TORCH_CHECK(gates == 0 || gates == H, gates, " gates for ", H, " heads");
    p.window = window.value_or(std::numeric_limits<int64_t>::max());
    p.scale = scale;
    p.rope_table = rope_table;
    p.qk_norm_whole = qk_norm_whole;
    p.q_norm = keep_floats(p, q_norm, "q_norm", {qk_norm_whole ? H * E : E});
    p.k_norm = keep_floats(p, k_norm, "k_norm", {qk_norm_whole ? K * E : E});
    p.v_norm = keep_floats(p, v_norm, "v_norm", {E});
    p.keys_as_values = keys_as_values;
    p.shares_cache = shares_cache;
    p.only_keys = !out;
    qkv_width = (H + gates + p.new_heads()) * E;
    mixed_width = H * E;
  }
  if (m) {
    p.net = {.n = n, .m = m, .dk = dk, .dv = dv};
    TORCH_CHECK(n > 0 && m % n == 0 && p.conv.channels == 2 * n * dk + m * dv, "a gated delta net of ", n,
                " key heads, ", m, " value heads and ", p.conv.channels, " channels");
    p.net.decay_weight = keep_floats(p, decay_weight, "decay_weight", {m});
    p.net.decay_bias = keep_floats(p, decay_bias, "decay_bias", {m});
    p.net.norm = keep_floats(p, delta_norm, "delta_norm", {dv});
    qkv_width = p.conv.channels + m * dv + 2 * m;
    mixed_width = m * dv;
  }
  p.qkv = keep_layer(p, qkv, qkv_width, p.D);
  if (p.only_keys) return prepared_blocks.add(std::move(p));

  p.out = keep_layer(p, out, p.D, mixed_width);
  keep_mlp(p, up, down, experts);
  if (own_gate) {
    p.P = prepared_layers.get(*own_gate)->layer.N;
    p.own_gate = keep_layer(p, own_gate, p.P, p.D);
    p.own_proj = keep_layer(p, own_proj, p.D, p.P);
    p.own_norm = keep_floats(p, own_norm, "own_norm", {p.D});
  }
  return prepared_blocks.add(std::move(p));
}

void release_blocks(at::IntArrayRef handles) { prepared_blocks.release(handles); }

// What all blocks of one call of `blocks` share.
struct BlocksCall {
  Tensor input_pos;            // (B,S)
  MaybeTensor rows;            // (B,)
  int64_t B, S, D;
  at::TensorList cos;          // (B,S,1,E) of each RoPE table; empty if the model does not use RoPE
  at::TensorList sin;          // the same
  MaybeTensor slopes;          // (H,)
  MaybeTensor query_scales;    // (slots,1,1)
  std::vector<DeltaRun> runs;  // if there are recurrent states
  int64_t R = 0;               // rows of the recurrent states
};

// Sets what a block with attention needs.
template <class T>
void set_attention(Block<T>& block, const BlocksCall& call, const Tensor& k_cache, const Tensor& v_cache) {
  const PreparedBlock& p = block.prepared;
  const int64_t B = call.B, S = call.S;
  block.attention = checked_attention<T>(B, S, p.H, k_cache, v_cache, call.input_pos, call.rows, call.slopes, p.window,
                                         p.scale);
  const Attention<T>& a = block.attention;
  TORCH_CHECK(p.K == a.K && p.E == a.E, "a block has K ", p.K, ", E ", p.E, ", not k_cache ", k_cache.sizes());
  block.k = k_cache.data_ptr<T>();
  block.v = v_cache.data_ptr<T>();
  block.query_scales = data<float>(checked(call.query_scales, "query_scales", at::kFloat, {a.slots, 1, 1}));
  if (call.cos.empty()) return;
  const int64_t tables = call.cos.size();
  TORCH_CHECK(p.rope_table < tables && call.cos.size() == call.sin.size(), "RoPE table ", p.rope_table, " of ", tables);
  const Tensor& cos = call.cos[p.rope_table];
  const Tensor& sin = call.sin[p.rope_table];
  block.cos = checked(cos, "cos", at::kFloat, {B, S, 1, p.E}).template const_data_ptr<float>();
  block.sin = checked(sin, "sin", at::kFloat, {B, S, 1, p.E}).template const_data_ptr<float>();
}

// Sets what a block with a recurrent token mixer needs: the tensors of its recurrent.ConvState.
template <class T>
void set_conv_state(Block<T>& block, const BlocksCall& call, const Tensor& base, const Tensor& tail) {
  const Convolution& conv = block.prepared.conv;
  const int64_t R = checked(base, "base", at::kLong, {-1}).size(0);
  TORCH_CHECK(R == call.R, "states of ", R, " and ", call.R, " rows");
  block.base = base.data_ptr<int64_t>();
  block.runs = &call.runs;
  check_pending(call.runs, block.base);
  const at::ScalarType dtype = c10::CppTypeToScalarType<T>::value;
  block.tail = checked(tail, "tail", dtype, {R, conv.tail_size() + 1, conv.channels}).template data_ptr<T>();
  block.attention.B = call.B;
  block.attention.S = call.S;
  block.attention.positions = call.input_pos.template const_data_ptr<int64_t>();
  block.attention.rows = data<int64_t>(call.rows);
}

// Checks that the lists of `blocks` have a tensor for each block of a kind.
void check_counts(const std::vector<std::shared_ptr<const PreparedBlock>>& prepared, at::TensorList k_caches,
                  at::TensorList v_caches, at::TensorList bases, at::TensorList tails, at::TensorList matrices,
                  at::TensorList keys, at::TensorList deltas, at::TensorList decays, at::TensorList expert_counts) {
  size_t attentions = 0;
  size_t recurrent = 0;
  size_t delta_nets = 0;
  size_t sparse = 0;
  for (const auto& block : prepared) {
    attentions += !block->conv.channels;
    recurrent += block->conv.channels > 0;
    delta_nets += block->net.m > 0;
    sparse += block->experts != nullptr;
  }
  TORCH_CHECK(k_caches.size() == attentions && v_caches.size() == attentions, k_caches.size(), " caches for ",
              attentions, " blocks with attention");
  TORCH_CHECK(bases.size() == recurrent && tails.size() == recurrent, bases.size(), " states for ", recurrent,
              " recurrent blocks");
  TORCH_CHECK(matrices.size() == delta_nets && keys.size() == delta_nets && deltas.size() == delta_nets &&
                  decays.size() == delta_nets,
              matrices.size(), " states for ", delta_nets, " gated delta nets");
  TORCH_CHECK(expert_counts.size() == sparse, expert_counts.size(), " counts for ", sparse, " sparse blocks");
}

// Runs several blocks, one after the other, on x (B,S,D). BlocksCall explains cos to query_scales. The lists of caches,
// states and counts have a tensor for each block of a kind, in the order of the blocks:
//   k_caches, v_caches              blocks with attention
//   bases, tails                    blocks with a recurrent.ConvState, which includes recurrent.DeltaState
//   matrices, keys, deltas, decays  blocks with a recurrent.DeltaState
//   expert_counts                   sparse blocks: see SparseMLP.set_counts
// own_inputs (B,S,blocks,P): of blocks that add inputs of their own.
Tensor blocks(const Tensor& x, const Tensor& input_pos, const MaybeTensor& rows, at::TensorList cos,
              at::TensorList sin, const MaybeTensor& slopes, const MaybeTensor& query_scales,
              at::TensorList k_caches, at::TensorList v_caches, at::TensorList bases, at::TensorList tails,
              at::TensorList matrices, at::TensorList keys, at::TensorList deltas, at::TensorList decays,
              at::TensorList expert_counts, const MaybeTensor& own_inputs, at::IntArrayRef handles) {
  TORCH_CHECK(x.dim() == 3, "x (B,S,D) was expected, not ", x.sizes());
  std::vector<std::shared_ptr<const PreparedBlock>> prepared;
  for (int64_t handle : handles) prepared.push_back(prepared_blocks.get(handle));
  check_counts(prepared, k_caches, v_caches, bases, tails, matrices, keys, deltas, decays, expert_counts);
  const Tensor xs = x.contiguous();
  const Tensor result = at::empty(x.sizes(), x.options());
  BlocksCall call{.input_pos = input_pos.contiguous(), .rows = rows, .B = x.size(0), .S = x.size(1), .D = x.size(2)};
  call.cos = cos;
  call.sin = sin;
  call.slopes = slopes;
  call.query_scales = query_scales;
  checked(call.input_pos, "input_pos", at::kLong, {call.B, call.S});
  if (!bases.empty()) {
    call.R = bases[0].size(0);
    call.runs = checked_runs(call.input_pos, rows, call.R);
  }
  const int64_t M = call.B * call.S, D = call.D;

  dispatch_dtype(x, [&](auto type) {
    using T = decltype(type);
    std::vector<Block<T>> all;
    std::deque<SplitPlan> plans;  // one for consecutive blocks of the same window; a deque does not move its elements
    int64_t window = -1;          // of the last plan
    int64_t slots = -1;
    size_t attentions = 0;  // how many blocks of each kind there were so far
    size_t recurrent = 0;
    size_t delta_nets = 0;
    size_t sparse = 0;
    int64_t work = 0;  // multiply-adds
    for (const auto& one : prepared) {
      const PreparedBlock& p = *one;
      TORCH_CHECK(p.dtype == x.scalar_type() && p.D == D, "a block has D ", p.D, " in ", p.dtype, ", not x ", x.sizes(),
                  " in ", x.scalar_type());
      Block<T> block{.prepared = p, .M = M, .result = result.data_ptr<T>()};
      block.x = all.empty() ? xs.const_data_ptr<T>() : result.const_data_ptr<T>();
      if (p.P) {
        const int64_t count = prepared.size();
        TORCH_CHECK(own_inputs, "a block with an input of its own needs own_inputs");
        const Tensor& own = checked(*own_inputs, "own_inputs", x.scalar_type(), {call.B, call.S, count, p.P});
        block.own_input = own.const_data_ptr<T>() + all.size() * p.P;
        block.own_stride = count * p.P;
        work += 2 * M * p.P * D;
      }
      if (p.conv.channels) {
        set_conv_state(block, call, bases[recurrent], tails[recurrent]);
        if (p.net.m) {
          const size_t i = delta_nets++;
          block.delta = checked_delta(matrices[i], bases[recurrent], keys[i], deltas[i], decays[i]);
          const Delta& d = block.delta;
          TORCH_CHECK(d.n == p.net.n && d.m == p.net.m && d.dk == p.net.dk && d.dv == p.net.dv,
                      "a block has other heads than its state ", matrices[i].sizes());
          work += M * d.m * d.dk * d.dv;
        }
        recurrent++;
      } else {
        set_attention(block, call, k_caches[attentions], v_caches[attentions]);
        attentions++;
        if (p.window != window || block.attention.slots != slots) {
          plans.emplace_back(block.attention);
          window = p.window;
          slots = block.attention.slots;
        }
        block.plan = &plans.back();
      }
      if (p.experts) {
        const Tensor& counts = checked(expert_counts[sparse++], "counts", at::kLong, {p.experts->X + 1});
        block.experts = {.p = p.experts.get(), .M = M};
        block.experts.positions = call.input_pos.template const_data_ptr<int64_t>();
        block.experts.counts = counts.template data_ptr<int64_t>();
        work += p.experts->multiply_adds(M);
      } else {
        work += M * (p.up.N * D + p.down.C * D);
      }
      work += M * (p.qkv.N * D + p.out.C * D);
      all.push_back(block);
    }

    // All blocks use the same memory, because they run one after the other.
    const auto [end, memory] = allocate_together([&](Arena& arena) {
      const Arena start = arena;
      for (auto& block : all) {
        Arena own = start;
        block.allocate(own);
        arena.next = std::max(arena.next, own.next);
      }
      return arena.next;
    });
    parallel(work < MIN_PARALLEL_WORK, [&](const Team& team) {
      for (const auto& block : all) block.run(team);
      team.begin(NONE);
    });
  });
  return result;
}

// Returns cos (M,E) and then sin (M,E) for positions (M,), from tables (slots,E). Padding gets the angles of the
// scratch slot.
std::vector<float> gather_angles(const float* cos, const float* sin, const int64_t* positions, int64_t M, int64_t slots,
                                 int64_t E) {
  std::vector<float> angles(2 * M * E);
  for (int64_t m = 0; m < M; m++) {
    const int64_t slot = positions[m] < 0 ? slots - 1 : positions[m];
    std::copy_n(cos + slot * E, E, angles.data() + m * E);
    std::copy_n(sin + slot * E, E, angles.data() + (M + m) * E);
  }
  return angles;
}

// Writes the keys and values of tokens (B,S) for the MTP layer, as MTPLayer.read of mixers/mtp.py does.
//   embedded, hidden  (B,S,D), the tokens' embeddings, and the model's last hidden states
//   cos, sin          (tables,slots,1,E), the RoPE tables of all positions
//   tail              of a recurrent.Tail
//   embedding_norm    and hidden_norm, (D,) float32: the weights of these norms
//   proj              the handle of the layer (D,2D) that joins an embedding and a hidden state
//   handle            of the layer's block, which only writes keys and values
void write_draft_keys(const Tensor& embedded, const Tensor& hidden, const Tensor& input_pos, const MaybeTensor& rows,
                      const Tensor& cos, const Tensor& sin, const Tensor& tail, const Tensor& k_cache,
                      const Tensor& v_cache, const Tensor& embedding_norm, const Tensor& hidden_norm, int64_t proj,
                      int64_t handle) {
  const auto prepared = prepared_blocks.get(handle);
  const auto prepared_proj = prepared_layers.get(proj);
  const PreparedBlock& p = *prepared;
  TORCH_CHECK(hidden.dim() == 3 && hidden.size(2) == p.D && p.dtype == hidden.scalar_type() && p.only_keys,
              "hidden states (B,S,", p.D, ") in ", p.dtype, " were expected, not ", hidden.sizes(), " in ",
              hidden.scalar_type());
  const int64_t B = hidden.size(0), S = hidden.size(1), D = p.D, M = B * S;
  const Tensor at = checked(input_pos.contiguous(), "input_pos", at::kLong, {B, S});
  const Tensor pair_pos = at.sub(1).clamp_min(-1);  // the position of a pair, an embedding and the hidden state before
  const Tensor embeddings = checked(embedded.contiguous(), "embedded", p.dtype, {B, S, D});
  const Tensor states = hidden.contiguous();
  const int64_t slots = k_cache.size(2);
  checked(cos, "cos", at::kFloat, {-1, slots, 1, p.E});
  checked(sin, "sin", at::kFloat, cos.sizes());
  TORCH_CHECK(p.rope_table < cos.size(0), "RoPE table ", p.rope_table, " of ", cos.size(0));
  const int64_t table = p.rope_table * slots * p.E;
  const std::vector<float> angles =
      gather_angles(cos.const_data_ptr<float>() + table, sin.const_data_ptr<float>() + table,
                    pair_pos.const_data_ptr<int64_t>(), M, slots, p.E);

  dispatch_dtype(hidden, [&](auto type) {
    using T = decltype(type);
    DraftKeys<T> call{.block = {.prepared = p, .M = M}, .B = B, .S = S, .D = D, .M = M};
    call.positions = at.const_data_ptr<int64_t>();
    call.rows = data<int64_t>(checked(rows, "rows", at::kLong, {B}));
    call.embedded = embeddings.const_data_ptr<T>();
    call.hidden = states.const_data_ptr<T>();
    call.embedding_norm = checked(embedding_norm, "embedding_norm", at::kFloat, {D}).template const_data_ptr<float>();
    call.hidden_norm = checked(hidden_norm, "hidden_norm", at::kFloat, {D}).template const_data_ptr<float>();
    call.eps = p.eps;
    call.proj = prepared_proj->checked(p.dtype, D, 2 * D);
    const std::vector<int64_t> tail_sizes{k_cache.size(0), call.tail_size + 1, D};
    call.tail = checked(tail, "tail", p.dtype, tail_sizes).template data_ptr<T>();
    for (int64_t b = 0; b < B; b++)
      call.counts.push_back(std::count_if(call.positions + b * S, call.positions + (b + 1) * S,
                                          [](int64_t position) { return position >= 0; }));
    Block<T>& block = call.block;
    block.attention = checked_attention<T>(B, S, p.H, k_cache, v_cache, pair_pos, rows, {}, p.window, p.scale);
    TORCH_CHECK(p.K == block.attention.K && p.E == block.attention.E, "k_cache ", k_cache.sizes());
    block.k = k_cache.data_ptr<T>();
    block.v = v_cache.data_ptr<T>();
    block.cos = angles.data();
    block.sin = angles.data() + M * p.E;

    const auto [arrays, memory] = allocate_together([&](Arena& arena) {
      DraftKeys<T> one = call;
      one.allocate(arena);
      return one;
    });
    const bool is_small = M * (call.proj.N * call.proj.C + p.qkv.N * D) < MIN_PARALLEL_WORK;
    parallel(is_small, [&, &arrays = arrays](const Team& team) { arrays.run(team); });
  });
}

// Returns whether AMX is used from now on: it must be allowed, and this library must have been compiled for it.
bool allow_amx(bool allowed) {
#ifdef HAS_AMX
  return amx_allowed = allowed;
#else
  return false;
#endif
}

}  // namespace

// The names of an operation's arguments in its schema, separated by commas; empty if the operation is not declared.
std::string argument_names(const char* operation) {
  std::string names;
  const auto declared = c10::Dispatcher::singleton().findSchema({operation, ""});
  if (!declared) return names;
  for (const auto& argument : declared->schema().arguments()) names += (names.empty() ? "" : ", ") + argument.name();
  return names;
}

#define TEXT_OF(...) #__VA_ARGS__
#define EXPANDED_TEXT_OF(...) TEXT_OF(__VA_ARGS__)

// Registers the kernels under the schemas that kernels.py and sampling.py declare. A kernel that does not fit its
// schema is left out, so that the reference runs; returns the names of these kernels, separated by spaces. torch
// compares the types of the arguments. All settings of sampling are tensors, so their names are compared, too.
extern "C" [[gnu::visibility("default")]] const char* register_kernels() {
  static torch::Library cpu(torch::Library::IMPL, "fastpath", c10::DispatchKey::CPU, __FILE__, __LINE__);
  // These have no tensor whose device could be dispatched on.
  static torch::Library any(torch::Library::IMPL, "fastpath", c10::DispatchKey::CompositeImplicitAutograd, __FILE__,
                            __LINE__);
  static std::string misfits;
  auto add_misfit = [](const char* name) { misfits += misfits.empty() ? name : std::string(" ") + name; };
  auto add = [&](torch::Library& library, const char* name, auto* function) {
    try {
      library.impl(name, function);
    } catch (const std::exception&) {
      add_misfit(name);
    }
  };
  add(cpu, "linear", &linear);
  add(cpu, "pack_layer", &pack_layer);
  add(cpu, "prepare_layer", &prepare_layer);
  add(cpu, "embed_packed", &embed_packed);
  add(cpu, "linear_packed", &linear_packed);
  add(cpu, "rms_norm", &rms_norm);
  add(cpu, "layer_norm", &layer_norm);
  add(cpu, "attention", &attention);
  add(cpu, "gated_delta", &gated_delta);
  if (argument_names("fastpath::sample") == EXPANDED_TEXT_OF(SAMPLING_NAMES)) {
    add(cpu, "sample", &sample);
    add(cpu, "probabilities", &probabilities);
  } else {
    add_misfit("sample");
    add_misfit("probabilities");
  }
  add(cpu, "sparse_mlp", &sparse_mlp);
  add(cpu, "prepare_block", &prepare_block);
  add(cpu, "blocks", &blocks);
  add(cpu, "medusa", &medusa);
  add(cpu, "head_logits", &head_logits);
  add(cpu, "quantize_head", &quantize_head);
  add(cpu, "write_draft_keys", &write_draft_keys);
  add(any, "packed_bytes", &packed_bytes);
  add(any, "stack_layers", &stack_layers);
  add(any, "prepare_experts", &prepare_experts);
  add(any, "release_experts", &release_experts);
  add(any, "release_layers", &release_layers);
  add(any, "release_blocks", &release_blocks);
  add(any, "allow_amx", &allow_amx);
  return misfits.c_str();
}

// Turns the profile on or off, and writes what was spent since the last call, in nanoseconds, in the order of PART_NAMES.
extern "C" [[gnu::visibility("default")]] void take_profile(bool on, int64_t* spent) {
  std::copy(profile.spent.begin(), profile.spent.end(), spent);
  profile.spent.fill(0);
  profile.is_on = on;
}

extern "C" [[gnu::visibility("default")]] const char* part_names() { return PART_NAMES; }

// The names of the formats that have kernels, separated by spaces.
extern "C" [[gnu::visibility("default")]] const char* format_names() {
  static const std::string names = [] {
    std::string all;
    for (int i = 0; i < int(std::tuple_size_v<Formats>); i++)
      with_format(i, [&](auto format) { all += std::string(i ? " " : "") + decltype(format)::NAME; });
    return all;
  }();
  return names.c_str();
}
