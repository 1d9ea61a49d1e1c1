// A frame of 16 codes, as the blocks of the persistent kernel compute it.
//
// input row -> talker (28 layers) -> head -> code 0 -> code predictor (16 rows, 5 layers each, 15 heads) -> codes 1..15
// -> sum of the 16 embeddings + text row -> next input row. No host in between. The code predictor reads the talker's
// hidden state at position 0, code 0's embedding at position 1, then every code it drew. Up to 4 sequences take the
// first two positions as two columns of one pass.
#pragma once
#include "draw.cuh"

namespace qmk {
namespace {

// This block's shared memory besides the ring.
template <class Dims>
struct Scratch {
  using T = typename Dims::Talker;
  using P = typename Dims::Predictor;
  static constexpr int kWide = max_of(max_of(T::kGateUpRows, T::kQkvRows), max_of(P::kGateUpRows, P::kQkvRows));
  static constexpr int kHeads = max_of(block_rows(Dims::kCodecVocab), block_rows(Dims::kCodes));
  union {
    alignas(16) float wide[partial_size(max_of(kWide, kHeads))];  // partial sums: qkv, gate and up, heads
    AttentionShares<T::kGroup> attention_shares[kShares];
  };
  alignas(16) float narrow[partial_size(max_of(T::kHiddenRows, P::kHiddenRows))];  // o, down, adapter
  AttentionScratch attention;
  DrawScratch draw;
  float hidden[kColumns * T::kHiddenRows];  // of the talker, this block's rows
  alignas(16) bf16 frame_kv[kFrameKvShared ? P::kMaxLayers : 0][2][kGroups][kHeadDim];
};

// What a compute thread carries through the frame.
template <class Dims>
struct Block {
  Scratch<Dims>& s;
  Ring ring;
  Patience patience;
  const Exchange& x;
  uint32_t epoch;
  int tid, warp, lane, block;
  unsigned long long* stage_ns;  // null except in one thread of a timed launch
  unsigned long long since;
  int columns;               // of the pass at hand
  int column[kColumnTiles];  // those whose input this lane feeds to the mma, -1: none
  float residual;            // see owned_row

  // Who this thread is, anew: called where a phase begins (see thread_index).
  __device__ __forceinline__ void refresh() {
    tid = thread_index(), block = block_index(), warp = tid / 32, lane = tid % 32;
#pragma unroll
    for (int t = 0; t < kColumnTiles; t++) column[t] = lane / 4 + t * 8 < columns ? lane / 4 + t * 8 : -1;
  }
  __device__ __forceinline__ void set_columns(int n) {
    columns = n;
    refresh();
  }
  __device__ __forceinline__ void mark(int stage) {
    if (!kStageClock || stage_ns == nullptr) return;
    const unsigned long long now = global_timer();
    stage_ns[stage] += now - since;
    since = now;
  }
};

template <class Dims>
struct Frame {
  using T = typename Dims::Talker;
  using P = typename Dims::Predictor;
  using Thread = Block<Dims>;
  static constexpr int kHeadRows = block_rows(Dims::kCodecVocab), kCodeRows = block_rows(Dims::kCodes);
  static constexpr int kRingStages =
      (kSharedBytes - 512 - static_cast<int>(sizeof(Scratch<Dims>))) / (kStageBytes + 16);
  static constexpr int kBytes =
      round_up(kRingStages * (kStageBytes + 16), 128) + static_cast<int>(sizeof(Scratch<Dims>));
  // With fewer stages than producers, one could be a round ahead of another and take a stage that is not free.
  static_assert(kRingStages >= max_of(2, kProducers) && kBytes <= kSharedBytes);
  static_assert(max_of(kHeadRows, kCodeRows) * kColumns <= kComputeThreads, "one thread finishes a row of a head");

  // Rows of one sequence that the pass at a position takes.
  static __device__ __forceinline__ int rows_at(int position, int sequences) {
    return !kWide && position == 0 && 2 * sequences <= kColumns ? 2 : 1;
  }

  // The talker's keys of a layer and a key-value head, page 0.
  static __device__ __forceinline__ bf16* layer_kv(const FrameParams& p, int index, int kv_head) {
    return p.kv + static_cast<size_t>(index * 2 * T::kKvHeads + kv_head) * kPagePositions * kHeadDim;
  }
  static __device__ __forceinline__ size_t page_stride(const FrameParams& p) {
    return static_cast<size_t>(p.talker.layers) * 2 * T::kKvHeads * kPagePositions * kHeadDim;
  }

