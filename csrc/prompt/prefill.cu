// Long prompts, many rows at a time: cuBLAS does the products, and this file does what lies between them. Weights come
// from the persistent kernel's own ribbons; keys and values go into its own pages.
#include <algorithm>

#include "../frame/dims.cuh"
#include "../frame/fp8.cuh"
#include "../pages.cuh"
#include "prompt.h"

namespace qmk {
namespace {

using bf16 = __nv_bfloat16;

// The inverse of backend/pack.py's `pack`: a thread takes the 16 bytes that a lane feeds to one mma, or to two.
__global__ void unpack_kernel(const __grid_constant__ Ribbons all) {
  const Ribbon& r = all.matrix[blockIdx.z];
  const int pairs = r.k / 2, lane_pairs = r.k / (kWarps * 4 * 2), steps = lane_pairs / 2;  // of a lane's share
  const int parts = row_parts(r.block_rows, r.k), rows = r.block_rows / parts;             // of a part
  const bool tall = rows % 16 == 0;  // tiles of 16 rows and one step, or of 8 and two
  const int tiles = rows / (tall ? 16 : 8), units = (tall ? steps : (steps + 1) / 2) * tiles * kWarps * 32;
  const int i = blockIdx.x * blockDim.x + threadIdx.x, block = blockIdx.y / parts, part = blockIdx.y % parts;
  if (i >= units || block >= kBlocks) return;
  const int q = i % 4, g = i / 4 % 8, warp = i / 32 % kWarps, tile = i / (32 * kWarps) % tiles,
            at = i / (32 * kWarps * tiles);
  const uint8_t* data = r.data + static_cast<int64_t>(block) * all.block_bytes + part * r.part_bytes;
  uint4 unit;
  if (r.scales) {  // two units share a lane's 16 bytes
    const int of = i / kComputeThreads, lane = i % kComputeThreads;
    const uint2 raw =
        *reinterpret_cast<const uint2*>(data + static_cast<int64_t>(of / 2 * kComputeThreads + lane) * 16 + of % 2 * 8);
    unit = widen_e4m3(raw.x, raw.y);
  } else {
    unit = *reinterpret_cast<const uint4*>(data + static_cast<int64_t>(i) * 16);
  }
  const uint32_t words[4] = {unit.x, unit.y, unit.z, unit.w};
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    const int step = tall ? at : 2 * at + w / 2, half = tall ? w / 2 : w % 2;
    const int row = block * r.block_rows + part * rows + (tall ? tile * 16 + w % 2 * 8 : tile * 8) + g;
    if (row >= r.rows || step >= steps) continue;
    const int value = step * 4 + half * 2,
              column = ((warp * (2 * lane_pairs / r.packet) + value / r.packet) * 4 + q) * r.packet + value % r.packet;
    __nv_bfloat162 pair = reinterpret_cast<const __nv_bfloat162&>(words[w]);
    if (r.scales) pair = __floats2bfloat162_rn(__low2float(pair) * r.scales[row], __high2float(pair) * r.scales[row]);
    r.out[static_cast<int64_t>(row) * pairs + column / 2] = reinterpret_cast<const uint32_t&>(pair);
  }
}

// x += delta; y = x / rms(x) * weight. A block a row.
__global__ void __launch_bounds__(256)
    add_norm_kernel(float* x, const bf16* delta, const bf16* weight, float eps, int hidden, bf16* y) {
  __shared__ float room[8];
  float* row = x + static_cast<int64_t>(blockIdx.x) * hidden;
  const bf16* more = delta ? delta + static_cast<int64_t>(blockIdx.x) * hidden : nullptr;
  float squares = 0.0f;
  for (int i = threadIdx.x * 2; i < hidden; i += 512) {
    float2 v = *reinterpret_cast<const float2*>(row + i);
    if (more) {
      const float2 d = __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(more + i));
      v.x += d.x, v.y += d.y;
      *reinterpret_cast<float2*>(row + i) = v;
    }
    squares += v.x * v.x + v.y * v.y;
  }
  squares = warp_sum(squares);
  if (threadIdx.x % 32 == 0) room[threadIdx.x / 32] = squares;
  __syncthreads();
  float all = 0.0f;
#pragma unroll
  for (int i = 0; i < 8; ++i) all += room[i];
  const float scale = rsqrtf(all / hidden + eps);
  for (int i = threadIdx.x * 2; i < hidden; i += 512) {
    const float2 v = *reinterpret_cast<const float2*>(row + i),
                 w = __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(weight + i));
    *reinterpret_cast<__nv_bfloat162*>(y + static_cast<int64_t>(blockIdx.x) * hidden + i) =
        __floats2bfloat162_rn(v.x * scale * w.x, v.y * scale * w.y);
  }
}

