// Attention on the tensor cores. A block works on one key-value head, its query heads, and one column.
//
// A tile is 16 positions. One warp takes a tile's keys into registers as mma's A, for all queries at once. Another warp
// takes its values. The talker's old keys and values come through the ring, between the weights of q k v and of o, so
// they are there before the heads of the current position. Each of these heads has one warp that awaits it, norms it
// and turns it. The other warps sleep.
//
// A talker's context is cut into splits of 64 positions; longer contexts double that until 16 splits suffice. The
// position alone decides. The blocks of a key-value head (16 of 128) share the columns of a launch, and a column's
// blocks share its splits. So the sums do not depend on the number of columns. A multiprocessor reads 64 bytes a cycle,
// so several blocks share even a short context, though it takes one exchange more to weigh their splits together.
#pragma once
#include "../pages.cuh"
#include "exchange.cuh"
#include "ring.cuh"

namespace qmk {

constexpr float kScoreScale = 0.08838834764831845f * 1.4426950408889634f;  // head_dim ^ -1/2, to the base of 2
constexpr int kTileLog = 4, kTile = 1 << kTileLog;                         // positions of a warp at a time
constexpr int kQueries = 4;                                                // at most: half of an mma's columns
constexpr int kShareLog = kBlocks == 128 ? 4 : kBlocks == 64 ? 3 : 2;
constexpr int kShare = 1 << kShareLog;  // blocks of a key-value head
constexpr int kTilesLog = 3,
              kTiles = 1 << kTilesLog;  // that a block works on at a time: a warp for keys, one for values
constexpr int kStageRows = kStageBytes / (kHeadDim * 2), kStageTiles = kStageRows / kTile;  // of a stage of the ring
static_assert(kStageRows <= kPagePositions && kPagePositions <= 1 << kSplitLog);
static_assert(2 * kTiles == kWarps && kPagePositions % kTile == 0 && kGroups == kTile);
static_assert(kShare == kBlocks / 8 && kColumns <= kShare);

// Positions of a split of the context of a position, as a power of two.
__device__ __forceinline__ int split_log(int position) {
  int log = kSplitLog;
  while (position >> log >= kSplits) log++;
  return log;
}

// What this block attends to: splits rank, rank + sharers, ... of one column, for the queries of one key-value head.
// `sharers` blocks share the column's splits; `rank` is this block's number among them.
struct Assignment {
  int kv_head, column, rank, sharers;
};
__device__ __forceinline__ Assignment assignment(int block, int columns) {
  const int size = kShareLog - (columns > 1) - (columns > 2) - (columns > 4) - (columns > 8), sharers = 1 << size;
  return {block / kShare, block % kShare >> size, block & (sharers - 1), sharers};
}

struct LaneDims {  // a lane's 4 dims of a head, in the exchange's layout
  float v[4];
};
// Weights of a head's norm, as they lie in memory. They are widened where they are used: the load stalls nothing
// before.
__device__ __forceinline__ uint2 load_norm(const bf16* p, int lane) {
  return *reinterpret_cast<const uint2*>(p + lane * 4);
}
__device__ __forceinline__ LaneDims load_angles(const float* p, int lane) {  // dims i and i + 64 turn by the same angle
  const float4 a = *reinterpret_cast<const float4*>(p + lane % 16 * 4);
  return {{a.x, a.y, a.z, a.w}};
}
__device__ __forceinline__ LaneDims await_dims(const Tagged* head, int lane, uint32_t epoch, Patience& patience) {
  float2 pair[2];
  await_pairs(pair, [&](int i) { return head + lane * 4 + i * 2; }, epoch, patience);
  return {{pair[0].x, pair[0].y, pair[1].x, pair[1].y}};
}

// Head norm, then rotate-half. This model has the same position on all three M-RoPE axes, so a pair of dims has one
// angle.
__device__ __forceinline__ void norm_and_rope(LaneDims& x, uint2 norm, const LaneDims& cos, const LaneDims& sin,
                                              int lane) {
  float square = 0.f;
#pragma unroll
  for (int i = 0; i < 4; i++) square = fmaf(x.v[i], x.v[i], square);
#pragma unroll
  for (int o = 16; o; o >>= 1) square += __shfl_xor_sync(~0u, square, o);
  const float inv = rsqrtf(square * (1.f / kHeadDim) + 1e-6f);
  const float weight[4] = {low_bf16(norm.x), high_bf16(norm.x), low_bf16(norm.y), high_bf16(norm.y)};
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const float y = x.v[i] * inv * weight[i], other = __shfl_xor_sync(~0u, y, 16);
    // One of the products fused, not the other: wherever this is inlined, the same bits (see fill_heads).
    x.v[i] = fmaf(y, cos.v[i], __fmul_rn(lane < 16 ? -other : other, sin.v[i]));
  }
}