  static __device__ void produce(const FrameParams& p, Ring& ring, Patience& patience, int block, int lane) {
    auto copy = [&](const uint8_t* ribbon, int stages, const Pace& pace, int pinned = 0) {
      ring.copy(ribbon + static_cast<size_t>(block) * stages * kStageBytes, stages, pinned, pace, patience, lane);
    };
    constexpr int head = Matvec<kHeadRows, T::kHidden, kFp8CodecHead>::stages(kSteps<T::kHidden>);
    constexpr int code = Matvec<kCodeRows, P::kHidden, kFp8LmHeads>::stages(kSteps<P::kHidden>);
    constexpr int qkv = Matvec<T::kQkvRows, T::kHidden, T::kFp8>::stages(kSteps<T::kHidden>);
    const Assignment mine = assignment(block, p.columns);
    const Context<T> context(mine, p.column, p.columns);
    const uint8_t* ribbon =
        p.talker.ribbon + static_cast<size_t>(block) * p.talker.layers * kLayerStages<T> * kStageBytes;
    for (int index = 0; index < p.talker.layers; index++) {
      ribbon = ring.copy(ribbon, qkv, 0, p.talker_pace, patience, lane);
      copy_context<T>(ring, context, p.column[mine.column].pages, layer_kv(p, index, mine.kv_head), page_stride(p),
                      p.talker_pace, patience, lane);
      ribbon = ring.copy(ribbon, kLayerStages<T> - qkv, 0, p.talker_pace, patience, lane);
    }
    if (p.prefill) return;
    copy(p.codec_head, head, p.predictor_pace);
    for (int position = 0; position < kGroups;) {
      if constexpr (Dims::kAdapter)
        copy(p.adapter, Matvec<P::kHiddenRows, T::kHidden>::stages(kSteps<T::kHidden>), p.predictor_pace);
      copy(p.predictor.ribbon, p.predictor.layers * kLayerStages<P>, p.predictor_pace, p.pinned);
      position += rows_at(position, p.columns);
      if (position > 1)
        copy(p.lm_heads + static_cast<size_t>(position - 2) * kBlocks * code * kStageBytes, code, p.predictor_pace);
    }
  }

  // What the lanes that feed a column to the mma know of it.
  template <class V>
  static __device__ __forceinline__ V of_column(const V (&value)[kColumnTiles], int column) {
    V v = __shfl_sync(~0u, value[0], column % 8 * 4);
    if constexpr (kColumnTiles > 1) {
      const V other = __shfl_sync(~0u, value[kColumnTiles - 1], column % 8 * 4);
      v = column < 8 ? v : other;
    }
    return v;
  }

  // Finish the rows of a head, whose sums are in s.wide, one thread a row. Then draw every sequence's code. `drawn`:
  // the codes of the sequences whose input this lane feeds to the mma. `noise`, `scale`: of this thread's row.
  template <int Rows, int K, int N>
  static __device__ __forceinline__ void choose(const FrameParams& p, Thread& b, int group, float noise, float scale,
                                                int (&drawn)[kColumnTiles]) {
    using M = Matvec<Rows, K>;
    b.refresh();
    const int id = b.block * Rows + b.tid % Rows, mine = b.tid / Rows;
    if (mine < b.columns && id < N) {
      const Column& c = p.column[mine];
      const DrawParams& d = group ? c.draw : c.draw0;
      float logit = M::sum(b.s.wide, b.tid % Rows, mine) * M::inverse_rms(b.s.wide, mine) * scale;
      if (p.logits_out) p.logits_out[(mine * kGroups + group) * Dims::kCodecVocab + id] = logit;
      if (!(fabsf(logit) < INFINITY)) p.codes[mine * kResultWords + kGroups] = 1;
      if (group == 0) logit = code0_rule(p, c, id, logit);
      if (d.sample) logit = __fmul_rn(logit, d.inverse_temperature);
      publish(b.x.logits + mine * Dims::kCodecVocab + id, __float_as_uint(logit),
              __float_as_uint(d.sample ? __fadd_rn(logit, noise) : logit), 0, b.epoch);
    }
    b.mark(kHead);
    b.refresh();
    constexpr int kApart = kBlocks / (8 * kColumnTiles);
    const int chooser = b.block / kApart;
    if (b.block % kApart == 0 && chooser < b.columns) {
      const Column& c = p.column[chooser];
      Candidates<N> candidates;
      candidates.await(b, b.x.logits + chooser * Dims::kCodecVocab);
      const int code = draw(b, candidates, group ? c.draw : c.draw0);
      // Every block is about to read the code's embedding. It goes to L2 while the code goes to them.
      if (b.tid < T::kHidden / 64) prefetch_l2(embedding(p, group, code) + b.tid * 64);
      if (b.tid < kBlocks) publish(b.x.drawn + b.tid * kColumns + chooser, __int_as_float(code), b.epoch);
      if (b.tid == 0) {
        p.codes[chooser * kResultWords + group] = code;
        c.recent[c.frame % kRecentFrames * kGroups + group] = code;
        if (group == 0 && code != p.eos_id) c.seen[code] = 1;
      }
    }
#pragma unroll
    for (int t = 0; t < kColumnTiles; t++) {
      uint32_t code = 0, polls = 0;
      if (b.column[t] >= 0) {
        const Tagged* slot = b.x.drawn + b.block * kColumns + b.column[t];
        for (;;) {
          const uint2 r = load_relaxed8(slot);
          code = r.x;
          if (r.y == b.epoch || b.patience.spent(polls)) break;
        }
      }
      drawn[t] = min(code, static_cast<uint32_t>(N - 1));
    }
    __syncwarp();
    b.mark(kDraw);
  }

