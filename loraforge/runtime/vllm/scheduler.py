"""The engine's scheduler with deferred admission (paper, B.1), where the plugin's options ask for it.

The engine can leave prompts out of a step by itself, to keep data-parallel ranks in time with each other: running
requests go on, prompts that are partly computed and the waiting ones do not, and one that needs no computing but its
last token (all else is in the cache, or on its way from elsewhere) still comes in. That is asked for here by another
rule, so that memory, preemption, priorities and aborted requests remain the engine's affair.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vllm.logger import init_logger
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from loraforge.errors import UsageError
from loraforge.runtime.deferred import DeferredAdmission
from loraforge.runtime.trace import AdmissionTrace

# keys of the engine's additional_config
DECODE_STEPS = "loraforge_decode_steps"  # steps that decode alone after one with a prompt; 0: off
TRACE = "loraforge_admission_trace"  # a file: a JSON line for every step that was not empty

logger = init_logger("vllm.loraforge")


def install(vllm_config: Any) -> None:
    """Name one of the schedulers below in the engine's configuration, if its options want one.

    To be called when the engine knows whether it schedules ahead of results (``async_scheduling``); may be called
    again. Raises UsageError for options that make no sense, or beside another scheduler of the user's.
    """
    steps, trace = _options(vllm_config)
    if not steps and trace is None:
        return
    config = vllm_config.scheduler_config
    ours = [f"{__name__}.{kind.__name__}" for kind in (DeferredScheduler, DeferredAsyncScheduler)]
    if config.scheduler_cls not in (None, *ours):
        raise UsageError(
            f"the engine is to use {config.scheduler_cls}",
            key="scheduler_cls",
            remedy=f"give either a scheduler or {DECODE_STEPS} and {TRACE}",
        )
    config.scheduler_cls = ours[bool(config.async_scheduling)]


def _options(vllm_config: Any) -> tuple[int, Path | None]:
    given = vllm_config.additional_config
    options = given if isinstance(given, dict) else {}
    steps, trace = options.get(DECODE_STEPS, 0), options.get(TRACE)
    if type(steps) is not int or steps < 0:
        raise UsageError(repr(steps), key=DECODE_STEPS, remedy="give a number of steps, 0 for none")
    if not isinstance(trace, str | None):
        raise UsageError(repr(trace), key=TRACE, remedy="give the path of a file")
    return steps, None if trace is None else Path(trace)


class _Deferring:
    """Goes before one of the engine's schedulers."""

    def __init__(self, *args: Any, vllm_config: Any, **kwargs: Any) -> None:
        native: Any = super()
        native.__init__(*args, vllm_config=vllm_config, **kwargs)
        steps, trace = _options(vllm_config)
        self._admission = DeferredAdmission(steps)
        self._trace = None if trace is None else AdmissionTrace(trace, TRACE)
        logger.info("LoRAForge defers prompts for %d decode steps after each step with a prompt", steps)

    def schedule(self, throttle_prefills: bool = False) -> Any:
        engine: Any = self
        native: Any = super()
        decoding = [request for request in engine.running if not request.is_prefill_chunk]
        held = self._admission.holds(
            any(_can_decode(request, engine.current_step + 1) for request in decoding)
        )
        saturated = engine.prefill_capacity_bound
        if held:
            engine.prefill_capacity_bound = False  # a saturated engine would hold nothing back
        output = native.schedule(throttle_prefills or held)
        if held:
            engine.prefill_capacity_bound = saturated
        self._note(output, {request.request_id for request in decoding}, held)
        return output

    def _note(self, output: Any, decoding: set[str], held: bool) -> None:
        engine: Any = self
        tokens = output.num_scheduled_tokens
        if not tokens:
            return
        # a request that has one token left to compute is no more work in its first step than in the next
        prompts = [
            count
            for name, count in tokens.items()
            if name not in decoding and (count > 1 or engine.requests[name].is_prefill_chunk)
        ]
        prefill = sum(prompts)
        decode = sum(tokens.values()) - prefill
        self._admission.ran(prefill, decode)
        if self._trace is not None:
            self._trace.add(
                engine.current_step,
                held=held,
                prefill=(prefill, len(prompts)),
                decode=(decode, len(tokens) - len(prompts)),
                running=len(engine.running),
                unfinished=engine.get_num_unfinished_requests(),
            )

    def shutdown(self) -> None:
        native: Any = super()
        native.shutdown()
        if self._trace is not None:
            self._trace.close()


class DeferredScheduler(_Deferring, Scheduler):
    """For an engine that waits for the results of a step before it schedules the next."""


class DeferredAsyncScheduler(_Deferring, AsyncScheduler):
    """For an engine that schedules a step while the one before runs."""


def _can_decode(request: Any, step: int) -> bool:
    """Whether a request whose prompt is computed has a token to make in a step: its last may be underway, and where the
    engine keeps several steps underway without scheduling ahead of results, it may have to wait for one."""
    underway: int = request.num_output_placeholders
    return bool(
        request.num_output_tokens + underway < request.max_tokens
        and request.num_computed_tokens < request.num_tokens + underway
        and request.next_decode_eligible_step <= step
    )