// 4 dims as bf16, and what that leaves of each.
__device__ __forceinline__ uint2 rounded(const LaneDims& x) {
  return make_uint2(pack2(x.v[0], x.v[1]), pack2(x.v[2], x.v[3]));
}
__device__ __forceinline__ uint2 rest_of(const LaneDims& x, uint2 high) {
  return make_uint2(pack2(x.v[0] - low_bf16(high.x), x.v[1] - high_bf16(high.x)),
                    pack2(x.v[2] - low_bf16(high.y), x.v[3] - high_bf16(high.y)));
}
// Store 4 dims of every lane. unit: the unit of 8 dims that this lane's dims belong to.
__device__ __forceinline__ void store_dims(bf16* row, uint2 dims, int lane, int unit) {
  reinterpret_cast<uint2*>(row)[unit * 2 + lane % 2] = dims;
}

struct Queries {
  static constexpr int kStride = kHeadDim + 32;   // no two lanes of a load of `query` meet in a bank
  alignas(16) bf16 query[2 * kQueries][kStride];  // of each its value as bf16, then the rest
};
struct AttentionScratch : Queries {
  // Keys and values of this launch's positions, and zeros behind them.
  alignas(16) bf16 fresh[kColumns + 1][2][kHeadDim];
};
// Shares of the tiles. They use the memory of partial sums that are already added up. Two of them take turns.
constexpr int kShares = 2;
template <int Group>
struct TileShares {
  alignas(16) float row[kTiles][Group][kHeadDim];
  float2 stat[kTiles][Group];  // largest score and sum of weights
};
template <int Group>
struct AttentionShares : TileShares<Group> {
  uint2 weights[kTiles][32];  // of a tile, as its warp of values takes them
};

// What a thread has added up so far: of one query, two dims.
struct WeighedSum {
  float max_score = -INFINITY, sum = 0.f;  // sum: of the weights
  float2 value{};

  // Add `count` shares, `Most` at most. stat(i): the largest score of share i and its sum of weights; values(i): its
  // sum of values.
  template <int Most, class Stat, class Values>
  __device__ __forceinline__ void add(int count, Stat stat, Values values) {
    float2 stats[Most];
    const float before = max_score;
#pragma unroll
    for (int i = 0; i < Most; i++) {
      stats[i] = i < count ? stat(i) : make_float2(-INFINITY, 0.f);
      max_score = fmaxf(max_score, stats[i].x);
    }
    const float keep = exp2_of(before - max_score);
    sum *= keep, value.x *= keep, value.y *= keep;
#pragma unroll
    for (int i = 0; i < Most; i++) {
      if (i >= count) continue;
      const float weight = exp2_of(stats[i].x - max_score);
      const float2 x = values(i);
      sum = fmaf(weight, stats[i].y, sum), value.x = fmaf(weight, x.x, value.x), value.y = fmaf(weight, x.y, value.y);
    }
  }
  // The same of some tiles of a query, in the two dims from `dim` on.
  template <int Most, int Group>
  __device__ __forceinline__ void add_tiles(const TileShares<Group>& shares, int first, int count, int query, int dim) {
    add<Most>(
        count, [&](int i) { return shares.stat[first + i][query]; },
        [&](int i) { return *reinterpret_cast<const float2*>(&shares.row[first + i][query][dim]); });
  }
  // Of a whole split: the weighed mean of its values, and its score among the splits.
  __device__ __forceinline__ float3 part() const {
    const float inv = inverse_of(sum);
    return make_float3(value.x * inv, value.y * inv, max_score + log2_of(sum));
  }
  // The weighed mean of this thread's dims, then of the next thread's.
  __device__ __forceinline__ uint2 packet() const {
    const float inv = inverse_of(sum);
    const uint32_t pair = pack2(value.x * inv, value.y * inv);
    return make_uint2(pair, __shfl_down_sync(~0u, pair, 1));
  }
};