  // Of the row that this thread finishes in the head of a group.
  template <int Rows>
  static __device__ __forceinline__ float noise_of(const FrameParams& p, const Thread& b, int group) {
    const int mine = b.tid / Rows;
    if (mine >= b.columns) return 0.f;
    const Column& c = p.column[mine];
    return (group ? c.draw : c.draw0).sample ? gumbel(c.seed, c.frame, group, b.block * Rows + b.tid % Rows) : 0.f;
  }

  // First value of packet i of this lane's share of a vector of K values.
  template <int K>
  static __device__ __forceinline__ int value_index(const Thread& b, int i) {
    return ((b.warp * kSteps<K> + i) * 4 + b.lane % 4) * 4;
  }
  // 4 values times the weights of a norm, as an mma step; adds their squares.
  static __device__ __forceinline__ uint2 normed(const float4& f, const bf16* weight, float& square) {
    const uint2 w = __ldg(reinterpret_cast<const uint2*>(weight));
    square += f.x * f.x + f.y * f.y + f.z * f.z + f.w * f.w;
    return make_uint2(pack2(f.x * low_bf16(w.x), f.y * high_bf16(w.x)),
                      pack2(f.z * low_bf16(w.y), f.w * high_bf16(w.y)));
  }
  static __device__ __forceinline__ float4 widened(uint2 v, float scale) {
    return make_float4(low_bf16(v.x) * scale, high_bf16(v.x) * scale, low_bf16(v.y) * scale, high_bf16(v.y) * scale);
  }

  static __device__ __forceinline__ const bf16* embedding(const FrameParams& p, int group, int code) {
    return group ? p.code_embedding + (static_cast<size_t>(group - 1) * Dims::kCodes + code) * T::kHidden
                 : p.code0_embedding + static_cast<size_t>(code) * T::kHidden;
  }

  // What comes into a layer of a stack: first(step, in), or what the layer before it left.
  template <class S, class First>
  struct LayerInput {
    using Vector = VectorInput<S::kHidden, Thread>;
    Vector left;
    int index;
    const First& first;

    __device__ __forceinline__ typename Vector::Asked ask(int step) const {
      if (index) return left.ask(step);
      return typename Vector::Asked{};
    }
    __device__ __forceinline__ void receive(typename Vector::Asked& asked, int step, InputOf<S::kHidden>& in) const {
      if (index) left.receive(asked, step, in);
      else first(step, in);
    }
  };
  template <class S, class First>
  static __device__ __forceinline__ LayerInput<S, First> layer_input(Thread& b, int index, const First& first) {
    return {vector_input<S::kHidden>(b, b.x.h_mlp, b.epoch - 1), index, first};
  }

