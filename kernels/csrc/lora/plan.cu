// Launcher of the plan builder.
#include "loraforge/lora/plan.cuh"

// Sorts `tokens` tokens by slot and cuts them into segments of at most `tile` rows (plan.cuh); one launch. Returns 0,
// an error of the runtime, or -1 where the slots do not fit into shared memory.
LF_API int lf_lora_plan(const int* token_slots, int tokens, int slots, int tile, int* order, int* segments, int* count,
                        int capacity, void* stream) {
    using namespace lf;
    if (tokens < 1 || slots < 1 || tile < 1 || capacity < 0) return kUnsupported;
    int device = 0, limit = 0;
    if (const auto e = current_device(&device); e != kOk) return e;
    if (const auto e = shared_limit(&limit, device); e != kOk) return e;
    int warps = 1;  // as many as have tokens and fit
    while (warps < lora::plan::kWarps && warps * kWarp < tokens &&
           lora::plan::shared_bytes(2 * warps, slots) <= size_t(limit))
        warps *= 2;
    const size_t shared = lora::plan::shared_bytes(warps, slots);
    if (shared > size_t(limit)) return kUnsupported;
    if (const auto e = allow_shared(lora::plan::fill, shared); e != kOk) return e;
    return lora::launch_overlapped(lora::plan::fill, dim3(1), lora::plan::kThreads, shared, stream, token_slots, tokens,
                                   slots, tile, warps, order, segments, count, capacity);
}