// Await a head. Queries and keys are normed and turned.
template <class S, class B>
__device__ __forceinline__ LaneDims await_head(B& b, const StackWeights& w, int index, int head, int column,
                                               int position) {
  const bf16* weights = (head < S::kHeads ? w.q_norm : w.k_norm) + index * kHeadDim;
  const uint2 norm = load_norm(weights, b.lane);
  const LaneDims cos = load_angles(w.rope_cos + position * (kHeadDim / 2), b.lane),
                 sin = load_angles(w.rope_sin + position * (kHeadDim / 2), b.lane);
  LaneDims x = await_dims(b.x.qkv + column * S::kQkv + head * kHeadDim, b.lane, b.epoch, b.patience);
  if (head < S::kHeads + S::kKvHeads) norm_and_rope(x, norm, cos, sin, b.lane);
  return x;
}
__device__ __forceinline__ void store_query(Queries& s, int query, uint2 high, uint2 low, int lane) {
  reinterpret_cast<uint2*>(s.query[2 * query])[lane] = high;
  reinterpret_cast<uint2*>(s.query[2 * query + 1])[lane] = low;
}

// Keep a query if it is watched, as the products take it: its value as bf16 plus the rest. number: of its head, counted
// through all layers.
__device__ __forceinline__ void keep_query(const Watch& watch, int number, uint2 high, uint2 low, int lane) {
  const int at = number - watch.first;
  if (at < 0 || at >= watch.heads) return;
  reinterpret_cast<float4*>(watch.queries + at * kHeadDim)[lane] =
      make_float4(low_bf16(high.x) + low_bf16(low.x), high_bf16(high.x) + high_bf16(low.x),
                  low_bf16(high.y) + low_bf16(low.y), high_bf16(high.y) + high_bf16(low.y));
}

// What lane (g, t) = (lane / 4, lane % 4) holds of 16 positions. Keys: unit[2 c + n] is unit 4 c + t of position
// g + 8 n. Values: unit[2 j + n] is unit g + 8 n of position value_row(j). Of the results it holds query t.
__device__ __forceinline__ int value_row(int lane, int j) { return lane % 4 * 2 + j % 2 + j / 2 * 8; }

struct Tile {
  uint4 unit[8];

  // Scores of positions g and g + 8 to the base of 2; queries: how many there are.
  __device__ __forceinline__ float2 scores(const Queries& s, int queries, int lane) const {
    float acc[2][4] = {};
#pragma unroll
    for (int c = 0; c < 4; c++) {
      uint4 q{};
      if (lane / 8 < queries) q = *reinterpret_cast<const uint4*>(&s.query[lane / 4][(4 * c + lane % 4) * 8]);
      const uint4 &low = unit[2 * c], &high = unit[2 * c + 1];
      mma_16x8x16(acc[0], low.x, high.x, low.y, high.y, q.x, q.y);
      mma_16x8x16(acc[1], low.z, high.z, low.w, high.w, q.z, q.w);
    }
    return make_float2((acc[0][0] + acc[1][0] + (acc[0][1] + acc[1][1])) * kScoreScale,
                       (acc[0][2] + acc[1][2] + (acc[0][3] + acc[1][3])) * kScoreScale);
  }
  // Sum of the values by these weights: dims 8 g .. and 64 + 8 g ..
  __device__ __forceinline__ void weigh(uint2 weights, float (&out)[2][8]) const {
#pragma unroll
    for (int i = 0; i < 8; i++) {
      auto pair = [&](int j, int n) {  // dim i of two positions
        auto word = [i](const uint4& v) { return i < 2 ? v.x : i < 4 ? v.y : i < 6 ? v.z : v.w; };
        return __byte_perm(word(unit[2 * j + n]), word(unit[2 * j + 2 + n]), i % 2 ? 0x7632 : 0x5410);
      };
      float acc[4] = {};
      mma_16x8x16(acc, pair(0, 0), pair(0, 1), pair(2, 0), pair(2, 1), weights.x, weights.y);
      out[0][i] = acc[0] + acc[1], out[1][i] = acc[2] + acc[3];
    }
  }
};

// The softmax of a tile: its largest score, and its weights as mma's B. A query has two columns: its weights as bf16,
// then the rest of each.
struct Softmax {
  float top, sum;  // sum: of this lane's weights
  uint2 weights;

