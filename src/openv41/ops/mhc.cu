// The streams between two blocks, in one launch. Report §2.4.1, Eq. (6).
//
// For N = 4 streams of bf16. A warp advances 16 tokens by 32 numbers of their rows at a time: lane
// 4 g + q holds numbers 8 q to 8 q + 7 of rows g and g + 8, which is what the tensor core's
// operand wants if the numbers are taken in that order, and 16 bytes of memory. The float32 weights
// are split into three bf16, whose products add up to those of float32.
//
// Programs ("blocks" below) of a tile of tokens own slices of D. All must have left their partial
// sums before the collapsed rows can be normalised and the coefficients be computed, so they wait at
// a counter. They have consecutive numbers and start in that order: those that are waited for run.

#include "mhc_pairs.cuh"

namespace {

constexpr int kPatience = 1 << 22;  // polls, then wrong numbers instead of a hang

struct Args {
  const uint16_t *x, *y;
  const float *b, *c, *a, *fn, *base, *scale;
  const void *norm;
  uint16_t *new_x, *h;
  float *next_a, *next_b, *next_c, *mixes, *inverse, *parts, *sums;
  unsigned long long *counters;
  long long x_token, x_stream, y_token;
  int tokens, dim, slices, steps, norm_is_bf16;
  float eps, norm_eps;
};

__device__ __forceinline__ void split(const float *from, uint4 (&parts)[3]) {
  const float4 u = __ldg(reinterpret_cast<const float4 *>(from));
  const float4 v = __ldg(reinterpret_cast<const float4 *>(from) + 1);
  split(u.x, u.y, parts[0].x, parts[1].x, parts[2].x);
  split(u.z, u.w, parts[0].y, parts[1].y, parts[2].y);
  split(v.x, v.y, parts[0].z, parts[1].z, parts[2].z);
  split(v.z, v.w, parts[0].w, parts[1].w, parts[2].w);
}

// Eight numbers of one token: the streams become the new ones, ``h`` is what they collapse to.
template <bool kHasY>
__device__ __forceinline__ void advance(const Args &args, long long token, bool inside,
                                        uint4 (&x)[kStreams], const uint4 &y, uint4 &h,
                                        float &square, float &h_square) {
  float4 a = {}, c = {}, b[kStreams] = {};
  if (inside) {
    a = __ldg(reinterpret_cast<const float4 *>(args.a) + token);
    if (kHasY) {
      c = __ldg(reinterpret_cast<const float4 *>(args.c) + token);
      for (int m = 0; m < kStreams; ++m)
        b[m] = __ldg(reinterpret_cast<const float4 *>(args.b) + token * kStreams + m);
    }
  }
  const float *as = &a.x, *cs = &c.x;
  const uint32_t *ys = &y.x;
  uint32_t *hs = &h.x;
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    float first[kStreams], second[kStreams], h_first = 0, h_second = 0;
#pragma unroll
    for (int n = 0; n < kStreams; ++n) {
      const uint32_t pair = (&x[n].x)[w];
      first[n] = low(pair), second[n] = high(pair);
    }
    const float y_first = low(ys[w]), y_second = high(ys[w]);
#pragma unroll
    for (int m = 0; m < kStreams; ++m) {
      float new_first = first[m], new_second = second[m];
      if (kHasY) {
        const float *bs = &b[m].x;
        new_first = cs[m] * y_first, new_second = cs[m] * y_second;
#pragma unroll
        for (int n = 0; n < kStreams; ++n) {
          new_first = fmaf(bs[n], first[n], new_first);
          new_second = fmaf(bs[n], second[n], new_second);
        }
        const uint32_t pair = pack(new_first, new_second);
        (&x[m].x)[w] = pair;
        new_first = low(pair), new_second = high(pair);
      }
      h_first = fmaf(as[m], new_first, h_first);
      h_second = fmaf(as[m], new_second, h_second);
      square = fmaf(new_first, new_first, square);
      square = fmaf(new_second, new_second, square);
    }
    hs[w] = pack(h_first, h_second);
    h_square = fmaf(low(hs[w]), low(hs[w]), h_square);
    h_square = fmaf(high(hs[w]), high(hs[w]), h_square);
  }
}

