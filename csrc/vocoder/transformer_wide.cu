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
// parts of 32 lanes of J quads (`parts_of`), a group of threads for each. Taps: matrices whose sums are added one by
// one.
template <int T, int P, int J, int Taps>
struct Tile {
  static constexpr int kRows = 4 * T, kLines = kRows + kColumns;   // a line: what a step takes of a row or a column
  static constexpr int kQuads = 4 * J, kPitch = 4 * (kQuads + 4);  // neighbouring lines lie in different banks
  static constexpr int kStages = 3, kStageFloats = P * kLines * kPitch;
  static constexpr int kValues = 128 * J * P;  // of a row or a column
  static constexpr int kBytes = kStages * kStageFloats * 4;
};

struct Multiplication {
  Kind kind;
  History in;            // of kInput: taps - 1 rows of the past
  const float* x;        // [rows][values], of the others
  const float* weights;  // [taps][columns][values]
  const float* bias;     // [columns], of kInput and kOutput
  float* out;            // [rows][columns]; of kGateUp [rows][columns / 2]; of kO and kDown the residual stream
  int columns;
  float eps;
};

// Of a sum's 32 lanes, each of four threads takes 8: thread q in step i this one, and its neighbours those beside it.
// So every addition of `warp_sum` over a distance of 16, 8 or 4 lanes has both sides as early as it can.
__device__ __forceinline__ int first_lane(int i) { return (i & 1) * 16 + (i & 2) * 4 + (i & 4); }

