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
// Overlap: a block reads all of its segments from the plan ahead of the wait, a lane each, sends their rows of B on
// their way to the L2 cache, and compares the plan after the wait; what was stale is read again. Right after a shrink
// of ours (common.cuh) there is nothing to compare, and B and Y of the first item are in registers before the wait.
//
// Variants: shape + 10 * grid, 0 for shape 6. Shapes, in threads x adjacent columns x groups (widest resident bucket),
// blocks at once:
//   1  128 x 2 x 1 (16) 6    3  256 x 1 x 1 (64) 2, the paper's    4  128 x 4 x 1 (16) 4    5   64 x 4 x 1  (8) 10
//   6  128 x 2 x 2  (8) 5    7  128 x 2 x 2 (16) 4                 8   64 x 2 x 2  (8) 10
//   9  128 x 1 x 4  (8) 4: what any other becomes where rows of Y are not aligned for it
// Grids: 0 as many blocks as fit at once, 1 a block an item, 2 one fewer a multiprocessor than fit, which leaves room
// for the kernel after it to start.
// Z straight from global memory (staged = 0) is there for the ablation: shape 3, one plane, rows of Z aligned to 16
// bytes.
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
    const uint16_t* b;
    const Slot* table;
    int slices;
    int first[lora::kMaxSlices], channels[lora::kMaxSlices];
    int blocks_end[lora::kMaxSlices];  // column blocks up to and including a slice
    const int* order;
    const int4* segments;
    const int* count;
    int segment_capacity, tokens;
    bool follows;     // a shrink of ours: then plan and Y are as they will be, and Z alone is waited for
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
    int start, rows;  // in `order`
    int columns;      // from the thread's first to the end of the slice
    int rank, width;
    float scale;
};

// Segments that a block reads at once, one a lane.
constexpr int kBatch = kWarp;

// What a block keeps in shared memory beside the tiles of Z.
template <int warps>
struct Kept {
    int tokens[warps][kMaxRows];  // of the item's rows; every warp has its own
    int4 entries[kBatch];         // the plan as the block saw it
    Slot slots[kBatch];
    unsigned seen;                // of the batch: segments that exist
    unsigned live;                // and have an adapter with directions
};

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
            const uint4 v = constant ? __ldg(at) : lora::load_past_l1(at);
            to[4 * i] = v.x, to[4 * i + 1] = v.y, to[4 * i + 2] = v.z, to[4 * i + 3] = v.w;
        }
    } else if constexpr (elements == 4) {
        const uint2* at = reinterpret_cast<const uint2*>(from);
        const uint2 v = constant ? __ldg(at) : lora::load_past_l1(at);
        to[0] = v.x, to[1] = v.y;
    } else if constexpr (elements == 2) {
        const uint32_t* at = reinterpret_cast<const uint32_t*>(from);
        to[0] = constant ? __ldg(at) : lora::load_past_l1(at);
    } else {
        to[0] = constant ? __ldg(from) : lora::load_past_l1(from);
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
    float sum = lora::load_past_l1(row + k);
#pragma unroll 1
    for (int plane = 1; plane < p.planes; plane += 3) {  // three loads at a time are in flight
        float more[3];
#pragma unroll
        for (int i = 0; i < 3; ++i)
            more[i] = plane + i < p.planes ? lora::load_past_l1(row + (plane + i) * p.z_plane + k) : 0.0f;
#pragma unroll
        for (int i = 0; i < 3; ++i) sum += more[i];
    }
    return sum * scale;
}

__device__ __forceinline__ const float* z_row(const Arguments& p, const Item& item, int token) {
    return item.z + token * p.z_row;
}

// Four elements of Z from k on, zeros past the rank: of a single plane whose rows may be read 16 bytes at a time.
__device__ __forceinline__ float4 z_four(const float* row, int k, const Item& item) {
    float4 v{};
    if (k < item.rank) v = *reinterpret_cast<const float4*>(row + k);
    v.x *= item.scale;
    v.y = k + 1 < item.rank ? v.y * item.scale : 0.0f;
    v.z = k + 2 < item.rank ? v.z * item.scale : 0.0f;
    v.w = k + 3 < item.rank ? v.w * item.scale : 0.0f;
    return v;
}

