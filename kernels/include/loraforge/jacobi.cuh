// Symmetric eigenproblems of any order in FP64: cyclic two-sided Jacobi in global memory, disjoint pairs rotated in
// parallel. jacobi_onesided.cuh has the fast solver of small ones.
//
// Pairs follow the circle method: position P of 0 ... half - 1 pairs a top and a bottom index, and after each of
// size - 1 steps every index but the first moves on by one place, so that a sweep meets each pair once and ends
// where it began. The matrix stays where it is (upper triangle; the diagonal apart) and the two indices of a
// position are computed.
#pragma once

#include "portable.cuh"

namespace lf {
namespace jacobi {

constexpr int kMaxSweeps = 30;
constexpr double kUnit = 1.1102230246251565e-16;  // 2^-53

// Index at ring place u after `step` moves; size - 1 places.
__device__ __forceinline__ int ring(int u, int step, int size) {
    const int at = u - step;
    return 1 + (at < 0 ? at + size - 1 : at);
}
__device__ __forceinline__ int top(int position, int step, int size) {
    return position == 0 ? 0 : ring(position - 1, step, size);
}
__device__ __forceinline__ int bottom(int position, int step, int size) {
    return ring(size - 2 - position, step, size);
}
// Where the entry (i, j), i != j, of the upper triangle lies.
__device__ __forceinline__ int64_t upper(int i, int j, int stride) {
    return int64_t(i < j ? i : j) * stride + (i < j ? j : i);
}

// Annihilates a_pq: cosine and sine with p' = c p - s q, q' = s p + c q; updates the diagonal.
__device__ __forceinline__ double2 rotate(double& app, double& aqq, double& apq, double tolerance) {
    if (!(fabs(apq) > tolerance)) return make_double2(1.0, 0.0);
    const double gap = aqq - app, twice = 2.0 * apq;
    const double t = twice / (gap + copysign(sqrt(fma(gap, gap, twice * twice)), gap));
    const double c = rsqrt(fma(t, t, 1.0));
    app = fma(-t, apq, app);
    aqq = fma(t, apq, aqq);
    apq = 0.0;
    return make_double2(c, t * c);
}

// J_P^T [[x00, x01], [x10, x11]] J_Q
__device__ __forceinline__ void rotate_block(double& x00, double& x01, double& x10, double& x11, double2 p, double2 q) {
    const double y00 = p.x * x00 - p.y * x10, y10 = p.y * x00 + p.x * x10;
    const double y01 = p.x * x01 - p.y * x11, y11 = p.y * x01 + p.x * x11;
    x00 = q.x * y00 - q.y * y01, x01 = q.y * y00 + q.x * y01;
    x10 = q.x * y10 - q.y * y11, x11 = q.y * y10 + q.x * y11;
}

constexpr int kGlobalThreads = 512;

// The same sum, in a fixed order of additions, in every thread of the block.
__device__ __forceinline__ double block_sum(double value, double* partial) {
    value = warp_sum(value);
    __syncthreads();
    if (threadIdx.x % kWarp == 0) partial[threadIdx.x / kWarp] = value;
    __syncthreads();
    value = 0;
    for (int i = 0; i < kGlobalThreads / kWarp; ++i) value += partial[i];
    return value;
}

// Descending place of entry i; ties keep their order.
__device__ __forceinline__ int rank_of(const double* values, int i, int n) {
    int rank = 0;
    for (int j = 0; j < n; ++j) rank += values[j] > values[i] || (values[j] == values[i] && j < i);
    return rank;
}

inline size_t global_shared(int n) {
    const size_t even = n + n % 2;
    return even / 2 * sizeof(double2) + (even + 32) * sizeof(double) + even * sizeof(int);
}

// The matrix in place in g, which is destroyed, the eigenvectors transposed in v until the end. A matrix is done once
// its off-diagonal norm is at most 2^-53 sqrt(n) of its norm, about the rounding error of the matrix itself; a matrix
// with NaN or infinity gives NaN.
__global__ void __launch_bounds__(kGlobalThreads, 1)
    global_kernel(double* __restrict__ g, double* __restrict__ w, double* __restrict__ v, int* __restrict__ sweeps, int n) {
    extern __shared__ __align__(16) unsigned char bytes[];
    const int size = n + n % 2, half = size / 2;
    double2* rotation = reinterpret_cast<double2*>(bytes);
    double* diagonal = reinterpret_cast<double*>(rotation + half);
    double* partial = diagonal + size;
    int* ranks = reinterpret_cast<int*>(partial + 32);
    const int thread = threadIdx.x, lane = thread % kWarp, warp = thread / kWarp;
    const int64_t matrix = blockIdx.x, square = int64_t(n) * n;
    g += matrix * square, v += matrix * square, w += matrix * n;

    const auto off_squares = [&] {
        double sum = 0;
        for (int i = warp; i < n; i += kGlobalThreads / kWarp)
            for (int j = i + 1 + lane; j < n; j += kWarp) sum = fma(g[int64_t(i) * n + j], g[int64_t(i) * n + j], sum);
        return 2.0 * block_sum(sum, partial);
    };
    double squares = 0;
    for (int i = thread; i < n; i += kGlobalThreads) {
        diagonal[i] = g[int64_t(i) * n + i];
        squares = fma(diagonal[i], diagonal[i], squares);
    }
    for (int64_t i = thread; i < square; i += kGlobalThreads) v[i] = i / n == i % n ? 1.0 : 0.0;
    squares = block_sum(squares, partial) + off_squares();
    const double limit = n * kUnit * kUnit * squares, tolerance = sqrt(limit) / n;
    const bool finite = squares <= 1.7976931348623157e308;

    int sweep = 0;
    bool converged = true;
    while (finite && off_squares() > limit) {
        if (sweep == kMaxSweeps) {
            converged = false;
            break;
        }
        ++sweep;
        for (int step = 0; step < size - 1; ++step) {
            __syncthreads();
            for (int i = thread; i < half; i += kGlobalThreads) {
                const int p = top(i, step, size), q = bottom(i, step, size);
                rotation[i] = p < n && q < n ? rotate(diagonal[p], diagonal[q], g[upper(p, q, n)], tolerance)
                                             : make_double2(1.0, 0.0);
            }
            __syncthreads();
            for (int item = thread; item < half * (half - 1) / 2; item += kGlobalThreads) {
                const int first = item % half, second = (first + 1 + item / half) % half;
                const int p = top(first, step, size), q = bottom(first, step, size);
                const int r = top(second, step, size), s = bottom(second, step, size);
                const bool has_p = p < n, has_q = q < n, has_r = r < n, has_s = s < n;  // an odd n has one ghost
                double x00 = has_p && has_r ? g[upper(p, r, n)] : 0.0, x01 = has_p && has_s ? g[upper(p, s, n)] : 0.0;
                double x10 = has_q && has_r ? g[upper(q, r, n)] : 0.0, x11 = has_q && has_s ? g[upper(q, s, n)] : 0.0;
                rotate_block(x00, x01, x10, x11, rotation[first], rotation[second]);
                if (has_p && has_r) g[upper(p, r, n)] = x00;
                if (has_p && has_s) g[upper(p, s, n)] = x01;
                if (has_q && has_r) g[upper(q, r, n)] = x10;
                if (has_q && has_s) g[upper(q, s, n)] = x11;
            }
            for (int i = warp; i < half; i += kGlobalThreads / kWarp) {
                const double2 cs = rotation[i];
                if (cs.y == 0.0) continue;
                double* a = v + int64_t(top(i, step, size)) * n;
                double* b = v + int64_t(bottom(i, step, size)) * n;
                for (int j = lane; j < n; j += kWarp) {
                    const double x = a[j], y = b[j];
                    a[j] = cs.x * x - cs.y * y;
                    b[j] = cs.y * x + cs.x * y;
                }
            }
        }
        __syncthreads();
    }

    __syncthreads();
    const double nan = __longlong_as_double(0x7ff8000000000000LL);
    for (int i = thread; i < n; i += kGlobalThreads) {
        const int rank = finite ? rank_of(diagonal, i, n) : i;
        ranks[i] = rank;
        w[rank] = finite ? diagonal[i] : nan;
    }
    if (thread == 0 && sweeps != nullptr) sweeps[matrix] = finite && converged ? sweep : -sweep - 1;
    __syncthreads();
    for (int64_t i = thread; i < square; i += kGlobalThreads) g[i % n * n + ranks[i / n]] = v[i];
    __syncthreads();
    for (int64_t i = thread; i < square; i += kGlobalThreads) v[i] = finite ? g[i] : nan;
}

}  // namespace jacobi
}  // namespace lf
