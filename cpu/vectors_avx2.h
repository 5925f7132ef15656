// The vectors of vectors.h in two registers of 256 bits, for AVX2 with FMA and F16C. AVX-VNNI is used where the
// processor has it. Functions without a comment are explained in vectors_avx512.h.

#pragma once

namespace fastpath {

struct f32x16 {
  __m256 low;   // lanes 0 to 7
  __m256 high;  // lanes 8 to 15
};
struct i32x16 {
  __m256i low;
  __m256i high;
};
struct u8x64 {
  __m256i low;
  __m256i high;
};
struct i64x16 {
  int64_t lane[LANES];
};

// ---------------------------------------------------------------- operators

inline f32x16 operator+(f32x16 a, f32x16 b) { return {a.low + b.low, a.high + b.high}; }
inline f32x16 operator-(f32x16 a, f32x16 b) { return {a.low - b.low, a.high - b.high}; }
inline f32x16 operator*(f32x16 a, f32x16 b) { return {a.low * b.low, a.high * b.high}; }
inline f32x16 operator/(f32x16 a, f32x16 b) { return {a.low / b.low, a.high / b.high}; }
inline i32x16 operator+(i32x16 a, i32x16 b) {
  return {_mm256_add_epi32(a.low, b.low), _mm256_add_epi32(a.high, b.high)};
}
inline i32x16 operator-(i32x16 a, i32x16 b) {
  return {_mm256_sub_epi32(a.low, b.low), _mm256_sub_epi32(a.high, b.high)};
}
inline i32x16 operator^(i32x16 a, i32x16 b) { return {a.low ^ b.low, a.high ^ b.high}; }
inline i32x16 operator&(i32x16 a, i32x16 b) { return {a.low & b.low, a.high & b.high}; }
inline i32x16 operator<<(i32x16 x, int n) { return {_mm256_slli_epi32(x.low, n), _mm256_slli_epi32(x.high, n)}; }
inline i32x16 operator>>(i32x16 x, int n) { return {_mm256_srai_epi32(x.low, n), _mm256_srai_epi32(x.high, n)}; }
inline u8x64 operator&(u8x64 a, u8x64 b) { return {a.low & b.low, a.high & b.high}; }
inline u8x64 operator|(u8x64 a, u8x64 b) { return {a.low | b.low, a.high | b.high}; }
inline u8x64 operator^(u8x64 a, u8x64 b) { return {a.low ^ b.low, a.high ^ b.high}; }

// ---------------------------------------------------------------- all lanes, and conversions

inline f32x16 floats(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline i32x16 ints(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
inline u8x64 bytes(uint8_t x) { return {_mm256_set1_epi8(x), _mm256_set1_epi8(x)}; }
inline i32x16 lane_indices() {
  return {_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), _mm256_setr_epi32(8, 9, 10, 11, 12, 13, 14, 15)};
}
inline f32x16 as_floats(i32x16 x) { return {_mm256_castsi256_ps(x.low), _mm256_castsi256_ps(x.high)}; }
inline i32x16 as_ints(f32x16 x) { return {_mm256_castps_si256(x.low), _mm256_castps_si256(x.high)}; }
inline i32x16 as_ints(u8x64 x) { return {x.low, x.high}; }
inline u8x64 as_bytes(i32x16 x) { return {x.low, x.high}; }
inline f32x16 to_floats(i32x16 x) { return {_mm256_cvtepi32_ps(x.low), _mm256_cvtepi32_ps(x.high)}; }
inline i32x16 to_ints(f32x16 x) { return {_mm256_cvtps_epi32(x.low), _mm256_cvtps_epi32(x.high)}; }

// 8 lanes in bfloat16, each in the upper half of its 32 bits.
inline __m256i rounded_bits(__m256 x) {
  const __m256i bits = _mm256_castps_si256(x);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
  const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
  const __m256 is_nan = _mm256_cmp_ps(x, x, _CMP_UNORD_Q);
  const __m256i exponent = _mm256_and_si256(bits, _mm256_set1_epi32(0x7f800000));
  const __m256i is_denormal = _mm256_cmpeq_epi32(exponent, _mm256_setzero_si256());
  const __m256i sign = _mm256_and_si256(bits, _mm256_set1_epi32(0x80000000));
  __m256i result = _mm256_blendv_epi8(rounded, quiet, _mm256_castps_si256(is_nan));
  result = _mm256_blendv_epi8(result, sign, is_denormal);
  return _mm256_and_si256(result, _mm256_set1_epi32(0xffff0000));
}
inline f32x16 rounded_to_bf16(f32x16 x) {
  return {_mm256_castsi256_ps(rounded_bits(x.low)), _mm256_castsi256_ps(rounded_bits(x.high))};
}
inline __m256i to_bf16(f32x16 x) {
  const __m256i low = _mm256_srli_epi32(rounded_bits(x.low), 16);
  const __m256i high = _mm256_srli_epi32(rounded_bits(x.high), 16);
  return _mm256_permute4x64_epi64(_mm256_packus_epi32(low, high), 0xd8);
}

// ---------------------------------------------------------------- memory: the first n elements; load sets others to 0

inline f32x16 load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline f32x16 load(const half* p) {
  const __m128i* at = (const __m128i*)p;
  return {_mm256_cvtph_ps(_mm_loadu_si128(at)), _mm256_cvtph_ps(_mm_loadu_si128(at + 1))};
}
inline i32x16 load_uint16(const void* p) {
  const __m128i* at = (const __m128i*)p;
  return {_mm256_cvtepu16_epi32(_mm_loadu_si128(at)), _mm256_cvtepu16_epi32(_mm_loadu_si128(at + 1))};
}
inline f32x16 load(const bf16* p) { return as_floats(load_uint16(p) << 16); }
inline i32x16 load_int8(const void* p) {
  const __m128i all = _mm_loadu_si128((const __m128i*)p);
  return {_mm256_cvtepi8_epi32(all), _mm256_cvtepi8_epi32(_mm_unpackhi_epi64(all, all))};
}
inline i32x16 load_uint8(const void* p) { return load_int8(p) & ints(255); }
inline u8x64 load_line(const void* p) {
  return {_mm256_loadu_si256((const __m256i*)p), _mm256_loadu_si256((const __m256i*)p + 1)};
}

// Calls use(p) with the first n of COUNT elements, followed by zeros.
template <int COUNT, class T, class Use>
inline auto with_zeros(const T* p, int64_t n, const Use& use) {
  if (n >= COUNT) return use(p);
  alignas(32) T padded[COUNT];
  std::memset((void*)padded, 0, sizeof padded);
  if (n > 0) std::memcpy((void*)padded, p, n * sizeof(T));
  return use((const T*)padded);
}

template <class T>
inline f32x16 load(const T* p, int64_t n) {
  return with_zeros<LANES>(p, n, [](const T* p) { return load(p); });
}
inline i32x16 load_pairs(const bf16* p, int64_t n) {
  return with_zeros<2 * LANES>(p, n, [](const bf16* p) { return as_ints(load_line(p)); });
}

inline void store(void* p, i32x16 x) {
  _mm256_storeu_si256((__m256i*)p, x.low);
  _mm256_storeu_si256((__m256i*)p + 1, x.high);
}
inline void store(void* p, u8x64 x) { store(p, as_ints(x)); }
inline void store(float* p, f32x16 x) {
  _mm256_storeu_ps(p, x.low);
  _mm256_storeu_ps(p + 8, x.high);
}
inline void store(half* p, f32x16 x) {
  constexpr int NEAREST = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph(x.low, NEAREST));
  _mm_storeu_si128((__m128i*)(p + 8), _mm256_cvtps_ph(x.high, NEAREST));
}
inline void store(bf16* p, f32x16 x) { _mm256_storeu_si256((__m256i*)p, to_bf16(x)); }
template <class T>
inline void store(T* p, f32x16 x, int64_t n) {
  if (n >= LANES) return store(p, x);
  alignas(32) T all[LANES];
  store(all, x);
  if (n > 0) std::memcpy((void*)p, all, n * sizeof(T));
}
inline void store_int8(int8_t* p, i32x16 x) {
  const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(x.low, x.high), 0xd8);
  _mm_storeu_si128((__m128i*)p, _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1)));
}

