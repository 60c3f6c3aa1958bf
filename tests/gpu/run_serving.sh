#!/usr/bin/env bash
# Engine tests, then serving experiments one behind another, on a GPU host: tests/gpu/run_serving.sh OUT ENGINE [EXPERIMENT...]
# ENGINE is vllm or sglang, which lies beside this package where python3 finds both; EXPERIMENT is the name of a file of
# config/serving. Without one, the tests alone. Build the kernels ahead, as run_all.sh says. BUDGET_SECONDS ends it: the
# same command goes on with what is left. SHAPES (100 GB for both fleets, kept) is /dev/shm/shapes where not set.
set -uo pipefail
usage="usage: run_serving.sh OUT vllm|sglang [EXPERIMENT...]"
out=$(realpath -m "${1:?$usage}") engine=${2:?$usage}
experiments=("${@:3}")
shapes=${SHAPES:-/dev/shm/shapes} until=$((SECONDS + ${BUDGET_SECONDS:-86400}))
cd "$(dirname "$0")/../.." && mkdir -p "$out"
files=()
for name in "${experiments[@]}"; do
    [ -f "config/serving/$name.yaml" ] || { echo "config/serving/$name.yaml: no such experiment" >&2; exit 2; }
    files+=("config/serving/$name.yaml")
done
case $engine in
    vllm) tests=(tests/engines/test_vllm_gpu.py tests/engines/test_vllm_scheduler.py) ;;
    sglang) tests=(tests/engines/test_sglang_gpu.py tests/serving/test_sglang_faults.py) ;;
    *) echo "$usage" >&2; exit 2 ;;
esac
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONDONTWRITEBYTECODE=1 HF_HUB_OFFLINE=1
# of both engines, where they lack FlashInfer; experiments set the same
export VLLM_USE_FLASHINFER_SAMPLER=0 SGLANG_IS_FLASHINFER_AVAILABLE=false SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK=1
status=0

python3 -m loraforge evidence machine --out "$out/machine" || exit 1
timeout "${PYTEST_SECONDS:-400}" python3 -m pytest "${tests[@]}" -m "gpu or engines" -p no:cacheprovider --tb=short -q \
    >"$out/pytest.txt" 2>&1 &
tested=$!
# shape fleets meanwhile, those that an experiment names
for fleet in qwen50 llama35; do
    if [ ${#files[@]} -gt 0 ] && grep -q "base: $fleet/" "${files[@]}"; then
        python3 -m loraforge bench shapes -o "$shapes" --fleets "$fleet" \
            --spectra evidence/spectra/20261130-cpu2/data/records.jsonl || exit 1
    fi
done
wait $tested || status=1
tail -n 5 "$out/pytest.txt"

for file in "${files[@]}"; do
    root=.
    grep -qE "base: (qwen50|llama35)/" "$file" && root=$shapes
    left=$((until - SECONDS))
    [ $left -gt 0 ] || { echo "$file: no time left"; status=1; continue; }
    python3 -m loraforge bench sweep "$file" -o "$out/$(basename "$file" .yaml)" --root "$root" \
        --budget-seconds $left || status=1
done
exit $status
