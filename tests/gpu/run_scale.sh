#!/usr/bin/env bash
# Several GPUs, and compression from files to files, on qwen50 in about three minutes: tests/gpu/run_scale.sh OUT [FOLDER]
# Build the kernels ahead, as run_all.sh says. FOLDER (40 GB, removed afterwards) is /dev/shm where that has room.
set -uo pipefail
out=${1:?usage: run_scale.sh OUT [FOLDER]}
folder=${2:-}
cd "$(dirname "$0")/../.." && mkdir -p "$out"
export PYTHONPATH=.${PYTHONPATH:+:$PYTHONPATH} PYTHONDONTWRITEBYTECODE=1 OMP_NUM_THREADS=8
export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True
status=0
if [ -z "$folder" ]; then
    room=$(df -B1 --output=avail /dev/shm 2>/dev/null | tail -n 1)
    if [ "${room:-0}" -gt 45000000000 ]; then folder=/dev/shm; else folder=${TMPDIR:-/tmp}; fi
fi
work=$(mktemp -d "$folder/loraforge.XXXXXX")
trap 'rm -rf "$work"' EXIT
nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader | tee "$out/gpus.txt"
nproc | sed 's/$/ CPUs/' | tee -a "$out/gpus.txt"
df -h "$work" | tail -n 1 | tee -a "$out/gpus.txt"

timeout "${END_TO_END_SECONDS:-150}" python3 - "$work/qwen50" "$out/end_to_end.jsonl" <<'PY' 2>&1 | tee "$out/end_to_end.txt" || status=1
import json, os, sys
from pathlib import Path
from loraforge.bench.fleets import end_to_end_records
from loraforge.files import write_jsonl
passes, warmups = int(os.environ.get("PASSES", "3")), int(os.environ.get("WARMUPS", "1"))
spectra = Path("evidence/spectra/20261130-cpu2/data/records.jsonl")
records = end_to_end_records(Path(sys.argv[1]), "qwen50", "1/12", warmups, passes, spectra=spectra)
write_jsonl(Path(sys.argv[2]), records)
for record in records:
    print(json.dumps(record))
PY
rm -rf "${work:?}/qwen50"

# a main module on standard input is one that processes started from it cannot find
scaling=$(cat <<'PY'
import json, os, statistics, sys
from pathlib import Path
import torch
from loraforge.bench.fleets import scaling_records
from loraforge.files import write_jsonl
count = min(int(os.environ.get("DEVICES", "4")), torch.cuda.device_count())
spectra = Path("evidence/spectra/20261130-cpu2/data/records.jsonl")
records = scaling_records("qwen50", count, 2, 5, spectra=spectra)
write_jsonl(Path(sys.argv[1]), records)
medians = {}
for devices in dict.fromkeys(r["devices"] for r in records):
    passes = [r for r in records if r["devices"] == devices and "pass" in r]
    medians[devices] = statistics.median(r["seconds"] for r in passes)
    stages = {s: round(statistics.median(p["stages"][s] for p in passes), 4) for s in passes[0]["stages"]}
    print(f"{devices} GPUs {medians[devices]:.4f} s, x{medians[1] / medians[devices]:.2f}", stages)
for record in records:
    if record.get("record") == "check":
        print(json.dumps(record))
PY
)
timeout "${SCALING_SECONDS:-75}" python3 -c "$scaling" "$out/scaling.jsonl" 2>&1 | tee "$out/scaling.txt" || status=1
exit $status
