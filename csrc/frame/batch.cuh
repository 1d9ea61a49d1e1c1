// A frame of many sequences: up to kBatchColumns columns a launch.
//
// The blocks own the same rows of the same ribbons as in frame.cuh, and each column's sums are added in the same order.
// So a column has the same bits in both. A block keeps its share of a matrix in registers and multiplies one group of
// 16 columns after the other by it. While it is at one group, the others of the exchange are on their way.
//
// Vectors lie in global memory as mma's B operand. Each warp loads its own share of K from there into registers, a
// group ahead. Two more warps of a block wait for others: the watcher, until all blocks have written a group of a
// vector, and the herald, until this block's warps have; then it tells the other blocks.
#pragma once
#include "draw.cuh"
#include "producer.cuh"

namespace qmk {
namespace {

constexpr int kTileColumns = 8;  // of an mma
constexpr int kJobs = 16;        // that the herald may be behind
constexpr int kFrameWarps = 4;   // that attend to a column's positions of a frame
constexpr int kGroupTiles = kBatchGroup / kTileColumns;
constexpr int kGroupsOfBatch = kBatchColumns / kBatchGroup;

// How a vector of K values lies in memory: of each tile so many units of kUnitBytes, a lane's 16 bytes of two steps of
// mma; then, of a residual, a lane's sums of squares of four steps.
template <int K>
struct VectorLayout {
  static constexpr int kValueUnits = (kSteps<K> + 1) / 2, kSquareUnits = (kSteps<K> + 3) / 4;
  static constexpr size_t kTileBytes = static_cast<size_t>(kUnitBytes) * (kValueUnits + kSquareUnits);
  static constexpr int units(bool squares) { return kValueUnits + (squares ? kSquareUnits : 0); }

  // The lane's 16 bytes of a column in unit 0.
  static __device__ __forceinline__ uint8_t* lane(uint8_t* vector, int column, int warp, int quarter) {
    return vector + column / kTileColumns * kTileBytes + ((warp * 8 + column % kTileColumns) * 4 + quarter) * 16;
  }
  // Packet p: 4 values, and the sum of their squares.
  static __device__ __forceinline__ uint2* values(uint8_t* vector, int column, int p) {
    const int step = p / 4 % kSteps<K>;
    return reinterpret_cast<uint2*>(lane(vector, column, p / 4 / kSteps<K>, p % 4) + step / 2 * kUnitBytes) + step % 2;
  }
  static __device__ __forceinline__ float* square(uint8_t* vector, int column, int p) {
    const int step = p / 4 % kSteps<K>;
    return reinterpret_cast<float*>(lane(vector, column, p / 4 / kSteps<K>, p % 4) +
                                    (kValueUnits + step / 4) * kUnitBytes) +
           step % 4;
  }
  // Word n, of 3, of packet p of an MLP's output.
  static __device__ __forceinline__ uint32_t* gated(uint8_t* vector, int column, int p, int n) {
    constexpr int kPackets = K / kWarps / 4 / kMlpPacket;  // of a lane
    const int word = p / 4 % kPackets * 3 + n;
    return reinterpret_cast<uint32_t*>(lane(vector, column, p / 4 / kPackets, p % 4) + word / 4 * kUnitBytes) +
           word % 4;
  }
};

// A ring between warps of a block: `full` and `empty` of its places.
struct Handover {
  uint32_t full, empty;
  int places;
  int place = 0;
  uint32_t round = 0;

  __device__ void init(int fillers, int takers) const {
    for (int i = 0; i < places; i++) mbarrier_init(full + i * 8, fillers), mbarrier_init(empty + i * 8, takers);
    mbarrier_init_fence();
  }
  __device__ __forceinline__ void await_empty(Patience& patience) const {
    if (round) patience.wait_barrier(empty + place * 8, (round - 1) & 1);
  }
  __device__ __forceinline__ void await_full(Patience& patience) const {
    patience.wait_barrier(full + place * 8, round & 1);
  }
  __device__ __forceinline__ void next() {
    if (++place == places) place = 0, round++;
  }
};

// Barriers for the groups of two vectors, which uses take in turn: a block needs its own part of each, so the watcher
// is never two ahead.
struct Arrivals {
  static constexpr int kBarriers = 2 * kGroupsOfBatch;
  uint32_t barriers;
  uint32_t use = 0;

