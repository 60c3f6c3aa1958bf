// Tokens sorted by slot and cut into segments: loraforge/ops/plan.py, in one block.
//
// A stable counting sort. Each warp owns a run of tokens and counts them by slot in a row of its own, so that nothing
// depends on the order in which warps run; tokens of one warp step that share a slot are told apart by their lanes.
#pragma once

#include "common.cuh"

namespace lf {
namespace lora {
namespace plan {

constexpr int kWarps = 32;
constexpr int kThreads = kWarps * kWarp;

// Bytes of shared memory for `warps` counting warps: their counters, and a slot's first place and first segment.
inline size_t shared_bytes(int warps, int slots) {
    return sizeof(int) * (size_t(warps) * slots + 2 * size_t(slots + 1));
}

// Lanes whose value equals this lane's.
__device__ __forceinline__ unsigned equal_lanes(int value) {
#if LF_HIP
    unsigned mask = 0;
    for (int lane = 0; lane < kWarp; ++lane) mask |= unsigned(shuffle(value, lane) == value) << lane;
    return mask;
#else
    return __match_any_sync(0xffffffffu, value);
#endif
}

// Sum of `value` over lower lanes, and over all lanes.
__device__ __forceinline__ int sum_below(int value, int lane, int& all) {
    int sum = value;
#pragma unroll
    for (int step = 1; step < kWarp; step *= 2) {
        const int other = shuffle(sum, (lane - step) & (kWarp - 1));
        if (lane >= step) sum += other;
    }
    all = shuffle(sum, kWarp - 1);
    return sum - value;
}

// order [tokens], segments [capacity, 4] and count [1] from token_slots [tokens]; slots outside [0, slots) are none.
// One block of kThreads threads, of which the first `warps` warps count; capacity as plan.py has it.
__global__ void __launch_bounds__(kThreads)
fill(const int* token_slots, int tokens, int slots, int tile, int warps, int* order, int* segments, int* count,
     int capacity) {
    LF_DYNAMIC_SHARED(int, memory);
    int* counters = memory;                        // [warps][slots]
    int* places = counters + size_t(warps) * slots;  // [slots + 1] first place of a slot in `order`
    int* firsts = places + slots + 1;              // [slots + 1] first segment of a slot
    const int thread = threadIdx.x, lane = thread % kWarp, warp = thread / kWarp;
    for (int i = thread; i < warps * slots; i += kThreads) counters[i] = 0;
    __syncthreads();
    wait_for_previous();

    const int run = (tokens + warps * kWarp - 1) / (warps * kWarp) * kWarp;
    const int first = warp * run, last = min(first + run, tokens);
    int* mine = counters + size_t(warp) * slots;
    if (warp < warps) {
        for (int base = first; base < last; base += kWarp) {
            const int token = base + lane, slot = token < last ? token_slots[token] : -1;
            const unsigned same = equal_lanes(slot);
            if (slot >= 0 && slot < slots && (same & ((1u << lane) - 1)) == 0) mine[slot] += __popc(same);
            warp_sync();
        }
    }
    __syncthreads();

    // a slot's counters become what lower warps have of it, its totals the sizes of its run and of its segments
    for (int slot = thread; slot < slots; slot += kThreads) {
        int total = 0;
        for (int w = 0; w < warps; ++w) {
            const int here = counters[size_t(w) * slots + slot];
            counters[size_t(w) * slots + slot] = total;
            total += here;
        }
        places[slot] = total;
        firsts[slot] = (total + tile - 1) / tile;
    }
    __syncthreads();
    if (warp < 2) {  // one warp sums places, one sums segments
        int* sums = warp == 0 ? places : firsts;
        int carry = 0;
        for (int base = 0; base < slots; base += kWarp) {
            const int slot = base + lane;
            int all;
            const int below = sum_below(slot < slots ? sums[slot] : 0, lane, all);
            if (slot < slots) sums[slot] = carry + below;
            carry += all;
        }
        if (lane == 0) sums[slots] = carry;
    }
    __syncthreads();

    if (warp < warps) {
        for (int base = first; base < last; base += kWarp) {
            const int token = base + lane, slot = token < last ? token_slots[token] : -1;
            const unsigned same = equal_lanes(slot), below = same & ((1u << lane) - 1);
            const bool live = slot >= 0 && slot < slots;
            if (live) order[places[slot] + mine[slot] + __popc(below)] = token;
            warp_sync();
            if (live && below == 0) mine[slot] += __popc(same);
            warp_sync();
        }
    }
    const int live = min(firsts[slots], capacity);
    for (int segment = thread; segment < live; segment += kThreads) {
        int low = 0, high = slots - 1;  // the last slot whose first segment is at or below this one
        while (low < high) {
            const int middle = (low + high + 1) / 2;
            if (firsts[middle] <= segment) low = middle;
            else high = middle - 1;
        }
        const int start = places[low] + (segment - firsts[low]) * tile;
        reinterpret_cast<int4*>(segments)[segment] = make_int4(start, min(tile, places[low + 1] - start), low, 0);
    }
    if (thread == 0) *count = live;
}

}  // namespace plan
}  // namespace lora
}  // namespace lf
