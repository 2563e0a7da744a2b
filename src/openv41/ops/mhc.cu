// The streams between two blocks, in one launch. Report §2.4.1, Eq. (6).
//
// For N = 4 streams of bf16. The 16 thread blocks of a cluster own a sixteenth of D each, and go
// through tiles of 16 tokens together; clusters share the tiles. A warp owns 32 numbers of the rows:
// lane 4 g + q holds numbers 8 q to 8 q + 7 of rows g and g + 8, which is what the tensor core's
// operand wants if the numbers are taken in that order, and 16 bytes of memory. A warp's weights stay
// in its registers, as two bf16 each, which leaves out less than 2^-17 of a weight. A lane copies the
// next tiles to shared memory itself, and nobody else reads them.
//
// The sums of a tile go to the block that computes its token's coefficients, and the squares of the
// collapsed rows to all. They are waited for while the next tile is advanced: the collapsed rows are
// kept until then. All sums have a fixed order.

#include "mhc_cluster.cuh"
#include "mhc_pairs.cuh"

namespace {

constexpr int kRanks = 16, kTile = 16;      // a block computes one token's coefficients per tile
constexpr int kMostWarps = 10, kMostStages = 3;  // tiles under way
constexpr int kGivens = 8;                       // at least kMostStages + 2
constexpr int kRowParts = 6;                 // float4 of a token: a, c and the rows of b
constexpr int kKept = 64;                    // tokens whose coefficients are computed at once
constexpr int kSums = kMixes + 1;            // of a token: the mixes, the streams' square
constexpr int kBytes = kRanks * (kSums + kTile) * 4;  // that a block is sent per tile

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

struct Memory {  // of a block; behind it one or more Stage
  uint4 collapsed[2][kMostWarps][2][32];
  float4 given[kGivens][kTile][kRowParts];
  float parts[kMostWarps][kTile * kMixes];
  float squares[2][kMostWarps][kTile];  // of the streams, of h
  float inbox[2][kRanks][kSums];      // of the own token, by rank
  float h_squares[2][kTile][kRanks];  // of all tokens
  float kept[kKept][kMixes];
  float norm[kMostWarps * 32];
  float base[kMixes], scale[4];
  uint64_t barriers[2];
};

struct Stage {  // rows of a tile, for each lane of each warp
  uint4 rows[kMostWarps][2][kStreams + 1][32];
};

struct Own {  // what is this lane's
  int warp, lane, g, q, d, rank;
};

// The first token of the i-th tile of this cluster.
__device__ __forceinline__ int start_of(int i) {
  return (static_cast<int>(blockIdx.x) / kRanks + i * (static_cast<int>(gridDim.x) / kRanks)) * kTile;
}

// Two bf16 of each of eight numbers.
__device__ __forceinline__ void split(const float4 &u, const float4 &v, uint4 &large,
                                      uint4 &small) {
  large = make_uint4(pack(u.x, u.y), pack(u.z, u.w), pack(v.x, v.y), pack(v.z, v.w));
  small.x = pack(u.x - low(large.x), u.y - high(large.x));
  small.y = pack(u.z - low(large.y), u.w - high(large.y));
  small.z = pack(v.x - low(large.z), v.y - high(large.z));
  small.w = pack(v.z - low(large.w), v.w - high(large.w));
}

__device__ __forceinline__ void read_weights(const Args &args, const Own &own,
                                             uint4 (&large)[kStreams][3],
                                             uint4 (&small)[kStreams][3]) {
  const float *from = args.fn + static_cast<long long>(own.g) * kStreams * args.dim + own.d;
  float4 u[kStreams][3], v[kStreams][3];
#pragma unroll
  for (int m = 0; m < kStreams; ++m)
#pragma unroll
    for (int n = 0; n < 3; ++n) {
      const float *at = from + (8ll * n * kStreams + m) * args.dim;
      u[m][n] = __ldg(reinterpret_cast<const float4 *>(at));
      v[m][n] = __ldg(reinterpret_cast<const float4 *>(at) + 1);
    }
#pragma unroll
  for (int m = 0; m < kStreams; ++m)
#pragma unroll
    for (int n = 0; n < 3; ++n) split(u[m][n], v[m][n], large[m][n], small[m][n]);
}

// The coefficients that a tile's rows were given.
template <bool kHasY>
__device__ __forceinline__ void fetch_given(const Args &args, Memory &memory, int i) {
  for (int k = threadIdx.x; k < (kHasY ? kRowParts : 1) * kTile; k += blockDim.x) {
    const int row = k % kTile, part = k / kTile, token = start_of(i) + row;
    const bool inside = token < args.tokens;
    const float *from = part == 0 ? args.a : part == 1 ? args.c : args.b + (part - 2) * 4;
    if (inside) from += static_cast<long long>(token) * (part > 1 ? 16 : 4);
    copy_async(&memory.given[i % kGivens][row][part], from, inside);
  }
}

// One group of copies: the rows of a tile and the coefficients of the next.
template <bool kHasY>
__device__ __forceinline__ void fetch(const Args &args, Memory &memory, Stage &stage, const Own &own,
                                      int i) {
  const int start = start_of(i);
  if (start < args.tokens) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int token = start + own.g + 8 * r;
      const bool inside = token < args.tokens;
      const long long row = inside ? token : 0;
      const uint16_t *from = args.x + (row * args.x_token + own.d);
      uint4(*to)[32] = stage.rows[own.warp][r];
#pragma unroll
      for (int n = 0; n < kStreams; ++n, from += args.x_stream)
        copy_async(&to[n][own.lane], from, inside);
      if (kHasY)
        copy_async(&to[kStreams][own.lane], args.y + (row * args.y_token + own.d), inside);
    }
    fetch_given<kHasY>(args, memory, i + 1);
  }
  commit_copies();
}