  __device__ void init() const {
    for (int i = 0; i < kBarriers; i++) mbarrier_init(barriers + i * 8, 1);
  }
  __device__ __forceinline__ uint32_t of(int group) const {
    return barriers + ((use & 1) * kGroupsOfBatch + group) * 8;
  }
  __device__ __forceinline__ void await(int group, Patience& patience) const {
    patience.wait_barrier(of(group), use >> 1 & 1);
  }
  __device__ __forceinline__ void next() { use++; }
};

// Does a block attend? It does to the heads of columns block % kShare, + kShare, ...
template <class S>
__device__ __forceinline__ bool attends(int block) {
  return block / kShare < S::kKvHeads;
}

// Copies weights, and the talker's old keys and values.
template <class Dims>
struct BatchProducer : Producer<Dims> {
  using T = typename Dims::Talker;
  using Base = Producer<Dims>;
  using Base::p, Base::ring, Base::patience, Base::block, Base::lane;

  __device__ __forceinline__ void talker() {
    constexpr int kQkvStages = Base::template kStages<T::kQkvRows, T::kHidden, T::kFp8>;
    const uint8_t* ribbon =
        p.talker.ribbon + static_cast<size_t>(block) * p.talker.layers * kLayerStages<T> * kStageBytes;
    const int kv_head = block / kShare;
    for (int index = 0; index < p.talker.layers; index++) {
      ribbon = ring.copy(ribbon, kQkvStages, 0, p.talker_pace, patience, lane);
      for (int column = block % kShare; column < p.columns; column += kShare) {
        const Context<T> context({kv_head, column, 0, 1}, p.batch.column, p.columns);
        copy_context<T>(ring, context, p.batch.column[column].pages, layer_kv<T>(p, index, kv_head), page_stride<T>(p),
                        p.talker_pace, patience, lane);
      }
      ribbon = ring.copy(ribbon, kLayerStages<T> - kQkvStages, 0, p.talker_pace, patience, lane);
    }
  }
};

// Tells this block's warps which groups of a vector are there.
template <class Dims>
struct Watcher : WeightSteps {
  using T = typename Dims::Talker;
  using P = typename Dims::Predictor;
  const FrameParams& p;
  Arrivals& arrivals;
  Patience& patience;
  // What `arrived` will be for a whole vector, of its uses so far; of kInput and kAttended: for each column.
  uint32_t expected[kVectors] = {};

  __device__ __forceinline__ void watch(VectorName name, uint32_t by_all, uint32_t by_column) {
    expected[name] += by_all + by_column;
    for (int first = 0; first < p.columns; first += kBatchGroup) {
      const uint32_t wanted = expected[name] * (by_column ? min(kBatchGroup, p.columns - first) : 1);
      const int group = first / kBatchGroup;
      uint32_t polls = 0;
      while (load_acquire4(p.batch.arrived + name * kGroupsOfBatch + group) < wanted && !patience.spent(polls)) {
      }
      mbarrier_arrive(arrivals.of(group));
    }
    arrivals.next();
  }
  template <class S>
  __device__ __forceinline__ void layer(bool first, bool looked_up) {
    if (!looked_up) {
      if (first) watch(kInput, 0, 1);
      else watch(kAfterMlp, kBlocks, 0);
    }
    watch(kAttended, 0, S::kKvHeads);
    watch(kAfterAttention, kBlocks, 0);
    watch(kGated, kBlocks, 0);
  }
  __device__ __forceinline__ void talker() {
    for (int index = 0; index < p.talker.layers; index++) layer<T>(index == 0, false);
  }
  __device__ __forceinline__ void codec_head() { watch(kAfterMlp, kBlocks, 0); }
  __device__ __forceinline__ void adapter(const Pass&) {}
  __device__ __forceinline__ void predictor(const Pass& pass) {
    for (int index = 0; index < p.predictor.layers; index++)
      layer<P>(index == 0, index == 0 && pass_mode(p, pass.position) == PassMode::kLookedUp);
    if (!pass.drawn_group()) expected[kAfterMlp] += kBlocks;  // nobody reads the last layer's
  }
  __device__ __forceinline__ void lm_head(const Pass&) { watch(kAfterMlp, kBlocks, 0); }
};

// Tells the other blocks what this one has written.
template <class Dims>
struct Herald : WeightSteps {
  using T = typename Dims::Talker;
  using P = typename Dims::Predictor;
  const FrameParams& p;
  Handover& jobs;
  Patience& patience;
  const int block;

