// The streams between two blocks, for few tokens, in one launch. Report §2.4.1, Eq. (6).
//
// For N = 4 streams of bf16. The 16 thread blocks of a cluster own a sixteenth of D each of a tile of
// 16 tokens. A warp owns 32 numbers of the rows: lane 4 g + q holds numbers 8 q to 8 q + 7 of rows g
// and g + 8, which is what the tensor core's operand wants if the numbers are taken in that order.
// Weights come as bulk copies, a stream after the other, and are taken as two bf16 each, which leaves
// out less than 2^-17 of a weight.
//
// The sums of a token go to the block that computes its coefficients, one for each token, and the
// squares of the collapsed rows to all. Where there are clusters enough, one of two predicts B only,
// whose balance takes longest, and the other does the rest. All sums have a fixed order.

#include "mhc_boundary.cuh"

namespace {

constexpr int kRanks = 16;
constexpr int kMostWarps = 10;     // and one for the coefficients
constexpr int kSums = kMixes + 2;  // of a token: the mixes, the squares of h and of the streams
constexpr int kPad = 4;            // floats behind a row of weights, for the banks

struct Memory {  // of a block; behind it weights [kStreams, kMixes, dim / kRanks + kPad]
  float4 given[kTile][kRowParts];
  float norm[kMostWarps * 32];
  float parts[kMostWarps][kTile][kSums];
  float inbox[kRanks][kSums];      // of the own token, by rank
  float h_squares[kTile][kRanks];  // of all tokens
  alignas(16) uint64_t weights[kStreams], sums;  // barriers
};

struct Own {  // what is this lane's
  int warp, lane, g, q, d, rank, width;
  int first, tokens;  // of the cluster's tile
  bool predicts[3];   // A and C; the upper and the lower half of B
};

__device__ __forceinline__ Own own_part(const Args &args, int parts) {
  Own own;
  own.warp = threadIdx.x / 32, own.lane = threadIdx.x % 32;
  own.g = own.lane / 4, own.q = own.lane % 4, own.rank = cluster_rank();
  own.width = args.dim / kRanks;
  own.d = own.rank * own.width + own.warp * 32 + own.q * 8;
  const int cluster = static_cast<int>(blockIdx.x) / kRanks;
  own.first = (parts == 1 ? cluster : cluster / 2) * kTile;
  own.tokens = args.tokens - own.first < kTile ? args.tokens - own.first : kTile;
  own.predicts[0] = parts == 1 || cluster % 2 == 0;
  own.predicts[1] = own.predicts[2] = parts == 1 || cluster % 2 == 1;
  return own;
}

__device__ __forceinline__ void set_up_barriers(Memory &memory, const Own &own) {
  const int rows = (own.predicts[0] ? 8 : 0) + (own.predicts[1] ? 16 : 0);
  const int floats = own.tokens * kRanks + (own.rank < own.tokens ? kRanks * kSums : 0);
  for (int m = 0; m < kStreams; ++m) set_up(&memory.weights[m], 1);
  set_up(&memory.sums, 1);
  show_set_up();
  for (int m = 0; m < kStreams; ++m) expect(&memory.weights[m], rows * own.width * 4);
  expect(&memory.sums, floats * 4);
}

// The copies of the weights on their way, a warp's share by one lane.
__device__ __forceinline__ void fetch_weights(const Args &args, Memory &memory, const Own &own) {
  const int first = own.predicts[0] ? 0 : 8, rows = (own.predicts[1] ? kMixes : 8) - first;
  float *weights = reinterpret_cast<float *>(&memory + 1);
  int row = own.warp, m = 0;
  while (true) {
    while (row >= rows) row -= rows, ++m;
    if (m >= kStreams) break;
    const long long place = 1ll * (first + row) * kStreams + m;
    copy_bulk(weights + (m * kMixes + first + row) * (own.width + kPad),
              args.fn + (place * args.dim + own.rank * own.width), own.width * 4,
              &memory.weights[m]);
    row += blockDim.x / 32 - 1;
  }
}

struct Rows {  // of a lane: two of a tile
  uint4 x[2][kStreams], y[2], h[2];
};

// The coefficients that the rows were given.
template <bool kHasY>
__device__ __forceinline__ void fetch_given(const Args &args, Memory &memory, const Own &own) {
  for (int k = threadIdx.x; k < (kHasY ? kRowParts : 1) * kTile; k += blockDim.x - 32) {
    const int row = k % kTile, part = k / kTile;
    const long long token = row < own.tokens ? own.first + row : own.first;
    const float *from = part == 0 ? args.a : part == 1 ? args.c : args.b + (part - 2) * 4;
    copy_async(&memory.given[row][part], from + token * (part > 1 ? 16 : 4), row < own.tokens);
  }
  commit_copies();
}

template <bool kHasY>
__device__ __forceinline__ void read_rows(const Args &args, const Own &own, Rows &rows) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = own.g + 8 * r;
    const long long token = own.first + row;
    rows.y[r] = {};
#pragma unroll
    for (int n = 0; n < kStreams; ++n) rows.x[r][n] = {};
    if (row >= own.tokens) continue;
    const uint16_t *from = args.x + (token * args.x_token + own.d);
#pragma unroll
    for (int n = 0; n < kStreams; ++n, from += args.x_stream)
      rows.x[r][n] = __ldg(reinterpret_cast<const uint4 *>(from));
    if (kHasY)
      rows.y[r] = __ldg(reinterpret_cast<const uint4 *>(args.y + (token * args.y_token + own.d)));
  }
}

