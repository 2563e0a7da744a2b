// Index scores of many queries with all keys of one request, on Hopper.
//
// Keys become rows of E4M3 numbers once, swizzled as matrix units read them. A block of threads
// keeps eight queries of 32 heads in shared memory and passes tiles of 64 keys by them: two
// warpgroups take tiles in turns, so that one multiplies while the other adds up its heads, and one
// more warp brings tiles by bulk copies. A barrier for each warpgroup keeps the turns. The best of
// each sixteen entries is written beside the scores, for the choice.
//
// Per tile: 4.2 MFLOP, 512 cycles; about 400 instructions of each of four warps.

#include "packed_rows.cuh"

namespace {

constexpr int kGroup = 128, kConsumers = 2 * kGroup, kThreads = kConsumers + 32;
constexpr int kHeads = 32, kQueries = 8, kRows = kHeads * kQueries, kTile = 64, kNear = 16;
constexpr int kWeights = 2 * kRows / kQueries + 4;  // of a lane of four: its heads, padded
constexpr int kStages = 8;

struct Given {
    const uint32_t* q;
    const float* weights;
    const uint8_t* keys;  // E4M3, rows of 128 bytes
    const float* scales;
    const int64_t* visible;
    float *out, *best;
    int queries, entries, groups, splits;
};

// What lies where in shared memory.
struct Shared {
    uint8_t q[kRows * 128];
    uint8_t keys[kStages][kTile * 128];
    float scales[kStages][kTile];
    float weights[4][kWeights];
    int seen[kQueries];
    uint64_t full[kStages], empty[kStages], turn[2];
};

__global__ void place_keys(const uint32_t* rows, const void* table, int is_wide, int per_page,
                           int entries, uint8_t* keys, float* scales) {
    constexpr int kCodes = kRowWords - 1;
    const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
    const int entry = static_cast<int>(i / kCodes), at = static_cast<int>(i % kCodes);
    if (entry >= entries) return;
    const int64_t page = is_wide ? static_cast<const int64_t*>(table)[entry / per_page]
                                 : static_cast<const int32_t*>(table)[entry / per_page];
    const uint32_t* row = rows + (page * per_page + entry % per_page) * kRowWords;
    place_word(row[at], row[kCodes], at, entry, keys + static_cast<int64_t>(entry) * 128);
    if (at == 0) scales[entry] = scale_of(largest_byte(row[kCodes])) * 0x1p-6f;
}

// Eight queries as rows of E4M3 numbers, and their weights in the order in which lanes take them.
__device__ __forceinline__ void place_queries(const Given& in, Shared& shared, int first) {
    constexpr int kCodes = kRowWords - 1;
    for (int i = threadIdx.x; i < kRows * kCodes; i += kConsumers) {
        const int row = i / kCodes, at = i % kCodes;
        const bool is_there = first + row / kHeads < in.queries;
        const uint32_t* from = in.q + (static_cast<int64_t>(first) * kHeads + row) * kRowWords;
        place_word(is_there ? from[at] : 0, is_there ? from[kCodes] : 0, at, row,
                   shared.q + row * 128);
    }
    for (int row = threadIdx.x; row < kRows; row += kConsumers) {
        const int64_t from = static_cast<int64_t>(first) * kHeads + row;
        float weight = 0.f;
        if (first + row / kHeads < in.queries)
            weight = in.weights[from] * scale_of(largest_byte(in.q[from * kRowWords + kCodes])) *
                     0x1p-7f;  // 2^-kRaised, and a half of x + |x|
        shared.weights[row % 8 / 2][row / 8 * 2 + row % 2] = weight;
    }
    see_stores();
    meet(1, kConsumers);
}

// Add up the heads of two keys; a lane of four ends with two of the queries.
__device__ __forceinline__ void add_heads(const float (&d)[128], const float* weights, int c,
                                          float (&score)[2][2]) {
    float sums[2][kQueries];
#pragma unroll
    for (int q = 0; q < kQueries; q++) {
        float weight[8];
#pragma unroll
        for (int n = 0; n < 8; n += 4)
            *reinterpret_cast<float4*>(&weight[n]) =
                *reinterpret_cast<const float4*>(&weights[q * 8 + n]);
#pragma unroll
        for (int i = 0; i < 2; i++) {
            sums[i][q] = 0.f;
#pragma unroll
            for (int n = 0; n < 8; n++) {
                const float x = d[q * 16 + n / 2 * 4 + 2 * i + n % 2];
                sums[i][q] += weight[n] * (x + fabsf(x));
            }
        }
    }
    const bool odd = c & 1, upper = c & 2;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        float half[4];
#pragma unroll
        for (int q = 0; q < 4; q++)
            half[q] = (odd ? sums[i][q + 4] : sums[i][q]) +
                      __shfl_xor_sync(~0u, odd ? sums[i][q] : sums[i][q + 4], 1);
#pragma unroll
        for (int q = 0; q < 2; q++)
            score[i][q] = (upper ? half[q + 2] : half[q]) +
                          __shfl_xor_sync(~0u, upper ? half[q] : half[q + 2], 2);
    }
}