  __device__ __forceinline__ void tell(VectorName name, int column) const {
    add_release(p.batch.arrived + name * kGroupsOfBatch + column / kBatchGroup);
  }
  __device__ __forceinline__ void await() { jobs.await_full(patience); }
  __device__ __forceinline__ void finish() {
    mbarrier_arrive(jobs.empty + jobs.place * 8);
    jobs.next();
  }
  __device__ __forceinline__ void groups(VectorName name) {
    for (int first = 0; first < p.columns; first += kBatchGroup) await(), tell(name, first), finish();
  }
  __device__ __forceinline__ void spread() {
    for (int column = block; column < p.columns; column += kBlocks) await(), tell(kInput, column), finish();
  }
  // at_once: columns of a job.
  template <class S>
  __device__ __forceinline__ void layer(int at_once) {
    if (attends<S>(block))
      for (int first = block % kShare; first < p.columns; first += at_once * kShare) {
        await();
        for (int i = 0; i < at_once; i++)
          if (first + i * kShare < p.columns) tell(kAttended, first + i * kShare);
        finish();
      }
    groups(kAfterAttention), groups(kGated), groups(kAfterMlp);
  }
  __device__ __forceinline__ void talker() {
    spread();
    for (int index = 0; index < p.talker.layers; index++) layer<T>(1);
  }
  __device__ __forceinline__ void codec_head() {}
  __device__ __forceinline__ void adapter(const Pass&) {}
  __device__ __forceinline__ void predictor(const Pass& pass) {
    if (pass_mode(p, pass.position) != PassMode::kLookedUp) spread();
    for (int index = 0; index < p.predictor.layers; index++) layer<P>(kWarps / kFrameWarps);
  }
  __device__ __forceinline__ void lm_head(const Pass&) {}
};

// A block's shared memory besides the rings.
template <class Dims>
struct BatchScratch {
  using T = typename Dims::Talker;
  using P = typename Dims::Predictor;
  static constexpr int kRows = max_of(max_of(max_of(T::kGateUpRows, T::kQkvRows), max_of(P::kGateUpRows, P::kQkvRows)),
                                      max_of(Dims::kHeadRows, Dims::kCodeRows));
  static constexpr int kHiddenRows = max_of(T::kHiddenRows, P::kHiddenRows);
  union {
    alignas(16) float wide[kGroupTiles][partial_size(kRows)];  // partial sums: qkv, gate and up, heads
    struct {
      AttentionShares<T::kGroup> attention_shares[kShares];
      float3 attention_parts[kSplits][T::kGroup][kHeadDim / 2];
    };
  };
  union {
    alignas(16) float narrow[kGroupTiles][partial_size(kHiddenRows)];  // o, down
    Queries frame_queries[kWarps / kFrameWarps];
  };
  AttentionScratch attention;
  DrawScratch draw;
  float inverse[kBatchColumns];  // 1 / rms of each column behind the talker
  int code[kBatchColumns];       // the last one of each column
  float residual[kBatchColumns * kHiddenRows];
  float hidden[kBatchColumns * T::kHiddenRows];  // as in Scratch
};

template <class Dims>
struct BatchBlock {
  BatchScratch<Dims>& s;
  Ring ring;
  Arrivals arrivals;
  Handover jobs;
  Patience patience;
  const Exchange& x;
  const Batch& batch;
  uint32_t epoch;
  int tid, warp, lane, block;
  int columns;                   // of the launch
  unsigned long long* stage_ns;  // as in Block
  unsigned long long since;

