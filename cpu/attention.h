// FlashAttention (arXiv:2205.14135). The cache is processed in chunks of 64 slots. For each chunk a query has a softmax
// state: the largest score m, the sum l of e^(score - m), and acc, the sum of e^(score - m) * value. The states of two
// chunks are merged by
//   m = max(m1, m2),   l = l1 e^(m1-m) + l2 e^(m2-m),   acc = acc1 e^(m1-m) + acc2 e^(m2-m)
// and the output is acc / l. Chunks begin at multiples of 64 and are merged in ascending order. The bits of an output
// therefore depend neither on the other queries nor on whether one thread computes all chunks (prefill) or several
// threads share them (decode).
//
// Scores are computed for 16 slots at a time, one slot in each lane. For this, the keys are transposed, so that a
// register holds the same 32-bit word of 16 keys. A word is one element in float32, or two elements in bfloat16.
// (float16 is converted to float32.)

#pragma once

#include <cmath>
#include <vector>

#include "matmul.h"

namespace fastpath {

constexpr int CHUNK = 64;       // slots
constexpr int QUERY_TILE = 32;  // queries that share the transposed keys

// How the products of queries with keys, and of weights with values, are computed. If AMX is allowed, bfloat16 uses AMX
// for many queries, and FLOAT for few, because AMX needs half a microsecond to wake up. Both give the same bits: as AMX
// does, FLOAT adds up 32 products at a time, with separate sums for even and odd indices.
enum Products {
  FLOAT,  // float32, after a conversion
  PAIRS,  // two bfloat16 elements at a time (vdpbf16ps)
  AMX,
};
constexpr int MIN_AMX_QUERIES = 8;
// At a time, this many queries are multiplied with keys, and this many with this many vectors of values. More sums do
// not fit in the registers.
constexpr int QUERIES_AT_ONCE = VECTOR_BITS == 512 ? 8 : 2;
constexpr int VALUE_QUERIES_AT_ONCE = VECTOR_BITS == 512 ? 4 : 2;
constexpr int VECTORS_AT_ONCE = VECTOR_BITS == 512 ? 4 : 2;

constexpr int elements_per_word(Products products) { return products == FLOAT ? 1 : 2; }

// One call of attention: its arguments, as in kernels.attention.
template <class T>
struct Attention {
  static constexpr Products KEY_WORDS = std::is_same_v<T, bf16> ? PAIRS : FLOAT;  // transposed keys consist of these

  int64_t B, S, H, K, E, slots;
  const T* q;                // (B,S,H,E)
  int64_t q_stride;          // elements between two tokens of q
  const T* k;                // (R,K,slots,E)
  const T* v;                // (R,K,slots,E)
  const int64_t* positions;  // (B,S)
  const int64_t* rows;       // (B,), or null for rows 0..B-1
  const float* slopes;       // (H,), or null
  int64_t window;            // a token attends to the last `window` slots up to its own
  float scale;               // of the products of queries and keys
  T* out;                    // (B,S,H,E)

  int64_t group() const { return H / K; }  // query heads that share a key head
  int64_t width() const { return (E + LANES - 1) / LANES * LANES; }  // elements of acc, padded to whole registers
  int64_t words(Products products) const {  // of a query, padded to whole registers, too
    return (width() / elements_per_word(products) + LANES - 1) / LANES * LANES;
  }
  int64_t key_words() const { return words(KEY_WORDS); }
  int64_t stride() const { return width() + LANES; }  // floats of a state: acc (width), m, l, padding
  const T* cache_row(const T* cache, int64_t b, int64_t k) const {
    return cache + ((rows ? rows[b] : b) * K + k) * slots * E;
  }

