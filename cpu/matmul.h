// `matmul`, the product of any layer, and the tiles of AMX.
//
// AMX is the matrix unit of some Intel processors. It has eight registers, called tiles, each of up to 16 rows of 64
// bytes. One instruction adds the products of a tile of x and a tile of weights to a tile of sums:
//   x        32 columns of up to 16 rows of x
//   weights  a group of a block; row j holds columns 2j..2j+1 (bfloat16) or 4j..4j+3 (int8) of all 16 outputs
//   sums     in float32 or int32: one row for each row of x, one column for each output
// Each row of sums depends only on its own row of x. Reading bfloat16 weights takes longer than multiplying them with
// 16 rows of x, so a product with 16 rows takes little longer than a product with one. With quantized weights, each
// group has to be scaled in float32. While AMX works, the processor executes only half as many other 512-bit
// multiplications.

#pragma once

#include "products.h"

namespace fastpath {

#ifdef HAS_AMX
// Configures this thread's tiles for a number of rows of x, and for groups of 32 columns in T. Releases them at the end
// of the scope, which takes 50 ns. Tiles 0 to 5 have sums, tile 6 has x, tile 7 has weights.
template <class T>
struct Tiles {
  struct alignas(64) Config {  // the layout that the processor expects
    uint8_t palette = 1;
    uint8_t start_row = 0;
    uint8_t reserved[14] = {};
    uint16_t bytes_per_row[16] = {64, 64, 64, 64, 64, 64, GROUP * sizeof(T), 64};
    uint8_t rows[16] = {};
  };

  explicit Tiles(int x_rows) {
    Config config;
    std::fill(config.rows, config.rows + 7, x_rows);
    config.rows[7] = GROUP * sizeof(T) / 4;
    asm volatile("" ::"r"(&config) : "memory");  // compilers do not know that the next instruction reads all of it
    _tile_loadconfig(&config);
  }
  ~Tiles() { _tile_release(); }
};
#endif

// A matrix is divided into units, which different threads may multiply: rows, or blocks of 16 packed rows. A thread
// gets a multiple of `grain` units, except at the end.
int64_t units(const Linear& l);
inline int64_t grain(const Linear& l) { return l.format == DENSE ? 2 : 1; }

// Units begin..end of a piece of a layer: writes their columns of the layer's out (M,N) = x W^T + bias + residual.
template <class T>
void multiply_units(const Linear& l, const Input& in, int64_t M, int64_t begin, int64_t end, const T* residual, T* out);

// This thread's share of out (M,N) = x W^T + bias + residual. `residual` may be null, and must not be `out`. The rows
// of `in` must have been converted (prepare_input_rows). matmul.cpp defines it for float, bfloat16 and float16.
template <class T>
void matmul(const Team& team, const Layer& layer, const Input& in, int64_t M, const T* residual, T* out);

}  // namespace fastpath
