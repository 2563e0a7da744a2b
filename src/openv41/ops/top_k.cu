// The k best of each row, ids in ascending order, the lowest id first among equals.
//
// A block holds a chunk of a row in registers as integers that order like the scores, and halves an
// interval of scores until what lies above its middle is few enough; then it lists that in order by
// a prefix sum. A long row is thinned chunk by chunk to a superset of the choice, in order; the last
// block thins once more into shared memory and chooses there.

#include <cuda_runtime.h>

#include <cstdint>

namespace {

constexpr int kNone = -2139095041;     // of -inf; what lies below is never chosen
constexpr int kInfinity = 0x7F800000;  // of inf and NaN
constexpr int kNoTie = 0x7FFFFFFF;
constexpr int kLinearSteps = 10;  // halvings between numbers, then between integers
constexpr int kThinThreads = 256, kThinPer = 32, kLastThreads = 1024, kLast = 4096;

__device__ __forceinline__ int ordered(float x) {
    const int bits = __float_as_int(x + 0.0f);  // makes -0 and 0 one
    return min(bits ^ ((bits >> 31) & 0x7FFFFFFF), kInfinity);
}

__device__ __forceinline__ float unordered(int key) {
    return __int_as_float(key ^ ((key >> 31) & 0x7FFFFFFF));
}

struct Cut {
    int cut, tie, room;  // all from cut on, and the first `room` that equal tie
};

template <int THREADS, int PER>
struct Block {
    static constexpr int kWarps = THREADS / 32, kTurns = PER / 4, kCounts = kTurns * kWarps;
    int keys[PER];  // of entries turn * THREADS * 4 + thread * 4 + 0..3
    int* parts;     // 2 * 32, shared
    int* counts;    // kCounts + 1, shared
    int turn = 0;

    __device__ Block(int* shared) : parts(shared), counts(shared + 64) {}

    __device__ static int place_of(int turn, int j) {
        return turn * THREADS * 4 + threadIdx.x * 4 + j;
    }

    template <typename Reduce>
    __device__ int all(int own, int neutral, Reduce reduce) {
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        own = reduce(own);
        if (lane == 0) parts[turn * 32 + warp] = own;
        __syncthreads();
        const int part = lane < kWarps ? parts[turn * 32 + lane] : neutral;
        turn ^= 1;
        return reduce(part);
    }

    __device__ int sum(int own) {
        return all(own, 0, [](int x) { return __reduce_add_sync(~0u, x); });
    }

    __device__ int count_from(int bound) {
        int own = 0;
#pragma unroll
        for (int i = 0; i < PER; i++) own += keys[i] >= bound;
        return sum(own);
    }

    __device__ Cut search(int k, int most) {
        int least = kNoTie, largest = kNone;
#pragma unroll
        for (int i = 0; i < PER; i++) {
            if (keys[i] > kNone) least = min(least, keys[i]);
            if (keys[i] < kInfinity) largest = max(largest, keys[i]);
        }
        if (count_from(kNone + 1) <= most) return {kNone + 1, kNoTie, 0};
        int low = all(least, kNoTie, [](int x) { return __reduce_min_sync(~0u, x); });
        int high = all(largest, kNone, [](int x) { return __reduce_max_sync(~0u, x); }) + 1;
        int above = count_from(high);
        if (above >= k) {  // only infinities are chosen
            low = high;
            high = kInfinity + 1;
            above = 0;
        }
        for (int step = 0; high - 1 > low; step++) {
            int middle = (low & high) + ((low ^ high) >> 1);
            if (step < kLinearSteps) {
                const int guess = ordered(0.5f * unordered(low) + 0.5f * unordered(high));
                middle = min(max(guess, low + 1), high - 1);
            }
            const int count = count_from(middle);
            if (count >= k && count <= most) return {middle, kNoTie, 0};
            if (count > most) {
                low = middle;
            } else {
                high = middle;
                above = count;
            }
        }
        return {high, low, k - above};
    }

