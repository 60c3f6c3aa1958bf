"""The whole ``smol`` fleet on its real base model in both engines on a GPU: LoRAForge against their own execution.

Needs ``pip install vllm==0.26.0`` or ``sglang==0.5.22``, this package beside it, and LORAFORGE_BASE naming the folder
that ``loraforge fleet base`` made. Of an engine three run side by side on one GPU, each in a process of its own, which
this file also is, and answer the same batches: its own execution in graphs, LoRAForge in graphs, LoRAForge eagerly. All
serve every original adapter and every compressed one (padded; eagerly LoRAForge has the ragged export) with fewer slots
than adapters.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_model import LENGTHS, VLLM, Rows, check_same, end, of_sglang, of_vllm, serve
from smol_fleet import (
    BASE,
    MODES,
    OWN,
    SLOTS,
    adapted,
    batches_of,
    check_alike,
    check_moved,
    rows_of,
    write_fleet,
)

from loraforge.runtime import sglang as sglang_plugin
from loraforge.runtime import vllm as vllm_plugin

pytestmark = [
    pytest.mark.engines,
    pytest.mark.gpu,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.skipif(not (BASE / "config.json").is_file(), reason="LORAFORGE_BASE names no base model"),
]

Batch = list[tuple[str | None, list[int]]]
TOKENS, TOP = 12, 20
GRAPHS = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512]  # tokens, up to a whole step
OURS = [mode for mode in MODES if mode != "native"]


def _vllm(mode: str, folders: dict[str, str]) -> tuple[Callable[[Batch], Rows], Callable[[], object]]:
    """Start vLLM; what answers a batch, and what ends the engine."""
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    llm = LLM(
        str(BASE),
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=512,
        max_num_seqs=32,
        max_num_batched_tokens=GRAPHS[-1],
        gpu_memory_utilization=0.2,
        kv_cache_memory_bytes=1 << 30,  # what is not measured, no neighbour on the GPU can disturb
        enable_prefix_caching=False,
        enforce_eager=mode == "eager",
        compilation_config={"cudagraph_capture_sizes": GRAPHS},
        enable_lora=True,
        max_loras=SLOTS,
        max_cpu_loras=len(folders),
        max_lora_rank=128,
    )
    greedy = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, logprobs=TOP, detokenize=False)
    requests = {
        name: LoRARequest(name, number, folder)
        for number, (name, folder) in enumerate(folders.items(), start=1)
    }

    def answer(batch: Batch) -> Rows:
        results = llm.generate(
            [{"prompt_token_ids": prompt} for _, prompt in batch],
            greedy,
            lora_request=[None if name is None else requests[name] for name, _ in batch],
            use_tqdm=False,
        )
        made = [result.outputs[0] for result in results]
        return [
            {
                "adapter": name,
                **of_vllm(its),
                "top": [[(token, told.logprob) for token, told in entry.items()] for entry in its.logprobs],
            }
            for (name, _), its in zip(batch, made, strict=True)
        ]

    return answer, lambda: None


def _sglang(mode: str, folders: dict[str, str]) -> tuple[Callable[[Batch], Rows], Callable[[], object]]:
    """The same of SGLang."""
    import sglang

    engine = sglang.Engine(
        model_path=str(BASE),
        skip_tokenizer_init=True,
        dtype="bfloat16",
        context_length=512,
        max_running_requests=32,
        max_total_tokens=16384,
        mem_fraction_static=0.3,  # of the memory when it starts, what neighbours take meanwhile included
        chunked_prefill_size=GRAPHS[-1],
        disable_radix_cache=True,
        attention_backend="triton",
        sampling_backend="pytorch",
        cuda_graph_bs_decode=[1, 2, 4, 8, 16, 32],
        cuda_graph_bs_prefill=[64, 256, 512],
        disable_cuda_graph=mode == "eager",
        random_seed=0,
        enable_lora=True,
        lora_backend="csgmv" if mode == "native" else "loraforge",
        max_loras_per_batch=SLOTS + 1,  # one of them the base model's
        max_lora_rank=128,
        lora_target_modules=[f"{part}_proj" for part in ("q", "k", "v", "o", "gate", "up", "down")],
        lora_paths=folders,
    )

    def answer(batch: Batch) -> Rows:
        answers = engine.generate(
            input_ids=[prompt for _, prompt in batch],
            sampling_params={"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True},
            lora_path=[name for name, _ in batch],
            return_logprob=True,
            top_logprobs_num=TOP,
        )
        return [
            {
                "adapter": name,
                **of_sglang(made),
                "top": [
                    [(token, logprob) for logprob, token, *_ in entry]
                    for entry in made["meta_info"]["output_top_logprobs"]
                ],
            }
            for (name, _), made in zip(batch, answers, strict=True)
        ]

    return answer, engine.shutdown


ENGINES = {"vllm": _vllm, "sglang": _sglang}
SWITCHES = {"vllm": vllm_plugin.SWITCH, "sglang": sglang_plugin.SWITCH}


def _serve(engine: str, mode: str, root: Path) -> None:
    """Serve the batches and write what came of them."""
    plan = json.loads((root / "plan.json").read_text())
    answer, shutdown = ENGINES[engine](mode, plan["folders"][mode])
    served = {part: answer(batch) for part, batch in plan["parts"].items()}
    end(root, f"{engine}-{mode}", {"served": served}, shutdown)


@dataclass(frozen=True)
class Served:
    """What each mode of an engine made of the batches, once it has."""

    engine: str
    modes: dict[str, Future[dict[str, Any]]]

    def of(self, mode: str) -> dict[str, Rows]:
        """Answers by batch."""
        found: dict[str, Rows] = self.modes[mode].result()["served"]
        return found

    def check_repeated(self, found: Rows, first: Rows) -> None:
        """Answers of one mode to the same prompts are the same: to rounding in vLLM, which has each batch as a whole
        before its first step. To SGLang requests come one by one, so that its steps may hold other rows the second
        time, and products other roundings."""
        (check_same if self.engine == "vllm" else check_alike)(found, first)


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The compressed adapters, and the plan of what is served."""
    folder = tmp_path_factory.mktemp("smol")
    write_fleet(folder)
    return folder


