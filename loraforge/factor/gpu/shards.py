"""How much of a fleet goes onto a device at once: whole adapters, as many as its memory holds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import torch

from loraforge.fleet.peft_io import Adapter

T = TypeVar("T")

# for the r x r stages, the FP64 copies of the checks and buffers; a third of a small device
WORKSPACE_BYTES = 20 << 30
# as :func:`adapter_bytes` counts, of a shard whose results are written while the next is loaded: little, for the
# writers wait for the first
STREAMED_BYTES = 6 << 30


def adapter_bytes(adapter: Adapter) -> int:
    """Device memory that an adapter takes: its factors twice, while they are loaded, and ordered ones in FP32."""
    return sum(
        module.rank * (module.d_in + module.d_out) * (2 * min(4, module.dtype.itemsize) + 4)
        for module in adapter.modules
    )


def device_room(device: torch.device) -> int:
    """Bytes that adapters may take on ``device`` now; on a CPU that stands in for one, half of a GiB."""
    if device.type != "cuda":
        return 1 << 29
    free, _ = torch.cuda.mem_get_info(device)
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    room = int(0.95 * (free + kept))
    return room - min(WORKSPACE_BYTES, room // 3)


def fit_together(adapters: Sequence[Adapter], device: torch.device) -> bool:
    """Whether all of a fleet may be on ``device`` at once."""
    return sum(adapter_bytes(adapter) for adapter in adapters) <= device_room(device)


def shards(adapters: Sequence[Adapter], room: int, most: int | None = None) -> list[list[Adapter]]:
    """Divide a fleet, in its order. One shard where all of it fits ``room`` bytes; otherwise each fits half, so that
    one is loaded while the one before is still written. An adapter that is larger goes alone, and so does one that
    is larger than ``most`` bytes, which no shard exceeds."""
    whole = sum(adapter_bytes(adapter) for adapter in adapters)
    limit = room if whole <= room else room // 2
    limit = limit if most is None else min(limit, most)
    found: list[list[Adapter]] = []
    used = 0
    for adapter in adapters:
        size = adapter_bytes(adapter)
        if not found or used + size > limit:
            found.append([])
            used = 0
        found[-1].append(adapter)
        used += size
    return found


def over_shards(
    adapters: Sequence[Adapter],
    device: torch.device,
    work: Callable[[list[Adapter]], T],
    too_large: Callable[[Adapter], T],
    most: int | None = None,
) -> Iterator[T]:
    """``work`` on each of :func:`shards` in turn. What does not fit after all is tried in halves; ``too_large`` takes
    an adapter that does not fit alone."""
    waiting = shards(adapters, device_room(device), most)[::-1]
    while waiting:
        shard = waiting.pop()
        if (result := _unless_too_large(work, shard)) is not None:
            yield result
            del result  # the next shard may need its memory
            continue
        torch.cuda.empty_cache()
        half = len(shard) // 2
        if half:
            waiting += [shard[half:], shard[:half]]
        else:
            yield too_large(shard[0])


def _unless_too_large(work: Callable[[list[Adapter]], T], shard: list[Adapter]) -> T | None:
    """None where memory does not suffice; what the attempt held is free again on return."""
    try:
        return work(shard)
    except torch.OutOfMemoryError:
        return None
