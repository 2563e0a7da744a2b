// Gradients of the streams between two blocks. Report §2.4.1, Eq. (6).
//
// For N = 4 streams of bf16, in the layout of mhc.cu: lane 4 g + q of a warp holds numbers 8 q to
// 8 q + 7 of 32, of rows g and g + 8. A block owns a slice of D, whose weights it keeps in shared
// memory as the tensor cores want them, and goes through tiles of 128 tokens. What the new streams
// were is computed again. Nothing waits for another block; sums over D are partial, per slice.

#include "mhc_pairs.cuh"

namespace {

constexpr int kTokens = 128, kWidth = 256, kChunks = kWidth / 32, kWarps = 8;
constexpr int kFragments = kChunks * kStreams * 2 * 3 * 32;  // of 16 bytes, of the weights
constexpr int kBytes = kFragments * 16 + kTokens * kMixes * 4;

struct Args {
  const uint16_t *x, *y;
  const float *b, *c, *a, *fn;
  const void *norm;
  const float *inverse;
  const uint16_t *g_new, *g_h;
  const float *g_mixes, *along, *products;
  uint16_t *g_x, *g_y;
  float *parts;
  long long x_token, x_stream, y_token;
  int tokens, dim, norm_is_bf16;
};

// Two adjacent rows of the weights at number d, as large and small halves.
__device__ __forceinline__ void rows_at(const Args &args, int m, int row, int d, uint32_t &large,
                                        uint32_t &small) {
  const long long width = static_cast<long long>(kStreams) * args.dim;
  const float *from = args.fn + row * width + static_cast<long long>(m) * args.dim + d;
  const float first = __ldg(from), second = __ldg(from + width);
  large = pack(first, second);
  small = pack(first - low(large), second - high(large));
}

// The slice's weights: [chunk][stream][half][piece][lane] of four words, the word 3 n + k being the
// operand's k-th register of column tile n.
__device__ __forceinline__ void keep_weights(const Args &args, int first, uint4 *to) {
  for (int i = threadIdx.x; i < kChunks * kStreams * 32; i += kWarps * 32) {
    const int lane = i % 32, m = i / 32 % kStreams, chunk = i / 32 / kStreams;
    const int g = lane / 4, q = lane % 4;
    uint32_t large[12], small[12];
#pragma unroll
    for (int n = 0; n < 4; ++n)
#pragma unroll
      for (int k = 0; k < 3; ++k)
        rows_at(args, m, 8 * k + 2 * q, first + chunk * 32 + g / 2 * 8 + n * 2 + g % 2,
                large[3 * n + k], small[3 * n + k]);
    uint4 *at = to + (chunk * kStreams + m) * 2 * 3 * 32 + lane;
#pragma unroll
    for (int p = 0; p < 3; ++p) {
      at[p * 32] = make_uint4(large[4 * p], large[4 * p + 1], large[4 * p + 2], large[4 * p + 3]);
      at[(3 + p) * 32] =
          make_uint4(small[4 * p], small[4 * p + 1], small[4 * p + 2], small[4 * p + 3]);
    }
  }
}

struct Row {  // of a token
  long long token;
  bool inside;
  float inverse, pull, along;
};

__device__ __forceinline__ Row row_of(const Args &args, long long token) {
  Row row = {token, token < args.tokens, 0, 0, 0};
  if (row.inside) {
    row.inverse = __ldg(args.inverse + 2 * token + 1);
    const float cube = row.inverse * row.inverse * row.inverse;
    row.pull = __ldg(args.products + token) / args.dim * cube;
    row.along = __ldg(args.along + token);
  }
  return row;
}

// The gradient of the mixes of two rows as operands: registers 0, 1 of the second step stay.
__device__ __forceinline__ void operands(const Args &args, const Row (&rows)[2], int q,
                                         uint32_t (&large)[6], uint32_t (&small)[6]) {
#pragma unroll
  for (int k = 0; k < 3; ++k)
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float2 pair = {};
      if (rows[r].inside)
        pair = __ldg(reinterpret_cast<const float2 *>(args.g_mixes + rows[r].token * kPartWidth) +
                     4 * k + q);
      large[2 * k + r] = pack(pair.x, pair.y);
      small[2 * k + r] = pack(pair.x - low(large[2 * k + r]), pair.y - high(large[2 * k + r]));
    }
}

__device__ __forceinline__ void multiply_both(float (&sum)[4], const uint32_t (&a)[6],
                                              const uint32_t *b) {
  multiply(sum, a[0], a[1], a[2], a[3], b[0], b[1]);
  multiply(sum, a[4], a[5], 0, 0, b[2], 0);
}

