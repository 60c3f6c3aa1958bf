"""Steps tuned on a GPU: an update behind its base product is timed, and the table is what engines' plugins ask."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

if torch.cuda.is_available():
    from loraforge.bench.cases import PROJECTIONS
    from loraforge.bench.step_tuning import fleet_ranks, incumbent, step_times, tune_steps
    from loraforge.bench.steps import RANK, step
    from loraforge.bench.tune import Candidates
    from loraforge.dispatch import load_table
    from loraforge.ops.choice import Choice, Kernel
    from loraforge.runtime.kernels import Kernels
    from loraforge.runtime.ranks import Projection


def test_two_steps_are_tuned_and_served(tmp_path: Path) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    name = torch.cuda.get_device_name(device)
    table, ranks, shape = load_table(name), fleet_ranks(None), PROJECTIONS[1]
    cases = [step(shape, "decode", 48, ranks), step(shape, "prefill", 512, ranks)]
    times = step_times(device, ranks)
    candidates = {
        phase: (
            Candidates(
                16,
                ((Kernel("direct", {"variant": 12}), 2),),
                (Kernel("row_expand", {"variant": 7}),),
                ((Kernel("fused", {"variant": 405}), 1),),
            ),
        )
        for phase in ("decode", "prefill")
    }
    out = tmp_path / "steps.json"
    found = tune_steps(out, name, times, table, ranks, cases=cases, candidates=candidates)
    assert found == load_table(name, out)
    kernels = Kernels(table, 64, {"o_proj": RANK}, 128, found)
    served = Projection("model.layers.0.self_attn.o_proj", shape.d_in, shape.channels)
    for entry, tokens in zip(found.entries, (48, 512), strict=True):
        assert kernels.choose(served, tokens) == Choice.from_json(entry.choice)
        assert entry.speedup is not None
        assert entry.speedup >= 1.0
    # an update takes some microseconds, and as long when it is measured again
    held = incumbent(table, ranks)(cases[0].case)
    first, again = (times("lora", cases[0].case, {"held": held})["held"] for _ in range(2))
    assert 1.0 < first < 100.0
    assert again == pytest.approx(first, rel=0.3)
