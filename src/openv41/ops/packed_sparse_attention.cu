// Sparse attention over packed rows on Hopper: 64 heads of 512 channels to a block of threads.
//
// Four warpgroups, each with its part, pass blocks of 64 rows along. One copies listed rows a step
// ahead, dequantises them and stores them for the matrix units (two buffers); one multiplies heads
// and rows and takes the softmax; two add up a half of the channels each, the second of them while
// the softmax is taken. A buffer's halves of the columns are filled and given back one by one.
// Blocks of threads stay and take query after query.
//
// Eight columns are kept in the order in which shifts take E2M1 codes out of a word, 0 4 1 5 2 6 3
// 7, in rows and queries alike; results are put in order at the end. Keys are held at 2^-8 of their
// value, so that scale and shift of the E2M1 bits are one bf16 factor.
//
// Stores are made seen to the matrix units by those who have waited for them: a fence of the warps
// that dequantise would wait for their copies.
//
// Per 64 rows: 8.4 MFLOP, 2,050 cycles; 310 KB through shared memory, 2,400 cycles.

#include "hopper.cuh"

namespace {

constexpr int kHeads = 64, kWidth = 512, kRows = 64, kHalf = kWidth / 2;
constexpr int kGroup = 128, kThreads = 4 * kGroup;
constexpr int kTile = kRows * 128;  // bytes of 64 columns
constexpr int kBuffer = kWidth / 64 * kTile;
constexpr int kFew = 112, kScoring = 80, kMany = 160;  // registers of a thread
constexpr int kSlot = kHalf + 32;  // bytes of a row of main KV, or of half a row of window KV
constexpr int kAtOnce = 1;  // halves that are added up while the next scores are made, not after
constexpr float kNone = -1e30f, kShrunk = 256.f, kLog2e = 1.4426950408889634f;
constexpr float kSlack = 8.f;  // weights reach 2^8 before sums are scaled anew

struct Given {
    const uint8_t *q, *window, *main;
    const void *window_rows, *main_rows;
    const float* sink;
    void* out;   // bf16, or float32 of each part with columns in the order of rows
    float* lse;  // of each part; null where there is one
    int64_t q_t, q_h, window_stride, main_stride;  // bytes
    int heads, groups, near, far, parts, items, wide_window_rows, wide_main_rows;
    float scale;
};

// What lies where in shared memory.
struct Shared {
    uint8_t q[kBuffer];
    uint8_t kv[2][kBuffer];
    uint8_t p[2][kTile];
    uint8_t packed[4][16 * kSlot];  // of a warp
    float shrink[2][kHeads];
    float last[kHeads];  // factor of the finished sums
    uint16_t present[2][4];  // a bit per row
    uint64_t full[2][2], empty[2][2], weighed[2], added[2], scored, asked;
};

// A query's heads and the blocks of its lists that belong to a part of it.
struct Item {
    int64_t t;
    int first_head, part, begin, end;
};

__device__ __forceinline__ Item item_of(const Given& in, int number) {
    const int near = (in.near + kRows - 1) / kRows, far = (in.far + kRows - 1) / kRows;
    const int blocks = max(near + far, 1), each = in.groups * in.parts;
    if (each == 1) return {number, 0, 0, 0, blocks};  // divisions take long
    const int rest = number % each, part = rest % in.parts;
    const int share = (blocks + in.parts - 1) / in.parts, begin = part * share;
    return {number / each, rest / in.parts * kHeads, part, begin, min(begin + share, blocks)};
}

// A step of the reading: a block of main KV, or a half of the columns of one of window KV.
struct Step {
    int number, block, end, half;
    int64_t t;
    bool in_window;
};

__device__ __forceinline__ void enter(const Given& in, Step& step) {
    step.in_window = step.block * kRows < in.near;
    step.half = 0;
}

__device__ __forceinline__ void open(const Given& in, Step& step, int number) {
    step.number = number;
    const Item item = item_of(in, number < in.items ? number : 0);
    step.t = item.t, step.block = item.begin, step.end = item.end;
    enter(in, step);
}

__device__ __forceinline__ void advance(const Given& in, Step& step) {
    if (step.in_window && step.half == 0) {
        step.half = 1;
    } else if (++step.block < step.end) {
        enter(in, step);
    } else {
        open(in, step, step.number + gridDim.x);
    }
}

__device__ __forceinline__ int listed(const void* rows, int is_wide, int64_t at) {
    if (is_wide) return static_cast<int>(static_cast<const int64_t*>(rows)[at]);
    return static_cast<const int32_t*>(rows)[at];
}

// Number of a step's row in its store; -1 is none.
__device__ __forceinline__ int row_of(const Given& in, const Step& step, int row) {
    if (step.number >= in.items) return -1;
    if (step.in_window) {
        const int at = step.block * kRows + row;
        if (at >= in.near) return -1;
        return listed(in.window_rows, in.wide_window_rows, step.t * in.near + at);
    }
    const int at = (step.block - (in.near + kRows - 1) / kRows) * kRows + row;
    if (at >= in.far) return -1;
    return listed(in.main_rows, in.wide_main_rows, step.t * in.far + at);
}

// Start to copy a warp's rows of a step, of which its lanes know the numbers; a bit for each that
// there is.
__device__ __forceinline__ uint32_t request(const Given& in, uint32_t slots, const Step& step,
                                            int row, int lane) {
    const uint8_t* store = step.in_window ? in.window + step.half * kHalf : in.main;
    const int64_t stride = step.in_window ? in.window_stride : in.main_stride;
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const int slot = 2 * i + lane / 16, own = __shfl_sync(~0u, row, slot);
        start_copy(slots + slot * kSlot + (lane % 16 ^ slot / 4 % 2) * 16,
                   store + max(own, 0) * stride + lane % 16 * 16, own >= 0);
    }
    const int own = __shfl_sync(~0u, row, lane / 2), at = lane % 2 * 16;
    const int scales = step.in_window ? kWidth - step.half * kHalf : kHalf;
    if (!step.in_window || at == 0)
        start_copy(slots + lane / 2 * kSlot + kHalf + at,
                   store + max(own, 0) * stride + scales + at, own >= 0);
    return __ballot_sync(~0u, row >= 0) & 0xFFFF;
}

