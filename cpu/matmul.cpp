// The products with AMX, and `matmul`, which chooses how a matrix is multiplied. matmul.h describes both.

#include "matmul.h"

#include "prefill.h"

namespace fastpath {

#ifdef HAS_AMX
constexpr int AMX_BF16_PREFETCH_DISTANCE = 2048;  // bytes, in products with bfloat16 weights
constexpr int MIN_AMX_ROWS = 9;  // of x for quantized weights; for fewer, vpdpbusd is faster

// acc (COUNT,rows,16) = a block of packed bfloat16 weights times COUNT tiles of rows of x, which begin at x[0], x[1]
// and so on.
template <int COUNT>
void block_dot_amx(const Linear& p, int64_t block, const bf16* const (&x)[COUNT], float (&acc)[COUNT][LANES * LANES]) {
  const bf16* w = (const bf16*)p.weight + block * p.Cb * GROUP * LANES;
// Instructions name tiles by constants, so there are macros instead of loops.
#define FOR_EACH_TILE(STATEMENT)             \
  if constexpr (COUNT > 0) { STATEMENT(0); } \
  if constexpr (COUNT > 1) { STATEMENT(1); } \
  if constexpr (COUNT > 2) { STATEMENT(2); } \
  if constexpr (COUNT > 3) { STATEMENT(3); }
#define ZERO(I) _tile_zero(I)
#define MULTIPLY(I)                                       \
  _tile_loadd(6, x[I] + b * GROUP, p.C * sizeof(bf16)); \
  _tile_dpbf16ps(I, 6, 7)
#define STORE(I) _tile_stored(I, acc[I], 64)
  FOR_EACH_TILE(ZERO)
  for (int64_t b = 0; b < p.Cb; b++, w += GROUP * LANES) {
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) _mm_prefetch((const char*)w + AMX_BF16_PREFETCH_DISTANCE + 64 * i, PREFETCH_TO);
    _tile_loadd(7, w, 64);
    FOR_EACH_TILE(MULTIPLY)
  }
  FOR_EACH_TILE(STORE)
#undef FOR_EACH_TILE
#undef ZERO
#undef MULTIPLY
#undef STORE
}

// Prefetches a stream of cache lines. The processor waits for few prefetches at a time, so they are spread over other
// work.
struct Ahead {
  const uint8_t* at;
  void prefetch(int lines) {
    for (int i = 0; i < lines; i++, at += 64) _mm_prefetch(at, PREFETCH_TO);
  }
};

constexpr int AMX_GROUPS = 6;  // groups of quantized weights that are multiplied before the first result is stored

// dots[i] (rows,16) = the int32 dot products of group i of rows of q with group i of a block of 8-bit weights.
// group_bytes: the bytes of a group of q. lines: how many lines to prefetch for each group.
template <int COUNT>
void multiply_groups(const int8_t* q, int64_t group_bytes, const void* const (&weights)[COUNT],
                     __m512i (&dots)[AMX_GROUPS][LANES], Ahead& ahead, int lines) {
  asm volatile("" ::: "memory");  // compilers do not know that tiles are loaded from memory
#define MULTIPLY(I)                          \
  if constexpr (I < COUNT) {                 \
    _tile_zero(I);                           \
    _tile_loadd(6, q + I * group_bytes, GROUP); \
    _tile_loadd(7, weights[I], 64);          \
    _tile_dpbsud(I, 6, 7);                   \
    ahead.prefetch(lines / 2);               \
  }
#define STORE(I)                       \
  if constexpr (I < COUNT) {           \
    _tile_stored(I, dots[I], 64);      \
    ahead.prefetch(lines - lines / 2); \
  }
  MULTIPLY(0) MULTIPLY(1) MULTIPLY(2) MULTIPLY(3) MULTIPLY(4) MULTIPLY(5)
  STORE(0) STORE(1) STORE(2) STORE(3) STORE(4) STORE(5)
#undef MULTIPLY
#undef STORE
}

