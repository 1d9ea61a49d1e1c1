// The persistent kernel: one launch is one frame of 16 codes.
//
// input row -> talker (28 layers) -> head -> code 0 -> code predictor (16 rows, 5 layers each, 15 heads) -> codes 1..15
// -> sum of the 16 embeddings + text row -> next input row. No host in between. The code predictor reads the talker's
// hidden state at position 0 and code 0's embedding at position 1, then every code it drew.
#include "draw.cuh"
#include "frame.h"

namespace qmk {
namespace {

constexpr int max_of(int a, int b) { return a > b ? a : b; }

template <class Dims>
struct Frame {
  using T = typename Dims::Talker;
  using P = typename Dims::Predictor;
  static constexpr int kHeadRows = Dims::kCodecVocab / kBlocks, kCodeRows = Dims::kCodes / kBlocks;
  [[maybe_unused]] static constexpr int kAdapterRows = P::kHidden / kBlocks;
  using Shared = Scratch<max_of(T::kIntermediate, P::kIntermediate), max_of(T::kHidden, P::kHidden),
                         max_of(T::kGateUpRows, P::kGateUpRows), P::kLayers>;
  using Thread = Block<Shared>;
  static constexpr int kRingStages = (227 * 1024 - 512 - static_cast<int>(sizeof(Shared))) / kStageBytes;
  static constexpr int kSharedBytes = kRingStages * (kStageBytes + 16) + static_cast<int>(sizeof(Shared)) + 128;
  static constexpr int kPinned = 3;  // of 15 predictor stages: 31 MB stay in L2 between the passes of a frame

  static __device__ void produce(const FrameParams& p, Ring& ring, Patience& patience, int block) {
    auto stream = [&](const uint8_t* ribbon, int stages, int pinned) {
      ring.stream(ribbon + static_cast<size_t>(block) * stages * kStageBytes, stages, pinned, patience);
    };
    constexpr int talker = T::kLayers * kLayerStages<T>, predictor = P::kLayers * kLayerStages<P>;
    constexpr int head = kMatrixStages<kHeadRows, T::kHidden>, code = kMatrixStages<kCodeRows, P::kHidden>;
    stream(p.talker.ribbon, talker, 0);
    if (p.prefill) return;
    stream(p.codec_head, head, 0);
    for (int row = 0; row < Dims::kGroups; row++) {
      if constexpr (Dims::kAdapter) stream(p.adapter, kMatrixStages<kAdapterRows, T::kHidden>, 0);
      stream(p.predictor.ribbon, predictor, kPinned);
      if (row) stream(p.lm_heads + static_cast<size_t>(row - 1) * kBlocks * code * kStageBytes, code, 0);
    }
  }

  // Normed residual times the head, then a draw. `noise` is this thread's row's, made while the residual was awaited.
  template <int Rows, int K, int N, class Rule>
  static __device__ int head(const FrameParams& p, Thread& b, const Slice<K>& h, const Slice<K>& norm, int group,
                             const DrawParams& d, float noise, Rule rule) {
    stage_normed(b, h, norm);
    matvec<Rows, K>(b, [&](int row, float sum) {
      const int id = b.block * Rows + row;
      const float raw = sum * inverse_rms<K>(b);
      if (p.logits_out) p.logits_out[group * Dims::kCodecVocab + id] = raw;
      const float logit = d.sample ? __fmul_rn(rule(id, raw), d.inverse_temperature) : rule(id, raw);
      publish(b.x.logits + id, logit, b.epoch);
      publish(b.x.noisy + id, d.sample ? __fadd_rn(logit, noise) : logit, b.epoch);
    });
    const Candidates<N> candidates{await<N>(b.x.logits, b.epoch, b.tid, b.patience),
                                   await<N>(b.x.noisy, b.epoch, b.tid, b.patience)};
    b.mark(kHead);
    const int code = draw(b, candidates, d);
    if (b.block == 0 && b.tid == 0) p.codes[group] = code;
    b.mark(kDraw);
    return code;
  }