  // The first and the last slot that any of the tokens begin..end of row b sees. The last one is -1 if all these tokens
  // are padding.
  std::pair<int64_t, int64_t> visible_slots(int64_t b, int64_t begin, int64_t end) const {
    int64_t least = slots;
    int64_t most = -1;
    for (int64_t s = begin; s < end; s++) {
      const int64_t p = positions[b * S + s];
      if (p >= 0) {
        least = std::min(least, p);
        most = std::max(most, p);
      }
    }
    return {std::max<int64_t>(0, least - window + 1), most};
  }
};

// One thread's temporary arrays.
struct Workspace {
  uint32_t* queries;   // (QUERY_TILE,words)
  uint32_t* keys;      // (words,16)
  int32_t* positions;  // (QUERY_TILE,), of the queries
  float* slopes;       // (QUERY_TILE,), of the queries; 0 without ALiBi
  uint32_t* values;    // (CHUNK/2,2*words), pairs of values, for AMX
  float* weights;      // (QUERY_TILE,CHUNK), products of queries and keys, then e^(score - m)
  float* state;        // (QUERY_TILE,stride), of the chunks so far
  float* chunk_state;  // (QUERY_TILE,stride), of one chunk

  template <class T>
  static std::vector<Workspace> allocate(Arena& arena, const Attention<T>& a) {
    std::vector<Workspace> all(omp_get_max_threads());
    for (auto& w : all) {
      w.queries = arena.allocate<uint32_t>(QUERY_TILE * a.words(FLOAT));
      w.keys = arena.allocate<uint32_t>(a.key_words() * LANES);
      w.positions = arena.allocate<int32_t>(QUERY_TILE);
      w.slopes = arena.allocate<float>(QUERY_TILE);
      w.values = arena.allocate<uint32_t>(CHUNK * a.words(AMX));
      w.weights = arena.allocate<float>(QUERY_TILE * CHUNK);
      w.state = arena.allocate<float>(QUERY_TILE * a.stride());
      w.chunk_state = arena.allocate<float>(QUERY_TILE * a.stride());
    }
    return all;
  }
};

// While it is in scope, denormal numbers count as zero, as operands and as results.
struct FlushDenormals {
  const unsigned before = _mm_getcsr();
  explicit FlushDenormals(bool enabled) {
    if (enabled) _mm_setcsr(before | _MM_FLUSH_ZERO_ON | _MM_DENORMALS_ZERO_ON);
  }
  ~FlushDenormals() { _mm_setcsr(before); }
};

// Loads 16 words of a query, key or value, from word number `word` on. Elements beyond E are zero.
template <Products P, class T>
i32x16 load_words(const T* row, int64_t word, int64_t E) {
  if constexpr (P == FLOAT)
    return as_ints(load(row + word, E - word));
  else
    return load_pairs(row + 2 * word, E - 2 * word);
}

// Copies queries begin..begin+count to the workspace, with their positions and slopes. The queries of row b and key
// head k are numbered by token, then by the heads that share the key head: query i is head k * group + i % group of
// token i / group.
template <Products P, class T>
void load_queries(const Attention<T>& a, int64_t b, int64_t k, int64_t begin, int64_t count, const Workspace& w) {
  for (int64_t i = 0; i < count; i++) {
    const int64_t s = (begin + i) / a.group();
    const int64_t h = k * a.group() + (begin + i) % a.group();
    w.positions[i] = a.positions[b * a.S + s];
    w.slopes[i] = a.slopes ? a.slopes[h] : 0.0f;
    const T* query = a.q + (b * a.S + s) * a.q_stride + h * a.E;
    for (int64_t j = 0; j < a.words(P); j += LANES) store(w.queries + i * a.words(P) + j, load_words<P>(query, j, a.E));
  }
}

// Prefetches memory to the L2 cache in ascending order, a few lines at a time between computations. A processor can
// wait for some twenty lines at once, and stalls at more prefetches in a row. (Any other order than ascending was
// slower, and prefetches to L1 took up to 1.4 times as long.)
struct ReadAhead {
  const char* next = nullptr;
  const char* end = nullptr;

  [[gnu::always_inline]] void lines(int count) {
    for (; count > 0 && next < end; count--, next += 64) _mm_prefetch(next, PREFETCH_TO);
  }
};

// w.keys = the keys of 16 slots from `slot` on, transposed. Beyond the end of the cache, the last slot is repeated; the
// causal mask hides the repetitions.
template <Products P, class T>
void transpose_keys(const Attention<T>& a, const T* keys, int64_t slot, const Workspace& w, ReadAhead& ahead) {
  const T* rows[LANES];
  for (int i = 0; i < LANES; i++) rows[i] = keys + std::min(slot + i, a.slots - 1) * a.E;
  const int64_t words = a.key_words();
  const int64_t E = a.E;
  uint32_t* to = w.keys;
  for (int64_t j = 0; j < words; j += LANES, to += LANES * LANES) {
    i32x16 r[LANES];
    ahead.lines(P == AMX ? LANES : LANES / 2);  // dot_keys prefetches as many
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++) r[i] = load_words<Attention<T>::KEY_WORDS>(rows[i], j, E);
    transpose(r);
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++) store(to + i * LANES, r[i]);
  }
}

