// One query head of one column over its context.
//
// Two layouts of a head's 128 dims over a warp. In the exchange a lane has 4 dims, so that q, k and v of the current
// position arrive in one round trip. Against the context 8 lanes share a position, 16 dims each, 4 positions at a time.
// Everything that does not depend on the current position (norms, angles, old keys) is loaded before the wait.
//
// A talker's context is cut into splits by position alone: split s has positions 256 s .. 256 s + 255, then every 2,048
// on. The 8 blocks of a head share the columns of a launch, and those of one column its splits, so that the sums do not
// depend on how many columns there are.
#pragma once
#include "exchange.cuh"

namespace qmk {

constexpr int kLaneDims = 16;
constexpr float kScoreScale = 0.08838834764831845f;  // head_dim ^ -1/2

// Splits that hold anything at a position.
__device__ __forceinline__ int active_splits(int position) { return min(position / kSplitPositions + 1, kSplits); }

// What this block attends to: splits sub, sub + sharers, ... of one head of one column, and of the 8th behind it.
struct Assignment {
  int head, column, sub, sharers;
};
__device__ __forceinline__ Assignment assignment(int block, int columns) {
  const int sharers = kSplits >> (columns > 1) >> (columns > 2) >> (columns > 4);
  return {block / kSplits, block % kSplits / sharers, block % sharers, sharers};
}

// 16 dims as bf16.
struct Row {
  uint4 low, high;
};
__device__ __forceinline__ Row load_row(const bf16* p) {
  const uint4* q = reinterpret_cast<const uint4*>(p);
  return {q[0], q[1]};
}
__device__ __forceinline__ Row load_far_row(const bf16* p) {
  const uint4* q = reinterpret_cast<const uint4*>(p);
  return {__ldcg(q), __ldcg(q + 1)};
}
__device__ __forceinline__ void to_floats(const Row& row, float (&f)[kLaneDims]) {
  const uint32_t w[8] = {row.low.x, row.low.y, row.low.z, row.low.w, row.high.x, row.high.y, row.high.z, row.high.w};
#pragma unroll
  for (int i = 0; i < 8; i++) f[2 * i] = low_bf16(w[i]), f[2 * i + 1] = high_bf16(w[i]);
}

struct Four {  // a lane's 4 dims in the exchange's layout
  float v[4];
};
// Weights of a head's norm, as they lie in memory: widened where they are used, so that the load stalls nothing before.
__device__ __forceinline__ uint2 load_norm(const bf16* p, int lane) {
  return *reinterpret_cast<const uint2*>(p + lane * 4);
}
__device__ __forceinline__ Four load_angles(const float* p, int lane) {  // dims i and i + 64 turn by the same angle
  const float4 a = *reinterpret_cast<const float4*>(p + lane % 16 * 4);
  return {{a.x, a.y, a.z, a.w}};
}
// Heads of the exchange, awaited together.
template <int N>
__device__ __forceinline__ void await_heads(Four (&x)[N], const Tagged* const (&head)[N], int lane, uint32_t epoch,
                                            Patience& patience) {
  float2 pair[2 * N];
  await_pairs(pair, [&](int i) { return head[i / 2] + lane * 4 + i % 2 * 2; }, epoch, patience);
#pragma unroll
  for (int n = 0; n < N; n++) x[n] = {{pair[2 * n].x, pair[2 * n].y, pair[2 * n + 1].x, pair[2 * n + 1].y}};
}

// Head norm, then rotate-half, of N heads side by side. Positions are the same on all three M-RoPE axes of this model,
// so one angle per pair of dims is all there is.
template <int N>
__device__ __forceinline__ void norm_and_rope(Four* x, const uint2 (&norm)[N], const Four& cos, const Four& sin,
                                              int lane) {
  float square[N] = {};
#pragma unroll
  for (int n = 0; n < N; n++)
#pragma unroll
    for (int i = 0; i < 4; i++) square[n] = fmaf(x[n].v[i], x[n].v[i], square[n]);
#pragma unroll
  for (int o = 16; o; o >>= 1)
#pragma unroll
    for (int n = 0; n < N; n++) square[n] += __shfl_xor_sync(~0u, square[n], o);
#pragma unroll
  for (int n = 0; n < N; n++) {
    const float inv = rsqrtf(square[n] * (1.f / kHeadDim) + 1e-6f);
    const float weight[4] = {low_bf16(norm[n].x), high_bf16(norm[n].x), low_bf16(norm[n].y), high_bf16(norm[n].y)};
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const float y = x[n].v[i] * inv * weight[i], other = __shfl_xor_sync(~0u, y, 16);
      x[n].v[i] = y * cos.v[i] + (lane < 16 ? -other : other) * sin.v[i];
    }
  }
}
__device__ __forceinline__ void store_four(bf16* row, const Four& x, int lane) {
  reinterpret_cast<uint2*>(row)[lane] = make_uint2(pack2(x.v[0], x.v[1]), pack2(x.v[2], x.v[3]));
}

