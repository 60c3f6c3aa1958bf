"""What experiments ask of the engine's scheduler: a trace of what it admits, and answers that end before their cap.

Deferred admission (paper, B.1) needs nothing of ours: it is the engine's ``--prefill-decode-interval``. Both are hooks
of methods, which leave the engine's decisions alone. They are there where the environment asks for them, whoever
executes LoRA, so that arms can be alike in it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from sglang.srt.runtime_context import get_parallel

from loraforge.errors import MissingDependencyError, OutputError, UsageError
from loraforge.runtime.sglang import EARLY_STOP, STOP_AT, TRACE
from loraforge.runtime.trace import AdmissionTrace

_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
_REQUEST = "sglang.srt.managers.schedule_batch.Req"


def install(environment: Mapping[str, str], problem: str | None) -> None:
    """Hook what the environment asks for. problem: why the installed engine is refused.

    Raises UsageError for a value that means nothing, OutputError for a trace whose folder is not there,
    MissingDependencyError where something is asked of an engine that is refused.
    """
    trace, early = environment.get(TRACE), environment.get(EARLY_STOP, "0")
    if early not in ("0", "1"):
        raise UsageError(repr(early), key=EARLY_STOP, remedy="give 1 or 0")
    for key, wanted in ((TRACE, trace is not None), (EARLY_STOP, early == "1")):
        if wanted and problem:
            raise MissingDependencyError(problem, key=key, remedy=f"install that version, or unset {key}")
    if trace is not None:
        if not Path(trace).parent.is_dir():
            raise OutputError(
                "no such folder", path=trace, key=TRACE, remedy="name a file that can be written"
            )
        HookRegistry.register(f"{_SCHEDULER}.get_next_batch_to_run", _traced(Path(trace)), HookType.AROUND)
    if early == "1":
        HookRegistry.register(f"{_REQUEST}.update_finish_state", end_early, HookType.AFTER)


def _traced(path: Path) -> Callable[..., Any]:
    """A hook of the scheduler that notes every batch which it is to run, in the first worker."""
    opened: list[AdmissionTrace] = []  # not before: the engine's other processes load the plugin too

    def note(native: Callable[..., Any], scheduler: Any, *args: Any, **kwargs: Any) -> Any:
        held = scheduler._prefill_decode_interval_remaining > 0
        plan = native(scheduler, *args, **kwargs)
        batch = plan.batch_to_run
        if batch is None or batch.is_empty() or get_parallel().tp_rank or get_parallel().pp_rank:
            return plan
        if not opened:
            opened.append(AdmissionTrace(path, TRACE))
        prefill, decode = _shares(batch)
        running = len({*plan.running_batch.reqs, *batch.reqs})
        opened[0].add(
            scheduler.forward_ct + 1,
            held=held,
            prefill=prefill,
            decode=decode,
            running=running,
            unfinished=running + len(scheduler.waiting_queue),
        )
        return plan

    return note


def _shares(batch: Any) -> tuple[tuple[int, int], tuple[int, int]]:
    """(tokens, requests) of prompts, and of requests that decode; a step of the engine may have both."""
    requests = len(batch.reqs)
    if not batch.forward_mode.is_extend():
        return (0, 0), (requests, requests)
    mixed = len(batch.decoding_reqs or ())
    return (batch.extend_num_tokens - mixed, requests - mixed), (mixed, mixed)


def end_early(_: Any, request: Any, *__: Any, **___: Any) -> None:
    """End an answer of the length that its request asks for in ``custom_params``, as though its last token were EOS.

    The scheduler knows of it only then, as it does of a real EOS: until then it reckons with the declared cap.
    """
    asked = request.sampling_params.custom_params
    if not isinstance(asked, dict) or request.finished():
        return
    length = asked.get(STOP_AT)
    if type(length) is int and len(request.output_ids) >= length > 0:
        from sglang.srt.managers.schedule_batch import FINISH_MATCHED_TOKEN

        request.finished_reason = FINISH_MATCHED_TOKEN(matched=request.output_ids[length - 1])
        request.finished_len = length
