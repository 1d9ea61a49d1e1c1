// Bounded waiting: no loop of the kernel can spin for ever.
//
// A wait that outlasts its limit makes every later wait of its thread short. The launch then runs to its end over
// meaningless numbers, sets the fault word and exits normally. So the CUDA context survives, and the host can say what
// happened.
#pragma once
#include "ptx.cuh"

namespace qmk {

struct Patience {
  static constexpr uint32_t kSpent = 64;  // polls of a thread that has given up once

  uint32_t limit;            // polls
  volatile uint32_t* fault;  // in host memory, shared by all blocks

  __device__ __forceinline__ Patience(uint32_t polls, uint32_t* word) : limit(max(polls, kSpent + 1)), fault(word) {}

  // Called once per failed poll; true: stop waiting.
  __device__ __forceinline__ bool spent(uint32_t& polls) {
    if (++polls < limit) return false;
    limit = kSpent;
    return true;
  }
  // Called where a thread's work ends: told once, so that no wait carries code for it.
  __device__ __forceinline__ void report() const {
    if (limit == kSpent) *fault = 1;
  }
  __device__ __forceinline__ void wait_barrier(uint32_t bar, uint32_t parity) {
    uint32_t polls = 0;
    while (!mbarrier_try_wait(bar, parity))
      if (spent(polls)) return;
  }
};

}  // namespace qmk
