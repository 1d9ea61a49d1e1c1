// From logits to a code, as sampling.py does it and in its order.
//
// The thread that finishes a row applies the rules and the temperature to its logit, adds the noise and publishes both.
// One block per column chooses among them and tells all others the code. If every block read every candidate, that
// would move 128 times as much: 6 MB for one column's code 0.
#pragma once
#include "layer.cuh"
#include "noise.cuh"
#include "order.cuh"

namespace qmk {

constexpr int kShortList = 512;  // candidates that are ranked all against all

struct DrawScratch {
  union {
    uint32_t list[kShortList];   // during a draw with top-p
    int code[kWarps][kColumns];  // behind it: the last code of each sequence, each warp's own copy
  };
  uint4 best[2][kWarps];  // of Candidate, each warp's; steps take them in turn
  uint32_t bound[kWarps], listed, kth;
  int count[2][kWarps];
  float sum[2][kWarps];
};

// What the reference does to code 0's logits: repetition penalty once per id spoken, no end of speech in the first
// frames, tags and speakers never.
__device__ __forceinline__ float code0_rule(const FrameParams& p, const Column& c, int id, float logit) {
  if (c.seen[id]) logit = logit < 0.f ? logit * c.repetition_penalty : logit * c.inverse_penalty;
  const bool eos = id == p.eos_id;
  if ((id >= p.first_suppressed_id && !eos) || (eos && c.frame < p.min_frames)) return -INFINITY;
  return logit;
}

// Floats as unsigned integers in the same order; 0 is below them all. -0 counts as 0, as it does for floats.
__device__ __forceinline__ uint32_t ordered(float x) {
  const uint32_t bits = __float_as_uint(__fadd_rn(x, 0.f));
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

__device__ __forceinline__ float value_of(uint32_t key) {
  return __uint_as_float(key & 0x80000000u ? key & 0x7fffffffu : ~key);
}

// What codes bring along: their embeddings, the talker's input, and their rows of the tables.
template <class Dims>
struct CodeRows {
  const FrameParams& p;

  __device__ __forceinline__ const bf16* embedding(int group, int code) const {
    return group ? p.code_embedding + (static_cast<size_t>(group - 1) * Dims::kCodes + code) * Dims::Talker::kHidden
                 : p.code0_embedding + static_cast<size_t>(code) * Dims::Talker::kHidden;
  }
  // 4 values of a column's input from `at` on; one of them.
  __device__ __forceinline__ float4 talker_input(const Column& c, int at) const {
    if (c.input_id == kPrecomputed) return *reinterpret_cast<const float4*>(c.row + at);
    const float4 code = widened(*reinterpret_cast<const uint2*>(embedding(0, c.input_id) + at), 1.f);
    const float4 text = widened(*reinterpret_cast<const uint2*>(c.input_text + at), 1.f);
    return make_float4(code.x + text.x, code.y + text.y, code.z + text.z, code.w + text.w);
  }
  __device__ __forceinline__ float talker_value(const Column& c, int row) const {
    return c.input_id == kPrecomputed
               ? c.row[row]
               : __bfloat162float(embedding(0, c.input_id)[row]) + __bfloat162float(c.input_text[row]);
  }
  // Some blocks are about to read a code's heads, all its embedding. They go to L2 while the code goes to them, or
  // while the block still counts.
  template <class B>
  __device__ __forceinline__ void prefetch(const B& b, int group, int code) const {
    using P = typename Dims::Predictor;
    if (group + 1 < kGroups && pass_mode(p, group + 1) == PassMode::kLookedUp && b.tid < (P::kQkv + P::kQ) / 64)
      prefetch_l2(table_heads(group, code) + b.tid * 64);
    if (b.tid < Dims::Talker::kHidden / 64) prefetch_l2(embedding(group, code) + b.tid * 64);
  }
  // Publish a head's logit: behind the rules and the temperature, and that plus noise. `column`: the number of c.
  template <class B>
  __device__ __forceinline__ void publish_logit(B& b, const Column& c, int column, int group, int id, float logit,
                                                float noise) const {
    const DrawParams& d = group ? c.draw : c.draw0;
    if (p.logits_out) p.logits_out[(column * kGroups + group) * Dims::kCodecVocab + id] = logit;
    if (!(fabsf(logit) < INFINITY)) p.codes[column * kResultWords + kGroups] = 1;
    if (group == 0) logit = code0_rule(p, c, id, logit);
    if (d.sample) logit = __fmul_rn(logit, d.inverse_temperature);
    publish(b.x.logits + column * Dims::kCodecVocab + id, ordered(logit),
            ordered(d.sample ? __fadd_rn(logit, noise) : logit), 0, b.epoch);
  }
  // A code was drawn: for the host, the vocoder and the repetition penalty.
  __device__ __forceinline__ void keep(const Column& c, int column, int group, int code) const {
    p.codes[column * kResultWords + group] = code;
    c.recent[c.frame % kRecentFrames * kGroups + group] = code;
    if (group == 0 && code != p.eos_id) c.seen[code] = 1;
  }
  // The row of the tables for the code of a group.
  static __device__ __forceinline__ size_t table_row(int group, int code) {
    return static_cast<size_t>(group + 1 - kFirstLookedUp) * Dims::kCodes + code;
  }
  __device__ __forceinline__ bf16* table_heads(int group, int code) const {
    return p.tables.heads + table_row(group, code) * (Dims::Predictor::kQkv + Dims::Predictor::kQ);
  }
};

// This thread's candidates of one column: ids tid, tid + 512, ... 0: there is none.
template <int N>
struct Candidates {
  static constexpr int kEach = (N + kComputeThreads - 1) / kComputeThreads;
  uint32_t key[kEach], noisy[kEach];  // of the logit behind rules and temperature; of that plus noise

  template <class B>
  __device__ __forceinline__ void await(B& b, const Packet* slots) {
    uint4 r[kEach] = {};
    uint32_t here = 0;
#pragma unroll
    for (int i = 0; i < kEach; i++) here |= (i * kComputeThreads + b.tid < N) << i;
    await_packets(r, here, [&](int i) { return slots + i * kComputeThreads + b.tid; }, b.epoch, b.patience);
#pragma unroll
    for (int i = 0; i < kEach; i++) key[i] = r[i].x, noisy[i] = r[i].y;
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

// A candidate that may be drawn. noisy: 0 if there was none, and then id is 0 too.
struct Candidate {
  uint32_t noisy, id, key;
};

// The candidate with the largest noisy logit among those whose key is at least `from` > 0, the lowest id of a tie; and
// how many keys are above `than`. Consecutive calls must name different scratch.
template <int N, class B>
__device__ __forceinline__ Candidate largest(B& b, const Candidates<N>& c, uint32_t from, uint4 (&scratch)[kWarps],
                                             uint32_t than, int& above) {
  Candidate best{0, ~0u, 0};
  int count = 0;
#pragma unroll
  for (int i = 0; i < c.kEach; i++) {
    if (c.key[i] >= from && c.noisy[i] > best.noisy)
      best = {c.noisy[i], static_cast<uint32_t>(i * kComputeThreads + b.tid), c.key[i]};
    count += c.key[i] > than;
  }
  uint32_t top = __reduce_max_sync(~0u, best.noisy), id = __reduce_min_sync(~0u, best.noisy == top ? best.id : ~0u);
  count = __reduce_add_sync(~0u, count);
  if (best.id == id) scratch[b.warp] = make_uint4(top, id, best.key, count);  // where all have none, all say so
  sync_compute<kComputeThreads>();
  const uint4 r = scratch[b.lane % kWarps];
  top = __reduce_max_sync(~0u, r.x), id = __reduce_min_sync(~0u, r.x == top ? r.y : ~0u);
  above = __reduce_add_sync(~0u, b.lane < kWarps ? r.w : 0);
  return {top, top ? id : 0, __reduce_max_sync(~0u, r.y == id ? r.z : 0)};
}

// The id with the largest noisy logit among those of the k largest logits (ties with the k-th stay). Candidates are
// tried in the order of their noisy logits; one stays if fewer than k logits are above its own. Else all that are not
// above it go too, so tries are few: three or four where 2,048 are much alike. The block looks for the next one while
// it counts. prefetch(id): it may be the one.
template <int N, class B, class Prefetch>
__device__ __forceinline__ int largest_of_top(B& b, const Candidates<N>& c, int k, Prefetch prefetch) {
  Candidate tried{0, 0, 0};  // N are above it
  for (int step = 0;; step++) {
    int above;
    const Candidate next = largest(b, c, tried.key + 1, b.s.draw.best[step & 1], tried.key, above);
    if (above < k) return tried.id;
    tried = next;
    if (k == N || !tried.noisy) return tried.id;
    prefetch(tried.id);
  }
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
    bound = max(bound, 1);
    uint32_t count = 0, at[Candidates<N>::kEach];
#pragma unroll
    for (int i = 0; i < Candidates<N>::kEach; i++) {
      const uint32_t hits = __ballot_sync(~0u, c.key[i] >= bound);
      at[i] = count + __popc(hits & ((1u << b.lane) - 1));
      count += __popc(hits);
    }
    uint32_t from = b.lane == 0 ? atomicAdd(&s.listed, count) : 0;
    from = __shfl_sync(~0u, from, 0);
#pragma unroll
    for (int i = 0; i < Candidates<N>::kEach; i++)
      if (c.key[i] >= bound && from + at[i] < kShortList) s.list[from + at[i]] = c.key[i];
    sync_compute<kComputeThreads>();
    const int n = s.listed;
    if (n <= kShortList) {
      if (b.tid < n) {
        const uint32_t key = s.list[b.tid];
        int above = 0, same = 0;
#pragma unroll 8
        for (int j = 0; j < n; j++) above += s.list[j] > key, same += s.list[j] == key;
        if (above < k && k <= above + same) s.kth = key;
      }
      sync_compute<kComputeThreads>();
      return s.kth;
    }
  }
  uint32_t found = 0;
  for (int bit = 31; bit >= 0; bit--) {
    const uint32_t trial = found | 1u << bit;
    int count = 0;
#pragma unroll
    for (int i = 0; i < c.kEach; i++) count += c.key[i] >= trial;
    if (over_warps(b, count, s.count[bit & 1], [](int x, int y) { return x + y; }) >= k) found = trial;
  }
  return found;
}

// One draw: the largest noisy logit among those that top-k (ties with the k-th stay) and top-p leave.
template <int N, class B, class Prefetch>
__device__ __forceinline__ int draw(B& b, const Candidates<N>& c, const DrawParams& d, Prefetch prefetch) {
  const int k = d.sample && d.top_k > 0 ? min(d.top_k, N) : N;
  if (!d.sample || d.top_p >= 1.f) return largest_of_top(b, c, k, prefetch);
  // Top-p keeps the largest logits that together hold top_p of what top-k leaves. Candidates are tried in the order of
  // the draw; one stays if enough lies at or below it. The tries are bounded because a faulted launch may bring NaN.
  const uint32_t kept = k < N ? kth_largest(b, c, k) : 1;
  DrawScratch& s = b.s.draw;
  uint32_t most = 0;
  float logit[Candidates<N>::kEach];  // of those that top-k leaves
#pragma unroll
  for (int i = 0; i < c.kEach; i++) {
    most = max(most, c.key[i]);
    logit[i] = c.key[i] >= kept ? value_of(c.key[i]) : -INFINITY;
  }
  const float top = value_of(over_warps(b, most, s.bound, [](uint32_t x, uint32_t y) { return max(x, y); }));
  auto share = [&](float limit, float* scratch) {  // of the probability, what lies at or below a logit
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < c.kEach; i++) sum += logit[i] <= limit ? expf(logit[i] - top) : 0.f;
    return over_warps(b, sum, scratch, [](float x, float y) { return x + y; });
  };
  const float total = share(top, s.sum[1]);
  uint32_t from = kept;
  for (int tries = 0; tries < N; tries++) {
    int ignored;
    const Candidate tried = largest(b, c, from, s.best[0], ~0u, ignored);
    const float limit = value_of(tried.key);
    if (share(limit, s.sum[0]) > (1.f - d.top_p) * total || limit == top) return tried.id;
    from = tried.key + 1;
  }
  return 0;
}

}  // namespace qmk