// acc = dot products of queries i..i+MT with the 16 transposed keys.
template <Products P, class T, int MT>
void dot_keys(const Attention<T>& a, const Workspace& w, int64_t i, f32x16 (&acc)[MT], ReadAhead& ahead) {
  const int64_t words = a.words(P);
  auto add = [&](f32x16& sum, f32x16 key, int64_t j, int m) {
    const i32x16 query = ints(w.queries[(i + m) * words + j]);
#ifdef HAS_BF16_PRODUCTS
    if constexpr (P == PAIRS) {
      sum = add_pair_products(sum, as_ints(key), query);
      return;
    }
#endif
    sum = fma(key, as_floats(query), sum);
  };
  f32x16 total[MT] = {};  // not `acc`, which may have to be in memory
  for (int64_t start = 0; start < words; start += GROUP) {
    f32x16 even[MT] = {};
    f32x16 odd[MT] = {};
    for (int64_t j = start; j < std::min(start + GROUP, words); j += 2) {
      ahead.lines(1);
      const uint32_t* keys = w.keys + j * LANES;
      f32x16 key;
      f32x16 next;
      if constexpr (P == FLOAT && Attention<T>::KEY_WORDS == PAIRS) {
        split_pairs(as_ints(load_line(w.keys + j / 2 * LANES)), key, next);
      } else {
        key = as_floats(as_ints(load_line(keys)));
        next = as_floats(as_ints(load_line(keys + LANES)));
      }
#pragma GCC unroll 8
      for (int m = 0; m < MT; m++) {
        add(even[m], key, j, m);
        add(odd[m], next, j + 1, m);
      }
    }
#pragma GCC unroll 8
    for (int m = 0; m < MT; m++) total[m] = total[m] + (even[m] + odd[m]);
  }
#pragma GCC unroll 8
  for (int m = 0; m < MT; m++) acc[m] = total[m];
}

// A chunk of slots, and the tile of queries that attends to it, in three steps: products with the keys
// (chunk_products), softmax (chunk_softmax), weighted sum of the values (add_values).
template <class T>
struct ChunkTile {
  const T* keys;          // of the row's key head, from slot 0 on
  const T* values;        // the same
  int64_t count;          // queries
  int64_t base;           // the first slot of the chunk
  int64_t from;           // the first slot of the chunk that any of the queries sees
  int64_t to;             // the slot after the last one
  bool is_first;          // this is the first visible chunk, so no chunk before it has prefetched it
  ReadAhead next_keys;    // of the next chunk, if there is one
  ReadAhead next_values;  // the same

  int64_t low() const { return from / LANES * LANES; }  // scores are computed from this slot on
};

#ifdef HAS_BF16_PRODUCTS
// Loads 16 words of the values of two slots, `slot` and slot + 1, from word number `word` on, and pairs their elements:
// `first` gets the first 16 pairs, and `second` the second 16. A slot that no query sees may hold NaN, so its elements
// are replaced by zeros.
inline void load_value_pairs(const Attention<bf16>& a, const ChunkTile<bf16>& c, int64_t slot, int64_t word,
                             i32x16& first, i32x16& second) {
  auto words_of = [&](int64_t slot) {
    const bool is_seen = slot >= c.from && slot < c.to;
    return is_seen ? load_words<PAIRS>(c.values + slot * a.E, word, a.E) : ints(0);
  };
  const i32x16 one = words_of(slot);
  const i32x16 two = words_of(slot + 1);
  first = interleave_halves<0>(one, two);
  second = interleave_halves<LANES>(one, two);
}
#endif

