// The CPU kernels: matrix products with bfloat16, float16 and float32 weights and with every quantized format, norms,
// attention, all blocks of a transformer as one operation, sampling, and Medusa heads.
//
// cpu/build.py compiles this file and matmul.cpp for the instruction set of the processor; cpu/layers.py packs weights.
// kernels.py and sampling.py declare the operations and say what they compute. With AMX, bfloat16 weights are packed
// and multiplied with it, and many rows or queries at once use it for quantized weights and for attention. Read this
// file last: it defines the operations, which check their arguments and divide the work among the threads. Before it
// come vectors.h, formats.h, parallel.h, dots.h, products.h, prefill.h, matmul.h with matmul.cpp, checks.h, experts.h,
// attention.h, delta.h, blocks.h, sampling.h, medusa.h and mtp.h, in this order.
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
#include "medusa.h"
#include "mtp.h"
#include "sampling.h"

using namespace fastpath;

namespace {

Tensor empty_with_width(const Tensor& x, int64_t width) {
  auto sizes = x.sizes().vec();
  sizes.back() = width;
  return at::empty(sizes, x.options());
}

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

// Packs the parts of a matrix (N,C) into `to`, of packed_bytes bytes. Parts are (N,bytes) in memory, whatever their
// dtype.
void pack_layer(const std::string& format, at::TensorList parts, int64_t C, int64_t groupsize, const Tensor& to) {
  const int64_t N = parts.at(0).size(0), Cb = (C + GROUP - 1) / GROUP;
  checked(to, "packed weight", at::kByte, {packed_bytes(format, N, C, groupsize)});
  Source source{{}, {}, N, C, groupsize};
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

// The rows of a table for these tokens, (...,C) float32.
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
  const bool in_float = weight.scalar_type() == at::kFloat;  // whatever x is
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
  Attention<T> a{B, S, H, K, k_cache.size(3), slots};
  a.k = k_cache.const_data_ptr<T>();
  a.v = v_cache.const_data_ptr<T>();
  a.positions = positions;
  a.rows = row;
  a.slopes = data<float>(slopes);
  a.window = std::min(window.value_or(slots), slots), a.scale = scale;
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
  Delta d{0, m, matrix.size(2), matrix.size(3)};
  d.n = checked(keys, "keys", at::kFloat, {R, DELTA_WINDOW, -1, d.dk}).size(2);
  TORCH_CHECK(d.n > 0 && m % d.n == 0, m, " value heads are not a multiple of ", d.n, " key heads");
  d.matrix = matrix.data_ptr<float>();
  d.keys = keys.data_ptr<float>();
  d.deltas = checked(deltas, "deltas", at::kFloat, {R, DELTA_WINDOW, m, d.dv}).data_ptr<float>();
  d.decays = checked(decays, "decays", at::kFloat, {R, DELTA_WINDOW, m}).data_ptr<float>();
  d.base = checked(base, "base", at::kLong, {R}).data_ptr<int64_t>();
  return d;
}

// The runs of a pass over rows of a state of R rows, after checks.
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

// Returns a handle of the experts of a sparse layer.
//   layers  handles of the router (with a shared expert: and of its gate, as one layer), of the experts' gate_up and
//           down, and of the shared expert's gate_up and down, if there is one
//   sizes   X, k, D, F, and F of the shared expert or 0
//   dtype   of the activations
int64_t prepare_experts(at::IntArrayRef layers, at::IntArrayRef sizes, bool normalized, at::ScalarType dtype) {
  TORCH_CHECK(sizes.size() == 5 && layers.size() == (sizes[4] ? 5 : 3), "5 sizes, 3 or 5 layers expected");
  PreparedExperts p{{}, dtype, sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], normalized};
  TORCH_CHECK(0 < p.k && p.k <= p.X, p.k, " of ", p.X, " experts");
  for (int64_t layer : layers) p.layers.push_back(prepared_layers.get(layer));
  p.router = p.layers[0]->checked(at::kFloat, p.X + (p.shared_F > 0), p.D);
  const Layer gate_up = p.layers[1]->checked(dtype, -1, p.D);
  const Layer down = p.layers[2]->checked(dtype, -1, p.F);
  for (int64_t e = 0; e < p.X; e++) {
    p.gate_up.push_back(layer_of_expert(*p.layers[1], gate_up, e, p.X, 2 * p.F));
    p.down.push_back(layer_of_expert(*p.layers[2], down, e, p.X, p.D));
  }
  if (p.shared_F) {
    p.gate_up.push_back(p.layers[3]->checked(dtype, 2 * p.shared_F, p.D));
    p.down.push_back(p.layers[4]->checked(dtype, p.D, p.shared_F));
  }
  return prepared_experts.add(std::move(p));
}

