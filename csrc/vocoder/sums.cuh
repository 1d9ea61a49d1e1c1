// A sum that two kernels must round alike, where the compiler would choose.
#pragma once

namespace qmk {

__device__ __forceinline__ float add_quad(float sum, float4 a, float4 b) {
  return __fadd_rn(sum, fmaf(a.w, b.w, fmaf(a.z, b.z, fmaf(a.x, b.x, __fmul_rn(a.y, b.y)))));
}

}  // namespace qmk
