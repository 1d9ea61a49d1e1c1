// What stands between the vocoder's matrix products: a push's inputs, depthwise convolutions with their norm, the last
// convolution, and what becomes the past.
#include <algorithm>

#include "../ptx.cuh"
#include "halves.cuh"
#include "launch.cuh"
#include "sums.cuh"
#include "vocoder.h"

namespace qmk {
namespace {

// The row `back` rows before a row of the push.
__device__ __forceinline__ const float* history_row(const History& h, int row, int back) {
  const auto [slot, begin] = h.frames->of[row / h.rows];
  const int t = row - back - begin * h.rows;
  return t >= 0 ? h.fresh + static_cast<int64_t>(row - back) * h.channels
                : h.past + slot * h.stride + static_cast<int64_t>(h.kept + t) * h.channels;
}

__device__ __forceinline__ float block_sum(float x, float (&room)[32]) {
  x = warp_sum(x);
  __syncthreads();
  if (threadIdx.x % 32 == 0) room[threadIdx.x / 32] = x;
  __syncthreads();
  return warp_sum(threadIdx.x % 32 < blockDim.x / 32 ? room[threadIdx.x % 32] : 0.0f);
}

// A block a row, a thread a channel. The row goes on as halves, because a product reads it.
__global__ void __launch_bounds__(kWidestNorm)
    depthwise_norm_kernel(const History in, const float* weight, const float* bias, const float* gain,
                          const float* shift, float eps, float* out) {
  __shared__ float room[32];
  const int row = blockIdx.x, channels = in.channels, c = threadIdx.x;
  const bool there = c < channels;
  float w[7], y = 0.0f;
#pragma unroll
  for (int tap = 0; tap < 7; ++tap) w[tap] = there ? weight[tap * channels + c] : 0.0f;
  wait_for_previous();
  if (row >= in.frames->count * in.rows) return;
  if (there) {
    y = bias[c];
#pragma unroll
    for (int tap = 0; tap < 7; ++tap) y += w[tap] * history_row(in, row, 6 - tap)[c];
  }
  const float mean = block_sum(there ? y : 0.0f, room) / channels, off = there ? y - mean : 0.0f;
  const float factor = rsqrtf(block_sum(off * off, room) / channels + eps);
  if (there) store_halves(out + static_cast<int64_t>(row) * channels, c, off * factor * gain[c] + shift[c]);
}

// Eight lanes an output sample, 32 samples a block, which leave it in one piece: they may go to the host.
__global__ void __launch_bounds__(256)
    convolve_to_sound_kernel(const History in, const float* weight, const float* bias, float* const* out) {
  wait_for_previous();
  __shared__ float sound[32];
  float* const to = *out;
  const int sample = (blockIdx.x * 256 + threadIdx.x) / 8, lane = threadIdx.x % 8;
  const int samples = in.frames->count * in.rows, there = min(sample, samples - 1);
  float sum = 0.0f;
#pragma unroll
  for (int tap = 0; tap < 7; ++tap) {
    const float* row = history_row(in, there, 6 - tap);
    for (int c = lane * 4; c < in.channels; c += 32) {
      const float4 x = load_halves(row, c), w = *reinterpret_cast<const float4*>(weight + tap * in.channels + c);
      sum = add_quad(sum, x, w);
    }
  }
#pragma unroll
  for (int d = 4; d; d /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, d);
  if (lane == 0) sound[threadIdx.x / 8] = clamped(sum + bias[0], 1.0f);
  __syncthreads();
  const int index = blockIdx.x * 32 + threadIdx.x;
  if (threadIdx.x < 32 && index < samples) to[index] = sound[threadIdx.x];
}

// The same for many frames, and with the same bits: eight lanes take eight samples, so each row is read for all of
// them.
template <int Blocks>  // of 32 channels
__global__ void __launch_bounds__(256, 2)
    convolve_much_to_sound_kernel(const History in, const float* weight, const float* bias, float* const* out) {
  constexpr int kChannels = 32 * Blocks;
  const int index = blockIdx.x * 256 + threadIdx.x, lane = threadIdx.x % 8, samples = in.frames->count * in.rows;
  float4 w[7][Blocks];
#pragma unroll
  for (int tap = 0; tap < 7; ++tap)
#pragma unroll
    for (int b = 0; b < Blocks; ++b)
      w[tap][b] = *reinterpret_cast<const float4*>(weight + tap * kChannels + b * 32 + lane * 4);
  wait_for_previous();
  const int last = min(index - lane, max(samples, 8) - 8) + 7;  // they are of one frame
  float sum[8] = {};
#pragma unroll
  for (int back = 13; back >= 0; --back) {
    const float* row = history_row(in, last, back);
#pragma unroll
    for (int b = 0; b < Blocks; ++b) {
      const float4 x = load_halves(row, b * 32 + lane * 4);
#pragma unroll
      for (int s = 0; s < 8; ++s)
        if (const int tap = 13 - back - s; tap >= 0 && tap < 7) sum[s] = add_quad(sum[s], x, w[tap][b]);
    }
  }
  float mine = 0.0f;
#pragma unroll
  for (int s = 0; s < 8; ++s) {
#pragma unroll
    for (int d = 4; d; d /= 2) sum[s] += __shfl_xor_sync(0xffffffffu, sum[s], d);
    if (lane == s) mine = sum[s];
  }
  if (index < samples) (*out)[index] = clamped(mine + bias[0], 1.0f);
}

// Together: rows that are read before they are written, because what is read lies behind what is written.
template <int kTogether>
__global__ void __launch_bounds__(128) keep_histories_kernel(const __grid_constant__ Kept p) {
  wait_for_previous();
  const auto& h = p.of[blockIdx.x];
  const int c = blockIdx.y * 128 + threadIdx.x;
  for (int sequence = blockIdx.z; sequence < p.frames->sequences; sequence += gridDim.z) {
    const auto [slot, begin, count] = p.frames->sequence[sequence];
    if (p.position && blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0) p.position[slot] += count;
    if (c >= h.channels) continue;
    const int rows = count * h.rows;
    float* past = h.past + static_cast<int64_t>(slot) * h.stride + c;
    const float* fresh = h.fresh + static_cast<int64_t>(begin) * h.rows * h.channels + c;
    for (int first = 0; first < h.kept; first += kTogether) {
      float x[kTogether];
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        const int from = first + i + rows;
        if (first + i < h.kept)
          x[i] = from < h.kept ? past[static_cast<int64_t>(from) * h.channels]
                               : fresh[static_cast<int64_t>(from - h.kept) * h.channels];
      }
#pragma unroll
      for (int i = 0; i < kTogether; ++i)
        if (first + i < h.kept) past[static_cast<int64_t>(first + i) * h.channels] = x[i];
    }
  }
}

// A block a frame: the sum of its codes' vectors.
__global__ void __launch_bounds__(512) begin_push_kernel(const __grid_constant__ Push p, const PushInputs inputs) {
  const int row = blockIdx.x;
  if (row == 0) {
    constexpr int kInts = sizeof(Frames) / sizeof(int);
    for (int i = threadIdx.x; i < kInts; i += blockDim.x)
      reinterpret_cast<int*>(inputs.frames)[i] = reinterpret_cast<const int*>(&p.frames)[i];
    if (threadIdx.x == 0) *inputs.sound = p.sound;
  }
  const int* codes = p.codes + row * kGroups;
  if (p.recent) codes = p.recent + (p.frames.of[row].slot * kRecentFrames + p.number[row] % kRecentFrames) * kGroups;
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
  begin_push_kernel<<<p.frames.count, 512, 0, stream>>>(p, inputs);
  return cudaGetLastError();
}

cudaError_t depthwise_norm(const History& in, const float* weight, const float* bias, const float* gain,
                           const float* shift, float eps, float* out, cudaStream_t stream) {
  if (in.channels > kWidestNorm || in.channels % kChannelTile || in.kept != 6) return cudaErrorInvalidValue;
  return launch_after(depthwise_norm_kernel, dim3(in.room * in.rows), (in.channels + 31) / 32 * 32, 0, stream, 1, in,
                      weight, bias, gain, shift, eps, out);
}

cudaError_t convolve_to_sound(const History& in, const float* weight, const float* bias, float* const* out,
                              cudaStream_t stream) {
  if (in.channels % kChannelTile || in.kept != 6) return cudaErrorInvalidValue;
  if (in.room > kFewFrames && in.channels == 96 && in.rows % 8 == 0)
    return launch_after(convolve_much_to_sound_kernel<3>, dim3((in.room * in.rows + 255) / 256), 256, 0, stream, 1, in,
                        weight, bias, out);
  return launch_after(convolve_to_sound_kernel, dim3((in.room * in.rows * 8 + 255) / 256), 256, 0, stream, 1, in,
                      weight, bias, out);
}

cudaError_t keep_histories(const Kept& p, cudaStream_t stream) {
  const dim3 grid(p.count, (p.widest + 127) / 128, p.room);
  return launch_after(p.room > kFewFrames ? keep_histories_kernel<54> : keep_histories_kernel<6>, grid, 128, 0, stream,
                      1, p);
}

}  // namespace qmk
