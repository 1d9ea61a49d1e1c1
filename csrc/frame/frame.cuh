// A frame of 16 codes, as the blocks of the persistent kernel compute it.
//
// input row -> talker (28 layers) -> head -> code 0 -> code predictor (16 rows, 5 layers each, 15 heads) -> codes 1..15
// -> sum of the 16 embeddings + text row -> next input row. No host in between. The code predictor reads the talker's
// hidden state at position 0, code 0's embedding at position 1, then every code it drew. Up to 4 sequences take the
// first two positions as two columns of one pass.
#pragma once
#include "draw.cuh"
#include "producer.cuh"

namespace qmk {
namespace {

// This block's shared memory besides the ring.
template <class Dims>
struct Scratch {
  using T = typename Dims::Talker;
  using P = typename Dims::Predictor;
  static constexpr int kWide = max_of(max_of(T::kGateUpRows, T::kQkvRows), max_of(P::kGateUpRows, P::kQkvRows));
  static constexpr int kHeads = max_of(Dims::kHeadRows, Dims::kCodeRows);
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
  // Packet p of a column's attention output.
  __device__ __forceinline__ void publish_attended(int p, int column, uint32_t low, uint32_t high) {
    publish(x.attn + packet_index(p, column), low, high, 0, epoch);
  }
  __device__ __forceinline__ void mark(int stage) {
    if (!kStageClock || stage_ns == nullptr) return;
    const unsigned long long now = global_timer();
    stage_ns[stage] += now - since;
    since = now;
  }
};

// What a compute thread does in each step of a frame (order.cuh).
template <class Dims>
struct Frame : CodeRows<Dims> {
  using T = typename Dims::Talker;
  using P = typename Dims::Predictor;
  using Thread = Block<Dims>;
  static constexpr int kRingStages =
      (kSharedBytes - 512 - static_cast<int>(sizeof(Scratch<Dims>))) / (kStageBytes + 16);
  static constexpr int kBytes =
      round_up(kRingStages * (kStageBytes + 16), 128) + static_cast<int>(sizeof(Scratch<Dims>));
  // With fewer stages than producers, one could be a round ahead of another and take a stage that is not free.
  static_assert(kRingStages >= max_of(2, kProducers) && kBytes <= kSharedBytes);
  static_assert(max_of(Dims::kHeadRows, Dims::kCodeRows) * kColumns <= kComputeThreads,
                "one thread finishes a row of a head");

  using CodeRows<Dims>::p;
  Thread& b;

  // What the tables hold of the adapter's output for the code of a group: this thread's value.
  __device__ __forceinline__ float* table_adapted(int group, int code) const {
    return p.tables.adapted + this->table_row(group, code) * P::kHidden + owned_row<P>(b);
  }

