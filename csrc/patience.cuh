// Bounded waiting: no loop of the kernel can spin for ever.
//
// A wait that outlasts its limit sets the fault word and makes every later wait of its thread short; the launch then
// runs to its end over meaningless numbers and exits normally, so that the CUDA context survives and the host can say
// what happened.
#pragma once
#include "ptx.cuh"

namespace qmk {

struct Patience {
  uint32_t limit;            // polls
  volatile uint32_t* fault;  // in host memory, shared by all blocks

  // Called once per failed poll; true: stop waiting.
  __device__ __forceinline__ bool spent(uint32_t& polls) {
    if (++polls < limit) return false;
    *fault = 1;
    limit = 64;
    return true;
  }
  __device__ __forceinline__ void wait_barrier(uint32_t bar, uint32_t parity) {
    uint32_t polls = 0;
    while (!mbarrier_try_wait(bar, parity))
      if (spent(polls)) return;
  }
};

}  // namespace qmk
