// What the host calls.
#pragma once
#include <cuda_runtime.h>

#include "params.h"

namespace qmk {

// Each of frame.cu for up to kNarrowColumns and, where kWideColumns is not 0, of frame_wide.cu for so many.

// Once per device and talker width: how many blocks the device can hold at once. The kernel needs kBlocks.
template <bool Wide>
cudaError_t prepare_frame(int talker_hidden, int* resident_blocks);

// One frame of params.columns sequences (or, with params.prefill, as many prompt rows) on `stream`; cooperative, so a
// grid that does not fit is an error.
template <bool Wide>
cudaError_t launch_frame(int talker_hidden, const FrameParams& params, cudaStream_t stream);

// The same of up to kBatchColumns sequences, from p.batch.column on (frame_batch.cu). cudaErrorInvalidValue: the kernel
// has no room for a model of this width.
cudaError_t prepare_batch(int talker_hidden);
cudaError_t launch_batch(int talker_hidden, const FrameParams& params, cudaStream_t stream);

template <>
cudaError_t prepare_frame<false>(int talker_hidden, int* resident_blocks);
template <>
cudaError_t prepare_frame<true>(int talker_hidden, int* resident_blocks);
template <>
cudaError_t launch_frame<false>(int talker_hidden, const FrameParams& params, cudaStream_t stream);
template <>
cudaError_t launch_frame<true>(int talker_hidden, const FrameParams& params, cudaStream_t stream);

}  // namespace qmk