  // Finish the rows of a head, whose sums are in s.wide, one thread a row. Then draw every sequence's code, into
  // s.draw.code. `noise`, `scale`: of this thread's row.
  template <int Rows, int K, int N>
  __device__ __forceinline__ void choose(int group, float noise, float scale) {
    using M = Matvec<Rows, K>;
    b.refresh();
    const int id = b.block * Rows + b.tid % Rows, column = b.tid / Rows;
    if (column < b.columns && id < N) {
      const Column& c = p.column[column];
      const float logit = M::sum(b.s.wide, b.tid % Rows, column) * M::inverse_rms(b.s.wide, column) * scale;
      this->publish_logit(b, c, column, group, id, logit, noise);
    }
    b.mark(kHead);
    b.refresh();
    constexpr int kBlocksApart = kBlocks / (8 * kColumnTiles);
    const int drawn_column = b.block / kBlocksApart;
    if (b.block % kBlocksApart == 0 && drawn_column < b.columns) {
      const Column& c = p.column[drawn_column];
      Candidates<N> candidates;
      candidates.await(b, b.x.logits + drawn_column * Dims::kCodecVocab);
      auto prefetch = [&](int code) { this->prefetch(b, group, code); };
      const int code = draw(b, candidates, group ? c.draw : c.draw0, prefetch);
      if (b.tid < kBlocks) publish(b.x.drawn + b.tid * kColumns + drawn_column, __int_as_float(code), b.epoch);
      prefetch(code);
      if (b.tid == 0) this->keep(c, drawn_column, group, code);
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
  __device__ __forceinline__ float noise_of(int group) const {
    const int column = b.tid / Rows;
    if (column >= b.columns) return 0.f;
    const Column& c = p.column[column];
    return (group ? c.draw : c.draw0).sample ? gumbel(c.seed, c.frame, group, b.block * Rows + b.tid % Rows) : 0.f;
  }

  // First value of packet i of this lane's share of a vector of K values.
  template <int K>
  __device__ __forceinline__ int value_index(int i) const {
    return ((b.warp * kSteps<K> + i) * 4 + b.lane % 4) * 4;
  }

  // The last code that a sequence drew.
  __device__ __forceinline__ int last_code(int sequence) const { return b.s.draw.code[b.warp][sequence]; }
  // This thread's row of the embedding of a group's code, of the sequence whose next input it adds up.
  __device__ __forceinline__ float last_part(int group) const {
    const int code = last_code(min(owned_column<T>(b), p.columns - 1));
    return __bfloat162float(owned_value<T>(b, this->embedding(group, code)));
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
  __device__ __forceinline__ LayerInput<S, First> layer_input(int index, const First& first) const {
    return {vector_input<S::kHidden>(b, b.x.h_mlp, b.epoch - 1), index, first};
  }

  // What the talker's layers left in an earlier launch: it took a prompt's last row along.
  __device__ __forceinline__ void resume() {
    b.epoch = p.epoch + p.talker.layers;
    if (owns<T>(b)) b.residual = p.column[owned_column<T>(b)].residual[owned_row<T>(b)];
    publish_residual<T>(b, Place<T>(b), b.x.h_mlp, owned_value<T>(b, p.talker.norm));
  }

  // Leaves the residual behind the last layer, ready for the final norm's matrix, in x.h_mlp.
  __device__ __forceinline__ void talker() {
    auto first_input = [&](int from, InputOf<T::kHidden>& in) {
#pragma unroll
      for (int t = 0; t < kColumnTiles; t++) {
        if (b.column[t] < 0) continue;
        const Column& c = p.column[b.column[t]];
#pragma unroll
        for (int i = 0; i < kAtOnce<T::kHidden>; i++) {
          const int at = value_index<T::kHidden>(from + i);
          in.b[t][i] = normed(this->talker_input(c, at), p.talker.input_norm + at, in.square[t]);
        }
      }
    };
    if (owns<T>(b)) b.residual = this->talker_value(p.column[owned_column<T>(b)], owned_row<T>(b));
    const int column = assignment(b.block, b.columns).column;
    if (column < b.columns && b.tid < kHeadDim) {  // the zeros behind this launch's keys and values
      const Column& c = p.column[column];
      reinterpret_cast<uint32_t*>(b.s.attention.fresh[c.position - c.first_fresh + 1])[b.tid] = 0;
    }
    for (int index = 0; index < p.talker.layers; index++) {
      b.epoch = p.epoch + 1 + index;
      const bool last = index + 1 == p.talker.layers;
      layer<T>(b, p.talker, p.talker_scales, index, layer_input<T>(index, first_input),
               last ? p.talker.norm : p.talker.input_norm + (index + 1) * T::kHidden, [&] {
                 const Assignment assigned = assignment(b.block, b.columns);  // anew, as in refresh()
                 attend_pages<T>(b, p.talker, index, assigned, p.column, layer_kv<T>(p, index, assigned.kv_head),
                                 page_stride<T>(p));
               });
      if (p.watched) keep_queries<T>(b, index, p.column);
    }
    if (!p.prefill || !owns<T>(b)) return;
    if (float* residual = p.column[owned_column<T>(b)].residual) residual[owned_row<T>(b)] = b.residual;
  }

  // Draw code 0, and keep the hidden state.
  __device__ __forceinline__ void codec_head() {
    constexpr int kRows = Dims::kHeadRows;
    using Head = Matvec<kRows, T::kHidden>;
    const float noise = noise_of<kRows>(0);
    const float scale =
        scale_of<kFp8CodecHead>(p.codec_head_scales, b.block * kRows + b.tid % kRows, Dims::kCodecVocab);
    matvec<kRows, T::kHidden, kFp8CodecHead>(b, b.s.wide, vector_input<T::kHidden>(b, b.x.h_mlp, b.epoch));
    if (b.tid < p.columns) b.s.inverse[b.tid] = Head::inverse_rms(b.s.wide, b.tid);
    const int owned = min(owned_column<T>(b), p.columns - 1);
    if (owns<T>(b)) {
      const float h =
          b.residual * Head::inverse_rms(b.s.wide, owned) * __bfloat162float(owned_value<T>(b, p.talker.norm));
      b.s.hidden[b.tid] = h;
      if (p.hidden_out) p.hidden_out[owned * T::kHidden + owned_row<T>(b)] = h;
    }
    sync_compute<kComputeThreads>();  // s.hidden and s.inverse are there, and all have read the sums of squares
    choose<kRows, T::kHidden, Dims::kCodecVocab>(0, noise, scale);
    if (b.stage_ns) b.stage_ns += kStages;
  }

  // This lane's share of a pass's input rows: embeddings of codes, or the talker's hidden states without their 1 / rms.
  __device__ __forceinline__ void read_rows(const Pass& pass, int from, InputOf<T::kHidden>& in) {
    const bool is_hidden = pass.is_hidden(b.lane / 4);
    int hidden[kColumnTiles];
#pragma unroll
    for (int t = 0; t < kColumnTiles; t++)
      hidden[t] = is_hidden && b.column[t] >= 0 ? pass.sequence_of(b.column[t]) : -1;
    if (pass.position == 0)
      VectorInput<T::kHidden, Thread>{b, b.x.h_mlp, hidden, p.epoch + p.talker.layers}.await(from, in);
    if (is_hidden) return;
#pragma unroll
    for (int t = 0; t < kColumnTiles; t++) {
      if (b.column[t] < 0) continue;
      const bf16* row = this->embedding(pass.last_group(), last_code(pass.sequence_of(b.column[t])));
#pragma unroll
      for (int i = 0; i < kAtOnce<T::kHidden>; i++)
        in.b[t][i] = *reinterpret_cast<const uint2*>(row + value_index<T::kHidden>(from + i));
    }
  }

  // 1.7B: from the talker's width to the code predictor's.
  __device__ __forceinline__ void adapter(const Pass& pass) {
    b.set_columns(p.columns * pass.rows);
    const int row = min(owned_column<P>(b), b.columns - 1), sequence = pass.sequence_of(row);
    const bool is_hidden = pass.is_hidden(row);
    matvec<P::kHiddenRows, T::kHidden, false>(
        b, b.s.narrow, LateInput{[&](int from, InputOf<T::kHidden>& in) { read_rows(pass, from, in); }});
    if (owns<P>(b)) {
      const float y = Matvec<P::kHiddenRows, T::kHidden>::sum(b.s.narrow, b.tid % P::kHiddenRows, row);
      b.residual = fmaf(y, is_hidden ? b.s.inverse[sequence] : 1.f, p.adapter_bias[owned_row<P>(b)]);
      if (p.tables.fill) *table_adapted(pass.last_group(), last_code(sequence)) = b.residual;
    }
    publish_residual<P>(b, Place<P>(b), b.x.adapted, owned_value<P>(b, p.predictor.input_norm));
  }

  // This lane's share of what comes into the code predictor's first layer.
  __device__ __forceinline__ void read_predictor_input(const Pass& pass, int from, InputOf<P::kHidden>& in) {
    if constexpr (Dims::kAdapter) {
      vector_input<P::kHidden>(b, b.x.adapted, b.epoch - 1).await(from, in);
    } else {
      const bool is_hidden = pass.is_hidden(b.lane / 4);
      InputOf<P::kHidden> rows{};
      read_rows(pass, from, rows);
#pragma unroll
      for (int t = 0; t < kColumnTiles; t++) {
        if (b.column[t] < 0) continue;
#pragma unroll
        for (int i = 0; i < kAtOnce<P::kHidden>; i++)
          in.b[t][i] = normed(widened(rows.b[t][i], is_hidden ? b.s.inverse[pass.sequence_of(b.column[t])] : 1.f),
                              p.predictor.input_norm + value_index<P::kHidden>(from + i), in.square[t]);
      }
    }
  }

  // What no head waits for: of the last code, this thread's part of the next input; and the residual, where nothing
  // computed it.
  __device__ __forceinline__ void add_last_code(const Pass& pass) {
    const int group = pass.last_group();
    const float part = last_part(group);
    if (b.tid < T::kHiddenRows * p.columns && pass.drawn_group())
      b.s.hidden[b.tid] = group ? b.s.hidden[b.tid] + part : part;
    if (pass_mode(p, pass.position) != PassMode::kLookedUp || !owns<P>(b)) return;
    if constexpr (Dims::kAdapter) b.residual = *table_adapted(group, last_code(owned_column<P>(b)));
    else b.residual = part;
  }

  // A pass through the code predictor's layers.
  __device__ __forceinline__ void predictor(const Pass& pass) {
    b.set_columns(p.columns * pass.rows);
    const bool looked_up = pass_mode(p, pass.position) == PassMode::kLookedUp, fills = p.tables.fill;
    if constexpr (!Dims::kAdapter)
      if (!looked_up && owns<P>(b)) {
        const int row = owned_column<P>(b), sequence = pass.sequence_of(row);
        b.residual = pass.is_hidden(row)
                         ? b.s.hidden[sequence * P::kHiddenRows + b.tid % P::kHiddenRows]
                         : __bfloat162float(owned_value<P>(b, this->embedding(pass.last_group(), last_code(sequence))));
      }
    auto first_input = [&](int from, InputOf<P::kHidden>& in) { read_predictor_input(pass, from, in); };
    for (int index = 0; index < p.predictor.layers; index++) {
      b.epoch++;
      const bool first = index == 0, last = index + 1 == p.predictor.layers;
      auto attend = [&] {
        const Assignment assigned = assignment(b.block, p.columns);
        auto* kv = kFrameKvShared ? b.s.frame_kv[index]
                                  : reinterpret_cast<bf16(*)[kGroups][kHeadDim]>(p.frame_kv) +
                                        (b.block * P::kMaxLayers + index) * 2;
        attend_frame<P>(
            b, p.predictor, index, assigned, p.columns, pass.rows, pass.position, kv,
            looked_up && first ? this->table_heads(pass.last_group(), last_code(assigned.column)) : nullptr);
        if (first) add_last_code(pass);
      };
      layer<P>(b, p.predictor, p.predictor_scales, index, layer_input<P>(index, first_input),
               last ? p.predictor.norm : p.predictor.input_norm + (index + 1) * P::kHidden, attend, looked_up && first,
               fills);
      if (fills) {
        b.refresh();
        if (b.block < p.columns)
          fill_heads<P>(b, p.predictor, b.block, pass.position,
                        this->table_heads(pass.last_group(), last_code(b.block)));
        return;
      }
    }
  }
  __device__ __forceinline__ void end_pass(const Pass& pass) {
    b.set_columns(p.columns);
    if (!pass.drawn_group()) sync_compute<kComputeThreads>();  // all are done with s.narrow
  }

  // Draw the code behind a pass.
  __device__ __forceinline__ void lm_head(const Pass& pass) {
    constexpr int kRows = Dims::kCodeRows;
    const int group = pass.drawn_group();
    const float noise = noise_of<kRows>(group);
    int last[kColumnTiles];  // rows of these sequences
#pragma unroll
    for (int t = 0; t < kColumnTiles; t++) last[t] = b.column[t] < 0 ? -1 : b.column[t] * pass.rows + pass.rows - 1;
    const float scale = scale_of<kFp8LmHeads>(p.lm_head_scales + (group - 1) * Dims::kCodes,
                                              b.block * kRows + b.tid % kRows, Dims::kCodes);
    matvec<kRows, P::kHidden, kFp8LmHeads>(b, b.s.wide, VectorInput<P::kHidden, Thread>{b, b.x.h_mlp, last, b.epoch});
    choose<kRows, P::kHidden, Dims::kCodes>(group, noise, scale);
  }

  // The sum of the embeddings of all codes, plus a row of text.
  __device__ __forceinline__ void next_input() {
    const float part = last_part(kGroups - 1);
    if (owns<T>(b)) {
      const Column& c = p.column[owned_column<T>(b)];
      c.next_row[owned_row<T>(b)] = b.s.hidden[b.tid] + part + __bfloat162float(c.text_row[owned_row<T>(b)]);
    }
  }

  // The codes whose rows of the tables this launch fills, as if they were drawn.
  __device__ __forceinline__ void begin_tables() {
    if (b.lane < p.columns) b.s.draw.code[b.warp][b.lane] = p.tables.first_code + b.lane;
    __syncwarp();
  }

  __device__ __forceinline__ void compute() {
    b.set_columns(p.columns);
    run_frame<Dims>(p, *this);
  }
};

}  // namespace
}  // namespace qmk
