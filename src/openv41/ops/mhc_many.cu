// The streams between two blocks, for many tokens. Report §2.4.1, Eq. (6).
//
// For N = 4 streams of bf16. The blocks of a group own a slice of D each and go through tiles of 16
// tokens together; groups share the tiles. A warp owns 32 numbers of the rows: lane 4 g + q holds
// numbers 8 q to 8 q + 7 of rows g and g + 8, which is what the tensor core's operand wants if the
// numbers are taken in that order, and 16 bytes of memory. The slice's weights stay in shared
// memory, as two bf16 each, which leaves out less than 2^-17 of a weight. A lane copies its next
// numbers to shared memory itself, and nobody else reads them.
//
// Two more warps do what the others would wait for. One adds the warps' sums of a tile, leaves them
// in memory and counts up; the other awaits all blocks of the group, finds the norms of the rows, and
// computes the coefficients of the block's own tokens. The collapsed rows are kept until their norms
// are there, two tiles later. All sums have a fixed order. A cluster would exchange them faster, but
// clusters of 16 leave processors idle.

#include "mhc_boundary.cuh"

namespace {

constexpr int kMostWarps = 10;      // and two
constexpr int kSums = kMixes + 2;   // of a row: the mixes, the squares of h and of the streams
constexpr int kLag = 2, kRing = 4;  // tiles that wait for their norms; places in rings
constexpr int kAhead = 3;           // tiles until one that is fetched to L2
constexpr int kSlots = 8;           // of tiles whose sums are in memory at once
constexpr int kRowsSize = 2 * (kStreams + 1) * 32, kKeptSize = 2 * 32;  // of a warp, in uint4
constexpr int kWeightsSize = kStreams * 3 * 2 * 32;

struct Shares {  // what the blocks of a group leave for each other
  float *mixes;       // [groups, kSlots, kTile, slices, kMixes]
  float2 *squares;    // [groups, kSlots, kTile, slices], of h and of the streams
  unsigned *arrived;  // [tiles]
  int slices, groups;
};

struct Memory {  // of a block; behind it what its warps own
  float4 given[kRing][kTile][kRowParts];
  float parts[kMostWarps][kTile][kSums];
  float inverse[kRing][kTile];  // of h
  float base[kMixes], scale[4];
  uint64_t parts_full, parts_free, given_full[kRing], inverse_full[kRing];
};

struct Own {  // what is this lane's
  int lane, warp, warps, g, q, rank, group, d, tiles;
  uint4 *weights;  // [kStreams, 3, 2, 32]
  uint4 *rows;     // [2, kStreams + 1, 32]
  uint4 *kept;     // [kLag + 1, 2, 32], of h
  float *norm;     // [32]
};

constexpr int bytes_of(int warps) {
  const int of_warp = kWeightsSize + kRowsSize + (kLag + 1) * kKeptSize + 8;
  return sizeof(Memory) + 16 * warps * of_warp;
}

__device__ __forceinline__ Own own_part(const Args &args, const Shares &shares, Memory &memory) {
  Own own;
  own.warp = threadIdx.x / 32, own.lane = threadIdx.x % 32, own.warps = blockDim.x / 32 - 2;
  own.g = own.lane / 4, own.q = own.lane % 4;
  own.rank = static_cast<int>(blockIdx.x) % shares.slices;
  own.group = static_cast<int>(blockIdx.x) / shares.slices;
  own.d = (own.rank * own.warps + own.warp) * 32 + own.q * 8;
  const int tiles = (args.tokens + kTile - 1) / kTile;
  own.tiles = (tiles - own.group + shares.groups - 1) / shares.groups;
  uint4 *at = reinterpret_cast<uint4 *>(&memory + 1);
  own.weights = at + own.warp * kWeightsSize, at += own.warps * kWeightsSize;
  own.rows = at + own.warp * kRowsSize, at += own.warps * kRowsSize;
  own.kept = at + own.warp * (kLag + 1) * kKeptSize, at += own.warps * (kLag + 1) * kKeptSize;
  own.norm = reinterpret_cast<float *>(at) + own.warp * 32;
  return own;
}

// The i-th tile of a group; the groups take turns.
__device__ __forceinline__ int tile_of(const Shares &shares, const Own &own, int i) {
  return i * shares.groups + own.group;
}

// A warp's weights, and its part of the norm's.
__device__ __forceinline__ void read_weights(const Args &args, const Own &own) {
  const float *from = args.fn + (1ll * own.g * kStreams * args.dim + own.d);
#pragma unroll
  for (int m = 0; m < kStreams; ++m) {
    float4 eight[3][2];
#pragma unroll
    for (int n = 0; n < 3; ++n) {
      const float *at = from + (8ll * n * kStreams + m) * args.dim;
      eight[n][0] = __ldg(reinterpret_cast<const float4 *>(at));
      eight[n][1] = __ldg(reinterpret_cast<const float4 *>(at) + 1);
    }
#pragma unroll
    for (int n = 0; n < 3; ++n) {
      uint4 large, small;
      split(eight[n], large, small);
      uint4 *to = own.weights + (m * 3 + n) * 64 + own.lane;
      to[0] = large, to[32] = small;
    }
  }
  const int d = (own.rank * own.warps + own.warp) * 32 + own.lane;
  own.norm[own.lane] = weight_of(args.norm, args.norm_is_bf16, d);
}

// The coefficients that a tile's rows were given: a lane's share of them.
template <bool kHasY>
__device__ __forceinline__ void read_given(const Args &args, const Own &own, int tile,
                                           float4 (&given)[3]) {
  const int row = own.lane % kTile, token = tile * kTile + row;
#pragma unroll
  for (int j = 0; j < 3; ++j) {
    const int part = 2 * j + own.lane / kTile;
    given[j] = make_float4(0, 0, 0, 0);
    if (token >= args.tokens || (!kHasY && part > 0)) continue;
    const float *from = part == 0 ? args.a : part == 1 ? args.c : args.b + (part - 2) * 4;
    from += static_cast<long long>(token) * (part > 1 ? 16 : 4);
    given[j] = __ldg(reinterpret_cast<const float4 *>(from));
  }
}

__device__ __forceinline__ void show_given(Memory &memory, const Own &own, int i,
                                           const float4 (&given)[3]) {
#pragma unroll
  for (int j = 0; j < 3; ++j)
    memory.given[i % kRing][own.lane % kTile][2 * j + own.lane / kTile] = given[j];
  __syncwarp();
  if (own.lane == 0) arrive(&memory.given_full[i % kRing]);
}

// The copies of a tile's rows.
template <bool kHasY>
__device__ __forceinline__ void fetch(const Args &args, const Own &own, int tile) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int token = tile * kTile + own.g + 8 * r;
    const bool inside = token < args.tokens;
    const long long row = inside ? token : 0;
    const uint16_t *from = args.x + (row * args.x_token + own.d);
    uint4 *to = own.rows + r * (kStreams + 1) * 32 + own.lane;
#pragma unroll
    for (int n = 0; n < kStreams; ++n, from += args.x_stream) copy_async(to + n * 32, from, inside);
    if (kHasY) copy_async(to + kStreams * 32, args.y + (row * args.y_token + own.d), inside);
  }
  commit_copies();
}

