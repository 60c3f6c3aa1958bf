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

GRAPH_US = 100.0  # what a graph of many launches should take: long beside the gap between two replays
MAX_LAUNCHES = 20
BLOCKS = 5
FLUSHES = 3


_Interval = tuple[torch.cuda.Event, torch.cuda.Event]


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


@dataclass(frozen=True)
class Captured:
    """Graphs of a subject: ``many`` of ``launches`` runs, ``single`` of one."""

    subject: Subject
    many: torch.cuda.CUDAGraph
    single: torch.cuda.CUDAGraph
    launches: int


class GraphTimer:
    """Times subjects on one device. Keeps a buffer of twice the L2 cache, and captures on a stream of its own."""

    def __init__(
        self, device: torch.device, max_launches: int = MAX_LAUNCHES, graph_us: float = GRAPH_US
    ) -> None:
        self._max_launches, self._graph_us = max_launches, graph_us
        properties = torch.cuda.get_device_properties(device)
        self._flush = torch.empty(2 * properties.L2_cache_size + (1 << 20), dtype=torch.int8, device=device)
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        # one for all graphs, which never run at once: each of its own would reserve addresses for good. It lasts as
        # long as some graph has it, so one is kept that does nothing of use
        self._pool = torch.cuda.graph_pool_handle()
        with torch.cuda.stream(self._stream):
            self._keeper = self._graph(lambda: self._flush[:1].zero_(), 1)

    def capture(self, subject: Subject, before: Callable[[], object] = lambda: None) -> Captured:
        """Run once, which compiles and allocates what is kept, and capture. ``before`` comes right before the last
        replay here, that of ``single``, whose outputs are then those of the subject."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            subject.run()
            subject.reset()
            pilot = self._graph(subject.run, 1)
            pilot.replay()
            start, end = _interval(pilot)
            end.synchronize()
            each = max(1.0, start.elapsed_time(end) * 1e3)
            launches = int(min(self._max_launches, max(2, self._graph_us // each)))
            many = self._graph(subject.run, launches)
            single = self._graph(subject.run, 1)  # last: its outputs are what ``subject`` holds
            before()
            single.replay()
        self._stream.synchronize()
        return Captured(subject, many, single, launches)

    def measure(
        self, captured: Mapping[str, Captured], seed: int, *, blocks: int = BLOCKS, flushed: bool = True
    ) -> dict[str, Samples]:
        """Samples of each: ``blocks`` blocks, every one over all of them in a random order of its own."""
        pending: list[tuple[str, list[_Interval]]] = []
        order = random.Random(seed)
        with torch.cuda.stream(self._stream):
            for _ in range(blocks):
                for name in order.sample(list(captured), len(captured)):
                    item = captured[name]
                    item.subject.reset()
                    item.many.replay()
                    taken = [_interval(item.many)]
                    if flushed:
                        taken += [self._cold(item) for _ in range(FLUSHES)]
                    pending.append((name, taken))
            self._stream.synchronize()
        found = {name: Samples() for name in captured}
        for name, taken in pending:
            warm, *cold = [start.elapsed_time(end) * 1e3 for start, end in taken]
            found[name].warm.append(warm / captured[name].launches)
            if cold:
                found[name].flushed.append(statistics.median(cold))
        return found

    def _graph(self, run: Callable[[], object], launches: int) -> torch.cuda.CUDAGraph:
        """Not by ``torch.cuda.graph``, which collects garbage and empties caches at every entry."""
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(pool=self._pool)
        try:
            for _ in range(launches):
                run()
        finally:
            graph.capture_end()
        return graph

    def _cold(self, item: Captured) -> _Interval:
        item.subject.reset()
        self._flush.fill_(0)
        return _interval(item.single)


def _interval(graph: torch.cuda.CUDAGraph) -> _Interval:
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
    found = timer.measure({name: timer.capture(subject) for name, subject in subjects.items()}, 0)
    moved = 2 * source.numel() * source.element_size()
    return Floors(
        moved / statistics.median(found["copy"].warm),
        statistics.median(found["empty"].warm),
        statistics.median(found["empty"].flushed),
    )


def _empty() -> None:
    """The body of the empty kernel."""


def median(samples: Sequence[float]) -> float:
    """The median, rounded to a nanosecond as records state it."""
    return round(statistics.median(samples), 3)