  // score: of positions g and g + 8, -infinity where there is none.
  __device__ __forceinline__ Softmax(float2 score, int lane) : top(fmaxf(score.x, score.y)) {
#pragma unroll
    for (int o = 4; o < 32; o *= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, o));
    const float2 weight = make_float2(exp2_of(score.x - top), exp2_of(score.y - top));
    sum = weight.x + weight.y;
    const int from = lane % 4 * 8 + lane / 8;
    float w[4];
    w[0] = __shfl_sync(~0u, weight.x, from), w[1] = __shfl_sync(~0u, weight.x, from + 4);
    w[2] = __shfl_sync(~0u, weight.y, from), w[3] = __shfl_sync(~0u, weight.y, from + 4);
    weights = make_uint2(pack2(w[0], w[1]), pack2(w[2], w[3]));
    if (lane / 4 % 2)
      weights = make_uint2(pack2(w[0] - low_bf16(weights.x), w[1] - high_bf16(weights.x)),
                           pack2(w[2] - low_bf16(weights.y), w[3] - high_bf16(weights.y)));
  }
  // Of all weights.
  __device__ __forceinline__ float total() const {
    float all = sum;
#pragma unroll
    for (int o = 4; o < 32; o *= 2) all += __shfl_xor_sync(~0u, all, o);
    return all;
  }
};

// What a talker's block attends to at a position. Its producer copies old keys and values in this order, and its warps
// take them in this order.
template <class S>
struct Context {
  int position, fresh, split_bits, splits, rank, sharers;  // a split has 1 << split_bits positions
  bool any;                                                // this block attends

  __device__ __forceinline__ Context(const Assignment& assigned, const Column* columns, int count) {
    any = assigned.kv_head < S::kKvHeads && assigned.column < count;
    const Column& c = columns[any ? assigned.column : 0];
    position = c.position, fresh = c.first_fresh, split_bits = split_log(position),
    splits = (position >> split_bits) + 1;
    rank = assigned.rank, sharers = assigned.sharers, any &= rank < splits;
  }
};

// The talker's keys of a layer and a key-value head, page 0.
template <class T>
__device__ __forceinline__ bf16* layer_kv(bf16* kv, int index, int kv_head) {
  return kv + static_cast<size_t>(index * 2 * T::kKvHeads + kv_head) * kPagePositions * kHeadDim;
}
template <class T>
__device__ __forceinline__ bf16* layer_kv(const FrameParams& p, int index, int kv_head) {
  return layer_kv<T>(p.kv, index, kv_head);
}
template <class T>
__device__ __forceinline__ size_t page_stride(const StackWeights& w) {
  return static_cast<size_t>(w.layers) * 2 * T::kKvHeads * kPagePositions * kHeadDim;
}
template <class T>
__device__ __forceinline__ size_t page_stride(const FrameParams& p) {
  return page_stride<T>(p.talker);
}

// The producer's half. For each split of this block and each kStageRows positions: the keys, then the values.
// kv: of this layer and key-value head, page 0.
template <class S>
__device__ __forceinline__ void copy_context(Ring& ring, const Context<S>& x, const int* pages, const bf16* kv,
                                             size_t page_stride, const Pace& pace, Patience& patience, int lane) {
  if (!x.any) return;
  for (int split = x.rank; split < x.splits; split += x.sharers)
    for (int start = split << x.split_bits; start < min((split + 1) << x.split_bits, x.fresh); start += kStageRows) {
      const bf16* rows = kv + pages[start / kPagePositions] * page_stride + start % kPagePositions * kHeadDim;
      const int bytes = min(kStageRows, x.fresh - start) * kHeadDim * 2;
      ring.copy_stage(rows, bytes, false, pace, patience, lane);
      ring.copy_stage(rows + S::kKvHeads * kPagePositions * kHeadDim, bytes, false, pace, patience, lane);
    }
}

// Talker. Keys and values lie in pages. This launch's own positions are in shared memory too, because other blocks
// write the pages.
template <class S, class B>
struct PagedAttention {
  static constexpr int kPairs = kHeadDim / 2, kFinishers = S::kGroup * kPairs;  // threads that finish a split
  static constexpr int kCombined = 4;                                           // splits that a thread combines
  static_assert(S::kGroup <= kQueries && S::kKvHeads * kShare <= kBlocks);
  static_assert(kFinishers * (kTiles >> (kSplitLog - kTileLog)) <= kComputeThreads, "all splits of a round");

