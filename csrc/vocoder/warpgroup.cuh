// A convolution's tile by `wgmma`, which Hopper has: four warps multiply [64 rows][N columns] straight from shared
// memory, 1.3 to 1.6 times as fast as warp by warp. The products and the order of the sums are those of
// `convolve_kernel`, and so are the bits (docs/log/2026-11-23.md#vocoder-pushes-hold).
#pragma once
#include "convolution.cuh"
#include "launch.cuh"

namespace qmk {

constexpr int kWarpgroupRows = 64, kWarpgroupThreads = 128;

template <int N, bool Unit>
struct WarpgroupShape {
  static constexpr int kStages = 5, kRowBytes = 4 * kDepth;  // of either matrix: 32 high halves, then 32 low ones
  static constexpr int kStageBytes = (kWarpgroupRows + N) * kRowBytes;
  static constexpr int kSpare = Unit ? kWarpgroupRows * kRowBytes : 0;  // rows of a step that no stage has room for
  static constexpr int kBytes = 1024 + kStages * kStageBytes + kSpare + 8 * kStages;  // aligned to 1,024
  static_assert(2 * (kBytes + 1024) <= 228 * 1024, "two blocks a multiprocessor");
};

template <int N>
struct Products;
template <>
struct Products<64> {
  static __device__ __forceinline__ void add(float (&d)[32], uint64_t a, uint64_t b, int to_what_is_there) {
    asm volatile(
        "{\n .reg .pred p;\n setp.ne.b32 p, %34, 0;\n"
        " wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
        "%32, %33, p, 1, 1, 0, 0;\n}"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]),
          "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]),
          "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]),
          "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
        : "l"(a), "l"(b), "r"(to_what_is_there));
  }
};
template <>
struct Products<96> {
  static __device__ __forceinline__ void add(float (&d)[48], uint64_t a, uint64_t b, int to_what_is_there) {
    asm volatile(
        "{\n .reg .pred p;\n setp.ne.b32 p, %50, 0;\n"
        " wgmma.mma_async.sync.aligned.m64n96k16.f32.f16.f16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47}, "
        "%48, %49, p, 1, 1, 0, 0;\n}"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]),
          "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]),
          "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]),
          "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), "+f"(d[32]),
          "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]),
          "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47])
        : "l"(a), "l"(b), "r"(to_what_is_there));
  }
};

// Rows of 128 bytes, whose 16-byte chunks are swizzled: chunk c of row r lies at c ^ (r % 8). Eight rows are 1,024
// bytes.
__device__ __forceinline__ uint64_t descriptor(uint32_t address) {
  return static_cast<uint64_t>((address & 0x3ffff) >> 4) | 1ull << 16 | 64ull << 32 | 1ull << 62;
}

// A copy takes microseconds. A wait that never ends is a fault, which the host sees.
__device__ __forceinline__ void wait_for_copy(uint32_t bar, uint32_t parity) {
  for (int polls = 0; !mbarrier_try_wait(bar, parity); ++polls)
    if (polls == 1 << 20) __trap();
}

// The end of a tile whose rows go on into a convolution of one tap: activated, as halves, they lie where that one's
// steps, beginning with `stage`, look for them. The whole sums become 0.
template <int N>
__device__ __forceinline__ void hand_over(const Convolution& p, float (&whole)[N / 2], unsigned char* base, int stage,
                                          int first_column) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using S = WarpgroupShape<N, true>;
  const auto cluster = cooperative_groups::this_cluster();
  const bool pair = p.columns > N;
  unsigned char* const other = pair ? cluster.map_shared_rank(base, 1 - cluster.block_rank()) : base;
  if (pair) cluster.sync();  // nobody needs a stage any more
  else __syncthreads();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
  for (int n = 0; n < N / 8; ++n) {
    const int column = first_column + n * 8 + 2 * (lane % 4), block = column / kDepth;
    const auto of_column = [&](const float* x) { return __ldg(reinterpret_cast<const float2*>(x + column)); };
    const float2 bias = of_column(p.bias), frequency = of_column(p.frequency), scale = of_column(p.scale);
    const int step = block < S::kStages ? (stage + block) % S::kStages * S::kStageBytes : S::kStages * S::kStageBytes;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float2 x = make_float2(whole[n * 4 + 2 * half], whole[n * 4 + 2 * half + 1]);
      whole[n * 4 + 2 * half] = whole[n * 4 + 2 * half + 1] = 0.0f;
      x.x = snake(bias.x + kRange * x.x, frequency.x, scale.x);
      x.y = snake(bias.y + kRange * x.y, frequency.y, scale.y);
      const uint2 halves = split(x);  // the low ones lie 64 bytes behind the high ones, both swizzled
      const int row = warp * 16 + lane / 4 + 8 * half;
      const int at = step + row * S::kRowBytes + ((n % 4 ^ row % 8) << 4) + 4 * (lane % 4);
      *reinterpret_cast<uint32_t*>(base + at) = halves.x;
      *reinterpret_cast<uint32_t*>(base + (at ^ 64)) = halves.y;
      if (pair) *reinterpret_cast<uint32_t*>(other + at) = halves.x;
      if (pair) *reinterpret_cast<uint32_t*>(other + (at ^ 64)) = halves.y;
    }
  }
  asm volatile("fence.proxy.async;" ::: "memory");
  if (pair) cluster.sync();
