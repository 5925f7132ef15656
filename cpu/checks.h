// What the operations share: checks of their arguments, layers that are prepared once, and templates for the dtype.

#pragma once

#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "matmul.h"

namespace fastpath {

// Calls work(T()), where T is the C++ type of x's dtype.
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

// Returns a tensor after checking that it is contiguous and has this dtype and these sizes (-1: any size).
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

// A layer that is checked once and then used by its handle.
struct PreparedLayer {
  std::vector<Tensor> tensors;          // own the memory that `layer` refers to
  std::optional<at::ScalarType> dtype;  // of the activations; empty if no weight or bias requires one
  Layer layer;

  // The layer for activations of this dtype and these sizes (-1: any). Activations in float32 are never quantized.
  Layer checked(at::ScalarType x_dtype, int64_t N, int64_t C) const {
    TORCH_CHECK((N == -1 || N == layer.N) && C == layer.C, "a layer of ", layer.N, " outputs and ", layer.C,
                " inputs, not ", N, " and ", C);
    TORCH_CHECK(!dtype || dtype == x_dtype, "a layer in ", *dtype, ", activations in ", x_dtype);
    Layer l = layer;
    for (Linear& piece : l.pieces) piece.exact |= x_dtype == at::kFloat;
    return l;
  }
};

// How many groups of 32 columns share a scale, if `groupsize` of the C columns do.
int64_t groups_per_scale(int64_t groupsize, int64_t C) {
  TORCH_CHECK(groupsize >= C || (groupsize > 0 && groupsize % GROUP == 0), "groups of ", groupsize,
              " columns are not a multiple of 32");
  return groupsize >= C ? (C + GROUP - 1) / GROUP : groupsize / GROUP;
}

// The index of a quantized format in `Formats`.
int checked_format(const std::string& name, int64_t C, int64_t groupsize) {
  const int number = format_named(name, groups_per_scale(groupsize, C));
  TORCH_CHECK(number >= 0, "there are no kernels for the format ", name);
  return number;
}

// The operation packed_bytes.
int64_t packed_bytes(const std::string& format, int64_t N, int64_t C, int64_t groupsize) {
  int64_t bytes = 0;
  with_format(checked_format(format, C, groupsize), [&](auto f) {
    const int64_t Cb = (C + GROUP - 1) / GROUP;
    bytes = (N + LANES - 1) / LANES * packed_block_bytes<decltype(f)>(Cb, groups_per_scale(groupsize, C));
  });
  return bytes;
}

// What Linear::format is for a format of prepare_layer.
int format_number(const std::string& format, int64_t C, int64_t groupsize) {
  if (format == "dense") return DENSE;
  if (format == "tiles") return TILES;
  return checked_format(format, C, groupsize);
}

// The layer that prepare_layer makes.
PreparedLayer make_layer(const std::string& format, const Tensor& weight, const MaybeTensor& bias, int64_t N, int64_t C,
                         int64_t groupsize, bool exact) {
  PreparedLayer made{.tensors = {weight}};
  const int number = format_number(format, C, groupsize);
  Linear l{.N = N, .C = C, .format = number, .exact = exact, .weight = weight.const_data_ptr()};
  if (!l.is_quantized()) made.dtype = weight.scalar_type();
  if (bias) {
    TORCH_CHECK(!made.dtype || made.dtype == bias->scalar_type(), "bias: in another dtype than the weight");
    made.dtype = bias->scalar_type();
    l.bias = checked(*bias, "bias", *made.dtype, {N}).const_data_ptr();
    made.tensors.push_back(*bias);
  }
  l.Cb = (C + GROUP - 1) / GROUP;
  l.stride = N;
  if (l.format == DENSE) {
    checked(weight, "weight", *made.dtype, {N, C});
  } else if (l.format == TILES) {
    const bool works = amx_allowed && made.dtype == at::kBFloat16;
    TORCH_CHECK(works, "packed bfloat16 weights need AMX and bfloat16 activations");
    TORCH_CHECK(N % LANES == 0 && C % GROUP == 0, "packed bfloat16 weights of ", N, " rows and ", C, " columns");
    checked(weight, "packed weight", at::kBFloat16, {N / LANES, l.Cb, GROUP / 2, LANES, 2});
  } else {
    const int64_t bytes = packed_bytes(format, N, C, groupsize);
    checked(weight, "packed weight", at::kByte, {bytes});
    l.groups_per_scale = groups_per_scale(groupsize, C);
    l.block_bytes = N ? bytes / ((N + LANES - 1) / LANES) : 0;
  }
  made.layer = {.N = N, .C = C, .pieces = {l}};
  return made;
}

// The layer that stack_layers makes: it has the outputs of several layers, one after the other.
PreparedLayer stack(const std::vector<std::shared_ptr<const PreparedLayer>>& layers, const MaybeTensor& bias) {
  PreparedLayer made{.layer = {.N = 0, .C = layers.at(0)->layer.C}};
  for (const auto& prepared : layers) {
    TORCH_CHECK(prepared->layer.C == made.layer.C, "a stack of layers of ", made.layer.C, " and ", prepared->layer.C,
                " inputs");
    made.tensors.insert(made.tensors.end(), prepared->tensors.begin(), prepared->tensors.end());
    if (prepared->dtype) made.dtype = prepared->dtype;
    for (Linear piece : prepared->layer.pieces) {
      TORCH_CHECK(!bias || !piece.bias, "a stack of layers with and without biases of their own");
      piece.first += made.layer.N;
      made.layer.pieces.push_back(piece);
    }
    made.layer.N += prepared->layer.N;
  }
  if (bias) {
    TORCH_CHECK(!made.dtype || made.dtype == bias->scalar_type(), "bias: in another dtype than the weights");
    made.dtype = bias->scalar_type();
    checked(*bias, "bias", *made.dtype, {made.layer.N});
    made.tensors.push_back(*bias);
  }
  for (Linear& piece : made.layer.pieces) {
    piece.stride = made.layer.N;
    if (bias) piece.bias = (const uint8_t*)bias->const_data_ptr() + piece.first * bias->element_size();
  }
  return made;
}

// A list of things that are prepared once and then used by their handles. A handle is an index.
template <class Thing>
class Handles {
  std::mutex lock;
  std::vector<std::shared_ptr<const Thing>> things;

 public:
  int64_t add(Thing thing) {
    const std::lock_guard guard(lock);
    things.push_back(std::make_shared<const Thing>(std::move(thing)));
    return things.size() - 1;
  }
  std::shared_ptr<const Thing> get(int64_t handle) {
    const std::lock_guard guard(lock);
    TORCH_CHECK(handle >= 0 && handle < int64_t(things.size()) && things[handle], "there is no handle ", handle);
    return things[handle];
  }
  void release(at::IntArrayRef handles) {
    const std::lock_guard guard(lock);
    for (int64_t handle : handles) things.at(handle).reset();
  }
};

Handles<PreparedLayer> prepared_layers;

}  // namespace fastpath
