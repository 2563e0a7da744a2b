// The k best of each row, ids in ascending order, the lowest id first among equals.
//
// The k best entries lie in the k best groups of neighbours, where a group is as good as its best
// entry. One pass over long rows, bound by memory, writes the best of each group; then a block per
// row chooses groups, reads those alone and chooses among their entries. The second kernel begins
// while the first one ends (programmatic dependent launch), and needs nothing that is kept.
//
// Scores become integers of the same order. The best of each thread's own entries bound the k-th
// score from below; what lies above is listed, and a histogram of 2048 bins between the bound and
// the largest finds the bin of the k-th. Bits of a map bring what is chosen into order.

#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

namespace {

constexpr int kNone = -2139095041;     // of -inf; what lies below is never chosen
constexpr int kInfinity = 0x7F800000;  // of inf and NaN
constexpr int kNoTie = 0x7FFFFFFF;
constexpr int kThreads = 1024, kWarps = kThreads / 32;
constexpr int kBits = 11, kBins = 1 << kBits;
constexpr int kFew = 64;  // entries of a bin that are compared with one another
constexpr int kGroupThreads = 256;

struct Rows {
    const float* scores;
    const int64_t* visible;
    int64_t stride;
    int size, k;
    int groups, width, shift;  // groups of a row, entries of a group: 2^shift
};

__device__ __forceinline__ int ordered(float x) {
    const int bits = __float_as_int(x + 0.0f);  // makes -0 and 0 one
    return min(bits ^ ((bits >> 31) & 0x7FFFFFFF), kInfinity);
}

__device__ __forceinline__ int seen_of(const Rows& in, int64_t row) {
    if (in.visible == nullptr) return in.size;
    const int64_t seen = in.visible[row];
    return static_cast<int>(seen < 0 ? 0 : seen < in.size ? seen : in.size);
}

__device__ __forceinline__ bool is_aligned(const float* row) {
    return (reinterpret_cast<uintptr_t>(row) & 15) == 0;
}

// Four scores from an entry on; -inf from `seen` on.
__device__ __forceinline__ float4 load_four(const float* row, int at, int seen, bool aligned) {
    if (aligned && at + 3 < seen) return *reinterpret_cast<const float4*>(row + at);
    const float none = __int_as_float(0xFF800000);
    return make_float4(at < seen ? row[at] : none, at + 1 < seen ? row[at + 1] : none,
                       at + 2 < seen ? row[at + 2] : none, at + 3 < seen ? row[at + 3] : none);
}

// The best of each group of WIDTH entries: a warp takes LOADS x 128 of them.
template <int WIDTH, int LOADS>
__global__ void __launch_bounds__(kGroupThreads) best_of_groups(const Rows in, int parts,
                                                                float* best) {
    asm volatile("griddepcontrol.launch_dependents;");
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int64_t row = blockIdx.x / parts;
    const int part = blockIdx.x % parts;
    const int first = (part * (kGroupThreads / 32) + warp) * LOADS * 128;
    if (first >= in.size) return;
    const int seen = seen_of(in, row);
    const float* values = in.scores + row * in.stride;
    const bool aligned = is_aligned(values);
    float four[LOADS];
    auto keep = [&](int i, float4 v) { four[i] = fmaxf(fmaxf(v.x, v.y), fmaxf(v.z, v.w)); };
    if (aligned && first + LOADS * 128 <= seen) {
#pragma unroll
        for (int i = 0; i < LOADS; i++)
            keep(i, *reinterpret_cast<const float4*>(values + first + i * 128 + lane * 4));
    } else {
#pragma unroll
        for (int i = 0; i < LOADS; i++)
            keep(i, load_four(values, first + i * 128 + lane * 4, seen, aligned));
    }
    // Of four loads a lane ends with one: its own of each four lanes.
    const bool odd = lane & 1, upper = lane & 2;
    const int own = (odd ? 2 : 0) + (upper ? 1 : 0);
#pragma unroll
    for (int i = 0; i < LOADS; i += 4) {
        const float a = odd ? four[i + 2] : four[i], b = odd ? four[i + 3] : four[i + 1];
        const float c = odd ? four[i] : four[i + 2], d = odd ? four[i + 1] : four[i + 3];
        const float e = fmaxf(a, __shfl_xor_sync(~0u, c, 1));
        const float f = fmaxf(b, __shfl_xor_sync(~0u, d, 1));
        float most = fmaxf(upper ? f : e, __shfl_xor_sync(~0u, upper ? e : f, 2));
#pragma unroll
        for (int step = 4; step < WIDTH / 4; step *= 2)
            most = fmaxf(most, __shfl_xor_sync(~0u, most, step));
        const int group = (first + (i + own) * 128 + lane * 4) / WIDTH;
        if (lane % (WIDTH / 4) < 4 && group < in.groups) best[row * in.groups + group] = most;
    }
}

struct Cut {
    int cut, tie, room;  // all from cut on, and the first `room` that equal tie
};

// What a block shares, for up to LISTED entries above the bound and PLACES bits.
template <int LISTED, int PLACES>
struct Shared {
    static constexpr int kListed = LISTED, kPlaces = PLACES;
    int bins[kBins];
    unsigned above[PLACES / 32], ties[PLACES / 32];
    int keys[LISTED];
    uint16_t places[LISTED], groups[PLACES / 16];
    int few[kFew], sums[3][32], found[3];
    int few_count, count;
};

template <typename Given>
struct Chooser {
    Given& shared;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;

