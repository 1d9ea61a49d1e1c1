// The vocoder's transformer, with the convolution before it and the first upsampling behind it, as one kernel: 36 small
// products one behind the other, which as launches of their own took 34 us a layer where their weights take 3.
//
// Every block owns some columns of every matrix, so that its weights come in one stream that is always four products
// ahead; what a product makes travels with its epoch, as in the frame kernel, and is polled by whoever needs it.
// Launched cooperatively: all blocks run at once. The order of every sum is fixed and does not depend on the other
// rows.
#include <algorithm>

#include "../patience.cuh"
#include "../ptx.cuh"
#include "vocoder.h"

namespace qmk {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;

__host__ __device__ constexpr int share(int all, int blocks) { return (all + blocks - 1) / blocks; }

// Columns of a block and values of a row of product i.
__host__ __device__ inline int2 shape_of(const Layers& p, int i) {
  const int hidden = share(p.hidden, p.blocks), width = p.heads * p.head_dim;
  if (i < kTransformerTaps) return {hidden, p.in.channels};
  if (i == kTransformerTaps + 4 * p.layers) return {share(p.columns_out, p.blocks), p.hidden};
  switch ((i - kTransformerTaps) % 4) {
    case 0: return {share(3 * width, p.blocks), p.hidden};
    case 1: return {hidden, width};
    case 2: return {2 * share(p.intermediate, p.blocks), p.hidden};
    default: return {hidden, p.intermediate};
  }
}

// Floats of shared memory, in this order.
struct Room {
  int weights[4] = {};  // the buffer of product i is i % 4
  int x = 0;            // the rows that a product takes, or an attention head's keys and values
  __host__ __device__ int all() const { return weights[0] + weights[1] + weights[2] + weights[3] + x; }
};
__host__ __device__ inline Room room_of(const Layers& p, int rows) {
  Room r;
  r.x = kTransformerRing * (2 * p.head_dim + 9) + kPushFrames * (4 * p.head_dim + kTransformerRing);
  auto take = [&](int i) {
    const int2 s = shape_of(p, i);
    r.weights[i % 4] = max(r.weights[i % 4], s.x * s.y);
    r.x = max(r.x, rows * s.y);
  };
  for (int i = 0; i < kTransformerTaps + 4; ++i) take(i);  // every kind
  take(kTransformerTaps + 4 * p.layers);
  return r;
}

template <int R>
struct Scratch {
  float sums[kTransformerColumns * R];      // [parts][columns][R]
  float residual[kTransformerColumns * R];  // [columns][R], of the columns that this block owns
  float factor[R];                          // 1 / rms
};

// D: head_dim; R: rows, at least as many as there are.
template <int D, int R>
struct Transformer {
  const Layers& p;
  Scratch<R>& s;
  float* memory;
  Room room;
  Patience patience;
  uint32_t epoch;         // of what was published last
  const float* to_fetch;  // all blocks' weights of the product that is fetched next
  int frames = p.in.rows, rows = p.in.sequences * frames, width = p.heads * D, product = 0;  // the next one
  int tid = threadIdx.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32, block = blockIdx.x;

  __device__ __forceinline__ float* weights(int i) const {
    float* w = memory;
    for (int j = 0; j < i % 4; ++j) w += room.weights[j];
    return w;
  }
  __device__ __forceinline__ float* x() const { return memory + room.all() - room.x; }