@pytest.fixture(scope="module", params=ENGINES)
def served(request: pytest.FixtureRequest, fleet: Path) -> Iterator[Served]:
    """All modes of an engine, at once."""
    engine: str = request.param
    if importlib.util.find_spec(engine) is None:
        pytest.skip(f"{engine} is not installed")

    def run(mode: str) -> dict[str, Any]:
        environment = {
            **VLLM,
            "VLLM_CACHE_ROOT": str(fleet / f"{engine}-{mode}.cache"),  # what one compiles, no other takes
            SWITCHES[engine]: "native" if mode == "native" else "1",
        }
        return serve(__file__, f"{engine}-{mode}", fleet, environment)

    with ThreadPoolExecutor(len(MODES)) as pool:
        yield Served(engine, {mode: pool.submit(run, mode) for mode in MODES})


@pytest.mark.parametrize("mode", OURS)
def test_answers_are_those_of_the_engines_own_execution(served: Served, mode: str) -> None:
    ours, native = served.of(mode), served.of("native")
    check_alike(adapted(rows_of(ours)), adapted(rows_of(native)))
    # the base model alone: among adapters its rows are not the engine's to show, which has been wrong about them
    check_alike(rows_of(ours, end="_base"), rows_of(native, end="_base"))


def test_graphs_and_eager_execution_agree_at_lengths_where_they_part(served: Served) -> None:
    graphs, eager = (rows_of(served.of(mode), LENGTHS) for mode in OURS)
    check_alike(graphs, eager)


@pytest.mark.parametrize("mode", MODES)
def test_every_adapter_changes_answers(served: Served, mode: str) -> None:
    check_moved(rows_of(served.of(mode)), rows_of(served.of(mode), end="_base"))


@pytest.mark.parametrize("mode", OURS)
def test_base_rows_of_a_mixed_batch_are_those_of_the_base_model_alone(served: Served, mode: str) -> None:
    mixed, alone = rows_of(served.of(mode)), rows_of(served.of(mode), end="_base")
    places = [place for place, row in enumerate(mixed) if row["adapter"] is None]
    assert places
    served.check_repeated([mixed[place] for place in places], [alone[place] for place in places])


@pytest.mark.parametrize("mode", OURS)
def test_adapters_come_back_as_they_were(served: Served, mode: str) -> None:
    served.check_repeated(rows_of(served.of(mode), end="_again"), rows_of(served.of(mode), [OWN]))


@pytest.mark.parametrize("mode", MODES)
def test_counters_tell_who_served_and_that_adapters_took_turns(served: Served, mode: str) -> None:
    told = served.modes[mode].result()["counters"]
    assert told["execution"] == ("native" if mode == "native" else "loraforge")
    assert told["adapters"] == told["loads"] - told["unloads"] <= SLOTS
    turns = [*batches_of(served.of(mode)), *batches_of(served.of(mode), "_again")]
    assert told["loads"] >= len(turns) * SLOTS


if __name__ == "__main__":
    _serve(*sys.argv[1].split("-"), Path(sys.argv[2]))
