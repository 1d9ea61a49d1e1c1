// What a producer copies into its block's ring: the weights of every step of a frame, and the talker's old keys and
// values where attention wants them.
#pragma once
#include "attention.cuh"
#include "order.cuh"
#include "packets.cuh"

namespace qmk {

template <class Dims>
struct Producer : WeightSteps {
  using T = typename Dims::Talker;
  using P = typename Dims::Predictor;
  // Stages of a matrix.
  template <int Rows, int K, bool Fp8>
  static constexpr int kStages = Matvec<Rows, K, Fp8>::stages(kSteps<K>);

  const FrameParams& p;
  Ring& ring;
  Patience& patience;
  const int block, lane;

  __device__ __forceinline__ void talker() {
    constexpr int kQkvStages = kStages<T::kQkvRows, T::kHidden, T::kFp8>;
    const Assignment assigned = assignment(block, p.columns);
    const Context<T> context(assigned, p.column, p.columns);
    const uint8_t* ribbon = share_of(p.talker.ribbon, p.talker.layers * kLayerStages<T>);
    for (int index = 0; index < p.talker.layers; index++) {
      ribbon = ring.copy(ribbon, kQkvStages, 0, p.talker_pace, patience, lane);
      copy_context<T>(ring, context, p.column[assigned.column].pages, layer_kv<T>(p, index, assigned.kv_head),
                      page_stride<T>(p), p.talker_pace, patience, lane);
      ribbon = ring.copy(ribbon, kLayerStages<T> - kQkvStages, 0, p.talker_pace, patience, lane);
    }
  }
  __device__ __forceinline__ void codec_head() {
    copy(p.codec_head, kStages<Dims::kHeadRows, T::kHidden, kFp8CodecHead>);
  }
  __device__ __forceinline__ void adapter(const Pass&) { copy(p.adapter, kStages<P::kHiddenRows, T::kHidden, false>); }
  __device__ __forceinline__ void predictor(const Pass& pass) {
    constexpr int kQkvStages = kStages<P::kQkvRows, P::kHidden, P::kFp8>;
    const int stages = p.predictor.layers * kLayerStages<P>;
    const uint8_t* const ribbon = share_of(p.predictor.ribbon, stages);
    // With tables a frame reads these once or twice: they stay in L2 where everything does.
    if (pass_mode(p, pass.position) != PassMode::kLookedUp)
      ring.copy(ribbon, kQkvStages, p.pinned < 15 ? 0 : 15, p.predictor_pace, patience, lane);
    if (pass_mode(p, pass.position) == PassMode::kFillsTables) return;
    ring.copy(ribbon + kQkvStages * kStageBytes, stages - kQkvStages, p.pinned, p.predictor_pace, patience, lane);
  }
  __device__ __forceinline__ void lm_head(const Pass& pass) {
    constexpr int kHeadStages = kStages<Dims::kCodeRows, P::kHidden, kFp8LmHeads>;
    copy(p.lm_heads + static_cast<size_t>(pass.drawn_group() - 1) * kBlocks * kHeadStages * kStageBytes, kHeadStages);
  }

 private:
  // This block's share of a ribbon: so many stages.
  __device__ __forceinline__ const uint8_t* share_of(const uint8_t* ribbon, int stages) const {
    return ribbon + static_cast<size_t>(block) * stages * kStageBytes;
  }
  // The one matrix of a ribbon.
  __device__ __forceinline__ void copy(const uint8_t* ribbon, int stages) {
    ring.copy(share_of(ribbon, stages), stages, 0, p.predictor_pace, patience, lane);
  }
};

}  // namespace qmk