template <bool kHasY>
__device__ __forceinline__ void read(const Args &args, long long token, bool inside, int d,
                                     uint4 (&x)[kStreams], uint4 &y) {
#pragma unroll
  for (int n = 0; n < kStreams; ++n) {
    const uint16_t *from = args.x + token * args.x_token + n * args.x_stream + d;
    x[n] = inside ? __ldg(reinterpret_cast<const uint4 *>(from)) : uint4{};
  }
  if (kHasY) {
    const uint16_t *from = args.y + token * args.y_token + d;
    y = inside ? __ldg(reinterpret_cast<const uint4 *>(from)) : uint4{};
  }
}

__device__ __forceinline__ void write(const Args &args, long long token, bool inside, int d,
                                      const uint4 (&x)[kStreams]) {
  if (!inside) return;
#pragma unroll
  for (int m = 0; m < kStreams; ++m) {
    uint16_t *to = args.new_x + (token * kStreams + m) * args.dim + d;
    *reinterpret_cast<uint4 *>(to) = x[m];
  }
}

__device__ __forceinline__ void normalise(const Args &args, long long token, bool inside, int d,
                                          const uint4 &h, float inverse) {
  if (!inside) return;
  uint4 out;
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    const uint32_t pair = (&h.x)[w];
    const float first = weight_of(args.norm, args.norm_is_bf16, d + 2 * w);
    const float second = weight_of(args.norm, args.norm_is_bf16, d + 2 * w + 1);
    (&out.x)[w] = pack(low(pair) * inverse * first, high(pair) * inverse * second);
  }
  *reinterpret_cast<uint4 *>(args.h + token * args.dim + d) = out;
}

// Leave a warp's partial sums of its 16 tokens; ``row`` is the first in the slice's rows.
template <int kTokens>
__device__ __forceinline__ void publish(const Args &args, long long slice, int row,
                                        const float (&sum)[3][4], float square_0, float square_1,
                                        float h_square_0, float h_square_1) {
  const int lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
#pragma unroll
  for (int step = 1; step < 4; step *= 2) {
    square_0 += __shfl_xor_sync(~0u, square_0, step);
    square_1 += __shfl_xor_sync(~0u, square_1, step);
    h_square_0 += __shfl_xor_sync(~0u, h_square_0, step);
    h_square_1 += __shfl_xor_sync(~0u, h_square_1, step);
  }
  float *to = args.parts + (slice * kTokens + row + g) * kPartWidth + 2 * q;
#pragma unroll
  for (int tile = 0; tile < 3; ++tile) {
    *reinterpret_cast<float2 *>(to + 8 * tile) = make_float2(sum[tile][0], sum[tile][1]);
    *reinterpret_cast<float2 *>(to + 8 * kPartWidth + 8 * tile) =
        make_float2(sum[tile][2], sum[tile][3]);
  }
  if (q == 0) {
    float *squares = args.sums + slice * 2 * kTokens + row + g;
    squares[0] = square_0, squares[8] = square_1;
    squares[kTokens] = h_square_0, squares[kTokens + 8] = h_square_1;
  }
}

// Wait until all blocks of a tile are here; a counter only grows, by ``slices`` per launch.
__device__ __forceinline__ void wait_for_all(unsigned long long *counter, int slices) {
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    const unsigned long long before = atomicAdd(counter, 1ull);
    const unsigned long long wanted = (before / slices + 1) * slices;
    unsigned long long seen = before + 1;
    for (int polls = 0; seen < wanted && polls < kPatience; ++polls)
      asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(seen) : "l"(counter) : "memory");
    __threadfence();
  }
  __syncthreads();
}

// A lane's sum over some slices: a column of the mixes, or one of the two squares.
template <int kTokens>
__device__ __forceinline__ float sum_of_slices(const Args &args, long long first_slice, int row,
                                               int from, int step) {
  const int lane = threadIdx.x % 32;
  if (lane >= kMixes + 2) return 0;
  const float *at = args.parts + (first_slice * kTokens + row) * kPartWidth + lane;
  long long stride = kTokens * kPartWidth;
  if (lane >= kMixes) {
    at = args.sums + (first_slice * 2 + lane - kMixes) * kTokens + row;
    stride = 2 * kTokens;
  }
  float sum = 0;
#pragma unroll 10
  for (int s = from; s < args.slices; s += step) sum += __ldcg(at + s * stride);
  return sum;
}

