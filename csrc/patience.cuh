// Bounded waiting: no loop of the kernel can spin for ever.
//
// A wait that outlasts its limit sets the fault word and this block's `quit`; from then on every wait of every block
// returns at once, the launch runs to its end over meaningless numbers and exits normally, so that the CUDA context
// survives and the host can say what happened.
#pragma once
#include "ptx.cuh"

namespace qmk {

struct Patience {
  uint32_t limit;           // polls
  uint32_t* fault;          // global, shared by all blocks
  volatile uint32_t* quit;  // shared by this block

  // Called once per failed poll; true: stop waiting.
  __device__ __forceinline__ bool spent(uint32_t& polls) const {
    if (*quit) return true;
    if ((++polls & 255u) == 0 && (polls >= limit || load_relaxed4(fault))) {
      atomicExch(fault, 1u);
      *quit = 1;
      return true;
    }
    return false;
  }
  __device__ __forceinline__ void wait_barrier(uint32_t bar, uint32_t parity) const {
    uint32_t polls = 0;
    while (!mbarrier_try_wait(bar, parity))
      if (spent(polls)) return;
  }
};

}  // namespace qmk
