// The gated update of all streams, and its gradients, on Hopper: each is read and written once.
//
// A thread has eight channels of every stream. Blocks of threads stay and take token after token.
// Rows of a stream come by bulk copies into a ring; one thread asks for a step's when all have read
// the rows that stood there. A block sums the weights' gradients over its tokens, in their order.
//
// Bytes moved per token, of bf16: (3 N + 1) D forward, (5 N + 2) D backward. At 4.3 TB/s a stream
// of a token has 1,700 cycles of a processor, backward 3,000.

#include "hopper.cuh"

namespace {

constexpr int kStreams = 4, kValues = 2, kWidest = 5120;  // tokens whose values are held; D
constexpr float kLeast = 1e-6f;

struct Given {
    const uint8_t *x, *key, *value, *grad;
    const void *q_weight, *k_weight;
    const uint8_t* is_image;
    uint8_t *out, *to_key, *to_value;  // out: streams, or their gradients
    float* partial;                    // [blocks, N, D]
    int64_t key_stride, value_stride;  // bytes
    int tokens, dim, wide;             // wide: weights are float32
    float eps;
};

// Rows of a stream, and streams in the ring: as many as fit beside values and, backward, weights.
template <bool kBackward>
constexpr int kRows = kBackward ? 3 : 2;
template <bool kBackward>
constexpr int kStages = kBackward ? 4 : 8;

struct Shared {
    uint64_t full[8];
    float4 sums[2][32];
    alignas(128) uint8_t rows[];  // of the stages, then of values; then, backward, weights
};

template <bool kBackward>
constexpr int bytes_for(int dim) {
    const int rows = kStages<kBackward> * kRows<kBackward> + kValues;
    return sizeof(Shared) + rows * dim * 2 + (kBackward ? kStreams * dim * 4 : 0);
}

// Which row of the ring a token's value is.
template <bool kBackward>
__device__ __forceinline__ int value_at(uint32_t turn) {
    return kStages<kBackward> * kRows<kBackward> + turn % kValues;
}

__device__ __forceinline__ void expect(uint32_t barrier, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
                 : "memory");
}

__device__ __forceinline__ void copy_row(uint32_t to, const uint8_t* from, uint32_t bytes,
                                         uint32_t barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
        ::"r"(to), "l"(from), "r"(bytes), "r"(barrier)
        : "memory");
}

struct Eight {
    float x[8];
};

