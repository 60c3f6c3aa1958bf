// Launcher of the batched FP64 Jacobi eigensolver.
#include "loraforge/jacobi.cuh"

namespace {

using namespace lf;

template <int kSize>
int launch(const double* g, double* w, double* v, int* sweeps, int64_t m, int n, stream_t stream) {
    using Plan = jacobi::Plan<kSize>;
    constexpr size_t shared = Plan::matrices * sizeof(jacobi::Shared<kSize>);
    const int64_t blocks = (m + Plan::matrices - 1) / Plan::matrices;
    if (const auto e = allow_shared(jacobi::shared_kernel<kSize>, shared); e != kOk) return e;
    jacobi::shared_kernel<kSize><<<static_cast<unsigned>(blocks), Plan::block, shared, stream>>>(g, w, v, sweeps, m, n);
    return last_error();
}

}  // namespace

// g[m, n, n] = V diag(w) V^T, w[m, n] descending, column j of v[m, n, n] (row-major) belonging to w[j]. Reads the
// upper triangle of g, which is destroyed where the matrix does not fit shared memory (n > 128 on sm_90).
// sweeps[m], which may be null: the sweeps used, or minus that minus one where 30 did not suffice or an entry is not
// finite (w and v are NaN then). Bitwise repeatable, each matrix independent of the batch. Returns 0, an error of
// the runtime, or -1.
LF_API int lf_jacobi(double* g, double* w, double* v, int* sweeps, int64_t m, int n, void* stream) {
    if (m < 0 || n < 1 || m > 0x7fffffff) return kUnsupported;
    if (m == 0) return kOk;
    int device = 0, limit = 0;
    if (const auto e = current_device(&device); e != kOk) return e;
    if (const auto e = shared_limit(&limit, device); e != kOk) return e;
    const auto on = static_cast<stream_t>(stream);
    if (n <= 16) return launch<16>(g, w, v, sweeps, m, n, on);
    if (n <= 32) return launch<32>(g, w, v, sweeps, m, n, on);
    if (n <= 64 && sizeof(jacobi::Shared<64>) <= size_t(limit)) return launch<64>(g, w, v, sweeps, m, n, on);
    if (n <= 128 && sizeof(jacobi::Shared<128>) <= size_t(limit)) return launch<128>(g, w, v, sweeps, m, n, on);
    const size_t shared = jacobi::global_shared(n);
    if (shared > size_t(limit)) return kUnsupported;
    if (const auto e = allow_shared(jacobi::global_kernel, shared); e != kOk) return e;
    jacobi::global_kernel<<<static_cast<unsigned>(m), jacobi::kGlobalThreads, shared, on>>>(g, w, v, sweeps, n);
    return last_error();
}
