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

// The scale of a row of E4M3 weights; 1 for bf16. `row` is clamped, because nobody owns the rows behind the last one.
// Ask for it before the wait for the matrix's input.
template <bool Fp8>
__device__ __forceinline__ float scale_of(const float* scales, int row, int rows) {
  if constexpr (Fp8) return scales[min(row, rows - 1)];
  else return 1.f;
}

// 4 values times the weights of a norm, as an mma step; adds their squares.
__device__ __forceinline__ uint2 normed(const float4& f, const bf16* weight, float& square) {
  const uint2 w = __ldg(reinterpret_cast<const uint2*>(weight));
  square += f.x * f.x + f.y * f.y + f.z * f.z + f.w * f.w;
  return make_uint2(pack2(f.x * low_bf16(w.x), f.y * high_bf16(w.x)), pack2(f.z * low_bf16(w.y), f.w * high_bf16(w.y)));
}
__device__ __forceinline__ float4 widened(uint2 v, float scale) {
  return make_float4(low_bf16(v.x) * scale, high_bf16(v.x) * scale, low_bf16(v.y) * scale, high_bf16(v.y) * scale);
}

// ---- a matrix's input
//
// An input has two halves. ask(step) sends for this lane's values of as many steps as are awaited at once.
// receive(asked, step, in) waits for them. In between, the lane fetches weights from the ring. So the way to L2 and
// back costs nothing if the values are already there.

template <int K>
constexpr int kAtOnce = steps_at_once(kSteps<K>);
template <int K>
using InputOf = Input<kAtOnce<K>>;

// Packets of this lane's columns on their way, `Count` a column.
template <int Count>
struct Packets {
  uint4 r[kColumnTiles * Count] = {};
  const Packet* of[kColumnTiles];
  uint32_t missing, epoch;

  __device__ __forceinline__ void ask(const Packet* slots, int first, const int (&column)[kColumnTiles],
                                      uint32_t of_epoch) {
    missing = 0, epoch = of_epoch;
#pragma unroll
    for (int c = 0; c < kColumnTiles; c++) {
      of[c] = slots + packet_index(first, column[c]);
      if (column[c] < 0) continue;
      missing |= ((1u << Count) - 1) << c * Count;
      if constexpr (!kAskEarly) continue;
#pragma unroll
      for (int i = 0; i < Count; i++) r[c * Count + i] = load_relaxed16(of[c] + i * kColumns * 4);
    }
  }
  __device__ __forceinline__ void receive(Patience& patience) {
    auto address = [&](int i) { return of[i / Count] + i % Count * kColumns * 4; };
    await_packets<kAskEarly>(r, missing, address, epoch, patience);
  }
};

// A vector of K values in packets of 4, one a step, with the squares of a residual's values.
template <int K, class B>
struct VectorInput {
  using Asked = Packets<kAtOnce<K>>;
  B& b;
  const Packet* slots;
  const int (&column)[kColumnTiles];
  uint32_t epoch;

  __device__ __forceinline__ Asked ask(int step) const {
    Asked asked;
    asked.ask(slots, (b.warp * kSteps<K> + step) * 4 + b.lane % 4, column, epoch);
    return asked;
  }
  __device__ __forceinline__ void receive(Asked& asked, int, InputOf<K>& in) const {
    asked.receive(b.patience);
#pragma unroll
    for (int c = 0; c < kColumnTiles; c++)
#pragma unroll
      for (int i = 0; i < kAtOnce<K>; i++) {
        const uint4& packet = asked.r[c * kAtOnce<K> + i];
        in.b[c][i] = make_uint2(packet.x, packet.y), in.square[c] += __uint_as_float(packet.z);
      }
  }
  __device__ __forceinline__ void await(int step, InputOf<K>& in) const {
    Asked asked = ask(step);
    receive(asked, step, in);
  }
};
template <int K, class B>
__device__ __forceinline__ VectorInput<K, B> vector_input(B& b, const Packet* slots, uint32_t epoch) {
  return {b, slots, b.column, epoch};
}

