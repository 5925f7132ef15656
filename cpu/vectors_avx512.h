// The vectors of vectors.h in registers of 512 bits, for AVX-512 (F, BW, DQ, VL). VNNI and BF16 are used where the
// processor has them.

#pragma once

namespace fastpath {

using f32x16 = __m512;
typedef int32_t i32x16 __attribute__((vector_size(64)));
typedef uint8_t u8x64 __attribute__((vector_size(64)));

struct i64x16 {
  __m512i low;   // lanes 0 to 7
  __m512i high;  // lanes 8 to 15
};

// The same as first_lanes, for 32 elements of 16 bits.
inline __mmask32 first_halves(int64_t n) { return n >= 32 ? ~0u : n <= 0 ? 0 : (1u << n) - 1; }

// ---------------------------------------------------------------- all lanes, and conversions

inline f32x16 floats(float x) { return _mm512_set1_ps(x); }
inline i32x16 ints(int32_t x) { return (i32x16)_mm512_set1_epi32(x); }
inline u8x64 bytes(uint8_t x) { return (u8x64)_mm512_set1_epi8(x); }
inline i32x16 lane_indices() { return i32x16{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}; }
inline f32x16 as_floats(i32x16 x) { return (f32x16)x; }
inline i32x16 as_ints(f32x16 x) { return (i32x16)x; }
inline i32x16 as_ints(u8x64 x) { return (i32x16)x; }
inline u8x64 as_bytes(i32x16 x) { return (u8x64)x; }
inline f32x16 to_floats(i32x16 x) { return _mm512_cvtepi32_ps((__m512i)x); }
inline i32x16 to_ints(f32x16 x) { return (i32x16)_mm512_cvtps_epi32(x); }  // rounds to the nearest, ties to even

// x in bfloat16: rounded to the nearest, ties to even, denormals to zero.
inline __m256i to_bf16(f32x16 x) {
#ifdef __AVX512BF16__
  return (__m256i)_mm512_cvtneps_pbh(x);
#else
  const i32x16 bits = as_ints(x), upper = (bits >> 16) & 0xffff;
  i32x16 rounded = ((bits + 0x7fff + (upper & 1)) >> 16) & 0xffff;
  rounded = (i32x16)_mm512_mask_or_epi32((__m512i)rounded, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), (__m512i)upper,
                                         _mm512_set1_epi32(0x40));
  const __mmask16 denormal = _mm512_testn_epi32_mask((__m512i)bits, _mm512_set1_epi32(0x7f800000));
  rounded = (i32x16)_mm512_mask_and_epi32((__m512i)rounded, denormal, (__m512i)upper, _mm512_set1_epi32(0x8000));
  return _mm512_cvtepi32_epi16((__m512i)rounded);
#endif
}
inline f32x16 rounded_to_bf16(f32x16 x) { return (f32x16)_mm512_slli_epi32(_mm512_cvtepu16_epi32(to_bf16(x)), 16); }

// ---------------------------------------------------------------- memory: the first n elements; load sets others to 0

inline f32x16 load(const float* p, int64_t n = LANES) { return _mm512_maskz_loadu_ps(first_lanes(n), p); }
inline f32x16 load(const half* p, int64_t n = LANES) {
  return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(first_lanes(n), p));
}
inline f32x16 load(const bf16* p, int64_t n = LANES) {
  return (f32x16)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(first_lanes(n), p)), 16);
}
inline i32x16 load_int8(const void* p) { return (i32x16)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)); }
inline i32x16 load_uint8(const void* p) { return (i32x16)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p)); }
inline u8x64 load_line(const void* p) { return (u8x64)_mm512_loadu_si512(p); }
// 32 bfloat16 elements without conversion: two in each lane.
inline i32x16 load_pairs(const bf16* p, int64_t n) { return (i32x16)_mm512_maskz_loadu_epi16(first_halves(n), p); }

