// Every PTX instruction of the kernel, as a named function.
#pragma once
#include <cuda_bf16.h>

#include <cstdint>

namespace qmk {

__device__ __forceinline__ uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// Barrier 1 among the compute warps; the producer warp never joins.
template <int Threads>
__device__ __forceinline__ void sync_compute() {
  asm volatile("bar.sync 1, %0;" ::"n"(Threads) : "memory");
}

// Barrier 2 among the first warps of a block.
__device__ __forceinline__ void sync_some(int threads) { asm volatile("bar.sync 2, %0;" ::"r"(threads) : "memory"); }

__device__ __forceinline__ void sync_threads(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// Barriers 3 .. among two warps.
__device__ __forceinline__ void sync_pair(int pair) { asm volatile("bar.sync %0, 64;" ::"r"(3 + pair) : "memory"); }

// Volatile, so that what is computed from them is computed where it is needed: kept across the layers, a hundred
// addresses would be spilled to local memory, of which too little fits in the cache beside 227 KB of shared memory.
__device__ __forceinline__ int thread_index() {
  int t;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(t));
  return t;
}
__device__ __forceinline__ int block_index() {
  int b;
  asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(b));
  return b;
}

// The producers hand registers over to the compute warps, where the architecture can.
template <int Registers, bool More>
__device__ __forceinline__ void set_registers() {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL) || defined(__CUDA_ARCH_FEAT_SM100_ALL) || defined(__CUDA_ARCH_FEAT_SM103_ALL)
  if constexpr (More) asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Registers));
  else asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Registers));
#endif
}

// Through L2 into shared memory, 16 bytes; zeros where there is nothing.
__device__ __forceinline__ void copy16(uint32_t shared, const void* global, bool there) {
  const int size = there ? 16 : 0;
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(size) : "memory");
}

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int d = 16; d; d /= 2) x += __shfl_xor_sync(~0u, x, d);
  return x;
}