  // Of the row that this thread finishes in the head of a group.
  template <int Rows>
  static __device__ float noise_of(const FrameParams& p, const Thread& b, int group, const DrawParams& d) {
    return d.sample && b.tid < Rows ? gumbel(p.seed, p.frame, group, b.block * Rows + b.tid) : 0.f;
  }

  // Leaves the residual behind the last layer in x.h_mlp.
  static __device__ void talk(const FrameParams& p, Thread& b) {
    Slice<T::kHidden> h;
#pragma unroll
    for (int i = 0; i < h.kPairs; i++) h.v[i] = *reinterpret_cast<const float2*>(p.row + h.index(i, b.tid));
    const int head = b.block / kSplits, kv_head = head / T::kGroup;
    constexpr size_t kHeadRows = kPagePositions * kHeadDim, kLayerRows = 2 * T::kKvHeads * kHeadRows;
    for (int index = 0; index < T::kLayers; index++) {
      const auto norm = load_slice<T::kHidden>(p.talker.input_norm + index * T::kHidden, b.tid);
      if (index) h = await<T::kHidden>(b.x.h_mlp, b.epoch, b.tid, b.patience);
      b.epoch++;
      const PagedCache cache{p.kv + index * kLayerRows + kv_head * kHeadRows, p.pages, T::kLayers * kLayerRows,
                             T::kKvHeads * kHeadRows, b.s.fresh, head % T::kGroup == 0};
      layer<T>(b, p.talker, index, p.position, h, norm, cache);
    }
  }

  // One row through the code predictor; leaves the residual behind its last layer in x.h_mlp.
  static __device__ void predict(const FrameParams& p, Thread& b, int position, const Slice<T::kHidden>& row) {
    Slice<P::kHidden> h;
    if constexpr (Dims::kAdapter) {
      stage_input(b, row);
      matvec<kAdapterRows, T::kHidden>(b, [&](int r, float sum) {
        const int i = b.block * kAdapterRows + r;
        publish(b.x.adapted + i, sum + p.adapter_bias[i], b.epoch);
      });
      h = await<P::kHidden>(b.x.adapted, b.epoch, b.tid, b.patience);
    } else {
      h = row;
    }
    for (int index = 0; index < P::kLayers; index++) {
      const auto norm = load_slice<P::kHidden>(p.predictor.input_norm + index * P::kHidden, b.tid);
      if (index) h = await<P::kHidden>(b.x.h_mlp, b.epoch, b.tid, b.patience);
      b.epoch++;
      layer<P>(b, p.predictor, index, position, h, norm, FrameCache{b.s.frame_kv[index]});
    }
  }

