// A convolution of many rows by `wgmma`. Its blocks stay, one a multiprocessor, and take tile after tile. Of a block's
// four warpgroups two multiply, one finishes the tile before, and one copies. So copies and products never wait for an
// activation. What limits them is L2, which gives a multiprocessor some 60 KB a microsecond: so two warpgroups share
// what was copied, and the two blocks of a cluster the weights. Bits are those of `convolve_by_warpgroup_kernel`.
#pragma once
#include "warpgroup.cuh"

namespace qmk {

constexpr int kPipelineThreads = 4 * kWarpgroupThreads, kPair = 2;  // blocks of a cluster

// A tile of N columns. Each of two warpgroups multiplies [64 rows][96 columns]: of the same 96 columns, or, where a
// convolution of one tap follows that needs all 192, of the same rows. A stage holds a step of both matrices.
template <int N>
struct Pipeline {
  static_assert(N == 96 || N == 192);
  static constexpr int kRows = N == 96 ? 128 : 64, kStages = N == 96 ? 6 : 5, kStageBytes = (kRows + N) * kStepBytes;
  static constexpr int kSpare = kStages * kStageBytes;  // rows of a step that no stage has room for
  static constexpr int kSums = kSpare + (N / kDepth > kStages ? kRows * kStepBytes : 0), kPitch = N + 8;
  static constexpr int kBars = kSums + kRows * kPitch * 4;
  static constexpr int kBytes = 1024 + kBars + 8 * (2 * kStages + 2);  // aligned to 1,024
  static_assert(kBytes <= 227 * 1024);

  unsigned char* base;
  int tiles, columns, end, last;  // steps: of the convolution; with those of the one that follows

