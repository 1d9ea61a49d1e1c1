// Launch geometry and model dims: the compile-time numbers of the kernel that follow from sizes.h and from the target.
#pragma once
#include <cstdint>

#include "../sizes.h"

// What one target allows; backend/targets.py's TARGETS hands these over.
#ifndef QMK_COLUMNS
#define QMK_BLOCKS 128
#define QMK_COLUMNS 8
#define QMK_WIDE_COLUMNS 16
#define QMK_BATCH_COLUMNS 256
#define QMK_SHARED_KB 227
#define QMK_PRODUCER_WARPS 4
#endif
// Which weights are E4M3 with a scale a row instead of bf16: bits, in the order of fp8.py's PARTS.
#ifndef QMK_FP8
#define QMK_FP8 0
#endif

namespace qmk {

// The kernel's own clock, stage by stage: benchmarks/measure_decode.py.
#ifdef QMK_STAGE_CLOCK
constexpr bool kStageClock = true;
#else
constexpr bool kStageClock = false;
#endif

constexpr int max_of(int a, int b) { return a > b ? a : b; }
constexpr int min_of(int a, int b) { return a < b ? a : b; }

// Of a launch, one a multiprocessor; they wait for each other, so all must be resident at once.
constexpr int kBlocks = QMK_BLOCKS;
constexpr int kSharedBytes = QMK_SHARED_KB * 1024;  // that a block may have
constexpr int kWarps = kComputeWarps, kComputeThreads = kWarps * 32;
// Behind them the producers: warps that copy weights, in turn. A wait for a stage and its copies take a producer 250
// cycles or more, which is too long where stages are small and the ring holds few. Where registers change hands, they
// do so by four warps.
constexpr int kProducers = kSharedBytes < 200 * 1024 ? 2 : 1;
constexpr int kThreads = kComputeThreads + max_of(QMK_PRODUCER_WARPS, kProducers) * 32;
#ifdef QMK_WIDE
constexpr bool kWide = true;  // frame_wide.cu
#else
constexpr bool kWide = false;
#endif
constexpr int kBatchColumns = QMK_BATCH_COLUMNS;  // of a launch of many columns, at most; 0: there are none
constexpr int kNarrowColumns = QMK_COLUMNS, kWideColumns = QMK_WIDE_COLUMNS;  // 0: there is no wide kernel
// Of a launch of this kernel, at most; even, because a lane stores two at a time.
constexpr int kColumns = kWide ? kWideColumns : kNarrowColumns;
constexpr int kColumnTiles = (kColumns + 7) / 8;  // an mma takes 8
static_assert(kColumns % 2 == 0 && kColumns >= 2 && kColumnTiles == (kWide ? 2 : 1));
constexpr int kMostColumns = kWideColumns ? kWideColumns : kNarrowColumns;  // of any launch
// Is there room for the code predictor's keys and values?
constexpr bool kFrameKvShared = kSharedBytes > 200 * 1024 && !kWide;
constexpr int kSplitLog = 6;  // of a talker's context: positions of a split, at least, as a power of two

// The weights' ribbon. A unit is one 16-byte fragment per compute lane; matrices fill pairs of units. Fewer, larger
// stages are faster. Where partial sums of 8 columns leave the ring little, small stages still make a few.
constexpr int kUnitBytes = kComputeThreads * 16;
constexpr int kStageUnits = kBlocks == 128 && kSharedBytes < 200 * 1024 ? 1 : 2;
constexpr int kStageBytes = kStageUnits * kUnitBytes;
// The producer asks for so much at a time: see Pace.
constexpr int kCopyBytes = 8192;
// Fragments of a stage: those of E4M3 take half the bytes.
constexpr int stage_units(bool fp8) { return fp8 ? 2 * kStageUnits : kStageUnits; }
constexpr bool kFp8Talker = QMK_FP8 & 1, kFp8Predictor = QMK_FP8 & 2;
constexpr bool kFp8CodecHead = QMK_FP8 & 4, kFp8LmHeads = QMK_FP8 & 8;

constexpr int round_up(int n, int multiple) { return (n + multiple - 1) / multiple * multiple; }
// Rows of a matrix that one block owns; the blocks behind the last row own padding.
constexpr int block_rows(int rows, int multiple = 8) { return round_up((rows + kBlocks - 1) / kBlocks, multiple); }
// Sums over k that a block keeps apart for each of its rows, so that an mma need not wait for the last one. They follow
// from its share with 128 blocks, so that every number of blocks adds up in the same order.
constexpr int row_chains(int rows, int k) {
  const int share = rows * kBlocks / 128, chains = share <= 16 ? 4 : share == 32 ? 2 : 1, steps = k / (kWarps * 16);
  return min_of(chains, steps);
}
// Parts in which a block multiplies its rows of a matrix, one after the other: see kSumsAtOnce.
constexpr int row_parts(int rows, int k) {
  int parts = 1;
  while (rows / parts * row_chains(rows, k) > kSumsAtOnce) parts *= 2;
  return parts;
}

// One decoder stack.
template <int Hidden, int Intermediate, int MaxLayers, int Heads, int KvHeads, bool Fp8>
struct StackDims {
  static constexpr bool kFp8 = Fp8;
  static constexpr int kHidden = Hidden, kIntermediate = Intermediate, kMaxLayers = MaxLayers, kHeads = Heads,
                       kKvHeads = KvHeads;
  static constexpr int kQ = Heads * kHeadDim, kKv = KvHeads * kHeadDim, kQkv = kQ + 2 * kKv, kGroup = Heads / KvHeads;
  static constexpr int kQkvRows = block_rows(kQkv), kHiddenRows = block_rows(Hidden);
  static constexpr int kScales = kQkv + 2 * Hidden + 2 * Intermediate;  // rows of a layer's matrices
  // By 24: whole packets of 6, and with gate beside up tiles of 16.
  static constexpr int kMlpRows = block_rows(Intermediate, 24), kGateUpRows = 2 * kMlpRows;
  static_assert(Hidden % 256 == 0 && kQ % 256 == 0, "a step of the mma takes 16 columns of every warp's share");
  static_assert(Intermediate % 768 == 0, "and so do packets of 6 (checkpoints of other widths are padded)");
};

template <class TalkerStack, class PredictorStack, int CodecVocab, int CodeVocab>
struct ModelDims {
  using Talker = TalkerStack;
  using Predictor = PredictorStack;
  static constexpr int kCodecVocab = CodecVocab, kCodes = CodeVocab;
  static constexpr int kHeadRows = block_rows(CodecVocab), kCodeRows = block_rows(CodeVocab);  // of the heads
  static constexpr bool kAdapter = Talker::kHidden != Predictor::kHidden;
  static_assert(Predictor::kMaxLayers <= 5 && kAdapter <= (Talker::kHidden > Predictor::kHidden));
};

using PublishedPredictor = StackDims<1024, 3072, 5, 16, 8, kFp8Predictor>;
using Dims06 = ModelDims<StackDims<1024, 3072, 28, 16, 8, kFp8Talker>, PublishedPredictor, 3072, 2048>;
using Dims17 = ModelDims<StackDims<2048, 6144, 28, 16, 8, kFp8Talker>, PublishedPredictor, 3072, 2048>;
// The bundled demo voice; narrower MLPs are padded.
using DimsDemo =
    ModelDims<StackDims<256, 768, 5, 4, 2, kFp8Talker>, StackDims<256, 768, 2, 2, 1, kFp8Predictor>, 1152, 128>;

}  // namespace qmk