  B& b;
  const Assignment& assigned;
  const int position, fresh, split_bits, splits;  // of Context
  // The block works in rounds. A round takes 1 << tile_bits tiles of each of some splits. A split of more tiles takes
  // several rounds: `split` is the round's first one, `offset` how many positions of it earlier rounds took.
  const int tile_bits = min(split_bits - kTileLog, kTilesLog), splits_at_once = kTiles >> tile_bits;
  int split = assigned.rank, offset = 0;
  const bool takes_values = b.warp >= kTiles;
  const int slot = b.warp % kTiles;  // this warp's among the block's tiles
  Tile tile{};
  int tile_start = start_of(slot);
  // What this thread finishes: of which of the round's splits, of which query, which two dims. The warps of values come
  // first; those of keys go on meanwhile.
  const int own_nth = (b.tid + kComputeThreads / 2) % kComputeThreads / kFinishers,
            own_query = b.tid % kFinishers / kPairs, dim = b.tid % kPairs * 2,
            head = assigned.kv_head * S::kGroup + own_query;
  WeighedSum total;  // of that split so far

  __device__ __forceinline__ PagedAttention(B& block, const Assignment& assigned, const Context<S>& x)
      : b(block),
        assigned(assigned),
        position(x.position),
        fresh(x.fresh),
        split_bits(x.split_bits),
        splits(x.splits) {}

  // The first position of a tile of this round, or one behind them all.
  __device__ __forceinline__ int start_of(int number) const {
    const int nth = number >> tile_bits, tile_split = split + nth * assigned.sharers;
    const int start = (tile_split << split_bits) + offset + (number - (nth << tile_bits)) * kTile;
    return nth < splits_at_once && tile_split < splits && start <= position ? start : position + 1;
  }
  __device__ __forceinline__ bool next_round() {
    offset += kTile << tile_bits;
    if (offset >> split_bits) offset = 0, split += splits_at_once * assigned.sharers;
    return split < splits;
  }

  // Take this warp's tile of a round from the ring's next stages: its rows from before this launch.
  __device__ __forceinline__ void take_tile() {
    tile_start = start_of(slot);
    // Each bit of a unit's index is worth so many bytes.
    const int row = takes_values ? lane() % 4 * 2 : lane() / 4;
    const int unit = unit_place(row, takes_values ? lane() / 4 : lane() % 4) * 16, turned = unit & 64 ? -64 : 64,
              bit0 = takes_values ? 128 : 2048, bit1 = takes_values ? 256 + turned : turned,
              bit2 = takes_values ? 2048 : 128;
#pragma unroll 1
    for (int stage = 0; stage < 2 * kTiles / kStageTiles; stage++) {
      if (start_of(stage / 2 * kStageTiles) >= fresh) break;
      b.ring.visit(b.patience, [&](uint32_t address) {
        uint32_t loaded = 0;
        if (stage != slot / kStageTiles * 2 + takes_values) return loaded;
        address += (slot % kStageTiles * kTile + row) * (kHeadDim * 2) + unit;
#pragma unroll
        for (int i = 0; i < 8; i++) {
          tile.unit[i] = load_shared16(address + i % 2 * bit0 + i / 2 % 2 * bit1 + i / 4 * bit2);
          loaded |= tile.unit[i].x;
        }
        return loaded;
      });
    }
  }

  // Await the queries, then key and value of each position of this launch that falls to this block. One warp a head.
  // pages: at(position), its key in the pages.
  template <class Pages>
  __device__ __forceinline__ void await_heads(const StackWeights& w, int index, Pages at) {
    AttentionScratch& s = b.s.attention;
    for (int number = kWarps - 1 - b.warp; number < S::kGroup + 2 * (position - fresh + 1); number += kWarps) {
      const int p = number < S::kGroup ? position : fresh + (number - S::kGroup) / 2,
                is_value = (number - S::kGroup) % 2;
      const int awaited = number < S::kGroup ? assigned.kv_head * S::kGroup + number
                                             : S::kHeads + is_value * S::kKvHeads + assigned.kv_head;
      if (number >= S::kGroup && (p >> split_bits & (assigned.sharers - 1)) != assigned.rank) continue;
      const LaneDims x = await_head<S>(b, w, index, awaited, assigned.column - (position - p), p);
      const uint2 high = rounded(x);
      if (number < S::kGroup) {
        store_query(s, number, high, rest_of(x, high), lane());
      } else {
        store_dims(s.fresh[p - fresh][is_value], high, lane(), lane() / 2);
        if (p == position)
          store_dims(at(p) + is_value * S::kKvHeads * kPagePositions * kHeadDim, high, lane(),
                     unit_place(p, lane() / 2));
      }
    }
    sync_compute<kComputeThreads>();
  }