// ---- to about the last bit, an instruction each
__device__ __forceinline__ float exp2_of(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float log2_of(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float inverse_of(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// ---- global memory between blocks: relaxed, straight to L2
// 16 bytes as one access: .b128 is never torn, where .v4 makes no promise.
__device__ __forceinline__ uint4 load_relaxed16(const void* p) {
  uint64_t a, b;
  asm volatile("{\n .reg .b128 v;\n ld.relaxed.gpu.global.b128 v, [%2];\n mov.b128 {%0,%1}, v;\n}"
               : "=l"(a), "=l"(b)
               : "l"(p)
               : "memory");
  return make_uint4(static_cast<uint32_t>(a), static_cast<uint32_t>(a >> 32), static_cast<uint32_t>(b),
                    static_cast<uint32_t>(b >> 32));
}
__device__ __forceinline__ void store_relaxed16(void* p, uint4 v) {
  const uint64_t a = v.x | static_cast<uint64_t>(v.y) << 32, b = v.z | static_cast<uint64_t>(v.w) << 32;
  asm volatile("{\n .reg .b128 v;\n mov.b128 v, {%1,%2};\n st.relaxed.gpu.global.b128 [%0], v;\n}" ::"l"(p), "l"(a),
               "l"(b)
               : "memory");
}
__device__ __forceinline__ void store_relaxed8(void* p, uint32_t a, uint32_t b) {
  asm volatile("st.relaxed.gpu.global.v2.u32 [%0], {%1,%2};" ::"l"(p), "r"(a), "r"(b) : "memory");
}
__device__ __forceinline__ uint2 load_relaxed8(const void* p) {
  uint2 v;
  asm volatile("ld.relaxed.gpu.global.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(p) : "memory");
  return v;
}
__device__ __forceinline__ uint32_t load_relaxed4(const void* p) {
  uint32_t v;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
__device__ __forceinline__ void prefetch_l2(const void* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }
__device__ __forceinline__ uint32_t clock_now() {
  uint32_t t;
  asm volatile("mov.u32 %0, %%clock;" : "=r"(t)::"memory");
  return t;
}
__device__ __forceinline__ uint64_t global_timer() {
  uint64_t t;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t)::"memory");
  return t;
}

// ---- mbarriers and copies into shared memory: bulk copies where they exist (Hopper and later), cp.async elsewhere
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
constexpr bool kBulkCopies = true;
#else
constexpr bool kBulkCopies = false;
#endif

__device__ __forceinline__ void mbarrier_init(uint32_t bar, uint32_t count) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(bar), "r"(count) : "memory");
}
// One arrival for a warp, behind all that its lanes did.
__device__ __forceinline__ void mbarrier_arrive_as_warp(uint32_t bar) {
  __syncwarp();
  if (threadIdx.x % 32 == 0)
    asm volatile("{\n .reg .b64 state;\n mbarrier.arrive.shared.b64 state, [%0];\n}" ::"r"(bar) : "memory");
}
// This lane's arrival, once its copies so far have landed.
__device__ __forceinline__ void mbarrier_arrive_after_copies(uint32_t bar) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(bar) : "memory");
}
// Arrive once `loaded`, made of what this warp has just loaded from shared memory, is there. Without it the arrival
// overtakes the loads: the stage was refilled under them, and about every tenth launch of 8 columns was wrong. Adds 0
// to the address in a way that ptxas cannot fold.
__device__ __forceinline__ void mbarrier_arrive_after_loads(uint32_t bar, uint32_t loaded) {
  asm volatile(
      "{\n .reg .b32 t;\n .reg .b64 state;\n popc.b32 t, %1;\n shr.u32 t, t, 6;\n add.u32 t, t, %0;\n "
      "mbarrier.arrive.shared.b64 state, [t];\n}" ::"r"(bar),
      "r"(loaded)
      : "memory");
}
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
__device__ __forceinline__ void mbarrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
__device__ __forceinline__ void mbarrier_expect(uint32_t bar, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
}
__device__ __forceinline__ bool mbarrier_try_wait(uint32_t bar, uint32_t parity) {
  uint32_t done;
  asm volatile("{\n .reg .pred p;\n mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n selp.u32 %0, 1, 0, p;\n}"
               : "=r"(done)
               : "r"(bar), "r"(parity)
               : "memory");
  return done;
}
__device__ __forceinline__ void bulk_copy(uint32_t dst, const void* src, uint32_t bytes, uint32_t bar,
                                          uint64_t policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::
          "r"(dst),
      "l"(src), "r"(bytes), "r"(bar), "l"(policy)
      : "memory");
}
__device__ __forceinline__ void bulk_copy(uint32_t dst, const void* src, uint32_t bytes, uint32_t bar) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(dst),
               "l"(src), "r"(bytes), "r"(bar)
               : "memory");
}
// Into both blocks of a cluster, at the same place; each is told by its own mbarrier.
__device__ __forceinline__ void bulk_copy_to_pair(uint32_t dst, const void* src, uint32_t bytes, uint32_t bar) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1], %2, [%3], "
      "%4;" ::"r"(dst),
      "l"(src), "r"(bytes), "r"(bar), "h"(static_cast<uint16_t>(3))
      : "memory");
}
// Arrive at that mbarrier of a block of the cluster, behind products by `wgmma` that are done. With `.release.cluster`,
// for what was written, it would wait for the whole GPU each time.
__device__ __forceinline__ void mbarrier_arrive_at(uint32_t bar, int rank) {
  asm volatile(
      "{\n .reg .b32 there;\n mapa.shared::cluster.u32 there, %0, %1;\n "
      "mbarrier.arrive.shared::cluster.b64 _, [there];\n}" ::"r"(bar),
      "r"(rank)
      : "memory");
}
__device__ __forceinline__ void copy16(uint32_t, const void*, uint64_t) {}
#else
__device__ __forceinline__ void mbarrier_init_fence() { __threadfence_block(); }
__device__ __forceinline__ void mbarrier_expect(uint32_t, uint32_t) {}
__device__ __forceinline__ bool mbarrier_try_wait(uint32_t bar, uint32_t parity) {
  uint32_t done;
  asm volatile("{\n .reg .pred p;\n mbarrier.test_wait.parity.shared.b64 p, [%1], %2;\n selp.u32 %0, 1, 0, p;\n}"
               : "=r"(done)
               : "r"(bar), "r"(parity)
               : "memory");
  return done;
}
__device__ __forceinline__ void bulk_copy(uint32_t, const void*, uint32_t, uint32_t, uint64_t) {}
__device__ __forceinline__ void copy16(uint32_t dst, const void* src, uint64_t policy) {
  asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;" ::"r"(dst), "l"(src), "l"(policy)
               : "memory");
}
#endif
// What is waited for takes microseconds. A wait that never ends is a fault, which the host sees.
__device__ __forceinline__ void mbarrier_wait(uint32_t bar, uint32_t parity) {
  for (int polls = 0; !mbarrier_try_wait(bar, parity); ++polls)
    if (polls == 1 << 20) __trap();
}
// Marks cache lines as the first or the last to leave L2.
__device__ __forceinline__ uint64_t policy_evict_last() {
  uint64_t p;
  asm volatile("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(p));
  return p;
}
__device__ __forceinline__ uint64_t policy_evict_first() {
  uint64_t p;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(p));
  return p;
}
__device__ __forceinline__ uint4 load_shared16(uint32_t address) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(address)
               : "memory");
  return v;
}

// ---- two fp16 halves, the first one below; what is too large becomes the largest, and NaN stays
__device__ __forceinline__ uint32_t pack_halves(float first, float second) {
  uint32_t y;
  asm("cvt.rn.satfinite.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(second), "f"(first));
  return y;
}

// ---- two bf16 times two bf16; as a fused multiply-add, which sm_80 has too
__device__ __forceinline__ uint32_t multiply_bf16x2(uint32_t a, uint32_t b) {
  uint32_t y;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(y) : "r"(a), "r"(b), "r"(0x80008000));
  return y;
}

// ---- tensor cores: c[16][8] += a[16][16] b[16][8], bf16 in, fp32 out
__device__ __forceinline__ void mma_16x8x16(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                                            uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

}  // namespace qmk
