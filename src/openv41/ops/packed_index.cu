// Index scores of decoded queries from packed MXFP4 rows, on Hopper.
//
// A warpgroup passes tiles of 128 entries by the 32 heads of one query; one more warp brings their
// rows by bulk copies into a ring. A code becomes an E4M3 number, 2^-6 of its value, by shifts:
// its bits eem behind its sign. Columns of keys and queries are permuted alike, into the order in
// which words hold them. A product is over one block of 32 columns, the sums of which FP8's adders
// hold exactly; then the four blocks of a key are added under their scales in float32. Those of a
// query are part of its numbers, relative to the largest: exact down to 2^-14 of it. While the
// products of half a tile are made, the codes of the next half are unpacked.
//
// Per 128 entries of 32 heads: 8,704 bytes, 1 MFLOP, about 1,900 instructions of a warp.

#include "packed_rows.cuh"

namespace {

constexpr int kConsumers = 128, kThreads = kConsumers + 32;
constexpr int kHeads = 32, kWords = kRowWords, kHalf = 64, kTile = 2 * kHalf;
constexpr int kPiece = 8, kPieces = kTile / kPiece;
constexpr int kAhead = 32 / kPieces;  // tiles whose rows are looked up at once
constexpr int kStages = 3, kPerSM = 3;

struct Given {
    const uint32_t* q;
    const float* weights;
    const uint32_t* keys;
    const void* table;
    const int64_t* visible;
    const int64_t* pools;  // null: all entries in order
    float* out;
    int64_t table_stride;
    int heads, tokens, width, per_page, blocks, table_is_wide;
};

// What lies where in shared memory.
struct Shared {
    uint8_t q[kHeads * 128];
    uint32_t rows[kStages][kTile * kWords];
    int entries[kStages][kPieces];  // where pieces begin; -1: nowhere
    float weights[kHeads];
    uint64_t full[kStages], empty[kStages];
};

// E4M3 numbers of a word's codes 0 2 4 6 and 1 3 5 7, at 2^-kRaised of their value.
__device__ __forceinline__ void unpack(uint32_t word, uint32_t& even, uint32_t& odd) {
    even = ((word << 2) & 0x1C1C1C1Cu) | ((word << 4) & 0x80808080u);
    odd = ((word >> 2) & 0x1C1C1C1Cu) | (word & 0x80808080u);
}

// Row of the keys and number of the entry where a piece of eight entries begins; -1: none is seen.
__device__ __forceinline__ int2 find_piece(const Given& in, int query, int piece, int seen) {
    int entry = -1;
    if (piece * kPiece < in.width) {
        if (in.pools == nullptr) {
            entry = piece * kPiece;
        } else {
            const int64_t block = in.pools[static_cast<int64_t>(query) * in.blocks + piece];
            entry = block < 0 ? -1 : static_cast<int>(block) * kPiece;
        }
    }
    if (entry < 0 || entry >= seen) return make_int2(-1, -1);
    const int64_t at = (query / in.tokens) * in.table_stride + entry / in.per_page;
    const int page = in.table_is_wide
                         ? static_cast<int>(static_cast<const int64_t*>(in.table)[at])
                         : static_cast<const int32_t*>(in.table)[at];
    return make_int2(page * in.per_page + entry % in.per_page, entry);
}

// The warp that brings tiles: a lane for each piece of a few of them.
__device__ __forceinline__ void bring(const Given& in, Shared& shared, int query, int seen,
                                      int begin, int end) {
    constexpr int kBytes = kPiece * kWords * 4, kNear = kHalf / kPiece;
    const int lane = threadIdx.x % 32, piece = lane % kPieces;
    const bool is_whole = in.pools == nullptr && in.per_page % kHalf == 0;  // a page holds halves
    int stage = 0, parity = 1;
    int2 next = find_piece(in, query, kPieces * begin + lane, seen);
    for (int tiles = begin; tiles < end; tiles += kAhead) {
        const int2 found = next;
        if (tiles + kAhead < end)
            next = find_piece(in, query, kPieces * (tiles + kAhead) + lane, seen);
        const uint32_t there = __ballot_sync(~0u, found.x >= 0);
        const int near = __popc(there >> lane / kNear * kNear & ((1 << kNear) - 1));
        const int bytes = is_whole ? piece % kNear == 0 ? near * kBytes : 0 : kBytes;
        for (int i = 0; i < min(kAhead, end - tiles); i++) {
            const bool own = lane / kPieces == i;
            const int count = __popc(there >> i * kPieces & ((1 << kPieces) - 1));
            const uint32_t full = shared_address(&shared.full[stage]);
            wait(shared_address(&shared.empty[stage]), parity);
            if (own) shared.entries[stage][piece] = found.y;
            __syncwarp();
            if (lane == 0) expect_bytes(full, count * kBytes);
            if (own && found.x >= 0 && bytes)
                start_bulk_copy(shared_address(&shared.rows[stage][piece * kPiece * kWords]),
                                in.keys + static_cast<int64_t>(found.x) * kWords, bytes, full);
            if (++stage == kStages) stage = 0, parity ^= 1;
        }
    }
}

// The heads of a query as rows of E4M3 numbers, and their weights.
__device__ __forceinline__ void place_query(const Given& in, Shared& shared, int query) {
    const uint32_t* rows = in.q + static_cast<int64_t>(query) * in.heads * kWords;
    for (int i = threadIdx.x; i < kHeads * (kWords - 1); i += kConsumers) {
        const int head = i / (kWords - 1), at = i % (kWords - 1);
        const uint32_t* row = rows + head * kWords;
        const bool is_there = head < in.heads;
        place_word(is_there ? row[at] : 0, is_there ? row[kWords - 1] : 0, at, head,
                   shared.q + head * 128);
    }
    if (threadIdx.x < kHeads) {
        const int head = threadIdx.x;
        float weight = 0.f;
        if (head < in.heads)
            weight = in.weights[static_cast<int64_t>(query) * in.heads + head] *
                     scale_of(largest_byte(rows[head * kWords + kWords - 1]));
        shared.weights[head] = 0.5f * weight;  // of x + |x|
    }
    see_stores();
    meet(1, kConsumers);
}

// Two rows of a thread: their scales, and its codes as those of a product.
__device__ __forceinline__ void take(const uint32_t* words, int at, int scales_at,
                                     uint32_t (&scales)[2], uint32_t (&codes)[4][4]) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
        scales[i] = words[i * 8 * kWords + scales_at];
#pragma unroll
        for (int b = 0; b < 4; b++)
            unpack(words[i * 8 * kWords + 4 * b + at], codes[b][i], codes[b][i + 2]);
    }
