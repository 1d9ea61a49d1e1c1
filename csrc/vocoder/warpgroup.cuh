// A convolution's tile by `wgmma`, which Hopper has: four warps multiply [64 rows][N columns] straight from shared
// memory, 1.3 to 1.6 times as fast as warp by warp. The products and the order of the sums are those of
// `convolve_kernel`, and so are the bits (docs/log/2026-11-23.md#vocoder-pushes-hold).
#pragma once
#include "convolution.cuh"
#include "launch.cuh"

namespace qmk {

constexpr int kWarpgroupRows = 64, kWarpgroupThreads = 128;
constexpr int kStepBytes = 4 * kDepth;  // of a row of either matrix: 32 high halves, then 32 low ones

template <int N>
struct WarpgroupShape {
  static constexpr int kStages = 5;
  static constexpr int kStageBytes = (kWarpgroupRows + N) * kStepBytes;
  static constexpr int kBytes = 1024 + kStages * kStageBytes + 8 * kStages;  // aligned to 1,024
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

// Begin the products of a step. 16 channels are 2 units of 16 bytes; the low halves lie 4 units behind the high ones.
template <int N, bool Exact>
__device__ __forceinline__ void multiply_step(float (&main)[N / 2], float (&cross)[N / 2], uint64_t a, uint64_t b) {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
  Products<N>::add(main, a, b, 0);
  Products<N>::add(main, a + 2, b + 2, 1);
  if constexpr (Exact) {
    Products<N>::add(cross, a + 4, b, 0);
    Products<N>::add(cross, a, b + 4, 1);
    Products<N>::add(cross, a + 6, b + 2, 1);
    Products<N>::add(cross, a + 2, b + 6, 1);
  }
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
// Add them, once they are there.
template <int N, bool Exact>
__device__ __forceinline__ void add_step(float (&sum)[N / 2], float (&main)[N / 2], float (&cross)[N / 2]) {
#pragma unroll
  for (int i = 0; i < N / 2; ++i) {
    asm volatile("" : "+f"(main[i])::"memory");  // not read before the wait
    if constexpr (Exact) asm volatile("" : "+f"(cross[i])::"memory");
    sum[i] += Exact ? fmaf(cross[i], 1.0f / kLowScale, main[i]) : main[i];
  }
}

// A warpgroup's sums into shared memory.
template <int N>
__device__ __forceinline__ void put_sums(const float (&whole)[N / 2], int warp, int lane, float* shared, int pitch) {
#pragma unroll
  for (int n = 0; n < N / 8; ++n)
#pragma unroll
    for (int half = 0; half < 2; ++half)
      *reinterpret_cast<float2*>(shared + (warp * 16 + lane / 4 + 8 * half) * pitch + n * 8 + 2 * (lane % 4)) =
          make_float2(kRange * whole[n * 4 + 2 * half], kRange * whole[n * 4 + 2 * half + 1]);
}

// One tile of a convolution; the parts of its sum as in `convolve_kernel`.
template <int N, bool Exact>
__global__ void __launch_bounds__(kWarpgroupThreads, 2)
    convolve_by_warpgroup_kernel(const Convolution p, const int parts) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using S = WarpgroupShape<N>;
  constexpr int kStages = S::kStages, kRows = 4, kApart = kWarpgroupThreads / 8;  // a thread copies 4 rows, 16 apart
  extern __shared__ __align__(1024) unsigned char memory[];
  unsigned char* const base = memory + (1024 - shared_address(memory) % 1024) % 1024;
  const uint32_t stages = shared_address(base), bars = stages + kStages * S::kStageBytes;
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
  const int total = p.in.frames->count * p.in.rows, first_row = blockIdx.y * kWarpgroupRows;
  const int first_column = blockIdx.x * N, spread = gridDim.z, rank = blockIdx.z;
  const int blocks_per_tap = p.in.channels / kDepth, steps = p.taps * blocks_per_tap;
  int part = rank;
  const int begin = steps * part / parts, end = spread > 1 ? steps * (part + 1) / parts : steps;
  int end_of_part = steps * (part + 1) / parts;
  if (thread == 0) {
    for (int i = 0; i < kStages; ++i) mbarrier_init(bars + 8 * i, 1);
    mbarrier_init_fence();
  }
  __syncthreads();

  auto load_weights = [&](int step, int stage) {
    if (thread == 0) {
      mbarrier_expect(bars + 8 * stage, N * kStepBytes);
      bulk_copy(stages + stage * S::kStageBytes + kWarpgroupRows * kStepBytes,
                p.weight + (static_cast<int64_t>(step) * p.columns + first_column) * 2 * kDepth, N * kStepBytes,
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
  const uint32_t to_a = thread / 8 * kStepBytes + ((chunk ^ (thread / 8 % 8)) << 4);
  auto load_history = [&](int stage) {
    const float4* const now = reinterpret_cast<const float4*>(p.in.fresh) + shift * pitch + block * 8 + chunk;
    const float4* const before = reinterpret_cast<const float4*>(p.in.past) + shift * pitch + block * 8 + chunk;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const bool there = time[i] >= 0;
      const float4* from = time[i] + shift >= 0 ? now + fresh[i] : before + past[i];
      if (!there) from = reinterpret_cast<const float4*>(p.in.fresh);
      copy16(stages + stage * S::kStageBytes + to_a + i * kApart * kStepBytes, from, there);
    }
    if (++block == blocks_per_tap) block = 0, shift += p.dilation;
  };
  wait_for_previous();
  if (first_row >= total) {  // the whole cluster is too much
    // Another block may get the shared memory only once everything has landed there.
    if (thread == 0)
      for (int s = 0; s < kStages - 1 && begin + s < end; ++s) mbarrier_wait(bars + 8 * s, 0);
    return;
  }
#pragma unroll
  for (int s = 0; s < kStages - 1; ++s) {
    if (begin + s < end) load_history(s);
    asm volatile("cp.async.commit_group;" ::: "memory");
  }

  float sum[N / 2] = {}, whole[N / 2] = {}, main[N / 2], cross[N / 2];
  const uint64_t of_a = descriptor(stages), of_b = descriptor(stages + kWarpgroupRows * kStepBytes);
  int stage = 0, ahead = kStages - 1;
  uint32_t parity = 0;
#pragma unroll 1
  for (int step = begin; step < end; ++step) {
    asm volatile("cp.async.wait_group %0;" ::"n"(kStages - 2) : "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncthreads();  // this step's rows are there, and everybody is through with the step before
    mbarrier_wait(bars + 8 * stage, parity);
    const uint64_t a = of_a + stage * (S::kStageBytes / 16), b = of_b + stage * (S::kStageBytes / 16);
    multiply_step<N, Exact>(main, cross, a, b);
    if (step + kStages - 1 < end) load_weights(step + kStages - 1, ahead);
    if (step + kStages - 1 < end) load_history(ahead);
    asm volatile("cp.async.commit_group;" ::: "memory");
    if (++stage == kStages) stage = 0, parity ^= 1;
    ahead = ahead + 1 == kStages ? 0 : ahead + 1;
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
    add_step<N, Exact>(sum, main, cross);
    if (step + 1 < end_of_part) continue;
    ++part;
#pragma unroll
    for (int i = 0; i < N / 2; ++i) whole[i] += sum[i], sum[i] = 0.0f;
    end_of_part = steps * (part + 1) / parts;
  }

  constexpr int kPitch = N + 8;
  static_assert(kWarpgroupRows * kPitch * 4 <= kStages * S::kStageBytes);
  float* const shared = reinterpret_cast<float*>(base);
  asm volatile("cp.async.wait_group 0;" ::: "memory");
  __syncthreads();
  put_sums<N>(whole, warp, lane, shared, kPitch);
  finish_tile<N, kPitch, kWarpgroupThreads>(p, shared, spread, rank, min(kWarpgroupRows, total - first_row), first_row,
                                            first_column);
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
