// The matrix products of a frame of many sequences: up to kBatchColumns columns a launch.
//
// Such a frame is a CUDA graph of kernels (frame_batch.cu), which read the same ribbons as the persistent kernel. Each
// column's sums are added in the same order too: K in 16 shares, a share in its chains, then the shares in pairs. So a
// column has the same bits in both.
//
// A warp keeps 16 rows of weights in registers, and four of them multiply 32 columns after the other by theirs. The
// blocks of a cluster have the same rows and different shares of K. So each reads a part of the weights and a part of
// the columns' values, and few bytes come from L2. Each block sends its sums of a tile of 8 columns to the one block
// that adds them up.
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
__device__ __forceinline__ void wgmma_64x32x16(float4 (&d)[4], const uint4& a, uint64_t b, bool add) {
  asm volatile(
      "{\n .reg .pred p;\n setp.ne.b32 p, %21, 0;\n"
      " wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, "
      "%13, %14, %15}, {%16, %17, %18, %19}, %20, p, 1, 1, 0;\n}"
      : "+f"(d[0].x), "+f"(d[0].y), "+f"(d[0].z), "+f"(d[0].w), "+f"(d[1].x), "+f"(d[1].y), "+f"(d[1].z), "+f"(d[1].w),
        "+f"(d[2].x), "+f"(d[2].y), "+f"(d[2].z), "+f"(d[2].w), "+f"(d[3].x), "+f"(d[3].y), "+f"(d[3].z), "+f"(d[3].w)
      : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "l"(b), "r"(static_cast<int>(add)));
}

// A matrix of which a block of the persistent kernel has `Rows` rows. A block here has RowTiles tiles of 16 rows, and
// kGroups warps for each, which share the block's part of K.
template <int Rows, int K, bool Fp8, int RowTiles>
struct Product {
  using M = Matvec<Rows, K, Fp8>;
  using V = VectorLayout<K>;
  static constexpr int kOf = kSteps<K>, kInner = K, kRowTiles = RowTiles, kTileRows = RowTiles * 16;
  // Sums that blocks send each other take longer than the products. So a block has as much of K as registers hold.
  static constexpr int kGroups = K <= 1024 ? 2 : 1, kSplit = K <= 1024 ? 2 : 8;  // the latter: blocks of a cluster
  static constexpr int kThreads = RowTiles * kGroups * 32;
  static constexpr int kShares = kWarps / kSplit, kGroupShares = kShares / kGroups;  // of a block, of a warp
  static constexpr int kAtOnce = min_of(kGroupShares, 24 / kOf);  // shares whose weights registers hold
  static constexpr int kRounds = kGroupShares / kAtOnce;
  static constexpr int kChunk = 64, kTiles = kChunk / kTileColumns;  // columns that a cluster multiplies at once
  static constexpr int kOwnTiles = kTiles / kSplit;                  // of them, that a block finishes
  static constexpr int kStride = kTileRows + 4;  // of a column's sums: no two lanes of a store meet in a bank
  // Shared memory: a chunk's input, what the cluster's blocks sent (twice), what the groups hand each other (twice),
  // this block's sums and the columns' 1 / rms.
  static constexpr int kShareInput = kTiles * V::kTileBytes, kTileSums = RowTiles * 512,
                       kSentBytes = kTiles * kTileSums;
  static constexpr int kSent = kShares * kShareInput, kHanded = kSent + 2 * kSentBytes,
                       kSums = kHanded + (kGroups - 1) * 2 * 4 * kTileSums,
                       kInverse = kSums + kOwnTiles * kTileColumns * kStride * 4,
                       kBarriers = kInverse + kOwnTiles * kTileColumns * 4, kBytes = kBarriers + 3 * 8;
  static_assert(RowTiles % 4 == 0 && kOf <= 24 && kRounds <= 2 && kBytes <= kSharedBytes);

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
  // A round's sums of 32 columns: of each of 4 tiles what mma gives this lane. input: shared address of their first
  // share.
  static __device__ __forceinline__ void multiply(const uint4 (&weights)[kAtOnce][kOf], uint32_t input,
                                                  float4 (&sum)[4]) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)  // wgmma
    // No swizzle; of a step the halves lie 128 bytes apart, the tiles of columns kTileBytes.
    const uint64_t from = (input & 0x3ffff) >> 4 | 128ull / 16 << 16 | static_cast<uint64_t>(V::kTileBytes / 16) << 32;
    float4 late[4];
