// One query head over one split of its context; the splits are weighed together by whoever reads them.
//
// A warp looks at 4 positions at a time: 8 lanes to a position, 16 of the 128 dims to a lane. The current position's
// key and value come straight from the exchange, are rounded to bf16 as the cache holds them, and stored.
#pragma once
#include "exchange.cuh"

namespace qmk {

constexpr int kLaneDims = 16;
__device__ constexpr float kScoreScale = 0.08838834764831845f;  // head_dim ^ -1/2

// Splits that hold anything at a position: split s has positions 256 s .. 256 s + 255, then every 2,048 on.
__host__ __device__ constexpr int active_splits(int position) {
  return position / kSplitPositions + 1 < kSplits ? position / kSplitPositions + 1 : kSplits;
}

__device__ __forceinline__ float group_sum(float x) {  // over the 8 lanes of a position
  x += __shfl_xor_sync(~0u, x, 1);
  x += __shfl_xor_sync(~0u, x, 2);
  return x + __shfl_xor_sync(~0u, x, 4);
}

__device__ __forceinline__ void to_floats(uint4 a, float* f) {
  const uint32_t w[4] = {a.x, a.y, a.z, a.w};
#pragma unroll
  for (int i = 0; i < 4; i++) f[2 * i] = __uint_as_float(w[i] << 16), f[2 * i + 1] = __uint_as_float(w[i] & 0xffff0000u);
}

// This lane's 16 dims of a head's q, k or v, from the exchange.
__device__ __forceinline__ void await_head(float (&x)[kLaneDims], const Tagged* head, uint32_t epoch, int t, const Patience& patience) {
  float2 pair[kLaneDims / 2];
  await_pairs(pair, [&](int i) { return head + t * kLaneDims + 2 * i; }, epoch, patience);
#pragma unroll
  for (int i = 0; i < kLaneDims / 2; i++) x[2 * i] = pair[i].x, x[2 * i + 1] = pair[i].y;
}

// Head norm, then rotate-half: dims i and i + 64 are 4 lanes apart. Positions are the same on all three M-RoPE axes of
// this model, so one angle per pair is all there is.
__device__ __forceinline__ void norm_and_rope(float (&x)[kLaneDims], const bf16* weight, const float* cos, const float* sin, int t) {
  float square = 0.f;
#pragma unroll
  for (int i = 0; i < kLaneDims; i++) square = fmaf(x[i], x[i], square);
  const float inv = rsqrtf(group_sum(square) * (1.f / kHeadDim) + 1e-6f);
#pragma unroll
  for (int i = 0; i < kLaneDims; i++) {
    const float y = x[i] * inv * __bfloat162float(weight[t * kLaneDims + i]);
    const float other = __shfl_xor_sync(~0u, y, 4);
    const int pair = (t & 3) * kLaneDims + i;
    x[i] = y * cos[pair] + (t < 4 ? -other : other) * sin[pair];
  }
}

struct Head {  // where one head reads and writes
  const Tagged *q, *k, *v;          // exchange, [head_dim] each
  const bf16 *q_norm, *k_norm;      // [head_dim]
  const float *cos, *sin;           // [head_dim / 2] of this position
  bool store;                       // of the two query heads that share a KV head one writes the cache
  Tagged* out;                      // [head_dim]
  Tagged* split;                    // [2] maximum and sum, or null where one split is all
};

// 16 dims as bf16.
struct Row {
  uint4 low, high;
};
__device__ __forceinline__ Row round_row(const float (&x)[kLaneDims]) {
  uint32_t w[kLaneDims / 2];
#pragma unroll
  for (int i = 0; i < kLaneDims / 2; i++) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(x[2 * i], x[2 * i + 1]);
    w[i] = *reinterpret_cast<const uint32_t*>(&pair);
  }
  return {make_uint4(w[0], w[1], w[2], w[3]), make_uint4(w[4], w[5], w[6], w[7])};
}
__device__ __forceinline__ Row load_row(const bf16* p) {
  const uint4* q = reinterpret_cast<const uint4*>(p);
  return {__ldcg(q), __ldcg(q + 1)};
}
__device__ __forceinline__ Row load_shared_row(const bf16* p) {
  const uint4* q = reinterpret_cast<const uint4*>(p);
  return {q[0], q[1]};
}
__device__ __forceinline__ void store_row(bf16* p, const Row& r) {
  uint4* q = reinterpret_cast<uint4*>(p);
  q[0] = r.low, q[1] = r.high;
}

