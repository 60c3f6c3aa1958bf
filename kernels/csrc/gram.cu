// Launcher of the batched FP64 Gram product.
#include "loraforge/gram.cuh"

namespace {

using namespace lf;

// Blocks a matrix is split over: enough to fill the device when there are few matrices, each with work to do.
int choose_parts(int64_t blocks, int64_t stages) {
#if LF_HIP
    (void)blocks, (void)stages;
    return 1;
#else
    int device = 0, sms = 0, major = 0;
    if (current_device(&device) != kOk || multiprocessors(&sms, device) != kOk) return 1;
    if (cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) != kOk || major < 9) return 1;
    int parts = 1;
    while (parts < 8 && blocks * parts < 4 * int64_t(sms) && stages / (2 * parts) >= 8) parts *= 2;
    return parts;
#endif
}

template <class T>
int launch(void (*kernel)(const T*, double*, int, int, int), size_t shared, int64_t m, int pairs, int parts,
           const T* x, double* g, int d, int r, stream_t stream) {
    int device = 0, limit = 0;
    if (const auto e = current_device(&device); e != kOk) return e;
    if (const auto e = shared_limit(&limit, device); e != kOk) return e;
    if (shared > size_t(limit) || m * parts > 0x7fffffff || pairs > 65535) return kUnsupported;
    if (const auto e = allow_shared(kernel, shared); e != kOk) return e;
    const dim3 grid(static_cast<unsigned>(m * parts), pairs), block(gram::kThreads);
#if LF_HIP
    kernel<<<grid, block, shared, stream>>>(x, g, d, r, parts);
    return last_error();
#else
    if (parts == 1) {
        kernel<<<grid, block, shared, stream>>>(x, g, d, r, parts);
        return last_error();
    }
    cudaLaunchAttribute cluster{};
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim = {static_cast<unsigned>(parts), 1, 1};
    cudaLaunchConfig_t config{};
    config.gridDim = grid;
    config.blockDim = block;
    config.dynamicSmemBytes = shared;
    config.stream = stream;
    config.attrs = &cluster;
    config.numAttrs = 1;
    return cudaLaunchKernelEx(&config, kernel, x, g, d, r, parts);
#endif
}

template <class T, int kLayout, int N, bool vector>
int narrow(const T* x, double* g, int64_t m, int d, int r, stream_t stream) {
    const int64_t stages = d / (gram::kWarps * gram::Tile<T, kLayout, N>::depth);
    return launch<T>(gram::narrow<T, kLayout, N, vector>, gram::narrow_shared<T, kLayout, N>(), m, 1,
                     choose_parts(m, stages), x, g, d, r, stream);
}

template <class T, int kLayout, bool vector>
int dispatch(const T* x, double* g, int64_t m, int d, int r, stream_t stream) {
    if (r <= 16) return narrow<T, kLayout, 2, vector>(x, g, m, d, r, stream);
    if (r <= 32) return narrow<T, kLayout, 4, vector>(x, g, m, d, r, stream);
    if (r <= 48) return narrow<T, kLayout, 6, vector>(x, g, m, d, r, stream);
    if (r <= 64) return narrow<T, kLayout, 8, vector>(x, g, m, d, r, stream);
    const int panels = (r + gram::kPanel - 1) / gram::kPanel, pairs = panels * (panels - 1) / 2;
    const int64_t stages = d / gram::Tile<T, kLayout, 8>::depth;
    return launch<T>(gram::wide<T, kLayout, vector>, gram::wide_shared<T, kLayout>(), m, pairs,
                     choose_parts(m * pairs, stages), x, g, d, r, stream);
}

}  // namespace

// g[m, r, r] = X^T X in FP64, both triangles, where X is the tall [d, r] view of each matrix of the stack x
// (dtype and layout codes: portable.cuh). Bitwise repeatable. Returns 0, an error of the runtime, or -1.
LF_API int lf_gram(const void* x, int dtype, int layout, double* g, int64_t m, int d, int r, void* stream) {
    if (m < 0 || d < 1 || r < 1 || (layout != kTall && layout != kWide)) return kUnsupported;
    if (m == 0) return kOk;
    return with_dtype(dtype, [&](auto type) -> int {
        using T = decltype(type);
        const T* typed = static_cast<const T*>(x);
        const auto on = static_cast<stream_t>(stream);
        const int64_t row = int64_t(layout == kTall ? r : d) * sizeof(T);
        const bool vector = row % 16 == 0 && reinterpret_cast<uintptr_t>(x) % 16 == 0;
        if (layout == kTall)
            return vector ? dispatch<T, kTall, true>(typed, g, m, d, r, on)
                          : dispatch<T, kTall, false>(typed, g, m, d, r, on);
        return vector ? dispatch<T, kWide, true>(typed, g, m, d, r, on)
                      : dispatch<T, kWide, false>(typed, g, m, d, r, on);
    });
}
