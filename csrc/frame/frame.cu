// The persistent kernel: one launch is one frame of 16 codes for up to 8 sequences, or to 16 (frame_wide.cu).
#include "frame.h"

#include "frame.cuh"

namespace qmk {
namespace {

template <class Dims>
__global__ void __launch_bounds__(kThreads, 1) frame_kernel(const __grid_constant__ FrameParams p) {
  using F = Frame<Dims>;
  extern __shared__ __align__(1024) uint8_t memory[];
  uint64_t* barriers = reinterpret_cast<uint64_t*>(memory + F::kRingStages * kStageBytes);
  auto& s = *reinterpret_cast<Scratch<Dims>*>(memory + round_up(F::kRingStages * (kStageBytes + 16), 128));
  const int tid = threadIdx.x;
  Ring ring{shared_address(memory), shared_address(barriers), shared_address(barriers + F::kRingStages),
            F::kRingStages};
  if (tid == 0) ring.init();
  __syncthreads();
  Patience patience{p.spin_limit, p.fault};
  if (tid >= kComputeThreads) {
    set_registers<24, false>();
    ring.turn = tid / 32 - kWarps;
    if (ring.turn < kProducers && tid % 32 < (kBulkCopies ? 1 : 32)) {
      Producer<Dims> producer{{}, p, ring, patience, static_cast<int>(blockIdx.x), tid % 32};
      run_frame<Dims>(p, producer);
      patience.report();
    }
    return;
  }
  set_registers<112, true>();
  const bool timed = p.stage_ns && blockIdx.x == 0 && tid == 0;
  Block<Dims> b{s,
                ring,
                patience,
                p.x,
                p.epoch,
                tid,
                tid / 32,
                tid % 32,
                static_cast<int>(blockIdx.x),
                timed ? p.stage_ns : nullptr,
                timed ? global_timer() : 0};
  F{{p}, b}.compute();
  b.patience.report();
}

template <class Dims>
cudaError_t prepare(int* resident_blocks) {
  constexpr int bytes = Frame<Dims>::kBytes;
  int device = 0, multiprocessors = 0, each = 0;
  cudaError_t error = cudaFuncSetAttribute(frame_kernel<Dims>, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (error == cudaSuccess) error = cudaGetDevice(&device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  if (error == cudaSuccess)
    error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&each, frame_kernel<Dims>, kThreads, bytes);
  *resident_blocks = each * multiprocessors;
  return error;
}

template <class Dims>
cudaError_t launch(const FrameParams& params, cudaStream_t stream) {
  void* args[] = {const_cast<FrameParams*>(&params)};
  return cudaLaunchCooperativeKernel(reinterpret_cast<const void*>(frame_kernel<Dims>), dim3(kBlocks), dim3(kThreads),
                                     args, Frame<Dims>::kBytes, stream);
}

// use(dims) for the dims of a talker of this width.
template <class Use>
cudaError_t with_dims(int talker_hidden, Use use) {
  switch (talker_hidden) {
    case DimsDemo::Talker::kHidden: return use(DimsDemo{});
    case Dims06::Talker::kHidden: return use(Dims06{});
    case Dims17::Talker::kHidden: return use(Dims17{});
  }
  return cudaErrorInvalidValue;
}

}  // namespace

template <>
cudaError_t prepare_frame<kWide>(int talker_hidden, int* resident_blocks) {
  return with_dims(talker_hidden, [&](auto dims) { return prepare<decltype(dims)>(resident_blocks); });
}
template <>
cudaError_t launch_frame<kWide>(int talker_hidden, const FrameParams& params, cudaStream_t stream) {
  return with_dims(talker_hidden, [&](auto dims) { return launch<decltype(dims)>(params, stream); });
}

}  // namespace qmk
