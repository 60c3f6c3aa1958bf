// FlashTSQR: FP32 Householder QR of many tall, narrow matrices by a tree of row tiles.
//
// A matrix of d rows and r columns is cut into leaves of 256 rows. A leaf is factored in registers; each merge
// factors two stacked triangles; all reflectors stay in the workspace, so Q is applied without being formed.
//
// Thread map, the same in every kernel of the narrow path (r <= 128). A half-warp of 16 lanes holds four
// adjacent columns (a group). Lane `part` of it holds, in stripe q of 64 rows, the four adjacent rows
// 64 q + 4 part + {0,1,2,3}: a 4 x 4 block whose block row is 16 q + part. So 16-byte accesses are
// contiguous along columns, a column sum is four shuffles, and row j of a panel sits at a position known at
// compile time within its block. Reflectors are made four at a time by the half-warp that owns the panel
// (no block barrier inside) and applied to the columns on its right in compact WY form, I - V T V^T:
// one barrier a panel.
//
// Triangles and coefficients travel between kernels as 4 x 4 blocks, column-major inside a block.
#pragma once

#include <cstring>

#include "loraforge/portable.cuh"

namespace lf {
namespace tsqr {

constexpr int kPanel = 4;                          // columns of a group, reflectors of a panel
constexpr int kBlock = kPanel * kPanel;            // elements of a 4 x 4 block
constexpr int kParts = 16;                         // lanes of a group
constexpr int kLeafStripes = 4;                    // stripes of 64 rows in a leaf
constexpr int kLeafRows = kLeafStripes * 64;       // rows of a leaf, at least the largest r
constexpr int kMaxNarrowRank = 128;                // above it, tiles live in global memory
constexpr int kMaxThreads = kMaxNarrowRank / kPanel * kParts;
constexpr int kStages = 3;                         // panels in flight while a leaf is applied
constexpr int kWideThreads = 512;
constexpr int kMaxWideRank = 5120;                 // one column of a wide tile fits in 48 KB of shared memory

// Squared norms outside this range are computed again from a scaled column, so that neither their underflow
// nor their overflow can make a reflector that is not orthogonal. The scales are powers of two, thus exact.
constexpr float kSmallSquare = 1e-28f;
constexpr float kLargeSquare = 1e36f;
constexpr float kScaleUp = 1.2676506002282294e30f;    // 2^100
constexpr float kScaleDown = 7.888609052210118e-31f;  // 2^-100

// Where everything lies in the workspace of m matrices; all counts are of floats.
struct Plan {
    int64_t m;
    int d, r;
    int panels;  // ceil(r / 4)
    int leaves;
    float* leaf_v;   // [m, leaves, 4 panels, 256]: reflectors with their unit and their zeros
    float* leaf_t;   // [m, leaves, panels, 4, 4]: T of each panel, row-major
    float* merge_v;  // [m, leaves - 1, triangle]: panel j holds 4 columns of j + 1 blocks of four rows
    float* merge_t;  // [m, leaves - 1, panels, 4, 4]
    float* slots;    // [m, leaves, panels, panels, 16]: triangles while factoring, coefficients while applying

