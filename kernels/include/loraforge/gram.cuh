// Batched Gram matrices G = X^T X in FP64 of FP32 or 16-bit factors, on FP64 tensor cores.
//
// A fragment of 8 columns and 4 rows of X serves as A and as B operand alike, so one warp that owns a whole
// slice of rows reads and converts each element once and computes every 16 x 8 tile on or above the diagonal.
// Warps stream their slices through private rings in shared memory (no block barrier in the loop) and are
// summed in a fixed order; few matrices are split over a thread-block cluster and summed likewise.
#pragma once

#include "dmma.cuh"

#if !LF_HIP
#include <cooperative_groups.h>
#endif

namespace lf {
namespace gram {

constexpr int kWarps = 4;
constexpr int kThreads = kWarps * kWarp;
constexpr int kStages = 4;
constexpr int kPanel = 64;       // columns that one warp can hold all tiles of
constexpr int kPairTiles = 72;   // tiles of two panels: 20 + 32 + 20
#ifndef LF_GRAM_STEP
#define LF_GRAM_STEP 1
#endif
constexpr int kStep = LF_GRAM_STEP;  // groups of four summed indices in one tensor-core instruction: 1, 2 or 4

// How X, cut into 8 N columns, lies in one stage of a ring, and which columns its fragments hold.
template <class T, int kLayout, int N>
struct Tile {
    static constexpr int columns = 8 * N;
    // rows of X in a stage: about 4 KiB (tall), or 128 bytes of each column (wide)
    static constexpr int depth = kLayout == kWide ? 128 / int(sizeof(T)) : 16 * (N >= 6 ? 1 : 8 / N) * (4 / int(sizeof(T)));
    static constexpr int stride = kLayout == kWide ? depth : conflict_free_stride<T>(columns);
    static constexpr int elements = stride * (kLayout == kWide ? columns : depth);
    static constexpr int chunks = (kLayout == kWide ? depth : columns) * int(sizeof(T)) / 16;
    static constexpr int upper_tiles = N / 2 * (N / 2 + 1);

    __device__ static int swizzle(int row) { return sizeof(T) == 4 ? (row & 1) << 2 : (row & 3) << 1; }

    __device__ static int offset(int row, int chunk) {
        constexpr int wide = 16 / sizeof(T);
        if constexpr (kLayout == kWide) return row * stride + (chunk ^ swizzle(row)) * wide;
        return row * stride + chunk * wide;
    }

    // Starts the copy of rows [row, row + depth) and columns [column, column + 8 N) of the tall view.
    template <bool vector>
    __device__ static void fill(T* to, const T* x, int d, int r, int row, int column, int thread, int threads) {
        if constexpr (kLayout == kWide)
            stage<vector>(to, x + int64_t(column) * d + row, d, columns, chunks, r - column, d - row, thread, threads, offset);
        else
            stage<vector>(to, x + int64_t(row) * r + column, r, depth, chunks, d - row, r - column, thread, threads, offset);
    }

    // Fragments of column groups [first, first + count) for 16 summed rows: f[group][s], s the step of four.
    template <int first, int count>
    __device__ static void fragments(float (&f)[count][4], const T* tile, int block, int lane) {
        const int g = lane / 4, t = lane % 4;
        if constexpr (kLayout == kWide) {
            constexpr int wide = 16 / sizeof(T);
#pragma unroll
            for (int c = 0; c < count; ++c) {
                const int row = 8 * (first + c) + g, at = 16 * block + 4 * t;
                load4(f[c], tile + offset(row, at / wide) + at % wide);
            }
        } else {
#pragma unroll
            for (int s = 0; s < 4; ++s) {
                const T* row = tile + (16 * block + 4 * s + t) * stride;
                static_assert(first % 4 == 0 && count % 2 == 0);
#pragma unroll
                for (int c = 0; c + 4 <= count; c += 4) {
                    float four[4];
                    load4(four, row + 8 * (first + c) + 4 * g);
#pragma unroll
                    for (int i = 0; i < 4; ++i) f[c + i][s] = four[i];
                }
                if constexpr (count % 4 == 2) {
                    float two[2];
                    load2(two, row + 8 * (first + count - 2) + 2 * g);
                    f[count - 2][s] = two[0], f[count - 1][s] = two[1];
                }
            }
        }
    }

