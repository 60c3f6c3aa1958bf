"""What a scheduler admitted in the first part of a timed window, from the trace that the plugin writes (paper, B.7)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime
from pathlib import Path
from statistics import fmean

from pydantic import TypeAdapter, ValidationError

from loraforge.errors import InputError
from loraforge.runtime.trace import Step
from loraforge.serving.points import Admission

WINDOW_S = 60.0  # the paper's
_STEP: TypeAdapter[Step] = TypeAdapter(Step)


def read_trace(path: Path) -> list[Step]:
    """The steps in a trace, but for a last line that is still being written. Raises InputError for another file, and
    where there is none: the plugin is not active then."""
    try:
        *lines, _ = path.read_bytes().split(b"\n")
    except OSError as error:
        raise InputError(
            f"cannot be read ({error.strerror}): the engine records no admissions",
            path=path,
            remedy="install loraforge beside the engine",
        ) from error
    steps = []
    for number, line in enumerate(lines, start=1):
        try:
            steps.append(_STEP.validate_json(line))
        except ValidationError as error:
            first = error.errors()[0]
            raise InputError(f"line {number} is no step of a trace: {first['msg']}", path=path) from error
    return steps


def admission(steps: Iterable[Step], started: str, ended: str, window_s: float = WINDOW_S) -> Admission:
    """Of the steps in a timed window and in its first ``window_s`` seconds. started, ended: UTC, ISO 8601."""
    first = datetime.fromisoformat(started).timestamp()
    last = min(datetime.fromisoformat(ended).timestamp(), first + window_s)
    inside = [step for step in steps if first <= step.time <= last]
    prefills = [step for step in inside if step.prefill_tokens]
    decodes = [step for step in inside if step.decode_requests]
    return Admission(
        window_s=last - first,
        steps=len(inside),
        held=sum(step.held for step in inside),
        prefill_steps=len(prefills),
        prefill_tokens_mean=_mean([step.prefill_tokens for step in prefills]),
        prefill_requests_mean=_mean([step.prefill_requests for step in prefills]),
        decode_requests_mean=_mean([step.decode_requests for step in decodes]),
        decode_requests_peak=max((step.decode_requests for step in decodes), default=0),
        running_peak=max((step.running for step in inside), default=0),
        waiting_peak=max((step.unfinished - step.running for step in inside), default=0),
    )


def _mean(values: Sequence[int]) -> float | None:
    return fmean(values) if values else None