    __host__ __device__ int64_t leaf_size() const { return int64_t{panels} * kPanel * kLeafRows; }
    __host__ __device__ int64_t t_size() const { return int64_t{panels} * kBlock; }
    __host__ __device__ int64_t triangle() const { return int64_t{panels} * (panels + 1) / 2 * kBlock; }
    __host__ __device__ int64_t slot_size() const { return int64_t{panels} * panels * kBlock; }
};

// Block (row, column) of a packed triangle: the blocks of one block column are adjacent.
__device__ __forceinline__ int64_t triangle_block(int row, int column) {
    return (int64_t{column} * (column + 1) / 2 + row) * kBlock;
}

struct Place {
    int lane, warp, part, group;
    __device__ Place() {
        lane = threadIdx.x % kWarp;
        warp = threadIdx.x / kWarp;
        part = lane % kParts;
        group = threadIdx.x / kParts;
    }
};

__device__ __forceinline__ float4 read4(const float* from) { return *reinterpret_cast<const float4*>(from); }
__device__ __forceinline__ void write4(float* to, float a, float b, float c, float d) {
    *reinterpret_cast<float4*>(to) = make_float4(a, b, c, d);
}

// Four adjacent elements: 16 bytes of float, 8 of the two-byte types.
__device__ __forceinline__ void load4(const float* from, float (&to)[4]) {
    const float4 raw = read4(from);
    to[0] = raw.x, to[1] = raw.y, to[2] = raw.z, to[3] = raw.w;
}
template <class T>
__device__ __forceinline__ void load4(const T* from, float (&to)[4]) {
    const uint2 raw = *reinterpret_cast<const uint2*>(from);
    T element[4];
    static_assert(sizeof(element) == sizeof(raw), "two-byte elements");
    memcpy(element, &raw, sizeof(raw));
#pragma unroll
    for (int i = 0; i < 4; ++i) to[i] = to_float(element[i]);
}

// Rows first.. of a tall matrix (d x r, or its transpose in memory) into registers; zero outside. `aligned` says
// that the extent that is contiguous in memory is a multiple of four and the base aligned for load4.
template <int kLayout, class T>
__device__ __forceinline__ void load_leaf(const T* x, int d, int r, bool aligned, int64_t first, const Place& at,
                                          float (&a)[4 * kLeafStripes][kPanel]) {
    const int column = at.group * kPanel;
#pragma unroll
    for (int q = 0; q < kLeafStripes; ++q) {
        const int64_t row = first + q * 64 + at.part * 4;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            // i counts rows of a tall matrix and columns of a wide one; four elements are contiguous across it.
            float four[4] = {0.f, 0.f, 0.f, 0.f};
            if (kLayout == kTall) {
                const T* from = x + (row + i) * r + column;
                if (row + i < d) {
                    if (aligned) {
                        if (column < r) load4(from, four);
                    } else {
#pragma unroll
                        for (int c = 0; c < 4; ++c)
                            if (column + c < r) four[c] = to_float(from[c]);
                    }
                }
            } else {
                const T* from = x + int64_t{column + i} * d + row;
                if (column + i < r) {
                    if (aligned) {
                        if (row < d) load4(from, four);
                    } else {
#pragma unroll
                        for (int e = 0; e < 4; ++e)
                            if (row + e < d) four[e] = to_float(from[e]);
                    }
                }
            }
#pragma unroll
            for (int n = 0; n < 4; ++n) {
                if (kLayout == kTall)
                    a[q * 4 + i][n] = four[n];
                else
                    a[q * 4 + n][i] = four[n];
            }
        }
    }
}

// The reverse of load_leaf, in FP32.
template <int kLayout>
__device__ __forceinline__ void store_leaf(float* y, int d, int k, bool aligned, int64_t first, const Place& at,
                                           const float (&a)[4 * kLeafStripes][kPanel]) {
    const int column = at.group * kPanel;
#pragma unroll
    for (int q = 0; q < kLeafStripes; ++q) {
        const int64_t row = first + q * 64 + at.part * 4;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            float four[4];
#pragma unroll
            for (int n = 0; n < 4; ++n) four[n] = kLayout == kTall ? a[q * 4 + i][n] : a[q * 4 + n][i];
            const int64_t outer = kLayout == kTall ? row + i : column + i;
            const int64_t inner = kLayout == kTall ? column : row;
            const int outer_size = kLayout == kTall ? d : k;
            const int inner_size = kLayout == kTall ? k : d;
            if (outer >= outer_size) continue;
            float* to = y + outer * inner_size + inner;
            if (aligned) {
                if (inner < inner_size) write4(to, four[0], four[1], four[2], four[3]);
            } else {
#pragma unroll
                for (int n = 0; n < 4; ++n)
                    if (inner + n < inner_size) to[n] = four[n];
            }
        }
    }
}

// Sums sixteen values over the sixteen lanes of a group; lane `part` gets sum `part`. 15 shuffles, not 64.
template <int kHalf = kBlock / 2>
__device__ __forceinline__ float reduce16(float (&value)[kBlock], int part) {
    const bool upper = part & kHalf;
#pragma unroll
    for (int i = 0; i < kHalf; ++i) {
        const float keep = upper ? value[i + kHalf] : value[i];
        const float send = upper ? value[i] : value[i + kHalf];
        value[i] = keep + shuffle_xor(send, kHalf);
    }
    if constexpr (kHalf > 1)
        return reduce16<kHalf / 2>(value, part);
    else
        return value[0];
}

// Sums four values over a group; every lane gets all four. Butterflies: the shortest chain.
__device__ __forceinline__ void reduce4(float (&value)[kPanel]) {
#pragma unroll
    for (int mask = kParts / 2; mask > 0; mask /= 2) {
#pragma unroll
        for (int c = 0; c < kPanel; ++c) value[c] += shuffle_xor(value[c], mask);
    }
}

// One panel's reflectors in shared memory while the trailing columns are updated.
template <int kStripes>
struct PanelBuffer {
    float4 v[kPanel][kStripes * kParts];  // four rows each
    float4 t[kPanel];                     // column kk of T
};