#endif
}

// One tile of a convolution; the parts of its sum as in `convolve_kernel`. Unit: a convolution of one tap follows,
// whose rows never leave shared memory. A block then has all their channels, or each of a cluster's two blocks has half
// of them and hands them to the other one.
template <int N, bool Exact, bool Unit>
__global__ void __launch_bounds__(kWarpgroupThreads, 2)
    convolve_by_warpgroup_kernel(const Convolution p, const int parts_of_p, const Convolution following,
                                 const int parts_of_following) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using S = WarpgroupShape<N, Unit>;
  constexpr int kStages = S::kStages, kRows = 4, kApart = kWarpgroupThreads / 8;  // a thread copies 4 rows, 16 apart
  extern __shared__ __align__(1024) unsigned char memory[];
  unsigned char* const base = memory + (1024 - shared_address(memory) % 1024) % 1024;
  const uint32_t stages = shared_address(base), spare = stages + kStages * S::kStageBytes, bars = spare + S::kSpare;
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
  const int total = p.in.frames->count * p.in.rows, first_row = blockIdx.y * kWarpgroupRows;
  const int first_column = blockIdx.x * N, spread = gridDim.z, rank = blockIdx.z;
  const int blocks_per_tap = p.in.channels / kDepth;
  int steps = p.taps * blocks_per_tap, parts = parts_of_p, part = rank;
  const int begin = steps * part / parts, end = spread > 1 ? steps * (part + 1) / parts : steps;
  const int last = Unit ? end + p.columns / kDepth : end;  // with the steps of the one that follows
  int end_of_part = steps * (part + 1) / parts;
  if (thread == 0) {
    for (int i = 0; i < kStages; ++i) mbarrier_init(bars + 8 * i, 1);
    mbarrier_init_fence();
  }
  __syncthreads();

  auto load_weights = [&](int step, int stage) {
    if (thread == 0) {
      const uint16_t* weight = p.weight;
      if (Unit && step >= end) weight = following.weight, step -= end;
      mbarrier_expect(bars + 8 * stage, N * S::kRowBytes);
      bulk_copy(stages + stage * S::kStageBytes + kWarpgroupRows * S::kRowBytes,
                weight + (static_cast<int64_t>(step) * p.columns + first_column) * 2 * kDepth, N * S::kRowBytes,
                bars + 8 * stage);
    }
  };
#pragma unroll
  for (int s = 0; s < kStages - 1; ++s)
    if (begin + s < end) load_weights(begin + s, s);

  // This thread copies chunk thread % 8 of its rows. Offsets in 16 bytes, because registers are short.
  const int pitch = p.in.channels / 4, chunk = thread % 8;
  int fresh[kRows], past[kRows], time[kRows];
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const int row = first_row + thread / 8 + i * kApart;
    const InputRow input = find_row(p.in, min(row, total - 1));
    time[i] = row < total ? input.time : -(1 << 28);
    fresh[i] = min(row, total - 1) * pitch;
    past[i] = p.in.kept ? static_cast<int>((input.past - p.in.past) / 4) + (input.time + p.in.kept) * pitch : 0;
  }
  int block = begin % blocks_per_tap, shift = begin / blocks_per_tap * p.dilation - p.in.kept;
  const uint32_t to_a = thread / 8 * S::kRowBytes + ((chunk ^ (thread / 8 % 8)) << 4);
  auto load_history = [&](int stage) {
    const float4* const now = reinterpret_cast<const float4*>(p.in.fresh) + shift * pitch + block * 8 + chunk;
    const float4* const before = reinterpret_cast<const float4*>(p.in.past) + shift * pitch + block * 8 + chunk;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const bool there = time[i] >= 0;
      const float4* from = time[i] + shift >= 0 ? now + fresh[i] : before + past[i];
      if (!there) from = reinterpret_cast<const float4*>(p.in.fresh);
      copy16(stages + stage * S::kStageBytes + to_a + i * kApart * S::kRowBytes, from, there);
    }
    if (++block == blocks_per_tap) block = 0, shift += p.dilation;
  };
  wait_for_previous();
  if (first_row >= total) {  // the whole cluster is too much
    // Another block may get the shared memory only once everything has landed there.
    if (thread == 0)
      for (int s = 0; s < kStages - 1 && begin + s < end; ++s) wait_for_copy(bars + 8 * s, 0);
    return;
  }