// Tokens that were read ahead of the wait may be anything: they make addresses before they are found to be stale.
__device__ __forceinline__ int clamp_token(const Arguments& p, int token) {
    return token >= 0 && token < p.tokens ? token : 0;
}

// Whether a segment as the plan has it may be gone by: stale ones may be anything that the plan ever was.
__device__ __forceinline__ bool exists(const Arguments& p, const int4& entry, int segment, int count) {
    return segment < count && entry.y > 0 && entry.x >= 0 && entry.x + entry.y <= p.tokens;
}

// Reads the segments of the units from `base` on, and their slots, one a lane of the first warp.
template <int warps>
__device__ __forceinline__ void read_batch(const Arguments& p, Kept<warps>& kept, int base, int slice) {
    if (threadIdx.x < kWarp) {
        const int unit = base + static_cast<int>(threadIdx.x * gridDim.y), segment = unit >> p.split_shift;
        const int count = lora::load_int(p.count);
        bool live = segment < p.segment_capacity;
        int4 entry{};
        Slot slot{};
        if (live) {
            entry = lora::load_words(p.segments + segment);
            live = exists(p, entry, segment, count);
        }
        const unsigned seen = lora::lanes_where(live);
        if (live) {
            slot = lora::load_slot(p.table + entry.z * p.slices + slice);
            live = slot.rank > 0;
        }
        kept.entries[threadIdx.x] = entry;
        kept.slots[threadIdx.x] = slot;
        const unsigned mask = lora::lanes_where(live);
        if (threadIdx.x == 0) kept.seen = seen, kept.live = mask;
    }
    __syncthreads();
}

// The plan after the wait, as far as a thread compares it: a segment and a token, one a lane.
struct Reread {
    int4 entry;
    int count, token;
};

__device__ __forceinline__ Reread reread(const Arguments& p, int start, int rows) {
    const int lane = threadIdx.x % kWarp, segment = static_cast<int>(blockIdx.y + lane * gridDim.y) >> p.split_shift;
    return {lora::load_words(p.segments + min(segment, p.segment_capacity - 1)), lora::load_int(p.count),
            lora::load_int(p.order + start + min(lane, rows - 1))};
}

// True where the plan that a block went by ahead of the wait is not the plan as it is now.
template <int warps>
__device__ __forceinline__ bool is_stale(const Arguments& p, const Kept<warps>& kept, const Reread& now, int rows) {
    const int lane = threadIdx.x % kWarp, segment = static_cast<int>(blockIdx.y + lane * gridDim.y) >> p.split_shift;
    const int4 then = kept.entries[lane];
    const bool lives = segment < p.segment_capacity && exists(p, now.entry, segment, now.count);
    const bool lived = kept.seen >> lane & 1;
    const bool moved = now.entry.x != then.x || now.entry.y != then.y || now.entry.z != then.z;
    return lives != lived || (lives && moved) ||
           clamp_token(p, now.token) != kept.tokens[threadIdx.x / kWarp][min(lane, rows - 1)];
}

