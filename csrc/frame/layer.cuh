// One decoder layer for up to 8 or 16 columns, in five stages: the page to read first. Talker and code predictor run
// the same code.
//
// Every block runs every line. A block owns a few rows of each matrix. It keeps its rows of the residual in registers,
// in fp32. It publishes what it computes and awaits what it needs next, so a wait is both the exchange and the barrier.
// Two buffers of partial sums (wide, narrow) take turns, so a matrix needs only one barrier inside the block.
#pragma once
#include "attention.cuh"
#include "packets.cuh"

namespace qmk {

// What a thread takes of a layer's small tensors.
template <class S>
struct LayerWeights {
  const float* scales;        // of rows of E4M3 weights: qkv, o, gate and up, down
  bf16 post_norm, next_norm;  // of its row: the norm before the MLP, and of whoever reads the layer's result

  template <class B>
  __device__ __forceinline__ LayerWeights(const B& b, const StackWeights& w, const float* all_scales, int index,
                                          const bf16* next)
      : scales(all_scales + (S::kFp8 ? index * S::kScales : 0)),
        post_norm(owned_value<S>(b, w.post_norm + index * S::kHidden)),
        next_norm(owned_value<S>(b, next)) {}
};

// q, k, v = W * norm(residual)
template <class S, class B, class Source>
__device__ __forceinline__ void qkv(B& b, const LayerWeights<S>& w, const Source& source) {
  const float scale = scale_of<S::kFp8>(w.scales, b.block * S::kQkvRows + b.tid % S::kQkvRows, S::kQkv);
  matvec<S::kQkvRows, S::kHidden, S::kFp8>(b, b.s.wide, source);
  publish_qkv<S>(b, b.s.wide, scale);
  b.mark(kQkv);
}

// attention = softmax(q * K) * V, of the head that this block works on: attend_pages or attend_frame (attention.cuh)
template <class B, class Attend>
__device__ __forceinline__ void attention(B& b, Attend attend) {
  b.refresh();
  attend();
  b.mark(kAttention);
}

// residual += W * attention
template <class S, class B>
__device__ __forceinline__ void o(B& b, const LayerWeights<S>& w) {
  const float scale = scale_of<S::kFp8>(w.scales + S::kQkv, owned_row<S>(b), S::kHidden);
  const Place<S> place(b);
  const auto source = vector_input<S::kQ>(b, b.x.attn, b.epoch);
  const LateInput late{[&](int step, auto& in) {
    // With several columns most blocks attend. Their other warps sleep until that is done, because their polls would
    // delay the loads of the warps that attend.
    if (step == 0 && b.columns > 1) sync_compute<kComputeThreads>();
    source.await(step, in);
  }};
  matvec<S::kHiddenRows, S::kQ, S::kFp8>(b, b.s.narrow, late);
  add_and_publish<S>(b, place, b.s.narrow, scale, b.x.h_attn, w.post_norm);
  b.mark(kO);
}

// mlp = SiLU(gate) * up, where gate, up = W * norm(residual)
template <class S, class B>
__device__ __forceinline__ void gate_up(B& b, const LayerWeights<S>& w) {
  const int gate = MlpPackets<S>::gate_row(b);
  const float gate_scale = scale_of<S::kFp8>(w.scales + S::kQkv + S::kHidden, gate, 2 * S::kIntermediate);
  const float up_scale = scale_of<S::kFp8>(w.scales + S::kQkv + S::kHidden, gate + 1, 2 * S::kIntermediate);
  matvec<S::kGateUpRows, S::kHidden, S::kFp8>(b, b.s.wide, vector_input<S::kHidden>(b, b.x.h_attn, b.epoch));
  MlpPackets<S>::publish_gated(b, b.s.wide, gate_scale, up_scale);
  b.mark(kGateUp);
}

// residual += W * mlp
template <class S, class B>
__device__ __forceinline__ void down(B& b, const LayerWeights<S>& w) {
  b.refresh();
  const float scale =
      scale_of<S::kFp8>(w.scales + S::kQkv + S::kHidden + 2 * S::kIntermediate, owned_row<S>(b), S::kHidden);
  const Place<S> place(b);
  matvec_of_mlp<S::kHiddenRows, S::kIntermediate, S::kFp8>(b, b.s.narrow);
  add_and_publish<S>(b, place, b.s.narrow, scale, b.x.h_mlp, w.next_norm);
  b.mark(kDown);
}

// source: the residual before the layer, normed but for 1 / rms. b.residual: this thread's row of it. attend()
// publishes x.attn. next_norm: [hidden], of whoever reads x.h_mlp. scales: [layers][S::kScales], of E4M3 weights.
// looked_up: q, k and v come from the tables. heads_only: nothing is wanted behind them. See Tables.
template <class S, class B, class Source, class Attend>
__device__ __forceinline__ void layer(B& b, const StackWeights& stack, const float* scales, int index,
                                      const Source& source, const bf16* next_norm, Attend attend,
                                      bool looked_up = false, bool heads_only = false) {
  b.refresh();
  const LayerWeights<S> w(b, stack, scales, index, next_norm);
  if (!looked_up) qkv<S>(b, w, source);
  if (heads_only) return;
  attention(b, attend);
  o<S>(b, w);
  gate_up<S>(b, w);
  down<S>(b, w);
}

}  // namespace qmk