inline void store(float* p, f32x16 x, int64_t n = LANES) { _mm512_mask_storeu_ps(p, first_lanes(n), x); }
inline void store(half* p, f32x16 x, int64_t n = LANES) {
  _mm256_mask_storeu_epi16(p, first_lanes(n), _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
inline void store(bf16* p, f32x16 x, int64_t n = LANES) { _mm256_mask_storeu_epi16(p, first_lanes(n), to_bf16(x)); }
inline void store(void* p, i32x16 x) { _mm512_storeu_si512(p, (__m512i)x); }
inline void store(void* p, u8x64 x) { _mm512_storeu_si512(p, (__m512i)x); }
inline void store_int8(int8_t* p, i32x16 x) { _mm_storeu_si128((__m128i*)p, _mm512_cvtepi32_epi8((__m512i)x)); }

// ---------------------------------------------------------------- arithmetic, besides the operators

inline f32x16 fma(f32x16 a, f32x16 b, f32x16 c) { return _mm512_fmadd_ps(a, b, c); }   // a b + c, rounded once
inline f32x16 fnma(f32x16 a, f32x16 b, f32x16 c) { return _mm512_fnmadd_ps(a, b, c); }  // c - a b
#ifdef __AVX512BF16__
#define HAS_BF16_PRODUCTS
// acc + the products of two bfloat16 elements of a and of b in each lane.
inline f32x16 add_pair_products(f32x16 acc, i32x16 a, i32x16 b) {
  return _mm512_dpbf16_ps(acc, (__m512bh)a, (__m512bh)b);
}
#endif
inline f32x16 max(f32x16 a, f32x16 b) { return _mm512_max_ps(a, b); }  // b if one of them is NaN, as in min
inline f32x16 min(f32x16 a, f32x16 b) { return _mm512_min_ps(a, b); }
inline f32x16 abs(f32x16 x) { return _mm512_abs_ps(x); }
inline f32x16 round_to_integers(f32x16 x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT); }
inline f32x16 floor(f32x16 x) { return _mm512_floor_ps(x); }
// x, rounded to float32: this keeps the compiler from fusing a multiplication with the addition after it.
inline f32x16 rounded(f32x16 x) {
  asm("" : "+v"(x));
  return x;
}
inline f32x16 times_power_of_2(f32x16 x, f32x16 n) { return _mm512_scalef_ps(x, n); }  // n: integers, -160 to 130
inline u8x64 shift_left(u8x64 x, int n) { return (u8x64)_mm512_slli_epi16((__m512i)x, n); }  // of each 16 bits
inline u8x64 shift_right(u8x64 x, int n) { return (u8x64)_mm512_srli_epi16((__m512i)x, n); }
// `yes` where a < b as unsigned integers, else `no`.
inline f32x16 where_below(i32x16 a, i32x16 b, f32x16 yes, f32x16 no) {
  return _mm512_mask_blend_ps(_mm512_cmplt_epu32_mask((__m512i)a, (__m512i)b), no, yes);
}
// The first n lanes of x; others are zero.
inline f32x16 first_of(f32x16 x, int64_t n) { return _mm512_maskz_mov_ps(first_lanes(n), x); }
// A bit for each lane: whether a and b are equal there.
inline Lanes equal_lanes(f32x16 a, f32x16 b) { return _mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ); }
inline Lanes above(f32x16 a, f32x16 b) { return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ); }  // a > b
inline Lanes above(i32x16 a, i32x16 b) { return _mm512_cmpgt_epi32_mask((__m512i)a, (__m512i)b); }
inline Lanes at_least(f32x16 a, f32x16 b) { return _mm512_cmp_ps_mask(a, b, _CMP_GE_OQ); }  // a >= b
inline Lanes at_least(i32x16 a, i32x16 b) { return _mm512_cmpge_epi32_mask((__m512i)a, (__m512i)b); }
inline f32x16 where(Lanes lanes, f32x16 yes, f32x16 no) { return _mm512_mask_blend_ps(lanes, no, yes); }
// Each byte of x, 0 to 15, replaced by its entry of the table.
inline u8x64 look_up_bytes(const uint8_t (&table)[16], u8x64 x) {
  const __m512i entries = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)table));
  return (u8x64)_mm512_shuffle_epi8(entries, (__m512i)x);
}

inline i32x16 max(i32x16 a, i32x16 b) { return (i32x16)_mm512_max_epi32((__m512i)a, (__m512i)b); }
inline i32x16 min(i32x16 a, i32x16 b) { return (i32x16)_mm512_min_epi32((__m512i)a, (__m512i)b); }
inline i32x16 times(i32x16 a, i32x16 b) { return (i32x16)_mm512_mullo_epi32((__m512i)a, (__m512i)b); }  // lower halves
inline i32x16 unsigned_shift(i32x16 x, int n) { return (i32x16)_mm512_srli_epi32((__m512i)x, n); }  // to the right
inline f32x16 unsigned_to_floats(i32x16 x) { return _mm512_cvtepu32_ps((__m512i)x); }

