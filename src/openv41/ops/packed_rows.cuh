// Packed MXFP4 rows of 128 numbers: 64 bytes of codes and a scale of each 32.
#pragma once

#include "index_products.cuh"

namespace {

constexpr int kRowWords = 17;  // of a packed row: 128 codes, four scales
constexpr int kRaised = 6;     // a row's largest block is held at 2^6 of its value

__device__ __forceinline__ int largest_byte(uint32_t x) {
    const int a = x & 255, b = (x >> 8) & 255, c = (x >> 16) & 255, d = x >> 24;
    return max(max(a, b), max(c, d));
}

// 2^(byte - 127); NaN for 255.
__device__ __forceinline__ float scale_of(int byte) {
    return __int_as_float(byte == 255 ? 0x7FC00000 : byte ? byte << 23 : 1 << 22);
}

// Put word `at` of a packed row into a row of E4M3 numbers, swizzled, under the scale of its
// largest block: codes 0 2 4 6 of a word, then, sixteen bytes on, 1 3 5 7.
__device__ __forceinline__ void place_word(uint32_t word, uint32_t scales, int at, int row,
                                           uint8_t* to) {
    const int block = at / 4, below = largest_byte(scales) - ((scales >> (8 * block)) & 255);
    const float scale = __int_as_float(max(127 + kRaised - below, 0) << 23);
    uint32_t numbers[2] = {0, 0};
#pragma unroll
    for (int k = 0; k < 8; k++) {
        const uint32_t code = word >> (4 * k);
        const float up = __int_as_float((127 + 126) << 23);  // what codes as float32 bits lack
        const float size = __int_as_float((code & 7) << 22) * up * scale;
        numbers[k % 2] |= e4m3_of(code & 8 ? -size : size) << (k / 2 * 8);
    }
#pragma unroll
    for (int odd = 0; odd < 2; odd++) {
        const int chunk = block * 2 + odd;
        *reinterpret_cast<uint32_t*>(to + (chunk ^ row % 8) * 16 + at % 4 * 4) = numbers[odd];
    }
}

}  // namespace