// acc (rows,16) = a block of packed weights times a tile of rows of x that are quantized to 8 bits, from row m0. It
// gives the same bits as block_dot_int8.
template <class F>
void block_dot_amx_int8(const Linear& p, int64_t block, const Input& x, int64_t m0, int rows, __m512* acc) {
  using L = typename F::Levels;
  using S = typename F::Scales;
  constexpr bool IS_TILE = std::is_same_v<L, Bytes>;  // a group is stored in the layout of a tile
  Stream<F> stream(p, block);
  Ahead ahead{stream.next + S::BYTES + PREFETCH_DISTANCE};
  __m512i dots[AMX_GROUPS][LANES];
  __m512i unpacked[AMX_GROUPS][8];
  std::fill(acc, acc + rows, _mm512_setzero_ps());
  int64_t b = 0;
  auto add_groups = [&](auto groups) {
    constexpr int COUNT = decltype(groups)::value;
    const void* weights[COUNT];
    __m512 scale[COUNT];
    __m512 min[COUNT];
    for (int g = 0; g < COUNT; g++) {
      const uint8_t* group = stream.next_group();
      weights[g] = IS_TILE ? group : (const void*)unpacked[g];
      for (int j = 0; !IS_TILE && j < L::STEPS; j++) {
        u8x64 levels[L::VECTORS];
        L::unpack(group, j, levels);
        for (int r = 0; r < L::VECTORS; r++) unpacked[g][L::first_column(j, r) / 4] = (__m512i)levels[r];
      }
      scale[g] = stream.scale(0);
      min[g] = stream.min();
    }
    const int64_t first = x.at(m0, b);
    const int64_t next = x.rows_of_tile(m0);
    multiply_groups<COUNT>(x.q + first * GROUP, next * GROUP, weights, dots, ahead, L::LINES / 2);
    int due = 0;  // the other half of the prefetches is spread evenly over the rows
    for (int m = 0; m < rows; m++) {
      due += COUNT * (L::LINES - L::LINES / 2);
      for (; due >= rows; due -= rows) ahead.prefetch(1);
      __m512 sum = acc[m];
#pragma GCC unroll 6
      for (int g = 0; g < COUNT; g++) {
        const int64_t at = first + g * next + m;
        const __m512i start = (__m512i)offset_sum<F::OFFSET>(x.sum[at]);
        const __m512 step = _mm512_mul_ps(_mm512_set1_ps(x.scale[at]), scale[g]);
        sum = _mm512_fmadd_ps(_mm512_cvtepi32_ps(_mm512_add_epi32(dots[g][m], start)), step, sum);
        if constexpr (S::HAS_MINS) sum = _mm512_fmadd_ps(min[g], _mm512_set1_ps(x.scaled_sum[at]), sum);
      }
      acc[m] = sum;
    }
    b += COUNT;
  };
  while (b + AMX_GROUPS <= p.Cb) add_groups(Int<AMX_GROUPS>());
  while (b + 2 <= p.Cb) add_groups(Int<2>());
  if (b < p.Cb) add_groups(Int<1>());
}

// A block of packed weights times rows m..stop of x that are quantized. AMX multiplies 16 rows, even if the last tile
// has fewer; the results of the missing rows are not used.
template <class F, class T>
void packed_block_amx_int8(const Linear& l, int64_t block, const Input& x, int64_t m, int64_t stop, const T* residual,
                           T* out) {
  for (; m < stop; m += TILE_ROWS) {
    const int rows = x.rows_of_tile(m);
    __m512 acc[TILE_ROWS];
    block_dot_amx_int8<F>(l, block, x, m, rows, acc);
    for (int i = 0; i < rows; i++) finish_outputs(l, block, m + i, acc[i], residual, out);
  }
}

// A block of packed bfloat16 weights times rows m..stop of x, in tiles of min(M,16) rows. `out` must not be `residual`,
// because the last tile overlaps the one before it, and computes the same bits again.
void packed_block_amx(const Linear& l, int64_t block, const Input& x, int64_t m, int64_t stop, int64_t M,
                      const bf16* residual, bf16* out) {
  const int64_t rows = std::min<int64_t>(M, LANES);
  auto multiply_rows = [&](auto count) {
    constexpr int COUNT = decltype(count)::value;
    const bf16* x_tiles[COUNT];
    int64_t first[COUNT];
    alignas(64) float acc[COUNT][LANES * LANES];
    for (int i = 0; i < COUNT; i++, m += rows) {
      first[i] = std::min(m, M - rows);
      x_tiles[i] = (const bf16*)x.x + first[i] * l.C;
    }
    block_dot_amx<COUNT>(l, block, x_tiles, acc);
    for (int i = 0; i < COUNT; i++)
      for (int r = 0; r < rows; r++) finish_outputs(l, block, first[i] + r, load(acc[i] + r * LANES), residual, out);
  };
  while (stop - m > 3 * rows) multiply_rows(Int<4>());
  while (m < stop) multiply_rows(Int<1>());
}
#endif

int64_t units(const Linear& l) { return l.format == DENSE ? l.N : (l.N + LANES - 1) / LANES; }