__device__ __forceinline__ float first_of(uint32_t pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float second_of(uint32_t pair) {
    return __uint_as_float(pair & 0xFFFF0000u);
}

__device__ __forceinline__ Eight widened(uint4 v) {
    return {{first_of(v.x), second_of(v.x), first_of(v.y), second_of(v.y), first_of(v.z),
             second_of(v.z), first_of(v.w), second_of(v.w)}};
}

__device__ __forceinline__ uint4 rounded(const Eight& v) {
    return make_uint4(pair_of(v.x[0], v.x[1]), pair_of(v.x[2], v.x[3]), pair_of(v.x[4], v.x[5]),
                      pair_of(v.x[6], v.x[7]));
}

__device__ __forceinline__ uint4 get(const uint8_t* at) {
    return *reinterpret_cast<const uint4*>(at);
}

__device__ __forceinline__ Eight get(const float* at) {
    const float4 a = reinterpret_cast<const float4*>(at)[0],
                 b = reinterpret_cast<const float4*>(at)[1];
    return {{a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w}};
}

__device__ __forceinline__ void put(uint8_t* at, uint4 x) { *reinterpret_cast<uint4*>(at) = x; }

__device__ __forceinline__ void put(float* at, const Eight& v) {
    reinterpret_cast<float4*>(at)[0] = make_float4(v.x[0], v.x[1], v.x[2], v.x[3]);
    reinterpret_cast<float4*>(at)[1] = make_float4(v.x[4], v.x[5], v.x[6], v.x[7]);
}

__device__ __forceinline__ Eight weight_at(const void* weights, int at, int wide) {
    if (!wide) return widened(get(static_cast<const uint8_t*>(weights) + 2 * at));
    return get(static_cast<const float*>(weights) + at);
}

// Product of both weights.
__device__ __forceinline__ Eight weights_at(const Given& in, int at) {
    Eight a = weight_at(in.q_weight, at, in.wide);
    const Eight b = weight_at(in.k_weight, at, in.wide);
#pragma unroll
    for (int i = 0; i < 8; i++) a.x[i] *= b.x[i];
    return a;
}

// Four sums over a warp: a lane gets one of them, over eight lanes, then over all.
__device__ __forceinline__ float4 over_warp(float4 v, int lane) {
    const bool odd = lane & 1, upper = lane & 2;
    float a = odd ? v.y : v.x, b = odd ? v.w : v.z;
    a += __shfl_xor_sync(~0u, odd ? v.x : v.y, 1);
    b += __shfl_xor_sync(~0u, odd ? v.z : v.w, 1);
    float c = upper ? b : a;
    c += __shfl_xor_sync(~0u, upper ? a : b, 2);
    c += __shfl_xor_sync(~0u, c, 4);
    c += __shfl_xor_sync(~0u, c, 8);
    c += __shfl_xor_sync(~0u, c, 16);
    return make_float4(__shfl_sync(~0u, c, 0), __shfl_sync(~0u, c, 1), __shfl_sync(~0u, c, 2),
                       __shfl_sync(~0u, c, 3));
}

// Sums over the warps of a block; buffers take turns, so that one meeting is enough.
__device__ __forceinline__ float4 over_block(float4 v, float4* buffer, int warp, int lane,
                                             int warps) {
    v = over_warp(v, lane);
    if (lane == 0) buffer[warp] = v;
    __syncthreads();
    const float4 none = make_float4(0.f, 0.f, 0.f, 0.f);
    return over_warp(lane < warps ? buffer[lane] : none, lane);
}

// Ask for the rows of a step: of one stream of a token, and the token's value with the first.
template <bool kBackward>
__device__ __forceinline__ void ask(const Given& in, Shared& shared, uint32_t step) {
    const int64_t t = blockIdx.x + static_cast<int64_t>(step / kStreams) * gridDim.x;
    if (t >= in.tokens) return;
    const uint32_t bytes = in.dim * 2, stream = step % kStreams, stage = step % kStages<kBackward>;
    const uint32_t barrier = shared_address(&shared.full[stage]);
    const uint32_t ring = shared_address(shared.rows), to = ring + stage * kRows<kBackward> * bytes;
    const int64_t at = (t * kStreams + stream) * bytes;
    expect(barrier, bytes * (kRows<kBackward> + (stream == 0)));
    copy_row(to, in.x + at, bytes, barrier);
    copy_row(to + bytes, in.key + t * in.key_stride + stream * bytes, bytes, barrier);
    if (kBackward) copy_row(to + 2 * bytes, in.grad + at, bytes, barrier);
    if (stream == 0)
        copy_row(ring + value_at<kBackward>(step / kStreams) * bytes,
                 in.value + t * in.value_stride, bytes, barrier);
}

struct Gate {
    float gate, dot, x_inverse, key_inverse;
};

__device__ __forceinline__ Gate gate_of(const Given& in, float4 sums) {
    const float each = 1.f / in.dim;
    const float x_inverse = rsqrtf(sums.x * each + in.eps);
    const float key_inverse = rsqrtf(sums.y * each + in.eps);
    const float dot = sums.z * (x_inverse * key_inverse) * rsqrtf(static_cast<float>(in.dim));
    const float root = sqrtf(fmaxf(fabsf(dot), kLeast));
    const float power = __expf(__float_as_int(dot) < 0 ? root : -root);
    return {1.f / (1.f + power), dot, x_inverse, key_inverse};
}

// Gradients of a thread's channels in a stream; what the block has of the weights' grows.
struct Slopes {
    float share, for_x, for_key, open;
};

__device__ __forceinline__ Slopes slopes_of(const Given& in, const Gate& gate, float by_gate,
                                            float passes) {
    const float size = fabsf(gate.dot), each = 1.f / in.dim;
    const float to_root = by_gate * gate.gate * (1.f - gate.gate) * passes;
    const float to_dot = size >= kLeast ? to_root / (2.f * sqrtf(fmaxf(size, kLeast))) : 0.f;
    const float inverse = gate.x_inverse * gate.key_inverse;
    return {to_dot * inverse * rsqrtf(static_cast<float>(in.dim)),
            to_dot * gate.dot * gate.x_inverse * gate.x_inverse * each,
            to_dot * gate.dot * gate.key_inverse * gate.key_inverse * each, gate.gate * passes};
}

__device__ __forceinline__ void put_gradients(const Given& in, const Slopes& by, const Eight& x,
                                              const Eight& key, const Eight& grad,
                                              const Eight& weight, Eight& for_weight,
                                              Eight& for_value, int64_t at) {
    Eight to_x, to_key;
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const float factor = by.share * weight.x[i];
        to_x.x[i] = grad.x[i] + factor * key.x[i] - by.for_x * x.x[i];
        to_key.x[i] = factor * x.x[i] - by.for_key * key.x[i];
        for_weight.x[i] += by.share * x.x[i] * key.x[i];
        for_value.x[i] += by.open * grad.x[i];
    }
    put(in.out + at, rounded(to_x));
    put(in.to_key + at, rounded(to_key));
}