__device__ __forceinline__ void add_products(const Own &own, const uint4 (&x)[2][kStreams],
                                             Sums &sums) {
  const uint4 *weights = own.weights + own.lane;
#pragma unroll
  for (int m = 0; m < kStreams; ++m, weights += 6 * 32) {
    uint4 large[3], small[3];
#pragma unroll
    for (int n = 0; n < 3; ++n) large[n] = weights[64 * n], small[n] = weights[64 * n + 32];
#pragma unroll
    for (int half = 0; half < 4; half += 2) {
      const uint32_t *up = &x[0][m].x + half, *down = &x[1][m].x + half;
      const uint32_t a[4] = {up[0], down[0], up[1], down[1]};
#pragma unroll
      for (int n = 0; n < 3; ++n) {
        const uint32_t *b = &small[n].x + half;
        multiply(sums.mixes[n], a[0], a[1], a[2], a[3], b[0], b[1]);
      }
      multiply(sums.upper, a[0], a[1], a[2], a[3], up[0], up[1]);
      multiply(sums.lower, a[0], a[1], a[2], a[3], down[0], down[1]);
#pragma unroll
      for (int n = 0; n < 3; ++n) {
        const uint32_t *b = &large[n].x + half;
        multiply(sums.mixes[n], a[0], a[1], a[2], a[3], b[0], b[1]);
      }
    }
  }
}