// Rows begin..end of a piece that is not packed.
template <class T>
void multiply_dense(const Linear& l, const Input& in, int64_t M, int64_t begin, int64_t end, const T* residual,
                    T* out) {
  const T* w = (const T*)l.weight;
  const T* x = (const T*)in.x;
  const T* bias = (const T*)l.bias;
  int64_t n = begin;
  auto rows = [&](auto count) {
    constexpr int NT = decltype(count)::value;
    auto at = [&](const T* p, int64_t i) { return p ? p + i : nullptr; };
    const T* add = at(residual, l.first + n);
    linear_rows<T, NT>(w + n * l.C, x, at(bias, n), add, out + l.first + n, M, l.stride, l.C);
    n += NT;
  };
  // One row of W at a time reads memory fastest. With more rows of x, several rows of W at a time save reads of x.
  while (M >= 8 && n + 2 <= end) rows(Int<2>());  // times 8 rows of x
  while (M > 2 && n + 4 <= end) rows(Int<4>());   // times 4 rows of x
  while (n < end) rows(Int<1>());
}

// Multiplies units begin..end of a piece of a layer. The first line that fits says which product runs. M is the number
// of rows of x; in the last two lines, it is the number in each slice of up to 256 rows (MAX_ROWS). If x is in float32,
// l is `exact`. All products of quantized weights that are not exact give the same bits.
//   weights                   instructions  M             product
//   not packed                any           any           linear_rows
//   bfloat16, packed          AMX           any           packed_block_amx
//   quantized, exact          any           any           packed_block, block_dot_float
//   quantized, but not q6_k   AMX           9 and more    packed_block_amx_int8
//   quantized, 4 or 8 bits    AVX2          any           packed_block, block_dot_int8
//   quantized                 any           28 and fewer  packed_block, block_dot_int8
//   quantized                 any           29 and more   packed_blocks, and packed_block for a block that is left over
template <class T>
void multiply_units(const Linear& l, const Input& in, int64_t M, int64_t begin, int64_t end, const T* residual,
                    T* out) {
  if (l.format == DENSE) return multiply_dense(l, in, M, begin, end, residual, out);
  auto by_rows = [&](const auto& run_blocks) {
    for (int64_t start = 0; start < M; start += MAX_ROWS) {
      run_blocks(begin, start, std::min<int64_t>(M, start + MAX_ROWS));
    }
  };
#ifdef HAS_AMX
  if constexpr (std::is_same_v<T, bf16>) {
    if (l.format == TILES) {
      const Tiles<bf16> tiles(std::clamp<int64_t>(M, 1, LANES));
      return by_rows([&](int64_t block, int64_t start, int64_t stop) {
        for (; block < end; block++) packed_block_amx(l, block, in, start, stop, M, residual, out);
      });
    }
  }
#endif
  with_format(l.format, [&](auto format) {
    using F = decltype(format);
#ifdef HAS_AMX
    if constexpr (!F::Scales::HALVES) {  // AMX sums all columns of a group, never only a half of them
      if (amx_allowed && l.quantizes_activations() && M >= MIN_AMX_ROWS) {
        const Tiles<int8_t> tiles(std::min<int64_t>(M, LANES));
        return by_rows([&](int64_t block, int64_t start, int64_t stop) {
          for (; block < end; block++) packed_block_amx_int8<F>(l, block, in, start, stop, residual, out);
        });
      }
    }
#endif
    by_rows([&](int64_t block, int64_t start, int64_t stop) {
      for (; !l.exact && stop - start > MAX_TILED_ROWS<F> && block + BLOCKS <= end; block += BLOCKS)
        packed_blocks<F>(l, block, in, start, stop, residual, out);
      for (; block < end; block++) packed_block<F>(l, block, in, start, stop, residual, out);
    });
  });
}

template <class T>
void matmul(const Team& team, const Layer& layer, const Input& in, int64_t M, const T* residual, T* out) {
  for (const Linear& piece : layer.pieces)
    team.split(units(piece), grain(piece), [&](int64_t begin, int64_t end) {
      multiply_units(piece, in, M, begin, end, residual, out);
    });
}

#define INSTANTIATE(T)                                                                                      \
  template void matmul<T>(const Team&, const Layer&, const Input&, int64_t, const T*, T*);                   \
  template void multiply_units<T>(const Linear&, const Input&, int64_t, int64_t, int64_t, const T*, T*);
INSTANTIATE(float)
INSTANTIATE(bf16)
INSTANTIATE(half)
#undef INSTANTIATE

}  // namespace fastpath
