// Batched symmetric eigenproblems in FP64: cyclic two-sided Jacobi, disjoint pairs rotated in parallel.
//
// Pairs follow the circle method: position P of 0 ... half - 1 pairs a top and a bottom index, and after each of
// size - 1 steps every index but the first moves on by one place, so that a sweep meets each pair once and ends
// where it began. The matrix stays where it is in shared memory (upper triangle; the diagonal apart) and the two
// indices of a position are computed. Eigenvectors do move: each thread keeps part of one of their rows in
// registers, by position, so register indices are constants and shared memory only serves the matrix.
#pragma once

#include "portable.cuh"

namespace lf {
namespace jacobi {

constexpr int kMaxSweeps = 30;
constexpr double kUnit = 1.1102230246251565e-16;  // 2^-53

template <int kSize>
struct Plan {
    static constexpr int half = kSize / 2;
    static constexpr int pairs = half < 16 ? half : 16;      // positions of one eigenvector row a thread holds
    static constexpr int parts = half / pairs;               // threads to a row
    static constexpr int threads = kSize * parts;            // threads to a matrix
    static constexpr int block = threads < 128 ? 128 : threads;
    static constexpr int matrices = block / threads;         // matrices to a block
    static constexpr int blocks2x2 = half * (half - 1) / 2;  // pairs of positions
    static constexpr int rounds = (blocks2x2 + threads - 1) / threads;
    static_assert(rounds % 2 == 0);
};

template <int kSize>
struct Shared {
    double a[kSize * kSize];
    double diagonal[kSize];
    double2 rotation[2][kSize / 2];
    double partial[32];
    int rank[kSize];
};

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

template <int threads>
__device__ __forceinline__ void group_sync() {
    if constexpr (threads <= kWarp)
        warp_sync();
    else
        __syncthreads();
}

// The same sum, in a fixed order of additions, in every thread of a group.
template <int threads>
__device__ __forceinline__ double group_sum(double value, double* partial) {
    value = warp_sum<(threads < kWarp ? threads : kWarp)>(value);
    if constexpr (threads > kWarp) {
        __syncthreads();
        if (threadIdx.x % kWarp == 0) partial[threadIdx.x / kWarp] = value;
        __syncthreads();
        value = 0;
        for (int i = 0; i < threads / kWarp; ++i) value += partial[i];
    }
    return value;
}

// Descending place of entry i; ties keep their order.
__device__ __forceinline__ int rank_of(const double* values, int i, int n) {
    int rank = 0;
    for (int j = 0; j < n; ++j) rank += values[j] > values[i] || (values[j] == values[i] && j < i);
    return rank;
}

// n <= kSize. Smaller problems are padded with zeros, which no rotation ever touches. A matrix is done once its
// off-diagonal norm is at most 2^-53 sqrt(n) of its norm, about the rounding error of the matrix itself; a matrix
// with NaN or infinity gives NaN.
template <int kSize>
__global__ void __launch_bounds__(Plan<kSize>::block, Plan<kSize>::block > 128 ? 1 : 3)
    shared_kernel(const double* __restrict__ g, double* __restrict__ w, double* __restrict__ v, int* __restrict__ sweeps,
                  int64_t m, int n) {
    using Plan = jacobi::Plan<kSize>;
    extern __shared__ __align__(16) unsigned char bytes[];
    Shared<kSize>& own = reinterpret_cast<Shared<kSize>*>(bytes)[threadIdx.x / Plan::threads];
    const int thread = threadIdx.x % Plan::threads, lane = threadIdx.x % kWarp;
    const int row = thread / Plan::parts, part = thread % Plan::parts;
    const int64_t matrix = int64_t(blockIdx.x) * Plan::matrices + threadIdx.x / Plan::threads;
    const bool present = matrix < m;
    g += matrix * n * n;

    double squares = 0;
    for (int i = thread; i < kSize * kSize; i += Plan::threads) {
        const int r = i / kSize, c = i % kSize;
        const double value = present && r <= c && c < n ? g[r * n + c] : 0.0;
        own.a[i] = r < c ? value : 0.0;
        if (r == c) own.diagonal[r] = value;
        squares += (r < c ? 2.0 : 1.0) * value * value;
    }
    squares = group_sum<Plan::threads>(squares, own.partial);
    group_sync<Plan::threads>();
    const double limit = n * kUnit * kUnit * squares, tolerance = sqrt(limit) / n;
    const bool finite = squares <= 1.7976931348623157e308;

    double upper_row[Plan::pairs], lower_row[Plan::pairs];  // this row's entries at top and bottom positions
#pragma unroll
    for (int i = 0; i < Plan::pairs; ++i) {
        const int position = part * Plan::pairs + i;
        upper_row[i] = row == position ? 1.0 : 0.0;
        lower_row[i] = row == kSize - 1 - position ? 1.0 : 0.0;
    }

    int sweep = 0;
    bool active = true, converged = true;
    for (;;) {
        double off = 0;
        for (int i = thread; i < kSize * kSize; i += Plan::threads) off = fma(own.a[i], own.a[i], off);
        off = 2.0 * group_sum<Plan::threads>(off, own.partial);
        active = finite && off > limit;
        if (active && sweep == kMaxSweeps) active = converged = false;
        bool any = active;  // matrices that share a warp stay together; a finished one turns by nothing
        if constexpr (Plan::threads < kWarp) any = shuffle_xor(int(active), Plan::threads) || active;
        if (!any) break;
        sweep += active;

        const auto turn = [&](int step) {
            if (thread < Plan::half) {
                const int p = top(thread, step, kSize), q = bottom(thread, step, kSize);
                own.rotation[step % 2][thread] =
                    active ? rotate(own.diagonal[p], own.diagonal[q], own.a[upper(p, q, kSize)], tolerance)
                           : make_double2(1.0, 0.0);
            }
        };
        group_sync<Plan::threads>();
        turn(0);
        group_sync<Plan::threads>();
#pragma unroll 1
        for (int step = 0; step < kSize - 1; ++step) {
            const double2* rotation = own.rotation[step % 2];
#pragma unroll
            for (int round = 0; round < Plan::rounds; round += 2) {  // two at a time: all loads before the stores
                double x[2][4];
                int at[2][4];
                double2 cs[2][2];
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    const int item = (round + i) * Plan::threads + thread;
                    const int first = item % Plan::half, second = (first + 1 + item / Plan::half) % Plan::half;
                    const int p = top(first, step, kSize), q = bottom(first, step, kSize);
                    const int r = top(second, step, kSize), s = bottom(second, step, kSize);
                    at[i][0] = int(upper(p, r, kSize)), at[i][1] = int(upper(p, s, kSize));
                    at[i][2] = int(upper(q, r, kSize)), at[i][3] = int(upper(q, s, kSize));
                    cs[i][0] = rotation[first], cs[i][1] = rotation[second];
#pragma unroll
                    for (int e = 0; e < 4; ++e) x[i][e] = own.a[at[i][e]];
                }
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    rotate_block(x[i][0], x[i][1], x[i][2], x[i][3], cs[i][0], cs[i][1]);
                    if ((round + i) * Plan::threads + thread < Plan::blocks2x2)
#pragma unroll
                        for (int e = 0; e < 4; ++e) own.a[at[i][e]] = x[i][e];
                }
            }
            group_sync<Plan::threads>();
            if (step + 1 < kSize - 1) turn(step + 1);  // hidden behind the eigenvectors of the other warps
#pragma unroll
            for (int i = 0; i < Plan::pairs; ++i) {
                const double2 cs = rotation[part * Plan::pairs + i];
                const double x = upper_row[i], y = lower_row[i];
                upper_row[i] = cs.x * x - cs.y * y;
                lower_row[i] = cs.y * x + cs.x * y;
            }
            const double last_top = upper_row[Plan::pairs - 1], first_bottom = lower_row[0];
            double from_left = 0, from_right = 0;
            if constexpr (Plan::parts > 1) {
                from_left = shuffle(last_top, (lane + kWarp - 1) % kWarp);
                from_right = shuffle(first_bottom, (lane + 1) % kWarp);
            }
#pragma unroll
            for (int i = Plan::pairs - 1; i > 1; --i) upper_row[i] = upper_row[i - 1];
            upper_row[1] = part == 0 ? first_bottom : upper_row[0];
            upper_row[0] = part == 0 ? upper_row[0] : from_left;
#pragma unroll
            for (int i = 0; i + 1 < Plan::pairs; ++i) lower_row[i] = lower_row[i + 1];
            lower_row[Plan::pairs - 1] = part == Plan::parts - 1 ? last_top : from_right;
            group_sync<Plan::threads>();
        }
    }