// Packed rows in registers: a thread has 16 bytes of two rows at four places, and their scales.
struct Packed {
    uint4 codes[8];
    uint32_t scales[8];
};

__device__ __forceinline__ void take(Packed& packed, const uint8_t* slots, const Step& step,
                                     int lane) {
    const uint8_t* row = slots + lane % 8 * kSlot;
    const int scales = kHalf + (step.in_window ? step.half * 8 : lane / 8 * 2);
    const int apart = step.in_window ? 2 : 8, chunk = lane / 8 ^ lane / 4 % 2;
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const uint8_t* at = row + i % 2 * 8 * kSlot;
        packed.codes[i] = *reinterpret_cast<const uint4*>(at + chunk * 16 + i / 2 * 64);
        packed.scales[i] = *reinterpret_cast<const uint16_t*>(at + scales + i / 2 * apart);
    }
}

__device__ __forceinline__ uint32_t signed_pair(uint32_t sizes, uint32_t signs, uint32_t mask) {
    return (sizes & mask) | (signs & 0x80008000u);
}

// Eight E2M1 codes. Their bits, put where a bf16 has its last exponent bits and its first fraction
// bit, are 2^-126 of their value, also where it is subnormal. A product shifts sizes and signs.
__device__ __forceinline__ uint4 main_columns(uint32_t codes, uint32_t factor) {
    constexpr uint32_t kMask = 0x01C001C0u, kBoth = 0x81C081C0u;
    return make_uint4(multiply_pairs((codes & 0x000F000Fu) * 0x1040u & kBoth, factor),
                      multiply_pairs((codes & 0x00F000F0u) * 0x0104u & kBoth, factor),
                      multiply_pairs(signed_pair(codes >> 2, codes << 4, kMask), factor),
                      multiply_pairs(signed_pair(codes >> 6, codes, kMask), factor));
}

// Columns i and i + 4 of eight E4M3 codes; 0x7780 is 2^112 of the 2^120 that their bits lack.
__device__ __forceinline__ uint32_t window_pair(uint32_t low, uint32_t high, int i,
                                                uint32_t factor) {
    const uint32_t codes = prmt(low, high, 0x4400u + 0x1111u * i);
    const uint32_t bits = signed_pair(codes >> 4, codes, 0x07F007F0u);
    return multiply_pairs(multiply_pairs(bits, 0x77807780u), factor);
}

__device__ __forceinline__ uint4 window_columns(uint32_t low, uint32_t high, uint32_t factor) {
    return make_uint4(window_pair(low, high, 0, factor), window_pair(low, high, 1, factor),
                      window_pair(low, high, 2, factor), window_pair(low, high, 3, factor));
}

