// The matrix products of a frame of many sequences: up to kBatchColumns columns a launch.
//
// Such a frame is a CUDA graph of kernels (frame_batch.cu), which read the same ribbons as the persistent kernel. Each
// column's sums are added in the same order too: K in 16 shares, a share in its chains, then the shares in pairs. So a
// column has the same bits in both.
//
// A warp keeps 16 rows of weights in registers, and four of them multiply some columns after the other by theirs.
// Groups of four or eight warps have the same rows and different shares of K; so have the blocks of a cluster. Within a
// block sums go through shared memory. Between blocks they are slower, so as few as possible do: each block sends its
// sums of some tiles of 8 columns to the one block that adds them up.
#pragma once
#include "draw.cuh"

namespace qmk {
namespace {

constexpr int kTileColumns = 8;
constexpr int kBatchTiles = kBatchColumns / kTileColumns;
constexpr int kStepBytes = 256;  // of a tile's values of a step of K

// How a vector of K values of all columns lies in memory: wgmma's B operand. Of each share of K its tiles of columns,
// of each tile its steps, of each step two halves: of every column the words of the four lanes that hold it in an mma.
template <int K>
struct VectorLayout {
  static constexpr int kTileBytes = kSteps<K> * kStepBytes;
  static constexpr size_t kShareBytes = static_cast<size_t>(kBatchTiles) * kTileBytes;

