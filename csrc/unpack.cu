// A matrix of a ribbon laid out plainly again, for prompts that are long enough for cuBLAS: its weights are not kept twice.
// The inverse of megakernel.py's `pack`; a thread takes the 16 bytes that a lane feeds to one mma, or to two.
#include "dims.cuh"
#include "prompt.h"

namespace qmk {
namespace {

__global__ void unpack_kernel(const Ribbon r, uint32_t* out) {
  const int pairs = r.k / 2, lane_pairs = r.k / (kWarps * 4 * 2), steps = lane_pairs / 2;  // of a lane's share
  const bool tall = r.block_rows % 16 == 0;                                               // tiles of 16 rows and one step, or of 8 and two
  const int tiles = r.block_rows / (tall ? 16 : 8), units = (tall ? steps : (steps + 1) / 2) * tiles * kWarps * 32;
  const int i = blockIdx.x * blockDim.x + threadIdx.x, block = blockIdx.y;
  if (i >= units) return;
  const int q = i % 4, g = i / 4 % 8, warp = i / 32 % kWarps, tile = i / (32 * kWarps) % tiles, at = i / (32 * kWarps * tiles);
  const uint4 unit = *reinterpret_cast<const uint4*>(r.data + static_cast<int64_t>(block) * r.block_bytes + static_cast<int64_t>(i) * 16);
  const uint32_t words[4] = {unit.x, unit.y, unit.z, unit.w};
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    const int step = tall ? at : 2 * at + w / 2, half = tall ? w / 2 : w % 2;
    const int row = block * r.block_rows + (tall ? tile * 16 + w % 2 * 8 : tile * 8) + g;
    if (row >= r.rows || step >= steps) continue;
    const int value = step * 4 + half * 2, column = ((warp * (2 * lane_pairs / r.packet) + value / r.packet) * 4 + q) * r.packet + value % r.packet;
    out[static_cast<int64_t>(row) * pairs + column / 2] = words[w];
  }
}

}  // namespace

cudaError_t unpack(const Ribbon& r, uint32_t* out, cudaStream_t stream) {
  if (r.block_rows % 8 || r.k % 256 || (r.k / 64) % r.packet || r.packet % 2) return cudaErrorInvalidValue;
  const int units = (r.k / 256 + 1) * (r.block_rows + 7) / 8 * kWarps * 32;  // at most
  unpack_kernel<<<dim3((units + 255) / 256, kBlocks), 256, 0, stream>>>(r, out);
  return cudaGetLastError();
}

}  // namespace qmk
