// The vocoder's transformer, the convolution before it and the first upsampling behind it, as one kernel. It makes 36
// small products, one behind the other. As launches of their own they took 34 us a layer; reading the weights takes 3.
//
// Every block owns some columns of every matrix, so its weights come in one stream, which is always four chunks ahead.
// A product's results travel with their epoch, as in the frame kernel, and blocks that need them poll. A chunk is a
// block's columns of one product, or as many of them as fit into shared memory four times. The launch is cooperative:
// all blocks run at once. The order of every sum is fixed and does not depend on the other rows, nor on where a push
// began.
#include <algorithm>

#include "../patience.cuh"
#include "transformer.cuh"

namespace qmk {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;
static_assert(kTransformerColumns * kTransformerRows <= kTransformerResiduals);

__host__ __device__ constexpr int share(int all, int blocks) { return (all + blocks - 1) / blocks; }

__host__ __device__ constexpr int count_products(int layers) { return kTransformerTaps + 4 * layers + 1; }
__host__ __device__ inline Kind kind_of(int product, int layers) {
  if (product < kTransformerTaps) return kInput;
  if (product + 1 == count_products(layers)) return kOutput;
  return static_cast<Kind>((product - kTransformerTaps) % 4);
}

// How the products are cut, and where everything lies: floats from the beginning of shared memory, where the sums are.
struct Plan {
  Product of[kKinds];
  int weights[4];  // of chunk i at i % 4
  int x;           // the rows that a product takes, or an attention head's keys and values
  int floats;      // of everything
};

struct Scratch {
  float residual[kTransformerResiduals];  // [columns][rows], of the columns that this block owns
  float factor[kTransformerRows];         // 1 / rms, of a group's rows
};

// D: head_dim; R: rows of a group. A row is a frame. A product takes one group after the other, and its weights come
// once.
template <int D, int R>
struct Transformer {
  const Layers& p;
  const Plan& plan;
  Scratch& s;
  float* sums;  // [parts][columns of a chunk][R], and the beginning of shared memory
  Patience patience;
  uint32_t epoch;         // of what was published last
  const float* to_fetch;  // all blocks' weights of the product that is fetched next
  int product_to_fetch = 0, column_to_fetch = 0;
  int chunk = 0;  // the next one to multiply with
  int rows = p.in.frames->count, width = p.heads * D;
  int tid = threadIdx.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32, block = blockIdx.x;

  __device__ __forceinline__ float* weights(int i) const { return sums + plan.weights[i % 4]; }
  __device__ __forceinline__ float* x() const { return sums + plan.x; }