// ---------------------------------------------------------------- arithmetic, besides the operators

inline f32x16 fma(f32x16 a, f32x16 b, f32x16 c) {
  return {_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)};
}
inline f32x16 fnma(f32x16 a, f32x16 b, f32x16 c) {
  return {_mm256_fnmadd_ps(a.low, b.low, c.low), _mm256_fnmadd_ps(a.high, b.high, c.high)};
}
inline f32x16 max(f32x16 a, f32x16 b) { return {_mm256_max_ps(a.low, b.low), _mm256_max_ps(a.high, b.high)}; }
inline f32x16 min(f32x16 a, f32x16 b) { return {_mm256_min_ps(a.low, b.low), _mm256_min_ps(a.high, b.high)}; }
inline f32x16 abs(f32x16 x) { return as_floats(as_ints(x) & ints(0x7fffffff)); }
inline f32x16 round_to_integers(f32x16 x) {
  constexpr int NEAREST = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  return {_mm256_round_ps(x.low, NEAREST), _mm256_round_ps(x.high, NEAREST)};
}
inline f32x16 floor(f32x16 x) { return {_mm256_floor_ps(x.low), _mm256_floor_ps(x.high)}; }
inline f32x16 rounded(f32x16 x) {
  asm("" : "+x"(x.low), "+x"(x.high));
  return x;
}
// There are two multiplications, because 2^n may be too small for a float32. If x is near 1, only the second rounds.
inline f32x16 times_power_of_2(f32x16 x, f32x16 n) {
  const i32x16 all = to_ints(n);
  const i32x16 half = all >> 1;
  const i32x16 bias = ints(127);
  return x * as_floats((half + bias) << 23) * as_floats((all - half + bias) << 23);
}
inline u8x64 shift_left(u8x64 x, int n) { return {_mm256_slli_epi16(x.low, n), _mm256_slli_epi16(x.high, n)}; }
inline u8x64 shift_right(u8x64 x, int n) { return {_mm256_srli_epi16(x.low, n), _mm256_srli_epi16(x.high, n)}; }
inline __m256 where_below(__m256i a, __m256i b, __m256 yes, __m256 no) {
  const __m256i not_below = _mm256_cmpeq_epi32(_mm256_max_epu32(a, b), a);
  return _mm256_blendv_ps(yes, no, _mm256_castsi256_ps(not_below));
}
inline f32x16 where_below(i32x16 a, i32x16 b, f32x16 yes, f32x16 no) {
  return {where_below(a.low, b.low, yes.low, no.low), where_below(a.high, b.high, yes.high, no.high)};
}
inline f32x16 first_of(f32x16 x, int64_t n) {
  return n >= LANES ? x : where_below(lane_indices(), ints(std::max<int64_t>(n, 0)), x, floats(0.0f));
}
inline Lanes lanes_of(__m256 low, __m256 high) { return _mm256_movemask_ps(low) | _mm256_movemask_ps(high) << 8; }
inline Lanes lanes_of(__m256i low, __m256i high) {
  return lanes_of(_mm256_castsi256_ps(low), _mm256_castsi256_ps(high));
}
inline Lanes equal_lanes(f32x16 a, f32x16 b) {
  return lanes_of(_mm256_cmp_ps(a.low, b.low, _CMP_EQ_OQ), _mm256_cmp_ps(a.high, b.high, _CMP_EQ_OQ));
}
inline Lanes above(f32x16 a, f32x16 b) {
  return lanes_of(_mm256_cmp_ps(a.low, b.low, _CMP_GT_OQ), _mm256_cmp_ps(a.high, b.high, _CMP_GT_OQ));
}
inline Lanes above(i32x16 a, i32x16 b) {
  return lanes_of(_mm256_cmpgt_epi32(a.low, b.low), _mm256_cmpgt_epi32(a.high, b.high));
}
inline Lanes at_least(f32x16 a, f32x16 b) {
  return lanes_of(_mm256_cmp_ps(a.low, b.low, _CMP_GE_OQ), _mm256_cmp_ps(a.high, b.high, _CMP_GE_OQ));
}
inline Lanes at_least(i32x16 a, i32x16 b) { return ~above(b, a); }
inline __m256 where(int lanes, __m256 yes, __m256 no) {
  const __m256i bits = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
  const __m256i selected = _mm256_cmpeq_epi32(_mm256_and_si256(_mm256_set1_epi32(lanes), bits), bits);
  return _mm256_blendv_ps(no, yes, _mm256_castsi256_ps(selected));
}
inline f32x16 where(Lanes lanes, f32x16 yes, f32x16 no) {
  return {where(lanes, yes.low, no.low), where(lanes >> 8, yes.high, no.high)};
}
inline u8x64 look_up_bytes(const uint8_t (&table)[16], u8x64 x) {
  const __m256i entries = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)table));
  return {_mm256_shuffle_epi8(entries, x.low), _mm256_shuffle_epi8(entries, x.high)};
}

