// The kernel for many sequences: batch.cuh.
#if QMK_BATCH_COLUMNS
#define QMK_BATCH
#include "batch.cuh"
#include "frame.h"

namespace qmk {
namespace {

template <class Dims>
struct BatchMemory {
  static constexpr int kOthers = 8 * (2 * kJobs + Arrivals::kBarriers);  // bytes of barriers besides the ring's
  static constexpr int kRingStages =
      (kSharedBytes - 128 - static_cast<int>(sizeof(BatchScratch<Dims>)) - kOthers) / (kStageBytes + 16);
  static constexpr int kBarriers = kRingStages * kStageBytes,
                       kScratch = round_up(kBarriers + kRingStages * 16 + kOthers, 128),
                       kBytes = kScratch + static_cast<int>(sizeof(BatchScratch<Dims>));
  static_assert(kRingStages >= 2 && kBytes <= kSharedBytes);
};

template <class Dims>
__global__ void __launch_bounds__(kThreads, 1) batch_kernel(const __grid_constant__ FrameParams p) {
  using M = BatchMemory<Dims>;
  extern __shared__ __align__(1024) uint8_t memory[];
  uint64_t* const barriers = reinterpret_cast<uint64_t*>(memory + M::kBarriers);
  auto& s = *reinterpret_cast<BatchScratch<Dims>*>(memory + M::kScratch);
  const int tid = threadIdx.x, block = blockIdx.x;
  Ring ring{shared_address(memory), shared_address(barriers), shared_address(barriers + M::kRingStages),
            M::kRingStages};
  uint64_t* const others = barriers + 2 * M::kRingStages;
  Handover jobs{shared_address(others), shared_address(others + kJobs), kJobs};
  Arrivals arrivals{shared_address(others + 2 * kJobs)};
  if (tid == 0) ring.init(), jobs.init(kWarps, 1), arrivals.init(), mbarrier_init_fence();
  __syncthreads();
  Patience patience{p.spin_limit, p.fault};
  if (tid >= kComputeThreads) {
    set_registers<32, false>();
    if (tid % 32) return;
    const int role = tid / 32 - kWarps;
    if (role == 0) {
      BatchProducer<Dims> producer{{{}, p, ring, patience, block, 0}};
      run_frame<Dims>(p, producer);
    } else if (role == 1) {
      Watcher<Dims> watcher{{}, p, arrivals, patience};
      run_frame<Dims>(p, watcher);
    } else if (role == 2) {
      Herald<Dims> herald{{}, p, jobs, patience, block};
      run_frame<Dims>(p, herald);
    }
    patience.report();
    return;
  }
  set_registers<112, true>();
  const bool timed = p.stage_ns && block == 0 && tid == 0;
  BatchBlock<Dims> b{s,
                     ring,
                     arrivals,
                     jobs,
                     patience,
                     p.x,
                     p.batch,
                     p.epoch,
                     tid,
                     tid / 32,
                     tid % 32,
                     block,
                     p.columns,
                     timed ? p.stage_ns : nullptr,
                     timed ? global_timer() : 0};
  BatchFrame<Dims> frame{{p}, b};
  run_frame<Dims>(p, frame);
  b.patience.report();
}

// use(dims) for the dims of a talker of this width, where the kernel has room for its matrices.
template <class Use>
cudaError_t with_batch_dims(int talker_hidden, Use use) {
  switch (talker_hidden) {
    case DimsDemo::Talker::kHidden: return use(DimsDemo{});
    case Dims06::Talker::kHidden: return use(Dims06{});
  }
  return cudaErrorInvalidValue;
}

}  // namespace

cudaError_t prepare_batch(int talker_hidden) {
  return with_batch_dims(talker_hidden, [&](auto dims) {
    using D = decltype(dims);
    return cudaFuncSetAttribute(batch_kernel<D>, cudaFuncAttributeMaxDynamicSharedMemorySize, BatchMemory<D>::kBytes);
  });
}
cudaError_t launch_batch(int talker_hidden, const FrameParams& params, cudaStream_t stream) {
  return with_batch_dims(talker_hidden, [&](auto dims) {
    using D = decltype(dims);
    void* args[] = {const_cast<FrameParams*>(&params)};
    return cudaLaunchCooperativeKernel(reinterpret_cast<const void*>(batch_kernel<D>), dim3(kBlocks), dim3(kThreads),
                                       args, BatchMemory<D>::kBytes, stream);
  });
}

}  // namespace qmk
#endif