  // The key or the value of a position of this launch, or the zeros behind them.
  __device__ __forceinline__ const uint4* fresh_row(int p, int is_value) const {
    return reinterpret_cast<const uint4*>(b.s.attention.fresh[min(p, position + 1) - fresh][is_value]);
  }
  __device__ __forceinline__ void score(AttentionShares<S::kGroup>& shares) {
    if (tile_start + kTile > fresh) {
#pragma unroll
      for (int n = 0; n < 2; n++) {
        const int p = tile_start + lane() / 4 + 8 * n;
        if (p < fresh) continue;
#pragma unroll
        for (int c = 0; c < 4; c++) tile.unit[2 * c + n] = fresh_row(p, 0)[4 * c + lane() % 4];
      }
    }
    float2 scores = tile.scores(b.s.attention, S::kGroup, lane());
    if (tile_start + lane() / 4 > position) scores.x = -INFINITY;
    if (tile_start + lane() / 4 + 8 > position) scores.y = -INFINITY;
    const Softmax softmax(scores, lane());
    shares.weights[slot][lane()] = softmax.weights;
    sync_pair(slot);
    const float total = softmax.total();
    if (lane() < S::kGroup) shares.stat[slot][lane()] = make_float2(softmax.top, total);
  }
  __device__ __forceinline__ void weigh(AttentionShares<S::kGroup>& shares) {
    if (tile_start + kTile > fresh) {
#pragma unroll
      for (int j = 0; j < 4; j++) {
        const int p = tile_start + value_row(lane(), j);
        if (p < fresh) continue;
#pragma unroll
        for (int n = 0; n < 2; n++) tile.unit[2 * j + n] = fresh_row(p, 1)[lane() / 4 + 8 * n];
      }
    }
    float out[2][8];
    sync_pair(slot);
    tile.weigh(shares.weights[slot][lane()], out);
    if (lane() % 4 >= S::kGroup) return;
    float* row = shares.row[slot][lane() % 4] + lane() / 4 * 8;
#pragma unroll
    for (int n = 0; n < 2; n++)
#pragma unroll
      for (int i = 0; i < 8; i += 4)
        *reinterpret_cast<float4*>(row + n * 64 + i) =
            make_float4(out[n][i], out[n][i + 1], out[n][i + 2], out[n][i + 3]);
  }

  __device__ __forceinline__ Packet* parts() const {
    return b.x.part + ((assigned.column * S::kHeads + head) * kSplits * kHeadDim + dim) / 2;
  }
  __device__ __forceinline__ void publish_head() const {
    const uint2 packet = total.packet();
    if (lane() % 2 == 0) b.publish_attended((head * kHeadDim + dim) / 4, assigned.column, packet.x, packet.y);
  }

  // Attend to all splits of this block. True: the context has one split only, and its result is published.
  __device__ __forceinline__ bool attend_splits() {
    for (int round = 0; split < splits; round++) {
      auto& shares = b.s.attention_shares[round % kShares];
      const int own_split = split + own_nth * assigned.sharers,
                rows = ((position - (own_split << split_bits) - offset) >> kTileLog) + 1;
      const bool more = next_round();
      if (tile_start <= position) {
        if (takes_values) weigh(shares);
        else score(shares);
      }
      if (more) take_tile();
      sync_compute<kComputeThreads>();
      if (own_nth < splits_at_once && own_split < splits) {
        total.add_tiles<kTiles>(shares, own_nth << tile_bits, min(rows, 1 << tile_bits), own_query, dim);
        if (offset == 0) {
          if (splits == 1) {
            publish_head();
            return true;
          }
          const float3 part = total.part();
          publish(parts() + own_split * kPairs, __float_as_uint(part.x), __float_as_uint(part.y),
                  __float_as_uint(part.z), b.epoch);
          total = {};
        }
      }
    }
    return splits == 1;
  }

