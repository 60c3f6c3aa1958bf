// Shrink for decode: Z[t, j] = <X[t, :], A[j, :]> over the live directions j of token t's adapter, FP32 sums.
//
// Two forms. `direct` gives a token and a few directions to a warp or a block (paper, section 5: one warp a token and a
// direction). `segmented` gives a segment (up to 16 tokens of one adapter) and 8 kTiles directions to a block, so that
// A is read once a segment: tensor cores multiply 16 tokens by 8 directions, and since a sum does not care about the
// order of its terms, the sixteen bytes that a lane loads of a row are four of its fragments as they are, without
// shuffles. Warps share the input dimension out and are added in a fixed order.
//
// Both end at the rank on the device before they read an operand. The grid covers directions with `groups` blocks that
// stride over them, so that a pool of capacity 128 costs few idle blocks. `planes` splits the input dimension over
// blocks too: each writes a plane of Z, which expand adds up.
//
// Blocks run ahead of the kernel before (programmatic dependent launch): a segmented one reads the plan, sends for A,
// and only then waits; it compares the plan afterwards and starts again in the rare case that it changed.
//
// Variants of lf_lora_shrink (0: kDefault below):
//   direct     1: a direction a warp (the paper's)   5: a direction a block of 4 warps   7: 8 a block of 4 warps
//   segmented 11: 8 directions a block of 8 warps   12: 16 of 8   14: 8 of 4   16: 8 of 16
#pragma once

#include "common.cuh"

namespace lf {
namespace lora {
namespace shrink {

template <class T>
struct Operands {
    const T* x;  // [tokens, x_stride]
    int64_t x_stride;
    const T* a;
    const Slot* table;  // [slots, slices]
    int slices, d_in;   // d_in a multiple of 8
    const int* token_slots;
    const int* order;
    const int* segments;
    const int* count;
    int tokens;
    float* z;  // [planes, tokens, slices, z_capacity]
    int z_capacity;

