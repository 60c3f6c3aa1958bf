// Low-rank products of many adapters in one batch on a CPU: Z = X A^T and Y += scale Z B^T (paper, section 5).
//
// Tokens of one adapter are a segment, so that A and B are read once for up to a tile of rows. Shrink: FP32 dot products
// of four rows and four directions at a time. Expand: B is transposed in registers, sixteen channels at a time, into an
// FP32 panel in the first-level cache that all rows of the segment use. Work is divided by its estimated cost; one
// number is always made by one thread and in one order, whatever the batch around it and the number of threads.
#include <omp.h>

#include <algorithm>
#include <vector>

#include "loraforge/cpu/lanes.h"

namespace loraforge::cpu {
namespace {

constexpr int kMaxSlices = 3;
constexpr int kGroup = 4;               // directions that one work unit of shrink takes
constexpr double kWorthThreads = 20e3;  // cycles: below, waking the other threads costs more than they save

struct Slot {  // loraforge/ops/slots.py
    int64_t a, b;
    int32_t rank, width;
    float scale;
    uint32_t unused;
};
static_assert(sizeof(Slot) == 32, "the slot table has 32-byte rows");

struct Segment {  // loraforge/ops/plan.py
    int32_t first, rows, slot, unused;
};

struct Batch {
    const uint16_t* x;
    int64_t x_stride;
    const uint16_t* a;
    const uint16_t* b;
    const Slot* table;
    int slices, d_in;
    const int32_t* order;
    const Segment* segments;
    int count;
    float* z;
    int capacity;
    uint16_t* y;
    int64_t y_stride;
    int first[kMaxSlices], channels[kMaxSlices];