void release_experts(at::IntArrayRef handles) { prepared_experts.release(handles); }

// experts.SparseMLP as one operation. x (B,S,D); input_pos (B,S): -1 is padding, which uses no expert; counts (X+1,):
// see SparseMLP.set_counts.
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
    Experts<T> call{&p, M};
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

// Returns a handle of a block for the operation `blocks`.
//   norms       weight and bias of the norms before attention and MLP, then the weights of q_norm,
//               k_norm and the norms after attention and MLP. With a gated delta net also the weights
//               of its convolution (width,channels), the weight and bias of its decay, and its norm.
//               With a short convolution also its weights (width,channels) and its bias
//   layers      handles of qkv (or what is in its place), out, up (or gate and up), down; or of qkv and out alone,
//               if the block has experts; or of qkv alone, then the block only writes keys and values
//   experts     of prepare_experts, or None
//   sizes       H, K, E, D, F, the heads with gates, then n, m, dk, dv of a gated delta net, or zeros
//   activation  the MLP's, as in Config.mlp
int64_t prepare_block(const c10::List<MaybeTensor>& norms, at::IntArrayRef layers, at::IntArrayRef sizes,
                      at::ScalarType dtype, std::optional<int64_t> window, double scale, double eps,
                      double residual_scale, std::string_view activation, bool qk_norm_whole, bool post_norm_residual,
                      int64_t rope_table, std::optional<int64_t> experts) {
  PreparedBlock p;
  p.only_keys = layers.size() == 1;
  TORCH_CHECK(norms.size() == 12 && sizes.size() == 10 && (p.only_keys || layers.size() == (experts ? 2 : 4)),
              "12 norms, 4 layers, 10 sizes expected");
  for (const MaybeTensor norm : norms) p.norms.push_back(norm ? MaybeTensor(norm->to(at::kFloat)) : norm);
  p.H = sizes[0];
  p.K = sizes[1];
  p.E = sizes[2];
  p.D = sizes[3];
  p.F = sizes[4];
  p.dtype = dtype;
  p.gates = sizes[5];
  TORCH_CHECK(p.gates == 0 || p.gates == p.H, p.gates, " gates for ", p.H, " heads");
  p.window = window.value_or(std::numeric_limits<int64_t>::max()), p.scale = scale;
  auto vector = [&](int i, int64_t size) {
    return checked(p.norms[i], "weight of a norm", at::kFloat, {size}) ? p.norms[i]->const_data_ptr<float>() : nullptr;
  };
  auto linear = [&](int i, int64_t N, int64_t C) {
    p.layers.push_back(prepared_layers.get(layers[i]));
    return p.layers.back()->checked(p.dtype, N, C);
  };
  DeltaNet& net = p.net;
  net.n = sizes[6];
  net.m = sizes[7];
  net.dk = sizes[8];
  net.dv = sizes[9];
  Convolution& conv = p.conv;
  if (p.norms[8]) {
    conv.width = checked(*p.norms[8], "conv", at::kFloat, {-1, -1}).size(0), conv.channels = p.norms[8]->size(1);
    TORCH_CHECK(conv.width <= MAX_CONV_WIDTH, "a convolution over ", conv.width, " positions");
    conv.weight = p.norms[8]->const_data_ptr<float>();
    conv.bias = nullptr;
  }
  if (net.m) {
    TORCH_CHECK(net.n > 0 && net.m % net.n == 0 && conv.channels == 2 * net.n * net.dk + net.m * net.dv,
                "a gated delta net of ", net.n, " key heads, ", net.m, " value heads and ", conv.channels, " channels");
    net.decay_weight = vector(9, net.m);
    net.decay_bias = vector(10, net.m);
    net.norm = vector(11, net.dv);
    p.qkv = linear(0, conv.channels + net.m * net.dv + 2 * net.m, p.D), p.out = linear(1, p.D, net.m * net.dv);
  } else if (conv.channels) {
    conv.bias = vector(9, conv.channels);
    p.qkv = linear(0, 3 * conv.channels, p.D), p.out = linear(1, p.D, conv.channels);
  } else {
    p.qkv = linear(0, (p.H + p.gates + 2 * p.K) * p.E, p.D);
    if (!p.only_keys) p.out = linear(1, p.D, p.H * p.E);
  }
  p.gated = activation != "gelu";
  p.gelu = activation != "swiglu";
  if (experts) {
    p.experts = prepared_experts.get(*experts);
    TORCH_CHECK(p.experts->D == p.D && p.experts->dtype == p.dtype, "experts of D ", p.experts->D, " in ",
                p.experts->dtype);
  } else if (!p.only_keys) {
    p.up = linear(2, p.gated ? 2 * p.F : p.F, p.D), p.down = linear(3, p.D, p.F);
  }
  for (int i = 0; i < 2; i++) {
    p.attention_norm[i] = vector(i, p.D);
    p.mlp_norm[i] = vector(2 + i, p.D);
  }
  p.qk_norm_whole = qk_norm_whole;
  p.q_norm = vector(4, qk_norm_whole ? p.H * p.E : p.E);
  p.k_norm = vector(5, qk_norm_whole ? p.K * p.E : p.E);
  p.attention_post_norm = vector(6, p.D);
  p.mlp_post_norm = vector(7, p.D);
  p.eps = eps;
  p.residual_scale = residual_scale;
  p.post_norm_residual = post_norm_residual;
  p.rope_table = rope_table;
  return prepared_blocks.add(std::move(p));
}