// Factors the four columns of the panel's owner in place. Leaf: row j of panel `panel` lies in the tile, rows
// above it are finished. Merge: the tile is the lower triangle's; row j is the upper triangle's, one element
// a lane in `top`, and rows of the tile below the diagonal are zero and stay so. All lanes of the warp run this; only those
// with `owner` change anything. v_global: the panel's columns, `v_stride` floats apart.
template <int kStripes, bool kMerge>
__device__ __forceinline__ void factor_panel(float (&a)[4 * kStripes][kPanel], float& top, int panel, bool owner,
                                             const Place& at, PanelBuffer<kStripes>& buffer, float* v_global,
                                             int v_stride, float* t_global) {
    const int base = at.lane - at.part;
    float t[kPanel][kPanel];
#pragma unroll
    for (int k = 0; k < kPanel; ++k) {
        float row[kPanel];  // row j across the panel: finished reflectors, diagonal, trailing columns
#pragma unroll
        for (int c = 0; c < kPanel; ++c) {
            if (kMerge) {
                row[c] = c >= k ? shuffle(top, base + c * 4 + k) : 0.f;
            } else {
                // Panels 0..15 have their rows in stripe 0, panels 16..31 in stripe 1.
                const float here = panel >= kParts ? a[(kStripes > 1 ? 4 : 0) + k][c] : a[k][c];
                row[c] = shuffle(here, base + panel % kParts);
            }
        }
        float x[4 * kStripes];  // the column below row j
#pragma unroll
        for (int q = 0; q < kStripes; ++q) {
            const int block = q * kParts + at.part;
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const bool below = kMerge || block > panel || (block == panel && e > k);
                x[q * 4 + e] = below ? a[q * 4 + e][k] : 0.f;
            }
        }
        float sum[kPanel];
        auto sums = [&] {
#pragma unroll
            for (int c = 0; c < kPanel; ++c) {
                sum[c] = 0.f;
#pragma unroll
                for (int i = 0; i < 4 * kStripes; ++i) sum[c] = fmaf(x[i], c == k ? x[i] : a[i][c], sum[c]);
            }
            reduce4(sum);
        };
        sums();
        float alpha = row[k];
        float square = fmaf(alpha, alpha, sum[k]);
        float unscale = 1.f;
        const bool extreme = owner && !(square >= kSmallSquare && square <= kLargeSquare);
        if (warp_any(extreme)) {
            const bool small = square < kSmallSquare;
            const float scale = extreme ? (small ? kScaleUp : kScaleDown) : 1.f;
            unscale = extreme ? (small ? kScaleDown : kScaleUp) : 1.f;
            alpha *= scale;
#pragma unroll
            for (int i = 0; i < 4 * kStripes; ++i) x[i] *= scale;
            sums();
            square = fmaf(alpha, alpha, sum[k]);
        }
        // H = I - tau v v^T with v_j = 1 maps the column to beta e_j; beta has the sign that cannot cancel.
        const bool reflects = owner && sum[k] != 0.f;
        const float beta = reflects ? -copysignf(sqrtf(square), alpha) : alpha;
        const float inverse = reflects ? 1.f / (alpha - beta) : 0.f;
        const float tau = reflects ? (beta - alpha) / beta : 0.f;
        const float diagonal = beta * unscale;

        float w[kPanel];  // inner products of v with the panel's columns
#pragma unroll
        for (int c = 0; c < kPanel; ++c) w[c] = fmaf(inverse, sum[c], row[c]);
        float weight[kPanel];  // zero, not zero times infinity, where there is no reflection
#pragma unroll
        for (int c = 0; c < kPanel; ++c) weight[c] = reflects ? tau * w[c] : 0.f;
        t[k][k] = tau;
#pragma unroll
        for (int l = 0; l < k; ++l) {
            float dot = 0.f;
#pragma unroll
            for (int n = l; n < k; ++n) dot = fmaf(t[l][n], w[n], dot);
            t[l][k] = -tau * dot;
        }
#pragma unroll
        for (int q = 0; q < kStripes; ++q) {
            const bool diagonal_block = !kMerge && q * kParts + at.part == panel;
            const bool below_block = kMerge || q * kParts + at.part > panel;
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const int i = q * 4 + e;
                x[i] *= inverse;
                if (e == k && diagonal_block) x[i] = 1.f;
#pragma unroll
                for (int c = k + 1; c < kPanel; ++c) a[i][c] = fmaf(-x[i], weight[c], a[i][c]);
                if (owner) {
                    if (below_block || (diagonal_block && e > k)) a[i][k] = x[i];
                    if (e == k && diagonal_block) a[i][k] = diagonal;
                }
            }
            if (owner) {
                const int block = q * kParts + at.part;
                buffer.v[k][block] = make_float4(x[q * 4], x[q * 4 + 1], x[q * 4 + 2], x[q * 4 + 3]);
                if (!kMerge || block <= panel)
                    write4(v_global + int64_t{k} * v_stride + block * 4, x[q * 4], x[q * 4 + 1], x[q * 4 + 2],
                           x[q * 4 + 3]);
            }
        }
        if (kMerge) {
#pragma unroll
            for (int c = k; c < kPanel; ++c)
                if (owner && at.part == c * 4 + k) top = c == k ? diagonal : row[c] - weight[c];
        }
    }
    float mine = 0.f;
#pragma unroll
    for (int i = 0; i < kPanel; ++i) {
#pragma unroll
        for (int l = i; l < kPanel; ++l)
            if (at.part == i * 4 + l) mine = t[i][l];
    }
    if (owner) {
        reinterpret_cast<float*>(buffer.t)[(at.part % 4) * 4 + at.part / 4] = mine;
        t_global[at.part] = mine;
    }
}

