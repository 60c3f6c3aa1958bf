"""Clocks on a device, and the rates that floors are stated in."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from loraforge.factor.stages import Stages


class EventStages(Stages):
    """Stages by CUDA events on the current stream; ``seconds`` is filled by :meth:`collect`."""

    def __init__(self) -> None:
        super().__init__()
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        yield
        end.record()
        self._events.append((name, start, end))

    def collect(self) -> dict[str, float]:
        for name, start, end in self._events:
            self.seconds[name] = self.seconds.get(name, 0.0) + start.elapsed_time(end) / 1e3
        return self.seconds


def copy_rate(device: torch.device) -> float:
    """Bytes a second, read and written, of a large copy on the device: the best of five."""
    source = torch.empty(1 << 30, dtype=torch.float32, device=device).zero_()
    target = torch.empty_like(source)
    return 2 * 4 * source.numel() / _best(lambda: target.copy_(source))


def product_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Operations a second of a large matrix product of random numbers: the best of five. FP64 runs on the tensor
    cores, FP32 on the FMA units unless the process allows TF32, which torch does not by itself."""
    n = 8192
    left = torch.randn(n, n, dtype=dtype, device=device)
    out = torch.empty_like(left)
    return 2.0 * n**3 / _best(lambda: torch.mm(left, left, out=out))


def _best(work: Callable[[], object]) -> float:
    work()
    times = []
    for _ in range(5):
        stages = EventStages()
        with stages("work"):
            work()
        torch.cuda.synchronize()
        times.append(stages.collect()["work"])
    return min(times)