// The MLP's vector of K values in packets of 6; this lane's from packet `from` on, `Steps` of 4 values at once.
template <int K, int Steps, class B>
struct MlpInput {
  static constexpr int kPackets = K / kWarps / 4 / kMlpPacket;  // of a lane
  using Asked = Packets<Steps * 4 / kMlpPacket>;
  B& b;
  int from;

  __device__ __forceinline__ Asked ask(int step) const {
    Asked asked;
    asked.ask(b.x.mlp, (b.warp * kPackets + from + step * 4 / kMlpPacket) * 4 + b.lane % 4, b.column, b.epoch);
    return asked;
  }
  __device__ __forceinline__ void receive(Asked& asked, int, Input<Steps>& in) const {
    asked.receive(b.patience);
#pragma unroll
    for (int c = 0; c < kColumnTiles; c++) {
      auto word = [&](int n) {
        const uint4& packet = asked.r[c * (Steps * 4 / kMlpPacket) + n / 3];
        return n % 3 == 0 ? packet.x : n % 3 == 1 ? packet.y : packet.z;
      };
#pragma unroll
      for (int i = 0; i < Steps; i++) in.b[c][i] = make_uint2(word(2 * i), word(2 * i + 1));
    }
  }
};

// What only await(step, in) knows.
template <class Await>
struct LateInput {
  struct Asked {};
  Await await;

  __device__ __forceinline__ Asked ask(int) const { return {}; }
  template <class In>
  __device__ __forceinline__ void receive(Asked, int step, In& in) const {
    await(step, in);
  }
};
template <class Await>
LateInput(Await) -> LateInput<Await>;

// ---- a matrix

// An input times the rows of this block; afterwards the block's partial sums are in `partial` for everyone in it.
template <int Rows, int K, bool Fp8, class B, class Source>
__device__ __forceinline__ void matvec(B& b, float* partial, const Source& source) {
  b.refresh();
  Matvec<Rows, K, Fp8> m;
  InputOf<K> in{};
  m.template multiply<kSteps<K>>(b.ring, source, 0, b.warp, b.lane, b.patience, in);
  m.store(partial, b.columns, b.warp, b.lane);
  if constexpr (m.kParts > 1) {
#pragma unroll 1
    for (int part = 1; part < m.kParts; part++) {
      m.multiply_next(b.ring, b.warp, b.lane, b.patience, in);
      m.store(partial, b.columns, b.warp, b.lane, part);
    }
  }
  sync_compute<kComputeThreads>();
}