// ---------------------------------------------------------------- selected lanes, stored without gaps

inline void store_selected(float* p, Lanes lanes, f32x16 x) {
  _mm512_mask_storeu_ps(p, first_lanes(std::popcount(lanes)), _mm512_maskz_compress_ps(lanes, x));
}
inline void store_selected(int32_t* p, Lanes lanes, i32x16 x) { store_selected((float*)p, lanes, as_floats(x)); }

// ---------------------------------------------------------------- 64 bits

// 0 <= x < 2^52, rounded towards zero.
inline i64x16 to_int64(f32x16 x) {
  return {_mm512_cvttps_epi64(_mm512_castps512_ps256(x)), _mm512_cvttps_epi64(_mm512_extractf32x8_ps(x, 1))};
}
inline i64x16 load_int64(const int64_t* p) { return {_mm512_loadu_si512(p), _mm512_loadu_si512(p + 8)}; }
inline void store(int64_t* p, i64x16 x) {
  _mm512_storeu_si512(p, x.low);
  _mm512_storeu_si512(p + 8, x.high);
}
inline i64x16 operator+(i64x16 a, i64x16 b) {
  return {_mm512_add_epi64(a.low, b.low), _mm512_add_epi64(a.high, b.high)};
}
// a + b in the selected lanes, a in the others.
inline i64x16 add_selected(i64x16 a, Lanes lanes, i64x16 b) {
  return {_mm512_mask_add_epi64(a.low, lanes, a.low, b.low), _mm512_mask_add_epi64(a.high, lanes >> 8, a.high, b.high)};
}
inline void store_selected(int64_t* p, Lanes lanes, i64x16 x) {
  const Lanes low = lanes & 0xff;
  const Lanes high = lanes >> 8;
  const int count = std::popcount(low);
  _mm512_mask_storeu_epi64(p, first_lanes(count), _mm512_maskz_compress_epi64(low, x.low));
  _mm512_mask_storeu_epi64(p + count, first_lanes(std::popcount(high)), _mm512_maskz_compress_epi64(high, x.high));
}
inline int64_t first_lane(i64x16 x) { return _mm_cvtsi128_si64(_mm512_castsi512_si128(x.low)); }
inline int64_t sum_of_lanes(i64x16 x) { return _mm512_reduce_add_epi64(_mm512_add_epi64(x.low, x.high)); }

// ---------------------------------------------------------------- over all lanes

inline float first_lane(f32x16 x) { return _mm512_cvtss_f32(x); }
inline float max_of_lanes(f32x16 x) { return _mm512_reduce_max_ps(x); }
inline int32_t max_of_lanes(i32x16 x) { return _mm512_reduce_max_epi32((__m512i)x); }
inline int32_t min_of_lanes(i32x16 x) { return _mm512_reduce_min_epi32((__m512i)x); }
inline int32_t sum_of_lanes(i32x16 x) { return _mm512_reduce_add_epi32((__m512i)x); }
// The order is fixed: lanes i and i + 8 are added first, then i and i + 4, i + 2, i + 1.
inline float sum_of_lanes(f32x16 x) {
  const __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1));
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
inline bool all_finite(f32x16 x) {
  constexpr int NOT_FINITE = 0x99;  // quiet and signalling NaN, both infinities
  return !_mm512_fpclass_ps_mask(x, NOT_FINITE);
}

// The lane sums of 16 vectors, with the same bits as sum_of_lanes and a fifth of the instructions.
inline f32x16 sums_of_lanes(const f32x16* x) {
  __m512 quarters[4];
  __m512 pairs[2];
#pragma GCC unroll 4
  for (int j = 0; j < 4; j++) {
    const __m512 a = _mm512_add_ps(_mm512_shuffle_f32x4(x[j], x[4 + j], 0x44),
                                   _mm512_shuffle_f32x4(x[j], x[4 + j], 0xee));
    const __m512 b = _mm512_add_ps(_mm512_shuffle_f32x4(x[8 + j], x[12 + j], 0x44),
                                   _mm512_shuffle_f32x4(x[8 + j], x[12 + j], 0xee));
    quarters[j] = _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
  }
#pragma GCC unroll 2
  for (int i = 0; i < 2; i++) {
    const __m512d a = _mm512_castps_pd(quarters[2 * i]);
    const __m512d b = _mm512_castps_pd(quarters[2 * i + 1]);
    pairs[i] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)), _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));
  }
  return _mm512_add_ps(_mm512_shuffle_ps(pairs[0], pairs[1], 0x88), _mm512_shuffle_ps(pairs[0], pairs[1], 0xdd));
}

