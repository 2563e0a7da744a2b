// CUDA C++ on a CPU, for tests: a thread per CUDA thread; those of a warp meet at barriers.
#pragma once

#include <atomic>
#include <barrier>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <thread>
#include <type_traits>
#include <vector>
#include <memory>
#include <algorithm>
#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__
using cudaStream_t = void *;
using cudaError_t = int;
struct uint4 { uint32_t x, y, z, w; };
struct uint2 { uint32_t x, y; };
struct float4 { float x, y, z, w; };
struct float2 { float x, y; };
struct dim3 { unsigned x = 1, y = 1, z = 1; };
inline uint4 make_uint4(uint32_t a, uint32_t b, uint32_t c, uint32_t d) { return {a, b, c, d}; }
inline uint2 make_uint2(uint32_t a, uint32_t b) { return {a, b}; }
inline float2 make_float2(float a, float b) { return {a, b}; }
inline thread_local dim3 threadIdx, blockIdx; inline dim3 gridDim;
template <class T> T __ldg(const T *p) { return *p; }
template <class T> T __ldcg(const T *p) { return *p; }
#define __host__
template <class T> void __stcg(T *p, T v) { *p = v; }
inline float __uint_as_float(uint32_t u) { float f; memcpy(&f, &u, 4); return f; }
inline uint32_t as_uint(float f) { uint32_t u; memcpy(&u, &f, 4); return u; }
struct Block {
  explicit Block(int n) : all(n) { for (int i = 0; i < n / 32; ++i) warps.push_back(std::make_unique<std::barrier<>>(32)), pairs.push_back(std::make_unique<std::barrier<>>(64)); slots.resize(n); }
  std::barrier<> all; std::vector<std::unique_ptr<std::barrier<>>> warps, pairs;
  struct Slot { uint32_t v[16]; }; std::vector<Slot> slots;
};
inline thread_local Block *block; alignas(16) inline char emulated_memory[1 << 20];
inline thread_local dim3 blockDim;
inline float4 make_float4(float a, float b, float c, float d) { return {a, b, c, d}; }
inline float __fdividef(float a, float b) { return a / b; }
inline float rsqrtf(float x) { return 1 / std::sqrt(x); }
inline void __syncthreads() { block->all.arrive_and_wait(); }
inline void warp_sync() { block->warps[threadIdx.x / 32]->arrive_and_wait(); }
inline void __syncwarp() { warp_sync(); }
inline float __shfl_xor_sync(unsigned, float v, int mask) {
  block->slots[threadIdx.x].v[0] = as_uint(v); warp_sync();
  float r = __uint_as_float(block->slots[threadIdx.x ^ mask].v[0]); warp_sync(); return r;
}
inline float __shfl_sync(unsigned, float v, int from) {
  block->slots[threadIdx.x].v[0] = as_uint(v); warp_sync();
  float r = __uint_as_float(block->slots[threadIdx.x / 32 * 32 + from].v[0]); warp_sync(); return r;
}
inline uint32_t bf16(float f) { uint32_t u = as_uint(f); return (u + 0x7fff + ((u >> 16) & 1)) >> 16; }
inline uint32_t emulated_pack(float a, float b) { return bf16(a) | bf16(b) << 16; }
inline float emulated_half(uint32_t u, int i) { return __uint_as_float(i ? u & 0xffff0000u : u << 16); }
// m16n8k16: registers as in the PTX manual
inline void emulated_multiply(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
  auto &mine = block->slots[threadIdx.x]; mine.v[0] = a0; mine.v[1] = a1; mine.v[2] = a2; mine.v[3] = a3; mine.v[4] = b0; mine.v[5] = b1;
  warp_sync();
  int lane = threadIdx.x % 32, base = threadIdx.x - lane, g = lane / 4, q = lane % 4;
  for (int i = 0; i < 4; ++i) {
    int row = g + (i >= 2 ? 8 : 0), col = 2 * q + (i & 1); double sum = d[i];
    for (int k = 0; k < 16; ++k) {
      int kk = k % 8; // column pair inside a half
      auto &as = block->slots[base + (row % 8) * 4 + kk / 2]; auto &bs = block->slots[base + col * 4 + kk / 2];
      float a = emulated_half(as.v[(row >= 8 ? 1 : 0) + (k >= 8 ? 2 : 0)], kk & 1), b = emulated_half(bs.v[4 + (k >= 8)], kk & 1);
      sum += double(a) * b;
    }
    d[i] = float(sum);
  }
  warp_sync();
}

// A block after the other, each of so many threads.
template <class F> void run_blocks(unsigned threads, F run) {
  for (unsigned y = 0; y < gridDim.y; ++y)
    for (unsigned x = 0; x < gridDim.x; ++x) {
      Block one(threads);
      std::vector<std::thread> all;
      for (unsigned i = 0; i < threads; ++i)
        all.emplace_back([=, &one] {
          block = &one;
          threadIdx = {i};
          blockIdx = {x, y, 0};
          run();
        });
      for (auto &thread : all) thread.join();
    }
}