// A tile's rows: the new streams go to memory, the collapsed rows are kept, the rest is sums.
template <bool kHasY>
__device__ __forceinline__ void advance_tile(const Args &args, Memory &memory, const Shares &shares,
                                             const Own &own, int i, Sums &sums) {
  wait_for_copies<0>();
  uint4 x[2][kStreams], y[2] = {};
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const uint4 *from = own.rows + r * (kStreams + 1) * 32 + own.lane;
#pragma unroll
    for (int n = 0; n < kStreams; ++n) x[r][n] = from[n * 32];
    if (kHasY) y[r] = from[kStreams * 32];
  }
  fetch<kHasY>(args, own, tile_of(shares, own, i + 1));
  await_turn(&memory.given_full[i % kRing], i / kRing % 2);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = own.g + 8 * r, token = tile_of(shares, own, i) * kTile + row;
    uint4 h;
    advance<kHasY>(memory.given[i % kRing][row], x[r], y[r], h, sums.h_square[r]);
    own.kept[i % (kLag + 1) * kKeptSize + r * 32 + own.lane] = h;
    if (kHasY && token < args.tokens) {
      uint16_t *to = args.new_x + (static_cast<long long>(token) * kStreams * args.dim + own.d);
#pragma unroll
      for (int m = 0; m < kStreams; ++m, to += args.dim) *reinterpret_cast<uint4 *>(to) = x[r][m];
    }
  }
  add_products(own, x, sums);
}

// Leave a warp's sums of a tile where the block adds them.
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
  __syncwarp();
  if (own.lane == 0) arrive(&memory.parts_full);
}

__device__ __forceinline__ void normalise(const Args &args, const Memory &memory,
                                          const Shares &shares, const Own &own, int i) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = own.g + 8 * r, token = tile_of(shares, own, i) * kTile + row;
    if (token >= args.tokens) continue;
    const uint4 h = own.kept[i % (kLag + 1) * kKeptSize + r * 32 + own.lane];
    const float4 *weights = reinterpret_cast<const float4 *>(own.norm + own.q * 8);
    const float4 norm[2] = {weights[0], weights[1]};
    uint16_t *to = args.h + (static_cast<long long>(token) * args.dim + own.d);
    *reinterpret_cast<uint4 *>(to) = normalised(h, memory.inverse[i % kRing][row], &norm[0].x);
  }
}

// What a warp of the slice does.
template <bool kHasY>
__device__ __forceinline__ void go_through_tiles(const Args &args, Memory &memory,
                                                 const Shares &shares, const Own &own) {
#pragma unroll 1
  for (int i = 0; i < own.tiles + kLag; ++i) {
    if (i < own.tiles) {
      Sums sums = {};
      advance_tile<kHasY>(args, memory, shares, own, i, sums);
      if (i > 0) await_turn(&memory.parts_free, (i - 1) % 2);
      leave(memory, own, sums);
    }
    const int before = i - kLag;
    if (before < 0) continue;
    await_turn(&memory.inverse_full[before % kRing], before / kRing % 2);
    normalise(args, memory, shares, own, before);
  }
}

// Whole rows of a tile's tokens on their way to L2, where the blocks of the group find their slices.
template <bool kHasY>
__device__ __forceinline__ void fetch_ahead(const Args &args, const Shares &shares, const Own &own,
                                            int tile) {
  if (own.lane >= kStreams + kHasY) return;
#pragma unroll 1
  for (int row = own.rank; row < kTile; row += shares.slices) {
    const long long token = 1ll * tile * kTile + row;
    if (token >= args.tokens) return;
    const uint16_t *from = own.lane < kStreams
                               ? args.x + (token * args.x_token + own.lane * args.x_stream)
                               : args.y + token * args.y_token;
    prefetch_bulk(from, args.dim * 2);
  }
}

