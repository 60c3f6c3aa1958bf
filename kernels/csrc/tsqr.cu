// Launchers of FlashTSQR: one launch a tree level over all matrices of a stack.
#include <algorithm>

#include "loraforge/tsqr.cuh"

namespace {

using namespace lf;
using namespace lf::tsqr;

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

bool narrow(int r) { return r <= kMaxNarrowRank; }

bool supported(int64_t m, int d, int r) { return m >= 0 && r >= 1 && d >= r && r <= kMaxWideRank; }

bool aligned_to(const void* pointer, size_t bytes) { return reinterpret_cast<uintptr_t>(pointer) % bytes == 0; }

// The sections follow each other; their sizes are multiples of 16 bytes on the narrow path.
Plan narrow_plan(float* at, int64_t m, int d, int r, int64_t* floats) {
    Plan plan{};
    plan.m = m, plan.d = d, plan.r = r;
    plan.panels = static_cast<int>(ceil_div(r, kPanel));
    plan.leaves = static_cast<int>(ceil_div(d, kLeafRows));
    const int64_t leaves = m * plan.leaves, merges = m * (plan.leaves - 1);
    int64_t used = 0;
    const auto take = [&](int64_t count) {
        float* section = at == nullptr ? nullptr : at + used;
        used += count;
        return section;
    };
    plan.leaf_v = take(leaves * plan.leaf_size());
    plan.leaf_t = take(leaves * plan.t_size());
    plan.merge_v = take(merges * plan.triangle());
    plan.merge_t = take(merges * plan.t_size());
    plan.slots = take(leaves * plan.slot_size());
    if (floats != nullptr) *floats = used;
    return plan;
}

WidePlan wide_plan(float* at, int64_t m, int d, int r, int64_t* floats) {
    WidePlan plan{};
    plan.m = m, plan.d = d, plan.r = r;
    plan.rows = 2 * r;
    plan.leaves = static_cast<int>(ceil_div(d, plan.rows));
    const int64_t nodes = m * plan.nodes();
    plan.tiles = at;
    plan.taus = at + (at == nullptr ? 0 : nodes * plan.tile_size());
    plan.slots = at + (at == nullptr ? 0 : nodes * (plan.tile_size() + r));
    if (floats != nullptr) *floats = nodes * (plan.tile_size() + r) + m * plan.leaves * plan.slot_size();
    return plan;
}

// Calls body(level, pairs, merges below) for every level upwards; stops at the first error.
template <class Body>
int each_level(int leaves, Body&& body) {
    int first = 0;
    for (int level = 0, nodes = leaves; nodes > 1; ++level, nodes = (nodes + 1) / 2) {
        if (const int error = body(level, nodes / 2, first)) return error;
        first += nodes / 2;
    }
    return kOk;
}

template <class Body>
int each_level_down(int leaves, Body&& body) {
    int levels = 0, first = leaves - 1;
    for (int nodes = leaves; nodes > 1; nodes = (nodes + 1) / 2) ++levels;
    for (int level = levels - 1; level >= 0; --level) {
        int nodes = leaves;
        for (int l = 0; l < level; ++l) nodes = (nodes + 1) / 2;
        first -= nodes / 2;
        if (const int error = body(level, nodes / 2, first)) return error;
    }
    return kOk;
}

// Threads for that many groups of four columns: whole warps.
int threads_for(int groups) { return static_cast<int>(ceil_div(groups, 2)) * kWarp; }

template <class T>
int factor_narrow(const T* x, int layout, float* rfac, float* workspace, int64_t m, int d, int r, void* stream) {
    const Plan plan = narrow_plan(workspace, m, d, r, nullptr);
    const int threads = threads_for(plan.panels);
    const bool aligned = (layout == kTall ? r : d) % 4 == 0 && aligned_to(x, 4 * sizeof(T));
    const auto leaf = layout == kTall ? leaf_factor<kTall, T> : leaf_factor<kWide, T>;
    if (const int error = launch(leaf, m * plan.leaves, threads, 0, stream, x, plan, aligned)) return error;
    const auto merge = plan.panels <= kParts ? merge_factor<1> : merge_factor<2>;
    const int error = each_level(plan.leaves, [&](int level, int pairs, int first) {
        return launch(merge, m * pairs, threads, 0, stream, plan, level, pairs, first);
    });
    return error != kOk ? error : launch(unpack_triangle, m, 256, 0, stream, rfac, plan);
}

template <class T>
int factor_wide(const T* x, int layout, float* rfac, float* workspace, int64_t m, int d, int r, void* stream) {
    const WidePlan plan = wide_plan(workspace, m, d, r, nullptr);
    const size_t shared = sizeof(float) * plan.rows;
    if (const int error = launch(wide_load<T>, m * plan.leaves, kWideThreads, 0, stream, x, plan, layout)) return error;
    if (const int error = launch(wide_factor, m * plan.leaves, kWideThreads, shared, stream, plan, plan.leaves, 0, 0))
        return error;
    const int error = each_level(plan.leaves, [&](int level, int pairs, int first) {
        const int stacked = launch(wide_stack, m * pairs, kWideThreads, 0, stream, plan, level, pairs, first);
        return stacked != kOk ? stacked
                              : launch(wide_factor, m * pairs, kWideThreads, shared, stream, plan, pairs,
                                       plan.leaves + first, level + 1);
    });
    return error != kOk ? error : launch(wide_unpack, m, 256, 0, stream, rfac, plan);
}

int apply_narrow(float* workspace, const float* c, float* y, int layout, int64_t m, int d, int r, int k, void* stream) {
    const Plan plan = narrow_plan(workspace, m, d, r, nullptr);
    const int groups = static_cast<int>(ceil_div(k, kPanel));
    const int threads = threads_for(groups);
    if (const int error = launch(pack_coefficients, m, 256, 0, stream, c, plan, k)) return error;
    const auto merge = plan.panels <= kParts ? merge_apply<1> : merge_apply<2>;
    const int error = each_level_down(plan.leaves, [&](int level, int pairs, int first) {
        return launch(merge, m * pairs, threads, 0, stream, plan, level, pairs, first, groups);
    });
    if (error != kOk) return error;
    const bool aligned = (layout == kTall ? k : d) % 4 == 0 && aligned_to(y, sizeof(float4));
    const auto leaf = layout == kTall ? leaf_apply<kTall> : leaf_apply<kWide>;
    return launch(leaf, m * plan.leaves, threads, 0, stream, y, plan, k, groups, aligned);
}

int apply_wide(float* workspace, const float* c, float* y, int layout, int64_t m, int d, int r, int k, void* stream) {
    const WidePlan plan = wide_plan(workspace, m, d, r, nullptr);
    // A column of a tile a warp, as many warps as 48 KB of shared memory hold.
    const size_t column = sizeof(float) * plan.rows;
    const int warps = static_cast<int>(std::clamp<size_t>(48 * 1024 / column, 1, kWideThreads / kWarp));
    const int threads = warps * kWarp;
    const int64_t chunks = ceil_div(k, warps);
    if (const int error = launch(wide_pack, m, 256, 0, stream, c, plan, k)) return error;
    const int error = each_level_down(plan.leaves, [&](int level, int pairs, int first) {
        return launch(wide_apply, m * pairs * chunks, threads, warps * column, stream, static_cast<float*>(nullptr), plan,
                      pairs, plan.leaves + first, level, k, layout);
    });
    if (error != kOk) return error;
    return launch(wide_apply, m * plan.leaves * chunks, threads, warps * column, stream, y, plan, plan.leaves, 0, 0, k,
                  layout);
}

}  // namespace

