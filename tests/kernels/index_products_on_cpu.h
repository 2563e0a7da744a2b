// What index_products.cuh has, on a CPU: copies are there at once, products when asked for.
#pragma once

#include "hopper_on_cpu.h"

inline int __popc(unsigned x) { return __builtin_popcount(x); }
struct int2 { int x, y; };
inline int2 make_int2(int a, int b) { return {a, b}; }

namespace {

// Bytes that a barrier's phase still wants: copies may come before it says how many.
inline std::atomic<int64_t> wanted_bytes[sizeof(emulated_memory) / 8];
inline void count_bytes(uint32_t barrier, int64_t bytes) {
  if (wanted_bytes[barrier / 8].fetch_add(bytes) + bytes == 0) arrive(barrier);
}
inline void expect_bytes(uint32_t barrier, int bytes) { count_bytes(barrier, bytes); }
inline void start_bulk_copy(uint32_t to, const void *from, int bytes, uint32_t barrier) {
  if (to % 16 || uintptr_t(from) % 16 || bytes % 16) std::abort();
  memcpy(shared_memory + to, from, bytes);
  count_bytes(barrier, -bytes);
}
inline uint32_t e4m3_of(float x) {
  float best = INFINITY; int code = 0;
  for (int i = 0; i < 127; ++i) {  // an exact tie goes to the even one
    float off = std::fabs(std::fabs(x) - e4m3(i));
    if (off < best || (off == best && i % 2 == 0)) best = off, code = i;
  }
  return code | (std::signbit(x) ? 128 : 0);
}
template <int n> void hold(uint32_t (&)[n]) {}
inline void close_group() {}
template <int left> void end_groups() {}

struct Numbers { float of[256]; Numbers() { for (int i = 0; i < 256; ++i) of[i] = e4m3(i); } };
inline const Numbers numbers;
inline float code_at(uint32_t start, int row, int byte) {
  uint32_t at = start + row * 128 + byte;
  return numbers.of[shared_memory[at ^ (at >> 3 & 0x70)]];
}
template <int n, class A> void add_products(float (&d)[n], uint64_t b, int more, A a) {
  int lane = threadIdx.x % 32;
  for (int i = 0; i < n; ++i) {
    float sum = more ? d[i] : 0;
    for (int k = 0; k < 32; ++k)
      sum += a(lane / 4 + (i & 2) * 4, k) * code_at(uint32_t(b), i / 4 * 8 + lane % 4 * 2 + i % 2, k);
    d[i] = sum;
  }
}
inline void multiply_codes(float (&d)[16], const uint32_t (&a)[4], uint64_t b) {
  memcpy(block->slots[threadIdx.x].v, a, 16); warp_sync();
  add_products(d, b, 0, [&](int row, int k) {
    uint32_t word = block->slots[threadIdx.x / 32 * 32 + row % 8 * 4 + k % 16 / 4].v[row / 8 + k / 16 * 2];
    return numbers.of[word >> k % 4 * 8 & 255];
  });
  warp_sync();
}
inline void multiply_tiles(float (&d)[128], uint64_t a, uint64_t b, int more) {
  int first = threadIdx.x % 128 / 32 * 16;
  warp_sync();  // no lane runs ahead
  add_products(d, b, more, [&](int row, int k) { return code_at(uint32_t(a), first + row, k); });
}

}  // namespace
