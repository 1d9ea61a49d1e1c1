// The weight ring: how a block's weights reach its tensor cores without ever waiting for the data.
//
// A block reads the same weights in the same order in every frame, so they lie in memory in that order (its ribbon).
// A producer warp, or two in turn, copy them stage after stage into a ring in shared memory. A full ring stops them,
// and so does their pace (params.h): megabytes on their way would delay what blocks tell each other. The compute warps
// wait for a stage, each takes its own 16 bytes per lane and unit, and hands the stage back.
#pragma once
#include "../patience.cuh"
#include "dims.cuh"
#include "fp8.cuh"
#include "params.h"

namespace qmk {

struct Ring {
  uint32_t data, full, empty;  // shared addresses: stages, "stage is filled", "stage is free"
  int stages;
  int stage = 0;
  uint32_t round = 0;   // how often the ring has gone round
  uint32_t copied = 0;  // producer: clock of its last copy, ...
  int turn = 0;         // ... and stages until its next one

  __device__ void init() const {
    for (int i = 0; i < stages; i++) {
      mbarrier_init(full + i * 8, kBulkCopies ? 1 : 32);
      mbarrier_init(empty + i * 8, kComputeThreads);
    }
    mbarrier_init_fence();
  }
  __device__ __forceinline__ void next() {
    if (++stage == stages) stage = 0, round++;
  }

  // Producer, one thread where copies come in bulk, else a warp: fill the next stage with so many bytes, if it is its
  // turn. last: they ask to stay in L2, else they leave it first.
  __device__ __forceinline__ void copy_stage(const void* from, int bytes, bool last, const Pace& pace,
                                             Patience& patience, int lane) {
    if constexpr (kProducers > 1) {
      if (turn--) return next();
      turn = kProducers - 1;
    }
    const uint8_t* src = static_cast<const uint8_t*>(from);
    const uint64_t policy = last ? policy_evict_last() : policy_evict_first();
    const uint32_t dst = data + stage * kStageBytes, bar = full + stage * 8;
    if (round) patience.wait_barrier(empty + stage * 8, (round - 1) & 1);
    if constexpr (kBulkCopies) {
      const int ahead = min(pace.stages, stages);
      // The stage so many before this one has arrived. Not beside another producer: it may have filled that stage again
      // by now, and a barrier tells only two rounds apart.
      if (kProducers == 1 && (round || stage >= ahead)) {
        const bool wraps = stage < ahead;
        patience.wait_barrier(full + (stage - ahead + wraps * stages) * 8, (round - wraps) & 1);
      }
      mbarrier_expect(bar, bytes);
#pragma unroll 1
      for (int o = 0; o < bytes; o += kCopyBytes) {
        while (clock_now() - copied < kProducers * pace.cycles) {
        }
        copied = clock_now();
        bulk_copy(dst + o, src + o, min(bytes - o, kCopyBytes), bar, policy);
      }
    } else {
#pragma unroll 8
      for (int j = lane * 16; j < bytes; j += 32 * 16) copy16(dst + j, src + j, policy);
      mbarrier_arrive_after_copies(bar);
    }
    next();
  }
  // n stages that lie one after the other; of every 15 `pinned` ask to stay in L2. Returns what lies behind them.
  __device__ const uint8_t* copy(const uint8_t* src, int n, int pinned, const Pace& pace, Patience& patience,
                                 int lane) {
    for (int i = 0; i < n; i++, src += kStageBytes) copy_stage(src, kStageBytes, i % 15 < pinned, pace, patience, lane);
    return src;
  }

  // Consumer: use(address) reads what it wants of the next stage, and returns something of every load of it.
  template <class Use>
  __device__ __forceinline__ void visit(Patience& patience, Use use) {
    patience.wait_barrier(full + stage * 8, round & 1);
    const uint32_t loaded = use(data + stage * kStageBytes);
    mbarrier_arrive_after_loads(empty + stage * 8, loaded);
    next();
  }
  // Consumer: this lane's fragments of the next stage, twice as many where they are E4M3.
  template <int Units>
  __device__ __forceinline__ void take(uint4 (&unit)[Units], int warp, int lane, Patience& patience) {
    static_assert(Units == stage_units(false) || Units == stage_units(true));
    patience.wait_barrier(full + stage * 8, round & 1);
    uint4 raw[kStageUnits];
#pragma unroll
    for (int j = 0; j < kStageUnits; j++)
      raw[j] = load_shared16(data + stage * kStageBytes + j * kUnitBytes + (warp * 32 + lane) * 16);
    uint32_t loaded = 0;
#pragma unroll
    for (int j = 0; j < kStageUnits; j++) loaded |= raw[j].x;
    mbarrier_arrive_after_loads(empty + stage * 8, loaded);
    next();
#pragma unroll
    for (int j = 0; j < kStageUnits; j++) {
      if constexpr (Units == kStageUnits) unit[j] = raw[j];
      else unit[2 * j] = widen_e4m3(raw[j].x, raw[j].y), unit[2 * j + 1] = widen_e4m3(raw[j].z, raw[j].w);
    }
  }
};

}  // namespace qmk