// Eight numbers of one token: the streams become the new ones, ``h`` is what they collapse to.
template <bool kHasY>
__device__ __forceinline__ void advance(const float4 (&given)[kRowParts], uint4 (&x)[kStreams],
                                        const uint4 &y, uint4 &h, float &h_square) {
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

template <bool kHasY>
__device__ __forceinline__ void advance_row(const Args &args, Memory &memory, const Stage &stage,
                                            const Own &own, int i, int r, uint4 (&x)[kStreams],
                                            float &h_square) {
  const uint4(*from)[32] = stage.rows[own.warp][r];
  uint4 y = {}, h;
#pragma unroll
  for (int n = 0; n < kStreams; ++n) x[n] = from[n][own.lane];
  if (kHasY) y = from[kStreams][own.lane];
  advance<kHasY>(memory.given[i % kGivens][own.g + 8 * r], x, y, h, h_square);
  memory.collapsed[i % 2][own.warp][r][own.lane] = h;
  const int token = start_of(i) + own.g + 8 * r;
  if (kHasY && token < args.tokens) {
    uint16_t *to = args.new_x + (static_cast<long long>(token) * kStreams * args.dim + own.d);
#pragma unroll
    for (int m = 0; m < kStreams; ++m, to += args.dim) *reinterpret_cast<uint4 *>(to) = x[m];
  }
}

struct Sums {  // of a warp's numbers of a tile
  float mixes[3][4], upper[4], lower[4], h_square[2];  // and products of rows with each other
};

// A tile's rows: the new streams go to memory, the collapsed rows are kept, the rest is sums.
template <bool kHasY>
__device__ __forceinline__ void advance_tile(const Args &args, Memory &memory, const Stage &stage,
                                             const Own &own, int i, const uint4 (&large)[kStreams][3],
                                             const uint4 (&small)[kStreams][3], Sums &sums) {
  uint4 x[kStreams], x_8[kStreams] = {};
  advance_row<kHasY>(args, memory, stage, own, i, 0, x, sums.h_square[0]);
  if (start_of(i) + 8 < args.tokens)
    advance_row<kHasY>(args, memory, stage, own, i, 1, x_8, sums.h_square[1]);
#pragma unroll
  for (int m = 0; m < kStreams; ++m) {
    const uint4 &up = x[m], &down = x_8[m];
    multiply(sums.upper, up.x, down.x, up.y, down.y, up.x, up.y);
    multiply(sums.lower, up.x, down.x, up.y, down.y, down.x, down.y);
#pragma unroll
    for (int n = 0; n < 3; ++n) {
      multiply(sums.mixes[n], up.x, down.x, up.y, down.y, small[m][n].x, small[m][n].y);
      multiply(sums.mixes[n], up.x, down.x, up.y, down.y, large[m][n].x, large[m][n].y);
    }
    multiply(sums.upper, up.z, down.z, up.w, down.w, up.z, up.w);
    multiply(sums.lower, up.z, down.z, up.w, down.w, down.z, down.w);
#pragma unroll
    for (int n = 0; n < 3; ++n) {
      multiply(sums.mixes[n], up.z, down.z, up.w, down.w, small[m][n].z, small[m][n].w);
      multiply(sums.mixes[n], up.z, down.z, up.w, down.w, large[m][n].z, large[m][n].w);
    }
  }
}

// Leave a warp's sums of the tile where the block adds them.
__device__ __forceinline__ void leave(Memory &memory, const Own &own, Sums &sums) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = own.g + 8 * r;
    float *to = memory.parts[own.warp] + row * kMixes + 2 * own.q;
#pragma unroll
    for (int n = 0; n < 3; ++n)
      *reinterpret_cast<float2 *>(to + 8 * n) =
          make_float2(sums.mixes[n][2 * r], sums.mixes[n][2 * r + 1]);
    const float *products = r == 0 ? sums.upper : sums.lower + 2;  // of row g with 2 q, 2 q + 1
    if (own.g / 2 == own.q)
      memory.squares[0][own.warp][row] = own.g % 2 == 0 ? products[0] : products[1];
    float h_square = sums.h_square[r];
    h_square += __shfl_xor_sync(~0u, h_square, 1);
    h_square += __shfl_xor_sync(~0u, h_square, 2);
    if (own.q == 0) memory.squares[1][own.warp][row] = h_square;
  }
}