inline i32x16 max(i32x16 a, i32x16 b) { return {_mm256_max_epi32(a.low, b.low), _mm256_max_epi32(a.high, b.high)}; }
inline i32x16 min(i32x16 a, i32x16 b) { return {_mm256_min_epi32(a.low, b.low), _mm256_min_epi32(a.high, b.high)}; }
inline i32x16 times(i32x16 a, i32x16 b) {
  return {_mm256_mullo_epi32(a.low, b.low), _mm256_mullo_epi32(a.high, b.high)};
}
inline i32x16 unsigned_shift(i32x16 x, int n) { return {_mm256_srli_epi32(x.low, n), _mm256_srli_epi32(x.high, n)}; }
inline f32x16 unsigned_to_floats(i32x16 x) {  // only fma rounds
  return fma(to_floats(unsigned_shift(x, 16)), floats(65536.0f), to_floats(x & ints(0xffff)));
}

// ---------------------------------------------------------------- selected lanes, stored without gaps

template <class T>
inline void store_selected(T* p, Lanes lanes, const T* x) {
  for (; lanes; lanes &= lanes - 1) *p++ = x[std::countr_zero(lanes)];
}
inline void store_selected(float* p, Lanes lanes, f32x16 x) {
  alignas(32) float all[LANES];
  store(all, x);
  store_selected(p, lanes, all);
}
inline void store_selected(int32_t* p, Lanes lanes, i32x16 x) {
  alignas(32) int32_t all[LANES];
  store(all, x);
  store_selected(p, lanes, all);
}