// a -= V op(T) V^T a for this warp's columns, with `top` the part of V^T a that comes from rows outside the tile
// (which it also updates). v(q, kk): four rows of reflector kk; t: row kk = part % 4 of op(T).
// Groups that are not `active` stay as they are. scratch: 32 floats of this warp, not those of the last call.
template <int kStripes, bool kMerge, class V>
__device__ __forceinline__ void apply_panel(float (&a)[4 * kStripes][kPanel], float& top, bool active,
                                            const Place& at, float* scratch, const float4& t, V&& v) {
    float p[kBlock] = {};
#pragma unroll
    for (int q = 0; q < kStripes; ++q) {
#pragma unroll
        for (int k = 0; k < kPanel; ++k) {
            const float4 four = v(q, k);
#pragma unroll
            for (int c = 0; c < kPanel; ++c) {
                float& sum = p[c * 4 + k];
                sum = fmaf(four.x, a[q * 4 + 0][c], sum);
                sum = fmaf(four.y, a[q * 4 + 1][c], sum);
                sum = fmaf(four.z, a[q * 4 + 2][c], sum);
                sum = fmaf(four.w, a[q * 4 + 3][c], sum);
            }
        }
    }
    float mine = reduce16(p, at.part);
    if (kMerge) mine += top;
    const int quad = at.lane & ~3;
    float w = t.x * shuffle(mine, quad);
    w = fmaf(t.y, shuffle(mine, quad + 1), w);
    w = fmaf(t.z, shuffle(mine, quad + 2), w);
    w = fmaf(t.w, shuffle(mine, quad + 3), w);
    if (!active) w = 0.f;
    if (kMerge) top -= w;
    scratch[at.lane] = w;
    warp_sync();
    float4 weights[kPanel];
#pragma unroll
    for (int c = 0; c < kPanel; ++c) weights[c] = read4(scratch + at.lane - at.part + c * 4);
#pragma unroll
    for (int q = 0; q < kStripes; ++q) {
        float4 four[kPanel];
#pragma unroll
        for (int k = 0; k < kPanel; ++k) four[k] = v(q, k);
#pragma unroll
        for (int c = 0; c < kPanel; ++c) {
            const float u[kPanel] = {-weights[c].x, -weights[c].y, -weights[c].z, -weights[c].w};
#pragma unroll
            for (int k = 0; k < kPanel; ++k) {
                a[q * 4 + 0][c] = fmaf(four[k].x, u[k], a[q * 4 + 0][c]);
                a[q * 4 + 1][c] = fmaf(four[k].y, u[k], a[q * 4 + 1][c]);
                a[q * 4 + 2][c] = fmaf(four[k].z, u[k], a[q * 4 + 2][c]);
                a[q * 4 + 3][c] = fmaf(four[k].w, u[k], a[q * 4 + 3][c]);
            }
        }
    }
}

// One block a leaf: QR of 256 rows in registers, reflectors to the workspace, R to the leaf's slot.
template <int kLayout, class T>
__global__ void __launch_bounds__(kMaxThreads, 1) leaf_factor(const T* x, Plan plan, bool aligned) {
    __shared__ PanelBuffer<kLeafStripes> buffers[2];
    __shared__ float4 scratch[kMaxThreads / kWarp][2][kWarp / 4];
    const Place at;
    const int64_t node = blockIdx.x;
    const int64_t matrix = blockIdx.x / static_cast<unsigned>(plan.leaves);
    const int leaf = static_cast<int>(blockIdx.x % static_cast<unsigned>(plan.leaves));
    float a[4 * kLeafStripes][kPanel];
    load_leaf<kLayout>(x + matrix * plan.d * plan.r, plan.d, plan.r, aligned, int64_t{leaf} * kLeafRows, at, a);
    float* v = plan.leaf_v + node * plan.leaf_size();
    float* t = plan.leaf_t + node * plan.t_size();
    float none = 0.f;
#pragma unroll 1
    for (int panel = 0; panel < plan.panels; ++panel) {
        PanelBuffer<kLeafStripes>& buffer = buffers[panel % 2];
        if (at.warp == panel / 2)
            factor_panel<kLeafStripes, false>(a, none, panel, at.group == panel, at, buffer,
                                              v + int64_t{panel} * kPanel * kLeafRows, kLeafRows, t + panel * kBlock);
        __syncthreads();
        if (at.warp * 2 + 1 > panel)
            apply_panel<kLeafStripes, false>(
                a, none, at.group > panel, at, reinterpret_cast<float*>(scratch[at.warp][panel % 2]),
                buffer.t[at.part % 4], [&](int q, int k) { return buffer.v[k][q * kParts + at.part]; });
    }
    float* slot = plan.slots + node * plan.slot_size();
#pragma unroll
    for (int q = 0; q < 2; ++q) {
        const int block = q * kParts + at.part;
        if (block > at.group || at.group >= plan.panels) continue;
        float* to = slot + triangle_block(block, at.group);
#pragma unroll
        for (int c = 0; c < kPanel; ++c) {
            float four[4];
#pragma unroll
            for (int e = 0; e < 4; ++e) four[e] = block == at.group && e > c ? 0.f : a[q * 4 + e][c];
            write4(to + c * 4, four[0], four[1], four[2], four[3]);
        }
    }
}