__device__ __forceinline__ float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

template <bool kRows>
__device__ __forceinline__ void balance(float (&mix)[16], float eps) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int at = kRows ? 4 * i : i, step = kRows ? 1 : 4;
    const float total =
        (mix[at] + mix[at + step]) + (mix[at + 2 * step] + mix[at + 3 * step]) + eps;
    const float inverse = __fdividef(1.0f, total);
#pragma unroll
    for (int j = 0; j < 4; ++j) mix[at + j * step] *= inverse;
  }
}

// The coefficients of one token, by one warp whose lanes hold the sums.
__device__ __forceinline__ void coefficients(const Args &args, long long token, float sum) {
  const int lane = threadIdx.x % 32;
  const float square = __shfl_sync(~0u, sum, kMixes);
  const float h_square = __shfl_sync(~0u, sum, kMixes + 1);
  const float inverse = rsqrtf(square / (kStreams * args.dim) + args.norm_eps);
  const float mix = lane < kMixes ? sum * inverse : 0;
  args.mixes[token * kPartWidth + lane] = mix;
  if (lane == 0) {
    args.inverse[2 * token] = inverse;
    args.inverse[2 * token + 1] = rsqrtf(h_square / args.dim + args.norm_eps);
  }
  float raw = 0;
  if (lane < kMixes) raw = mix * args.scale[lane < 4 ? 0 : lane < 8 ? 1 : 2] + args.base[lane];
  if (lane < 4) args.next_a[token * 4 + lane] = sigmoid(raw) + args.eps;
  else if (lane < 8) args.next_c[token * 4 + lane - 4] = 2 * sigmoid(raw);
  float soft[16];
#pragma unroll
  for (int k = 0; k < 16; ++k) soft[k] = __shfl_sync(~0u, raw, 8 + k);
#pragma unroll
  for (int i = 0; i < 16; i += 4) {
    const float top = fmaxf(fmaxf(soft[i], soft[i + 1]), fmaxf(soft[i + 2], soft[i + 3]));
    for (int j = i; j < i + 4; ++j) soft[j] = expf(soft[j] - top);
    const float total = soft[i] + soft[i + 1] + soft[i + 2] + soft[i + 3];
    for (int j = i; j < i + 4; ++j) soft[j] = soft[j] / total + args.eps;
  }
  balance<false>(soft, args.eps);
  for (int step = 1; step < args.steps; ++step) {
    balance<true>(soft, args.eps);
    balance<false>(soft, args.eps);
  }
  float own = 0;
#pragma unroll
  for (int k = 0; k < 16; ++k) own = lane == k ? soft[k] : own;
  if (lane < 16) args.next_b[token * 16 + lane % 4 * 4 + lane / 4] = own;
}

// Tiles of 128 tokens, slices of 128 numbers; the slice's weights are split once, in shared memory.
constexpr int kManyTokens = 128, kManyWidth = 128, kUnits = kManyWidth / 8;
constexpr int kManyWeights = 3 * kStreams * kMixes * kUnits;
constexpr int kManyBytes = (kManyWeights + kManyTokens * kUnits) * 16 + 2 * kManyTokens * 4;