#pragma unroll
    for (int s = 0; s < kAtOnce; s++) {
      float4 acc[M::kChains][4];
      asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
      for (int i = 0; i < kOf; i++)
        wgmma_64x32x16(acc[i % M::kChains], weights[s][i], from + (s * kShareInput + i * kStepBytes) / 16,
                       i >= M::kChains);
      asm volatile("wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;" ::: "memory");
#pragma unroll
      for (int t = 0; t < 4; t++) {
#pragma unroll
        for (int c = 1; c < M::kChains; c++) acc[0][t] = plus(acc[0][t], acc[c][t]);
        // In pairs: shares 0 and 1, 2 and 3, both.
        if (s == 0) sum[t] = acc[0][t];
        if (s == 1) sum[t] = plus(sum[t], acc[0][t]);
        if (s == 2) late[t] = acc[0][t];
        if (s == 3) sum[t] = plus(sum[t], plus(late[t], acc[0][t]));
      }
    }
#endif
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
// A copy takes microseconds. A wait that never ends is a fault, which the host sees.
__device__ __forceinline__ void wait_for_copy(uint32_t bar, uint32_t parity) {
  for (int polls = 0; !mbarrier_try_wait(bar, parity); ++polls)
    if (polls == 1 << 20) __trap();
}
// Relaxed: with a release, each arrival would wait until all that the thread has stored is in L2.
__device__ __forceinline__ void arrive_at_cluster() { asm volatile("barrier.cluster.arrive.relaxed.aligned;"); }
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

