// The keys and values of an MTP layer (mixers/mtp.py) as one operation. The input of the layer for a token is the embedding of
// the token, and the model's hidden state of the token before.

#pragma once

#include "blocks.h"

namespace fastpath {

// One call of the operation: see write_draft_keys.
template <class T>
struct DraftKeys {
  Block<T> block;               // writes the keys and values
  int64_t B, S, D, M;           // M = B * S tokens
  const int64_t* positions;     // (B,S)
  const int64_t* rows;          // (B,) or null
  const T* embedded;            // (M,D)
  const T* hidden;              // (M,D)
  const float* embedding_norm;  // (D,)
  const float* hidden_norm;     // (D,)
  float eps;
  T* tail;                      // (R,tail_size+1,D): the latest hidden states
  Layer proj;                   // (D,2D), joins an embedding and a hidden state
  std::vector<int64_t> counts;  // how many tokens each batch row has, without padding

  // Temporary arrays, from allocate():
  T* pairs;   // (M,2D)
  T* joined;  // (M,D)
  Input to_proj;

  static constexpr int64_t tail_size = DELTA_WINDOW + 1;

  void allocate(Arena& arena) {
    pairs = arena.allocate<T>(M * 2 * D);
    joined = arena.allocate<T>(M * D);
    to_proj = allocate_input(arena, proj, pairs, M);
    block.allocate(arena);
    block.x = joined;
  }

  T* tail_of(int64_t m, int64_t position) const {
    const int64_t row = rows ? rows[m / S] : m / S;
    return tail + (row * (tail_size + 1) + position % tail_size) * D;
  }

  // Stores the latest hidden states of each row.
  void write_tail(const Team& team) const {
    team.split(M, 1, [&](int64_t m, int64_t end) {
      for (; m < end; m++) {
        const bool is_kept = positions[m] >= 0 && m % S >= counts[m / S] - tail_size;
        if (is_kept) std::copy(hidden + m * D, hidden + (m + 1) * D, tail_of(m, positions[m]));
      }
    });
    team.barrier();
  }

  // The hidden state of the token before token m; null if there is none.
  const T* before(int64_t m) const {
    if (positions[m] <= 0) return nullptr;
    return m % S ? hidden + (m - 1) * D : tail_of(m, positions[m] - 1);
  }

  void run(const Team& team) const {
    const bool is_short = S <= DELTA_WINDOW;  // as in Block::with_tail
    if (is_short) write_tail(team);
    team.split(M, 1, [&](int64_t m, int64_t end) {
      for (; m < end; m++) {
        T* pair = pairs + m * 2 * D;
        rms_norm_row(embedded + m * D, embedding_norm, pair, D, eps);
        if (const T* state = before(m)) rms_norm_row(state, hidden_norm, pair + D, D, eps);
        else std::fill(pair + D, pair + 2 * D, T(0.0f));
        prepare_input<T>(proj, to_proj, m, 0, proj.groups());
      }
    });
    team.barrier();
    if (!is_short) write_tail(team);
    matmul<T>(team, proj, to_proj, M, nullptr, joined);
    team.barrier();
    block.run(team);
  }
};

}  // namespace fastpath
