// The vocoder: small matrix products, fused with everything around them. A frame is about a hundred launches of one
// CUDA graph. The kernel that makes a layer's input also computes the layer's activation, once per element. The past is
// read in place. The order of every sum is fixed, so the same push gives the same bits.
#include "vocoder.h"

#include <cooperative_groups.h>

#include <algorithm>
#include <utility>

#include "../ptx.cuh"

namespace qmk {
namespace {

// x = high + low. high is x rounded to TF32's 11 bits. low is the exact rest; the tensor core takes its first 11 bits.
__device__ __forceinline__ void split(float x, uint32_t& high, uint32_t& low) {
  high = (__float_as_uint(x) + 0x1000u) & 0xffffe000u;
  low = __float_as_uint(x - __uint_as_float(high));
}

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

__device__ __forceinline__ void mma(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// A kernel may begin while the one before it ends. It fetches weights, then waits here for all results of earlier
// kernels.
__device__ __forceinline__ void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
  // Only now may the next one begin. A chain of waiting kernels would take the room of the one that works.
  asm volatile("griddepcontrol.wait;\n griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

__global__ void __launch_bounds__(128) keep_histories_kernel(const __grid_constant__ Kept p);

// Do the kernels use clusters, and launches that overlap? It depends on what they were compiled for: code of an older
// architecture has neither, whatever the card.
bool has_clusters() {
  cudaFuncAttributes attributes{};
  return cudaFuncGetAttributes(&attributes, keep_histories_kernel) == cudaSuccess && attributes.ptxVersion >= 90;
}

template <class... Parameters, class... Arguments>
cudaError_t launch_after(void (*kernel)(Parameters...), dim3 grid, int threads, int shared, cudaStream_t stream,
                         int cluster, Arguments&&... arguments) {
  cudaLaunchAttribute attributes[2] = {};
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = threads;
  config.dynamicSmemBytes = shared;
  config.stream = stream;
  config.attrs = attributes;
  if (has_clusters()) {
    attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[0].val.programmaticStreamSerializationAllowed = 1;
    attributes[1].id = cudaLaunchAttributeClusterDimension;
    attributes[1].val.clusterDim = {1, 1, static_cast<unsigned>(cluster)};
    config.numAttrs = cluster > 1 ? 2 : 1;
  }
  return cudaLaunchKernelEx(&config, kernel, std::forward<Arguments>(arguments)...);
}

constexpr int kDepth = kChannelTile;  // of a step along the sum
constexpr int kParts = 8;             // of a sum, at most: what a cluster may hold anywhere

template <int M, int N>
struct Shape {
  static constexpr int kStages = M * N <= 1024 ? 6 : M * N <= 2048 ? 4 : 3;  // in flight: small tiles wait longest
  static constexpr int kPitchA = kDepth + 4, kPitchB = N + 8;                // no two of a fragment's words in one bank
  static constexpr int kStageFloats = M * kPitchA + kDepth * kPitchB;
  static constexpr int kBytes = kStages * kStageFloats * 4;
};

// One tile [M rows][N columns] of a convolution. Its sum may be cut into gridDim.z parts, one for each block of a
// cluster. Each block then adds up its share of the tile, always in the same order. Warps lie WM x WN.
template <int M, int N, int WM, int WN, bool Exact>
__global__ void __launch_bounds__(32 * (M / WM) * (N / WN)) convolve_kernel(const Convolution p) {
  using S = Shape<M, N>;
  constexpr int kStages = S::kStages;
  constexpr int kThreads = 32 * (M / WM) * (N / WN);
  constexpr int kTilesM = WM / 16, kTilesN = WN / 8;
  constexpr int kChunksA = M * (kDepth / 4), kChunksB = kDepth * (N / 4);
  constexpr int kMineA = (kChunksA + kThreads - 1) / kThreads, kMineB = (kChunksB + kThreads - 1) / kThreads;
  extern __shared__ __align__(16) float shared[];
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
  const int total = p.in.sequences * p.in.rows, first_row = blockIdx.y * M, first_column = blockIdx.x * N;
  const int blocks_per_tap = p.in.channels / kDepth, steps = p.taps * blocks_per_tap;
  const int begin = static_cast<int>(static_cast<int64_t>(steps) * blockIdx.z / gridDim.z);
  const int end = static_cast<int>(static_cast<int64_t>(steps) * (blockIdx.z + 1) / gridDim.z);

  // What this thread copies of B, and where the next step of it lies.
  int to_b[kMineB], from_b[kMineB];
#pragma unroll
  for (int i = 0; i < kMineB; ++i) {
    const int chunk = thread + i * kThreads, row = chunk / (N / 4), column = chunk % (N / 4) * 4;
    to_b[i] = M * S::kPitchA + row * S::kPitchB + column;
    from_b[i] = row * p.columns + column;
  }
  const float* weight = p.weight + static_cast<int64_t>(begin) * kDepth * p.columns + first_column;
  auto load_weights = [&](int stage) {
#pragma unroll
    for (int i = 0; i < kMineB; ++i)
      if (kChunksB % kThreads == 0 || thread + i * kThreads < kChunksB)
        copy16(shared_address(shared + stage * S::kStageFloats + to_b[i]), weight + from_b[i], true);
    weight += static_cast<int64_t>(kDepth) * p.columns;
  };
#pragma unroll
  for (int s = 0; s < kStages - 1; ++s)
    if (begin + s < end) load_weights(s);
  wait_for_previous();

  // What this thread copies of A: its rows stay the same all along.
  const float* fresh[kMineA];
  const float* past[kMineA];
  int time[kMineA];
#pragma unroll
  for (int i = 0; i < kMineA; ++i) {
    const int chunk = thread + i * kThreads, row = first_row + chunk / (kDepth / 4);
    const bool there = chunk < kChunksA && row < total;
    const int sequence = there ? row / p.in.rows : 0;
    time[i] = there ? row - sequence * p.in.rows : -(1 << 28);
    const int column = chunk % (kDepth / 4) * 4;
    fresh[i] = p.in.fresh + static_cast<int64_t>(sequence) * p.in.rows * p.in.channels + column;
    past[i] = p.in.kept ? p.in.past + p.in.slots[sequence] * p.in.stride + column : p.in.fresh;
  }
  int channel = begin % blocks_per_tap * kDepth, shift = begin / blocks_per_tap * p.dilation - p.in.kept;
  auto load_history = [&](int stage) {
#pragma unroll
    for (int i = 0; i < kMineA; ++i) {
      const int chunk = thread + i * kThreads;
      if (kChunksA % kThreads == 0 || chunk < kChunksA) {
        const int t = time[i] + shift;
        const bool there = time[i] >= 0;
        const float* from =
            t >= 0 ? fresh[i] + t * p.in.channels : past[i] + (there ? t + p.in.kept : 0) * p.in.channels;
        copy16(shared_address(shared + stage * S::kStageFloats + chunk / (kDepth / 4) * S::kPitchA +
                              chunk % (kDepth / 4) * 4),
               from + channel, there);
      }
    }
    if (channel += kDepth; channel == p.in.channels) channel = 0, shift += p.dilation;
  };

  float sum[kTilesM][kTilesN][4] = {};
  const int warp_row = warp / (N / WN) * WM, warp_column = warp % (N / WN) * WN;
  const int g = lane / 4, q = lane % 4;
#pragma unroll
  for (int s = 0; s < kStages - 1; ++s) {
    if (begin + s < end) load_history(s);
    asm volatile("cp.async.commit_group;" ::: "memory");  // the first one holds all the weights fetched so far
  }
  // Tensor cores truncate their sums. So they only add within a step; the sum over steps is rounded. Where a warp has
  // few tiles, each of a tile's three products has its own sum, so that none waits for another.
  constexpr int kSums = Exact && kTilesM * kTilesN <= 4 ? 3 : 1;
  int stage = 0, ahead = kStages - 1;
  for (int step = begin; step < end; ++step) {
    asm volatile("cp.async.wait_group %0;" ::"n"(kStages - 2) : "memory");
    __syncthreads();
    if (step + kStages - 1 < end) {
      load_weights(ahead);
      load_history(ahead);
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
    const float* a = shared + stage * S::kStageFloats + warp_row * S::kPitchA;
    const float* b = shared + stage * S::kStageFloats + M * S::kPitchA + warp_column;
    stage = stage + 1 == kStages ? 0 : stage + 1;
    ahead = ahead + 1 == kStages ? 0 : ahead + 1;
    float part[kSums][kTilesM][kTilesN][4] = {};
#pragma unroll
    for (int k = 0; k < kDepth; k += 8) {
      uint32_t high_b[kTilesN][2], low_b[kTilesN][2];
#pragma unroll
      for (int n = 0; n < kTilesN; ++n)
#pragma unroll
        for (int i = 0; i < 2; ++i) split(b[(k + q + 4 * i) * S::kPitchB + n * 8 + g], high_b[n][i], low_b[n][i]);
#pragma unroll
      for (int m = 0; m < kTilesM; ++m) {
        uint32_t high[4], low[4];
#pragma unroll
        for (int i = 0; i < 4; ++i)
          split(a[(m * 16 + g + 8 * (i % 2)) * S::kPitchA + k + q + 4 * (i / 2)], high[i], low[i]);
#pragma unroll
        for (int n = 0; n < kTilesN; ++n) {
          if constexpr (Exact) {
            mma(part[kSums - 1][m][n], low, high_b[n]);
            mma(part[kSums / 2][m][n], high, low_b[n]);
          }
          mma(part[0][m][n], high, high_b[n]);
        }
      }
    }
#pragma unroll
    for (int m = 0; m < kTilesM; ++m)
#pragma unroll
      for (int n = 0; n < kTilesN; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          if constexpr (kSums == 3) part[0][m][n][i] += part[1][m][n][i] + part[2][m][n][i];
          sum[m][n][i] += part[0][m][n][i];
        }
  }

  // Through shared memory: rows in one piece, and little code.
  constexpr int kPitch = N + 8;
  static_assert(M * kPitch <= kStages * S::kStageFloats);
  asm volatile("cp.async.wait_group 0;" ::: "memory");
  __syncthreads();
#pragma unroll
  for (int m = 0; m < kTilesM; ++m)
#pragma unroll
    for (int n = 0; n < kTilesN; ++n)
#pragma unroll
      for (int half = 0; half < 2; ++half)
        *reinterpret_cast<float2*>(shared + (warp_row + m * 16 + g + 8 * half) * kPitch + warp_column + n * 8 + 2 * q) =
            make_float2(sum[m][n][2 * half], sum[m][n][2 * half + 1]);
  const int parts = gridDim.z, part = blockIdx.z;
  const float* others[kParts];
#if __CUDA_ARCH__ >= 900
  const auto cluster = cooperative_groups::this_cluster();
  if (parts > 1) cluster.sync();
  else __syncthreads();
#pragma unroll
  for (int z = 0; z < kParts; ++z) others[z] = parts > 1 && z < parts ? cluster.map_shared_rank(shared, z) : shared;
#else
  __syncthreads();
  others[0] = shared;
#endif
  const int items = min(M, total - first_row) * (N / 4), stride = kThreads * parts;
  // Everything is read before anything is written: the compiler must assume that they overlap.
  constexpr int kTogether = 4;
#pragma unroll 1
  for (int first = thread + part * kThreads; first < items; first += kTogether * stride) {
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
        if (z < parts) {
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
      if (p.activation == Activation::kSnake) {
        const int channel = column % p.channels_out;
        const float4 f = __ldg(reinterpret_cast<const float4*>(p.frequency + channel)),
                     s = __ldg(reinterpret_cast<const float4*>(p.scale + channel));
        v[i].x += s.x * sine_squared(v[i].x * f.x);
        v[i].y += s.y * sine_squared(v[i].y * f.y);
        v[i].z += s.z * sine_squared(v[i].z * f.z);
        v[i].w += s.w * sine_squared(v[i].w * f.w);
      } else if (p.activation == Activation::kGelu) {
        v[i].x *= 0.5f * (1.0f + erff(v[i].x * 0.70710678118654752f));
        v[i].y *= 0.5f * (1.0f + erff(v[i].y * 0.70710678118654752f));
        v[i].z *= 0.5f * (1.0f + erff(v[i].z * 0.70710678118654752f));
        v[i].w *= 0.5f * (1.0f + erff(v[i].w * 0.70710678118654752f));
      }
      *reinterpret_cast<float4*>(p.activated + at) = v[i];
    }
  }
#if __CUDA_ARCH__ >= 900
  if (parts > 1) cluster.sync();  // nobody leaves while others read its shared memory
#endif
}

// A way to cut a result into tiles [m][n] and their sums into parts, and its time by a model fitted to an H200.
struct Cut {
  int m, n;
  float step_us;  // of one block that has its multiprocessor for itself
  int tiles = 0, parts = 1;
  float us = INFINITY;
};

Cut best_of(Cut cut, const Convolution& p, int processors, bool clusters) {
  const int steps = p.taps * (p.in.channels / kDepth);
  cut.tiles = (p.in.sequences * p.in.rows + cut.m - 1) / cut.m * (p.columns / cut.n);
  if (p.columns % cut.n) return cut;
  for (int parts = 1; parts <= (clusters ? kParts : 1) && 2 * parts <= std::max(steps, 2); parts *= 2) {
    const int waves = (cut.tiles * parts + processors - 1) / processors, per_part = (steps + parts - 1) / parts;
    const float sharing = parts > 1 ? 0.8f + 0.1f * parts : 0.0f,
                end = 0.9f * ((cut.m * cut.n + 2048 * parts - 1) / (2048 * parts));
    const float us = (per_part * cut.step_us + end) * (1.0f + 0.75f * (waves - 1)) + sharing;
    if (us < cut.us) cut.us = us, cut.parts = parts;
  }
  return cut;
}

template <int M, int N, int WM, int WN, bool Exact>
cudaError_t launch(const Convolution& p, int parts, cudaStream_t stream) {
  const auto kernel = convolve_kernel<M, N, WM, WN, Exact>;
  constexpr int kBytes = Shape<M, N>::kBytes;
  if (kBytes > 48 * 1024) {
    const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
    if (error != cudaSuccess) return error;
  }
  const dim3 grid(p.columns / N, (p.in.sequences * p.in.rows + M - 1) / M, parts);
  return launch_after(kernel, grid, 32 * (M / WM) * (N / WN), kBytes, stream, parts, p);
}

template <bool Exact>
cudaError_t choose(const Convolution& p, cudaStream_t stream) {
  int device = 0, processors = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
  const bool clusters = has_clusters();
  Cut best{32, 32, 0.41f};
  for (const Cut& cut : {Cut{16, 64, 0.42f}, Cut{32, 32, 0.41f}, Cut{32, 64, 0.60f}, Cut{64, 32, 0.74f},
                         Cut{64, 64, 0.90f}, Cut{64, 96, 1.30f}})
    if (const Cut fitted = best_of(cut, p, processors, clusters); fitted.us < best.us) best = fitted;
  switch (best.m * 1000 + best.n) {
    case 16064: return launch<16, 64, 16, 16, Exact>(p, best.parts, stream);
    case 32064: return launch<32, 64, 16, 32, Exact>(p, best.parts, stream);
    case 64032: return launch<64, 32, 32, 16, Exact>(p, best.parts, stream);
    case 64064: return launch<64, 64, 32, 32, Exact>(p, best.parts, stream);
    case 64096: return launch<64, 96, 32, 48, Exact>(p, best.parts, stream);
    default: return launch<32, 32, 16, 16, Exact>(p, best.parts, stream);
  }
}

// ---------------------------------------------------------------- the rest

__device__ __forceinline__ const float* history_row(const History& h, int sequence, int t) {
  return t >= 0 ? h.fresh + (static_cast<int64_t>(sequence) * h.rows + t) * h.channels
                : h.past + h.slots[sequence] * h.stride + static_cast<int64_t>(h.kept + t) * h.channels;
}

__device__ __forceinline__ float block_sum(float x, float (&room)[32]) {
  x = warp_sum(x);
  __syncthreads();
  if (threadIdx.x % 32 == 0) room[threadIdx.x / 32] = x;
  __syncthreads();
  return warp_sum(threadIdx.x % 32 < blockDim.x / 32 ? room[threadIdx.x % 32] : 0.0f);
}

// A block a row, a thread a channel.
__global__ void __launch_bounds__(kWidestNorm)
    depthwise_norm_kernel(const History in, const float* weight, const float* bias, const float* gain,
                          const float* shift, float eps, float* out) {
  __shared__ float room[32];
  const int sequence = blockIdx.x / in.rows, t = blockIdx.x % in.rows, channels = in.channels, c = threadIdx.x;
  const bool there = c < channels;
  float w[7], y = 0.0f;
#pragma unroll
  for (int tap = 0; tap < 7; ++tap) w[tap] = there ? weight[tap * channels + c] : 0.0f;
  wait_for_previous();
  if (there) {
    y = bias[c];
#pragma unroll
    for (int tap = 0; tap < 7; ++tap) y += w[tap] * history_row(in, sequence, t + tap - 6)[c];
  }
  const float mean = block_sum(there ? y : 0.0f, room) / channels, off = there ? y - mean : 0.0f;
  const float factor = rsqrtf(block_sum(off * off, room) / channels + eps);
  if (there) out[static_cast<int64_t>(blockIdx.x) * channels + c] = off * factor * gain[c] + shift[c];
}

// Eight lanes an output sample, 32 samples a block, which leave it in one piece: they may go to the host.
__global__ void __launch_bounds__(256)
    convolve_to_sound_kernel(const History in, const float* weight, const float* bias, float* const* out) {
  wait_for_previous();
  __shared__ float sound[32];
  float* const to = *out;
  const int sample = (blockIdx.x * 256 + threadIdx.x) / 8, lane = threadIdx.x % 8;
  const bool there = sample < in.sequences * in.rows;
  const int sequence = there ? sample / in.rows : 0, t = there ? sample % in.rows : 0;
  float sum = 0.0f;
#pragma unroll
  for (int tap = 0; tap < 7; ++tap) {
    const float* row = history_row(in, sequence, t + tap - 6);
    for (int c = lane * 4; c < in.channels; c += 32) {
      const float4 x = *reinterpret_cast<const float4*>(row + c),
                   w = *reinterpret_cast<const float4*>(weight + tap * in.channels + c);
      sum += x.x * w.x + x.y * w.y + x.z * w.z + x.w * w.w;
    }
  }
#pragma unroll
  for (int d = 4; d; d /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, d);
  if (lane == 0) sound[threadIdx.x / 8] = fminf(1.0f, fmaxf(-1.0f, sum + bias[0]));
  __syncthreads();
  const int mine = blockIdx.x * 32 + threadIdx.x;
  if (threadIdx.x < 32 && mine < in.sequences * in.rows) to[mine] = sound[threadIdx.x];
}

__global__ void __launch_bounds__(128) keep_histories_kernel(const __grid_constant__ Kept p) {
  wait_for_previous();
  const auto& h = p.of[blockIdx.x];
  const int sequence = blockIdx.z, slot = p.slots[sequence], c = blockIdx.y * 128 + threadIdx.x;
  if (blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0) p.position[slot] += p.positions;
  if (c >= h.channels) return;
  float* past = h.past + static_cast<int64_t>(slot) * h.stride + c;
  const float* fresh = h.fresh + static_cast<int64_t>(sequence) * h.rows * h.channels + c;
  constexpr int kTogether = 6;  // read before they are written: what is read lies behind what is written
  for (int first = 0; first < h.kept; first += kTogether) {
    float x[kTogether];
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      const int from = first + i + h.rows;
      if (first + i < h.kept)
        x[i] = from < h.kept ? past[static_cast<int64_t>(from) * h.channels]
                             : fresh[static_cast<int64_t>(from - h.kept) * h.channels];
    }
#pragma unroll
    for (int i = 0; i < kTogether; ++i)
      if (first + i < h.kept) past[static_cast<int64_t>(first + i) * h.channels] = x[i];
  }
}

// A block a frame: the sum of its codes' vectors.
__global__ void __launch_bounds__(512) begin_push_kernel(const __grid_constant__ Push p, const PushInputs inputs) {
  const int row = blockIdx.x, sequence = row / p.frames, frame = row % p.frames;
  if (row == 0 && threadIdx.x < p.sequences) inputs.slots[threadIdx.x] = p.slot[threadIdx.x];
  if (row == 0 && threadIdx.x == 0) *inputs.sound = p.sound;
  const int* codes =
      p.recent ? p.recent + (p.slot[sequence] * kRecentFrames + (p.first[sequence] + frame) % kRecentFrames) * kGroups
               : p.codes + row * kGroups;
  for (int c = threadIdx.x; c < inputs.channels; c += blockDim.x) {
    float sum = 0.0f;
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      const int code = max(0, min(inputs.size - 1, codes[group]));
      sum += inputs.table[(static_cast<int64_t>(group) * inputs.size + code) * inputs.channels + c];
    }
    inputs.embedding[static_cast<int64_t>(row) * inputs.channels + c] = sum;
  }
}

}  // namespace

cudaError_t begin_push(const Push& p, const PushInputs& inputs, cudaStream_t stream) {
  if (p.sequences > kPushSequences || p.sequences * p.frames > kPushRows) return cudaErrorInvalidValue;
  begin_push_kernel<<<p.sequences * p.frames, 512, 0, stream>>>(p, inputs);
  return cudaGetLastError();
}

cudaError_t convolve(const Convolution& p, cudaStream_t stream) {
  return p.exact ? choose<true>(p, stream) : choose<false>(p, stream);
}

cudaError_t depthwise_norm(const History& in, const float* weight, const float* bias, const float* gain,
                           const float* shift, float eps, float* out, cudaStream_t stream) {
  if (in.channels > kWidestNorm || in.kept != 6) return cudaErrorInvalidValue;
  return launch_after(depthwise_norm_kernel, dim3(in.sequences * in.rows), (in.channels + 31) / 32 * 32, 0, stream, 1,
                      in, weight, bias, gain, shift, eps, out);
}

cudaError_t convolve_to_sound(const History& in, const float* weight, const float* bias, float* const* out,
                              cudaStream_t stream) {
  if (in.kept != 6) return cudaErrorInvalidValue;
  return launch_after(convolve_to_sound_kernel, dim3((in.sequences * in.rows * 8 + 255) / 256), 256, 0, stream, 1, in,
                      weight, bias, out);
}

cudaError_t keep_histories(const Kept& p, cudaStream_t stream) {
  return launch_after(keep_histories_kernel, dim3(p.count, (p.widest + 127) / 128, p.sequences), 128, 0, stream, 1, p);
}

}  // namespace qmk
