// The formats of packed weights: how levels and scales lie in memory, how they are read, and how they are packed.
//
// A quantized weight is stored as an unsigned integer, its level: weight = (level - OFFSET) * scale + min. A group is
// 32 columns of a row. One or several groups share a scale and, in some formats, a min.
//
// A packed matrix consists of Nb blocks of 16 rows, one row for each lane. A block is one stream of whole lines of 64
// bytes, which a product reads once, in ascending order, so that the processor's prefetchers can follow. The stream
// consists of superblocks: first some lines of scales, then the levels of the groups with these scales. The last
// superblock of a block may have fewer groups. N and C are padded with zeros.
//
// A format is a struct that combines a struct of levels with a struct of scales. It also reads the weights as they are
// stored before they are packed: the parts that formats.py describes. (A format of GGUF files has one part, the blocks
// of the file.) To add a format, write such a struct and append it to `Formats`.

#pragma once

#include <cstring>
#include <string>
#include <tuple>
#include <type_traits>

#include "vectors.h"

namespace fastpath {

constexpr int GROUP = 32;  // columns of x that share a scale when x is quantized, or that AMX adds at once

// A matrix before it is packed.
struct Source {
  const uint8_t* parts[3];  // each (N,row_bytes)
  int64_t row_bytes[3];     // of each part
  int64_t N, C;
  int64_t groupsize;  // columns that share a scale