// Pairs of one factor: two E4M3 scales times 2^126 / kShrunk, or one of two E8M0 scales.
__device__ __forceinline__ uint2 main_factors(uint32_t scales) {
    const float2 s = numbers_of(static_cast<uint16_t>(scales));
    const float first = s.x * 0x1p118f, second = s.y * 0x1p118f;
    return make_uint2(pair_of(first, first), pair_of(second, second));
}

__device__ __forceinline__ uint32_t window_factor(uint32_t byte) {
    return (byte == 0 ? 0x0040u : byte == 255 ? 0x7FC0u : byte << 7) * 0x00010001u;
}

__device__ __forceinline__ void store(uint8_t* at, uint4 x) { *reinterpret_cast<uint4*>(at) = x; }

// All threads of a warp have done something that others wait for.
__device__ __forceinline__ void arrive_warp(const void* barrier, int lane) {
    __syncwarp();
    if (lane == 0) arrive(shared_address(barrier));
}

// A thread's part of half a block of window KV.
__device__ __forceinline__ void put_window(uint8_t* to, const Packed& packed, int place, int swap) {
    const int unit = (place * 2) ^ swap;
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const uint4 codes = packed.codes[i];
        const uint32_t scales = packed.scales[i];
        const uint32_t factor = window_factor(place < 2 ? scales & 255 : scales >> 8);
        uint8_t* const at = to + i / 2 * kTile + i % 2 * 1024;
        store(at + unit * 16, window_columns(codes.x, codes.y, factor));
        store(at + (unit ^ 1) * 16, window_columns(codes.z, codes.w, factor));
    }
}

// A thread's part of half a block of main KV.
template <int kFirst>
__device__ __forceinline__ void put_main(uint8_t* to, const Packed& packed, int place, int swap) {
    const int unit = (place % 2 * 4) ^ swap;
#pragma unroll
    for (int i = kFirst; i < kFirst + 4; i++) {
        const uint4 codes = packed.codes[i];
        const uint2 factors = main_factors(packed.scales[i]);
        uint8_t* const at = to + (i / 2 * 2 + place / 2) * kTile + i % 2 * 1024;
        store(at + unit * 16, main_columns(codes.x, factors.x));
        store(at + (unit ^ 1) * 16, main_columns(codes.y, factors.x));
        store(at + (unit ^ 2) * 16, main_columns(codes.z, factors.y));
        store(at + (unit ^ 3) * 16, main_columns(codes.w, factors.y));
    }
}

// The warpgroup that reads and dequantises; a warp has sixteen rows of a block.
__device__ __forceinline__ void dequantise(const Given& in, Shared& shared, int thread) {
    const int warp = thread / 32, lane = thread % 32, row = warp * 16 + lane % 8, place = lane / 8;
    const uint32_t slots = shared_address(shared.packed[warp]);
    Step step, next;
    open(in, step, blockIdx.x);
    int asked = row_of(in, step, warp * 16 + lane % 16);
    uint32_t present = request(in, slots, step, asked, lane), turn = 0;
    next = step;
    advance(in, next);
    asked = row_of(in, next, warp * 16 + lane % 16);
    while (step.number < in.items) {
        Packed packed;
        const uint32_t here = present;
        wait_for_copies();
        __syncwarp();
        take(packed, shared.packed[warp], step, lane);
        __syncwarp();
        present = request(in, slots, next, asked, lane);
        const bool in_window = step.in_window;
        const int half = step.half, buffer = turn % 2, parity = ~(turn / 2) & 1;
        step = next;
        advance(in, next);
        asked = row_of(in, next, warp * 16 + lane % 16);
        uint8_t* const kv = shared.kv[buffer] + row * 128;
        wait(shared_address(&shared.empty[buffer][half]), parity);
        if (lane == 0) shared.present[buffer][warp] = here;
        if (in_window) {
            put_window(kv + half * 4 * kTile, packed, place, lane % 8);
            arrive_warp(&shared.full[buffer][half], lane);
            turn += half;
        } else {
            put_main<0>(kv, packed, place, lane % 8);
            arrive_warp(&shared.full[buffer][0], lane);
            wait(shared_address(&shared.empty[buffer][1]), parity);
            put_main<4>(kv, packed, place, lane % 8);
            arrive_warp(&shared.full[buffer][1], lane);
            turn++;
        }
    }
}