  static __device__ void compute(const FrameParams& p, Thread& b) {
    const auto norm = load_slice<T::kHidden>(p.talker.norm, b.tid);
    talk(p, b);
    if (p.prefill) return;
    float noise = noise_of<kHeadRows>(p, b, 0, p.draw0);
    auto h = await<T::kHidden>(b.x.h_mlp, b.epoch, b.tid, b.patience);
    const int code0 = head<kHeadRows, T::kHidden, Dims::kCodecVocab>(
        p, b, h, norm, 0, p.draw0, noise, [&](int id, float logit) { return code0_rule(p, id, logit); });
    if (b.stage_ns) b.stage_ns += kStages;

    const float inv = inverse_rms<T::kHidden>(b);  // of the row that the head has just read
#pragma unroll
    for (int i = 0; i < h.kPairs; i++) {
      h.v[i] = make_float2(h.v[i].x * inv * norm.v[i].x, h.v[i].y * inv * norm.v[i].y);
      if (p.hidden_out && b.block == 0) *reinterpret_cast<float2*>(p.hidden_out + h.index(i, b.tid)) = h.v[i];
    }
    sync_compute<kComputeThreads>();  // all have read the sums of squares
    auto row = load_slice<T::kHidden>(p.code0_embedding + static_cast<size_t>(code0) * T::kHidden, b.tid);
    auto sum = row;
    predict(p, b, 0, h);
    await<P::kHidden>(b.x.h_mlp, b.epoch, b.tid, b.patience);  // nobody is still reading when the next row begins
    const auto predictor_norm = load_slice<P::kHidden>(p.predictor.norm, b.tid);
    for (int group = 1; group < Dims::kGroups; group++) {
      predict(p, b, group, row);
      noise = noise_of<kCodeRows>(p, b, group, p.draw);
      const auto last = await<P::kHidden>(b.x.h_mlp, b.epoch, b.tid, b.patience);
      const int code = head<kCodeRows, P::kHidden, Dims::kCodes>(p, b, last, predictor_norm, group, p.draw, noise,
                                                                 [](int, float logit) { return logit; });
      row = load_slice<T::kHidden>(p.code_embedding + (static_cast<size_t>(group - 1) * Dims::kCodes + code) * T::kHidden, b.tid);
#pragma unroll
      for (int i = 0; i < sum.kPairs; i++) sum.v[i].x += row.v[i].x, sum.v[i].y += row.v[i].y;
    }

    if (b.block != 0) return;  // one block writes what the next launch reads
    const auto text = load_slice<T::kHidden>(p.text_row, b.tid);
#pragma unroll
    for (int i = 0; i < sum.kPairs; i++)
      *reinterpret_cast<float2*>(p.next_row + sum.index(i, b.tid)) = make_float2(sum.v[i].x + text.v[i].x, sum.v[i].y + text.v[i].y);
    if (b.tid == 0 && code0 != p.eos_id) p.seen[code0] = 1;
  }
};

template <class Dims>
__global__ void __launch_bounds__(kThreads, 1) frame_kernel(const __grid_constant__ FrameParams p) {
  using F = Frame<Dims>;
  extern __shared__ __align__(1024) uint8_t memory[];
  uint8_t* after = memory + F::kRingStages * kStageBytes;
  uint64_t* barriers = reinterpret_cast<uint64_t*>(after);
  auto& s = *reinterpret_cast<typename F::Shared*>(after + ((F::kRingStages * 16 + 127) & ~127));
  const int tid = threadIdx.x;
  Ring ring{shared_address(memory), shared_address(barriers), shared_address(barriers + F::kRingStages), F::kRingStages};
  if (tid == 0) {
    s.quit = 0;
    ring.init();
  }
  __syncthreads();
  Patience patience{p.spin_limit, p.fault, &s.quit};
  if (tid >= kComputeThreads) {
    if (tid == kComputeThreads) F::produce(p, ring, patience, blockIdx.x);
    return;
  }
  const bool timed = p.stage_ns && blockIdx.x == 0 && tid == 0;
  typename F::Thread b{s, ring, patience, p.x, p.epoch, tid, tid / 32, tid % 32, static_cast<int>(blockIdx.x),
                       timed ? p.stage_ns : nullptr, timed ? global_timer() : 0};
  F::compute(p, b);
}

template <class Dims>
cudaError_t launch(const FrameParams& params, cudaStream_t stream) {
  constexpr int bytes = Frame<Dims>::kSharedBytes;
  static_assert(bytes <= 227 * 1024);
  cudaError_t error = cudaFuncSetAttribute(frame_kernel<Dims>, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (error != cudaSuccess) return error;
  void* args[] = {const_cast<FrameParams*>(&params)};
  return cudaLaunchCooperativeKernel(reinterpret_cast<const void*>(frame_kernel<Dims>), dim3(kBlocks), dim3(kThreads), args, bytes, stream);
}

}  // namespace

cudaError_t launch_frame(int talker_hidden, const FrameParams& params, cudaStream_t stream) {
  return talker_hidden == Dims06::Talker::kHidden ? launch<Dims06>(params, stream) : launch<Dims17>(params, stream);
}

}  // namespace qmk