  // A stage's step has arrived; both blocks are through with it. A tile's sums are there; they are finished.
  __device__ uint32_t arrived(int stage) const { return shared_address(base + kBars) + 8 * stage; }
  __device__ uint32_t free(int stage) const { return arrived(kStages + stage); }
  __device__ uint32_t summed() const { return arrived(2 * kStages); }
  __device__ uint32_t finished() const { return arrived(2 * kStages + 1); }
  // A cluster's two blocks take the same columns of neighbouring rows. Those of the second may lie behind the last row.
  __device__ int first_row(int tile) const { return (tile / (columns / N) * kPair + blockIdx.x % kPair) * kRows; }
  __device__ int first_column(int tile) const { return tile % (columns / N) * N; }
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
template <int N, bool Unit>
__device__ __forceinline__ void copy_tiles(const Convolution& p, const Convolution& following, const Pipeline<N> s,
                                           int total) {
  using S = Pipeline<N>;
  constexpr int kShare = N / kPair;  // of the weights' columns
  const int share = blockIdx.x % kPair * kShare;
  int stage = 0;
  uint32_t parity = 1;
#pragma unroll 1
  for (int tile = blockIdx.x / kPair; tile < s.tiles; tile += gridDim.x / kPair) {
    const CopiedRows<S::kRows / 16> rows(p.in, s.first_row(tile), total);
    int channel = 0, shift = -p.in.kept;
#pragma unroll 1
    for (int step = 0; step < s.last; ++step) {
      const uint32_t to = shared_address(s.base) + stage * S::kStageBytes, bar = s.arrived(stage);
      wait_for(s.free(stage), parity);
      if (threadIdx.x % kWarpgroupThreads == 0) {
        const bool first = !Unit || step < s.end;
        const int64_t row = static_cast<int64_t>(first ? step : step - s.end) * s.columns + s.first_column(tile);
        mbarrier_expect(bar, N * kStepBytes);
        bulk_copy_to_pair(to + (S::kRows + share) * kStepBytes,
                          (first ? p : following).weight + (row + share) * 2 * kDepth, kShare * kStepBytes, bar);
      }
      if (!Unit || step < s.end) {
        rows.copy(p.in, channel, shift, to);
        if (channel += kDepth; channel == p.in.channels) channel = 0, shift += p.dilation;
      }
      mbarrier_arrive_after_copies(bar);
      if (++stage == S::kStages) stage = 0, parity ^= 1;
    }
  }
  asm volatile("cp.async.wait_all;" ::: "memory");
}

// The end of a tile whose rows go on into a convolution of one tap: activated, as halves, they lie where that one's
// steps, beginning with `stage`, look for them.
template <int N>
__device__ __forceinline__ void hand_over(const Convolution& p, const float (&whole)[48], unsigned char* rows,
                                          int stage, int first_column, int group) {
  using S = Pipeline<N>;
  const auto sync = [&] { N == 96 ? sync_threads(2 + group, kWarpgroupThreads) : sync_threads(2, 256); };
  sync();  // whoever shares these rows is through with them
  const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
#pragma unroll
  for (int n = 0; n < 12; ++n) {
    const int column = first_column + n * 8 + 2 * (lane % 4), block = column / kDepth;
    const auto of_column = [&](const float* x) { return __ldg(reinterpret_cast<const float2*>(x + column)); };
    const float2 bias = of_column(p.bias), frequency = of_column(p.frequency), scale = of_column(p.scale);
    const int step = block < S::kStages ? (stage + block) % S::kStages * S::kStageBytes : S::kSpare;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float2 x = make_float2(whole[n * 4 + 2 * half], whole[n * 4 + 2 * half + 1]);
      x.x = snake(bias.x + kRange * x.x, frequency.x, scale.x);
      x.y = snake(bias.y + kRange * x.y, frequency.y, scale.y);
      const uint2 halves = split(x);  // the low ones lie 64 bytes behind the high ones, both swizzled
      const int row = warp * 16 + lane / 4 + 8 * half;
      const int at = step + row * kStepBytes + ((n % 4 ^ row % 8) << 4) + 4 * (lane % 4);
      *reinterpret_cast<uint32_t*>(rows + at) = halves.x;
      *reinterpret_cast<uint32_t*>(rows + (at ^ 64)) = halves.y;
    }
  }
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  sync();
}

template <int N, bool Exact, bool Unit>
__device__ __forceinline__ void multiply_tiles(const Convolution& p, int parts_of_p, int parts_of_following,
                                               const Pipeline<N> s) {
  using S = Pipeline<N>;
  const int group = __shfl_sync(~0u, threadIdx.x / kWarpgroupThreads, 0);  // the same in a warp: descriptors are quick
  const int row = N == 96 ? 64 * group : 0, column = N == 96 ? 0 : 96 * group;  // of the tile
  const uint64_t of_a = descriptor(shared_address(s.base) + row * kStepBytes);
  const uint64_t of_b = descriptor(shared_address(s.base) + (S::kRows + column) * kStepBytes);
  float sum[48] = {}, whole[48], main[48], cross[48];
  int stage = 0;
  uint32_t parity = 0, tile_parity = 1;
#pragma unroll 1
  for (int tile = blockIdx.x / kPair; tile < s.tiles; tile += gridDim.x / kPair, tile_parity ^= 1) {
    int begin = 0, steps = s.end, parts = parts_of_p, part = 0, end_of_part = steps / parts;
#pragma unroll 1
    for (int step = 0; step < s.last; ++step) {
      const uint64_t a =
          Unit && step - s.end >= S::kStages ? of_a + S::kSpare / 16 : of_a + stage * (S::kStageBytes / 16);
      wait_for(s.arrived(stage), parity);
      asm volatile("fence.proxy.async.shared::cta;" ::: "memory");  // the rows were not copied in bulk
      multiply_step<96, Exact>(main, cross, a, of_b + stage * (S::kStageBytes / 16));
      asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
      if (threadIdx.x % 32 < kPair) mbarrier_arrive_at(s.free(stage), threadIdx.x % 32);
      if (++stage == S::kStages) stage = 0, parity ^= 1;
      add_step<96, Exact>(sum, main, cross);
      if (step + 1 < end_of_part) continue;
#pragma unroll
      for (int i = 0; i < 48; ++i) whole[i] = part ? whole[i] + sum[i] : sum[i], sum[i] = 0.0f;
      ++part;
      if (Unit && step + 1 == s.end) {
        hand_over<N>(p, whole, s.base + row * kStepBytes, stage, column, group);
        begin = s.end, steps = s.last - s.end, parts = parts_of_following, part = 0;
      }
      end_of_part = begin + steps * (part + 1) / parts;
    }
    wait_for(s.finished(), tile_parity);
    put_sums<96>(whole, reinterpret_cast<float*>(s.base + S::kSums) + row * S::kPitch + column, S::kPitch);
    mbarrier_arrive_as_warp(s.summed());
  }
}
#endif

// All tiles of a convolution; the parts of their sums as in `convolve_kernel`. Unit: a convolution of one tap follows,
// whose rows never leave shared memory, because a tile has all their channels.
template <int N, bool Exact, bool Unit>
__global__ void __launch_bounds__(kPipelineThreads, 1)
    convolve_by_pipeline_kernel(const Convolution p, const int parts_of_p, const Convolution following,
                                const int parts_of_following) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using S = Pipeline<N>;
  extern __shared__ __align__(1024) unsigned char memory[];
  const int total = p.in.frames->count * p.in.rows, rows_of_pair = kPair * S::kRows;
  const int end = p.taps * (p.in.channels / kDepth), role = threadIdx.x / kWarpgroupThreads;
  const S s{memory + (1024 - shared_address(memory) % 1024) % 1024,
            (total + rows_of_pair - 1) / rows_of_pair * (p.columns / N), p.columns, end,
            Unit ? end + p.columns / kDepth : end};
  if (threadIdx.x == 0) {
    for (int i = 0; i < S::kStages; ++i) mbarrier_init(s.arrived(i), 1 + kWarpgroupThreads);
    for (int i = 0; i < S::kStages; ++i) mbarrier_init(s.free(i), 8 * kPair);  // of warps that multiply
    mbarrier_init(s.summed(), 8), mbarrier_init(s.finished(), 4);
    mbarrier_init_fence();
  }
  const auto cluster = cooperative_groups::this_cluster();
  cluster.sync();
  wait_for_previous();
  if (role < 2) {
    set_registers<200, true>();  // which the other warpgroups give away
    multiply_tiles<N, Exact, Unit>(p, parts_of_p, parts_of_following, s);
  } else if (role == 2) {
    set_registers<56, false>();
    uint32_t parity = 0;
    const float* sums[1] = {reinterpret_cast<const float*>(s.base + S::kSums)};
#pragma unroll 1
    for (int tile = blockIdx.x / kPair; tile < s.tiles; tile += gridDim.x / kPair, parity ^= 1) {
      const int first_row = s.first_row(tile);
      wait_for(s.summed(), parity);
      finish_items<N, S::kPitch>(Unit ? following : p, sums, 1, threadIdx.x % kWarpgroupThreads, kWarpgroupThreads,
                                 min(S::kRows, total - first_row), first_row, s.first_column(tile));
      mbarrier_arrive_as_warp(s.finished());
    }
  } else {
    set_registers<56, false>();
    copy_tiles<N, Unit>(p, following, s, total);
  }
  cluster.sync();  // nobody leaves while the other one copies into its shared memory
#else
  __trap();  // `has_warpgroups` keeps it from being launched
#endif
}

}  // namespace qmk