    // Index 8 group + g under which a column is held in fragments.
    __device__ static int place(int column) {
        if constexpr (kLayout == kWide) return column;
        constexpr int whole = N / 4 * 32;
        if (column < whole) return column / 32 * 32 + column % 4 * 8 + column % 32 / 4;
        return whole + (column - whole) % 2 * 8 + (column - whole) / 2;
    }

    // Where element (i, j) of the symmetric product lies among the stored tiles [tile][4][lane].
    __device__ static int upper_index(int i, int j) {
        const int a = place(i), b = place(j);
        const int low = a < b ? a : b, high = a < b ? b : a;
        const int band = low / 16;
        return element(band * (N - band + 1) + high / 8 - 2 * band, low, high);
    }

    __device__ static int element(int tile, int row, int column) {
        const int e = row / 8 % 2 * 2 + column % 2;
        return (tile * 4 + e) * kWarp + row % 8 * 4 + column % 8 / 2;
    }
};

// Adds the products of 16 summed rows to all tiles on or above the diagonal.
template <int N, int tiles>
__device__ __forceinline__ void multiply_upper(double (&acc)[tiles][4], const float (&f)[N][4]) {
#pragma unroll
    for (int s = 0; s < 4; s += kStep) {
        double x[N][kStep];
#pragma unroll
        for (int c = 0; c < N; ++c)
#pragma unroll
            for (int u = 0; u < kStep; ++u) x[c][u] = static_cast<double>(f[c][s + u]);
        int tile = 0;
#pragma unroll
        for (int i = 0; i < N / 2; ++i) {
            double a[2 * kStep];
#pragma unroll
            for (int u = 0; u < kStep; ++u) a[2 * u] = x[2 * i][u], a[2 * u + 1] = x[2 * i + 1][u];
#pragma unroll
            for (int j = 2 * i; j < N; ++j) dmma(acc[tile++], a, x[j]);
        }
    }
}

// Adds the products of 16 summed rows to half of a dense block of 32 x 64: its columns 32 h ... 32 h + 31.
template <int h, int tiles>
__device__ __forceinline__ void multiply_dense(double (&acc)[tiles][4], const float (&left)[4][4],
                                               const float (&right)[4][4]) {
    static_assert(tiles >= 16);
#pragma unroll
    for (int s = 0; s < 4; s += kStep) {
        double a[2][2 * kStep];
#pragma unroll
        for (int i = 0; i < 4; ++i)
#pragma unroll
            for (int u = 0; u < kStep; ++u) a[i / 2][2 * u + i % 2] = static_cast<double>(left[i][s + u]);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            double b[kStep];
#pragma unroll
            for (int u = 0; u < kStep; ++u) b[u] = static_cast<double>(right[j][s + u]);
            dmma(acc[4 * h + j], a[0], b);
            dmma(acc[8 + 4 * h + j], a[1], b);
        }
    }
}

// The sum over the blocks of a cluster of one element of their tiles, in rank order.
struct ClusterSum {
#if !LF_HIP && defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    const double* tiles;
    int parts;
    __device__ ClusterSum(double* own, int count) : tiles(own), parts(count) {
        if (parts > 1) cooperative_groups::this_cluster().sync();
    }
    __device__ double operator()(int index) const {
        if (parts == 1) return tiles[index];
        auto cluster = cooperative_groups::this_cluster();
        double sum = 0;
        for (int part = 0; part < parts; ++part)
            sum += cluster.map_shared_rank(const_cast<double*>(tiles), part)[index];
        return sum;
    }
    __device__ void close() const {  // no block may leave while others read its shared memory
        if (parts > 1) cooperative_groups::this_cluster().sync();
    }
#else
    const double* tiles;
    __device__ ClusterSum(double* own, int) : tiles(own) {}
    __device__ double operator()(int index) const { return tiles[index]; }
    __device__ void close() const {}
#endif
};

template <class T, int kLayout, int N>
constexpr size_t narrow_shared() {
    const size_t ring = size_t(kWarps) * kStages * Tile<T, kLayout, N>::elements * sizeof(T);
    const size_t tiles = size_t(Tile<T, kLayout, N>::upper_tiles) * 4 * kWarp * sizeof(double);
    return ring > tiles ? ring : tiles;
}

// r <= 8 N <= 64. One matrix a cluster of `parts` blocks; warp w of part p takes stages 4 p + w, stepping 4 parts.
template <class T, int kLayout, int N, bool vector>
__global__ void __launch_bounds__(kThreads, N <= 2 ? 4 : N <= 4 ? 3 : 2)
    narrow(const T* __restrict__ x, double* __restrict__ g, int d, int r, int parts) {
    using Shape = Tile<T, kLayout, N>;
    extern __shared__ __align__(128) unsigned char shared[];
    const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, part = blockIdx.x % parts;
    const int64_t matrix = blockIdx.x / parts;
    x += matrix * d * r;
    g += matrix * r * r;
    T* ring = reinterpret_cast<T*>(shared) + warp * kStages * Shape::elements;
    const int first = (part * kWarps + warp) * Shape::depth, hop = parts * kWarps * Shape::depth;

    double acc[Shape::upper_tiles][4] = {};
    int ahead = first;
#pragma unroll
    for (int i = 0; i < kStages - 1; ++i, ahead += hop) {
        if (ahead < d)
            Shape::template fill<vector>(ring + i * Shape::elements, x, d, r, ahead, 0, lane, kWarp);
        commit_copies();
    }
    int slot = 0, free_slot = kStages - 1;
    for (int row = first; row < d; row += hop, ahead += hop) {
        await_copies<kStages - 2>();
        warp_sync();
        if (ahead < d)
            Shape::template fill<vector>(ring + free_slot * Shape::elements, x, d, r, ahead, 0, lane, kWarp);
        commit_copies();
#pragma unroll 1
        for (int block = 0; block < Shape::depth / 16; ++block) {
            float f[N][4];
            Shape::template fragments<0, N>(f, ring + slot * Shape::elements, block, lane);
            multiply_upper<N>(acc, f);
        }
        free_slot = slot;
        slot = slot + 1 == kStages ? 0 : slot + 1;
    }

    await_copies<0>();
    __syncthreads();
    double* tiles = reinterpret_cast<double*>(shared);
    for (int turn = 0; turn < kWarps; ++turn) {
        if (warp == turn) {
#pragma unroll
            for (int i = 0; i < Shape::upper_tiles; ++i)
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    double& at = tiles[(i * 4 + e) * kWarp + lane];
                    at = turn == 0 ? acc[i][e] : at + acc[i][e];
                }
        }
        __syncthreads();
    }
    const ClusterSum sum(tiles, parts);
    for (int i = part * kThreads + threadIdx.x; i < r * r; i += parts * kThreads)
        g[i] = sum(Shape::upper_index(i / r, i % r));
    sum.close();
}