#pragma unroll
    for (int b = 0; b < 4; b++) hold(codes[b]);  // not later than here
}

__device__ __forceinline__ void start_products(float (&d)[4][16], const uint32_t (&codes)[4][4],
                                               uint64_t heads) {
    begin_products();
#pragma unroll
    for (int b = 0; b < 4; b++) multiply_codes(d[b], codes[b], moved(heads, 32 * b));
    close_group();
}

__device__ __forceinline__ void finish_products(float (&d)[4][16], uint32_t (&codes)[4][4]) {
    end_groups<0>();
#pragma unroll
    for (int b = 0; b < 4; b++) {
        hold(d[b]);
        hold(codes[b]);
    }
}

// Scores of two rows of a thread: its own eight heads.
__device__ __forceinline__ void add_heads(const float (&d)[4][16], const uint32_t (&scales)[2],
                                          const float (&weight)[8], float (&score)[2]) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const float scale[4] = {__uint_as_float((scales[i] << 23) & 0x7F800000u),
                                __uint_as_float((scales[i] << 15) & 0x7F800000u),
                                __uint_as_float((scales[i] << 7) & 0x7F800000u),
                                __uint_as_float((scales[i] >> 1) & 0x7F800000u)};
        score[i] = 0.f;
#pragma unroll
        for (int n = 0; n < 8; n++) {
            const int at = n / 2 * 4 + 2 * i + n % 2;
            float x = d[0][at] * scale[0];
#pragma unroll
            for (int b = 1; b < 4; b++) x += d[b][at] * scale[b];
            score[i] += weight[n] * (x + fabsf(x));
        }
    }
}

// A lane of four ends with the sum of one of four rows.
__device__ __forceinline__ float add_lanes(const float (&score)[2][2], int c) {
    const bool odd = c & 1, upper = c & 2;
    float sum[2];
#pragma unroll
    for (int half = 0; half < 2; half++)
        sum[half] = (odd ? score[half][1] : score[half][0]) +
                    __shfl_xor_sync(~0u, odd ? score[half][0] : score[half][1], 1);
    return (upper ? sum[1] : sum[0]) + __shfl_xor_sync(~0u, upper ? sum[0] : sum[1], 2);
}