// The new streams; the collapsed rows stay here.
template <bool kHasY>
__device__ __forceinline__ void advance_rows(const Args &args, const Memory &memory,
                                             const Own &own, Rows &rows, Sums &sums) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    if (r == 1 && own.tokens <= 8) break;
    const int row = own.g + 8 * r;
    advance<kHasY>(memory.given[row], rows.x[r], rows.y[r], rows.h[r], sums.h_square[r]);
    if (!kHasY || row >= own.tokens || !own.predicts[0]) continue;
    uint16_t *to = args.new_x + ((1ll * own.first + row) * kStreams * args.dim + own.d);
#pragma unroll
    for (int m = 0; m < kStreams; ++m, to += args.dim)
      __stcg(reinterpret_cast<uint4 *>(to), rows.x[r][m]);
  }
}

// The products with the weights, a stream when it is there.
__device__ __forceinline__ void add_products(Memory &memory, const Own &own, const Rows &rows,
                                             Sums &sums) {
  float of_small[3][4] = {};
  const float *weights = reinterpret_cast<const float *>(&memory + 1) +
                         (own.g * (own.width + kPad) + own.warp * 32 + own.q * 8);
#pragma unroll
  for (int m = 0; m < kStreams; ++m) {
    multiply(sums.upper, rows.x[0][m], rows.x[1][m], rows.x[0][m]);
    if (own.tokens > 8) multiply(sums.lower, rows.x[0][m], rows.x[1][m], rows.x[1][m]);
  }
#pragma unroll
  for (int m = 0; m < kStreams; ++m) {
    await_turn(&memory.weights[m], 0);
#pragma unroll
    for (int n = 0; n < 3; ++n) {
      if (!own.predicts[n]) continue;
      const float4 *from =
          reinterpret_cast<const float4 *>(weights + (m * kMixes + 8 * n) * (own.width + kPad));
      const float4 eight[2] = {from[0], from[1]};
      uint4 large, small;
      split(eight, large, small);
      multiply(sums.mixes[n], rows.x[0][m], rows.x[1][m], large);
      multiply(of_small[n], rows.x[0][m], rows.x[1][m], small);
    }
  }
#pragma unroll
  for (int k = 0; k < 12; ++k) sums.mixes[k / 4][k % 4] += of_small[k / 4][k % 4];
}

// Leave a warp's sums of the tile where the block adds them.
__device__ __forceinline__ void leave(Memory &memory, const Own &own, const Sums &sums) {
  float2 squares[2];
  squares_of(sums, own.g, squares);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float2 *to = reinterpret_cast<float2 *>(memory.parts[own.warp][own.g + 8 * r]);
#pragma unroll
    for (int n = 0; n < 3; ++n)
      to[4 * n + own.q] = make_float2(sums.mixes[n][2 * r], sums.mixes[n][2 * r + 1]);
    if (own.g / 2 == own.q) to[kMixes / 2] = squares[r];
  }
}

