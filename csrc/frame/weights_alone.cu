// The weights of a frame alone: benchmarks/measure_fp8.py builds this file in frame.cu's place and times it. Blocks,
// ring and producers are the frame's, so the same weights arrive in the same order. The compute warps multiply them by
// zeros, and neither exchange nor draw. It takes a frame at position 0 only: later ones find old keys and values in the
// ring.
#include "frame.cuh"

namespace qmk {
namespace {

template <class Dims>
struct WeightsAlone : WeightSteps {
  using T = typename Dims::Talker;
  using P = typename Dims::Predictor;
  const FrameParams& p;
  Block<Dims>& b;

  __device__ __forceinline__ void talker() { multiply_layers<T>(p.talker.layers, false); }
  __device__ __forceinline__ void codec_head() { multiply<Dims::kHeadRows, T::kHidden, kFp8CodecHead>(); }
  __device__ __forceinline__ void adapter(const Pass&) { multiply<P::kHiddenRows, T::kHidden, false>(); }
  __device__ __forceinline__ void predictor(const Pass& pass) {
    if (pass_mode(p, pass.position) == PassMode::kFillsTables) multiply<P::kQkvRows, P::kHidden, P::kFp8>();
    else multiply_layers<P>(p.predictor.layers, pass_mode(p, pass.position) == PassMode::kLookedUp);
  }
  __device__ __forceinline__ void lm_head(const Pass&) { multiply<Dims::kCodeRows, P::kHidden, kFp8LmHeads>(); }

 private:
  template <int Rows, int K, bool Fp8>
  __device__ __forceinline__ void multiply() {
    b.refresh();
    Matvec<Rows, K, Fp8> m;
    InputOf<K> zeros{};
    m.template multiply<kSteps<K>>(b.ring, LateInput{[](int, auto&) {}}, 0, b.warp, b.lane, b.patience, zeros);
#pragma unroll 1
    for (int part = 1; part < m.kParts; part++) m.multiply_next(b.ring, b.warp, b.lane, b.patience, zeros);
  }
  template <class S>
  __device__ __forceinline__ void multiply_layers(int layers, bool looked_up) {
    for (int index = 0; index < layers; index++) {
      if (index || !looked_up) multiply<S::kQkvRows, S::kHidden, S::kFp8>();
      multiply<S::kHiddenRows, S::kQ, S::kFp8>();
      multiply<S::kGateUpRows, S::kHidden, S::kFp8>();
      multiply<S::kHiddenRows, S::kIntermediate, S::kFp8>();
    }
  }
};

template <class Dims>
__device__ __forceinline__ void multiply_frame(const FrameParams& p, Block<Dims>& b) {
  WeightsAlone<Dims> alone{{}, p, b};
  run_frame<Dims>(p, alone);
}
template <>
__device__ __forceinline__ void Frame<DimsDemo>::compute() {
  multiply_frame(p, b);
}
template <>
__device__ __forceinline__ void Frame<Dims06>::compute() {
  multiply_frame(p, b);
}
template <>
__device__ __forceinline__ void Frame<Dims17>::compute() {
  multiply_frame(p, b);
}

}  // namespace
}  // namespace qmk

#include "frame.cu"  // the kernel and its launch
