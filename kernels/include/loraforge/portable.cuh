// The only place where CUDA and HIP differ: runtime names, shuffles, shared-memory limits, element types.
#pragma once

#include <cstddef>
#include <cstdint>

#if defined(__HIPCC__) || defined(__HIP_PLATFORM_AMD__)
#define LF_HIP 1
#include <hip/hip_fp16.h>
#include <hip/hip_runtime.h>
#else
#define LF_HIP 0
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#endif

#define LF_API extern "C" __attribute__((visibility("default")))

// Tensor-core FP64 (DMMA) exists from compute capability 8.0; every use has an FMA fallback.
#if !LF_HIP && defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
#define LF_DMMA 1
#else
#define LF_DMMA 0
#endif

// The block's dynamic shared memory, 16-byte aligned, seen as an array.
#define LF_DYNAMIC_SHARED(type, name)                               \
    extern __shared__ __align__(16) unsigned char lf_dynamic_shared[]; \
    type* name = reinterpret_cast<type*>(lf_dynamic_shared)

namespace lf {

#if LF_HIP
using stream_t = hipStream_t;
using error_t = hipError_t;
constexpr error_t kOk = hipSuccess;
inline error_t last_error() { return hipGetLastError(); }
inline error_t current_device(int* device) { return hipGetDevice(device); }
inline error_t multiprocessors(int* count, int device) {
    return hipDeviceGetAttribute(count, hipDeviceAttributeMultiprocessorCount, device);
}
inline error_t shared_limit(int* bytes, int device) {
    return hipDeviceGetAttribute(bytes, hipDeviceAttributeMaxSharedMemoryPerBlock, device);
}
template <class Kernel>
inline error_t allow_shared(Kernel* kernel, size_t bytes) {
    return hipFuncSetAttribute(reinterpret_cast<const void*>(kernel), hipFuncAttributeMaxDynamicSharedMemorySize,
                               static_cast<int>(bytes));
}
inline error_t zero_async(void* at, size_t bytes, stream_t stream) { return hipMemsetAsync(at, 0, bytes, stream); }
#else
using stream_t = cudaStream_t;
using error_t = cudaError_t;
constexpr error_t kOk = cudaSuccess;
inline error_t last_error() { return cudaGetLastError(); }
inline error_t current_device(int* device) { return cudaGetDevice(device); }
inline error_t multiprocessors(int* count, int device) {
    return cudaDeviceGetAttribute(count, cudaDevAttrMultiProcessorCount, device);
}
inline error_t shared_limit(int* bytes, int device) {
    return cudaDeviceGetAttribute(bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
}
template <class Kernel>
inline error_t allow_shared(Kernel* kernel, size_t bytes) {
    return cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel), cudaFuncAttributeMaxDynamicSharedMemorySize,
                                static_cast<int>(bytes));
}
inline error_t zero_async(void* at, size_t bytes, stream_t stream) { return cudaMemsetAsync(at, 0, bytes, stream); }
#endif

// What a launcher returns for arguments that it does not support; otherwise 0 or the runtime's error code.
constexpr int kUnsupported = -1;

// A "warp" is 32 lanes everywhere. On a 64-wide wavefront two of them run side by side, which only asks that
// both halves reach the same shuffles together.
constexpr int kWarp = 32;

template <class T>
__device__ __forceinline__ T shuffle_xor(T value, int mask) {
#if LF_HIP
    return __shfl_xor(value, mask, kWarp);
#else
    return __shfl_xor_sync(0xffffffffu, value, mask, kWarp);
#endif
}

template <class T>
__device__ __forceinline__ T shuffle(T value, int lane) {
#if LF_HIP
    return __shfl(value, lane, kWarp);
#else
    return __shfl_sync(0xffffffffu, value, lane, kWarp);
#endif
}

// Orders shared-memory accesses among the lanes of one warp.
__device__ __forceinline__ void warp_sync() {
#if LF_HIP
    __threadfence_block();
    __builtin_amdgcn_wave_barrier();
#else
    __syncwarp();
#endif
}

// True where any lane of the warp says so; on a 64-wide wavefront its neighbour's lanes count too.
__device__ __forceinline__ bool warp_any(bool value) {
#if LF_HIP
    return __any(value);
#else
    return __any_sync(0xffffffffu, value);
#endif
}

// The largest value of the warp, in every lane.
__device__ __forceinline__ unsigned warp_max(unsigned value) {
#if !LF_HIP && defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    return __reduce_max_sync(0xffffffffu, value);
#else
#pragma unroll
    for (int mask = kWarp / 2; mask > 0; mask /= 2) {
        const unsigned other = shuffle_xor(value, mask);
        value = other > value ? other : value;
    }
    return value;
#endif
}

// The same sum, in the same order of additions, in every lane of each group of `lanes` (a power of two).
template <int lanes = kWarp, class T>
__device__ __forceinline__ T warp_sum(T value) {
#pragma unroll
    for (int mask = lanes / 2; mask > 0; mask /= 2) value += shuffle_xor(value, mask);
    return value;
}

// Copies 16 aligned bytes from global to shared memory, in the background where the hardware can.
__device__ __forceinline__ void copy16_async(void* shared, const void* global) {
#if !LF_HIP && defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(
                     static_cast<unsigned>(__cvta_generic_to_shared(shared))),
                 "l"(global)
                 : "memory");
#else
    *static_cast<float4*>(shared) = *static_cast<const float4*>(global);
#endif
}

// Closes a group of copies; copies_wait<n> returns once all but the newest n groups of this thread are there.
__device__ __forceinline__ void copies_commit() {
#if !LF_HIP && defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

template <int n>
__device__ __forceinline__ void copies_wait() {
#if !LF_HIP && defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_group %0;" ::"n"(n) : "memory");
#endif
}

// bfloat16 by its bits: both toolchains agree on those, not on the type.
struct bf16 {
    uint16_t bits;
};

// Codes of input element types in the C interface.
enum dtype : int { kFloat32 = 0, kFloat16 = 1, kBFloat16 = 2 };

__device__ __forceinline__ float to_float(float value) { return value; }
__device__ __forceinline__ float to_float(__half value) { return __half2float(value); }
__device__ __forceinline__ float to_float(bf16 value) {
    return __uint_as_float(static_cast<unsigned>(value.bits) << 16);
}

// Calls body(T{}) with the element type of a dtype code; kUnsupported for any other code.
template <class Body>
inline int with_dtype(int code, Body&& body) {
    switch (code) {
        case kFloat32: return body(float{});
        case kFloat16: return body(__half{});
        case kBFloat16: return body(bf16{});
        default: return kUnsupported;
    }
}

// Starts a kernel of one-dimensional blocks; 0, an error code, or kUnsupported where the grid is too large.
template <class... Parameters, class... Arguments>
inline int launch(void (*kernel)(Parameters...), int64_t blocks, int threads, size_t shared, void* stream,
                  Arguments... arguments) {
    if (blocks == 0) return kOk;
    if (blocks < 0 || blocks > 0x7fffffff) return kUnsupported;
    kernel<<<static_cast<unsigned>(blocks), threads, shared, static_cast<stream_t>(stream)>>>(arguments...);
    return static_cast<int>(last_error());
}

// Layout codes of a factor stack: the tall matrix is d x r in both.
enum layout : int { kTall = 0 /* [m, d, r] */, kWide = 1 /* [m, r, d] */ };

}  // namespace lf
