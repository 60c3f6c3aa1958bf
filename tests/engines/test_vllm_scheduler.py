"""Deferred admission in the engine's own scheduler, without a model and then with one.

Needs what ``test_vllm_cpu`` needs. Without a model the scheduler is driven as the engine drives it, results one step
late where it schedules ahead, over random requests, too little memory for them, and requests that are given up.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import deque
from copy import copy
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from loraforge.errors import OutputError, UsageError

pytest.importorskip("vllm")
BASE = Path(os.environ.get("LORAFORGE_BASE", "no base model given"))
pytestmark = [
    pytest.mark.engines,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not (BASE / "config.json").is_file(), reason="LORAFORGE_BASE names no base model"),
]
BLOCK, BUDGET, MODEL_LEN = 16, 40, 160  # tokens of a block of memory, of a step, of a request
NUMBERS = count()


@pytest.fixture(scope="module")
def plain() -> Any:
    """The engine's configuration for the base model, as it comes."""
    from vllm.engine.arg_utils import EngineArgs

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        arguments = EngineArgs(
            str(BASE),
            max_model_len=MODEL_LEN,
            max_num_seqs=6,
            max_num_batched_tokens=BUDGET,
            enable_prefix_caching=False,
            block_size=BLOCK,
            kv_cache_memory_bytes=1 << 24,
        )
        yield arguments.create_engine_config()


@dataclass
class Step:
    """Tokens of prompts, and of requests that decode. could_decode: whether any had one to make."""

    could_decode: bool
    prefill: int = 0
    decode: int = 0


@dataclass
class Loop:
    """An engine without a model: every request goes on to its length."""

    scheduler: Any
    depth: int  # steps that may be underway at once
    steps: list[Step] = field(default_factory=list)
    made: dict[str, int] = field(default_factory=dict)  # tokens of each request

    def __post_init__(self) -> None:
        self._underway: deque[tuple[Any, list[str]]] = deque()

    def add(self, prompt: int, tokens: int) -> str:
        from vllm import SamplingParams
        from vllm.v1.request import Request

        name = str(next(NUMBERS))
        parameters = SamplingParams(max_tokens=tokens, ignore_eos=True)
        self.scheduler.add_request(Request(name, list(range(prompt)), parameters, None))
        return name

    def abort(self, name: str) -> None:
        from vllm.v1.request import RequestStatus

        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    def step(self) -> None:
        """One turn of the engine: schedule, and take results once nothing more can be scheduled ahead of them."""
        engine = self.scheduler
        if engine.has_requests():
            underway = {name: request.num_output_placeholders for name, request in engine.requests.items()}
            step = Step(
                any(
                    not request.is_prefill_chunk
                    and request.num_output_tokens + underway[request.request_id] < request.max_tokens
                    and request.num_tokens + underway[request.request_id] > request.num_computed_tokens
                    for request in engine.running
                )
            )
            output = engine.schedule()
            new = [(entry.req_id, entry.num_computed_tokens) for entry in output.scheduled_new_reqs]
            old = output.scheduled_cached_reqs
            sampled = []
            for name, computed in [*new, *zip(old.req_ids, old.num_computed_tokens, strict=True)]:
                known = engine.requests[name].num_tokens + underway[name] - computed
                scheduled = output.num_scheduled_tokens[name]
                if known > 1:
                    step.prefill += scheduled
                else:
                    step.decode += scheduled
                if scheduled == known:
                    sampled.append(name)
            self.steps.append(step)
            self._underway.append((output, sampled))
            if len(self._underway) < self.depth and output.num_scheduled_tokens:
                return
        self._take()

    def _take(self) -> None:
        from vllm.v1.outputs import ModelRunnerOutput

        if not self._underway:
            return
        output, sampled = self._underway.popleft()
        names = list(output.num_scheduled_tokens)
        tokens = [[7] if name in sampled else [] for name in names]
        places = {name: place for place, name in enumerate(names)}
        results = self.scheduler.update_from_output(output, ModelRunnerOutput(names, places, tokens))
        for client in results.values():
            for result in client.outputs:
                made = self.made.get(result.request_id, 0)
                self.made[result.request_id] = made + len(result.new_token_ids)

    def finish(self) -> None:
        for _ in range(3000):
            if not self.scheduler.has_requests() and not self._underway:
                return
            self.step()
        raise AssertionError("requests starve")


