// The arithmetic behind layer.cuh: which rows and packets belong to which thread, how a matrix's input arrives in the
// lanes that feed it to the tensor cores, and how a block hands round what it made.
#pragma once
#include "exchange.cuh"
#include "matvec.cuh"

namespace qmk {

// Ring stages of one layer of a block: qkv, o, gate and up, down.
template <class S>
constexpr int kLayerStages = Matvec<S::kQkvRows, S::kHidden, S::kFp8>::stages(kSteps<S::kHidden>) +
                             Matvec<S::kHiddenRows, S::kQ, S::kFp8>::stages(kSteps<S::kQ>) +
                             Matvec<S::kGateUpRows, S::kHidden, S::kFp8>::stages(kSteps<S::kHidden>) +
                             Matvec<S::kHiddenRows, S::kIntermediate, S::kFp8>::stages(kSteps<S::kIntermediate>);

// ---- what a thread owns

// Thread t owns row t % S::kHiddenRows of this block's share of the residual, of column t / S::kHiddenRows.
template <class S, class B>
__device__ __forceinline__ int owned_row(const B& b) {
  return b.block * S::kHiddenRows + b.tid % S::kHiddenRows;
}
template <class S, class B>
__device__ __forceinline__ int owned_column(const B& b) {
  return b.tid / S::kHiddenRows;
}
template <class S, class B>
__device__ __forceinline__ bool owns(const B& b) {
  return b.tid < S::kHiddenRows * b.columns && owned_row<S>(b) < S::kHidden;
}
// This row's value of a vector [hidden]. Converted where it is used: the load must not stall what comes between.
template <class S, class B>
__device__ __forceinline__ bf16 owned_value(const B& b, const bf16* vector) {
  return vector[min(owned_row<S>(b), S::kHidden - 1)];
}

// The scale of a row of E4M3 weights, 1 for bf16; `row` is clamped, because nobody owns the rows behind the last one.
// Ask for it before the wait for the matrix's input.
template <bool Fp8>
__device__ __forceinline__ float scale_of(const float* scales, int row, int rows) {
  if constexpr (Fp8) return scales[min(row, rows - 1)];
  else return 1.f;
}

// ---- a matrix's input

// This lane's share of an input of K values, as many steps as are awaited at once.
template <int K>
constexpr int kAtOnce = steps_at_once(kSteps<K>);
template <int K>
using InputOf = Input<kAtOnce<K>>;

// Packets of this lane's columns, `Count` a column one behind the other from packet `first` on.
template <int Count, class B>
__device__ __forceinline__ void await_columns(B& b, uint4 (&r)[kColumnTiles * Count], const Packet* slots, int first,
                                              const int (&column)[kColumnTiles], uint32_t epoch) {
  const Packet* of[kColumnTiles];
  uint32_t missing = 0;
#pragma unroll
  for (int c = 0; c < kColumnTiles; c++) {
    of[c] = slots + packet_index(first, column[c]);
    missing |= column[c] < 0 ? 0 : ((1u << Count) - 1) << c * Count;
  }
  await_packets(r, missing, [&](int i) { return of[i / Count] + i % Count * kColumns * 4; }, epoch, b.patience);
}

// Steps `from` ... of a vector in packets of 4 values, one a step, with the squares of a residual's values.
template <int K, class B>
__device__ __forceinline__ void await_input(B& b, const Packet* slots, const int (&column)[kColumnTiles],
                                            uint32_t epoch, int from, InputOf<K>& in) {
  constexpr int kCount = kAtOnce<K>;
  uint4 r[kColumnTiles * kCount] = {};
  await_columns<kCount>(b, r, slots, (b.warp * kSteps<K> + from) * 4 + b.lane % 4, column, epoch);
#pragma unroll
  for (int c = 0; c < kColumnTiles; c++)
#pragma unroll
    for (int i = 0; i < kCount; i++) {
      const uint4& packet = r[c * kCount + i];
      in.b[c][i] = make_uint2(packet.x, packet.y), in.square[c] += __uint_as_float(packet.z);
    }
}

// For `matvec`: what awaits this pass's vector of K values in one of the exchange's slots.
template <int K, Packet* Exchange::* Slots, class B>
__device__ __forceinline__ auto awaiting(B& b) {
  return [&b](int from, auto& in) { await_input<K>(b, b.x.*Slots, b.column, b.epoch, from, in); };
}

// Packets of the MLP's vector of K values that a lane takes.
template <int K>
constexpr int kMlpPackets = K / kWarps / 4 / kMlpPacket;

// The same of the MLP's packets of 6 values: from packet `first` of this lane's `Packets` on, as steps of 4.
template <int Packets, int Steps, class B>
__device__ __forceinline__ void await_mlp(B& b, int first, Input<Steps>& in) {
  constexpr int kCount = Steps * 4 / kMlpPacket;
  uint4 r[kColumnTiles * kCount] = {};
  await_columns<kCount>(b, r, b.x.mlp, (b.warp * Packets + first) * 4 + b.lane % 4, b.column, b.epoch);
#pragma unroll
  for (int c = 0; c < kColumnTiles; c++) {
    auto word = [&](int n) {
      return n % 3 == 0 ? r[c * kCount + n / 3].x : n % 3 == 1 ? r[c * kCount + n / 3].y : r[c * kCount + n / 3].z;
    };
#pragma unroll
    for (int i = 0; i < Steps; i++) in.b[c][i] = make_uint2(word(2 * i), word(2 * i + 1));
  }
}

// For `matvec_of_mlp`: what awaits some packets of the MLP's vector of K values.
template <int K, class B>
__device__ __forceinline__ auto awaiting_mlp(B& b) {
  return [&b](int first, auto& in) { await_mlp<kMlpPackets<K>>(b, first, in); };
}

// ---- a matrix

// The input that `await(from, in)` brings, from that step on, times the rows of this block; afterwards the block's
// partial sums are in `partial` for everyone in it.
template <int Rows, int K, bool Fp8, class B, class Await>
__device__ __forceinline__ void matvec(B& b, float* partial, Await await) {
  b.refresh();
  Matvec<Rows, K, Fp8> m;
  auto await_or_not = [&](int from, auto& in) {
    if constexpr (!kWeightsAlone) await(from, in);
  };
  m.template multiply<kSteps<K>>(b.ring, await_or_not, 0, b.warp, b.lane, b.patience);
  if constexpr (kWeightsAlone) return;
  m.store(partial, b.columns, b.warp, b.lane);
  sync_compute<kComputeThreads>();
}

// The same of the MLP's output, which arrives in packets of 6: as many of them at once as registers hold.
template <int Rows, int K, bool Fp8, class B, class Await>
__device__ __forceinline__ void matvec_of_mlp(B& b, float* partial, Await await) {
  Matvec<Rows, K, Fp8> m;
  constexpr int kPackets = kMlpPackets<K>, kMany = kPackets < 8 ? kPackets : 8;  // of a lane; at once
#pragma unroll
  for (int from = 0; from < kPackets; from += kMany) {
    constexpr int kCount = kMany * kMlpPacket / 4, kEach = steps_at_once(kCount);
    m.template multiply<kCount>(
        b.ring, [&](int step, Input<kEach>& in) { await(from + step * 4 / kMlpPacket, in); }, from * kMlpPacket / 4,
        b.warp, b.lane, b.patience);
  }
  m.store(partial, b.columns, b.warp, b.lane);
  sync_compute<kComputeThreads>();
}

// The matrices of a layer over nothing: benchmarks/measure_fp8.py times the weights alone.
template <class S, class B, class Await>
__device__ __forceinline__ void multiply_alone(B& b, Await await) {
  matvec<S::kQkvRows, S::kHidden, S::kFp8>(b, b.s.wide, await);
  matvec<S::kHiddenRows, S::kQ, S::kFp8>(b, b.s.narrow, await);
  matvec<S::kGateUpRows, S::kHidden, S::kFp8>(b, b.s.wide, await);
  matvec<S::kHiddenRows, S::kIntermediate, S::kFp8>(b, b.s.narrow, await);
}

// ---- what a block made

// q, k and v of this block's rows of a layer, out of partial sums.
template <class S, class B>
__device__ __forceinline__ void publish_qkv(B& b, const float* partial, float scale) {
  using M = Matvec<S::kQkvRows, S::kHidden>;
  static_assert(kComputeThreads % S::kQkvRows == 0, "a thread's row is the same one in every round");
  for (int i = b.tid; i < S::kQkvRows * b.columns; i += kComputeThreads) {
    const int row = b.block * S::kQkvRows + i % S::kQkvRows, column = i / S::kQkvRows;
    const float y = M::sum(partial, i % S::kQkvRows, column) * M::inverse_rms(partial, column) * scale;
    if (row < S::kQkv) publish(b.x.qkv + column * S::kQkv + row, y, b.epoch);
  }
}

// This thread's row of a product of K values, out of partial sums, added to its row of the residual.
template <class S, int K, class B>
__device__ __forceinline__ void add_to_residual(B& b, const float* partial, float scale) {
  using M = Matvec<S::kHiddenRows, K>;
  if (owns<S>(b)) b.residual += M::sum(partial, b.tid % S::kHiddenRows, owned_column<S>(b)) * scale;
}

// Hand round the residual h, times the weight of the norm that comes next. 1 / rms is the same factor for all rows, so
// it is applied to the sums behind that norm's matrix and the input is rounded once only.
template <class S, class B>
__device__ __forceinline__ void publish_residual(const B& b, Packet* slots, float h, bf16 weight) {
  if (b.warp * 32 >= S::kHiddenRows * b.columns) return;
  float square = h * h;
  square += __shfl_xor_sync(~0u, square, 1);
  square += __shfl_xor_sync(~0u, square, 2);
  const float x = h * __bfloat162float(weight);
  const uint32_t pair = pack2(x, __shfl_down_sync(~0u, x, 1)), next = __shfl_down_sync(~0u, pair, 2);
  if (b.tid % 4 == 0 && owns<S>(b))
    publish(slots + packet_index(owned_row<S>(b) / 4, owned_column<S>(b)), pair, next, __float_as_uint(square),
            b.epoch);
}

// The MLP's rows of this block, in packets of 6: 8 threads make one, the last two of them the same as the sixth.
template <class S>
struct MlpPackets {
  static constexpr int kPackets = S::kMlpRows / kMlpPacket;  // of a column
  static_assert(kComputeThreads / 8 % kPackets == 0, "a thread's packet is the same one in every round");

