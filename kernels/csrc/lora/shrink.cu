// Launcher of the decode shrink.
#include "loraforge/lora/shrink.cuh"

namespace {

using namespace lf;
using namespace lf::lora::shrink;

#if LF_HIP
constexpr int kDefault = 1;
#else
constexpr int kDefault = 11;
#endif

template <int kDirections, int kSplit, class T>
int start_direct(const Operands<T>& in, int planes, void* stream) {
    const int64_t pairs = int64_t(in.tokens) * in.slices;
    const int groups = choose_groups(kSplit == 1 ? (pairs + 7) / 8 : pairs, in.z_capacity, kDirections);
    const int64_t items = pairs * groups, blocks = kSplit == 1 ? (items + 7) / 8 : items;
    if (blocks > 0x7fffffff) return kUnsupported;
    return lora::launch_overlapped(direct<T, kDirections, kSplit>, dim3(static_cast<unsigned>(blocks), planes),
                                   kDirectWarps<kSplit> * kWarp, 0, stream, in, groups);
}

#if !LF_HIP
template <int kTiles, int kWarps, class T>
int start_segmented(const Operands<T>& in, int capacity, int planes, void* stream) {
    const int64_t pairs = int64_t(capacity) * in.slices;
    const int groups = choose_groups(pairs * planes, in.z_capacity, 8 * kTiles);
    if (pairs * groups > 0x7fffffff) return kUnsupported;
    static const error_t ready = allow_shared(segmented<T, kTiles, kWarps>, kShared<kTiles, kWarps>);
    if (ready != kOk) return static_cast<int>(ready);
    return lora::launch_overlapped(segmented<T, kTiles, kWarps>, dim3(static_cast<unsigned>(pairs * groups), planes),
                                   kWarps * kWarp, kShared<kTiles, kWarps>, stream, in, groups);
}
#endif

template <class T>
int start(const Operands<T>& in, int capacity, int planes, int variant, void* stream) {
    switch (variant == 0 ? kDefault : variant) {
        case 1: return start_direct<1, 1>(in, planes, stream);
        case 5: return start_direct<1, 4>(in, planes, stream);
        case 7: return start_direct<8, 4>(in, planes, stream);
#if !LF_HIP
        case 11: return start_segmented<1, 8>(in, capacity, planes, stream);
        case 12: return start_segmented<2, 8>(in, capacity, planes, stream);
        case 14: return start_segmented<1, 4>(in, capacity, planes, stream);
        case 16: return start_segmented<1, 16>(in, capacity, planes, stream);
#endif
        default: return kUnsupported;
    }
}

}  // namespace

// Live entries of z [planes, tokens, slices, z_capacity] from x [tokens, d_in], rows x_stride elements apart (dtype
// codes 1 and 2: portable.cuh), by the table and the plan; segmented variants take tiles of at most 16 rows. Variants:
// shrink.cuh. Returns 0, an error of the runtime, or -1.
LF_API int lf_lora_shrink(const void* x, int64_t x_stride, int dtype, const void* a, const void* table, int slices,
                          int d_in, const int* token_slots, const int* order, const int* segments, const int* count,
                          int segment_capacity, int tokens, float* z, int z_capacity, int planes, int variant,
                          void* stream) {
    const bool aligned = reinterpret_cast<uintptr_t>(x) % 16 == 0 && reinterpret_cast<uintptr_t>(a) % 16 == 0 &&
                         x_stride % 8 == 0 && d_in % 8 == 0;
    if (!aligned || slices < 1 || slices > lora::kMaxSlices || d_in < 1 || tokens < 1 || z_capacity < 1 || planes < 1 ||
        planes > 65535 || segment_capacity < 1)
        return kUnsupported;
    return lora::with_half(dtype, [&](auto type) -> int {
        using T = decltype(type);
        const Operands<T> in{static_cast<const T*>(x), x_stride, static_cast<const T*>(a),
                             static_cast<const lora::Slot*>(table), slices, d_in, token_slots, order, segments, count,
                             tokens, z, z_capacity};
        return start(in, segment_capacity, planes, variant, stream);
    });
}