// Where a thread keeps sixteen bytes of a head.
__device__ __forceinline__ int place_of(int head, int i, int lane) {
    return (i % 2 * 4 + lane / 8) * kTile + head * 128 + (lane % 8 ^ head % 8) * 16;
}

// Start to copy heads of a query, divided among some warps; a head that there is not is zero.
template <int kWarps>
__device__ __forceinline__ void copy_q(const Given& in, Shared& shared, const Item& item, int warp,
                                       int lane) {
    const uint8_t* q = in.q + item.t * in.q_t + item.first_head * in.q_h + lane * 16;
    const uint32_t to = shared_address(shared.q);
#pragma unroll 8
    for (int i = 0; i < 2 * kHeads / kWarps; i++) {
        const int head = warp * (kHeads / kWarps) + i / 2;
        start_copy(to + place_of(head, i, lane), q + head * in.q_h + i % 2 * 512,
                   item.first_head + head < in.heads);
    }
}

// Put what this thread has copied into the order of the rows.
template <int kWarps>
__device__ __forceinline__ void order_q(Shared& shared, int warp, int lane) {
    wait_for_copies();
#pragma unroll 8
    for (int i = 0; i < 2 * kHeads / kWarps; i++) {
        uint8_t* const at = shared.q + place_of(warp * (kHeads / kWarps) + i / 2, i, lane);
        const uint4 x = *reinterpret_cast<const uint4*>(at);
        store(at, make_uint4(prmt(x.x, x.z, 0x5410), prmt(x.x, x.z, 0x7632),
                             prmt(x.y, x.w, 0x5410), prmt(x.y, x.w, 0x7632)));
    }
}

// A thread's two heads in a running softmax; the four threads of a head have the same top.
struct Softmax {
    float top[2], total[2];
};

// Weights of a block, and the factor of what was before.
__device__ __forceinline__ void weigh(Softmax& state, float (&s)[32], float scale,
                                      uint64_t present, float (&shrink)[2], int lane) {
    if (present != ~0ull) {
        const uint64_t own = present >> (lane % 4 * 2);
#pragma unroll
        for (int i = 0; i < 32; i++)
            if (!(own >> (i / 4 * 8 + i % 2) & 1)) s[i] = __int_as_float(0xFF800000);
    }
    float most[2][2];
#pragma unroll
    for (int i = 0; i < 4; i++) most[i / 2][i % 2] = s[i];
#pragma unroll
    for (int i = 4; i < 32; i++) most[i / 2 % 2][i % 2] = fmaxf(most[i / 2 % 2][i % 2], s[i]);
#pragma unroll
    for (int r = 0; r < 2; r++) {
        float top = fmaxf(most[r][0], most[r][1]);
        top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
        top = fmaxf(top, __shfl_xor_sync(~0u, top, 2)) * scale;
        top = top > state.top[r] + kSlack ? top : state.top[r];
        shrink[r] = exp2_of(state.top[r] - top);
        state.top[r] = top;
    }
    float sum[2][2] = {};
#pragma unroll
    for (int i = 0; i < 32; i++) {
        s[i] = exp2_of(fmaf(s[i], scale, -state.top[i / 2 % 2]));
        sum[i / 2 % 2][i % 2] += s[i];
    }
#pragma unroll
    for (int r = 0; r < 2; r++)
        state.total[r] = state.total[r] * shrink[r] + (sum[r][0] + sum[r][1]);
}

// Factor of a head's sums: with the sink, or of a part, whose logarithm is kept.
__device__ __forceinline__ float finish(const Given& in, const Item& item, int row, float top,
                                        float total, float sink, bool writes) {
    const int head = item.first_head + row;
    if (in.lse == nullptr) {
        sink = fminf(fmaxf(sink * kLog2e, kNone), -kNone);
        const float most = fmaxf(top, sink), shrink = exp2_of(top - most);
        return shrink / (total * shrink + exp2_of(sink - most)) * kShrunk;
    }
    const bool empty = total == 0.f;
    if (writes && head < in.heads)
        in.lse[(item.t * in.parts + item.part) * in.heads + head] =
            empty ? 2 * kNone : top + log2_of(total);
    return empty ? 0.f : kShrunk / total;
}