def _loop(
    plain: Any, options: dict[str, Any], *, ahead: bool, depth: int | None = None, blocks: int = 200
) -> Loop:
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.structured_output import StructuredOutputManager

    from loraforge.runtime.vllm import scheduler

    config = copy(plain)
    config.scheduler_config = copy(plain.scheduler_config)
    config.scheduler_config.async_scheduling = ahead
    config.additional_config = options
    scheduler.install(config)
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32)
    config.cache_config = copy(plain.cache_config)
    config.cache_config.num_gpu_blocks = blocks
    kind = config.scheduler_config.get_scheduler_cls()
    return Loop(
        kind(
            vllm_config=config,
            kv_cache_config=KVCacheConfig(
                num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)]
            ),
            structured_output_manager=StructuredOutputManager(config),
            block_size=BLOCK,
        ),
        depth or 1 + ahead,
    )


def _obeys(steps: list[Step], decode_steps: int) -> None:
    decodes = decode_steps
    for step in steps:
        if step.could_decode and decodes < decode_steps:
            assert not step.prefill
        if step.prefill:
            decodes = 0
        elif step.decode:
            decodes += 1


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.integers(0, 5),
    st.sampled_from([(False, 1), (False, 3), (True, 2)]),
    st.integers(11, 20),  # a request takes 10 blocks at most, and one is the engine's own
    st.lists(
        st.tuples(st.integers(0, 6), st.integers(1, 90), st.integers(1, 60), st.booleans()),
        min_size=1,
        max_size=20,
    ),
)
def test_the_rule_holds_and_every_request_ends(
    plain: Any,
    decode_steps: int,
    mode: tuple[bool, int],
    blocks: int,
    requests: list[tuple[int, int, int, bool]],
) -> None:
    """``requests``: (steps before it, prompt, tokens, whether it is given up in the next one's place)."""
    ahead, depth = mode
    loop = _loop(plain, {"loraforge_decode_steps": decode_steps}, ahead=ahead, depth=depth, blocks=blocks)
    wanted, leaving = {}, None
    for wait, prompt, tokens, given_up in requests:
        for _ in range(wait):
            loop.step()
        if leaving is not None:
            loop.abort(leaving)
        name = loop.add(prompt, tokens)
        leaving = name if given_up else None
        if not given_up:
            wanted[name] = tokens
    loop.finish()
    _obeys(loop.steps, decode_steps)
    assert {name: loop.made[name] for name in wanted} == wanted


