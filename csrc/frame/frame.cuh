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
  float inverse[kColumns];  // 1 / rms of each sequence, which the talker's x.h_mlp lacks
  // This block's rows of the talker's hidden state; from code 0's turn in the code predictor on, of the sum of the
  // embeddings so far, each its thread's own.
  float hidden[kColumns * T::kHiddenRows];
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

  // Whether the pass at a position looks up what layer 0 of the code predictor makes of its input.
  static __device__ __forceinline__ bool looks_up(const FrameParams& p, int position) {
    return p.tables.heads && position >= kFirstLookedUp && !p.tables.filled;
  }
  // Of a table, its row for the code of a group.
  static __device__ __forceinline__ size_t table_row(int group, int code) {
    return static_cast<size_t>(group + 1 - kFirstLookedUp) * Dims::kCodes + code;
  }
  static __device__ __forceinline__ bf16* table_heads(const FrameParams& p, int group, int code) {
    return p.tables.heads + table_row(group, code) * (P::kQkv + P::kQ);
  }

  static __device__ __forceinline__ float* adapted(const FrameParams& p, const Thread& b, int group, int code) {
    return p.tables.adapted + table_row(group, code) * P::kHidden + owned_row<P>(b);
  }

  // The talker's keys of a layer and a key-value head, page 0.
  static __device__ __forceinline__ bf16* layer_kv(const FrameParams& p, int index, int kv_head) {
    return p.kv + static_cast<size_t>(index * 2 * T::kKvHeads + kv_head) * kPagePositions * kHeadDim;
  }
  static __device__ __forceinline__ size_t page_stride(const FrameParams& p) {
    return static_cast<size_t>(p.talker.layers) * 2 * T::kKvHeads * kPagePositions * kHeadDim;
  }

  static __device__ void produce(const FrameParams& p, Ring& ring, Patience& patience, int block, int lane) {
    auto copy = [&](const uint8_t* ribbon, int stages, const Pace& pace) {
      ring.copy(ribbon + static_cast<size_t>(block) * stages * kStageBytes, stages, 0, pace, patience, lane);
    };
    constexpr int head = Matvec<kHeadRows, T::kHidden, kFp8CodecHead>::stages(kSteps<T::kHidden>);
    constexpr int code = Matvec<kCodeRows, P::kHidden, kFp8LmHeads>::stages(kSteps<P::kHidden>);
    constexpr int qkv = Matvec<T::kQkvRows, T::kHidden, T::kFp8>::stages(kSteps<T::kHidden>);
    constexpr int first = Matvec<P::kQkvRows, P::kHidden, P::kFp8>::stages(kSteps<P::kHidden>);
    const int layers = p.predictor.layers * kLayerStages<P>;
    const uint8_t* const predictor = p.predictor.ribbon + static_cast<size_t>(block) * layers * kStageBytes;
    auto adapt = [&] {
      if constexpr (Dims::kAdapter)
        copy(p.adapter, Matvec<P::kHiddenRows, T::kHidden>::stages(kSteps<T::kHidden>), p.predictor_pace);
    };
    if (p.tables.filled) {
      adapt();
      ring.copy(predictor, first, 0, p.predictor_pace, patience, lane);
      return;
    }
    const Assignment mine = assignment(block, p.columns);
    const Context<T> context(mine, p.column, p.columns);
    const uint8_t* ribbon =
        p.talker.ribbon + static_cast<size_t>(block) * p.talker.layers * kLayerStages<T> * kStageBytes;
    for (int index = p.talked ? p.talker.layers : 0; index < p.talker.layers; index++) {
      ribbon = ring.copy(ribbon, qkv, 0, p.talker_pace, patience, lane);
      copy_context<T>(ring, context, p.column[mine.column].pages, layer_kv(p, index, mine.kv_head), page_stride(p),
                      p.talker_pace, patience, lane);
      ribbon = ring.copy(ribbon, kLayerStages<T> - qkv, 0, p.talker_pace, patience, lane);
    }
    if (p.prefill) return;
    copy(p.codec_head, head, p.predictor_pace);
    for (int position = 0; position < kGroups;) {
      if (!looks_up(p, position)) {
        adapt();
        // With tables a frame reads these once or twice: they stay in L2 where everything does.
        ring.copy(predictor, first, p.pinned < 15 ? 0 : 15, p.predictor_pace, patience, lane);
      }
      ring.copy(predictor + first * kStageBytes, layers - first, p.pinned, p.predictor_pace, patience, lane);
      position += rows_at(position, p.columns);
      if (position > 1)
        copy(p.lm_heads + static_cast<size_t>(position - 2) * kBlocks * code * kStageBytes, code, p.predictor_pace);
    }
  }

  // Finish the rows of a head, whose sums are in s.wide, one thread a row. Then draw every sequence's code, into
  // s.draw.code. `noise`, `scale`: of this thread's row.
  template <int Rows, int K, int N>
  static __device__ __forceinline__ void choose(const FrameParams& p, Thread& b, int group, float noise, float scale) {
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
      publish(b.x.logits + mine * Dims::kCodecVocab + id, ordered(logit),
              ordered(d.sample ? __fadd_rn(logit, noise) : logit), 0, b.epoch);
    }
    b.mark(kHead);
    b.refresh();
    constexpr int kApart = kBlocks / (8 * kColumnTiles);
    const int chooser = b.block / kApart;
    if (b.block % kApart == 0 && chooser < b.columns) {
      const Column& c = p.column[chooser];
      Candidates<N> candidates;
      candidates.await(b, b.x.logits + chooser * Dims::kCodecVocab);
      // Some blocks are about to read the code's heads, all its embedding. They go to L2 while the code goes to them,
      // or while the block still counts.
      auto soon = [&](int code) {
        if (group + 1 < kGroups && looks_up(p, group + 1) && b.tid < (P::kQkv + P::kQ) / 64)
          prefetch_l2(table_heads(p, group, code) + b.tid * 64);
        if (b.tid < T::kHidden / 64) prefetch_l2(embedding(p, group, code) + b.tid * 64);
      };
      const int code = draw(b, candidates, group ? c.draw : c.draw0, soon);
      if (b.tid < kBlocks) publish(b.x.drawn + b.tid * kColumns + chooser, __int_as_float(code), b.epoch);
      soon(code);
      if (b.tid == 0) {
        p.codes[chooser * kResultWords + group] = code;
        c.recent[c.frame % kRecentFrames * kGroups + group] = code;
        if (group == 0 && code != p.eos_id) c.seen[code] = 1;
      }
    }
