// Launcher of decode in one call.
#include "loraforge/lora/fused.cuh"

#include <algorithm>

#if !LF_HIP

namespace {

using namespace lf;
using namespace lf::lora;

constexpr int kDefault = 1;

template <class T>
struct Call {
    shrink::Operands<T> in;
    fused::Outputs<T> out;
    int capacity;
    void* stream;
};

// Starts one configuration: shrink blocks of kWarps warps and 8 kTiles directions, at most per_processor expand blocks
// a multiprocessor.
template <int kTiles, int kWarps, bool kOne, class T>
int start(Call<T> call, int per_processor) {
    auto& [in, out, capacity, stream] = call;
    constexpr int kWide = 2 * kWarps * kWarp;
    const int64_t pairs = int64_t(capacity) * in.slices;
    out.groups = shrink::choose_groups(pairs * out.planes, in.z_capacity, 8 * kTiles);
    out.blocks = 0;
    for (int i = 0; i < out.slices.count; ++i) out.blocks += (out.slices.channels[i] + kWide - 1) / kWide;
    const int64_t items = int64_t(capacity) * out.blocks, shrinkers = pairs * out.groups * out.planes;
    if (items > 0x3fffffff || shrinkers > 0x3fffffff) return kUnsupported;
    out.items = static_cast<int>(items);
    const int expanders = static_cast<int>(std::min<int64_t>(items, int64_t(per_processor) * processors()));
    const size_t tile = sizeof(float) * kTile * ((in.z_capacity + 7) / 8 * 8);
    const size_t ring = shrink::kShared<kTiles, kWarps>;
    if (tile > 128 * 1024) return kUnsupported;
    if constexpr (kOne) {
        if (out.sync == nullptr) return kUnsupported;
        const size_t shared = std::max(ring, tile);
        if (const auto e = allow_shared(fused::one<T, kTiles, kWarps>, shared); e != kOk) return static_cast<int>(e);
        return launch_overlapped(fused::one<T, kTiles, kWarps>, dim3(static_cast<unsigned>(shrinkers + expanders)),
                                 kWarps * kWarp, shared, stream, in, out, static_cast<int>(shrinkers));
    } else {
        out.sync = nullptr;
        const auto first = shrink::segmented<T, kTiles, kWarps>;
        if (const auto e = allow_shared(first, ring); e != kOk) return static_cast<int>(e);
        if (const auto e = allow_shared(fused::second<T, kWarps>, tile); e != kOk) return static_cast<int>(e);
        const dim3 grid(static_cast<unsigned>(pairs * out.groups), static_cast<unsigned>(out.planes));
        const int e = launch_overlapped(first, grid, kWarps * kWarp, ring, stream, in, out.groups);
        if (e != kOk) return e;
        return launch_overlapped(fused::second<T, kWarps>, dim3(static_cast<unsigned>(expanders)), kWarps * kWarp, tile,
                                 stream, in, out);
    }
}

template <class T>
int choose(const Call<T>& call, int variant) {
    switch (variant == 0 ? kDefault : variant) {
        case 1: return start<1, 8, true>(call, 3);
        case 2: return start<1, 8, true>(call, 6);
        case 3: return start<1, 8, true>(call, 24);
        case 4: return start<1, 4, true>(call, 6);
        case 5: return start<1, 4, true>(call, 12);
        case 6: return start<1, 4, true>(call, 48);
        case 7: return start<2, 8, true>(call, 6);
        case 8: return start<2, 4, true>(call, 12);
        case 11: return start<1, 8, false>(call, 3);
        case 12: return start<1, 8, false>(call, 6);
        case 13: return start<1, 8, false>(call, 24);
        case 14: return start<1, 4, false>(call, 6);
        case 15: return start<1, 4, false>(call, 12);
        case 16: return start<1, 4, false>(call, 48);
        case 17: return start<2, 8, false>(call, 6);
        case 18: return start<2, 4, false>(call, 12);
        default: return kUnsupported;
    }
}

}  // namespace

#endif

// y [tokens, y_stride] += scale (x A^T) B^T by the table and the plan, tiles of at most 16 rows; z [planes, tokens,
// slices, z_capacity] is workspace, and so is sync [segment_capacity, slices, 2], zeroed once and left zeroed, which
// variants of two launches do not need. Slices are host arrays of output channels. Variants: fused.cuh. Returns 0, an
// error of the runtime, or -1.
LF_API int lf_lora_fused(const void* x, int64_t x_stride, int dtype, const void* a, const void* b, const void* table,
                         int slices, const int* slice_first, const int* slice_channels, int d_in, const int* order,
                         const int* segments, const int* count, int segment_capacity, int tokens, float* z,
                         int z_capacity, int planes, void* y, int64_t y_stride, int* sync, int variant, void* stream) {
#if LF_HIP
    (void)x, (void)x_stride, (void)dtype, (void)a, (void)b, (void)table, (void)slices, (void)slice_first;
    (void)slice_channels, (void)d_in, (void)order, (void)segments, (void)count, (void)segment_capacity, (void)tokens;
    (void)z, (void)z_capacity, (void)planes, (void)y, (void)y_stride, (void)sync, (void)variant, (void)stream;
    return lf::kUnsupported;
#else
    const auto aligned = [](const void* at) { return reinterpret_cast<uintptr_t>(at) % 16 == 0; };
    Slices extents{};
    if (!aligned(x) || !aligned(a) || !aligned(b) || x_stride % 8 != 0 || d_in % 8 != 0 || d_in < 1 || tokens < 1 ||
        z_capacity < 1 || planes < 1 || planes > 65535 || segment_capacity < 1 ||
        !make_slices(extents, slices, slice_first, slice_channels))
        return kUnsupported;
    bool pairs = reinterpret_cast<uintptr_t>(y) % 4 == 0 && y_stride % 2 == 0;
    for (int i = 0; i < slices; ++i) pairs = pairs && slice_first[i] % 2 == 0 && slice_channels[i] % 2 == 0;
    return with_half(dtype, [&](auto type) -> int {
        using T = decltype(type);
        const shrink::Operands<T> in{static_cast<const T*>(x), x_stride, static_cast<const T*>(a),
                                     static_cast<const Slot*>(table), slices, d_in, nullptr, order, segments, count,
                                     tokens, z, z_capacity};
        const fused::Outputs<T> out{static_cast<const T*>(b), static_cast<T*>(y), y_stride, extents, pairs, planes,
                                    sync, 0, 0, 0};
        const Call<T> call{in, out, segment_capacity, stream};
        return choose(call, variant);
    });
#endif
}
