"""Records of one replay: a line about the run, then one a request, failed ones and unsent ones among them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from loraforge.errors import InputError
from loraforge.files import read_jsonl, write_jsonl

Stop = Literal["natural", "exact", "exact-eos", "early"]


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class RequestRecord(_Record):
    """What became of one request. Times are seconds after the start of the replay, on one monotonic clock.

    ``failure`` says why where the answer was not had as asked; nothing else then counts, but what was seen is kept.
    """

    id: int
    fleet: str
    adapter: str | None
    model: str = Field(description="name that the server was asked for")
    asked_tokens: int = Field(description="exact length, or the cap of a natural stop")
    scheduled_s: float
    sent_s: float | None = Field(None, description="null where it was never sent")
    first_s: float | None = Field(
        None,
        description="first chunk of the answer: engines send one once there is a token, if its text is empty too",
    )
    text_s: float | None = Field(None, description="first chunk with text; null where nothing printable came")
    end_s: float | None = Field(
        None, description="last chunk of the answer; where the request failed, when that was known"
    )
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    counted: Literal["usage", "chunks"] | None = Field(
        None, description="whether the server stated output_tokens, or chunks with text were counted"
    )
    finish_reason: str | None = None
    failure: str | None = None


class RunRecord(_Record):
    """One replay as a whole."""

    record: Literal["loraforge.serving-records/1"] = "loraforge.serving-records/1"
    workload: str = Field(description="SHA-256 of the workload")
    requests_sha256: str
    arrivals_sha256: str
    outputs_sha256: str
    engine: Literal["vllm", "sglang"]
    seed: int
    rate: float = Field(description="offered requests a second")
    stop: Stop
    base_only: bool = Field(description="whether every request went to the base model")
    caps: dict[str, int] = Field(
        default_factory=dict, description="tokens that requests of a fleet declared at most, under stop early"
    )
    copies: int = Field(1, ge=1, description="names of each adapter, which requests took in turn")
    timeout_s: float
    urls: dict[str, str] = Field(description="server of each fleet")
    started: str = Field(description="UTC time of the start, ISO 8601")
    untimed: dict[str, int] = Field(
        default_factory=dict, description="requests of each untimed pass before this run"
    )
    untimed_failed: int = 0
    ended: str | None = Field(None, description="why the replay ended early; null where it did not")


class Run(_Record):
    """A replay and its requests, by id."""

    run: RunRecord
    requests: tuple[RequestRecord, ...]

    def outputs(self) -> dict[int, int]:
        """Output tokens by request id of what was answered: lengths that a matched workload takes."""
        return {
            request.id: request.output_tokens
            for request in self.requests
            if request.failure is None and request.output_tokens
        }


def write_run(path: Path, run: Run) -> None:
    """Write the records of a replay atomically."""
    write_jsonl(path, _rows(run))


def _rows(run: Run) -> Iterator[dict[str, Any]]:
    yield run.run.model_dump(mode="json")
    for request in run.requests:
        yield request.model_dump(mode="json")


def read_run(path: Path) -> Run:
    """Read the records of a replay. Raises InputError that names the key for anything else."""
    rows = read_jsonl(path)
    try:
        return Run(
            run=RunRecord.model_validate(next(rows, None)),
            requests=tuple(RequestRecord.model_validate(row) for row in rows),
        )
    except ValidationError as error:
        first = error.errors()[0]
        raise InputError(
            f"holds no records of a replay: {first['msg']}",
            path=path,
            key=".".join(map(str, first["loc"])) or None,
            remedy="make them with loraforge bench serve",
        ) from error