    __device__ explicit Chooser(Given& given) : shared(given) {}

    __device__ void clear() {
        for (int i = threadIdx.x; i < kBins; i += kThreads) shared.bins[i] = 0;
        for (int i = threadIdx.x; i < Given::kPlaces / 32; i += kThreads)
            shared.above[i] = shared.ties[i] = 0;
        if (threadIdx.x == 0) shared.few_count = shared.count = 0;
    }

    __device__ int scan_warp(int own) {
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
            const int other = __shfl_up_sync(~0u, own, step);
            if (lane >= step) own += other;
        }
        return own;
    }

    // Sum over the threads before this one, and over all; passes a barrier.
    __device__ int2 scan(int own) {
        const int until = scan_warp(own);
        if (lane == 31) shared.sums[0][warp] = until;
        __syncthreads();
        const int part = lane < kWarps ? shared.sums[0][lane] : 0;
        const int before = __reduce_add_sync(~0u, lane < warp ? part : 0);
        return make_int2(before + until - own, __reduce_add_sync(~0u, part));
    }

    __device__ int2 least_and_largest(int least, int largest) {
        least = __reduce_min_sync(~0u, least);
        largest = __reduce_max_sync(~0u, largest);
        if (lane == 0) {
            shared.sums[1][warp] = least;
            shared.sums[2][warp] = largest;
        }
        __syncthreads();
        least = __reduce_min_sync(~0u, lane < kWarps ? shared.sums[1][lane] : kNoTie);
        largest = __reduce_max_sync(~0u, lane < kWarps ? shared.sums[2][lane] : kNone);
        return make_int2(least, largest);
    }

