// Index scores of decoded queries from packed MXFP4 rows, on Hopper.
//
// A warpgroup passes tiles of 64 entries by the 32 heads of one query; one more warp brings their
// rows by bulk copies into a ring. A code becomes an E4M3 number, 2^-6 of its value, by shifts:
// its bits eem behind its sign. Columns of keys and queries are permuted alike, into the order in which
// words hold them. A product is over one block of 32 columns, the sums of which FP8's adders hold
// exactly; then the four blocks of a key are added under their scales in float32. Those of a query
// are part of its numbers, relative to the largest: exact down to 2^-14 of it.
//
// Per 64 entries of 32 heads: 4,352 bytes, 524 kFLOP, about 900 instructions of a warp.

#include "packed_rows.cuh"

namespace {

constexpr int kConsumers = 128, kThreads = kConsumers + 32;
constexpr int kHeads = 32, kWords = kRowWords, kTile = 64, kPiece = 8, kPieces = kTile / kPiece;
constexpr int kAhead = 32 / kPieces;  // tiles whose rows are looked up at once
constexpr int kStages = 6, kPerSM = 3;

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
    int entries[kStages][kPieces + 1];  // where pieces begin, -1: nowhere; how many pieces there are
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
    constexpr int kBytes = kPiece * kWords * 4;
    const int lane = threadIdx.x % 32, piece = lane % kPieces;
    const bool is_whole = in.pools == nullptr && in.per_page % kTile == 0;  // a page holds tiles
    int stage = 0, parity = 1;
    int2 next = find_piece(in, query, kPieces * begin + lane, seen);
    for (int tiles = begin; tiles < end; tiles += kAhead) {
        const int2 found = next;
        if (tiles + kAhead < end)
            next = find_piece(in, query, kPieces * (tiles + kAhead) + lane, seen);
        for (int i = 0; i < min(kAhead, end - tiles); i++) {
            const bool own = lane / kPieces == i;
            const int count = __popc(__ballot_sync(~0u, own && found.x >= 0));
            const uint32_t full = shared_address(&shared.full[stage]);
            wait(shared_address(&shared.empty[stage]), parity);
            if (own) shared.entries[stage][piece] = found.y;
            if (own && piece == 0) shared.entries[stage][kPieces] = count;
            __syncwarp();
            if (lane == 0) expect_bytes(full, count * kBytes);
            if (own && found.x >= 0 && (piece == 0 || !is_whole))
                start_bulk_copy(shared_address(&shared.rows[stage][piece * kPiece * kWords]),
                                in.keys + static_cast<int64_t>(found.x) * kWords,
                                is_whole ? count * kBytes : kBytes, full);
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

__global__ void __launch_bounds__(kThreads, kPerSM) packed_scores(const Given in) {
    Shared& shared = *reinterpret_cast<Shared*>(shared_memory);
    const int query = blockIdx.y;
    const int tiles = (in.width + kTile - 1) / kTile, each = (tiles + gridDim.x - 1) / gridDim.x;
    const int begin = blockIdx.x * each, end = min(begin + each, tiles);
    if (begin >= end) return;
    const int seen = static_cast<int>(in.visible[query]);
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
    float* out = in.out + static_cast<int64_t>(query) * in.width;
    int stage = 0, parity = 0;
    for (int tile = begin; tile < end; tile++) {
        wait(shared_address(&shared.full[stage]), parity);
        const uint32_t* rows = &shared.rows[stage][(warp * 16 + g) * kWords];
        const int first = shared.entries[stage][2 * warp + c % 2];
        const int present = shared.entries[stage][kPieces];
        const uint32_t scales[2] = {rows[16], rows[8 * kWords + 16]};
        uint32_t codes[4][4];
#pragma unroll
        for (int b = 0; b < 4; b++) {
            unpack(rows[4 * b + c], codes[b][0], codes[b][2]);
            unpack(rows[8 * kWords + 4 * b + c], codes[b][1], codes[b][3]);
        }
        __syncwarp();
        if (lane == 0) arrive(shared_address(&shared.empty[stage]));
        if (++stage == kStages) stage = 0, parity ^= 1;
        float score[2] = {0.f, 0.f};
        if (present) {
            float d[4][16];
#pragma unroll
            for (int b = 0; b < 4; b++) hold(codes[b]);  // all are there before the first product
            begin_products();
#pragma unroll
            for (int b = 0; b < 4; b++) multiply_codes(d[b], codes[b], moved(heads, 32 * b));
            end_products();
#pragma unroll
            for (int b = 0; b < 4; b++) hold(d[b]);
            add_heads(d, scales, weight, score);
        }
        // The quad's sum of one row, then of the other.
        float sum = c % 2 ? score[1] : score[0];
        sum += __shfl_xor_sync(~0u, c % 2 ? score[0] : score[1], 1);
        sum += __shfl_xor_sync(~0u, sum, 2);
        const uint32_t own = c % 2 ? scales[1] : scales[0];
        if (((own & 0x7F7F7F7Fu) + 0x01010101u) & own & 0x80808080u)  // a scale of 255
            sum = __int_as_float(0x7FC00000);
        const int slot = tile * kTile + warp * 16 + c * kPiece + g;
        if (c < 2 && slot < in.width)
            out[slot] = first >= 0 && first + g < seen ? sum : __int_as_float(0xFF800000);
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
