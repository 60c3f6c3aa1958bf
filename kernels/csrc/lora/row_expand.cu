// Launchers of RowExpand; see row_expand.cuh.
#include "loraforge/lora/row_expand.cuh"
#include "loraforge/lora/launch.h"

#include <atomic>
#include <type_traits>

namespace lf {
namespace row_expand {
namespace {

// Shapes by the numbers that row_expand.cuh lists; the last one suits any alignment of Y.
using Narrow = Shape<128, 1, 4, 8, 4>;
constexpr int kGrids = 3;

template <class Body>
int with_shape(int index, bool staged, Body&& body) {
    using Staged = std::true_type;
    using Paper = Shape<256, 1, 1, 64, 2>;
    if (!staged) return index == 3 ? body(Paper{}, std::false_type{}) : kUnsupported;
    switch (index) {
        case 1: return body(Shape<128, 2, 1, 16, 6>{}, Staged{});
        case 3: return body(Paper{}, Staged{});
        case 4: return body(Shape<128, 4, 1, 16, 4>{}, Staged{});
        case 5: return body(Shape<64, 4, 1, 8, 10>{}, Staged{});
        case 0:
        case 6: return body(Shape<128, 2, 2, 8, 5>{}, Staged{});
        case 7: return body(Shape<128, 2, 2, 16, 4>{}, Staged{});
        case 8: return body(Shape<64, 2, 2, 8, 10>{}, Staged{});
        case 9: return body(Narrow{}, Staged{});
        default: return kUnsupported;
    }
}

// Blocks of a kernel that a multiprocessor holds, asked of the runtime once a kernel and amount of shared memory.
template <class T, class S, bool staged>
int resident_blocks(size_t shared) {
    static std::atomic<int64_t> known{-1};  // bytes << 8 | blocks
    const int64_t before = known.load(std::memory_order_relaxed);
    if (before >= 0 && before >> 8 == static_cast<int64_t>(shared)) return static_cast<int>(before & 255);
    int blocks = 0;
#if LF_HIP
    const error_t error =
        hipOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel<T, S, staged>, S::threads, shared);
#else
    const error_t error =
        cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel<T, S, staged>, S::threads, shared);
#endif
    if (error != kOk || blocks < 1) blocks = 1;
    known.store(static_cast<int64_t>(shared) << 8 | blocks, std::memory_order_relaxed);
    return blocks;
}

template <class T, class S, bool staged>
int run(Arguments p, int grid, void* stream) {
    int column_blocks = 0;
    for (int i = 0; i < p.slices; ++i) {
        column_blocks += (p.channels[i] + S::columns - 1) / S::columns;
        p.blocks_end[i] = column_blocks;
    }
    if (column_blocks == 0) return kOk;
    // rows of Z that are staged whole: of the resident bucket, or of the capacity for those that are not resident
    p.tile_stride = (p.z_capacity + kChunk - 1) / kChunk * kChunk;
    const int width = p.tile_stride > S::resident ? p.tile_stride : S::resident;
    while (p.limit > 1 && 2 * size_t(p.limit) * width * sizeof(float) > 48 * 1024) p.limit /= 2;
    p.tile_floats = p.limit * width;
    const size_t shared = staged ? 2 * size_t(p.tile_floats) * sizeof(float) : 0;
    if (shared > 48 * 1024) return kUnsupported;

    // segments whose rows exceed the limit are shared by so many blocks that one has about one item
    p.split_shift = 0;
    while (p.split_shift < 6 && (int64_t(p.segment_capacity) * p.limit << p.split_shift) < p.tokens) ++p.split_shift;
    const int64_t units = int64_t(p.segment_capacity) << p.split_shift;
    const int resident = resident_blocks<T, S, staged>(shared);
    const int64_t blocks = int64_t(grid == 2 && resident > 1 ? resident - 1 : resident) * lora::processors();
    int64_t strides = grid == 1 ? units : blocks / column_blocks;
    if (strides > units) strides = units;
    if (strides > 65535) strides = 65535;
    if (strides < 1) strides = 1;
    return lora::launch_overlapped(kernel<T, S, staged>,
                                   dim3(static_cast<unsigned>(column_blocks), static_cast<unsigned>(strides)),
                                   S::threads, shared, stream, p);
}

bool aligned(const void* at, size_t bytes) { return reinterpret_cast<uintptr_t>(at) % bytes == 0; }

// The vector of a shape's accesses of Y suits its rows and slices.
template <class S>
bool suits(const Arguments& p) {
    bool fits = aligned(p.y, 2 * S::vector) && p.y_stride % S::vector == 0;
    for (int i = 0; i < p.slices; ++i) fits = fits && p.first[i] % S::vector == 0 && p.channels[i] % S::vector == 0;
    return fits;
}

}  // namespace
}  // namespace row_expand
}  // namespace lf