// Where a row's sums of the i-th tile are.
__device__ __forceinline__ long long place_of(const Shares &shares, const Own &own, int i,
                                              int row) {
  return 1ll * ((own.group * kSlots + i % kSlots) * kTile + row) * shares.slices;
}

// Add the warps' sums and leave them for the group.
template <bool kHasY>
__device__ __forceinline__ void add_and_leave(const Args &args, Memory &memory,
                                              const Shares &shares, const Own &own) {
  float4 given[3];
#pragma unroll 1
  for (int i = 0; i < kRing; ++i) {
    read_given<kHasY>(args, own, tile_of(shares, own, i), given);
    show_given(memory, own, i, given);
    if (0 < i && i < kAhead) fetch_ahead<kHasY>(args, shares, own, tile_of(shares, own, i));
  }
#pragma unroll 1
  for (int i = 0; i < own.tiles; ++i) {
    fetch_ahead<kHasY>(args, shares, own, tile_of(shares, own, i + kAhead));
    __syncwarp();
    read_given<kHasY>(args, own, tile_of(shares, own, i + kRing), given);
    await_turn(&memory.parts_full, i % 2);
#pragma unroll
    for (int k = own.lane; k < kTile * kSums / 2; k += 32) {
      const float2 *from = reinterpret_cast<const float2 *>(memory.parts[0][0]) + k;
      float2 sum = make_float2(0, 0);
#pragma unroll
      for (int w = 0; w < kMostWarps; ++w)
        if (w < own.warps) {
          const float2 part = from[w * kTile * kSums / 2];
          sum.x += part.x, sum.y += part.y;
        }
      const int row = k / (kSums / 2), column = k % (kSums / 2);
      const long long place = place_of(shares, own, i, row) + own.rank;
      float2 *to = column < kMixes / 2
                       ? reinterpret_cast<float2 *>(shares.mixes) + (place * kMixes / 2 + column)
                       : shares.squares + place;
      *to = sum;
    }
    __syncwarp();
    if (own.lane == 0) arrive(&memory.parts_free);
    show_given(memory, own, i + kRing, given);
    if (own.lane == 0) count_up(shares.arrived + tile_of(shares, own, i));
  }
}

// The coefficients of the tokens that have been added up, one by each lane.
__device__ __forceinline__ void own_coefficients(const Args &args, const Memory &memory,
                                                 const Own &own, int owned, int mine) {
  __syncwarp();
  if (own.lane >= owned) return;
  float mixes[kMixes];
  const float4 *from = reinterpret_cast<const float4 *>(args.mixes + 1ll * mine * kPartWidth);
#pragma unroll
  for (int k = 0; k < kMixes / 4; ++k) {
    const float4 four = __ldcg(from + k);
    mixes[4 * k] = four.x, mixes[4 * k + 1] = four.y;
    mixes[4 * k + 2] = four.z, mixes[4 * k + 3] = four.w;
  }
  coefficients(args, memory.base, memory.scale, mixes, mine);
}