// Multiply the columns by the matrix. finish(sums, column, row, inverse): of 4 rows from `row` on; a warp's lanes have
// neighbouring ones. Cluster: kSplit blocks of neighbouring x.
template <class Q, class Finish>
__global__ void __launch_bounds__(Q::kThreads)
    product_kernel(const __grid_constant__ ProductArgs a, const __grid_constant__ Finish finish) {
  constexpr int K = Q::kInner, kRowTiles = Q::kRowTiles;
  using V = VectorLayout<K>;
  extern __shared__ __align__(128) uint8_t memory[];
  float *const sums = reinterpret_cast<float*>(memory + Q::kSums), *const inverse =
                                                                       reinterpret_cast<float*>(memory + Q::kInverse);
  const uint32_t input = shared_address(memory), bars = input + Q::kBarriers;
  const int tid = threadIdx.x, warp = tid / 32, lane = tid % 32, rank = blockIdx.x % Q::kSplit,
            tile = blockIdx.x / Q::kSplit, first_share = rank * Q::kShares, row_tile = warp % kRowTiles,
            group = warp / kRowTiles, group_share = group * Q::kGroupShares;
  uint4 weights[Q::kAtOnce][Q::kOf];
  auto load = [&](int round) {
#pragma unroll
    for (int s = 0; s < Q::kAtOnce; s++)
      Q::load(a.matrix, a.block_bytes, tile * kRowTiles + row_tile, first_share + group_share + round * Q::kAtOnce + s,
              lane, weights[s]);
  };
  load(0);
  if (tid == 0) {
    for (int i = 0; i < 3; i++) mbarrier_init(bars + i * 8, 1);
    mbarrier_init_fence();
  }
  arrive_at_cluster();  // the barriers may be told
  const int columns = *a.columns, step = gridDim.y * Q::kChunk;
  after_the_kernel_before();
  // A chunk's input: of each share its tiles.
  auto fetch = [&](int first) {
    const int bytes = min(Q::kChunk, round_up(columns - first, kTileColumns)) / kTileColumns * V::kTileBytes;
    mbarrier_expect(bars, Q::kShares * bytes);
    for (int s = 0; s < Q::kShares; s++)
      bulk_copy(input + s * Q::kShareInput,
                a.vector + (first_share + s) * V::kShareBytes + first / kTileColumns * V::kTileBytes, bytes, bars);
  };
  int first = blockIdx.y * Q::kChunk;
  if (tid == 0 && first < columns) fetch(first);
  wait_for_cluster();
  for (int turn = 0; first < columns; first += step, turn++) {
    // Two buffers take turns: the cluster's barrier tells when all have read the one before.
    const int buffer = Q::kSent + (turn & 1) * Q::kSentBytes, own = first + rank * Q::kOwnTiles * kTileColumns;
    const uint32_t bar = bars + 8 + (turn & 1) * 8;
    const int tiles = min(Q::kTiles, (columns - first + kTileColumns - 1) / kTileColumns),
              own_tiles = min(Q::kOwnTiles, tiles - rank * Q::kOwnTiles);
    // Of a block's tile, where a warp's sums of a share of K go.
    auto place = [&](int block, int tile_of_block) {
      return buffer + (((block * Q::kOwnTiles + tile_of_block) * kRowTiles + row_tile) * 32 + lane) * 16;
    };
    if (tid == 0 && own_tiles > 0) mbarrier_expect(bar, own_tiles * Q::kSplit * Q::kTileSums);
    wait_for_copy(bars, turn & 1);
    auto send_sum = [&](int t, const float4& sum) {
      if (t >= tiles) return;
      const int to = t / Q::kOwnTiles;
      send(in_block(shared_address(memory) + place(rank, t % Q::kOwnTiles), to), sum, in_block(bar, to));
    };
#pragma unroll 1
    for (int part = 0; part < tiles; part += 4) {
      const uint32_t from = input + part * V::kTileBytes + group_share * Q::kShareInput;
      float4 sum[4];
      if (Q::kRounds > 1 && (turn || part)) load(0);
      Q::multiply(weights, from, sum);
      if constexpr (Q::kRounds > 1) {
        float4 more[4];
        load(1);
        Q::multiply(weights, from + Q::kAtOnce * Q::kShareInput, more);
#pragma unroll
        for (int t = 0; t < 4; t++) sum[t] = plus(sum[t], more[t]);
      }
      if constexpr (Q::kGroups == 1) {
#pragma unroll
        for (int t = 0; t < 4; t++) send_sum(part + t, sum[t]);
      } else {
        // Each group hands the other one half of the tiles, and adds up its own half. Two buffers take turns.
        float4* const handed =
            reinterpret_cast<float4*>(memory + Q::kHanded + part / 4 % 2 * 4 * Q::kTileSums) + row_tile * 32 + lane;
        auto of = [&](int from_group, int t) -> float4& { return handed[(from_group * 2 + t) * kRowTiles * 32]; };
#pragma unroll
        for (int t = 0; t < 2; t++) of(group, t) = group ? sum[t] : sum[2 + t];
        __syncthreads();
#pragma unroll
        for (int t = 0; t < 2; t++) send_sum(part + 2 * group + t, plus(group ? sum[2 + t] : sum[t], of(1 - group, t)));
      }
    }
    __syncthreads();  // all are done with the input, and with the last turn
    if (tid == 0 && first + step < columns) fetch(first + step);
    if (own_tiles > 0) {
      if constexpr (Finish::kNormed)
        if (tid < Q::kOwnTiles * kTileColumns && own + tid < columns)
          inverse[tid] = inverse_rms_of<K>(a.squares, own + tid);
      wait_for_copy(bar, turn >> 1 & 1);
      for (int t = group; t < own_tiles; t += Q::kGroups) {
        float4 y[Q::kSplit];
#pragma unroll
        for (int r = 0; r < Q::kSplit; r++) y[r] = *reinterpret_cast<const float4*>(memory + place(r, t));
        const float4 sum = sum_of_pairs(y);
        float* const p = sums + (t * kTileColumns + lane % 4 * 2) * Q::kStride + row_tile * 16 + lane / 4;
        p[0] = sum.x, p[Q::kStride] = sum.y, p[8] = sum.z, p[Q::kStride + 8] = sum.w;
      }
      __syncthreads();
      constexpr int kItems = Q::kTileRows / 4;  // of a column
      for (int item = tid; item < own_tiles * kTileColumns * kItems; item += Q::kThreads) {
        const int of_own = item / kItems, row = item % kItems * 4, column = own + of_own;
        // A residual's warps stay together, also behind the last column: what they store there nobody reads.
        if (!Finish::kNormed || column < columns)
          finish(*reinterpret_cast<const float4*>(sums + of_own * Q::kStride + row), column, tile * Q::kTileRows + row,
                 Finish::kNormed ? inverse[of_own] : 1.f);
      }
    }
    if (turn) wait_for_cluster();
    arrive_at_cluster();  // the buffer has been read
  }
  if (blockIdx.y * Q::kChunk < columns) wait_for_cluster();
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

  __device__ __forceinline__ void operator()(const float4& sums, int column, int row, float inverse) const {
    const float4 y = sums, scale = scales_of<S::kFp8>(scales, row);
    *reinterpret_cast<float4*>(qkv + static_cast<size_t>(column) * S::kQkv + row) =
        make_float4(y.x * inverse * scale.x, y.y * inverse * scale.y, y.z * inverse * scale.z, y.w * inverse * scale.w);
  }
};

