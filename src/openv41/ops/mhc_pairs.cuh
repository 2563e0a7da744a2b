// Numbers of the streams in registers: pairs of bf16, and products of them on the tensor cores.
#pragma once

#include <cstdint>
#include <type_traits>
#include <cuda_runtime.h>

namespace {

constexpr int kStreams = 4, kMixes = 24, kPartWidth = 32;

__device__ __forceinline__ float low(uint32_t pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high(uint32_t pair) { return __uint_as_float(pair & 0xffff0000u); }

__device__ __forceinline__ uint32_t pack(float first, float second) {
  uint32_t pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
  return pair;
}

// To the last bit or the one before.
__device__ __forceinline__ float reciprocal(float of) {
  float inverse;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(of));
  return inverse;
}

__device__ __forceinline__ void multiply(float (&sum)[4], uint32_t a0, uint32_t a1, uint32_t a2,
                                         uint32_t a3, uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

__device__ __forceinline__ void multiply(float (&sum)[4], const uint4 &upper, const uint4 &lower,
                                         const uint4 &weight) {
  multiply(sum, upper.x, lower.x, upper.y, lower.y, weight.x, weight.y);
  multiply(sum, upper.z, lower.z, upper.w, lower.w, weight.z, weight.w);
}

// Two float32 as three pairs of bf16.
__device__ __forceinline__ void split(float first, float second, uint32_t &large, uint32_t &middle,
                                      uint32_t &small) {
  large = pack(first, second);
  first -= low(large), second -= high(large);
  middle = pack(first, second);
  small = pack(first - low(middle), second - high(middle));
}

// One weight of the norm, of either type.
__device__ __forceinline__ float weight_of(const void *norm, int is_bf16, int d) {
  if (is_bf16) return low(static_cast<const uint16_t *>(norm)[d]);
  return static_cast<const float *>(norm)[d];
}

}  // namespace
