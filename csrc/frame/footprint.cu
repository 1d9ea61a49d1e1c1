// What a launch takes, one line for each model dims: `make kernels` compiles this for every target and runs it on the
// host.
#include <cstdio>

#include "frame.cu"

template <class Dims>
void print() {
  using F = qmk::Frame<Dims>;
  std::printf("%d %d %d %d\n", Dims::Talker::kHidden, qmk::kThreads, F::kBytes, F::kRingStages * qmk::kStageBytes);
}

int main() { print<qmk::DimsDemo>(), print<qmk::Dims06>(), print<qmk::Dims17>(); }