  // A lane's word of the first half of a step.
  static __device__ __forceinline__ uint32_t* word(uint8_t* vector, int column, int share, int step, int quarter) {
    return reinterpret_cast<uint32_t*>(vector + share * kShareBytes + column / kTileColumns * kTileBytes +
                                       step * kStepBytes + column % kTileColumns * 16) +
           quarter;
  }
  // Packet p: 4 values.
  static __device__ __forceinline__ uint32_t* packet(uint8_t* vector, int column, int p) {
    return word(vector, column, p / 4 / kSteps<K>, p / 4 % kSteps<K>, p % 4);
  }
  static __device__ __forceinline__ void store(uint8_t* vector, int column, int p, uint2 values) {
    uint32_t* const at = packet(vector, column, p);
    at[0] = values.x, at[kStepBytes / 8] = values.y;
  }
  static __device__ __forceinline__ uint2 load(uint8_t* vector, int column, int p) {
    const uint32_t* const at = packet(vector, column, p);
    return make_uint2(at[0], at[kStepBytes / 8]);
  }
  // Values i and i + 1 of an MLP's output, which the weights take in packets of 6.
  static __device__ __forceinline__ void store_gated(uint8_t* vector, int column, int i, uint32_t pair) {
    constexpr int kPackets = K / kWarps / 4 / kMlpPacket;  // of a lane
    const int p = i / kMlpPacket, n = p / 4 % kPackets * 3 + i % kMlpPacket / 2;
    word(vector, column, p / 4 / kPackets, n / 2, p % 4)[n % 2 * (kStepBytes / 8)] = pair;
  }
};

// Of a vector of K values: the sums of squares of its shares, fp32 [columns][kWarps]. A warp's lanes have neighbouring
// packets, each its square; a share's are added in the order of Matvec.
template <int K>
__device__ __forceinline__ void store_square(float* squares, int column, int packet, float square, int lane) {
  constexpr int kPackets = 4 * kSteps<K>;  // of a share
  static_assert(kPackets <= 32 && 32 % kPackets == 0);
  float sum = 0.f;
#pragma unroll
  for (int step = 0; step < kSteps<K>; step++)
    sum += __shfl_sync(~0u, square, lane / kPackets * kPackets + step * 4 + lane % 4);
  sum += __shfl_xor_sync(~0u, sum, 1);
  sum += __shfl_xor_sync(~0u, sum, 2);
  if (packet % kPackets == 0) squares[column * kWarps + packet / kPackets] = sum;
}

// Values added in pairs, as Matvec::sum_as does.
template <int N, class T>
__device__ __forceinline__ T sum_of_pairs(T (&y)[N]) {
#pragma unroll
  for (int level = 1; level < N; level *= 2)
#pragma unroll
    for (int i = 0; i < N; i += 2 * level) y[i] = plus(y[i], y[i + level]);
  return y[0];
}
// 1 / rms of a column of K values.
template <int K>
__device__ __forceinline__ float inverse_rms_of(const float* squares, int column) {
  float y[kWarps];
#pragma unroll
  for (int i = 0; i < kWarps / 4; i++) {
    const float4 four = *reinterpret_cast<const float4*>(squares + column * kWarps + i * 4);
    y[4 * i] = four.x, y[4 * i + 1] = four.y, y[4 * i + 2] = four.z, y[4 * i + 3] = four.w;
  }
  return rsqrtf(sum_of_pairs(y) * (1.f / K) + 1e-6f);
}

// d = A * B, or d += it: 64 rows by 32 columns, a step of K. A warp has 16 rows, as in mma's A operand; of 8 columns
// each lane gets what mma gives it. The bits are mma's: 200 million sums of 1 to 8 steps were equal.
//
// ptxas (13.0) takes sums of the same registers for the same sums, whatever wgmma wrote there in between. wgmma_fresh
// gets registers of its own, so one of them in each sum suffices. If all were, more would be needed than there are.
__device__ __forceinline__ void wgmma_fresh(float4 (&d)[4], const uint4& a, uint64_t b) {
  asm volatile(
      "{\n .reg .pred p;\n setp.ne.b32 p, 0, 0;\n"
      " wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, "
      "%13, %14, %15}, {%16, %17, %18, %19}, %20, p, 1, 1, 0;\n}"
      : "=f"(d[0].x), "=f"(d[0].y), "=f"(d[0].z), "=f"(d[0].w), "=f"(d[1].x), "=f"(d[1].y), "=f"(d[1].z), "=f"(d[1].w),
        "=f"(d[2].x), "=f"(d[2].y), "=f"(d[2].z), "=f"(d[2].w), "=f"(d[3].x), "=f"(d[3].y), "=f"(d[3].z), "=f"(d[3].w)
      : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "l"(b));
}
__device__ __forceinline__ void wgmma(float4 (&d)[4], const uint4& a, uint64_t b, bool add) {
  asm volatile(
      "{\n .reg .pred p;\n setp.ne.b32 p, %21, 0;\n"
      " wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, "
      "%13, %14, %15}, {%16, %17, %18, %19}, %20, p, 1, 1, 0;\n}"
      : "+f"(d[0].x), "+f"(d[0].y), "+f"(d[0].z), "+f"(d[0].w), "+f"(d[1].x), "+f"(d[1].y), "+f"(d[1].z), "+f"(d[1].w),
        "+f"(d[2].x), "+f"(d[2].y), "+f"(d[2].z), "+f"(d[2].w), "+f"(d[3].x), "+f"(d[3].y), "+f"(d[3].z), "+f"(d[3].w)
      : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "l"(b), "r"(static_cast<int>(add)));
}

constexpr int power_of_2_below(int n) { return n < 2 ? 1 : 2 * power_of_2_below(n / 2); }

// How a product is cut: a block has RowTiles tiles of 16 rows, and Groups warps for each, which share the block's part
// of K. So many Blocks of a cluster share K. Chunk: columns that a cluster finishes at once.
template <int RowTiles, int Groups, int Blocks, int Chunk = 32>
struct Shape {
  static constexpr int kRowTiles = RowTiles, kGroups = Groups, kSplit = Blocks, kChunk = Chunk;
};
constexpr int kWgmmaColumns = 32;  // of a wgmma: with 16, reading A from registers takes longer than the product

// A matrix of which a block of the persistent kernel has `Rows` rows.
template <int Rows, int K, bool Fp8, class Cut>
struct Product : Cut {
  using M = Matvec<Rows, K, Fp8>;
  using V = VectorLayout<K>;
  using Cut::kChunk, Cut::kGroups, Cut::kRowTiles, Cut::kSplit;
  static constexpr int kOf = kSteps<K>, kInner = K, kTileRows = kRowTiles * 16, kThreads = kRowTiles * kGroups * 32;
  static constexpr int kShares = kWarps / kSplit, kGroupShares = kShares / kGroups;  // of a block, of a warp
  // Shares whose weights registers hold. Where a warp has more, each chunk takes some rounds, each with other weights.
  static constexpr int kFragments = kThreads > 256 ? 16 : 32,
                       kAtOnce = power_of_2_below(min_of(kGroupShares, kFragments / kOf)),
                       kRounds = kGroupShares / kAtOnce, kRoundShares = kGroups * kAtOnce;
  // Shares whose sums registers hold beside them.
  static constexpr int kInFlight = min_of(kAtOnce, power_of_2_below(32 / (M::kChains * kWgmmaColumns)));
  static constexpr int kTiles = kChunk / kTileColumns,
                       kOwnColumns = kChunk / kSplit;  // the latter: columns, of a block
  static constexpr int kItems = kTileRows / 4;         // of a column, for threads that finish it
  static constexpr int kStride = kTileRows + 4;        // of a column's sums: no two lanes of a store meet in a bank
  // Shared memory: what the groups add up (twice), what other blocks sent (twice), the columns' 1 / rms, barriers, and
  // the input of a round. With room for more rounds, fewer blocks would fit a multiprocessor.
  static constexpr int kShareInput = kTiles * V::kTileBytes, kInputBytes = kRoundShares * kShareInput,
                       kGroupSums = kChunk * kStride, kSumBytes = kGroups * kGroupSums * 4,
                       kSentFrom = kOwnColumns * kTileRows, kSentBytes = (kSplit - 1) * kSentFrom * 4;
  static constexpr int kSent = 2 * kSumBytes, kInverse = kSent + 2 * kSentBytes,
                       kBarriers = kInverse + kBatchColumns * 4, kInput = round_up(kBarriers + 3 * 8, 128),
                       kBytes = kInput + kInputBytes;
  static_assert(kRowTiles % 4 == 0 && kShares % kGroups == 0 && kRounds <= 4 && kBytes <= kSharedBytes);