  template <class T = uint8_t>
  const T* row(int part, int64_t n) const { return (const T*)(parts[part] + n * row_bytes[part]); }
};

// ---------------------------------------------------------------- levels
//
// A struct of levels says how the levels of a group, which are 0 to MOST, are stored in LINES lines. `unpack` converts
// them to unsigned bytes in STEPS steps; each step gives VECTORS vectors. A vector has four columns of each of the 16
// rows, beginning with first_column(step, vector). `pack` writes the levels q of one row to its lane.

// 8 bits. Line j has columns 4j..4j+3.
struct Bytes {
  static constexpr int MOST = 255, LINES = 8, STEPS = 8, VECTORS = 1;
  static constexpr int first_column(int step, int) { return 4 * step; }
  [[gnu::always_inline]] static void unpack(const uint8_t* group, int step, u8x64 (&levels)[VECTORS]) {
    levels[0] = load_line(group + 64 * step);
  }
  static void pack(const uint8_t* q, int lane, uint8_t* group) {
    for (int j = 0; j < 8; j++) std::memcpy(group + 64 * j + 4 * lane, q + 4 * j, 4);
  }
};

// 4 bits. Line j has columns 4j..4j+3 in the low nibbles, and 16+4j..16+4j+3 in the high nibbles.
struct Nibbles {
  static constexpr int MOST = 15, LINES = 4, STEPS = 4, VECTORS = 2;
  static constexpr int first_column(int step, int half) { return 16 * half + 4 * step; }
  [[gnu::always_inline]] static void unpack(const uint8_t* group, int step, u8x64 (&levels)[VECTORS]) {
    const u8x64 line = load_line(group + 64 * step);
    const u8x64 nibble = bytes(15);
    levels[0] = line & nibble;
    levels[1] = shift_right(line, 4) & nibble;
  }
  static void pack(const uint8_t* q, int lane, uint8_t* group) {
    uint8_t bytes[16];
    for (int c = 0; c < 16; c++) bytes[c] = (q[c] & 15) | q[16 + c] << 4;
    for (int j = 0; j < 4; j++) std::memcpy(group + 64 * j + 4 * lane, bytes + 4 * j, 4);
  }
};

// x, shifted to the left by `left` bits, or to the right if `left` is negative. The caller masks the bits that cross
// into another byte.
inline u8x64 shifted(u8x64 x, int left) { return left >= 0 ? shift_left(x, left) : shift_right(x, -left); }

// 5 bits. First a line with the fifth bits, bit 2 * step + half of each byte; then the nibbles.
struct FiveBits {
  static constexpr int MOST = 31, LINES = 5, STEPS = 4, VECTORS = 2;
  static constexpr int first_column(int step, int half) { return Nibbles::first_column(step, half); }
  [[gnu::always_inline]] static void unpack(const uint8_t* group, int step, u8x64 (&levels)[VECTORS]) {
    const u8x64 plane = load_line(group);
    const u8x64 fifth = bytes(16);
    Nibbles::unpack(group + 64, step, levels);
    for (int half = 0; half < 2; half++)
      levels[half] = levels[half] | (shifted(plane, 4 - 2 * step - half) & fifth);
  }
  static void pack(const uint8_t* q, int lane, uint8_t* group) {
    Nibbles::pack(q, lane, group + 64);
    uint8_t bits[4] = {};
    for (int i = 0; i < 8; i++)
      for (int c = 0; c < 4; c++) bits[c] |= (q[first_column(i / 2, i % 2) + c] >> 4 & 1) << i;
    std::memcpy(group + 4 * lane, bits, 4);
  }
};

// 6 bits. First two lines with the upper two bits of each half, bits 2 * step and 2 * step + 1; then the nibbles.
struct SixBits {
  static constexpr int MOST = 63, LINES = 6, STEPS = 4, VECTORS = 2;
  static constexpr int first_column(int step, int half) { return Nibbles::first_column(step, half); }
  [[gnu::always_inline]] static void unpack(const uint8_t* group, int step, u8x64 (&levels)[VECTORS]) {
    const u8x64 upper = bytes(0x30);
    Nibbles::unpack(group + 128, step, levels);
    for (int half = 0; half < 2; half++)
      levels[half] = levels[half] | (shifted(load_line(group + 64 * half), 4 - 2 * step) & upper);
  }
  static void pack(const uint8_t* q, int lane, uint8_t* group) {
    Nibbles::pack(q, lane, group + 128);
    for (int half = 0; half < 2; half++) {
      uint8_t bits[4] = {};
      for (int j = 0; j < 4; j++)
        for (int c = 0; c < 4; c++) bits[c] |= (q[first_column(j, half) + c] >> 4) << 2 * j;
      std::memcpy(group + 64 * half + 4 * lane, bits, 4);
    }
  }
};

// ---------------------------------------------------------------- scales
//
// A struct of scales describes the first BYTES bytes of a superblock of GROUPS groups. (GROUPS is 0 if only `groups`
// knows how many.) `load` reads these bytes. Then scale(i, half) and min(i) return the scales and mins of group i, one
// for each of the 16 rows. If HALVES, the two halves of a group have different scales.

// A float16 scale for each `groupsize` columns. A line holds the scales and, if MINS, the mins of these
// columns; without mins, it holds the scales of twice as many columns. FIXED: the groupsize is 32.
template <bool MINS, bool FIXED>
struct HalfScales {
  static constexpr bool HAS_MINS = MINS;
  static constexpr bool HALVES = false;
  static constexpr int IN_A_LINE = MINS ? 1 : 2;  // scales of a row in a line
  static constexpr int BYTES = 64, GROUPS = FIXED ? IN_A_LINE : 0;
  static int64_t groups(int64_t groups_per_scale) { return FIXED ? IN_A_LINE : IN_A_LINE * groups_per_scale; }

  const half* at;
  int64_t groups_per_scale;
  void load(const uint8_t* from, int64_t per_scale) {
    at = (const half*)from;
    groups_per_scale = FIXED ? 1 : per_scale;
  }
  f32x16 scale(int64_t i, int) const { return fastpath::load(at + (MINS || i < groups_per_scale ? 0 : LANES)); }
  f32x16 min(int64_t) const { return fastpath::load(at + LANES); }