@pytest.mark.parametrize("ahead", [False, True])
def test_what_was_held_comes_in_after_the_decode_steps(plain: Any, ahead: bool, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    options = {"loraforge_decode_steps": 3, "loraforge_admission_trace": str(trace)}
    loop = _loop(plain, options, ahead=ahead)
    loop.add(100, 12)  # three steps of prompt: alone, so that none waits
    for _ in range(4):
        loop.step()
    loop.add(60, 2)  # two steps of prompt
    loop.add(10, 2)
    loop.finish()
    loop.scheduler.shutdown()
    work = [(step.prefill, step.decode) for step in loop.steps if step.prefill + step.decode]
    assert work[:3] == [(40, 0), (40, 0), (20, 0)]
    assert work[3:6] == [(0, 1)] * 3
    assert work[6:8] == [(39, 1), (0, 1)]  # a step's tokens are shared with the decode
    # the rest of one prompt and the whole of another
    assert work[8:11] == [(0, 1), (0, 1), (31, 1)]
    records = [json.loads(line) for line in trace.read_text(encoding="utf-8").splitlines()]
    assert [(record["prefill_tokens"], record["decode_tokens"]) for record in records] == work
    assert [record["held"] for record in records[:7]] == [False] * 3 + [True] * 3 + [False]


def test_an_engine_with_nothing_to_decode_admits_at_once(plain: Any) -> None:
    loop = _loop(plain, {"loraforge_decode_steps": 50}, ahead=False)
    for _ in range(3):
        loop.add(10, 4)
        loop.step()
        assert loop.steps[-1] == Step(False, prefill=10)
        loop.finish()


def test_a_last_token_that_is_underway_holds_nothing(plain: Any) -> None:
    loop = _loop(plain, {"loraforge_decode_steps": 50}, ahead=True)
    loop.add(10, 2)
    loop.step()
    loop.add(20, 1)
    loop.finish()
    assert loop.steps[:3] == [Step(False, prefill=10), Step(True, decode=1), Step(False, prefill=20)]


def test_a_token_whose_turn_has_not_come_holds_nothing(plain: Any) -> None:
    """As where a model is cut into parts that work at once: a request has one token underway, prompts fill the rest."""
    loop = _loop(plain, {"loraforge_decode_steps": 50}, ahead=False, depth=2)
    loop.add(10, 5)
    loop.step()
    loop.add(20, 1)
    loop.finish()
    assert loop.steps[:3] == [Step(False, prefill=10), Step(False, prefill=20), Step(True, decode=1)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loraforge_decode_steps": -1}, "loraforge_decode_steps: -1"),
        ({"loraforge_decode_steps": True}, "loraforge_decode_steps: True"),
        ({"loraforge_decode_steps": "4"}, "loraforge_decode_steps: '4'"),
        ({"loraforge_admission_trace": 4}, "loraforge_admission_trace: 4"),
    ],
)
def test_options_that_make_no_sense(plain: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        _loop(plain, options, ahead=False)


def test_the_engines_scheduler_stays_where_nothing_is_asked(plain: Any, tmp_path: Path) -> None:
    from vllm.v1.core.sched.scheduler import Scheduler

    assert type(_loop(plain, {"loraforge_decode_steps": 0}, ahead=False).scheduler) is Scheduler
    with pytest.raises(OutputError, match="loraforge_admission_trace: No such file"):
        _loop(plain, {"loraforge_admission_trace": str(tmp_path / "no" / "trace")}, ahead=False)


def test_another_scheduler_is_not_displaced(plain: Any) -> None:
    from loraforge.runtime.vllm import scheduler

    config = copy(plain)
    config.scheduler_config = copy(plain.scheduler_config)
    config.scheduler_config.scheduler_cls = "vllm.v1.core.sched.scheduler.Scheduler"
    config.additional_config = {"loraforge_decode_steps": 4}
    with pytest.raises(UsageError, match="scheduler_cls: the engine is to use vllm"):
        scheduler.install(config)


_SERVE = """
import json, sys
from vllm import LLM, SamplingParams
base, options, prompts, lengths = json.loads(sys.argv[1])
llm = LLM(base, dtype="float32", max_model_len=160, max_num_seqs=6, max_num_batched_tokens=40,
          kv_cache_memory_bytes=1 << 26, enable_prefix_caching=False, enforce_eager=True, additional_config=options)
wanted = [SamplingParams(temperature=0, max_tokens=length, ignore_eos=True) for length in lengths]
made = llm.generate([{"prompt_token_ids": ids} for ids in prompts], wanted, use_tqdm=False)
print("MADE", json.dumps([list(output.outputs[0].token_ids) for output in made]))
"""


def _generate(
    switch: str, options: dict[str, Any], prompts: list[list[int]], lengths: list[int]
) -> list[list[int]]:
    """What a whole engine makes of ``prompts``, in a process of its own. FP32: a batch changes no token."""
    done = subprocess.run(
        [sys.executable, "-c", _SERVE, json.dumps([str(BASE), options, prompts, lengths])],
        env={
            **os.environ,
            "LORAFORGE_VLLM": switch,
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "HF_HUB_OFFLINE": "1",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("MADE ")]
    return list(json.loads(line.removeprefix("MADE ")))


def test_a_real_engine_makes_the_same_tokens_in_another_order(tmp_path: Path) -> None:
    prompts = [list(range(100 * start, 100 * start + 12 * start)) for start in range(1, 8)]
    lengths = [12, 3, 8, 1, 5, 14, 4]
    traces, made = [], []
    for steps, switch in ((0, "1"), (4, "native")):
        trace = tmp_path / f"{steps}.jsonl"
        options = {"loraforge_decode_steps": steps, "loraforge_admission_trace": str(trace)}
        made.append(_generate(switch, options, prompts, lengths))
        traces.append([json.loads(line) for line in trace.read_text(encoding="utf-8").splitlines()])
    assert made[0] == made[1]
    assert list(map(len, made[0])) == lengths
    eager, deferred = traces
    for trace in traces:
        tokens = sum(record["prefill_tokens"] + record["decode_tokens"] for record in trace)
        assert tokens == sum(map(len, prompts)) + sum(lengths) - len(lengths)
    assert not any(record["held"] for record in eager)
    assert sum(record["held"] for record in deferred) >= 12
    _obeys(
        [
            Step(
                record["held"] or bool(record["decode_tokens"]),
                record["prefill_tokens"],
                record["decode_tokens"],
            )
            for record in deferred
        ],
        4,
    )