// What a thread adds to the sums of a stream.
__device__ __forceinline__ float4 sums_of(const Eight& x, const Eight& key, const Eight& weight) {
    float4 sums = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
    for (int i = 0; i < 8; i++) {
        sums.x += x.x[i] * x.x[i];
        sums.y += key.x[i] * key.x[i];
        sums.z += x.x[i] * weight.x[i] * key.x[i];
    }
    return sums;
}

__device__ __forceinline__ float product_of(const Eight& a, const Eight& b) {
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < 8; i++) sum += a.x[i] * b.x[i];
    return sum;
}

// A thread's channels of all tokens of its block.
template <bool kBackward>
__device__ __forceinline__ void update(const Given& in, Shared& shared) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32;
    const int bytes = in.dim * 2, column = threadIdx.x * 8;
    const uint8_t* const own = shared.rows + threadIdx.x * 16;
    float* const weights = reinterpret_cast<float*>(shared.rows + value_at<kBackward>(0) * bytes +
                                                    kValues * bytes) + column;
    Eight weight[kStreams], for_weight[kBackward ? kStreams : 1] = {};
#pragma unroll
    for (int n = 0; n < kStreams; n++) {
        weight[n] = weights_at(in, n * in.dim + column);
        if (kBackward) put(weights + n * in.dim, weight[n]);  // registers do not hold these too
    }
    uint32_t step = 0, turn = 0;
    for (int64_t t = blockIdx.x; t < in.tokens; t += gridDim.x, turn++) {
        const float passes = in.is_image != nullptr && in.is_image[t] != 0 ? 0.f : 1.f;
        uint4 more = {};
        Eight for_value = {};
#pragma unroll
        for (int n = 0; n < kStreams; n++, step++) {
            const int stage = step % kStages<kBackward>, round = step / kStages<kBackward>;
            const uint8_t* const from = own + stage * kRows<kBackward> * bytes;
            wait(shared_address(&shared.full[stage]), round & 1);
            if (n == 0) more = get(own + value_at<kBackward>(turn) * bytes);
            if (kBackward) weight[n] = get(weights + n * in.dim);
            const uint4 row = get(from);
            float4 sums = sums_of(widened(row), widened(get(from + bytes)), weight[n]);
            if (kBackward) sums.w = product_of(widened(get(from + 2 * bytes)), widened(more));
            sums = over_block(sums, shared.sums[step % 2], warp, lane, warps);
            if (threadIdx.x == 0 && step >= kBackward)  // all have read these rows, or the last
                ask<kBackward>(in, shared, step - kBackward + kStages<kBackward>);
            const Gate gate = gate_of(in, sums);
            const int64_t at = (t * kStreams + n) * bytes + column * 2;
            if constexpr (kBackward) {
                put_gradients(in, slopes_of(in, gate, sums.w, passes), widened(get(from)),
                              widened(get(from + bytes)), widened(get(from + 2 * bytes)),
                              get(weights + n * in.dim), for_weight[n], for_value, at);
            } else {
                const float open = gate.gate * passes;
                Eight out = widened(row);
                const Eight value = widened(more);
#pragma unroll
                for (int i = 0; i < 8; i++) out.x[i] += open * value.x[i];
                put(in.out + at, rounded(out));
            }
        }
        if constexpr (kBackward) put(in.to_value + t * bytes + column * 2, rounded(for_value));
    }
    if constexpr (kBackward)