    // Cut off the k best of the keys from low to high; loosely: after one histogram, a few more.
    template <typename Each>
    __device__ Cut find(Each each, int low, int high, int k, bool loosely) {
        constexpr int kHeld = kBins / kThreads;
        while (true) {
            const unsigned range = static_cast<unsigned>(high) - static_cast<unsigned>(low);
            const int bits = 32 - __clz(static_cast<int>(range));
            const int shift = bits > kBits ? bits - kBits : 0;
            each([&](int key, int) {
                if (key >= low && key <= high)
                    atomicAdd(&shared.bins[(static_cast<unsigned>(key) - static_cast<unsigned>(low)) >> shift], 1);
            });
            __syncthreads();
            const int top = kBins - 1 - static_cast<int>(threadIdx.x) * kHeld;
            int held[kHeld], own = 0;
#pragma unroll
            for (int i = 0; i < kHeld; i++) {
                own += held[i] = shared.bins[top - i];
                shared.bins[top - i] = 0;
            }
            const int2 sums = scan(own);
            int before = sums.x;
            if (before < k && k <= before + own) {
#pragma unroll
                for (int i = 0; i < kHeld; i++) {
                    if (before < k && k <= before + held[i]) {
                        shared.found[0] = top - i;
                        shared.found[1] = before;
                        shared.found[2] = held[i];
                    }
                    before += held[i];
                }
            }
            __syncthreads();
            if (sums.y < k) return {low, kNoTie, 0};
            low = static_cast<int>(static_cast<unsigned>(low) +
                                   (static_cast<unsigned>(shared.found[0]) << shift));
            const int count = shared.found[2];
            if (loosely || shared.found[1] + count == k) return {low, kNoTie, 0};
            k -= shared.found[1];
            if (shift == 0) return {low + 1, low, k};
            high = min(high, low + (1 << shift) - 1);
            if (count <= kFew) return compare(each, low, high, count, k);
        }
    }

    // The k-th of a few keys from low to high.
    template <typename Each>
    __device__ Cut compare(Each each, int low, int high, int count, int k) {
        each([&](int key, int) {
            if (key >= low && key <= high) shared.few[atomicAdd(&shared.few_count, 1)] = key;
        });
        __syncthreads();
        if (threadIdx.x < count) {
            const int key = shared.few[threadIdx.x];
            int better = 0, equal = 0, earlier = 0;
            for (int i = 0; i < count; i++) {
                better += shared.few[i] > key;
                equal += shared.few[i] == key;
                earlier += shared.few[i] == key && i < threadIdx.x;
            }
            if (better < k && k <= better + equal && earlier == 0) {
                shared.found[0] = key;
                shared.found[1] = k - better;
            }
        }
        if (threadIdx.x == 0) shared.few_count = 0;
        __syncthreads();
        const int tie = shared.found[0];
        return {tie + 1, tie, shared.found[1]};
    }

    // Call emit(rank, place) for bits of two masks from a place on, after those of others.
    template <typename Emit>
    __device__ void rank(unsigned above, unsigned ties, int place, int& chosen, int& equal,
                         const Cut& cut, Emit emit) {
        for (unsigned bits = above | ties; bits; bits &= bits - 1) {
            const int bit = __ffs(static_cast<int>(bits)) - 1;
            const bool is_tie = !(above >> bit & 1);
            if (!is_tie || equal < cut.room) emit(chosen + min(equal, cut.room), place + bit);
            chosen += !is_tie;
            equal += is_tie;
        }
    }

    // Call emit(rank, place) for what the cut leaves of some places, in their order; returns how
    // many that are.
    template <typename Each, typename Emit>
    __device__ int list(Each each, const Cut& cut, int places, Emit emit) {
        each([&](int key, int place) {
            if (key >= cut.cut) {
                atomicOr(&shared.above[place / 32], 1u << (place % 32));
            } else if (key == cut.tie) {
                atomicOr(&shared.ties[place / 32], 1u << (place % 32));
            }
        });
        __syncthreads();
        // Places of a thread: 16, or 32 at a time.
        const int words = (places + 32 * kThreads - 1) / (32 * kThreads);
        const int bits = places <= 16 * kThreads ? 16 : 32, first = threadIdx.x * words * bits;
        auto mask = [&](const unsigned* of, int i) {
            const int at = first + i * bits;
            const unsigned word = at < Given::kPlaces ? of[at / 32] : 0;
            return bits == 32 ? word : word >> (at % 32) & 0xFFFF;
        };
        int own = 0;
        for (int i = 0; i < words; i++)
            own += __popc(mask(shared.above, i)) + (__popc(mask(shared.ties, i)) << 16);
        const int2 sums = scan(own);
        int chosen = sums.x & 0xFFFF, equal = static_cast<unsigned>(sums.x) >> 16;
        for (int i = 0; i < words; i++)
            rank(mask(shared.above, i), mask(shared.ties, i), first + i * bits, chosen, equal, cut,
                 emit);
        return (sums.y & 0xFFFF) + cut.room;
    }