// The sum of what the block's warps left, in their order.
__device__ __forceinline__ float sum_of_warps(const float *from, int step) {
  const int warps = blockDim.x / 32;
  float total = 0;
#pragma unroll
  for (int w = 0; w < kMostWarps; ++w)
    if (w < warps) total += from[w * step];
  return total;
}

// Send the block's sums off: a row's to the block of its number, squares of h to all.
__device__ __forceinline__ void send(Memory &memory, const Own &own, int i) {
  uint64_t *barrier = &memory.barriers[i % 2];
  if (threadIdx.x == 0) expect(barrier, kBytes);
#pragma unroll 1
  for (int k = threadIdx.x; k < kTile * kSums; k += blockDim.x) {
    const bool is_mix = k < kTile * kMixes;
    const int row = is_mix ? k / kMixes : k - kTile * kMixes, column = is_mix ? k % kMixes : kMixes;
    const float *from = is_mix ? memory.parts[0] + k : memory.squares[0][0] + row;
    send_to(row, &memory.inbox[i % 2][own.rank][column], barrier,
            sum_of_warps(from, is_mix ? kTile * kMixes : kTile));
  }
#pragma unroll 1
  for (int k = threadIdx.x; k < kTile * kRanks; k += blockDim.x)
    send_to(k / kTile, &memory.h_squares[i % 2][k % kTile][own.rank], barrier,
            sum_of_warps(memory.squares[1][0] + k % kTile, kTile));
}

__device__ __forceinline__ void normalise(const Args &args, const Memory &memory, const Own &own,
                                          int i, int r) {
  const int row = own.g + 8 * r, token = start_of(i) + row;
  const float4 four = *reinterpret_cast<const float4 *>(&memory.h_squares[i % 2][row][4 * own.q]);
  float total = (four.x + four.y) + (four.z + four.w);
  total += __shfl_xor_sync(~0u, total, 1);
  total += __shfl_xor_sync(~0u, total, 2);
  if (token >= args.tokens) return;
  const float inverse = rsqrtf(fmaf(total, args.over_dim, args.norm_eps));
  const uint4 h = memory.collapsed[i % 2][own.warp][r][own.lane];
  const float4 *norm = reinterpret_cast<const float4 *>(memory.norm + own.warp * 32 + own.q * 8);
  const float4 u = norm[0], v = norm[1];
  const uint4 out = make_uint4(pack(low(h.x) * inverse * u.x, high(h.x) * inverse * u.y),
                               pack(low(h.y) * inverse * u.z, high(h.y) * inverse * u.w),
                               pack(low(h.z) * inverse * v.x, high(h.z) * inverse * v.y),
                               pack(low(h.w) * inverse * v.z, high(h.w) * inverse * v.w));
  *reinterpret_cast<uint4 *>(args.h + (static_cast<long long>(token) * args.dim + own.d)) = out;
}