  // Begin to copy the weights of product i; a group of its own, though it may be empty.
  __device__ __forceinline__ void fetch(int i) {
    if (i <= kTransformerTaps + 4 * p.layers) {
      const int2 s = shape_of(p, i);
      const int size = s.x * s.y;
      const uint32_t to = shared_address(weights(i));
      const float* from = to_fetch + static_cast<int64_t>(block) * size;
      for (int at = tid * 4; at < size; at += kThreads * 4) copy16(to + at * 4, from + at, true);
      to_fetch += static_cast<int64_t>(p.blocks) * size;
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
  }

  __device__ __forceinline__ void publish(uint2* at, float value) const {
    store_relaxed8(at, __float_as_uint(value), epoch);
  }

  // Pairs of values that carry the epoch, into shared memory: pair i from `from(i)` to `to(i)`.
  template <class From, class To>
  __device__ __forceinline__ void receive(int pairs, From from, To to) {
    constexpr int kTogether = 4;
    for (int first = tid; first < pairs; first += kTogether * kThreads) {
      uint4 v[kTogether];
#pragma unroll
      for (int i = 0; i < kTogether; ++i)
        if (first + i * kThreads < pairs) v[i] = load_relaxed16(from(first + i * kThreads));
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        const int at = first + i * kThreads;
        if (at >= pairs) break;
        uint32_t polls = 0;
        while (v[i].y != epoch || v[i].w != epoch) {
          if (patience.spent(polls)) break;
          v[i] = load_relaxed16(from(at));
        }
        *reinterpret_cast<float2*>(to(at)) = make_float2(__uint_as_float(v[i].x), __uint_as_float(v[i].z));
      }
    }
  }
  __device__ __forceinline__ void receive_rows(const uint2* from, int values) {
    receive(rows * values / 2, [&](int i) { return from + 2 * i; }, [&](int i) { return x() + 2 * i; });
  }

  // Columns column, column + distance, ... of this warp, all rows, over its part of K.
  template <int Columns>
  __device__ __forceinline__ void dots(const float* w, int column, int distance, int k, int begin, int end,
                                       float* out) {
    float sum[Columns][R] = {};
    for (int at = begin + lane; at < end; at += 32) {
      float4 f[Columns];
#pragma unroll
      for (int c = 0; c < Columns; ++c)
        f[c] = *reinterpret_cast<const float4*>(w + (column + c * distance) * k + at * 4);
#pragma unroll
      for (int r = 0; r < R; ++r) {
        const float4 v = *reinterpret_cast<const float4*>(x() + r * k + at * 4);
#pragma unroll
        for (int c = 0; c < Columns; ++c) sum[c][r] += f[c].x * v.x + f[c].y * v.y + f[c].z * v.z + f[c].w * v.w;
      }
    }
#pragma unroll
    for (int c = 0; c < Columns; ++c)
#pragma unroll
      for (int r = 0; r < R; ++r) {
        const float all = warp_sum(sum[c][r]);
        if (lane == (c * R + r) % 32) out[(column + c * distance) * R + r] = all;
      }
  }
  // The next product over the rows in x. finish(c, r, sum) for every column of this block and every row, `sum(c, r)`
  // being what came out there.
  template <class Finish>
  __device__ __forceinline__ void multiply(bool normed, Finish finish) {
    const int2 size = shape_of(p, product);
    const int columns = size.x, k = size.y;
    const float* w = weights(product);
    asm volatile("cp.async.wait_group 3;" ::: "memory");
    __syncthreads();
    const int parts = columns >= 5 ? 1 : columns >= 3 ? 2 : columns == 2 ? 4 : 8;  // of K: work for every warp
    const int distance = kWarps / parts;
    const int part = warp % parts, begin = k / 4 * part / parts, end = k / 4 * (part + 1) / parts;
    for (int c = warp / parts; c < columns; c += 3 * distance) {
      const int left = (columns - c + distance - 1) / distance;
      float* out = s.sums + part * columns * R;
      if (left >= 3) dots<3>(w, c, distance, k, begin, end, out);
      else if (left == 2) dots<2>(w, c, distance, k, begin, end, out);
      else dots<1>(w, c, distance, k, begin, end, out);
    }
    if (normed)
      for (int r = warp; r < rows; r += kWarps) {
        float squares = 0.0f;
        for (int i = lane * 4; i < k; i += 32 * 4) {
          const float4 v = *reinterpret_cast<const float4*>(x() + r * k + i);
          squares += v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w;
        }
        squares = warp_sum(squares);
        if (lane == 0) s.factor[r] = rsqrtf(squares / k + p.eps);
      }
    __syncthreads();
    fetch(product + 4);
    ++product, ++epoch;
    auto sum = [&](int c, int r) {
      float all = s.sums[c * R + r];
      for (int i = 1; i < parts; ++i) all += s.sums[(i * columns + c) * R + r];
      return normed ? all * s.factor[r] : all;
    };
    for (int i = tid; i < columns * rows; i += kThreads) finish(i % columns, i / columns, sum);
  }

