// A convolution of many rows by `wgmma`. Its blocks stay, one a multiprocessor, and take tile after tile. Of a block's
// four warpgroups two multiply, one finishes the tile before, and one copies. So copies and products never wait for an
// activation. What limits them is L2, which gives a multiprocessor some 60 KB a microsecond: so two warpgroups share
// what was copied, and the two blocks of a cluster the weights. Bits are those of `convolve_by_warpgroup_kernel`.
#pragma once
#include "warpgroup.cuh"

namespace qmk {

constexpr int kPipelineThreads = 4 * kWarpgroupThreads, kPair = 2;  // blocks of a cluster

// A tile of N columns. Each of two warpgroups multiplies 64 rows: of the same 96 columns, or else the same rows of half
// of the columns. If a convolution of one tap follows, the tile has all columns. A stage holds a step of both matrices.
template <int N>
struct Pipeline {
  static_assert(N == 96 || N == 128 || N == 192);
  static constexpr int kRows = N == 96 ? 128 : 64, kColumns = N == 96 ? N : N / 2;  // columns of a warpgroup
  static constexpr int kStages = N == 96 ? 6 : N == 128 ? 7 : 5, kStageBytes = (kRows + N) * kStepBytes;
  static constexpr int kSpare = kStages * kStageBytes;  // rows of a step that no stage has room for
  static constexpr int kSums = kSpare + (N / kDepth > kStages ? kRows * kStepBytes : 0), kPitch = N + 8;
  static constexpr int kBars = kSums + kRows * kPitch * 4;
  static constexpr int kBytes = 1024 + kBars + 8 * (2 * kStages + 2);  // aligned to 1,024
  static_assert(kBytes <= 227 * 1024);
  static constexpr int kToMultiply = N == 192 ? 208 : 200, kToFinish = 56, kToCopy = N == 96 ? 56 : 40;  // registers
  static_assert(2 * kToMultiply + kToFinish + kToCopy <= 512);

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
// What a thread copies of the input: a chunk of K rows, 16 apart. Behind the last row it copies the last one.
template <int K>
struct CopiedRows {
  const float4* from[K];                     // of a tap
  int first, last, pitch, time[K], past[K];  // offsets in 16 bytes
  uint32_t to;                               // in a stage
  __device__ __forceinline__ CopiedRows(const History& in, int first_row, int total) {
    const int thread = threadIdx.x % kWarpgroupThreads, chunk = thread % 8;
    first = first_row + thread / 8, last = total - 1, pitch = in.channels / 4;
    to = thread / 8 * kStepBytes + ((chunk ^ (thread / 8 % 8)) << 4);
#pragma unroll
    for (int i = 0; i < K; ++i) {
      const InputRow input = find_row(in, min(first + 16 * i, last));
      time[i] = input.time;
      past[i] = in.kept ? static_cast<int>((input.past - in.past) / 4) + (input.time + in.kept) * pitch + chunk : 0;
    }
  }
  // A tap, whose rows lie `shift` rows later.
  __device__ __forceinline__ void begin(const History& in, int shift) {
    const int chunk = threadIdx.x % 8;
#pragma unroll
    for (int i = 0; i < K; ++i) {
      const bool now = time[i] + shift >= 0;
      const int at = now ? min(first + 16 * i, last) * pitch + chunk : past[i];
      from[i] = reinterpret_cast<const float4*>(now ? in.fresh : in.past) + (at + shift * pitch);
    }
  }
  __device__ __forceinline__ void copy(int block, uint32_t stage) const {
#pragma unroll
    for (int i = 0; i < K; ++i) copy16(stage + to + 16 * i * kStepBytes, from[i] + block * (kStepBytes / 16), true);
  }
};

template <int N, bool Unit>
__device__ __forceinline__ void copy_tiles(const Convolution& p, const Convolution& following, const Pipeline<N> s,
                                           int total) {
  using S = Pipeline<N>;
  constexpr int kShare = N / kPair;  // of the weights' columns
  const int share = blockIdx.x % kPair * kShare, blocks_per_tap = p.in.channels / kDepth;
  const uint32_t stages = shared_address(s.base);
  int stage = 0;
  uint32_t parity = 1;
#pragma unroll 1
  for (int tile = blockIdx.x / kPair; tile < s.tiles; tile += gridDim.x / kPair) {
    CopiedRows<S::kRows / 16> rows(p.in, s.first_row(tile), total);
    const int column = s.first_column(tile) + share;
    const uint16_t* weight = p.weight + column * 2 * kDepth;
    int block = 0, shift = -p.in.kept;
#pragma unroll 1
    for (int step = 0; step < s.last; ++step) {
      const bool first = !Unit || step < s.end;
      if (first && block == 0) rows.begin(p.in, shift), shift += p.dilation;
      if (Unit && step == s.end) weight = following.weight + column * 2 * kDepth;
      const uint32_t to = stages + stage * S::kStageBytes, bar = s.arrived(stage);
      mbarrier_wait(s.free(stage), parity);
      if (threadIdx.x % kWarpgroupThreads == 0) {
        mbarrier_expect(bar, N * kStepBytes);
        bulk_copy_to_pair(to + (S::kRows + share) * kStepBytes, weight, kShare * kStepBytes, bar);
      }
      if (first) rows.copy(block, to);
      mbarrier_arrive_after_copies(bar);
      weight += s.columns * 2 * kDepth;
      if (++block == blocks_per_tap) block = 0;
      if (++stage == S::kStages) stage = 0, parity ^= 1;
    }
  }
  asm volatile("cp.async.wait_all;" ::: "memory");
}

// `split`, but that NaN stays NaN: where warps have too little time, conversions clamp.
__device__ __forceinline__ uint2 split_quickly(float2 x) {
  x.x *= 1.0f / kRange, x.y *= 1.0f / kRange;
  const uint32_t high = pack_halves(x.x, x.y);
  const float2 kept = __half22float2(*reinterpret_cast<const __half2*>(&high));
  return make_uint2(high, pack_halves((x.x - kept.x) * kLowScale, (x.y - kept.y) * kLowScale));
}

// The end of a tile whose rows go on into a convolution of one tap: activated, as halves, they lie where that one's
// steps, beginning with `stage`, look for them. The whole sums become 0.
template <int N>
__device__ __forceinline__ void hand_over(const Convolution& p, float (&whole)[48], unsigned char* rows, int stage,
                                          int first_column, int group) {
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
      whole[n * 4 + 2 * half] = whole[n * 4 + 2 * half + 1] = 0.0f;
      x.x = snake(bias.x + kRange * x.x, frequency.x, scale.x);
      x.y = snake(bias.y + kRange * x.y, frequency.y, scale.y);
      const uint2 halves = split_quickly(x);  // the low ones lie 64 bytes behind the high ones, both swizzled
      const int row = warp * 16 + lane / 4 + 8 * half;
      const int at = step + row * kStepBytes + ((n % 4 ^ row % 8) << 4) + 4 * (lane % 4);
      *reinterpret_cast<uint32_t*>(rows + at) = halves.x;
      *reinterpret_cast<uint32_t*>(rows + (at ^ 64)) = halves.y;
    }
  }
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  sync();
}