    const Slot& slot(const Segment& segment, int slice) const {
        return table[int64_t(segment.slot) * slices + slice];
    }
    float* z_row(int token, int slice) const { return z + (int64_t(token) * slices + slice) * capacity; }
};

// Channels that share a panel: as many as keep it near, so that long runs of B and y are streamed at low ranks.
int chunk_channels(int rank) { return rank <= 16 ? 256 : rank <= 64 ? 128 : rank <= 256 ? 64 : kLanes; }

int ceil_div(int value, int by) { return (value + by - 1) / by; }

struct Work {
    int units;
    double each;  // estimated cycles of a unit
};

Work shrink_work(const Batch& batch, const Segment& segment, int slice) {
    const double steps = batch.d_in / 32.0;
    return {ceil_div(batch.slot(segment, slice).rank, kGroup), kGroup * steps * (segment.rows + 2)};
}

Work expand_work(const Batch& batch, const Segment& segment, int slice) {
    const int rank = batch.slot(segment, slice).rank;
    if (rank == 0) return {0, 0};
    const int width = chunk_channels(rank);
    const double blocks = double(width) / kLanes;
    return {ceil_div(batch.channels[slice], width), blocks * (2.0 * rank + segment.rows * (0.5 * rank + 6))};
}

using Estimate = Work (*)(const Batch&, const Segment&, int);

double total(const Batch& batch, Estimate estimate) {
    double sum = 0;
    for (int s = 0; s < batch.count; ++s)
        for (int slice = 0; slice < batch.slices; ++slice) {
            const Work work = estimate(batch, batch.segments[s], slice);
            sum += work.units * work.each;
        }
    return sum;
}

// Call `visit(segment, slice, first unit, end)` for the share of one thread: the units whose start lies in its part.
template <class Visit>
void share(const Batch& batch, Estimate estimate, int thread, int threads, Visit visit) {
    const double all = total(batch, estimate);
    const double from = all * thread / threads;
    const double to = thread + 1 == threads ? 2 * all : all * (thread + 1) / threads;
    double start = 0;
    for (int s = 0; s < batch.count && start < to; ++s)
        for (int slice = 0; slice < batch.slices; ++slice) {
            const Work work = estimate(batch, batch.segments[s], slice);
            int bounds[2] = {0, 0};
            for (int side = 0; side < 2 && work.units > 0; ++side) {
                const double edge = (side == 0 ? from : to) - start;
                int unit = edge <= 0 ? 0 : int(std::min<double>(edge / work.each, work.units));
                if (unit < work.units && unit * work.each < edge) ++unit;
                bounds[side] = unit;
            }
            if (bounds[0] < bounds[1]) visit(batch.segments[s], slice, bounds[0], bounds[1]);
            start += work.units * work.each;
        }
}

// Dot products of R rows with up to 4 G directions that lie `d_in` apart, of which `live` are kept.
template <class T, int R, int G>
void dots(const uint16_t* const (&x)[R], const uint16_t* a, int d_in, int live, float* const (&z)[R]) {
    using D = Dot<T>;
    const uint16_t* direction[4 * G];
    for (int j = 0; j < 4 * G; ++j) direction[j] = a + int64_t(std::min(j, live - 1)) * d_in;
    Lanes sum[R][4 * G] = {};
    const auto step = [&](auto take, int k) {
        typename D::Chunk row[R];
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) row[r] = take(x[r] + k);
#pragma GCC unroll 8
        for (int j = 0; j < 4 * G; ++j) {
            const typename D::Chunk factor = take(direction[j] + k);
#pragma GCC unroll 4
            for (int r = 0; r < R; ++r) sum[r][j] = D::add(sum[r][j], row[r], factor);
        }
    };
    int k = 0;
    for (; k + D::kStep <= d_in; k += D::kStep) step([](const uint16_t* from) { return D::take(from); }, k);
    if (const int rest = d_in - k; rest > 0)
        step([rest](const uint16_t* from) { return D::take(from, rest); }, k);
    for (int r = 0; r < R; ++r)
        for (int g = 0; g < G; ++g) {
            float sums[4];
            sum4(sum[r][4 * g], sum[r][4 * g + 1], sum[r][4 * g + 2], sum[r][4 * g + 3], sums);
            for (int j = 0; j < 4 && 4 * g + j < live; ++j) z[r][4 * g + j] = sums[j];
        }
}

template <class T, int R, int G>
void shrink_rows(const Batch& batch, const int32_t* tokens, const Slot& slot, int slice, int from, int to) {
    const uint16_t* x[R];
    float* z[R];
    for (int r = 0; r < R; ++r) x[r] = batch.x + tokens[r] * batch.x_stride;
    const uint16_t* a = batch.a + slot.a;
    for (int j = from; j < to; j += 4 * G) {
        for (int r = 0; r < R; ++r) z[r] = batch.z_row(tokens[r], slice) + j;
        const uint16_t* block = a + int64_t(j) * batch.d_in;
        if (to - j > 4)
            dots<T, R, G>(x, block, batch.d_in, std::min(to - j, 4 * G), z);
        else
            dots<T, R, 1>(x, block, batch.d_in, to - j, z);
    }
}

template <class T>
void shrink_units(const Batch& batch, const Segment& segment, int slice, int from, int to) {
    const Slot& slot = batch.slot(segment, slice);
    const int32_t* tokens = batch.order + segment.first;
    const int first = from * kGroup, end = std::min(to * kGroup, slot.rank);
    int row = 0;
    for (; row + 4 <= segment.rows; row += 4) shrink_rows<T, 4, 1>(batch, tokens + row, slot, slice, first, end);
    if (segment.rows - row >= 2) {
        shrink_rows<T, 2, 2>(batch, tokens + row, slot, slice, first, end);
        row += 2;
    }
    if (row < segment.rows) shrink_rows<T, 1, 2>(batch, tokens + row, slot, slice, first, end);
}

// Directions [0, live) of a block of up to sixteen rows of B, as FP32 panel[direction][channel]. No element past
// `live` is read.
template <class T>
void pack_rest(const uint16_t* b, int64_t width, int channels, int live, float* panel, int stride) {
#ifdef LF_AVX512
    for (int j = 0; j < live; j += 2 * kLanes) {
        const int count = std::min(live - j, 2 * kLanes);
        __m512i rows[kLanes] = {};
        for (int n = 0; n < channels; ++n)
            rows[n] = _mm512_maskz_loadu_epi16(uint32_t((uint64_t(1) << count) - 1), b + n * width + j);
        transpose(rows);
        for (int i = 0; i < count; ++i)
            store_lanes(panel + (j + i) * stride, i % 2 == 0 ? T::even(rows[i / 2]) : T::odd(rows[i / 2]));
    }
#else
    for (int j = 0; j < live; ++j)
        for (int n = 0; n < kLanes; ++n) panel[j * stride + n] = n < channels ? T::widen(b[n * width + j]) : 0.0f;
#endif
}

#ifdef LF_AVX512
// 2 L directions of whole blocks of sixteen channels.
template <class T, int L>
void pack_blocks(const uint16_t* b, int64_t width, int blocks, float* panel, int stride) {
    for (int block = 0; block < blocks; ++block, b += kLanes * width, panel += kLanes) {
        __m512i rows[L];
        gather_rows<L>(b, width, rows);
        transpose(rows);
#pragma GCC unroll 16
        for (int p = 0; p < L; ++p) {
            store_lanes(panel + 2 * p * stride, T::even(rows[p]));
            store_lanes(panel + (2 * p + 1) * stride, T::odd(rows[p]));
        }
    }
}
#endif

// All live directions of `channels` rows of B. What is past the rank may be stored, where the width has it, and is
// never multiplied. The panel has room for the next power of two.
template <class T>
void pack(const uint16_t* b, int64_t width, int channels, int rank, float* panel, int stride) {
    int done = 0;  // channels
#ifdef LF_AVX512
    const int blocks = channels / kLanes;
    if (width == 1) {
        for (; done < channels; done += kLanes)
            store_lanes(panel + done, load<T>(b + done, std::min(channels - done, kLanes)));
        return;
    }
    const int last = (rank - 1) / (2 * kLanes) * 2 * kLanes;  // the first direction of the last step
    const int pairs = rank - last <= 2 ? 1 : rank - last <= 4 ? 2 : rank - last <= 8 ? 4 : rank - last <= 16 ? 8 : 16;
    if (last + 2 * pairs <= width) {
        for (int j = 0; j < last; j += 2 * kLanes)
            pack_blocks<T, kLanes>(b + j, width, blocks, panel + j * stride, stride);
        float* to = panel + last * stride;
        switch (pairs) {
            case 1: pack_blocks<T, 1>(b + last, width, blocks, to, stride); break;
            case 2: pack_blocks<T, 2>(b + last, width, blocks, to, stride); break;
            case 4: pack_blocks<T, 4>(b + last, width, blocks, to, stride); break;
            case 8: pack_blocks<T, 8>(b + last, width, blocks, to, stride); break;
            default: pack_blocks<T, kLanes>(b + last, width, blocks, to, stride);
        }
        done = blocks * kLanes;
    }
#endif
    for (; done < channels; done += kLanes)
        pack_rest<T>(b + done * width, width, std::min(channels - done, kLanes), rank, panel + done, stride);
}

// y += scale z panel for R rows and 16 V channels, of which the last `rest` lanes exist in the last vector.
template <class T, int R, int V, bool kWhole>
void multiply(const float* const (&z)[R], int rank, const float* panel, int stride, float scale,
              uint16_t* const (&y)[R], int column, int rest) {
    Lanes sum[R][V] = {};
    for (int j = 0; j < rank; ++j) {
        Lanes factor[V];
#pragma GCC unroll 8
        for (int v = 0; v < V; ++v) factor[v] = load_lanes(panel + j * stride + column + v * kLanes);
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) {
            const Lanes weight = broadcast(z[r][j]);
#pragma GCC unroll 8
            for (int v = 0; v < V; ++v) sum[r][v] += weight * factor[v];
        }
    }
    // all loads before all stores: rows of y often lie a multiple of a page apart, where a load waits for a store
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
        for (int v = 0; v < V; ++v)
            sum[r][v] = load<T>(y[r] + column + v * kLanes, kWhole ? kLanes : rest) + scale * sum[r][v];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
        if constexpr (kWhole && V > 1) {
#pragma GCC unroll 4
            for (int v = 0; v < V; v += 2)
                store_two<T>(y[r] + column + v * kLanes, sum[r][v], sum[r][v + 1]);
        } else {
            store<T>(y[r] + column, sum[r][0], kWhole ? kLanes : rest);
        }
    }
}

