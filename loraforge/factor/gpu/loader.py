"""A fleet of adapter folders onto one device, grouped by shape across adapters.

Reader threads take a weight file each. They fill pinned buffers, two a thread, and send each to the device on a
stream of its own while the other fills; what is not hashed yet is hashed on the way, from the buffer. No tensor is
touched by the host. On the device every tensor then goes to its row of its group. Files are read, not mapped: a
read into pinned memory is one copy without page faults.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from loraforge.errors import InputError
from loraforge.factor.gpu.drain import enter
from loraforge.factor.gpu.engine import Group
from loraforge.factor.stages import Stages
from loraforge.fleet.peft_io import Adapter, LoraModule
from loraforge.threads import io_threads

CHUNK_BYTES = 32 << 20
_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True)
class LoadedFleet:
    """Groups on the device; of each, the numbers [m] (int64, CPU) in ``modules`` of its rows.

    ``modules``: all of the fleet, in its order. Those with an FP64 factor are in no group, for the kernels read no
    FP64; nor are those whose factors are not stored as such. ``nbytes`` is what was copied to the device.
    """

    modules: list[tuple[Adapter, LoraModule]]
    groups: list[Group]
    members: list[Tensor]
    nbytes: int


@dataclass(frozen=True)
class _Span:
    """Where a tensor lies in the data section of its file, in bytes."""

    dtype: torch.dtype
    start: int
    stop: int


@dataclass(frozen=True)
class _File:
    """``spans`` of the factors in the data section, which starts at ``begin`` and holds them in ``nbytes``; and the
    whole file's ``size``."""

    adapter: Adapter
    begin: int
    size: int
    spans: dict[str, _Span]
    nbytes: int