  __device__ __forceinline__ void mark(int stage) {
    if (!kStageClock || stage_ns == nullptr) return;
    const unsigned long long now = global_timer();
    stage_ns[stage] += now - since;
    since = now;
  }
  __device__ __forceinline__ void refresh() {
    tid = thread_index(), block = block_index(), warp = tid / 32, lane = tid % 32;
  }
  // This warp has done its part of the herald's next job.
  __device__ __forceinline__ void tell() {
    __syncwarp();
    if (lane == 0) {
      jobs.await_empty(patience);
      mbarrier_arrive(jobs.full + jobs.place * 8);
    }
    jobs.next();
  }
  // This lane's share of a tile of a vector.
  template <int K, int Units>
  __device__ __forceinline__ void ask(const uint8_t* vector, int column, uint4 (&unit)[Units]) const {
    const uint8_t* from = vector + column / kTileColumns * VectorLayout<K>::kTileBytes + (warp * 32 + lane) * 16;
#pragma unroll
    for (int u = 0; u < Units; u++) unit[u] = __ldcg(reinterpret_cast<const uint4*>(from + u * kUnitBytes));
  }
  template <int K, bool Squares, int Units>
  static __device__ __forceinline__ Input<kSteps<K>> input_of(const uint4 (&unit)[Units]) {
    using V = VectorLayout<K>;
    Input<kSteps<K>> in;
#pragma unroll
    for (int step = 0; step < kSteps<K>; step++) {
      const uint4& v = unit[step / 2];
      in.b[0][step] = step % 2 ? make_uint2(v.z, v.w) : make_uint2(v.x, v.y);
    }
    in.square[0] = 0.f;
    if constexpr (Squares)
#pragma unroll
      for (int step = 0; step < kSteps<K>; step++) {
        const uint4& v = unit[V::kValueUnits + step / 4];
        in.square[0] += __uint_as_float(step % 4 == 0 ? v.x : step % 4 == 1 ? v.y : step % 4 == 2 ? v.z : v.w);
      }
    return in;
  }
  // Packet p of a column's attention output.
  template <class S>
  __device__ __forceinline__ void publish_attended(int p, int column, uint32_t low, uint32_t high) {
    *VectorLayout<S::kQ>::values(batch.vectors[kAttended], column, p) = make_uint2(low, high);
  }
};

// Matvec::inverse_rms for a half-warp whose lanes all ask for the same column.
template <int Rows, int K>
__device__ __forceinline__ float inverse_rms_of(const float* partial, int column, int lane) {
  using M = Matvec<Rows, K>;
  static_assert(kWarps == 16);
  float sum = partial[(lane % kWarps * kColumns + column) * M::kStride + Rows];
#pragma unroll
  for (int other = 1; other < kWarps; other *= 2) sum += __shfl_xor_sync(~0u, sum, other);
  return rsqrtf(sum * (1.f / K) + 1e-6f);
}

// What a compute thread does in each step of a frame (order.cuh).
template <class Dims>
struct BatchFrame : CodeRows<Dims> {
  using T = typename Dims::Talker;
  using P = typename Dims::Predictor;
  static_assert(!Dims::kAdapter);
  using CodeRows<Dims>::p;
  BatchBlock<Dims>& b;

  // Multiply this block's rows of a matrix by every group of a vector; columns behind the last one hold old values.
  // finish(thread, first, partial): of a tile's sums, from column `first` on, by `Threads` threads. Told: the herald
  // tells of each group.
  template <int Rows, int K, bool Fp8, bool Squares, int Threads, bool Told, class Finish>
  __device__ __forceinline__ void products(VectorName name, float* partial, Finish finish) {
    using M = Matvec<Rows, K, Fp8>;
    constexpr int kOf = kSteps<K>, kUnits = M::kTiles * (M::kTall ? kOf : (kOf + 1) / 2), kStages = M::part_stages(kOf);
    static_assert(M::kParts == 1 && Threads % 32 == 0 && Threads * kGroupTiles <= kComputeThreads);
    b.refresh();
    uint4 weights[kStages][M::kStageUnits];
#pragma unroll
    for (int stage = 0; stage < kStages; stage++) b.ring.take(weights[stage], b.warp, b.lane, b.patience);
    const uint8_t* const vector = b.batch.vectors[name];
    constexpr int kInputUnits = VectorLayout<K>::units(Squares);
    uint4 asked[kGroupTiles][kInputUnits];
    b.arrivals.await(0, b.patience);
#pragma unroll
    for (int t = 0; t < kGroupTiles; t++) b.template ask<K>(vector, t * kTileColumns, asked[t]);
    int turn = b.tid;  // others finish the next group
#pragma unroll 1
    for (int first = 0; first < b.columns; first += kBatchGroup) {
      const int next = first + kBatchGroup;
#pragma unroll
      for (int t = 0; t < kGroupTiles; t++) {
        M m;
        const Input<kOf> in = b.template input_of<K, Squares>(asked[t]);
#pragma unroll
        for (int u = 0; u < kUnits; u++) {
          const int step = u / M::kTiles * (M::kTall ? 1 : 2);
          m.multiply(weights[u / M::kStageUnits][u % M::kStageUnits], in, u % M::kTiles, step, step);
        }
        m.square[0] = in.square[0];
        if (next < b.columns) {
          if (t == 0) b.arrivals.await(next / kBatchGroup, b.patience);
          b.template ask<K>(vector, next + t * kTileColumns, asked[t]);
        }
        if (t == 0 && first) sync_compute<kComputeThreads>();  // all have read the sums of the last group
        m.store(partial + t * partial_size(Rows), kTileColumns, b.warp, b.lane);
      }
      sync_compute<kComputeThreads>();
      const int tile = turn / Threads, from = first + tile * kTileColumns;
      if (tile < kGroupTiles && from < b.columns) finish(turn % Threads, from, partial + tile * partial_size(Rows));
      turn = (turn + kComputeThreads - Threads * kGroupTiles) & (kComputeThreads - 1);
      if constexpr (Told) b.tell();
    }
    b.arrivals.next();
  }

