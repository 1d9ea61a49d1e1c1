// The vocoder's transformer for pushes of many frames: a launch for each product, and one for the attention of a layer.
// In the kernel of small pushes (transformer.cu) every block takes every row, 16 at a time: 128 rows took it 1.85 ms on
// an H200. Here a block takes some rows and some columns, and a thread keeps 32 or 16 sums in registers. The order of a
// sum is that kernel's, so a sample has the same bits on either way.
#include <algorithm>

#include "launch.cuh"
#include "transformer.cuh"

namespace qmk {
namespace {

constexpr int kGroup = 128;      // threads that compute a part of the sums of a tile
constexpr int kColumns = 32;     // of a tile
constexpr int kAttending = 256;  // threads of a block that attends

// A tile is [4 * T rows][32 columns], and four neighbouring threads share sums of T rows and 4 columns. A sum has P
// parts of 32 lanes of J quads (`parts_of`), a group of threads for each.
template <int T, int P, int J>
struct Tile {
  static constexpr int kRows = 4 * T, kLines = kRows + kColumns;   // a line: what a step takes of a row or a column
  static constexpr int kQuads = 4 * J, kPitch = 4 * (kQuads + 4);  // neighbouring lines lie in different banks
  static constexpr int kStages = 3, kStageFloats = P * kLines * kPitch;
  static constexpr int kValues = 128 * J * P;  // of a row or a column
  static constexpr int kBytes = (kStages * kStageFloats + kGroup * T) * 4;
};

struct Multiplication {
  Kind kind;
  History in;            // rows of the values, and their past where a row's result needs rows before it
  const float* weights;  // [taps][columns][values]
  const float* bias;     // [columns], of kInput and kOutput
  float* out;            // [rows][columns]; of kGateUp [rows][columns / 2]; of kO and kDown the residual stream
  int columns;
  float eps;
};

// Of a sum's 32 lanes, each of four threads takes 8: thread q in step i this one plus q. So every addition of
// `warp_sum` over a distance of 16, 8 or 4 lanes has both sides as early as it can.
__device__ __forceinline__ int first_lane(int i) { return (i & 1) * 16 + (i & 2) * 4 + (i & 4); }

// Taps: matrices whose results are added one by one, of a row and the ones before it, the oldest first.
template <int T, int P, int J, int Taps>
__global__ void __launch_bounds__(kGroup* P, P == 1 ? 3 : 1) multiply_kernel(const __grid_constant__ Multiplication p) {
  using S = Tile<T, P, J>;
  constexpr int kStages = S::kStages, kSteps = 8 * Taps, kApart = kGroup / S::kQuads;
  constexpr bool kNormed = P == 1;
  extern __shared__ __align__(16) float shared[];
  __shared__ float factor[S::kRows];
  const int part = threadIdx.x / kGroup, thread = threadIdx.x % kGroup;
  const int q = thread % 4, row_tile = thread / 4 % 4, column_tile = thread / 16;
  const int total = p.in.frames->count, first_row = blockIdx.y * S::kRows, first_column = blockIdx.x * kColumns;

  // This thread copies a quad of every kApart-th line.
  const int line = thread / S::kQuads, quad = thread % S::kQuads, row = first_row + line;
  const int in_line = 4 * (part * 32 * J + quad / 4 * 32 + quad % 4);
  const uint32_t to = shared_address(shared + (part * S::kLines + line) * S::kPitch + 4 * quad);
  const float* const weights = p.weights + static_cast<int64_t>(first_column + line) * S::kValues + in_line;
  auto copy_columns = [&](int step, int stage) {
    const float* from = weights + 4 * first_lane(step % 8);
    if (Taps > 1) from += static_cast<int64_t>(step / 8) * p.columns * S::kValues;
#pragma unroll
    for (int i = 0; i < kColumns; i += kApart)
      copy16(to + 4 * (stage * S::kStageFloats + (S::kRows + i) * S::kPitch), from + i * S::kValues, true);
  };
#pragma unroll
  for (int s = 0; s < kStages - 1; ++s) copy_columns(s, s);

  const float *fresh = p.in.fresh + static_cast<int64_t>(row) * S::kValues + in_line, *past = nullptr;
  int time = 0;
  if constexpr (Taps > 1) {
    static_assert(kApart == S::kRows);
    const auto [slot, begin] = p.in.frames->of[row < total ? row : 0];
    time = row - begin;
    past = p.in.past + slot * p.in.stride + static_cast<int64_t>(p.in.kept + time) * S::kValues + in_line;
  }
  auto copy_rows = [&](int step, int stage) {
    const int back = Taps > 1 ? Taps - 1 - step / 8 : 0;
    const float* from = (time >= back ? fresh : past) - back * S::kValues + 4 * first_lane(step % 8);
#pragma unroll
    for (int i = 0; i < S::kRows; i += kApart) {
      const bool there = row + i < total;
      copy16(to + 4 * (stage * S::kStageFloats + i * S::kPitch), there ? from + i * S::kValues : p.weights, there);
    }
  };
  wait_for_previous();
  if (first_row >= total) {
    asm volatile("cp.async.wait_all;" ::: "memory");  // another block may get the shared memory only then
    return;
  }
#pragma unroll
  for (int s = 0; s < kStages - 1; ++s) {
    copy_rows(s, s);
    asm volatile("cp.async.commit_group;" ::: "memory");  // the first one holds all the columns fetched so far
  }

  // Of the four threads' rows this one finishes every fourth.
  auto row_of = [&](int r) { return row_tile + 16 * r + 4 * q; };
  const int column = first_column + 4 * column_tile;
  auto out_of = [&](int r) { return p.out + static_cast<int64_t>(first_row + row_of(r)) * p.columns + column; };
  float4 h[T / 4] = {};  // what stands before the results, and then with them
#pragma unroll
  for (int r = 0; r < T / 4; ++r) {
    if (p.bias) h[r] = *reinterpret_cast<const float4*>(p.bias + column);
    if (!kNormed && !p.bias && first_row + row_of(r) < total) h[r] = *reinterpret_cast<const float4*>(out_of(r));
  }
  constexpr int kSums = 4 * T + kNormed;  // the last one is of a row's squares
  float4* const other = reinterpret_cast<float4*>(shared + kStages * S::kStageFloats) + thread;  // part's results
  int stage = 0, ahead = kStages - 1;
#pragma unroll
  for (int tap = 0; tap < Taps; ++tap) {
    float sum[kSums], waiting[3][kSums];
    auto add = [&](const float (&more)[kSums]) {
#pragma unroll
      for (int n = 0; n < kSums; ++n) sum[n] += more[n];
    };
    auto keep = [&](float (&as)[kSums]) {
#pragma unroll
      for (int n = 0; n < kSums; ++n) as[n] = sum[n];
    };
#pragma unroll 1
    for (int i = 0; i < 8; ++i) {
      asm volatile("cp.async.wait_group %0;" ::"n"(kStages - 2) : "memory");
      __syncthreads();  // this step's lines are there, and everybody is through with the step before
      if (const int next = 8 * tap + i + kStages - 1; next < kSteps) {
        copy_columns(next, ahead);
        copy_rows(next, ahead);
      }
      asm volatile("cp.async.commit_group;" ::: "memory");
      const float* const rows = shared + stage * S::kStageFloats + part * S::kLines * S::kPitch + 4 * q;
      const float* const columns = rows + (S::kRows + 4 * column_tile) * S::kPitch;
      stage = stage + 1 == kStages ? 0 : stage + 1;
      ahead = ahead + 1 == kStages ? 0 : ahead + 1;
#pragma unroll
      for (int n = 0; n < kSums; ++n) sum[n] = 0.0f;
#pragma unroll
      for (int j = 0; j < J; ++j) {
        auto quad_of = [&](const float* of, int line) {
          return *reinterpret_cast<const float4*>(of + line * S::kPitch + 16 * j);
        };
        const float4 f[4] = {quad_of(columns, 0), quad_of(columns, 1), quad_of(columns, 2), quad_of(columns, 3)};
#pragma unroll
        for (int r = 0; r < T; ++r) {
          const float4 v = quad_of(rows, row_tile + 4 * r);
#pragma unroll
          for (int c = 0; c < 4; ++c) sum[4 * r + c] = add_quad(sum[4 * r + c], f[c], v);
        }
        if (kNormed && thread / 4 < S::kRows) {
          const float4 v = quad_of(rows, thread / 4);
          sum[kSums - 1] = add_quad(sum[kSums - 1], v, v);
        }
      }
      // `warp_sum` over distances of 16, 8 and 4.
      if (i % 2) add(waiting[0]);
      else keep(waiting[0]);
      if (i % 4 == 1) keep(waiting[1]);
      if (i % 4 == 3) add(waiting[1]);
      if (i == 3) keep(waiting[2]);
      if (i == 7) add(waiting[2]);
    }
#pragma unroll
    for (int n = 0; n < kSums; ++n) {
      sum[n] += __shfl_xor_sync(~0u, sum[n], 2);
      sum[n] += __shfl_xor_sync(~0u, sum[n], 1);
    }
    if (kNormed && q == 0 && thread / 4 < S::kRows) factor[thread / 4] = rms_factor(sum[kSums - 1], S::kValues, p.eps);
    float4 v[T / 4];
#pragma unroll
    for (int r = 0; r < T; ++r)
      if (r % 4 == q) v[r / 4] = make_float4(sum[4 * r], sum[4 * r + 1], sum[4 * r + 2], sum[4 * r + 3]);
#pragma unroll
    for (int r = 0; r < T / 4; ++r)
      if (part == 1) other[r * kGroup] = v[r];
    __syncthreads();  // the factors and the other part's results are there
#pragma unroll
    for (int r = 0; r < T / 4; ++r) {
      const float4 more = P == 2 ? other[r * kGroup] : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      const float by = kNormed ? factor[row_of(r)] : 1.0f;
      h[r].x += __fmul_rn(v[r].x + more.x, by), h[r].y += __fmul_rn(v[r].y + more.y, by);
      h[r].z += __fmul_rn(v[r].z + more.z, by), h[r].w += __fmul_rn(v[r].w + more.w, by);
    }
  }
#pragma unroll
  for (int r = 0; r < T / 4; ++r) {
    if (part == 1 || first_row + row_of(r) >= total) break;
    float* const out = out_of(r);
    if (p.kind != kGateUp) *reinterpret_cast<float4*>(out) = h[r];
    else
      *reinterpret_cast<float2*>(p.out + (out - p.out) / 2) = make_float2(gated(h[r].x, h[r].y), gated(h[r].z, h[r].w));
  }
}

// What the launches hand each other, of every row.
struct Vectors {
  float *h, *qkv, *attended, *gated;