int lf::row_expand::start(const float* z, int z_capacity, int planes, const void* b, const void* table, int slices,
                          const int* slice_first, const int* slice_channels, int dtype, const int* order,
                          const int* segments, const int* count, int segment_capacity, int tokens, void* y,
                          int64_t y_stride, int tile_limit, int staged, int variant, bool follows, void* stream) {
    using namespace lf;
    using namespace lf::row_expand;
    lora::Slices given;
    if (!lora::make_slices(given, slices, slice_first, slice_channels) || z_capacity < 1 || planes < 1 ||
        tile_limit < 1 || tile_limit > kMaxRows || variant < 0 || variant / 10 >= kGrids || segment_capacity < 0 ||
        tokens < 0 || y_stride < 0 || y_stride > 0x7fffffff ||
        int64_t(tokens) * slices * z_capacity * planes > 0x7fffffff || !aligned(b, 16) || !aligned(table, 16) ||
        !aligned(segments, 16))
        return kUnsupported;
    if (!staged && (planes > 1 || z_capacity % 4 != 0 || !aligned(z, 16))) return kUnsupported;
    if (segment_capacity == 0 || tokens == 0) return kOk;
    Arguments p{};
    p.z = z, p.z_capacity = z_capacity, p.planes = planes;
    p.z_row = slices * z_capacity, p.z_plane = tokens * p.z_row;
    p.b = static_cast<const uint16_t*>(b), p.table = static_cast<const lora::Slot*>(table), p.slices = slices;
    for (int i = 0; i < slices; ++i) {
        if (given.first[i] < 0 || given.channels[i] < 0) return kUnsupported;
        p.first[i] = given.first[i], p.channels[i] = given.channels[i];
    }
    p.order = order, p.segments = reinterpret_cast<const int4*>(segments), p.count = count;
    p.segment_capacity = segment_capacity, p.tokens = tokens, p.limit = tile_limit, p.follows = follows;
    p.y = static_cast<uint16_t*>(y), p.y_stride = static_cast<unsigned>(y_stride);
    return lora::with_half(dtype, [&](auto type) {
        using T = decltype(type);
        const auto with = [&](auto shape, auto tile) {
            using S = decltype(shape);
            constexpr bool kStaged = decltype(tile)::value;
            if constexpr (S::vector > 1)
                if (!suits<S>(p)) return run<T, Narrow, kStaged>(p, variant / 10, stream);
            return run<T, S, kStaged>(p, variant / 10, stream);
        };
        return with_shape(variant % 10, staged != 0, with);
    });
}

// y[token, slice_first + n] += scale * sum_k (sum_planes z)[token, slice, k] * b[n, k], for the tokens of the plan.
// z FP32 [planes, tokens, slices, z_capacity]; b, y 16-bit of `dtype`; b 16-byte aligned; tile_limit 1 to 32 rows an
// item. Returns 0, an error of the runtime, or -1 for arguments that are not supported.
LF_API int lf_lora_row_expand(const float* z, int z_capacity, int planes, const void* b, const void* table, int slices,
                              const int* slice_first, const int* slice_channels, int dtype, const int* order,
                              const int* segments, const int* count, int segment_capacity, int tokens, void* y,
                              int64_t y_stride, int tile_limit, int staged, int variant, void* stream) {
    return lf::row_expand::start(z, z_capacity, planes, b, table, slices, slice_first, slice_channels, dtype, order,
                                 segments, count, segment_capacity, tokens, y, y_stride, tile_limit, staged, variant,
                                 false, stream);
}

// What the compiler made of a variant (BF16) and how many of its blocks a multiprocessor holds at a tile limit of 16.
// One kernel has all buckets, so the numbers are those of any; `bucket` 1 to 64 sets the width of the tile of Z.
LF_API int lf_lora_row_expand_attributes(int bucket, int staged, int variant, int* registers, int* shared_bytes,
                                         int* local_bytes, int* blocks_per_multiprocessor) {
    using namespace lf;
    using namespace lf::row_expand;
    if (bucket < 1 || bucket > 64 || (bucket & (bucket - 1)) != 0 || variant < 0 || variant / 10 >= kGrids)
        return kUnsupported;
    return with_shape(variant % 10, staged != 0, [&](auto shape, auto tile) {
        using S = decltype(shape);
        constexpr bool kStaged = decltype(tile)::value;
        const auto entry = kernel<bf16, S, kStaged>;
#if LF_HIP
        hipFuncAttributes found{};
        const lf::error_t error = hipFuncGetAttributes(&found, reinterpret_cast<const void*>(entry));
#else
        cudaFuncAttributes found{};
        const lf::error_t error = cudaFuncGetAttributes(&found, entry);
#endif
        if (error != kOk) return static_cast<int>(error);
        const int width = bucket > S::resident ? bucket : S::resident;
        const size_t dynamic = kStaged ? 2 * size_t(16) * width * sizeof(float) : 0;
        *registers = found.numRegs;
        *shared_bytes = static_cast<int>(found.sharedSizeBytes + dynamic);
        *local_bytes = static_cast<int>(found.localSizeBytes);
        *blocks_per_multiprocessor = resident_blocks<bf16, S, kStaged>(dynamic);
        return static_cast<int>(kOk);
    });
}
