// One decoder layer for one row: the page to read first. Talker and code predictor run the same code.
//
// Every block runs every line. A block owns a few rows of each matrix; what it computes it publishes, and what it needs
// next it awaits, so a wait is at once the exchange and the barrier. Norms and residuals are computed by every block
// alike, in fp32, because repeating them is cheaper than handing them round.
#pragma once
#include "attention.cuh"
#include "matvec.cuh"

namespace qmk {

// This block's shared memory besides the ring.
template <int MaxK, int MaxHidden, int MaxRows, int PredictorLayers>
struct Scratch {
  alignas(16) bf16 x[MaxK];                 // input of the matrix at hand
  float h[MaxHidden];                       // residual stream, fp32
  float partial[kWarps * MaxRows];          // see Matvec
  float square[kWarps];                     // sums of squares of h
  AttentionScratch attention;
  alignas(16) bf16 fresh[2][kHeadDim];      // the talker's key and value of the current position
  alignas(16) bf16 frame_kv[PredictorLayers][2][16][kHeadDim];  // the code predictor's, where a head lives here
  unsigned long long best[kWarps];          // see draw.cuh
  int count[2][kWarps];
  float sum[2][kWarps], chosen;
  uint32_t quit;
};

template <class Scratch>
struct Block {  // what a compute thread carries through the frame
  Scratch& s;
  Ring ring;
  Patience patience;
  Exchange x;
  uint32_t epoch;
  int tid, warp, lane, block;
  unsigned long long* stage_ns;  // null except in one thread of a timed launch
  unsigned long long since;

  __device__ __forceinline__ void mark(int stage) {
    if (stage_ns == nullptr) return;
    const unsigned long long now = global_timer();
    stage_ns[stage] += now - since;
    since = now;
  }
};

// Norm weights of this thread's slice; loaded ahead of the wait that comes before their use.
template <int N>
__device__ __forceinline__ Slice<N> load_slice(const bf16* p, int tid) {
  Slice<N> s;
#pragma unroll
  for (int i = 0; i < Slice<N>::kPairs; i++)
    s.v[i] = __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(p + Slice<N>::index(i, tid)));
  return s;
}

template <class B, int N>
__device__ __forceinline__ void stage_input(B& b, const Slice<N>& in) {
#pragma unroll
  for (int i = 0; i < Slice<N>::kPairs; i++)
    *reinterpret_cast<__nv_bfloat162*>(b.s.x + Slice<N>::index(i, b.tid)) = __floats2bfloat162_rn(in.v[i].x, in.v[i].y);
  sync_compute<kComputeThreads>();
}

// x = h * weight in bf16; the 1 / rms factor is the same for all rows and is applied to the sums (`inverse_rms`).
template <class B, int N>
__device__ __forceinline__ void stage_normed(B& b, const Slice<N>& h, const Slice<N>& weight) {
  float square = 0.f;
  Slice<N> scaled;
#pragma unroll
  for (int i = 0; i < Slice<N>::kPairs; i++) {
    square = fmaf(h.v[i].x, h.v[i].x, fmaf(h.v[i].y, h.v[i].y, square));
    scaled.v[i] = make_float2(h.v[i].x * weight.v[i].x, h.v[i].y * weight.v[i].y);
    *reinterpret_cast<float2*>(b.s.h + Slice<N>::index(i, b.tid)) = h.v[i];
  }
#pragma unroll
  for (int o = 16; o; o >>= 1) square += __shfl_xor_sync(~0u, square, o);
  if (b.lane == 0) b.s.square[b.warp] = square;
  stage_input(b, scaled);
}
template <int N, class B>
__device__ __forceinline__ float inverse_rms(const B& b) {
  float square = 0.f;
#pragma unroll
  for (int w = 0; w < kWarps; w++) square += b.s.square[w];
  return rsqrtf(square * (1.f / N) + 1e-6f);
}