// Bytes of workspace for m matrices of d x r, or -1. It needs an alignment of 16 bytes and no initialisation.
LF_API int64_t lf_tsqr_workspace(int64_t m, int d, int r) {
    if (!supported(m, d, r)) return kUnsupported;
    int64_t floats = 0;
    if (narrow(r))
        narrow_plan(nullptr, m, d, r, &floats);
    else
        wide_plan(nullptr, m, d, r, &floats);
    return floats * static_cast<int64_t>(sizeof(float));
}

// X = Q R for each matrix of a stack: R [m, r, r] FP32, upper triangular, its lower part zero; the diagonal may have
// either sign. Q stays in the workspace as reflectors.
LF_API int lf_tsqr_factor(const void* x, int dtype, int layout, float* rfac, void* workspace, int64_t m, int d, int r,
                          void* stream) {
    if (!supported(m, d, r) || (layout != kTall && layout != kWide) || !aligned_to(workspace, 16)) return kUnsupported;
    if (m == 0) return kOk;
    return with_dtype(dtype, [&](auto zero) {
        using T = decltype(zero);
        const T* typed = static_cast<const T*>(x);
        float* floats = static_cast<float*>(workspace);
        return narrow(r) ? factor_narrow(typed, layout, rfac, floats, m, d, r, stream)
                         : factor_wide(typed, layout, rfac, floats, m, d, r, stream);
    });
}

// Q c for c [m, r, k], k <= r. The reflectors in the workspace are only read, so this can be called again; a scratch
// section of the workspace is written, so calls that share a workspace must share a stream.
LF_API int lf_tsqr_apply(const void* workspace, const float* c, float* y, int layout, int64_t m, int d, int r, int k,
                         void* stream) {
    if (!supported(m, d, r) || k < 0 || k > r || (layout != kTall && layout != kWide) || !aligned_to(workspace, 16))
        return kUnsupported;
    if (m == 0 || k == 0) return kOk;
    float* floats = static_cast<float*>(const_cast<void*>(workspace));
    return narrow(r) ? apply_narrow(floats, c, y, layout, m, d, r, k, stream)
                     : apply_wide(floats, c, y, layout, m, d, r, k, stream);
}