// Two numbers of one row: x and y become their gradients.
template <bool kHasY, bool kHasG>
__device__ __forceinline__ void step(const float *coefficients, const Row &row, float2 norm,
                                     const float (&total)[kStreams][2],
                                     const uint32_t (&g_new)[kStreams], uint32_t g_h,
                                     uint32_t (&x)[kStreams], uint32_t &y, float (&sums)[kMixes]) {
  const float *a = coefficients, *c = coefficients + 4, *b = coefficients + 8;
  float x_0[kStreams], x_1[kStreams], new_0[kStreams], new_1[kStreams];
  const float y_0 = low(y), y_1 = high(y);
#pragma unroll
  for (int n = 0; n < kStreams; ++n) x_0[n] = low(x[n]), x_1[n] = high(x[n]);
  float h_0 = 0, h_1 = 0;
#pragma unroll
  for (int m = 0; m < kStreams; ++m) {
    new_0[m] = x_0[m], new_1[m] = x_1[m];
    if (kHasY) {
      float first = c[m] * y_0, second = c[m] * y_1;
#pragma unroll
      for (int n = 0; n < kStreams; ++n) {
        first = fmaf(b[4 * m + n], x_0[n], first);
        second = fmaf(b[4 * m + n], x_1[n], second);
      }
      const uint32_t pair = pack(first, second);
      new_0[m] = low(pair), new_1[m] = high(pair);
    }
    h_0 = fmaf(a[m], new_0[m], h_0), h_1 = fmaf(a[m], new_1[m], h_1);
  }
  const uint32_t h = pack(h_0, h_1);
  const float g_h_0 = low(g_h) * norm.x * row.inverse - low(h) * row.pull;
  const float g_h_1 = high(g_h) * norm.y * row.inverse - high(h) * row.pull;
  float g_y_0 = 0, g_y_1 = 0, g_x_0[kStreams] = {}, g_x_1[kStreams] = {};
#pragma unroll
  for (int m = 0; m < kStreams; ++m) {
    float first = fmaf(a[m], g_h_0, total[m][0] - row.along * new_0[m]);
    float second = fmaf(a[m], g_h_1, total[m][1] - row.along * new_1[m]);
    if (kHasG) first += low(g_new[m]), second += high(g_new[m]);
    sums[m] += g_h_0 * new_0[m] + g_h_1 * new_1[m];
    if (kHasY) {
      sums[4 + m] += first * y_0 + second * y_1;
      g_y_0 = fmaf(c[m], first, g_y_0), g_y_1 = fmaf(c[m], second, g_y_1);
#pragma unroll
      for (int n = 0; n < kStreams; ++n) {
        sums[8 + 4 * m + n] += first * x_0[n] + second * x_1[n];
        g_x_0[n] = fmaf(b[4 * m + n], first, g_x_0[n]);
        g_x_1[n] = fmaf(b[4 * m + n], second, g_x_1[n]);
      }
    } else {
      g_x_0[m] = first, g_x_1[m] = second;
    }
  }
#pragma unroll
  for (int n = 0; n < kStreams; ++n) x[n] = pack(g_x_0[n], g_x_1[n]);
  if (kHasY) y = pack(g_y_0, g_y_1);
}

__device__ __forceinline__ uint4 load(const uint16_t *from, bool inside) {
  return inside ? __ldg(reinterpret_cast<const uint4 *>(from)) : uint4{};
}

