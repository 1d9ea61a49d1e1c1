// One query head over one split of its context; the splits are weighed together by whoever reads them.
//
// Two layouts of a head's 128 dims over a warp. In the exchange a lane has 4 dims, so that q, k and v of the current
// position arrive in one round trip. Against the context 8 lanes share a position, 16 dims each, 4 positions at a time.
// Everything that does not depend on the current position (norms, angles, old keys) is loaded before the wait.
#pragma once
#include "exchange.cuh"

namespace qmk {

constexpr int kLaneDims = 16;
constexpr float kScoreScale = 0.08838834764831845f;  // head_dim ^ -1/2

// Splits that hold anything at a position: split s has positions 256 s .. 256 s + 255, then every 2,048 on.
__host__ __device__ constexpr int active_splits(int position) {
  return position / kSplitPositions + 1 < kSplits ? position / kSplitPositions + 1 : kSplits;
}

// 16 dims as bf16.
struct Row {
  uint4 low, high;
};
__device__ __forceinline__ Row load_shared_row(const bf16* p) {
  const uint4* q = reinterpret_cast<const uint4*>(p);
  return {q[0], q[1]};
}
__device__ __forceinline__ Row load_global_row(const bf16* p) {
  const uint4* q = reinterpret_cast<const uint4*>(p);
  return {__ldcg(q), __ldcg(q + 1)};
}
__device__ __forceinline__ void to_floats(const Row& row, float (&f)[kLaneDims]) {
  const uint32_t w[8] = {row.low.x, row.low.y, row.low.z, row.low.w, row.high.x, row.high.y, row.high.z, row.high.w};
#pragma unroll
  for (int i = 0; i < 8; i++) f[2 * i] = __uint_as_float(w[i] << 16), f[2 * i + 1] = __uint_as_float(w[i] & 0xffff0000u);
}

struct Four {  // a lane's 4 dims in the exchange's layout
  float v[4];
};
__device__ __forceinline__ Four load_norm(const bf16* p, int lane) {
  const __nv_bfloat162* q = reinterpret_cast<const __nv_bfloat162*>(p + lane * 4);
  const float2 a = __bfloat1622float2(q[0]), b = __bfloat1622float2(q[1]);
  return {{a.x, a.y, b.x, b.y}};
}
__device__ __forceinline__ Four load_angles(const float* p, int lane) {  // dims i and i + 64 turn by the same angle
  const float4 a = *reinterpret_cast<const float4*>(p + lane % 16 * 4);
  return {{a.x, a.y, a.z, a.w}};
}
__device__ __forceinline__ Four await_four(const Tagged* head, int lane, uint32_t epoch, const Patience& patience) {
  float2 pair[2];
  await_pairs(pair, [&](int i) { return head + lane * 4 + 2 * i; }, epoch, patience);
  return {{pair[0].x, pair[0].y, pair[1].x, pair[1].y}};
}

// Head norm, then rotate-half. Positions are the same on all three M-RoPE axes of this model, so one angle per pair of
// dims is all there is.
__device__ __forceinline__ void norm_and_rope(Four& x, const Four& weight, const Four& cos, const Four& sin, int lane) {
  float square = 0.f;
#pragma unroll
  for (int i = 0; i < 4; i++) square = fmaf(x.v[i], x.v[i], square);
#pragma unroll
  for (int o = 16; o; o >>= 1) square += __shfl_xor_sync(~0u, square, o);
  const float inv = rsqrtf(square * (1.f / kHeadDim) + 1e-6f);
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const float y = x.v[i] * inv * weight.v[i], other = __shfl_xor_sync(~0u, y, 16);
    x.v[i] = y * cos.v[i] + (lane < 16 ? -other : other) * sin.v[i];
  }
}
__device__ __forceinline__ uint2 rounded(const Four& x) {
  const __nv_bfloat162 a = __floats2bfloat162_rn(x.v[0], x.v[1]), b = __floats2bfloat162_rn(x.v[2], x.v[3]);
  return make_uint2(*reinterpret_cast<const uint32_t*>(&a), *reinterpret_cast<const uint32_t*>(&b));
}