  __host__ __device__ explicit Vectors(const Layers& p) {
    const int64_t room = p.in.room, width = p.heads * p.head_dim;
    h = p.vectors, qkv = h + room * p.hidden, attended = qkv + room * 3 * width, gated = attended + room * width;
  }
};

template <int D>
__global__ void __launch_bounds__(kAttending, 3) attend_kernel(const __grid_constant__ Layers p, const int layer) {
  extern __shared__ __align__(16) float shared[];
  const Vectors of(p);
  const int width = p.heads * D, tasks = p.heads * p.in.frames->sequences;
  for (int task = blockIdx.x; task < tasks; task += gridDim.x)
    attend<D, kAttending>(
        p, layer, task, shared,
        [&](int first_row, int frames, int head, float* to) {
          wait_for_previous();  // the rings hold what earlier pushes left, so they need not wait
          for (int i = threadIdx.x; i < 3 * frames * (D / 4); i += kAttending) {
            const int third = i / (frames * (D / 4)), t = i / (D / 4) % frames, d = i % (D / 4) * 4;
            const int64_t at = (static_cast<int64_t>(first_row + t) * 3 + third) * width + head * D + d;
            *reinterpret_cast<float4*>(to + 4 * i) = *reinterpret_cast<const float4*>(of.qkv + at);
          }
        },
        [&](int row, int column, float value) { of.attended[static_cast<int64_t>(row) * width + column] = value; });
  wait_for_previous();  // without a task, too: the next launch relies on all that came before this one
}

template <int T, int P, int J, int Taps>
cudaError_t launch(const Multiplication& m, cudaStream_t stream) {
  using S = Tile<T, P, J>;
  const auto kernel = multiply_kernel<T, P, J, Taps>;
  const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, S::kBytes);
  if (error != cudaSuccess) return error;
  const dim3 grid(m.columns / kColumns, (m.in.room + S::kRows - 1) / S::kRows);
  return launch_after(kernel, grid, kGroup * P, S::kBytes, stream, 1, m);
}

cudaError_t launch_attention(const Layers& p, int layer, cudaStream_t stream) {
  const auto kernel = attend_kernel<64>;
  constexpr int kBytes = attention_floats(64) * 4;
  const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  if (error != cudaSuccess) return error;
  return launch_after(kernel, dim3(std::min(p.heads * p.in.room, 3 * p.blocks)), kAttending, kBytes, stream, 1, p,
                      layer);
}

}  // namespace