  // 1 / rms of a tile's column, for threads that finish `Rows` rows each.
  template <int Rows, int K>
  __device__ __forceinline__ float inverse_of_tile(const float* sums, int column) const {
    if constexpr (Rows % kWarps == 0) return inverse_rms_of<Rows, K>(sums, column, b.lane);
    else return Matvec<Rows, K>::inverse_rms(sums, column);
  }

  // Norm what comes into a stack's first layer, some columns a block. input(column, at): 4 values from `at` on.
  template <class S, class Value>
  __device__ __forceinline__ void spread(const bf16* norm, Value input) {
    static_assert(S::kHidden / 4 <= kComputeThreads);
    b.refresh();
    for (int column = b.block; column < b.columns; column += kBlocks) {
      const int packet = b.tid;
      if (packet < S::kHidden / 4) {
        float square = 0.f;
        const uint2 values = normed(input(column, packet), norm + packet * 4, square);
        *VectorLayout<S::kHidden>::values(b.batch.vectors[kInput], column, packet) = values;
        *VectorLayout<S::kHidden>::square(b.batch.vectors[kInput], column, packet) = square;
      }
      b.tell();
    }
  }

  // residual[row] of this block's rows of every column: of(column, row of all).
  template <class S, class Value>
  __device__ __forceinline__ void set_residual(float* residual, Value of) {
    for (int i = b.tid; i < S::kHiddenRows * b.columns; i += kComputeThreads) {
      const int row = b.block * S::kHiddenRows + i % S::kHiddenRows;
      if (row < S::kHidden) residual[i] = of(i / S::kHiddenRows, row);
    }
  }

  // Add a product [hidden] to the residual of a tile, and publish it for the next norm's matrix.
  template <class S, int K, bool Fp8>
  __device__ __forceinline__ void add_product(VectorName input, float* partial, VectorName name, const float* scales,
                                              const bf16* norm) {
    // A thread's row is the same one in every group.
    const int own = thread_index() % S::kHiddenRows, row = block_index() * S::kHiddenRows + own;
    const bf16 weight = norm[min(row, S::kHidden - 1)];
    const float scale = scale_of<Fp8>(scales, row, S::kHidden);
    products<S::kHiddenRows, K, Fp8, false, S::kHiddenRows * kTileColumns, true>(
        input, partial, [&](int thread, int first, const float* sums) {
          const int column = first + thread / S::kHiddenRows;
          float h = 0.f, x = 0.f;
          if (column < b.columns && row < S::kHidden) {
            h = b.s.residual[column * S::kHiddenRows + own];
            h += Matvec<S::kHiddenRows, 256>::sum(sums, own, thread / S::kHiddenRows) * scale;
            b.s.residual[column * S::kHiddenRows + own] = h;
            x = h * __bfloat162float(weight);
          }
          const uint3 packet = residual_packet(h, x);
          if (thread % 4 || column >= b.columns || row >= S::kHidden) return;
          *VectorLayout<S::kHidden>::values(b.batch.vectors[name], column, row / 4) = make_uint2(packet.x, packet.y);
          *VectorLayout<S::kHidden>::square(b.batch.vectors[name], column, row / 4) = __uint_as_float(packet.z);
        });
  }