template <bool kHasY, bool kHasG>
__global__ void __launch_bounds__(kWarps * 32, 1) gradients(const __grid_constant__ Args args) {
  extern __shared__ uint4 memory[];
  float *coefficients = reinterpret_cast<float *>(memory + kFragments);
  const int slice = blockIdx.x, first = slice * kWidth;
  keep_weights(args, first, memory);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
  const int tiles = (args.tokens + kTokens - 1) / kTokens;
  for (int tile = blockIdx.y; tile < tiles; tile += gridDim.y) {
    const long long start = static_cast<long long>(tile) * kTokens;
    __syncthreads();  // nobody reads the coefficients of the tile before
    for (int i = threadIdx.x; i < kTokens * kMixes; i += kWarps * 32) {
      const long long token = start + i / kMixes;
      const int k = i % kMixes;
      float value = 0;
      if (token < args.tokens) {
        if (k < 4) value = args.a[token * 4 + k];
        else if (kHasY) value = k < 8 ? args.c[token * 4 + k - 4] : args.b[token * 16 + k - 8];
      }
      coefficients[i] = value;
    }
    __syncthreads();
    const int own = warp * 16 + g;
    const Row rows[2] = {row_of(args, start + own), row_of(args, start + own + 8)};
    uint32_t large[6], small[6];
    operands(args, rows, q, large, small);
    float sums[2][kMixes] = {};
#pragma unroll 1
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      const int d = first + chunk * 32 + q * 8;
      uint4 x[2][kStreams], g_new[2][kStreams], y[2] = {}, g_h[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const long long token = rows[r].token;
        const bool inside = rows[r].inside;
#pragma unroll
        for (int n = 0; n < kStreams; ++n) {
          x[r][n] = load(args.x + token * args.x_token + n * args.x_stream + d, inside);
          if (kHasG) g_new[r][n] = load(args.g_new + (token * kStreams + n) * args.dim + d, inside);
        }
        if (kHasY) y[r] = load(args.y + token * args.y_token + d, inside);
        g_h[r] = load(args.g_h + token * args.dim + d, inside);
      }
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        float total[kStreams][4] = {};
#pragma unroll
        for (int m = 0; m < kStreams; ++m) {
          const uint32_t *at = reinterpret_cast<const uint32_t *>(
              memory + (chunk * kStreams + m) * 2 * 3 * 32 + lane);
          uint32_t high_part[3], low_part[3];
#pragma unroll
          for (int k = 0; k < 3; ++k) {
            const int word = 3 * w + k;
            high_part[k] = at[word / 4 * 128 + word % 4];
            low_part[k] = at[(3 + word / 4) * 128 + word % 4];
          }
          multiply_both(total[m], small, high_part);
          multiply_both(total[m], large, low_part);
          multiply_both(total[m], large, high_part);
        }
        const float2 norm = {weight_of(args.norm, args.norm_is_bf16, d + 2 * w),
                             weight_of(args.norm, args.norm_is_bf16, d + 2 * w + 1)};
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          float half[kStreams][2];
          uint32_t x_pairs[kStreams], g_pairs[kStreams];
#pragma unroll
          for (int m = 0; m < kStreams; ++m) {
            half[m][0] = total[m][2 * r], half[m][1] = total[m][2 * r + 1];
            x_pairs[m] = (&x[r][m].x)[w];
            g_pairs[m] = kHasG ? (&g_new[r][m].x)[w] : 0;
          }
          step<kHasY, kHasG>(coefficients + (own + 8 * r) * kMixes, rows[r], norm, half, g_pairs,
                             (&g_h[r].x)[w], x_pairs, (&y[r].x)[w], sums[r]);
#pragma unroll
          for (int m = 0; m < kStreams; ++m) (&x[r][m].x)[w] = x_pairs[m];
        }
      }
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        if (!rows[r].inside) continue;
        uint16_t *to = args.g_x + rows[r].token * kStreams * args.dim + d;
#pragma unroll
        for (int n = 0; n < kStreams; ++n)
          *reinterpret_cast<uint4 *>(to + static_cast<long long>(n) * args.dim) = x[r][n];
        if (kHasY) *reinterpret_cast<uint4 *>(args.g_y + rows[r].token * args.dim + d) = y[r];
      }
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float *to = args.parts + (static_cast<long long>(slice) * args.tokens + rows[r].token) * kMixes;
#pragma unroll
      for (int k = 0; k < kMixes; ++k) {
        float sum = sums[r][k];
        sum += __shfl_xor_sync(~0u, sum, 1);
        sum += __shfl_xor_sync(~0u, sum, 2);
        if (rows[r].inside && k % 4 == q) to[k] = sum;
      }
    }
  }
}

template <bool kHasY, bool kHasG>
cudaError_t launch(const Args &args, int groups, cudaStream_t stream) {
  const auto kernel = gradients<kHasY, kHasG>;
  cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  kernel<<<dim3(args.dim / kWidth, groups), kWarps * 32, kBytes, stream>>>(args);
  return cudaGetLastError();
}

}  // namespace

// ``pointers`` stand in the order of Args; ``sizes``: strides, tokens, dim, kind of norm, groups.
extern "C" int openv41_mega_mhc_backward(void *const *pointers, const long long *sizes,
                                         void *stream) {
  Args args;
  int at = 0;
  auto next = [&](auto *&to) { to = static_cast<std::decay_t<decltype(to)>>(pointers[at++]); };
  next(args.x), next(args.y), next(args.b), next(args.c), next(args.a), next(args.fn);
  next(args.norm), next(args.inverse), next(args.g_new), next(args.g_h), next(args.g_mixes);
  next(args.along), next(args.products), next(args.g_x), next(args.g_y), next(args.parts);
  args.x_token = sizes[0], args.x_stream = sizes[1], args.y_token = sizes[2];
  args.tokens = sizes[3], args.dim = sizes[4], args.norm_is_bf16 = sizes[5];
  const int groups = sizes[6];
  const auto on = static_cast<cudaStream_t>(stream);
  if (args.y != nullptr) {
    if (args.g_new != nullptr) return launch<true, true>(args, groups, on);
    return launch<true, false>(args, groups, on);
  }
  return launch<false, false>(args, groups, on);
}