__device__ __forceinline__ void bring(const Given& in, Shared& shared, int begin, int end) {
    if (threadIdx.x % 32) return;
    int stage = 0, parity = 1;
    for (int tile = begin; tile < end; tile++) {
        const uint32_t full = shared_address(&shared.full[stage]);
        const int64_t entry = static_cast<int64_t>(tile) * kTile;
        wait(shared_address(&shared.empty[stage]), parity);
        expect_bytes(full, kTile * 132);
        start_bulk_copy(shared_address(shared.keys[stage]), in.keys + entry * 128, kTile * 128, full);
        start_bulk_copy(shared_address(shared.scales[stage]), in.scales + entry, kTile * 4, full);
        if (++stage == kStages) stage = 0, parity ^= 1;
    }
}

// The products of a tile; the other warpgroup begins its own while the last of these are made.
__device__ __forceinline__ void multiply(float (&d)[128], uint64_t keys, uint64_t queries,
                                         uint32_t turn, int lane) {
    begin_products();
#pragma unroll
    for (int k = 0; k < 4; k++) {
        multiply_tiles(d, moved(keys, 32 * k), moved(queries, 32 * k), k);
        if (k == 1) close_group();
    }
    close_group();
    end_groups<1>();
    if (lane == 0) arrive(turn);
    end_groups<0>();
    hold(d);
}