  // Leaves the residual behind the last layer, ready for the final norm's matrix, in x.h_mlp.
  static __device__ __forceinline__ void talk(const FrameParams& p, Thread& b) {
    auto first_input = [&](int from, InputOf<T::kHidden>& in) {
#pragma unroll
      for (int t = 0; t < kColumnTiles; t++) {
        if (b.column[t] < 0) continue;
        const Column& c = p.column[b.column[t]];
#pragma unroll
        for (int i = 0; i < kAtOnce<T::kHidden>; i++) {
          const int at = value_index<T::kHidden>(b, from + i);
          in.b[t][i] = normed(*reinterpret_cast<const float4*>(c.row + at), p.talker.input_norm + at, in.square[t]);
        }
      }
    };
    if (owns<T>(b)) b.residual = p.column[owned_column<T>(b)].row[owned_row<T>(b)];
    const Assignment mine = assignment(b.block, b.columns);
    if (mine.column < b.columns && b.tid < kHeadDim) {  // the zeros behind this launch's keys and values
      const Column& c = p.column[mine.column];
      reinterpret_cast<uint32_t*>(b.s.attention.fresh[c.position - c.first_fresh + 1])[b.tid] = 0;
    }
    for (int index = 0; index < p.talker.layers; index++) {
      b.epoch++;
      const bool last = index + 1 == p.talker.layers;
      layer<T>(b, p.talker, p.talker_scales, index, layer_input<T>(b, index, first_input),
               last ? p.talker.norm : p.talker.input_norm + (index + 1) * T::kHidden, [&] {
                 attend_pages<T>(b, p.talker, index, mine, p.column, layer_kv(p, index, mine.kv_head), page_stride(p));
               });
    }
  }

  // Send the embeddings of the last codes, or at first the talker's hidden state, through the layers. Up to two rows a
  // sequence. inverse: 1 / rms, which the talker's x.h_mlp still lacks. code: the last one. Both are of the sequences
  // whose input this lane feeds to the mma when every sequence has one row.
  static __device__ __forceinline__ void predict(const FrameParams& p, Thread& b, int position, int rows,
                                                 const float (&inverse)[kColumnTiles],
                                                 const int (&code)[kColumnTiles]) {
    const int sequences = p.columns, quad = b.lane / 4;
    b.set_columns(sequences * rows);
    const int both = rows - 1;                               // a shift by it divides by rows
    const bool first = position == 0 && (quad & both) == 0;  // this lane's rows are hidden states
    const int group = max(position - 1, 0);                  // of the last code
    int row_code[kColumnTiles], hidden[kColumnTiles];
    float mine[kColumnTiles];
#pragma unroll
    for (int t = 0; t < kColumnTiles; t++) {
      const int from = min((quad + t * 8) >> both, sequences - 1);
      row_code[t] = of_column(code, from), mine[t] = of_column(inverse, from);
      hidden[t] = first && b.column[t] >= 0 ? (quad + t * 8) >> both : -1;
    }
    auto raw_input = [&](int at, InputOf<T::kHidden>& in) {
      if (position == 0) VectorInput<T::kHidden, Thread>{b, b.x.h_mlp, hidden, p.epoch + p.talker.layers}.await(at, in);
      if (first) return;
#pragma unroll
      for (int t = 0; t < kColumnTiles; t++) {
        if (b.column[t] < 0) continue;
        const bf16* row = embedding(p, group, row_code[t]);
#pragma unroll
        for (int i = 0; i < kAtOnce<T::kHidden>; i++)
          in.b[t][i] = *reinterpret_cast<const uint2*>(row + value_index<T::kHidden>(b, at + i));
      }
    };
    const int owned = min(owned_column<P>(b), b.columns - 1), sequence = owned >> both;
    const int its_code = of_column(code, sequence);
    const float its_inverse = of_column(inverse, sequence);
    const bool owned_first = position == 0 && (owned & both) == 0;

    if constexpr (Dims::kAdapter) {
      matvec<P::kHiddenRows, T::kHidden, false>(b, b.s.narrow, LateInput{raw_input});
      if (owns<P>(b)) {
        const float y = Matvec<P::kHiddenRows, T::kHidden>::sum(b.s.narrow, b.tid % P::kHiddenRows, owned);
        b.residual = fmaf(y, owned_first ? its_inverse : 1.f, p.adapter_bias[owned_row<P>(b)]);
      }
      publish_residual<P>(b, Place<P>(b), b.x.adapted, owned_value<P>(b, p.predictor.input_norm));
    } else if (owns<P>(b)) {
      b.residual = owned_first ? b.s.hidden[sequence * P::kHiddenRows + b.tid % P::kHiddenRows]
                               : __bfloat162float(owned_value<P>(b, embedding(p, group, its_code)));
    }
    auto first_input = [&](int from, InputOf<P::kHidden>& in) {
      if constexpr (Dims::kAdapter) {
        vector_input<P::kHidden>(b, b.x.adapted, b.epoch - 1).await(from, in);
      } else {
        InputOf<P::kHidden> raw{};
        raw_input(from, raw);
#pragma unroll
        for (int t = 0; t < kColumnTiles; t++) {
          if (b.column[t] < 0) continue;
#pragma unroll
          for (int i = 0; i < kAtOnce<P::kHidden>; i++)
            in.b[t][i] = normed(widened(raw.b[t][i], first ? mine[t] : 1.f),
                                p.predictor.input_norm + value_index<P::kHidden>(b, from + i), in.square[t]);
        }
      }
    };
    const Assignment at = assignment(b.block, sequences);
    for (int index = 0; index < p.predictor.layers; index++) {
      b.epoch++;
      const bool last = index + 1 == p.predictor.layers;
      layer<P>(b, p.predictor, p.predictor_scales, index, layer_input<P>(b, index, first_input),
               last ? p.predictor.norm : p.predictor.input_norm + (index + 1) * P::kHidden, [&] {
                 auto* kv = kFrameKvShared ? b.s.frame_kv[index]
                                           : reinterpret_cast<bf16(*)[kGroups][kHeadDim]>(p.frame_kv) +
                                                 (b.block * P::kMaxLayers + index) * 2;
                 attend_frame<P>(b, p.predictor, index, at, sequences, rows, position, kv);
               });
    }
  }

