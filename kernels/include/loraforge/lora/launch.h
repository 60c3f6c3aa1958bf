// The launchers that launchers of other files call.
#pragma once

#include "../portable.cuh"

LF_API int lf_lora_shrink(const void* x, int64_t x_stride, int dtype, const void* a, const void* table, int slices,
                          int d_in, const int* token_slots, const int* order, const int* segments, const int* count,
                          int segment_capacity, int tokens, float* z, int z_capacity, int planes, int variant,
                          void* stream);

namespace lf {
namespace row_expand {

// lf_lora_row_expand; `follows`: the kernel before it on the stream is the shrink that makes z.
int start(const float* z, int z_capacity, int planes, const void* b, const void* table, int slices,
          const int* slice_first, const int* slice_channels, int dtype, const int* order, const int* segments,
          const int* count, int segment_capacity, int tokens, void* y, int64_t y_stride, int tile_limit, int staged,
          int variant, bool follows, void* stream);

}  // namespace row_expand
}  // namespace lf