struct Head {  // where one head reads and writes
  const Tagged *q, *k, *v;          // exchange, [head_dim] each
  const bf16 *q_norm, *k_norm;      // [head_dim]
  const float *cos, *sin;           // [head_dim / 2] of this position
  Tagged* out;                      // [head_dim]
  Tagged* split;                    // [2] maximum and sum, or null where one split is all
};

struct AttentionScratch {
  alignas(16) float row[kWarps][kHeadDim];  // a warp's query, then its share of the output
  float2 stat[kWarps];
};

// Keys and values of the talker: pages in global memory, the current position in shared memory (and stored by one of the
// query heads that share them).
struct PagedCache {
  static constexpr int kWarpsUsed = kWarps, kRows = 2;  // rows of 4 positions that a warp looks at at a time
  static constexpr bool kEager = true;
  const bf16* kv;         // of this layer and KV head, page 0
  const int* pages;
  size_t page_stride, value_offset;
  bf16 (*fresh)[kHeadDim];  // shared [2]
  bool store;

  __device__ __forceinline__ const bf16* at(int p) const {
    return kv + pages[p / kPagePositions] * page_stride + p % kPagePositions * kHeadDim;
  }
  __device__ __forceinline__ void put(int p, uint2 key, uint2 value, int lane) const {
    reinterpret_cast<uint2*>(fresh[0])[lane] = key, reinterpret_cast<uint2*>(fresh[1])[lane] = value;
    if (!store) return;
    bf16* row = const_cast<bf16*>(at(p));
    reinterpret_cast<uint2*>(row)[lane] = key, reinterpret_cast<uint2*>(row + value_offset)[lane] = value;
  }
  __device__ __forceinline__ Row old_row(int p, int t, bool value) const {
    return load_global_row(at(p) + (value ? value_offset : 0) + t * kLaneDims);
  }
  __device__ __forceinline__ Row fresh_row(int, int t, bool value) const { return load_shared_row(fresh[value] + t * kLaneDims); }
};

// Keys and values of the code predictor: at most 16 positions of one frame, in the shared memory of the head's block.
struct FrameCache {
  static constexpr int kWarpsUsed = 1, kRows = 4;
  static constexpr bool kEager = false;
  bf16 (*rows)[16][kHeadDim];  // shared [2][positions]

  __device__ __forceinline__ void put(int p, uint2 key, uint2 value, int lane) const {
    reinterpret_cast<uint2*>(rows[0][p])[lane] = key, reinterpret_cast<uint2*>(rows[1][p])[lane] = value;
  }
  __device__ __forceinline__ Row old_row(int p, int t, bool value) const { return load_shared_row(rows[value][p] + t * kLaneDims); }
  __device__ __forceinline__ Row fresh_row(int p, int t, bool value) const { return old_row(p, t, value); }
};

