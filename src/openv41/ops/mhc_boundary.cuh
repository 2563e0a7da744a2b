// What happens to the streams between two blocks, for few tokens or many. Report §2.4.1, Eq. (6).
#pragma once

#include "mhc_cluster.cuh"
#include "mhc_pairs.cuh"

namespace {

constexpr int kTile = 16;     // tokens that a warp advances together
constexpr int kRowParts = 6;  // float4 of a token: a, c and the rows of b

struct Args {
  const uint16_t *x, *y;
  const float *b, *c, *a, *fn, *base, *scale;
  const void *norm;
  uint16_t *new_x, *h;
  float *next_a, *next_b, *next_c, *mixes, *inverse;
  long long x_token, x_stream, y_token;
  int tokens, dim, steps, norm_is_bf16;
  float eps, norm_eps, over_dim;
};

constexpr int kPointers = 16, kSizes = 7;

// ``pointers`` stand in the order of Args; ``sizes``: strides, tokens, dim, steps, kind.
Args args_of(void *const *pointers, const long long *sizes, float eps, float norm_eps) {
  Args args;
  int at = 0;
  auto next = [&](auto *&to) { to = static_cast<std::decay_t<decltype(to)>>(pointers[at++]); };
  next(args.x), next(args.y), next(args.b), next(args.c), next(args.a), next(args.fn);
  next(args.base), next(args.scale), next(args.norm), next(args.new_x), next(args.h);
  next(args.next_a), next(args.next_b), next(args.next_c), next(args.mixes), next(args.inverse);
  args.x_token = sizes[0], args.x_stream = sizes[1], args.y_token = sizes[2];
  args.tokens = sizes[3], args.dim = sizes[4], args.steps = sizes[5];
  args.norm_is_bf16 = sizes[6];
  args.eps = eps, args.norm_eps = norm_eps, args.over_dim = 1.0f / args.dim;
  return args;
}

// Two bf16 of each of eight weights.
__device__ __forceinline__ void split(const float4 (&weights)[2], uint4 &large, uint4 &small) {
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    const float first = (&weights[w / 2].x)[w % 2 * 2], second = (&weights[w / 2].x)[w % 2 * 2 + 1];
    const uint32_t pair = pack(first, second);
    (&large.x)[w] = pair;
    (&small.x)[w] = pack(first - low(pair), second - high(pair));
  }
}

// Eight numbers of one token: the streams become the new ones, ``h`` is what they collapse to.
template <bool kHasY>
__device__ __forceinline__ void advance(const float4 *given, uint4 (&x)[kStreams], const uint4 &y,
                                        uint4 &h, float &h_square) {
  const float4 a = given[0], c = given[1];
  const float4 b[kStreams] = {given[2], given[3], given[4], given[5]};
  const float *as = &a.x, *cs = &c.x;
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    float first[kStreams], second[kStreams], h_first = 0, h_second = 0;
#pragma unroll
    for (int n = 0; n < kStreams; ++n) {
      const uint32_t pair = (&x[n].x)[w];
      first[n] = low(pair), second[n] = high(pair);
    }
    const uint32_t y_pair = (&y.x)[w];
#pragma unroll
    for (int m = 0; m < kStreams; ++m) {
      float new_first = first[m], new_second = second[m];
      if (kHasY) {
        const float *bs = &b[m].x;
        new_first = cs[m] * low(y_pair), new_second = cs[m] * high(y_pair);
#pragma unroll
        for (int n = 0; n < kStreams; ++n) {
          new_first = fmaf(bs[n], first[n], new_first);
          new_second = fmaf(bs[n], second[n], new_second);
        }
        (&x[m].x)[w] = pack(new_first, new_second);
      }
      h_first = fmaf(as[m], new_first, h_first);
      h_second = fmaf(as[m], new_second, h_second);
    }
    (&h.x)[w] = pack(h_first, h_second);
    h_square = fmaf(h_first, h_first, h_square);
    h_square = fmaf(h_second, h_second, h_square);
  }
}

struct Sums {  // of a warp's numbers of a tile
  float mixes[3][4], upper[4], lower[4], h_square[2];  // and products of rows with each other
};

__device__ __forceinline__ float sum_of_four(float value) {  // lanes
  value += __shfl_xor_sync(~0u, value, 1);
  return value + __shfl_xor_sync(~0u, value, 2);
}