// How many tensors the state of a block has, other than keys and values.
size_t state_tensors(const PreparedBlock& p) { return p.net.m ? 6 : p.conv.channels ? 2 : 0; }

void release_blocks(at::IntArrayRef handles) { prepared_blocks.release(handles); }

// cos and sin have a tensor for each RoPE table, with the values for x's tokens; they are empty if the
// model does not use RoPE. query_scales has a value for each slot. k_caches and v_caches have a tensor
// for each block with attention. states has two for each other block, base and tail of its
// recurrent.ConvState, and with a gated delta net also matrix, keys, deltas and decays. counts has a
// tensor for each sparse block: see SparseMLP.set_counts.
Tensor blocks(const Tensor& x, const Tensor& input_pos, const MaybeTensor& rows, at::TensorList cos,
              at::TensorList sin, const MaybeTensor& slopes, const MaybeTensor& query_scales,
              at::TensorList k_caches, at::TensorList v_caches, at::TensorList states, at::TensorList counts,
              at::IntArrayRef handles) {
  std::vector<std::shared_ptr<const PreparedBlock>> prepared;
  size_t recurrent = 0;
  size_t sparse = 0;
  size_t tensors = 0;
  for (int64_t handle : handles) {
    prepared.push_back(prepared_blocks.get(handle));
    recurrent += prepared.back()->conv.channels > 0;
    tensors += state_tensors(*prepared.back());
    sparse += prepared.back()->experts != nullptr;
  }
  TORCH_CHECK(x.dim() == 3 && k_caches.size() == handles.size() - recurrent && v_caches.size() == k_caches.size() &&
              states.size() == tensors && counts.size() == sparse,
              "x (B,S,D), and the state and the counts of each block were expected");
  const int64_t B = x.size(0), S = x.size(1), D = x.size(2);
  const Tensor xs = x.contiguous();
  const Tensor at = input_pos.contiguous();
  const Tensor result = at::empty(x.sizes(), x.options());
  dispatch_dtype(x, [&](auto type) {
    using T = decltype(type);
    std::vector<Block<T>> all;
    std::deque<SplitPlan> plans;  // one for consecutive blocks of the same window; a deque does not move its elements
    int64_t window = -1;
    int64_t slots = 0;
    int64_t work = 0;
    size_t at_cache = 0;
    size_t at_state = 0;
    size_t at_counts = 0;  // of the next block
    std::vector<DeltaRun> runs;
    checked(at, "input_pos", at::kLong, {B, S});
    if (recurrent) {
      runs = checked_runs(at, rows, states[0].size(0));
    }
    for (size_t i = 0; i < prepared.size(); i++) {
      const PreparedBlock& p = *prepared[i];
      TORCH_CHECK(p.dtype == x.scalar_type() && p.D == D, "block ", handles[i], " has D ", p.D, " in ", p.dtype,
                  ", not x ", x.sizes(), " in ", x.scalar_type());
      Block<T> block{p};
      block.M = B * S;
      if (p.conv.channels) {
        const at::TensorList state = states.slice(at_state, state_tensors(p));
        at_state += state.size();
        const int64_t R = checked(state[0], "base", at::kLong, {-1}).size(0);
        TORCH_CHECK(R == states[0].size(0), "states of ", R, " and ", states[0].size(0), " rows");
        block.base = state[0].data_ptr<int64_t>();
        block.runs = &runs;
        check_pending(runs, block.base);
        const std::vector<int64_t> tail_sizes{R, p.conv.tail_size() + 1, p.conv.channels};
        block.tail = checked(state[1], "tail", x.scalar_type(), tail_sizes).template data_ptr<T>();
        block.attention = {B, S};
        block.attention.positions = at.const_data_ptr<int64_t>();
        block.attention.rows = data<int64_t>(rows);
        if (p.net.m) {
          block.delta = checked_delta(state[2], state[0], state[3], state[4], state[5]);
          const Delta& d = block.delta;
          TORCH_CHECK(d.n == p.net.n && d.m == p.net.m && d.dk == p.net.dk && d.dv == p.net.dv, "block ", handles[i],
                      " has other heads than its state ", state[2].sizes());
          work += B * S * d.m * d.dk * d.dv;
        }
      } else {
        const Tensor& k = k_caches[at_cache];
        const Tensor& v = v_caches[at_cache];
        at_cache++;
        auto a = checked_attention<T>(B, S, p.H, k, v, at, rows, slopes, p.window, p.scale);
        TORCH_CHECK(p.K == a.K && p.E == a.E, "block ", handles[i], " has K ", p.K, ", E ", p.E, ", not k_cache ",
                    k.sizes());
        block.attention = a;
        if (!p.only_keys) {
          if (p.window != window || a.slots != slots) {
            plans.emplace_back(a);
            window = p.window;
            slots = a.slots;
          }
          block.plan = &plans.back();
        }
        block.k = k.data_ptr<T>();
        block.v = v.data_ptr<T>();
        block.query_scales = data<float>(checked(query_scales, "query_scales", at::kFloat, {a.slots, 1, 1}));
      }
      if (!cos.empty()) {
        TORCH_CHECK(p.rope_table >= 0 && p.rope_table < int64_t(cos.size()) && cos.size() == sin.size(), "block ",
                    handles[i], " needs RoPE table ", p.rope_table, " of ", cos.size());
        const Tensor& c = cos[p.rope_table];
        const Tensor& s = sin[p.rope_table];
        block.cos = checked(c, "cos", at::kFloat, {B, S, 1, p.E}).const_data_ptr<float>();
        block.sin = checked(s, "sin", at::kFloat, {B, S, 1, p.E}).const_data_ptr<float>();
      }
      if (p.experts) {
        block.experts.p = p.experts.get();
        block.experts.M = B * S;
        block.experts.positions = at.const_data_ptr<int64_t>();
        const Tensor& count = checked(counts[at_counts++], "counts", at::kLong, {p.experts->X + 1});
        block.experts.counts = count.data_ptr<int64_t>();
        work += p.experts->multiply_adds(B * S);
      } else {
        work += B * S * (p.up.N * D + p.down.C * D);
      }
      block.x = i ? result.data_ptr<T>() : xs.const_data_ptr<T>();
      block.result = result.data_ptr<T>();
      all.push_back(block);
      work += B * S * (p.qkv.N * D + p.out.C * D);
    }
    // All blocks use the same memory, since they run one after the other.
    auto allocate_blocks = [&](Arena from) {
      Arena furthest = from;
      for (auto& block : all) {
        Arena arena = from;
        block.allocate(arena);
        furthest.next = std::max(furthest.next, arena.next);
      }
      return furthest;
    };
    const auto [furthest, memory] = allocate_together([&](Arena& arena) { return arena = allocate_blocks(arena); });
    parallel(work < MIN_PARALLEL_WORK, [&](const Team& team) {
      for (const auto& block : all) block.run(team);
    });
  });
  return result;
}

