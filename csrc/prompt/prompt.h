// What a prompt needs besides the persistent kernel, as the host calls it.
#pragma once
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "../sizes.h"

namespace qmk {

struct Projection {
  const __nv_bfloat16* embedded;         // [rows][inner]
  const __nv_bfloat16 *weight1, *bias1;  // [inner][inner], [inner]
  const __nv_bfloat16 *weight2, *bias2;  // [hidden][inner], [hidden]
  __nv_bfloat16 *between, *out;          // [rows][inner], [rows][hidden]
  int inner, hidden;
};
cudaError_t project_text(const Projection&, int rows, cudaStream_t);

// A matrix [rows][k] within a ribbon.
struct Ribbon {
  const uint8_t* data;                          // of its first block
  int rows, k, block_rows, packet, part_bytes;  // part_bytes: of each of row_parts(block_rows, k) of a block
  uint32_t* out;                                // [rows][k / 2] pairs of bf16
  const float* scales;                          // [rows] of E4M3 weights, null: they are bf16
};
struct Ribbons {
  Ribbon matrix[kLayerMatrices];
  int64_t block_bytes;  // from one block's part to the next one's
};
cudaError_t unpack(const Ribbons&, cudaStream_t);

// x += delta (or nothing, where that is null), y = RMSNorm(x): x fp32, delta and y bf16, all [rows][hidden].
cudaError_t add_norm(float* x, const __nv_bfloat16* delta, const __nv_bfloat16* weight, float eps, int rows, int hidden,
                     __nv_bfloat16* y, cudaStream_t);

// Queries, keys and values of the rows of one slot's prompt.
struct Heads {
  const __nv_bfloat16* qkv;              // [rows][heads + 2 kv_heads][128]
  const __nv_bfloat16 *q_norm, *k_norm;  // [128]
  const float *cos, *sin;                // [positions][64]
  const int64_t* at;                     // [rows] position of every row, the last one the largest
  const int64_t* pages;                  // of the slot
  __nv_bfloat16* kv;                     // this layer's in the first page: [2][kv_heads][page][128]
  int64_t page_stride;                   // values from a page's to the next one's
  __nv_bfloat16* q;                      // [heads][rows][128] out
  int rows, heads, kv_heads, page;
  float eps;
};
cudaError_t place_heads(const Heads&, cudaStream_t);
// Keys and values of positions 0 .. length - 1, [heads][length][128] each; zeros behind the last row's position.
cudaError_t gather(const Heads&, int length, __nv_bfloat16* keys, __nv_bfloat16* values, cudaStream_t);
// out = SiLU(gate) * up; both: [values] of (gate, up).
cudaError_t gate(const __nv_bfloat16* both, int64_t values, __nv_bfloat16* out, cudaStream_t);

}  // namespace qmk