template <bool kHasY>
__global__ void __launch_bounds__(256, 2) many_tokens(const __grid_constant__ Args args) {
  extern __shared__ uint4 memory[];
  uint4 *weights = memory, *kept = memory + kManyWeights;
  float *inverses = reinterpret_cast<float *>(kept + kManyTokens * kUnits);
  const long long tile = blockIdx.x / args.slices;
  const int slice = blockIdx.x % args.slices, first = slice * kManyWidth;
  for (int i = threadIdx.x; i < kStreams * kMixes * kUnits; i += 256) {
    const int unit = i % kUnits, row = i / kUnits % kMixes, m = i / kUnits / kMixes;
    uint4 parts[3];
    split(args.fn + (static_cast<long long>(row) * kStreams + m) * args.dim + first + 8 * unit,
          parts);
    const int at = (m * kMixes + row) * kUnits + (unit ^ ((row & 1) << 2));  // no bank conflicts
    for (int s = 0; s < 3; ++s) weights[s * kStreams * kMixes * kUnits + at] = parts[s];
  }
  __syncthreads();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
  const int row = warp * 16 + g;
  const long long token = tile * kManyTokens + row;
  const bool inside = token < args.tokens, inside_8 = token + 8 < args.tokens;
  float sum[3][4] = {}, square[2] = {}, h_square[2] = {};
#pragma unroll 1
  for (int chunk = 0; chunk < kManyWidth / 32; ++chunk) {
    const int d = first + chunk * 32 + q * 8, unit = chunk * 4 + q;
    uint4 x[kStreams], x_8[kStreams], y = {}, y_8 = {}, h;
    read<kHasY>(args, token, inside, d, x, y);
    read<kHasY>(args, token + 8, inside_8, d, x_8, y_8);
    advance<kHasY>(args, token, inside, x, y, h, square[0], h_square[0]);
    kept[row * kUnits + unit] = h;
    advance<kHasY>(args, token + 8, inside_8, x_8, y_8, h, square[1], h_square[1]);
    kept[(row + 8) * kUnits + unit] = h;
    if (kHasY) {
      write(args, token, inside, d, x);
      write(args, token + 8, inside_8, d, x_8);
    }
#pragma unroll
    for (int m = 0; m < kStreams; ++m)
#pragma unroll
      for (int s = 2; s >= 0; --s)
#pragma unroll
        for (int n = 0; n < 3; ++n) {
          const int at = ((s * kStreams + m) * kMixes + n * 8 + g) * kUnits;
          multiply(sum[n], x[m], x_8[m], weights[at + (unit ^ ((g & 1) << 2))]);
        }
  }
  publish<kManyTokens>(args, blockIdx.x, warp * 16, sum, square[0], square[1], h_square[0],
                       h_square[1]);
  wait_for_all(args.counters + tile, args.slices);
  {
    const int half = threadIdx.x / kManyTokens, i = threadIdx.x % kManyTokens;
    const float *at = args.sums + (tile * args.slices * 2 + 1) * kManyTokens + i;
    float total = 0;
#pragma unroll 10
    for (int s = half; s < args.slices; s += 2) total += __ldcg(at + s * 2ll * kManyTokens);
    inverses[half * kManyTokens + i] = total;
  }
  __syncthreads();
  const float total = inverses[row] + inverses[kManyTokens + row];
  const float total_8 = inverses[row + 8] + inverses[kManyTokens + row + 8];
  const float inverse = rsqrtf(total / args.dim + args.norm_eps);
  const float inverse_8 = rsqrtf(total_8 / args.dim + args.norm_eps);
#pragma unroll
  for (int chunk = 0; chunk < kManyWidth / 32; ++chunk) {
    const int d = first + chunk * 32 + q * 8, unit = chunk * 4 + q;
    normalise(args, token, inside, d, kept[row * kUnits + unit], inverse);
    normalise(args, token + 8, inside_8, d, kept[(row + 8) * kUnits + unit], inverse_8);
  }
  const int share = (kManyTokens + args.slices - 1) / args.slices;
  for (int i = warp; i < share; i += 8) {
    const int own = slice * share + i;
    if (own >= kManyTokens || tile * kManyTokens + own >= args.tokens) continue;
    const float found = sum_of_slices<kManyTokens>(args, tile * args.slices, own, 0, 1);
    coefficients(args, tile * kManyTokens + own, found);
  }
}

// One tile of at most 64 tokens, slices of 64 numbers, weights straight from memory.
constexpr int kFewTokens = 64, kFewWidth = 64;