// Send the block's sums off, added in the order of its warps: a row's to the block of its number,
// squares of h to all.
__device__ __forceinline__ void send(Memory &memory, const Own &own) {
  const int warps = blockDim.x / 32 - 1;
#pragma unroll 1
  for (int k = threadIdx.x; k < own.tokens * (kSums + kRanks); k += blockDim.x) {
    const int of_h = k - own.tokens * kSums;
    const int row = of_h < 0 ? k / kSums : of_h / kRanks, column = of_h < 0 ? k % kSums : kMixes;
    float total = 0;
#pragma unroll
    for (int w = 0; w < kMostWarps; ++w)
      if (w < warps) total += memory.parts[w][row][column];
    float *to = of_h < 0 ? &memory.inbox[own.rank][column] : &memory.h_squares[row][own.rank];
    send_to(of_h < 0 ? row : of_h % kRanks, to, &memory.sums, total);
  }
}

__device__ __forceinline__ void normalise(const Args &args, const Memory &memory, const Own &own,
                                          const Rows &rows) {
  const float4 *weights =
      reinterpret_cast<const float4 *>(memory.norm + own.warp * 32 + own.q * 8);
  const float4 norm[2] = {weights[0], weights[1]};
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = own.g + 8 * r;
    const float4 four = *reinterpret_cast<const float4 *>(&memory.h_squares[row][4 * own.q]);
    const float total = sum_of_four((four.x + four.y) + (four.z + four.w));
    if (row >= own.tokens) continue;
    const float inverse = rsqrtf(fmaf(total, args.over_dim, args.norm_eps));
    uint16_t *to = args.h + ((1ll * own.first + row) * args.dim + own.d);
    __stcg(reinterpret_cast<uint4 *>(to), normalised(rows.h[r], inverse, &norm[0].x));
  }
}

// The own token's mixes and both norms, a mix by each lane.
__device__ __forceinline__ float own_mix(const Args &args, const Memory &memory, const Own &own) {
  const long long token = own.first + own.rank;
  float sum = 0;
#pragma unroll
  for (int s = 0; s < kRanks; ++s) sum += memory.inbox[s][own.lane < kSums ? own.lane : 0];
  const float h_square = __shfl_sync(~0u, sum, kMixes);
  const float square = __shfl_sync(~0u, sum, kMixes + 1);
  const float inverse = rsqrtf(fmaf(square, args.over_dim / kStreams, args.norm_eps));
  const float mix = own.lane < kMixes ? sum * inverse : 0;
  if (own.lane < 8 ? own.predicts[0] : own.predicts[1])
    args.mixes[token * kPartWidth + own.lane] = mix;
  if (own.lane < 2 && own.predicts[0])
    args.inverse[2 * token + own.lane] =
        own.lane == 0 ? inverse : rsqrtf(fmaf(h_square, args.over_dim, args.norm_eps));
  return mix;
}

// The coefficients of the own token, by one warp.
__device__ __forceinline__ void own_coefficients(const Args &args, const Own &own, float raw) {
  const int lane = own.lane, part = lane < 4 ? 0 : lane < 8 ? 1 : 2;
  const long long token = own.first + own.rank;
  if (own.predicts[0] && part < 2) {
    const float half = sigmoid(raw);
    if (part == 0) args.next_a[token * 4 + lane] = half + args.eps;
    else args.next_c[token * 4 + lane - 4] = 2 * half;
  }
  if (!own.predicts[1]) return;
  __syncwarp();
  float top = fmaxf(raw, __shfl_xor_sync(~0u, raw, 1));
  top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
  const float power = expf(raw - top), total = sum_of_four(power);
  const float soft = fmaf(power, reciprocal(total), args.eps);
  float m[16], u[4], v[4];
#pragma unroll
  for (int k = 0; k < 16; ++k) m[k] = __shfl_sync(~0u, soft, 8 + k);
  balance(m, args.steps, args.eps, u, v);
  const int i = lane / 4 - 2, j = lane % 4;
  const float u_i = i == 0 ? u[0] : i == 1 ? u[1] : i == 2 ? u[2] : u[3];
  const float v_j = j == 0 ? v[0] : j == 1 ? v[1] : j == 2 ? v[2] : v[3];
  if (part == 2 && lane < kMixes) args.next_b[token * 16 + j * 4 + i] = soft * u_i * v_j;
}