  // 16 bytes a lane of a ribbon's unit.
  static __device__ __forceinline__ uint4 unit(const uint8_t* from, int u) {
    auto load = [](const uint8_t* at) { return __ldg(reinterpret_cast<const uint4*>(at)); };
    if constexpr (Fp8) {
      const uint4 raw = load(from + u / 2 * kUnitBytes);
      return u % 2 ? widen_e4m3(raw.z, raw.w) : widen_e4m3(raw.x, raw.y);
    } else {
      return load(from + u * kUnitBytes);
    }
  }
  // mma's A operand of rows 16 tile .. of a share of K. Where ribbons have tiles of 8 rows, of two of them.
  static __device__ __forceinline__ void load(const uint8_t* matrix, size_t block_bytes, int tile, int share, int lane,
                                              uint4 (&weights)[kOf]) {
    constexpr int kOfBlock = M::kTiles * M::kParts;  // tiles
    auto from = [&](int of_all) {
      return matrix + of_all / kOfBlock * block_bytes +
             of_all % kOfBlock / M::kTiles * (M::part_stages(kOf) * kStageBytes) + (share * 32 + lane) * 16;
    };
    if constexpr (M::kTall) {
      const uint8_t* const at = from(tile);
#pragma unroll
      for (int i = 0; i < kOf; i++) weights[i] = unit(at, tile % M::kTiles + M::kTiles * i);
    } else {
      const uint8_t *const low = from(2 * tile), *const high = from(2 * tile + 1);
#pragma unroll
      for (int i = 0; i < kOf; i += 2) {
        const uint4 a = unit(low, 2 * tile % M::kTiles + M::kTiles * (i / 2)),
                    b = unit(high, (2 * tile + 1) % M::kTiles + M::kTiles * (i / 2));
        weights[i] = make_uint4(a.x, b.x, a.y, b.y);
        if (i + 1 < kOf) weights[i + 1] = make_uint4(a.z, b.z, a.w, b.w);
      }
    }
  }

