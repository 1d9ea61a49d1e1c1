// The extension module: what frame/, prompt/ and vocoder/ offer to Python, and the sizes that Python must agree on.
#include <pybind11/pybind11.h>

#include "sizes.h"

void bind_frame(pybind11::module_&);    // frame/frame_bindings.cpp
void bind_prompt(pybind11::module_&);   // prompt/prompt_bindings.cpp
void bind_vocoder(pybind11::module_&);  // vocoder/vocoder_bindings.cpp

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  bind_frame(m);
  bind_prompt(m);
  bind_vocoder(m);
  // All of sizes.h; backend/sizes.py compares them.
  pybind11::dict sizes;
  sizes["COMPUTE_WARPS"] = qmk::kComputeWarps;
  sizes["HEAD_DIM"] = qmk::kHeadDim;
  sizes["SPLITS"] = qmk::kSplits;
  sizes["GROUPS"] = qmk::kGroups;
  sizes["FIRST_LOOKED_UP"] = qmk::kFirstLookedUp;
  sizes["PACKET"] = qmk::kPacket;
  sizes["MLP_PACKET"] = qmk::kMlpPacket;
  sizes["PAGE_POSITIONS"] = qmk::kPagePositions;
  sizes["LAUNCHES_AHEAD"] = qmk::kLaunchesAhead;
  sizes["SUMS_AT_ONCE"] = qmk::kSumsAtOnce;
  sizes["RECENT_FRAMES"] = qmk::kRecentFrames;
  sizes["TOLD"] = qmk::kTold;
  sizes["TELLINGS"] = qmk::kTellings;
  sizes["LAYER_MATRICES"] = qmk::kLayerMatrices;
  sizes["PUSH_FRAMES"] = qmk::kPushFrames;
  sizes["PUSH_ROWS"] = qmk::kPushRows;
  sizes["PUSHES_AHEAD"] = qmk::kPushesAhead;
  sizes["CHANNEL_TILE"] = qmk::kChannelTile;
  sizes["LOW_SCALE"] = qmk::kLowScale;
  sizes["WIDEST_NORM"] = qmk::kWidestNorm;
  sizes["TRANSFORMER_ROWS"] = qmk::kTransformerRows;
  sizes["TRANSFORMER_RESIDUALS"] = qmk::kTransformerResiduals;
  sizes["TRANSFORMER_TAPS"] = qmk::kTransformerTaps;
  sizes["TRANSFORMER_COLUMNS"] = qmk::kTransformerColumns;
  sizes["TRANSFORMER_RING"] = qmk::kTransformerRing;
  m.attr("SIZES") = sizes;
}
