// Launcher of the batched FP64 Jacobi eigensolver.
#include "loraforge/jacobi_onesided.cuh"

namespace {

using namespace lf;

template <class Plan>
bool takes(int n, int shared_limit) {
    return n <= Plan::largest && jacobi::onesided::shared_bytes<Plan>() <= size_t(shared_limit);
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

    using namespace jacobi::onesided;
    using To16 = Plan<1, 8, 1, 1, 4>;
    using To32 = Plan<1, 16, 1, 2, 3>;
    using To64 = Plan<2, 8, 4, 1, 3>;
    using To96 = Plan<3, 8, 8, 8, 1>;
    using To128 = Plan<4, 8, 8, 8, 1>;
    if (takes<To16>(n, limit)) return start<To16>(g, w, v, sweeps, m, n, stream);
    if (takes<To32>(n, limit)) return start<To32>(g, w, v, sweeps, m, n, stream);
    if (takes<To64>(n, limit)) return start<To64>(g, w, v, sweeps, m, n, stream);
    if (takes<To96>(n, limit)) return start<To96>(g, w, v, sweeps, m, n, stream);
    if (takes<To128>(n, limit)) return start<To128>(g, w, v, sweeps, m, n, stream);
    const size_t shared = jacobi::global_shared(n);
    if (shared > size_t(limit)) return kUnsupported;
    if (const auto e = allow_shared(jacobi::global_kernel, shared); e != kOk) return e;
    return launch(jacobi::global_kernel, m, jacobi::kGlobalThreads, shared, stream, g, w, v, sweeps, n);
}