template <class T, int R>
void expand_rows(const Batch& batch, const int32_t* tokens, int slice, const Slot& slot, const float* panel,
                 int stride, int column, int channels) {
    constexpr int kVectors = R == 4 ? 4 : 8;
    const float* z[R];
    uint16_t* y[R];
    for (int r = 0; r < R; ++r) {
        z[r] = batch.z_row(tokens[r], slice);
        y[r] = batch.y + tokens[r] * batch.y_stride + column;
    }
    int at = 0;
    for (; at + kVectors * kLanes <= channels; at += kVectors * kLanes)
        multiply<T, R, kVectors, true>(z, slot.rank, panel, stride, slot.scale, y, at, kLanes);
    for (; at + kLanes <= channels; at += kLanes)
        multiply<T, R, 1, true>(z, slot.rank, panel, stride, slot.scale, y, at, kLanes);
    if (at < channels) multiply<T, R, 1, false>(z, slot.rank, panel, stride, slot.scale, y, at, channels - at);
}

// Channels [column, column + channels) of a slice, for all rows of a segment.
template <class T>
void expand_chunk(const Batch& batch, const Segment& segment, int slice, int column, int channels, float* panel) {
    const Slot& slot = batch.slot(segment, slice);
    const int stride = chunk_channels(slot.rank);
    pack<T>(batch.b + slot.b + column * int64_t(slot.width), slot.width, channels, slot.rank, panel, stride);
    const int32_t* tokens = batch.order + segment.first;
    const int first = batch.first[slice] + column;
    int row = 0;
    for (; row + 4 <= segment.rows; row += 4)
        expand_rows<T, 4>(batch, tokens + row, slice, slot, panel, stride, first, channels);
    if (row + 2 <= segment.rows) {
        expand_rows<T, 2>(batch, tokens + row, slice, slot, panel, stride, first, channels);
        row += 2;
    }
    if (row < segment.rows) expand_rows<T, 1>(batch, tokens + row, slice, slot, panel, stride, first, channels);
}