// The tile of Z of an item into shared memory, zeros past the rank, rows of a compile-time width or (0) of
// p.tile_stride. False where the block went by a stale plan.
template <int width, bool staged, int warps>
__device__ __forceinline__ bool stage(const Arguments& p, const Item& item, float* tile, bool first,
                                      const Kept<warps>& kept) {
    const int* tokens = kept.tokens[threadIdx.x / kWarp];
    if (first && p.follows) {
        lora::wait_for_previous();
        lora::let_next_start();
    }
    const bool compares = first && !p.follows;
    Reread now{};
    if (compares) now = reread(p, item.start, item.rows);  // on its way together with Z
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
    if (compares) return !__syncthreads_or(is_stale(p, kept, now, item.rows));
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
            const float4 v = z_four(z_row(p, item, token), k + at, item);
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
    __syncthreads();  // as every item does, so that no tile of Z is overwritten while it is read
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

// A place in a batch: the chunk-th item of this block in its segment `index`; past the end, `index` is kBatch.
struct Cursor {
    int index, chunk;
};

// The first item at `at` or after it, and where its rows are in `order`.
template <int warps>
__device__ __forceinline__ Cursor find(const Arguments& p, const Kept<warps>& kept, int base, Cursor at, int& start,
                                       int& rows) {
    const int splits = 1 << p.split_shift;
#pragma unroll 1
    for (; at.index < kBatch; ++at.index, at.chunk = 0) {
        const unsigned left = kept.live >> at.index;
        if (left == 0) break;
        if ((left & 1) == 0) continue;
        const int4 entry = kept.entries[at.index];
        const int unit = base + at.index * static_cast<int>(gridDim.y);
        const int skipped = ((unit & (splits - 1)) + at.chunk * splits) * p.limit;
        start = entry.x + skipped, rows = min(entry.y - skipped, p.limit);
        if (rows > 0) return at;
    }
    return {kBatch, 0};
}

// Grid: x column blocks of all slices, y strides over segments (2^split_shift neighbours share one).
template <class T, class S, bool staged>
__global__ void __launch_bounds__(S::threads, S::blocks) kernel(const Arguments p) {
    LF_DYNAMIC_SHARED(float, tiles);
    __shared__ Kept<S::threads / kWarp> kept;

    const int lane = threadIdx.x % kWarp;
    int* const tokens = kept.tokens[threadIdx.x / kWarp];
    int slice = 0;
    while (slice + 1 < p.slices && static_cast<int>(blockIdx.x) >= p.blocks_end[slice]) ++slice;
    const int before = slice > 0 ? p.blocks_end[slice - 1] : 0;
    const int column = (static_cast<int>(blockIdx.x) - before) * S::columns + static_cast<int>(threadIdx.x) * S::vector;
    Item item;
    item.z = p.z + slice * p.z_capacity;
    item.y = p.y + p.first[slice] + column;
    item.columns = p.channels[slice] - column;
    const auto enter = [&](int index) {
        const Slot& slot = kept.slots[index];
        item.b = p.b + slot.b + static_cast<int64_t>(column) * slot.width;
        item.rank = slot.rank, item.width = slot.width, item.scale = slot.scale;
    };

    const int units = p.segment_capacity << p.split_shift;
    bool ahead = true;  // of the kernel before
    int parity = 0;
    for (int base = blockIdx.y; base < units; base += kBatch * static_cast<int>(gridDim.y)) {
        bool again;
        do {
            again = false;
            read_batch(p, kept, base, slice);
            Cursor at = find(p, kept, base, {0, 0}, item.start, item.rows);
            int token = 0;
            if (at.index < kBatch && lane < item.rows) token = lora::load_int(p.order + item.start + lane);
            if (ahead) {
                unsigned left = kept.live;
#pragma unroll 1
                for (int last = -1; left != 0; left &= left - 1) {
                    const int index = __ffs(static_cast<int>(left)) - 1;
                    if (kept.entries[index].z == last) continue;  // rows of one adapter follow each other
                    last = kept.entries[index].z;
                    enter(index);
                    prefetch_rows<S>(item);
                }
                if (!p.follows || at.index == kBatch) {
                    lora::wait_for_previous();
                    lora::let_next_start();
                }
                again = at.index == kBatch && !p.follows;  // as far as it saw
                if (again) ahead = false;
            }
#pragma unroll 1
            while (at.index < kBatch) {
                warp_sync();
                if (lane < item.rows) tokens[lane] = clamp_token(p, token);
                warp_sync();
                enter(at.index);
                int start = 0, rows = 0;  // of the next item, whose tokens are on their way during this one
                const Cursor next = find(p, kept, base, {at.index, at.chunk + 1}, start, rows);
                if (next.index < kBatch && lane < rows) token = lora::load_int(p.order + start + lane);
                again = !run_item<T, S, staged>(p, item, tiles + parity * p.tile_floats, ahead, kept);
                ahead = false;
                if (again) break;
                parity ^= 1;
                at = next, item.start = start, item.rows = rows;
            }
            __syncthreads();  // the batch is done with
        } while (again);
    }
}

}  // namespace row_expand
}  // namespace lf
