// FP64 matrix products of one warp: fragments, asynchronous staging, and a fallback without tensor cores.
//
// A warp computes C[16, 8] += A[16, 4 S] B[4 S, 8]. Lane = 4 g + t holds
//   a[2 s + e] = A[g + 8 e, k(s, t)]   b[s] = B[k(s, t), g]   c[2 e + f] = C[g + 8 e, 2 t + f]
// where k(s, t) may be any bijection onto the 4 S summed indices, as long as A and B agree on it: the kernels
// choose the one whose reads from shared memory are 16 bytes wide and free of bank conflicts.
#pragma once

#include "portable.cuh"

namespace lf {

#if LF_DMMA
__device__ __forceinline__ void dmma(double (&c)[4], const double (&a)[2], const double (&b)[1]) {
#if __CUDA_ARCH__ >= 900
    asm("mma.sync.aligned.m16n8k4.row.col.f64.f64.f64.f64 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
        : "+d"(c[0]), "+d"(c[1]), "+d"(c[2]), "+d"(c[3])
        : "d"(a[0]), "d"(a[1]), "d"(b[0]));
#else
    asm("mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%0,%1}, {%2}, {%3}, {%0,%1};"
        : "+d"(c[0]), "+d"(c[1])
        : "d"(a[0]), "d"(b[0]));
    asm("mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%0,%1}, {%2}, {%3}, {%0,%1};"
        : "+d"(c[2]), "+d"(c[3])
        : "d"(a[1]), "d"(b[0]));
#endif
}
#else
__device__ __forceinline__ void dmma(double (&c)[4], const double (&a)[2], const double (&b)[1]) {
    const int lane = threadIdx.x % kWarp, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int k = 0; k < 4; ++k) {
        const double upper = shuffle(a[0], 4 * g + k), lower = shuffle(a[1], 4 * g + k);
        const double left = shuffle(b[0], 8 * t + k), right = shuffle(b[0], 8 * t + 4 + k);
        c[0] = fma(upper, left, c[0]);
        c[1] = fma(upper, right, c[1]);
        c[2] = fma(lower, left, c[2]);
        c[3] = fma(lower, right, c[3]);
    }
}
#endif

#if LF_DMMA && __CUDA_ARCH__ >= 900
__device__ __forceinline__ void dmma(double (&c)[4], const double (&a)[4], const double (&b)[2]) {
    asm("mma.sync.aligned.m16n8k8.row.col.f64.f64.f64.f64 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+d"(c[0]), "+d"(c[1]), "+d"(c[2]), "+d"(c[3])
        : "d"(a[0]), "d"(a[1]), "d"(a[2]), "d"(a[3]), "d"(b[0]), "d"(b[1]));
}
__device__ __forceinline__ void dmma(double (&c)[4], const double (&a)[8], const double (&b)[4]) {
    asm("mma.sync.aligned.m16n8k16.row.col.f64.f64.f64.f64 {%0,%1,%2,%3}, {%4,%5,%6,%7,%8,%9,%10,%11}, "
        "{%12,%13,%14,%15}, {%0,%1,%2,%3};"
        : "+d"(c[0]), "+d"(c[1]), "+d"(c[2]), "+d"(c[3])
        : "d"(a[0]), "d"(a[1]), "d"(a[2]), "d"(a[3]), "d"(a[4]), "d"(a[5]), "d"(a[6]), "d"(a[7]), "d"(b[0]),
          "d"(b[1]), "d"(b[2]), "d"(b[3]));
}
#else
template <int S>
__device__ __forceinline__ void dmma(double (&c)[4], const double (&a)[2 * S], const double (&b)[S]) {
#pragma unroll
    for (int s = 0; s < S; ++s) {
        const double upper_lower[2] = {a[2 * s], a[2 * s + 1]}, one[1] = {b[s]};
        dmma(c, upper_lower, one);
    }
}
__device__ __forceinline__ void dmma(double (&c)[4], const double (&a)[4], const double (&b)[2]) { dmma<2>(c, a, b); }
__device__ __forceinline__ void dmma(double (&c)[4], const double (&a)[8], const double (&b)[4]) { dmma<4>(c, a, b); }
#endif