  // A column's first block of a head combines the splits: each thread up to 4, then one thread what up to 4 threads
  // made of theirs.
  __device__ __forceinline__ void combine_splits() {
    if (assigned.rank || own_nth * kCombined >= splits) return;
    uint4 part[kCombined];
    uint32_t missing = 0;
#pragma unroll
    for (int n = 0; n < kCombined; n++) {
      part[n] = make_uint4(0, 0, __float_as_uint(-INFINITY), 0);
      missing |= (own_nth * kCombined + n < splits) << n;
    }
    const Packet* slots = parts() + own_nth * kCombined * kPairs;
    await_packets(part, missing, [&](int n) { return slots + n * kPairs; }, b.epoch, b.patience);
#pragma unroll
    for (int n = 0; n < kCombined; n++) total.max_score = fmaxf(total.max_score, __uint_as_float(part[n].z));
#pragma unroll
    for (int n = 0; n < kCombined; n++) {
      const float weight = exp2_of(__uint_as_float(part[n].z) - total.max_score);
      total.value.x = fmaf(weight, __uint_as_float(part[n].x), total.value.x);
      total.value.y = fmaf(weight, __uint_as_float(part[n].y), total.value.y), total.sum += weight;
    }
    if (splits > kCombined) {
      const int holders = (splits + kCombined - 1) / kCombined;
      auto& shares = b.s.attention_shares[0];
      sync_some(holders * kFinishers);  // all have read the shares
      *reinterpret_cast<float2*>(&shares.row[own_nth][own_query][dim]) = total.value;
      if (dim == 0) shares.stat[own_nth][own_query] = make_float2(total.max_score, total.sum);
      sync_some(holders * kFinishers);
      if (own_nth) return;
      total = {};
      total.add_tiles<kSplits / kCombined>(shares, 0, holders, own_query, dim);
    }
    publish_head();
  }

 private:
  __device__ __forceinline__ int lane() const { return b.lane; }
};

// kv: of this layer and key-value head, page 0.
template <class S, class B>
__device__ __forceinline__ void attend_pages(B& b, const StackWeights& w, int index, const Assignment& assigned,
                                             const Column* columns, bf16* kv, size_t page_stride) {
  const Context<S> x(assigned, columns, b.columns);
  if (!x.any) return;
  const int* pages = columns[assigned.column].pages;
  PagedAttention<S, B> attention(b, assigned, x);
  attention.take_tile();
  attention.await_heads(
      w, index, [&](int p) { return kv + pages[p / kPagePositions] * page_stride + p % kPagePositions * kHeadDim; });
  if (!attention.attend_splits()) attention.combine_splits();
}

// Keep the queries that are watched. It comes behind the layer, where nobody waits and few registers are taken: the
// queries lie in shared memory up to the next attention, which is behind a barrier of the block. A column's first block
// of a head keeps them, a warp a query.
template <class S, class B>
__device__ __forceinline__ void keep_queries(B& b, int index, const Column* columns) {
  const Assignment assigned = assignment(block_index(), b.columns);
  const int query = thread_index() / 32, lane = thread_index() % 32;
  if (assigned.rank || query >= S::kGroup || assigned.kv_head >= S::kKvHeads || assigned.column >= b.columns) return;
  const auto& rows = b.s.attention.query;
  keep_query(columns[assigned.column].watch, index * S::kHeads + assigned.kv_head * S::kGroup + query,
             reinterpret_cast<const uint2*>(rows[2 * query])[lane],
             reinterpret_cast<const uint2*>(rows[2 * query + 1])[lane], lane);
}

// Await the heads of a column and leave them in its row of a table (see Tables). Each warp takes some.
template <class S, class B>
__device__ __forceinline__ void fill_heads(B& b, const StackWeights& w, int column, int position, bf16* row) {
  for (int head = b.warp; head < S::kHeads + 2 * S::kKvHeads; head += kWarps) {
    const LaneDims x = await_head<S>(b, w, 0, head, column, position);
    uint2* const dims = reinterpret_cast<uint2*>(row + head * kHeadDim) + b.lane;
    const uint2 high = rounded(x);
    *dims = high;
    if (head < S::kHeads) dims[S::kQkv / 4] = rest_of(x, high);
  }
}

