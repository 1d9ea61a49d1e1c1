// The vocoder: small matrix products, fused with everything around them. A push is some forty launches of one CUDA
// graph. The kernel that makes a layer's input also computes the layer's activation and splits it into halves, once per
// element. The past is read in place. The order of every sum is fixed and does not depend on the push: a sample's bits
// depend on nothing but its sequence.
#include <algorithm>
#include <vector>

#include "convolution.cuh"
#include "launch.cuh"
#include "pipeline.cuh"

namespace qmk {
namespace {

__device__ __forceinline__ void mma(float (&c)[4], const uint32_t (&a)[4], const uint32_t* b) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// Four matrices of 8 x 8 halves. Lane i tells where row i % 8 of matrix i / 8 begins. It gets of each matrix the values
// 2 * (i % 4) and the next one of row i / 4: a fragment of a matrix that lies in rows of its K.
__device__ __forceinline__ void load_matrices(uint32_t (&to)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(address)
               : "memory");
}

// A stage holds a step of both matrices. The eight rows which `ldmatrix` reads at once lie in different banks: those of
// A have a pitch of an odd number of 16 bytes, here in words of 4; those of B are swizzled (`Convolution::weight`).
template <int M, int N>
struct Shape {
  static constexpr int kStages = M * N <= 1024 ? 6 : M * N <= 2048 ? 4 : 3;  // in flight: small tiles wait longest
  static constexpr int kPitchA = kDepth + 4;  // a row's 32 high halves, then its 32 low ones
  static_assert(kPitchA / 4 % 2 == 1);
  static constexpr int kStageFloats = M * kPitchA + N * kDepth;
  static constexpr int kBytes = kStages * kStageFloats * 4;
  static_assert(kBytes <= 99 * 1024, "the least that a supported GPU has");
};

// One tile [M rows][N columns] of a convolution. Its sum is cut into `parts`. The blocks of a cluster take one each,
// and each block then adds up its share of the tile; or one block takes all. Either way the parts are added in their
// order, so the bits are the same. Warps lie WM x WN.
template <int M, int N, int WM, int WN, bool Exact>
__global__ void __launch_bounds__(32 * (M / WM) * (N / WN)) convolve_kernel(const Convolution p, const int parts) {
  using S = Shape<M, N>;
  constexpr int kStages = S::kStages;
  constexpr int kThreads = 32 * (M / WM) * (N / WN);
  constexpr int kTilesM = WM / 16, kTilesN = WN / 8;
  constexpr int kChunksA = M * (kDepth / 4), kChunksB = N * (kDepth / 4);
  constexpr int kMineA = (kChunksA + kThreads - 1) / kThreads, kMineB = (kChunksB + kThreads - 1) / kThreads;
  extern __shared__ __align__(16) float shared[];
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
  const int total = p.in.frames->count * p.in.rows, first_row = blockIdx.y * M, first_column = blockIdx.x * N;
  const int blocks_per_tap = p.in.channels / kDepth, steps = p.taps * blocks_per_tap;
  const int spread = gridDim.z, rank = blockIdx.z;  // the cluster's blocks: 1, or as many as parts
  int part = rank;
  const int begin = steps * part / parts, end = spread > 1 ? steps * (part + 1) / parts : steps;
  int end_of_part = steps * (part + 1) / parts;

  const uint16_t* weight = p.weight + (static_cast<int64_t>(begin) * p.columns + first_column) * 2 * kDepth;
  auto load_weights = [&](int stage) {
#pragma unroll
    for (int i = 0; i < kMineB; ++i)
      if (kChunksB % kThreads == 0 || thread + i * kThreads < kChunksB)
        copy16(shared_address(shared + stage * S::kStageFloats + M * S::kPitchA) + (thread + i * kThreads) * 16,
               weight + (thread + i * kThreads) * 8, true);
    weight += static_cast<int64_t>(p.columns) * 2 * kDepth;
  };
#pragma unroll
  for (int s = 0; s < kStages - 1; ++s)
    if (begin + s < end) load_weights(s);

  // What this thread copies of A: its rows stay the same all along. A step of a row is 128 bytes in one piece.
  const float* fresh[kMineA];
  const float* past[kMineA];
  int time[kMineA];
#pragma unroll
  for (int i = 0; i < kMineA; ++i) {
    const int chunk = thread + i * kThreads, row = first_row + chunk / (kDepth / 4);
    const bool there = chunk < kChunksA && row < total;
    const InputRow input = find_row(p.in, there ? row : 0);
    const int column = chunk % (kDepth / 4) * 4;
    time[i] = there ? input.time : -(1 << 28);
    fresh[i] = input.fresh + column, past[i] = input.past + column;
  }
  wait_for_previous();
  if (first_row >= total) {                           // the whole cluster is too much
    asm volatile("cp.async.wait_all;" ::: "memory");  // another block may get the shared memory only then
    return;
  }
  int channel = begin % blocks_per_tap * kDepth, shift = begin / blocks_per_tap * p.dilation - p.in.kept;
  auto load_history = [&](int stage) {
#pragma unroll
    for (int i = 0; i < kMineA; ++i) {
      const int chunk = thread + i * kThreads;
      if (kChunksA % kThreads == 0 || chunk < kChunksA) {
        const int t = time[i] + shift;
        const bool there = time[i] >= 0;
        const float* from =
            t >= 0 ? fresh[i] + t * p.in.channels : past[i] + (there ? t + p.in.kept : 0) * p.in.channels;
        copy16(shared_address(shared + stage * S::kStageFloats + chunk / (kDepth / 4) * S::kPitchA +
                              chunk % (kDepth / 4) * 4),
               from + channel, there);
      }
    }
    if (channel += kDepth; channel == p.in.channels) channel = 0, shift += p.dilation;
  };

  float sum[kTilesM][kTilesN][4] = {}, whole[kTilesM][kTilesN][4] = {};  // of a part; of those before it
  const int warp_row = warp / (N / WN) * WM, warp_column = warp % (N / WN) * WN;
  const int g = lane / 4, q = lane % 4;  // of a tile's sums
#pragma unroll
  for (int s = 0; s < kStages - 1; ++s) {
    if (begin + s < end) load_history(s);
    asm volatile("cp.async.commit_group;" ::: "memory");  // the first one holds all the weights fetched so far
  }
  // What of A and B this lane points at for `ldmatrix`: of a fragment of A the row lane % 16 and the eight channels
  // lane / 16; of two of B the column lane % 8 of fragment lane / 16, and the eight channels lane / 8 % 2.
  const uint32_t from_a = shared_address(shared + (warp_row + lane % 16) * S::kPitchA + lane / 16 * 4);
  const uint32_t from_b_tile =
      shared_address(shared + M * S::kPitchA + (warp_column + lane / 16 * 8 + lane % 8) * kDepth);
  const int chunk_b = (lane / 8 % 2) ^ (lane % 8);
  // Tensor cores truncate their sums. So they only add within a step; the sum over steps is rounded.
  constexpr int kHalves = Exact ? 2 : 1;
  int stage = 0, ahead = kStages - 1;
  for (int step = begin; step < end; ++step) {
    asm volatile("cp.async.wait_group %0;" ::"n"(kStages - 2) : "memory");
    __syncthreads();
    if (step + kStages - 1 < end) {
      load_weights(ahead);
      load_history(ahead);
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
    const uint32_t a = from_a + stage * S::kStageFloats * 4, b = from_b_tile + stage * S::kStageFloats * 4;
    stage = stage + 1 == kStages ? 0 : stage + 1;
    ahead = ahead + 1 == kStages ? 0 : ahead + 1;
    uint32_t rows[kDepth / 16][kHalves][kTilesM][4];
#pragma unroll
    for (int k = 0; k < kDepth / 16; ++k)
#pragma unroll
      for (int half = 0; half < kHalves; ++half)
#pragma unroll
        for (int m = 0; m < kTilesM; ++m)
          load_matrices(rows[k][half][m], a + m * 16 * S::kPitchA * 4 + half * kDepth * 2 + k * 32);
    // Two tiles of columns at a time: their sums of this step take few registers.
#pragma unroll
    for (int n = 0; n < kTilesN; n += 2) {
      float main[kTilesM][2][4] = {}, cross[kTilesM][2][4] = {};
#pragma unroll
      for (int k = 0; k < kDepth / 16; ++k) {
        uint32_t columns[kHalves][4];  // [..][2 * tile ..] is a fragment
#pragma unroll
        for (int half = 0; half < kHalves; ++half)
          load_matrices(columns[half], b + n * 8 * kDepth * 4 + ((chunk_b ^ (half * 4 + k * 2)) << 4));
#pragma unroll
        for (int m = 0; m < kTilesM; ++m)
#pragma unroll
          for (int i = 0; i < 2; ++i) mma(main[m][i], rows[k][0][m], columns[0] + 2 * i);
        if constexpr (Exact) {
#pragma unroll
          for (int m = 0; m < kTilesM; ++m)
#pragma unroll
            for (int i = 0; i < 2; ++i) mma(cross[m][i], rows[k][1][m], columns[0] + 2 * i);
#pragma unroll
          for (int m = 0; m < kTilesM; ++m)
#pragma unroll
            for (int i = 0; i < 2; ++i) mma(cross[m][i], rows[k][0][m], columns[1] + 2 * i);
        }
      }
#pragma unroll
      for (int m = 0; m < kTilesM; ++m)
#pragma unroll
        for (int i = 0; i < 2; ++i)
#pragma unroll
          for (int j = 0; j < 4; ++j)
            sum[m][n + i][j] += Exact ? fmaf(cross[m][i][j], 1.0f / kLowScale, main[m][i][j]) : main[m][i][j];
    }
    if (step + 1 < end_of_part) continue;
    end_of_part = steps * (++part + 1) / parts;
#pragma unroll
    for (int m = 0; m < kTilesM; ++m)
#pragma unroll
      for (int n = 0; n < kTilesN; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) whole[m][n][i] += sum[m][n][i], sum[m][n][i] = 0.0f;
  }

  // Through shared memory: rows in one piece, and little code.
  constexpr int kPitch = N + 8;
  static_assert(M * kPitch <= kStages * S::kStageFloats);
  asm volatile("cp.async.wait_group 0;" ::: "memory");
  __syncthreads();
#pragma unroll
  for (int m = 0; m < kTilesM; ++m)
#pragma unroll
    for (int n = 0; n < kTilesN; ++n)
#pragma unroll
      for (int half = 0; half < 2; ++half)
        *reinterpret_cast<float2*>(shared + (warp_row + m * 16 + g + 8 * half) * kPitch + warp_column + n * 8 + 2 * q) =
            make_float2(kRange * whole[m][n][2 * half], kRange * whole[m][n][2 * half + 1]);
  finish_tile<N, kPitch, kThreads>(p, shared, spread, rank, min(M, total - first_row), first_row, first_column);
}

// A way to cut a result into tiles [m][n], its sums over so many blocks, and its time by a model fitted to an H200 (but
// for a pipeline: what L2 allows): microseconds of a step of a block that has its multiprocessor for itself, of one of
// several there, and of its end.
struct Cut {
  int m, n;
  float step_us, shared_us, end_us;
  bool warpgroup = false, stays = false;  // by `wgmma`; in a pipeline
  int blocks = 1;
  float us = INFINITY;
};

Cut timed(Cut cut, const Convolution& p, int rows, int blocks, int processors) {
  if (p.columns % cut.n || (cut.stays && blocks > 1)) return cut;
  const int steps = p.taps * (p.in.channels / kDepth), tiles = (rows + cut.m - 1) / cut.m * (p.columns / cut.n);
  const int each = (tiles * blocks + processors - 1) / processors, per_block = (steps + blocks - 1) / blocks;
  cut.blocks = blocks;
  cut.us = per_block * std::max(cut.step_us, cut.shared_us * each) + cut.end_us * each;
  if (blocks > 1) cut.us += 0.05f + 0.25f * blocks;
  return cut;
}

constexpr Cut kCuts[] = {{16, 64, 0.286f, 0.241f, 1.14f},
                         {32, 32, 0.316f, 0.215f, 0.75f},
                         {32, 64, 0.359f, 0.280f, 1.19f},
                         {64, 64, 0.538f, 0.389f, 2.23f},
                         {64, 96, 0.792f, 0.582f, 3.38f},
                         {64, 64, 0.355f, 0.245f, 2.00f, true},
                         {64, 96, 0.370f, 0.325f, 3.40f, true},
                         {64, 128, 0.300f, 0.300f, 2.00f, true, true},
                         {64, 192, 0.390f, 0.390f, 2.00f, true, true},
                         {128, 96, 0.430f, 0.430f, 2.00f, true, true}};

// The quickest cut of so many rows, with one of these numbers of blocks for a sum.
Cut quickest(const Convolution& p, int rows, const std::vector<int>& blocks, bool pipeline, bool warpgroups,
             int processors) {
  Cut best = kCuts[1];  // its tiles fit any number of columns
  for (const Cut& cut : kCuts)
    for (const int many : blocks)
      if (const Cut tried = timed(cut, p, rows, many, processors);
          tried.us < best.us && warpgroups >= cut.warpgroup && pipeline >= cut.stays)
        best = tried;
  return best;
}

// How many parts a sum has: what is quickest for one frame of one sequence. Other pushes keep to it, so that a sample's
// bits depend on nothing but its sequence.
int parts_of(const Convolution& p, bool warpgroups, int processors) {
  const int steps = p.taps * (p.in.channels / kDepth);
  std::vector<int> tried{1};
  for (int parts = 2; parts <= kParts && 2 * parts <= steps; parts *= 2) tried.push_back(parts);
  return quickest(p, p.in.rows, tried, false, warpgroups, processors).blocks;
}

template <int M, int N, int WM, int WN, bool Exact>
cudaError_t launch(const Convolution& p, int parts, int blocks, cudaStream_t stream) {
  const auto kernel = convolve_kernel<M, N, WM, WN, Exact>;
  constexpr int kBytes = Shape<M, N>::kBytes;
  if (kBytes > 48 * 1024) {
    const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
    if (error != cudaSuccess) return error;
  }
  const dim3 grid(p.columns / N, (p.in.room * p.in.rows + M - 1) / M, blocks);
  return launch_after(kernel, grid, 32 * (M / WM) * (N / WN), kBytes, stream, dim3(1, 1, blocks), p, parts);
}

template <int N, bool Exact>
cudaError_t launch_warpgroups(const Convolution& p, int parts, int blocks, cudaStream_t stream) {
  const auto kernel = convolve_by_warpgroup_kernel<N, Exact>;
  constexpr int kBytes = WarpgroupShape<N>::kBytes;
  const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  if (error != cudaSuccess) return error;
  const dim3 grid(p.columns / N, (p.in.room * p.in.rows + kWarpgroupRows - 1) / kWarpgroupRows, blocks);
  return launch_after(kernel, grid, kWarpgroupThreads, kBytes, stream, dim3(1, 1, blocks), p, parts);
}

template <int N, bool Exact, bool Unit>
cudaError_t launch_pipeline(const Convolution& p, int parts, int processors, cudaStream_t stream,
                            const Convolution& following, int parts_of_following) {
  const auto kernel = convolve_by_pipeline_kernel<N, Exact, Unit>;
  using S = Pipeline<N>;
  const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, S::kBytes);
  if (error != cudaSuccess) return error;
  const int tiles = (p.in.room * p.in.rows + kPair * S::kRows - 1) / (kPair * S::kRows) * (p.columns / N);
  return launch_after(kernel, kPair * std::min(tiles, processors / kPair), kPipelineThreads, S::kBytes, stream,
                      dim3(kPair), p, parts, following, parts_of_following);
}

template <bool Exact>
cudaError_t choose(const Convolution& p, const Convolution* following, cudaStream_t stream) {
  int device = 0, processors = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
  const bool warpgroups = has_warpgroups(convolve_by_warpgroup_kernel<64, Exact>);
  const bool clusters = has_clusters(convolve_kernel<32, 32, 16, 16, Exact>);
  auto parts_in = [&](const Convolution& c) { return clusters ? parts_of(c, warpgroups, processors) : 1; };
  const int parts = parts_in(p);
  if (following) {
    const auto launch = p.columns == 96 ? launch_pipeline<96, Exact, true> : launch_pipeline<192, Exact, true>;
    return launch(p, parts, processors, stream, *following, parts_in(*following));
  }
  const Cut best = quickest(p, p.in.room * p.in.rows, {1, parts}, p.in.room > kFewFrames, warpgroups, processors);
  if (best.stays) {
    const auto launch = best.n == 96    ? launch_pipeline<96, Exact, false>
                        : best.n == 128 ? launch_pipeline<128, Exact, false>
                                        : launch_pipeline<192, Exact, false>;
    return launch(p, parts, processors, stream, {}, 1);
  }
  if (best.warpgroup)
    return best.n == 96 ? launch_warpgroups<96, Exact>(p, parts, best.blocks, stream)
                        : launch_warpgroups<64, Exact>(p, parts, best.blocks, stream);
  switch (best.m * 1000 + best.n) {
    case 16064: return launch<16, 64, 16, 16, Exact>(p, parts, best.blocks, stream);
    case 32064: return launch<32, 64, 16, 32, Exact>(p, parts, best.blocks, stream);
    case 64064: return launch<64, 64, 32, 32, Exact>(p, parts, best.blocks, stream);
    case 64096: return launch<64, 96, 32, 48, Exact>(p, parts, best.blocks, stream);
    default: return launch<32, 32, 16, 16, Exact>(p, parts, best.blocks, stream);
  }
}

}  // namespace

bool can_follow(int channels) {
  return (channels == 96 || channels == 192) && has_warpgroups(convolve_by_pipeline_kernel<96, true, true>);
}

cudaError_t convolve(const Convolution& p, const Convolution* following, cudaStream_t stream) {
  if (following && !(can_follow(p.columns) && p.activation == Activation::kSnake && following->taps == 1 &&
                     following->columns == p.columns && following->in.channels == p.columns))
    return cudaErrorInvalidValue;
  return p.exact ? choose<true>(p, following, stream) : choose<false>(p, following, stream);
}

}  // namespace qmk
