// What a prompt needs besides the persistent kernel, as the host calls it.
#pragma once
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace qmk {

struct Projection {
  const __nv_bfloat16* embedded;           // [rows][inner]
  const __nv_bfloat16 *weight1, *bias1;    // [inner][inner], [inner]
  const __nv_bfloat16 *weight2, *bias2;    // [hidden][inner], [hidden]
  __nv_bfloat16 *between, *out;            // [rows][inner], [rows][hidden]
  int inner, hidden;
};
cudaError_t project_text(const Projection&, int rows, cudaStream_t);

// A matrix [rows][k] within a ribbon.
struct Ribbon {
  const uint8_t* data;    // of its first block
  int64_t block_bytes;    // from one block's part to the next one's
  int rows, k, block_rows, packet;
};
// out: [rows][k / 2] pairs of bf16.
cudaError_t unpack(const Ribbon&, uint32_t* out, cudaStream_t);

}  // namespace qmk
