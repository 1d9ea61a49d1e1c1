// How heads of the talker attended to a text in a frame, for word times (engine/text_path.py). The frame's kernels keep
// the queries of watched heads (Watch). This one runs behind them, on a stream of its own.
#include "../pages.cuh"
#include "../ptx.cuh"
#include "frame.h"

namespace qmk {
namespace {

constexpr int kLookWarps = 8, kLookThreads = kLookWarps * 32;
constexpr int kRowLanes = kHeadDim / 8;                               // that share a key: a unit of 8 dims each
constexpr int kRows = kLookThreads / kRowLanes;                       // keys that a block takes at a time
constexpr int kAtOnce = 4;                                            // of which each lane has so many on their way
constexpr int kNear = kTold - 3;                                      // tokens that are told one by one
constexpr float kScale = 0.08838834764831845f * 1.4426950408889634f;  // head_dim ^ -1/2, to the base of 2
static_assert(kTold == kRowLanes && kRows <= 32);

// What is added up of some rows. Weights are relative to `top`.
struct Sums {
  float top;               // the largest score
  float all, before, far;  // of the weights; of the tokens before the near ones, and behind them
  float best;              // the largest score of a token
  int token;               // which one

  __device__ __forceinline__ void raise(float score) {
    const float now = fmaxf(top, score), keep = exp2_of(top - now);
    all *= keep, before *= keep, far *= keep, top = now;
  }
};

__device__ constexpr Sums kNothing{-INFINITY, 0.f, 0.f, 0.f, -INFINITY, 0};

// Grid: heads of each column, columns. Block: kLookThreads. told[0]: `first`; [1], [2]: the attention to all tokens,
// and the token with the most; then for each of kNear tokens from `first` on: the attention to it and all behind it.
__global__ void __launch_bounds__(kLookThreads) look_kernel(const Look* looks, const bf16* kv, TalkerHeads talker) {
  __shared__ Look look;
  __shared__ Sums sums[kRows];
  __shared__ float near[kNear];  // scores
  const int tid = threadIdx.x, lane = tid % 32, row = tid / kRowLanes, unit = tid % kRowLanes;
  if (tid < sizeof(Look) / 4)  // it lies in the host's memory: read it once
    reinterpret_cast<uint32_t*>(&look)[tid] = reinterpret_cast<const uint32_t*>(looks + blockIdx.y)[tid];
  __syncthreads();
  const int head = look.first_head + blockIdx.x, layer = head / talker.heads;
  const int kv_head = head % talker.heads / (talker.heads / talker.kv_heads);
  constexpr size_t kHeadPage = kPagePositions * kHeadDim;
  const size_t stride = 2 * kHeadPage * talker.layers * talker.kv_heads;  // of a page
  const bf16* const keys = kv + (2 * layer * talker.kv_heads + kv_head) * kHeadPage;
  float query[8];
#pragma unroll
  for (int i = 0; i < 8; i++) query[i] = look.queries[blockIdx.x * kHeadDim + unit * 8 + i] * kScale;

  const int position = look.position, tokens = min(look.tokens, position + 1 - look.text_at);  // that are there
  Sums mine = kNothing;
  for (int start = row; start - row <= position; start += kAtOnce * kRows) {
    uint4 key[kAtOnce]{};
    float score[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; i++) {
      const int p = start + i * kRows;
      if (p > position) continue;
      const bf16* const at = keys + look.pages[p / kPagePositions] * stride + p % kPagePositions * kHeadDim;
      key[i] = reinterpret_cast<const uint4*>(at)[unit_place(p, unit)];
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; i++) {
      const uint32_t pair[4] = {key[i].x, key[i].y, key[i].z, key[i].w};
      float sum = 0.f;
#pragma unroll
      for (int n = 0; n < 4; n++)
        sum = fmaf(__uint_as_float(pair[n] << 16), query[2 * n],
                   fmaf(__uint_as_float(pair[n] & 0xffff0000u), query[2 * n + 1], sum));
#pragma unroll
      for (int d = kRowLanes / 2; d; d /= 2) sum += __shfl_xor_sync(~0u, sum, d);
      score[i] = sum;
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; i++) {
      const int p = start + i * kRows, token = p - look.text_at, nth = token - look.first;
      if (p > position) continue;
      mine.raise(score[i]);
      const float weight = exp2_of(score[i] - mine.top);
      mine.all += weight;
      if (token < 0 || token >= tokens) continue;
      if (nth < 0) mine.before += weight;
      else if (nth >= kNear) mine.far += weight;
      else if (unit == 0) near[nth] = score[i];
      if (score[i] > mine.best) mine.best = score[i], mine.token = token;
    }
  }
  if (unit == 0) sums[row] = mine;
  __syncthreads();
  if (tid >= 32) return;

  // One warp: a lane has the sums of a row, and then a token.
  Sums all = lane < kRows ? sums[lane] : kNothing;
  float top = all.top;
#pragma unroll
  for (int d = 16; d; d /= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, d));
  all.raise(top);
#pragma unroll
  for (int d = 16; d; d /= 2) {
    all.all += __shfl_xor_sync(~0u, all.all, d);
    all.before += __shfl_xor_sync(~0u, all.before, d), all.far += __shfl_xor_sync(~0u, all.far, d);
    const float best = __shfl_xor_sync(~0u, all.best, d);
    const int token = __shfl_xor_sync(~0u, all.token, d);
    if (best > all.best || (best == all.best && token < all.token)) all.best = best, all.token = token;
  }
  float behind = lane < kNear && look.first + lane < tokens ? exp2_of(near[lane] - top) : 0.f;
#pragma unroll
  for (int d = 1; d < 16; d *= 2) {
    const float other = __shfl_down_sync(~0u, behind, d);
    if (lane + d < 32) behind += other;
  }
  behind = (behind + all.far) / all.all;
  const float total = all.before / all.all + __shfl_sync(~0u, behind, 0);
  float* const told = look.told + blockIdx.x * kTold;
  if (lane < kNear) told[3 + lane] = behind;
  if (lane < 3) told[lane] = lane == 0 ? static_cast<float>(look.first) : lane == 1 ? total : all.token;
}

}  // namespace

cudaError_t launch_looks(const Look* looks, int columns, int heads, const bf16* kv, const TalkerHeads& talker,
                         cudaStream_t stream) {
  look_kernel<<<dim3(heads, columns), kLookThreads, 0, stream>>>(looks, kv, talker);
  return cudaGetLastError();
}

}  // namespace qmk
