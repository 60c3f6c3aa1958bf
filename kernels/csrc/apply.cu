// Launcher of the batched thin product Y = X T.
#include "loraforge/apply.cuh"

namespace {

using namespace lf;

constexpr int64_t kBlocksPerProcessor = 8;  // below this many blocks the rows of a matrix are split

template <class T, int kLayout, bool vector>
using Kernel = void (*)(const T*, const double*, float*, apply::Shape);

template <class T, int kLayout, bool vector>
Kernel<T, kLayout, vector> pick(int tiles) {
    // the element-wise path is rare: one width of it keeps the library small
    if constexpr (vector) {
        switch (tiles) {
            case 1: return apply::kernel<T, kLayout, 1, vector>;
            case 2: return apply::kernel<T, kLayout, 2, vector>;
            case 4: return apply::kernel<T, kLayout, 4, vector>;
            case 6: return apply::kernel<T, kLayout, 6, vector>;
            default: return apply::kernel<T, kLayout, 8, vector>;
        }
    }
    return tiles == 2 ? apply::kernel<T, kLayout, 2, vector> : apply::kernel<T, kLayout, 8, vector>;
}

template <class T, int kLayout, bool vector>
int launch(const T* x, const double* t, float* y, int64_t m, int d, int r, int k, stream_t stream) {
    int device = 0, limit = 0, sms = 0;
    if (const auto e = current_device(&device); e != kOk) return e;
    if (const auto e = shared_limit(&limit, device); e != kOk) return e;
    if (const auto e = multiprocessors(&sms, device); e != kOk) return e;

    apply::Shape p{};
    p.d = d, p.r = r, p.k = k;
    p.chunk = r <= 16 ? 16 : r <= 32 ? 32 : apply::kChunk;
    p.stages = p.chunk < apply::kChunk ? 4 : 2;
    const size_t stage_bytes = size_t(apply::stage_elements<T, kLayout>(p.chunk)) * sizeof(T);
    const size_t summed = size_t(r + p.chunk - 1) / p.chunk * p.chunk;
    const auto shared = [&](int tiles, int warps) {
        return summed * 8 * tiles * sizeof(double) + size_t(warps) * p.stages * stage_bytes;
    };
    // Four warps where two blocks then share a processor; else one block with all the warps that fit; T is cut
    // into narrower slabs where not even one warp fits.
    constexpr int widths[] = {1, 2, 4, 6, 8};
    int tiles = 8;
    for (int width : widths)
        if (8 * width >= k && width < tiles) tiles = width;
    if (!vector && tiles < 8) tiles = 8 * 2 >= k ? 2 : 8;
    int warps = 0;
    for (;;) {
        if (shared(tiles, 4) + 1024 <= (size_t(limit) + 1024) / 2) warps = 4;
        for (int count = 8; warps == 0 && count > 0; count /= 2)
            if (shared(tiles, count) <= size_t(limit)) warps = count;
        if (warps > 0 || tiles == 1 || (!vector && tiles == 2)) break;
        tiles = !vector ? 2 : tiles == 8 || tiles == 6 ? 4 : tiles / 2;
    }
    if (warps == 0) return kUnsupported;

    p.column_blocks = (k + 8 * tiles - 1) / (8 * tiles);
    const int64_t row_tiles = (d + apply::kRows - 1) / apply::kRows, wanted = kBlocksPerProcessor * sms;
    int64_t split = (wanted + m * p.column_blocks - 1) / (m * p.column_blocks);
    const int64_t most = (row_tiles + 2 * warps - 1) / (2 * warps);
    split = split < 1 ? 1 : split > most ? most : split;
    p.tiles_per_block = static_cast<int>((row_tiles + split - 1) / split);
    p.row_blocks = static_cast<int>((row_tiles + p.tiles_per_block - 1) / p.tiles_per_block);
    p.wide_stores = (kLayout == kWide ? d : k) % 4 == 0 && reinterpret_cast<uintptr_t>(y) % 16 == 0;
    const int64_t blocks = m * p.column_blocks * p.row_blocks;
    if (blocks > 0x7fffffff) return kUnsupported;

    const auto kernel = pick<T, kLayout, vector>(tiles);
    const size_t bytes = shared(tiles, warps);
    if (const auto e = allow_shared(kernel, bytes); e != kOk) return e;
    kernel<<<static_cast<unsigned>(blocks), warps * kWarp, bytes, stream>>>(x, t, y, p);
    return last_error();
}

}  // namespace

// Y = X T with X the tall [d, r] view of each matrix of the stack x, t[m, r, k] FP64, sums in FP64, Y rounded to
// FP32: y[m, d, k] for the tall layout, y[m, k, d] for the wide one. Any k >= 1. Returns 0, an error of the
// runtime, or -1.
LF_API int lf_apply(const void* x, int dtype, int layout, const double* t, float* y, int64_t m, int d, int r, int k,
                    void* stream) {
    if (m < 0 || d < 1 || r < 1 || k < 1 || (layout != kTall && layout != kWide)) return kUnsupported;
    if (m == 0) return kOk;
    return with_dtype(dtype, [&](auto type) -> int {
        using T = decltype(type);
        const T* typed = static_cast<const T*>(x);
        const auto on = static_cast<stream_t>(stream);
        const int64_t row = int64_t(layout == kTall ? r : d) * sizeof(T);
        const bool vector = row % 16 == 0 && reinterpret_cast<uintptr_t>(x) % 16 == 0;
        if (layout == kTall)
            return vector ? launch<T, kTall, true>(typed, t, y, m, d, r, k, on)
                          : launch<T, kTall, false>(typed, t, y, m, d, r, k, on);
        return vector ? launch<T, kWide, true>(typed, t, y, m, d, r, k, on)
                      : launch<T, kWide, false>(typed, t, y, m, d, r, k, on);
    });
}