// ---------------------------------------------------------------- rearranging

// Undoes a split into even elements (x) and odd elements (y): afterwards x has elements 0 to 15, and y 16 to 31.
inline void join_pairs(f32x16& x, f32x16& y) {
  const i32x16 low = (lane_indices() >> 1) | ((lane_indices() & 1) << 4);
  const i32x16 high = low + 8;
  const __m512 first = _mm512_permutex2var_ps(x, (__m512i)low, y);
  y = _mm512_permutex2var_ps(x, (__m512i)high, y);
  x = first;
}

// Transposes 16 vectors of 16 words.
inline void transpose(i32x16 (&words)[16]) {
  __m512i t[16];
  __m512i (&r)[16] = (__m512i(&)[16])words;
#pragma GCC unroll 16
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
  }
#pragma GCC unroll 16
  for (int i = 0; i < 16; i += 4) {
    r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
#pragma GCC unroll 16
  for (int i = 0; i < 4; i++) {
    t[i] = _mm512_shuffle_i32x4(r[i], r[4 + i], 0x88);  // quarters 0 and 2
    t[4 + i] = _mm512_shuffle_i32x4(r[i], r[4 + i], 0xdd);  // 1 and 3
    t[8 + i] = _mm512_shuffle_i32x4(r[8 + i], r[12 + i], 0x88);
    t[12 + i] = _mm512_shuffle_i32x4(r[8 + i], r[12 + i], 0xdd);
  }
#pragma GCC unroll 16
  for (int i = 0; i < 4; i++) {
    r[i] = _mm512_shuffle_i32x4(t[i], t[8 + i], 0x88);
    r[4 + i] = _mm512_shuffle_i32x4(t[4 + i], t[12 + i], 0x88);
    r[8 + i] = _mm512_shuffle_i32x4(t[i], t[8 + i], 0xdd);
    r[12 + i] = _mm512_shuffle_i32x4(t[4 + i], t[12 + i], 0xdd);
  }
}

// Alternates the 16-bit elements from..from+16 of x with the same elements of y.
template <int from>
inline i32x16 interleave_halves(i32x16 x, i32x16 y) {
  const i32x16 one = lane_indices() + from;
  const i32x16 indices = one | ((one + 32) << 16);
  return (i32x16)_mm512_permutex2var_epi16((__m512i)x, (__m512i)indices, (__m512i)y);
}

// ---------------------------------------------------------------- products of integers

// acc + the products of four bytes of `levels`, unsigned, and four of x, signed, in each lane.
#ifdef __AVX512VNNI__
#define HAS_VNNI
inline i32x16 add_products(i32x16 acc, u8x64 levels, u8x64 x) {
  return (i32x16)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)levels, (__m512i)x);
}
#else
using i16x32 = __m512i;
// The sum of two products in each 16 bits. It must fit in int16.
inline i16x32 pair_products(u8x64 levels, u8x64 x) { return _mm512_maddubs_epi16((__m512i)levels, (__m512i)x); }
inline i16x32 add_pairs(i16x32 a, i16x32 b) { return _mm512_add_epi16(a, b); }
// acc + the two 16-bit sums in each lane.
inline i32x16 add_sums(i32x16 acc, i16x32 x) { return acc + (i32x16)_mm512_madd_epi16(x, _mm512_set1_epi16(1)); }
inline u8x64 abs_bytes(u8x64 x) { return (u8x64)_mm512_abs_epi8((__m512i)x); }
// x, negated where `sign` is negative. Where `sign` is zero, the result may be anything.
inline u8x64 with_sign_of(u8x64 sign, u8x64 x) {
  const __mmask64 negative = _mm512_movepi8_mask((__m512i)sign);
  return (u8x64)_mm512_mask_sub_epi8((__m512i)x, negative, _mm512_setzero_si512(), (__m512i)x);
}
#endif

}  // namespace fastpath