struct AttentionScratch {
  alignas(16) float row[kWarps][kHeadDim];        // a warp's query, then its share of the output
  float2 stat[kWarps];                            // maximum and sum of that share
  alignas(16) bf16 fresh[kColumns][2][kHeadDim];  // keys and values of this launch's positions
  float part[kSplits][kHeadDim];                  // splits that this block has worked off
  float2 part_stat[kSplits][kHeadDim / 32];
};

// From the exchange's layout of a query to the context's.
__device__ __forceinline__ void spread_query(const Four& query, float* row, float (&q)[kLaneDims], int lane) {
  reinterpret_cast<float4*>(row)[lane] = make_float4(query.v[0], query.v[1], query.v[2], query.v[3]);
  __syncwarp();
#pragma unroll
  for (int i = 0; i < kLaneDims; i += 4) {
    const float4 f = *reinterpret_cast<const float4*>(row + lane % 8 * kLaneDims + i);
    q[i] = f.x, q[i + 1] = f.y, q[i + 2] = f.z, q[i + 3] = f.w;
  }
  __syncwarp();
}

// A running softmax over the positions that one group of 8 lanes has seen.
struct Softmax {
  float top = -INFINITY, total = 0.f, out[kLaneDims] = {};

  // Scores of N positions per group; `seen(j)`: position j belongs to the context.
  template <int N, class Seen>
  __device__ __forceinline__ void scores(const float (&q)[kLaneDims], const Row (&key)[N], Seen seen,
                                         float (&score)[N]) const {
#pragma unroll
    for (int j = 0; j < N; j++) {
      float k[kLaneDims], dot = 0.f;
      to_floats(key[j], k);
#pragma unroll
      for (int i = 0; i < kLaneDims; i++) dot = fmaf(q[i], k[i], dot);
      dot += __shfl_xor_sync(~0u, dot, 1);
      dot += __shfl_xor_sync(~0u, dot, 2);
      dot += __shfl_xor_sync(~0u, dot, 4);
      score[j] = seen(j) ? dot * kScoreScale : -INFINITY;
    }
  }
  template <int N>
  __device__ __forceinline__ void add(const float (&score)[N], const Row (&value)[N]) {
    float now = top;
#pragma unroll
    for (int j = 0; j < N; j++) now = fmaxf(now, score[j]);
    now = fmaxf(now, __shfl_xor_sync(~0u, now, 8));
    now = fmaxf(now, __shfl_xor_sync(~0u, now, 16));
    if (now == -INFINITY) return;  // this warp has nothing here
    const float keep = __expf(top - now);
    total *= keep;
#pragma unroll
    for (int i = 0; i < kLaneDims; i++) out[i] *= keep;
#pragma unroll
    for (int j = 0; j < N; j++) {
      float v[kLaneDims];
      to_floats(value[j], v);
      const float weight = __expf(score[j] - now);  // 0 where there is no position
      total += weight;
#pragma unroll
      for (int i = 0; i < kLaneDims; i++) out[i] = fmaf(weight, v[i], out[i]);
    }
    top = now;
  }
  // The warp's four groups together: 4 dims a lane, from the returned one on, and `total` of all.
  __device__ __forceinline__ int join(float (&four)[4], int lane) {
    total += __shfl_xor_sync(~0u, total, 8);
    total += __shfl_xor_sync(~0u, total, 16);
    const bool high = lane & 16, odd = lane & 8;
    float half[8];
#pragma unroll
    for (int i = 0; i < 8; i++)
      half[i] = (high ? out[8 + i] : out[i]) + __shfl_xor_sync(~0u, high ? out[i] : out[8 + i], 16);
#pragma unroll
    for (int i = 0; i < 4; i++)
      four[i] = (odd ? half[4 + i] : half[i]) + __shfl_xor_sync(~0u, odd ? half[i] : half[4 + i], 8);
    return lane % 8 * kLaneDims + (high ? 8 : 0) + (odd ? 4 : 0);
  }
};