// One tree level: block i of a matrix factors the triangles of slots 2i and 2i + 1 (in steps of 1 << level),
// reads the upper one as it goes and leaves the result in its slot. first: merges of the levels below.
template <int kStripes>
__global__ void __launch_bounds__(kStripes * 256, 4 / kStripes / kStripes) merge_factor(Plan plan, int level, int pairs, int first) {
    __shared__ PanelBuffer<kStripes> buffers[2];
    __shared__ float4 scratch[kStripes * 256 / kWarp][2][kWarp / 4];
    const Place at;
    const int64_t matrix = blockIdx.x / pairs;
    const int pair = static_cast<int>(blockIdx.x % pairs);
    const int64_t left = matrix * plan.leaves + (int64_t{2 * pair} << level);
    float* upper = plan.slots + left * plan.slot_size();
    const float* lower = plan.slots + (left + (int64_t{1} << level)) * plan.slot_size();
    const int64_t node = matrix * (plan.leaves - 1) + first + pair;
    float* v = plan.merge_v + node * plan.triangle();
    float* t = plan.merge_t + node * plan.t_size();
    const bool live = at.group < plan.panels;

    float a[4 * kStripes][kPanel];
#pragma unroll
    for (int q = 0; q < kStripes; ++q) {
        const int block = q * kParts + at.part;
#pragma unroll
        for (int c = 0; c < kPanel; ++c) {
            float four[4] = {0.f, 0.f, 0.f, 0.f};
            if (live && block <= at.group) load4(lower + triangle_block(block, at.group) + c * 4, four);
#pragma unroll
            for (int e = 0; e < 4; ++e) a[q * 4 + e][c] = four[e];
        }
    }
    float top = live ? upper[triangle_block(0, at.group) + at.part] : 0.f;
    for (int panel = 0; panel < plan.panels; ++panel) {
        const bool more = live && panel + 1 <= at.group;
        const float next = more ? upper[triangle_block(panel + 1, at.group) + at.part] : 0.f;
        PanelBuffer<kStripes>& buffer = buffers[panel % 2];
        if (at.warp == panel / 2)
            factor_panel<kStripes, true>(a, top, panel, at.group == panel, at, buffer, v + triangle_block(0, panel),
                                         (panel + 1) * 4, t + panel * kBlock);
        __syncthreads();
        if (at.warp * 2 + 1 > panel)
            apply_panel<kStripes, true>(a, top, at.group > panel, at,
                                        reinterpret_cast<float*>(scratch[at.warp][panel % 2]), buffer.t[at.part % 4],
                                        [&](int q, int k) { return buffer.v[k][q * kParts + at.part]; });
        if (live && panel <= at.group) upper[triangle_block(panel, at.group) + at.part] = top;
        top = next;
    }
}

// The root's triangle as a dense row-major r x r matrix.
__global__ void __launch_bounds__(256) unpack_triangle(float* rfac, Plan plan) {
    const float* slot = plan.slots + int64_t{blockIdx.x} * plan.leaves * plan.slot_size();
    float* to = rfac + int64_t{blockIdx.x} * plan.r * plan.r;
    for (int i = threadIdx.x; i < plan.r * plan.r; i += blockDim.x) {
        const int row = i / plan.r, column = i % plan.r;
        to[i] = row <= column ? slot[triangle_block(row / 4, column / 4) + column % 4 * 4 + row % 4] : 0.f;
    }
}

// Coefficients c [m, r, k] into the root's slot as blocks, zero-padded.
__global__ void __launch_bounds__(256) pack_coefficients(const float* c, Plan plan, int k) {
    const int groups = (k + kPanel - 1) / kPanel;
    float* slot = plan.slots + int64_t{blockIdx.x} * plan.leaves * plan.slot_size();
    const float* from = c + int64_t{blockIdx.x} * plan.r * k;
    for (int i = threadIdx.x; i < plan.panels * groups * kBlock; i += blockDim.x) {
        const int block = i / kBlock;
        const int row = block / groups * 4 + i % 4, column = block % groups * 4 + i % kBlock / 4;
        slot[i] = row < plan.r && column < k ? from[row * k + column] : 0.f;
    }
}

// The panels of a node on their way down, some ahead of their use: each is copied to shared memory once a block.
template <int kRows>
struct Stages {
    struct Stage {
        float4 v[kPanel * kRows / 4];
        float4 t[kPanel];  // row kk of T
    };
    Stage stage[kStages];