  // A block per head and sequence.
  __device__ __forceinline__ void attend(int layer) {
    constexpr int kKey = D + 1, kValue = D + 8;         // between rows: the lanes of a warp read from different banks
    float* keys = x();                                  // [ring][kKey]
    float* values = keys + kTransformerRing * kKey;     // [ring][kValue]
    float* fresh = values + kTransformerRing * kValue;  // q, k, v [3][frames][D]
    float* queries = fresh + 3 * kPushFrames * D;       // [frames][D]
    float* chances = queries + kPushFrames * D;         // [frames][ring]
    for (int task = block; task < p.heads * p.in.sequences; task += p.blocks) {
      const int head = task % p.heads, sequence = task / p.heads, slot = p.in.slots[sequence];
      const int64_t position = p.position[slot];
      float* ring_keys = p.rings + slot * p.stride + static_cast<int64_t>(2 * layer * p.heads + head) * p.ring * D;
      float* ring_values = ring_keys + static_cast<int64_t>(p.heads) * p.ring * D;
      const int64_t oldest = position > p.window - 1 ? position - (p.window - 1) : 0;
      const int before = static_cast<int>(position - oldest);  // local index j is position oldest + j
      const int start = static_cast<int>(oldest % p.ring);
#pragma unroll 4
      for (int i = tid; i < before * (D / 4); i += kThreads) {
        const int j = i / (D / 4), d = i % (D / 4) * 4,
                  at = (start + j < p.ring ? start + j : start + j - p.ring) * D + d;
        const float4 k = __ldcg(reinterpret_cast<const float4*>(ring_keys + at)),
                     v = __ldcg(reinterpret_cast<const float4*>(ring_values + at));
        float* to = keys + j * kKey + d;
        to[0] = k.x, to[1] = k.y, to[2] = k.z, to[3] = k.w;
        *reinterpret_cast<float4*>(values + j * kValue + d) = v;
      }
      receive(
          3 * frames * (D / 2),
          [&](int i) {
            const int which = i / (frames * (D / 2)), t = i / (D / 2) % frames, d = i % (D / 2) * 2;
            return p.qkv + static_cast<int64_t>(sequence * frames + t) * 3 * width + which * width + head * D + d;
          },
          [&](int i) { return fresh + 2 * i; });
      __syncthreads();
      for (int i = tid; i < frames * D; i += kThreads) {
        const int t = i / D, d = i % D, other = d < D / 2 ? d + D / 2 : d - D / 2;
        const float *q = fresh + t * D, *k = q + frames * D, *v = k + frames * D;
        float sine, cosine;
        sincosf(static_cast<float>(position + t) * p.inv_freq[d % (D / 2)], &sine, &cosine);
        if (d < D / 2) sine = -sine;
        queries[t * D + d] = q[d] * cosine + q[other] * sine;
        const float turned = k[d] * cosine + k[other] * sine;
        keys[(before + t) * kKey + d] = turned;
        values[(before + t) * kValue + d] = v[d];
        const int at = (start + before + t) % p.ring * D + d;
        ring_keys[at] = turned;
        ring_values[at] = v[d];
      }
      __syncthreads();
      // Four lanes a score, then a warp a frame, then a quarter of the positions for every output.
      for (int i = tid / 4; i < frames * kTransformerRing; i += kThreads / 4) {
        const int t = i / kTransformerRing, j = i % kTransformerRing, last = before + t;
        float dot = 0.0f;
        if (j <= last && j > last - p.window)
#pragma unroll
          for (int e = 0; e < D / 4; ++e) {
            const int d = tid % 4 * (D / 4) + e;
            dot += queries[t * D + d] * keys[j * kKey + d];
          }
        dot += __shfl_xor_sync(~0u, dot, 1);
        dot += __shfl_xor_sync(~0u, dot, 2);
        if (tid % 4 == 0)
          chances[i] = j <= last && j > last - p.window ? dot * rsqrtf(static_cast<float>(D)) : -INFINITY;
      }
      __syncthreads();
      for (int t = warp; t < frames; t += kWarps) {
        constexpr int kEach = (kTransformerRing + 31) / 32;
        float score[kEach], most = -INFINITY, sum = 0.0f;
#pragma unroll
        for (int i = 0; i < kEach; ++i) {
          score[i] = lane + 32 * i < kTransformerRing ? chances[t * kTransformerRing + lane + 32 * i] : -INFINITY;
          most = fmaxf(most, score[i]);
        }
#pragma unroll
        for (int d = 16; d; d /= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, d));
#pragma unroll
        for (int i = 0; i < kEach; ++i) sum += score[i] = expf(score[i] - most);
        sum = 1.0f / warp_sum(sum);
#pragma unroll
        for (int i = 0; i < kEach; ++i)
          if (lane + 32 * i < kTransformerRing) chances[t * kTransformerRing + lane + 32 * i] = score[i] * sum;
      }
      __syncthreads();
      for (int i = tid / 4; i < frames * D; i += kThreads / 4) {
        const int t = i / D, d = i % D, last = before + t, first = max(0, last - (p.window - 1));
        float mixed = 0.0f;
#pragma unroll 4
        for (int j = first + tid % 4; j <= last; j += 4)
          mixed += chances[t * kTransformerRing + j] * values[j * kValue + d];
        mixed += __shfl_xor_sync(~0u, mixed, 1);
        mixed += __shfl_xor_sync(~0u, mixed, 2);
        uint2* to = p.attended + static_cast<int64_t>(sequence * frames + t) * width + head * D + d;
        if (tid % 4 == 0) store_relaxed8(to, __float_as_uint(mixed), epoch + 1);
      }
      __syncthreads();
    }
    ++epoch;
  }