template <bool kHasY>
__global__ void __launch_bounds__(128) few_tokens(const __grid_constant__ Args args) {
  __shared__ float totals[2][kFewTokens], sums[4][32];
  const int slice = blockIdx.x, first = slice * kFewWidth;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
  const int row = warp * 16 + g;
  const bool inside = row < args.tokens, inside_8 = row + 8 < args.tokens;
  uint4 h[kFewWidth / 32], h_8[kFewWidth / 32];
  if (warp * 16 < args.tokens) {
    float sum[3][4] = {}, square[2] = {}, h_square[2] = {};
#pragma unroll
    for (int chunk = 0; chunk < kFewWidth / 32; ++chunk) {
      const int d = first + chunk * 32 + q * 8;
      uint4 x[kStreams], x_8[kStreams], y = {}, y_8 = {};
      read<kHasY>(args, row, inside, d, x, y);
      read<kHasY>(args, row + 8, inside_8, d, x_8, y_8);
      advance<kHasY>(args, row, inside, x, y, h[chunk], square[0], h_square[0]);
      advance<kHasY>(args, row + 8, inside_8, x_8, y_8, h_8[chunk], square[1], h_square[1]);
      if (kHasY) {
        write(args, row, inside, d, x);
        write(args, row + 8, inside_8, d, x_8);
      }
#pragma unroll
      for (int m = 0; m < kStreams; ++m)
#pragma unroll
        for (int n = 0; n < 3; ++n) {
          uint4 parts[3];
          split(args.fn + ((n * 8 + g) * kStreams + m) * static_cast<long long>(args.dim) + d,
                parts);
          for (int s = 2; s >= 0; --s) multiply(sum[n], x[m], x_8[m], parts[s]);
        }
    }
    publish<kFewTokens>(args, slice, warp * 16, sum, square[0], square[1], h_square[0],
                        h_square[1]);
  }
  wait_for_all(args.counters, args.slices);
  const bool owns = slice < args.tokens;
  if (owns) sums[warp][lane] = sum_of_slices<kFewTokens>(args, 0, slice, warp, 4);
  {
    const int half = threadIdx.x / kFewTokens, i = threadIdx.x % kFewTokens;
    float total = 0;
    if (i < args.tokens) {
      const float *at = args.sums + kFewTokens + i;
#pragma unroll 10
      for (int s = half; s < args.slices; s += 2) total += __ldcg(at + s * 2 * kFewTokens);
    }
    totals[half][i] = total;
  }
  __syncthreads();
  const float total = totals[0][row] + totals[1][row];
  const float total_8 = totals[0][row + 8] + totals[1][row + 8];
  const float inverse = rsqrtf(total / args.dim + args.norm_eps);
  const float inverse_8 = rsqrtf(total_8 / args.dim + args.norm_eps);
#pragma unroll
  for (int chunk = 0; chunk < kFewWidth / 32; ++chunk) {
    const int d = first + chunk * 32 + q * 8;
    normalise(args, row, inside, d, h[chunk], inverse);
    normalise(args, row + 8, inside_8, d, h_8[chunk], inverse_8);
  }
  if (owns && warp == 3)  // the warp with the fewest rows of its own
    coefficients(args, slice, (sums[0][lane] + sums[1][lane]) + (sums[2][lane] + sums[3][lane]));
}

template <bool kHasY>
cudaError_t launch(const Args &args, cudaStream_t stream) {
  if (args.tokens <= kFewTokens && args.slices == args.dim / kFewWidth) {
    few_tokens<kHasY><<<args.slices, 128, 0, stream>>>(args);
    return cudaGetLastError();
  }
  const int tiles = (args.tokens + kManyTokens - 1) / kManyTokens;
  const auto kernel = many_tokens<kHasY>;
  cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kManyBytes);
  kernel<<<tiles * args.slices, 256, kManyBytes, stream>>>(args);
  return cudaGetLastError();
}

}  // namespace

// ``pointers`` stand in the order of Args, ``sizes`` too: strides, tokens, dim, slices, steps, kind.
extern "C" int openv41_mega_mhc(void *const *pointers, const long long *sizes, float eps,
                                float norm_eps, void *stream) {
  Args args;
  int at = 0;
  auto next = [&](auto *&to) { to = static_cast<std::decay_t<decltype(to)>>(pointers[at++]); };
  next(args.x), next(args.y), next(args.b), next(args.c), next(args.a), next(args.fn);
  next(args.base), next(args.scale), next(args.norm), next(args.new_x), next(args.h);
  next(args.next_a), next(args.next_b), next(args.next_c), next(args.mixes), next(args.inverse);
  next(args.parts), next(args.sums), next(args.counters);
  args.x_token = sizes[0], args.x_stream = sizes[1], args.y_token = sizes[2];
  args.tokens = sizes[3], args.dim = sizes[4], args.slices = sizes[5], args.steps = sizes[6];
  args.norm_is_bf16 = sizes[7];
  args.eps = eps, args.norm_eps = norm_eps;
  const auto on = static_cast<cudaStream_t>(stream);
  return args.y == nullptr ? launch<false>(args, on) : launch<true>(args, on);
}