// The warpgroup of the scores.
__device__ __forceinline__ void score(const Given& in, Shared& shared, int thread) {
    const int warp = thread / 32, lane = thread % 32, row = warp * 16 + lane / 4;
    const uint64_t q = describe(shared_address(shared.q));
    // where a thread stores a row of a tile of weights: rows are 0 to 7 and 8 to 15, then columns
    const int place = (warp * 16 + lane % 16) * 128 + (lane / 16 ^ lane % 8) * 16;
    uint32_t turn = 0;
    for (int number = blockIdx.x; number < in.items; number += gridDim.x) {
        const Item item = item_of(in, number);
        if (turn == 0) {
            wait(shared_address(&shared.asked), 0);
        } else {
            order_q<4>(shared, warp, lane);
            meet(1, kGroup);
        }
        Softmax state = {{2 * kNone, 2 * kNone}, {0.f, 0.f}};
        float sink[2];
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const int head = item.first_head + row + 8 * r;
            sink[r] = head < in.heads ? in.sink[head] : 0.f;
        }
        for (int block = item.begin; block < item.end; block++, turn++) {
            const int buffer = turn % 2, parity = turn / 2 & 1;
            const uint64_t kv = describe(shared_address(shared.kv[buffer]));
            float s[32], shrink[2];
            wait(shared_address(&shared.full[buffer][0]), parity);
            see_stores();
            begin_products();
#pragma unroll
            for (int k = 0; k < 32; k++) {
                if (k == 16) {
                    wait(shared_address(&shared.full[buffer][1]), parity);
                    see_stores();
                    begin_products();
                }
                const uint32_t at = k / 4 * kTile + k % 4 * 32;
                multiply_rows(s, moved(q, at), moved(kv, at), k > 0);
            }
            end_products();
            hold(s);
            arrive_warp(&shared.scored, lane);
            if (block + 1 == item.end && number + gridDim.x < in.items) {
                meet(1, kGroup);  // all have done with this query
                copy_q<4>(in, shared, item_of(in, number + gridDim.x), warp, lane);
            }
            const uint64_t present =
                *reinterpret_cast<const volatile uint64_t*>(shared.present[buffer]);
            weigh(state, s, in.scale, present, shrink, lane);
            wait(shared_address(&shared.added[buffer]), parity ^ 1);
            const uint32_t p = shared_address(shared.p[buffer]) + place;
#pragma unroll
            for (int i = 0; i < 32; i += 8)
                store_tiles(p ^ i * 4, pair_of(s[i], s[i + 1]), pair_of(s[i + 2], s[i + 3]),
                            pair_of(s[i + 4], s[i + 5]), pair_of(s[i + 6], s[i + 7]));
            if (lane % 4 == 0) {
                shared.shrink[buffer][row] = shrink[0];
                shared.shrink[buffer][row + 8] = shrink[1];
            }
            if (block + 1 == item.end) {
                // what the sums of the query before are multiplied by has been read
                if (turn > 0) wait(shared_address(&shared.added[buffer ^ 1]), (turn - 1) / 2 & 1);
#pragma unroll
                for (int r = 0; r < 2; r++) {
                    float total = state.total[r];
                    total += __shfl_xor_sync(~0u, total, 1);
                    total += __shfl_xor_sync(~0u, total, 2);
                    const float factor = finish(in, item, row + 8 * r, state.top[r], total, sink[r],
                                                lane % 4 == 0);
                    if (lane % 4 == 0) shared.last[row + 8 * r] = factor;
                }
            }
            arrive_warp(&shared.weighed[buffer], lane);
        }
    }
}

// Four registers of four neighbours, the other way round.
__device__ __forceinline__ void transpose(uint32_t (&x)[4], int lane) {
#pragma unroll
    for (int bit = 1; bit < 4; bit *= 2) {
        const bool upper = lane & bit;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int low = bit == 1 ? 2 * i : i, high = low + bit;
            const uint32_t got = __shfl_xor_sync(~0u, upper ? x[low] : x[high], bit);
            if (upper) x[low] = got;
            if (!upper) x[high] = got;
        }
    }
}