  static __device__ __forceinline__ void compute(const FrameParams& p, Thread& b) {
    const int sequences = p.columns, quad = b.lane / 4;
    b.set_columns(sequences);
    talk(p, b);
    if (p.prefill) return;

    using Head = Matvec<kHeadRows, T::kHidden>;
    float noise = noise_of<kHeadRows>(p, b, 0);
    const float head_scale =
        scale_of<kFp8CodecHead>(p.codec_head_scales, b.block * kHeadRows + b.tid % kHeadRows, Dims::kCodecVocab);
    matvec<kHeadRows, T::kHidden, kFp8CodecHead>(b, b.s.wide, vector_input<T::kHidden>(b, b.x.h_mlp, b.epoch));
    float inverse[kColumnTiles];
#pragma unroll
    for (int t = 0; t < kColumnTiles; t++) inverse[t] = Head::inverse_rms(b.s.wide, min(quad + t * 8, sequences - 1));
    const int owned = min(owned_column<T>(b), sequences - 1);
    if (owns<T>(b)) {
      const float h =
          b.residual * Head::inverse_rms(b.s.wide, owned) * __bfloat162float(owned_value<T>(b, p.talker.norm));
      b.s.hidden[b.tid] = h;
      if (p.hidden_out) p.hidden_out[owned * T::kHidden + owned_row<T>(b)] = h;
    }
    sync_compute<kComputeThreads>();  // s.hidden is there, and all have read the sums of squares
    int code[kColumnTiles];
    choose<kHeadRows, T::kHidden, Dims::kCodecVocab>(p, b, 0, noise, head_scale, code);
    if (b.stage_ns) b.stage_ns += kStages;

    float sum = __bfloat162float(owned_value<T>(b, embedding(p, 0, of_column(code, owned))));
    for (int position = 0; position < kGroups;) {
      const int rows = rows_at(position, sequences);
      predict(p, b, position, rows, inverse, code);
      position += rows;
      b.set_columns(sequences);
      if (position == 1) {                // nothing is drawn behind the hidden state alone
        sync_compute<kComputeThreads>();  // all are done with s.narrow
        continue;
      }
      const int group = position - 1;
      noise = noise_of<kCodeRows>(p, b, group);
      int last[kColumnTiles];  // rows of these sequences
#pragma unroll
      for (int t = 0; t < kColumnTiles; t++) last[t] = b.column[t] < 0 ? -1 : b.column[t] * rows + rows - 1;
      const float code_scale = scale_of<kFp8LmHeads>(p.lm_head_scales + (group - 1) * Dims::kCodes,
                                                     b.block * kCodeRows + b.tid % kCodeRows, Dims::kCodes);
      matvec<kCodeRows, P::kHidden, kFp8LmHeads>(b, b.s.wide,
                                                 VectorInput<P::kHidden, Thread>{b, b.x.h_mlp, last, b.epoch});
      choose<kCodeRows, P::kHidden, Dims::kCodes>(p, b, group, noise, code_scale, code);
      sum += __bfloat162float(owned_value<T>(b, embedding(p, group, of_column(code, owned))));
    }
    if (owns<T>(b)) {
      const Column& c = p.column[owned];
      c.next_row[owned_row<T>(b)] = sum + __bfloat162float(c.text_row[owned_row<T>(b)]);
    }
  }
};

}  // namespace
}  // namespace qmk
