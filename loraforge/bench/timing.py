"""Times of device work by CUDA-graph replay: interleaved blocks, warm and cache-flushed, and the floors beneath them.

A warm sample is one replay of a graph of several launches, right behind another replay of it, divided by their
number: launches on one stream follow each other as kernels of a captured step do. A flushed sample is the median of
three replays of a graph of one launch, each behind a fill of at least twice the L2 cache and a reset of the outputs,
both outside the interval between the events.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

GRAPH_US = 150.0  # what a graph of many launches should take: long beside the gap between two replays
MAX_LAUNCHES = 40
BLOCKS = 5
FLUSHES = 3


@dataclass
class Samples:
    """Microseconds a launch, one number a block."""

    warm: list[float] = field(default_factory=list)
    flushed: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Subject:
    """``run`` enqueues the work on the current stream and must be capturable; ``reset`` restores its outputs."""

    run: Callable[[], object]
    reset: Callable[[], object]


class GraphTimer:
    """Times subjects on one device. Keeps a buffer of twice the L2 cache, and captures on a stream of its own."""

    def __init__(self, device: torch.device) -> None:
        properties = torch.cuda.get_device_properties(device)
        self._flush = torch.empty(2 * properties.L2_cache_size + (1 << 20), dtype=torch.int8, device=device)
        self._stream = torch.cuda.Stream(device)

    def measure(
        self,
        subjects: Mapping[str, Subject],
        seed: int,
        *,
        blocks: int = BLOCKS,
        flushed: bool = True,
    ) -> dict[str, Samples]:
        """Samples of each subject: ``blocks`` blocks, every one over all subjects in a random order of its own."""
        captured = {name: self._prepare(subject, flushed) for name, subject in subjects.items()}
        pending: list[tuple[str, bool, list[tuple[torch.cuda.Event, torch.cuda.Event]]]] = []
        order = random.Random(seed)
        with torch.cuda.stream(self._stream):
            for _ in range(blocks):
                for name in order.sample(list(captured), len(captured)):
                    graph, single, _ = captured[name]
                    subjects[name].reset()
                    graph.replay()
                    pending.append((name, False, [_interval(graph)]))
                    if single is not None:
                        pending.append(
                            (name, True, [self._cold(subjects[name], single) for _ in range(FLUSHES)])
                        )
            self._stream.synchronize()
        found = {name: Samples() for name in subjects}
        for name, cold, intervals in pending:
            times = [start.elapsed_time(end) * 1e3 for start, end in intervals]
            if cold:
                found[name].flushed.append(statistics.median(times))
            else:
                found[name].warm.append(times[0] / captured[name][2])
        return found

    def run(self, subject: Subject) -> None:
        """Once, eagerly, on the stream of the captures, and wait."""
        with torch.cuda.stream(self._stream):
            subject.run()
        self._stream.synchronize()

    def replay_once(self, subject: Subject) -> None:
        """Once, from a graph captured for it, and wait."""
        graph = self._capture(subject.run, 1)
        with torch.cuda.stream(self._stream):
            graph.replay()
        self._stream.synchronize()

    def _prepare(
        self, subject: Subject, flushed: bool
    ) -> tuple[torch.cuda.CUDAGraph, torch.cuda.CUDAGraph | None, int]:
        pilot = self._capture(subject.run, 2)
        with torch.cuda.stream(self._stream):
            pilot.replay()
            start, end = _interval(pilot)
            end.synchronize()
        each = max(1e-3, start.elapsed_time(end) * 1e3 / 2)
        launches = int(min(MAX_LAUNCHES, max(2, GRAPH_US // each)))
        graph = pilot if launches == 2 else self._capture(subject.run, launches)
        return graph, self._capture(subject.run, 1) if flushed else None, launches

    def _capture(self, run: Callable[[], object], launches: int) -> torch.cuda.CUDAGraph:
        """Not by ``torch.cuda.graph``, which collects garbage and empties caches at every entry."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            graph.capture_begin()
            try:
                for _ in range(launches):
                    run()
            finally:
                graph.capture_end()
        return graph

    def _cold(
        self, subject: Subject, graph: torch.cuda.CUDAGraph
    ) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        subject.reset()
        self._flush.fill_(0)
        return _interval(graph)


def _interval(graph: torch.cuda.CUDAGraph) -> tuple[torch.cuda.Event, torch.cuda.Event]:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()
    graph.replay()
    end.record()
    return start, end


@dataclass(frozen=True)
class Floors:
    """bytes_per_us: of a large copy, read and written. launch_us: of an empty kernel in a replayed graph, warm;
    flushed_us: the same measured as a flushed sample, whose interval holds the start of a graph."""

    bytes_per_us: float
    launch_us: float
    flushed_us: float

    def floor_us(self, moved: int, launches: int = 1) -> float:
        """The least that work which moves so many bytes in so many launches can take."""
        return max(moved / self.bytes_per_us, launches * self.launch_us)


def measure_floors(timer: GraphTimer, device: torch.device) -> Floors:
    """Copy bandwidth over 1 GiB, and the launch of an empty Triton kernel."""
    import triton

    source = torch.zeros(1 << 28, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    empty = triton.jit(_empty)
    subjects = {
        "copy": Subject(lambda: target.copy_(source), lambda: None),
        "empty": Subject(lambda: empty[(1,)](), lambda: None),
    }
    for subject in subjects.values():
        timer.run(subject)
    found = timer.measure(subjects, 0)
    moved = 2 * source.numel() * source.element_size()
    return Floors(
        moved / statistics.median(found["copy"].warm),
        statistics.median(found["empty"].warm),
        statistics.median(found["empty"].flushed),
    )


def _empty() -> None:
    """The body of the empty kernel."""


def poison(*outputs: Tensor) -> None:
    """NaN everywhere, so that an element which is not written shows."""
    for output in outputs:
        output.fill_(float("nan"))


def medians(samples: Sequence[float]) -> float:
    """The median, rounded to a nanosecond as records state it."""
    return round(statistics.median(samples), 3)