def load_fleet(
    adapters: Sequence[Adapter],
    device: torch.device,
    stages: Stages,
    *,
    readers: int | None = None,
    chunk_bytes: int = CHUNK_BYTES,
) -> LoadedFleet:
    """Read every factor of ``adapters`` that is stored as FP32, FP16 or BF16 to ``device``.

    Adapters whose SHA-256 is not known are told it. Takes twice the fleet's bytes on the device while it runs.
    ``readers`` threads, by default the available CPUs, at most 16. The wall-clock time goes to stages ``hash``, which
    gets the readers' share of it, and ``load``. Raises InputError for files that cannot be read; values are not
    checked here.
    """
    started = time.perf_counter()
    threads = readers or io_threads()
    files = [_header(adapter) for adapter in adapters]
    mover = _Mover(device, min(chunk_bytes, max((file.size for file in files), default=0)))
    # one piece for each file, rounded so that any type may be viewed in place
    starts, total = [], 0
    for file in files:
        starts.append(total)
        total += -(-file.nbytes // 256) * 256
    staged = torch.empty(total, dtype=torch.uint8, device=device)
    mover.begin()
    with ThreadPoolExecutor(threads, initializer=enter, initargs=(device,)) as pool:
        running = {
            number: pool.submit(
                mover.read, files[number], staged[starts[number] : starts[number] + files[number].nbytes]
            )
            for number in sorted(range(len(files)), key=lambda number: -files[number].nbytes)
        }
        try:
            modules, groups, members, rows = _groups(files, device)  # while they read
            word = _word(files)
            slots = [(_rows(group.a, word), _rows(group.b, word)) for group in groups]
            hashing = 0.0
            for number, (file, start) in enumerate(zip(files, starts, strict=True)):
                hashing += running[number].result()
                mover.join()
                _scatter(file, staged[start : start + file.nbytes].view(word), slots, rows[number])
        finally:
            pool.shutdown(cancel_futures=True)
    share = hashing / threads
    stages.add("hash", share)
    stages.add("load", time.perf_counter() - started - share)
    return LoadedFleet(modules, groups, members, sum(file.nbytes for file in files))


class _Mover:
    """Copies files to the device through buffers, two a thread, which are pinned where that means something."""

    def __init__(self, device: torch.device, size: int) -> None:
        self._device, self._size = device, size
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._local = threading.local()

    def begin(self) -> None:
        """What is copied from here on may overwrite what was allocated until now."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def join(self) -> None:
        """Let the current stream wait for the copies sent so far."""
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def read(self, file: _File, target: Tensor) -> float:
        """Read one file, its factors to ``target``; hash all of it if nobody has, and return the seconds of that."""
        seconds = 0.0
        digest = None if file.adapter.hashed else hashlib.sha256()
        begin, end = file.begin, file.begin + file.nbytes
        start, stop = (begin, end) if digest is None else (0, file.size)
        slabs = self._slabs()
        for offset, piece, (slab, sent) in _pieces(file.adapter.weights_path, start, stop, slabs):
            if digest is not None:
                started = time.perf_counter()
                digest.update(piece)
                seconds += time.perf_counter() - started
            first, last = max(offset, begin), min(offset + len(piece), end)
            if first < last:
                place, source = target[first - begin : last - begin], slab[first - offset : last - offset]
                if sent is None:
                    place.copy_(source)
                else:
                    with torch.cuda.stream(self._stream):
                        place.copy_(source, non_blocking=True)
                        sent.record(self._stream)
        if digest is not None:
            file.adapter.state_sha256(digest.hexdigest())
        return seconds

    def _slabs(self) -> list[_Slab]:
        if not hasattr(self._local, "slabs"):
            pinned = self._stream is not None
            self._local.slabs = [
                (
                    torch.empty(self._size, dtype=torch.uint8, pin_memory=pinned),
                    torch.cuda.Event(blocking=True) if pinned else None,  # type: ignore[no-untyped-call]
                )
                for _ in range(2)
            ]
        found: list[_Slab] = self._local.slabs
        return found


_Slab = tuple[Tensor, torch.cuda.Event | None]


def _pieces(
    path: Path, start: int, stop: int, slabs: Sequence[_Slab]
) -> Iterator[tuple[int, memoryview, _Slab]]:
    """Bytes ``start``..``stop`` of a file in turns of the buffers, each once its last copy is done: where each
    piece begins in the file, its bytes, and its buffer."""
    try:
        with open(path, "rb", buffering=0) as stream:
            turn = 0
            while start < stop:
                slab, sent = slabs[turn % len(slabs)]
                if sent is not None:
                    sent.synchronize()  # no wait for an event never recorded
                piece = memoryview(slab.numpy())[: stop - start]  # type: ignore[arg-type]
                _read_into(stream.fileno(), start, piece, path)
                yield start, piece, (slab, sent)
                start, turn = start + len(piece), turn + 1
    except OSError as error:
        raise InputError(f"cannot be read ({error.strerror})", path=path) from error


def _read_into(handle: int, offset: int, piece: memoryview, path: Path) -> None:
    while piece:
        count = os.preadv(handle, [piece], offset)
        if count == 0:
            raise InputError("was truncated while it was read", path=path)
        piece, offset = piece[count:], offset + count


def _header(adapter: Adapter) -> _File:
    """Where the tensors of a file lie, which :func:`loraforge.fleet.peft_io.open_adapter` has found whole."""
    path = adapter.weights_path
    if not adapter.weights.mapped:
        adapter.state_sha256(adapter.weights_sha256)  # of all its files, which are not read here
        return _File(adapter, 0, 0, {}, 0)
    try:
        with open(path, "rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            header: dict[str, Any] = json.loads(stream.read(length))
            size = os.fstat(stream.fileno()).st_size
    except (OSError, ValueError) as error:
        raise InputError(f"cannot be read ({error})", path=path) from error
    spans: dict[str, _Span] = {}
    for module in adapter.modules:
        if module.build is not None:
            continue
        entries = {key: header[key] for key in (module.a_key, module.b_key)}
        if all(entry["dtype"] in _DTYPES for entry in entries.values()):
            for key, entry in entries.items():
                spans[key] = _Span(_DTYPES[entry["dtype"]], *entry["data_offsets"])
    return _File(adapter, 8 + length, size, spans, max((span.stop for span in spans.values()), default=0))


def _groups(
    files: Sequence[_File], device: torch.device
) -> tuple[list[tuple[Adapter, LoraModule]], list[Group], list[Tensor], list[dict[str, tuple[int, int]]]]:
    """All modules, groups to fill, their members, and of the modules of every file the group and row."""
    found: dict[tuple[Any, ...], list[int]] = defaultdict(list)
    modules: list[tuple[Adapter, LoraModule]] = []
    rows: list[dict[str, tuple[int, int]]] = []
    numbers: dict[tuple[Any, ...], int] = {}
    for file in files:
        rows.append({})
        for module in file.adapter.modules:
            modules.append((file.adapter, module))
            if module.build is not None or module.a_key not in file.spans:
                continue
            types = file.spans[module.a_key].dtype, file.spans[module.b_key].dtype
            key = (module.d_in, module.d_out, module.rank, *types)
            rows[-1][module.name] = numbers.setdefault(key, len(numbers)), len(found[key])
            found[key].append(len(modules) - 1)
    groups, members = [], []
    for (d_in, d_out, rank, a_type, b_type), inside in found.items():
        a = torch.empty((len(inside), rank, d_in), dtype=a_type, device=device)
        b = torch.empty((len(inside), d_out, rank), dtype=b_type, device=device)
        scale = torch.tensor([modules[index][1].scale for index in inside], dtype=torch.float64).to(device)
        names = [f"{modules[index][0].name}: {modules[index][1].name}" for index in inside]
        groups.append(Group(a, b, scale, names))
        members.append(torch.tensor(inside))
    return modules, groups, members, rows


def _word(files: Sequence[_File]) -> torch.dtype:
    """The widest type whose size divides where every factor begins and ends: the format aligns tensors of one type
    only, and copies of bytes are slow."""
    common = math.gcd(
        8, *(place for file in files for span in file.spans.values() for place in (span.start, span.stop))
    )
    return {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[common]


def _rows(stack: Tensor, word: torch.dtype) -> tuple[Tensor, ...]:
    """Each matrix of ``stack`` [m, ...] as a view of words."""
    return stack.view(len(stack), -1).view(word).unbind()


def _scatter(
    file: _File,
    staged: Tensor,
    slots: Sequence[tuple[Sequence[Tensor], Sequence[Tensor]]],
    rows: Mapping[str, tuple[int, int]],
) -> None:
    """Every factor of a file, whose data section ``staged`` is, to its row: ``slots`` by group, side and row.

    One call gives the views of all tensors of a file, for the readers want the interpreter too.
    """
    targets: list[tuple[int, int, Tensor]] = []
    for module in file.adapter.modules:
        if module.name in rows:
            group, row = rows[module.name]
            for key, side in ((module.a_key, 0), (module.b_key, 1)):
                span = file.spans[key]
                targets.append((span.start, span.stop, slots[group][side][row]))
    if not targets:
        return
    targets.sort(key=lambda target: target[0])
    sizes, end = [], 0  # of what lies before a factor, and of the factor
    for start, stop, _ in targets:
        sizes += [(start - end) // staged.itemsize, (stop - start) // staged.itemsize]
        end = stop
    torch._foreach_copy_([target for *_, target in targets], staged.split_with_sizes(sizes)[1::2])
