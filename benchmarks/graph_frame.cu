// A frame of one stream as some 560 ordinary kernels, for a CUDA graph: what the persistent kernel is compared with.
// graph_frame.py puts them in order.
//
// Each kernel is what one would write for one stream today: a warp loads its rows' weights into registers, and only
// then waits for the kernel before it (programmatic dependent launch). So weights are on their way while the kernel
// before it still computes. Norms, residuals and SiLU are part of the products.
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace {

using bf16 = __nv_bfloat16;
constexpr int kWarps = 8, kHeadDim = 128, kDrawThreads = 1024, kTopK = 50;
constexpr float kEpsilon = 1e-6f;

__device__ __forceinline__ void after_the_kernel_before() {
  cudaTriggerProgrammaticLaunchCompletion();  // the next one may load its weights
  cudaGridDependencySynchronize();
}
__device__ __forceinline__ uint4 load_once(const bf16* from) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(from));
  return v;
}
__device__ __forceinline__ void widen(uint4 v, float (&out)[8]) {
  const uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
  for (int i = 0; i < 4; i++)
    out[2 * i] = __uint_as_float(words[i] << 16), out[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
}
template <int Lanes>
__device__ __forceinline__ float sum_of(float v) {
#pragma unroll
  for (int apart = Lanes / 2; apart; apart /= 2) v += __shfl_xor_sync(~0u, v, apart);
  return v;
}

// out = W * x, or W * norm(x); with a bias; added to out; or of rows of gate and up, SiLU(gate) * up.
// x: [columns][K]; weights: [rows, or gate's rows and then up's][K]; out: [columns][rows]. kSplit warps share a row.
template <int K, int kSplit, int kRows, int kColumns, bool kGated>
__global__ void __launch_bounds__(32 * kWarps) product(const float* x, const bf16* norm, const bf16* weights,
                                                       const float* bias, float* out, int rows, bool add) {
  constexpr int kShare = K / kSplit, kLoads = kShare / 256, kGroups = kWarps / kSplit;
  static_assert(kShare % 256 == 0 && (!kGated || kRows == 2));
  __shared__ float shared[kWarps][kColumns][kRows + 1];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, part = warp % kSplit;
  const int group = blockIdx.x * kGroups + warp / kSplit, first = group * (kGated ? 1 : kRows);
  const int at = part * kShare + lane * 8;
  uint4 w[kRows][kLoads];
#pragma unroll
  for (int r = 0; r < kRows; r++)
#pragma unroll
    for (int l = 0; l < kLoads; l++)
      w[r][l] = load_once(weights + static_cast<size_t>(kGated ? first + r * rows : first + r) * K + at + l * 256);
  after_the_kernel_before();
  float sum[kColumns][kRows + 1] = {};  // the last: of squares
#pragma unroll
  for (int c = 0; c < kColumns; c++)
#pragma unroll
    for (int l = 0; l < kLoads; l++) {
      float in[8], n[8], row[8];
      *reinterpret_cast<float4*>(in) = *reinterpret_cast<const float4*>(x + c * K + at + l * 256);
      *reinterpret_cast<float4*>(in + 4) = *reinterpret_cast<const float4*>(x + c * K + at + l * 256 + 4);
      if (norm) {
        widen(*reinterpret_cast<const uint4*>(norm + at + l * 256), n);
#pragma unroll
        for (int i = 0; i < 8; i++) sum[c][kRows] += in[i] * in[i], in[i] *= n[i];
      }
#pragma unroll
      for (int r = 0; r < kRows; r++) {
        widen(w[r][l], row);
#pragma unroll
        for (int i = 0; i < 8; i++) sum[c][r] += row[i] * in[i];
      }
    }
#pragma unroll
  for (int c = 0; c < kColumns; c++)
#pragma unroll
    for (int r = 0; r <= kRows; r++) sum[c][r] = sum_of<32>(sum[c][r]);
  if constexpr (kSplit > 1) {
    if (lane == 0)
#pragma unroll
      for (int c = 0; c < kColumns; c++)
#pragma unroll
        for (int r = 0; r <= kRows; r++) shared[warp][c][r] = sum[c][r];
    __syncthreads();
    if (part) return;
#pragma unroll
    for (int c = 0; c < kColumns; c++)
#pragma unroll
      for (int r = 0; r <= kRows; r++)
        for (int other = 1; other < kSplit; other++) sum[c][r] += shared[warp + other][c][r];
  }
  if (lane) return;
#pragma unroll
  for (int c = 0; c < kColumns; c++) {
    const float inverse = norm ? rsqrtf(sum[c][kRows] / K + kEpsilon) : 1.f;
    if constexpr (kGated) {
      const float gate = sum[c][0] * inverse;
      out[c * rows + first] = gate / (1.f + __expf(-gate)) * sum[c][1] * inverse;
    } else {
#pragma unroll
      for (int r = 0; r < kRows; r++) {
        const int row = first + r;
        const float y = sum[c][r] * inverse + (bias ? bias[row] : 0.f);
        out[c * rows + row] = add ? out[c * rows + row] + y : y;
      }
    }
  }
}

// 8 values of a head, from at * 8 on: normed, rotated. The 16 lanes of half a warp hold a head.
__device__ __forceinline__ void norm_and_rotate(float (&v)[8], const bf16* norm, const float* cos, const float* sin,
                                                int at) {
  float n[8], square = 0;
  widen(*reinterpret_cast<const uint4*>(norm + at * 8), n);
#pragma unroll
  for (int i = 0; i < 8; i++) square += v[i] * v[i];
  const float inverse = rsqrtf(sum_of<16>(square) / kHeadDim + kEpsilon);
#pragma unroll
  for (int i = 0; i < 8; i++) {
    v[i] *= inverse * n[i];
    const float other = __shfl_xor_sync(~0u, v[i], 8);
    const int j = at % 8 * 8 + i;
    v[i] = v[i] * cos[j] + (at < 8 ? -other : other) * sin[j];
  }
}

// Attention of a key-value head (blockIdx.x) and its two query heads, of column blockIdx.y. The last columns' keys and
// values are those of qkv: [columns][16 + 8 + 8 heads][128]. Half a warp takes every (threads / 16)th position.
// keys, values: [heads][positions][128]. position: of column 0, plus `from`. Room for kRounds * kThreads / 16 positions.
template <int kThreads, int kRounds>
__global__ void __launch_bounds__(kThreads) attend(const float* qkv, const bf16* q_norm, const bf16* k_norm,
                                                   const float* cos, const float* sin, bf16* keys, bf16* values,
                                                   int positions, const int* position, int from, float* out) {
  constexpr int kHalves = kThreads / 16, kHeads = 16, kKvHeads = 8, kRow = (kHeads + 2 * kKvHeads) * kHeadDim;
  extern __shared__ float acc[];  // [halves][2][128]
  __shared__ float most[kHalves][2], total[kHalves][2];
  const int half = threadIdx.x / 16, lane = threadIdx.x % 16, kv = blockIdx.x, column = blockIdx.y;
  const int first = (position ? *position : 0) + from, mine = first + column;
  bf16* const k_here = keys + static_cast<size_t>(kv) * positions * kHeadDim + lane * 8;
  bf16* const v_here = values + static_cast<size_t>(kv) * positions * kHeadDim + lane * 8;
  uint4 k[kRounds], v[kRounds];
#pragma unroll
  for (int i = 0; i < kRounds; i++) {
    const int p = half + i * kHalves;
    k[i] = v[i] = make_uint4(0, 0, 0, 0);
    // Not load_once: an earlier frame wrote them.
    if (p < first) k[i] = *reinterpret_cast<const uint4*>(k_here + p * kHeadDim);
    if (p < first) v[i] = *reinterpret_cast<const uint4*>(v_here + p * kHeadDim);
  }
  after_the_kernel_before();
  float q[2][8];
  auto take = [&](float (&to)[8], int head, int of) {
    const float* row = qkv + of * kRow + head * kHeadDim + lane * 8;
    *reinterpret_cast<float4*>(to) = *reinterpret_cast<const float4*>(row);
    *reinterpret_cast<float4*>(to + 4) = *reinterpret_cast<const float4*>(row + 4);
  };
#pragma unroll
  for (int h = 0; h < 2; h++) {
    take(q[h], 2 * kv + h, column);
    norm_and_rotate(q[h], q_norm, cos + mine * kHeadDim / 2, sin + mine * kHeadDim / 2, lane);
  }
  float score[2][kRounds], top[2] = {-INFINITY, -INFINITY};
#pragma unroll
  for (int i = 0; i < kRounds; i++) {
    const int p = half + i * kHalves;
    // Both halves of a warp go the same way: they shuffle together.
    if ((p & ~1) + 1 >= first && (p & ~1) <= mine) {
      const int of = min(max(p - first, 0), column);
      float fresh[8], value[8];
      take(fresh, kHeads + kv, of);
      norm_and_rotate(fresh, k_norm, cos + (first + of) * kHeadDim / 2, sin + (first + of) * kHeadDim / 2, lane);
      take(value, kHeads + kKvHeads + kv, of);
      if (p >= first && p <= mine) {
        bf16 packed[8], packed_v[8];
#pragma unroll
        for (int j = 0; j < 8; j++) packed[j] = __float2bfloat16(fresh[j]), packed_v[j] = __float2bfloat16(value[j]);
        k[i] = *reinterpret_cast<uint4*>(packed), v[i] = *reinterpret_cast<uint4*>(packed_v);
        *reinterpret_cast<uint4*>(k_here + p * kHeadDim) = k[i];
        *reinterpret_cast<uint4*>(v_here + p * kHeadDim) = v[i];
      }
    }
    float key[8];
    widen(k[i], key);
#pragma unroll
    for (int h = 0; h < 2; h++) {
      float dot = 0;
#pragma unroll
      for (int j = 0; j < 8; j++) dot += q[h][j] * key[j];
      dot = sum_of<16>(dot) * 0.08838834764831845f;
      score[h][i] = p <= mine ? dot : -INFINITY;
      top[h] = fmaxf(top[h], score[h][i]);
    }
  }
#pragma unroll
  for (int h = 0; h < 2; h++) {
    float part[8] = {}, weights = 0;
#pragma unroll
    for (int i = 0; i < kRounds; i++) {
      float value[8];
      widen(v[i], value);
      const float w = score[h][i] == -INFINITY ? 0.f : __expf(score[h][i] - top[h]);
      weights += w;
#pragma unroll
      for (int j = 0; j < 8; j++) part[j] += w * value[j];
    }
#pragma unroll
    for (int j = 0; j < 8; j++) acc[(half * 2 + h) * kHeadDim + lane * 8 + j] = part[j];
    if (lane == 0) most[half][h] = top[h], total[half][h] = weights;
  }
  __syncthreads();
  if (threadIdx.x >= 2 * kHeadDim) return;
  const int h = threadIdx.x / kHeadDim, dim = threadIdx.x % kHeadDim;
  float all = -INFINITY, sum = 0, weights = 0;
  for (int i = 0; i < kHalves; i++) all = fmaxf(all, most[i][h]);
  for (int i = 0; i < kHalves; i++) {
    if (most[i][h] == -INFINITY) continue;
    const float w = __expf(most[i][h] - all);
    sum += w * acc[(i * 2 + h) * kHeadDim + dim], weights += w * total[i][h];
  }
  out[(column * kHeads + 2 * kv + h) * kHeadDim + dim] = sum / weights;
}

__device__ __forceinline__ uint32_t ordered(float v) {
  const uint32_t bits = __float_as_uint(v);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
__device__ __forceinline__ float gumbel(uint32_t frame, uint32_t group, uint32_t id) {
  uint32_t v = id * 0x9e3779b9u ^ (frame * 16 + group) * 0x85ebca6bu;
  v ^= v >> 16, v *= 0x7feb352du, v ^= v >> 15, v *= 0x846ca68bu, v ^= v >> 16;
  return -__logf(-__logf((v + 0.5f) * 2.3283064e-10f));
}

// Draw a code of N logits: temperature, the 50 largest, noise; greedy without temperature. Then the next input: for
// group 0, [normed hidden state; the code's embedding]; else the embedding. `sum` adds up the next frame's input, which
// the last group moves to `hidden`.
template <int N>
__global__ void __launch_bounds__(kDrawThreads) draw(const float* logits, int allowed, float inverse_temperature,
                                                     int group, int* position, const bf16* embeddings, int width,
                                                     float* hidden, const bf16* norm, const bf16* text, float* sum,
                                                     float* next, int* codes) {
  constexpr int kEach = N / kDrawThreads;
  __shared__ unsigned long long best;
  __shared__ float squares[kDrawThreads / 32];
  const int tid = threadIdx.x;
  if (tid == 0) best = 0;
  after_the_kernel_before();
  uint32_t key[kEach], least = 0;
#pragma unroll
  for (int i = 0; i < kEach; i++) {
    const int id = tid + i * kDrawThreads;
    key[i] = id < allowed ? ordered(logits[id]) : 0;
  }
  const int frame = *position;
  float square = 0;
  for (int i = tid; group == 0 && i < width; i += kDrawThreads) square += hidden[i] * hidden[i];
  square = sum_of<32>(square);
  if (tid % 32 == 0) squares[tid / 32] = square;
  __syncthreads();
  if (inverse_temperature > 0)
    for (int bit = 31; bit >= 0; bit--) {
      const uint32_t trial = least | 1u << bit;
      int count = 0;
#pragma unroll
      for (int i = 0; i < kEach; i++) count += __syncthreads_count(key[i] >= trial);
      if (count >= kTopK) least = trial;
    }
  unsigned long long mine = 0;
#pragma unroll
  for (int i = 0; i < kEach; i++) {
    const int id = tid + i * kDrawThreads;
    if (key[i] < least || id >= allowed) continue;
    const float noisy =
        inverse_temperature > 0 ? logits[id] * inverse_temperature + gumbel(frame, group, id) : logits[id];
    const unsigned long long candidate = static_cast<unsigned long long>(ordered(noisy)) << 32 | (N - 1 - id);
    mine = mine > candidate ? mine : candidate;
  }
#pragma unroll
  for (int apart = 16; apart; apart /= 2) {
    const unsigned long long other = __shfl_xor_sync(~0u, mine, apart);
    mine = mine > other ? mine : other;
  }
  if (tid % 32 == 0) atomicMax(&best, mine);
  __syncthreads();
  const int code = N - 1 - static_cast<int>(best & 0xffffffffu);
  if (tid == 0) codes[group] = code;
  if (tid == 0 && group == 15) *position = frame + 1;
  float total = 0;
  for (int i = 0; i < kDrawThreads / 32; i++) total += squares[i];
  const float inverse = rsqrtf(total / width + kEpsilon);
  for (int i = tid; i < width; i += kDrawThreads) {
    const float embedding = __bfloat162float(embeddings[static_cast<size_t>(code) * width + i]);
    if (group == 0) next[i] = hidden[i] * inverse * __bfloat162float(norm[i]);
    next[(group == 0 ? width : 0) + i] = embedding;
    const float all = embedding + (group ? sum[i] : __bfloat162float(text[i]));
    (group == 15 ? hidden : sum)[i] = all;
  }
}

template <class... Params, class... Args>
int launch(void (*kernel)(Params...), dim3 blocks, int threads, int shared, bool programmatic, cudaStream_t stream,
           Args... args) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = blocks, config.blockDim = dim3(threads), config.dynamicSmemBytes = shared, config.stream = stream;
  config.attrs = &attribute, config.numAttrs = programmatic ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, static_cast<Params>(args)...);
}

