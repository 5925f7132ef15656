// The barrier at which the threads of a parallel region wait for each other. It knows nothing of torch.

#pragma once

#include <immintrin.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <climits>
#include <ctime>

namespace fastpath {

constexpr int SPINS = 2000;  // how often a thread looks, every 25 ns or so, before it sleeps
constexpr timespec SLEEP_LIMIT{.tv_sec = 0, .tv_nsec = 5'000'000};  // then a sleeping thread looks again

// A waiting thread spins for some 50 us, which is nearly always enough, and then sleeps: if another program occupies a
// processor, the thread that is late may need this one.
//
// Even if a wake-up is lost, no thread sleeps forever: it looks again after SLEEP_LIMIT. (An earlier barrier used
// std::atomic::wait, which has no time limit, and once in many hundred runs all threads slept forever. It stored the
// phase with memory_order_release. The processor may then read the number of sleepers before others see the new phase,
// and does not wake a thread that falls asleep just then. Whether this was the cause is not known.)
class Barrier {
  alignas(64) std::atomic<int> arrived{0};  // threads that have arrived in this phase
  alignas(64) std::atomic<int> phase{0};    // the last thread to arrive begins the next phase
  std::atomic<int> sleepers{0};             // threads that must be woken when the phase changes

 public:
  void wait(int threads) {
    const int now = phase.load(std::memory_order_acquire);
    if (arrived.fetch_add(1, std::memory_order_acq_rel) + 1 == threads) {
      arrived.store(0, std::memory_order_relaxed);
      return begin_phase(now + 1);
    }
    for (int i = 0; i < SPINS; i++) {
      if (phase.load(std::memory_order_acquire) != now) return;
      _mm_pause();
    }
    sleep_through(now);
  }

 private:
  // All threads see the accesses to `phase` and `sleepers` here in the same order (memory_order_seq_cst). So either the
  // thread that changes the phase sees the sleeper, or Linux sees the new phase and does not let the thread sleep.
  void begin_phase(int next) {
    phase.store(next);
    if (sleepers.load() > 0) wake_sleepers();
  }

  void wake_sleepers() { syscall(SYS_futex, &phase, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0); }

  void sleep_through(int now) {
    sleepers.fetch_add(1);
    while (phase.load() == now) syscall(SYS_futex, &phase, FUTEX_WAIT_PRIVATE, now, &SLEEP_LIMIT, nullptr, 0);
    sleepers.fetch_sub(1);
  }
};

}  // namespace fastpath