// Writes the keys and values of tokens (B,S), as DraftLayer.read of mixers/mtp.py does. embedded, hidden (B,S,D): the tokens'
// embeddings, and the model's last hidden states; tail: of a recurrent.Tail; cos, sin (P,T,1,E): the tables of all
// positions; norms: the float32 weights of the norms of embedded and hidden; proj: the handle of the layer that joins
// them; handle: that of the layer's block, with keys only.
void write_draft_keys(const Tensor& embedded, const Tensor& hidden, const Tensor& input_pos, const MaybeTensor& rows,
                      const Tensor& cos, const Tensor& sin, const Tensor& tail, const Tensor& k_cache,
                      const Tensor& v_cache, at::TensorList norms, int64_t proj, int64_t handle) {
  const auto prepared = prepared_blocks.get(handle);
  const auto joins = prepared_layers.get(proj);
  const PreparedBlock& p = *prepared;
  TORCH_CHECK(hidden.dim() == 3 && hidden.size(2) == p.D && p.dtype == hidden.scalar_type() && p.only_keys &&
              norms.size() == 2, "hidden states (B,S,", p.D, ") were expected, not ", hidden.sizes());
  const int64_t B = hidden.size(0), S = hidden.size(1), D = p.D, M = B * S;
  const Tensor at = checked(input_pos.contiguous(), "input_pos", at::kLong, {B, S});
  const Tensor pair_pos = at.sub(1).clamp_min(-1);
  const Tensor table = checked(embedded.contiguous(), "embedded", p.dtype, {B, S, D});
  const Tensor states = hidden.contiguous();
  const int64_t T_slots = k_cache.size(2);
  for (const Tensor& one : {cos, sin}) checked(one, "cos or sin", at::kFloat, {-1, T_slots, 1, p.E});
  TORCH_CHECK(p.rope_table < cos.size(0), "RoPE table ", p.rope_table, " of ", cos.size(0));

  dispatch_dtype(hidden, [&](auto type) {
    using T = decltype(type);
    DraftKeys<T> call{Block<T>{p}, B, S, D, M};
    call.positions = at.const_data_ptr<int64_t>();
    call.rows = data<int64_t>(checked(rows, "rows", at::kLong, {B}));
    call.embedded = table.const_data_ptr<T>();
    call.hidden = states.const_data_ptr<T>();
    call.embedding_norm = checked(norms[0], "norm", at::kFloat, {D}).template const_data_ptr<float>();
    call.hidden_norm = checked(norms[1], "norm", at::kFloat, {D}).template const_data_ptr<float>();
    call.eps = p.eps, call.proj = joins->checked(p.dtype, D, 2 * D);
    const std::vector<int64_t> tail_sizes{k_cache.size(0), call.tail_size + 1, D};
    call.tail = checked(tail, "tail", p.dtype, tail_sizes).template data_ptr<T>();
    for (int64_t b = 0; b < B; b++)
      call.counts.push_back(std::count_if(call.positions + b * S, call.positions + (b + 1) * S,
                                          [](int64_t position) { return position >= 0; }));
    Block<T>& block = call.block;
    block.M = M;
    block.attention = checked_attention<T>(B, S, p.H, k_cache, v_cache, pair_pos, rows, {}, p.window, p.scale);
    TORCH_CHECK(p.K == block.attention.K && p.E == block.attention.E, "k_cache ", k_cache.sizes());
    block.k = k_cache.data_ptr<T>();
    block.v = v_cache.data_ptr<T>();

    std::vector<float> angles(2 * M * p.E);  // cos and sin of the pairs
    const int64_t* slots = pair_pos.const_data_ptr<int64_t>();
    for (int64_t m = 0; m < M; m++) {
      const int64_t from = (p.rope_table * T_slots + (slots[m] < 0 ? T_slots - 1 : slots[m])) * p.E;
      std::copy_n(cos.const_data_ptr<float>() + from, p.E, angles.data() + m * p.E);
      std::copy_n(sin.const_data_ptr<float>() + from, p.E, angles.data() + (M + m) * p.E);
    }
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

// Returns whether AMX is used from now on: whether it is allowed and this library was compiled for it.
bool allow_amx(bool allowed) {
#ifdef HAS_AMX
  return amx_allowed = allowed;
#else
  return false;
#endif
}

}  // namespace

// The names of an operation's arguments in its schema, separated by commas; empty if the operation is
// not declared.
std::string argument_names(const char* operation) {
  std::string names;
  const auto declared = c10::Dispatcher::singleton().findSchema({operation, ""});
  if (!declared) return names;
  for (const auto& argument : declared->schema().arguments()) names += (names.empty() ? "" : ", ") + argument.name();
  return names;
}

#define TEXT_OF(...) #__VA_ARGS__
#define EXPANDED_TEXT_OF(...) TEXT_OF(__VA_ARGS__)

// Registers the kernels under the schemas that kernels.py and sampling.py declare. Returns the names of those that do
// not fit their schemas, separated by spaces: these are left out, so that their references run. torch compares the
// types of the arguments. All settings of sampling are tensors, so their names are compared, too.
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