// Await the group's sums, find the norms, and add up the mixes of the own tokens.
__device__ __forceinline__ void finish_tiles(const Args &args, Memory &memory, const Shares &shares,
                                             const Own &own) {
  int owned = 0, mine = 0;
#pragma unroll 1
  for (int i = 0; i < own.tiles; ++i) {
    const int tile = tile_of(shares, own, i), row = own.lane % kTile;
    if (own.lane == 0) await_count(shares.arrived + tile, shares.slices);
    __syncwarp();
    const float2 *from = shares.squares + place_of(shares, own, i, row);
    float h_square = 0, square = 0;
#pragma unroll 8
    for (int s = own.lane / kTile; s < shares.slices; s += 2) {
      const float2 both = __ldcg(from + s);
      h_square += both.x, square += both.y;
    }
    h_square += __shfl_xor_sync(~0u, h_square, kTile);
    square += __shfl_xor_sync(~0u, square, kTile);
    const float of_h = rsqrtf(fmaf(h_square, args.over_dim, args.norm_eps));
    const float of_x = rsqrtf(fmaf(square, args.over_dim / kStreams, args.norm_eps));
    if (own.lane < kTile) memory.inverse[i % kRing][row] = of_h;
    __syncwarp();
    if (own.lane == 0) arrive(&memory.inverse_full[i % kRing]);
#pragma unroll 1
    for (int k = own.rank; k < kTile && tile * kTile + k < args.tokens; k += shares.slices) {
      const long long token = tile * kTile + k;
      const float *part = shares.mixes + (place_of(shares, own, i, k) * kMixes + own.lane);
      float sum = 0;
      if (own.lane < kMixes) {
#pragma unroll 16
        for (int s = 0; s < shares.slices; ++s) sum += __ldcg(part + s * kMixes);
      }
      const float inverse = __shfl_sync(~0u, of_x, k), inverse_h = __shfl_sync(~0u, of_h, k);
      args.mixes[token * kPartWidth + own.lane] = sum * inverse;
      if (own.lane < 2) args.inverse[2 * token + own.lane] = own.lane == 0 ? inverse : inverse_h;
      if (owned++ == own.lane) mine = token;
      if (owned == 32) own_coefficients(args, memory, own, owned, mine), owned = 0;
    }
  }
  own_coefficients(args, memory, own, owned, mine);
}

template <bool kHasY>
__global__ void __launch_bounds__((kMostWarps + 2) * 32, 1)
    boundary(const __grid_constant__ Args args, const __grid_constant__ Shares shares) {
  extern __shared__ uint4 whole[];
  Memory &memory = *reinterpret_cast<Memory *>(whole);
  const Own own = own_part(args, shares, memory);
  if (threadIdx.x == 0) {
    set_up(&memory.parts_full, own.warps), set_up(&memory.parts_free, 1);
    for (int k = 0; k < kRing; ++k)
      set_up(&memory.given_full[k], 1), set_up(&memory.inverse_full[k], 1);
  }
  if (own.warp < own.warps) {
    fetch<kHasY>(args, own, tile_of(shares, own, 0));
    read_weights(args, own);
  } else if (own.warp == own.warps) {
    if (own.lane < kMixes) memory.base[own.lane] = args.base[own.lane];
    if (own.lane < 3) memory.scale[own.lane] = args.scale[own.lane];
  }
  __syncthreads();
  if (own.warp < own.warps) go_through_tiles<kHasY>(args, memory, shares, own);
  else if (own.warp == own.warps) add_and_leave<kHasY>(args, memory, shares, own);
  else finish_tiles(args, memory, shares, own);
}

template <bool kHasY>
cudaError_t launch(const Args &args, const Shares &shares, cudaStream_t stream) {
  const auto kernel = boundary<kHasY>;
  const int tiles = (args.tokens + kTile - 1) / kTile;
  const int warps = args.dim / (shares.slices * 32), bytes = bytes_of(warps);
  cudaMemsetAsync(shares.arrived, 0, tiles * sizeof(unsigned), stream);
  cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeCooperative;  // all blocks run at once
  attribute.val.cooperative = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(shares.slices * shares.groups), config.blockDim = dim3(warps * 32 + 64);
  config.dynamicSmemBytes = bytes, config.stream = stream;
  config.attrs = &attribute, config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, kernel, args, shares);
}

}  // namespace

// ``pointers`` stand in the order of Args, then the shares; ``sizes``: those of Args, the slices and
// the groups.
extern "C" int openv41_mega_mhc_many(void *const *pointers, const long long *sizes, float eps,
                                     float norm_eps, void *stream) {
  Shares shares;
  const Args args = args_of(pointers, sizes, eps, norm_eps);
  shares.mixes = static_cast<float *>(pointers[kPointers]);
  shares.squares = static_cast<float2 *>(pointers[kPointers + 1]);
  shares.arrived = static_cast<unsigned *>(pointers[kPointers + 2]);
  shares.slices = sizes[kSizes], shares.groups = sizes[kSizes + 1];
  const auto on = static_cast<cudaStream_t>(stream);
  return args.y == nullptr ? launch<false>(args, shares, on) : launch<true>(args, shares, on);
}