  // Sums of kWgmmaColumns columns: of each of their tiles what mma gives this lane.
  struct Sums {
    float4 tile[kWgmmaColumns / kTileColumns];

    __device__ __forceinline__ Sums plus(const Sums& other) const {
      Sums sum;
#pragma unroll
      for (int t = 0; t < kWgmmaColumns / kTileColumns; t++) sum.tile[t] = qmk::plus(tile[t], other.tile[t]);
      return sum;
    }
  };
  // Of some of a round's shares of K, added in pairs. input: shared address of the round's. others: room for the sums
  // of all chains but the first.
  using Chains = float4[kInFlight][M::kChains][kWgmmaColumns / kTileColumns];
  template <int First = 0, int Count = kAtOnce>
  static __device__ __forceinline__ Sums multiply(Chains& others, const uint4 (&weights)[kAtOnce][kOf],
                                                  uint32_t input) {
    if constexpr (Count > kInFlight) {
      const Sums sum = multiply<First, Count / 2>(others, weights, input);
      return sum.plus(multiply<First + Count / 2, Count / 2>(others, weights, input));
    } else {
      Sums sum[Count];
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)  // wgmma
      // No swizzle; of a step the halves lie 128 bytes apart, the tiles of columns kTileBytes.
      const uint64_t from = ((input + First * kShareInput) & 0x3ffff) >> 4 | 128ull / 16 << 16 |
                            static_cast<uint64_t>(V::kTileBytes / 16) << 32;
      // A share that is only added to another one needs no registers of its own.
      auto shared = [](int share) { return M::kChains == 1 && share % 2; };
      asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
      for (int i = 0; i < kOf; i++)
#pragma unroll
        for (int s = 0; s < Count; s++) {
          const uint4& a = weights[First + s][i];
          const uint64_t b = from + (s * kShareInput + i * kStepBytes) / 16;
          const bool other = i % M::kChains || shared(First + s);
          if (i == 0 && !other) wgmma_fresh(sum[s].tile, a, b);
          else wgmma(other ? others[s][i % M::kChains] : sum[s].tile, a, b, i >= M::kChains);
        }
      asm volatile("wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;" ::: "memory");
#pragma unroll
      for (int s = 0; s < Count; s++)
#pragma unroll
        for (int t = 0; t < kWgmmaColumns / kTileColumns; t++) {
          if (shared(First + s)) sum[s].tile[t] = others[s][0][t];
#pragma unroll
          for (int c = 1; c < M::kChains; c++) sum[s].tile[t] = qmk::plus(sum[s].tile[t], others[s][c][t]);
        }
#endif
#pragma unroll
      for (int level = 1; level < Count; level *= 2)
#pragma unroll
        for (int s = 0; s < Count; s += 2 * level) sum[s] = sum[s].plus(sum[s + level]);
      return sum[0];
    }
  }
  // A round's sums to where the round before left its own. Rounds are added in pairs: 0 and 1, 2 and 3, both. Round 2's
  // wait at `second`: there the last turn's were, which all are done with.
  static __device__ __forceinline__ void keep(const Sums& sums, float* first, float* second, int round) {
    float y[kWgmmaColumns / 2];
    auto each = [&](auto work) {
#pragma unroll
      for (int i = 0; i < kWgmmaColumns / 2; i++) work(y[i], (i / 4 * kTileColumns + i % 2) * kStride + i / 2 % 2 * 8);
    };
#pragma unroll
    for (int t = 0; t < kWgmmaColumns / kTileColumns; t++)
      y[4 * t] = sums.tile[t].x, y[4 * t + 1] = sums.tile[t].y, y[4 * t + 2] = sums.tile[t].z,
            y[4 * t + 3] = sums.tile[t].w;
    if (kRounds > 2 && round == 3) each([&](float& sum, int at) { sum = second[at] + sum; });
    if (kRounds > 1 && round % 2) each([&](float& sum, int at) { sum = first[at] + sum; });
    float* const to = kRounds > 2 && round == 2 ? second : first;
    each([&](float& sum, int at) { to[at] = sum; });
  }
};

struct ProductArgs {
  const uint8_t* matrix;  // of block 0's ribbon
  size_t block_bytes;     // from a block's ribbon to the next one's
  const uint8_t* vector;
  const float* squares;  // of the vector, where Finish wants 1 / rms
  const int* columns;    // of this launch
};

__device__ __forceinline__ void after_the_kernel_before() {
  cudaTriggerProgrammaticLaunchCompletion();  // the next one may fetch its weights
  cudaGridDependencySynchronize();
}
// Relaxed: with a release, each arrival would wait until all that the thread has stored is in L2.
__device__ __forceinline__ void arrive_at_cluster() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
__device__ __forceinline__ void wait_for_cluster() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
// Of a block of the cluster: what lies at this block's shared address.
__device__ __forceinline__ uint32_t in_block(uint32_t address, int rank) {
  uint32_t there;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
  return there;
}
// Store into another block's memory, and tell its barrier of 16 bytes.
__device__ __forceinline__ void send(uint32_t to, float4 v, uint32_t bar) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(to),
               "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w), "r"(bar)
               : "memory");
}

