"""A serving experiment as declared in YAML: fleets, arms, points, and how they are measured (paper 6.4, 6.5, B)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Literal

import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from loraforge.config import Layout
from loraforge.errors import InputError, UsageError
from loraforge.evidence.machine import Protocol
from loraforge.serving.arms import Arm, Execution, Weights
from loraforge.serving.mps import GPUS, PIPES
from loraforge.serving.records import Stop
from loraforge.serving.workload import Even, FleetLoad, Lengths, LoadSpec, Vocabulary, Zipf


def _arm(name: str) -> str:
    try:
        return Arm.parse(name).name
    except UsageError as error:
        raise ValueError(str(error)) from error


def _once(items: Sequence[object], what: str) -> None:
    for item in items:
        if items.count(item) > 1:
            raise ValueError(f"names {what} {item} twice")


def _file_name(name: str) -> str:
    if not name or any(character in name for character in "/\\\0"):
        raise ValueError(f"{name!r} cannot be part of a file's name")
    return name


_LAST_PORT = 65535
ArmName = Annotated[str, AfterValidator(_arm)]
FleetName = Annotated[str, AfterValidator(_file_name)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class FleetConfig(_Strict):
    """One fleet and its engine. Paths are relative to the root that the runner is given."""

    base: Path = Field(description="folder of the base model")
    adapters: dict[Weights, Path] = Field(
        min_length=1,
        description="weights -> folder of PEFT adapters, or of a compressed fleet; the same names in each",
    )
    only: tuple[str, ...] | None = Field(None, min_length=1, description="names to serve; null: all")
    layout: Layout = Field("padded", description="layout to serve of a compressed fleet")
    budget_gib: float | None = Field(
        None, gt=0, description="device memory for adapters; null: as much as all of them need"
    )
    max_rank: int | None = Field(
        None,
        ge=1,
        description="rank that native buffers are made for; null: the least that loads the weights",
    )
    port: Annotated[int, Field(ge=1, le=_LAST_PORT)] = Field(
        description="where its engine answers; of arms abreast, the second's at the next one, and so on"
    )
    context: int = Field(ge=1, description="longest prompt and answer, tokens")
    running: int = Field(256, ge=1, description="requests that run at once")
    kv_tokens: int | None = Field(None, ge=1, description="KV capacity; null: as the engine likes")
    kv_block: int = Field(16, ge=1, description="tokens of a KV block, which divide kv_tokens; 32 on a CPU")
    vocabulary: Vocabulary | None = Field(None, description="prompts of drawn token ids")
    prompts: Path | None = Field(
        None, description="or a file of prompts, or one an adapter, with {adapter} for its name"
    )
    output_tokens: Lengths = Field(description="exact lengths, or caps of a natural stop")
    cap_tokens: int | None = Field(
        None, ge=1, description="what requests declare under a stop that is early: no less than any length"
    )
    share: float | None = Field(None, gt=0, description="part of the requests, under Zipf popularity")
    extra: tuple[str, ...] = Field((), description="further arguments of the engine")
    env: dict[str, str] = Field(default_factory=dict, description="environment of the engine")
    command: tuple[str, ...] | None = Field(
        None, min_length=1, description="command line in place of the engine's; {port}, {arm} stand for both"
    )

    @model_validator(mode="after")
    def _whole_blocks(self) -> FleetConfig:
        if self.kv_tokens is not None and self.kv_tokens % self.kv_block:
            raise ValueError(f"kv_tokens {self.kv_tokens} is no multiple of kv_block {self.kv_block}")
        return self


class Points(_Strict):
    """Points at one offered rate."""

    rate: float = Field(gt=0, description="offered requests a second")
    requests: int = Field(ge=1, description="of each adapter; under Zipf popularity, of all")
    seeds: tuple[int, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _seeds_differ(self) -> Points:
        _once(self.seeds, "seed")
        return self


class EvenPopularity(_Strict):
    """As many requests of each adapter (paper: 20)."""

    kind: Literal["even"] = "even"


class ZipfPopularity(_Strict):
    """The i-th adapter of a drawn order has weight i**-s; s = 0 is uniform."""

    kind: Literal["zipf"]
    s: float = Field(ge=0, le=10)


class Experiment(_Strict):
    """What ``loraforge bench sweep`` reads."""

    experiment: str = Field(pattern=r"^[a-z][a-z0-9_]*$")
    protocol: Protocol
    engine: Literal["vllm", "sglang"]
    python: Path | None = Field(None, description="interpreter that has the engine; null: the runner's own")
    fleets: dict[FleetName, FleetConfig] = Field(min_length=1, description="co-located, one engine each")
    arms: tuple[ArmName, ...] = Field(min_length=1, description="in the order in which they take turns")
    abreast: int = Field(
        1,
        ge=1,
        description="arms whose engines are started together; they take turns all the same, and the others idle",
    )
    mps: bool = Field(
        False,
        description="whether engines that share a GPU do so by CUDA's multi-process service, so that their kernels run"
        " side by side, and not in time slices",
    )
    points: tuple[Points, ...] = Field(min_length=1)
    popularity: EvenPopularity | ZipfPopularity = Field(default_factory=EvenPopularity, discriminator="kind")
    stop: Stop = "exact"
    stops: tuple[Stop, ...] | None = Field(
        None,
        min_length=1,
        description="measure each point under each of these, in this order, on one start; null: under `stop` alone",
    )
    lengths_of: ArmName = Field(
        "spectral_loraforge", description="under a natural stop, the arm whose answers base_only repeats"
    )
    warmup: int = Field(0, ge=0, description="requests before each point, not recorded")
    conditioning: Literal["never", "start", "point"] = Field(
        "point",
        description="a whole untimed pass: before each point, or once after a start, of its heaviest load",
    )
    decode_steps: int = Field(
        0, ge=0, description="decode steps that defer admissions after a prefill, in every arm (paper B.1)"
    )
    trace: bool = Field(False, description="record what the schedulers admit, in every arm (paper B.7)")
    pool: Literal["ragged", "shadow"] = Field("ragged", description="of the arms that LoRAForge executes")
    lora_backends: dict[Execution, str] = Field(
        {"native": "csgmv", "loraforge": "loraforge"}, description="SGLang's name of each execution"
    )
    timeout_s: float = Field(600.0, gt=0, description="that a request may take")
    start_s: float = Field(600.0, gt=0, description="that engines may take to become healthy")
    extra: tuple[str, ...] = Field((), description="further arguments of every engine")
    env: dict[str, str] = Field(default_factory=dict, description="environment of every engine")

    @model_validator(mode="after")
    def _fits(self) -> Experiment:
        _once(self.arms, "arm")
        _once([f"{points.rate:g}" for points in self.points], "rate")  # as files and summaries have it
        if self.abreast > len(self.arms):
            raise ValueError(f"has {len(self.arms)} arms, of which {self.abreast} cannot be abreast")
        ports = [fleet.port + place for fleet in self.fleets.values() for place in range(self.abreast)]
        _once(ports, "port")
        if (highest := max(ports)) > _LAST_PORT:
            raise ValueError(f"needs port {highest}, and {_LAST_PORT} is the last one")
        parsed = [Arm.parse(name) for name in self.arms]
        for name, fleet in self.fleets.items():
            for arm in parsed:
                if arm.weights is not None and arm.weights not in fleet.adapters:
                    raise ValueError(f"fleet {name} has no {arm.weights} weights, which arm {arm} serves")
        if self.mps:
            self._fits_mps()
        _once(self.contracts, "stop")
        repeating = [arm.name for arm in parsed if any(map(self.repeats, self.contracts_of(arm)))]
        if repeating:
            order = {name: place for place, name in enumerate(self.arms)}
            if order.get(self.lengths_of, len(order)) > min(map(order.__getitem__, repeating)):
                raise ValueError(
                    f"{repeating[0]} repeats the lengths of {self.lengths_of}, which has to precede it"
                )
            if self.contracts[0] != "natural":
                raise ValueError(f"{self.contracts[0]} repeats natural lengths, which have to precede it")
        if "early" in self.contracts:
            self._fits_early()
        return self

    def _fits_mps(self) -> None:
        if self.protocol == "cpu":
            raise ValueError("mps is for engines on GPUs, and protocol cpu has none")
        fleets = {f"fleet {name}": fleet.env for name, fleet in self.fleets.items()}
        for where, env in {"env": self.env, **fleets}.items():
            if declared := sorted({PIPES, GPUS} & set(env)):
                raise ValueError(f"{where} declares {declared[0]}, which mps sets for every engine")

    def _fits_early(self) -> None:
        if self.engine != "sglang":
            raise ValueError("stop early is for SGLang, whose plugin ends answers before their cap")
        for name, fleet in self.fleets.items():
            longest = fleet.output_tokens.longest
            if fleet.cap_tokens is None or fleet.cap_tokens < longest:
                raise ValueError(f"fleet {name} needs a cap_tokens of at least {longest} for stop early")

    @property
    def contracts(self) -> tuple[Stop, ...]:
        """How answers end, each for all points."""
        return self.stops or (self.stop,)

    def contracts_of(self, arm: Arm) -> tuple[Stop, ...]:
        """Those of an arm: the base model's natural answers are of other lengths than those of adapters, so that it
        repeats theirs."""
        if arm.weights is not None or "natural" not in self.contracts:
            return self.contracts
        return tuple(stop for stop in self.contracts if stop != "natural") or ("exact",)

    def repeats(self, stop: Stop) -> bool:
        """Whether lengths under a contract are those that ``lengths_of`` had by itself."""
        return stop != "natural" and "natural" in self.contracts

    def abreast_of(self, chosen: Sequence[Arm]) -> Iterator[tuple[Arm, ...]]:
        """Those of the chosen arms that are started together, in their order. Which belong together is declared: it is
        the same whatever is chosen."""
        for first in range(0, len(self.arms), self.abreast):
            together = self.arms[first : first + self.abreast]
            if found := tuple(arm for arm in chosen if arm.name in together):
                yield found

    def check_ports(self, offset: int) -> None:
        """Raise UsageError where the declared ports, each so much higher, are none."""
        highest = max(fleet.port for fleet in self.fleets.values()) + self.abreast - 1 + offset
        if highest > _LAST_PORT:
            raise UsageError(
                f"needs port {highest}, and {_LAST_PORT} is the last one",
                key="--port-offset",
                remedy="choose a smaller one",
            )

    def point(self, rate: float) -> Points:
        """The points at a rate that is declared."""
        return next(points for points in self.points if points.rate == rate)

    def grid(self) -> Iterator[tuple[float, int]]:
        """(rate, seed) of each workload, in order."""
        for points in self.points:
            for seed in points.seeds:
                yield points.rate, seed

    def load(self, requests: int, adapters: dict[str, tuple[str, ...]], root: Path) -> LoadSpec:
        """The declared load of one rate. adapters: names of each fleet."""
        return LoadSpec(
            fleets={
                name: FleetLoad(
                    adapters=adapters[name],
                    vocabulary=fleet.vocabulary,
                    prompts=None if fleet.prompts is None else root / fleet.prompts,
                    output_tokens=fleet.output_tokens,
                    share=fleet.share,
                )
                for name, fleet in self.fleets.items()
            },
            popularity=Zipf(kind="zipf", requests=requests, s=self.popularity.s)
            if isinstance(self.popularity, ZipfPopularity)
            else Even(kind="even", requests=requests),
        )


def load_experiment(path: Path) -> Experiment:
    """Read a declared experiment. Raises InputError that names the file and the key."""
    try:
        return Experiment.model_validate(yaml.safe_load(Path(path).read_text(encoding="utf-8")))
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot be read ({error})", path=path) from error
    except yaml.YAMLError as error:
        raise InputError(f"not YAML ({' '.join(str(error).split())})", path=path) from error
    except ValidationError as error:
        first = error.errors()[0]
        raise InputError(
            first["msg"],
            path=path,
            key=".".join(map(str, first["loc"])) or None,
            remedy="see docs/serving_experiments.md",
        ) from error