  // This thread's row of packet `packet`, within the block.
  template <class B>
  static __device__ __forceinline__ int row(const B& b, int packet) {
    return packet * kMlpPacket + min(b.tid % 8, kMlpPacket - 1);
  }
  // Of gate in the matrix, whose rows alternate: gate, up.
  template <class B>
  static __device__ __forceinline__ int gate_row(const B& b) {
    return 2 * (b.block * S::kMlpRows + row(b, b.tid / 8 % kPackets));
  }

  // SiLU(gate) * up, out of partial sums.
  template <class B>
  static __device__ __forceinline__ void publish_gated(B& b, const float* partial, float gate_scale, float up_scale) {
    using M = Matvec<S::kGateUpRows, S::kHidden>;
    constexpr int kRounds = (kPackets * kColumns * 8 + kComputeThreads - 1) / kComputeThreads;
#pragma unroll
    for (int round = 0; round < kRounds; round++) {
      const int at = b.tid / 8 + round * (kComputeThreads / 8), column = at / kPackets, packet = at % kPackets,
                mine = row(b, packet);
      if (b.warp * 4 + round * (kComputeThreads / 8) >= kPackets * b.columns) break;
      const int c = min(column, b.columns - 1);
      const float inv = M::inverse_rms(partial, c);
      const float2 sums = M::template sum_as<float2>(partial, 2 * mine, c);
      const float gate = sums.x * inv * gate_scale, up = sums.y * inv * up_scale;
      const float y = gate / (1.f + __expf(-gate)) * up;
      const uint32_t pair = pack2(y, __shfl_down_sync(~0u, y, 1));
      const uint32_t second = __shfl_down_sync(~0u, pair, 2), third = __shfl_down_sync(~0u, pair, 4);
      const int p = b.block * kPackets + packet;
      if (b.tid % 8 == 0 && column < b.columns && p * kMlpPacket < S::kIntermediate)
        publish(b.x.mlp + packet_index(p, column), pair, second, third, b.epoch);
    }
  }
};

}  // namespace qmk