// A thread's share of the end of a tile: four columns of every `apart`-th row, then those 32 columns further. Threads
// are counted from 0 on, eight for each of `apart` rows.
template <int N>
__device__ __forceinline__ void finish_tile(const Convolution& p, const Pipeline<N>& s, int total, int tile, int thread,
                                            int apart) {
  using S = Pipeline<N>;
  constexpr int kTogether = 4;  // are read before they are written: the compiler must assume that they overlap
  const int row = thread / 8, first_row = s.first_row(tile), rows = min(S::kRows, total - first_row);
  const int first = first_row * p.columns + s.first_column(tile);
  const float* const sums = reinterpret_cast<const float*>(s.base + S::kSums);
#pragma unroll 1
  for (int in_tile = thread % 8 * 4; in_tile < N; in_tile += 32) {
    const int column = s.first_column(tile) + in_tile;
    const float4 bias = __ldg(reinterpret_cast<const float4*>(p.bias + column));
    Snakes snakes{};
    if (p.activation == Activation::kSnake) snakes = snakes_of(p, column % p.channels_out);
#pragma unroll 1
    for (int done = row; done < rows; done += kTogether * apart) {
      float4 r[kTogether];
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        r[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (p.residual && done + apart * i < rows)
          r[i] = *reinterpret_cast<const float4*>(p.residual + first + (done + apart * i) * p.columns + in_tile);
      }
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        const int at_row = done + apart * i;
        if (at_row >= rows) break;
        const float4 sum = *reinterpret_cast<const float4*>(sums + at_row * S::kPitch + in_tile);
        float4 v = make_float4(bias.x + sum.x, bias.y + sum.y, bias.z + sum.z, bias.w + sum.w);
        v.x += r[i].x, v.y += r[i].y, v.z += r[i].z, v.w += r[i].w;
        const int at = first + at_row * p.columns + in_tile;
        if (p.out) *reinterpret_cast<float4*>(p.out + at) = v;
        if (!p.activated) continue;
        if (p.activation == Activation::kSnake) snake(v, snakes);
        else if (p.activation == Activation::kGelu) gelu(v);
        store_halves(p.activated + (at - column), column, split_quickly(make_float2(v.x, v.y)),
                     split_quickly(make_float2(v.z, v.w)));
      }
    }
  }
}

// Of a block's last tile, those who multiplied it finish their share.
template <int N>
__device__ __forceinline__ void finish_last_tile(const Convolution& p, const Pipeline<N>& s, int total, int tile) {
  sync_threads(1, 3 * kWarpgroupThreads);  // its sums are there
  finish_tile(p, s, total, tile, threadIdx.x, 3 * kWarpgroupThreads / 8);
}

