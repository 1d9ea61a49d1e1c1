// The order of a frame: its steps, one after the other. It stands only here. Four run it, each with its own work: the
// producers, which fetch weights (producer.cuh), the compute warps, which multiply by them (frame.cuh), a benchmark
// that does nothing else (weights_alone.cu), and on the host who records the graphs for many columns (frame_batch.cu).
#pragma once
#include "params.h"

namespace qmk {

// What a pass of the code predictor has to do with the tables (see Tables).
enum class PassMode {
  kComputed,     // nothing: every matrix is multiplied
  kLookedUp,     // neither the adapter nor q, k and v of layer 0 are computed: they are in the tables
  kFillsTables,  // only these are computed, for the tables
};

// One pass of the code predictor: the same `rows` positions of every sequence, from `position` on.
struct Pass {
  int position, rows;

  // Group of the last code that comes in; 0 too where only the hidden state does.
  __host__ __device__ __forceinline__ int last_group() const { return max(position - 1, 0); }
  // Group of the code that is drawn behind it; 0: none is, because the pass took the hidden state alone.
  __host__ __device__ __forceinline__ int drawn_group() const { return position + rows - 1; }
  // Of a row among those of all sequences: its sequence (the shift divides by `rows`), and whether it is the talker's
  // hidden state.
  __device__ __forceinline__ int sequence_of(int row) const { return row >> (rows - 1); }
  __device__ __forceinline__ bool is_hidden(int row) const { return position == 0 && (row & (rows - 1)) == 0; }
};

__host__ __device__ __forceinline__ PassMode pass_mode(const FrameParams& p, int position) {
  if (p.tables.fill) return PassMode::kFillsTables;
  return p.tables.heads && position >= kFirstLookedUp ? PassMode::kLookedUp : PassMode::kComputed;
}

// Run the steps of a launch. `steps` has a method for each, of the host or of the device.
#pragma nv_exec_check_disable
template <class Dims, class Steps>
__host__ __device__ __forceinline__ void run_frame(const FrameParams& p, Steps& steps) {
  if (p.tables.fill) {
    steps.begin_tables();
  } else {
    if (p.talked) steps.resume();
    else steps.talker();
    if (p.prefill) return;
    steps.codec_head();
  }
  for (int position = p.tables.fill ? p.tables.position : 0; position < kGroups;) {
    // The first two positions share a pass where the columns suffice.
    const bool shared = !kWide && position == 0 && 2 * p.columns <= kColumns;
    const Pass pass{position, shared ? 2 : 1};
    if constexpr (Dims::kAdapter)
      if (pass_mode(p, pass.position) != PassMode::kLookedUp) steps.adapter(pass);
    steps.predictor(pass);
    if (p.tables.fill) return;
    steps.end_pass(pass);
    if (pass.drawn_group()) steps.lm_head(pass);
    position += pass.rows;
  }
  steps.next_input();
}

// The steps that take no weights, for those who do nothing in them.
struct WeightSteps {
  __host__ __device__ __forceinline__ void begin_tables() {}
  __host__ __device__ __forceinline__ void resume() {}
  __host__ __device__ __forceinline__ void end_pass(const Pass&) {}
  __host__ __device__ __forceinline__ void next_input() {}
};

}  // namespace qmk