__global__ void __launch_bounds__(kThreads, 1) score(const Given in) {
    Shared& shared = *reinterpret_cast<Shared*>(shared_memory);
    const int first = blockIdx.x / in.splits * kQueries, part = blockIdx.x % in.splits;
    if (threadIdx.x < kStages) {
        init_barrier(shared_address(&shared.full[threadIdx.x]), 1);
        init_barrier(shared_address(&shared.empty[threadIdx.x]), kGroup / 32);
        if (threadIdx.x < 2) init_barrier(shared_address(&shared.turn[threadIdx.x]), kGroup / 32);
        show_barriers();
        see_stores();
    }
    if (threadIdx.x < kQueries) {
        const int query = first + threadIdx.x;
        const int64_t seen = query < in.queries ? in.visible[query] : 0;
        shared.seen[threadIdx.x] =
            static_cast<int>(seen < 0 ? 0 : seen < in.entries ? seen : in.entries);
    }
    __syncthreads();
    int most = 0;
#pragma unroll
    for (int q = 0; q < kQueries; q++) most = max(most, shared.seen[q]);
    const int tiles = (most + kTile - 1) / kTile, each = (tiles + in.splits - 1) / in.splits;
    const int begin = part * each, end = min(begin + each, tiles);
    if (begin >= end) return;
    if (threadIdx.x >= kConsumers) {
        bring(in, shared, begin, end);
        return;
    }
    place_queries(in, shared, first);
    const int group = threadIdx.x / kGroup, warp = threadIdx.x % kGroup / 32;
    const int lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
    const int own = c % 2 * 4 + c / 2 * 2;  // the first of the two queries a lane ends with
    const int seen[2] = {shared.seen[own], shared.seen[own + 1]};
    const int64_t row = first + own;
    float* out = in.out + row * in.entries + warp * 16 + g;
    float* best = in.best + (row + g % 2) * in.groups + warp;
    const bool writes_best = in.best != nullptr && lane < 8;
    const uint64_t queries = describe(shared_address(shared.q));
    const uint64_t tile_0 = describe(shared_address(shared.keys[0]));
    for (int i = group; i < end - begin; i += 2) {
        const int stage = i % kStages, entry = (begin + i) * kTile + warp * 16 + g;
        wait(shared_address(&shared.full[stage]), (i / kStages) & 1);
        wait(shared_address(&shared.turn[1 - group]), (i / 2 - 1 + group) & 1);
        float d[128];
        multiply(d, moved(tile_0, stage * kTile * 128), queries,
                 shared_address(&shared.turn[group]), lane);
        const float scale[2] = {shared.scales[stage][warp * 16 + g],
                                shared.scales[stage][warp * 16 + g + 8]};
        __syncwarp();
        if (lane == 0) arrive(shared_address(&shared.empty[stage]));
        float score[2][2], most_of[2];
        add_heads(d, shared.weights[c], c, score);
#pragma unroll
        for (int q = 0; q < 2; q++) {
#pragma unroll
            for (int k = 0; k < 2; k++) {
                const bool is_seen = entry + 8 * k < seen[q];
                score[k][q] = is_seen ? score[k][q] * scale[k] : __int_as_float(0xFF800000);
                if (is_seen)
                    out[q * static_cast<int64_t>(in.entries) + (begin + i) * kTile + 8 * k] =
                        score[k][q];
            }
            most_of[q] = fmaxf(score[0][q], score[1][q]);
        }
        // The best of sixteen keys, of one query in even rows of lanes and of the other in odd ones.
        const bool odd = g & 1;
        float most_near = fmaxf(odd ? most_of[1] : most_of[0],
                                __shfl_xor_sync(~0u, odd ? most_of[0] : most_of[1], 4));
        most_near = fmaxf(most_near, __shfl_xor_sync(~0u, most_near, 8));
        most_near = fmaxf(most_near, __shfl_xor_sync(~0u, most_near, 16));
        const int near = (begin + i) * (kTile / kNear);
        if (writes_best && row + g % 2 < in.queries && near + warp < in.groups)
            best[near] = most_near;
    }
}

cudaError_t launch(const Given& in, int blocks, void* stream) {
    constexpr int bytes = sizeof(Shared);
    const cudaError_t error =
        cudaFuncSetAttribute(score, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    if (error != cudaSuccess) return error;
    score<<<blocks, kThreads, bytes, static_cast<cudaStream_t>(stream)>>>(in);
    return cudaGetLastError();
}

}  // namespace

// Rows of a request's pages as E4M3 numbers, and a scale for each.
extern "C" int index_prefill_keys(const void* rows, const void* table, uint8_t* keys, float* scales,
                                  int is_wide, int per_page, int entries, void* stream) {
    const int64_t words = static_cast<int64_t>(entries) * (kRowWords - 1);
    place_keys<<<static_cast<unsigned>((words + 255) / 256), 256, 0,
                 static_cast<cudaStream_t>(stream)>>>(static_cast<const uint32_t*>(rows), table,
                                                      is_wide, per_page, entries, keys, scales);
    return static_cast<int>(cudaGetLastError());
}

// Scores up to each query's last visible entry, and the best of each sixteen unless null.
extern "C" int index_prefill_scores(const void* q, const float* weights, const uint8_t* keys,
                                    const float* scales, const int64_t* visible, float* out,
                                    float* best, int queries, int entries, int splits,
                                    void* stream) {
    const Given in = {static_cast<const uint32_t*>(q), weights, keys, scales, visible, out, best,
                      queries, entries, (entries + kNear - 1) / kNear, splits};
    const int blocks = (queries + kQueries - 1) / kQueries * splits;
    return static_cast<int>(launch(in, blocks, stream));
}
