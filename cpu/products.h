// Products of weights and rows of x: layers, the conversion of x, and the products of tiles.
//
// Quantized weights are packed in blocks of 16 rows (formats.h). Activations are quantized to 8 bits, with one scale
// for each group of 32 columns: the dot product of a group is then an exact int32. With `exact`, activations are not
// quantized, and weights are converted to float32 in registers.
//
// A product is limited by reading the weights if there are few rows of x, and by the multiplications if there are many.
// So each weight is loaded (and unpacked) once for a tile of rows of x, whose sums stay in registers.

#pragma once

#include <cmath>
#include <cstring>
#include <type_traits>
#include <vector>

#include "dots.h"
#include "formats.h"
#include "parallel.h"

#if defined(__AMX_BF16__) && defined(__AMX_INT8__)
#define HAS_AMX
#endif

namespace fastpath {

// A pass with more new tokens per row is a prefill. Then torch multiplies weights that are not packed (see `linear`),
// and attention has enough queries for all threads (see SplitPlan).
constexpr int MAX_DECODE_TOKENS = 16;
constexpr int PREFETCH_DISTANCE = 6144;  // weights are prefetched this many bytes before they are used
// Weights of 8 bits need so little arithmetic that a processor reads far ahead by itself. With a greater distance,
// products were 1.08 times as slow on a Zen 4 whose memory others used, too; with 4 bits, they were with a smaller one.
template <class F>
constexpr int PREFETCH_AHEAD = F::Levels::LINES == 8 ? 2048 : PREFETCH_DISTANCE;
constexpr auto PREFETCH_TO = _MM_HINT_T1;  // the L2 cache: prefetches to L1 delay the loads of x

// How the rows of a matrix are stored: one of these two, or an index in `Formats`.
constexpr int DENSE = -2;  // in x's dtype, (N,C)
constexpr int TILES = -1;  // in bfloat16, packed for AMX: (Nb,Cb,16,16,2), line j of a group has columns 2j and 2j+1

// A piece of a layer: N of its rows, W, all in one format.
struct Linear {
  int64_t N, C;
  int format;
  bool exact;  // x is not quantized
  const void* weight;
  const void* bias;          // (N,) in x's dtype, or null
  int64_t Cb;                // groups of 32 columns
  int64_t groups_per_scale;  // groups that share a weight scale, for formats with groups of several sizes
  int64_t block_bytes;       // bytes of a block of 16 packed rows, if W is quantized
  int64_t first;             // the layer's output that the first of these rows computes
  int64_t stride;            // how many outputs the layer has

  bool is_quantized() const { return format >= 0; }
  bool quantizes_activations() const { return is_quantized() && !exact; }
};

// A linear layer: y = x W^T + bias. The rows of W may be stored in several formats.
struct Layer {
  int64_t N, C;
  std::vector<Linear> pieces;

  int64_t groups() const { return (C + GROUP - 1) / GROUP; }
  bool any(bool (Linear::*property)() const) const {
    return std::any_of(pieces.begin(), pieces.end(), [&](const Linear& l) { return (l.*property)(); });
  }
};

constexpr int TILE_ROWS = 16;  // rows of x in a tile of quantized activations
// How many rows of x are multiplied with a block at a time: the registers hold no more sums.
constexpr int INT8_ROWS = VECTOR_BITS == 512 ? 8 : 4;   // quantized rows
constexpr int FLOAT_ROWS = VECTOR_BITS == 512 ? 4 : 2;  // rows in float32

// M rows of x, converted for a matrix product. Quantized activations are stored in tiles of up to 16 rows: the layout
// is (tiles,Cb,rows,32), so that a product finds the rows of a group one after the other. `at` is the index of a group.
struct Input {
  const void* x;  // (M,C)
  int64_t M, Cb;
  int8_t* q;             // (M*Cb,32), x quantized to 8 bits
  float* scale;          // (M*Cb,), x = q * scale
  int32_t* sum;          // (M*Cb,), -8 * sum(q) of a group: a product uses it to subtract the OFFSET of the levels
  int32_t* half_sum[2];  // (M*Cb,) each, the same of each half of a group
  float* scaled_sum;     // (M*Cb,), scale * sum(q): a product multiplies it by the min of a group of weights
  float* as_float;       // (M,Cb*32), x in float32, for exact activations

