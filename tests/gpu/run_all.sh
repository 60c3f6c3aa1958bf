#!/usr/bin/env bash
# Tests and a short benchmark on a GPU machine, in about two minutes: tests/gpu/run_all.sh OUT [SHAPES]
# Build the kernels ahead (python -c 'from loraforge.jit import build_ahead; build_ahead()') and bring
# loraforge/libloraforge_factor.{so,json}; without them they are built here first.
set -uo pipefail
out=${1:?usage: run_all.sh OUT [SHAPES]}
shapes=${2:-qwen50}
cd "$(dirname "$0")/../.." && mkdir -p "$out"
export PYTHONPATH=. PYTHONDONTWRITEBYTECODE=1 OMP_NUM_THREADS=8
export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True
status=0

nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader | tee "$out/gpu.txt"
timeout 120 python3 - <<'PY' 2>&1 | tee "$out/kernels.txt" || status=1
import time
from loraforge import jit
print("ahead of time:", jit.prebuilt())
started = time.perf_counter()
print(jit.build(), f"{time.perf_counter() - started:.1f} s")
from loraforge.factor import gpu
kernels = gpu.kernels()
print("eigensolver:", kernels.eigensolver, "on", kernels.device)
PY

timeout "${PYTEST_SECONDS:-70}" python3 -m pytest tests/gpu tests/quality/test_scoring_gpu.py -m gpu -p no:cacheprovider --maxfail=25 --tb=short -q \
    >"$out/pytest.txt" 2>&1 || status=1
tail -n 25 "$out/pytest.txt"

# not through the command line, whose parser may want packages that a bare GPU machine lacks
timeout "${BENCH_SECONDS:-80}" python3 - "$shapes" "$out/recompression.jsonl" >"$out/bench.txt" 2>&1 <<'PY' || status=1
import os, sys
from pathlib import Path
from loraforge.bench.fleets import device_records
from loraforge.files import write_jsonl
methods = os.environ.get("METHODS", "gram,gram_streams,gram_deferred,gram_deferred_uniform,tsqr,fraq").split(",")
passes, warmups = int(os.environ.get("PASSES", "3")), int(os.environ.get("WARMUPS", "1"))
subset = int(os.environ["SUBSET"]) if "SUBSET" in os.environ else None
budget = float(os.environ["BUDGET"]) if "BUDGET" in os.environ else None
spectra = Path("evidence/spectra/20261130-cpu2/data/records.jsonl")
records = []
for shapes in sys.argv[1].split(","):
    records += device_records(
        shapes, methods, warmups, passes, subset=subset, budget=budget, spectra=spectra
    )
    write_jsonl(Path(sys.argv[2]), records)
PY
tail -n 20 "$out/bench.txt"
python3 - "$out/recompression.jsonl" <<'PY' 2>&1 | tee "$out/stages.txt"
import json, statistics, sys
records = [json.loads(line) for line in open(sys.argv[1], encoding="utf-8")]
for key in dict.fromkeys((r["fleet"], r["method"]) for r in records if "pass" in r):
    passes = [r for r in records if (r["fleet"], r["method"]) == key and "pass" in r]
    stages = {s: statistics.median(p["stages"][s] for p in passes) for s in passes[0]["stages"]}
    print(*key, f"{statistics.median(p['seconds'] for p in passes):.4f} s", {s: round(v, 4) for s, v in stages.items()})
for r in records:
    if r.get("record") in ("check", "floor", "protocol"):
        print(json.dumps(r))
PY
exit $status