// FP32 numbers of the largest panel that the batch needs.
size_t panel_size(const Batch& batch) {
    size_t most = 0;
    for (int s = 0; s < batch.count; ++s)
        for (int slice = 0; slice < batch.slices; ++slice) {
            const int rank = batch.slot(batch.segments[s], slice).rank;
            const size_t rows = size_t(ceil_div(rank, 2 * kLanes)) * 2 * kLanes;
            most = std::max(most, rows * chunk_channels(rank));
        }
    return most;
}

// A panel of this thread's own that only ever grows.
float* own_panel(size_t size) {
    thread_local std::vector<float> panel;
    if (panel.size() < size + kLanes) panel.resize(size + kLanes);
    return reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(panel.data()) + 63) & ~uintptr_t(63));
}

template <class T>
void shrink(const Batch& batch, int thread, int threads) {
    share(batch, shrink_work, thread, threads, [&](const Segment& segment, int slice, int from, int to) {
        shrink_units<T>(batch, segment, slice, from, to);
    });
}

template <class T>
void expand(const Batch& batch, int thread, int threads) {
    float* panel = own_panel(panel_size(batch));
    share(batch, expand_work, thread, threads, [&](const Segment& segment, int slice, int from, int to) {
        const int width = chunk_channels(batch.slot(segment, slice).rank);
        for (int unit = from; unit < to; ++unit)
            expand_chunk<T>(batch, segment, slice, unit * width,
                            std::min(width, batch.channels[slice] - unit * width), panel);
    });
}

