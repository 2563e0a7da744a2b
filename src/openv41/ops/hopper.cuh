// What Hopper adds, as functions: barriers that count, products of warpgroups, pairs of bf16.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace {

extern __shared__ __align__(1024) uint8_t shared_memory[];

__device__ __forceinline__ uint32_t shared_address(const void* p) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// Barriers in shared memory; a wait for the parity of the phase before the first returns at once.
__device__ __forceinline__ void init_barrier(uint32_t barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals));
}

__device__ __forceinline__ void show_barriers() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void arrive(uint32_t barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void wait(uint32_t barrier, uint32_t parity) {
    asm volatile(
        "{\n.reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;\n}"
        :
        : "r"(barrier), "r"(parity)
        : "memory");
}

// Copies of sixteen bytes into shared memory, or of zeros; a thread waits for its own.
__device__ __forceinline__ void start_copy(uint32_t to, const void* from, bool present) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
                 "r"(present ? 16 : 0)
                 : "memory");
}

__device__ __forceinline__ void wait_for_copies() {
    asm volatile("cp.async.wait_all;" ::: "memory");
}

// Meeting of some warps.
__device__ __forceinline__ void meet(int name, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(name), "r"(threads) : "memory");
}

// What was stored in shared memory before a wait of this thread can be read by matrix units.
__device__ __forceinline__ void see_stores() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

template <int kCount>
__device__ __forceinline__ void take_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kCount));
}

template <int kCount>
__device__ __forceinline__ void give_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kCount));
}

__device__ __forceinline__ void prefetch(const void* p) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(p));
}

// Tiles of bf16 in rows of 128 bytes, swizzled, eight rows a kilobyte. Columns that are multiplied
// follow each other in a row, or (k along the rows) 64 columns of a row lie `step` bytes apart.
__device__ __forceinline__ uint64_t describe(uint32_t address, uint32_t step = 16) {
    return static_cast<uint64_t>((address & 0x3FFFF) >> 4) |
           static_cast<uint64_t>(step >> 4) << 16 | uint64_t{1024 >> 4} << 32 | uint64_t{1} << 62;
}

__device__ __forceinline__ uint64_t moved(uint64_t described, uint32_t bytes) {
    return described + (bytes >> 4);
}

__device__ __forceinline__ void begin_products() {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

// All products of this warpgroup are there; what has been asked of sums comes after.
__device__ __forceinline__ void end_products() {
    asm volatile("wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;" ::: "memory");
}

template <int kCount>
__device__ __forceinline__ void hold(float (&d)[kCount]) {
#pragma unroll
    for (int i = 0; i < kCount; i++) asm volatile("" : "+f"(d[i])::"memory");
}

#define OPENV41_F4(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define OPENV41_F16(d, i) \
    OPENV41_F4(d, i), OPENV41_F4(d, i + 4), OPENV41_F4(d, i + 8), OPENV41_F4(d, i + 12)

// 64 x 64 over 16 columns of rows of a and b; nothing was there before, or d.
__device__ __forceinline__ void multiply_rows(float (&d)[32], uint64_t a, uint64_t b, int more) {
    asm volatile(
        "{\n.reg .pred more;\nsetp.ne.b32 more, %34, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
        "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,"
        "%24,%25,%26,%27,%28,%29,%30,%31}, %32, %33, more, 1, 1, 0, 0;\n}"
        : OPENV41_F16(d, 0), OPENV41_F16(d, 16)
        : "l"(a), "l"(b), "r"(more));
}

// 64 x 128 over 16 columns of a, which are 16 rows of b.
__device__ __forceinline__ void multiply_columns(float (&d)[64], uint64_t a, uint64_t b, int more) {
    asm volatile(
        "{\n.reg .pred more;\nsetp.ne.b32 more, %66, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 "
        "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,"
        "%24,%25,%26,%27,%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,"
        "%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63}, "
        "%64, %65, more, 1, 1, 0, 1;\n}"
        : OPENV41_F16(d, 0), OPENV41_F16(d, 16), OPENV41_F16(d, 32), OPENV41_F16(d, 48)
        : "l"(a), "l"(b), "r"(more));
}

// Four 8 x 8 tiles of bf16, each thread with the address of a row.
__device__ __forceinline__ void store_tiles(uint32_t row, uint32_t a, uint32_t b, uint32_t c,
                                            uint32_t d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(row), "r"(a),
                 "r"(b), "r"(c), "r"(d)
                 : "memory");
}

__device__ __forceinline__ uint32_t prmt(uint32_t a, uint32_t b, uint32_t s) {
    uint32_t r;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(s));
    return r;
}

__device__ __forceinline__ float exp2_of(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ float log2_of(float x) {
    float y;
    asm("lg2.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ uint32_t multiply_pairs(uint32_t a, uint32_t b) {
    uint32_t r;
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    return r;
}

__device__ __forceinline__ uint32_t pair_of(float first, float second) {
    uint32_t pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
    return pair;
}

// Two E4M3 numbers.
__device__ __forceinline__ float2 numbers_of(uint16_t codes) {
    float2 x;
    asm("{\n.reg .b32 both;\n.reg .b16 low, high;\n"
        "cvt.rn.f16x2.e4m3x2 both, %2;\nmov.b32 {low, high}, both;\n"
        "cvt.f32.f16 %0, low;\ncvt.f32.f16 %1, high;\n}"
        : "=f"(x.x), "=f"(x.y)
        : "h"(codes));
    return x;
}

}  // namespace
