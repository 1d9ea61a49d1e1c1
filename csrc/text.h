// The text projection as the host calls it.
#pragma once
#include <cuda_bf16.h>
#include <cuda_runtime.h>

namespace qmk {

struct Projection {
  const __nv_bfloat16* embedded;           // [rows][inner]
  const __nv_bfloat16 *weight1, *bias1;    // [inner][inner], [inner]
  const __nv_bfloat16 *weight2, *bias2;    // [hidden][inner], [hidden]
  __nv_bfloat16 *between, *out;            // [rows][inner], [rows][hidden]
  int inner, hidden;
};
cudaError_t project_text(const Projection&, int rows, cudaStream_t);

}  // namespace qmk
