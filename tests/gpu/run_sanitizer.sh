#!/usr/bin/env bash
# Every kernel under compute-sanitizer, in a few minutes: tests/gpu/run_sanitizer.sh OUT [TOOL...]
# TOOL: memcheck (accesses out of bounds), racecheck (hazards in shared memory), initcheck (reads of what was never
# written) and synccheck (barriers that not all reach); all of them by default. Status 1 where one finds something.
# Build the kernels ahead, as run_all.sh says; with NVCC_APPEND_FLAGS=-lineinfo for line numbers in reports.
set -uo pipefail
out=${1:?usage: run_sanitizer.sh OUT [TOOL...]}
tools=("${@:2}")
[ ${#tools[@]} -gt 0 ] || tools=(memcheck racecheck initcheck synccheck)
cd "$(dirname "$0")/../.." && mkdir -p "$out"
export PYTHONPATH=.${PYTHONPATH:+:$PYTHONPATH} PYTHONDONTWRITEBYTECODE=1 OMP_NUM_THREADS=4
# an allocation a tensor: torch's cache would hide accesses past the end of one
export PYTORCH_NO_CUDA_MEMORY_CACHING=1
export PATH="$PATH:/usr/local/cuda/bin"
status=0

if ! command -v compute-sanitizer >/dev/null; then
    echo "skipped: no compute-sanitizer (it comes with the CUDA toolkit)" | tee "$out/sanitizer.txt"
    exit 0
fi
python3 -c 'from loraforge import jit; print("kernels:", *(jit.build(name) for name in jit.LIBRARIES))' || exit 1

check() {
    local tool=$1 report=$out/sanitizer-$1.txt started=$SECONDS result=clean
    shift
    # the kernels here alone, whose names begin with namespace lf
    timeout "${TOOL_SECONDS:-150}" compute-sanitizer --tool "$tool" --kernel-name kns=_ZN2lf --error-exitcode 9 \
        --report-api-errors no --print-limit 20 "$@" python3 tests/gpu/sanitizer_cases.py >"$report" 2>&1 || result="status $?"
    [ "$result" = clean ] || status=1
    printf '%s: %s, %d s; %s\n' "$tool" "$result" $((SECONDS - started)) "$(grep -E 'SUMMARY' "$report" | tail -n 1)" |
        tee -a "$out/sanitizer.txt"
    [ "$result" = clean ] || head -n 40 "$report"
}

: >"$out/sanitizer.txt"
for tool in "${tools[@]}"; do
    case $tool in
        memcheck) check memcheck --padding 256 ;;
        *) check "$tool" ;;
    esac
done
exit $status
