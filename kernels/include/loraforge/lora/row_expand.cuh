// RowExpand: Y += scale Z B^T where a thread owns rows of B, that is, columns of Y (paper, section 5 and appendix A.2).
//
// A work item is up to `limit` token rows of one segment and a block of output columns of one slice. Its threads hold
// their rows of B in registers, its tile of Z is summed over the planes and scaled into shared memory once, and each
// thread finishes the whole reduction of its columns by itself: no atomics, one order of additions, so results are the
// same bits whatever the tile limit, staging, variant or grid.
//
// Widths up to the shape's resident bucket are compile-time: the row stays in registers across the token rows. Wider
// rows pass through registers eight directions at a time while the sums of a few token rows stay there; that path
// takes any rank and is chosen a block at a time on the device.
//
// The grid is column blocks x persistent strides over segments. Nothing about ranks or counts is known to the host.
//
// Overlap: the block's first item is read from the plan ahead of the wait, to send its rows of B on their way, and the
// plan is compared after the wait, whatever kernel came before; what was stale is read again.
//
// Variants: shape + 10 * grid. Shapes, in threads x adjacent columns x groups (widest resident bucket), blocks at once:
//   0  128 x 4 x 1  (8) 5    1  128 x 2 x 1 (16) 6    2  128 x 8 x 1  (8) 3    3  256 x 1 x 1 (64) 2
//   4  128 x 4 x 1 (16) 4    5   64 x 4 x 1  (8) 10   6  128 x 2 x 2  (8) 5    7  128 x 2 x 1  (8) 7
//   9  128 x 1 x 4  (8) 4: what any other becomes where rows of Y are not aligned for it
// Grids: 0 as many blocks as fit at once, 1 a block an item, 2 half of 0, 3 twice 0.
// Z straight from global memory (staged = 0) is there for the ablation, with shapes 0, 3 and 9 alone.
#pragma once

#include "common.cuh"

