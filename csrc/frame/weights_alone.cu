// The weights of a frame alone: benchmarks/measure_fp8.py builds this file in frame.cu's place and times it. Blocks,
// ring and producers are the frame's, so the same weights arrive in the same order. The compute warps multiply them by
// zeros, and neither exchange nor draw. It takes a frame at position 0 only: later ones find old keys and values in the
// ring.
#include "frame.cuh"

namespace qmk {
namespace {

template <int Rows, int K, bool Fp8, class B>
__device__ __forceinline__ void multiply(B& b) {
  b.refresh();
  Matvec<Rows, K, Fp8> m;
  InputOf<K> zeros{};
  m.template multiply<kSteps<K>>(b.ring, LateInput{[](int, auto&) {}}, 0, b.warp, b.lane, b.patience, zeros);
#pragma unroll 1
  for (int part = 1; part < m.kParts; part++) m.multiply_next(b.ring, b.warp, b.lane, b.patience, zeros);
}

template <class S, class B>
__device__ __forceinline__ void multiply_layers(B& b, int layers, bool known = false) {
  for (int index = 0; index < layers; index++) {
    if (index || !known) multiply<S::kQkvRows, S::kHidden, S::kFp8>(b);
    multiply<S::kHiddenRows, S::kQ, S::kFp8>(b);
    multiply<S::kGateUpRows, S::kHidden, S::kFp8>(b);
    multiply<S::kHiddenRows, S::kIntermediate, S::kFp8>(b);
  }
}

// In the order of Frame::produce.
template <class Dims>
__device__ __forceinline__ void multiply_frame(const FrameParams& p, Block<Dims>& b) {
  using F = Frame<Dims>;
  using P = typename F::P;
  constexpr int kHidden = F::T::kHidden;
  if (!p.tables.filled) {
    multiply_layers<typename F::T>(b, p.talker.layers);
    multiply<F::kHeadRows, kHidden, kFp8CodecHead>(b);
  }
  for (int position = p.tables.filled; position < kGroups;) {
    const bool known = F::looks_up(p, position);
    if constexpr (Dims::kAdapter)
      if (!known) multiply<P::kHiddenRows, kHidden, false>(b);
    if (p.tables.filled) return multiply<P::kQkvRows, P::kHidden, P::kFp8>(b);
    multiply_layers<P>(b, p.predictor.layers, known);
    position += F::rows_at(position, p.columns);
    if (position > 1) multiply<F::kCodeRows, P::kHidden, kFp8LmHeads>(b);
  }
}

template <>
__device__ __forceinline__ void Frame<DimsDemo>::compute(const FrameParams& p, Block<DimsDemo>& b) {
  multiply_frame(p, b);
}
template <>
__device__ __forceinline__ void Frame<Dims06>::compute(const FrameParams& p, Block<Dims06>& b) {
  multiply_frame(p, b);
}
template <>
__device__ __forceinline__ void Frame<Dims17>::compute(const FrameParams& p, Block<Dims17>& b) {
  multiply_frame(p, b);
}

}  // namespace
}  // namespace qmk

#include "frame.cu"  // the kernel and its launch