template <class Cache>
__device__ __forceinline__ void attend(const Head& head, const Cache& cache, int split, int position, uint32_t epoch,
                                       AttentionScratch& s, int warp, int lane, const Patience& patience) {
  constexpr int kUsed = Cache::kWarpsUsed, kRows = Cache::kRows, kSpan = kUsed * kRows * 4;
  constexpr bool kEager = Cache::kEager;  // rows are far away: ask for them before they are needed
  const int group = lane / 8, t = lane % 8;
  // Positions of this warp from `base` on: row j, group g.
  auto position_of = [&](int base, int j) { return base + (j * kUsed + warp) * 4 + group; };
  auto next_base = [&](int base) {
    return (base + kSpan) % kSplitPositions ? base + kSpan : base + kSpan + kSplitPositions * (kSplits - 1);
  };
  auto old_rows = [&](Row (&row)[kRows], int base, bool value) {
#pragma unroll
    for (int j = 0; j < kRows; j++) {
      const int p = position_of(base, j);
      row[j] = p < position ? cache.old_row(p, t, value) : Row{};
    }
  };
  auto row_at = [&](const Row& eager, int p, bool value) {
    if (p == position) return cache.fresh_row(p, t, value);
    return kEager || p > position ? eager : cache.old_row(p, t, value);
  };
  int base = split * kSplitPositions;
  Row key[kRows]{}, value[kRows]{};
  if constexpr (kEager) old_rows(key, base, false);

  const Four cos = load_angles(head.cos, lane), sin = load_angles(head.sin, lane), q_norm = load_norm(head.q_norm, lane);
  if (position / kSplitPositions % kSplits == split && position / 4 % kUsed == warp) {  // the current position falls to this warp
    const Four k_norm = load_norm(head.k_norm, lane);
    Four k = await_four(head.k, lane, epoch, patience);
    const Four v = await_four(head.v, lane, epoch, patience);
    norm_and_rope(k, k_norm, cos, sin, lane);
    cache.put(position, rounded(k), rounded(v), lane);
  }
  Four query = await_four(head.q, lane, epoch, patience);
  norm_and_rope(query, q_norm, cos, sin, lane);
  reinterpret_cast<float4*>(s.row[warp])[lane] = make_float4(query.v[0], query.v[1], query.v[2], query.v[3]);
  __syncwarp();
  float q[kLaneDims];
#pragma unroll
  for (int i = 0; i < kLaneDims; i++) q[i] = s.row[warp][t * kLaneDims + i];
  __syncwarp();

  float top = -INFINITY, total = 0.f, out[kLaneDims] = {};
  while (base <= position) {
    if constexpr (kEager) old_rows(value, base, true);
    const int here = base;
    float score[kRows], now = top;
#pragma unroll
    for (int j = 0; j < kRows; j++) {
      float k[kLaneDims], dot = 0.f;
      to_floats(row_at(key[j], position_of(here, j), false), k);
#pragma unroll
      for (int i = 0; i < kLaneDims; i++) dot = fmaf(q[i], k[i], dot);
      dot += __shfl_xor_sync(~0u, dot, 1);
      dot += __shfl_xor_sync(~0u, dot, 2);
      dot += __shfl_xor_sync(~0u, dot, 4);
      score[j] = position_of(here, j) <= position ? dot * kScoreScale : -INFINITY;
      now = fmaxf(now, score[j]);
    }
    now = fmaxf(now, __shfl_xor_sync(~0u, now, 8));
    now = fmaxf(now, __shfl_xor_sync(~0u, now, 16));
    base = next_base(base);
    if (kEager && base <= position) old_rows(key, base, false);
    if (now == -INFINITY) continue;  // this warp has nothing here
    const float keep = __expf(top - now);
    total *= keep;
#pragma unroll
    for (int i = 0; i < kLaneDims; i++) out[i] *= keep;
#pragma unroll
    for (int j = 0; j < kRows; j++) {
      float v[kLaneDims];
      to_floats(row_at(value[j], position_of(here, j), true), v);
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

  if constexpr (kUsed == 1) {
#pragma unroll
    for (int i = 0; i < 4; i++) publish(head.out + mine + i, quarter[i] / total, epoch);
  } else {
    *reinterpret_cast<float4*>(&s.row[warp][mine]) = make_float4(quarter[0], quarter[1], quarter[2], quarter[3]);
    if (lane == 0) s.stat[warp] = make_float2(top, total);
    sync_compute<kComputeThreads>();
    const int dim = warp * 32 + lane;
    if (dim < kHeadDim) {
      float best = -INFINITY, sum = 0.f, value = 0.f;
#pragma unroll
      for (int w = 0; w < kUsed; w++) best = fmaxf(best, s.stat[w].x);
#pragma unroll
      for (int w = 0; w < kUsed; w++) {
        const float weight = __expf(s.stat[w].x - best);
        sum = fmaf(weight, s.stat[w].y, sum), value = fmaf(weight, s.row[w][dim], value);
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
