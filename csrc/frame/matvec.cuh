// y = W x for the rows that this block owns and up to 8 columns x a tile, on the tensor cores.
//
// The 16 compute warps share K: each multiplies its share of x with all rows of the block and leaves partial sums in
// shared memory, where they are added up in a fixed order. Weights come out of the ring as ready mma fragments
// (backend/pack.py packs them): tiles of 16 rows where a block's rows come in sixteens, else of 8 rows and two steps of
// K. mma's columns do not touch each other, so a column's result does not depend on what runs beside it.
#pragma once
#include "ring.cuh"

namespace qmk {

// Fragments of weights that are fetched before their input is there: 32 registers, or 16 where a second tile of columns
// needs the rest. Half as many where a block's rows need more than 24 registers for their sums.
constexpr int kEarlyUnits = kColumnTiles > 1 ? 4 : 8;
// An input is on its way while weights are fetched, where there are registers for both: not beside a second tile of
// columns.
constexpr bool kAskEarly = kColumnTiles == 1;
// Stages of weights that are fetched before. Measured on an H200 with 1 column: 1 of 4 1.110 ms, 2 1.094, 3 1.087, all
// 1.101.
constexpr int kStagesBeforeAsking = 3;

template <int K>
constexpr int kSteps = K / (kWarps * 16);  // of the mma along a warp's share of K; a lane has 4 values of each

// Steps whose input is awaited at once: with two tiles of columns, registers hold half of many.
constexpr int steps_at_once(int steps) { return kColumnTiles > 1 && steps >= 8 ? steps / 2 : steps; }

// This lane's values of some steps of a matrix's input: mma's B operand of its columns, and their sums of squares.
template <int Steps>
struct Input {
  uint2 b[kColumnTiles][Steps];
  float square[kColumnTiles];
};

constexpr int partial_stride(int rows) { return round_up(rows - 3, 8) + 4; }
constexpr int partial_size(int rows) { return kWarps * kColumns * partial_stride(rows); }  // floats

__device__ __forceinline__ float plus(float a, float b) { return a + b; }
__device__ __forceinline__ float2 plus(float2 a, float2 b) { return make_float2(a.x + b.x, a.y + b.y); }
__device__ __forceinline__ float4 plus(float4 a, float4 b) {
  return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
}

template <int Rows, int K, bool Fp8 = false>
struct Matvec {
  static constexpr int kParts = row_parts(Rows, K), kPartRows = Rows / kParts;
  static constexpr bool kTall = kPartRows % 16 == 0;
  static constexpr int kTiles = kPartRows / (kTall ? 16 : 8);  // of a part
  static constexpr int kChains = row_chains(Rows, K);
  static constexpr int kStageUnits = stage_units(Fp8), kWhole = Fp8 ? 4 : 2;  // units that a matrix is filled up to
  static_assert(kPartRows * kParts == Rows && (kParts == 1 || (kTall && kColumnTiles == 1)));
  // Ring stages that `steps` of K take, of a part of the rows and of all.
  static constexpr int part_stages(int steps) {
    return round_up(kTiles * (kTall ? steps : (steps + 1) / 2), kWhole) / kStageUnits;
  }
  static constexpr int stages(int steps) { return kParts * part_stages(steps); }

  static constexpr int kStride = partial_stride(Rows);

  float acc[kColumnTiles][kTiles][kChains][4] = {}, square[kColumnTiles] = {};

  // One unit of weights times the steps it covers, from step i on, whose input is in.b[][at].
  template <int Steps>
  __device__ __forceinline__ void multiply(const uint4& w, const Input<Steps>& in, int tile, int i, int at) {
#pragma unroll
    for (int c = 0; c < kColumnTiles; c++) {
      const auto& b = in.b[c];
      if constexpr (kTall) {
        mma_16x8x16(acc[c][tile][i % kChains], w.x, w.y, w.z, w.w, b[at].x, b[at].y);
      } else {
        mma_16x8x16(acc[c][tile][i % kChains], w.x, 0, w.y, 0, b[at].x, b[at].y);
        if (at + 1 < Steps) mma_16x8x16(acc[c][tile][(i + 1) % kChains], w.z, 0, w.w, 0, b[at + 1].x, b[at + 1].y);
      }
    }
  }

