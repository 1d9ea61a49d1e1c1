// From logits to a code, as sampling.py does it and in its order.
//
// The thread that finishes a row applies the rules and the temperature to its logit, adds the noise and publishes both.
// One block per column chooses among them and tells all others the code. If every block read every candidate, that
// would move 128 times as much: 6 MB for one column's code 0.
#pragma once
#include "layer.cuh"
#include "noise.cuh"

namespace qmk {

constexpr int kShortList = 512;  // candidates that are ranked all against all

struct DrawScratch {
  union {
    uint32_t list[kShortList];   // during a draw
    int code[kWarps][kColumns];  // behind it: the last code of each sequence, each warp's own copy
  };
  uint32_t bound[kWarps], listed, kth;
  int count[2][kWarps];
  float sum[2][kWarps], chosen;
  uint2 best[kWarps];
};

// What the reference does to code 0's logits: repetition penalty once per id spoken, no end of speech in the first
// frames, tags and speakers never.
__device__ __forceinline__ float code0_rule(const FrameParams& p, const Column& c, int id, float logit) {
  if (c.seen[id]) logit = logit < 0.f ? logit * c.repetition_penalty : logit * c.inverse_penalty;
  const bool eos = id == p.eos_id;
  if ((id >= p.first_suppressed_id && !eos) || (eos && c.frame < p.min_frames)) return -INFINITY;
  return logit;
}

// Floats as unsigned integers in the same order; 0 is below them all.
__device__ __forceinline__ uint32_t ordered(float x) {
  const uint32_t bits = __float_as_uint(x);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// This thread's candidates of one column: ids tid, tid + 512, ...
template <int N>
struct Candidates {
  static constexpr int kEach = (N + kComputeThreads - 1) / kComputeThreads;
  float logit[kEach], noisy[kEach];  // behind rules and temperature; plus noise
  uint32_t key[kEach];               // of the logit

  template <class B>
  __device__ __forceinline__ void await(B& b, const Packet* slots) {
    uint4 r[kEach];
    uint32_t here = 0;
#pragma unroll
    for (int i = 0; i < kEach; i++) {
      r[i] = make_uint4(__float_as_uint(-INFINITY), __float_as_uint(-INFINITY), 0, 0);
      here |= (i * kComputeThreads + b.tid < N) << i;
    }
    await_packets(r, here, [&](int i) { return slots + i * kComputeThreads + b.tid; }, b.epoch, b.patience);
#pragma unroll
    for (int i = 0; i < kEach; i++) {
      logit[i] = __uint_as_float(r[i].x), noisy[i] = __uint_as_float(r[i].y);
      key[i] = here >> i & 1 ? ordered(logit[i]) : 0;
    }
  }
  template <class Use>  // use(id, i) for every candidate of this thread
  __device__ __forceinline__ void each(int tid, Use use) const {
#pragma unroll
    for (int i = 0; i < kEach; i++)
      if (key[i]) use(i * kComputeThreads + tid, i);
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

// The id with the largest noisy logit among those whose logit is at least `kept` and above `floor` (as keys); the
// lowest id of a tie, 0 if there is none.
template <int N, class B>
__device__ __forceinline__ int largest(B& b, const Candidates<N>& c, uint32_t kept, uint32_t floor) {
  uint32_t best = 0, who = ~0u;
  c.each(b.tid, [&](int id, int i) {
    const uint32_t key = ordered(c.noisy[i]);
    if (c.key[i] >= kept && c.key[i] > floor && key > best) best = key, who = id;
  });
  const uint32_t top = __reduce_max_sync(~0u, best);
  who = __reduce_min_sync(~0u, best == top ? who : ~0u);
  if (b.lane == 0) b.s.draw.best[b.warp] = make_uint2(top, who);
  sync_compute<kComputeThreads>();
  uint2 winner = b.s.draw.best[0];
#pragma unroll
  for (int w = 1; w < kWarps; w++) {
    const uint2 other = b.s.draw.best[w];
    if (other.x > winner.x || (other.x == winner.x && other.y < winner.y)) winner = other;
  }
  return winner.x ? static_cast<int>(winner.y) : 0;
}

// The logit of one candidate, to all threads.
template <int N, class B>
__device__ __forceinline__ float logit_of(B& b, const Candidates<N>& c, int id) {
  c.each(b.tid, [&](int mine, int i) {
    if (mine == id) b.s.draw.chosen = c.logit[i];
  });
  sync_compute<kComputeThreads>();
  return b.s.draw.chosen;
}

// Key of the k-th largest logit. For the usual small k, the smallest of the warps' (k / 16)-th largest is a lower
// bound. It leaves one or two hundred candidates, which are ranked all against all. For large k: bit by bit.
template <int N, class B>
__device__ __forceinline__ uint32_t kth_largest(B& b, const Candidates<N>& c, int k) {
  DrawScratch& s = b.s.draw;
  const int rounds = (k + kWarps - 1) / kWarps;
  if (rounds <= 8) {
    uint32_t left[Candidates<N>::kEach], bound = 0;
#pragma unroll
    for (int i = 0; i < Candidates<N>::kEach; i++) left[i] = c.key[i];
    for (int r = 0; r < rounds; r++) {
      uint32_t best = 0;
#pragma unroll
      for (int i = 0; i < Candidates<N>::kEach; i++) best = max(best, left[i]);
      bound = __reduce_max_sync(~0u, best);
#pragma unroll
      for (int i = 0; i < Candidates<N>::kEach; i++) left[i] = left[i] == bound ? 0 : left[i];
    }
    if (b.lane == 0) s.bound[b.warp] = bound;
    if (b.tid == 0) s.listed = 0;
    sync_compute<kComputeThreads>();
#pragma unroll
    for (int w = 0; w < kWarps; w++) bound = min(bound, s.bound[w]);
    uint32_t count = 0, at[Candidates<N>::kEach];
#pragma unroll
    for (int i = 0; i < Candidates<N>::kEach; i++) {
      const uint32_t hits = __ballot_sync(~0u, c.key[i] && c.key[i] >= bound);
      at[i] = count + __popc(hits & ((1u << b.lane) - 1));
      count += __popc(hits);
    }
    uint32_t from = b.lane == 0 ? atomicAdd(&s.listed, count) : 0;
    from = __shfl_sync(~0u, from, 0);
#pragma unroll
    for (int i = 0; i < Candidates<N>::kEach; i++)
      if (c.key[i] && c.key[i] >= bound && from + at[i] < kShortList) s.list[from + at[i]] = c.key[i];
    sync_compute<kComputeThreads>();
    const int n = s.listed;
    if (n <= kShortList) {
      if (b.tid < n) {
        const uint32_t mine = s.list[b.tid];
        int above = 0, same = 0;
#pragma unroll 8
        for (int j = 0; j < n; j++) above += s.list[j] > mine, same += s.list[j] == mine;
        if (above < k && k <= above + same) s.kth = mine;
      }
      sync_compute<kComputeThreads>();
      return s.kth;
    }
  }
  uint32_t found = 0;
  for (int bit = 31; bit >= 0; bit--) {
    const uint32_t trial = found | 1u << bit;
    int count = 0;
    c.each(b.tid, [&](int, int i) { count += c.key[i] >= trial; });
    if (over_warps(b, count, s.count[bit & 1], [](int x, int y) { return x + y; }) >= k) found = trial;
  }
  return found;
}

// One draw: the largest noisy logit among those that top-k (ties with the k-th stay) and top-p leave.
template <int N, class B>
__device__ __forceinline__ int draw(B& b, const Candidates<N>& c, const DrawParams& d) {
  const uint32_t kept = d.sample && d.top_k > 0 && d.top_k < N ? kth_largest(b, c, d.top_k) : 0;
  if (!d.sample || d.top_p >= 1.f) return largest(b, c, kept, 0);
  // Top-p keeps the largest logits that together hold top_p of what top-k leaves. Candidates are tried in the order of
  // the draw; one stays if enough lies at or below it. The tries are bounded because a faulted launch may bring NaN.
  DrawScratch& s = b.s.draw;
  float top = -INFINITY, total = 0.f;
  c.each(b.tid, [&](int, int i) { top = fmaxf(top, c.logit[i]); });
  top = over_warps(b, top, s.sum[0], [](float x, float y) { return fmaxf(x, y); });
  c.each(b.tid, [&](int, int i) { total += c.key[i] >= kept ? expf(c.logit[i] - top) : 0.f; });
  total = over_warps(b, total, s.sum[1], [](float x, float y) { return x + y; });
  uint32_t floor = 0;
  for (int tries = 0; tries < N; tries++) {
    const int id = largest(b, c, kept, floor);
    const float logit = logit_of(b, c, id);
    float below = 0.f;  // of the probability, this candidate's included
    c.each(b.tid, [&](int, int i) { below += c.key[i] >= kept && c.logit[i] <= logit ? expf(c.logit[i] - top) : 0.f; });
    below = over_warps(b, below, s.sum[0], [](float x, float y) { return x + y; });
    if (logit == top || below > (1.f - d.top_p) * total) return id;
    floor = ordered(logit);
  }
  return 0;
}

}  // namespace qmk