// Step 3 of a chunk, with FLOAT: acc = the weighted sum of the values, for queries i..i+MT and elements e..e+16*VT.
template <class T, int MT, int VT>
[[gnu::noinline]] void add_values(const Attention<T>& a, const Workspace& w, ChunkTile<T>& c, int64_t i, int64_t e,
                                  float* states) {
  constexpr bool BY_PAIRS = std::is_same_v<T, bf16> && VT % 2 == 0;  // even elements in a register, odd in the next
  f32x16 acc[MT][VT] = {};
  f32x16 even_sum[MT][VT];
  for (int64_t group = c.from / GROUP * GROUP; group < c.to; group += GROUP) {
    const int64_t begin = std::max(group, c.from);
    const int64_t end = std::min(group + GROUP, c.to);
    for (int odd = 0; odd < 2; odd++) {
      f32x16 sum[MT][VT] = {};
      for (int64_t slot = begin + (begin + odd) % 2; slot < end; slot += 2) {
        c.next_values.lines(VT);
        const T* value = c.values + slot * a.E;
        f32x16 v[VT];
#pragma GCC unroll 4
        for (int j = 0; j < VT; j += 1 + BY_PAIRS) {
          if constexpr (BY_PAIRS)
            split_pairs(load_words<PAIRS>(value, (e + j * LANES) / 2, a.E), v[j], v[j + 1]);
          else
            v[j] = load(value + e + j * LANES, a.E - e - j * LANES);
        }
#pragma GCC unroll 4
        for (int m = 0; m < MT; m++) {
          const f32x16 weight = floats(w.weights[(i + m) * CHUNK + slot % CHUNK]);
#pragma GCC unroll 4
          for (int j = 0; j < VT; j++) sum[m][j] = fma(weight, v[j], sum[m][j]);
        }
      }
#pragma GCC unroll 4
      for (int m = 0; m < MT; m++)
#pragma GCC unroll 4
        for (int j = 0; j < VT; j++) {
          if (odd)
            acc[m][j] = acc[m][j] + (even_sum[m][j] + sum[m][j]);
          else
            even_sum[m][j] = sum[m][j];
        }
    }
  }
#pragma GCC unroll 4
  for (int m = 0; m < MT; m++) {
#pragma GCC unroll 4
    for (int j = 0; j < VT; j += 1 + BY_PAIRS) {
      float* to = states + (i + m) * a.stride() + e + j * LANES;
      if constexpr (BY_PAIRS) {
        join_pairs(acc[m][j], acc[m][j + 1]);
        store(to + LANES, acc[m][j + 1]);
      }
      store(to, acc[m][j]);
    }
  }
}