// A warp per row and head of q, k and v: q and k normed and rotated; q to [heads][rows][128], k and v into their pages.
__global__ void __launch_bounds__(128) place_heads_kernel(const __grid_constant__ Heads p) {
  const int index = blockIdx.x * 4 + threadIdx.x / 32, lane = threadIdx.x % 32, all = p.heads + 2 * p.kv_heads;
  if (index >= p.rows * all) return;
  const int row = index / all, head = index % all;
  const int64_t at = p.at[row];
  const bf16* from = p.qkv + (static_cast<int64_t>(row) * all + head) * kHeadDim;
  // lane holds dims 2 lane, 2 lane + 1 of either half: the pairs that turn together
  float2 left = __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(from + 2 * lane));
  float2 right = __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(from + 64 + 2 * lane));
  if (head < p.heads + p.kv_heads) {
    const bf16* norm = head < p.heads ? p.q_norm : p.k_norm;
    const float scale =
        rsqrtf(warp_sum(left.x * left.x + left.y * left.y + right.x * right.x + right.y * right.y) / kHeadDim + p.eps);
    const float2 wl = __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(norm + 2 * lane));
    const float2 wr = __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(norm + 64 + 2 * lane));
    left.x *= scale * wl.x, left.y *= scale * wl.y, right.x *= scale * wr.x, right.y *= scale * wr.y;
    const float2 c = *reinterpret_cast<const float2*>(p.cos + at * 64 + 2 * lane),
                 s = *reinterpret_cast<const float2*>(p.sin + at * 64 + 2 * lane);
    const float2 l = left;
    left = make_float2(l.x * c.x - right.x * s.x, l.y * c.y - right.y * s.y);
    right = make_float2(right.x * c.x + l.x * s.x, right.y * c.y + l.y * s.y);
  }
  if (head >= p.heads && row && p.at[row - 1] == at) return;  // what fills a graph up is its last row again
  bf16* to;
  int unit = lane / 4;  // of 8 dims
  if (head < p.heads) {
    to = p.q + (static_cast<int64_t>(head) * p.rows + row) * kHeadDim;
  } else {
    const int kv = (head - p.heads) / p.kv_heads, kv_head = (head - p.heads) % p.kv_heads;  // k or v, and its head
    to = p.kv + p.pages[at / p.page] * p.page_stride +
         ((static_cast<int64_t>(kv) * p.kv_heads + kv_head) * p.page + at % p.page) * kHeadDim;
    unit = unit_place(static_cast<int>(at % p.page), unit);
  }
  to += unit * 8 + lane % 4 * 2;  // the order of units is the same in both halves
  *reinterpret_cast<__nv_bfloat162*>(to) = __floats2bfloat162_rn(left.x, left.y);
  *reinterpret_cast<__nv_bfloat162*>(to + 64) = __floats2bfloat162_rn(right.x, right.y);
}

// Keys and values of positions 0 .. length - 1 in one piece, for every query head. Behind the last row's position come
// zeros, because another sequence may have left NaN there. 16 lanes a position.
__global__ void __launch_bounds__(256)
    gather_kernel(const __grid_constant__ Heads p, int length, uint4* keys, uint4* values) {
  const int position = blockIdx.x * 16 + threadIdx.x / 16, lane = threadIdx.x % 16, head = blockIdx.y;
  if (position >= length) return;
  const int64_t to = (static_cast<int64_t>(head) * length + position) * 16 + lane;
  uint4 k = make_uint4(0, 0, 0, 0), v = k;
  if (position <= p.at[p.rows - 1]) {
    const int64_t kv_head = head / (p.heads / p.kv_heads);
    const bf16* page = p.kv + p.pages[position / p.page] * p.page_stride;
    const int unit = unit_place(position % p.page, lane);
    k = reinterpret_cast<const uint4*>(page + (kv_head * p.page + position % p.page) * kHeadDim)[unit];
    v = reinterpret_cast<const uint4*>(page + ((p.kv_heads + kv_head) * p.page + position % p.page) * kHeadDim)[unit];
  }
  keys[to] = k;
  values[to] = v;
}

// gate and up alternate.
__global__ void __launch_bounds__(256) gate_kernel(const bf16* both, int64_t values, bf16* out) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * 256 + threadIdx.x;
  if (i >= values) return;
  const float2 v = __bfloat1622float2(reinterpret_cast<const __nv_bfloat162*>(both)[i]);
  out[i] = __float2bfloat16(v.x / (1.0f + __expf(-v.x)) * v.y);
}

}  // namespace

cudaError_t unpack(const Ribbons& all, cudaStream_t stream) {
  int units = 0, parts = 1;  // at most
  for (const Ribbon& r : all.matrix) {
    if (r.block_rows % 8 || r.k % 256 || (r.k / 64) % r.packet || r.packet % 2) return cudaErrorInvalidValue;
    units = std::max(units, (r.k / 256 + 1) * ((r.block_rows + 7) / 8) * kWarps * 32);
    parts = std::max(parts, row_parts(r.block_rows, r.k));
  }
  unpack_kernel<<<dim3((units + 255) / 256, kBlocks * parts, kLayerMatrices), 256, 0, stream>>>(all);
  return cudaGetLastError();
}
cudaError_t add_norm(float* x, const bf16* delta, const bf16* weight, float eps, int rows, int hidden, bf16* y,
                     cudaStream_t stream) {
  add_norm_kernel<<<rows, 256, 0, stream>>>(x, delta, weight, eps, hidden, y);
  return cudaGetLastError();
}
cudaError_t place_heads(const Heads& p, cudaStream_t stream) {
  const int warps = p.rows * (p.heads + 2 * p.kv_heads);
  place_heads_kernel<<<(warps + 3) / 4, 128, 0, stream>>>(p);
  return cudaGetLastError();
}
cudaError_t gather(const Heads& p, int length, bf16* keys, bf16* values, cudaStream_t stream) {
  gather_kernel<<<dim3((length + 15) / 16, p.heads), 256, 0, stream>>>(p, length, reinterpret_cast<uint4*>(keys),
                                                                       reinterpret_cast<uint4*>(values));
  return cudaGetLastError();
}
cudaError_t gate(const bf16* both, int64_t values, bf16* out, cudaStream_t stream) {
  gate_kernel<<<static_cast<int>((values + 255) / 256), 256, 0, stream>>>(both, values, out);
  return cudaGetLastError();
}

}  // namespace qmk