// Keep the own token's mixes, ``at`` that place; by one warp.
__device__ __forceinline__ void keep(const Args &args, Memory &memory, const Own &own, int i,
                                     int at) {
  const long long token = start_of(i) + own.rank;
  if (token >= args.tokens) return;
  const bool of_h = own.lane == kSums;
  const float *from = of_h ? memory.h_squares[i % 2][own.rank] : memory.inbox[i % 2][0] + own.lane;
  const int step = of_h ? 1 : kSums;
  float sum = 0;
#pragma unroll
  for (int s = 0; s < kRanks; ++s)
    if (own.lane <= kSums) sum += from[s * step];
  const float square = __shfl_sync(~0u, sum, kMixes), h_square = __shfl_sync(~0u, sum, kSums);
  const float inverse = rsqrtf(fmaf(square, args.over_dim / kStreams, args.norm_eps));
  const float mix = own.lane < kMixes ? sum * inverse : 0;
  args.mixes[token * kPartWidth + own.lane] = mix;
  if (own.lane < kMixes) memory.kept[at][own.lane] = mix;
  if (own.lane < 2)
    args.inverse[2 * token + own.lane] =
        own.lane == 0 ? inverse : rsqrtf(fmaf(h_square, args.over_dim, args.norm_eps));
}

__device__ __forceinline__ float sigmoid(float x) { return __fdividef(1.0f, 1.0f + expf(-x)); }

// One half step of balancing diag(u) M diag(v): the own factors, whose inverses are ``divisors``.
template <int kAcross, int kAlong>
__device__ __forceinline__ void balance(const float (&m)[16], const float (&others)[4],
                                        float (&factors)[4], float (&divisors)[4], float eps) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float *at = m + i * kAcross;
    const float first = fmaf(at[0], others[0], at[kAlong] * others[1]);
    const float second = fmaf(at[2 * kAlong], others[2], at[3 * kAlong] * others[3]);
    divisors[i] = fmaf(eps, divisors[i], first + second);
    factors[i] = __fdividef(1.0f, divisors[i]);
  }
}

// The coefficients of one token, by one thread.
__device__ __forceinline__ void coefficients(const Args &args, const Memory &memory,
                                             const float *mixes, long long token) {
  float next[8], m[16];
#pragma unroll
  for (int k = 0; k < 8; ++k) next[k] = sigmoid(mixes[k] * memory.scale[k / 4] + memory.base[k]);
  float4 *to = reinterpret_cast<float4 *>(args.next_a) + token;
  *to = make_float4(next[0] + args.eps, next[1] + args.eps, next[2] + args.eps, next[3] + args.eps);
  to = reinterpret_cast<float4 *>(args.next_c) + token;
  *to = make_float4(2 * next[4], 2 * next[5], 2 * next[6], 2 * next[7]);
#pragma unroll
  for (int k = 0; k < 16; ++k) m[k] = mixes[8 + k] * memory.scale[2] + memory.base[8 + k];
#pragma unroll
  for (int i = 0; i < 16; i += 4) {
    const float top = fmaxf(fmaxf(m[i], m[i + 1]), fmaxf(m[i + 2], m[i + 3]));
    for (int j = i; j < i + 4; ++j) m[j] = expf(m[j] - top);
    const float inverse = __fdividef(1.0f, (m[i] + m[i + 1]) + (m[i + 2] + m[i + 3]));
    for (int j = i; j < i + 4; ++j) m[j] = fmaf(m[j], inverse, args.eps);
  }
  float u[4] = {1, 1, 1, 1}, v[4] = {1, 1, 1, 1}, over_u[4] = {1, 1, 1, 1}, over_v[4] = {1, 1, 1, 1};
  balance<1, 4>(m, u, v, over_v, args.eps);
#pragma unroll 1
  for (int step = 1; step < args.steps; ++step) {
    balance<4, 1>(m, v, u, over_u, args.eps);
    balance<1, 4>(m, u, v, over_v, args.eps);
  }
  to = reinterpret_cast<float4 *>(args.next_b) + token * 4;
#pragma unroll
  for (int j = 0; j < 4; ++j)
    to[j] = make_float4(m[j] * u[0] * v[j], m[4 + j] * u[1] * v[j], m[8 + j] * u[2] * v[j],
                        m[12 + j] * u[3] * v[j]);
}

