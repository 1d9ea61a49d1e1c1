// Attention of many columns, as kernels of their own: the bits of attention.cuh.
//
// Old keys and values go straight from memory to the registers that feed the tensor cores. A warp has a tile of keys
// and one of values on their way, 8 KB; 16 warps of a multiprocessor have 128 KB, several times what memory needs to
// be busy.
//
// The results go to publish(p, column, low, high): packet p of a column's attention output, four values as bf16.
#pragma once
#include <cuda_runtime.h>

#include "attention.cuh"

namespace qmk {

constexpr int kAttentionWarps = 4, kAttentionThreads = kAttentionWarps * 32;  // of a block
constexpr int kAttentionBlocks = 4;                                           // of a multiprocessor, at least

// Queries, key and value of a column's own position. Heads of a key-value head have numbers: its queries, key, value.
struct FreshHeads : Queries {
  alignas(16) bf16 fresh[2][kHeadDim];

  // key: where the key belongs in memory; the value belongs `to_value` behind it. Stored: it lies there already.
  template <class S, bool Stored = false>
  __device__ __forceinline__ void keep(int number, uint2 high, uint2 low, int position, bf16* key, int to_value,
                                       int lane) {
    const int is_value = number - S::kGroup;
    if (is_value < 0) return store_query(*this, number, high, low, lane);
    store_dims(fresh[is_value], high, lane, lane / 2);
    if constexpr (!Stored) store_dims(key + is_value * to_value, high, lane, unit_place(position, lane / 2));
  }
};

// A head's number -> its place among a column's heads.
template <class S>
__device__ __forceinline__ int head_of(int kv_head, int number) {
  const int is_value = number - S::kGroup;
  return is_value < 0 ? kv_head * S::kGroup + number : S::kHeads + is_value * S::kKvHeads + kv_head;
}
__device__ __forceinline__ LaneDims load_dims(const float* head, int lane) {
  const float4 x = reinterpret_cast<const float4*>(head)[lane];
  return {{x.x, x.y, x.z, x.w}};
}

// Of 16 positions, the first `old` of which lie in memory from `rows` on: this lane's keys or values of these. Behind
// them the tile keeps what it had.
template <bool Values>
__device__ __forceinline__ void load_tile(Tile& tile, const bf16* rows, int old, int lane) {
  const int first = Values ? value_row(lane, 0) : lane / 4, unit = unit_place(first, Values ? lane / 4 : lane % 4);
  const uint4* const from = reinterpret_cast<const uint4*>(rows + first * kHeadDim);
#pragma unroll
  for (int i = 0; i < 8; i++) {
    const int n = i % 2, j = i / 2;
    const int row = Values ? j % 2 + j / 2 * 8 : n * 8;                                      // from `first` on
    const int place = Values ? (unit ^ j % 2 * 4) + n * 8 : (unit ^ j % 2 * 4) + j / 2 * 8;  // unit_place, by its bits
    if (first + row < old) tile.unit[i] = __ldcs(from + row * (kHeadDim / 8) + place);
  }
}
// The rows behind: the fresh one. What comes after it weighs nothing, but must be a number.
template <bool Values>
__device__ __forceinline__ void complete_tile(Tile& tile, const FreshHeads& s, int old, int lane) {
  const uint4* const fresh = reinterpret_cast<const uint4*>(s.fresh[Values]);
#pragma unroll
  for (int i = 0; i < 8; i++) {
    const int n = i % 2, j = i / 2;
    if ((Values ? value_row(lane, j) : lane / 4 + n * 8) >= old)
      tile.unit[i] = fresh[Values ? lane / 4 + n * 8 : 4 * j + lane % 4];
  }
}
// The softmax of a tile whose first position is `start`.
template <class S>
__device__ __forceinline__ Softmax softmax_of(const Tile& keys, const Queries& queries, int start, int position,
                                              int lane) {
  float2 scores = keys.scores(queries, S::kGroup, lane);
  if (start + lane / 4 > position) scores.x = -INFINITY;
  if (start + lane / 4 + 8 > position) scores.y = -INFINITY;
  return Softmax(scores, lane);
}

// ---- talker

// What the talker's attention takes. The kernel waits only for `qkv`: `columns` must be there when the graph starts,
// and old keys and values are of earlier frames, which ended before it starts. Those of a prompt's rows may be of other
// columns of the launch. There keep_prompt_kernel runs first, and the attention waits before it loads any.
struct TalkerAttention {
  const float* qkv;       // [columns][S::kQkv] of this layer, neither normed nor turned
  const Column* columns;  // [columns]; each holds one fresh position
  const int* count;       // of columns
  bf16* kv;               // as in FrameParams
  StackWeights weights;
  int index;  // of the layer
};

template <class S>
struct TalkerScratch : FreshHeads {
  TileShares<S::kGroup> shares[kShares];  // of a round each
  // Each thread's own: of up to 4 splits, then of so many together.
  static constexpr int kTogether = 4;
  float3 part[kTogether][kAttentionThreads];
  float4 parts[kSplits / kTogether][kAttentionThreads];  // sum of values, largest score, sum of weights
};

// Where the key of a column's position belongs in memory. Its value belongs to_value<S> behind it.
template <class S>
constexpr int to_value = S::kKvHeads * kPagePositions * kHeadDim;
template <class S>
__device__ __forceinline__ bf16* key_of(const TalkerAttention& a, const Column& column, int kv_head) {
  return layer_kv<S>(a.kv, a.index, kv_head) +
         column.pages[column.position / kPagePositions] * page_stride<S>(a.weights) +
         column.position % kPagePositions * kHeadDim;
}

// The keys and values of prompts' rows, a head of a column by a block. Grid: S::kKvHeads, columns. Block: two warps.
template <class S>
__global__ void keep_prompt_kernel(const __grid_constant__ TalkerAttention a) {
  cudaTriggerProgrammaticLaunchCompletion();
  const int kv_head = blockIdx.x, is_value = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (blockIdx.y >= *a.count) return;
  const Column& column = a.columns[blockIdx.y];
  const int angles = column.position * (kHeadDim / 2);
  const uint2 norm = load_norm(a.weights.k_norm + a.index * kHeadDim, lane);
  const LaneDims cos = load_angles(a.weights.rope_cos + angles, lane),
                 sin = load_angles(a.weights.rope_sin + angles, lane);
  cudaGridDependencySynchronize();
  const float* const qkv = a.qkv + static_cast<size_t>(blockIdx.y) * S::kQkv;
  LaneDims x = load_dims(qkv + head_of<S>(kv_head, S::kGroup + is_value) * kHeadDim, lane);
  if (!is_value) norm_and_rope(x, norm, cos, sin, lane);
  store_dims(key_of<S>(a, column, kv_head) + is_value * to_value<S>, rounded(x), lane,
             unit_place(column.position, lane / 2));
}

// A key-value head of a column, by a block. A warp takes the same 16 positions of every page. Two pages make a round,
// as in PagedAttention; then each thread adds the round's tiles in two dims of a query.
template <class S, bool Prompt, class Publish>
__device__ __forceinline__ void attend_column(const TalkerAttention& a, TalkerScratch<S>& s, int kv_head, int column,
                                              Publish publish) {
  static_assert(kAttentionWarps * kTile == kPagePositions && kTiles == 2 * kAttentionWarps);
  static_assert(S::kGroup + 2 == kAttentionWarps && S::kGroup * kHeadDim / 2 == kAttentionThreads);
  constexpr int kTogether = TalkerScratch<S>::kTogether, kToValue = to_value<S>;
  const int tid = threadIdx.x, warp = tid / 32, lane = tid % 32;
  const int* const pages = a.columns[column].pages;
  const int position = a.columns[column].position, last_page = position / kPagePositions;
  const size_t stride = page_stride<S>(a.weights);
  bf16* const kv = layer_kv<S>(a.kv, a.index, kv_head);
  bf16* const own_kv = kv + warp * kTile * kHeadDim;  // this warp's positions of page 0
  const int own = warp * kTile;
  Tile keys{}, values{};
  const bf16* rows = own_kv + pages[0] * stride;
  int next_page = pages[min(1, last_page)];
  if constexpr (Prompt) cudaGridDependencySynchronize();
  load_tile<false>(keys, rows, position - own, lane);
  load_tile<true>(values, rows + kToValue, position - own, lane);
  {
    const StackWeights& w = a.weights;
    const uint2 norm = load_norm((warp < S::kGroup ? w.q_norm : w.k_norm) + a.index * kHeadDim, lane);
    const LaneDims cos = load_angles(w.rope_cos + position * (kHeadDim / 2), lane),
                   sin = load_angles(w.rope_sin + position * (kHeadDim / 2), lane);
    bf16* const key = key_of<S>(a, a.columns[column], kv_head);
    const Watch watch = a.columns[column].watch;
    cudaGridDependencySynchronize();
    LaneDims x = load_dims(a.qkv + static_cast<size_t>(column) * S::kQkv + head_of<S>(kv_head, warp) * kHeadDim, lane);
    if (warp <= S::kGroup) norm_and_rope(x, norm, cos, sin, lane);
    const uint2 high = rounded(x), low = rest_of(x, high);
    s.template keep<S, Prompt>(warp, high, low, position, key, kToValue, lane);
    if (warp < S::kGroup) keep_query(watch, a.index * S::kHeads + head_of<S>(kv_head, warp), high, low, lane);
  }
  __syncthreads();

  const int split_bits = split_log(position), splits = (position >> split_bits) + 1;
  const int at_once = min(1 << (split_bits - kTileLog), kTiles);  // tiles of a split that a round takes
  const int query = tid / (kHeadDim / 2), dim = tid % (kHeadDim / 2) * 2;
  WeighedSum total;  // of a split so far
#pragma unroll 1
  for (int page = 0; page <= last_page; page++) {
    auto& shares = s.shares[page / 2 % kShares];
    const int start = page * kPagePositions + own, slot = page % 2 * kAttentionWarps + warp;
    if (start <= position) {
      rows = own_kv + next_page * stride;
      next_page = pages[min(page + 2, last_page)];
      const int old = position - start;  // positions
      if (old < kTile) complete_tile<false>(keys, s, old, lane);
      const Softmax softmax = softmax_of<S>(keys, s, start, position, lane);
      load_tile<false>(keys, rows, old - kPagePositions, lane);
      if (old < kTile) complete_tile<true>(values, s, old, lane);
      float out[2][8];
      values.weigh(softmax.weights, out);
      load_tile<true>(values, rows + kToValue, old - kPagePositions, lane);
      const float sum = softmax.total();
      if (lane < S::kGroup) shares.stat[slot][lane] = make_float2(softmax.top, sum);
      if (lane % 4 < S::kGroup) {
        float* const row = shares.row[slot][lane % 4] + lane / 4 * 8;
#pragma unroll
        for (int n = 0; n < 2; n++)
#pragma unroll
          for (int i = 0; i < 8; i += 4)
            *reinterpret_cast<float4*>(row + n * 64 + i) =
                make_float4(out[n][i], out[n][i + 1], out[n][i + 2], out[n][i + 3]);
      }
    }
    if (page % 2 == 0 && page < last_page) continue;
    __syncthreads();
    const int first = page / 2 * kTiles, end = min(first + kTiles, (position >> kTileLog) + 1);  // the round's tiles
#pragma unroll 1
    for (int tile = first; tile < end; tile += at_once) {
      total.template add_tiles<kTiles>(shares, tile - first, min(end - tile, at_once), query, dim);
      const int behind = (tile + at_once) << kTileLog;  // first position behind them
      if (splits == 1 || (behind <= position && behind & ((1 << split_bits) - 1))) continue;
      const int split = (behind - 1) >> split_bits, nth = split % kTogether;
      s.part[nth][tid] = total.part();
      total = {};
      if (nth + 1 < kTogether && split + 1 < splits) continue;
      WeighedSum sum;
      sum.template add<kTogether>(
          nth + 1, [&](int i) { return make_float2(s.part[i][tid].z, 1.f); },
          [&](int i) { return make_float2(s.part[i][tid].x, s.part[i][tid].y); });
      s.parts[split / kTogether][tid] = make_float4(sum.value.x, sum.value.y, sum.max_score, sum.sum);
    }
  }
  if (splits > 1)
    total.template add<kSplits / kTogether>((splits + kTogether - 1) / kTogether,
                                            [&](int i) { return make_float2(s.parts[i][tid].z, s.parts[i][tid].w); },
                                            [&](int i) { return make_float2(s.parts[i][tid].x, s.parts[i][tid].y); });
  const uint2 packet = total.packet();
  const int head = kv_head * S::kGroup + query;
  if (lane % 2 == 0) publish((head * kHeadDim + dim) / 4, column, packet.x, packet.y);
}

// Grid: S::kKvHeads, columns or more. Block: kAttentionThreads.
template <class S, bool Prompt, class Publish>
__global__ void __launch_bounds__(kAttentionThreads, kAttentionBlocks)
    talker_attention(const __grid_constant__ TalkerAttention a, Publish publish) {
  __shared__ TalkerScratch<S> s;
  cudaTriggerProgrammaticLaunchCompletion();
  if (blockIdx.y < *a.count) attend_column<S, Prompt>(a, s, blockIdx.x, blockIdx.y, publish);
}

// ---- code predictor

// What the code predictor's attention takes. Everything but the weights may be of kernels just before.
struct PredictorAttention {
  const float* qkv;   // [columns][S::kQkv] of this layer, neither normed nor turned; not read where there is a table
  bf16* frame_kv;     // as in Batch
  const bf16* table;  // Tables::heads from the last group's codes on, or null
  const int* codes;   // [columns] of the last group; read where there is a table
  StackWeights weights;
  const int* count;  // of columns
  int index, position;
};

// A key-value head of a column, by a warp: all positions are one tile.
template <class S, class Publish>
__device__ __forceinline__ void attend_frame_column(const PredictorAttention& a, FreshHeads& s, int kv_head, int column,
                                                    int lane, Publish publish) {
  constexpr int kFreshHeads = S::kGroup + 2, kToValue = kGroups * kHeadDim;
  const int position = a.position;
  const StackWeights& w = a.weights;
  const uint2 q_norm = load_norm(w.q_norm + a.index * kHeadDim, lane),
              k_norm = load_norm(w.k_norm + a.index * kHeadDim, lane);
  const LaneDims cos = load_angles(w.rope_cos + position * (kHeadDim / 2), lane),
                 sin = load_angles(w.rope_sin + position * (kHeadDim / 2), lane);
  bf16* const rows =
      a.frame_kv + ((static_cast<size_t>(kv_head) * kBatchColumns + column) * S::kMaxLayers + a.index) * 2 * kToValue;
  bf16* const key = rows + position * kHeadDim;
  cudaGridDependencySynchronize();
  uint2 high[kFreshHeads], low[kFreshHeads]{};
  Tile keys{}, values{};
  if (a.table) {
    const bf16* const row = a.table + static_cast<size_t>(a.codes[column]) * (S::kQkv + S::kQ);
    load_tile<false>(keys, rows, position, lane);
    load_tile<true>(values, rows + kToValue, position, lane);
#pragma unroll
    for (int number = 0; number < kFreshHeads; number++) {
      const uint2* const dims = reinterpret_cast<const uint2*>(row + head_of<S>(kv_head, number) * kHeadDim) + lane;
      high[number] = *dims;
      if (number < S::kGroup) low[number] = dims[S::kQkv / 4];
    }
  } else {
    LaneDims x[kFreshHeads];
#pragma unroll
    for (int number = 0; number < kFreshHeads; number++)
      x[number] =
          load_dims(a.qkv + static_cast<size_t>(column) * S::kQkv + head_of<S>(kv_head, number) * kHeadDim, lane);
    load_tile<false>(keys, rows, position, lane);
    load_tile<true>(values, rows + kToValue, position, lane);
#pragma unroll
    for (int number = 0; number < kFreshHeads; number++) {
      if (number <= S::kGroup) norm_and_rope(x[number], number < S::kGroup ? q_norm : k_norm, cos, sin, lane);
      high[number] = rounded(x[number]);
      if (number < S::kGroup) low[number] = rest_of(x[number], high[number]);
    }
  }
#pragma unroll
  for (int number = 0; number < kFreshHeads; number++)
    s.template keep<S>(number, high[number], low[number], position, key, kToValue, lane);
  __syncwarp();
  complete_tile<false>(keys, s, position, lane);
  complete_tile<true>(values, s, position, lane);
  const Softmax softmax = softmax_of<S>(keys, s, 0, position, lane);
  float out[2][8];
  values.weigh(softmax.weights, out);
  const float inv = inverse_of(softmax.total());
  const int head = kv_head * S::kGroup + lane % 4;
  if (lane % 4 >= S::kGroup) return;
#pragma unroll
  for (int n = 0; n < 2; n++)
#pragma unroll
    for (int i = 0; i < 8; i += 4)
      publish((head * kHeadDim + n * 64 + lane / 4 * 8 + i) / 4, column, pack2(out[n][i] * inv, out[n][i + 1] * inv),
              pack2(out[n][i + 2] * inv, out[n][i + 3] * inv));
}

// Grid: S::kKvHeads, a block for every kAttentionWarps columns. Block: kAttentionThreads.
template <class S, class Publish>
__global__ void __launch_bounds__(kAttentionThreads, kAttentionBlocks)
    predictor_attention(const __grid_constant__ PredictorAttention a, Publish publish) {
  __shared__ FreshHeads s[kAttentionWarps];
  cudaTriggerProgrammaticLaunchCompletion();
  const int warp = threadIdx.x / 32, column = blockIdx.y * kAttentionWarps + warp;
  if (column < *a.count) attend_frame_column<S>(a, s[warp], blockIdx.x, column, threadIdx.x % 32, publish);
}

}  // namespace qmk
