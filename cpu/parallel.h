// Threads: all of them work on one operation, divide its work, and wait for each other at barriers.

#pragma once

#include <ATen/ops/empty.h>

#include <algorithm>
#include <utility>

#include "barrier.h"
#include "profile.h"
#include "vectors.h"

// The OpenMP runtime that torch has loaded. Its functions are called directly, without pragmas, so that every compiler
// uses torch's threads: a second pool of threads would compete with them for the processors wherever torch's operations
// alternate with ours. GOMP_parallel calls function(argument) on `threads` threads (flags: 0). Between regions, these
// threads sleep without a time limit; if one of them misses its wake-up, watchdog.py wakes it.
extern "C" {
void GOMP_parallel(void (*function)(void*), void* argument, unsigned threads, unsigned flags);
int omp_get_thread_num();
int omp_get_num_threads();
int omp_get_max_threads();
int omp_in_parallel();
}

namespace fastpath {

constexpr int64_t MIN_PARALLEL_WORK = 1 << 15;  // multiply-adds; with fewer, waking threads costs more than it saves

// The threads of a parallel region, as one of them sees it. All of them call the same functions.
struct Team {
  int thread;   // the number of this thread
  int threads;  // how many there are
  Barrier* meeting_point = nullptr;

  // Divides 0..n among the threads, in multiples of `grain`, and calls work(begin, end) for this thread's share.
  template <class Work>
  void split(int64_t n, int64_t grain, const Work& work) const {
    const int64_t pieces = (n + grain - 1) / grain;
    const int64_t begin = pieces * thread / threads * grain;
    const int64_t end = std::min(n, pieces * (thread + 1) / threads * grain);
    if (begin < end) work(begin, end);
  }

  void barrier() const {  // returns when all threads have arrived
    if (threads == 1) return;
    const bool is_profiled = thread == 0 && profile.is_on && profile.current != NONE;
    const Part part = is_profiled ? profile.begin(WAITING) : NONE;
    meeting_point->wait(threads);
    if (is_profiled) profile.begin(part);
  }

  void begin(Part part) const {  // from here on, the time of thread 0 counts for this part
    if (thread == 0 && profile.is_on) profile.begin(part);
  }
};

// Runs work(team) on all of torch's threads, or on the calling thread alone if `serial`.
template <class Work>
void parallel(bool serial, const Work& work) {
  const int threads = serial || omp_in_parallel() ? 1 : omp_get_max_threads();
  if (threads <= 1) return work(Team{0, 1});
  struct Region {
    const Work& work;
    Barrier barrier;
  };
  Region region{work};
  const auto run = [](void* argument) {
    Region& region = *(Region*)argument;
    const Team team{omp_get_thread_num(), omp_get_num_threads(), &region.barrier};
    region.work(team);
    team.barrier();  // so that no thread waits long at OpenMP's own barrier, at the end of the region
  };
  GOMP_parallel(run, &region, threads, 0);
}

// A bump allocator: it takes arrays from one piece of memory, aligned to 64 bytes. If it starts at a null pointer, it
// only counts bytes.
struct Arena {
  uint8_t* next = nullptr;
  template <class T>
  T* allocate(int64_t n) {
    T* p = reinterpret_cast<T*>(next);
    next += (n * sizeof(T) + 63) / 64 * 64;
    return p;
  }
};

// Calls make(arena) twice: first to count the bytes that it needs, then to allocate from a tensor of that size. Returns
// the result of the second call, and the tensor, which must live as long as the arrays.
template <class Make>
auto allocate_together(const Make& make) {
  Arena counting;
  make(counting);
  const Tensor memory = at::empty({(counting.next - (uint8_t*)nullptr) + 64}, at::kByte);
  Arena arena{memory.data_ptr<uint8_t>()};
  arena.next += -(uintptr_t)arena.next % 64;
  return std::make_pair(make(arena), memory);
}

}  // namespace fastpath