    __device__ __forceinline__ int rank(const Slot& row) const { return min(row.rank, z_capacity); }
    __device__ __forceinline__ float* z_row(int plane, int token, int slice) const {
        return z + ((int64_t(plane) * tokens + token) * slices + slice) * z_capacity;
    }
};

template <class T>
__device__ __forceinline__ float dot8(uint4 x, uint4 a, float sum) {
    const unsigned xs[4] = {x.x, x.y, x.z, x.w}, as[4] = {a.x, a.y, a.z, a.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const float2 u = unpack(xs[i], T{}), v = unpack(as[i], T{});
        sum = fmaf(u.x, v.x, sum);
        sum = fmaf(u.y, v.y, sum);
    }
    return sum;
}

// Warps of a block of the direct form whose work items have kSplit warps each.
template <int kSplit>
constexpr int kDirectWarps = kSplit == 1 ? 8 : kSplit;

// A work item is a token, a slice and every groups-th run of kDirections directions. It belongs to a warp, or to a
// block whose kSplit warps share the input dimension. Grid: x covers tokens * slices * groups items, y the planes.
template <class T, int kDirections, int kSplit>
__global__ void __launch_bounds__(kDirectWarps<kSplit> * kWarp) direct(const Operands<T> in, int groups) {
    constexpr int kUnroll = kDirections >= 8 ? 1 : kDirections == 4 ? 2 : 4;
    __shared__ float partial[kSplit][kDirections];
    const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
    const int item = kSplit == 1 ? blockIdx.x * kDirectWarps<1> + warp : blockIdx.x;
    const int group = item % groups, slice = item / groups % in.slices, token = item / groups / in.slices;
    wait_for_previous();
    let_next_start();
    if (token >= in.tokens) return;
    const int slot = load_int(in.token_slots + token);
    if (slot < 0) return;
    const Slot row = load_slot(in.table + int64_t(slot) * in.slices + slice);
    const int rank = in.rank(row), chunks = in.d_in / 8;
    const int first = (kSplit == 1 ? 0 : warp) + kSplit * blockIdx.y, step = kSplit * gridDim.y * kWarp;
    const uint4* x = reinterpret_cast<const uint4*>(in.x + token * in.x_stride);
    for (int j = group * kDirections; j < rank; j += groups * kDirections) {
        const uint4* a[kDirections];
        float sum[kDirections] = {};
#pragma unroll
        for (int i = 0; i < kDirections; ++i)
            a[i] = reinterpret_cast<const uint4*>(in.a + row.a + int64_t(min(j + i, rank - 1)) * in.d_in);
        for (int at = first * kWarp + lane; at < chunks; at += kUnroll * step) {
            uint4 xs[kUnroll], as[kUnroll][kDirections];
#pragma unroll
            for (int u = 0; u < kUnroll; ++u) {
                const int chunk = at + u * step;
                xs[u] = load16(x + chunk, chunk < chunks);
#pragma unroll
                for (int i = 0; i < kDirections; ++i) as[u][i] = load16(a[i] + chunk, chunk < chunks);
            }
#pragma unroll
            for (int u = 0; u < kUnroll; ++u)
#pragma unroll
                for (int i = 0; i < kDirections; ++i) sum[i] = dot8<T>(xs[u], as[u][i], sum[i]);
        }
        float mine = 0;
#pragma unroll
        for (int i = 0; i < kDirections; ++i) {
            const float all = warp_sum(sum[i]);
            if (lane == i) mine = all;
        }
        float* z = in.z_row(blockIdx.y, token, slice) + j;
        if constexpr (kSplit == 1) {
            if (lane < kDirections && j + lane < rank) z[lane] = mine;
        } else {
            if (lane < kDirections) partial[warp][lane] = mine;
            __syncthreads();
            if (warp == 0 && lane < kDirections && j + lane < rank) {
                float all = 0;
#pragma unroll
                for (int w = 0; w < kSplit; ++w) all += partial[w][lane];
                z[lane] = all;
            }
            __syncthreads();
        }
    }
}

#if !LF_HIP

// c [16 x 8] += a [16 x 16] b [16 x 8]; row g = lane / 4 and row g + 8, columns 2 (lane % 4) and the next.
template <class T>
__device__ __forceinline__ void multiply(float (&c)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0,
                                         unsigned b1) {
    if constexpr (std::is_same_v<T, bf16>)
        asm volatile(
            "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
            "{%0, %1, %2, %3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
    else
        asm volatile(
            "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
            "{%0, %1, %2, %3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// Copies 16 bytes to an address in shared memory in the background, zeros where not `wanted`.
__device__ __forceinline__ void copy16(unsigned to, const void* from, bool wanted) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(wanted ? 16 : 0) : "memory");
}

// A warp's ring in shared memory: a step is 64 elements of every row, in two halves, and a row's half is one load of 16
// bytes a lane. A lane copies what it will multiply itself, so the ring is an extension of its registers that needs no
// barrier: all it buys is loads in flight, more than registers could hold.
template <int kTiles>
constexpr int kSlots = kTiles == 1 ? 16 : 24;  // loads of the ring
template <int kTiles, bool kTall>
constexpr int kSteps = kSlots<kTiles> / (2 * (kTiles + (kTall ? 2 : 1)));
template <int kTiles>
constexpr int kRing = kSlots<kTiles> * kWarp;  // in uint4
template <int kTiles, int kWarps>
constexpr size_t kShared = size_t(kWarps) * kRing<kTiles> * sizeof(uint4);

// A segment as a lane sees it: its tokens g = lane / 4 and g + 8 of the segment, the last one where there are fewer.
struct Rows {
    Segment segment;
    int low, high;
};

__device__ __forceinline__ Rows load_rows(const int* order, const Segment& segment) {
    const int g = threadIdx.x % kWarp / 4, last = segment.rows - 1;
    const int low = load_int(order + segment.start + min(g, last));
    return {segment, low, load_int(order + segment.start + min(g + 8, last))};
}

// Whether the plan still says what this lane went by ahead of the wait.
template <class T>
__device__ __forceinline__ bool is_stale(const Operands<T>& in, const Rows& rows, int index) {
    const int count = load_int(in.count);
    const Segment now = load_segment(in.segments, index);
    const Rows again = load_rows(in.order, rows.segment);
    return (index >= count) | (now.start != rows.segment.start) | (now.rows != rows.segment.rows) |
           (now.slot != rows.segment.slot) | (again.low != rows.low) | (again.high != rows.high);
}

// A warp's way through its share of the input dimension, for 16 tokens (8 where kTall is false) by 8 kTiles directions
// from `first` on. Lanes past the last token or direction repeat it: the same bytes, of which nobody uses anything.
template <class T, int kTiles, int kWarps, bool kTall>
struct Stream {
    static constexpr int kDepth = kSteps<kTiles, kTall>, kLoads = kTiles + (kTall ? 2 : 1);
    static constexpr int kStep = 2 * kLoads * kWarp;  // of the ring, in uint4
    const T* from[kLoads];                            // x of the low tokens, A, x of the high ones
    const uint4* ring;
    unsigned address;
    int d_in, left, first, step, rank;
    int k;  // where the next step is

    __device__ __forceinline__ Stream(const Operands<T>& in, const Slot& row, const Rows& rows, int start, int plane,
                                      int planes, uint4* of_warp) {
        const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, g = lane / 4, t = lane % 4;
        rank = in.rank(row), d_in = in.d_in, left = in.d_in - 8 * t, first = start;
        from[0] = in.x + rows.low * in.x_stride + 8 * t;
        if constexpr (kTall) from[kLoads - 1] = in.x + rows.high * in.x_stride + 8 * t;
#pragma unroll
        for (int j = 0; j < kTiles; ++j)
            from[1 + j] = in.a + row.a + int64_t(min(first + 8 * j + g, rank - 1)) * in.d_in + 8 * t;
        step = 64 * kWarps * planes, k = 64 * (warp + kWarps * plane);
        ring = of_warp + lane;
        address = static_cast<unsigned>(__cvta_generic_to_shared(ring));
    }

    // Sends for 64 elements of A, or of X, at `at`.
    template <bool kWeights>
    __device__ __forceinline__ void fetch(int slot, int at) const {
        if (at >= d_in) return;
#pragma unroll
        for (int h = 0; h < 2; ++h)
#pragma unroll
            for (int i = 0; i < kLoads; ++i) {
                if ((i >= 1 && i <= kTiles) != kWeights) continue;
                const bool live = i < 2 || i > kTiles || first + 8 * (i - 1) < rank;
                const unsigned to = address + (slot * kStep + (h * kLoads + i) * kWarp) * sizeof(uint4);
                copy16(to, from[i] + at + 32 * h, live && at + 32 * h < left);
            }
    }

    // The first steps, as many as the ring holds: first A, which needs no wait, then X.
    __device__ __forceinline__ void begin_weights() const {
#pragma unroll 1
        for (int u = 0; u < kDepth; ++u) fetch<true>(u, k + u * step);
    }

    __device__ __forceinline__ void begin_inputs() const {
#pragma unroll 1
        for (int u = 0; u < kDepth; ++u) {
            fetch<false>(u, k + u * step);
            copies_commit();
        }
    }

    __device__ __forceinline__ void run(float (&sum)[kTiles][4]) {
        float other[kTiles][4] = {};  // takes turns with `sum`, so that multiplications wait less for each other
        int slot = 0;
#pragma unroll 1
        for (; k < d_in; k += step) {
            copies_wait<kDepth - 1>();
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const uint4* here = ring + slot * kStep + h * kLoads * kWarp;
                const uint4 low = here[0], high = kTall ? here[(kLoads - 1) * kWarp] : uint4{};
#pragma unroll
                for (int j = 0; j < kTiles; ++j) {
                    const uint4 b = here[(1 + j) * kWarp];
                    multiply<T>(sum[j], low.x, high.x, low.y, high.y, b.x, b.y);
                    multiply<T>(other[j], low.z, high.z, low.w, high.w, b.z, b.w);
                }
            }
            fetch<false>(slot, k + kDepth * step);
            fetch<true>(slot, k + kDepth * step);
            copies_commit();
            slot = slot + 1 == kDepth ? 0 : slot + 1;
        }
#pragma unroll
        for (int j = 0; j < kTiles; ++j)
#pragma unroll
            for (int i = 0; i < 4; ++i) sum[j][i] += other[j][i];
        copies_wait<0>();
    }
};

// What one block of kWarps warps does of a segment and slice: every groups-th run of 8 kTiles directions from run
// `group` on, this plane's share of the input dimension. `shared`: kShared bytes. Where the block is `ahead` of the
// kernel before, waits for it once A is on its way; false if the plan turns out to be another.
template <class T, int kTiles, int kWarps, bool kTall>
__device__ __forceinline__ bool work(const Operands<T>& in, const Rows& rows, const Slot& row, int index, int slice,
                                     int group, int groups, bool ahead, uint4* shared) {
    constexpr int kWide = 8 * kTiles;
    const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, g = lane / 4, t = lane % 4;
    const int rank = in.rank(row);
    uint4* ring = shared + warp * kRing<kTiles>;
#pragma unroll 1
    for (int first = group * kWide; first < rank; first += groups * kWide) {
        Stream<T, kTiles, kWarps, kTall> stream(in, row, rows, first, blockIdx.y, gridDim.y, ring);
        stream.begin_weights();
        if (ahead) {
            wait_for_previous();
            let_next_start();
        }
        stream.begin_inputs();
        if (ahead && __syncthreads_or(is_stale(in, rows, index))) {
            copies_wait<0>();
            return false;
        }
        ahead = false;
        float sum[kTiles][4] = {};
        stream.run(sum);
        warp_sync();  // the warp's ring is empty: its sums, [16, kWide], go there
        float* mine = reinterpret_cast<float*>(ring) + g * kWide + 2 * t;
#pragma unroll
        for (int j = 0; j < kTiles; ++j) {
            *reinterpret_cast<float2*>(mine + 8 * j) = {sum[j][0], sum[j][1]};
            *reinterpret_cast<float2*>(mine + 8 * kWide + 8 * j) = {sum[j][2], sum[j][3]};
        }
        __syncthreads();
        for (int base = warp * kWarp; base < rows.segment.rows * kWide; base += kWarps * kWarp) {
            const int i = base + lane, place = i / kWide, j = i % kWide;
            const int low = shuffle(rows.low, 4 * (place & 7)), high = shuffle(rows.high, 4 * (place & 7));
            float all = 0;
#pragma unroll
            for (int w = 0; w < kWarps; ++w) all += reinterpret_cast<float*>(shared + w * kRing<kTiles>)[i];
            if (place < rows.segment.rows && first + j < rank)
                in.z_row(blockIdx.y, place < 8 ? low : high, slice)[first + j] = all;
        }
        __syncthreads();
    }
    return true;
}

// Grid: x covers segments * slices * groups, y the planes.
template <class T, int kTiles, int kWarps>
__global__ void __launch_bounds__(kWarps * kWarp) segmented(const Operands<T> in, int groups) {
    LF_DYNAMIC_SHARED(uint4, shared);
    __shared__ int4 seen;
    const int group = blockIdx.x % groups, slice = blockIdx.x / groups % in.slices;
    const int index = blockIdx.x / groups / in.slices;
    bool ahead = true;
    for (;;) {
        if (threadIdx.x == 0) {  // one thread reads, so that all go by the same although it may be changing
            const int count = load_int(in.count);
            int4 words = load_words(reinterpret_cast<const int4*>(in.segments) + index);
            if (index >= count || words.x < 0 || words.y > kTile || words.x + words.y > in.tokens) words.y = 0;
            seen = words;
        }
        __syncthreads();
        const Segment segment{seen.x, seen.y, seen.z, 0};
        bool live = segment.rows > 0;
        if (live) {
            Rows rows = load_rows(in.order, segment);
            const Slot row = load_slot(in.table + int64_t(segment.slot) * in.slices + slice);
            const auto clamp = [&](int token) { return token >= 0 && token < in.tokens ? token : 0; };
            rows.low = clamp(rows.low), rows.high = clamp(rows.high);
            live = in.rank(row) > 8 * kTiles * group;
            if (live) {
                const bool done = segment.rows > 8 ? work<T, kTiles, kWarps, true>(in, rows, row, index, slice, group,
                                                                                   groups, ahead, shared)
                                                   : work<T, kTiles, kWarps, false>(in, rows, row, index, slice, group,
                                                                                    groups, ahead, shared);
                if (done) return;
            }
        }
        if (!ahead) return;
        if (!live) {
            wait_for_previous();
            let_next_start();
        }
        ahead = false;
        __syncthreads();
    }
}

#endif

// Blocks that stride over the directions of one of `items` work items: enough of them to fill the device twice where
// there are few items, and no more, since those past the rank only come and go.
inline int choose_groups(int64_t items, int capacity, int directions) {
    const int most = (capacity + directions - 1) / directions;
    const int64_t wanted = (2 * int64_t(processors()) + items - 1) / items;
    return static_cast<int>(wanted < most ? wanted : most);
}

}  // namespace shrink
}  // namespace lora
}  // namespace lf