// A packet of a residual, ready for the next norm's matrix: see residual_packet.
template <int K>
__device__ __forceinline__ void publish_residual(const float4& h, const bf16* norm, uint8_t* vector, float* squares,
                                                 int column, int row, int lane) {
  const uint2 w = *reinterpret_cast<const uint2*>(norm + row);
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

  __device__ __forceinline__ void operator()(const float4& sums, int column, int row, float) const {
    float4* const at = reinterpret_cast<float4*>(residual + static_cast<size_t>(column) * S::kHidden + row);
    const float4 y = sums, scale = scales_of<S::kFp8>(scales, row);
    float4 h = *at;
    h.x += y.x * scale.x, h.y += y.y * scale.y, h.z += y.z * scale.z, h.w += y.w * scale.w;
    *at = h;
    publish_residual<S::kHidden>(h, norm, vector, squares, column, row, thread_index() % 32);
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

  __device__ __forceinline__ void operator()(const float4& sums, int column, int row, float) const {
    const float4 y = sums, b = *reinterpret_cast<const float4*>(bias + row);
    const float scale = inverse ? inverse[column] : 1.f;
    const float4 h =
        make_float4(fmaf(y.x, scale, b.x), fmaf(y.y, scale, b.y), fmaf(y.z, scale, b.z), fmaf(y.w, scale, b.w));
    *reinterpret_cast<float4*>(residual + static_cast<size_t>(column) * P::kHidden + row) = h;
    publish_residual<P::kHidden>(h, norm, vector, squares, column, row, thread_index() % 32);
  }
};

// SiLU(gate) * up, whose rows alternate.
template <class S>
struct GatedFinish {
  static constexpr bool kNormed = true;
  const float* scales;
  uint8_t* vector;

  __device__ __forceinline__ void operator()(const float4& sums, int column, int row, float inverse) const {
    const float4 scale = scales_of<S::kFp8>(scales, row);
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

  __device__ __forceinline__ void operator()(const float4& sums, int column, int row, float inverse) const {
    const FrameParams& p = *params;
    const Column& c = p.batch.column[column];
    const bool sample = (First ? c.draw0 : c.draw).sample;
    const float4 four = sums, scale = scales_of<Fp8>(scales, row);
    const float y[4] = {four.x, four.y, four.z, four.w}, s[4] = {scale.x, scale.y, scale.z, scale.w};
#pragma unroll
    for (int i = 0; i < 4; i++)
      CodeRows<Dims>{p}.publish_logit(p, c, column, First ? 0 : group, row + i, y[i] * inverse * s[i],
                                      sample ? gumbel(c.seed, c.frame, First ? 0 : group, row + i) : 0.f);
  }
};

}  // namespace
}  // namespace qmk
