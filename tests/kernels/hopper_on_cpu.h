// What hopper.cuh has, on a CPU: stores are seen at once, products are done when asked for.
#pragma once

#include <chrono>

#include "cuda_on_cpu.h"

inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a > b ? a : b; }
inline float __int_as_float(uint32_t u) { return __uint_as_float(u); }
inline uint32_t __shfl_xor_sync(unsigned mask, uint32_t v, int lanes) {
  return as_uint(__shfl_xor_sync(mask, __uint_as_float(v), lanes));
}
inline int __shfl_sync(unsigned mask, int v, int lane) {
  return int(as_uint(__shfl_sync(mask, __uint_as_float(uint32_t(v)), lane)));
}
inline uint32_t __ballot_sync(unsigned, bool v) {
  block->slots[threadIdx.x].v[0] = v; warp_sync();
  uint32_t all = 0;
  for (int i = 0; i < 32; ++i) all |= block->slots[threadIdx.x / 32 * 32 + i].v[0] << i;
  warp_sync(); return all;
}
inline bool __all_sync(unsigned, bool v) { return __ballot_sync(~0u, v) == ~0u; }

namespace {

uint8_t *const shared_memory = reinterpret_cast<uint8_t *>(emulated_memory);
inline uint32_t shared_address(const void *p) { return uint32_t(static_cast<const uint8_t *>(p) - shared_memory); }

// Missing arrivals, arrivals of a phase, and the phase.
struct Barrier { uint16_t missing, arrivals; uint32_t phase; };
inline std::atomic_ref<uint64_t> at_barrier(uint32_t a) { return std::atomic_ref(*reinterpret_cast<uint64_t *>(shared_memory + a)); }
inline Barrier barrier_of(uint64_t v) { Barrier b; memcpy(&b, &v, 8); return b; }
inline uint64_t bits_of(Barrier b) { uint64_t v; memcpy(&v, &b, 8); return v; }
inline void init_barrier(uint32_t a, int n) { at_barrier(a) = bits_of({uint16_t(n), uint16_t(n), 0}); }
inline void show_barriers() {}
inline void arrive(uint32_t a) {
  uint64_t old = at_barrier(a), now;
  do {
    Barrier b = barrier_of(old);
    if (--b.missing == 0) b.missing = b.arrivals, ++b.phase;
    now = bits_of(b);
  } while (!at_barrier(a).compare_exchange_weak(old, now));
}
inline void wait(uint32_t a, uint32_t parity) {
  for (int us = 100; (barrier_of(at_barrier(a)).phase & 1) == parity; us = std::min(2 * us, 10000))
    std::this_thread::sleep_for(std::chrono::microseconds(us));
}
inline void start_copy(uint32_t to, const void *from, bool present) {
  if (to % 16 || uintptr_t(from) % 16) std::abort();
  if (present) memcpy(shared_memory + to, from, 16); else memset(shared_memory + to, 0, 16);
}
inline void wait_for_copies() {}
inline void meet(int, int threads) {
  static std::barrier<> some(128), all(256);
  if (threads != 128 && threads != 256) std::abort();
  (threads == 128 ? some : all).arrive_and_wait();
}
inline void see_stores() {}
template <int> void take_registers() {}
template <int> void give_registers() {}
inline void prefetch(const void *) {}

inline uint64_t describe(uint32_t address, uint32_t step = 16) { return uint64_t(step) << 32 | address; }
inline uint64_t moved(uint64_t d, uint32_t bytes) { return d + bytes; }
inline float element(uint32_t start, uint32_t rows, uint32_t bytes) {
  uint32_t at = start + rows * 128 + bytes;
  uint16_t x; memcpy(&x, shared_memory + (at ^ (at >> 3 & 0x70)), 2);
  return __uint_as_float(uint32_t(x) << 16);
}
inline void begin_products() {}
inline void end_products() {}
template <int n> void hold(float (&)[n]) {}
template <int n, class B> void multiply(float (&d)[n], uint64_t a, int more, B b) {
  int lane = threadIdx.x % 32, row = threadIdx.x % 128 / 32 * 16 + lane / 4;
  for (int i = 0; i < n; ++i) {
    float sum = more ? d[i] : 0;
    for (int k = 0; k < 16; ++k) sum += element(uint32_t(a), row + (i & 2) * 4, 2 * k) * b(i / 4 * 8 + lane % 4 * 2 + i % 2, k);
    d[i] = sum;
  }
}
inline void multiply_rows(float (&d)[32], uint64_t a, uint64_t b, int more) {
  multiply(d, a, more, [&](int column, int k) { return element(uint32_t(b), column, 2 * k); });
}
inline void multiply_columns(float (&d)[64], uint64_t a, uint64_t b, int more) {
  multiply(d, a, more, [&](int column, int k) { return element(uint32_t(b) + column / 64 * uint32_t(b >> 32), k, column % 64 * 2); });
}

inline uint32_t prmt(uint32_t a, uint32_t b, uint32_t s) {
  uint64_t both = uint64_t(b) << 32 | a; uint32_t r = 0;
  for (int i = 0; i < 4; ++i) r |= uint32_t(both >> (s >> 4 * i & 7) * 8 & 255) << 8 * i;
  return r;
}
inline void store_tiles(uint32_t row, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  auto &slots = block->slots; int lane = threadIdx.x % 32, warp = threadIdx.x - lane;
  uint32_t given[] = {a, b, c, d};
  slots[threadIdx.x].v[0] = row; warp_sync();
  for (int i = 0; i < 4; ++i) memcpy(shared_memory + slots[warp + i * 8 + lane / 4].v[0] + lane % 4 * 4, &given[i], 4);
  warp_sync();
}
inline float exp2_of(float x) { return std::exp2(x); }
inline float log2_of(float x) { return std::log2(x); }
inline uint32_t multiply_pairs(uint32_t a, uint32_t b) {
  return emulated_pack(emulated_half(a, 0) * emulated_half(b, 0), emulated_half(a, 1) * emulated_half(b, 1));
}
inline uint32_t pair_of(float a, float b) { return emulated_pack(a, b); }
inline float e4m3(int code) {
  int exponent = code >> 3 & 15, fraction = code & 7;
  float size = (code & 127) == 127 ? NAN : exponent ? std::ldexp(8.f + fraction, exponent - 10) : std::ldexp(float(fraction), -9);
  return code & 128 ? -size : size;
}
inline float2 numbers_of(uint16_t codes) { return make_float2(e4m3(codes & 255), e4m3(codes >> 8)); }

}  // namespace