namespace lf {
namespace row_expand {

using lora::Slot;

constexpr int kMaxRows = 32;  // rows of an item: a warp keeps their tokens, one a lane
constexpr int kChunk = 8;     // directions that a wide row brings into registers at a time

// What one instantiation is made of.
//   threads: of a block. vector: adjacent columns a thread owns, one access of Y. groups: such groups, a block apart.
//   resident: the widest bucket kept in registers. blocks: of a multiprocessor, at least.
template <int threads_, int vector_, int groups_, int resident_, int blocks_>
struct Shape {
    static constexpr int threads = threads_, vector = vector_, groups = groups_;
    static constexpr int resident = resident_, blocks = blocks_;
    static constexpr int owned = vector * groups;
    static constexpr int columns = threads * owned;  // of a block
    static constexpr int rows = owned >= 8 ? 2 : owned >= 4 ? 4 : 8;  // of Y that a thread has in flight
};

struct Arguments {
    const float* z;
    int z_capacity, z_row, z_plane, planes;  // z_row, z_plane: elements from a token to the next, from a partial sum
    bool z_vectors;                          // rows of Z may be read 16 bytes at a time
    const uint16_t* b;
    const Slot* table;
    int slices;
    int first[lora::kMaxSlices], channels[lora::kMaxSlices];
    int blocks_end[lora::kMaxSlices];  // column blocks up to and including a slice
    const int* order;
    const int4* segments;
    const int* count;
    int segment_capacity, tokens;
    int limit;        // rows of an item
    int split_shift;  // 2^split_shift blocks share the items of a segment
    int tile_stride;  // floats from one row of Z in shared memory to the next, where the width is not compile-time
    int tile_floats;  // of one of the two tiles
    uint16_t* y;
    unsigned y_stride;
};

// One item: rows of one segment, and where its slice and its adapter lie.
struct Item {
    const float* z;  // of the slice
    uint16_t* y;     // of the slice, the thread's first column
    const uint16_t* b;
    int rows;
    int columns;  // from the thread's first to the end of the slice
    int rank, width;
    float scale;
};

// What a block keeps in shared memory beside the tiles of Z.
template <int warps>
struct Kept {
    int tokens[warps][kMaxRows];  // of the item's rows; every warp has its own
    int4 entry;                   // the plan as the first item saw it ahead of the wait
    int count;
};

// The plan may change under a block that reads it ahead, so it never comes from the L1 cache.
__device__ __forceinline__ int load_plan(const int* at) {
#if LF_HIP
    return __hip_atomic_load(at, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
#else
    int value;
    asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(at) : "memory");
    return value;
#endif
}

__device__ __forceinline__ int4 load_plan4(const int4* at) {
#if LF_HIP
    const int* words = reinterpret_cast<const int*>(at);
    return make_int4(load_plan(words), load_plan(words + 1), load_plan(words + 2), 0);
#else
    int4 value;
    asm volatile("ld.relaxed.gpu.global.v4.s32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
                 : "l"(at)
                 : "memory");
    return value;
#endif
}

__device__ __forceinline__ void prefetch(const void* at) {
#if !LF_HIP
    asm volatile("prefetch.global.L2 [%0];" ::"l"(at));
#endif
}

// Loads 16-bit elements that lie together and are aligned to their number (at most eight a load).
template <int elements, bool constant>
__device__ __forceinline__ void load_bits(uint32_t* to, const uint16_t* from) {
    if constexpr (elements >= 8) {
#pragma unroll
        for (int i = 0; i < elements / 8; ++i) {
            const uint4* at = reinterpret_cast<const uint4*>(from) + i;
            const uint4 v = constant ? __ldg(at) : *at;
            to[4 * i] = v.x, to[4 * i + 1] = v.y, to[4 * i + 2] = v.z, to[4 * i + 3] = v.w;
        }
    } else if constexpr (elements == 4) {
        const uint2* at = reinterpret_cast<const uint2*>(from);
        const uint2 v = constant ? __ldg(at) : *at;
        to[0] = v.x, to[1] = v.y;
    } else if constexpr (elements == 2) {
        const uint32_t* at = reinterpret_cast<const uint32_t*>(from);
        to[0] = constant ? __ldg(at) : *at;
    } else {
        to[0] = constant ? __ldg(from) : *from;
    }
}

template <int elements>
__device__ __forceinline__ void store_bits(uint16_t* to, const uint32_t* from) {
    if constexpr (elements == 8) {
        *reinterpret_cast<uint4*>(to) = make_uint4(from[0], from[1], from[2], from[3]);
    } else if constexpr (elements == 4) {
        *reinterpret_cast<uint2*>(to) = make_uint2(from[0], from[1]);
    } else if constexpr (elements == 2) {
        *reinterpret_cast<uint32_t*>(to) = from[0];
    } else {
        *to = static_cast<uint16_t>(from[0]);
    }
}

template <class T, int elements>
__device__ __forceinline__ void unpack(float* to, const uint32_t* from) {
#pragma unroll
    for (int i = 0; i < elements; i += 2) {
        const float2 pair = lora::unpack(from[i / 2], T{});
        to[i] = pair.x;
        if (i + 1 < elements) to[i + 1] = pair.y;
    }
}

// Reads `width` leading elements of `vector` rows from `from`, `stride` apart, as 16-bit pairs in the order of rows.
// What lies past the rank may come along, so it is masked after; nothing past the stride is touched.
template <int width, int vector>
__device__ __forceinline__ void load_rows(uint32_t* to, const uint16_t* from, int stride, bool flat) {
    constexpr int wide = width < 8 ? width : 8;
    if (width < 8 && vector > 1 && flat) {
        load_bits<width * vector, true>(to, from);
    } else if constexpr (width == 1) {
#pragma unroll
        for (int c = 0; c < vector; ++c) {
            const uint32_t bits = __ldg(from + c * stride);
            to[c / 2] = c % 2 == 0 ? bits : to[c / 2] | bits << 16;
        }
    } else {
#pragma unroll
        for (int c = 0; c < vector; ++c)
#pragma unroll
            for (int k = 0; k < width; k += wide)
                load_bits<wide, true>(to + (c * width + k) / 2, from + c * stride + k);
    }
}

// scale * sum of planes of one live element of Z: the same bits staged or not.
__device__ __forceinline__ float z_value(const Arguments& p, const float* row, int k, float scale) {
    float sum = row[k];
#pragma unroll 1
    for (int plane = 1; plane < p.planes; plane += 3) {  // three loads at a time are in flight
        float more[3];
#pragma unroll
        for (int i = 0; i < 3; ++i) more[i] = plane + i < p.planes ? row[(plane + i) * p.z_plane + k] : 0.0f;
#pragma unroll
        for (int i = 0; i < 3; ++i) sum += more[i];
    }
    return sum * scale;
}

__device__ __forceinline__ const float* z_row(const Arguments& p, const Item& item, int token) {
    return item.z + token * p.z_row;
}

// Four elements of Z from k on; zeros past the rank.
__device__ __forceinline__ float4 z_four(const Arguments& p, const float* row, int k, const Item& item) {
    float v[4];
    if (p.z_vectors && k < item.rank) {  // the capacity is a multiple of four, so no read leaves the row
        float4 sum = *reinterpret_cast<const float4*>(row + k);
#pragma unroll 1
        for (int plane = 1; plane < p.planes; ++plane) {
            const float4 more = *reinterpret_cast<const float4*>(row + plane * p.z_plane + k);
            sum.x += more.x, sum.y += more.y, sum.z += more.z, sum.w += more.w;
        }
        v[0] = sum.x * item.scale, v[1] = sum.y * item.scale, v[2] = sum.z * item.scale, v[3] = sum.w * item.scale;
#pragma unroll
        for (int i = 1; i < 4; ++i)
            if (k + i >= item.rank) v[i] = 0.0f;
    } else {
#pragma unroll
        for (int i = 0; i < 4; ++i) v[i] = k + i < item.rank ? z_value(p, row, k + i, item.scale) : 0.0f;
    }
    return make_float4(v[0], v[1], v[2], v[3]);
}

// Tokens that were read ahead of the wait may be anything: they make addresses before they are found to be stale.
__device__ __forceinline__ int clamp_token(const Arguments& p, int token) {
    return token >= 0 && token < p.tokens ? token : 0;
}

// True where the plan that a block's first item went by is not the plan as it is after the wait.
template <int warps>
__device__ __forceinline__ bool is_stale(const Arguments& p, const Item& item, const Kept<warps>& kept) {
    const int segment = blockIdx.y >> p.split_shift, lane = threadIdx.x % kWarp;
    const int4 now = load_plan4(p.segments + segment);
    const int count = load_plan(p.count);
    bool stale = now.x != kept.entry.x || now.y != kept.entry.y || now.z != kept.entry.z || segment >= count;
    if (lane < item.rows) {
        const int skipped = (blockIdx.y & ((1 << p.split_shift) - 1)) * p.limit;
        const int token = clamp_token(p, load_plan(p.order + kept.entry.x + skipped + lane));
        stale = stale || token != kept.tokens[threadIdx.x / kWarp][lane];
    }
    return stale;
}

// The tile of Z of an item into shared memory, zeros past the rank, rows of a compile-time width or (0) of
// p.tile_stride. False where the first item went by a stale plan.
template <int width, bool staged, int warps>
__device__ __forceinline__ bool stage(const Arguments& p, const Item& item, float* tile, bool first,
                                      const Kept<warps>& kept) {
    const int* tokens = kept.tokens[threadIdx.x / kWarp];
    if constexpr (staged && width > 0) {
#pragma unroll 1
        for (int i = threadIdx.x; i < item.rows * width; i += warps * kWarp) {
            const int k = i % width;
            tile[i] = k < item.rank ? z_value(p, z_row(p, item, tokens[i / width]), k, item.scale) : 0.0f;
        }
    } else if constexpr (staged) {  // a warp a row
        const int columns = (item.rank + kChunk - 1) / kChunk * kChunk;
#pragma unroll 1
        for (int row = threadIdx.x / kWarp; row < item.rows; row += warps) {
            const float* from = z_row(p, item, tokens[row]);
#pragma unroll 1
            for (int k = threadIdx.x % kWarp; k < columns; k += kWarp)
                tile[row * p.tile_stride + k] = k < item.rank ? z_value(p, from, k, item.scale) : 0.0f;
        }
    }
    if (first) return !__syncthreads_or(is_stale(p, item, kept));
    if constexpr (staged) __syncthreads();
    return true;
}

// Rows of Y in flight: loaded, added to, stored.
template <class T, class S>
struct OutputTile {
    static constexpr int words = (S::vector + 1) / 2;
    // Cleared before every load that may not happen: what such a load leaves alone would otherwise be kept in
    // registers all around the loop over items.
    uint32_t at[S::rows][S::groups][words];