// Multiply the columns by the matrix. finish(sums, column, row, inverse, given): of 4 rows from `row` on; a warp's
// lanes have neighbouring ones. given(column, row): what it needs of memory. Cluster: kSplit blocks of neighbouring x.
template <class Q, class Finish>
__global__ void __launch_bounds__(Q::kThreads)
    product_kernel(const __grid_constant__ ProductArgs a, const __grid_constant__ Finish finish) {
  constexpr int K = Q::kInner, kSplit = Q::kSplit;
  constexpr bool kCluster = kSplit > 1;
  using V = VectorLayout<K>;
  extern __shared__ __align__(128) uint8_t memory[];
  float* const inverse = reinterpret_cast<float*>(memory + Q::kInverse);
  const uint32_t shared = shared_address(memory), input = shared + Q::kInput, bars = shared + Q::kBarriers;
  const int tid = threadIdx.x, warp = tid / 32, lane = tid % 32, rank = blockIdx.x % kSplit, tile = blockIdx.x / kSplit,
            first_share = rank * Q::kShares, row_tile = warp % Q::kRowTiles, group = warp / Q::kRowTiles;
  uint4 weights[Q::kAtOnce][Q::kOf];
  typename Q::Chains others{};
  auto load = [&](int of_turn) {
#pragma unroll
    for (int s = 0; s < Q::kAtOnce; s++)
      Q::load(a.matrix, a.block_bytes, tile * Q::kRowTiles + row_tile,
              first_share + group * Q::kGroupShares + of_turn * Q::kAtOnce + s, lane, weights[s]);
  };
  load(0);
  if (tid == 0) {
    for (int i = 0; i < 3; i++) mbarrier_init(bars + i * 8, 1);
    mbarrier_init_fence();
  }
  if constexpr (kCluster) arrive_at_cluster();  // the barriers may be told
  const int columns = *a.columns, step = gridDim.y * Q::kChunk, begin = blockIdx.y * Q::kChunk;
  __syncthreads();
  // The next kernel may fetch its weights only now: its blocks would take room from those of this one.
  cudaGridDependencySynchronize();
  cudaTriggerProgrammaticLaunchCompletion();
  // The input of a round, counted over all turns: of each share its tiles. A thread takes some 30 cycles a copy, so
  // each warp asks for its own ones.
  auto fetch = [&](int round) {
    const int first = begin + round / Q::kRounds * step;
    if (first >= columns) return;
    const int bytes = min(Q::kChunk, round_up(columns - first, kTileColumns)) / kTileColumns * V::kTileBytes;
    if (tid == 0) mbarrier_expect(bars, Q::kRoundShares * bytes);
    if (lane == 0)
      for (int i = warp; i < Q::kRoundShares; i += Q::kThreads / 32) {
        const int share =
            first_share + i / Q::kAtOnce * Q::kGroupShares + round % Q::kRounds * Q::kAtOnce + i % Q::kAtOnce;
        bulk_copy(input + i * Q::kShareInput, a.vector + share * V::kShareBytes + first / kTileColumns * V::kTileBytes,
                  bytes, bars);
      }
    __syncwarp();
  };
  fetch(0);
  if constexpr (Finish::kNormed)
    for (int i = tid; i < kBatchColumns; i += Q::kThreads) {
      const int column = begin + i / Q::kChunk * step + i % Q::kChunk;
      if (column < columns) inverse[i] = inverse_rms_of<K>(a.squares, column);
    }
  if constexpr (kCluster) wait_for_cluster();
  for (int turn = 0; begin + turn * step < columns; turn++) {
    const int first = begin + turn * step;
    // Two buffers take turns: a barrier tells when all have read the one before.
    const int tiles = min(Q::kTiles, (columns - first + kTileColumns - 1) / kTileColumns), own = rank * Q::kOwnColumns,
              own_columns = min(Q::kOwnColumns, tiles * kTileColumns - own);
    float* const sums = reinterpret_cast<float*>(memory + (turn & 1) * Q::kSumBytes);
    const int sent = Q::kSent + (turn & 1) * Q::kSentBytes;
    const uint32_t sent_bar = bars + (1 + (turn & 1)) * 8;
    if constexpr (kCluster)
      if (tid == 0 && own_columns > 0) mbarrier_expect(sent_bar, own_columns * Q::kTileRows * 4 * (kSplit - 1));
#pragma unroll 1
    for (int of_turn = 0; of_turn < Q::kRounds; of_turn++) {
      // The warp's place is read anew: kept, it would be spilled.
      const int round = turn * Q::kRounds + of_turn, row_tile = thread_index() / 32 % Q::kRowTiles,
                group = thread_index() / 32 / Q::kRowTiles;
      if (Q::kRounds > 1 && round) {
        if (of_turn) {
          __syncthreads();  // all are done with the last round's input
          fetch(round);
        }
        load(of_turn);
      }
      mbarrier_wait(bars, round & 1);
#pragma unroll 1
      for (int i = 0; i < Q::kChunk / kWgmmaColumns; i++) {
        const int part = i * (kWgmmaColumns / kTileColumns);  // its first tile
        if (i && part >= tiles) break;
        const auto sum =
            Q::multiply(others, weights, input + group * Q::kAtOnce * Q::kShareInput + part * V::kTileBytes);
        float* const p =
            sums + group * Q::kGroupSums + (part * kTileColumns + lane % 4 * 2) * Q::kStride + row_tile * 16 + lane / 4;
        Q::keep(sum, p, p + (turn & 1 ? -1 : 1) * Q::kSumBytes / 4, of_turn);
      }
    }
    // Warps take turns too: those that finish a chunk come later to the next one's products than the others.
    constexpr int kEach = (Q::kOwnColumns * Q::kItems + Q::kThreads - 1) / Q::kThreads;
    const int worker = thread_index() ^ (turn & 1) * (Q::kThreads / 2);
    typename Finish::Given given[kEach];
#pragma unroll
    for (int i = 0; i < kEach; i++) {
      const int item = worker + i * Q::kThreads;
      if (item < own_columns * Q::kItems)
        given[i] = finish.given(first + own + item / Q::kItems, tile * Q::kTileRows + item % Q::kItems * 4);
    }
    __syncthreads();  // all sums are there, and all are done with the input and with the last turn's sums
    fetch((turn + 1) * Q::kRounds);
    auto sum_of_groups = [&](int column, int row) {
      float4 y[Q::kGroups];
#pragma unroll
      for (int g = 0; g < Q::kGroups; g++)
        y[g] = *reinterpret_cast<const float4*>(sums + g * Q::kGroupSums + column * Q::kStride + row);
      return sum_of_pairs(y);
    };
    if constexpr (kCluster) {
      for (int item = worker ^ Q::kThreads / 2; item < (Q::kChunk - Q::kOwnColumns) * Q::kItems; item += Q::kThreads) {
        const int other = item / Q::kItems, row = item % Q::kItems * 4,
                  column = other < own ? other : other + Q::kOwnColumns, to = column / Q::kOwnColumns,
                  from = rank - (rank > to);
        if (column < tiles * kTileColumns)
          send(in_block(shared + sent + (from * Q::kSentFrom + column % Q::kOwnColumns * Q::kTileRows + row) * 4, to),
               sum_of_groups(column, row), in_block(sent_bar, to));
      }
      if (worker < own_columns * Q::kItems) mbarrier_wait(sent_bar, turn >> 1 & 1);  // others go on to their products
    }
#pragma unroll
    for (int i = 0; i < kEach; i++) {
      const int item = worker + i * Q::kThreads, of_own = item / Q::kItems, row = item % Q::kItems * 4,
                column = own + of_own;
      // A residual's warps stay together, also behind the last column: what they store there nobody reads.
      if (item >= own_columns * Q::kItems || (Finish::kNormed && first + column >= columns)) continue;
      float4 y[kSplit];
#pragma unroll
      for (int r = 0; r < kSplit; r++)
        y[r] = r == rank ? sum_of_groups(column, row)
                         : *reinterpret_cast<const float4*>(
                               memory + sent + ((r - (r > rank)) * Q::kSentFrom + of_own * Q::kTileRows + row) * 4);
      finish(sum_of_pairs(y), first + column, tile * Q::kTileRows + row,
             Finish::kNormed ? inverse[turn * Q::kChunk + column] : 1.f, given[i]);
    }
    if constexpr (kCluster) {
      if (turn) wait_for_cluster();
      arrive_at_cluster();  // what was sent has been read
    }
  }
  if constexpr (kCluster)
    if (begin < columns) wait_for_cluster();
}

