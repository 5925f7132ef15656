// What the operations share: they check their arguments, and call templates for the dtype.

#pragma once

#include <optional>

#include "matmul.h"

namespace {

// Calls work with a number of x's type.
template <class Work>
void dispatch_dtype(const Tensor& x, const Work& work) {
  if (x.scalar_type() == at::kBFloat16) return work(bf16());
  if (x.scalar_type() == at::kHalf) return work(half());
  TORCH_CHECK(x.scalar_type() == at::kFloat, "expected bfloat16, float16 or float32, got ", x.scalar_type());
  work(float());
}

using MaybeTensor = std::optional<Tensor>;

template <class T>
const T* data(const MaybeTensor& t) {
  return t ? t->const_data_ptr<T>() : nullptr;
}

// Checks that a tensor is contiguous and has this dtype and these sizes (-1: any size), and returns it.
const Tensor& checked(const Tensor& t, const char* name, at::ScalarType dtype, at::IntArrayRef sizes) {
  bool fits = t.scalar_type() == dtype && t.dim() == int64_t(sizes.size()) && t.is_contiguous();
  for (size_t i = 0; fits && i < sizes.size(); i++) fits = sizes[i] == -1 || t.size(i) == sizes[i];
  TORCH_CHECK(fits, name, ": expected ", sizes, " in ", dtype, ", contiguous; got ", t.sizes(), " in ", t.scalar_type(),
              t.is_contiguous() ? "" : ", not contiguous");
  return t;
}

const MaybeTensor& checked(const MaybeTensor& t, const char* name, at::ScalarType dtype, at::IntArrayRef sizes) {
  if (t) checked(*t, name, dtype, sizes);
  return t;
}

// A linear layer of N outputs and K inputs. Weights without scales are in x's dtype: (N,K), or packed for AMX. With
// scales they are int8, with mins as well int4.
Linear checked_layer(const Tensor& weight, const MaybeTensor& scales, const MaybeTensor& mins, const MaybeTensor& bias,
                     at::ScalarType dtype, int64_t N, int64_t K, int64_t groupsize, bool exact) {
  Linear l{N, K, !scales ? 16 : mins ? 4 : 8, exact || dtype == at::kFloat, weight.const_data_ptr()};
  l.bias = checked(bias, "bias", dtype, {N}) ? bias->const_data_ptr() : nullptr;
  if (!scales && weight.dim() == 2) {
    checked(weight, "weight", dtype, {N, K});
    return l;
  }
  const int64_t Nb = (N + LANES - 1) / LANES;
  l.Kb = (K + GROUP - 1) / GROUP;
  if (!scales) {
    TORCH_CHECK(amx_allowed && dtype == at::kBFloat16, "packed bfloat16 weights need AMX and bfloat16 activations");
    TORCH_CHECK(N % LANES == 0 && K % GROUP == 0, "packed bfloat16 weights of ", N, " rows and ", K, " columns");
    checked(weight, "packed weight", dtype, {Nb, l.Kb, GROUP / 2, LANES, 2});
    return l;
  }
  TORCH_CHECK(groupsize >= K || (groupsize > 0 && groupsize % GROUP == 0), "groups of ", groupsize,
              " columns are no multiple of 32");
  l.groups_per_scale = groupsize >= K ? l.Kb : groupsize / GROUP;
  l.G = (l.Kb + l.groups_per_scale - 1) / l.groups_per_scale;
  checked(weight, "packed weight", at::kByte, {Nb, l.Kb, mins ? 4 : 8, LANES, 4});
  l.scales = checked(*scales, "scales", at::kHalf, {Nb, l.G, LANES}).const_data_ptr<half>();
  l.mins = data<half>(checked(mins, "mins", at::kHalf, {Nb, l.G, LANES}));
  return l;
}

}  // namespace