  // The first part times `Count` steps of K from `first` on, of an input (packets.cuh) that brings steps_at_once(Count)
  // at a time and adds their squares. What fits in registers of the weights is fetched before they are received.
  template <int Count, class Source>
  __device__ __forceinline__ void multiply(Ring& ring, const Source& source, int first, int warp, int lane,
                                           Patience& patience, Input<steps_at_once(Count)>& in) {
    constexpr int kAtOnce = steps_at_once(Count);
    static_assert(Count % kAtOnce == 0 && (kTall || kAtOnce == Count || kAtOnce % 2 == 0));
    constexpr int kUnits = kTiles * (kTall ? Count : (Count + 1) / 2), kStages = part_stages(Count),
                  kMost = (kTiles * kChains > 6 ? kEarlyUnits / 2 : kEarlyUnits) / kStageUnits,
                  kEarly = min_of(kStages, kMost), kBefore = kAskEarly ? min_of(kEarly, kStagesBeforeAsking) : kEarly;
    static_assert(Count == kSteps<K> || kUnits % kWhole == 0, "a part of K ends with a stage");
    uint4 early[kEarly][kStageUnits];
#pragma unroll
    for (int s = 0; s < kBefore; s++) ring.take(early[s], warp, lane, patience);
    auto asked = source.ask(0);
#pragma unroll
    for (int s = kBefore; s < kEarly; s++) ring.take(early[s], warp, lane, patience);
#pragma unroll
    for (int s = 0; s < kStages; s++) {
      uint4 unit[kStageUnits];
      if (s >= kEarly) ring.take(unit, warp, lane, patience);
#pragma unroll
      for (int j = 0; j < kStageUnits; j++) {
        const int u = s * kStageUnits + j, tile = u % kTiles, i = u / kTiles * (kTall ? 1 : 2);
        if (u >= kUnits) continue;
        if (tile == 0 && i % kAtOnce == 0) {
          if (i) asked = source.ask(i);
          source.receive(asked, i, in);
        }
        multiply(s < kEarly ? early[s][j] : unit[j], in, tile, first + i, i % kAtOnce);
      }
    }
#pragma unroll
    for (int c = 0; c < kColumnTiles; c++) square[c] += in.square[c];
  }
  // The next part times an input that is there, all of it.
  template <int Steps>
  __device__ __forceinline__ void multiply_next(Ring& ring, int warp, int lane, Patience& patience,
                                                const Input<Steps>& in) {
    static_assert(Steps == kSteps<K>);
#pragma unroll
    for (auto& tile : acc[0])
#pragma unroll
      for (auto& chain : tile)
#pragma unroll
        for (float& sum : chain) sum = 0.f;
#pragma unroll
    for (int s = 0; s < part_stages(Steps); s++) {
      uint4 unit[kStageUnits];
      ring.take(unit, warp, lane, patience);
#pragma unroll
      for (int j = 0; j < kStageUnits; j++) {
        const int u = s * kStageUnits + j, i = u / kTiles;
        if (u < kTiles * Steps) multiply(unit[j], in, u % kTiles, i, i);
      }
    }
  }

  // partial: fp32 [warps][kColumns][kStride], the rows, then the sum of squares. The stride is 4 modulo 8, so that no
  // two lanes of a store or of a sum meet in a bank.
  __device__ __forceinline__ void store(float* partial, int columns, int warp, int lane, int part = 0) {
#pragma unroll
    for (int c = 0; c < kColumnTiles; c++)
      store(partial + (warp * kColumns + c * 8) * kStride, acc[c], square[c], columns - c * 8, lane, part);
  }
  __device__ __forceinline__ static void store(float* p, float (&acc)[kTiles][kChains][4], float square, int columns,
                                               int lane, int part) {
    if (part == 0) {
      square += __shfl_xor_sync(~0u, square, 1);
      square += __shfl_xor_sync(~0u, square, 2);
      if (lane % 4 == 0 && lane / 4 < columns) p[lane / 4 * kStride + Rows] = square;
    }
    p += part * kPartRows;
    const int column = lane % 4 * 2;
    if (column >= columns) return;
    p += column * kStride + lane / 4;
#pragma unroll
    for (int t = 0; t < kTiles; t++) {
#pragma unroll
      for (int c = 1; c < kChains; c++)
#pragma unroll
        for (int i = 0; i < 4; i++) acc[t][0][i] += acc[t][c][i];
      p[t * (kTall ? 16 : 8)] = acc[t][0][0], p[t * (kTall ? 16 : 8) + kStride] = acc[t][0][1];
      if constexpr (kTall) p[t * 16 + 8] = acc[t][0][2], p[t * 16 + 8 + kStride] = acc[t][0][3];
    }
  }

  // The warps' sums of some neighbouring rows of a column, added in pairs; in canonical loops, so that they stay in
  // registers.
  template <class T>
  static __device__ __forceinline__ T sum_as(const float* partial, int row, int column) {
    T y[kWarps];
#pragma unroll
    for (int w = 0; w < kWarps; w++)
      y[w] = *reinterpret_cast<const T*>(partial + (w * kColumns + column) * kStride + row);
#pragma unroll
    for (int level = 1; level < kWarps; level *= 2)
#pragma unroll
      for (int w = 0; w < kWarps; w += 2 * level) y[w] = plus(y[w], y[w + level]);
    return y[0];
  }
  static __device__ __forceinline__ float sum(const float* partial, int row, int column) {
    return sum_as<float>(partial, row, column);
  }
  // 1 / rms of a column of K values.
  static __device__ __forceinline__ float inverse_rms(const float* partial, int column) {
    return rsqrtf(sum(partial, Rows, column) * (1.f / K) + 1e-6f);
  }
};

}  // namespace qmk
