// What the serving kernels share: slots, segments, overlapped launches, 16-bit element pairs.
//
// Overlap (programmatic dependent launch). Every kernel here calls wait_for_previous() before it uses or writes
// anything that a kernel before it may touch, and let_next_start() only after that. Ahead of the wait it may guess: it
// reads the plan as it is, sends off for the weights that this plan asks for, and reads the plan again afterwards. A
// plan is only ever written by the builder and starts out empty, so that whatever is read of it makes addresses that
// exist; the table and the weights change between steps. And where a kernel is known to follow one of these, everything
// up to the kernel before that one is complete and visible without a wait.
#pragma once

#include <type_traits>

#include "../portable.cuh"

namespace lf {
namespace lora {

constexpr int kMaxSlices = 3;
constexpr int kTile = 16;  // rows of a segment that the decode kernels take

// One slot and slice: loraforge/ops/slots.py.
struct __align__(16) Slot {
    int64_t a, b;  // first elements of A and B
    int rank, width;
    float scale;
    int unused;
};
static_assert(sizeof(Slot) == 32, "a row is two 16-byte loads");

// Loads of metadata. They stand in a chain (segment, slot, operands) whose length in latencies is most of a small
// kernel's time: volatile has them issued where they are written, not sunk below the test that decides whether they are
// needed. They never come from the L1 cache, since a plan may change under a block that reads it ahead.
__device__ __forceinline__ int load_int(const int* at) {
#if LF_HIP
    return __hip_atomic_load(at, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
#else
    int value;
    asm volatile("ld.relaxed.gpu.global.b32 %0, [%1];" : "=r"(value) : "l"(at));
    return value;
#endif
}

__device__ __forceinline__ int4 load_words(const void* at) {
#if LF_HIP
    const int* words = static_cast<const int*>(at);
    return make_int4(load_int(words), load_int(words + 1), load_int(words + 2), load_int(words + 3));
#else
    int4 value;
    asm volatile("ld.relaxed.gpu.global.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
                 : "l"(at));
    return value;
#endif
}

__device__ __forceinline__ Slot load_slot(const Slot* at) {
    const int4 low = load_words(at), high = load_words(reinterpret_cast<const int4*>(at) + 1);
    const auto wide = [](int first, int second) {
        return static_cast<int64_t>(static_cast<uint64_t>(static_cast<unsigned>(second)) << 32 |
                                    static_cast<unsigned>(first));
    };
    return {wide(low.x, low.y), wide(low.z, low.w), high.x, high.y, __int_as_float(high.z), 0};
}

// A load of what kernels before this one wrote, past the L1 cache: nobody here reads it twice.
template <class V>
__device__ __forceinline__ V load_past_l1(const V* at) {
#if LF_HIP
    return *at;
#else
    return __ldcg(at);
#endif
}

// Output channels [first, first + channels) of each slice, by value in the kernel's parameters.
struct Slices {
    int count;
    int first[kMaxSlices], channels[kMaxSlices];
};

// False for a number of slices that the kernels do not take.
inline bool make_slices(Slices& to, int count, const int* first, const int* channels) {
    if (count < 1 || count > kMaxSlices) return false;
    to.count = count;
    for (int i = 0; i < count; ++i) to.first[i] = first[i], to.channels[i] = channels[i];
    return true;
}

// Rows [start, start + rows) of `order` have one slot; the fourth word is unused.
struct __align__(16) Segment {
    int start, rows, slot, unused;
};

__device__ __forceinline__ Segment load_segment(const int* segments, int index) {
    const int4 words = load_words(reinterpret_cast<const int4*>(segments) + index);
    return {words.x, words.y, words.z, 0};
}

__device__ __forceinline__ void wait_for_previous() {
#if !LF_HIP && defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

__device__ __forceinline__ void let_next_start() {
#if !LF_HIP && defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// One bit a lane of the warp, the first lane's lowest.
__device__ __forceinline__ unsigned lanes_where(bool holds) {
#if LF_HIP
    unsigned mask = 0;
    for (int lane = 0; lane < kWarp; ++lane) mask |= unsigned(shuffle(int(holds), lane)) << lane;
    return mask;
#else
    return __ballot_sync(0xffffffffu, holds);
#endif
}

// Starts a kernel that may run ahead of the end of the one before it.
template <class... Parameters, class... Arguments>
inline int launch_overlapped(void (*kernel)(Parameters...), dim3 grid, int threads, size_t shared, void* stream,
                             Arguments... arguments) {
#if LF_HIP
    kernel<<<grid, threads, shared, static_cast<stream_t>(stream)>>>(arguments...);
    return static_cast<int>(last_error());
#else
    cudaLaunchAttribute overlap{};
    overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    overlap.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = grid;
    config.blockDim = dim3(static_cast<unsigned>(threads));
    config.dynamicSmemBytes = shared;
    config.stream = static_cast<stream_t>(stream);
    config.attrs = &overlap;
    config.numAttrs = 1;
    return static_cast<int>(cudaLaunchKernelEx(&config, kernel, arguments...));
#endif
}

// Multiprocessors of the current device, asked once a device; 1 where the runtime does not say.
inline int processors() {
    constexpr int kDevices = 64;
    static int known[kDevices] = {};
    int device = 0;
    if (current_device(&device) != kOk || device >= kDevices) return 1;
    if (known[device] == 0 && multiprocessors(&known[device], device) != kOk) return 1;
    return known[device];
}

template <class Body>
inline int with_half(int code, Body&& body) {
    switch (code) {
        case kFloat16: return body(__half{});
        case kBFloat16: return body(bf16{});
        default: return kUnsupported;
    }
}

// Sixteen bytes that no thread writes while the kernel runs, zeros where not `wanted`. Volatile keeps a run of loads
// together: the compiler would otherwise save registers by loading each operand just before its use, one at a time.
__device__ __forceinline__ uint4 load16(const void* at, bool wanted = true) {
#if LF_HIP
    return wanted ? *static_cast<const uint4*>(at) : uint4{};
#else
    uint4 value;
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.u32 p, %5, 0;\nmov.b32 %0, 0;\nmov.b32 %1, 0;\nmov.b32 %2, 0;\nmov.b32 %3, 0;\n"
        "@p ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];\n}"
        : "=&r"(value.x), "=&r"(value.y), "=&r"(value.z), "=&r"(value.w)
        : "l"(at), "r"(unsigned(wanted)));
    return value;
#endif
}

// The same for bytes that are used once: they leave the L1 cache to others.
__device__ __forceinline__ uint4 load16_once(const void* at, bool wanted = true) {
#if LF_HIP
    return load16(at, wanted);
#else
    uint4 value;
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.u32 p, %5, 0;\nmov.b32 %0, 0;\nmov.b32 %1, 0;\nmov.b32 %2, 0;\nmov.b32 %3, 0;\n"
        "@p ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];\n}"
        : "=&r"(value.x), "=&r"(value.y), "=&r"(value.z), "=&r"(value.w)
        : "l"(at), "r"(unsigned(wanted)));
    return value;
#endif
}

// Two elements in one word, the first in the low half.
__device__ __forceinline__ float2 unpack(unsigned word, bf16) {
    return {__uint_as_float(word << 16), __uint_as_float(word & 0xffff0000u)};
}

__device__ __forceinline__ float2 unpack(unsigned word, __half) {
    __half2 pair;
    *reinterpret_cast<unsigned*>(&pair) = word;
    return __half22float2(pair);
}

__device__ __forceinline__ uint16_t round_bits(float value, __half) {
    const __half rounded = __float2half_rn(value);
    return *reinterpret_cast<const uint16_t*>(&rounded);
}

__device__ __forceinline__ uint16_t round_bits(float value, bf16) {
#if !LF_HIP && defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    uint16_t bits;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
#else
    const unsigned bits = __float_as_uint(value);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((bits >> 16) | 0x40);  // NaN stays NaN
    return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1)) >> 16);
#endif
}

template <class T>
__device__ __forceinline__ unsigned pack(float low, float high, T type) {
#if !LF_HIP && defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    unsigned word;
    if constexpr (std::is_same_v<T, bf16>)
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    else
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    return word;
#else
    return round_bits(low, type) | static_cast<unsigned>(round_bits(high, type)) << 16;
#endif
}

}  // namespace lora
}  // namespace lf