    // The same for keys in registers, quads of neighbours; a thread then takes COUNT neighbours.
    template <int COUNT, typename Emit>
    __device__ int list_held(const int (&keys)[COUNT], const Cut& cut, Emit emit) {
        auto* marks = reinterpret_cast<uint16_t*>(shared.keys);  // of eight places: ties above
#pragma unroll
        for (int t = 0; t < COUNT / 4; t++) {
            unsigned own = 0;
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int key = keys[4 * t + i];
                own |= key >= cut.cut ? 1u << i : key == cut.tie ? 256u << i : 0u;
            }
            own |= __shfl_xor_sync(~0u, own, 1) << 4;
            if (lane % 2 == 0) marks[(t * kThreads + threadIdx.x) / 2] = static_cast<uint16_t>(own);
        }
        __syncthreads();
        unsigned above = 0, ties = 0;
#pragma unroll
        for (int i = 0; i < (COUNT + 7) / 8; i++) {
            const unsigned mark = marks[threadIdx.x * COUNT / 8 + i];
            above |= (mark & 255) << (8 * i);
            ties |= mark >> 8 << (8 * i);
        }
        if (COUNT == 4) {
            above = above >> (threadIdx.x % 2 * 4) & 15;
            ties = ties >> (threadIdx.x % 2 * 4) & 15;
        }
        const int2 sums = scan(__popc(above) + (__popc(ties) << 16));
        int chosen = sums.x & 0xFFFF, equal = static_cast<unsigned>(sums.x) >> 16;
        rank(above, ties, threadIdx.x * COUNT, chosen, equal, cut, emit);
        return (sums.y & 0xFFFF) + cut.room;
    }

    // Add keys from a bound on to the list, as far as there is room; the whole warp calls.
    template <int COUNT>
    __device__ void push(const int (&keys)[COUNT], int place, int stride, int bound) {
        int own = 0;
#pragma unroll
        for (int i = 0; i < COUNT; i++) own += keys[i] >= bound;
        if (!__any_sync(~0u, own)) return;
        const int until = scan_warp(own);
        int to = 0;
        if (lane == 31) to = atomicAdd(&shared.count, until);
        to = __shfl_sync(~0u, to, 31) + until - own;
        if (own == 0) return;
#pragma unroll
        for (int i = 0; i < COUNT; i++) {
            if (keys[i] >= bound && to < Given::kListed) {
                shared.keys[to] = keys[i];
                shared.places[to] = static_cast<uint16_t>(place + i / 4 * stride + i % 4);
            }
            to += keys[i] >= bound;
        }
    }

    // Choose k of the entries from a bound on, which are listed; if too many, from each_of_all.
    template <typename Each, typename Emit>
    __device__ void choose(Each each_of_all, int bound, int most, int k, int places, Emit emit,
                           int64_t* out) {
        const int count = shared.count;
        auto finish = [&](auto each) {
            Cut cut = {bound, kNoTie, 0};
            if (count > k) cut = find(each, bound, most, k, false);
            const int total = list(each, cut, places, emit);
            for (int i = total + threadIdx.x; i < k; i += kThreads) out[i] = -1;
        };
        if (count > Given::kListed) {
            finish(each_of_all);
        } else {
            finish([&](auto take) {
                for (int i = threadIdx.x; i < count; i += kThreads)
                    take(shared.keys[i], shared.places[i]);
            });
        }
    }
};

