// What the host calls.
#pragma once
#include <cuda_runtime.h>

#include "params.h"

namespace qmk {

// Once per device and talker width: how many blocks the device can hold at once. The kernel needs kBlocks.
cudaError_t prepare_frame(int talker_hidden, int* resident_blocks);

// One frame of params.columns streams (or, with params.prefill, as many prompt rows) on `stream`; cooperative, so a grid
// that does not fit is an error.
cudaError_t launch_frame(int talker_hidden, const FrameParams& params, cudaStream_t stream);

}  // namespace qmk
