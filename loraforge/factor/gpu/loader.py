"""A fleet of adapter folders onto one device, grouped by shape across adapters.

Reader threads fill pinned buffers from the weight files, two a thread, and send each to the device on a stream
of its own while the other fills; no tensor is touched by the host. On the device every tensor then goes to its
row of its group. Files are read, not mapped: a read into pinned memory is one copy without page faults.
"""

from __future__ import annotations

import json
import os
import threading
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from loraforge.errors import InputError
from loraforge.factor.gpu.engine import Group
from loraforge.fleet.peft_io import Adapter, LoraModule

CHUNK_BYTES = 32 << 20
_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True)
class LoadedFleet:
    """Groups on the device; of each, the modules [m] (int64, CPU, in the order of the fleet) that are its rows.

    ``nbytes`` is what was copied to the device.
    """

    groups: list[Group]
    members: list[Tensor]
    nbytes: int


@dataclass(frozen=True)
class _Span:
    dtype: torch.dtype
    shape: tuple[int, int]
    start: int
    stop: int

    def of(self, staged: Tensor) -> Tensor:
        """The tensor in the data section ``staged`` (uint8) of its file."""
        raw = staged[self.start : self.stop]
        # the format aligns tensors of one type only; a view needs more
        aligned = raw if raw.storage_offset() % self.dtype.itemsize == 0 else raw.clone()
        return aligned.view(self.dtype).view(self.shape)


@dataclass(frozen=True)
class _File:
    adapter: Adapter
    begin: int
    spans: dict[str, _Span]
    nbytes: int