template <class T>
void run(const Batch& batch) {
    const double cycles =
        (batch.x ? total(batch, shrink_work) : 0) + (batch.y ? total(batch, expand_work) : 0);
    const int threads = cycles < kWorthThreads || omp_in_parallel() ? 1 : omp_get_max_threads();
    if (threads == 1) {
        if (batch.x) shrink<T>(batch, 0, 1);
        if (batch.y) expand<T>(batch, 0, 1);
        return;
    }
#pragma omp parallel num_threads(threads)
    {
        const int thread = omp_get_thread_num(), team = omp_get_num_threads();
        if (batch.x) shrink<T>(batch, thread, team);
        if (batch.x && batch.y) {
#pragma omp barrier
        }
        if (batch.y) expand<T>(batch, thread, team);
    }
}

}  // namespace
}  // namespace loraforge::cpu

extern "C" {

// The instructions that the products were compiled for.
const char* lf_cpu_isa() {
#if defined(LF_AVX512_BF16)
    return "AVX-512 with BF16 dot products";
#elif defined(LF_AVX512)
    return "AVX-512";
#else
    return "generic vectors";
#endif
}

// Sort tokens by slot and cut them into segments of at most `tile` rows. Returns 0, or -1 for sizes that make no sense.
int lf_cpu_plan(const int32_t* token_slots, int tokens, int slots, int tile, int32_t* order, int32_t* segments,
                int32_t* count) {
    if (tokens < 0 || slots < 1 || tile < 1) return -1;
    std::vector<int32_t> place(size_t(slots) + 1, 0);  // of the next token of each slot
    for (int t = 0; t < tokens; ++t)
        if (token_slots[t] >= 0 && token_slots[t] < slots) ++place[token_slots[t] + 1];
    int32_t made = 0, begin = 0;
    for (int slot = 0; slot < slots; ++slot) {
        const int32_t rows = place[slot + 1];
        place[slot] = begin;
        for (int32_t done = 0; done < rows; done += tile, ++made) {
            int32_t* segment = segments + int64_t(made) * 4;
            segment[0] = begin + done;
            segment[1] = std::min(tile, rows - done);
            segment[2] = slot;
            segment[3] = 0;
        }
        begin += rows;
    }
    for (int t = 0; t < tokens; ++t)
        if (token_slots[t] >= 0 && token_slots[t] < slots) order[place[token_slots[t]]++] = t;
    *count = made;
    return 0;
}

// Shrink (x given), expand (y given) or both in one parallel region. dtype: 1 fp16, 2 bf16. z: FP32 [tokens, slices,
// z_capacity]. x_stride, y_stride: elements from one row to the next. Returns 0, or -1 for what is not supported.
int lf_cpu_lora(const void* x, int64_t x_stride, int dtype, const void* a, const void* b, const void* table, int slices,
                int d_in, const int32_t* order, const int32_t* segments, const int32_t* count, float* z, int z_capacity,
                void* y, int64_t y_stride, const int* slice_first, const int* slice_channels) {
    using namespace loraforge::cpu;
    if (slices < 1 || slices > kMaxSlices || (dtype != 1 && dtype != 2)) return -1;
    Batch batch{static_cast<const uint16_t*>(x),
                x_stride,
                static_cast<const uint16_t*>(a),
                static_cast<const uint16_t*>(b),
                static_cast<const Slot*>(table),
                slices,
                d_in,
                order,
                reinterpret_cast<const Segment*>(segments),
                *count,
                z,
                z_capacity,
                static_cast<uint16_t*>(y),
                y_stride,
                {},
                {}};
    for (int slice = 0; y && slice < slices; ++slice) {
        batch.first[slice] = slice_first[slice];
        batch.channels[slice] = slice_channels[slice];
    }
    if (dtype == 1)
        run<Fp16>(batch);
    else
        run<Bf16>(batch);
    return 0;
}
}