__global__ void __launch_bounds__(kThreads, kPerSM) packed_scores(const Given in) {
    Shared& shared = *reinterpret_cast<Shared*>(shared_memory);
    const int query = blockIdx.y;
    const int64_t visible = in.visible[query];
    const int seen = static_cast<int>(visible < 0 ? 0 : visible);
    const int width = in.pools == nullptr ? min(seen, in.width) : in.width;
    const int tiles = (width + kTile - 1) / kTile, each = (tiles + gridDim.x - 1) / gridDim.x;
    const int begin = blockIdx.x * each, end = min(begin + each, tiles);
    float* out = in.out + static_cast<int64_t>(query) * in.width;
    for (int slot = tiles * kTile + blockIdx.x * kThreads + threadIdx.x; slot < in.width;
         slot += gridDim.x * kThreads)
        out[slot] = __int_as_float(0xFF800000);
    if (begin >= end) return;
    if (threadIdx.x < kStages) {
        init_barrier(shared_address(&shared.full[threadIdx.x]), 1);
        init_barrier(shared_address(&shared.empty[threadIdx.x]), kConsumers / 32);
        show_barriers();
        see_stores();
    }
    __syncthreads();
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
    if (warp == kConsumers / 32) {
        bring(in, shared, query, seen, begin, end);
        return;
    }
    place_query(in, shared, query);
    float weight[8];
#pragma unroll
    for (int n = 0; n < 8; n++) weight[n] = shared.weights[n / 2 * 8 + 2 * c + n % 2];
    const uint64_t heads = describe(shared_address(shared.q));
    int own = c / 2 * kHalf + warp * 16 + c % 2 * kPiece;  // a lane's piece of a tile
    int at = (warp * 16 + g) * kWords + c, scales_at = at - c + kWords - 1;
    asm volatile("" : "+r"(own), "+r"(at), "+r"(scales_at));  // not to be found anew in the loop
    int stage = 0, parity = 0;
    uint32_t scales[2][2], codes[2][4][4];
    wait(shared_address(&shared.full[0]), 0);
    take(shared.rows[0], at, scales_at, scales[0], codes[0]);
    for (int tile = begin; tile < end; tile++) {
        float d[4][16], score[2][2];
        start_products(d, codes[0], heads);
        take(shared.rows[stage] + kHalf * kWords, at, scales_at, scales[1], codes[1]);
        const int first = shared.entries[stage][own / kPiece];
        __syncwarp();
        if (lane == 0) arrive(shared_address(&shared.empty[stage]));
        if (++stage == kStages) stage = 0, parity ^= 1;
        finish_products(d, codes[0]);
        add_heads(d, scales[0], weight, score[0]);
        const uint32_t bytes[2] = {c % 2 ? scales[0][1] : scales[0][0],
                                   c % 2 ? scales[1][1] : scales[1][0]};
        start_products(d, codes[1], heads);
        if (tile + 1 < end) {
            wait(shared_address(&shared.full[stage]), parity);
            take(shared.rows[stage], at, scales_at, scales[0], codes[0]);
        }
        finish_products(d, codes[1]);
        add_heads(d, scales[1], weight, score[1]);
        const float sum = add_lanes(score, c);
        const uint32_t x = c / 2 ? bytes[1] : bytes[0];
        const bool is_known = !(((x & 0x7F7F7F7Fu) + 0x01010101u) & x & 0x80808080u);  // none is 255
        const float value = is_known ? sum : __int_as_float(0x7FC00000);
        const int slot = tile * kTile + own + g;
        if (slot < in.width)
            out[slot] = first >= 0 && first + g < seen ? value : __int_as_float(0xFF800000);
    }
}

cudaError_t launch(const Given& in, dim3 grid, void* stream) {
    packed_scores<<<grid, kThreads, sizeof(Shared), static_cast<cudaStream_t>(stream)>>>(in);
    return cudaGetLastError();
}

}  // namespace

extern "C" int packed_index_scores(const void* q, const float* weights, const void* keys,
                                   const void* table, const int64_t* visible,
                                   const int64_t* pools, float* out, int64_t table_stride,
                                   int heads, int batches, int tokens, int width, int per_page,
                                   int blocks, int table_is_wide, int programs, void* stream) {
    const Given in = {static_cast<const uint32_t*>(q),
                      weights,
                      static_cast<const uint32_t*>(keys),
                      table,
                      visible,
                      pools,
                      out,
                      table_stride,
                      heads,
                      tokens,
                      width,
                      per_page,
                      blocks,
                      table_is_wide};
    const int queries = batches * tokens, wanted = (width + kTile - 1) / kTile;
    const int each = programs / queries;  // rounded down: all run at once, a second wave is short
    const unsigned blocks_of_query = each < 1 ? 1 : each > wanted ? wanted : each;
    const dim3 grid = {blocks_of_query, static_cast<unsigned>(queries), 1};
    return static_cast<int>(launch(in, grid, stream));
}
