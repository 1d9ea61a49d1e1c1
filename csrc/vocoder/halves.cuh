// An fp32 value as two fp16 ones, x = high + low / kLowScale, for the tensor cores. low is what high's rounding lost.
// Scaled, it has high's exponents, so small values keep their 22 bits too. Activations are divided by 64 first: so they
// may reach 4 million, and below 0.004 they are still exact to 2^-30, because low goes on where high cannot.
//
// A row of channels takes 4 bytes a channel, as in fp32. It is blocks of 32 channels: 32 high halves, then 32 low ones.
#pragma once
#include <cuda_fp16.h>

#include <cstdint>

#include "../sizes.h"

namespace qmk {

constexpr float kRange = 64.0f;
constexpr float kMostHalf = 65504.0f;  // of fp16; larger values become this one, because inf times 0 is NaN

// x from -most to most. NaN stays NaN. With fminf and fmaxf it would be -most: noise at full volume, and no error.
__device__ __forceinline__ float clamped(float x, float most) {
  asm("max.NaN.f32 %0, %0, %1;" : "+f"(x) : "f"(-most));
  asm("min.NaN.f32 %0, %0, %1;" : "+f"(x) : "f"(most));
  return x;
}
__device__ __forceinline__ float clamp_half(float x) { return clamped(x, kMostHalf); }

// Of an activation. vocoder_weights.py does the same with weights, but for kRange.
__device__ __forceinline__ void split(float x, __half& high, __half& low) {
  x *= 1.0f / kRange;
  high = __float2half_rn(clamp_half(x));
  low = __float2half_rn(clamp_half((x - __half2float(high)) * kLowScale));
}

// Where a channel's high half lies, in halves from the row's beginning; its low one lies kChannelTile behind.
__device__ __forceinline__ int place_of(int channel) {
  return channel / kChannelTile * 2 * kChannelTile + channel % kChannelTile;
}

__device__ __forceinline__ void store_halves(float* row, int channel, float x) {
  __half* to = reinterpret_cast<__half*>(row) + place_of(channel);
  split(x, to[0], to[kChannelTile]);
}

// Two neighbouring channels: their high halves, their low ones.
__device__ __forceinline__ uint2 split(float2 x) {
  x.x *= 1.0f / kRange, x.y *= 1.0f / kRange;
  const __half2 high = __floats2half2_rn(clamp_half(x.x), clamp_half(x.y));
  const float2 kept = __half22float2(high);
  const __half2 low = __floats2half2_rn(clamp_half((x.x - kept.x) * kLowScale), clamp_half((x.y - kept.y) * kLowScale));
  return make_uint2(*reinterpret_cast<const uint32_t*>(&high), *reinterpret_cast<const uint32_t*>(&low));
}

// Four channels, from a multiple of 4 on: two and two.
__device__ __forceinline__ void store_halves(float* row, int channel, uint2 first, uint2 second) {
  __half* to = reinterpret_cast<__half*>(row) + place_of(channel);
  *reinterpret_cast<uint2*>(to) = make_uint2(first.x, second.x);
  *reinterpret_cast<uint2*>(to + kChannelTile) = make_uint2(first.y, second.y);
}
__device__ __forceinline__ void store_halves(float* row, int channel, float4 x) {
  store_halves(row, channel, split(make_float2(x.x, x.y)), split(make_float2(x.z, x.w)));
}
__device__ __forceinline__ float4 load_halves(const float* row, int channel) {
  const __half* from = reinterpret_cast<const __half*>(row) + place_of(channel);
  const uint2 high = *reinterpret_cast<const uint2*>(from), low = *reinterpret_cast<const uint2*>(from + kChannelTile);
  auto join = [](uint32_t high, uint32_t low) {
    return __half2float(__ushort_as_half(static_cast<unsigned short>(high))) * kRange +
           __half2float(__ushort_as_half(static_cast<unsigned short>(low))) * (kRange / kLowScale);
  };
  return make_float4(join(high.x, low.x), join(high.x >> 16, low.x >> 16), join(high.y, low.y),
                     join(high.y >> 16, low.y >> 16));
}

}  // namespace qmk
