// From logits to a code. Every block holds all logits and draws alike, so the code needs no exchange of its own.
#pragma once
#include "layer.cuh"

namespace qmk {

// What the reference does to code 0's logits: repetition penalty once per id spoken, no end of speech in the first
// frames, tags and speakers never.
__device__ __forceinline__ float code0_rule(const FrameParams& p, int id, float logit) {
  if (p.seen[id]) logit = logit < 0.f ? logit * p.repetition_penalty : logit / p.repetition_penalty;
  const bool eos = id == p.eos_id;
  if ((id >= p.first_suppressed_id && !eos) || (eos && p.frame < p.min_frames)) return -INFINITY;
  return logit;
}

// Floats as unsigned integers in the same order.
__device__ __forceinline__ uint32_t ordered(float x) {
  const uint32_t bits = __float_as_uint(x);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// The largest logit's id, the lowest one of a tie; the same in every thread.
template <int N, class B>
__device__ __forceinline__ int argmax(B& b, const Slice<N>& logits) {
  unsigned long long best = 0;
#pragma unroll
  for (int i = 0; i < Slice<N>::kPairs; i++) {
    const uint32_t id = Slice<N>::index(i, b.tid);
    best = max(best, static_cast<unsigned long long>(ordered(logits.v[i].x)) << 32 | ~id);
    best = max(best, static_cast<unsigned long long>(ordered(logits.v[i].y)) << 32 | ~(id + 1));
  }
#pragma unroll
  for (int o = 16; o; o >>= 1) best = max(best, __shfl_xor_sync(~0u, best, o));
  if (b.lane == 0) b.s.best[b.warp] = best;
  sync_compute<kComputeThreads>();
#pragma unroll
  for (int w = 0; w < kWarps; w++) best = max(best, b.s.best[w]);
  return static_cast<int>(~static_cast<uint32_t>(best));
}

}  // namespace qmk