// Choose from scores, or from groups by the best of each. A thread holds PER of them, in SUB parts.
template <int PER, int SUB, bool GROUPED>
__global__ void __launch_bounds__(kThreads, 1) choose(const Rows in, const float* best, int64_t* out) {
    using Given = std::conditional_t<SUB <= 2, Shared<2048, 65536>, Shared<4096, 32768>>;
    __shared__ Given shared;
    Chooser<Given> chooser(shared);
    chooser.clear();
    if (GROUPED) asm volatile("griddepcontrol.wait;" ::: "memory");
    const int64_t row = blockIdx.x;
    out += row * in.k;
    const float* values = in.scores + row * in.stride;
    const int seen = seen_of(in, row);
    const bool aligned = is_aligned(values);
    const float* held = GROUPED ? best + row * in.groups : values;
    const int held_until = GROUPED ? (seen + in.width - 1) >> in.shift : seen;
    const bool held_aligned = is_aligned(held);

    int keys[PER], parts[SUB], least = kNoTie, largest = kNone;
    float4 loaded[PER / 4];
#pragma unroll
    for (int t = 0; t < PER / 4; t++)
        loaded[t] = load_four(held, (t * kThreads + threadIdx.x) * 4, held_until, held_aligned);
#pragma unroll
    for (int t = 0; t < PER / 4; t++) {
        keys[4 * t] = ordered(loaded[t].x);
        keys[4 * t + 1] = ordered(loaded[t].y);
        keys[4 * t + 2] = ordered(loaded[t].z);
        keys[4 * t + 3] = ordered(loaded[t].w);
    }
#pragma unroll
    for (int s = 0; s < SUB; s++) {
        parts[s] = kNone;
#pragma unroll
        for (int i = 0; i < PER / SUB; i++) parts[s] = max(parts[s], keys[i * SUB + s]);
        if (parts[s] > kNone) least = min(least, parts[s]);
        largest = max(largest, parts[s]);
    }
    auto each_part = [&](auto take) {
#pragma unroll
        for (int s = 0; s < SUB; s++) take(parts[s], 0);
    };
    auto each_held = [&](auto take) {
#pragma unroll
        for (int i = 0; i < PER; i++)
            take(keys[i], (i / 4 * kThreads + threadIdx.x) * 4 + i % 4);
    };
    const int2 ends = chooser.least_and_largest(least, largest);
    const int most = ends.y;
    if (most == kNone) {  // nothing to choose
        for (int i = threadIdx.x; i < in.k; i += kThreads) out[i] = -1;
        return;
    }
    Cut cut = chooser.find(each_part, ends.x, most, in.k, true);
    if (cut.cut == ends.x) cut.cut = kNone + 1;  // perhaps fewer parts than k
    if constexpr (!GROUPED) {
        chooser.push(keys, threadIdx.x * 4, kThreads * 4, cut.cut);
        __syncthreads();
        chooser.choose(each_held, cut.cut, most, in.k, PER * kThreads,
                       [&](int rank, int place) { out[rank] = place; }, out);
    } else {
        const int room = Given::kPlaces >> in.shift;
        auto note = [&](int rank, int place) {
            if (rank < room) shared.groups[rank] = static_cast<uint16_t>(place);
        };
        int total;
        for (bool is_exact = false;; is_exact = true) {
            total = chooser.list_held(keys, cut, note);
            __syncthreads();
            if (total <= room || is_exact) break;
            cut = chooser.find(each_held, cut.cut, most, in.k, false);  // many are alike
        }
        const int bound = cut.room ? cut.tie : cut.cut;
        const int deep = in.shift - 2, quads = total << deep;
        auto four_of = [&](int quad) {
            if (quad >= quads) return load_four(values, 0, 0, false);
            const int at = (shared.groups[quad >> deep] << in.shift) + (quad & ((1 << deep) - 1)) * 4;
            return load_four(values, at, seen, aligned);
        };
        constexpr int kAtOnce = 3;
        for (int first = 0; first < quads; first += kAtOnce * kThreads) {
            float4 got[kAtOnce];
            int found[4 * kAtOnce];
#pragma unroll
            for (int i = 0; i < kAtOnce; i++) got[i] = four_of(first + i * kThreads + threadIdx.x);
#pragma unroll
            for (int i = 0; i < kAtOnce; i++) {
                found[4 * i] = ordered(got[i].x);
                found[4 * i + 1] = ordered(got[i].y);
                found[4 * i + 2] = ordered(got[i].z);
                found[4 * i + 3] = ordered(got[i].w);
            }
            chooser.push(found, (first + threadIdx.x) * 4, kThreads * 4, bound);
        }
        __syncthreads();
        auto each_read = [&](auto take) {
            for (int quad = threadIdx.x; quad < quads; quad += kThreads) {
                const float4 got = four_of(quad);
                take(ordered(got.x), quad * 4);
                take(ordered(got.y), quad * 4 + 1);
                take(ordered(got.z), quad * 4 + 2);
                take(ordered(got.w), quad * 4 + 3);
            }
        };
        chooser.choose(each_read, bound, most, in.k, quads * 4, [&](int rank, int place) {
            out[rank] = (shared.groups[place >> in.shift] << in.shift) + (place & (in.width - 1));
        }, out);
    }
}

