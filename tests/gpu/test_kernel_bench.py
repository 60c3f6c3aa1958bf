"""The kernel benchmark on a GPU: our arms pass their checks and are timed; the engines' too, where they are.

``LORAFORGE_ENGINES`` names the folder that ``loraforge bench engines`` makes.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

if torch.cuda.is_available():
    from loraforge.bench.arms import Ours
    from loraforge.bench.cases import PROJECTIONS, Case
    from loraforge.bench.kernels import Workbench
    from loraforge.bench.runs import DECODE, FUSED, PREFILL, Setup
    from loraforge.bench.timing import measure_floors


@pytest.mark.parametrize("op", ["shrink", "expand", "lora"])
@pytest.mark.parametrize(
    ("phase", "tokens", "rank", "capacity"),
    [("decode", 1, 8, 8), ("decode", 32, 12, 12), ("prefill", 512, 16, 128)],
)
def test_every_arm_passes_its_check_before_it_is_timed(
    op: str, phase: str, tokens: int, rank: int, capacity: int
) -> None:
    bench = Workbench(torch.device("cuda", 0), 7, blocks=2)
    case = Case(PROJECTIONS[0], phase, tokens, min(8, tokens), rank, capacity)  # type: ignore[arg-type]
    arms = [Ours("custom", lambda op, case: DECODE), Ours("segmented", lambda op, case: PREFILL)]
    if op == "lora":
        arms.append(Ours("fused", lambda op, case: FUSED))
    if "LORAFORGE_ENGINES" in os.environ:
        arms = [*Setup(Path(os.environ["LORAFORGE_ENGINES"])).natives(), *arms]  # type: ignore[list-item]
    for record in bench.cell(op, bench.operands(case), arms):  # type: ignore[arg-type]
        assert record["passed"], record
        assert len(record["warm_us"]) == len(record["flushed_us"]) == 2
        assert 0.5 < min(record["warm_us"]) < 10_000


def test_the_floors_are_those_of_a_gpu() -> None:
    bench = Workbench(torch.device("cuda", 0), 7)
    floors = measure_floors(bench.timer, bench.device)
    assert 1e5 < floors.bytes_per_us < 2e7
    assert 0.3 < floors.launch_us < floors.flushed_us < 50