// Talker. Keys and values lie in pages; this launch's own positions in shared memory too, because the pages are written
// by other blocks. kv: of this layer and KV head, page 0.
template <class S, class B>
__device__ __forceinline__ void attend_pages(B& b, const StackWeights& w, int index, const Assignment& mine,
                                             const Column& c, bf16* kv, size_t page_stride, size_t value_offset) {
  constexpr int kRows = 2, kSpan = kWarps * kRows * 4;  // positions that the block looks at at a time
  const int position = c.position, fresh = c.first_fresh, splits = active_splits(position);
  if (mine.head >= S::kHeads || mine.column >= b.columns || mine.sub >= splits) return;
  AttentionScratch& s = b.s.attention;
  const int lane = b.lane, warp = b.warp, group = lane / 8, t = lane % 8, kv_head = mine.head / S::kGroup;
  auto at = [&](int p) { return kv + c.pages[p / kPagePositions] * page_stride + p % kPagePositions * kHeadDim; };
  auto position_of = [&](int base, int j) { return base + (j * kWarps + warp) * 4 + group; };
  auto old_rows = [&](Row(&row)[kRows], int base, size_t offset) {
#pragma unroll
    for (int j = 0; j < kRows; j++) {
      const int p = position_of(base, j);
      row[j] = p < fresh ? load_far_row(at(p) + offset + t * kLaneDims) : Row{};
    }
  };
  auto with_fresh = [&](Row(&row)[kRows], int base, bool value) {
#pragma unroll
    for (int j = 0; j < kRows; j++) {
      const int p = position_of(base, j);
      if (p >= fresh && p <= position) row[j] = load_row(s.fresh[p - fresh][value] + t * kLaneDims);
    }
  };
  Row key[kRows];
  int split = mine.sub, base = split * kSplitPositions;
  old_rows(key, base, 0);

  const uint2 q_norm = load_norm(w.q_norm + index * kHeadDim, lane),
              k_norm = load_norm(w.k_norm + index * kHeadDim, lane);
  Four cos = load_angles(w.rope_cos + position * (kHeadDim / 2), lane),
       sin = load_angles(w.rope_sin + position * (kHeadDim / 2), lane);
  auto head_of = [&](int column, int head) { return b.x.qkv + column * S::kQkv + head * kHeadDim; };
  auto mine_too = [&](int p) {
    return p / kSplitPositions % kSplits % mine.sharers == mine.sub && p / 4 % kWarps == warp;
  };
  for (int p = fresh; p < position; p++) {  // a prompt's earlier columns
    if (!mine_too(p)) continue;
    const int column = mine.column - (position - p);
    Four kv_four[2];
    await_heads(kv_four, {head_of(column, S::kHeads + kv_head), head_of(column, S::kHeads + S::kKvHeads + kv_head)},
                lane, b.epoch, b.patience);
    norm_and_rope<1>(kv_four, {k_norm}, load_angles(w.rope_cos + p * (kHeadDim / 2), lane),
                     load_angles(w.rope_sin + p * (kHeadDim / 2), lane), lane);
    store_four(s.fresh[p - fresh][0], kv_four[0], lane), store_four(s.fresh[p - fresh][1], kv_four[1], lane);
  }
  float q[kLaneDims];
  if (mine_too(position)) {
    Four x[3];
    await_heads(x,
                {head_of(mine.column, mine.head), head_of(mine.column, S::kHeads + kv_head),
                 head_of(mine.column, S::kHeads + S::kKvHeads + kv_head)},
                lane, b.epoch, b.patience);
    norm_and_rope<2>(x, {q_norm, k_norm}, cos, sin, lane);
    store_four(s.fresh[position - fresh][0], x[1], lane), store_four(s.fresh[position - fresh][1], x[2], lane);
    if (mine.head % S::kGroup == 0)
      store_four(at(position), x[1], lane), store_four(at(position) + value_offset, x[2], lane);
    spread_query(x[0], s.row[warp], q, lane);
  } else {
    Four x[1];
    await_heads(x, {head_of(mine.column, mine.head)}, lane, b.epoch, b.patience);
    norm_and_rope<1>(x, {q_norm}, cos, sin, lane);
    spread_query(x[0], s.row[warp], q, lane);
  }

  const int dim = b.tid;
  while (split < splits) {
    const int current = split;
    Softmax softmax;
    while (split == current) {
      const int here = base;
      Row value[kRows];
      old_rows(value, here, value_offset);
      with_fresh(key, here, false), with_fresh(value, here, true);
      float score[kRows];
      softmax.scores(q, key, [&](int j) { return position_of(here, j) <= position; }, score);
      base += kSpan;
      if (base % kSplitPositions == 0) base += kSplitPositions * (kSplits - 1);
      if (base > position) split += mine.sharers, base = split * kSplitPositions;
      if (split < splits) old_rows(key, base, 0);
      softmax.add(score, value);
    }
    float four[4];
    const int first = softmax.join(four, lane);
    *reinterpret_cast<float4*>(&s.row[warp][first]) = make_float4(four[0], four[1], four[2], four[3]);
    if (lane == 0) s.stat[warp] = make_float2(softmax.top, softmax.total);
    sync_compute<kComputeThreads>();
    if (dim < kHeadDim) {
      float best = -INFINITY, sum = 0.f, value = 0.f;
#pragma unroll
      for (int i = 0; i < kWarps; i++) best = fmaxf(best, s.stat[i].x);
#pragma unroll
      for (int i = 0; i < kWarps; i++) {
        const float weight = __expf(s.stat[i].x - best);
        sum = fmaf(weight, s.stat[i].y, sum), value = fmaf(weight, s.row[i][dim], value);
      }
      if (mine.sub) {
        Packet* slot = b.x.part + ((mine.column * S::kHeads + mine.head) * kSplits + current) * kHeadDim + dim;
        publish(slot, __float_as_uint(value), __float_as_uint(best), __float_as_uint(sum), b.epoch);
      } else {
        s.part[current][dim] = value;
        if (lane == 0) s.part_stat[current][warp] = make_float2(best, sum);
        __syncwarp();
      }
    }
    if (split < splits) sync_compute<kComputeThreads>();  // s.row is about to be written again
  }
  if (mine.sub || dim >= kHeadDim) return;

  // The column's first block of a head weighs the splits together.
  uint4 part[kSplits];
  const Packet* slots = b.x.part + (mine.column * S::kHeads + mine.head) * kSplits * kHeadDim + dim;
  uint32_t theirs = 0;
#pragma unroll
  for (int n = 0; n < kSplits; n++) {
    part[n] = make_uint4(0, __float_as_uint(-INFINITY), 0, 0);
    if (n >= splits) continue;
    if (n % mine.sharers) theirs |= 1u << n;
    else
      part[n] = make_uint4(__float_as_uint(s.part[n][dim]), __float_as_uint(s.part_stat[n][warp].x),
                           __float_as_uint(s.part_stat[n][warp].y), 0);
  }
  await_packets(part, theirs, [&](int n) { return slots + n * kHeadDim; }, b.epoch, b.patience);
  float best = -INFINITY, sum = 0.f, value = 0.f;
#pragma unroll
  for (int n = 0; n < kSplits; n++) best = fmaxf(best, __uint_as_float(part[n].y));
#pragma unroll
  for (int n = 0; n < kSplits; n++) {
    const float weight = __expf(__uint_as_float(part[n].y) - best);
    value = fmaf(weight, __uint_as_float(part[n].x), value), sum = fmaf(weight, __uint_as_float(part[n].z), sum);
  }
  value /= sum;
  const uint32_t pair = pack2(value, __shfl_down_sync(~0u, value, 1)), next = __shfl_down_sync(~0u, pair, 2);
  if (lane % 4 == 0)
    publish(b.x.attn + packet_index((mine.head * kHeadDim + dim) / 4, mine.column), pair, next, 0, b.epoch);
}