template <class T, int kLayout>
constexpr size_t wide_shared() {
    const size_t ring = size_t(kStages) * 2 * Tile<T, kLayout, 8>::elements * sizeof(T);
    const size_t tiles = size_t(kPairTiles) * 4 * kWarp * sizeof(double);
    return ring > tiles ? ring : tiles;
}

// r > 64. blockIdx.y is a pair of panels a < b of 64 columns. The four warps share each stage: warps 0 and 3
// take the two diagonal blocks, warps 1 and 2 the halves of the block between. Diagonal blocks are written by the
// pair of neighbours that owns them.
template <class T, int kLayout, bool vector>
__global__ void __launch_bounds__(kThreads, 2)
    wide(const T* __restrict__ x, double* __restrict__ g, int d, int r, int parts) {
    using Shape = Tile<T, kLayout, 8>;
    extern __shared__ __align__(128) unsigned char shared[];
    const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, part = blockIdx.x % parts;
    const int64_t matrix = blockIdx.x / parts;
    x += matrix * d * r;
    g += matrix * r * r;
    int a = 0, b = blockIdx.y + 1;
    for (const int panels = (r + kPanel - 1) / kPanel; b >= panels;) b += ++a + 1 - panels;
    T* ring = reinterpret_cast<T*>(shared);
    const int first = part * Shape::depth, hop = parts * Shape::depth;
    const auto fill = [&](int slot, int row) {
        T* to = ring + slot * 2 * Shape::elements;
#pragma unroll 1
        for (int panel = 0; panel < 2; ++panel, to += Shape::elements)
            Shape::template fill<vector>(to, x, d, r, row, kPanel * (panel == 0 ? a : b), threadIdx.x, kThreads);
    };

    double acc[20][4] = {};
    int ahead = first;
    for (int i = 0; i < kStages - 1; ++i, ahead += hop) {
        if (ahead < d) fill(i, ahead);
        commit_copies();
    }
    int slot = 0, free_slot = kStages - 1;
    for (int row = first; row < d; row += hop, ahead += hop) {
        await_copies<kStages - 2>();
        __syncthreads();
        if (ahead < d) fill(free_slot, ahead);
        commit_copies();
        const T* left = ring + slot * 2 * Shape::elements;
        const T* right = left + Shape::elements;
#pragma unroll 1
        for (int block = 0; block < Shape::depth / 16; ++block) {
            if (warp == 0 || warp == 3) {
                float f[8][4];
                Shape::template fragments<0, 8>(f, warp == 0 ? left : right, block, lane);
                multiply_upper<8>(acc, f);
            } else {
                float rows[4][4], columns[4][4];
                if (warp == 1)
                    Shape::template fragments<0, 4>(rows, left, block, lane);
                else
                    Shape::template fragments<4, 4>(rows, left, block, lane);
                Shape::template fragments<0, 4>(columns, right, block, lane);
                multiply_dense<0>(acc, rows, columns);
                Shape::template fragments<4, 4>(columns, right, block, lane);
                multiply_dense<1>(acc, rows, columns);
            }
        }
        free_slot = slot;
        slot = slot + 1 == kStages ? 0 : slot + 1;
    }

    await_copies<0>();
    __syncthreads();
    double* tiles = reinterpret_cast<double*>(shared);
    const int base = warp == 0 ? 0 : warp == 1 ? 20 : warp == 2 ? 36 : 52, count = warp == 0 || warp == 3 ? 20 : 16;
#pragma unroll
    for (int i = 0; i < 20; ++i)
        if (i < count)
#pragma unroll
            for (int e = 0; e < 4; ++e) tiles[((base + i) * 4 + e) * kWarp + lane] = acc[i][e];
    __syncthreads();
    const ClusterSum sum(tiles, parts);
    const int from_a = kPanel * a, from_b = kPanel * b, size_b = r - from_b < kPanel ? r - from_b : kPanel;
    const int start = part * kThreads + threadIdx.x, step = parts * kThreads;
    for (int i = start; i < kPanel * size_b; i += step) {  // block (a, b)
        const int row = Shape::place(i / size_b), column = Shape::place(i % size_b);
        g[int64_t(from_a + i / size_b) * r + from_b + i % size_b] =
            sum(Shape::element(20 + row / 16 * 8 + column / 8, row, column));
    }
    for (int i = start; i < kPanel * size_b; i += step) {  // and its transpose
        const int row = Shape::place(i % kPanel), column = Shape::place(i / kPanel);
        g[int64_t(from_b + i / kPanel) * r + from_a + i % kPanel] =
            sum(Shape::element(20 + row / 16 * 8 + column / 8, row, column));
    }
    if (b == a + 1)
        for (int i = start; i < kPanel * kPanel; i += step)
            g[int64_t(from_a + i / kPanel) * r + from_a + i % kPanel] =
                sum(Shape::upper_index(i / kPanel, i % kPanel));
    if (b == a + 1 && from_b + kPanel >= r)
        for (int i = start; i < size_b * size_b; i += step)
            g[int64_t(from_b + i / size_b) * r + from_b + i % size_b] =
                sum(52 * 4 * kWarp + Shape::upper_index(i / size_b, i % size_b));
    sum.close();
}

}  // namespace gram
}  // namespace lf
