// Products of packed weights with many rows of x, as in prefill.
//
// BLOCKS blocks of 16 weight rows are unpacked once for up to 256 rows of x: their levels to bytes, their scales to
// float32. The products of 4 rows of x with these blocks have their sums in registers, and 4 bytes of x that are loaded
// are multiplied with all blocks. The unpacked weights stay in the L1 cache, because only 16 groups (UNPACKED_GROUPS)
// are unpacked at a time. Meanwhile, the sums of all rows are in memory.

#pragma once

#include <climits>

#include "products.h"

namespace fastpath {

// The largest number of rows of x for which packed_block is faster, although it unpacks the weights again for each tile
// of rows. It is 28 with AVX-512, and for formats of 5 and 6 bits, which have more lines than steps because the upper
// bits have their own lines. Other formats are unpacked in few instructions. With 256 bits, where few sums fit in the
// registers, packed_block is always faster for them.
template <class F>
constexpr int MAX_TILED_ROWS = VECTOR_BITS == 512 || F::Levels::LINES > F::Levels::STEPS ? 28 : INT_MAX;
constexpr int MAX_ROWS = 256;        // rows of x at a time; they stay in the L2 cache
constexpr int UNPACKED_GROUPS = 16;  // groups of 32 columns at a time
constexpr int BLOCKS = VECTOR_BITS == 512 ? 2 : 1;  // blocks of weight rows at a time

// The same group of 32 columns of each block.
struct Unpacked {
  u8x64 levels[BLOCKS][8];  // four columns in each vector
  f32x16 scale[BLOCKS][2];  // the scales of both halves if the format has HALVES, else the scale and the min
};

// Unpacks the next groups of a stream to block number `block` of `to`.
template <class F>
[[gnu::noinline]] void unpack_groups(Stream<F>& stream, int groups, int block, Unpacked* to) {
  using L = typename F::Levels;
  for (int b = 0; b < groups; b++) {
    const uint8_t* group = stream.next_group();
    prefetch_lines<F, L::LINES>(group);
#pragma GCC unroll 8
    for (int j = 0; j < L::STEPS; j++) {
      u8x64 levels[L::VECTORS];
      L::unpack(group, j, levels);
      for (int r = 0; r < L::VECTORS; r++) to[b].levels[block][L::first_column(j, r) / 4] = levels[r];
    }
    to[b].scale[block][0] = stream.scale(0);
    to[b].scale[block][1] = F::Scales::HALVES ? stream.scale(1) : stream.min();
  }
}

// acc (MT,BLOCKS,16) += the products of groups b..b+groups of the weights and of MT rows of x, from row m0. It gives
// the same bits as block_dot_int8.
template <class Sums, int MT>
[[gnu::noinline]] void add_groups(const Unpacked* w, int groups, const Input& x, int64_t m0, int64_t b, f32x16* acc) {
  f32x16 total[MT][BLOCKS];
  for (int i = 0; i < MT * BLOCKS; i++) total[i / BLOCKS][i % BLOCKS] = acc[i];
  const int64_t rows = x.rows_of_tile(m0);
  int64_t at = x.at(m0, b);
  for (const Unpacked* end = w + groups; w < end; w++, at += rows) {
    const int8_t* q = x.q + at * GROUP;
    Sums sums[MT][BLOCKS];
#pragma GCC unroll 4
    for (int m = 0; m < MT; m++)
#pragma GCC unroll 2
      for (int n = 0; n < BLOCKS; n++) sums[m][n].start(x, at + m);
#pragma GCC unroll 8
    for (int j = 0; j < 8; j++) {
      typename Sums::Part::Factor factors[BLOCKS];
#pragma GCC unroll 2
      for (int n = 0; n < BLOCKS; n++) factors[n] = Sums::Part::factor(w->levels[n][j]);
#pragma GCC unroll 4
      for (int m = 0; m < MT; m++) {
        const u8x64 columns = four_columns(q + m * GROUP + 4 * j);
#pragma GCC unroll 2
        for (int n = 0; n < BLOCKS; n++) sums[m][n].parts[j / Sums::STEPS].add(factors[n], columns, j % Sums::STEPS);
      }
    }
#pragma GCC unroll 4
    for (int m = 0; m < MT; m++)
#pragma GCC unroll 2
      for (int n = 0; n < BLOCKS; n++)
        total[m][n] = sums[m][n].add_to(total[m][n], w->scale[n], w->scale[n][1], x, at + m);
  }
  for (int i = 0; i < MT * BLOCKS; i++) acc[i] = total[i / BLOCKS][i % BLOCKS];
}

// BLOCKS blocks of packed weights, the first one at `block`, times rows start..stop of x, plus bias and residual.
template <class F, class T>
void packed_blocks(const Linear& l, int64_t block, const Input& x, int64_t start, int64_t stop, const T* residual,
                   T* out) {
  f32x16 acc[MAX_ROWS * BLOCKS];
  Unpacked groups[UNPACKED_GROUPS];
  std::fill(acc, acc + (stop - start) * BLOCKS, floats(0.0f));
  Stream<F> streams[] = {Stream<F>(l, block), Stream<F>(l, block + BLOCKS - 1)};
  for (int64_t b = 0; b < l.Cb; b += UNPACKED_GROUPS) {
    const int count = std::min<int64_t>(UNPACKED_GROUPS, l.Cb - b);
    for (int n = 0; n < BLOCKS; n++) unpack_groups(streams[n], count, n, groups);
    in_tiles<4>(start, stop, [&](int64_t m, auto rows) {
      add_groups<SumsOf<F>, rows>(groups, count, x, m, b, acc + (m - start) * BLOCKS);
    });
  }
  for (int64_t m = start; m < stop; m++)
    for (int n = 0; n < BLOCKS; n++) finish_outputs(l, block + n, m, acc[(m - start) * BLOCKS + n], residual, out);
}

}  // namespace fastpath