// The published sizes, where a chunk of the other kernel is a whole product: this decides the parts of a sum.
bool can_share_rows(const Layers& p, const Product (&products)[kKinds]) {
  return p.blocks == 128 && p.hidden == 512 && p.heads == 16 && p.head_dim == 64 && p.intermediate == 1024 &&
         p.in.channels == 512 && p.columns_out == 2048 &&
         std::all_of(products, products + kKinds, [](const Product& m) { return m.chunk == m.columns; });
}

cudaError_t transform_by_launches(const Layers& p, cudaStream_t stream) {
  const Vectors of(p);
  const int width = p.heads * p.head_dim;
  const float* weights = p.weights;
  cudaError_t error = cudaSuccess;
  auto multiply = [&](Kind kind, const float* x, int values, const float* bias, float* out, int columns) {
    Multiplication m{kind, p.in, weights, bias, out, columns, p.eps};
    m.in.fresh = x;
    weights += static_cast<int64_t>(kind == kInput ? kTransformerTaps : 1) * columns * values;
    if (error != cudaSuccess) return;
    if (kind == kInput) error = launch<4, 2, 2, kTransformerTaps>(m, stream);
    else if (!is_normed(kind)) error = launch<4, 2, 4, 1>(m, stream);
    else error = p.in.room <= 64 ? launch<4, 1, 4, 1>(m, stream) : launch<8, 1, 4, 1>(m, stream);
  };
  multiply(kInput, p.in.fresh, p.in.channels, p.bias_in, of.h, p.hidden);
  for (int layer = 0; layer < p.layers; ++layer) {
    multiply(kQkv, of.h, p.hidden, nullptr, of.qkv, 3 * width);
    if (error == cudaSuccess) error = launch_attention(p, layer, stream);
    multiply(kO, of.attended, width, nullptr, of.h, p.hidden);
    multiply(kGateUp, of.h, p.hidden, nullptr, of.gated, 2 * p.intermediate);
    multiply(kDown, of.gated, p.intermediate, nullptr, of.h, p.hidden);
  }
  multiply(kOutput, of.h, p.hidden, p.bias_out, p.out, p.columns_out);
  return error;
}

}  // namespace qmk