  // Begin to copy the weights of the next chunk, which is chunk i; a group of its own, though it may be empty.
  __device__ __forceinline__ void fetch(int i) {
    if (product_to_fetch < count_products(p.layers)) {
      const Product m = plan.of[kind_of(product_to_fetch, p.layers)];
      const int size = min(m.chunk, m.columns - column_to_fetch) * m.values;
      const uint32_t to = shared_address(weights(i));
      const float* from = to_fetch + static_cast<int64_t>(block * m.columns + column_to_fetch) * m.values;
      for (int at = tid * 4; at < size; at += kThreads * 4) copy16(to + at * 4, from + at, true);
      column_to_fetch += m.chunk;
      if (column_to_fetch >= m.columns) {
        column_to_fetch = 0, ++product_to_fetch;
        to_fetch += static_cast<int64_t>(p.blocks) * m.columns * m.values;
      }
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
  }

  __device__ __forceinline__ void publish(uint2* at, float value) const {
    store_relaxed8(at, __float_as_uint(value), epoch);
  }

  // Pairs of values that carry the wanted epoch, into shared memory: pair i from `from(i)` to `to(i)`.
  template <class From, class To>
  __device__ __forceinline__ void receive(int pairs, uint32_t wanted, From from, To to) {
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
        while (v[i].y != wanted || v[i].w != wanted) {
          if (patience.spent(polls)) break;
          v[i] = load_relaxed16(from(at));
        }
        *reinterpret_cast<float2*>(to(at)) = make_float2(__uint_as_float(v[i].x), __uint_as_float(v[i].z));
      }
    }
  }
  // What a product takes of a group of rows: of the vector that the product before it published, or of the input.
  __device__ __forceinline__ void take(int product, Kind kind, int first_row, int count, uint32_t wanted) {
    if (kind == kInput) return take_input(kTransformerTaps - 1 - product, first_row, count);
    const int values = plan.of[kind].values;
    const uint2* from = (kind == kO      ? p.attended
                         : kind == kDown ? p.gated
                                         : p.h) +
                        static_cast<int64_t>(first_row) * values;
    receive(count * values / 2, wanted, [&](int i) { return from + 2 * i; }, [&](int i) { return x() + 2 * i; });
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
        for (int c = 0; c < Columns; ++c) sum[c][r] = add_quad(sum[c][r], f[c], v);
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
  // The next product, of this kind. It calls finish(c, r, sum) for every column of this block and every row. `sum(c,
  // r)` is the result there. A gate also has the result of the column behind it.
  template <class Finish>
  __device__ __forceinline__ void multiply(int product, Kind kind, Finish finish) {
    const Product m = plan.of[kind];
    const int k = m.values;
    const bool normed = is_normed(kind), one_group = rows <= R;
    const uint32_t wanted = epoch++;
#pragma unroll 1
    for (int first = 0; first < m.columns; first += m.chunk) {
      const int columns = min(m.chunk, m.columns - first);
      const float* w = weights(chunk);
      const int parts = parts_of(columns);
      const int distance = kWarps / parts;
      const int part = warp % parts, begin = k / 4 * part / parts, end = k / 4 * (part + 1) / parts;
#pragma unroll 1
      for (int first_row = 0; first_row < rows; first_row += R) {
        const int count = min(R, rows - first_row);
        const bool fresh = first == 0 || !one_group;
        if (fresh) take(product, kind, first_row, count, wanted);
        asm volatile("cp.async.wait_group 3;" ::: "memory");
        __syncthreads();
        for (int c = warp / parts; c < columns; c += 3 * distance) {
          const int left = (columns - c + distance - 1) / distance;
          float* out = sums + part * columns * R;
          if (left >= 3) dots<3>(w, c, distance, k, begin, end, out);
          else if (left == 2) dots<2>(w, c, distance, k, begin, end, out);
          else dots<1>(w, c, distance, k, begin, end, out);
        }
        if (normed && fresh)
          for (int r = warp; r < count; r += kWarps) {
            float squares = 0.0f;
            for (int i = lane * 4; i < k; i += 32 * 4) {
              const float4 v = *reinterpret_cast<const float4*>(x() + r * k + i);
              squares = add_quad(squares, v, v);
            }
            squares = warp_sum(squares);
            if (lane == 0) s.factor[r] = rms_factor(squares, k, p.eps);
          }
        __syncthreads();
        if (first_row + R >= rows) fetch(chunk + 4);  // nobody needs this chunk any more
        auto sum = [&](int c, int r) {
          const int at = (c - first) * R + r - first_row;
          float all = sums[at];
          for (int i = 1; i < parts; ++i) all += sums[i * columns * R + at];
          return normed ? __fmul_rn(all, s.factor[r - first_row]) : all;
        };
        for (int i = tid; i < columns * count; i += kThreads) finish(first + i % columns, first_row + i / columns, sum);
      }
      ++chunk;
    }
  }

  // A block per head and sequence.
  __device__ __forceinline__ void attend_heads(int layer) {
    for (int task = block; task < p.heads * p.in.frames->sequences; task += p.blocks)
      attend<D, kThreads>(
          p, layer, task, x(),
          [&](int first_row, int frames, int head, float* to) {
            receive(
                3 * frames * (D / 2), epoch,
                [&](int i) {
                  const int part = i / (frames * (D / 2)), t = i / (D / 2) % frames, d = i % (D / 2) * 2;
                  return p.qkv + static_cast<int64_t>(first_row + t) * 3 * width + part * width + head * D + d;
                },
                [&](int i) { return to + 2 * i; });
          },
          [&](int row, int column, float value) {
            store_relaxed8(p.attended + static_cast<int64_t>(row) * width + column, __float_as_uint(value), epoch + 1);
          });
    ++epoch;
  }

  // Rows of the embeddings, and of their past, so many frames back.
  __device__ __forceinline__ void take_input(int back, int first_row, int count) {
    for (int i = tid * 4; i < count * p.in.channels; i += kThreads * 4) {
      const int r = first_row + i / p.in.channels;
      const auto [slot, begin] = p.in.frames->of[r];
      const int t = r - back - begin;
      const float* from = t >= 0 ? p.in.fresh + static_cast<int64_t>(r - back) * p.in.channels
                                 : p.in.past + slot * p.in.stride + static_cast<int64_t>(p.in.kept + t) * p.in.channels;
      *reinterpret_cast<float4*>(x() + i) = *reinterpret_cast<const float4*>(from + i % p.in.channels);
    }
  }

  __device__ void run() {
    for (int i = 0; i < 4; ++i) fetch(i);
#pragma unroll 1  // every kind of product is the same code: seven copies of it took a minute to compile
    for (int i = 0; i < count_products(p.layers); ++i) {
      const Kind kind = kind_of(i, p.layers);
      if (kind == kO) attend_heads((i - kTransformerTaps) / 4);
      multiply(i, kind, [&](int c, int r, auto sum) {
        const float value = sum(c, r);
        if (kind == kQkv) {
          const int column = block * plan.of[kQkv].columns + c;
          if (column < 3 * width) publish(p.qkv + r * 3 * width + column, value);
        } else if (kind == kGateUp) {  // gate and up stand beside each other
          const int column = (block * plan.of[kGateUp].columns + c) / 2;
          if (c % 2 == 0 && column < p.intermediate)
            publish(p.gated + r * p.intermediate + column, gated(value, sum(c + 1, r)));
        } else if (kind == kOutput) {
          const int column = block * plan.of[kOutput].columns + c;
          if (column < p.columns_out) p.out[r * p.columns_out + column] = value + p.bias_out[column];
        } else {
          const int column = block * plan.of[kind].columns + c;
          float& residual = s.residual[c * rows + r];
          const float before = i ? residual : column < p.hidden ? p.bias_in[column] : 0.0f;
          const float h = residual = before + value;
          if (i + 1 >= kTransformerTaps && column < p.hidden) publish(p.h + r * p.hidden + column, h);
        }
      });
    }
  }
};

template <int D, int R>
__global__ void __launch_bounds__(kThreads, 1)
    layers_kernel(const __grid_constant__ Layers p, const __grid_constant__ Plan plan) {
  extern __shared__ __align__(16) float memory[];
  __shared__ Scratch scratch;
  Transformer<D, R> t{p, plan, scratch, memory, Patience{p.spin_limit, p.fault}, load_relaxed4(p.epoch), p.weights};
  t.run();
  t.patience.report();
  // By now every block has read it: block 0 took something of each of them.
  if (blockIdx.x == 0 && threadIdx.x == 0) *p.epoch = t.epoch;
}

// Cut the products into chunks of at most so many floats, and lay them out. The number of rows changes nothing, because
// the columns of a chunk decide how its sums are cut.
Plan lay_out(const Layers& p, const Product (&products)[kKinds], int chunk) {
  Plan plan{};
  int narrowest = chunk, widest = 0;
  bool whole = true;
  for (int kind = 0; kind < kKinds; ++kind) {
    const auto& [columns, values, together] = products[kind];
    const int pieces = share(columns, chunk / (together * values) * together);
    plan.of[kind] = {columns, values, share(columns / together, pieces) * together};
    narrowest = std::min(narrowest, values), widest = std::max(widest, values);
    whole = whole && pieces == 1;
  }
  int room[4] = {chunk, chunk, chunk, chunk};
  if (whole) {  // chunk i is product i
    std::fill_n(room, 4, 0);
    for (int i = 0; i < count_products(p.layers); ++i) {
      const Product& m = products[kind_of(i, p.layers)];
      room[i % 4] = std::max(room[i % 4], m.columns * m.values);
    }
  }
  plan.floats = kTransformerRows * std::max(kWarps, chunk / narrowest);  // the sums: parts x columns, see `multiply`
  for (int i = 0; i < 4; ++i) plan.weights[i] = plan.floats, plan.floats += room[i];
  plan.x = plan.floats;
  plan.floats += std::max(kTransformerRows * widest, attention_floats(p.head_dim));
  return plan;
}

// Take the products whole if they fit, else in the largest of the tried chunk sizes that fits. True: one fits.
// vocoder_graphs.py has the smallest size's arithmetic too (`why_no_graphs`).
bool make_plan(const Layers& p, Plan& plan) {
  const int hidden = share(p.hidden, p.blocks), width = p.heads * p.head_dim;
  // By Kind; of each the smallest chunk, too: a column, or a gate and its up.
  const Product products[kKinds] = {{share(3 * width, p.blocks), p.hidden, 1},
                                    {hidden, width, 1},
                                    {2 * share(p.intermediate, p.blocks), p.hidden, 2},
                                    {hidden, p.intermediate, 1},
                                    {hidden, p.in.channels, 1},
                                    {share(p.columns_out, p.blocks), p.hidden, 1}};
  int most = 0, least = 0;
  for (const Product& m : products) {
    most = std::max(most, m.columns * m.values);
    least = std::max(least, m.chunk * m.values);
  }
  auto fits = [&](int chunk) {
    plan = lay_out(p, products, chunk);
    return plan.floats * sizeof(float) + sizeof(Scratch) <= static_cast<size_t>(p.shared_bytes);
  };
  bool found = fits(most);
  for (int units = (most - 1) / least; !found && units > 0; --units) found = fits(units * least);
  return found;
}

template <int D, int R>
cudaError_t launch(const Layers& p, const Plan& plan, cudaStream_t stream) {
  const int bytes = plan.floats * static_cast<int>(sizeof(float));
  const cudaError_t error =
      cudaFuncSetAttribute(layers_kernel<D, R>, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (error != cudaSuccess) return error;
  Layers layers = p;
  Plan copy = plan;
  void* arguments[] = {&layers, &copy};
  return cudaLaunchCooperativeKernel(reinterpret_cast<const void*>(layers_kernel<D, R>), dim3(p.blocks), dim3(kThreads),
                                     arguments, bytes, stream);
}

template <int D>
cudaError_t choose(const Layers& p, const Plan& plan, cudaStream_t stream) {
  if (p.in.room <= 1) return launch<D, 1>(p, plan, stream);
  if (p.in.room <= 2) return launch<D, 2>(p, plan, stream);
  if (p.in.room <= 4) return launch<D, 4>(p, plan, stream);
  if (p.in.room <= 8) return launch<D, 8>(p, plan, stream);
  return launch<D, 16>(p, plan, stream);
}

}  // namespace

cudaError_t transform(const Layers& p, cudaStream_t stream) {
  // The buffers between blocks are used again. Before that, a block waits for values of every other block, so all have
  // read the old ones. That is why each block must own columns.
  for (const int columns : {p.hidden, 3 * p.heads * p.head_dim, p.intermediate})
    if ((p.blocks - 1) * share(columns, p.blocks) >= columns) return cudaErrorInvalidValue;
  if (p.in.rows != 1 || p.in.kept != kTransformerTaps - 1) return cudaErrorInvalidValue;
  const int columns = share(p.hidden, p.blocks);
  if (columns > kTransformerColumns || p.in.room * columns > kTransformerResiduals) return cudaErrorInvalidValue;
  if (p.ring > kTransformerRing || p.ring < p.window - 1 + kPushFrames) return cudaErrorInvalidValue;
  if (p.hidden % 4 || p.in.channels % 4 || p.intermediate % 4) return cudaErrorInvalidValue;
  if (p.head_dim != 64 && p.head_dim != 32) return cudaErrorInvalidValue;
  Plan plan;
  if (!make_plan(p, plan)) return cudaErrorInvalidValue;
  if (p.in.room > kTransformerRows && can_share_rows(p, plan.of)) return transform_by_launches(p, stream);
  return p.head_dim == 64 ? choose<64>(p, plan, stream) : choose<32>(p, plan, stream);
}

}  // namespace qmk
