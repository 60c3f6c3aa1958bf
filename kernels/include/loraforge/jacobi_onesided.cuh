// Batched symmetric eigenproblems in FP64: one-sided Jacobi on a pivoted Cholesky factor (Veselic and Hari).
//
// G + shift I = L L^T with diagonal pivoting; rotations from the right make the columns of L orthogonal, and then
// they are the eigenvectors, scaled by the square roots of the eigenvalues: no eigenvectors are accumulated. L lives
// in registers: lanes share the rows, a warp owns two half blocks of columns and meets all pairs across them without
// touching shared memory; then half blocks move between warps. Columns are kept as y times a scale, so that a
// rotation is two FMAs an element, and angles need FP32 only: any angle gives an orthogonal rotation as long as
// cosine and sine belong together, which they do to FP64.
#pragma once

#include "jacobi.cuh"

namespace lf {
namespace jacobi {
namespace onesided {

constexpr double kSmallTurn = 1e-17;  // squared; after a sweep of such turns what is left is their square

// Orders up to the smaller of 32 row_lanes and 2 half_block team.
template <int row_lanes, int half_block, int team, int unrolled, int blocks>
struct Plan {
    static constexpr int rows = row_lanes;                   // rows a lane
    static constexpr int half = half_block;                  // columns to a half block, a power of two
    static constexpr int warps = team;                       // warps to a matrix, a power of two
    static constexpr int unroll = unrolled;                  // steps to the body of the inner loop
    static constexpr int resident = blocks;                  // blocks to a multiprocessor to compile for
    static constexpr int matrices = warps == 1 ? 4 : 1;      // to a block
    static constexpr int threads = kWarp * warps * matrices;
    static constexpr int columns = 2 * half * warps;
    static constexpr int height = kWarp * rows;
    static constexpr int stride = height + 1;                // of a column in shared memory
    static constexpr int moving = kWarp * (half * rows + 4);  // doubles of a half block on the move
    static constexpr int largest = columns < height ? columns : height;
    static constexpr int copies = kWarp / half;              // lanes that hold the same pair
    static_assert(half * copies == kWarp && half % unroll == 0 && height <= 128);
};

template <class Plan>
struct Shared {
    static constexpr int whole = Plan::columns * Plan::stride, moves = Plan::warps > 1 ? 2 * Plan::warps * Plan::moving : 0;
    double2 turn[Plan::warps][2][Plan::half];
    double buffer[whole > moves ? whole : moves];
    double pivot_column[2][Plan::height];
    double norm[Plan::columns], sorted[Plan::columns];
    double partial[Plan::warps];
    int rank[Plan::columns];
    int flags[Plan::warps];
};

// A half block in the registers of a warp. The lane that holds pair i has the state of column i.
template <class Plan>
struct Half {
    double y[Plan::half][Plan::rows];
    double norm, scale, low, inverse;  // squared norm; the columns are y (scale + low); 1 / scale
};

template <class Plan>
__device__ __forceinline__ void team_sync() {
    if constexpr (Plan::warps == 1)
        warp_sync();
    else
        __syncthreads();
}

// Sums the first `count` values over lanes that differ in `mask` and below; lane l of a warp gets the sum of value
// l / (32 / count) when started with 16.
template <int count, int mask = kWarp / 2, int size>
__device__ __forceinline__ double sum_many(double (&values)[size], int lane) {
    if constexpr (mask == 0) {
        return values[0];
    } else if constexpr (count == 1) {
        values[0] += shuffle_xor(values[0], mask);
        return sum_many<1, mask / 2>(values, lane);
    } else {
        const bool upper = lane & mask;
#pragma unroll
        for (int i = 0; i < count / 2; ++i) {
            const double a = values[i], b = values[i + count / 2];
            values[i] = (upper ? b : a) + shuffle_xor(upper ? a : b, mask);
        }
        return sum_many<count / 2, mask / 2>(values, lane);
    }
}

// The same maximum or sum of non-negative numbers in every thread of a team.
template <class Plan, bool maximum>
__device__ __forceinline__ double team_total(double value, double* partial, int warp) {
#pragma unroll
    for (int mask = kWarp / 2; mask > 0; mask /= 2) {
        const double other = shuffle_xor(value, mask);
        value = maximum ? fmax(value, other) : value + other;
    }
    if constexpr (Plan::warps > 1) {
        __syncthreads();
        if (threadIdx.x % kWarp == 0) partial[warp] = value;
        __syncthreads();
        value = partial[0];
        for (int i = 1; i < Plan::warps; ++i) value = maximum ? fmax(value, partial[i]) : value + partial[i];
    }
    return value;
}

// Multiplies the scale by 1 + by, and its inverse by 1 + back. Factors near one round the scale to one side, which would
// show in the eigenvalues after hundreds of turns: what is lost is kept apart.
template <class Plan>
__device__ __forceinline__ void rescale(Half<Plan>& half, double by, double back) {
    const double scale = fma(half.scale, by, half.scale), inverse = fma(half.inverse, back, half.inverse);
    half.low = fma(half.low, by, half.low) + fma(half.scale, by, half.scale - scale);
    half.scale = scale;
    half.inverse = by == 0.0 ? half.inverse : fma(inverse, fma(-scale, inverse, 1.0), inverse);
}

// Turns the pairs (p.y[i], q.y[(i + offset) % half]) to be orthogonal; the states are already beside each other.
// Adds 1 to flags where there was one to turn, 2 where a turn was not small.
template <class Plan, int offset>
__device__ __forceinline__ void step(Half<Plan>& p, Half<Plan>& q, double2* turn, double tolerance, int& flags, int lane) {
    constexpr int half = Plan::half;
    double dots[half];
#pragma unroll
    for (int i = 0; i < half; ++i) {
        const int j = (i + offset) % half;
        dots[i] = p.y[i][0] * q.y[j][0];
#pragma unroll
        for (int r = 1; r < Plan::rows; ++r) dots[i] = fma(p.y[i][r], q.y[j][r], dots[i]);
    }
    const double dot = sum_many<half>(dots, lane) * (p.scale * q.scale);
    const bool apart = !(dot * dot > tolerance * fabs(p.norm * q.norm));
    if (!warp_any(!apart)) {
        warp_sync();  // the step after next writes over what the one before this read
        return;
    }
    const double gap = q.norm - p.norm;
    const float z = __fdividef(float(gap), float(2.0 * dot)), size = fabsf(z), square = fmaf(z, z, 1.0f);
    const float root = size > 1e4f ? size : square * rsqrtf(square);
    const float tangent = apart ? 0.0f : copysignf(__fdividef(1.0f, size + root), z);
    const double t = tangent, t2 = t * t;
    // 1 - cosine and its square to FP64: the guess and its square are exact in FP64, and so is what it lacks to first
    // order
    const double guess = rsqrtf(fmaf(tangent, tangent, 1.0f)), guess2 = guess * guess;
    const double lacking = fma(-t2, guess2, 1.0 - guess2);
    const double cosine2 = guess2 * fma(lacking, 1.0 + lacking, 1.0);
    if (lane % Plan::copies == 0)
        turn[lane / Plan::copies] = make_double2(t * (q.scale * p.inverse), t * cosine2 * (p.scale * q.inverse));
    warp_sync();
    // one after the other: a rotation in place, with 1 / cosine for the second scale
#pragma unroll
    for (int i = 0; i < half; ++i) {
        const int j = (i + offset) % half;
        const double2 by = turn[i];
#pragma unroll
        for (int r = 0; r < Plan::rows; ++r) p.y[i][r] = fma(-by.x, q.y[j][r], p.y[i][r]);
#pragma unroll
        for (int r = 0; r < Plan::rows; ++r) q.y[j][r] = fma(by.y, p.y[i][r], q.y[j][r]);
    }
    const double versine = apart ? 0.0 : fma(-guess, lacking * fma(0.375, lacking, 0.5), 1.0 - guess);
    const double exsecant = fma(-t2, versine, t2 - versine);
    if (!apart) flags |= t2 * fmax(p.norm, q.norm) > kSmallTurn * fmin(p.norm, q.norm) ? 3 : 1;
    p.norm = fma(-t, dot, p.norm);
    q.norm = fma(t, dot, q.norm);
    rescale(p, -versine, exsecant);
    rescale(q, exsecant, -versine);
}

// Brings the state of the next column, cyclically among `group` columns, beside each pair.
template <class Plan>
__device__ __forceinline__ void next_state(Half<Plan>& q, int group, int lane) {
    const int pair = lane / Plan::copies;
    const int from = ((pair & -group) | ((pair + 1) & (group - 1))) * Plan::copies + lane % Plan::copies;
    q.norm = shuffle(q.norm, from);
    q.scale = shuffle(q.scale, from);
    q.low = shuffle(q.low, from);
    q.inverse = shuffle(q.inverse, from);
}

// Moves the columns by `by` places, cyclically in groups.
template <int group, int by, class Plan>
__device__ __forceinline__ void next_columns(Half<Plan>& q) {
    if constexpr (group > 1 && by < group) {
#pragma unroll
        for (int first = 0; first < Plan::half; first += group)
#pragma unroll
            for (int r = 0; r < Plan::rows; ++r) {
                double x[group];
#pragma unroll
                for (int i = 0; i < group; ++i) x[i] = q.y[first + (i + by) % group][r];
#pragma unroll
                for (int i = 0; i < group; ++i) q.y[first + i][r] = x[i];
            }
    }
}

// The steps after `done` others: one writes its angles where the one before does not read.
template <class Plan, int offset = 0>
__device__ __forceinline__ void steps(Half<Plan>& p, Half<Plan>& q, double2 (*turn)[Plan::half], int done, double tolerance,
                                      int& flags, int lane) {
    step<Plan, offset>(p, q, turn[(done + offset) % 2], tolerance, flags, lane);
    next_state(q, Plan::half, lane);
    if constexpr (offset + 1 < Plan::unroll) steps<Plan, offset + 1>(p, q, turn, done, tolerance, flags, lane);
}

// All pairs of a column of p and one of q.
template <class Plan>
__device__ __forceinline__ void across(Half<Plan>& p, Half<Plan>& q, double2 (*turn)[Plan::half], double tolerance, int& flags,
                                       int lane) {
#pragma unroll 1
    for (int s = 0; s < Plan::half; s += Plan::unroll) {
        steps<Plan>(p, q, turn, s, tolerance, flags, lane);
        next_columns<Plan::half, Plan::unroll>(q);
    }
}

// All pairs inside p and inside q: quarter blocks across, then eighths, and so on.
template <int group, class Plan>
__device__ __forceinline__ void trade(Half<Plan>& p, Half<Plan>& q, int lane) {
#pragma unroll
    for (int i = 0; i < Plan::half; ++i)
        if (i & group)
#pragma unroll
            for (int r = 0; r < Plan::rows; ++r) {
                const double x = p.y[i][r];
                p.y[i][r] = q.y[i - group][r];
                q.y[i - group][r] = x;
            }
    const bool upper = lane / Plan::copies & group;
    const auto both = [&](double& a, double& b) {
        const double got = shuffle_xor(upper ? a : b, group * Plan::copies);
        (upper ? a : b) = got;
    };
    both(p.norm, q.norm);
    both(p.scale, q.scale);
    both(p.low, q.low);
    both(p.inverse, q.inverse);
}

template <int group, class Plan, class Body>
__device__ __forceinline__ void with_group(int runtime, Body&& body) {
    if (runtime == group)
        body.template operator()<group>();
    else if constexpr (group > 1)
        with_group<group / 2, Plan>(runtime, body);
}

template <class Plan>
struct Trade {
    Half<Plan>&p, &q;
    int lane;
    template <int group>
    __device__ __forceinline__ void operator()() const {
        trade<group>(p, q, lane);
    }
};
template <class Plan>
struct Next {
    Half<Plan>& q;
    template <int group>
    __device__ __forceinline__ void operator()() const {
        next_columns<group, 1>(q);
    }
};

template <class Plan>
__device__ __forceinline__ void inside(Half<Plan>& p, Half<Plan>& q, double2 (*turn)[Plan::half], double tolerance, int& flags,
                                       int lane) {
#pragma unroll 1
    for (int group = Plan::half / 2; group > 0; group /= 2) {
        with_group<Plan::half / 2, Plan>(group, Trade<Plan>{p, q, lane});
#pragma unroll 1
        for (int s = 0; s < group; ++s) {
            step<Plan, 0>(p, q, turn[s % 2], tolerance, flags, lane);
            next_state(q, group, lane);
            with_group<Plan::half / 2, Plan>(group, Next<Plan>{q});
        }
    }
}

// Hands a half block to whom it concerns and takes that of warp `from`.
template <class Plan>
__device__ __forceinline__ void move(Half<Plan>& half, double* buffer, int warp, int from, int lane) {
    constexpr int elements = Plan::half * Plan::rows;
    static_assert(elements % 2 == 0);
    double2* to = reinterpret_cast<double2*>(buffer + warp * Plan::moving) + lane;
    const double2* at = reinterpret_cast<const double2*>(buffer + from * Plan::moving) + lane;
#pragma unroll
    for (int i = 0; i < elements; i += 2)
        to[i / 2 * kWarp] = make_double2(half.y[i / Plan::rows][i % Plan::rows], half.y[(i + 1) / Plan::rows][(i + 1) % Plan::rows]);
    to[elements / 2 * kWarp] = make_double2(half.norm, half.scale);
    to[(elements / 2 + 1) * kWarp] = make_double2(half.low, half.inverse);
    __syncthreads();
#pragma unroll
    for (int i = 0; i < elements; i += 2) {
        const double2 x = at[i / 2 * kWarp];
        half.y[i / Plan::rows][i % Plan::rows] = x.x;
        half.y[(i + 1) / Plan::rows][(i + 1) % Plan::rows] = x.y;
    }
    const double2 first = at[elements / 2 * kWarp], second = at[(elements / 2 + 1) * kWarp];
    half.norm = first.x, half.scale = first.y, half.low = second.x, half.inverse = second.y;
}

// Meets every pair of columns once. In a group of warps every first half block meets every second one, which go
// round; then the firsts and the seconds form groups of half the size.
template <class Plan>
__device__ __forceinline__ int sweep(Half<Plan>& p, Half<Plan>& q, Shared<Plan>& own, double tolerance, int warp, int lane) {
    int flags = 0, moves = 0;
#pragma unroll 1
    for (int group = Plan::warps; group > 0; group /= 2) {
#pragma unroll 1
        for (int round = 0; round < group; ++round) {
            // columns of padding come last and in half blocks of their own, mostly
            if (warp_any(p.norm > 0.0) && warp_any(q.norm > 0.0)) across(p, q, own.turn[warp], tolerance, flags, lane);
            if constexpr (Plan::warps > 1) {
                if (group == 1) break;
                double* buffer = own.buffer + moves++ % 2 * Plan::warps * Plan::moving;
                const int place = warp & (group - 1);
                if (round + 1 < group)
                    move(q, buffer, warp, (warp - place) | ((place + 1) & (group - 1)), lane);
                else if (place < group / 2)
                    move(q, buffer, warp, warp ^ group / 2, lane);
                else
                    move(p, buffer, warp, warp ^ group / 2, lane);
            }
        }
    }
    inside(p, q, own.turn[warp], tolerance, flags, lane);
    if (lane % Plan::copies == 0)
        own.turn[warp][1][lane / Plan::copies] = make_double2(p.scale + p.low, q.scale + q.low);
    warp_sync();
#pragma unroll
    for (int i = 0; i < Plan::half; ++i) {
        const double2 scale = own.turn[warp][1][i];
#pragma unroll
        for (int r = 0; r < Plan::rows; ++r) p.y[i][r] *= scale.x, q.y[i][r] *= scale.y;
    }
#pragma unroll
    for (int mask = kWarp / 2; mask > 0; mask /= 2) flags |= shuffle_xor(flags, mask);
    return flags;
}

// Puts the columns in order of descending norms into own.buffer, the squared norms into own.sorted.
template <class Plan>
__device__ __forceinline__ void sort(Half<Plan>& p, Half<Plan>& q, Shared<Plan>& own, int warp, int lane) {
    const int first = warp * 2 * Plan::half, place = first + lane / Plan::copies;
    const auto squares = [&](const Half<Plan>& half) {
        double sums[Plan::half];
#pragma unroll
        for (int i = 0; i < Plan::half; ++i) {
            sums[i] = half.y[i][0] * half.y[i][0];
#pragma unroll
            for (int r = 1; r < Plan::rows; ++r) sums[i] = fma(half.y[i][r], half.y[i][r], sums[i]);
        }
        return sum_many<Plan::half>(sums, lane);
    };
    const double p_norm = squares(p), q_norm = squares(q);
    if (lane % Plan::copies == 0) own.norm[place] = p_norm, own.norm[place + Plan::half] = q_norm;
    team_sync<Plan>();
    for (int i = warp * kWarp + lane; i < Plan::columns; i += Plan::warps * kWarp) {
        own.rank[i] = rank_of(own.norm, i, Plan::columns);
        own.sorted[own.rank[i]] = own.norm[i];
    }
    team_sync<Plan>();
#pragma unroll
    for (int i = 0; i < 2 * Plan::half; ++i) {
        double* to = own.buffer + own.rank[first + i] * Plan::stride + lane;
        const double(&y)[Plan::rows] = i < Plan::half ? p.y[i % Plan::half] : q.y[i % Plan::half];
#pragma unroll
        for (int r = 0; r < Plan::rows; ++r) to[kWarp * r] = y[r];
    }
    team_sync<Plan>();
}

// Takes the sorted columns back.
template <class Plan>
__device__ __forceinline__ void take(Half<Plan>& half, const Shared<Plan>& own, int first, int lane) {
#pragma unroll
    for (int i = 0; i < Plan::half; ++i)
#pragma unroll
        for (int r = 0; r < Plan::rows; ++r) half.y[i][r] = own.buffer[(first + i) * Plan::stride + lane + kWarp * r];
    half.norm = own.sorted[first + lane / Plan::copies];
    half.scale = half.inverse = 1.0;
    half.low = 0.0;
}

// L of the matrix in p and q, whose diagonal is also given by rows, in its place: the column of a pivot becomes that
// of L, rows stay where they are. False where a pivot is not above `floor`; if `always`, it is taken as that.
template <class Plan>
__device__ __forceinline__ bool factorise(Half<Plan>& p, Half<Plan>& q, double (&diagonal)[Plan::rows], Shared<Plan>& own,
                                          int n, double floor, bool always, int warp, int lane) {
    constexpr int width = 2 * Plan::half;
    unsigned done = 0, live = 0;  // rows that had their pivot or are padding; columns that are neither
#pragma unroll
    for (int r = 0; r < Plan::rows; ++r) done |= unsigned(lane + kWarp * r >= n) << r;
#pragma unroll
    for (int i = 0; i < width; ++i) live |= unsigned(warp * width + i < n) << i;
#pragma unroll 1
    for (int k = 0; k < n; ++k) {
        // the largest to 13 bits: the low ones of its upper word give way to the row
        unsigned best = 0;
#pragma unroll
        for (int r = 0; r < Plan::rows; ++r) {
            const int word = __double2hiint(diagonal[r]), row = lane + kWarp * r;
            const unsigned key = (unsigned(word < 128 ? 128 : word) & ~127u) | unsigned(127 - row);
            if (!(done >> r & 1) && key > best) best = key;
        }
        const int pivot = 127 - int(warp_max(best) & 127u), slot = pivot - warp * width;
        double* column = own.pivot_column[k % 2];
#pragma unroll
        for (int i = 0; i < width; ++i)
            if (i == slot) {
                const double(&y)[Plan::rows] = i < Plan::half ? p.y[i % Plan::half] : q.y[i % Plan::half];
#pragma unroll
                for (int r = 0; r < Plan::rows; ++r) column[lane + kWarp * r] = done >> r & 1 ? 0.0 : y[r];
            }
        team_sync<Plan>();
        double value = column[pivot];
        if (!(value > floor)) {
            if (!always) return false;
            value = floor;
        }
        const double root = rsqrt(value);
        double entry[Plan::rows], factor[Plan::rows];
#pragma unroll
        for (int r = 0; r < Plan::rows; ++r) {
            entry[r] = column[lane + kWarp * r];
            factor[r] = -entry[r] * (root * root);
            diagonal[r] = fma(factor[r], entry[r], diagonal[r]);
        }
#pragma unroll
        for (int i = 0; i < width; ++i) {
            if (!(live >> i & 1)) continue;
            double(&y)[Plan::rows] = i < Plan::half ? p.y[i % Plan::half] : q.y[i % Plan::half];
            const double other = column[warp * width + i];
#pragma unroll
            for (int r = 0; r < Plan::rows; ++r) y[r] = i == slot ? entry[r] * root : fma(factor[r], other, y[r]);
        }
        if (slot >= 0 && slot < width) live &= ~(1u << slot);
        if (pivot % kWarp == lane) done |= 1u << pivot / kWarp;
    }
    return true;
}

// The contract of lf_jacobi for n <= Plan::largest; g is only read. A shift of about the rounding error of G makes
// semidefinite matrices definite; where that is not enough, a little over the Frobenius norm is.
template <class Plan>
__global__ void __launch_bounds__(Plan::threads, Plan::resident)
    kernel(const double* __restrict__ g, double* __restrict__ w, double* __restrict__ v, int* __restrict__ sweeps, int64_t m,
           int n) {
    LF_DYNAMIC_SHARED(Shared<Plan>, all);
    constexpr int team = kWarp * Plan::warps;
    Shared<Plan>& own = all[threadIdx.x / team];
    const int thread = threadIdx.x % team, lane = thread % kWarp, warp = thread / kWarp;
    const int64_t matrix = int64_t(blockIdx.x) * Plan::matrices + threadIdx.x / team;
    if (matrix >= m) return;
    g += matrix * n * n, w += matrix * n, v += matrix * n * n;

    Half<Plan> p, q;
    const int first = warp * 2 * Plan::half;
    const auto load = [&](Half<Plan>& half, int column, double scale, double shift) {
#pragma unroll
        for (int i = 0; i < Plan::half; ++i)
#pragma unroll
            for (int r = 0; r < Plan::rows; ++r) {
                const int row = lane + kWarp * r, c = column + i;
                half.y[i][r] = row < n && c < n ? g[upper(row, c, n)] * scale + (row == c ? shift : 0.0) : 0.0;
            }
    };
    const auto total = [&](auto&& function) {
        double sum = 0;
#pragma unroll
        for (int i = 0; i < Plan::half; ++i)
#pragma unroll
            for (int r = 0; r < Plan::rows; ++r) {
                function(sum, p.y[i][r]);
                function(sum, q.y[i][r]);
            }
        return sum;
    };
    load(p, first, 1.0, 0.0);
    load(q, first + Plan::half, 1.0, 0.0);
    const double infinity = __longlong_as_double(0x7ff0000000000000LL), nan = __longlong_as_double(0x7ff8000000000000LL);
    const double peak = team_total<Plan, true>(total([&](double& most, double x) {
        x = fabs(x);
        most = x < infinity ? fmax(most, x) : infinity;
    }), own.partial, warp);
    if (!(peak < infinity)) {
        for (int i = thread; i < n; i += team) w[i] = nan;
        for (int i = thread; i < n * n; i += team) v[i] = nan;
        if (thread == 0 && sweeps != nullptr) sweeps[matrix] = -1;
        return;
    }
    // a power of two brings the largest entry to between 1 and 2 (4 at the very top); no entry but zeros and
    // subnormal numbers gives a factor of zero on the way back
    const int64_t exponent = __double_as_longlong(peak) >> 52, inverse = exponent < 2045 ? 2046 - exponent : 1;
    const double down = __longlong_as_double(inverse << 52);
    const double up = __longlong_as_double(exponent == 0 ? 0 : (2046 - inverse) << 52);
    const double squares = team_total<Plan, false>(total([&](double& sum, double x) {
        x *= down;
        sum = fma(x, x, sum);
    }), own.partial, warp);
    const double norm = fmax(1.0, sqrt(squares)), least = n * kUnit * norm;
    double shift = least;
    for (bool again = false;; again = true) {
        load(p, first, down, shift);
        load(q, first + Plan::half, down, shift);
        double diagonal[Plan::rows];
#pragma unroll
        for (int r = 0; r < Plan::rows; ++r) {
            const int row = lane + kWarp * r;
            diagonal[r] = row < n ? g[int64_t(row) * n + row] * down + shift : 0.0;
        }
        if (factorise(p, q, diagonal, own, n, least / 8, again, warp, lane)) break;
        shift = 1.0625 * norm;
        team_sync<Plan>();
    }

    const double tolerance = (n + 16) * kUnit * kUnit;
    int count = 0, passes = 0;
    bool more = true;
    for (;;) {
        sort(p, q, own, warp, lane);
        if (!more || passes == kMaxSweeps) break;
        take(p, own, first, lane);
        take(q, own, first + Plan::half, lane);
        team_sync<Plan>();
        int flags = sweep(p, q, own, tolerance, warp, lane);
        if constexpr (Plan::warps > 1) {
            if (lane == 0) own.flags[warp] = flags;
            __syncthreads();
            for (int i = 0; i < Plan::warps; ++i) flags |= own.flags[i];
        }
        ++passes;
        count += flags & 1;
        more = flags & 2;
    }

    for (int i = thread; i < n; i += team) {
        w[i] = (own.sorted[i] - shift) * up;
        own.norm[i] = 1.0 / sqrt(own.sorted[i]);
    }
    if (thread == 0 && sweeps != nullptr) sweeps[matrix] = more ? -count - 1 : count;
    team_sync<Plan>();
    for (int row = warp; row < n; row += Plan::warps)
        for (int i = lane; i < n; i += kWarp) v[int64_t(row) * n + i] = own.buffer[i * Plan::stride + row] * own.norm[i];
}

template <class Plan>
constexpr size_t shared_bytes() {
    return Plan::matrices * sizeof(Shared<Plan>);
}

template <class Plan>
inline int start(const double* g, double* w, double* v, int* sweeps, int64_t m, int n, void* stream) {
    if (const auto e = allow_shared(kernel<Plan>, shared_bytes<Plan>()); e != kOk) return e;
    const int64_t blocks = (m + Plan::matrices - 1) / Plan::matrices;
    return launch(kernel<Plan>, blocks, Plan::threads, shared_bytes<Plan>(), stream, g, w, v, sweeps, m, n);
}

}  // namespace onesided
}  // namespace jacobi
}  // namespace lf