// ---------------------------------------------------------------- 64 bits: the compiler vectorizes these loops

// After 2^52 is added to a double that is an integer, its lower bits are this integer.
inline i64x16 to_int64(f32x16 x) {
  alignas(32) float whole[LANES];
  store(whole, floor(x));
  i64x16 result;
  const __m256d base = _mm256_set1_pd(0x1p52);
#pragma GCC unroll 4
  for (int i = 0; i < LANES; i += 4) {
    const __m256d sum = _mm256_cvtps_pd(_mm_load_ps(whole + i)) + base;
    _mm256_storeu_si256((__m256i*)(result.lane + i), _mm256_castpd_si256(_mm256_xor_pd(sum, base)));
  }
  return result;
}
inline i64x16 load_int64(const int64_t* p) {
  i64x16 x;
  std::memcpy(x.lane, p, sizeof x.lane);
  return x;
}
inline void store(int64_t* p, i64x16 x) { std::memcpy(p, x.lane, sizeof x.lane); }
inline i64x16 add_selected(i64x16 a, Lanes lanes, i64x16 b) {
  for (int i = 0; i < LANES; i++) a.lane[i] += b.lane[i] & -(int64_t)(lanes >> i & 1);
  return a;
}
inline i64x16 operator+(i64x16 a, i64x16 b) { return add_selected(a, 0xffff, b); }
inline void store_selected(int64_t* p, Lanes lanes, i64x16 x) { store_selected(p, lanes, x.lane); }
inline int64_t first_lane(i64x16 x) { return x.lane[0]; }
inline int64_t sum_of_lanes(i64x16 x) {
  int64_t sum = 0;
  for (int64_t lane : x.lane) sum += lane;
  return sum;
}

// ---------------------------------------------------------------- over all lanes