// Scales of 4 neighbouring rows; 1 for bf16.
template <bool Fp8>
__device__ __forceinline__ float4 scales_of(const float* scales, int row) {
  if constexpr (Fp8) return *reinterpret_cast<const float4*>(scales + row);
  else return make_float4(1.f, 1.f, 1.f, 1.f);
}

// q, k and v.
template <class S>
struct QkvFinish {
  static constexpr bool kNormed = true;
  float* qkv;  // [columns][kQkv]
  const float* scales;

  using Given = float4;  // scales
  __device__ __forceinline__ Given given(int, int row) const { return scales_of<S::kFp8>(scales, row); }
  __device__ __forceinline__ void operator()(const float4& y, int column, int row, float inverse,
                                             const Given& scale) const {
    *reinterpret_cast<float4*>(qkv + static_cast<size_t>(column) * S::kQkv + row) =
        make_float4(y.x * inverse * scale.x, y.y * inverse * scale.y, y.z * inverse * scale.z, y.w * inverse * scale.w);
  }
};

// A packet of a residual, ready for the matrix behind the norm with weights w: see residual_packet.
template <int K>
__device__ __forceinline__ void publish_residual(const float4& h, uint2 w, uint8_t* vector, float* squares, int column,
                                                 int row, int lane) {
  VectorLayout<K>::store(
      vector, column, row / 4,
      make_uint2(pack2(h.x * low_bf16(w.x), h.y * high_bf16(w.x)), pack2(h.z * low_bf16(w.y), h.w * high_bf16(w.y))));
  const float square = __fadd_rn(__fadd_rn(__fmul_rn(h.x, h.x), __fmul_rn(h.y, h.y)),
                                 __fadd_rn(__fmul_rn(h.z, h.z), __fmul_rn(h.w, h.w)));
  store_square<K>(squares, column, row / 4, square, lane);
}