// Write a thread's sums of a head: in their order as bf16, or of a part as they are.
__device__ __forceinline__ void write(const Given& in, const Item& item, const float (&sums)[2][64],
                                      int r, float factor, int row, int half, int lane) {
    const int head = item.first_head + row;
    const int64_t at = ((item.t * in.parts + item.part) * in.heads + head) * kWidth + half * kHalf;
    const int c = lane % 4;
    if (in.lse != nullptr) {
        float* const out = static_cast<float*>(in.out) + at + 2 * c;
        if (head >= in.heads) return;
#pragma unroll
        for (int i = 0; i < 32; i++) {
            const float* x = &sums[i / 16][i % 16 * 4 + 2 * r];
            *reinterpret_cast<float2*>(out + 8 * i) = make_float2(x[0] * factor, x[1] * factor);
        }
        return;
    }
    uint16_t* const out = static_cast<uint16_t*>(in.out) + at + 8 * c;
#pragma unroll
    for (int i = 0; i < 32; i += 4) {
        uint32_t x[4];
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const float* y = &sums[i / 16][(i % 16 + j) * 4 + 2 * r];
            x[j] = pair_of(y[0] * factor, y[1] * factor);
        }
        transpose(x, lane);
        const uint4 columns = make_uint4(prmt(x[0], x[1], 0x5410), prmt(x[2], x[3], 0x5410),
                                         prmt(x[0], x[1], 0x7632), prmt(x[2], x[3], 0x7632));
        if (head < in.heads) *reinterpret_cast<uint4*>(out + 8 * i) = columns;
    }
}

// A warpgroup of the sums, of one half of the channels.
__device__ __forceinline__ void add_up(const Given& in, Shared& shared, int half, int thread) {
    const int warp = thread / 32, lane = thread % 32, row = warp * 16 + lane / 4;
    float sums[2][64];
    uint32_t turn = 0;
    copy_q<8>(in, shared, item_of(in, blockIdx.x), half * 4 + warp, lane);
    order_q<8>(shared, half * 4 + warp, lane);
    arrive_warp(&shared.asked, lane);
    for (int number = blockIdx.x; number < in.items; number += gridDim.x) {
        const Item item = item_of(in, number);
        float factor[2];
        for (int block = item.begin; block < item.end; block++, turn++) {
            const int buffer = turn % 2, parity = turn / 2 & 1;
            const uint64_t p = describe(shared_address(shared.p[buffer]));
            const uint64_t kv =
                describe(shared_address(shared.kv[buffer] + half * 4 * kTile), kTile);
            wait(shared_address(&shared.weighed[buffer]), parity);
            see_stores();
            const float first = shared.shrink[buffer][row], second = shared.shrink[buffer][row + 8];
            factor[0] = shared.last[row], factor[1] = shared.last[row + 8];
            if (block > item.begin && !__all_sync(~0u, first == 1.f && second == 1.f)) {
#pragma unroll
                for (int i = 0; i < 64; i++) {
                    sums[0][i] *= i % 4 < 2 ? first : second;
                    sums[1][i] *= i % 4 < 2 ? first : second;
                }
            }
            if (half >= kAtOnce && block + 1 < item.end)
                wait(shared_address(&shared.scored), (turn + 1) & 1);
            begin_products();
#pragma unroll
            for (int k = 0; k < 4; k++) {
                const int more = k > 0 || block > item.begin;
                multiply_columns(sums[0], moved(p, k * 32), moved(kv, k * 2048), more);
                multiply_columns(sums[1], moved(p, k * 32), moved(kv, k * 2048 + 2 * kTile), more);
            }
            end_products();
            hold(sums[0]), hold(sums[1]);
            arrive_warp(&shared.empty[buffer][half], lane);
            arrive_warp(&shared.added[buffer], lane);
        }
#pragma unroll
        for (int r = 0; r < 2; r++) write(in, item, sums, r, factor[r], row + 8 * r, half, lane);
    }
}

static_assert(sizeof(Shared) <= 227 * 1024);

__global__ void __launch_bounds__(kThreads, 1) attend(const __grid_constant__ Given in) {
    Shared& shared = *reinterpret_cast<Shared*>(shared_memory);
    if (threadIdx.x == 0) {
        for (int i = 0; i < 2; i++) {
            for (int half = 0; half < 2; half++) {
                init_barrier(shared_address(&shared.full[i][half]), 4);
                init_barrier(shared_address(&shared.empty[i][half]), 4);
            }
            init_barrier(shared_address(&shared.weighed[i]), 4);
            init_barrier(shared_address(&shared.added[i]), 8);
        }
        init_barrier(shared_address(&shared.scored), 4);
        init_barrier(shared_address(&shared.asked), 8);
        show_barriers();
    }
    __syncthreads();
    const int group = threadIdx.x / kGroup, thread = threadIdx.x % kGroup;
    if (group == 0) {
        give_registers<kFew>();
        dequantise(in, shared, thread);
    } else if (group == 1) {
        give_registers<kScoring>();
        score(in, shared, thread);
    } else {
        take_registers<kMany>();
        add_up(in, shared, group - 2, thread);
    }
}

