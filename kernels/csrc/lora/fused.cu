// Decode in one call: Y += scale (X A^T) B^T as two launches that overlap.
//
// Shrink lets RowExpand start at once (programmatic dependent launch), so RowExpand's blocks read the plan, load their
// first rows of B and Y, bring the others of B to the L2 cache while shrink runs, and wait for Z alone. A form of one
// launch, whose expand blocks waited for counters that its shrink blocks released, took 51 us where two launches took
// 42 (H200, a Qwen3-4B layer, 128 tokens of 50 adapters, rank 8), and 58 to 53 at mixed ranks.
#include "loraforge/lora/launch.h"

// y [tokens, y_stride] += scale (x A^T) B^T by the table and the plan; z [planes, tokens, slices, z_capacity] is
// workspace. Slices are host arrays of output channels. variant: a shrink's + 100 times a RowExpand's (shrink.cuh,
// row_expand.cuh). Returns 0, an error of the runtime, or -1, as those do.
LF_API int lf_lora_fused(const void* x, int64_t x_stride, int dtype, const void* a, const void* b, const void* table,
                         int slices, const int* slice_first, const int* slice_channels, int d_in,
                         const int* token_slots, const int* order, const int* segments, const int* count,
                         int segment_capacity, int tokens, float* z, int z_capacity, int planes, void* y,
                         int64_t y_stride, int variant, void* stream) {
    constexpr int kTileLimit = 16;
    if (variant < 0) return lf::kUnsupported;
    const int status = lf_lora_shrink(x, x_stride, dtype, a, table, slices, d_in, token_slots, order, segments, count,
                                      segment_capacity, tokens, z, z_capacity, planes, variant % 100, stream);
    if (status != 0) return status;
    return lf::row_expand::start(z, z_capacity, planes, b, table, slices, slice_first, slice_channels, dtype, order,
                                 segments, count, segment_capacity, tokens, y, y_stride, kTileLimit, 1, variant / 100,
                                 true, stream);
}