// Warps: 1 looks at 16 positions by itself; 16 look at 256 and combine through shared memory.
// cache(p): pointer to the key row of position p; the value row lies `value_offset` elements on.
template <int Warps, class Cache>
__device__ __forceinline__ void attend(const Head& head, Cache cache, size_t value_offset, int split, int position, uint32_t epoch,
                                       float (*s_out)[kHeadDim], float2* s_stat, bf16 (*s_fresh)[kHeadDim], int warp, int lane,
                                       const Patience& patience) {
  constexpr int kStride = kSplitPositions * kSplits;
  const int group = lane / 8, t = lane % 8;
  float q[kLaneDims];
  await_head(q, head.q, epoch, t, patience);
  norm_and_rope(q, head.q_norm, head.cos, head.sin, t);

  // The warp that the current position falls to makes its key and value, and alone reads them below.
  if (position / kSplitPositions % kSplits == split && position % kSplitPositions / 4 % Warps == warp) {
    float x[kLaneDims];
    await_head(x, head.k, epoch, t, patience);
    norm_and_rope(x, head.k_norm, head.cos, head.sin, t);
    const Row key = round_row(x);
    await_head(x, head.v, epoch, t, patience);
    const Row value = round_row(x);
    if (group == 0) {
      store_row(s_fresh[0] + t * kLaneDims, key), store_row(s_fresh[1] + t * kLaneDims, value);
      if (head.store) {
        bf16* row = cache(position) + t * kLaneDims;
        store_row(row, key), store_row(row + value_offset, value);
      }
    }
    __syncwarp();
  }

  float top = -INFINITY, total = 0.f, out[kLaneDims] = {};
  for (int base = split * kSplitPositions; base <= position; base += kStride) {
    float score[4];
    Row value[4];
#pragma unroll
    for (int j = 0; j < 4; j++) {
      const int p = base + (j * Warps + warp) * 4 + group;
      Row key{};
      value[j] = {};
      if (p < position) {
        const bf16* row = cache(p) + t * kLaneDims;
        key = load_row(row), value[j] = load_row(row + value_offset);
      } else if (p == position) {
        key = load_shared_row(s_fresh[0] + t * kLaneDims), value[j] = load_shared_row(s_fresh[1] + t * kLaneDims);
      }
      float k[kLaneDims], dot = 0.f;
      to_floats(key.low, k), to_floats(key.high, k + 8);
#pragma unroll
      for (int i = 0; i < kLaneDims; i++) dot = fmaf(q[i], k[i], dot);
      dot = group_sum(dot);
      score[j] = p <= position ? dot * kScoreScale : -INFINITY;
    }
    float now = fmaxf(fmaxf(score[0], score[1]), fmaxf(score[2], score[3]));
    now = fmaxf(now, __shfl_xor_sync(~0u, now, 8));
    now = fmaxf(fmaxf(now, __shfl_xor_sync(~0u, now, 16)), top);
    if (now == -INFINITY) continue;  // this warp has nothing here
    const float keep = __expf(top - now);
    total *= keep;
#pragma unroll
    for (int i = 0; i < kLaneDims; i++) out[i] *= keep;
#pragma unroll
    for (int j = 0; j < 4; j++) {
      float v[kLaneDims];
      to_floats(value[j].low, v), to_floats(value[j].high, v + 8);
      const float weight = __expf(score[j] - now);  // 0 where there is no position
      total += weight;
#pragma unroll
      for (int i = 0; i < kLaneDims; i++) out[i] = fmaf(weight, v[i], out[i]);
    }
    top = now;
  }
  // Add up the four groups; each keeps a quarter of its lanes' dims: 4 of 16, from `mine` on.
  total += __shfl_xor_sync(~0u, total, 8);
  total += __shfl_xor_sync(~0u, total, 16);
  const bool high = lane & 16, odd = lane & 8;
  float half[8], quarter[4];
#pragma unroll
  for (int i = 0; i < 8; i++) half[i] = (high ? out[8 + i] : out[i]) + __shfl_xor_sync(~0u, high ? out[i] : out[8 + i], 16);
#pragma unroll
  for (int i = 0; i < 4; i++) quarter[i] = (odd ? half[4 + i] : half[i]) + __shfl_xor_sync(~0u, odd ? half[i] : half[4 + i], 8);
  const int mine = t * kLaneDims + (high ? 8 : 0) + (odd ? 4 : 0);

  if constexpr (Warps == 1) {
#pragma unroll
    for (int i = 0; i < 4; i++) publish(head.out + mine + i, quarter[i] / total, epoch);
  } else {
    *reinterpret_cast<float4*>(&s_out[warp][mine]) = make_float4(quarter[0], quarter[1], quarter[2], quarter[3]);
    if (lane == 0) s_stat[warp] = make_float2(top, total);
    sync_compute<kComputeThreads>();
    const int dim = warp * 32 + lane;
    if (dim < kHeadDim) {
      float best = -INFINITY, sum = 0.f, value = 0.f;
      for (int w = 0; w < Warps; w++) best = fmaxf(best, s_stat[w].x);
      for (int w = 0; w < Warps; w++) {
        const float weight = __expf(s_stat[w].x - best);
        sum = fmaf(weight, s_stat[w].y, sum), value = fmaf(weight, s_out[w][dim], value);
      }
      publish(head.out + dim, value / sum, epoch);
      if (head.split && dim < 2) publish(head.split + dim, dim ? sum : best, epoch);
    }
  }
}

// The attention output as all blocks need it: splits weighed by their sums.
template <int Q>
__device__ __forceinline__ Slice<Q> await_attention(const Exchange& x, int splits, uint32_t epoch, int tid, const Patience& patience) {
  if (splits == 1) return await<Q>(x.attn, epoch, tid, patience);
  Slice<Q> s;
#pragma unroll
  for (int i = 0; i < Slice<Q>::kPairs; i++) {
    const int index = Slice<Q>::index(i, tid), head = index / kHeadDim;
    float2 part[kSplits], stat[kSplits];  // splits that hold nothing repeat the first one, with weight 0
    await_pairs(part, [&](int n) { return x.attn + (n < splits ? n : 0) * Q + index; }, epoch, patience);
    await_pairs(stat, [&](int n) { return x.split + (head * kSplits + (n < splits ? n : 0)) * 2; }, epoch, patience);
    float best = stat[0].x, sum = 0.f;
#pragma unroll
    for (int n = 1; n < kSplits; n++) best = fmaxf(best, stat[n].x);
    s.v[i] = make_float2(0.f, 0.f);
#pragma unroll
    for (int n = 0; n < kSplits; n++) {
      const float weight = n < splits ? stat[n].y * __expf(stat[n].x - best) : 0.f;
      sum += weight;
      s.v[i].x = fmaf(weight, part[n].x, s.v[i].x), s.v[i].y = fmaf(weight, part[n].y, s.v[i].y);
    }
    s.v[i].x /= sum, s.v[i].y /= sum;
  }
  return s;
}

}  // namespace qmk