  int64_t rows_of_tile(int64_t m) const { return std::min<int64_t>(TILE_ROWS, M - m / TILE_ROWS * TILE_ROWS); }
  // The index of a group of row m. The next row of the tile has the next index; the next group of row m has an index
  // that is larger by rows_of_tile(m).
  int64_t at(int64_t m, int64_t group) const {
    return m / TILE_ROWS * TILE_ROWS * Cb + group * rows_of_tile(m) + m % TILE_ROWS;
  }
};

template <int I>
using Int = std::integral_constant<int, I>;

// Calls f(Int<0>()) to f(Int<N - 1>()): a loop whose index is a constant.
template <int N, class Function>
[[gnu::always_inline]] inline void repeat(const Function& f) {
  [&]<int... I>(std::integer_sequence<int, I...>) __attribute__((always_inline)) {
    (f(Int<I>()), ...);
  }(std::make_integer_sequence<int, N>());
}

// Calls f with n, which is 1 to MOST, as a constant.
template <int MOST, class Function>
void with_size(int64_t n, const Function& f) {
  if constexpr (MOST > 1) {
    if (n < MOST) return with_size<MOST - 1>(n, f);
  }
  f(Int<MOST>());
}

// Divides rows m..stop of x into tiles of up to MOST rows, and calls f(m, rows) for each; `rows` is a constant. Every
// tile reads and unpacks the weights again, so there are as few tiles as possible, of nearly equal sizes. A tile never
// crosses a boundary between the tiles of `Input`.
template <int MOST, class Function>
void in_tiles(int64_t m, int64_t stop, const Function& f) {
  while (m < stop) {
    const int64_t left = std::min<int64_t>(stop - m, TILE_ROWS - m % TILE_ROWS);
    const int64_t tiles = (left + MOST - 1) / MOST;
    for (int64_t i = 0; i < tiles; i++) {
      const int64_t rows = left / tiles + (i < left % tiles);
      with_size<MOST>(rows, [&](auto count) { f(m, count); });
      m += rows;
    }
  }
}

inline bool amx_allowed = false;  // set once, by allow_amx

// One step along the columns for weights that are not packed: acc += w * x, lane by lane. With bfloat16,
// two products are added to each lane.
template <class T>
struct Step {
  static constexpr int WIDTH = LANES;
  using Vector = f32x16;
  static Vector load_step(const T* p, int64_t left) { return load(p, left); }
  static f32x16 multiply_add(f32x16 acc, Vector w, Vector x) { return fma(w, x, acc); }
};

template <>
struct Step<bf16> {
  static constexpr int WIDTH = 2 * LANES;
#ifdef HAS_BF16_PRODUCTS
  using Vector = i32x16;
  static Vector load_step(const bf16* p, int64_t left) { return load_pairs(p, left); }
  static f32x16 multiply_add(f32x16 acc, Vector w, Vector x) { return add_pair_products(acc, w, x); }
#else
  struct Vector {
    f32x16 even;
    f32x16 odd;
  };
  static Vector load_step(const bf16* p, int64_t left) {
    Vector v;
    split_pairs(load_pairs(p, left), v.even, v.odd);
    return v;
  }
  static f32x16 multiply_add(f32x16 acc, Vector w, Vector x) { return fma(w.odd, x.odd, fma(w.even, x.even, acc)); }
#endif
};

// NT rows of w times MT rows of x. Each of the MT * NT sums has its own register, whose lanes are added at the end.
template <class T, int NT, int MT>
inline void linear_tile(const T* w, const T* x, const T* bias, const T* residual, T* out, int64_t stride, int64_t C) {
  using S = Step<T>;
  f32x16 acc[MT][NT] = {};
  // Prefetches go through memory in ascending order, not row by row in turn, so the hardware prefetcher follows too.
  const char* ahead = (const char*)w + PREFETCH_DISTANCE * (NT + 1) / 2;
  auto step = [&](int64_t c, int64_t left) {
    typename S::Vector xs[MT];
#pragma GCC unroll 8
    for (int m = 0; m < MT; m++) xs[m] = S::load_step(x + m * C + c, left);
#pragma GCC unroll 8
    for (int n = 0; n < NT; n++, ahead += 64) {
      _mm_prefetch(ahead, PREFETCH_TO);
      const auto row = S::load_step(w + n * C + c, left);
#pragma GCC unroll 8
      for (int m = 0; m < MT; m++) acc[m][n] = S::multiply_add(acc[m][n], row, xs[m]);
    }
  };
  int64_t c = 0;
  for (; c + S::WIDTH <= C; c += S::WIDTH) step(c, S::WIDTH);
  if (c < C) step(c, C - c);
  alignas(64) float sums[MT][NT];
  if constexpr (MT * NT == LANES) {
    store(sums[0], sums_of_lanes(acc[0]));
  } else {
#pragma GCC unroll 8
    for (int m = 0; m < MT; m++)
#pragma GCC unroll 8
      for (int n = 0; n < NT; n++) sums[m][n] = sum_of_lanes(acc[m][n]);
  }
  for (int m = 0; m < MT; m++) {
    f32x16 y = load(sums[m], NT);
    if (bias) y = y + load(bias, NT);
    if (residual) y = y + load(residual + m * stride, NT);
    store(out + m * stride, y, NT);
  }
}

constexpr int DENSE_SUMS = VECTOR_BITS == 512 ? 16 : 4;  // how many sums of a product fit in registers

// NT rows of w times all M rows of x, in tiles of as many rows as fit.
template <class T, int NT>
void linear_rows(const T* w, const T* x, const T* bias, const T* residual, T* out, int64_t M, int64_t stride,
                 int64_t C) {
  int64_t m = 0;
  auto tile = [&](auto rows) {
    constexpr int MT = decltype(rows)::value;
    linear_tile<T, NT, MT>(w, x + m * C, bias, residual ? residual + m * stride : nullptr, out + m * stride, stride, C);
    m += MT;
  };
  constexpr int MOST = NT == 1 ? 4 : DENSE_SUMS / NT;
  while (m + MOST <= M) tile(Int<MOST>());
  while (m + 4 <= M) tile(Int<4>());
  if (m < M) with_size<3>(M - m, tile);
}

// Quantizes a group of x, of up to 32 columns, to index `at`. Any NaN or infinity makes the scale NaN.
template <class T>
inline void quantize_group(const T* x, int64_t columns, const Input& in, int64_t at) {
  f32x16 low = load(x, columns);
  f32x16 high = load(x + LANES, columns - LANES);
  const bool finite = all_finite(low) && all_finite(high);
  if (!finite) low = high = floats(0.0f);
  const float most = max_of_lanes(max(abs(low), abs(high)));
  const bool tiny = most < 1e-30f;  // its inverse would overflow
  float scale = tiny ? 0.0f : most / 127;
  if (!finite) scale = NAN;
  const f32x16 inverse = floats(tiny ? 0.0f : 127 / most);
  const i32x16 a = to_ints(low * inverse);
  const i32x16 c = to_ints(high * inverse);
  store_int8(in.q + at * GROUP, a);
  store_int8(in.q + at * GROUP + LANES, c);
  const int32_t first = sum_of_lanes(a);
  const int32_t second = sum_of_lanes(c);
  in.half_sum[0][at] = -8 * first;
  in.half_sum[1][at] = -8 * second;
  in.sum[at] = -8 * (first + second);
  in.scale[at] = scale;
  in.scaled_sum[at] = scale * (first + second);
}

// Four bytes of q, copied to every lane.
inline u8x64 four_columns(const int8_t* q) {
  int32_t columns;
  std::memcpy(&columns, q, 4);
  return as_bytes(ints(columns));
}

// This must be inlined: GCC assumes that a function that only prefetches has no effect, and removes its calls.
template <class F, int LINES>
[[gnu::always_inline]] inline void prefetch_lines(const uint8_t* at) {
#pragma GCC unroll 8
  for (int i = 0; i < LINES; i++) _mm_prefetch(at + PREFETCH_AHEAD<F> + 64 * i, PREFETCH_TO);
}

// Walks through the groups of a block of packed weights, in the order of the stream.
template <class F>
struct Stream {
  using Scales = typename F::Scales;
  const uint8_t* next;  // what follows the current group
  int64_t groups_per_scale;
  int64_t groups;  // in a superblock
  int64_t i;       // the number of the current group in its superblock
  Scales scales;   // of the superblock
  Stream(const Linear& l, int64_t block)
      : next((const uint8_t*)l.weight + block * l.block_bytes), groups_per_scale(l.groups_per_scale),
        groups(Scales::groups(groups_per_scale)), i(groups - 1) {}