    // Call emit(place, entry, key) for each chosen entry; returns how many there are.
    template <typename Emit>
    __device__ int list(const Cut& cut, Emit emit) {
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        unsigned before[kTurns];  // chosen, and ties in the upper half
        __syncthreads();          // counts may be in use
#pragma unroll
        for (int t = 0; t < kTurns; t++) {
            unsigned own = 0;
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const int key = keys[4 * t + j];
                own += key >= cut.cut ? 1u : key == cut.tie ? 0x10000u : 0u;
            }
            unsigned total = own;
#pragma unroll
            for (int step = 1; step < 32; step *= 2) {
                const unsigned other = __shfl_up_sync(~0u, total, step);
                if (lane >= step) total += other;
            }
            before[t] = total - own;
            if (lane == 31) counts[t * kWarps + warp] = static_cast<int>(total);
        }
        __syncthreads();
        if (warp == 0) {
            constexpr int kEach = (kCounts + 31) / 32;
            unsigned held[kEach], total = 0;
#pragma unroll
            for (int i = 0; i < kEach; i++) {
                const int at = lane * kEach + i;
                held[i] = at < kCounts ? static_cast<unsigned>(counts[at]) : 0u;
                total += held[i];
            }
            unsigned running = total;
#pragma unroll
            for (int step = 1; step < 32; step *= 2) {
                const unsigned other = __shfl_up_sync(~0u, running, step);
                if (lane >= step) running += other;
            }
            if (lane == 31) counts[kCounts] = static_cast<int>(running);
            running -= total;
#pragma unroll
            for (int i = 0; i < kEach; i++) {
                const int at = lane * kEach + i;
                if (at < kCounts) counts[at] = static_cast<int>(running);
                running += held[i];
            }
        }
        __syncthreads();
#pragma unroll
        for (int t = 0; t < kTurns; t++) {
            const unsigned base = before[t] + static_cast<unsigned>(counts[t * kWarps + warp]);
            int chosen = base & 0xFFFF, ties = base >> 16;
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const int key = keys[4 * t + j];
                if (key >= cut.cut) {
                    emit(chosen + min(ties, cut.room), place_of(t, j), key);
                    chosen++;
                } else if (key == cut.tie) {
                    if (ties < cut.room) emit(chosen + ties, place_of(t, j), key);
                    ties++;
                }
            }
        }
        const unsigned whole = static_cast<unsigned>(counts[kCounts]);
        return (whole & 0xFFFF) + min(static_cast<int>(whole >> 16), cut.room);
    }

    // Entries first .. of a row of `size`; scores, or keys if they are integers already.
    template <typename T>
    __device__ void load(const T* row, int first, int size, bool aligned) {
#pragma unroll
        for (int t = 0; t < kTurns; t++) {
            const int at = first + place_of(t, 0);
            if (aligned && at + 3 < size) {
                const int4 four = *reinterpret_cast<const int4*>(row + at);
                const int bits[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
                for (int j = 0; j < 4; j++)
                    keys[4 * t + j] =
                        sizeof(T) == 4 && T(0.5) == T(0) ? bits[j] : ordered(__int_as_float(bits[j]));
            } else {
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    int key = kNone;
                    if (at + j < size) {
                        const T value = row[at + j];
                        key = T(0.5) == T(0) ? static_cast<int>(value)
                                             : ordered(static_cast<float>(value));
                    }
                    keys[4 * t + j] = key;
                }
            }
        }
    }
};

struct Rows {
    const void* values;  // float32 scores, or int32 keys where there are ids
    const int* ids;
    const int64_t* visible;
    int64_t stride;
    int size, k, most, chunks;
};

__device__ __forceinline__ int seen_of(const Rows& in, int64_t row) {
    if (in.visible == nullptr) return in.size;
    const int64_t seen = in.visible[row];
    return static_cast<int>(seen < in.size ? seen : in.size);
}

template <typename T>
__global__ void __launch_bounds__(kThinThreads) thin(const Rows in, int* out_keys, int* out_ids) {
    using Held = Block<kThinThreads, kThinPer>;
    __shared__ int shared[64 + Held::kCounts + 1];
    Held block(shared);
    const int64_t row = blockIdx.x / in.chunks;
    const int chunk = blockIdx.x % in.chunks, first = chunk * kThinThreads * kThinPer;
    const T* values = static_cast<const T*>(in.values) + row * in.stride;
    const bool aligned = (reinterpret_cast<uintptr_t>(values) & 15) == 0;
    block.load(values, first, seen_of(in, row), aligned);
    const Cut cut = block.search(in.k, in.most);
    const int64_t to = (row * in.chunks + chunk) * in.most;
    const int* ids = in.ids == nullptr ? nullptr : in.ids + row * in.stride;
    const int total = block.list(cut, [&](int place, int entry, int key) {
        out_keys[to + place] = key;
        out_ids[to + place] = ids == nullptr ? first + entry : ids[first + entry];
    });
    for (int i = total + threadIdx.x; i < in.most; i += kThinThreads) out_keys[to + i] = kNone;
}