  // attend(): publishes kAttended of every column. looked_up: q, k and v come from the tables.
  template <class S, class Attend>
  __device__ __forceinline__ void layer(const StackWeights& w, const float* all_scales, int index,
                                        const bf16* next_norm, bool looked_up, Attend attend) {
    const float* const scales = all_scales + (S::kFp8 ? index * S::kScales : 0);
    float *const wide = b.s.wide[0], *const narrow = b.s.narrow[0];
    if (!looked_up) {
      using M = Matvec<S::kQkvRows, S::kHidden>;
      products<S::kQkvRows, S::kHidden, S::kFp8, true, S::kQkvRows * kTileColumns, false>(
          index ? kAfterMlp : kInput, wide, [&](int thread, int first, const float* sums) {
            const int own = thread % S::kQkvRows, of_tile = thread / S::kQkvRows, row = b.block * S::kQkvRows + own,
                      column = first + of_tile;
            const float inverse = inverse_of_tile<S::kQkvRows, S::kHidden>(sums, of_tile);
            if (column >= b.columns || row >= S::kQkv) return;
            const float scale = scale_of<S::kFp8>(scales, row, S::kQkv);
            const float y = M::sum(sums, own, of_tile) * inverse * scale;
            publish(b.x.qkv + static_cast<size_t>(column) * S::kQkv + row, y, b.epoch);
          });
      b.mark(kQkv);
    }
    b.refresh();
    attend();
    sync_compute<kComputeThreads>();  // all are done with its scratch
    b.mark(kAttention);
    add_product<S, S::kQ, S::kFp8>(kAttended, narrow, kAfterAttention, scales + S::kQkv,
                                   w.post_norm + index * S::kHidden);
    b.mark(kO);
    using Packets = MlpPackets<S>;
    using M = Matvec<S::kGateUpRows, S::kHidden>;
    products<S::kGateUpRows, S::kHidden, S::kFp8, true, Packets::kPackets * 8 * kTileColumns, true>(
        kAfterAttention, wide, [&](int thread, int first, const float* sums) {
          const int of_tile = thread / 8 / Packets::kPackets, packet = thread / 8 % Packets::kPackets,
                    own = Packets::row(b, packet), column = first + of_tile;
          const int gate_row = 2 * (b.block * S::kMlpRows + own);
          const float* const gate_scales = scales + S::kQkv + S::kHidden;
          const float gate_scale = scale_of<S::kFp8>(gate_scales, gate_row, 2 * S::kIntermediate);
          const float up_scale = scale_of<S::kFp8>(gate_scales, gate_row + 1, 2 * S::kIntermediate);
          const float inv = inverse_rms_of<S::kGateUpRows, S::kHidden>(sums, of_tile, b.lane);
          const uint3 words =
              Packets::gated(M::template sum_as<float2>(sums, 2 * own, of_tile), inv, gate_scale, up_scale);
          const int at = b.block * Packets::kPackets + packet;
          if (b.tid % 8 || column >= b.columns || at * kMlpPacket >= S::kIntermediate) return;
          uint8_t* const vector = b.batch.vectors[kGated];
          *VectorLayout<S::kIntermediate>::gated(vector, column, at, 0) = words.x;
          *VectorLayout<S::kIntermediate>::gated(vector, column, at, 1) = words.y;
          *VectorLayout<S::kIntermediate>::gated(vector, column, at, 2) = words.z;
        });
    b.mark(kGateUp);
    add_product<S, S::kIntermediate, S::kFp8>(kGated, narrow, kAfterMlp,
                                              scales + S::kQkv + S::kHidden + 2 * S::kIntermediate, next_norm);
    b.mark(kDown);
  }

  __device__ __forceinline__ void resume() {}
  __device__ __forceinline__ void begin_tables() {}
  __device__ __forceinline__ void adapter(const Pass&) {}
  __device__ __forceinline__ void end_pass(const Pass& pass) {
    if (!pass.drawn_group()) sync_compute<kComputeThreads>();  // all are done with the residual
  }