template <int T, int P, int J, int Taps>
__global__ void __launch_bounds__(kGroup* P, P == 1 ? 3 : 1) multiply_kernel(const __grid_constant__ Multiplication p) {
  using S = Tile<T, P, J, Taps>;
  constexpr int kStages = S::kStages, kSteps = 8 * Taps, kApart = kGroup / S::kQuads;
  constexpr int kCopiedRows = S::kRows / kApart, kCopiedColumns = kColumns / kApart;
  constexpr bool kNormed = P == 1;
  extern __shared__ __align__(16) float shared[];
  __shared__ float factor[S::kRows];
  const int part = threadIdx.x / kGroup, thread = threadIdx.x % kGroup;
  const int q = thread % 4, row_tile = thread / 4 % 4, column_tile = thread / 16;
  const int total = p.in.frames->count, first_row = blockIdx.y * S::kRows, first_column = blockIdx.x * kColumns;

  // This thread copies a quad of every kApart-th line.
  const int line = thread / S::kQuads, quad = thread % S::kQuads;
  const int in_line = 4 * (part * 32 * J + quad / 4 * 32 + quad % 4);
  const uint32_t to = shared_address(shared + (part * S::kLines + line) * S::kPitch + 4 * quad);
  const float* const weights = p.weights + static_cast<int64_t>(first_column + line) * S::kValues + in_line;
  auto copy_columns = [&](int step, int stage) {
    const float* from = weights + 4 * first_lane(step % 8);
    if (Taps > 1) from += static_cast<int64_t>(step / 8) * p.columns * S::kValues;
#pragma unroll
    for (int i = 0; i < kCopiedColumns; ++i)
      copy16(to + 4 * (stage * S::kStageFloats + (S::kRows + i * kApart) * S::kPitch), from + i * kApart * S::kValues,
             true);
  };
#pragma unroll
  for (int s = 0; s < kStages - 1; ++s) copy_columns(s, s);

  const int row = first_row + line;
  const float *fresh = p.x + static_cast<int64_t>(row) * S::kValues + in_line, *past = nullptr;
  int time = 0;
  if constexpr (Taps > 1) {
    static_assert(kCopiedRows == 1);
    const auto [slot, begin] = p.in.frames->of[row < total ? row : 0];
    time = row - begin;
    fresh = p.in.fresh + static_cast<int64_t>(row) * S::kValues + in_line;
    past = p.in.past + slot * p.in.stride + static_cast<int64_t>(p.in.kept + time) * S::kValues + in_line;
  }
  auto copy_rows = [&](int step, int stage) {
    const int back = Taps > 1 ? Taps - 1 - step / 8 : 0;
    const float* from = time >= back ? fresh : past;
#pragma unroll
    for (int i = 0; i < kCopiedRows; ++i) {
      const bool there = row + i * kApart < total;
      copy16(to + 4 * (stage * S::kStageFloats + i * kApart * S::kPitch),
             there ? from + (i * kApart - back) * S::kValues + 4 * first_lane(step % 8) : p.weights, there);
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

  constexpr int kSums = 4 * T + kNormed;  // the last one is of a row's squares
  float value[Taps][T / 4][4];
  int stage = 0, ahead = kStages - 1;
#pragma unroll
  for (int tap = 0; tap < Taps; ++tap) {
    float sum[kSums], waiting[3][kSums];
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
        float4 f[4];
#pragma unroll
        for (int c = 0; c < 4; ++c) f[c] = *reinterpret_cast<const float4*>(columns + c * S::kPitch + 16 * j);
#pragma unroll
        for (int r = 0; r < T; ++r) {
          const float4 v = *reinterpret_cast<const float4*>(rows + (row_tile + 4 * r) * S::kPitch + 16 * j);
#pragma unroll
          for (int c = 0; c < 4; ++c) sum[4 * r + c] = add_quad(sum[4 * r + c], f[c], v);
        }
        if constexpr (kNormed)
          if (thread / 4 < S::kRows) {
            const float4 v = *reinterpret_cast<const float4*>(rows + thread / 4 * S::kPitch + 16 * j);
            sum[4 * T] = add_quad(sum[4 * T], v, v);
          }
      }
      // `warp_sum` over distances of 16, 8 and 4.
      auto add = [&](const float (&other)[kSums]) {
#pragma unroll
        for (int n = 0; n < kSums; ++n) sum[n] += other[n];
      };
      auto keep = [&](float (&as)[kSums]) {
#pragma unroll
        for (int n = 0; n < kSums; ++n) as[n] = sum[n];
      };
      if (i % 2 == 0) {
        keep(waiting[0]);
      } else {
        add(waiting[0]);
        if (i % 4 == 1) keep(waiting[1]);
        else add(waiting[1]);
        if (i == 3) keep(waiting[2]);
        if (i == 7) add(waiting[2]);
      }
    }
    // Over distances of 2 and 1; of four threads each keeps the sums of some rows.
    float half[T / 2][4];
#pragma unroll
    for (int r = 0; r < T / 2; ++r)
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        const float low = sum[4 * r + c], high = sum[4 * (r + T / 2) + c];
        half[r][c] = (q & 2 ? high : low) + __shfl_xor_sync(~0u, q & 2 ? low : high, 2);
      }
#pragma unroll
    for (int r = 0; r < T / 4; ++r)
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        const float low = half[r][c], high = half[r + T / 4][c];
        value[tap][r][c] = (q & 1 ? high : low) + __shfl_xor_sync(~0u, q & 1 ? low : high, 1);
      }
    if constexpr (kNormed) {
      float squares = sum[4 * T];
      squares += __shfl_xor_sync(~0u, squares, 2);
      squares += __shfl_xor_sync(~0u, squares, 1);
      if (q == 0 && thread / 4 < S::kRows) factor[thread / 4] = rms_factor(squares, S::kValues, p.eps);
    }
  }

  __syncthreads();  // the factors are there, and nobody needs a stage any more
  if constexpr (P == 2) {
    float4* const room = reinterpret_cast<float4*>(shared) + thread;
#pragma unroll
    for (int tap = 0; tap < Taps; ++tap)
#pragma unroll
      for (int r = 0; r < T / 4; ++r)
        if (part == 1) room[(tap * (T / 4) + r) * kGroup] = *reinterpret_cast<const float4*>(value[tap][r]);
    __syncthreads();
    if (part == 1) return;
#pragma unroll
    for (int tap = 0; tap < Taps; ++tap)
#pragma unroll
      for (int r = 0; r < T / 4; ++r) {
        const float4 v = room[(tap * (T / 4) + r) * kGroup];
        value[tap][r][0] += v.x, value[tap][r][1] += v.y, value[tap][r][2] += v.z, value[tap][r][3] += v.w;
      }
  }