// The same for the MLP's output, which arrives in packets of 6: as many at once as registers hold. Each part of the
// rows reads it again.
template <int Rows, int K, bool Fp8, class B>
__device__ __forceinline__ void matvec_of_mlp(B& b, float* partial) {
  using M = Matvec<Rows, K, Fp8>;
  constexpr int kPackets = MlpInput<K, 1, B>::kPackets, kMany = kPackets < 8 ? kPackets : 8;  // of a lane; at once
  constexpr int kCount = kMany * kMlpPacket / 4, kAtOnceOf = steps_at_once(kCount);
#pragma unroll 1
  for (int part = 0; part < M::kParts; part++) {
    M m;
#pragma unroll
    for (int from = 0; from < kPackets; from += kMany) {
      Input<kAtOnceOf> in{};
      m.template multiply<kCount>(b.ring, MlpInput<K, kAtOnceOf, B>{b, from}, from * kMlpPacket / 4, b.warp, b.lane,
                                  b.patience, in);
    }
    m.store(partial, b.columns, b.warp, b.lane, part);
  }
  sync_compute<kComputeThreads>();
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

// Where this thread finds the sums of its row of a product [hidden], and where it publishes. It is worked out before
// the wait for the product's input: behind that wait, every block would wait for these instructions.
template <class S>
struct Place {
  int sums = -1, packet = -1;  // -1: it has none

  template <class B>
  __device__ __forceinline__ explicit Place(const B& b) {
    if (b.warp * 32 < S::kHiddenRows * b.columns && owns<S>(b)) {
      sums = owned_column<S>(b) * partial_stride(S::kHiddenRows) + b.tid % S::kHiddenRows;
      if (b.tid % 4 == 0) packet = packet_index(owned_row<S>(b) / 4, owned_column<S>(b));
    }
    asm volatile("" : "+r"(sums), "+r"(packet));  // here, and not where they are used
  }
};

// Of four neighbouring threads, for the first: their x, which is the residual h times the weight of a norm, as bf16,
// and the sum of the squares of h.
__device__ __forceinline__ uint3 residual_packet(float h, float x) {
  float square = h * h;
  const uint32_t pair = pack2(x, __shfl_down_sync(~0u, x, 1));
  square += __shfl_xor_sync(~0u, square, 1);
  const uint32_t next = __shfl_down_sync(~0u, pair, 2);
  square += __shfl_xor_sync(~0u, square, 2);
  return make_uint3(pair, next, __float_as_uint(square));
}

// Publish the residual h times the weight of the next norm. All rows share the factor 1 / rms, so it is applied to the
// sums behind that norm's matrix, and the input is rounded only once.
template <class S, class B>
__device__ __forceinline__ void publish_residual(const B& b, const Place<S>& place, Packet* slots, bf16 weight) {
  if (b.warp * 32 >= S::kHiddenRows * b.columns) return;
  const uint3 packet = residual_packet(b.residual, b.residual * __bfloat162float(weight));
  if (place.packet >= 0) publish(slots + place.packet, packet.x, packet.y, packet.z, b.epoch);
}
// The same with this block's product added to the residual first.
template <class S, class B>
__device__ __forceinline__ void add_and_publish(B& b, const Place<S>& place, const float* partial, float scale,
                                                Packet* slots, bf16 weight) {
  if (place.sums >= 0) b.residual += Matvec<S::kHiddenRows, 256>::sum(partial + place.sums, 0, 0) * scale;
  publish_residual<S>(b, place, slots, weight);
}

// SiLU(gate) * up of a row, out of its sums of gate and up.
__device__ __forceinline__ float gated(float2 sums, float inv, float gate_scale, float up_scale) {
  const float gate = sums.x * inv * gate_scale, up = sums.y * inv * up_scale;
  return gate / (1.f + __expf(-gate)) * up;
}

// The MLP's rows of this block, in packets of 6. Eight threads make one; the last two do the same as the sixth.
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

  // SiLU(gate) * up of a packet, out of partial sums, of all columns.
  template <class B>
  static __device__ __forceinline__ void publish_gated(B& b, const float* partial, float gate_scale, float up_scale) {
    using M = Matvec<S::kGateUpRows, S::kHidden>;
    constexpr int kRounds = (kPackets * kColumns * 8 + kComputeThreads - 1) / kComputeThreads;
#pragma unroll
    for (int round = 0; round < kRounds; round++) {
      const int at = b.tid / 8 + round * (kComputeThreads / 8), column = at / kPackets, packet = at % kPackets,
                packet_row = row(b, packet);
      if (b.warp * 4 + round * (kComputeThreads / 8) >= kPackets * b.columns) break;
      const int c = min(column, b.columns - 1);
      const float inv = M::inverse_rms(partial, c);
      const float y = gated(M::template sum_as<float2>(partial, 2 * packet_row, c), inv, gate_scale, up_scale);
      const uint32_t pair = pack2(y, __shfl_down_sync(~0u, y, 1));
      const uint32_t second = __shfl_down_sync(~0u, pair, 2), third = __shfl_down_sync(~0u, pair, 4);
      const int p = b.block * kPackets + packet;
      if (b.tid % 8 == 0 && column < b.columns && p * kMlpPacket < S::kIntermediate)
        publish(b.x.mlp + packet_index(p, column), pair, second, third, b.epoch);
    }
  }
};

}  // namespace qmk
