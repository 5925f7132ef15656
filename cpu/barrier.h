// The barrier at which the threads of a parallel region wait for each other. Knows nothing of torch.

#pragma once

#include <immintrin.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <climits>
#include <ctime>

namespace fastpath {

constexpr int SPINS = 2000;  // iterations of about 25 ns that a thread waits awake for the others
constexpr timespec SLEEP_LIMIT{.tv_sec = 0, .tv_nsec = 5'000'000};  // then a sleeping thread looks again

// A waiting thread spins for some 50 us, which is nearly always enough, and then sleeps: if another program occupies a
// processor, the thread that is late may need this one.
//
// No thread sleeps forever, even if a wake-up is lost, whatever the cause: it looks again after SLEEP_LIMIT. (Once in
// many hundred runs, all threads slept for ever. That was with std::atomic::wait, which has no time limit, and a phase
// stored with memory_order_release: the processor may then read the number of sleepers before others see the new phase,
// so that a thread that falls asleep just then is not woken. Whether it was this is not known.)
class Barrier {
  alignas(64) std::atomic<int> arrived{0};
  alignas(64) std::atomic<int> phase{0};
  std::atomic<int> sleepers{0};  // threads that must be woken when the phase changes

 public:
  void wait(int threads) {
    const int now = phase.load(std::memory_order_acquire);
    if (arrived.fetch_add(1, std::memory_order_acq_rel) + 1 == threads) {
      arrived.store(0, std::memory_order_relaxed);
      return begin_phase(now + 1);
    }
    for (int i = 0; i < SPINS; i++, _mm_pause())
      if (phase.load(std::memory_order_acquire) != now) return;
    sleep_through(now);
  }

 private:
  // All accesses to `phase` and `sleepers` here are in one order that all threads agree on (memory_order_seq_cst).
  // Either the thread that changes the phase sees the sleeper, or the kernel sees the new phase and lets nobody sleep.
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
