// What the convolutions' two kernels have in common: the steps of a sum, and what happens to a tile behind it.
#pragma once
#include <cooperative_groups.h>

#include "../ptx.cuh"
#include "halves.cuh"
#include "vocoder.h"

namespace qmk {

constexpr int kDepth = kChannelTile;  // of a step along the sum
constexpr int kParts = 8;             // of a sum, at most: what a cluster may hold anywhere

// sin(x)^2, within 2e-7: reduced by multiples of pi, then a polynomial. sinf also reduces large angles. Inlined for
// every element, that is more code than the instruction cache holds.
__device__ __forceinline__ float sine_squared(float x) {
  const float k = rintf(x * 0.318309886f);
  float r = fmaf(k, -3.140625f, x);
  r = fmaf(k, -9.67502594e-4f, r);
  r = fmaf(k, -1.509957991e-7f, r);
  const float q = r * r;
  float p = fmaf(q, -2.3889859e-8f, 2.7525562e-6f);
  p = fmaf(p, q, -1.98408740e-4f);
  p = fmaf(p, q, 8.3333310e-3f);
  p = fmaf(p, q, -1.66666667e-1f);
  const float sine = fmaf(p * q, r, r);
  return sine * sine;
}
__device__ __forceinline__ float snake(float x, float frequency, float scale) {
  return fmaf(scale, sine_squared(x * frequency), x);
}

// Where a thread finds a row of the input, and its time in its sequence. Without a past, all rows are one history.
struct InputRow {
  const float *fresh, *past;  // of the sequence
  int time;
};
__device__ __forceinline__ InputRow find_row(const History& in, int row) {
  int slot = 0, begin = 0;
  if (in.kept) slot = in.frames->of[row / in.rows].slot, begin = in.frames->of[row / in.rows].begin * in.rows;
  return {in.fresh + static_cast<int64_t>(begin) * in.channels, in.kept ? in.past + slot * in.stride : in.fresh,
          row - begin};
}

// What SnakeBeta needs of four channels.
struct Snakes {
  float4 frequency, scale;
};
__device__ __forceinline__ Snakes snakes_of(const Convolution& p, int channel) {
  return {__ldg(reinterpret_cast<const float4*>(p.frequency + channel)),
          __ldg(reinterpret_cast<const float4*>(p.scale + channel))};
}
__device__ __forceinline__ void snake(float4& x, const Snakes& s) {
  x.x = snake(x.x, s.frequency.x, s.scale.x), x.y = snake(x.y, s.frequency.y, s.scale.y);
  x.z = snake(x.z, s.frequency.z, s.scale.z), x.w = snake(x.w, s.frequency.w, s.scale.w);
}
__device__ __forceinline__ void gelu(float4& x) {
  x.x *= 0.5f * (1.0f + erff(x.x * 0.70710678118654752f)), x.y *= 0.5f * (1.0f + erff(x.y * 0.70710678118654752f));
  x.z *= 0.5f * (1.0f + erff(x.z * 0.70710678118654752f)), x.w *= 0.5f * (1.0f + erff(x.w * 0.70710678118654752f));
}

// The end of a tile, whose sums lie in shared memory: [rows][pitch]. The blocks of a cluster of `spread` each have
// those of a part, and each block finishes its share of the tile.
template <int N, int kPitch, int kThreads>
__device__ __forceinline__ void finish_tile(const Convolution& p, float* shared, int spread, int rank, int rows,
                                            int first_row, int first_column) {
  const int thread = threadIdx.x;
  const float* others[kParts];
#if __CUDA_ARCH__ >= 900
  const auto cluster = cooperative_groups::this_cluster();
  if (spread > 1) cluster.sync();
  else __syncthreads();
#pragma unroll
  for (int z = 0; z < kParts; ++z) others[z] = spread > 1 && z < spread ? cluster.map_shared_rank(shared, z) : shared;
#else
  __syncthreads();
  others[0] = shared;
#endif
  const int items = rows * (N / 4), stride = kThreads * spread;
  // Everything is read before anything is written: the compiler must assume that they overlap.
  constexpr int kTogether = 4;
#pragma unroll 1
  for (int first = thread + rank * kThreads; first < items; first += kTogether * stride) {
    float4 v[kTogether], r[kTogether];
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      const int item = min(first + i * stride, items - 1), row = item / (N / 4), in_tile = item % (N / 4) * 4;
      const int at = row * kPitch + in_tile, column = first_column + in_tile;
      v[i] = __ldg(reinterpret_cast<const float4*>(p.bias + column));
      r[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      if (p.residual)
        r[i] =
            *reinterpret_cast<const float4*>(p.residual + static_cast<int64_t>(first_row + row) * p.columns + column);
      float4 sum = *reinterpret_cast<const float4*>(others[0] + at);
#if __CUDA_ARCH__ >= 900
#pragma unroll
      for (int z = 1; z < kParts; ++z)
        if (z < spread) {
          const float4 x = *reinterpret_cast<const float4*>(others[z] + at);
          sum.x += x.x, sum.y += x.y, sum.z += x.z, sum.w += x.w;
        }
#endif
      v[i].x += sum.x, v[i].y += sum.y, v[i].z += sum.z, v[i].w += sum.w;
    }
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      const int item = first + i * stride;
      if (item >= items) break;
      const int column = first_column + item % (N / 4) * 4;
      const int64_t at = static_cast<int64_t>(first_row + item / (N / 4)) * p.columns + column;
      v[i].x += r[i].x, v[i].y += r[i].y, v[i].z += r[i].z, v[i].w += r[i].w;
      if (p.out) *reinterpret_cast<float4*>(p.out + at) = v[i];
      if (!p.activated) continue;
      if (p.activation == Activation::kSnake) snake(v[i], snakes_of(p, column % p.channels_out));
      else if (p.activation == Activation::kGelu) gelu(v[i]);
      store_halves(p.activated + (at - column), column, v[i]);
    }
  }
#if __CUDA_ARCH__ >= 900
  if (spread > 1) cluster.sync();  // nobody leaves while others read its shared memory
#endif
}

}  // namespace qmk