    // Starts the copy of a panel of `pieces` times 16 bytes; none below panel 0.
    __device__ __forceinline__ void fetch(int panel, const float* v, int pieces, const float* t) {
        if (panel >= 0) {
            Stage& to = stage[panel % kStages];
            for (int i = threadIdx.x; i < pieces + kPanel; i += blockDim.x) {
                if (i < pieces)
                    copy16_async(to.v + i, v + i * 4);
                else
                    copy16_async(to.t + (i - pieces), t + (i - pieces) * 4);
            }
        }
        copies_commit();
    }
    // Everyone's copies of the oldest panel are there, and the stage that is filled next is free.
    __device__ __forceinline__ const Stage& arrive(int panel) {
        copies_wait<kStages - 2>();
        __syncthreads();
        return stage[panel % kStages];
    }
};

// The tree downwards: coefficients of a merge become those of its two children, in the children's slots.
template <int kStripes>
__global__ void __launch_bounds__(kStripes * 256, 4 / kStripes / kStripes) merge_apply(Plan plan, int level, int pairs,
                                                                                      int first, int groups) {
    __shared__ Stages<kStripes * 64> stages;
    __shared__ float4 scratch[kStripes * 256 / kWarp][2][kWarp / 4];
    const Place at;
    const int64_t matrix = blockIdx.x / pairs;
    const int pair = static_cast<int>(blockIdx.x % pairs);
    const int64_t left = matrix * plan.leaves + (int64_t{2 * pair} << level);
    float* upper = plan.slots + left * plan.slot_size();
    float* lower = plan.slots + (left + (int64_t{1} << level)) * plan.slot_size();
    const int64_t node = matrix * (plan.leaves - 1) + first + pair;
    const float* v = plan.merge_v + node * plan.triangle();
    const float* t = plan.merge_t + node * plan.t_size();
    const bool live = at.group < groups;
    const auto element = [&](int panel) { return (int64_t{panel} * groups + at.group) * kBlock + at.part; };
    const auto fetch = [&](int panel) {
        stages.fetch(panel, v + triangle_block(0, panel), (panel + 1) * kPanel, t + panel * kBlock);
    };
    fetch(plan.panels - 1);
    fetch(plan.panels - 2);

    float a[4 * kStripes][kPanel] = {};
    float next = live ? upper[element(plan.panels - 1)] : 0.f;
    for (int panel = plan.panels - 1; panel >= 0; --panel) {
        float top = next;
        if (live && panel > 0) next = upper[element(panel - 1)];
        const auto& stage = stages.arrive(panel);
        fetch(panel - 2);
        apply_panel<kStripes, true>(a, top, live, at, reinterpret_cast<float*>(scratch[at.warp][panel % 2]),
                                    stage.t[at.part % 4], [&](int q, int k) {
                                        const int block = q * kParts + at.part;
                                        return block <= panel ? stage.v[k * (panel + 1) + block]
                                                              : make_float4(0.f, 0.f, 0.f, 0.f);
                                    });
        if (live) upper[element(panel)] = top;
    }
    if (!live) return;
#pragma unroll
    for (int q = 0; q < kStripes; ++q) {
        const int block = q * kParts + at.part;
        if (block >= plan.panels) continue;
        float* to = lower + (int64_t{block} * groups + at.group) * kBlock;
#pragma unroll
        for (int c = 0; c < kPanel; ++c) write4(to + c * 4, a[q * 4][c], a[q * 4 + 1][c], a[q * 4 + 2][c], a[q * 4 + 3][c]);
    }
}

// One block a leaf: its 256 rows of Q c from the r rows of its slot.
template <int kLayout>
__global__ void __launch_bounds__(kMaxThreads, 1) leaf_apply(float* y, Plan plan, int k, int groups, bool aligned) {
    __shared__ Stages<kLeafRows> stages;
    __shared__ float4 scratch[kMaxThreads / kWarp][2][kWarp / 4];
    const Place at;
    const int64_t node = blockIdx.x;
    const int64_t matrix = node / plan.leaves;
    const int leaf = static_cast<int>(node % plan.leaves);
    const float* v = plan.leaf_v + node * plan.leaf_size();
    const float* t = plan.leaf_t + node * plan.t_size();
    const auto fetch = [&](int panel) {
        stages.fetch(panel, v + int64_t{panel} * kPanel * kLeafRows, kPanel * kLeafRows / 4, t + panel * kBlock);
    };
    fetch(plan.panels - 1);
    fetch(plan.panels - 2);

    float a[4 * kLeafStripes][kPanel];
    const float* slot = plan.slots + node * plan.slot_size();
#pragma unroll
    for (int q = 0; q < kLeafStripes; ++q) {
        const int block = q * kParts + at.part;
#pragma unroll
        for (int c = 0; c < kPanel; ++c) {
            float four[4] = {0.f, 0.f, 0.f, 0.f};
            if (block < plan.panels && at.group < groups)
                load4(slot + (int64_t{block} * groups + at.group) * kBlock + c * 4, four);
#pragma unroll
            for (int e = 0; e < 4; ++e) a[q * 4 + e][c] = four[e];
        }
    }
    float none = 0.f;
    for (int panel = plan.panels - 1; panel >= 0; --panel) {
        const auto& stage = stages.arrive(panel);
        fetch(panel - 2);
        apply_panel<kLeafStripes, false>(a, none, true, at, reinterpret_cast<float*>(scratch[at.warp][panel % 2]),
                                         stage.t[at.part % 4],
                                         [&](int q, int kk) { return stage.v[kk * (kLeafRows / 4) + q * kParts + at.part]; });
    }
    store_leaf<kLayout>(y + matrix * plan.d * k, plan.d, k, aligned, int64_t{leaf} * kLeafRows, at, a);
}

