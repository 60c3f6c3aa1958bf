// Batched thin products Y = X T: X FP32 or 16-bit [d, r], T FP64 [r, k], sums in FP64 on tensor cores, Y FP32.
//
// A block keeps up to 64 columns of T in shared memory in the order of the B fragments. Each warp streams tiles
// of 32 rows of X (cut into chunks of at most 64 columns) through its own ring, so the loop has no block barrier
// and every element of X is read and converted once a block of columns.
#pragma once

#include "dmma.cuh"

namespace lf {
namespace apply {

constexpr int kRows = 32;   // rows of X, so of Y, a warp computes at a time
constexpr int kChunk = 64;  // summed columns a stage holds at most
#ifndef LF_APPLY_STEP
#define LF_APPLY_STEP 4
#endif
constexpr int kStep = LF_APPLY_STEP;  // groups of four summed indices in one tensor-core instruction: 1, 2 or 4

struct Shape {
    int d, r, k;
    int chunk;           // summed columns a stage holds: 16, 32 or 64
    int stages;          // depth of a ring: 2 or 4
    int column_blocks;   // blocks of 8 NT columns of T
    int row_blocks;      // blocks that the rows of a matrix are split over
    int tiles_per_block; // tiles of 32 rows each takes
    bool wide_stores;    // 16-byte stores to Y are aligned
};

// Row length of a stage in elements: rows of X (tall) or 32 of its rows laid across (wide).
template <class T, int kLayout>
__host__ __device__ constexpr int stage_stride(int chunk) {
    return kLayout == kWide ? conflict_free_stride<T>(kRows) : 16 * (chunk / 16 | 1);
}
template <class T, int kLayout>
__host__ __device__ constexpr int stage_elements(int chunk) {
    return stage_stride<T, kLayout>(chunk) * (kLayout == kWide ? chunk : kRows);
}

// Column of T that lane group g of tile n holds. Tall: pairs of tiles are interleaved so that a lane ends with
// four neighbouring columns of Y.
template <int kLayout, int NT>
__device__ __forceinline__ int column_of(int n, int g) {
    if constexpr (kLayout == kTall && NT % 2 == 0) return n / 2 * 16 + g / 2 * 4 + n % 2 * 2 + g % 2;
    return 8 * n + g;
}

// Row of T, within 16, that lane t holds for step s.
template <int kLayout>
__device__ __forceinline__ int row_of(int s, int t) {
    return kLayout == kTall ? 4 * t + s : 4 * s + t;
}

// slab[((block * NT + n) * 2 + s / 2) * 64 + 2 * lane + s % 2]
template <int kLayout, int NT>
__device__ __forceinline__ void load_slab(double* slab, const double* t, int r, int k, int first, int blocks) {
    for (int i = threadIdx.x; i < blocks * NT * 128; i += blockDim.x) {
        const int lane = i % 64 / 2, s = i / 64 % 2 * 2 + i % 2, n = i / 128 % NT, block = i / 128 / NT;
        const int row = 16 * block + row_of<kLayout>(s, lane % 4), column = first + column_of<kLayout, NT>(n, lane / 4);
        slab[i] = row < r && column < k ? t[int64_t(row) * k + column] : 0.0;
    }
}

template <class T, int kLayout, int NT>
__device__ __forceinline__ void store(float* y, const double (&acc)[2][NT][4], const Shape& p, int row, int first,
                                      int lane) {
    const int g = lane / 4, t = lane % 4;
    if constexpr (kLayout == kWide) {  // y[k, d]: a lane holds rows row + 4 g + 0..3 of columns 2 t, 2 t + 1
        const int at = row + 4 * g;
        int column = first + 2 * t;
        float* to = y + int64_t(column) * p.d + at;
#pragma unroll
        for (int n = 0; n < NT; ++n, column += 6, to += 6 * int64_t(p.d))
#pragma unroll
            for (int f = 0; f < 2; ++f, ++column, to += p.d) {
                if (column >= p.k) continue;
                const float v[4] = {float(acc[0][n][f]), float(acc[0][n][2 + f]), float(acc[1][n][f]),
                                    float(acc[1][n][2 + f])};
                if (p.wide_stores && at + 4 <= p.d) {
                    *reinterpret_cast<float4*>(to) = make_float4(v[0], v[1], v[2], v[3]);
                } else {
#pragma unroll
                    for (int i = 0; i < 4; ++i)
                        if (at + i < p.d) to[i] = v[i];
                }
            }
    } else {  // y[d, k]: row + 8 c + g
        constexpr int group = NT % 2 == 0 ? 2 : 1;  // tiles whose columns are neighbours in a lane
#pragma unroll
        for (int c = 0; c < 4; ++c) {
            const int at = row + 8 * c + g;
            if (at >= p.d) continue;
#pragma unroll
            for (int n = 0; n < NT; n += group) {
                const int column = first + 8 * n + 2 * group * t;
                float* to = y + int64_t(at) * p.k + column;
                float v[2 * group];
#pragma unroll
                for (int i = 0; i < 2 * group; ++i) v[i] = float(acc[c / 2][n + i / 2][c % 2 * 2 + i % 2]);
                if (group == 2 && p.wide_stores && column + 4 <= p.k) {
                    *reinterpret_cast<float4*>(to) = make_float4(v[0], v[1], v[2 * group - 2], v[2 * group - 1]);
                } else {
#pragma unroll
                    for (int i = 0; i < 2 * group; ++i)
                        if (column + i < p.k) to[i] = v[i];
                }
            }
        }
    }
}

template <class T, int kLayout, int NT, bool vector>
__global__ void __launch_bounds__(256, 1)
    kernel(const T* __restrict__ x, const double* __restrict__ t, float* __restrict__ y, const Shape p) {
    extern __shared__ __align__(128) unsigned char shared[];
    const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, warps = blockDim.x / kWarp;
    const int column_block = blockIdx.x % p.column_blocks, rest = blockIdx.x / p.column_blocks;
    const int64_t matrix = rest / p.row_blocks;
    const int chunks = (p.r + p.chunk - 1) / p.chunk, blocks = p.chunk / 16, first = column_block * 8 * NT;
    x += matrix * p.d * p.r;
    t += matrix * p.r * p.k;
    y += matrix * p.d * p.k;

    double* slab = reinterpret_cast<double*>(shared);
    const int elements = stage_elements<T, kLayout>(p.chunk), stride = stage_stride<T, kLayout>(p.chunk);
    T* ring = reinterpret_cast<T*>(slab + chunks * blocks * NT * 128) + warp * p.stages * elements;
    const int all_tiles = (p.d + kRows - 1) / kRows;
    const int begin = (rest % p.row_blocks) * p.tiles_per_block;
    const int end = begin + p.tiles_per_block < all_tiles ? begin + p.tiles_per_block : all_tiles;

    int ahead_tile = begin + warp;
    int ahead_chunk = 0, ahead_slot = 0;
    constexpr int wide = 16 / sizeof(T);
    const auto fill = [&] {
        if (ahead_tile < end) {
            T* to = ring + ahead_slot * elements;
            const int row = ahead_tile * kRows;
            const int column = ahead_chunk * p.chunk;
            const auto offset = [stride](int i, int chunk) { return i * stride + chunk * (16 / int(sizeof(T))); };
            if constexpr (kLayout == kWide)
                stage<vector>(to, x + int64_t(column) * p.d + row, p.d, p.chunk, kRows / wide, p.r - column, p.d - row, lane,
                              kWarp, offset);
            else
                stage<vector>(to, x + int64_t(row) * p.r + column, p.r, kRows, p.chunk / wide, p.d - row, p.r - column, lane,
                              kWarp, offset);
            if (++ahead_chunk == chunks) ahead_chunk = 0, ahead_tile += warps;
        }
        commit_copies();
        ahead_slot = ahead_slot + 1 == p.stages ? 0 : ahead_slot + 1;
    };
    for (int i = 0; i + 1 < p.stages; ++i) fill();
    load_slab<kLayout, NT>(slab, t, p.r, p.k, first, chunks * blocks);
    __syncthreads();

    int slot = 0;
    const int g = lane / 4, q = lane % 4;
    for (int tile = begin + warp; tile < end; tile += warps) {
        double acc[2][NT][4] = {};
        for (int chunk = 0; chunk < chunks; ++chunk) {
            if (p.stages == 2)
                await_copies<0>();
            else
                await_copies<2>();
            warp_sync();
            fill();
            const T* in = ring + slot * elements;
            const double* fragment = slab + chunk * blocks * NT * 128 + 2 * lane;
#pragma unroll 1
            for (int block = 0; block < blocks; ++block, fragment += NT * 128) {
                double a[2][8];
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    float f[4];
                    if constexpr (kLayout == kTall) {  // rows 8 i + g; steps are neighbours
                        load4(f, in + (8 * i + g) * stride + 16 * block + 4 * q);
#pragma unroll
                        for (int s = 0; s < 4; ++s) a[i / 2][2 * s + i % 2] = static_cast<double>(f[s]);
                    } else {  // step i; rows 4 g + c are neighbours
                        load4(f, in + (16 * block + 4 * i + q) * stride + 4 * g);
#pragma unroll
                        for (int c = 0; c < 4; ++c) a[c / 2][2 * i + c % 2] = static_cast<double>(f[c]);
                    }
                }
#pragma unroll
                for (int n = 0; n < NT; ++n) {
                    const double2 low = *reinterpret_cast<const double2*>(fragment + n * 128);
                    const double2 high = *reinterpret_cast<const double2*>(fragment + n * 128 + 64);
                    const double b[4] = {low.x, low.y, high.x, high.y};
#pragma unroll
                    for (int u = 0; u < 2; ++u) {
#pragma unroll
                        for (int s = 0; s < 4; s += kStep) {
                            double as[2 * kStep], bs[kStep];
#pragma unroll
                            for (int i = 0; i < 2 * kStep; ++i) as[i] = a[u][2 * s + i];
#pragma unroll
                            for (int i = 0; i < kStep; ++i) bs[i] = b[s + i];
                            dmma(acc[u][n], as, bs);
                        }
                    }
                }
            }
            slot = slot + 1 == p.stages ? 0 : slot + 1;
        }
        store<T, kLayout, NT>(y, acc, p, tile * kRows, first, lane);
    }
    await_copies<0>();
}

}  // namespace apply
}  // namespace lf