// Four or two neighbouring elements from shared memory, as floats.
__device__ __forceinline__ void load4(float (&out)[4], const float* at) {
    const float4 v = *reinterpret_cast<const float4*>(at);
    out[0] = v.x, out[1] = v.y, out[2] = v.z, out[3] = v.w;
}
__device__ __forceinline__ void load2(float (&out)[2], const float* at) {
    const float2 v = *reinterpret_cast<const float2*>(at);
    out[0] = v.x, out[1] = v.y;
}
template <class Half>
__device__ __forceinline__ void load4(float (&out)[4], const Half* at) {
    static_assert(sizeof(Half) == 2);
    const struct alignas(8) Four { Half h[4]; } v = *reinterpret_cast<const Four*>(at);
#pragma unroll
    for (int i = 0; i < 4; ++i) out[i] = to_float(v.h[i]);
}
template <class Half>
__device__ __forceinline__ void load2(float (&out)[2], const Half* at) {
    static_assert(sizeof(Half) == 2);
    const struct alignas(4) Two { Half h[2]; } v = *reinterpret_cast<const Two*>(at);
    out[0] = to_float(v.h[0]), out[1] = to_float(v.h[1]);
}

// 16 bytes from device to shared memory, or 16 zero bytes; complete after commit_copies and await_copies.
__device__ __forceinline__ void copy16(void* to, const void* from, bool valid) {
#if LF_DMMA
    const unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(to));
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(address), "l"(from), "r"(valid ? 16 : 0)
                 : "memory");
#else
    *static_cast<uint4*>(to) = valid ? *static_cast<const uint4*>(from) : make_uint4(0, 0, 0, 0);
#endif
}
__device__ __forceinline__ void commit_copies() {
#if LF_DMMA
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}
template <int pending>
__device__ __forceinline__ void await_copies() {
#if LF_DMMA
    asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
#endif
}

// Copies a tile of `rows` rows and 2^log_chunks chunks of 16 bytes into shared memory; what lies outside
// rows_valid x columns_valid reads as zero. offset(row, chunk) is where a chunk starts, in elements.
// A stage spans less than 2^31 elements of the source.
// Without `vector` (rows not 16-byte aligned) elements are copied one by one.
template <bool vector, class T, class Offset>
__device__ __forceinline__ void stage(T* to, const T* from, int stride, int rows, int chunks, int rows_valid,
                                      int columns_valid, int thread, int threads, Offset offset) {
    constexpr int wide = 16 / sizeof(T);
    if constexpr (vector) {
#pragma unroll 2  // unrolled whole, the addresses of all copies would push the accumulators out of registers
        for (int i = thread; i < rows * chunks; i += threads) {
            const int row = i / chunks, chunk = i % chunks;
            const bool valid = row < rows_valid && chunk * wide < columns_valid;
            copy16(to + offset(row, chunk), valid ? from + row * stride + chunk * wide : from, valid);
        }
    } else {
        const int columns = chunks * wide;
#pragma unroll 1
        for (int i = thread; i < rows * columns; i += threads) {
            const int row = i / columns, column = i % columns;
            T value{};
            if (row < rows_valid && column < columns_valid) value = from[row * stride + column];
            to[offset(row, column / wide) + column % wide] = value;
        }
    }
}

// Row length, in elements, at which four rows read eight columns (or groups of columns) each without conflicts.
template <class T>
__host__ __device__ constexpr int conflict_free_stride(int columns) {
    const int words = columns * static_cast<int>(sizeof(T)) / 4;
    const int padded = words % 16 <= 8 ? words / 16 * 16 + 8 : words / 16 * 16 + 24;
    return padded * 4 / static_cast<int>(sizeof(T));
}

}  // namespace lf