  // Goes to the next group, and returns its levels. `scale` and `min` are then for this group.
  const uint8_t* next_group() {
    if (++i == (Scales::GROUPS ? Scales::GROUPS : groups)) {
      i = 0;
      scales.load(next, groups_per_scale);
      prefetch_lines<F, Scales::BYTES / 64>(next);
      next += Scales::BYTES;
    }
    const uint8_t* at = next;
    next += F::Levels::LINES * 64;
    return at;
  }
  f32x16 scale(int half) const { return scales.scale(i, half); }
  f32x16 min() const { return scales.min(i); }
};

// The sums of a group of weights for one row of x: one sum for the whole group or, if HALVES, one for each half.
template <int MOST, int OFFSET, bool HAS_MINS, bool HALVES>
struct GroupSums {
  static constexpr int COUNT = HALVES ? 2 : 1;
  static constexpr int STEPS = 8 / COUNT;  // steps of four columns in a sum
  using Part = Dot<MOST, OFFSET, STEPS>;
  Part parts[COUNT];

  void start(const Input& x, int64_t at) {
    if constexpr (!HALVES) return parts[0].start(x.sum[at]);
    for (int half = 0; half < COUNT; half++) parts[half].start(x.half_sum[half][at]);
  }
  // acc + x_scale * sum * scale, of the group or of its halves, + min * scaled_sum
  f32x16 add_to(f32x16 acc, const f32x16* scale, f32x16 min, const Input& x, int64_t at) const {
    const f32x16 xs = floats(x.scale[at]);
    const f32x16 sum = to_floats(parts[0].sum);
    if constexpr (HALVES)
      acc = fma(fma(to_floats(parts[1].sum), scale[1], sum * scale[0]), xs, acc);
    else
      acc = fma(sum, xs * scale[0], acc);
    return HAS_MINS ? fma(min, floats(x.scaled_sum[at]), acc) : acc;
  }
};

template <class F>
using SumsOf = GroupSums<DOT_NEEDS_MOST ? F::Levels::MOST : 0, F::OFFSET, F::Scales::HAS_MINS, F::Scales::HALVES>;

// A block of 16 packed weight rows times MT rows of x that are quantized to 8 bits.
template <int MT, class F>
[[gnu::noinline]] void block_dot_int8(const Linear& p, int64_t block, const Input& x, int64_t m0, f32x16 (&acc)[MT]) {
  using L = typename F::Levels;
  using Sums = SumsOf<F>;
  static_assert(Sums::COUNT == 1 || (L::VECTORS == 2 && !F::Scales::HAS_MINS));  // a vector has columns of one half
  Stream<F> stream(p, block);
  std::fill(acc, acc + MT, floats(0.0f));
  const int64_t rows = x.rows_of_tile(m0);
  int64_t at = x.at(m0, 0);
  for (int64_t b = 0; b < p.Cb; b++, at += rows) {
    const uint8_t* group = stream.next_group();
    const int8_t* q = x.q + at * GROUP;
    Sums sums[MT];
#pragma GCC unroll 8
    for (int m = 0; m < MT; m++) sums[m].start(x, at + m);
    if constexpr (L::LINES > L::STEPS) prefetch_lines<F, L::LINES - L::STEPS>(group);
    repeat<L::STEPS>([&](auto j) __attribute__((always_inline)) {
      u8x64 levels[L::VECTORS];
      L::unpack(group, j, levels);
      prefetch_lines<F, 1>(group + 64 * (L::LINES - L::STEPS + j));
#pragma GCC unroll 2
      for (int r = 0; r < L::VECTORS; r++) {
        const auto factor = Sums::Part::factor(levels[r]);
#pragma GCC unroll 8
        for (int m = 0; m < MT; m++) {
          const u8x64 columns = four_columns(q + m * GROUP + L::first_column(j, r));
          sums[m].parts[r % Sums::COUNT].add(factor, columns, Sums::COUNT == 1 ? j * L::VECTORS + r : j);
        }
      }
    });
    f32x16 scale[Sums::COUNT];
    for (int h = 0; h < Sums::COUNT; h++) scale[h] = stream.scale(h);
    const f32x16 min = stream.min();
#pragma GCC unroll 8
    for (int m = 0; m < MT; m++) acc[m] = sums[m].add_to(acc[m], scale, min, x, at + m);
  }
}

// A vector of levels has four columns of 16 rows. Returns the weights of column c, 0 to 3, in float32.
template <class F>
inline f32x16 weights_of_column(u8x64 levels, int c, f32x16 scale, f32x16 min) {
  const i32x16 level = (as_ints(levels) >> 8 * c) & ints(255);
  const f32x16 centered = to_floats(level - ints(F::OFFSET));
  return F::Scales::HAS_MINS ? fma(centered, scale, min) : centered * scale;
}

// A block of 16 packed weight rows times MT rows of x in float32. Each weight is unpacked once, for all MT rows.
template <int MT, class F>
[[gnu::noinline]] void block_dot_float(const Linear& p, int64_t block, const Input& x, int64_t m0, f32x16 (&acc)[MT]) {
  using L = typename F::Levels;
  const int64_t stride = p.Cb * GROUP;
  Stream<F> stream(p, block);
  f32x16 even[MT] = {};
  f32x16 odd[MT] = {};  // two sums, so that an addition does not wait for the addition before it
  for (int64_t b = 0; b < p.Cb; b++) {
    const uint8_t* group = stream.next_group();
    const f32x16 scale[] = {stream.scale(0), stream.scale(1)};
    const f32x16 min = stream.min();
    const float* columns = x.as_float + m0 * stride + b * GROUP;
    for (int j = 0; j < L::STEPS; j++) {
      u8x64 levels[L::VECTORS];
      L::unpack(group, j, levels);
#pragma GCC unroll 4
      for (int c = 0; c < 4; c++)
#pragma GCC unroll 2
        for (int r = 0; r < L::VECTORS; r++) {
          const f32x16 weight = weights_of_column<F>(levels[r], c, scale[F::Scales::HALVES ? r : 0], min);
          const float* column = columns + L::first_column(j, r) + c;
#pragma GCC unroll 8
          for (int m = 0; m < MT; m++) {
            f32x16& sum = (L::VECTORS > 1 ? r : c) % 2 ? odd[m] : even[m];
            sum = fma(weight, floats(column[m * stride]), sum);
          }
        }
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < MT; m++) acc[m] = even[m] + odd[m];
}

// The input of a layer with M rows of x. Only the arrays that the layer reads are allocated; others are null.
inline Input allocate_input(Arena& arena, const Layer& l, const void* x, int64_t M) {
  Input in{.x = x, .M = M, .Cb = l.groups()};
  const int64_t groups = M * l.groups();
  if (l.any(&Linear::quantizes_activations)) {
    in.q = arena.allocate<int8_t>((groups + TILE_ROWS) * GROUP);  // AMX always reads 16 rows, also of the last tile
    in.scale = arena.allocate<float>(groups);
    in.scaled_sum = arena.allocate<float>(groups);
    in.sum = arena.allocate<int32_t>(groups);
    for (int32_t*& sum : in.half_sum) sum = arena.allocate<int32_t>(groups);
  } else if (l.any(&Linear::is_quantized)) {
    in.as_float = arena.allocate<float>(groups * GROUP);
  }
  return in;
}

// Converts groups begin..end of row m of x.
template <class T>
void prepare_input(const Layer& l, const Input& in, int64_t m, int64_t begin, int64_t end) {
  if (!in.q && !in.as_float) return;
  const T* x = (const T*)in.x + m * l.C;
  for (int64_t b = begin; b < end; b++) {
    const int64_t c = b * GROUP;
    const int64_t left = l.C - c;
    const int64_t at = m * in.Cb + b;
    if (in.q) {
      quantize_group(x + c, left, in, in.at(m, b));
    } else {
      store(in.as_float + at * GROUP, load(x + c, left));
      store(in.as_float + at * GROUP + LANES, load(x + c + LANES, left - LANES));
    }
  }
}

template <class T>
void prepare_input_rows(const Team& team, const Layer& l, const Input& in, int64_t M) {
  if (!in.q && !in.as_float) return;
  team.split(M, 1, [&](int64_t m, int64_t end) {
    for (; m < end; m++) prepare_input<T>(l, in, m, 0, l.groups());
  });
  team.barrier();
}

// Adds bias and residual to 16 outputs of row m of x, and stores them.
template <class T>
inline void finish_outputs(const Linear& l, int64_t block, int64_t m, f32x16 y, const T* residual, T* out) {
  const int64_t n = block * LANES;
  const int64_t at = m * l.stride + l.first + n;
  const int64_t valid = l.N - n;
  if (l.bias) y = y + load((const T*)l.bias + n, valid);
  if (residual) y = y + load(residual + at, valid);
  store(out + at, y, valid);
}

// A block of packed weights times rows m..stop of x, plus bias and residual.
template <class F, class T>
void packed_block(const Linear& l, int64_t block, const Input& x, int64_t m, int64_t stop, const T* residual, T* out) {
  auto finish = [&](int64_t first, int rows, const f32x16* acc) {
    for (int i = 0; i < rows; i++) finish_outputs(l, block, first + i, acc[i], residual, out);
  };
  if (l.exact) {
    in_tiles<FLOAT_ROWS>(m, stop, [&](int64_t first, auto rows) {
      f32x16 acc[rows];
      block_dot_float<rows, F>(l, block, x, first, acc);
      finish(first, rows, acc);
    });
  } else {
    in_tiles<INT8_ROWS>(m, stop, [&](int64_t first, auto rows) {
      f32x16 acc[rows];
      block_dot_int8<rows, F>(l, block, x, first, acc);
      finish(first, rows, acc);
    });
  }
}

// Row `id` of a table of any format, such as an embedding.
template <class T>
void look_up(const Linear& table, int64_t id, T* out) {
  const int64_t block = id / LANES;
  const int64_t lane = id % LANES;
  const T* weight = (const T*)table.weight;
  if (table.format == DENSE) std::copy_n(weight + id * table.C, table.C, out);
  if (table.format == TILES) {
    for (int64_t c = 0; c < table.C; c++) {
      const int64_t group = block * table.Cb + c / GROUP;
      const int64_t pair = group * GROUP / 2 + c % GROUP / 2;
      out[c] = weight[(pair * LANES + lane) * 2 + c % 2];
    }
  }
  with_format(table.format, [&](auto format) {
    using F = decltype(format);
    using L = typename F::Levels;
    Stream<F> stream(table, block);
    for (int64_t b = 0; b < table.Cb; b++) {
      const uint8_t* group = stream.next_group();
      for (int j = 0; j < L::STEPS; j++) {
        u8x64 levels[L::VECTORS];
        L::unpack(group, j, levels);
        for (int r = 0; r < L::VECTORS; r++)
          for (int c = 0; c < 4; c++) {
            alignas(64) float weights[LANES];
            store(weights, weights_of_column<F>(levels[r], c, stream.scale(r), stream.min()));
            const int64_t column = b * GROUP + L::first_column(j, r) + c;
            if (column < table.C) out[column] = weights[lane];
          }
      }
    }
  });
}

}  // namespace fastpath
