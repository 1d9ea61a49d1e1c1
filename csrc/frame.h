// What the host calls.
#pragma once
#include <cuda_runtime.h>

#include "params.h"

namespace qmk {

// One frame (or, with params.prefill, one prompt row) on `stream`; cooperative, so a grid that does not fit is an error.
cudaError_t launch_frame(int talker_hidden, const FrameParams& params, cudaStream_t stream);

}  // namespace qmk