    static __device__ __forceinline__ uint16_t* row(const Arguments& p, const Item& item, int token) {
        return item.y + static_cast<uint64_t>(static_cast<unsigned>(token)) * p.y_stride;
    }

    __device__ __forceinline__ void load(const Arguments& p, const Item& item, const int* tokens, int base) {
#pragma unroll
        for (int r = 0; r < S::rows; ++r)
#pragma unroll
            for (int g = 0; g < S::groups; ++g)
#pragma unroll
                for (int i = 0; i < words; ++i) at[r][g][i] = 0;
#pragma unroll
        for (int r = 0; r < S::rows; ++r)
            if (base + r < item.rows) {
                const uint16_t* from = row(p, item, tokens[base + r]);
#pragma unroll
                for (int g = 0; g < S::groups; ++g)
                    if (g * S::threads * S::vector < item.columns)
                        load_bits<S::vector, false>(at[r][g], from + g * S::threads * S::vector);
            }
    }

    __device__ __forceinline__ void add_and_store(const Arguments& p, const Item& item, int token, int r,
                                                  const float (&sum)[S::owned]) {
        uint16_t* to = row(p, item, token);
#pragma unroll
        for (int g = 0; g < S::groups; ++g) {
            float y[2 * words];
            unpack<T, 2 * words>(y, at[r][g]);
#pragma unroll
            for (int c = 0; c < S::vector; ++c) y[c] += sum[g * S::vector + c];
            uint32_t out[words];
#pragma unroll
            for (int i = 0; i < words; ++i) out[i] = lora::pack(y[2 * i], y[2 * i + 1], T{});
            if (g * S::threads * S::vector < item.columns)
                store_bits<S::vector>(to + g * S::threads * S::vector, out);
        }
    }
};

// A thread's rows of B, `width` directions from `k` on, as loaded and as they are used.
template <class T, class S, int width>
struct Weights {
    static constexpr int words = (width * S::vector + 1) / 2;
    uint32_t raw[S::groups][words];  // cleared as OutputTile is

