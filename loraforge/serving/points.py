"""Records of one serving experiment: a setting, the starts of engines, and measured points.

``records.jsonl`` has one object a line, appended as it is known: first the ``setting``, then, for each time an arm's
engines were started, a ``start`` and after it the ``point`` of each rate and seed that was measured on them. A folder
may be finished by several runs, so an arm may have several starts. Requests are in ``requests/*.jsonl``, as
:mod:`loraforge.serving.records` has them; a point states the SHA-256 of its file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from loraforge.errors import InputError
from loraforge.evidence.machine import Protocol, System
from loraforge.files import read_jsonl
from loraforge.serving.counters import Counters
from loraforge.serving.records import Stop

RECORDS = "records.jsonl"
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Figures = dict[str, float | None]
Kept = Literal["logs", "counters", "traces"]
KEPT: dict[Kept, str] = {"logs": "log", "counters": "json", "traces": "jsonl"}  # folder -> suffix


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class WorkloadHashes(_Record):
    """One workload: what is asked, when, and how long the answers are; ``sha256`` covers all of it."""

    rate: float = Field(gt=0, description="offered requests a second")
    seed: int
    requests: int = Field(ge=1)
    sha256: Sha256
    requests_sha256: Sha256
    arrivals_sha256: Sha256
    outputs_sha256: Sha256


class SettingRecord(_Record):
    """What an experiment is: the same for every run that adds to its folder."""

    record: Literal["setting"] = "setting"
    schema_: Literal["loraforge.serving-experiment/1"] = Field(
        "loraforge.serving-experiment/1", alias="schema"
    )
    experiment: str
    protocol: Protocol
    config: dict[str, Any] = Field(description="whole resolved configuration")
    engine: str = Field(description="distribution and version, as vllm 0.26.0")
    host: System
    arms: tuple[str, ...] = Field(min_length=1, description="in the order in which they take turns")
    workloads: tuple[WorkloadHashes, ...] = Field(
        min_length=1, description="of every rate and seed, the same for all arms"
    )
    adapters: dict[str, dict[str, dict[str, Sha256]]] = Field(
        description="fleet -> weights -> adapter -> SHA-256 of its tensors' file"
    )


class EngineState(_Record):
    """One fleet's engine as it was started."""

    slots: int | None = Field(description="adapters that fit at once; null without LoRA")
    max_rank: int | None = Field(description="rank that native buffers are made for; null without LoRA")
    pool: Literal["ragged", "shadow", "native"] | None = None
    pool_bytes: int | None = Field(None, description="bound that LoRAForge's pool was given")
    counters: Counters | None = Field(None, description="once healthy; null where no plugin counts")


class StartRecord(_Record):
    """One start of an arm's engines, all at once. ``number`` counts the starts of the folder: the order of turns, or of
    beginnings where sweeps side by side were gathered.

    ``beside`` names the arms whose engines were started with them, and were up and idle while they served.
    """

    record: Literal["start"] = "start"
    experiment: str
    arm: str
    number: int = Field(ge=0)
    started: str = Field(description="UTC, ISO 8601")
    healthy_s: float | None = Field(
        description="seconds until all answered, and those of arms before it that were started with them; null where"
        " one did not"
    )
    engines: dict[str, EngineState] = Field(description="by fleet")
    failure: str | None = Field(None, description="why the engines did not start; null where they did")
    beside: tuple[str, ...] = ()
    gpus: str | None = Field(
        None, description="CUDA_VISIBLE_DEVICES, where it was set: those of the host that served"
    )


class Window(_Record):
    """Counters over the timed window of a point: differences of snapshots before and after, and the later one."""

    loads: int = Field(ge=0)
    unloads: int = Field(ge=0)
    source_bytes: int = Field(ge=0)
    moves: int = Field(ge=0)
    after: Counters


class Admission(_Record):
    """What a scheduler admitted in the first ``window_s`` seconds of a timed window; a step may hold prompts, decodes
    or both."""

    window_s: float = Field(ge=0)
    steps: int = Field(ge=0, description="that were not empty")
    held: int = Field(ge=0, description="steps in which prompts had to wait for decodes")
    prefill_steps: int = Field(ge=0, description="steps with tokens of prompts")
    prefill_tokens_mean: float | None = Field(description="of those steps")
    prefill_requests_mean: float | None = Field(description="of those steps")
    decode_requests_mean: float | None = Field(description="of the steps that decode")
    decode_requests_peak: int = Field(ge=0)
    running_peak: int = Field(ge=0)
    waiting_peak: int = Field(ge=0, description="requests that were not admitted yet")


