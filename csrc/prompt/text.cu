// Text embeddings -> talker rows: two linear layers with SiLU between them, for the few rows of a text. A row's sum
// does not depend on the rows beside it. So a text gives the same rows whole or in pieces.
#include "../ptx.cuh"
#include "prompt.h"

namespace qmk {
namespace {

constexpr int kWarps = 8, kRows = 16, kColumns = 16;  // of a block; its warps share K

__device__ __forceinline__ float rounded(float x) { return __bfloat162float(__float2bfloat16(x)); }

// out[row][column] = bias + sum over k of in[row][k] * weight[column][k], rounded to bf16 wherever PyTorch rounds.
template <bool Silu>
__global__ void __launch_bounds__(kWarps * 32)
    linear_kernel(const __nv_bfloat16* in, const __nv_bfloat16* weight, const __nv_bfloat16* bias, int rows, int k,
                  int columns, __nv_bfloat16* out) {
  __shared__ float sums[kWarps][kRows][kColumns];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
  const int first_row = blockIdx.y * kRows, first_column = blockIdx.x * kColumns;
  // A step is 32 values of k, 8 of them in each lane: which of these meet in an mma does not matter, if both sides
  // agree.
  auto eight = [&](const __nv_bfloat16* of, int at, int step, bool there) {
    return there && step + q * 8 < k
               ? __ldg(reinterpret_cast<const uint4*>(of + static_cast<int64_t>(at) * k + step + q * 8))
               : make_uint4(0, 0, 0, 0);
  };
  float sum[2][4] = {};
#pragma unroll 4
  for (int step = warp * 32; step < k; step += kWarps * 32) {
    const int row = first_row + g;
    const uint4 low = eight(in, row, step, row < rows), high = eight(in, row + 8, step, row + 8 < rows);
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const int column = first_column + n * 8 + g;
      const uint4 w = eight(weight, column, step, column < columns);
      mma_16x8x16(sum[n], low.x, high.x, low.y, high.y, w.x, w.y);
      mma_16x8x16(sum[n], low.z, high.z, low.w, high.w, w.z, w.w);
    }
  }
#pragma unroll
  for (int n = 0; n < 2; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) sums[warp][g + i / 2 * 8][n * 8 + 2 * q + i % 2] = sum[n][i];
  __syncthreads();
  const int r = threadIdx.x / kColumns, c = threadIdx.x % kColumns, row = first_row + r, column = first_column + c;
  if (row >= rows || column >= columns) return;
  float y = 0.0f;
#pragma unroll
  for (int i = 0; i < kWarps; ++i) y += sums[i][r][c];
  y = rounded(y + __bfloat162float(bias[column]));
  if (Silu) y = y / (1.0f + __expf(-y));
  out[static_cast<int64_t>(row) * columns + column] = __float2bfloat16(y);
}

}  // namespace

cudaError_t project_text(const Projection& p, int rows, cudaStream_t stream) {
  if (p.inner % 8) return cudaErrorInvalidValue;
  const int tiles = (rows + kRows - 1) / kRows;
  linear_kernel<true><<<dim3((p.inner + kColumns - 1) / kColumns, tiles), kWarps * 32, 0, stream>>>(
      p.embedded, p.weight1, p.bias1, rows, p.inner, p.inner, p.between);
  linear_kernel<false><<<dim3((p.hidden + kColumns - 1) / kColumns, tiles), kWarps * 32, 0, stream>>>(
      p.between, p.weight2, p.bias2, rows, p.inner, p.hidden, p.out);
  return cudaGetLastError();
}

}  // namespace qmk