template <int K, int kSplit, int kRows, bool kGated>
int launch_product(int columns, const float* x, const bf16* norm, const bf16* weights, const float* bias, float* out,
                   int rows, bool add, bool programmatic, cudaStream_t stream) {
  const dim3 blocks(rows / (kWarps / kSplit * (kGated ? 1 : kRows)));
  auto kernel = columns == 1 ? product<K, kSplit, kRows, 1, kGated> : product<K, kSplit, kRows, 2, kGated>;
  return launch(kernel, blocks, 32 * kWarps, 0, programmatic, stream, x, norm, weights, bias, out, rows, add);
}

}  // namespace

// All return CUDA's error; -1: no such size.
extern "C" int graph_product(int k, bool gated, int columns, const float* x, const bf16* norm, const bf16* weights,
                             const float* bias, float* out, int rows, bool add, bool programmatic,
                             cudaStream_t stream) {
  auto with = [&](auto run) { return run(columns, x, norm, weights, bias, out, rows, add, programmatic, stream); };
  if (gated) {
    if (k == 1024) return with(launch_product<1024, 1, 2, true>);
    if (k == 2048) return with(launch_product<2048, 2, 2, true>);
    return -1;
  }
  switch (k) {
    case 1024: return with(launch_product<1024, 1, 2, false>);
    case 2048: return with(launch_product<2048, 2, 2, false>);
    case 3072: return with(launch_product<3072, 2, 1, false>);
    case 6144: return with(launch_product<6144, 4, 2, false>);
  }
  return -1;
}

extern "C" int graph_attend(bool long_context, int columns, const float* qkv, const bf16* q_norm, const bf16* k_norm,
                            const float* cos, const float* sin, bf16* keys, bf16* values, int positions,
                            const int* position, int from, float* out, bool programmatic, cudaStream_t stream) {
  auto kernel = long_context ? attend<512, 8> : attend<256, 1>;
  const int threads = long_context ? 512 : 256, shared = threads / 16 * 2 * kHeadDim * 4;
  return launch(kernel, dim3(8, columns), threads, shared, programmatic, stream, qkv, q_norm, k_norm, cos, sin, keys,
                values, positions, position, from, out);
}

extern "C" int graph_draw(int n, const float* logits, int allowed, float inverse_temperature, int group, int* position,
                          const bf16* embeddings, int width, float* hidden, const bf16* norm, const bf16* text,
                          float* sum, float* next, int* codes, bool programmatic, cudaStream_t stream) {
  auto kernel = n == 3072 ? draw<3072> : draw<2048>;
  return launch(kernel, dim3(1), kDrawThreads, 0, programmatic, stream, logits, allowed, inverse_temperature, group,
                position, embeddings, width, hidden, norm, text, sum, next, codes);
}