template <bool kHasY, int kStages>
__global__ void __launch_bounds__(kMostWarps * 32, 1) boundary(const __grid_constant__ Args args) {
  extern __shared__ uint4 whole[];
  Memory &memory = *reinterpret_cast<Memory *>(whole);
  Stage *stages = reinterpret_cast<Stage *>(&memory + 1);
  if (threadIdx.x < 2) set_up(&memory.barriers[threadIdx.x]);
  cluster_arrive();
  Own own;
  own.warp = threadIdx.x / 32, own.lane = threadIdx.x % 32;
  own.g = own.lane / 4, own.q = own.lane % 4, own.rank = cluster_rank();
  const int first = own.rank * static_cast<int>(blockDim.x);
  own.d = first + own.warp * 32 + own.q * 8;
  fetch_given<kHasY>(args, memory, 0);
#pragma unroll 1
  for (int i = 0; i < kStages; ++i) fetch<kHasY>(args, memory, stages[i], own, i);
  uint4 large[kStreams][3], small[kStreams][3];
  read_weights(args, own, large, small);
  memory.norm[threadIdx.x] = weight_of(args.norm, args.norm_is_bf16, first + threadIdx.x);
  if (threadIdx.x < kMixes) memory.base[threadIdx.x] = args.base[threadIdx.x];
  if (threadIdx.x < 3) memory.scale[threadIdx.x] = args.scale[threadIdx.x];
  wait_for_copies<kStages - 1>();
  __syncthreads();
  int kept = 0, kept_from = 0, stage = 0;
#pragma unroll 1
  for (int i = 0;; ++i) {
    const bool more = start_of(i) < args.tokens;
    Sums sums = {};
    if (more) {
      wait_for_copies<kStages - 1>();
      advance_tile<kHasY>(args, memory, stages[stage], own, i, large, small, sums);
      fetch<kHasY>(args, memory, stages[stage], own, i + kStages);
      stage = stage + 1 < kStages ? stage + 1 : 0;
    }
    if (i == 0) cluster_wait();
    else wait_for(&memory.barriers[(i - 1) % 2], (i - 1) / 2 % 2);
    if (more) leave(memory, own, sums);
    if (i > 0) {
      if (own.warp == (i - 1) % (static_cast<int>(blockDim.x) / 32))
        keep(args, memory, own, i - 1, kept);
      normalise(args, memory, own, i - 1, 0);
      if (start_of(i - 1) + 8 < args.tokens) normalise(args, memory, own, i - 1, 1);
      ++kept;
    }
    __syncthreads();
    if (more) send(memory, own, i);
    if (kept == kKept || !more) {
      for (int k = threadIdx.x; k < kept; k += blockDim.x) {
        const long long token = start_of(kept_from + k) + own.rank;
        if (token < args.tokens) coefficients(args, memory, memory.kept[k], token);
      }
      kept_from += kept, kept = 0;
    }
    if (!more) break;
  }
}

template <bool kHasY, int kStages>
cudaLaunchConfig_t configure(int dim, cudaLaunchAttribute *attribute) {
  const auto kernel = boundary<kHasY, kStages>;
  const int bytes = sizeof(Memory) + kStages * sizeof(Stage);
  cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
  attribute->id = cudaLaunchAttributeClusterDimension;
  attribute->val.clusterDim.x = kRanks;
  attribute->val.clusterDim.y = attribute->val.clusterDim.z = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(kRanks), config.blockDim = dim3(dim / kRanks);
  config.dynamicSmemBytes = bytes;
  config.attrs = attribute, config.numAttrs = 1;
  return config;
}

template <bool kHasY, int kStages>
cudaError_t launch(const Args &args, int clusters, cudaStream_t stream) {
  cudaLaunchAttribute attribute;
  cudaLaunchConfig_t config = configure<kHasY, kStages>(args.dim, &attribute);
  config.gridDim.x = kRanks * clusters;
  config.stream = stream;
  return cudaLaunchKernelEx(&config, boundary<kHasY, kStages>, args);
}

// As many clusters as there are tiles, or as run at once; only then is there a next tile to copy.
template <bool kHasY>
cudaError_t launch(const Args &args, int clusters, cudaStream_t stream) {
  const int tiles = (args.tokens + kTile - 1) / kTile;
  if (tiles <= clusters) return launch<kHasY, 1>(args, tiles, stream);
  return launch<kHasY, kMostStages>(args, clusters, stream);
}

}  // namespace

// How many clusters run at once; 0 where one does not fit.
extern "C" int openv41_mega_mhc_clusters(int dim) {
  cudaLaunchAttribute attribute;
  const cudaLaunchConfig_t config = configure<true, kMostStages>(dim, &attribute);
  int clusters = 0;
  const auto error = cudaOccupancyMaxActiveClusters(&clusters, boundary<true, kMostStages>, &config);
  return error == cudaSuccess ? clusters : 0;
}

// ``pointers`` stand in the order of Args; ``sizes``: strides, tokens, dim, steps, kind, clusters.
extern "C" int openv41_mega_mhc(void *const *pointers, const long long *sizes, float eps,
                                float norm_eps, void *stream) {
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
  const int clusters = sizes[7];
  const auto on = static_cast<cudaStream_t>(stream);
  return args.y == nullptr ? launch<false>(args, clusters, on) : launch<true>(args, clusters, on);
}