template <bool kHasY>
__global__ void __launch_bounds__((kMostWarps + 1) * 32, 1)
    boundary(const __grid_constant__ Args args, int parts) {
  extern __shared__ uint4 whole[];
  Memory &memory = *reinterpret_cast<Memory *>(whole);
  const Own own = own_part(args, parts);
  if (own.warp == static_cast<int>(blockDim.x) / 32 - 1) {
    if (own.lane == 0) set_up_barriers(memory, own);
    __syncthreads();
    const float base = own.lane < kMixes ? __ldg(args.base + own.lane) : 0;
    const float scale = __ldg(args.scale + (own.lane < 4 ? 0 : own.lane < 8 ? 1 : 2));
    cluster_arrive();
    __syncthreads();
    cluster_wait();
    __syncthreads();
    send(memory, own);
    await_turn(&memory.sums, 0);
    if (own.rank < own.tokens)
      own_coefficients(args, own, fmaf(own_mix(args, memory, own), scale, base));
    return;
  }
  fetch_given<kHasY>(args, memory, own);
  Rows rows;
  read_rows<kHasY>(args, own, rows);
  const float norm = weight_of(args.norm, args.norm_is_bf16, own.rank * own.width + threadIdx.x);
  __syncthreads();
  if (own.lane == 0) fetch_weights(args, memory, own);
  __syncwarp();
  cluster_arrive();
  Sums sums = {};
  memory.norm[threadIdx.x] = norm;
  wait_for_copies<0>();
  __syncthreads();
  advance_rows<kHasY>(args, memory, own, rows, sums);
  add_products(memory, own, rows, sums);
  leave(memory, own, sums);
  cluster_wait();
  __syncthreads();
  send(memory, own);
  await_turn(&memory.sums, 0);
  if (own.predicts[0]) normalise(args, memory, own, rows);
}

template <bool kHasY>
cudaLaunchConfig_t configure(int dim, cudaLaunchAttribute *attribute) {
  const auto kernel = boundary<kHasY>;
  const int bytes = sizeof(Memory) + kStreams * kMixes * (dim / kRanks + kPad) * sizeof(float);
  cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
  attribute->id = cudaLaunchAttributeClusterDimension;
  attribute->val.clusterDim.x = kRanks;
  attribute->val.clusterDim.y = attribute->val.clusterDim.z = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(kRanks), config.blockDim = dim3(dim / kRanks + 32);
  config.dynamicSmemBytes = bytes;
  config.attrs = attribute, config.numAttrs = 1;
  return config;
}

template <bool kHasY>
cudaError_t launch(const Args &args, int parts, cudaStream_t stream) {
  cudaLaunchAttribute attribute;
  cudaLaunchConfig_t config = configure<kHasY>(args.dim, &attribute);
  config.gridDim.x = kRanks * parts * ((args.tokens + kTile - 1) / kTile);
  config.stream = stream;
  return cudaLaunchKernelEx(&config, boundary<kHasY>, args, parts);
}

}  // namespace

// How many clusters run at once; 0 where one does not fit.
extern "C" int openv41_mega_mhc_clusters(int dim) {
  cudaLaunchAttribute attribute;
  const cudaLaunchConfig_t config = configure<true>(dim, &attribute);
  int clusters = 0;
  const auto error = cudaOccupancyMaxActiveClusters(&clusters, boundary<true>, &config);
  return error == cudaSuccess ? clusters : 0;
}

// ``pointers`` stand in the order of Args; ``sizes``: those of Args, and how many clusters share a
// tile: one or two.
extern "C" int openv41_mega_mhc(void *const *pointers, const long long *sizes, float eps,
                                float norm_eps, void *stream) {
  const Args args = args_of(pointers, sizes, eps, norm_eps);
  const int parts = sizes[kSizes];
  const auto on = static_cast<cudaStream_t>(stream);
  return args.y == nullptr ? launch<false>(args, parts, on) : launch<true>(args, parts, on);
}
