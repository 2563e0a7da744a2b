// The streams between two blocks, for many tokens. Report §2.4.1, Eq. (6).
//
// A candidate for the place of mhc_many.cu, from which it differs in how rows come and go; it has
// not run on a GPU yet.
//
// For N = 4 streams of bf16. The blocks of a group own a slice of D each and go through tiles of 16
// tokens together; groups share the tiles. A warp owns 32 numbers of the rows: lane 4 g + q holds
// numbers 8 q to 8 q + 7 of rows g and g + 8, which is what the tensor core's operand wants if the
// numbers are taken in that order. The slice's weights stay, as two bf16 each, which leaves out
// less than 2^-17 of a weight: the larger in shared memory, the smaller in registers. Two warps
// share whole lines of the rows, which the copy engine brings and takes away as boxes.
//
// Two more warps do what the others would wait for. One adds the warps' sums of a tile, leaves them
// in memory and counts up; the other awaits all blocks of the group, finds the norms of the rows, and
// computes the coefficients of the block's own tokens. The collapsed rows are kept until their norms
// are there, two tiles later. All sums have a fixed order. A cluster would exchange them faster, but
// clusters of 16 leave processors idle.

#include "mhc_boundary.cuh"
#include "tensor_maps.cuh"

namespace {

constexpr int kMostWarps = 10;      // and two
constexpr int kSums = kMixes + 2;   // of a row: the mixes, the squares of h and of the streams
constexpr int kLag = 2, kRing = 4;  // tiles that wait for their norms; places in rings
constexpr int kSlots = 8;           // of tiles whose sums are in memory at once
constexpr int kPlaces = kLag + 2;   // for collapsed rows
constexpr int kOneSize = kTile * kLine, kBoxSize = kStreams * kOneSize;  // in bytes, of a pair
constexpr int kWeightsSize = kStreams * 3 * 32;                          // in uint4, of a warp

struct Shares {  // what the blocks of a group leave for each other
  float *mixes;       // [groups, kSlots, kTile, slices, kMixes]
  float2 *squares;    // [groups, kSlots, kTile, slices], of h and of the streams
  unsigned *arrived;  // [tiles]
  int slices, groups, ahead;  // ahead: tiles until one that is fetched to L2; 0: none is
};

struct Memory {  // of a block; behind it what its warps own
  float4 given[kRing][kTile][kRowParts];
  float parts[kMostWarps][kTile][kSums];
  float inverse[kRing][kTile];  // of h
  float base[kMixes], scale[4];
  uint64_t parts_full, parts_free, given_full[kRing], inverse_full[kRing];
  uint64_t rows_full[kMostWarps / 2];
};

struct Maps {
  CUtensorMap x, y, new_x, h;
};

struct Own {  // what is this lane's
  int lane, warp, warps, g, q, rank, group, d, tiles;
  int pair, column;  // of the pair's box
  char *rows;        // of the pair: streams, then the output
  char *written;     // of the pair: new streams
  char *kept;        // [kPlaces], of the pair: collapsed rows, places of all pairs in turns
  uint4 *weights;    // [kStreams, 3, 32]
  float *norm;       // [32]
};

// Boxes come first, whose places have to be multiples of 1,024.
constexpr int bytes_of(int warps) {
  const int of_pair = 2 * kBoxSize + (1 + kPlaces) * kOneSize;
  return warps / 2 * of_pair + warps * (16 * kWeightsSize + 128) + sizeof(Memory);
}

__device__ __forceinline__ Memory &memory_of(void *whole, int warps) {
  return *reinterpret_cast<Memory *>(static_cast<char *>(whole) + bytes_of(warps) - sizeof(Memory));
}

__device__ __forceinline__ Own own_part(const Args &args, const Shares &shares, void *whole) {
  Own own;
  own.warp = threadIdx.x / 32, own.lane = threadIdx.x % 32, own.warps = blockDim.x / 32 - 2;
  own.g = own.lane / 4, own.q = own.lane % 4, own.pair = own.warp / 2;
  own.rank = static_cast<int>(blockIdx.x) % shares.slices;
  own.group = static_cast<int>(blockIdx.x) / shares.slices;
  own.column = own.rank * own.warps * 32 + own.pair * kBoxWidth;
  own.d = (own.rank * own.warps + own.warp) * 32 + own.q * 8;
  const int tiles = (args.tokens + kTile - 1) / kTile, pairs = own.warps / 2;
  own.tiles = (tiles - own.group + shares.groups - 1) / shares.groups;
  char *at = static_cast<char *>(whole);
  own.rows = at + own.pair * (kBoxSize + kOneSize), at += pairs * (kBoxSize + kOneSize);
  own.written = at + own.pair * kBoxSize, at += pairs * kBoxSize;
  own.kept = at + own.pair * kOneSize, at += kPlaces * pairs * kOneSize;
  own.weights = reinterpret_cast<uint4 *>(at) + own.warp * kWeightsSize;
  at += own.warps * kWeightsSize * 16;
  own.norm = reinterpret_cast<float *>(at) + own.warp * 32;
  return own;
}

// Where a lane's numbers are in a box of streams, at its first row; the other is 32 rows behind.
__device__ __forceinline__ uint4 *place_in_box(char *box, const Own &own, int stream) {
  const int chunk = (own.warp % 2 ^ own.g % 2) * 4 + (own.q ^ stream);
  return reinterpret_cast<uint4 *>(box + (kStreams * own.g + stream) * kLine + chunk * 16);
}

// And in a box of one row for each token.
__device__ __forceinline__ uint4 *place_in_one(char *box, const Own &own) {
  const int chunk = (own.warp % 2 * 4 + own.q) ^ own.g;
  return reinterpret_cast<uint4 *>(box + own.g * kLine + chunk * 16);
}

__device__ __forceinline__ char *kept_at(const Own &own, int i) {
  return own.kept + i % kPlaces * (own.warps / 2) * kOneSize;
}

struct Small {  // what the larger parts of a lane's weights leave out
  uint4 of[kStreams][3];
};

// The i-th tile of a group; the groups take turns.
__device__ __forceinline__ int tile_of(const Shares &shares, const Own &own, int i) {
  return i * shares.groups + own.group;
}

// A warp's weights, and its part of the norm's.
__device__ __forceinline__ void read_weights(const Args &args, const Own &own, Small &small) {
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
      uint4 large;
      split(eight[n], large, small.of[m][n]);
      own.weights[(m * 3 + n) * 32 + own.lane] = large;
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

// The copies of a tile's rows, by one thread.
template <bool kHasY>
__device__ __forceinline__ void fetch(const Maps &maps, char *rows, int column, int tile,
                                      uint64_t *barrier) {
  expect(barrier, kBoxSize + kHasY * kOneSize);
  copy_box(rows, maps.x, column, tile * kTile, barrier);
  if (kHasY) copy_box(rows + kBoxSize, maps.y, column, tile * kTile, barrier);
}

__device__ __forceinline__ void add_products(const Own &own, const Small &small,
                                             const uint4 (&x)[2][kStreams], Sums &sums) {
  const uint4 *weights = own.weights + own.lane;
#pragma unroll
  for (int m = 0; m < kStreams; ++m, weights += 3 * 32) {
    uint4 large[3];
#pragma unroll
    for (int n = 0; n < 3; ++n) large[n] = weights[32 * n];
#pragma unroll
    for (int half = 0; half < 4; half += 2) {
      const uint32_t *up = &x[0][m].x + half, *down = &x[1][m].x + half;
      const uint32_t a[4] = {up[0], down[0], up[1], down[1]};
#pragma unroll
      for (int n = 0; n < 3; ++n) {
        const uint32_t *b = &small.of[m][n].x + half;
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

// The pair meets: its rows are in registers, its boxes are free. Next rows are asked for, and the
// collapsed rows of the tile before the one that was normalised last, which are whole, are written.
template <bool kHasY>
__device__ __forceinline__ void turn_boxes(Memory &memory, const Shares &shares, const Maps &maps,
                                           const Own &own, int i) {
  const bool leads = own.warp % 2 == 0 && own.lane == 0;
  if (leads) wait_until_read();
  show_to_engine();
  meet_pair(own.pair);
  if (!leads) return;
  if (i + 1 < own.tiles)
    fetch<kHasY>(maps, own.rows, own.column, tile_of(shares, own, i + 1),
                 &memory.rows_full[own.pair]);
  const int whole = i - kLag - 1;
  if (whole < 0) return;
  write_box(maps.h, kept_at(own, whole), own.column, tile_of(shares, own, whole) * kTile);
  commit_boxes();
}

// A tile's rows: the new streams go to memory, the collapsed rows are kept, the rest is sums.
template <bool kHasY>
__device__ __forceinline__ void advance_tile(Memory &memory, const Shares &shares, const Maps &maps,
                                             const Own &own, const Small &small, int i,
                                             Sums &sums) {
  await_turn(&memory.rows_full[own.pair], i % 2);
  uint4 x[2][kStreams], y[2] = {};
#pragma unroll
  for (int r = 0; r < 2; ++r) {
#pragma unroll
    for (int n = 0; n < kStreams; ++n)
      x[r][n] = place_in_box(own.rows, own, n)[r * kStreams * kLine / 2];
    if (kHasY) y[r] = place_in_one(own.rows + kBoxSize, own)[r * kLine / 2];
  }
  turn_boxes<kHasY>(memory, shares, maps, own, i);
  await_turn(&memory.given_full[i % kRing], i / kRing % 2);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    uint4 h;
    advance<kHasY>(memory.given[i % kRing][own.g + 8 * r], x[r], y[r], h, sums.h_square[r]);
    place_in_one(kept_at(own, i), own)[r * kLine / 2] = h;
    if constexpr (kHasY)
#pragma unroll
      for (int m = 0; m < kStreams; ++m)
        place_in_box(own.written, own, m)[r * kStreams * kLine / 2] = x[r][m];
  }
  if (kHasY) {
    show_to_engine();
    meet_pair(own.pair);
    if (own.warp % 2 == 0 && own.lane == 0) {
      write_box(maps.new_x, own.written, own.column, tile_of(shares, own, i) * kTile);
      commit_boxes();
    }
  }
  add_products(own, small, x, sums);
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

__device__ __forceinline__ void normalise(const Memory &memory, const Own &own, int i) {
  uint4 *rows = place_in_one(kept_at(own, i), own);
  const float4 *weights = reinterpret_cast<const float4 *>(own.norm + own.q * 8);
  const float4 norm[2] = {weights[0], weights[1]};
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    uint4 &row = rows[r * kLine / 2];
    row = normalised(row, memory.inverse[i % kRing][own.g + 8 * r], &norm[0].x);
  }
}

// What a warp of the slice does.
template <bool kHasY>
__device__ __forceinline__ void go_through_tiles(Memory &memory, const Shares &shares,
                                                 const Maps &maps, const Own &own,
                                                 const Small &small) {
#pragma unroll 1
  for (int i = 0; i < own.tiles + kLag; ++i) {
    if (i < own.tiles) {
      Sums sums = {};
      advance_tile<kHasY>(memory, shares, maps, own, small, i, sums);
      if (i > 0) await_turn(&memory.parts_free, (i - 1) % 2);
      leave(memory, own, sums);
    } else {
      turn_boxes<kHasY>(memory, shares, maps, own, i);
    }
    const int before = i - kLag;
    if (before < 0) continue;
    await_turn(&memory.inverse_full[before % kRing], before / kRing % 2);
    normalise(memory, own, before);
  }
  turn_boxes<kHasY>(memory, shares, maps, own, own.tiles + kLag);
  if (own.warp % 2 == 0 && own.lane == 0) wait_until_read();
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
    if (0 < i && i < shares.ahead) fetch_ahead<kHasY>(args, shares, own, tile_of(shares, own, i));
  }
#pragma unroll 1
  for (int i = 0; i < own.tiles; ++i) {
    if (shares.ahead > 0)
      fetch_ahead<kHasY>(args, shares, own, tile_of(shares, own, i + shares.ahead));
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
    boundary(const __grid_constant__ Args args, const __grid_constant__ Shares shares,
             const __grid_constant__ Maps maps) {
  extern __shared__ __align__(1024) uint4 whole[];
  const Own own = own_part(args, shares, whole);
  Memory &memory = memory_of(whole, own.warps);
  Small small;
  if (threadIdx.x == 0) {
    set_up(&memory.parts_full, own.warps), set_up(&memory.parts_free, 1);
    for (int k = 0; k < kRing; ++k)
      set_up(&memory.given_full[k], 1), set_up(&memory.inverse_full[k], 1);
    for (int k = 0; k < own.warps / 2; ++k) set_up(&memory.rows_full[k], 1);
    show_set_up();
    for (int k = 0; k < own.warps / 2 && own.tiles > 0; ++k)
      fetch<kHasY>(maps, own.rows + k * (kBoxSize + kOneSize), own.column + k * kBoxWidth,
                   tile_of(shares, own, 0), &memory.rows_full[k]);
  }
  if (own.warp < own.warps) {
    read_weights(args, own, small);
  } else if (own.warp == own.warps) {
    if (own.lane < kMixes) memory.base[own.lane] = args.base[own.lane];
    if (own.lane < 3) memory.scale[own.lane] = args.scale[own.lane];
  }
  __syncthreads();
  if (own.warp < own.warps) go_through_tiles<kHasY>(memory, shares, maps, own, small);
  else if (own.warp == own.warps) add_and_leave<kHasY>(args, memory, shares, own);
  else finish_tiles(args, memory, shares, own);
}

// Of what is read and written.
template <bool kHasY>
cudaError_t make_maps(const Args &args, Maps &maps) {
  const int d = args.dim, n = kStreams, tokens = args.tokens;
  cudaError_t error = map_of(maps.x, args.x, d, n, tokens, args.x_stream, args.x_token);
  if (error == cudaSuccess) error = map_of(maps.h, args.h, d, 1, tokens, d, d);
  if (!kHasY || error != cudaSuccess) return error;
  error = map_of(maps.y, args.y, d, 1, tokens, args.y_token, args.y_token);
  return error == cudaSuccess ? map_of(maps.new_x, args.new_x, d, n, tokens, d, 1ll * n * d) : error;
}

template <bool kHasY>
cudaError_t launch_on(const Args &args, const Shares &shares, const Maps &maps,
                      cudaStream_t stream) {
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
  return cudaLaunchKernelEx(&config, kernel, args, shares, maps);
}

template <bool kHasY>
cudaError_t launch_boxes(const Args &args, const Shares &shares, cudaStream_t stream) {
  Maps maps = {};
  const cudaError_t error = make_maps<kHasY>(args, maps);
  return error == cudaSuccess ? launch_on<kHasY>(args, shares, maps, stream) : error;
}

}  // namespace

// ``pointers`` stand in the order of Args, then the shares; ``sizes``: those of Args, the slices,
// the groups, and how far rows are fetched ahead. A slice is a multiple of 64 numbers.
extern "C" int openv41_mega_mhc_boxes(void *const *pointers, const long long *sizes, float eps,
                                      float norm_eps, void *stream) {
  Shares shares;
  const Args args = args_of(pointers, sizes, eps, norm_eps);
  shares.mixes = static_cast<float *>(pointers[kPointers]);
  shares.squares = static_cast<float2 *>(pointers[kPointers + 1]);
  shares.arrived = static_cast<unsigned *>(pointers[kPointers + 2]);
  shares.slices = sizes[kSizes], shares.groups = sizes[kSizes + 1];
  shares.ahead = sizes[kSizes + 2];
  const auto on = static_cast<cudaStream_t>(stream);
  if (args.y == nullptr) return launch_boxes<false>(args, shares, on);
  return launch_boxes<true>(args, shares, on);
}