// The wide path: nodes are dense tiles of 2r x r, column-major in global memory; leaves and merges alike.
struct WidePlan {
    int64_t m;
    int d, r;
    int rows;  // of a tile: 2 r
    int leaves;
    float* tiles;  // [m, 2 leaves - 1, r, rows]
    float* taus;   // [m, 2 leaves - 1, r]
    float* slots;  // [m, leaves, r, r], column-major

    __host__ __device__ int nodes() const { return 2 * leaves - 1; }
    __host__ __device__ int64_t tile_size() const { return int64_t{r} * rows; }
    __host__ __device__ int64_t slot_size() const { return int64_t{r} * r; }
};

template <class T>
__global__ void __launch_bounds__(kWideThreads) wide_load(const T* x, WidePlan plan, int layout) {
    const int64_t matrix = blockIdx.x / plan.leaves;
    const int leaf = static_cast<int>(blockIdx.x % plan.leaves);
    const T* from = x + matrix * plan.d * plan.r;
    float* tile = plan.tiles + (matrix * plan.nodes() + leaf) * plan.tile_size();
    const int64_t first = int64_t{leaf} * plan.rows;
    for (int64_t i = threadIdx.x; i < plan.tile_size(); i += blockDim.x) {
        // Walks in the order of the source, which is what the loads need to be coalesced.
        const int64_t row = layout == kTall ? i / plan.r : i % plan.rows;
        const int64_t column = layout == kTall ? i % plan.r : i / plan.rows;
        const int64_t at = layout == kTall ? (first + row) * plan.r + column : column * plan.d + first + row;
        tile[column * plan.rows + row] = first + row < plan.d ? to_float(from[at]) : 0.f;
    }
}

__global__ void __launch_bounds__(kWideThreads) wide_stack(WidePlan plan, int level, int pairs, int first) {
    const int64_t matrix = blockIdx.x / pairs;
    const int pair = static_cast<int>(blockIdx.x % pairs);
    const float* upper = plan.slots + (matrix * plan.leaves + (int64_t{2 * pair} << level)) * plan.slot_size();
    const float* lower = upper + (int64_t{1} << level) * plan.slot_size();
    float* tile = plan.tiles + (matrix * plan.nodes() + plan.leaves + first + pair) * plan.tile_size();
    for (int64_t i = threadIdx.x; i < plan.tile_size(); i += blockDim.x) {
        const int64_t column = i / plan.rows, row = i % plan.rows;
        tile[i] = row < plan.r ? upper[column * plan.r + row] : lower[column * plan.r + row - plan.r];
    }
}