// The squares of h and of the streams of a lane's two rows. The second is there where g / 2 == q: it
// is the product of the row with itself, and the lane holds those with rows 2 q and 2 q + 1.
__device__ __forceinline__ void squares_of(const Sums &sums, int g, float2 (&squares)[2]) {
  const bool odd = g % 2 == 1;
  squares[0] = make_float2(sum_of_four(sums.h_square[0]), odd ? sums.upper[1] : sums.upper[0]);
  squares[1] = make_float2(sum_of_four(sums.h_square[1]), odd ? sums.lower[3] : sums.lower[2]);
}

__device__ __forceinline__ uint4 normalised(const uint4 &h, float inverse, const float *norm) {
  uint4 out;
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    const uint32_t pair = (&h.x)[w];
    (&out.x)[w] = pack(low(pair) * inverse * norm[2 * w], high(pair) * inverse * norm[2 * w + 1]);
  }
  return out;
}

__device__ __forceinline__ float sigmoid(float x) { return reciprocal(1.0f + expf(-x)); }

// One half step of balancing diag(u) M diag(v): the own factors, whose inverses are ``divisors``.
template <int kAcross, int kAlong>
__device__ __forceinline__ void balance_half(const float (&m)[16], const float (&others)[4],
                                             float (&factors)[4], float (&divisors)[4], float eps) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float *at = m + i * kAcross;
    const float first = fmaf(at[0], others[0], fmaf(at[kAlong], others[1], eps * divisors[i]));
    const float second = fmaf(at[2 * kAlong], others[2], at[3 * kAlong] * others[3]);
    divisors[i] = first + second;
  }
#pragma unroll
  for (int i = 0; i < 4; i += 2) {  // of two at once: reciprocals are what takes long
    const float inverse = reciprocal(divisors[i] * divisors[i + 1]);
    factors[i] = inverse * divisors[i + 1], factors[i + 1] = inverse * divisors[i];
  }
}

// The factors that make diag(u) M diag(v) doubly stochastic; M's rows have been softmaxed.
__device__ __forceinline__ void balance(const float (&m)[16], int steps, float eps, float (&u)[4],
                                        float (&v)[4]) {
  float over_u[4] = {1, 1, 1, 1}, over_v[4] = {1, 1, 1, 1};
#pragma unroll
  for (int i = 0; i < 4; ++i) u[i] = 1, v[i] = 1;
  balance_half<1, 4>(m, u, v, over_v, eps);
#pragma unroll 1
  for (int step = 1; step < steps; ++step) {
    balance_half<4, 1>(m, v, u, over_u, eps);
    balance_half<1, 4>(m, u, v, over_v, eps);
  }
}

// The coefficients of one token, by one thread.
__device__ __forceinline__ void coefficients(const Args &args, const float *base,
                                             const float *scale, const float *mixes,
                                             long long token) {
  float next[8], m[16], u[4], v[4];
#pragma unroll
  for (int k = 0; k < 8; ++k) next[k] = sigmoid(mixes[k] * scale[k / 4] + base[k]);
  float4 *to = reinterpret_cast<float4 *>(args.next_a) + token;
  *to = make_float4(next[0] + args.eps, next[1] + args.eps, next[2] + args.eps, next[3] + args.eps);
  to = reinterpret_cast<float4 *>(args.next_c) + token;
  *to = make_float4(2 * next[4], 2 * next[5], 2 * next[6], 2 * next[7]);
#pragma unroll
  for (int k = 0; k < 16; ++k) m[k] = mixes[8 + k] * scale[2] + base[8 + k];
#pragma unroll
  for (int i = 0; i < 16; i += 4) {
    const float top = fmaxf(fmaxf(m[i], m[i + 1]), fmaxf(m[i + 2], m[i + 3]));
    for (int j = i; j < i + 4; ++j) m[j] = expf(m[j] - top);
    const float inverse = reciprocal((m[i] + m[i + 1]) + (m[i + 2] + m[i + 3]));
    for (int j = i; j < i + 4; ++j) m[j] = fmaf(m[j], inverse, args.eps);
  }
  balance(m, args.steps, args.eps, u, v);
  to = reinterpret_cast<float4 *>(args.next_b) + token * 4;
#pragma unroll
  for (int j = 0; j < 4; ++j)
    to[j] = make_float4(m[j] * u[0] * v[j], m[4 + j] * u[1] * v[j], m[8 + j] * u[2] * v[j],
                        m[12 + j] * u[3] * v[j]);
}

}  // namespace