#pragma unroll
    for (int t = 0; t < kColumnTiles; t++) {
      if (b.column[t] < 0) continue;
      const Tagged* slot = b.x.drawn + b.block * kColumns + b.column[t];
      uint2 r;
      uint32_t polls = 0;
      do r = load_relaxed8(slot);
      while (r.y != b.epoch && !b.patience.spent(polls));
      if (b.lane % 4 == 0) b.s.draw.code[b.warp][b.column[t]] = min(r.x, static_cast<uint32_t>(N - 1));
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

  // This thread's row of the embedding of a group's code, of the sequence whose next input it adds up.
  static __device__ __forceinline__ float last_part(const FrameParams& p, const Thread& b, int group) {
    const int code = b.s.draw.code[b.warp][min(owned_column<T>(b), p.columns - 1)];
    return __bfloat162float(owned_value<T>(b, embedding(p, group, code)));
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

  // 4 values of a column's input from `at` on.
  static __device__ __forceinline__ float4 talker_input(const FrameParams& p, const Column& c, int at) {
    if (c.input_id == kPrecomputed) return *reinterpret_cast<const float4*>(c.row + at);
    const float4 code = widened(*reinterpret_cast<const uint2*>(embedding(p, 0, c.input_id) + at), 1.f);
    const float4 text = widened(*reinterpret_cast<const uint2*>(c.input_text + at), 1.f);
    return make_float4(code.x + text.x, code.y + text.y, code.z + text.z, code.w + text.w);
  }

  // What talk() left, of a prompt's last row that its prefill took along.
  static __device__ __forceinline__ void resume(const FrameParams& p, Thread& b) {
    b.epoch = p.epoch + p.talker.layers;
    if (owns<T>(b)) b.residual = p.column[owned_column<T>(b)].residual[owned_row<T>(b)];
    publish_residual<T>(b, Place<T>(b), b.x.h_mlp, owned_value<T>(b, p.talker.norm));
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
          in.b[t][i] = normed(talker_input(p, c, at), p.talker.input_norm + at, in.square[t]);
        }
      }
    };
    if (owns<T>(b)) {
      const Column& c = p.column[owned_column<T>(b)];
      const int row = owned_row<T>(b);
      b.residual = c.input_id == kPrecomputed
                       ? c.row[row]
                       : __bfloat162float(embedding(p, 0, c.input_id)[row]) + __bfloat162float(c.input_text[row]);
    }
    const int column = assignment(b.block, b.columns).column;
    if (column < b.columns && b.tid < kHeadDim) {  // the zeros behind this launch's keys and values
      const Column& c = p.column[column];
      reinterpret_cast<uint32_t*>(b.s.attention.fresh[c.position - c.first_fresh + 1])[b.tid] = 0;
    }
    for (int index = 0; index < p.talker.layers; index++) {
      b.epoch = p.epoch + 1 + index;
      const bool last = index + 1 == p.talker.layers;
      layer<T>(b, p.talker, p.talker_scales, index, layer_input<T>(b, index, first_input),
               last ? p.talker.norm : p.talker.input_norm + (index + 1) * T::kHidden, [&] {
                 const Assignment mine = assignment(b.block, b.columns);  // anew, as in refresh()
                 attend_pages<T>(b, p.talker, index, mine, p.column, layer_kv(p, index, mine.kv_head), page_stride(p));
               });
    }
    if (!p.prefill || !owns<T>(b)) return;
    if (float* residual = p.column[owned_column<T>(b)].residual) residual[owned_row<T>(b)] = b.residual;
  }

  // Send the embeddings of the last codes, or at first the talker's hidden state, through the layers. Up to two rows a
  // sequence.
  static __device__ __forceinline__ void predict(const FrameParams& p, Thread& b, int position, int rows) {
    const int sequences = p.columns;
    b.set_columns(sequences * rows);
    const int group = max(position - 1, 0);  // of the last code
    auto code_of = [&](int sequence) { return b.s.draw.code[b.warp][sequence]; };
    // A row's sequence; a shift by rows - 1 divides by rows. Whether rows of this lane, or a row, are hidden states.
    auto sequence_of = [&](int row) { return row >> (rows - 1); };
    auto is_hidden = [&](int row) { return position == 0 && (row & (rows - 1)) == 0; };
    auto raw_input = [&](int at, InputOf<T::kHidden>& in) {
      const bool first = is_hidden(b.lane / 4);
      int hidden[kColumnTiles];
#pragma unroll
      for (int t = 0; t < kColumnTiles; t++) hidden[t] = first && b.column[t] >= 0 ? sequence_of(b.column[t]) : -1;
      if (position == 0) VectorInput<T::kHidden, Thread>{b, b.x.h_mlp, hidden, p.epoch + p.talker.layers}.await(at, in);
      if (first) return;
#pragma unroll
      for (int t = 0; t < kColumnTiles; t++) {
        if (b.column[t] < 0) continue;
        const bf16* row = embedding(p, group, code_of(sequence_of(b.column[t])));
#pragma unroll
        for (int i = 0; i < kAtOnce<T::kHidden>; i++)
          in.b[t][i] = *reinterpret_cast<const uint2*>(row + value_index<T::kHidden>(b, at + i));
      }
    };
    const int owned = min(owned_column<P>(b), b.columns - 1), sequence = sequence_of(owned);
    const bool owned_first = is_hidden(owned);

    const bool known = looks_up(p, position);
    if constexpr (Dims::kAdapter) {
      if (!known) {
        matvec<P::kHiddenRows, T::kHidden, false>(b, b.s.narrow, LateInput{raw_input});
        if (owns<P>(b)) {
          const float y = Matvec<P::kHiddenRows, T::kHidden>::sum(b.s.narrow, b.tid % P::kHiddenRows, owned);
          b.residual = fmaf(y, owned_first ? b.s.inverse[sequence] : 1.f, p.adapter_bias[owned_row<P>(b)]);
          if (p.tables.filled) *adapted(p, b, group, code_of(sequence)) = b.residual;
        }
        publish_residual<P>(b, Place<P>(b), b.x.adapted, owned_value<P>(b, p.predictor.input_norm));
      }
    } else if (!known && owns<P>(b)) {
      b.residual = owned_first ? b.s.hidden[sequence * P::kHiddenRows + b.tid % P::kHiddenRows]
                               : __bfloat162float(owned_value<P>(b, embedding(p, group, code_of(sequence))));
    }
    // What no head waits for: of the last code, this thread's part of the next input, and of what is looked up.
    auto behind_heads = [&] {
      const float part = last_part(p, b, group);
      if (b.tid < T::kHiddenRows * sequences && position + rows > 1)
        b.s.hidden[b.tid] = group ? b.s.hidden[b.tid] + part : part;
      if (!known || !owns<P>(b)) return;
      if constexpr (Dims::kAdapter) b.residual = *adapted(p, b, group, code_of(owned_column<P>(b)));
      else b.residual = part;
    };
    auto first_input = [&](int from, InputOf<P::kHidden>& in) {
      if constexpr (Dims::kAdapter) {
        vector_input<P::kHidden>(b, b.x.adapted, b.epoch - 1).await(from, in);
      } else {
        const bool first = is_hidden(b.lane / 4);
        InputOf<P::kHidden> raw{};
        raw_input(from, raw);
#pragma unroll
        for (int t = 0; t < kColumnTiles; t++) {
          if (b.column[t] < 0) continue;
#pragma unroll
          for (int i = 0; i < kAtOnce<P::kHidden>; i++)
            in.b[t][i] = normed(widened(raw.b[t][i], first ? b.s.inverse[sequence_of(b.column[t])] : 1.f),
                                p.predictor.input_norm + value_index<P::kHidden>(b, from + i), in.square[t]);
        }
      }
    };
    const bool filled = p.tables.filled;
    for (int index = 0; index < p.predictor.layers; index++) {
      b.epoch++;
      const bool last = index + 1 == p.predictor.layers;
      layer<P>(
          b, p.predictor, p.predictor_scales, index, layer_input<P>(b, index, first_input),
          last ? p.predictor.norm : p.predictor.input_norm + (index + 1) * P::kHidden,
          [&] {
            const Assignment at = assignment(b.block, sequences);
            auto* kv = kFrameKvShared ? b.s.frame_kv[index]
                                      : reinterpret_cast<bf16(*)[kGroups][kHeadDim]>(p.frame_kv) +
                                            (b.block * P::kMaxLayers + index) * 2;
            attend_frame<P>(b, p.predictor, index, at, sequences, rows, position, kv,
                            known && index == 0 ? table_heads(p, group, code_of(at.column)) : nullptr);
            if (index == 0) behind_heads();
          },
          known && index == 0, filled);
      if (filled) {
        b.refresh();
        if (b.block < sequences)
          fill_heads<P>(b, p.predictor, b.block, position, table_heads(p, group, code_of(b.block)));
        return;
      }
    }
  }

  // Draw code 0, and keep the hidden state.
  static __device__ __forceinline__ void choose_first(const FrameParams& p, Thread& b) {
    const int sequences = p.columns;
    using Head = Matvec<kHeadRows, T::kHidden>;
    const float noise = noise_of<kHeadRows>(p, b, 0);
    const float head_scale =
        scale_of<kFp8CodecHead>(p.codec_head_scales, b.block * kHeadRows + b.tid % kHeadRows, Dims::kCodecVocab);
    matvec<kHeadRows, T::kHidden, kFp8CodecHead>(b, b.s.wide, vector_input<T::kHidden>(b, b.x.h_mlp, b.epoch));
    if (b.tid < sequences) b.s.inverse[b.tid] = Head::inverse_rms(b.s.wide, b.tid);
    const int owned = min(owned_column<T>(b), sequences - 1);
    if (owns<T>(b)) {
      const float h =
          b.residual * Head::inverse_rms(b.s.wide, owned) * __bfloat162float(owned_value<T>(b, p.talker.norm));
      b.s.hidden[b.tid] = h;
      if (p.hidden_out) p.hidden_out[owned * T::kHidden + owned_row<T>(b)] = h;
    }
    sync_compute<kComputeThreads>();  // s.hidden and s.inverse are there, and all have read the sums of squares
    choose<kHeadRows, T::kHidden, Dims::kCodecVocab>(p, b, 0, noise, head_scale);
    if (b.stage_ns) b.stage_ns += kStages;
  }

  static __device__ __forceinline__ void compute(const FrameParams& p, Thread& b) {
    const int sequences = p.columns;
    b.set_columns(sequences);
    if (p.tables.filled) {
      if (b.lane < sequences) b.s.draw.code[b.warp][b.lane] = p.tables.first + b.lane;
      __syncwarp();
    } else {
      if (p.talked) resume(p, b);
      else talk(p, b);
      if (p.prefill) return;
      choose_first(p, b);
    }

    for (int position = p.tables.filled; position < kGroups;) {
      const int rows = rows_at(position, sequences);
      predict(p, b, position, rows);
      if (p.tables.filled) return;
      position += rows;
      b.set_columns(sequences);
      if (position == 1) {                // nothing is drawn behind the hidden state alone
        sync_compute<kComputeThreads>();  // all are done with s.narrow
        continue;
      }
      const int group = position - 1;
      const float noise = noise_of<kCodeRows>(p, b, group);
      int last[kColumnTiles];  // rows of these sequences
#pragma unroll
      for (int t = 0; t < kColumnTiles; t++) last[t] = b.column[t] < 0 ? -1 : b.column[t] * rows + rows - 1;
      const float code_scale = scale_of<kFp8LmHeads>(p.lm_head_scales + (group - 1) * Dims::kCodes,
                                                     b.block * kCodeRows + b.tid % kCodeRows, Dims::kCodes);
      matvec<kCodeRows, P::kHidden, kFp8LmHeads>(b, b.s.wide,
                                                 VectorInput<P::kHidden, Thread>{b, b.x.h_mlp, last, b.epoch});
      choose<kCodeRows, P::kHidden, Dims::kCodes>(p, b, group, noise, code_scale);
    }
    const float part = last_part(p, b, kGroups - 1);
    if (owns<T>(b)) {
      const Column& c = p.column[owned_column<T>(b)];
      c.next_row[owned_row<T>(b)] = b.s.hidden[b.tid] + part + __bfloat162float(c.text_row[owned_row<T>(b)]);
    }
  }
};

}  // namespace
}  // namespace qmk
