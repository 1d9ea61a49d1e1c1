// What the host calls.
#pragma once
#include <cuda_runtime.h>

#include <vector>

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

// The same of up to kBatchColumns sequences, as CUDA graphs (frame_batch.cu).
class BatchGraphs {
 public:
  BatchGraphs() = default;
  ~BatchGraphs() {
    for (cudaGraphExec_t graph : graphs_) cudaGraphExecDestroy(graph);
  }
  BatchGraphs(const BatchGraphs&) = delete;
  BatchGraphs& operator=(const BatchGraphs&) = delete;

  // Record the graphs for launches of up to `columns` sequences. p: what is the same in all launches; on_gpu: where
  // each one's parameters will be.
  cudaError_t record(int talker_hidden, int columns, FrameParams p, const FrameParams* on_gpu);
  // One frame of so many sequences.
  cudaError_t launch(int columns, cudaStream_t stream) const;

 private:
  static constexpr int kStep = 32;  // columns between two graphs
  std::vector<cudaGraphExec_t> graphs_;
};

template <>
cudaError_t prepare_frame<false>(int talker_hidden, int* resident_blocks);
template <>
cudaError_t prepare_frame<true>(int talker_hidden, int* resident_blocks);
template <>
cudaError_t launch_frame<false>(int talker_hidden, const FrameParams& params, cudaStream_t stream);
template <>
cudaError_t launch_frame<true>(int talker_hidden, const FrameParams& params, cudaStream_t stream);

}  // namespace qmk