#pragma unroll
  for (int r = 0; r < T / 4; ++r) {
    const int in_tile = row_tile + 4 * (q * (T / 4) + r), at = first_row + in_tile;
    if (at >= total) break;
    const int column = first_column + 4 * column_tile;
    float v[4];
#pragma unroll
    for (int c = 0; c < 4; ++c) v[c] = kNormed ? __fmul_rn(value[0][r][c], factor[in_tile]) : value[0][r][c];
    float4* const out = reinterpret_cast<float4*>(p.out + static_cast<int64_t>(at) * p.columns + column);
    if (p.kind == kGateUp) {
      *reinterpret_cast<float2*>(p.out + (static_cast<int64_t>(at) * p.columns + column) / 2) =
          make_float2(gated(v[0], v[1]), gated(v[2], v[3]));
    } else {
      float4 before = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      if (p.kind == kO || p.kind == kDown) before = *out;
      if (p.bias) before = *reinterpret_cast<const float4*>(p.bias + column);
      float4 h = p.kind == kQkv ? make_float4(v[0], v[1], v[2], v[3])
                                : make_float4(before.x + v[0], before.y + v[1], before.z + v[2], before.w + v[3]);
#pragma unroll
      for (int tap = 1; tap < Taps; ++tap)
        h.x += value[tap][r][0], h.y += value[tap][r][1], h.z += value[tap][r][2], h.w += value[tap][r][3];
      *out = h;
    }
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
  using S = Tile<T, P, J, Taps>;
  const auto kernel = multiply_kernel<T, P, J, Taps>;
  const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, S::kBytes);
  if (error != cudaSuccess) return error;
  const dim3 grid(m.columns / kColumns, (m.in.room + S::kRows - 1) / S::kRows);
  return launch_after(kernel, grid, kGroup * P, S::kBytes, stream, 1, m);
}

template <int D>
cudaError_t launch_attention(const Layers& p, int layer, cudaStream_t stream) {
  constexpr int kBytes = attention_floats(D) * 4;
  int device = 0, processors = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
  const cudaError_t error = cudaFuncSetAttribute(attend_kernel<D>, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  if (error != cudaSuccess) return error;
  const dim3 grid(std::min(p.heads * p.in.room, 3 * processors));
  return launch_after(attend_kernel<D>, grid, kAttending, kBytes, stream, 1, p, layer);
}

}  // namespace

bool can_share_rows(const Layers& p, const Product (&products)[kKinds]) {
  const int width = p.heads * p.head_dim;
  const int all[kKinds] = {3 * width, p.hidden, 2 * p.intermediate, p.hidden, p.hidden, p.columns_out};
  bool can = p.head_dim == 64 && Tile<4, 2, 4, 1>::kBytes <= p.shared_bytes;  // the largest of them
  for (int kind = 0; kind < kKinds; ++kind) {
    const auto& [columns, values, chunk] = products[kind];
    const int parts = is_normed(static_cast<Kind>(kind)) ? 1 : 2, last = (columns - 1) % chunk + 1;
    can = can && parts_of(std::min(columns, chunk)) == parts && parts_of(last) == parts;
    can = can && values == 128 * parts * (kind == kInput ? 2 : 4);
    can = can && columns * p.blocks == all[kind] && all[kind] % kColumns == 0;
  }
  return can;
}

cudaError_t transform_by_launches(const Layers& p, cudaStream_t stream) {
  const Vectors of(p);
  const int width = p.heads * p.head_dim;
  const float* weights = p.weights;
  cudaError_t error = cudaSuccess;
  auto multiply = [&](Kind kind, const float* x, int values, const float* bias, float* out, int columns) {
    const Multiplication m{kind, p.in, x, weights, bias, out, columns, p.eps};
    weights += static_cast<int64_t>(kind == kInput ? kTransformerTaps : 1) * columns * values;
    if (error != cudaSuccess) return;
    if (kind == kInput) error = launch<4, 2, 2, kTransformerTaps>(m, stream);
    else if (!is_normed(kind)) error = launch<4, 2, 4, 1>(m, stream);
    else if (p.in.room <= 64) error = launch<4, 1, 4, 1>(m, stream);
    else error = launch<8, 1, 4, 1>(m, stream);
  };
  multiply(kInput, nullptr, p.in.channels, p.bias_in, of.h, p.hidden);
  for (int layer = 0; layer < p.layers; ++layer) {
    multiply(kQkv, of.h, p.hidden, nullptr, of.qkv, 3 * width);
    if (error == cudaSuccess) error = launch_attention<64>(p, layer, stream);
    multiply(kO, of.attended, width, nullptr, of.h, p.hidden);
    multiply(kGateUp, of.h, p.hidden, nullptr, of.gated, 2 * p.intermediate);
    multiply(kDown, of.gated, p.intermediate, nullptr, of.h, p.hidden);
  }
  multiply(kOutput, of.h, p.hidden, p.bias_out, p.out, p.columns_out);
  return error;
}

}  // namespace qmk
