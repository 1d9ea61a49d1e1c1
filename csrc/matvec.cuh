// y = W x for the rows that this block owns, on the tensor cores.
//
// The 16 compute warps share K: each multiplies its slice of x with all rows of the block and leaves partial sums in
// shared memory, which the first `Rows` threads add up in a fixed order. Weights come out of the ring as ready mma
// fragments (megakernel.py packs them): 16 x 16 tiles where the block's rows come in sixteens; else 8 x 32 tiles, whose
// upper half holds the same 8 rows 16 columns further on.
#pragma once
#include "ring.cuh"

namespace qmk {

template <int Rows, int K>
struct Matvec {
  static constexpr bool kTall = Rows % 16 == 0;
  static constexpr int kRowTiles = kTall ? Rows / 16 : Rows / 8;
  static constexpr int kTileK = kTall ? 16 : 32, kSliceK = K / kWarps;
  static constexpr int kUnits = kSliceK / kTileK * kRowTiles;
  static_assert(kUnits % kStageUnits == 0 && kUnits * kUnitBytes == Rows * K * 2, "a matrix fills whole stages");

  // x: bf16 [K] in shared memory. partial: fp32 [warps][Rows] in shared memory.
  static __device__ __forceinline__ void run(Ring& ring, const bf16* x, float* partial, int warp, int lane, Patience& patience) {
    float acc[kRowTiles][4] = {}, acc_upper[kTall ? 1 : kRowTiles][4] = {};
    uint32_t b[kTall ? 2 : 4];
#pragma unroll
    for (int s = 0; s < kUnits / kStageUnits; s++) {
      uint4 unit[kStageUnits];
      ring.take(unit, warp, lane, patience);
#pragma unroll
      for (int j = 0; j < kStageUnits; j++) {
        const int u = s * kStageUnits + j, tile = u % kRowTiles;
        if (tile == 0) {  // x as column 0 of the mma's B: lanes 0..3 hold it, two values a register
          const uint32_t* column = reinterpret_cast<const uint32_t*>(x + warp * kSliceK + u / kRowTiles * kTileK);
#pragma unroll
          for (int i = 0; i < (kTall ? 2 : 4); i++) b[i] = lane < 4 ? column[i * 4 + lane] : 0u;
        }
        mma_16x8x16(acc[tile], unit[j], b[0], b[1]);
        if constexpr (!kTall) mma_16x8x16(acc_upper[tile], unit[j], b[2], b[3]);
      }
    }
    if (lane % 4 == 0) {  // column 0 of the result: rows lane / 4 and lane / 4 + 8
      float* p = partial + warp * Rows + lane / 4;
#pragma unroll
      for (int r = 0; r < kRowTiles; r++) {
        if constexpr (kTall) p[r * 16] = acc[r][0], p[r * 16 + 8] = acc[r][2];
        else p[r * 8] = acc[r][0] + acc_upper[r][2];
      }
    }
  }

  static __device__ __forceinline__ float sum(const float* partial, int row) {
    float y = 0.f;
#pragma unroll
    for (int w = 0; w < kWarps; w++) y += partial[w * Rows + row];
    return y;
  }
};

}  // namespace qmk
