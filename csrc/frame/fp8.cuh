// E4M3 weights on their way into the tensor cores, which multiply them as bf16.
#pragma once
#include "../ptx.cuh"

namespace qmk {

// Four E4M3 bytes as pairs of bf16, exactly: bytes 1 and 3, then 0 and 2 (backend/pack.py packs them like that). Sign,
// exponent and mantissa go where bf16 has its own. bf16's exponent counts from 120 further down; a product by 2^120
// makes up for it. That holds for E4M3's subnormals too, which are subnormal before it. No FP8 instructions are needed.
__device__ __forceinline__ uint2 widen_e4m3(uint32_t four) {
  constexpr uint32_t kSigns = 0x80008000, kRest = 0x07F007F0, kTo120 = 0x7B807B80;  // 2^120, twice
  return make_uint2(multiply_bf16x2((four & kSigns) | (four >> 4 & kRest), kTo120),
                    multiply_bf16x2((four << 8 & kSigns) | (four << 4 & kRest), kTo120));
}

// Eight of them: the fragment of one unit.
__device__ __forceinline__ uint4 widen_e4m3(uint32_t a, uint32_t b) {
  const uint2 first = widen_e4m3(a), second = widen_e4m3(b);
  return make_uint4(first.x, first.y, second.x, second.y);
}

}  // namespace qmk
