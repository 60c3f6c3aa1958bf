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
// Variants of lf_lora_shrink (0: kDefault below):
//   direct     1: 1 direction a warp   2: 2   3: 4   4: 8   5: 1 direction a block of 4 warps   6: 4   7: 8
//   segmented 11: 8 directions a block of 8 warps   12: 16 of 8   13: 32 of 8   14: 8 of 4   15: 16 of 4   16: 8 of 16
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

// This warp's sums of 16 tokens (8 where kTall is false) by 8 kTiles directions from `first` on. Lanes past the last
// token or direction repeat it: the same bytes, and nobody uses what comes of them.
template <class T, int kTiles, int kWarps, bool kTall>
__device__ __forceinline__ void accumulate(float (&sum)[kTiles][4], const Operands<T>& in, const Slot& row, int rank,
                                           const Rows& rows, int first, int plane, int planes, uint4* ring) {
    constexpr int kDepth = kSteps<kTiles, kTall>, kLoads = kTiles + (kTall ? 2 : 1);
    const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, g = lane / 4, t = lane % 4;
    const T* from[kLoads];
    from[0] = in.x + rows.low * in.x_stride + 8 * t;
    if constexpr (kTall) from[kLoads - 1] = in.x + rows.high * in.x_stride + 8 * t;
#pragma unroll
    for (int j = 0; j < kTiles; ++j)
        from[1 + j] = in.a + row.a + int64_t(min(first + 8 * j + g, rank - 1)) * in.d_in + 8 * t;
    const int step = 64 * kWarps * planes, left = in.d_in - 8 * t;
    constexpr int kStep = 2 * kLoads * kWarp;  // of the ring, in uint4
    ring += lane;
    const unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(ring));
    const auto fetch = [&](int slot, int k) {
        if (k < in.d_in) {
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const int at = k + 32 * h;
#pragma unroll
                for (int i = 0; i < kLoads; ++i) {
                    const bool live = i < 2 || i > kTiles || first + 8 * (i - 1) < rank;
                    const unsigned to = address + (slot * kStep + (h * kLoads + i) * kWarp) * sizeof(uint4);
                    copy16(to, from[i] + at, live && at < left);
                }
            }
        }
        copies_commit();
    };
    int k = 64 * (warp + kWarps * plane), slot = 0;
#pragma unroll 1
    for (int u = 0; u < kDepth; ++u) fetch(u, k + u * step);
    float other[kTiles][4] = {};  // takes turns with `sum`, so that multiplications wait less for each other
#pragma unroll 1
    for (; k < in.d_in; k += step) {
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
        fetch(slot, k + kDepth * step);
        slot = slot + 1 == kDepth ? 0 : slot + 1;
    }
#pragma unroll
    for (int j = 0; j < kTiles; ++j)
#pragma unroll
        for (int i = 0; i < 4; ++i) sum[j][i] += other[j][i];
    copies_wait<0>();
}

// What one block of kWarps warps does of a segment and slice: every groups-th run of 8 kTiles directions from run
// `group` on, this plane's share of the input dimension. `shared`: kShared bytes.
template <class T, int kTiles, int kWarps>
__device__ __forceinline__ void work(const Operands<T>& in, const Rows& rows, const Slot& row, int slice, int group,
                                     int groups, int plane, int planes, uint4* shared) {
    constexpr int kWide = 8 * kTiles;
    const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, g = lane / 4, t = lane % 4;
    const int rank = in.rank(row);
    uint4* ring = shared + warp * kRing<kTiles>;
    for (int first = group * kWide; first < rank; first += groups * kWide) {
        float sum[kTiles][4] = {};
        if (rows.segment.rows > 8)
            accumulate<T, kTiles, kWarps, true>(sum, in, row, rank, rows, first, plane, planes, ring);
        else
            accumulate<T, kTiles, kWarps, false>(sum, in, row, rank, rows, first, plane, planes, ring);
        warp_sync();  // the warp's ring is empty: its sums, [16, kWide], go there
        float* mine = reinterpret_cast<float*>(ring) + g * kWide + 2 * t;
#pragma unroll
        for (int j = 0; j < kTiles; ++j) {
            *reinterpret_cast<float2*>(mine + 8 * j) = {sum[j][0], sum[j][1]};
            *reinterpret_cast<float2*>(mine + 8 * kWide + 8 * j) = {sum[j][2], sum[j][3]};
        }
        __syncthreads();
        for (int i = threadIdx.x; i < rows.segment.rows * kWide; i += kWarps * kWarp) {
            const int place = i / kWide, j = i % kWide;
            const int token = load_int(in.order + rows.segment.start + place);
            float all = 0;
#pragma unroll
            for (int w = 0; w < kWarps; ++w) all += reinterpret_cast<float*>(shared + w * kRing<kTiles>)[i];
            if (first + j < rank) in.z_row(plane, token, slice)[first + j] = all;
        }
        __syncthreads();
    }
}

// Grid: x covers segments * slices * groups, y the planes. The tests join everything that has been loaded by then, so
// that loads which do not depend on each other are not made to wait for each other.
template <class T, int kTiles, int kWarps>
__global__ void __launch_bounds__(kWarps * kWarp) segmented(const Operands<T> in, int groups) {
    LF_DYNAMIC_SHARED(uint4, shared);
    const int group = blockIdx.x % groups, slice = blockIdx.x / groups % in.slices;
    const int index = blockIdx.x / groups / in.slices;
    wait_for_previous();
    let_next_start();
    const int count = load_int(in.count);
    const Segment segment = load_segment(in.segments, index);
    if ((index >= count) | (segment.rows < 1)) return;
    const Rows rows = load_rows(in.order, segment);
    const Slot row = load_slot(in.table + int64_t(segment.slot) * in.slices + slice);
    if ((in.rank(row) <= 8 * kTiles * group) | ((rows.low | rows.high) < 0)) return;
    work<T, kTiles, kWarps>(in, rows, row, slice, group, groups, blockIdx.y, gridDim.y, shared);
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
