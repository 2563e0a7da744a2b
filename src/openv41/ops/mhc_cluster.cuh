// What thread blocks do together: copies under way, barriers, each other's memory, counters.
#pragma once

#include <cstdint>
#include <cuda_runtime.h>

namespace {

__device__ __forceinline__ uint32_t address_of(const void *shared) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(shared));
}

// 16 bytes of memory on their way to shared memory; zeros where the row is not ``inside``.
__device__ __forceinline__ void copy_async(void *to, const void *from, bool inside) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(address_of(to)),
               "l"(from), "r"(inside ? 16 : 0)
               : "memory");
}

__device__ __forceinline__ void commit_copies() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// All but the newest kLeft groups of this thread's copies are there.
template <int kLeft>
__device__ __forceinline__ void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kLeft) : "memory");
}

__device__ __forceinline__ uint32_t cluster_rank() {
  uint32_t rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// The others' memory is there once they have begun; what this thread has set up is seen by then.
__device__ __forceinline__ void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}

__device__ __forceinline__ void cluster_wait() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// A barrier has turns of so many arrivals.
__device__ __forceinline__ void set_up(uint64_t *barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(address_of(barrier)), "r"(arrivals)
               : "memory");
}

// What has been set up is seen by copies and by the other blocks of the cluster.
__device__ __forceinline__ void show_set_up() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// An arrival; the turn ends when that many bytes have been sent here, too.
__device__ __forceinline__ void expect(uint64_t *barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(address_of(barrier)),
               "r"(bytes)
               : "memory");
}

__device__ __forceinline__ void arrive(uint64_t *barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(address_of(barrier)) : "memory");
}

__device__ __forceinline__ void await_turn(uint64_t *barrier, uint32_t parity) {
  uint32_t done;
  do {
    asm volatile(
        "{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; "
        "selp.u32 %0, 1, 0, p; }"
        : "=r"(done)
        : "r"(address_of(barrier)), "r"(parity)
        : "memory");
  } while (!done);
}

// Part of a row on its way to shared memory, by the copy engine; multiples of 16 bytes.
__device__ __forceinline__ void copy_bulk(void *to, const void *from, uint32_t bytes,
                                          uint64_t *barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
          address_of(to)),
      "l"(from), "r"(bytes), "r"(address_of(barrier))
      : "memory");
}

// A row on its way to L2; a copy engine that is asked for a few hundred bytes at a time falls behind.
__device__ __forceinline__ void prefetch_bulk(const void *from, uint32_t bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
}

// Into the shared memory of another block, at the place where it is in this one.
__device__ __forceinline__ void send_to(uint32_t rank, float *place, uint64_t *barrier,
                                        float value) {
  uint32_t there, at_barrier;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address_of(place)), "r"(rank));
  asm("mapa.shared::cluster.u32 %0, %1, %2;"
      : "=r"(at_barrier)
      : "r"(address_of(barrier)), "r"(rank));
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.f32 [%0], %1, [%2];" ::"r"(
                   there),
               "f"(value), "r"(at_barrier)
               : "memory");
}

// What the warp has written is seen by those who await the count; by one lane, after the others.
__device__ __forceinline__ void count_up(unsigned *counter) {
  asm volatile("fence.acq_rel.gpu;" ::: "memory");
  asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(counter) : "memory");
}

__device__ __forceinline__ void await_count(unsigned *counter, unsigned count) {
  unsigned found;
  do {
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(found) : "l"(counter) : "memory");
  } while (found < count);
}

}  // namespace
