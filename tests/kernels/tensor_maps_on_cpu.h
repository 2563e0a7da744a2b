// What tensor_maps.cuh has, on a CPU: boxes are moved at once, swizzled.
#pragma once

#include "cuda_on_cpu.h"

struct CUtensorMap { uint16_t *rows; int dim, streams, tokens; long long stream_stride, token_stride; };
constexpr int cudaSuccess = 0, kBoxWidth = 64, kLine = 128;
inline int map_of(CUtensorMap &map, const uint16_t *rows, int dim, int streams, int tokens, long long stream_stride, long long token_stride) {
  map = {const_cast<uint16_t *>(rows), dim, streams, tokens, stream_stride, token_stride}; return 0;
}
template <class F> void for_box(const CUtensorMap &map, const void *box, int column, int first, F run) {
  for (int row = 0; row < 16 * map.streams; ++row)
    for (int c = 0; c < 8; ++c) {
      int token = first + row / map.streams;
      char *at = static_cast<char *>(const_cast<void *>(box)) + row * 128 + (c ^ row % 8) * 16;
      bool inside = token < map.tokens && column + 8 * c < map.dim;
      run(at, inside ? map.rows + token * map.token_stride + row % map.streams * map.stream_stride + column + 8 * c : nullptr);
    }
}
inline void copy_box(void *to, const CUtensorMap &map, int column, int token, uint64_t *barrier) {
  for_box(map, to, column, token, [](char *at, uint16_t *row) { if (row) memcpy(at, row, 16); else memset(at, 0, 16); });
  turns(barrier).missing -= 2048 * map.streams;
}
inline void write_box(const CUtensorMap &map, const void *from, int column, int token) {
  for_box(map, from, column, token, [](char *at, uint16_t *row) { if (row) memcpy(row, at, 16); });
}
inline void commit_boxes() {}
inline void wait_until_read() {}
inline void show_to_engine() {}
inline void meet_pair(int pair) { block->pairs[pair]->arrive_and_wait(); }