constexpr int kJoining = 8;  // warps, each with a head of a query

// Weigh the parts of a query's head by their denominators, the sink among them.
__global__ void __launch_bounds__(kJoining * 32) join_parts(const __grid_constant__ Given in,
                                                            uint16_t* out, int64_t rows) {
    const int64_t row = static_cast<int64_t>(blockIdx.x) * kJoining + threadIdx.x / 32;
    const int lane = threadIdx.x % 32;
    if (row >= rows) return;
    const int head = static_cast<int>(row % in.heads);
    const int64_t at = row / in.heads * in.parts * in.heads + head;
    const float sink = fminf(fmaxf(in.sink[head] * kLog2e, kNone), -kNone);
    float top = sink;
    for (int i = 0; i < in.parts; i++) top = fmaxf(top, in.lse[at + i * in.heads]);
    float total = exp2_of(sink - top), sums[2][8] = {};
    for (int i = 0; i < in.parts; i++) {
        const float weight = exp2_of(in.lse[at + i * in.heads] - top);
        const float4* part = static_cast<const float4*>(in.out) + (at + i * in.heads) * kWidth / 4;
        total += weight;
#pragma unroll
        for (int j = 0; j < 2; j++) {
            const float4 a = part[j * 64 + lane * 2], b = part[j * 64 + lane * 2 + 1];
            const float x[8] = {a.x, a.z, b.x, b.z, a.y, a.w, b.y, b.w};
#pragma unroll
            for (int k = 0; k < 8; k++) sums[j][k] += x[k] * weight;
        }
    }
#pragma unroll
    for (int j = 0; j < 2; j++) {
        uint32_t x[4];
#pragma unroll
        for (int k = 0; k < 4; k++)
            x[k] = pair_of(sums[j][2 * k] / total, sums[j][2 * k + 1] / total);
        store(reinterpret_cast<uint8_t*>(out + row * kWidth + j * 256 + lane * 8),
              make_uint4(x[0], x[1], x[2], x[3]));
    }
}

cudaError_t launch(const Given& in, void* joined, int64_t queries, int programs,
                   cudaStream_t stream) {
    cudaFuncSetAttribute(attend, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(Shared));
    attend<<<in.items < programs ? in.items : programs, kThreads, sizeof(Shared), stream>>>(in);
    if (in.parts > 1) {
        const int64_t rows = queries * in.heads;
        const auto blocks = static_cast<unsigned>((rows + kJoining - 1) / kJoining);
        join_parts<<<blocks, kJoining * 32, 0, stream>>>(in, static_cast<uint16_t*>(joined), rows);
    }
    return cudaGetLastError();
}

}  // namespace

// Tensors: q, window, main, their lists, sink, out; sums and logarithms of parts, or null.
extern "C" int packed_sparse_attention(void* const* tensors, const int64_t* sizes, float scale,
                                       void* stream) {
    Given in = {};
    in.q = static_cast<const uint8_t*>(tensors[0]);
    in.window = static_cast<const uint8_t*>(tensors[1]);
    in.main = static_cast<const uint8_t*>(tensors[2]);
    in.window_rows = tensors[3], in.main_rows = tensors[4];
    in.sink = static_cast<const float*>(tensors[5]);
    in.out = tensors[7] == nullptr ? tensors[6] : tensors[7];
    in.lse = static_cast<float*>(tensors[8]);
    in.q_t = sizes[0], in.q_h = sizes[1], in.window_stride = sizes[2], in.main_stride = sizes[3];
    in.heads = static_cast<int>(sizes[5]), in.near = static_cast<int>(sizes[6]);
    in.far = static_cast<int>(sizes[7]), in.parts = static_cast<int>(sizes[8]);
    in.wide_window_rows = static_cast<int>(sizes[9]);
    in.wide_main_rows = static_cast<int>(sizes[10]);
    in.groups = (in.heads + kHeads - 1) / kHeads;
    in.items = static_cast<int>(sizes[4] * in.groups * in.parts);
    in.scale = scale * kLog2e * kShrunk;
    return launch(in, tensors[6], sizes[4], static_cast<int>(sizes[11]),
                  static_cast<cudaStream_t>(stream));
}