def load_fleet(
    adapters: Sequence[Adapter],
    device: torch.device,
    *,
    readers: int | None = None,
    chunk_bytes: int = CHUNK_BYTES,
) -> LoadedFleet:
    """Read every factor of ``adapters`` (stored as FP32, FP16 or BF16) to ``device``.

    Takes twice the fleet's bytes on the device while it runs. ``readers`` threads, by default the available CPUs,
    at most 16. Raises InputError for FP64 factors and for files that cannot be read; values are not checked here.
    """
    files = [_header(adapter) for adapter in adapters]
    size = max((file.nbytes for file in files), default=0)
    mover = _Mover(device, min(chunk_bytes, size))
    # one piece for each file, rounded so that any type may be viewed in place
    starts, total = [], 0
    for file in files:
        starts.append(total)
        total += -(-file.nbytes // 256) * 256
    staged = torch.empty(total, dtype=torch.uint8, device=device)
    mover.begin()
    with ThreadPoolExecutor(readers or min(16, len(os.sched_getaffinity(0)))) as pool:
        pending = [
            mover.read(pool, file, staged[start : start + file.nbytes])
            for file, start in zip(files, starts, strict=True)
        ]
        # while they read
        groups, members, rows = _groups(files, device)
        for number, (file, start) in enumerate(zip(files, starts, strict=True)):
            for future in pending[number]:
                future.result()
            mover.join()
            place = staged[start : start + file.nbytes]
            sources, targets = [], []
            for module, (group, row) in zip(file.adapter.modules, rows[number], strict=True):
                for key, stack in ((module.a_key, groups[group].a), (module.b_key, groups[group].b)):
                    sources.append(file.spans[key].of(place))
                    targets.append(stack[row])
            torch._foreach_copy_(targets, sources)
    return LoadedFleet(groups, members, sum(file.nbytes for file in files))


class _Mover:
    """Copies chunks of files to the device from pinned buffers, two a thread; on a CPU it reads in place."""

    def __init__(self, device: torch.device, size: int) -> None:
        self.device, self.size = device, size
        self.cuda = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if self.cuda else None  # type: ignore[no-untyped-call]
        self._local = threading.local()

    def begin(self) -> None:
        """What is copied from here on may overwrite what was allocated until now."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self.device))

    def join(self) -> None:
        """Let the current stream wait for the copies sent so far."""
        if self._stream is not None:
            torch.cuda.current_stream(self.device).wait_stream(self._stream)

    def read(self, pool: ThreadPoolExecutor, file: _File, target: Tensor) -> list[Future[None]]:
        path, step = file.adapter.weights_path, max(1, self.size)
        return [
            pool.submit(self._chunk, path, file.begin + start, target[start : start + step])
            for start in range(0, file.nbytes, step)
        ]

    def _chunk(self, path: Path, offset: int, target: Tensor) -> None:
        if self._stream is None:
            _read_into(path, offset, target)
            return
        slabs = self._slabs()
        slab, sent = slabs.pop(0)
        sent.synchronize()  # no wait for an event never recorded
        piece = slab[: len(target)]
        _read_into(path, offset, piece)
        with torch.cuda.stream(self._stream):
            target.copy_(piece, non_blocking=True)
            sent.record(self._stream)
        slabs.append((slab, sent))

    def _slabs(self) -> list[tuple[Tensor, torch.cuda.Event]]:
        if not hasattr(self._local, "slabs"):
            self._local.slabs = [
                (torch.empty(self.size, dtype=torch.uint8, pin_memory=True), torch.cuda.Event(blocking=True))  # type: ignore[no-untyped-call]
                for _ in range(2)
            ]
        found: list[tuple[Tensor, torch.cuda.Event]] = self._local.slabs
        return found


def _read_into(path: Path, offset: int, target: Tensor) -> None:
    view = memoryview(target.numpy())  # type: ignore[arg-type]
    try:
        with open(path, "rb", buffering=0) as stream:
            while view:
                count = os.preadv(stream.fileno(), [view], offset)
                if count == 0:
                    raise InputError("was truncated while it was read", path=path)
                view, offset = view[count:], offset + count
    except OSError as error:
        raise InputError(f"cannot be read ({error.strerror})", path=path) from error


def _header(adapter: Adapter) -> _File:
    """Where the tensors of a file lie, which :func:`loraforge.fleet.peft_io.open_adapter` has found whole."""
    path = adapter.weights_path
    try:
        with open(path, "rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            header: dict[str, Any] = json.loads(stream.read(length))
    except (OSError, ValueError) as error:
        raise InputError(f"cannot be read ({error})", path=path) from error
    spans: dict[str, _Span] = {}
    for module in adapter.modules:
        for key in (module.a_key, module.b_key):
            entry = header[key]
            if entry["dtype"] not in _DTYPES:
                raise InputError(
                    f"stored as {entry['dtype']}; the GPU takes {', '.join(_DTYPES)}",
                    path=path,
                    key=key,
                    remedy="use loraforge compress, which factorises FP64 on the CPU",
                )
            first, second = entry["shape"]
            spans[key] = _Span(_DTYPES[entry["dtype"]], (first, second), *entry["data_offsets"])
    return _File(adapter, 8 + length, spans, max(span.stop for span in spans.values()))


def _groups(
    files: Sequence[_File], device: torch.device
) -> tuple[list[Group], list[Tensor], list[list[tuple[int, int]]]]:
    """Groups to fill, their members, and of every module of every file its group and row."""
    found: dict[tuple[Any, ...], list[tuple[int, Adapter, LoraModule]]] = defaultdict(list)
    rows: list[list[tuple[int, int]]] = []
    numbers: dict[tuple[Any, ...], int] = {}
    index = 0
    for file in files:
        rows.append([])
        for module in file.adapter.modules:
            types = file.spans[module.a_key].dtype, file.spans[module.b_key].dtype
            key = (module.d_in, module.d_out, module.rank, *types)
            rows[-1].append((numbers.setdefault(key, len(numbers)), len(found[key])))
            found[key].append((index, file.adapter, module))
            index += 1
    groups, members = [], []
    for (d_in, d_out, rank, a_type, b_type), inside in found.items():
        a = torch.empty((len(inside), rank, d_in), dtype=a_type, device=device)
        b = torch.empty((len(inside), d_out, rank), dtype=b_type, device=device)
        scale = torch.tensor([module.scale for _, _, module in inside], dtype=torch.float64).to(device)
        names = [f"{adapter.name}: {module.name}" for _, adapter, module in inside]
        groups.append(Group(a, b, scale, names))
        members.append(torch.tensor([number for number, _, _ in inside]))
    return groups, members, rows