// The residual plus a product.
template <class S>
struct ResidualFinish {
  static constexpr bool kNormed = false;
  float* residual;  // [columns][kHidden]
  const float* scales;
  const bf16* norm;
  uint8_t* vector;
  float* squares;

  struct Given {
    float4 h, scale;
    uint2 norm;
  };
  __device__ __forceinline__ float4* at(int column, int row) const {
    return reinterpret_cast<float4*>(residual + static_cast<size_t>(column) * S::kHidden + row);
  }
  __device__ __forceinline__ Given given(int column, int row) const {
    return {*at(column, row), scales_of<S::kFp8>(scales, row), *reinterpret_cast<const uint2*>(norm + row)};
  }
  __device__ __forceinline__ void operator()(const float4& y, int column, int row, float, const Given& given) const {
    const float4 scale = given.scale;
    float4 h = given.h;
    h.x += y.x * scale.x, h.y += y.y * scale.y, h.z += y.z * scale.z, h.w += y.w * scale.w;
    *at(column, row) = h;
    publish_residual<S::kHidden>(h, given.norm, vector, squares, column, row, thread_index() % 32);
  }
};

// 1.7B: from the talker's width to the code predictor's. inverse: of the talker's hidden states, or null.
template <class P>
struct AdapterFinish {
  static constexpr bool kNormed = false;
  const float *inverse, *bias;
  float* residual;
  const bf16* norm;
  uint8_t* vector;
  float* squares;