  // Writes the scales of row n in superblock u to a lane.
  template <class F>
  static void pack(const Source& s, int64_t n, int64_t u, int lane, uint8_t* to) {
    const int64_t G = (s.C + s.groupsize - 1) / s.groupsize;
    const int64_t g = IN_A_LINE * u;
    uint16_t values[2] = {F::scale(s, n, g), 0};
    if constexpr (MINS) values[1] = F::min(s, n, g);
    if (!MINS && g + 1 < G) values[1] = F::scale(s, n, g + 1);
    for (int i = 0; i < 2; i++) std::memcpy(to + 32 * i + 2 * lane, values + i, 2);
  }
};

// For each of 8 groups, a scale and a min of 6 bits, which are multiplied by two float16 numbers, d and dmin. The first
// line has d and dmin. Three more lines have four times 64 numbers of 6 bits: the scales of groups 0..3, the scales of
// groups 4..7, the mins of groups 0..3, and the mins of groups 4..7. The first three sets of 64 are in the lower six
// bits of a line each. The fourth is spread over the upper two bits of all three lines.
struct SixBitScales {
  static constexpr bool HAS_MINS = true;
  static constexpr bool HALVES = false;
  static constexpr int BYTES = 256, GROUPS = 8;
  static int64_t groups(int64_t) { return GROUPS; }

  alignas(64) uint8_t numbers[4][64];
  f32x16 d;
  f32x16 dmin;
  void load(const uint8_t* at, int64_t) {
    u8x64 last = bytes(0);
    for (int i = 0; i < 3; i++) {
      const u8x64 line = load_line(at + 64 + 64 * i);
      store(numbers[i], line & bytes(63));
      last = last | shift_left(shift_right(line, 6) & bytes(3), 2 * i);
    }
    store(numbers[3], last);
    d = fastpath::load((const half*)at);
    dmin = floats(0.0f) - fastpath::load((const half*)at + LANES);
  }
  f32x16 scale(int64_t i, int) const { return d * to_floats(load_uint8(numbers[0] + 16 * i)); }
  f32x16 min(int64_t i) const { return dmin * to_floats(load_uint8(numbers[2] + 16 * i)); }

  // A block of the file begins with d, dmin, and 12 bytes of scales and mins, as llama.cpp arranges them.
  template <class F>
  static void pack(const Source& s, int64_t n, int64_t u, int lane, uint8_t* to) {
    const uint8_t* block = F::block(s, n, u);
    const uint8_t* q = block + 4;
    for (int i = 0; i < 2; i++) std::memcpy(to + 32 * i + 2 * lane, block + 2 * i, 2);
    uint8_t values[4][4];
    for (int i = 0; i < 4; i++) {
      values[0][i] = q[i] & 63;
      values[2][i] = q[i + 4] & 63;
      values[1][i] = (q[i + 8] & 15) | q[i] >> 6 << 4;
      values[3][i] = q[i + 8] >> 4 | q[i + 4] >> 6 << 4;
    }
    for (int i = 0; i < 4; i++)
      for (int line = 0; line < 3; line++)
        to[64 + 64 * line + 16 * i + lane] = values[line][i] | (values[3][i] >> 2 * line & 3) << 6;
  }
};

// For each of 8 groups, or for each of their halves, a signed scale of 8 bits, which is multiplied by a float16 number,
// d. First comes d.
template <bool HAS_HALVES>
struct ByteScales {
  static constexpr bool HAS_MINS = false;
  static constexpr bool HALVES = HAS_HALVES;
  static constexpr int COUNT = HALVES ? 16 : 8;  // scales of a row
  static constexpr int BYTES = HALVES ? 320 : 192, GROUPS = 8;
  static int64_t groups(int64_t) { return GROUPS; }

  const uint8_t* at;
  f32x16 d;
  void load(const uint8_t* from, int64_t) {
    at = from;
    d = fastpath::load((const half*)from);
  }
  f32x16 scale(int64_t i, int half) const {
    return d * to_floats(load_int8(at + 32 + 16 * (HALVES ? 2 * i + half : i)));
  }
  f32x16 min(int64_t) const { return floats(0.0f); }