    const double nan = __longlong_as_double(0x7ff8000000000000LL);
    for (int i = thread; i < n; i += Plan::threads) {
        const int rank = finite ? rank_of(own.diagonal, i, n) : i;
        own.rank[i] = rank;
        if (present) w[matrix * n + rank] = finite ? own.diagonal[i] : nan;
    }
    if (present && thread == 0 && sweeps != nullptr) sweeps[matrix] = finite && converged ? sweep : -sweep - 1;
    group_sync<Plan::threads>();
    if (!present || row >= n) return;
    v += (matrix * n + row) * n;
#pragma unroll
    for (int i = 0; i < Plan::pairs; ++i) {
        const int position = part * Plan::pairs + i, mirror = kSize - 1 - position;
        if (position < n) v[own.rank[position]] = finite ? upper_row[i] : nan;
        if (mirror < n) v[own.rank[mirror]] = finite ? lower_row[i] : nan;
    }
}

constexpr int kGlobalThreads = 512;
inline size_t global_shared(int n) {
    const size_t even = n + n % 2;
    return even / 2 * sizeof(double2) + (even + 32) * sizeof(double) + even * sizeof(int);
}

// Any n: the matrix in place in g, which is destroyed, the eigenvectors transposed in v until the end.
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
        return 2.0 * group_sum<kGlobalThreads>(sum, partial);
    };
    double squares = 0;
    for (int i = thread; i < n; i += kGlobalThreads) {
        diagonal[i] = g[int64_t(i) * n + i];
        squares = fma(diagonal[i], diagonal[i], squares);
    }
    for (int64_t i = thread; i < square; i += kGlobalThreads) v[i] = i / n == i % n ? 1.0 : 0.0;
    squares = group_sum<kGlobalThreads>(squares, partial) + off_squares();
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