    __device__ __forceinline__ void load(const Item& item, int k) {
        constexpr int bytes = width * S::vector < 8 ? 2 * width * S::vector : 16;
        const bool flat = item.width == width && reinterpret_cast<uintptr_t>(item.b) % bytes == 0;
#pragma unroll
        for (int g = 0; g < S::groups; ++g) {
#pragma unroll
            for (int i = 0; i < words; ++i) raw[g][i] = 0;
            if (g * S::threads * S::vector < item.columns)
                load_rows<width, S::vector>(raw[g], item.b + g * S::threads * S::vector * item.width + k, item.width,
                                            flat);
        }
    }

    // to[own column][direction]; `live` directions, zeros beyond.
    __device__ __forceinline__ void use(float (&to)[S::owned][width], int live) const {
#pragma unroll
        for (int g = 0; g < S::groups; ++g) {
            float all[S::vector * width + 1];
            unpack<T, S::vector * width>(all, raw[g]);
#pragma unroll
            for (int i = 0; i < S::vector * width; ++i) to[g * S::vector + i / width][i % width] = all[i];
        }
        if (live < width)
#pragma unroll
            for (int c = 0; c < S::owned; ++c)
#pragma unroll
                for (int k = 0; k < width; ++k)
                    if (k >= live) to[c][k] = 0.0f;
    }
};

// sum += B z for one token row over `width` directions from `k` on; z from the tile, or from global memory.
template <class S, int width, bool staged>
__device__ __forceinline__ void multiply(float (&sum)[S::owned], const float (&weight)[S::owned][width],
                                         const Arguments& p, const Item& item, const float* tile, int token, int k) {
    constexpr int step = width < 4 ? width : 4;
#pragma unroll
    for (int at = 0; at < width; at += step) {
        float z[4];
        if constexpr (!staged) {
            const float4 v = z_four(p, z_row(p, item, token), k + at, item);
            z[0] = v.x, z[1] = v.y, z[2] = v.z, z[3] = v.w;
        } else if constexpr (step == 4) {
            const float4 v = *reinterpret_cast<const float4*>(tile + at);
            z[0] = v.x, z[1] = v.y, z[2] = v.z, z[3] = v.w;
        } else {
#pragma unroll
            for (int i = 0; i < step; ++i) z[i] = tile[at + i];
        }
#pragma unroll
        for (int i = 0; i < step; ++i)
#pragma unroll
            for (int c = 0; c < S::owned; ++c) sum[c] = fmaf(z[i], weight[c][at + i], sum[c]);
    }
}

// An item whose rows of B are `width` long once padded, kept in registers.
template <class T, class S, int width, bool staged, int warps>
__device__ __forceinline__ bool resident_item(const Arguments& p, const Item& item, float* tile, bool first,
                                              const Kept<warps>& kept) {
    const int* tokens = kept.tokens[threadIdx.x / kWarp];
    float weight[S::owned][width];
    OutputTile<T, S> y;
    {
        Weights<T, S, width> b;
        b.load(item, 0);
        y.load(p, item, tokens, 0);
        if (!stage<width, staged>(p, item, tile, first, kept)) return false;
        b.use(weight, item.rank);
    }
#pragma unroll 1
    for (int base = 0; base < item.rows; base += S::rows) {
        OutputTile<T, S> next;
        next.load(p, item, tokens, base + S::rows);
#pragma unroll
        for (int r = 0; r < S::rows; ++r)
            if (base + r < item.rows) {
                const int token = tokens[base + r];
                float sum[S::owned] = {};
                multiply<S, width, staged>(sum, weight, p, item, tile + (base + r) * width, token, 0);
                y.add_and_store(p, item, token, r, sum);
            }
        y = next;
    }
    return true;
}

// An item of any rank: kChunk directions of B in registers at a time, the sums of a few token rows stay there.
template <class T, class S, bool staged, int warps>
__device__ __forceinline__ bool streamed_item(const Arguments& p, const Item& item, float* tile, bool first,
                                              const Kept<warps>& kept) {
    const int* tokens = kept.tokens[threadIdx.x / kWarp];
    Weights<T, S, kChunk> b;
    b.load(item, 0);
    if (!stage<0, staged>(p, item, tile, first, kept)) return false;
#pragma unroll 1
    for (int base = 0; base < item.rows; base += S::rows) {
        if (base > 0) b.load(item, 0);
        float sum[S::rows][S::owned] = {};
#pragma unroll 1
        for (int k = 0; k < item.rank; k += kChunk) {
            float weight[S::owned][kChunk];
            b.use(weight, item.rank - k);
            if (k + kChunk < item.rank) b.load(item, k + kChunk);
#pragma unroll
            for (int r = 0; r < S::rows; ++r)
                if (base + r < item.rows)
                    multiply<S, kChunk, staged>(sum[r], weight, p, item, tile + (base + r) * p.tile_stride + k,
                                                tokens[base + r], k);
        }
        OutputTile<T, S> y;  // B is what takes time here: its registers are worth more than Y in flight
        y.load(p, item, tokens, base);
#pragma unroll
        for (int r = 0; r < S::rows; ++r)
            if (base + r < item.rows) y.add_and_store(p, item, tokens[base + r], r, sum[r]);
    }
    return true;
}

// An item whose rows of B allow no vector reads: an element at a time, for layouts that no pool of ours has.
template <class T, class S, int warps>
__device__ __forceinline__ bool plain_item(const Arguments& p, const Item& item, bool first, const Kept<warps>& kept) {
    if (!stage<0, false>(p, item, nullptr, first, kept)) return false;
    if (!first) __syncthreads();  // as every item does once, so that no tile of Z is overwritten while it is read
    const int* tokens = kept.tokens[threadIdx.x / kWarp];
#pragma unroll 1
    for (int i = 0; i < item.rows * S::owned; ++i) {
        const int token = tokens[i / S::owned], c = i % S::owned;
        const int column = c / S::vector * S::threads * S::vector + c % S::vector;
        if (column >= item.columns) continue;
        const float* z = z_row(p, item, token);
        float sum = 0.0f;
#pragma unroll 1
        for (int k = 0; k < item.rank; ++k)
            sum = fmaf(z_value(p, z, k, item.scale), lora::unpack(item.b[column * item.width + k], T{}).x, sum);
        uint16_t* y = OutputTile<T, S>::row(p, item, token) + column;
        *y = lora::round_bits(lora::unpack(*y, T{}).x + sum, T{});
    }
    return true;
}

template <class T, class S, bool staged, int warps>
__device__ __forceinline__ bool run_item(const Arguments& p, const Item& item, float* tile, bool first,
                                         const Kept<warps>& kept) {
    // the first elements of every row that the rank's bucket reads must lie where its loads may read them
    const int piece = item.rank > 4 ? 8 : item.rank > 2 ? 4 : item.rank;
    if ((item.width | static_cast<int>(reinterpret_cast<uintptr_t>(item.b) / 2)) & (piece - 1))
        return plain_item<T, S>(p, item, first, kept);
    const int bucket = item.rank <= 8 ? 0 : item.rank <= 16 ? 16 : item.rank <= 32 ? 32 : 64;
    if (item.rank > S::resident || item.width < bucket) return streamed_item<T, S, staged>(p, item, tile, first, kept);
    if (item.rank == 1) return resident_item<T, S, 1, staged>(p, item, tile, first, kept);
    if (item.rank == 2) return resident_item<T, S, 2, staged>(p, item, tile, first, kept);
    if (item.rank <= 4) return resident_item<T, S, 4, staged>(p, item, tile, first, kept);
    if (item.rank <= 8) return resident_item<T, S, 8, staged>(p, item, tile, first, kept);
    if constexpr (S::resident >= 16)
        if (item.rank <= 16) return resident_item<T, S, 16, staged>(p, item, tile, first, kept);
    if constexpr (S::resident >= 32)
        if (item.rank <= 32) return resident_item<T, S, 32, staged>(p, item, tile, first, kept);
    if constexpr (S::resident >= 64) return resident_item<T, S, 64, staged>(p, item, tile, first, kept);
    return true;
}

// Sends the thread's rows of B on their way to the L2 cache.
template <class S>
__device__ __forceinline__ void prefetch_rows(const Item& item) {
    constexpr int line = 64;  // elements
#pragma unroll 1
    for (int g = 0; g < S::owned; ++g) {
        const int column = g / S::vector * S::threads * S::vector + g % S::vector;
        const uint16_t* row = item.b + column * item.width;
        // of rows that share a line, the first one speaks
        const bool leads = static_cast<int>(reinterpret_cast<uintptr_t>(row) / 2 % line) < item.width;
        if (column < item.columns && leads)
#pragma unroll 1
            for (int k = 0; k < item.rank; k += line) prefetch(row + k);
    }
}

// Grid: x column blocks of all slices, y strides over segments (2^split_shift neighbours share one).
template <class T, class S, bool staged>
__global__ void __launch_bounds__(S::threads, S::blocks) kernel(const Arguments p) {
    LF_DYNAMIC_SHARED(float, tiles);
    __shared__ Kept<S::threads / kWarp> kept;

    const int lane = threadIdx.x % kWarp;
    int slice = 0;
    while (slice + 1 < p.slices && static_cast<int>(blockIdx.x) >= p.blocks_end[slice]) ++slice;
    const int before = slice > 0 ? p.blocks_end[slice - 1] : 0;
    const int column = (static_cast<int>(blockIdx.x) - before) * S::columns + static_cast<int>(threadIdx.x) * S::vector;
    Item item;
    item.z = p.z + slice * p.z_capacity;
    item.y = p.y + p.first[slice] + column;
    item.columns = p.channels[slice] - column;

    const int units = p.segment_capacity << p.split_shift, splits = 1 << p.split_shift;
    int unit = blockIdx.y, chunk = 0, parity = 0;
    bool first = true;  // until this block has waited for the kernel before

    while (unit < units) {
        const int segment = unit >> p.split_shift;
        int count;
        int4 entry;
        if (first) {  // one thread reads, so that all see the same although it may be changing
            if (threadIdx.x == 0) {
                kept.count = load_plan(p.count);
                kept.entry = load_plan4(p.segments + segment);
            }
            __syncthreads();
            count = kept.count, entry = kept.entry;
        } else {
            count = load_plan(p.count), entry = load_plan4(p.segments + segment);
            if (segment >= count) break;
        }
        const int skipped = ((unit & (splits - 1)) + chunk * splits) * p.limit, start = entry.x + skipped;
        item.rows = entry.y - skipped < p.limit ? entry.y - skipped : p.limit;
        const bool more = skipped + splits * p.limit < entry.y;
        bool live = segment < count && item.rows > 0 && start >= 0 && start + item.rows <= p.tokens;
        if (live) {
            const Slot slot = lora::load_slot(p.table + entry.z * p.slices + slice);
            item.b = p.b + slot.b + static_cast<int64_t>(column) * slot.width;
            item.rank = slot.rank, item.width = slot.width, item.scale = slot.scale;
            live = item.rank > 0;
        }
        if (live) {
            warp_sync();
            if (lane < item.rows)
                kept.tokens[threadIdx.x / kWarp][lane] = clamp_token(p, load_plan(p.order + start + lane));
            warp_sync();
        }
        const bool ahead = first;
        if (ahead) {
            if (live) prefetch_rows<S>(item);
            lora::wait_for_previous();
            lora::let_next_start();
            first = false;
            if (!live) continue;  // as far as it saw: the plan is read again
        }
        if (live) {
            if (!run_item<T, S, staged>(p, item, tiles + parity * p.tile_floats, ahead, kept)) continue;
            parity ^= 1;
        }
        if (more) {
            ++chunk;
        } else {
            unit += gridDim.y, chunk = 0;
        }
    }
}

}  // namespace row_expand
}  // namespace lf