#pragma unroll
        for (int n = 0; n < kStreams; n++)
            put(in.partial + (static_cast<int64_t>(blockIdx.x) * kStreams + n) * in.dim + column,
                for_weight[n]);
}

template <bool kBackward>
__global__ void __launch_bounds__(kWidest / 8, 1)
    engram(const __grid_constant__ Given in) {
    Shared& shared = *reinterpret_cast<Shared*>(shared_memory);
    if (threadIdx.x == 0) {
        for (int i = 0; i < kStages<kBackward>; i++)
            init_barrier(shared_address(&shared.full[i]), 1);
        show_barriers();
        see_stores();
        for (int i = 0; i < kStages<kBackward>; i++) ask<kBackward>(in, shared, i);
    }
    __syncthreads();
    update<kBackward>(in, shared);
}

template <bool kBackward>
cudaError_t launch(const Given& in, int blocks, cudaStream_t stream) {
    const int bytes = bytes_for<kBackward>(in.dim);
    cudaFuncSetAttribute(engram<kBackward>, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    engram<kBackward><<<blocks, in.dim / 8, bytes, stream>>>(in);
    return cudaGetLastError();
}

}  // namespace

// Tensors: x, key, value, both weights, is_image or null, out; then, backward, the gradient of
// out, gradients of keys and values, and sums of each block for the weights'.
extern "C" int openv41_engram_update(void* const* tensors, const int64_t* sizes, float eps,
                                     void* stream) {
    Given in = {};
    in.x = static_cast<const uint8_t*>(tensors[0]);
    in.key = static_cast<const uint8_t*>(tensors[1]);
    in.value = static_cast<const uint8_t*>(tensors[2]);
    in.q_weight = tensors[3], in.k_weight = tensors[4];
    in.is_image = static_cast<const uint8_t*>(tensors[5]);
    in.out = static_cast<uint8_t*>(tensors[6]);
    in.grad = static_cast<const uint8_t*>(tensors[7]);
    in.to_key = static_cast<uint8_t*>(tensors[8]);
    in.to_value = static_cast<uint8_t*>(tensors[9]);
    in.partial = static_cast<float*>(tensors[10]);
    in.key_stride = sizes[0], in.value_stride = sizes[1];
    in.tokens = static_cast<int>(sizes[2]), in.dim = static_cast<int>(sizes[3]);
    in.wide = static_cast<int>(sizes[4]);
    in.eps = eps;
    const auto blocks = static_cast<int>(sizes[5]);
    const auto on = static_cast<cudaStream_t>(stream);
    return in.grad == nullptr ? launch<false>(in, blocks, on) : launch<true>(in, blocks, on);
}
