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

// What shall be told of a column's watched heads in a frame (text_heads.cu).
struct Look {
  const float* queries;  // see Watch
  const int* pages;      // the slot's page table
  float* told;           // [heads][kTold] out, in the host's memory
  int position;          // of the frame
  int first_head, heads;
  int text_at, tokens;  // where the text begins, and how long it is; tokens behind `position` do not count
  int first;            // token from which on some are told one by one
};
static_assert(sizeof(Look) % 4 == 0);
struct TalkerHeads {
  int layers, heads, kv_heads;
};
// `heads`: of each of these columns. looks: on the host or on the GPU. kv: as in FrameParams.
cudaError_t launch_looks(const Look* looks, int columns, int heads, const bf16* kv, const TalkerHeads& talker,
                         cudaStream_t stream);

// The same of up to kBatchColumns sequences, as CUDA graphs (frame_batch.cu).
class BatchGraphs {
 public:
  BatchGraphs() = default;
  ~BatchGraphs() {
    for (auto& graphs : graphs_)
      for (cudaGraphExec_t graph : graphs) cudaGraphExecDestroy(graph);
  }
  BatchGraphs(const BatchGraphs&) = delete;
  BatchGraphs& operator=(const BatchGraphs&) = delete;

  // Record the graphs for launches of up to `columns` sequences. p: what is the same in all launches; on_gpu: where
  // each one's parameters will be.
  cudaError_t record(int talker_hidden, int columns, FrameParams p, const FrameParams* on_gpu);
  // One frame of so many sequences. prefill: so many rows of prompts, for their keys and values.
  cudaError_t launch(int columns, bool prefill, cudaStream_t stream) const;

 private:
  static constexpr int kStep = 32;          // columns between two graphs
  std::vector<cudaGraphExec_t> graphs_[2];  // of frames, of prompts
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
