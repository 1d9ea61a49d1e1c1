// Every size that two files must agree on, or C++ and Python. qwen_megakernel/backend/sizes.py has them too: the
// extension exports them (bindings.cpp), Python compares them when it loads the extension, and a test compares both
// files.
#pragma once

namespace qmk {

// ---- the frame kernel
constexpr int kComputeWarps = 16;   // of a block; they share the inputs of every matrix
constexpr int kHeadDim = 128;       // of an attention head
constexpr int kSplits = 16;         // parts that a query head's context is cut into, at most
constexpr int kGroups = 16;         // codes of a frame, and positions of the code predictor
constexpr int kFirstLookedUp = 2;   // position of the code predictor from which tables hold what it reads (params.h)
constexpr int kPacket = 4;          // values of a column that travel together: of a residual or an attention output
constexpr int kMlpPacket = 6;       // the same of the MLP
constexpr int kPagePositions = 64;  // of a page of the talker's keys and values
constexpr int kLaunchesAhead = 4;   // launches that may be uncollected
constexpr int kSumsAtOnce = 128;  // of a matrix, that a block keeps at once: its rows x row_chains; registers hold them
constexpr int kRecentFrames = 16;  // of every slot, whose codes the frame kernel leaves for the vocoder
constexpr int kTold = 16;          // values that tell how a head attended to the text (frame/text_heads.cu)
constexpr int kTellings = 5;       // frames of a slot whose values are kept: one more than launches ahead

// ---- the prompt's kernels
constexpr int kLayerMatrices = 4;  // of a decoder layer: qkv, o, gate and up, down

// ---- the vocoder's kernels; a push decodes some frames of some sequences
constexpr int kPushFrames = 8;              // of each sequence of a push, at most
constexpr int kPushRows = 128;              // frames of a push, at most
constexpr int kPushesAhead = 64;            // pushes that may be uncollected
constexpr int kChannelTile = 32;            // channels and columns of a convolution are multiples of it
constexpr int kLowScale = 2048;             // of the low one of a value's two fp16 halves (halves.cuh)
constexpr int kWidestNorm = 1024;           // channels of a depthwise convolution, at most: a thread each
constexpr int kTransformerRows = 16;        // that the transformer's kernel multiplies at once
constexpr int kTransformerResiduals = 512;  // of a block: its hidden columns x the rows of a push, at most
constexpr int kTransformerTaps = 3;         // of the convolution in front of the transformer
constexpr int kTransformerColumns = 22;     // hidden ones of a block of the transformer's kernel, at most
constexpr int kTransformerRing = 80;        // positions of its keys and values, at most

}  // namespace qmk
