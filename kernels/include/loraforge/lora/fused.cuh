// Decode in one call: Y += scale (X A^T) B^T, with the shrink hidden behind the traffic of B and Y.
//
// The work of expand is an item: a segment and two output channels a thread, of one slice. A block brings the rows of B
// and the first rows of Y into registers before it needs Z, so that only adding up is left when Z is there. How it
// learns that Z is there makes two forms:
//
//   one launch    The first blocks of the grid shrink, the rest expand. Each segment and slice has a counter of shrink
//                 blocks that are done with it (release), for which its expand items wait (acquire); the last of them
//                 sets it back to zero, so graphs replay without a reset. Blocks start in the order of their index and
//                 only wait for lower ones, which never wait: no deadlock, whatever shares the device.
//   two launches  Shrink, then expand in blocks that run ahead of its end (programmatic dependent launch).
//
// Within a row of B, groups of lanes share ranks above 8, sixteen bytes a lane, and exchange partial sums so that each
// lane ends with two (one above rank 16) adjacent channels. Rows are read up to the power of two at the rank, which may
// not be past their width; other widths, ranks above 64 and odd columns of Y take a path that reads eight directions at
// a time, chosen on the device a block at a time. FP32 sums in one order, rounded once: results repeat bit for bit.
//
// Variants of lf_lora_fused (0: kDefault in fused.cu): directions x warps of a shrink block, most expand blocks a
// multiprocessor:
//   one launch     1: 8 x 8, 3    2: 8 x 8, 6    3: 8 x 8, 24   4: 8 x 4, 6    5: 8 x 4, 12   6: 8 x 4, 48
//                  7: 16 x 8, 6   8: 16 x 4, 12
//   two launches  11 to 18: the same
#pragma once

#include "shrink.cuh"

#if !LF_HIP

