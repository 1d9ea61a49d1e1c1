// From logits to a code, as sampling.py does it and in its order.
//
// The thread that finishes a row applies the rules and the temperature to its logit, adds the noise and publishes both.
// Every block then sees all candidates and chooses alike, so the code needs no exchange of its own.
#pragma once
#include "layer.cuh"
#include "noise.cuh"

namespace qmk {

// What the reference does to code 0's logits: repetition penalty once per id spoken, no end of speech in the first
// frames, tags and speakers never.
__device__ __forceinline__ float code0_rule(const FrameParams& p, int id, float logit) {
  if (p.seen[id]) logit = logit < 0.f ? logit * p.repetition_penalty : logit * p.inverse_penalty;
  const bool eos = id == p.eos_id;
  if ((id >= p.first_suppressed_id && !eos) || (eos && p.frame < p.min_frames)) return -INFINITY;
  return logit;
}

// Floats as unsigned integers in the same order.
__device__ __forceinline__ uint32_t ordered(float x) {
  const uint32_t bits = __float_as_uint(x);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

template <int N>
struct Candidates {
  Slice<N> logit, noisy;  // behind rules and temperature; plus noise

  template <class Use>  // use(id, logit, noisy) for every candidate of this thread
  __device__ __forceinline__ void each(int tid, Use use) const {
#pragma unroll
    for (int i = 0; i < Slice<N>::kPairs; i++) {
      const int id = Slice<N>::index(i, tid);
      use(id, logit.v[i].x, noisy.v[i].x), use(id + 1, logit.v[i].y, noisy.v[i].y);
    }
  }
};

// One value per warp to all threads; consecutive calls must name different scratch rows.
template <class T, class B, class Combine>
__device__ __forceinline__ T over_warps(B& b, T value, T* scratch, Combine combine) {
#pragma unroll
  for (int o = 16; o; o >>= 1) value = combine(value, __shfl_xor_sync(~0u, value, o));
  if (b.lane == 0) scratch[b.warp] = value;
  sync_compute<kComputeThreads>();
  value = scratch[0];
#pragma unroll
  for (int w = 1; w < kWarps; w++) value = combine(value, scratch[w]);
  return value;
}

// The id with the largest noisy logit among those whose logit is above `floor`; the lowest id of a tie.
template <int N, class B>
__device__ __forceinline__ int largest(B& b, const Candidates<N>& c, float floor) {
  unsigned long long best = 0;
  c.each(b.tid, [&](int id, float logit, float noisy) {
    const auto key = static_cast<unsigned long long>(ordered(noisy)) << 32 | ~static_cast<uint32_t>(id);
    if (logit > floor || floor == -INFINITY) best = max(best, key);
  });
  best = over_warps(b, best, b.s.best, [](auto x, auto y) { return max(x, y); });
  return max(static_cast<int>(~static_cast<uint32_t>(best)), 0);  // 0 if nothing was above the floor
}

// The logit of one candidate, to all threads.
template <int N, class B>
__device__ __forceinline__ float logit_of(B& b, const Candidates<N>& c, int id) {
  c.each(b.tid, [&](int mine, float logit, float) {
    if (mine == id) b.s.chosen = logit;
  });
  sync_compute<kComputeThreads>();
  return b.s.chosen;
}

// The logit that the k-th largest candidate has, found bit by bit.
template <int N, class B>
__device__ __forceinline__ uint32_t kth_largest(B& b, const Candidates<N>& c, int k) {
  uint32_t found = 0;
  for (int bit = 31; bit >= 0; bit--) {
    const uint32_t trial = found | 1u << bit;
    int count = 0;
    c.each(b.tid, [&](int, float logit, float) { count += ordered(logit) >= trial; });
    if (over_warps(b, count, b.s.count[bit & 1], [](int x, int y) { return x + y; }) >= k) found = trial;
  }
  return found;
}

// One draw. Top-k without sorting: the overall winner is drawn first; it stands if fewer than k candidates have a larger
// logit, else everything up to its logit is out of the top k and the rest draws again. The noise stays, so the result is
// the winner among the top k, ties with the k-th included. The tries are bounded because a faulted launch may bring NaN.
template <int N, class B>
__device__ __forceinline__ int draw(B& b, const Candidates<N>& c, const DrawParams& d) {
  if (!d.sample || (d.top_k == 0 && d.top_p >= 1.f)) return largest(b, c, -INFINITY);
  if (d.top_p < 1.f) {  // keep the largest logits that together hold top_p of what top-k leaves
    const uint32_t kept = d.top_k ? kth_largest(b, c, d.top_k) : 0;
    float top = -INFINITY, total = 0.f;
    c.each(b.tid, [&](int, float logit, float) { top = fmaxf(top, logit); });
    top = over_warps(b, top, b.s.sum[0], [](float x, float y) { return fmaxf(x, y); });
    c.each(b.tid, [&](int, float logit, float) { total += ordered(logit) >= kept ? expf(logit - top) : 0.f; });
    total = over_warps(b, total, b.s.sum[1], [](float x, float y) { return x + y; });
    float floor = -INFINITY;
    for (int tries = 0; tries < N; tries++) {
      const int id = largest(b, c, floor);
      const float logit = logit_of(b, c, id);
      float below = 0.f;  // of the probability, this candidate's included
      c.each(b.tid, [&](int, float other, float) {
        below += ordered(other) >= kept && other <= logit ? expf(other - top) : 0.f;
      });
      below = over_warps(b, below, b.s.sum[0], [](float x, float y) { return x + y; });
      if (logit == top || (ordered(logit) >= kept && below > (1.f - d.top_p) * total)) return id;
      floor = logit;
    }
    return 0;
  }
  float floor = -INFINITY;
  for (int tries = 0; tries < N; tries++) {
    const int id = largest(b, c, floor);
    const float logit = logit_of(b, c, id);
    int above = 0;
    c.each(b.tid, [&](int, float other, float) { above += other > logit; });
    if (over_warps(b, above, b.s.count[0], [](int x, int y) { return x + y; }) < d.top_k) return id;
    floor = logit;
  }
  return 0;
}

}  // namespace qmk