// Rows of this block times the staged input; `finish(row, sum)` runs in one thread per row.
template <int Rows, int K, class B, class Finish>
__device__ __forceinline__ void matvec(B& b, Finish finish) {
  Matvec<Rows, K>::run(b.ring, b.s.x, b.s.partial, b.warp, b.lane, b.patience);
  sync_compute<kComputeThreads>();
  if (b.tid < Rows) finish(b.tid, Matvec<Rows, K>::sum(b.s.partial, b.tid));
}

// cache: of this block's head (see attention.cuh). h: residual in. Publishes the residual out as x.h_mlp.
template <class S, class B, class Cache>
__device__ __forceinline__ void layer(B& b, const StackWeights& w, int index, int position, const Slice<S::kHidden>& h,
                                      const Slice<S::kHidden>& input_norm, const Cache& cache) {
  const int splits = Cache::kWarpsUsed == 1 ? 1 : active_splits(position);
  const int head = b.block / kSplits, split = b.block % kSplits;

  stage_normed(b, h, input_norm);
  matvec<S::kQkvRows, S::kHidden>(b, [&](int row, float sum) {
    publish(b.x.qkv + b.block * S::kQkvRows + row, sum * inverse_rms<S::kHidden>(b), b.epoch);
  });

  b.mark(kQkv);
  if (split < splits && b.warp < Cache::kWarpsUsed) {
    const int kv_head = head / S::kGroup;
    const Head at{.q = b.x.qkv + head * kHeadDim,
                  .k = b.x.qkv + S::kQ + kv_head * kHeadDim,
                  .v = b.x.qkv + S::kQ + S::kKv + kv_head * kHeadDim,
                  .q_norm = w.q_norm + index * kHeadDim,
                  .k_norm = w.k_norm + index * kHeadDim,
                  .cos = w.rope_cos + position * (kHeadDim / 2),
                  .sin = w.rope_sin + position * (kHeadDim / 2),
                  .out = b.x.attn + split * S::kQ + head * kHeadDim,
                  .split = splits > 1 ? b.x.split + (head * kSplits + split) * 2 : nullptr};
    attend(at, cache, split, position, b.epoch, b.s.attention, b.warp, b.lane, b.patience);
  }

  b.mark(kAttention);
  const auto post_norm = load_slice<S::kHidden>(w.post_norm + index * S::kHidden, b.tid);
  stage_input(b, await_attention<S::kQ>(b.x, splits, b.epoch, b.tid, b.patience));
  matvec<S::kORows, S::kQ>(b, [&](int row, float sum) {
    const int i = b.block * S::kORows + row;
    publish(b.x.h_attn + i, b.s.h[i] + sum, b.epoch);
  });

  b.mark(kOut);
  stage_normed(b, await<S::kHidden>(b.x.h_attn, b.epoch, b.tid, b.patience), post_norm);
  Matvec<S::kGateUpRows, S::kHidden>::run(b.ring, b.s.x, b.s.partial, b.warp, b.lane, b.patience);
  sync_compute<kComputeThreads>();
  if (b.tid < S::kGateUpRows / 2) {  // rows alternate: gate, up
    const float inv = inverse_rms<S::kHidden>(b);
    const float gate = Matvec<S::kGateUpRows, S::kHidden>::sum(b.s.partial, 2 * b.tid) * inv;
    const float up = Matvec<S::kGateUpRows, S::kHidden>::sum(b.s.partial, 2 * b.tid + 1) * inv;
    publish(b.x.mlp + b.block * (S::kGateUpRows / 2) + b.tid, gate / (1.f + __expf(-gate)) * up, b.epoch);
  }

  b.mark(kGateUp);
  stage_input(b, await<S::kIntermediate>(b.x.mlp, b.epoch, b.tid, b.patience));
  matvec<S::kDownRows, S::kIntermediate>(b, [&](int row, float sum) {
    const int i = b.block * S::kDownRows + row;
    publish(b.x.h_mlp + i, b.s.h[i] + sum, b.epoch);
  });
  b.mark(kDown);
}

}  // namespace qmk
