// One decoder layer for up to 8 or 16 columns: the page to read first. Talker and code predictor run the same code.
//
// Every block runs every line. A block owns a few rows of each matrix and keeps its rows of the residual stream, fp32, in
// registers; what it computes it publishes, and what it needs next it awaits, so a wait is at once the exchange and the
// barrier. Two buffers of partial sums take turns, so that one barrier inside the block per matrix is enough.
#pragma once
#include "attention.cuh"
#include "matvec.cuh"

namespace qmk {

// A block's stages of one layer: qkv, o, gate and up, down.
template <class S>
constexpr int kLayerStages = Matvec<S::kQkvRows, S::kHidden, S::kFp8>::stages(kSteps<S::kHidden>) +
                             Matvec<S::kHiddenRows, S::kQ, S::kFp8>::stages(kSteps<S::kQ>) +
                             Matvec<S::kGateUpRows, S::kHidden, S::kFp8>::stages(kSteps<S::kHidden>) +
                             Matvec<S::kHiddenRows, S::kIntermediate, S::kFp8>::stages(kSteps<S::kIntermediate>);

// A share of a matrix's input.
template <int K>
constexpr int kAtOnce = steps_at_once(kSteps<K>);
template <int K>
using InputOf = Input<kAtOnce<K>>;

// Packets of this lane's columns, `Count` a column one behind the other from packet `first` on.
template <int Count, class B>
__device__ __forceinline__ void await_columns(B& b, uint4 (&r)[kColumnTiles * Count], const Packet* slots, int first, const int (&column)[kColumnTiles], uint32_t epoch) {
  const Packet* of[kColumnTiles];
  uint32_t missing = 0;
#pragma unroll
  for (int c = 0; c < kColumnTiles; c++) {
    of[c] = slots + packet_index(first, column[c]);
    missing |= column[c] < 0 ? 0 : ((1u << Count) - 1) << c * Count;
  }
  await_packets(r, missing, [&](int i) { return of[i / Count] + i % Count * kColumns * 4; }, epoch, b.patience);
}

template <int K, class B>
__device__ __forceinline__ void await_input(B& b, const Packet* slots, const int (&column)[kColumnTiles], uint32_t epoch, int from, InputOf<K>& in) {
  constexpr int kCount = kAtOnce<K>;  // packets of 4 values: one a step
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

// The input that `await(from, in)` brings, from that step on, times the rows of this block; afterwards the block's partial
// sums are in `partial` for everyone in it.
template <int Rows, int K, bool Fp8, class B, class Await>
__device__ __forceinline__ void matvec(B& b, float* partial, Await await) {
  b.refresh();
  Matvec<Rows, K, Fp8> m;
  auto await_or_not = [&](int from, auto& in) { if constexpr (!kWeightsAlone) await(from, in); };
  m.template multiply<kSteps<K>>(b.ring, await_or_not, 0, b.warp, b.lane, b.patience);
  if constexpr (kWeightsAlone) return;
  m.store(partial, b.columns, b.warp, b.lane);
  sync_compute<kComputeThreads>();
}

// Thread t owns row t % S::kHiddenRows of this block's share of the residual stream, of column t / S::kHiddenRows.
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
// One of these rows' value of a vector [hidden]. Converted where it is used: the load must not stall what comes between.
template <class S, class B>
__device__ __forceinline__ bf16 owned_value(const B& b, const bf16* vector) {
  return vector[min(owned_row<S>(b), S::kHidden - 1)];
}

// What E4M3 rows of a matrix lack, 1 for bf16; `row` is clamped, the rows behind the last one are nobody's. To be asked
// for before the wait for the matrix's input.
template <bool Fp8>
__device__ __forceinline__ float scale_of(const float* scales, int row, int rows) {
  if constexpr (Fp8) return scales[min(row, rows - 1)];
  else return 1.f;
}

// Hand round the residual h, times the weight of the norm that comes next. 1 / rms is the same factor for all rows, so it
// is applied to the sums behind that norm's matrix and the input is rounded once only.
template <class S, class B>
__device__ __forceinline__ void publish_residual(const B& b, Packet* slots, float h, bf16 weight) {
  if (b.warp * 32 >= S::kHiddenRows * b.columns) return;
  float square = h * h;
  square += __shfl_xor_sync(~0u, square, 1);
  square += __shfl_xor_sync(~0u, square, 2);
  const float x = h * __bfloat162float(weight);
  const uint32_t pair = pack2(x, __shfl_down_sync(~0u, x, 1)), next = __shfl_down_sync(~0u, pair, 2);
  if (b.tid % 4 == 0 && owns<S>(b))
    publish(slots + packet_index(owned_row<S>(b) / 4, owned_column<S>(b)), pair, next, __float_as_uint(square), b.epoch);
}

// await(from, in): waits for the residual before the layer, normed but for 1 / rms; b.residual: this thread's row of it. attend()
// publishes x.attn. next_norm: [hidden], of whoever reads x.h_mlp. scales: [layers][S::kScales], of E4M3 weights.
template <class S, class B, class Await, class Attend>
__device__ __forceinline__ void layer(B& b, const StackWeights& w, const float* scales, int index, Await await, const bf16* next_norm, Attend attend) {
  if constexpr (kWeightsAlone) {
    matvec<S::kQkvRows, S::kHidden, S::kFp8>(b, b.s.wide, await);
    matvec<S::kHiddenRows, S::kQ, S::kFp8>(b, b.s.narrow, await);
    matvec<S::kGateUpRows, S::kHidden, S::kFp8>(b, b.s.wide, await);
    matvec<S::kHiddenRows, S::kIntermediate, S::kFp8>(b, b.s.narrow, await);
    return;
  }
  b.refresh();
  scales += S::kFp8 ? index * S::kScales : 0;
  const bf16 post_weight = owned_value<S>(b, w.post_norm + index * S::kHidden), next_weight = owned_value<S>(b, next_norm);

  static_assert(kComputeThreads % S::kQkvRows == 0);
  const float qkv_scale = scale_of<S::kFp8>(scales, b.block * S::kQkvRows + b.tid % S::kQkvRows, S::kQkv);
  matvec<S::kQkvRows, S::kHidden, S::kFp8>(b, b.s.wide, await);
  for (int i = b.tid; i < S::kQkvRows * b.columns; i += kComputeThreads) {
    using M = Matvec<S::kQkvRows, S::kHidden>;
    const int row = b.block * S::kQkvRows + i % S::kQkvRows, column = i / S::kQkvRows;
    const float y = M::sum(b.s.wide, i % S::kQkvRows, column) * M::inverse_rms(b.s.wide, column) * qkv_scale;
    if (row < S::kQkv) publish(b.x.qkv + column * S::kQkv + row, y, b.epoch);
  }

  b.mark(kQkv);
  b.refresh();
  attend();

  b.mark(kAttention);
  const float out_scale = scale_of<S::kFp8>(scales + S::kQkv, owned_row<S>(b), S::kHidden);
  matvec<S::kHiddenRows, S::kQ, S::kFp8>(b, b.s.narrow, [&](int from, auto& in) { await_input<S::kQ>(b, b.x.attn, b.column, b.epoch, from, in); });
  if (owns<S>(b)) b.residual += Matvec<S::kHiddenRows, S::kQ>::sum(b.s.narrow, b.tid % S::kHiddenRows, owned_column<S>(b)) * out_scale;
  publish_residual<S>(b, b.x.h_attn, b.residual, post_weight);

  b.mark(kOut);
  constexpr int kPackets = S::kMlpRows / kMlpPacket;  // of a column; 8 threads make one
  static_assert(kComputeThreads / 8 % kPackets == 0, "a thread's packet is the same one in every round");
  const int mlp_row = b.tid / 8 % kPackets * kMlpPacket + min(b.tid % 8, kMlpPacket - 1), gate_up = 2 * (b.block * S::kMlpRows + mlp_row);
  const float gate_scale = scale_of<S::kFp8>(scales + S::kQkv + S::kHidden, gate_up, 2 * S::kIntermediate);
  const float up_scale = scale_of<S::kFp8>(scales + S::kQkv + S::kHidden, gate_up + 1, 2 * S::kIntermediate);
  matvec<S::kGateUpRows, S::kHidden, S::kFp8>(b, b.s.wide, [&](int from, auto& in) { await_input<S::kHidden>(b, b.x.h_attn, b.column, b.epoch, from, in); });
  {  // rows alternate: gate, up
    using M = Matvec<S::kGateUpRows, S::kHidden>;
    constexpr int kRounds = (kPackets * kColumns * 8 + kComputeThreads - 1) / kComputeThreads;
#pragma unroll
    for (int round = 0; round < kRounds; round++) {
      const int at = b.tid / 8 + round * (kComputeThreads / 8), column = at / kPackets, packet = at % kPackets;
      const int row = packet * kMlpPacket + min(b.tid % 8, kMlpPacket - 1);
      if (b.warp * 4 + round * (kComputeThreads / 8) >= kPackets * b.columns) break;
      const int c = min(column, b.columns - 1);
      const float inv = M::inverse_rms(b.s.wide, c);
      const float2 sums = M::template sum_as<float2>(b.s.wide, 2 * row, c);
      const float gate = sums.x * inv * gate_scale, up = sums.y * inv * up_scale;
      const float y = gate / (1.f + __expf(-gate)) * up;
      const uint32_t pair = pack2(y, __shfl_down_sync(~0u, y, 1));
      const uint32_t second = __shfl_down_sync(~0u, pair, 2), third = __shfl_down_sync(~0u, pair, 4);
      const int p = b.block * kPackets + packet;
      if (b.tid % 8 == 0 && column < b.columns && p * kMlpPacket < S::kIntermediate)
        publish(b.x.mlp + packet_index(p, column), pair, second, third, b.epoch);
    }
  }

  b.mark(kGateUp);
  {
    b.refresh();
    const float down_scale = scale_of<S::kFp8>(scales + S::kQkv + S::kHidden + 2 * S::kIntermediate, owned_row<S>(b), S::kHidden);
    Matvec<S::kHiddenRows, S::kIntermediate, S::kFp8> m;
    constexpr int kPackets = S::kIntermediate / kWarps / 4 / kMlpPacket, kMany = kPackets < 8 ? kPackets : 8;  // registers
#pragma unroll
    for (int from = 0; from < kPackets; from += kMany) {
      constexpr int kCount = kMany * kMlpPacket / 4, kEach = steps_at_once(kCount), kFew = kEach * 4 / kMlpPacket;
      m.template multiply<kCount>(b.ring, [&](int step, Input<kEach>& in) {
        uint4 r[kColumnTiles * kFew] = {};
        await_columns<kFew>(b, r, b.x.mlp, (b.warp * kPackets + from + step * 4 / kMlpPacket) * 4 + b.lane % 4, b.column, b.epoch);
#pragma unroll
        for (int c = 0; c < kColumnTiles; c++) {
          auto word = [&](int n) { return n % 3 == 0 ? r[c * kFew + n / 3].x : n % 3 == 1 ? r[c * kFew + n / 3].y : r[c * kFew + n / 3].z; };
#pragma unroll
          for (int i = 0; i < kEach; i++) in.b[c][i] = make_uint2(word(2 * i), word(2 * i + 1));
        }
      }, from * kMlpPacket / 4, b.warp, b.lane, b.patience);
    }
    m.store(b.s.narrow, b.columns, b.warp, b.lane);
    sync_compute<kComputeThreads>();
    if (owns<S>(b)) b.residual += m.sum(b.s.narrow, b.tid % S::kHiddenRows, owned_column<S>(b)) * down_scale;
    publish_residual<S>(b, b.x.h_mlp, b.residual, next_weight);
  }
  b.mark(kDown);
}

}  // namespace qmk