#ifdef HAS_BF16_PRODUCTS
// The same as add_values, with PAIRS: two slots at a time, for queries i..i+MT and elements e..e+32.
template <int MT>
[[gnu::noinline]] void add_value_pairs(const Attention<bf16>& a, const Workspace& w, ChunkTile<bf16>& c, int64_t i,
                                       int64_t e, float* states) {
  f32x16 low[MT] = {};
  f32x16 high[MT] = {};
  for (int64_t slot = c.from / 2 * 2; slot < c.to; slot += 2) {
    c.next_values.lines(2);
    i32x16 first, second;
    load_value_pairs(a, c, slot, e / 2, first, second);
#pragma GCC unroll 8
    for (int m = 0; m < MT; m++) {
      const i32x16 weight = ints(((const uint32_t*)(w.weights + (i + m) * CHUNK))[slot % CHUNK / 2]);
      low[m] = add_pair_products(low[m], first, weight);
      high[m] = add_pair_products(high[m], second, weight);
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < MT; m++) {
    store(states + (i + m) * a.stride() + e, low[m]);
    if (e + LANES < a.width()) store(states + (i + m) * a.stride() + e + LANES, high[m]);
  }
}
#endif

#ifdef HAS_AMX
// out (count,16) = a (count,32*steps) times b, which has a tile of 16 rows of 16 pairs of bfloat16 for each step.
// Strides are in bytes. The last tile of rows may overlap the tile before it.
void multiply_tiles(const void* a, int64_t a_stride, const void* b, int64_t b_stride, int64_t steps, float* out,
                    int64_t out_stride, int64_t count) {
  asm volatile("" ::: "memory");  // compilers do not know that tiles are loaded from memory
  const int64_t rows = std::min<int64_t>(count, LANES);
  for (int64_t i = 0; i < count; i += rows) {
    const int64_t first = std::min(i, count - rows);
    _tile_zero(0);
    for (int64_t step = 0; step < steps; step++) {
      _tile_loadd(6, (const char*)a + first * a_stride + step * 64, a_stride);
      _tile_loadd(7, (const char*)b + step * LANES * b_stride, b_stride);
      _tile_dpbf16ps(0, 6, 7);
    }
    _tile_stored(0, (char*)out + first * out_stride, out_stride);
  }
}

// The same as add_values, with AMX: for all queries, 32 slots at a time.
void add_values_amx(const Attention<bf16>& a, const Workspace& w, ChunkTile<bf16>& c, float* states) {
  const int64_t words = a.words(AMX);
  const int64_t begin = c.from / GROUP * GROUP;
  const int64_t end = (c.to + GROUP - 1) / GROUP * GROUP;
  uint32_t* pairs = w.values;
  for (int64_t slot = begin; slot < end; slot += 2) {
    for (int64_t word = 0; word < words; word += LANES, pairs += 2 * LANES) {
      c.next_values.lines(2);
      i32x16 low;
      i32x16 high;
      load_value_pairs(a, c, slot, word, low, high);
      store(pairs, low);
      store(pairs + LANES, high);
    }
  }
  for (int64_t e = 0; e < a.width(); e += LANES)
    multiply_tiles((const bf16*)w.weights + begin % CHUNK, CHUNK * sizeof(float), w.values + e,
                   2 * words * sizeof(uint32_t), (end - begin) / GROUP, states + e, a.stride() * sizeof(float),
                   c.count);
}
#endif

// Divides 0..count into steps of MOST, of which the last may be shorter, and calls work(Int<n>(), i) for step i..i+n.
template <int MOST, class Work>
void in_steps(int64_t count, const Work& work) {
  for (int64_t i = 0; i < count; i += MOST) with_size<MOST>(count - i, [&](auto n) { work(n, i); });
}

// Step 1 of a chunk: w.weights = the dot products of queries and keys.
template <Products P, class T>
[[gnu::always_inline]] inline void chunk_products(const Attention<T>& a, const Workspace& w, ChunkTile<T>& c) {
  // Without prefetches attention takes three times as long.
  if (c.is_first) prefetch(c.keys + c.low() * a.E, (c.to - c.low()) * a.E * sizeof(T));
  for (int64_t slot = c.low(); slot < c.to; slot += LANES) {
    if (c.is_first) prefetch(c.values + slot * a.E, LANES * a.E * sizeof(T));
    transpose_keys<P>(a, c.keys, slot, w, c.next_keys);
    float* products = w.weights + slot - c.base;
#ifdef HAS_AMX
    if constexpr (P == AMX) {
      multiply_tiles(w.queries, a.words(P) * sizeof(uint32_t), w.keys, LANES * sizeof(uint32_t), a.words(P) / LANES,
                     products, CHUNK * sizeof(float), c.count);
      continue;
    }
#endif
    in_steps<QUERIES_AT_ONCE>(c.count, [&](auto queries, int64_t i) {
      constexpr int MT = decltype(queries)::value;
      f32x16 acc[MT];
      dot_keys<P, T, MT>(a, w, i, acc, c.next_keys);
      for (int m = 0; m < MT; m++) store(products + (i + m) * CHUNK, acc[m]);
    });
  }
}

// Step 2: w.weights = e^(score - m), rounded to bfloat16 if T is bfloat16. m and l of each query go to states. The
// scores are q k scale - slope * distance, and -infinity for slots that a query does not see.
template <Products P, class T>
[[gnu::always_inline]] inline void chunk_softmax(const Attention<T>& a, const Workspace& w, const ChunkTile<T>& c,
                                                 float* states) {
  const int64_t low = c.low() - c.base;
  const int64_t high = (c.to - c.base + LANES - 1) / LANES * LANES;
  for (int64_t i = 0; i < c.count; i++) {
    float* weights = w.weights + i * CHUNK;
    const int64_t p = w.positions[i];
    const i32x16 window = ints(p < 0 ? 0 : a.window);
    f32x16 most = floats(-INF);
    f32x16 sum = floats(0.0f);
    for (int64_t j = low; j < high; j += LANES) {
      const i32x16 distance = ints(p - c.base - j) - lane_indices();
      f32x16 score = load(weights + j) * floats(a.scale);
      if (a.slopes) score = fnma(floats(w.slopes[i]), to_floats(distance), score);
      // Future slots wrap around to huge unsigned distances, so they are masked as well.
      score = where_below(distance, window, score, floats(-INF));
      most = max(most, score);
      store(weights + j, score);
    }
    const float m = max_of_lanes(most);
    const f32x16 shift = floats(m == -INF ? 0.0f : m);
    for (int64_t j = low; j < high; j += LANES) {
      const f32x16 weight = fast_exp(load(weights + j) - shift);
      sum = sum + weight;
      if constexpr (P == FLOAT)
        store(weights + j, std::is_same_v<T, bf16> ? rounded_to_bf16(weight) : weight);
      else
        store((bf16*)weights + j, weight);  // overwrites only scores that have been read
    }
    if constexpr (P == AMX) {  // it multiplies whole groups of 32 slots
      for (int64_t j = low / GROUP * GROUP; j < low; j += LANES) store((bf16*)weights + j, floats(0.0f));
      if (high % GROUP) store((bf16*)weights + high, floats(0.0f));
    }
    states[i * a.stride() + a.width()] = m;
    states[i * a.stride() + a.width() + 1] = sum_of_lanes(sum);
  }
}

// An empty state: m = -infinity, l = 0, acc = 0.
inline void clear_state(float* state, int64_t width) {
  std::fill(state, state + width + LANES, 0.0f);
  state[width] = -INF;
}

// Computes the softmax state (acc, m, l) of a tile of queries over one chunk, and stores it in states (count,stride).
// The queries must be in the workspace already. (It saves 3 % of attention's time that steps 1 and 2 are inlined and
// step 3 is not.)
template <Products P, class T>
void attend_chunk(const Attention<T>& a, int64_t b, int64_t k, int64_t begin, int64_t count, int64_t chunk,
                  const Workspace& w, float* states) {
  const auto [first, last] = a.visible_slots(b, begin / a.group(), (begin + count - 1) / a.group() + 1);
  const int64_t base = chunk * CHUNK;
  ChunkTile<T> c{.keys = a.cache_row(a.k, b, k), .values = a.cache_row(a.v, b, k), .count = count, .base = base};
  c.from = std::max(base, first);
  c.to = std::min(base + CHUNK, last + 1);
  c.is_first = base <= first;
  const int64_t next = base + CHUNK;
  const int64_t next_end = std::min(next + CHUNK, last + 1);
  if (next < next_end) {
    c.next_keys = {(const char*)(c.keys + next * a.E), (const char*)(c.keys + next_end * a.E)};
    c.next_values = {(const char*)(c.values + next * a.E), (const char*)(c.values + next_end * a.E)};
  }
  if (c.from >= c.to) {  // only other queries of the row see the chunk
    for (int64_t i = 0; i < count; i++) clear_state(states + i * a.stride(), a.width());
    return;
  }
  chunk_products<P>(a, w, c);
  chunk_softmax<P>(a, w, c, states);
#ifdef HAS_AMX
  if constexpr (P == AMX) return add_values_amx(a, w, c, states);
#endif
#ifdef HAS_BF16_PRODUCTS
  if constexpr (P == PAIRS) {
    for (int64_t e = 0; e < a.E; e += 2 * LANES)
      in_steps<QUERIES_AT_ONCE>(
          count, [&](auto queries, int64_t i) { add_value_pairs<queries>(a, w, c, i, e, states); });
    return;
  }
#endif
  in_steps<VECTORS_AT_ONCE>(a.width() / LANES, [&](auto vectors, int64_t e) {
    in_steps<VALUE_QUERIES_AT_ONCE>(
        count, [&](auto queries, int64_t i) { add_values<T, queries, vectors>(a, w, c, i, e * LANES, states); });
  });
}

// Calls work(Int<P>()) with the Products for a tile of this many queries.
template <class T, class Work>
void choose_products(int64_t queries, const Work& work) {
  if constexpr (std::is_same_v<T, bf16>) {
#ifdef HAS_BF16_PRODUCTS
    if (!amx_allowed) return work(Int<PAIRS>());
#endif
#ifdef HAS_AMX
    if (queries >= MIN_AMX_QUERIES) {
      const Tiles<bf16> tiles(std::min<int64_t>(queries, LANES));
      return work(Int<AMX>());
    }
#endif
  }
  work(Int<FLOAT>());
}

// Merges the state `other` into `state`.
inline void merge_state(float* state, const float* other, int64_t width) {
  const float m = std::max(other[width], state[width]);  // in this order, NaN of `other` is not lost
  if (m == -INF) return;
  const float a = fast_exp(state[width] - m);
  const float c = fast_exp(other[width] - m);
  for (int64_t e = 0; e < width; e += LANES)
    store(state + e, fma(load(state + e), floats(a), load(other + e) * floats(c)));
  state[width] = m;
  state[width + 1] = state[width + 1] * a + other[width + 1] * c;
}

// Writes the output of query number `query` of row b and key head k. Returns whether it is finite.
template <class T>
bool write_output(const Attention<T>& a, int64_t b, int64_t k, int64_t query, const float* state) {
  const int64_t s = query / a.group();
  const int64_t h = k * a.group() + query % a.group();
  T* out = a.out + ((b * a.S + s) * a.H + h) * a.E;
  const float l = state[a.width() + 1];
  const f32x16 inverse = floats(l == 0 ? 0.0f : 1 / l);  // padding sees no slot: its output is zero
  bool is_finite = true;
  for (int64_t e = 0; e < a.E; e += LANES) {
    const f32x16 y = load(state + e) * inverse;
    is_finite = is_finite && all_finite(y);
    store(out + e, y, a.E - e);
  }
  return is_finite;
}

// w.state = the states of a tile of queries, after all chunks that any of them sees.
template <class T>
void attend_tile(const Attention<T>& a, int64_t b, int64_t k, int64_t begin, int64_t count, const Workspace& w) {
  const int64_t stride = a.stride();
  const auto visible = a.visible_slots(b, begin / a.group(), (begin + count - 1) / a.group() + 1);
  for (int64_t i = 0; i < count; i++) clear_state(w.state + i * stride, a.width());
  choose_products<T>(count, [&](auto products) {
    constexpr Products P = Products(decltype(products)::value);
    load_queries<P>(a, b, k, begin, count, w);
    for (int64_t chunk = visible.first / CHUNK; chunk * CHUNK <= visible.second; chunk++) {
      attend_chunk<P>(a, b, k, begin, count, chunk, w, w.chunk_state);
      for (int64_t i = 0; i < count; i++) merge_state(w.state + i * stride, w.chunk_state + i * stride, a.width());
    }
  });
}

// Computes a query again, alone, if its output in a tile was not finite. In a tile, NaN in a slot reaches all queries,
// because 0 times NaN is NaN, even the queries of earlier tokens, which do not see the slot. A query alone reads only
// slots that it sees.
template <class T>
void attend_alone(const Attention<T>& a, int64_t b, int64_t k, int64_t query, const Workspace& w) {
  if (a.S == 1) return;  // no other token was in the tile
  attend_tile(a, b, k, query, 1, w);
  write_output(a, b, k, query, w.state);
}

// Prefill: a thread computes all chunks of a tile of queries. Consecutive tiles go to different threads, because later
// tiles see more slots.
template <class T>
void attention_by_queries(const Team& team, const Attention<T>& a, const Workspace& w) {
  const int64_t G = a.group();
  const int64_t queries = a.S * G;
  const int64_t tiles = (queries + QUERY_TILE - 1) / QUERY_TILE;
  for (int64_t item = team.thread; item < a.B * a.K * tiles; item += team.threads) {
    const int64_t b = item / (a.K * tiles);
    const int64_t k = item / tiles % a.K;
    const int64_t begin = item % tiles * QUERY_TILE;
    const int64_t count = std::min<int64_t>(QUERY_TILE, queries - begin);
    attend_tile(a, b, k, begin, count, w);
    std::vector<int64_t> bad;  // allocates nothing while it is empty
    for (int64_t query = begin; query < begin + count; query++)
      if (!write_output(a, b, k, query, w.state + (query - begin) * a.stride())) bad.push_back(query);
    for (int64_t query : bad) attend_alone(a, b, k, query, w);
  }
}

// Decode with few rows (flash-decoding): the threads share the chunks of all rows and heads (attend_split), and then
// merge the states of the chunks (merge_split). An item is one chunk of one key head of one row.
struct SplitPlan {
  bool enabled;  // otherwise attention_by_queries is used, and there are no items
  std::vector<int64_t> first_chunk;  // the first visible chunk of each row
  std::vector<int64_t> first_item;   // the first item of each row, and the number of items

  template <class T>
  explicit SplitPlan(const Attention<T>& a) : first_item{0} {
    const int64_t tiles = (a.S * a.group() + QUERY_TILE - 1) / QUERY_TILE;
    enabled = a.S <= MAX_DECODE_TOKENS && a.B * a.K * tiles < 8 * omp_get_max_threads();
    for (int64_t b = 0; b < a.B && enabled; b++) {
      const auto [least, most] = a.visible_slots(b, 0, a.S);
      first_chunk.push_back(least / CHUNK);
      first_item.push_back(first_item.back() + (most < 0 ? 0 : most / CHUNK - least / CHUNK + 1) * a.K);
    }
  }

  int64_t items() const { return first_item.back(); }

  template <class T>
  float* allocate(Arena& arena, const Attention<T>& a) const {
    return arena.allocate<float>(items() * a.S * a.group() * a.stride());
  }
};

// Computes this thread's items: states (items,S*group,stride).
template <class T>
void attend_split(const Team& team, const Attention<T>& a, const SplitPlan& plan, const Workspace& w, float* states) {
  const int64_t queries = a.S * a.group();
  const auto& first_item = plan.first_item;
  team.split(plan.items(), 1, [&](int64_t item, int64_t end) {
    for (; item < end; item++) {
      const int64_t b = std::upper_bound(first_item.begin(), first_item.end(), item) - first_item.begin() - 1;
      const int64_t chunks = (first_item[b + 1] - first_item[b]) / a.K;
      const int64_t i = item - first_item[b];
      for (int64_t begin = 0; begin < queries; begin += QUERY_TILE) {
        const int64_t count = std::min<int64_t>(QUERY_TILE, queries - begin);
        float* to = states + (item * queries + begin) * a.stride();
        choose_products<T>(count, [&](auto products) {
          constexpr Products P = Products(decltype(products)::value);
          load_queries<P>(a, b, i / chunks, begin, count, w);
          attend_chunk<P>(a, b, i / chunks, begin, count, plan.first_chunk[b] + i % chunks, w, to);
        });
      }
    }
  });
}

// Merges the states of all chunks, and writes the outputs.
template <class T>
void merge_split(const Team& team, const Attention<T>& a, const SplitPlan& plan, const Workspace& w,
                 const float* states) {
  const int64_t queries = a.S * a.group();
  const int64_t G = a.group();
  team.split(a.B * a.S * a.H, 1, [&](int64_t at, int64_t end) {
    for (; at < end; at++) {
      const int64_t b = at / (a.S * a.H);
      const int64_t s = at / a.H % a.S;
      const int64_t h = at % a.H;
      const int64_t first = plan.first_item[b];
      const int64_t chunks = (plan.first_item[b + 1] - first) / a.K;
      clear_state(w.state, a.width());
      const int64_t begin = first + h / G * chunks;
      const int64_t query = s * G + h % G;
      for (int64_t item = begin; item < begin + chunks; item++)
        merge_state(w.state, states + (item * queries + query) * a.stride(), a.width());
      if (!write_output(a, b, h / G, query, w.state)) attend_alone(a, b, h / G, query, w);
    }
  });
}

// This thread's share of attention. `states` is the memory of plan.allocate.
template <class T>
void run_attention(const Team& team, const Attention<T>& a, const SplitPlan& plan, const Workspace& w, float* states) {
  const FlushDenormals flush(std::is_same_v<T, bf16>);  // as AMX does
  if (plan.enabled) {
    attend_split(team, a, plan, w, states);
    team.barrier();
    merge_split(team, a, plan, w, states);
  } else {
    attention_by_queries(team, a, w);
  }
  team.barrier();
}

}  // namespace fastpath