  // Rows of the embeddings, and of their past, so many frames back.
  __device__ __forceinline__ void take_input(int back) {
    for (int i = tid * 4; i < rows * p.in.channels; i += kThreads * 4) {
      const int r = i / p.in.channels, sequence = r / frames, t = r % frames - back;
      const float* from =
          t >= 0 ? p.in.fresh + static_cast<int64_t>(sequence * frames + t) * p.in.channels
                 : p.in.past + p.in.slots[sequence] * p.in.stride + static_cast<int64_t>(p.in.kept + t) * p.in.channels;
      *reinterpret_cast<float4*>(x() + i) = *reinterpret_cast<const float4*>(from + i % p.in.channels);
    }
  }

  enum Kind { kQkv, kO, kGateUp, kDown, kInput, kOutput };

  __device__ void run() {
    for (int i = 0; i < 4; ++i) fetch(i);
    const int hidden = share(p.hidden, p.blocks), count = kTransformerTaps + 4 * p.layers + 1;
#pragma unroll 1  // every kind of product is the same code: seven copies of it took a minute to compile
    for (int i = 0; i < count; ++i) {
      const Kind kind = i < kTransformerTaps ? kInput
                        : i + 1 == count     ? kOutput
                                             : static_cast<Kind>((i - kTransformerTaps) % 4);
      if (kind == kO) attend((i - kTransformerTaps) / 4);
      if (kind == kInput) take_input(kTransformerTaps - 1 - i);
      else receive_rows(kind == kO ? p.attended : kind == kDown ? p.gated : p.h, shape_of(p, i).y);
      const bool normed = kind == kQkv || kind == kGateUp || kind == kOutput;
      multiply(normed, [&](int c, int r, auto sum) {
        const float value = sum(c, r);
        if (kind == kQkv) {
          const int column = block * share(3 * width, p.blocks) + c;
          if (column < 3 * width) publish(p.qkv + r * 3 * width + column, value);
        } else if (kind == kGateUp) {  // gate and up stand beside each other
          const int column = block * share(p.intermediate, p.blocks) + c / 2;
          if (c % 2 == 0 && column < p.intermediate)
            publish(p.gated + r * p.intermediate + column, value / (1.0f + expf(-value)) * sum(c + 1, r));
        } else if (kind == kOutput) {
          const int column = block * share(p.columns_out, p.blocks) + c;
          if (column < p.columns_out) p.out[r * p.columns_out + column] = value + p.bias_out[column];
        } else {
          const int column = block * hidden + c;
          const float before = i ? s.residual[c * R + r] : column < p.hidden ? p.bias_in[column] : 0.0f;
          const float h = s.residual[c * R + r] = before + value;
          if (i + 1 >= kTransformerTaps && column < p.hidden) publish(p.h + r * p.hidden + column, h);
        }
      });
    }
  }
};