  __device__ __forceinline__ void talker() {
    spread<T>(p.talker.input_norm,
              [&](int column, int packet) { return this->talker_input(b.batch.column[column], packet * 4); });
    set_residual<T>(b.s.residual, [&](int column, int row) { return this->talker_value(b.batch.column[column], row); });
    if (b.tid < kHeadDim)  // the zeros behind a column's own position
      reinterpret_cast<uint32_t*>(b.s.attention.fresh[1])[b.tid] = 0;
    for (int index = 0; index < p.talker.layers; index++) {
      b.epoch = p.epoch + 1 + index;
      const bool last = index + 1 == p.talker.layers;
      layer<T>(p.talker, p.talker_scales, index, last ? p.talker.norm : p.talker.input_norm + (index + 1) * T::kHidden,
               false, [&] {
                 if (!attends<T>(b.block)) return;
                 const int kv_head = b.block / kShare;
                 for (int column = b.block % kShare; column < b.columns; column += kShare) {
                   attend_pages<T>(b, p.talker, index, {kv_head, column, 0, 1}, b.batch.column,
                                   layer_kv<T>(p, index, kv_head), page_stride<T>(p));
                   b.tell();
                 }
               });
    }
  }

  // From a head's sums to a code of each column, in s.code.
  template <int Rows, int K, bool Fp8, int N>
  __device__ __forceinline__ void choose(int group, const float* scales) {
    using M = Matvec<Rows, K>;
    products<Rows, K, Fp8, true, Rows * kTileColumns, false>(
        kAfterMlp, b.s.wide[0], [&](int thread, int first, const float* sums) {
          const int own = thread % Rows, of_tile = thread / Rows, id = b.block * Rows + own, column = first + of_tile;
          const float inverse = inverse_of_tile<Rows, K>(sums, of_tile);
          if (column >= b.columns) return;
          if (group == 0 && own < T::kHiddenRows) {
            b.s.inverse[column] = inverse;
            const int row = b.block * T::kHiddenRows + own;
            if (row < T::kHidden) {
              const int i = column * T::kHiddenRows + own;
              const float h = b.s.residual[i] * inverse * __bfloat162float(p.talker.norm[row]);
              b.s.hidden[i] = h;
              if (p.hidden_out) p.hidden_out[column * T::kHidden + row] = h;
            }
          }
          if (id >= N) return;
          const Column& c = b.batch.column[column];
          const float scale = scale_of<Fp8>(scales, id, N);
          const float noise = (group ? c.draw : c.draw0).sample ? gumbel(c.seed, c.frame, group, id) : 0.f;
          this->publish_logit(b, c, column, group, id, M::sum(sums, own, of_tile) * inverse * scale, noise);
        });
    b.mark(kHead);
    b.refresh();
    for (int column = b.block; column < b.columns; column += kBlocks) {
      const Column& c = b.batch.column[column];
      Candidates<N> candidates;
      candidates.await(b, b.x.logits + static_cast<size_t>(column) * Dims::kCodecVocab);
      auto prefetch = [&](int code) { this->prefetch(b, group, code); };
      const int code = draw(b, candidates, group ? c.draw : c.draw0, prefetch);
      prefetch(code);
      if (b.tid == 0) {
        publish(b.x.drawn + column, __int_as_float(code), b.epoch);
        this->keep(c, column, group, code);
      }
      sync_compute<kComputeThreads>();  // all are done with the draw's scratch
    }
    for (int column = b.tid; column < b.columns; column += kComputeThreads) {
      uint2 r;
      uint32_t polls = 0;
      do r = load_relaxed8(b.x.drawn + column);
      while (r.y != b.epoch && !b.patience.spent(polls));
      b.s.code[column] = min(r.x, static_cast<uint32_t>(N - 1));
    }
    sync_compute<kComputeThreads>();
    b.mark(kDraw);
  }
  __device__ __forceinline__ void codec_head() {
    static_assert(T::kHiddenRows <= Dims::kHeadRows);
    choose<Dims::kHeadRows, T::kHidden, kFp8CodecHead, Dims::kCodecVocab>(0, p.codec_head_scales);
    if (b.stage_ns) b.stage_ns += kStages;
  }
  __device__ __forceinline__ void lm_head(const Pass& pass) {
    const int group = pass.drawn_group();
    choose<Dims::kCodeRows, P::kHidden, kFp8LmHeads, Dims::kCodes>(group,
                                                                   p.lm_head_scales + (group - 1) * Dims::kCodes);
  }

