// Dot products of integers: a group of weights, as unsigned levels (formats.h), times a row of x in 8 bits. The sums
// are exact, so all processors give the same bits.

#pragma once

#include "vectors.h"

namespace fastpath {

// -OFFSET * sum(q) in each lane, from -8 * sum(q).
template <int OFFSET>
inline i32x16 offset_sum(int32_t sum) {
  static_assert(OFFSET % 8 == 0 && !(OFFSET & (OFFSET - 1)));
  constexpr int shift = OFFSET == 128 ? 4 : OFFSET / 16;  // 8, 16, 32: 0, 1, 2
  return ints(OFFSET ? sum << shift : 0);
}

#ifdef HAS_VNNI
constexpr bool DOT_NEEDS_MOST = false;

// The sum for one row of x. Each lane belongs to one of 16 rows of weights, whose levels are 0 to MOST. `add` is called
// COUNT times, and adds four products to each lane.
template <int MOST, int OFFSET, int COUNT>
struct Dot {
  using Factor = u8x64;
  static Factor factor(u8x64 levels) { return levels; }

  i32x16 sum;
  void start(int32_t x_sum) { sum = offset_sum<OFFSET>(x_sum); }  // x_sum: -8 times the sum of the row of x
  void add(Factor levels, u8x64 x, int) { sum = add_products(sum, levels, x); }
};

#else
constexpr bool DOT_NEEDS_MOST = true;

// Without VNNI, an instruction adds two products in 16 bits (vpmaddubsw). If the levels are small, the sum of several
// such results fits in 16 bits, so they are added before the conversion to 32 bits.
template <int MOST, int OFFSET, int COUNT>
struct Dot {
  static constexpr int FIT = std::min(32767 / (2 * 127 * MOST), COUNT);  // how many fit
  static_assert(COUNT % FIT == 0);
  using Factor = u8x64;
  static Factor factor(u8x64 levels) { return levels; }

  i16x32 pairs;  // up to FIT results, not yet in `sum`
  i32x16 sum;
  void start(int32_t x_sum) { sum = offset_sum<OFFSET>(x_sum); }
  void add(Factor levels, u8x64 x, int i) {  // i: the number of the call, 0 to COUNT - 1, a constant after unrolling
    const i16x32 products = pair_products(levels, x);
    pairs = i % FIT ? add_pairs(pairs, products) : products;
    if (i % FIT == FIT - 1) sum = add_sums(sum, pairs);
  }
};

// The sum of two products of 255 and 127 does not fit in 16 bits. So the levels become signed, and their signs are
// moved to x: |w| is at most 128, and |x| at most 127.
template <int COUNT>
struct Dot<255, 128, COUNT> {
  struct Factor {
    u8x64 sign;  // the signed weights: only their signs are used
    u8x64 size;  // their absolute values
  };
  static Factor factor(u8x64 levels) {
    const u8x64 weights = levels ^ bytes(128);
    return {weights, abs_bytes(weights)};
  }

  i32x16 sum;
  void start(int32_t) { sum = ints(0); }
  void add(const Factor& w, u8x64 x, int) {
    sum = add_sums(sum, pair_products(w.size, with_sign_of(w.sign, x)));
  }
};

#endif

}  // namespace fastpath