template <int D, int R>
__global__ void __launch_bounds__(kThreads, 1) layers_kernel(const __grid_constant__ Layers p) {
  extern __shared__ __align__(16) float memory[];
  __shared__ Scratch<R> scratch;
  Transformer<D, R> t{p,        scratch, memory, room_of(p, R), Patience{p.spin_limit, p.fault}, load_relaxed4(p.epoch),
                      p.weights};
  t.run();
  t.patience.report();
  // By now every block has read it: block 0 took something of each of them.
  if (blockIdx.x == 0 && threadIdx.x == 0) *p.epoch = t.epoch;
}

template <int D, int R>
cudaError_t launch(const Layers& p, cudaStream_t stream) {
  const int bytes = room_of(p, R).all() * static_cast<int>(sizeof(float));
  const cudaError_t error =
      cudaFuncSetAttribute(layers_kernel<D, R>, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (error != cudaSuccess) return error;
  Layers copy = p;
  void* arguments[] = {&copy};
  return cudaLaunchCooperativeKernel(reinterpret_cast<const void*>(layers_kernel<D, R>), dim3(p.blocks), dim3(kThreads),
                                     arguments, bytes, stream);
}

template <int D>
cudaError_t choose(const Layers& p, cudaStream_t stream) {
  const int rows = p.in.sequences * p.in.rows;
  if (rows <= 1) return launch<D, 1>(p, stream);
  if (rows <= 2) return launch<D, 2>(p, stream);
  if (rows <= 4) return launch<D, 4>(p, stream);
  if (rows <= 8) return launch<D, 8>(p, stream);
  return launch<D, 16>(p, stream);
}

}  // namespace

cudaError_t transform(const Layers& p, cudaStream_t stream) {
  const int width = p.heads * p.head_dim;
  const int widest =
      std::max({share(3 * width, p.blocks), share(p.columns_out, p.blocks), 2 * share(p.intermediate, p.blocks)});
  if (p.in.rows > kPushFrames || p.in.sequences * p.in.rows > kPushRows || p.in.kept != kTransformerTaps - 1 ||
      widest > kTransformerColumns)
    return cudaErrorInvalidValue;
  if (p.ring > kTransformerRing || p.ring < p.window - 1 + p.in.rows) return cudaErrorInvalidValue;
  if (p.hidden % 4 || p.in.channels % 4 || p.intermediate % 4) return cudaErrorInvalidValue;
  if (p.head_dim == 64) return choose<64>(p, stream);
  if (p.head_dim == 32) return choose<32>(p, stream);
  return cudaErrorInvalidValue;
}

}  // namespace qmk