// Code predictor: at most 16 positions of one frame, kept by the block of their head and sequence. One warp per row,
// this one's is `row` of its sequence's; they are neighbouring columns. kv: [2][kGroups][head_dim] of this layer, this
// block's own.
template <class S, class B>
__device__ __forceinline__ void attend_frame(B& b, const StackWeights& w, int index, const Assignment& mine,
                                             int sequences, int rows, int row, int position,
                                             bf16 (*kv)[kGroups][kHeadDim]) {
  constexpr int kRows = 4;  // of 4 positions each
  if (mine.head >= S::kHeads || mine.column >= sequences || mine.sub || row >= rows) return;
  const int lane = b.lane, group = lane / 8, t = lane % 8, kv_head = mine.head / S::kGroup, last = position + row;
  const uint2 q_norm = load_norm(w.q_norm + index * kHeadDim, lane),
              k_norm = load_norm(w.k_norm + index * kHeadDim, lane);
  Four x[3];
  for (int p = position; p <= last; p++) {  // the second row's warp makes the first row's key and value as well
    const Tagged* qkv = b.x.qkv + (mine.column * rows + p - position) * S::kQkv;
    const Four cos = load_angles(w.rope_cos + p * (kHeadDim / 2), lane),
               sin = load_angles(w.rope_sin + p * (kHeadDim / 2), lane);
    await_heads(
        x, {qkv + mine.head * kHeadDim, qkv + S::kQ + kv_head * kHeadDim, qkv + S::kQ + S::kKv + kv_head * kHeadDim},
        lane, b.epoch, b.patience);
    norm_and_rope<2>(x, {q_norm, k_norm}, cos, sin, lane);
    store_four(kv[0][p], x[1], lane), store_four(kv[1][p], x[2], lane);
  }
  float q[kLaneDims], score[kRows], four[4];
  spread_query(x[0], b.s.attention.row[b.warp], q, lane);
  Row old[kRows];
  auto rows_of = [&](int which) {
#pragma unroll
    for (int j = 0; j < kRows; j++)
      old[j] = j * 4 + group <= last ? load_row(kv[which][j * 4 + group] + t * kLaneDims) : Row{};
  };
  Softmax softmax;
  rows_of(0);
  softmax.scores(q, old, [&](int j) { return j * 4 + group <= last; }, score);
  rows_of(1);
  softmax.add(score, old);
  const int first = softmax.join(four, lane);
  const float inv = 1.f / softmax.total;
  publish(b.x.attn + packet_index((mine.head * kHeadDim + first) / 4, mine.column * rows + row),
          pack2(four[0] * inv, four[1] * inv), pack2(four[2] * inv, four[3] * inv), 0, b.epoch);
}

}  // namespace qmk