// The second half of attend_frame: this warp's quarter of the dims, once queries, keys and values are there.
template <class S, class B>
__device__ __forceinline__ void weigh_frame(B& b, const Queries& s, const Assignment& assigned, int column,
                                            bool one_query, int rows, int position, const bf16 (*kv)[kGroups][kHeadDim],
                                            int number) {
  const int lane = b.lane;
  const int query = lane % 4, query_row = min(query / S::kGroup, rows - 1), last = position + query_row;
  Tile tile;
#pragma unroll
  for (int i = 0; i < 8; i++) {
    const int p = lane / 4 + i % 2 * 8;
    tile.unit[i] = reinterpret_cast<const uint4*>(kv[0][p])[unit_place(p, i / 2 * 4 + lane % 4)];
  }
  float2 score = tile.scores(s, rows * S::kGroup, lane);
  if (lane / 4 > last) score.x = -INFINITY;
  if (lane / 4 + 8 > last) score.y = -INFINITY;
  const Softmax softmax(score, lane);
  // Of the values, this lane's 4 dims of positions 2 t, 2 t + 1, 2 t + 8, 2 t + 9.
  uint2 part[4];
  const int dims = number / 2 * 64 + lane / 4 * 8 + number % 2 * 4;
#pragma unroll
  for (int j = 0; j < 4; j++) {
    const int p = value_row(lane, j);
    part[j] = p < position + rows ? *reinterpret_cast<const uint2*>(&kv[1][p][unit_place(p, dims / 8) * 8 + dims % 8])
                                  : uint2{};
  }
  float y[2][2];
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const uint32_t selector = i ? 0x7632 : 0x5410;
    float acc[4] = {};
    mma_16x8x16(acc, __byte_perm(part[0].x, part[1].x, selector), __byte_perm(part[0].y, part[1].y, selector),
                __byte_perm(part[2].x, part[3].x, selector), __byte_perm(part[2].y, part[3].y, selector),
                softmax.weights.x, softmax.weights.y);
    y[0][i] = acc[0] + acc[1], y[1][i] = acc[2] + acc[3];
  }
  const float inv = inverse_of(softmax.total());
  if (query >= rows * S::kGroup || (one_query && query % S::kGroup != assigned.rank)) return;
  b.publish_attended(((assigned.kv_head * S::kGroup + query % S::kGroup) * kHeadDim + dims) / 4, column + query_row,
                     pack2(y[0][0] * inv, y[0][1] * inv), pack2(y[1][0] * inv, y[1][1] * inv));
}

// Code predictor. A frame has at most 16 positions, one tile; every block of a sequence keeps it.
// rows: neighbouring columns from `position` on, with up to kQueries queries. kv: [2][kGroups][head_dim] of this layer,
// this block's own. One warp awaits each head. Then four warps each do the softmax and a quarter of the dims.
template <class S, class B>
__device__ __forceinline__ void attend_frame(B& b, const StackWeights& w, int index, const Assignment& assigned,
                                             int sequences, int rows, int position, bf16 (*kv)[kGroups][kHeadDim],
                                             const bf16* table_row) {
  constexpr int kHeads = S::kGroup + 2;  // of a row
  static_assert(2 * S::kGroup <= kQueries && kHeads == 4);
  const int row = b.warp / kHeads, number = b.warp % kHeads, lane = b.lane;
  const bool one_query = assigned.sharers >= S::kGroup;  // there is a block for each query head
  if (assigned.kv_head >= S::kKvHeads || assigned.column >= sequences || row >= rows) return;
  if (assigned.rank >= (one_query ? S::kGroup : 1)) return;
  const int kv_index = number - S::kGroup;  // 0: the key, 1: the value; below: a query
  const int column = assigned.column * rows;
  const int head =
      kv_index < 0 ? assigned.kv_head * S::kGroup + number : S::kHeads + kv_index * S::kKvHeads + assigned.kv_head;
  if (kv_index >= 0 || !one_query || number == assigned.rank) {
    uint2 high, low{};
    if (table_row) {
      const uint2* const dims_of_head = reinterpret_cast<const uint2*>(table_row + head * kHeadDim) + lane;
      high = *dims_of_head;
      if (kv_index < 0) low = dims_of_head[S::kQkv / 4];
    } else {
      const LaneDims x = await_head<S>(b, w, index, head, column + row, position + row);
      high = rounded(x);
      if (kv_index < 0) low = rest_of(x, high);
    }
    if (kv_index < 0) store_query(b.s.attention, row * S::kGroup + number, high, low, lane);
    else store_dims(kv[kv_index][position + row], high, lane, unit_place(position + row, lane / 2));
  }
  sync_some(rows * kHeads * 32);
  if (row) return;

  weigh_frame<S>(b, b.s.attention, assigned, column, one_query, rows, position, kv, number);
}

}  // namespace qmk
