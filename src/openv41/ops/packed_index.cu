// Index scores of decoded queries from packed MXFP4 rows, on Hopper.
//
// A warp passes 16 rows at a time by the 32 heads of one query. Rows come by bulk copies into a ring
// of its own. A row is unpacked to float16 under the power of two of its largest block: bytes of a
// table, chosen by the codes themselves (prmt), are the upper bytes of the numbers; blocks below
// 2^-22 of the largest are zero. Products are mma.m16n8k16 with float32 sums; the columns of a row
// are permuted alike in keys and queries.
//
// Per 16 rows of 32 heads: 1088 bytes, 131 kFLOP, about 240 instructions of a warp.

#include <cuda_runtime.h>

#include <cstdint>

namespace {

constexpr int kWarps = 4, kStages = 6, kWords = 17, kPiece = 8, kRows = 16;
constexpr int kTop = 9;  // the largest block's scale becomes 2^9

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

__device__ __forceinline__ uint32_t prmt(uint32_t a, uint32_t b, uint32_t s) {
    uint32_t r;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(s));
    return r;
}

__device__ __forceinline__ uint32_t shared_address(const void* p) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

__device__ __forceinline__ int largest_byte(uint32_t x) {
    const int a = x & 255, b = (x >> 8) & 255, c = (x >> 16) & 255, d = x >> 24;
    return max(max(a, b), max(c, d));
}

// 2^(byte - 127 - kTop); NaN for 255.
__device__ __forceinline__ float scale_of(int byte) {
    if (byte == 255) return __int_as_float(0x7FC00000);
    return __int_as_float(max(byte - kTop, 0) << 23);
}

// Upper bytes of the float16 numbers of eight codes: the even ones, the odd ones.
__device__ __forceinline__ void unpack(uint32_t word, uint2 table, uint32_t& even, uint32_t& odd) {
    const uint32_t sizes = word & 0x77777777u;
    const uint32_t first = prmt(table.x, table.y, sizes);
    const uint32_t second = prmt(table.x, table.y, sizes >> 16);
    even = prmt(first, second, 0x6420) | ((word << 4) & 0x80808080u);
    odd = prmt(first, second, 0x7531) | (word & 0x80808080u);
}

__device__ __forceinline__ uint32_t lower_pair(uint32_t x) { return prmt(x, 0, 0x1404); }
__device__ __forceinline__ uint32_t upper_pair(uint32_t x) { return prmt(x, 0, 0x3424); }

__device__ __forceinline__ void multiply(float* c, const uint32_t* a, const uint32_t* b) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
        "{%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

__device__ __forceinline__ void wait(uint32_t barrier, uint32_t parity) {
    asm volatile(
        "{\n.reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;\n}"
        :
        : "r"(barrier), "r"(parity)
        : "memory");
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

__global__ void __launch_bounds__(kWarps * 32, 3) packed_scores(const Given in) {
    __shared__ alignas(128) uint32_t ring[kWarps][kStages][kRows * kWords];
    __shared__ uint2 table[256];
    __shared__ uint64_t barriers[kWarps][kStages];
    __shared__ int2 entries[kWarps][kStages];

    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
    const int query = blockIdx.y;
    for (int d = threadIdx.x; d < 256; d += kWarps * 32) {
        const bool kept = d <= 22;
        table[d].x = kept ? 0x62605C00u - d * 0x04040400u : 0u;
        table[d].y = kept ? 0x6A686664u - d * 0x04040404u : 0u;
    }
    if (lane < kStages) {
        asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(
            shared_address(&barriers[warp][lane])));
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncthreads();

    const int steps = (in.width + kRows - 1) / kRows;
    const int warps = gridDim.x * kWarps;
    const int each = (steps + warps - 1) / warps;
    const int begin = (blockIdx.x * kWarps + warp) * each, end = min(begin + each, steps);
    if (begin >= end) return;
    const int seen = static_cast<int>(in.visible[query]);

    int batch = begin;
    int2 found = find_piece(in, query, 2 * begin + lane, seen);
    auto request = [&](int step) {
        if (step - batch == 16) {
            batch = step;
            found = find_piece(in, query, 2 * step + lane, seen);
        }
        const int from = 2 * (step - batch), stage = (step - begin) % kStages;
        int row[2], entry[2];
        for (int i = 0; i < 2; i++) {
            row[i] = __shfl_sync(~0u, found.x, from + i);
            entry[i] = __shfl_sync(~0u, found.y, from + i);
        }
        if (lane == 0) {
            constexpr int bytes = kPiece * kWords * 4;
            entries[warp][stage] = make_int2(entry[0], entry[1]);
            const uint32_t barrier = shared_address(&barriers[warp][stage]);
            const int expected = bytes * ((row[0] >= 0) + (row[1] >= 0));
            asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier),
                         "r"(expected)
                         : "memory");
            for (int i = 0; i < 2; i++) {
                if (row[i] < 0) continue;
                const uint32_t to =
                    shared_address(&ring[warp][stage][i * kPiece * kWords]);
                const uint32_t* source = in.keys + static_cast<int64_t>(row[i]) * kWords;
                asm volatile(
                    "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
                    "[%0], [%1], %2, [%3];" ::"r"(to),
                    "l"(source), "r"(bytes), "r"(barrier)
                    : "memory");
            }
        }
        __syncwarp();
    };
    for (int step = begin; step < min(begin + kStages, end); step++) request(step);

    uint32_t q[4][8][2];
    float weight[4][2];
    const uint32_t* query_rows = in.q + static_cast<int64_t>(query) * in.heads * kWords;