  // Four warps a column; each awaits a head, then does a quarter of the dims.
  __device__ __forceinline__ void attend_frames(const Pass& pass, int index, bool looked_up) {
    constexpr int kAtOnce = kWarps / kFrameWarps;
    static_assert(P::kGroup + 2 == kFrameWarps);
    if (!attends<P>(b.block)) return;
    const int of_block = b.warp / kFrameWarps, number = b.warp % kFrameWarps, kv_head = b.block / kShare;
    Queries& queries = b.s.frame_queries[of_block];
    for (int first = b.block % kShare; first < b.columns; first += kAtOnce * kShare) {
      const int column = first + of_block * kShare;
      if (column < b.columns) {
        auto* const kv = reinterpret_cast<bf16(*)[kGroups][kHeadDim]>(b.batch.frame_kv) +
                         ((static_cast<size_t>(kv_head) * kBatchColumns + column) * P::kMaxLayers + index) * 2;
        const int kv_index = number - P::kGroup;
        const int head = kv_index < 0 ? kv_head * P::kGroup + number : P::kHeads + kv_index * P::kKvHeads + kv_head;
        uint2 high, low{};
        if (looked_up) {
          const uint2* const dims =
              reinterpret_cast<const uint2*>(this->table_heads(pass.last_group(), b.s.code[column]) + head * kHeadDim) +
              b.lane;
          high = *dims;
          if (kv_index < 0) low = dims[P::kQkv / 4];
        } else {
          const LaneDims x = await_head<P>(b, p.predictor, index, head, column, pass.position);
          high = rounded(x);
          if (kv_index < 0) low = rest_of(x, high);
        }
        if (kv_index < 0) store_query(queries, number, high, low, b.lane);
        else store_dims(kv[kv_index][pass.position], high, b.lane, unit_place(pass.position, b.lane / 2));
        sync_frame(of_block);
        weigh_frame<P>(b, queries, Assignment{kv_head, column, 0, 1}, column, false, 1, pass.position, kv, number);
        sync_frame(of_block);
      }
      b.tell();
    }
  }

  __device__ __forceinline__ void predictor(const Pass& pass) {
    const bool looked_up = pass_mode(p, pass.position) == PassMode::kLookedUp;
    const int group = pass.last_group();
    b.refresh();
    if (!looked_up)
      spread<P>(p.predictor.input_norm, [&](int column, int packet) {
        if (pass.position)
          return widened(*reinterpret_cast<const uint2*>(this->embedding(group, b.s.code[column]) + packet * 4), 1.f);
        const uint2* const h = VectorLayout<T::kHidden>::values(b.batch.vectors[kAfterMlp], column, packet);
        return widened(__ldcg(h), b.s.inverse[column]);
      });
    set_residual<P>(b.s.residual, [&](int column, int row) {
      const int i = column * T::kHiddenRows + row % T::kHiddenRows;
      if (pass.position == 0) return b.s.hidden[i];
      const float part = __bfloat162float(this->embedding(group, b.s.code[column])[row]);
      b.s.hidden[i] = group ? b.s.hidden[i] + part : part;
      return part;
    });
    for (int index = 0; index < p.predictor.layers; index++) {
      b.epoch++;
      const bool first = index == 0, last = index + 1 == p.predictor.layers;
      layer<P>(p.predictor, p.predictor_scales, index,
               last ? p.predictor.norm : p.predictor.input_norm + (index + 1) * P::kHidden, looked_up && first,
               [&] { attend_frames(pass, index, looked_up && first); });
    }
  }

  // The sum of the embeddings of all codes, plus a row of text.
  __device__ __forceinline__ void next_input() {
    set_residual<T>(b.s.residual, [&](int column, int row) {
      const Column& c = b.batch.column[column];
      const int i = column * T::kHiddenRows + row % T::kHiddenRows;
      const float part = __bfloat162float(this->embedding(kGroups - 1, b.s.code[column])[row]);
      c.next_row[row] = b.s.hidden[i] + part + __bfloat162float(c.text_row[row]);
      return 0.f;
    });
  }
};

}  // namespace
}  // namespace qmk