class PointRecord(_Record):
    """One rate and seed of an arm. Keys of ``figures`` are those of :func:`loraforge.serving.metrics.summarise`.

    A point that ``stopped`` early is kept to be seen and counts for nothing; it is measured again by the next run,
    whose record then comes after it.
    """

    record: Literal["point"] = "point"
    experiment: str
    arm: str
    rate: float = Field(gt=0, description="offered requests a second")
    seed: int
    stop: Stop | None = Field(
        None,
        description="how answers ended, of an experiment that measures several ways; null: as it declares",
    )
    start: int = Field(ge=0, description="number of the start whose engines served it")
    figures: Figures = Field(description="over all fleets, in one wall interval that includes the drain")
    fleets: dict[str, Figures] = Field(description="the same of each fleet's requests alone")
    loads: int | None = Field(description="adapter loads in the timed window; null where none counts them")
    source_bytes: int | None = Field(description="bytes copied from the host for them")
    pool_bytes: int | None = Field(description="device memory held for LoRA by all engines, after the window")
    peak_allocated_bytes: int | None = Field(
        description="sum of the engines' high-water marks since their start; null on a CPU, or where none counts"
    )
    windows: dict[str, Window] = Field(description="counters by fleet, of engines that have any")
    admission: dict[str, Admission] = Field(
        default_factory=dict, description="by fleet, of an experiment that traces its schedulers"
    )
    workload: WorkloadHashes = Field(description="as replayed; what repeats answers has lengths of its own")
    requests: str = Field(description="file of the requests, relative to the folder of records")
    requests_file_sha256: Sha256
    untimed: dict[str, int] = Field(description="requests of each untimed pass before the timed one")
    untimed_failed: int = Field(ge=0, description="of those, requests that failed")
    failures: dict[str, int] = Field(description="requests that failed, by reason")
    started: str = Field(description="UTC of the timed window's start, ISO 8601")
    ended: str = Field(description="UTC, ISO 8601")
    stopped: str | None = Field(None, description="why it ended early; null where it did not")

    @property
    def case(self) -> str:
        """What is held against others: the arm, and how answers ended where an experiment has several ways."""
        return case_of(self.arm, self.stop)

    @property
    def key(self) -> tuple[str, float, int]:
        """What is measured once: case, rate, seed."""
        return self.case, self.rate, self.seed


def case_of(arm: str, stop: Stop | None) -> str:
    """``spectral_loraforge``, or ``spectral_loraforge.exact`` for one way of several to end answers."""
    return arm if stop is None else f"{arm}.{stop}"


def kept(folder: Kept, number: int, arm: str, fleet: str) -> str:
    """What the engine of a fleet leaves of a start: its file, relative to the folder of records."""
    return f"{folder}/{number:03d}-{arm}-{fleet}.{KEPT[folder]}"


def requests_file(start: int, case: str, rate: float, seed: int) -> str:
    """Where the requests of a point are, relative to the folder of records."""
    return f"requests/{start:03d}-{case}-rate{rate:g}-seed{seed}.jsonl"


SweepRecord = Annotated[SettingRecord | StartRecord | PointRecord, Field(discriminator="record")]
_RECORD: TypeAdapter[SettingRecord | StartRecord | PointRecord] = TypeAdapter(SweepRecord)


@dataclass(frozen=True)
class Sweep:
    """All records of a folder, in their order."""

    setting: SettingRecord
    starts: tuple[StartRecord, ...]
    points: tuple[PointRecord, ...]

    @property
    def complete(self) -> tuple[PointRecord, ...]:
        """The points that count: those that did not end early."""
        return tuple(point for point in self.points if point.stopped is None)


def dump(record: SettingRecord | StartRecord | PointRecord) -> dict[str, Any]:
    """A record as the plain values of its line."""
    return record.model_dump(mode="json", by_alias=True)


def parse(rows: Sequence[Any], path: Path) -> Sweep:
    """Records of plain values. Raises InputError that names the key, and for records that contradict each other."""
    records = []
    for number, row in enumerate(rows, start=1):
        try:
            records.append(_RECORD.validate_python(row))
        except ValidationError as error:
            first = error.errors()[0]
            key = ".".join(map(str, first["loc"]))
            raise InputError(
                f"line {number} is no record of an experiment: {first['msg']}",
                path=path,
                key=key or None,
                remedy="make records with loraforge bench sweep",
            ) from error
    return assemble(records, path)


def assemble(records: Sequence[SettingRecord | StartRecord | PointRecord], path: str | Path) -> Sweep:
    """Valid records as one experiment. Raises InputError where they contradict each other."""
    if not records or not isinstance(setting := records[0], SettingRecord):
        raise InputError("does not begin with a setting", path=path)
    starts = tuple(record for record in records if isinstance(record, StartRecord))
    points = tuple(record for record in records if isinstance(record, PointRecord))
    if len(starts) + len(points) + 1 != len(records):
        raise InputError("has two settings", path=path)
    sweep = Sweep(setting, starts, points)
    _check(sweep, path)
    return sweep


def _check(sweep: Sweep, path: str | Path) -> None:
    known = {start.number: start for start in sweep.starts}
    if len(known) != len(sweep.starts):
        raise InputError("numbers two starts alike", path=path, key="start.number")
    others: list[StartRecord | PointRecord] = [*sweep.starts, *sweep.points]
    for record in others:
        if record.experiment != sweep.setting.experiment:
            raise InputError(
                f"has a {record.record} of {record.experiment} in {sweep.setting.experiment}", path=path
            )
    for point in sweep.points:
        start = known.get(point.start)
        if start is None or start.arm != point.arm:
            raise InputError(f"has no start {point.start} of {point.arm}", path=path, key="point.start")
        if start.failure is not None:
            raise InputError(
                f"has a point of start {start.number}, which failed", path=path, key="point.start"
            )
        if point.figures.get("requests") != point.workload.requests:
            raise InputError(
                f"says {point.figures.get('requests')} of {point.workload.requests} requests of {point.arm} at rate "
                f"{point.rate:g}, seed {point.seed}",
                path=path,
                key="point.figures",
            )
    keys = [point.key for point in sweep.complete]
    if twice := sorted({key for key in keys if keys.count(key) > 1}):
        arm, rate, seed = twice[0]
        raise InputError(f"measures {arm} at rate {rate:g}, seed {seed}, twice", path=path)


def read_sweep(path: Path) -> Sweep:
    """Read ``records.jsonl``, or the folder that has it. Raises InputError as :func:`parse` does."""
    file = Path(path) / RECORDS if Path(path).is_dir() else Path(path)
    return parse(list(read_jsonl(file)), file)
