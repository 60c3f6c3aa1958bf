"""Run a serving experiment: an arm's engines are started once and serve all its points, arm after arm.

Engines of several arms may be started together, where starts leave cores idle; their arms take turns all the same.
Every arm replays the same hashed workloads. Around each timed window counters are read, never in it. What is measured
is appended to ``records.jsonl`` at once: a run that ends in any way leaves a folder that the same command finishes.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path

from loraforge.bench.journal import append, take_up
from loraforge.errors import InputError, UsageError
from loraforge.evidence.machine import anonymise, describe
from loraforge.files import output_error, sha256_file, sole_writer
from loraforge.progress import progress, say
from loraforge.runtime.vllm import version
from loraforge.serving import mps
from loraforge.serving.admission import admission, read_trace
from loraforge.serving.arms import Arm
from loraforge.serving.client import Options, replay
from loraforge.serving.counters import Counters, read_counters
from loraforge.serving.engines import Engine, EngineError, starting, stop_all
from loraforge.serving.experiment import Experiment
from loraforge.serving.fleets import (
    ServedFleet,
    engine_config,
    engine_version,
    interpreter,
    open_fleets,
    state,
)
from loraforge.serving.metrics import failures, summarise
from loraforge.serving.points import (
    RECORDS,
    Admission,
    EngineState,
    PointRecord,
    SettingRecord,
    StartRecord,
    Sweep,
    Window,
    WorkloadHashes,
    case_of,
    dump,
    kept,
    parse,
    requests_file,
)
from loraforge.serving.records import Run, Stop, read_run, write_run
from loraforge.serving.setting import difference
from loraforge.serving.workload import Workload, make_workload

_DISTRIBUTIONS = {"vllm": version.DISTRIBUTIONS, "sglang": ("sglang",)}
_HELD = 16  # workloads in memory: prompts are long, and each is needed once an arm


@dataclass
class Outcome:
    """How a run ended. interrupted: the signal's words, if one came. problems: points that could not be measured, and
    why. left: points of the chosen arms that remain to be measured."""

    interrupted: str | None = None
    problems: list[str] = field(default_factory=list)
    left: int = 0


def run_sweep(
    experiment: Experiment,
    root: Path,
    out: Path,
    *,
    arms: Sequence[str] | None = None,
    budget_s: float | None = None,
    python: Path | None = None,
    port_offset: int = 0,
) -> Outcome:
    """Measure the points of an experiment that ``out`` does not have yet.

    root: where the paths of the experiment start. arms: those to run, in the declared order; None for all. budget_s:
    seconds after which nothing new is begun that would, by what was measured, end later. python: interpreter that has
    the engine, in place of the declared one. port_offset: what to add to the declared ports, for sweeps side by side on
    several GPUs. An arm whose engines do not start or die is recorded so, and the next one goes on.

    Raises UsageError for an arm that is not declared, a port in use or beyond the last one and an interpreter without
    the engine, InputError for fleets that cannot be opened and for a folder of another setting, OutputError for one
    that another run uses; of an experiment with ``mps``, what :func:`loraforge.serving.mps.service` does, and MpsError
    where its daemon has ended before a start.
    """
    if python is not None:
        experiment = experiment.model_copy(update={"python": python.absolute()})
    deadline = None if budget_s is None else time.monotonic() + budget_s
    if arms is not None and not arms:
        raise UsageError("names no arm", key="--arms", remedy=f"choose from {', '.join(experiment.arms)}")
    if unknown := [name for name in arms or () if name not in experiment.arms]:
        raise UsageError(
            f"{unknown[0]!r} is no arm of {experiment.experiment}",
            key="--arms",
            remedy=f"choose from {', '.join(experiment.arms)}",
        )
    experiment.check_ports(port_offset)
    if experiment.mps:
        mps.find_tool()  # before adapters are hashed
    fleets = open_fleets(experiment, root)
    chosen = [Arm.parse(name) for name in experiment.arms if arms is None or name in arms]
    with mps.service() if experiment.mps else nullcontext() as shared, sole_writer(out):
        runner = _Runner(experiment, root, out, fleets, deadline, port_offset, shared)
        for arms_abreast in experiment.abreast_of(chosen):
            if runner.outcome.interrupted is None:
                runner.run(arms_abreast)
        runner.outcome.left = sum(len(runner.pending(arm)) for arm in chosen)
    return runner.outcome


@dataclass(frozen=True)
class _Running:
    """An arm's engines while they serve, by fleet. start: what is recorded of their start. pending: (rate, seed, stop)
    of the points to measure. traces: of their schedulers, where the experiment has any. untimed, failed: requests of
    the pass after their start."""

    arm: Arm
    start: StartRecord
    pending: Sequence[tuple[float, int, Stop]]
    engines: Mapping[str, Engine]
    counters: Mapping[str, Path]
    traces: Mapping[str, Path]
    untimed: Mapping[str, int] = field(default_factory=dict)
    failed: int = 0

    @property
    def urls(self) -> dict[str, str]:
        """Where each fleet is served."""
        return {name: engine.url for name, engine in self.engines.items()}

    @property
    def up(self) -> bool:
        """Whether its engines run: none does that did not become healthy."""
        return all(engine.pid is not None for engine in self.engines.values())


class _Runner:
    """One run into a folder."""

    def __init__(
        self,
        experiment: Experiment,
        root: Path,
        out: Path,
        fleets: Mapping[str, ServedFleet],
        deadline: float | None,
        port_offset: int,
        shared: mps.Service | None,
    ) -> None:
        self.experiment, self.root, self.out, self.fleets = experiment, root, out, fleets
        self.deadline, self.port_offset, self.shared = deadline, port_offset, shared
        self.outcome = Outcome()
        self.records = out / RECORDS
        self._adapters = {name: fleet.adapters for name, fleet in fleets.items()}
        self._drawn = lru_cache(_HELD)(self._draw)
        setting = self._setting()
        if rows := take_up(self.records):
            self.sweep = parse(rows, self.records)
            _same(self.sweep.setting, setting, self.records)
        else:
            self.sweep = Sweep(setting, (), ())
            append(self.records, dump(setting))

    def pending(self, arm: Arm) -> list[tuple[float, int, Stop]]:
        """(rate, seed, stop) of the points that are not measured yet."""
        known = {point.key for point in self.sweep.complete}
        return [
            (rate, seed, stop)
            for rate, seed in self.experiment.grid()
            for stop in self.experiment.contracts_of(arm)
            if (self._case(arm, stop), rate, seed) not in known
        ]

    def run(self, arms: Sequence[Arm]) -> None:
        """Measure what is pending of some arms, one after the other, on one start of the engines of all of them."""
        chosen = [(arm, pending) for arm in arms if (pending := self.pending(arm)) and self._fits(pending)]
        # not their count: of arms abreast, one may have had no time left for it, and the next one have
        first = max((start.number for start in self.sweep.starts), default=-1) + 1
        turns = [
            self._turn(arm, pending, first + place, arms.index(arm))
            for place, (arm, pending) in enumerate(chosen)
        ]
        if turns and self.shared is not None:
            self.shared.check()
        clock = time.monotonic()
        with starting([engine for turn in turns for engine in turn.engines.values()]):
            turns = [self._wait(turn, clock) for turn in turns]
            for turn in turns:
                if self.outcome.interrupted is None:
                    self._serve(turn, beside=[other for other in turns if other is not turn and other.up])

    def _turn(
        self, arm: Arm, pending: Sequence[tuple[float, int, Stop]], number: int, place: int
    ) -> _Running:
        """An arm's engines, which are to be started. place: of the arm among those abreast, which tells ports apart."""
        states = {name: state(self.experiment, fleet, arm) for name, fleet in self.fleets.items()}
        counters = {name: self.out / kept("counters", number, arm.name, name) for name in self.fleets}
        traces = {name: self.out / kept("traces", number, arm.name, name) for name in self.fleets}
        traces = traces if self.experiment.trace else {}
        for file in (*counters.values(), *traces.values()):
            _make_way(file)
        engines = {
            name: self._engine(
                fleet,
                arm,
                states[name],
                self.port_offset + place,
                counters[name],
                traces.get(name),
                self.out / kept("logs", number, arm.name, name),
            )
            for name, fleet in self.fleets.items()
        }
        start = StartRecord(
            experiment=self.experiment.experiment,
            arm=arm.name,
            number=number,
            started=_now(),
            healthy_s=None,
            engines=states,
            gpus=os.environ.get("CUDA_VISIBLE_DEVICES"),
        )
        say(f"{arm}: start {', '.join(f'{name} {_words(states[name])}' for name in engines)}")
        return _Running(arm, start, pending, engines, counters, traces)

    def _wait(self, turn: _Running, clock: float) -> _Running:
        """Wait until an arm's engines are healthy; end those of one where any is not. clock: when they were started."""
        try:
            for engine in turn.engines.values():
                engine.wait_healthy()
        except EngineError as error:
            stop_all(list(turn.engines.values()))
            self.outcome.problems.append(f"{turn.arm}: {error}")
            reason = anonymise(error.problem.partition("; the end of ")[0])
            return replace(turn, start=turn.start.model_copy(update={"failure": reason}))
        healthy_s = time.monotonic() - clock
        say(f"{turn.arm}: healthy after {healthy_s:.1f} s")
        engines = {
            name: known.model_copy(update={"counters": read_counters(turn.counters[name])})
            for name, known in turn.start.engines.items()
        }
        return replace(turn, start=turn.start.model_copy(update={"healthy_s": healthy_s, "engines": engines}))

    def _serve(self, turn: _Running, beside: Sequence[_Running]) -> None:
        """Record a start, and measure on it. beside: arms whose engines are up too, and idle."""
        start = turn.start.model_copy(update={"beside": tuple(other.arm.name for other in beside)})
        if not turn.up:
            self._add(start)
            return
        if not self._has_time(self._pass_s() + self._least_s(turn.pending)):
            return
        trouble = _inactive(turn.arm, start.engines) or self._trouble(turn.engines)
        if trouble is None:
            turn, trouble = self._condition(turn)
        self._add(start.model_copy(update={"failure": trouble}))
        if trouble is not None:
            self._note(f"{turn.arm}: {trouble}")
        elif self._measure(turn):
            return
        stop_all(list(turn.engines.values()))  # not to be idle beside the next one

    def _measure(self, running: _Running) -> bool:
        """Measure the points; whether none ended early."""
        for rate, seed, stop in running.pending:
            if not self._has_time(self._point_s(rate)):
                return True
            try:
                workload = self._workload(rate, seed, stop)
            except InputError as error:
                case = self._case(running.arm, stop)
                self.outcome.problems.append(f"{case} at rate {rate:g}, seed {seed}: {error}")
                continue
            point = self._point(running, workload, stop)
            self._add(point)
            say(_line(point))
            if point.stopped is not None:
                self._note(point.stopped)
                return False
        return True

    def _note(self, stopped: str) -> None:
        if "interrupted by " in stopped:
            self.outcome.interrupted = stopped[stopped.index("interrupted by ") :]
        else:
            self.outcome.problems.append(stopped)

    def _point(self, running: _Running, workload: Workload, stop: Stop) -> PointRecord:
        arm, case = running.arm, self._case(running.arm, stop)
        hashes = _hashes(workload)
        before: dict[str, Counters | None] = {}
        with progress(f"{case} rate {hashes.rate:g} seed {hashes.seed}", hashes.requests) as ticker:
            run = replay(
                workload,
                running.urls,
                self._options(arm, stop),
                warmup=self.experiment.warmup,
                conditioning=self.experiment.conditioning == "point",
                before=lambda: before.update(_snapshot(running.counters)),
                ticker=ticker,
            )
        ended = _now()
        after = _snapshot(running.counters)
        windows = {
            name: _window(first, last)
            for name, first in before.items()
            if first is not None and (last := after[name]) is not None
        }
        counted = len(windows) == len(running.engines)
        peaks = [window.after.peak_allocated_bytes for window in windows.values()]
        stopped = run.run.ended or self._trouble(running.engines)
        admitted, untraced = _admissions(running.traces, run.run.started, ended)
        name = requests_file(running.start.number, case, hashes.rate, hashes.seed)
        write_run(self.out / name, run)
        return PointRecord(
            experiment=self.experiment.experiment,
            arm=arm.name,
            rate=hashes.rate,
            seed=hashes.seed,
            stop=stop if self.experiment.stops else None,
            start=running.start.number,
            figures=summarise(run),
            fleets={name: summarise(_of_fleet(run, name)) for name in running.engines},
            loads=sum(window.loads for window in windows.values()) if counted else None,
            source_bytes=sum(window.source_bytes for window in windows.values()) if counted else None,
            pool_bytes=sum(window.after.lora_bytes for window in windows.values()) if counted else None,
            peak_allocated_bytes=sum(peak for peak in peaks if peak is not None)
            if counted and None not in peaks
            else None,
            windows=windows,
            admission=admitted,
            workload=hashes,
            requests=name,
            requests_file_sha256=sha256_file(self.out / name),
            untimed={**running.untimed, **run.run.untimed},
            untimed_failed=running.failed + run.run.untimed_failed,
            failures=failures(run.requests),
            started=run.run.started,
            ended=ended,
            stopped=stopped or untraced,
        )

    def _condition(self, running: _Running) -> tuple[_Running, str | None]:
        """Make the pass after a start, if there is to be one; and what went wrong."""
        if self.experiment.conditioning != "start":
            return running, None
        workload = self._drawn(*self._heaviest())
        stop = self.experiment.contracts_of(running.arm)[0]
        run = replay(workload, running.urls, self._options(running.arm, stop))
        passed = replace(
            running,
            untimed={"conditioning at the start": len(run.requests)},
            failed=sum(failures(run.requests).values()),
        )
        return passed, run.run.ended or self._trouble(running.engines)

    def _trouble(self, engines: Mapping[str, Engine]) -> str | None:
        """Which engine no longer serves, or does not share its GPU as declared, and why; None where all do."""
        for name, engine in engines.items():
            if (reason := engine.trouble()) is not None:
                return f"the engine of {name} {reason}"
        return None if self.shared is None else self.shared.trouble()

    def _case(self, arm: Arm, stop: Stop) -> str:
        return case_of(arm.name, stop if self.experiment.stops else None)

    def _options(self, arm: Arm, stop: Stop) -> Options:
        caps = {name: fleet.config.cap_tokens for name, fleet in self.fleets.items()}
        return Options(
            engine=self.experiment.engine,
            stop=stop,
            base_only=arm.weights is None,
            timeout_s=self.experiment.timeout_s,
            caps={name: cap for name, cap in caps.items() if cap is not None} if stop == "early" else {},
            copies=arm.copies,
        )

    def _workload(self, rate: float, seed: int, stop: Stop) -> Workload:
        """What is replayed under a contract. Raises InputError where it is to repeat answers that are not there, or
        were changed."""
        if not self.experiment.repeats(stop):
            return self._drawn(rate, seed)
        key = (self._case(Arm.parse(self.experiment.lengths_of), "natural"), rate, seed)
        answered = next((point for point in self.sweep.complete if point.key == key), None)
        if answered is None:
            raise InputError(f"repeats the lengths of {key[0]}, which is not measured there")
        file = self.out / answered.requests
        if sha256_file(file) != answered.requests_file_sha256:
            raise InputError("is not what was measured", path=file, remedy="put the file back as it was")
        outputs = read_run(file).outputs()
        return self._draw(rate, seed, outputs, answered.requests_file_sha256)

    def _draw(
        self,
        rate: float,
        seed: int,
        outputs: Mapping[int, int] | None = None,
        source: str | None = None,
    ) -> Workload:
        requests = self.experiment.point(rate).requests
        load = self.experiment.load(requests, self._adapters, self.root)
        return make_workload(load, seed, rate, outputs, source)

    def _setting(self) -> SettingRecord:
        experiment = self.experiment
        if all(fleet.config.command is not None for fleet in self.fleets.values()):
            engine = "declared command"
        else:
            engine = engine_version(interpreter(experiment, self.root), _DISTRIBUTIONS[experiment.engine])
        return SettingRecord(
            experiment=experiment.experiment,
            protocol=experiment.protocol,
            config=experiment.model_dump(mode="json", exclude={"python"}),  # whose version is stated
            engine=engine,
            host=describe(),
            arms=experiment.arms,
            workloads=tuple(_hashes(self._drawn(rate, seed)) for rate, seed in experiment.grid()),
            adapters={
                name: {kind: dict(served.hashes) for kind, served in fleet.weights.items()}
                for name, fleet in self.fleets.items()
            },
        )

    def _engine(
        self,
        fleet: ServedFleet,
        arm: Arm,
        planned: EngineState,
        port_offset: int,
        counters: Path,
        trace: Path | None,
        log: Path,
    ) -> Engine:
        config = engine_config(self.experiment, fleet, arm, planned, self.root, counters, trace, port_offset)
        if self.shared is not None:
            config = config.model_copy(update={"env": {**config.env, **self.shared.environment}})
        if (declared := fleet.config.command) is None:
            return Engine.of(config, log, start_s=self.experiment.start_s)
        line = [part.replace("{port}", str(config.port)).replace("{arm}", arm.name) for part in declared]
        return Engine(line, port=config.port, log=log, env=config.env, start_s=self.experiment.start_s)

    def _add(self, record: StartRecord | PointRecord) -> None:
        append(self.records, dump(record))
        if isinstance(record, StartRecord):
            self.sweep = Sweep(self.sweep.setting, (*self.sweep.starts, record), self.sweep.points)
        else:
            self.sweep = Sweep(self.sweep.setting, self.sweep.starts, (*self.sweep.points, record))

    def _fits(self, pending: Sequence[tuple[float, int, Stop]]) -> bool:
        """Whether there is time for a start and a point."""
        return self._has_time(self._start_s() + self._least_s(pending))

    def _has_time(self, needed_s: float) -> bool:
        return self.deadline is None or time.monotonic() + needed_s <= self.deadline

    def _start_s(self) -> float:
        """Seconds that a start will take, with the pass after it: the longest so far."""
        return max((start.healthy_s or 0.0 for start in self.sweep.starts), default=0.0) + self._pass_s()

    def _pass_s(self) -> float:
        """Seconds that the pass after a start will take."""
        return self._wall_s(self._heaviest()[0]) if self.experiment.conditioning == "start" else 0.0

    def _least_s(self, pending: Sequence[tuple[float, int, Stop]]) -> float:
        """Seconds that the shortest of some points will take."""
        return min(self._point_s(rate) for rate, *_ in pending)

    def _point_s(self, rate: float) -> float:
        """Seconds that a point will take, with the pass before it."""
        return self._wall_s(rate) * (2 if self.experiment.conditioning == "point" else 1)

    def _wall_s(self, rate: float) -> float:
        """Seconds of a replay: the longest so far at its rate, or else until the last request of one is sent."""
        known = [point.figures["wall_s"] or 0.0 for point in self.sweep.complete if point.rate == rate]
        return (
            max(known)
            if known
            else self._drawn(rate, self.experiment.point(rate).seeds[0]).requests[-1].arrival_s
        )

    def _heaviest(self) -> tuple[float, int]:
        """Rate and seed of the pass after a start."""
        return max(self.experiment.grid(), key=lambda key: key[0])