template <int N>
__device__ __forceinline__ void finish_tiles(const Convolution& p, const Pipeline<N> s, int total) {
  const int thread = threadIdx.x % kWarpgroupThreads, apart = gridDim.x / kPair;
  uint32_t parity = 0;
#pragma unroll 1
  for (int tile = blockIdx.x / kPair; tile < s.tiles; tile += apart, parity ^= 1) {
    const int first_row = s.first_row(tile), rows = min(Pipeline<N>::kRows, total - first_row);
    if (p.residual)
#pragma unroll 1
      for (int i = thread; i < rows * (N / 32); i += kWarpgroupThreads)
        prefetch_l2(p.residual + (first_row + i / (N / 32)) * p.columns + s.first_column(tile) + i % (N / 32) * 32);
    if (tile + apart >= s.tiles) return finish_last_tile(p, s, total, tile);
    mbarrier_wait(s.summed(), parity);
    finish_tile(p, s, total, tile, thread, kWarpgroupThreads / 8);
    mbarrier_arrive_as_warp(s.finished());
  }
}

template <int N, bool Exact, bool Unit>
__device__ __forceinline__ void multiply_tiles(const Convolution& p, int parts_of_p, const Convolution& following,
                                               int parts_of_following, const Pipeline<N> s, int total) {
  using S = Pipeline<N>;
  constexpr int kColumns = S::kColumns;
  const int log2_of_parts = __ffs(parts_of_p) - 1, log2_of_following = __ffs(parts_of_following) - 1;  // 1, 2, 4 or 8
  const int group = __shfl_sync(~0u, threadIdx.x / kWarpgroupThreads, 0);  // the same in a warp: descriptors are quick
  const int row = N == 96 ? 64 * group : 0, column = N == 96 ? 0 : kColumns * group;  // of the tile
  const uint64_t of_a = descriptor(shared_address(s.base) + row * kStepBytes);
  const uint64_t of_b = descriptor(shared_address(s.base) + (S::kRows + column) * kStepBytes);
  float sum[kColumns / 2] = {}, main[kColumns / 2], cross[kColumns / 2];
  int stage = 0;
  uint32_t parity = 0, tile_parity = 1;
  auto wait_for_step = [&] {
    mbarrier_wait(s.arrived(stage), parity);
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");  // the rows were not copied in bulk
  };
  const int apart = gridDim.x / kPair;
  int tile = blockIdx.x / kPair;
  if (tile < s.tiles) wait_for_step();
#pragma unroll 1
  for (; tile < s.tiles; tile += apart, tile_parity ^= 1) {
    float whole[kColumns / 2] = {};
    int begin = 0, steps = s.end, part = 0, shift = log2_of_parts, end_of_part = steps >> shift;
#pragma unroll 1
    for (int step = 0; step < s.last; ++step) {
      const bool spare = Unit && N / kDepth > S::kStages && step - s.end >= S::kStages;
      const uint64_t a = of_a + (spare ? S::kSpare : stage * S::kStageBytes) / 16;
      multiply_step<kColumns, Exact>(main, cross, a, of_b + stage * (S::kStageBytes / 16));
      const uint32_t used = s.free(stage);
      if (++stage == S::kStages) stage = 0, parity ^= 1;
      if (step + 1 < s.last || tile + apart < s.tiles) wait_for_step();  // for the next one, beside these products
      asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
      if (threadIdx.x % 32 < kPair) mbarrier_arrive_at(used, threadIdx.x % 32);
      add_step<kColumns, Exact>(sum, main, cross);
      if (step + 1 < end_of_part) continue;
#pragma unroll
      for (int i = 0; i < kColumns / 2; ++i) whole[i] += sum[i], sum[i] = 0.0f;
      ++part;
      if constexpr (Unit)
        if (step + 1 == s.end) {
          hand_over<N>(p, whole, s.base + row * kStepBytes, stage, column, group);
          begin = s.end, steps = s.last - s.end, part = 0, shift = log2_of_following;
        }
      end_of_part = begin + (steps * (part + 1) >> shift);
    }
    mbarrier_wait(s.finished(), tile_parity);
    put_sums<kColumns>(whole, threadIdx.x / 32 % 4, threadIdx.x % 32,
                       reinterpret_cast<float*>(s.base + S::kSums) + row * S::kPitch + column, S::kPitch);
    if (tile + apart >= s.tiles) finish_last_tile(Unit ? following : p, s, total, tile);
    else mbarrier_arrive_as_warp(s.summed());
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
    set_registers<S::kToMultiply, true>();  // which the other warpgroups give away
    multiply_tiles<N, Exact, Unit>(p, parts_of_p, following, parts_of_following, s, total);
  } else if (role == 2) {
    set_registers<S::kToFinish, false>();
    finish_tiles<N>(Unit ? following : p, s, total);
  } else {
    set_registers<S::kToCopy, false>();
    copy_tiles<N, Unit>(p, following, s, total);
  }
  cluster.sync();  // nobody leaves while the other one copies into its shared memory
#else
  __trap();  // `has_warpgroups` keeps it from being launched
#endif
}

}  // namespace qmk