inline float first_lane(f32x16 x) { return _mm256_cvtss_f32(x.low); }
inline float sum_of_lanes(f32x16 x) {
  const __m256 eight = x.low + x.high;
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
inline float max_of_lanes(f32x16 x) {
  const __m256 eight = _mm256_max_ps(x.low, x.high);
  const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}
inline int32_t max_of_lanes(i32x16 x) {
  alignas(32) int32_t all[LANES];
  store(all, x);
  return *std::max_element(all, all + LANES);
}
inline int32_t min_of_lanes(i32x16 x) { return ~max_of_lanes({~x.low, ~x.high}); }
inline int32_t sum_of_lanes(i32x16 x) {
  const __m256i eight = _mm256_add_epi32(x.low, x.high);
  const __m128i four = _mm_add_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
  const __m128i two = _mm_add_epi32(four, _mm_unpackhi_epi64(four, four));
  return _mm_cvtsi128_si32(_mm_add_epi32(two, _mm_shuffle_epi32(two, 1)));
}
inline bool all_finite(f32x16 x) {
  const i32x16 infinity = ints(0x7f800000);
  const i32x16 exponents = as_ints(x) & infinity;
  const __m256i low = _mm256_cmpeq_epi32(exponents.low, infinity.low);
  return !_mm256_movemask_epi8(low | _mm256_cmpeq_epi32(exponents.high, infinity.high));
}

inline f32x16 sums_of_lanes(const f32x16* x) {
  float sums[LANES];
  for (int i = 0; i < LANES; i++) sums[i] = sum_of_lanes(x[i]);
  return load(sums);
}

// ---------------------------------------------------------------- rearranging

inline void join_pairs(__m256& x, __m256& y) {
  const __m256 low = _mm256_unpacklo_ps(x, y);
  const __m256 high = _mm256_unpackhi_ps(x, y);
  x = _mm256_permute2f128_ps(low, high, 0x20);
  y = _mm256_permute2f128_ps(low, high, 0x31);
}
inline void join_pairs(f32x16& x, f32x16& y) {
  join_pairs(x.low, y.low);
  join_pairs(x.high, y.high);
  std::swap(x.high, y.low);
}

// Transposes 8 registers of 8 words.
inline void transpose(__m256i (&r)[8]) {
  __m256i t[8];
#pragma GCC unroll 8
  for (int i = 0; i < 8; i += 2) {
    t[i] = _mm256_unpacklo_epi32(r[i], r[i + 1]);
    t[i + 1] = _mm256_unpackhi_epi32(r[i], r[i + 1]);
  }
#pragma GCC unroll 8
  for (int i = 0; i < 8; i += 4) {
    r[i] = _mm256_unpacklo_epi64(t[i], t[i + 2]);
    r[i + 1] = _mm256_unpackhi_epi64(t[i], t[i + 2]);
    r[i + 2] = _mm256_unpacklo_epi64(t[i + 1], t[i + 3]);
    r[i + 3] = _mm256_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
#pragma GCC unroll 8
  for (int i = 0; i < 4; i++) {
    t[i] = _mm256_permute2x128_si256(r[i], r[4 + i], 0x20);
    t[4 + i] = _mm256_permute2x128_si256(r[i], r[4 + i], 0x31);
  }
#pragma GCC unroll 8
  for (int i = 0; i < 8; i++) r[i] = t[i];
}
inline void transpose(i32x16 (&words)[16]) {
  __m256i quarters[2][2][8];  // by half of the rows, and half of the columns
#pragma GCC unroll 8
  for (int i = 0; i < 8; i++) {
    quarters[0][0][i] = words[i].low;
    quarters[0][1][i] = words[i].high;
    quarters[1][0][i] = words[8 + i].low;
    quarters[1][1][i] = words[8 + i].high;
  }
  for (auto& halves : quarters) {
    transpose(halves[0]);
    transpose(halves[1]);
  }
#pragma GCC unroll 8
  for (int i = 0; i < 8; i++) {
    words[i] = {quarters[0][0][i], quarters[1][0][i]};
    words[8 + i] = {quarters[0][1][i], quarters[1][1][i]};
  }
}

// ---------------------------------------------------------------- products of integers

#if defined(__AVXVNNI__) || defined(__AVX512VNNI__)
#define HAS_VNNI
inline __m256i add_products(__m256i acc, __m256i levels, __m256i x) {
#ifdef __AVXVNNI__
  return _mm256_dpbusd_avx_epi32(acc, levels, x);
#else
  return _mm256_dpbusd_epi32(acc, levels, x);
#endif
}
inline i32x16 add_products(i32x16 acc, u8x64 levels, u8x64 x) {
  return {add_products(acc.low, levels.low, x.low), add_products(acc.high, levels.high, x.high)};
}
#else
struct i16x32 {
  __m256i low;
  __m256i high;
};
inline i16x32 pair_products(u8x64 levels, u8x64 x) {
  return {_mm256_maddubs_epi16(levels.low, x.low), _mm256_maddubs_epi16(levels.high, x.high)};
}
// GCC would delay these additions until it has all products, for which there are too few registers. The empty asm
// statement prevents this.
inline i16x32 add_pairs(i16x32 a, i16x32 b) {
  i16x32 sum{_mm256_add_epi16(a.low, b.low), _mm256_add_epi16(a.high, b.high)};
  asm("" : "+x"(sum.low), "+x"(sum.high));
  return sum;
}
inline i32x16 add_sums(i32x16 acc, i16x32 x) {
  const __m256i one = _mm256_set1_epi16(1);
  i32x16 sum = acc + i32x16{_mm256_madd_epi16(x.low, one), _mm256_madd_epi16(x.high, one)};
  asm("" : "+x"(sum.low), "+x"(sum.high));
  return sum;
}
inline u8x64 abs_bytes(u8x64 x) { return {_mm256_abs_epi8(x.low), _mm256_abs_epi8(x.high)}; }
inline u8x64 with_sign_of(u8x64 sign, u8x64 x) {
  return {_mm256_sign_epi8(x.low, sign.low), _mm256_sign_epi8(x.high, sign.high)};
}
#endif

}  // namespace fastpath