  template <class F>
  static void pack(const Source& s, int64_t n, int64_t u, int lane, uint8_t* to) {
    const uint16_t d = F::d(F::block(s, n, u));
    std::memcpy(to + 2 * lane, &d, 2);
    for (int i = 0; i < COUNT; i++) to[32 + 16 * i + lane] = F::number(F::block(s, n, u), i);
  }
};

// ---------------------------------------------------------------- the formats
//
// `read` writes the levels of group b of row n (columns 32b to 32b+31) to 32 bytes, q. `scale` and `min` get the number
// g of the columns that share them. `block` of a format of GGUF files is block u of a row. OFFSET is a multiple of 8.

inline uint16_t read_half(const uint8_t* p) {
  uint16_t bits;
  std::memcpy(&bits, p, 2);
  return bits;
}

template <bool FIXED>  // the groupsize is 32
struct Int8 {
  static constexpr const char* NAME = "int8";
  using Levels = Bytes;
  using Scales = HalfScales<false, FIXED>;
  static constexpr int PARTS = 2;
  static constexpr int OFFSET = 128;
  static void read(const Source& s, int64_t n, int64_t b, uint8_t* q) {
    for (int64_t c = 0; c < std::min<int64_t>(GROUP, s.C - b * GROUP); c++) q[c] = s.row(0, n)[b * GROUP + c] ^ 128;
  }
  static uint16_t scale(const Source& s, int64_t n, int64_t g) { return s.row<uint16_t>(1, n)[g]; }
};

template <bool FIXED>
struct Int4 {
  static constexpr const char* NAME = "int4";
  using Levels = Nibbles;
  using Scales = HalfScales<true, FIXED>;
  static constexpr int PARTS = 3;
  static constexpr int OFFSET = 0;
  static void read(const Source& s, int64_t n, int64_t b, uint8_t* q) {
    for (int64_t c = 0; c < std::min<int64_t>(GROUP, s.C - b * GROUP); c++)
      q[c] = s.row(0, n)[b * GROUP / 2 + c / 2] >> 4 * (c % 2) & 15;
  }
  static uint16_t scale(const Source& s, int64_t n, int64_t g) { return s.row<uint16_t>(1, n)[g]; }
  static uint16_t min(const Source& s, int64_t n, int64_t g) { return s.row<uint16_t>(2, n)[g]; }
};

// What the formats of GGUF files have in common: the weights of COLUMNS columns form a block of BYTES bytes.
template <int COLUMNS_, int BYTES_>
struct Blocks {
  static constexpr int PARTS = 1;
  static constexpr int COLUMNS = COLUMNS_, BYTES = BYTES_;
  static const uint8_t* block(const Source& s, int64_t n, int64_t u) { return s.row(0, n) + u * BYTES; }
};

// Reads the nibbles of 32 columns: columns 0 to 15 are in the low nibbles of 16 bytes, and columns 16
// to 31 in the high nibbles.
inline void read_nibbles(const uint8_t* from, uint8_t* q) {
  for (int c = 0; c < 16; c++) {
    q[c] = from[c] & 15;
    q[16 + c] = from[c] >> 4;
  }
}

// The same for levels of five bits: the fifth bits of 32 columns are in 4 bytes.
inline void read_five_bits(const uint8_t* fifth, const uint8_t* nibbles, uint8_t* q) {
  read_nibbles(nibbles, q);
  for (int c = 0; c < 32; c++) q[c] |= (fifth[c / 8] >> c % 8 & 1) << 4;
}

// In Q4_K, Q5_K and Q6_K, pairs of groups share bytes: the first has the low nibbles, the second the high nibbles.
inline void read_shared_nibbles(const uint8_t* from, int second, uint8_t* q) {
  for (int c = 0; c < 32; c++) q[c] = from[c] >> 4 * second & 15;
}

// Blocks of one group, which begin with its scale and, if MINS, its min.
template <int BYTES, bool MINS>
struct SmallBlocks : Blocks<32, BYTES> {
  using Scales = HalfScales<MINS, true>;
  static uint16_t scale(const Source& s, int64_t n, int64_t g) { return read_half(SmallBlocks::block(s, n, g)); }
  static uint16_t min(const Source& s, int64_t n, int64_t g) { return read_half(SmallBlocks::block(s, n, g) + 2); }
};

struct Q4_0 : SmallBlocks<18, false> {
  static constexpr const char* NAME = "q4_0";
  using Levels = Nibbles;
  static constexpr int OFFSET = 8;
  static void read(const Source& s, int64_t n, int64_t b, uint8_t* q) { read_nibbles(block(s, n, b) + 2, q); }
};

struct Q4_1 : SmallBlocks<20, true> {
  static constexpr const char* NAME = "q4_1";
  using Levels = Nibbles;
  static constexpr int OFFSET = 0;
  static void read(const Source& s, int64_t n, int64_t b, uint8_t* q) { read_nibbles(block(s, n, b) + 4, q); }
};

struct Q5_0 : SmallBlocks<22, false> {
  static constexpr const char* NAME = "q5_0";
  using Levels = FiveBits;
  static constexpr int OFFSET = 16;
  static void read(const Source& s, int64_t n, int64_t b, uint8_t* q) {
    read_five_bits(block(s, n, b) + 2, block(s, n, b) + 6, q);
  }
};

struct Q5_1 : SmallBlocks<24, true> {
  static constexpr const char* NAME = "q5_1";
  using Levels = FiveBits;
  static constexpr int OFFSET = 0;
  static void read(const Source& s, int64_t n, int64_t b, uint8_t* q) {
    read_five_bits(block(s, n, b) + 4, block(s, n, b) + 8, q);
  }
};

struct Q8_0 : SmallBlocks<34, false> {
  static constexpr const char* NAME = "q8_0";
  using Levels = Bytes;
  static constexpr int OFFSET = 128;
  static void read(const Source& s, int64_t n, int64_t b, uint8_t* q) {
    for (int c = 0; c < 32; c++) q[c] = block(s, n, b)[2 + c] ^ 128;
  }
};

struct Q4_K : Blocks<256, 144> {
  static constexpr const char* NAME = "q4_k";
  using Levels = Nibbles;
  using Scales = SixBitScales;
  static constexpr int OFFSET = 0;
  static void read(const Source& s, int64_t n, int64_t b, uint8_t* q) {
    read_shared_nibbles(block(s, n, b / 8) + 16 + b % 8 / 2 * 32, b % 2, q);
  }
};

struct Q5_K : Blocks<256, 176> {
  static constexpr const char* NAME = "q5_k";
  using Levels = FiveBits;
  using Scales = SixBitScales;
  static constexpr int OFFSET = 0;
  static void read(const Source& s, int64_t n, int64_t b, uint8_t* q) {
    const uint8_t* from = block(s, n, b / 8);
    read_shared_nibbles(from + 48 + b % 8 / 2 * 32, b % 2, q);
    for (int c = 0; c < 32; c++) q[c] |= (from[16 + c] >> b % 8 & 1) << 4;
  }
};

struct Q6_K : Blocks<256, 210> {
  static constexpr const char* NAME = "q6_k";
  using Levels = SixBits;
  using Scales = ByteScales<true>;
  static constexpr int OFFSET = 32;
  // Each 128 columns have 64 bytes of nibbles (the low nibbles belong to the first 64 columns), and 32 bytes with the
  // upper two bits of all four groups.
  static void read(const Source& s, int64_t n, int64_t b, uint8_t* q) {
    const uint8_t* from = block(s, n, b / 8);
    const int part = b % 8 / 4;
    const int i = b % 4;
    read_shared_nibbles(from + 64 * part + 32 * (i % 2), i / 2, q);
    for (int c = 0; c < 32; c++) q[c] |= (from[128 + 32 * part + c] >> 2 * i & 3) << 4;
  }
  static uint16_t d(const uint8_t* block) { return read_half(block + 208); }
  static int8_t number(const uint8_t* block, int i) { return block[192 + i]; }
};

// 4 bits, which are an index into a table of 16 levels.
struct TableNibbles : Nibbles {
  static constexpr int MOST = 255;
  // The table of llama.cpp, plus OFFSET.
  alignas(16) static constexpr uint8_t TABLE[16] = {1,   24,  45,  63,  79,  93,  106, 118,
                                                    129, 141, 153, 166, 181, 197, 217, 241};
  [[gnu::always_inline]] static void unpack(const uint8_t* group, int step, u8x64 (&levels)[VECTORS]) {
    Nibbles::unpack(group, step, levels);
    for (u8x64& level : levels) level = look_up_bytes(TABLE, level);
  }
};

struct Iq4Nl : SmallBlocks<18, false> {
  static constexpr const char* NAME = "iq4_nl";
  using Levels = TableNibbles;
  static constexpr int OFFSET = 128;
  static void read(const Source& s, int64_t n, int64_t b, uint8_t* q) { read_nibbles(block(s, n, b) + 2, q); }
};

struct Iq4Xs : Blocks<256, 136> {
  static constexpr const char* NAME = "iq4_xs";
  using Levels = TableNibbles;
  using Scales = ByteScales<false>;
  static constexpr int OFFSET = 128;
  static void read(const Source& s, int64_t n, int64_t b, uint8_t* q) {
    read_nibbles(block(s, n, b / 8) + 8 + 16 * (b % 8), q);
  }
  static uint16_t d(const uint8_t* block) { return read_half(block); }
  static int8_t number(const uint8_t* block, int i) {
    return ((block[4 + i / 2] >> 4 * (i % 2) & 15) | (read_half(block + 2) >> 2 * i & 3) << 4) - 32;
  }
};

using Formats = std::tuple<Int8<true>, Int4<true>, Int8<false>, Int4<false>, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K,
                           Q6_K, Iq4Nl, Iq4Xs>;

// Calls work(F()), where F is the format with this index in `Formats`. For other numbers it does nothing.
template <class Work>
void with_format(int format, const Work& work) {
  auto try_format = [&]<size_t I>(std::integral_constant<size_t, I>) __attribute__((always_inline)) {
    if (int(I) != format) return false;
    work(std::tuple_element_t<I, Formats>());
    return true;
  };
  [&]<size_t... I>(std::index_sequence<I...>) {
    (try_format(std::integral_constant<size_t, I>()) || ...);
  }(std::make_index_sequence<std::tuple_size_v<Formats>>());
}

// The index in `Formats` of the first format with this name (a name of formats.FORMATS) that allows a scale for each
// groups_per_scale groups. -1 if there is none.
inline int format_named(const std::string& name, int64_t groups_per_scale) {
  int found = -1;
  for (int i = std::tuple_size_v<Formats> - 1; i >= 0; i--)
    with_format(i, [&](auto format) {
      using F = decltype(format);
      const bool is_fixed = std::is_same_v<F, Int8<true>> || std::is_same_v<F, Int4<true>>;
      if (name == F::NAME && (!is_fixed || groups_per_scale == 1)) found = i;
    });
  return found;
}

// ---------------------------------------------------------------- packing

// The bytes of a packed block of 16 rows with Cb groups each.
template <class F>
int64_t packed_block_bytes(int64_t Cb, int64_t groups_per_scale) {
  const int64_t groups = F::Scales::groups(groups_per_scale);
  return (Cb + groups - 1) / groups * F::Scales::BYTES + Cb * F::Levels::LINES * 64;
}

// Packs rows 16 * block to 16 * block + 15 to `to`, superblock after superblock (u in the structs of scales), and in
// each of them group after group.
template <class F>
void pack_block(const Source& s, int64_t block, int64_t Cb, int64_t groups_per_scale, uint8_t* to) {
  const int64_t groups = F::Scales::groups(groups_per_scale);
  const int64_t n = block * LANES;
  const int lanes = std::min<int64_t>(LANES, s.N - n);
  if (lanes < LANES) std::memset(to, 0, packed_block_bytes<F>(Cb, groups_per_scale));
  int64_t b = 0;  // a group of each row
  for (int64_t superblock = 0; b < Cb; superblock++) {
    for (int lane = 0; lane < lanes; lane++) F::Scales::template pack<F>(s, n + lane, superblock, lane, to);
    to += F::Scales::BYTES;
    for (const int64_t end = std::min(Cb, b + groups); b < end; b++) {
      for (int lane = 0; lane < lanes; lane++) {
        uint8_t q[GROUP] = {};
        F::read(s, n + lane, b, q);
        F::Levels::pack(q, lane, to);
      }
      to += F::Levels::LINES * 64;
    }
  }
}

}  // namespace fastpath