def _same(stored: SettingRecord, wanted: SettingRecord, path: Path) -> None:
    """Raise InputError where a folder was made with another setting, or on another kind of machine."""
    if (found := difference(stored, wanted)) is not None:
        raise InputError(
            f"was {found.one} when this folder was begun, and is {found.other}",
            path=path,
            key=found.key,
            remedy="finish it with the setting it has, or choose another folder",
        )


def _make_way(file: Path) -> None:
    """Make the folder of a file, and remove that of a run that was killed before it recorded this start."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.unlink(missing_ok=True)
    except OSError as error:
        raise output_error(error, file) from error


def _snapshot(counters: Mapping[str, Path]) -> dict[str, Counters | None]:
    return {name: read_counters(path) for name, path in counters.items()}


def _window(before: Counters, after: Counters) -> Window:
    return Window(
        loads=after.loads - before.loads,
        unloads=after.unloads - before.unloads,
        source_bytes=after.source_bytes - before.source_bytes,
        moves=after.moves - before.moves,
        after=after,
    )


def _of_fleet(run: Run, fleet: str) -> Run:
    return Run(run=run.run, requests=tuple(request for request in run.requests if request.fleet == fleet))


def _admissions(
    traces: Mapping[str, Path], started: str, ended: str
) -> tuple[dict[str, Admission], str | None]:
    """What each scheduler admitted in a timed window; or why that is not known."""
    try:
        return {name: admission(read_trace(path), started, ended) for name, path in traces.items()}, None
    except InputError as error:
        return {}, error.problem


def _inactive(arm: Arm, engines: Mapping[str, EngineState]) -> str | None:
    """Which engine of an arm that LoRAForge is to execute does not say that it does; None where all do, or need not."""
    if arm.execution == "loraforge":
        for name, engine in engines.items():
            if engine.counters is None or engine.counters.execution != "loraforge":
                return f"LoRAForge is not active in the engine of {name}: install loraforge beside it"
    return None


def _hashes(workload: Workload) -> WorkloadHashes:
    header = workload.header
    return WorkloadHashes(
        rate=header["rate"],
        seed=header["seed"],
        requests=header["count"],
        **{key: header[key] for key in ("sha256", "requests_sha256", "arrivals_sha256", "outputs_sha256")},
    )


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def _words(planned: EngineState) -> str:
    if planned.slots is None:
        return "without adapters"
    pool = "" if planned.pool_bytes is None else f", {planned.pool_bytes / 1e9:.2f} GB"
    return f"({planned.slots} slots of rank {planned.max_rank}{pool})"


def _line(point: PointRecord) -> str:
    def show(key: str, form: str) -> str:
        value = point.figures[key]
        return "-" if value is None else format(value, form)

    loads = "" if point.loads is None else f", {point.loads} loads"
    stopped = "" if point.stopped is None else f"; STOPPED: {point.stopped}"
    return (
        f"{point.case} rate {point.rate:g} seed {point.seed}: {show('tok_s', '.1f')} tok/s, "
        f"TTFT P50 {show('ttft_p50_s', '.3f')} s, TPOT P99 {show('tpot_p99_ms', '.1f')} ms, "
        f"{show('failed', '.0f')} failed{loads}, {show('wall_s', '.1f')} s{stopped}"
    )