// Node first + i of each matrix; its R goes to slot i << shift.
__global__ void __launch_bounds__(kWideThreads) wide_factor(WidePlan plan, int count, int first, int shift) {
    LF_DYNAMIC_SHARED(float, v);
    __shared__ float partial[kWideThreads / kWarp];
    const int64_t matrix = blockIdx.x / count;
    const int i = static_cast<int>(blockIdx.x % count);
    const int64_t node = matrix * plan.nodes() + first + i;
    float* tile = plan.tiles + node * plan.tile_size();
    float* taus = plan.taus + node * plan.r;
    const int rows = plan.rows, lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
    for (int j = 0; j < plan.r; ++j) {
        float* column = tile + int64_t{j} * rows;
        float scale = 1.f, unscale = 1.f, sum, alpha, square;
        for (bool again = true; again;) {
            float mine = 0.f;
            for (int row = j + 1 + threadIdx.x; row < rows; row += kWideThreads) {
                const float value = column[row] * scale;
                mine = fmaf(value, value, mine);
            }
            mine = warp_sum(mine);
            if (lane == 0) partial[warp] = mine;
            __syncthreads();
            sum = 0.f;
            for (int n = 0; n < kWideThreads / kWarp; ++n) sum += partial[n];
            alpha = column[j] * scale;
            square = fmaf(alpha, alpha, sum);
            __syncthreads();  // partial may be written again, and column[j] too
            again = scale == 1.f && !(square >= kSmallSquare && square <= kLargeSquare);
            if (again) {
                const bool small = square < kSmallSquare;
                scale = small ? kScaleUp : kScaleDown;
                unscale = small ? kScaleDown : kScaleUp;
            }
        }
        const bool reflects = sum != 0.f;
        const float beta = reflects ? -copysignf(sqrtf(square), alpha) : alpha;
        const float inverse = reflects ? 1.f / (alpha - beta) : 0.f;
        const float tau = reflects ? (beta - alpha) / beta : 0.f;
        for (int row = j + threadIdx.x; row < rows; row += kWideThreads) {
            const float value = row == j ? 1.f : column[row] * scale * inverse;
            v[row] = value;
            column[row] = row == j ? beta * unscale : value;
        }
        if (threadIdx.x == 0) taus[j] = tau;
        __syncthreads();
        for (int c = j + 1 + warp; c < plan.r; c += kWideThreads / kWarp) {
            float* other = tile + int64_t{c} * rows;
            float dot = 0.f;
            for (int row = j + lane; row < rows; row += kWarp) dot = fmaf(v[row], other[row], dot);
            const float weight = tau * warp_sum(dot);
            for (int row = j + lane; row < rows; row += kWarp) other[row] = fmaf(-weight, v[row], other[row]);
        }
        __syncthreads();
    }
    float* slot = plan.slots + (matrix * plan.leaves + (int64_t{i} << shift)) * plan.slot_size();
    for (int64_t n = threadIdx.x; n < plan.slot_size(); n += kWideThreads) {
        const int64_t column = n / plan.r, row = n % plan.r;
        slot[n] = row <= column ? tile[column * rows + row] : 0.f;
    }
}

__global__ void __launch_bounds__(256) wide_unpack(float* rfac, WidePlan plan) {
    const float* slot = plan.slots + int64_t{blockIdx.x} * plan.leaves * plan.slot_size();
    for (int64_t i = threadIdx.x; i < plan.slot_size(); i += blockDim.x)
        rfac[blockIdx.x * plan.slot_size() + i] = slot[i % plan.r * plan.r + i / plan.r];
}

__global__ void __launch_bounds__(256) wide_pack(const float* c, WidePlan plan, int k) {
    float* slot = plan.slots + int64_t{blockIdx.x} * plan.leaves * plan.slot_size();
    const float* from = c + int64_t{blockIdx.x} * plan.r * k;
    for (int64_t i = threadIdx.x; i < int64_t{plan.r} * k; i += blockDim.x)
        slot[i % k * plan.r + i / k] = from[i];
}

// Node first + i of each matrix, a warp a column: leaves (y given) write rows of y, merges their children's slots.
__global__ void __launch_bounds__(kWideThreads) wide_apply(float* y, WidePlan plan, int count, int first, int level,
                                                           int k, int layout) {
    LF_DYNAMIC_SHARED(float, columns);
    const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, warps = blockDim.x / kWarp;
    const int chunks = (k + warps - 1) / warps;
    const int64_t task = blockIdx.x / chunks;
    const int c = static_cast<int>(blockIdx.x % chunks) * warps + warp;
    if (c >= k) return;
    const int64_t matrix = task / count;
    const int i = static_cast<int>(task % count);
    const int rows = plan.rows, r = plan.r;
    const int64_t node = matrix * plan.nodes() + first + i;
    const float* tile = plan.tiles + node * plan.tile_size();
    const float* taus = plan.taus + node * r;
    const int64_t index = y != nullptr ? i : int64_t{2 * i} << level;
    float* upper = plan.slots + (matrix * plan.leaves + index) * plan.slot_size() + int64_t{c} * r;
    float* lower = upper + (int64_t{1} << level) * plan.slot_size();
    float* column = columns + int64_t{warp} * rows;
    // A lane only ever touches the rows that are its own modulo the warp.
    for (int row = lane; row < rows; row += kWarp) column[row] = row < r ? upper[row] : 0.f;
    for (int j = r - 1; j >= 0; --j) {
        const float* v = tile + int64_t{j} * rows;
        const int start = j / kWarp * kWarp + lane;
        float dot = 0.f;
        for (int row = start; row < rows; row += kWarp)
            if (row >= j) dot = fmaf(row == j ? 1.f : v[row], column[row], dot);
        const float weight = taus[j] * warp_sum(dot);
        for (int row = start; row < rows; row += kWarp)
            if (row >= j) column[row] = fmaf(-weight, row == j ? 1.f : v[row], column[row]);
    }
    if (y == nullptr) {
        for (int row = lane; row < rows; row += kWarp) (row < r ? upper[row] : lower[row - r]) = column[row];
        return;
    }
    float* to = y + matrix * plan.d * k;
    for (int row = lane; row < rows; row += kWarp) {
        const int64_t at = int64_t{i} * rows + row;
        if (at < plan.d) to[layout == kTall ? at * k + c : int64_t{c} * plan.d + at] = column[row];
    }
}

}  // namespace tsqr
}  // namespace lf