#pragma unroll
  for (int s = 0; s < kStages - 1; ++s) {
    if (begin + s < end) load_history(s);
    asm volatile("cp.async.commit_group;" ::: "memory");
  }

  float sum[N / 2] = {}, whole[N / 2] = {}, main[N / 2], cross[N / 2];
  const uint64_t of_a = descriptor(stages), of_b = descriptor(stages + kWarpgroupRows * S::kRowBytes);
  int stage = 0, ahead = kStages - 1;
  uint32_t parity = 0;
#pragma unroll 1
  for (int step = begin; step < last; ++step) {
    asm volatile("cp.async.wait_group %0;" ::"n"(kStages - 2) : "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncthreads();  // this step's rows are there, and everybody is through with the step before
    wait_for_copy(bars + 8 * stage, parity);
    const uint64_t a = Unit && step - end >= kStages ? descriptor(spare) : of_a + stage * (S::kStageBytes / 16);
    const uint64_t b = of_b + stage * (S::kStageBytes / 16);
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
    // 16 channels are 2 units of 16 bytes; the low halves lie 4 units behind the high ones.
    Products<N>::add(main, a, b, 0);
    Products<N>::add(main, a + 2, b + 2, 1);
    if constexpr (Exact) {
      Products<N>::add(cross, a + 4, b, 0);
      Products<N>::add(cross, a, b + 4, 1);
      Products<N>::add(cross, a + 6, b + 2, 1);
      Products<N>::add(cross, a + 2, b + 6, 1);
    }
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
    if (step + kStages - 1 < last) load_weights(step + kStages - 1, ahead);
    if (step + kStages - 1 < end) load_history(ahead);
    asm volatile("cp.async.commit_group;" ::: "memory");
    if (++stage == kStages) stage = 0, parity ^= 1;
    ahead = ahead + 1 == kStages ? 0 : ahead + 1;
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
#pragma unroll
    for (int i = 0; i < N / 2; ++i) {
      asm volatile("" : "+f"(main[i])::"memory");  // not read before the wait
      if constexpr (Exact) asm volatile("" : "+f"(cross[i])::"memory");
      sum[i] += Exact ? fmaf(cross[i], 1.0f / kLowScale, main[i]) : main[i];
    }
    if (step + 1 < end_of_part) continue;
    ++part;
#pragma unroll
    for (int i = 0; i < N / 2; ++i) whole[i] += sum[i], sum[i] = 0.0f;
    if (Unit && step + 1 == end) {
      hand_over<N>(p, whole, base, stage, first_column);
      steps = last - end, parts = parts_of_following, part = 0;
    }
    end_of_part = (Unit && step + 1 >= end ? end : 0) + steps * (part + 1) / parts;
  }

  constexpr int kPitch = N + 8;
  static_assert(kWarpgroupRows * kPitch * 4 <= kStages * S::kStageBytes);
  float* const shared = reinterpret_cast<float*>(base);
  asm volatile("cp.async.wait_group 0;" ::: "memory");
  __syncthreads();
#pragma unroll
  for (int n = 0; n < N / 8; ++n)
#pragma unroll
    for (int half = 0; half < 2; ++half)
      *reinterpret_cast<float2*>(shared + (warp * 16 + lane / 4 + 8 * half) * kPitch + n * 8 + 2 * (lane % 4)) =
          make_float2(kRange * whole[n * 4 + 2 * half], kRange * whole[n * 4 + 2 * half + 1]);
  finish_tile<N, kPitch, kWarpgroupThreads>(Unit ? following : p, shared, spread, rank,
                                            min(kWarpgroupRows, total - first_row), first_row, first_column);
#else
  __trap();  // `has_warpgroups` keeps it from being launched
#endif
}

// Was the kernel compiled for Hopper? Code of an older architecture has an empty one, whatever the card.
template <class Kernel>
bool has_warpgroups(Kernel* kernel) {
  cudaFuncAttributes attributes{};
  return cudaFuncGetAttributes(&attributes, kernel) == cudaSuccess && attributes.ptxVersion == 90 &&
         attributes.binaryVersion == 90;
}

}  // namespace qmk