namespace lf {
namespace lora {
namespace fused {

// Rows of Y in flight.
template <int kWidth>
constexpr int kAhead = kWidth > 16 ? 2 : 4;

template <class T>
struct Outputs {
    const T* b;
    T* y;  // [tokens, y_stride]
    int64_t y_stride;
    Slices slices;
    bool pairs;  // whether channels 2i and 2i + 1 of a slice exist together and may be one access of Y
    int planes;
    int* sync;   // [segment capacity, slices, 2]: shrink blocks done, expand items that know; null for two launches
    int groups;  // of shrink
    int blocks;  // expand items a segment
    int items;   // of all segments that there could be
};

// One or two adjacent channels of Y as one word, zeros where not `wanted`.
template <int kChannels>
__device__ __forceinline__ unsigned load_y(const void* at, bool wanted) {
    if constexpr (kChannels == 2) return wanted ? *static_cast<const unsigned*>(at) : 0;
    return wanted ? *static_cast<const uint16_t*>(at) : 0;
}

template <int kChannels>
__device__ __forceinline__ void store_y(void* at, unsigned word, bool wanted) {
    if (!wanted) return;
    if constexpr (kChannels == 2) *static_cast<unsigned*>(at) = word;
    else *static_cast<uint16_t*>(at) = static_cast<uint16_t>(word);
}

// A block's item once its segment, slice and slot are known.
template <class T>
struct Item {
    Segment segment;
    Slot row;
    int token;  // of row lane % 32 of the segment, the last one's where there are fewer
    int slice, rank;
    int channel, channels;  // this block's first channel of the slice; how many the slice has
    int counter;            // where in `sync`
};

// Waits until Z of the item is complete, then puts scale * (sum of its planes) into shared memory: [rows, width], zeros
// from the rank on.
template <class T>
__device__ __forceinline__ void stage(float* z, int width, const shrink::Operands<T>& in, const Outputs<T>& out,
                                      const Item<T>& item, int directions) {
    if (out.sync != nullptr) {
        if (threadIdx.x == 0) {
            int* sync = out.sync + item.counter;
            const int runs = (item.rank + directions - 1) / directions, done = min(runs, out.groups) * out.planes;
            int seen;
            do asm volatile("ld.acquire.gpu.global.b32 %0, [%1];" : "=r"(seen) : "l"(sync) : "memory");
            while (seen != done);
            const int users = (item.channels + 2 * int(blockDim.x) - 1) / (2 * int(blockDim.x));
            if (atomicAdd(sync + 1, 1) == users - 1) sync[0] = 0, sync[1] = 0;
        }
    } else {  // only the first time is a wait
        wait_for_previous();
        let_next_start();
    }
    __syncthreads();  // also: everyone is done with the last item's Z
    const int lane = threadIdx.x % kWarp, total = item.segment.rows * width;
    for (int base = threadIdx.x - lane; base < total; base += blockDim.x) {
        const int i = base + lane, place = i / width, j = i % width;
        const int token = shuffle(item.token, place % kWarp);
        float sum = 0;
        if (i < total && j < item.rank)
            for (int plane = 0; plane < out.planes; ++plane) sum += __ldcg(in.z_row(plane, token, item.slice) + j);
        if (i < total) z[i] = sum * item.row.scale;
    }
    __syncthreads();
}

// Up to 8 adjacent elements as words, aligned to their number.
template <int kElements>
__device__ __forceinline__ void load_elements(unsigned (&to)[(kElements + 1) / 2], const void* at, bool wanted) {
    if constexpr (kElements == 8) {
        const uint4 words = load16(at, wanted);
        to[0] = words.x, to[1] = words.y, to[2] = words.z, to[3] = words.w;
    } else if constexpr (kElements == 4) {
        const uint2 words = wanted ? __ldg(static_cast<const uint2*>(at)) : uint2{};
        to[0] = words.x, to[1] = words.y;
    } else if constexpr (kElements == 2) {
        to[0] = wanted ? __ldg(static_cast<const unsigned*>(at)) : 0;
    } else {
        to[0] = wanted ? __ldg(static_cast<const uint16_t*>(at)) : 0;
    }
}

// Rows of B of `kWidth` elements, a power of two at or above the rank.
template <class T, int kWidth>
__device__ __forceinline__ void expand_rows(float* z, const shrink::Operands<T>& in, const Outputs<T>& out,
                                            const Item<T>& item, int directions) {
    constexpr int kLanes = kWidth <= 8 ? 1 : kWidth == 16 ? 2 : 4;  // that share a row
    constexpr int kOwn = kWidth <= 16 ? 2 : 1;                      // channels that a lane ends with
    constexpr int kRows = kLanes * kOwn;                            // rows that it holds pieces of
    constexpr int kPiece = kWidth < 8 ? kWidth : 8, kWords = (kPiece + 1) / 2;
    constexpr int kPieces = kWidth / kPiece / kLanes;               // of each row
    constexpr int kRowsAhead = kAhead<kWidth>;
    const int sub = threadIdx.x % kLanes, rows = item.segment.rows;
#pragma unroll 1
    for (int pass = 0; pass < 2 / kOwn; ++pass) {
        const int mine = item.channel + pass * blockDim.x + threadIdx.x * kOwn;  // this lane's first channel
        const bool exists = mine < item.channels;
        unsigned b[kRows][kPieces][kWords];
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
            const int channel = min(mine - sub * kOwn + r, item.channels - 1);
            const T* from = out.b + item.row.b + int64_t(channel) * item.row.width;
#pragma unroll
            for (int c = 0; c < kPieces; ++c) {
                const int at = (sub + kLanes * c) * kPiece;
                load_elements<kPiece>(b[r][c], from + at, at < item.rank);
            }
        }
        T* y = out.y + out.slices.first[item.slice] + mine;
        const auto row = [&](int i) { return y + shuffle(item.token, i) * out.y_stride; };
        unsigned now[kRowsAhead];
#pragma unroll
        for (int i = 0; i < kRowsAhead; ++i) now[i] = load_y<kOwn>(row(i), exists && i < rows);
        if (item.rank < kWidth) {  // elements past the rank may be anything
#pragma unroll
            for (int c = 0; c < kPieces; ++c) {
                const int live = item.rank - (sub + kLanes * c) * kPiece;
#pragma unroll
                for (int w = 0; w < kWords; ++w) {
                    const unsigned mask = live > 2 * w + 1 ? 0xffffffffu : live > 2 * w ? 0xffffu : 0u;
#pragma unroll
                    for (int r = 0; r < kRows; ++r) b[r][c][w] &= mask;
                }
            }
        }
        if (pass == 0) stage(z, kWidth, in, out, item, directions);
#pragma unroll 1
        for (int i = 0; i < rows; ++i) {
            const float2 old = unpack(now[0], T{});
#pragma unroll
            for (int next = 1; next < kRowsAhead; ++next) now[next - 1] = now[next];
            now[kRowsAhead - 1] = load_y<kOwn>(row(i + kRowsAhead), exists && i + kRowsAhead < rows);
            float sum[kRows] = {};
#pragma unroll
            for (int c = 0; c < kPieces; ++c) {
                const float* from = z + i * kWidth + (sub + kLanes * c) * kPiece;
                float zs[2 * kWords];
                if constexpr (kPiece >= 4) {
#pragma unroll
                    for (int q = 0; q < kPiece; q += 4) {
                        const float4 four = *reinterpret_cast<const float4*>(from + q);
                        zs[q] = four.x, zs[q + 1] = four.y, zs[q + 2] = four.z, zs[q + 3] = four.w;
                    }
                } else {
#pragma unroll
                    for (int q = 0; q < kPiece; ++q) zs[q] = from[q];
                }
#pragma unroll
                for (int r = 0; r < kRows; ++r)
#pragma unroll
                    for (int w = 0; w < kWords; ++w) {
                        // wide rows stay packed: converted once for all tokens they would not fit into registers
                        if constexpr (kWidth > 8) asm volatile("" : "+r"(b[r][c][w]));
                        const float2 pair = unpack(b[r][c][w], T{});
                        sum[r] = fmaf(pair.x, zs[2 * w], sum[r]);
                        if constexpr (kPiece > 1) sum[r] = fmaf(pair.y, zs[2 * w + 1], sum[r]);
                    }
            }
            // each lane keeps half of the rows it has sums of and gives the other half away, until kOwn are left
#pragma unroll
            for (int half = kLanes / 2; half > 0; half /= 2) {
                const bool upper = sub & half;
#pragma unroll
                for (int r = 0; r < half * kOwn; ++r) {
                    const float given = upper ? sum[r] : sum[r + half * kOwn];
                    const float kept = upper ? sum[r + half * kOwn] : sum[r];
                    sum[r] = kept + shuffle_xor(given, half);
                }
            }
            const unsigned fresh = pack(old.x + sum[0], old.y + (kOwn > 1 ? sum[kOwn - 1] : 0.0f), T{});
            store_y<kOwn>(row(i), fresh, exists);
        }
    }
}

// Any rank, width and alignment: a lane's two channels, a few tokens at a time, eight directions of each row at a time.
template <class T>
__device__ __forceinline__ void expand_any(float* z, const shrink::Operands<T>& in, const Outputs<T>& out,
                                           const Item<T>& item, int directions) {
    constexpr int kTokens = 4;
    const int mine = item.channel + 2 * threadIdx.x, rows = item.segment.rows, width = (item.rank + 7) / 8 * 8;
    const bool wide = item.row.width % 8 == 0 && item.row.b % 8 == 0;
    stage(z, width, in, out, item, directions);
#pragma unroll 1
    for (int base = 0; base < rows; base += kTokens) {
        float sum[kTokens][2] = {};
#pragma unroll 1
        for (int j = 0; j < item.rank; j += 8) {
#pragma unroll
            for (int c = 0; c < 2; ++c) {
                const int channel = min(mine + c, item.channels - 1);
                const T* from = out.b + item.row.b + int64_t(channel) * item.row.width + j;
                unsigned words[4];
                if (wide) {
                    load_elements<8>(words, from, true);
                } else {
                    const uint16_t* bits = reinterpret_cast<const uint16_t*>(from);
#pragma unroll
                    for (int w = 0; w < 4; ++w)
                        words[w] = (j + 2 * w < item.rank ? bits[2 * w] : 0u) |
                                   (j + 2 * w + 1 < item.rank ? bits[2 * w + 1] : 0u) << 16;
                }
#pragma unroll
                for (int w = 0; w < 4; ++w) {
                    const float2 pair = unpack(words[w], T{});
                    const float low = j + 2 * w < item.rank ? pair.x : 0;
                    const float high = j + 2 * w + 1 < item.rank ? pair.y : 0;
#pragma unroll
                    for (int i = 0; i < kTokens; ++i) {
                        const float* from_z = z + min(base + i, rows - 1) * width + j + 2 * w;
                        sum[i][c] = fmaf(low, from_z[0], sum[i][c]);
                        sum[i][c] = fmaf(high, from_z[1], sum[i][c]);
                    }
                }
            }
        }
#pragma unroll
        for (int i = 0; i < kTokens; ++i) {
            T* y = out.y + out.slices.first[item.slice] + mine + shuffle(item.token, base + i) * out.y_stride;
#pragma unroll
            for (int c = 0; c < 2; ++c) {
                const bool exists = mine + c < item.channels && base + i < rows;
                const float old = unpack(load_y<1>(y + c, exists), T{}).x;
                store_y<1>(y + c, round_bits(old + sum[i][c], T{}), exists);
            }
        }
    }
}

// Items `index`, `index` + step, ... of all live ones. `directions`: of a shrink block. `z`: kTile rows of floats.
template <class T>
__device__ __forceinline__ void expand(float* z, const shrink::Operands<T>& in, const Outputs<T>& out, int index,
                                       int step, int directions) {
    const int wide = 2 * blockDim.x, lane = threadIdx.x % kWarp;
    const int live = load_int(in.count) * out.blocks;
    for (; index < out.items; index += step) {
        Item<T> item;
        const int place = index / out.blocks;
        item.segment = load_segment(in.segments, place);
        // tests join what is loaded by then, so that loads which do not depend on each other do not wait for each other
        if ((index >= live) | (item.segment.rows < 1)) break;
        item.token = load_int(in.order + item.segment.start + min(lane, item.segment.rows - 1));
        item.slice = 0, item.channel = index % out.blocks * wide;
        while (item.slice + 1 < out.slices.count) {
            const int taken = (out.slices.channels[item.slice] + wide - 1) / wide * wide;
            if (item.channel < taken) break;
            item.channel -= taken, ++item.slice;
        }
        item.row = load_slot(in.table + int64_t(item.segment.slot) * in.slices + item.slice);
        item.rank = in.rank(item.row);
        if ((item.rank < 1) | (item.token < 0)) continue;
        item.channels = out.slices.channels[item.slice];
        item.counter = 2 * (place * in.slices + item.slice);
        const int bits = item.rank > 1 ? 32 - __clz(item.rank - 1) : 0, piece = min(1 << bits, 8);
        const bool whole =
            out.pairs && item.row.width >= 1 << bits && item.row.width % piece == 0 && item.row.b % piece == 0;
        switch (whole ? bits : -1) {
            case 0: expand_rows<T, 1>(z, in, out, item, directions); break;
            case 1: expand_rows<T, 2>(z, in, out, item, directions); break;
            case 2: expand_rows<T, 4>(z, in, out, item, directions); break;
            case 3: expand_rows<T, 8>(z, in, out, item, directions); break;
            case 4: expand_rows<T, 16>(z, in, out, item, directions); break;
            case 5: expand_rows<T, 32>(z, in, out, item, directions); break;
            case 6: expand_rows<T, 64>(z, in, out, item, directions); break;
            default: expand_any(z, in, out, item, directions);
        }
    }
    wait_for_previous();  // blocks without work too: what comes next may rely on this kernel having waited
}

// Blocks of a multiprocessor that registers and shared memory have to allow: 768 threads, or 512 with long rings.
template <int kTiles, int kWarps>
constexpr int kResident = (kTiles == 1 ? 24 : 16) / kWarps;

// One launch. Blocks [0, shrinkers) shrink: segment, slice, group and plane by their index; the rest expand.
template <class T, int kTiles, int kWarps>
__global__ void __launch_bounds__(kWarps * kWarp, kResident<kTiles, kWarps>)
one(const __grid_constant__ shrink::Operands<T> in, const __grid_constant__ Outputs<T> out, int shrinkers) {
    LF_DYNAMIC_SHARED(uint4, shared);
    wait_for_previous();
    let_next_start();
    const int block = blockIdx.x;
    if (block >= shrinkers) {
        expand(reinterpret_cast<float*>(shared), in, out, block - shrinkers, gridDim.x - shrinkers, 8 * kTiles);
        return;
    }
    const int plane = block % out.planes, group = block / out.planes % out.groups;
    const int pair = block / out.planes / out.groups, index = pair / in.slices, slice = pair % in.slices;
    const int count = load_int(in.count);
    const Segment segment = load_segment(in.segments, index);
    if ((index >= count) | (segment.rows < 1)) return;
    const shrink::Rows rows = shrink::load_rows(in.order, segment);
    const Slot row = load_slot(in.table + int64_t(segment.slot) * in.slices + slice);
    if ((in.rank(row) <= 8 * kTiles * group) | ((rows.low | rows.high) < 0)) return;
    shrink::work<T, kTiles, kWarps>(in, rows, row, slice, group, out.groups, plane, out.planes, shared);
    if (threadIdx.x == 0) {  // past the barrier that ends the work: on behalf of the whole block
        int* done = out.sync + 2 * pair;
        asm volatile("fence.acq_rel.gpu;\nred.release.gpu.global.add.s32 [%0], 1;" ::"l"(done) : "memory");
    }
}

// The second of two launches.
template <class T, int kWarps>
__global__ void __launch_bounds__(kWarps * kWarp, 24 / kWarps)
second(const __grid_constant__ shrink::Operands<T> in, const __grid_constant__ Outputs<T> out) {
    LF_DYNAMIC_SHARED(float, z);
    expand(z, in, out, blockIdx.x, gridDim.x, 0);
}

}  // namespace fused
}  // namespace lora
}  // namespace lf

#endif