// A cluster: its blocks run at once. Copies are there at once; a barrier counts bytes.
constexpr int kClusterBlocks = 16;
struct Cluster {
  explicit Cluster(unsigned threads) : all(threads * kClusterBlocks) {}
  std::barrier<> all; char *memories[kClusterBlocks];
};
inline thread_local void *own_memory; inline thread_local Cluster *cluster; inline thread_local int block_in_cluster;
struct Turns { std::atomic<uint16_t> arrived; uint16_t of_turn; std::atomic<int32_t> missing; };  // bytes
inline Turns &turns(void *barrier) { return *static_cast<Turns *>(barrier); }
inline void set_up(uint64_t *barrier, uint32_t arrivals) { *barrier = 0, turns(barrier).of_turn = arrivals; }
inline void arrive(uint64_t *barrier) { turns(barrier).arrived += 1; }
inline void expect(uint64_t *barrier, uint32_t bytes) {
  turns(barrier).missing += bytes; arrive(barrier);
}
inline void await_turn(uint64_t *barrier, uint32_t parity) {
  while (turns(barrier).missing || turns(barrier).arrived / turns(barrier).of_turn % 2 == parity)
    std::this_thread::yield();
}
inline void copy_async(void *to, const void *from, bool inside) {
  if (inside) memcpy(to, from, 16); else memset(to, 0, 16);
}
inline void copy_bulk(void *to, const void *from, uint32_t bytes, uint64_t *barrier) {
  memcpy(to, from, bytes); turns(barrier).missing -= bytes;
}
inline void prefetch_bulk(const void *, uint32_t) {}
inline void commit_copies() {}
template <int kLeft> void wait_for_copies() {}
inline uint32_t cluster_rank() { return block_in_cluster; }
inline void cluster_arrive() { cluster->all.arrive_and_wait(); }
inline void cluster_wait() {}
inline void show_set_up() {}
inline void send_to(uint32_t rank, float *place, uint64_t *barrier, float value) {
  char *own = cluster->memories[block_in_cluster], *other = cluster->memories[rank];
  *reinterpret_cast<float *>(other + (reinterpret_cast<char *>(place) - own)) = value;
  turns(other + (reinterpret_cast<char *>(barrier) - own)).missing -= 4;
}
inline void count_up(unsigned *counter) { std::atomic_ref(*counter) += 1; }
inline void await_count(unsigned *counter, unsigned count) {
  while (std::atomic_ref(*counter) < count) std::this_thread::yield();
}

// All blocks at once; shared memory holds NaN.
template <class F> void run_grid(unsigned threads, size_t bytes, F run) {
  std::vector<std::vector<uint4>> memories(gridDim.x, std::vector<uint4>(bytes / 16 + 1));
  std::vector<std::unique_ptr<Block>> blocks;
  std::vector<std::thread> all;
  for (unsigned k = 0; k < gridDim.x; ++k) {
    blocks.push_back(std::make_unique<Block>(threads));
    memset(memories[k].data(), 0xff, bytes);
  }
  for (unsigned k = 0; k < gridDim.x; ++k)
    for (unsigned i = 0; i < threads; ++i)
      all.emplace_back([&, k, i] {
        block = blocks[k].get(), own_memory = memories[k].data();
        threadIdx = {i}, blockIdx = {k, 0, 0}, blockDim = {threads, 1, 1};
        run();
      });
  for (auto &thread : all) thread.join();
}

// A cluster after the other; shared memory holds NaN.
template <class F> void run_clusters(unsigned threads, size_t bytes, F run) {
  blockDim = {threads, 1, 1};
  for (unsigned first = 0; first < gridDim.x; first += kClusterBlocks) {
    Cluster one(threads);
    std::vector<std::vector<uint4>> memories(kClusterBlocks, std::vector<uint4>(bytes / 16 + 1));
    std::vector<std::unique_ptr<Block>> blocks;
    std::vector<std::thread> all;
    for (unsigned k = 0; k < kClusterBlocks; ++k) {
      blocks.push_back(std::make_unique<Block>(threads));
      one.memories[k] = reinterpret_cast<char *>(memories[k].data());
      memset(one.memories[k], 0xff, bytes);
    }
    for (unsigned k = 0; k < kClusterBlocks; ++k)
      for (unsigned i = 0; i < threads; ++i)
        all.emplace_back([&, k, i] {
          block = blocks[k].get(), cluster = &one, block_in_cluster = k, own_memory = one.memories[k];
          threadIdx = {i}, blockIdx = {first + k, 0, 0}, blockDim = {threads, 1, 1};
          run();
        });
    for (auto &thread : all) thread.join();
  }
}
