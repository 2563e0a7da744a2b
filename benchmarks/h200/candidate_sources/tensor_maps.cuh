// Boxes of streams: 64 numbers of each stream of 16 tokens, which the copy engine moves in lines.
#pragma once

#include <cuda.h>

#include "mhc_cluster.cuh"

namespace {

constexpr int kBoxWidth = 64, kBoxTokens = 16, kLine = 2 * kBoxWidth;  // kLine in bytes

// Rows of bf16, [tokens, streams, dim] with strides in numbers. In shared memory a row's 16 bytes c
// are at c ^ row % 8, and a box begins at a multiple of 1,024 bytes. Zeros where no tokens are.
inline cudaError_t map_of(CUtensorMap &map, const uint16_t *rows, int dim, int streams, int tokens,
                          long long stream_stride, long long token_stride) {
  void *found = nullptr;
  cudaDriverEntryPointQueryResult status;
#if CUDART_VERSION >= 12050
  cudaError_t error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000,
                                                       cudaEnableDefault, &status);
#else
  cudaError_t error =
      cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &found, cudaEnableDefault, &status);
#endif
  if (error != cudaSuccess || found == nullptr) return cudaErrorNotSupported;
  const cuuint64_t sizes[3] = {cuuint64_t(dim), cuuint64_t(streams), cuuint64_t(tokens)};
  const cuuint64_t strides[2] = {cuuint64_t(stream_stride) * 2, cuuint64_t(token_stride) * 2};
  const cuuint32_t box[3] = {kBoxWidth, cuuint32_t(streams), kBoxTokens}, steps[3] = {1, 1, 1};
  const auto encode = reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(found);
  const CUresult result =
      encode(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 3, const_cast<uint16_t *>(rows), sizes,
             strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
             CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

// A box on its way to shared memory; all its bytes count at the barrier.
__device__ __forceinline__ void copy_box(void *to, const CUtensorMap &map, int column, int token,
                                         uint64_t *barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], "
      "[%1, {%2, %3, %4}], [%5];" ::"r"(address_of(to)),
      "l"(&map), "r"(column), "r"(0), "r"(token), "r"(address_of(barrier))
      : "memory");
}

// A box on its way to memory; no tokens are written beyond the last.
__device__ __forceinline__ void write_box(const CUtensorMap &map, const void *from, int column,
                                          int token) {
  asm volatile(
      "cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(
          &map),
      "r"(address_of(from)), "r"(column), "r"(0), "r"(token)
      : "memory");
}

__device__ __forceinline__ void commit_boxes() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// What this thread has written from shared memory has been read there.
__device__ __forceinline__ void wait_until_read() {
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}

// What this thread has stored in shared memory is seen by the copy engine, after a meeting.
__device__ __forceinline__ void show_to_engine() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Two warps meet.
__device__ __forceinline__ void meet_pair(int pair) {
  asm volatile("bar.sync %0, 64;" ::"r"(1 + pair) : "memory");
}

}  // namespace
