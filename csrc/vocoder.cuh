// What the vocoder's kernels share.
#pragma once
#include <cstdint>

namespace qmk {

// Through L2 into shared memory, 16 bytes; zeros where there is nothing.
__device__ __forceinline__ void copy16(uint32_t shared, const void* global, bool there) {
  const int size = there ? 16 : 0;
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(size) : "memory");
}

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int d = 16; d; d /= 2) x += __shfl_xor_sync(0xffffffffu, x, d);
  return x;
}

}  // namespace qmk