  struct Given {
    float4 bias;
    float scale;
    uint2 norm;
  };
  __device__ __forceinline__ Given given(int column, int row) const {
    return {*reinterpret_cast<const float4*>(bias + row), inverse ? inverse[column] : 1.f,
            *reinterpret_cast<const uint2*>(norm + row)};
  }
  __device__ __forceinline__ void operator()(const float4& y, int column, int row, float, const Given& given) const {
    const float4 b = given.bias;
    const float scale = given.scale;
    const float4 h =
        make_float4(fmaf(y.x, scale, b.x), fmaf(y.y, scale, b.y), fmaf(y.z, scale, b.z), fmaf(y.w, scale, b.w));
    *reinterpret_cast<float4*>(residual + static_cast<size_t>(column) * P::kHidden + row) = h;
    publish_residual<P::kHidden>(h, given.norm, vector, squares, column, row, thread_index() % 32);
  }
};

// SiLU(gate) * up, whose rows alternate.
template <class S>
struct GatedFinish {
  static constexpr bool kNormed = true;
  const float* scales;
  uint8_t* vector;

  using Given = float4;  // scales
  __device__ __forceinline__ Given given(int, int row) const { return scales_of<S::kFp8>(scales, row); }
  __device__ __forceinline__ void operator()(const float4& sums, int column, int row, float inverse,
                                             const Given& scale) const {
    const float first = gated(make_float2(sums.x, sums.y), inverse, scale.x, scale.y),
                second = gated(make_float2(sums.z, sums.w), inverse, scale.z, scale.w);
    VectorLayout<S::kIntermediate>::store_gated(vector, column, row / 2, pack2(first, second));
  }
};

// Logits.
template <class Dims, bool First, bool Fp8>
struct LogitFinish {
  static constexpr bool kNormed = true;
  const FrameParams* params;
  const float* scales;
  int group;

  using Given = float4;  // scales
  __device__ __forceinline__ Given given(int, int row) const { return scales_of<Fp8>(scales, row); }
  __device__ __forceinline__ void operator()(const float4& sums, int column, int row, float inverse,
                                             const Given& scale) const {
    const FrameParams& p = *params;
    const Column& c = p.batch.column[column];
    const bool sample = (First ? c.draw0 : c.draw).sample;
    const float y[4] = {sums.x, sums.y, sums.z, sums.w}, s[4] = {scale.x, scale.y, scale.z, scale.w};
#pragma unroll
    for (int i = 0; i < 4; i++)
      CodeRows<Dims>{p}.publish_logit(p, c, column, First ? 0 : group, row + i, y[i] * inverse * s[i],
                                      sample ? gumbel(c.seed, c.frame, First ? 0 : group, row + i) : 0.f);
  }
};

}  // namespace
}  // namespace qmk
