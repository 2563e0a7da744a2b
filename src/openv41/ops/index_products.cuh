// Products of E4M3 numbers by warpgroups, and bulk copies: what the index adds to hopper.cuh.
#pragma once

#include "hopper.cuh"

namespace {

// A barrier's next phase also ends with so many bytes; counts as an arrival.
__device__ __forceinline__ void expect_bytes(uint32_t barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
                 : "memory");
}

// Sixteen bytes or more into shared memory, which a barrier counts.
__device__ __forceinline__ void start_bulk_copy(uint32_t to, const void* from, int bytes,
                                                uint32_t barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
            to),
        "l"(from), "r"(bytes), "r"(barrier)
        : "memory");
}

// The nearest E4M3 number, in the lowest byte.
__device__ __forceinline__ uint32_t e4m3_of(float x) {
    uint16_t pair;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(0.f), "f"(x));
    return pair;
}

template <int kCount>
__device__ __forceinline__ void hold(uint32_t (&x)[kCount]) {
#pragma unroll
    for (int i = 0; i < kCount; i++) asm volatile("" : "+r"(x[i])::"memory");
}

// 64 x 32 over 32 columns: of rows in registers (as those of mma.m16n8k32) and rows of b.
__device__ __forceinline__ void multiply_codes(float (&d)[16], const uint32_t (&a)[4], uint64_t b) {
    asm volatile(
        "{\n.reg .pred more;\nsetp.ne.b32 more, 0, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n32k32.f32.e4m3.e4m3 "
        "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15}, {%16,%17,%18,%19}, %20, "
        "more, 1, 1;\n}"
        : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3]), "=f"(d[4]), "=f"(d[5]), "=f"(d[6]),
          "=f"(d[7]), "=f"(d[8]), "=f"(d[9]), "=f"(d[10]), "=f"(d[11]), "=f"(d[12]), "=f"(d[13]),
          "=f"(d[14]), "=f"(d[15])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

// 64 x 256 over 32 columns of rows of a and b; nothing was there before, or d.
__device__ __forceinline__ void multiply_tiles(float (&d)[128], uint64_t a, uint64_t b, int more) {
    asm volatile(
        "{\n.reg .pred more;\nsetp.ne.b32 more, %130, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n256k32.f32.e4m3.e4m3 "
        "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
        "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,"
        "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,"
        "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63,"
        "%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,"
        "%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95,"
        "%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111,"
        "%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127}, "
        "%128, %129, more, 1, 1;\n}"
        : OPENV41_F16(d, 0), OPENV41_F16(d, 16), OPENV41_F16(d, 32), OPENV41_F16(d, 48),
          OPENV41_F16(d, 64), OPENV41_F16(d, 80), OPENV41_F16(d, 96), OPENV41_F16(d, 112)
        : "l"(a), "l"(b), "r"(more));
}

// Products asked for so far make a group; all groups but the last `left` are there.
__device__ __forceinline__ void close_group() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

template <int left>
__device__ __forceinline__ void end_groups() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(left) : "memory");
}

}  // namespace