template <bool GROUPED, int SUB>
cudaError_t choose_with(int per, int rows, cudaStream_t stream, const Rows& in, const float* best,
                        int64_t* out) {
    auto kernel = per <= 4    ? choose<4, SUB, GROUPED>
                  : per <= 8  ? choose<8, SUB, GROUPED>
                  : per <= 16 ? choose<16, SUB, GROUPED>
                              : choose<32, SUB, GROUPED>;
    cudaLaunchAttribute early = {};
    early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    early.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(rows);
    config.blockDim = dim3(kThreads);
    config.stream = stream;
    config.attrs = &early;
    config.numAttrs = GROUPED ? 1 : 0;
    return cudaLaunchKernelEx(&config, kernel, in, best, out);
}

template <int LOADS>
void group(int blocks, int parts, cudaStream_t stream, const Rows& in, float* best) {
    auto kernel = in.width == 16   ? best_of_groups<16, LOADS>
                  : in.width == 32 ? best_of_groups<32, LOADS>
                  : in.width == 64 ? best_of_groups<64, LOADS>
                                   : best_of_groups<128, LOADS>;
    kernel<<<blocks, kGroupThreads, 0, stream>>>(in, parts, best);
}

}  // namespace

// Choose k of each row: of at most 32 x 1024 scores, or of as many groups of `width` scores. With
// no loads the best of each group up to the last that is seen are there.
extern "C" int top_k_choose(const float* scores, const int64_t* visible, float* best, int64_t* out,
                            int64_t stride, int rows, int size, int k, int groups, int width,
                            int loads, void* on) {
    int shift = 0;
    while (1 << shift < width) shift++;
    const Rows in = {scores, visible, stride, size, k, groups, width, shift};
    const auto stream = static_cast<cudaStream_t>(on);
    if (width && loads) {
        const int piece = kGroupThreads * 4 * loads, parts = (size + piece - 1) / piece;
        if (loads == 4) {
            group<4>(rows * parts, parts, stream, in, best);
        } else {
            group<8>(rows * parts, parts, stream, in, best);
        }
    }
    const int held = width ? groups : size, per = (held + kThreads - 1) / kThreads;
    auto run = k <= kThreads / 2 ? (width ? choose_with<true, 1> : choose_with<false, 1>)
               : k <= kThreads   ? (width ? choose_with<true, 2> : choose_with<false, 2>)
                                 : (width ? choose_with<true, 4> : choose_with<false, 4>);
    const cudaError_t status = run(per, rows, stream, in, best, out);
    return static_cast<int>(status == cudaSuccess ? cudaGetLastError() : status);
}
