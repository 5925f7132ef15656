// Where the time of a pass goes: nanoseconds of thread 0 in each part of the work. benchmarks/life.py turns it on. When
// it is off, each part and each barrier reads one flag.

#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <utility>

namespace fastpath {

// NONE: outside of the operations that are profiled, `blocks` and `head_logits`. ATTENTION includes QK-norm and RoPE, UP
// the activation. WAITING is at barriers: with several threads, a part has finished when the slowest thread has.
enum Part { NONE, NORM, QKV, ATTENTION, RECURRENT, OUT, UP, DOWN, EXPERTS, SHADOW, HEAD, WAITING, PARTS };
constexpr const char* PART_NAMES = "none norm qkv attention recurrent out up down experts shadow head waiting";

struct Profile {
  bool is_on = false;
  Part current = NONE;
  int64_t since = 0;  // when it began
  std::array<int64_t, PARTS> spent{};

  // Begins a part, and returns the one that ends.
  Part begin(Part next) {
    using namespace std::chrono;
    const int64_t now = duration_cast<nanoseconds>(steady_clock::now().time_since_epoch()).count();
    spent[current] += now - since;
    since = now;
    return std::exchange(current, next);
  }
};

inline Profile profile;  // of thread 0; only one operation runs at a time

}  // namespace fastpath
