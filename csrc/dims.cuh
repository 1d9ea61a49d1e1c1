// Launch geometry and model dims: every compile-time number of the kernel.
#pragma once
#include <cstdint>

namespace qmk {

constexpr int kBlocks = 128;                        // resident for the whole frame
constexpr int kComputeThreads = 512, kWarps = 16;   // plus one producer warp
constexpr int kThreads = kComputeThreads + 32;
constexpr int kHeadDim = 128;
constexpr int kSplits = 8;                          // blocks that share a query head's context
constexpr int kSplitPositions = 256;                // positions of one split before the next one begins

// The weight stream. A unit is one 16-byte fragment per compute lane; a ring stage is two units.
constexpr int kUnitBytes = kComputeThreads * 16, kStageUnits = 2, kStageBytes = kStageUnits * kUnitBytes;

// One decoder stack. A block owns rows r, r + 1, ... of every matrix, so each row count is a multiple of 8 per block.
template <int Hidden, int Intermediate, int Layers, int Heads, int KvHeads>
struct StackDims {
  static constexpr int kHidden = Hidden, kIntermediate = Intermediate, kLayers = Layers, kHeads = Heads, kKvHeads = KvHeads;
  static constexpr int kQ = Heads * kHeadDim, kKv = KvHeads * kHeadDim, kGroup = Heads / KvHeads;
  static constexpr int kQkvRows = (kQ + 2 * kKv) / kBlocks, kORows = Hidden / kBlocks;
  static constexpr int kGateUpRows = 2 * Intermediate / kBlocks, kDownRows = Hidden / kBlocks;
  static_assert(kQkvRows % 8 == 0 && kORows % 8 == 0 && kGateUpRows % 16 == 0, "rows of a block come in eights");
  static_assert(Hidden % 1024 == 0 && Intermediate % 1024 == 0 && kQ % 1024 == 0, "an exchange moves 1024 values at a time");
  static_assert(Heads * kSplits <= kBlocks, "a block attends to one split of one head");
};

template <class TalkerStack, int CodecVocab, int CodeVocab>
struct ModelDims {
  using Talker = TalkerStack;
  using Predictor = StackDims<1024, 3072, 5, 16, 8>;
  static constexpr int kCodecVocab = CodecVocab, kCodes = CodeVocab, kGroups = 16;
  static constexpr bool kAdapter = Talker::kHidden != Predictor::kHidden;
};

using Dims06 = ModelDims<StackDims<1024, 3072, 28, 16, 8>, 3072, 2048>;
using Dims17 = ModelDims<StackDims<2048, 6144, 28, 16, 8>, 3072, 2048>;

// Stages that one matrix takes in a block's ribbon.
template <int Rows, int K>
constexpr int kMatrixStages = Rows * K * 2 / kStageBytes;
template <class S>
constexpr int kLayerStages = kMatrixStages<S::kQkvRows, S::kHidden> + kMatrixStages<S::kORows, S::kQ> +
                             kMatrixStages<S::kGateUpRows, S::kHidden> + kMatrixStages<S::kDownRows, S::kIntermediate>;

}  // namespace qmk