template <typename T, int PER>
__global__ void __launch_bounds__(kLastThreads) choose(const Rows in, int64_t* out) {
    using Held = Block<kLastThreads, PER>;
    using Few = Block<kLastThreads, 4>;
    __shared__ int shared[64 + Held::kCounts + 1];
    __shared__ int few_keys[PER > 4 ? kLast : 1], few_places[PER > 4 ? kLast : 1];
    const int64_t row = blockIdx.x;
    const T* values = static_cast<const T*>(in.values) + row * in.stride;
    const bool aligned = (reinterpret_cast<uintptr_t>(values) & 15) == 0;
    Few last(shared);
    if constexpr (PER > 4) {
        Held block(shared);
        block.load(values, 0, seen_of(in, row), aligned);
        const Cut cut = block.search(in.k, kLast);
        const int total = block.list(cut, [&](int place, int entry, int key) {
            few_keys[place] = key;
            few_places[place] = entry;
        });
        __syncthreads();
        last.load(few_keys, 0, total, false);
        __syncthreads();  // all have read the counts
    } else {
        last.load(values, 0, seen_of(in, row), aligned);
    }
    const Cut cut = last.search(in.k, in.k);
    const int* ids = in.ids == nullptr ? nullptr : in.ids + row * in.stride;
    const int total = last.list(cut, [&](int place, int entry, int) {
        const int at = PER > 4 ? few_places[entry] : entry;
        out[row * in.k + place] = ids == nullptr ? at : ids[at];
    });
    for (int i = total + threadIdx.x; i < in.k; i += kLastThreads) out[row * in.k + i] = -1;
}

template <typename T>
void choose_with(int per, int rows, cudaStream_t stream, const Rows& in, int64_t* out) {
    if (per <= 4) {
        choose<T, 4><<<rows, kLastThreads, 0, stream>>>(in, out);
    } else if (per <= 8) {
        choose<T, 8><<<rows, kLastThreads, 0, stream>>>(in, out);
    } else if (per <= 16) {
        choose<T, 16><<<rows, kLastThreads, 0, stream>>>(in, out);
    } else {
        choose<T, 32><<<rows, kLastThreads, 0, stream>>>(in, out);
    }
}

}  // namespace

// Thin rows to `most` in each chunk of 8192; with ids, values are keys of an earlier thinning.
extern "C" int top_k_thin(const void* values, const int* ids, const int64_t* visible,
                          int64_t stride, int rows, int size, int k, int most, int chunks,
                          int* out_keys, int* out_ids, void* stream) {
    const Rows in = {values, ids, visible, stride, size, k, most, chunks};
    const auto on = static_cast<cudaStream_t>(stream);
    const unsigned blocks = static_cast<unsigned>(rows) * static_cast<unsigned>(chunks);
    if (ids == nullptr) {
        thin<float><<<blocks, kThinThreads, 0, on>>>(in, out_keys, out_ids);
    } else {
        thin<int><<<blocks, kThinThreads, 0, on>>>(in, out_keys, out_ids);
    }
    return static_cast<int>(cudaGetLastError());
}

// Choose from rows of at most 32,768.
extern "C" int top_k_choose(const void* values, const int* ids, const int64_t* visible,
                            int64_t stride, int rows, int size, int k, int64_t* out,
                            void* stream) {
    const Rows in = {values, ids, visible, stride, size, k, k, 1};
    const int per = (size + kLastThreads - 1) / kLastThreads;
    if (ids == nullptr) {
        choose_with<float>(per, rows, static_cast<cudaStream_t>(stream), in, out);
    } else {
        choose_with<int>(per, rows, static_cast<cudaStream_t>(stream), in, out);
    }
    return static_cast<int>(cudaGetLastError());
}
