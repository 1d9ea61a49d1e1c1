// What the transformer's two ways of computing have in common: its products, the order of their sums, and attention. A
// push may take either way, so every sum is written so that the compiler cannot choose what it rounds.
#pragma once
#include "../ptx.cuh"
#include "sums.cuh"
#include "vocoder.h"

namespace qmk {

// Kinds of product. The four of a layer come first, in their order.
enum Kind { kQkv, kO, kGateUp, kDown, kInput, kOutput, kKinds };

// Does RMSNorm stand in front of it? Its weights are part of the matrix, and its factor is applied to the sums.
__host__ __device__ constexpr bool is_normed(Kind kind) { return kind == kQkv || kind == kGateUp || kind == kOutput; }

// A block's part of a kind of product in the kernel of small pushes: its columns, the values of each, and how many
// columns a chunk has at most.
struct Product {
  int columns, values, chunk;
};

// Parts that K is cut into where a chunk has so many columns: work for each of a block's 8 warps. In a part lane i of a
// warp adds up quads i, i + 32, ... of products, and `warp_sum` the lanes; then the parts are added.
__host__ __device__ constexpr int parts_of(int columns) {
  return columns >= 5 ? 1 : columns >= 3 ? 2 : columns == 2 ? 4 : 8;
}

__device__ __forceinline__ float rms_factor(float squares, int values, float eps) {
  return rsqrtf(__fadd_rn(squares / values, eps));
}
__device__ __forceinline__ float gated(float gate, float up) { return gate / (1.0f + expf(-gate)) * up; }

// Floats of shared memory that `attend` takes.
__host__ __device__ constexpr int attention_floats(int head_dim) {
  return kTransformerRing * (2 * head_dim + 9) + kPushFrames * (4 * head_dim + kTransformerRing);
}

// Attention of one head over the window of one sequence, by a block of `Threads`: task is sequence * heads + head.
// take(first_row, frames, head, to) loads q, k and v of its frames, [3][frames][D]; give(row, column, value) has a
// result.
template <int D, int Threads, class Take, class Give>
__device__ __forceinline__ void attend(const Layers& p, int layer, int task, float* memory, Take take, Give give) {
  constexpr int kKey = D + 1, kValue = D + 8;         // between rows: the lanes of a warp read from different banks
  float* keys = memory;                               // [ring][kKey]
  float* values = keys + kTransformerRing * kKey;     // [ring][kValue]
  float* fresh = values + kTransformerRing * kValue;  // q, k, v [3][frames][D]
  float* queries = fresh + 3 * kPushFrames * D;       // [frames][D]
  float* chances = queries + kPushFrames * D;         // [frames][ring]
  const int tid = threadIdx.x, warp = tid / 32, lane = tid % 32, head = task % p.heads;
  const auto [slot, first_row, frames] = p.in.frames->sequence[task / p.heads];
  const int64_t position = p.position[slot];
  float* ring_keys = p.rings + slot * p.stride + static_cast<int64_t>(2 * layer * p.heads + head) * p.ring * D;
  float* ring_values = ring_keys + static_cast<int64_t>(p.heads) * p.ring * D;
  const int64_t oldest = position > p.window - 1 ? position - (p.window - 1) : 0;
  const int before = static_cast<int>(position - oldest);  // local index j is position oldest + j
  const int start = static_cast<int>(oldest % p.ring);
#pragma unroll 4
  for (int i = tid; i < before * (D / 4); i += Threads) {
    const int j = i / (D / 4), d = i % (D / 4) * 4, at = (start + j < p.ring ? start + j : start + j - p.ring) * D + d;
    const float4 k = __ldcg(reinterpret_cast<const float4*>(ring_keys + at)),
                 v = __ldcg(reinterpret_cast<const float4*>(ring_values + at));
    float* to = keys + j * kKey + d;
    to[0] = k.x, to[1] = k.y, to[2] = k.z, to[3] = k.w;
    *reinterpret_cast<float4*>(values + j * kValue + d) = v;
  }
  take(first_row, frames, head, fresh);
  __syncthreads();
  for (int i = tid; i < frames * D; i += Threads) {
    const int t = i / D, d = i % D, other = d < D / 2 ? d + D / 2 : d - D / 2;
    const float *q = fresh + t * D, *k = q + frames * D, *v = k + frames * D;
    float sine, cosine;
    sincosf(static_cast<float>(position + t) * p.inv_freq[d % (D / 2)], &sine, &cosine);
    if (d < D / 2) sine = -sine;
    queries[t * D + d] = fmaf(q[d], cosine, __fmul_rn(q[other], sine));
    const float turned = fmaf(k[d], cosine, __fmul_rn(k[other], sine));
    keys[(before + t) * kKey + d] = turned;
    values[(before + t) * kValue + d] = v[d];
    const int at = (start + before + t) % p.ring * D + d;
    ring_keys[at] = turned;
    ring_values[at] = v[d];
  }
  __syncthreads();
  // Four lanes a score, then a warp a frame, then a quarter of the positions for every output. Scores lie as keys do in
  // the ring. So the order of the sums depends on the positions, not on where a push began.
  auto local = [&](int place) { return place < start ? place - start + p.ring : place - start; };
  for (int i = tid / 4; i < frames * kTransformerRing; i += Threads / 4) {
    const int t = i / kTransformerRing, place = i % kTransformerRing, j = local(place), last = before + t;
    const bool seen = place < p.ring && j <= last && j > last - p.window;
    float dot = 0.0f;
    if (seen)
#pragma unroll
      for (int e = 0; e < D / 4; ++e) {
        const int d = tid % 4 * (D / 4) + e;
        dot = fmaf(queries[t * D + d], keys[j * kKey + d], dot);
      }
    dot += __shfl_xor_sync(~0u, dot, 1);
    dot += __shfl_xor_sync(~0u, dot, 2);
    if (tid % 4 == 0) chances[i] = seen ? dot * rsqrtf(static_cast<float>(D)) : -INFINITY;
  }
  __syncthreads();
  for (int t = warp; t < frames; t += Threads / 32) {
    constexpr int kEach = (kTransformerRing + 31) / 32;
    float score[kEach], most = -INFINITY, sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      score[i] = lane + 32 * i < kTransformerRing ? chances[t * kTransformerRing + lane + 32 * i] : -INFINITY;
      most = fmaxf(most, score[i]);
    }
#pragma unroll
    for (int d = 16; d; d /= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, d));
#pragma unroll
    for (int i = 0; i < kEach; ++i) sum = __fadd_rn(sum, score[i] = expf(score[i] - most));
    sum = 1.0f / warp_sum(sum);
#pragma unroll
    for (int i = 0; i < kEach; ++i)
      if (lane + 32 * i < kTransformerRing) chances[t * kTransformerRing + lane + 32 * i] = score[i] * sum;
  }
  __syncthreads();
  for (int i = tid / 4; i < frames * D; i += Threads / 4) {
    const int t = i / D, d = i % D, last = before + t;
    float mixed = 0.0f;
#pragma unroll 4
    for (int place = tid % 4; place < p.ring; place += 4) {
      const int j = local(place);
      if (j <= last && j > last - p.window)
        mixed = fmaf(chances[t * kTransformerRing + place], values[j * kValue + d], mixed);
    }
    mixed += __shfl_xor_sync(~0u, mixed, 1);
    mixed += __shfl_xor_sync(~0u, mixed, 2);
    if (tid % 4 == 0) give(first_row + t, head * D + d, mixed);
  }
  __syncthreads();
}

// A push of more than `kTransformerRows` frames by a launch for each product, where `can_share_rows`.
bool can_share_rows(const Layers&, const Product (&)[kKinds]);
cudaError_t transform_by_launches(const Layers&, cudaStream_t);

}  // namespace qmk