#pragma unroll
    for (int n = 0; n < 4; n++) {
        const int head = 8 * n + g;
        const uint32_t* row = query_rows + head * kWords;
        const uint32_t scales = head < in.heads ? row[16] : 0;
        const int largest = largest_byte(scales);
#pragma unroll
        for (int b = 0; b < 4; b++) {
            const uint32_t word = head < in.heads ? row[4 * b + c] : 0;
            uint32_t even, odd;
            unpack(word, table[largest - ((scales >> (8 * b)) & 255)], even, odd);
            q[n][2 * b][0] = lower_pair(even);
            q[n][2 * b][1] = upper_pair(even);
            q[n][2 * b + 1][0] = lower_pair(odd);
            q[n][2 * b + 1][1] = upper_pair(odd);
        }
#pragma unroll
        for (int j = 0; j < 2; j++) {
            const int own = 8 * n + 2 * c + j;
            weight[n][j] = 0.f;
            if (own < in.heads) {
                const int byte = largest_byte(query_rows[own * kWords + 16]);
                weight[n][j] = in.weights[query * in.heads + own] * scale_of(byte);
            }
        }
    }

    float* out = in.out + static_cast<int64_t>(query) * in.width;
    for (int step = begin; step < end; step++) {
        const int turn = step - begin, stage = turn % kStages;
        wait(shared_address(&barriers[warp][stage]), (turn / kStages) & 1);
        const uint32_t* rows[2] = {&ring[warp][stage][g * kWords],
                                   &ring[warp][stage][(g + 8) * kWords]};
        const int2 entry = entries[warp][stage];
        int largest[2];
        uint2 tables[2][4];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const uint32_t scales = rows[i][16];
            largest[i] = largest_byte(scales);
#pragma unroll
            for (int b = 0; b < 4; b++)
                tables[i][b] = table[largest[i] - ((scales >> (8 * b)) & 255)];
        }
        float sums[4][4] = {};
#pragma unroll
        for (int b = 0; b < 4; b++) {
            uint32_t even[2], odd[2];
#pragma unroll
            for (int i = 0; i < 2; i++) unpack(rows[i][4 * b + c], tables[i][b], even[i], odd[i]);
            const uint32_t first[4] = {lower_pair(even[0]), lower_pair(even[1]),
                                       upper_pair(even[0]), upper_pair(even[1])};
            const uint32_t second[4] = {lower_pair(odd[0]), lower_pair(odd[1]),
                                        upper_pair(odd[0]), upper_pair(odd[1])};
#pragma unroll
            for (int n = 0; n < 4; n++) multiply(sums[n], first, q[n][2 * b]);
#pragma unroll
            for (int n = 0; n < 4; n++) multiply(sums[n], second, q[n][2 * b + 1]);
        }
        __syncwarp();  // the whole warp has read the stage
        if (step + kStages < end) request(step + kStages);
        float score[2] = {0.f, 0.f};
#pragma unroll
        for (int n = 0; n < 4; n++) {
#pragma unroll
            for (int i = 0; i < 2; i++) {
                score[i] += weight[n][0] * fmaxf(sums[n][2 * i], 0.f);
                score[i] += weight[n][1] * fmaxf(sums[n][2 * i + 1], 0.f);
            }
        }
#pragma unroll
        for (int i = 0; i < 2; i++) {
            score[i] += __shfl_xor_sync(~0u, score[i], 1);
            score[i] += __shfl_xor_sync(~0u, score[i], 2);
        }
        if (c < 2) {
            const int first = c == 0 ? entry.x : entry.y, slot = step * kRows + c * 8 + g;
            const float value = (c == 0 ? score[0] : score[1]) *
                                scale_of(c == 0 ? largest[0] : largest[1]);
            const bool known = first >= 0 && first + g < seen;
            if (slot < in.width) out[slot] = known ? value : __int_as_float(0xFF800000);
        }
    }
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
    const int queries = batches * tokens, steps = (width + kRows - 1) / kRows;
    const int wanted = (steps + kWarps - 1) / kWarps;
    int each = programs / queries;  // rounded down: all run at once, a second wave would be short
    each = each < 1 ? 1 : each > wanted ? wanted : each;
    packed_scores<<<dim3(each, queries), kWarps * 32, 0, static_cast<cudaStream_t>(stream)>>>(in);
    return static_cast<int>(cudaGetLastError());
}
