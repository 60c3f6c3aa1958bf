"""Tensors from a device into files: through pinned buffers, one on its way while the other is hashed and written."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors

from loraforge.tensor_file import host_views

SLAB_BYTES = 32 << 20
_WIDEST = 8  # bytes of an element


def enter(device: torch.device) -> None:
    """Make a thread's current device this one: without it, it would take a context on the first."""
    if device.type == "cuda" and device.index is not None:  # without an index it means the current one
        torch.cuda.set_device(device)


class Drain:
    """:data:`loraforge.tensor_file.Views` of tensors, most of them on one device, for as many threads as like.

    Each thread copies on a stream of its own, which waits for all that was enqueued on the stream where the drain
    was made, and leaves nothing under way: when the views are used up, the tensors may go. ``slab_bytes`` of pinned
    memory, twice a thread.
    """

    def __init__(
        self, device: torch.device, *, slab_bytes: int = SLAB_BYTES, sharing: Drain | None = None
    ) -> None:
        """``sharing``: an earlier drain of this device, whose threads keep their streams and buffers, whatever
        ``slab_bytes``, for this one."""
        self._device = device
        self._size: int = max(slab_bytes, _WIDEST) if sharing is None else sharing._size
        self._local: threading.local = threading.local() if sharing is None else sharing._local
        self._ready: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._ready.record(torch.cuda.current_stream(device))

    @contextmanager
    def here(self) -> Iterator[None]:
        """Enqueue what this thread computes on its stream: for tensors that are to be drained."""
        if self._ready is None:
            yield
            return
        enter(self._device)
        stream, _ = self._resources()
        stream.wait_event(self._ready)
        with torch.cuda.stream(stream):
            yield

    def __call__(self, tensors: Iterable[Tensor]) -> Iterator[memoryview]:
        """The bytes of ``tensors``, row-major, in order; views of memory that is used again after the next one."""
        if self._ready is None:
            yield from host_views(tensors)
            return
        with self.here():
            stream, slabs = self._resources()
        batches = _batches(tensors, self._size)
        under_way: deque[tuple[Tensor, torch.cuda.Event]] = deque()
        turn = 0
        try:
            while True:
                with torch.cuda.stream(stream):
                    pieces = next(batches, [])
                pause = not pieces or pieces[0].device.type == "cpu"
                while under_way and (pause or len(under_way) == 2):
                    yield _arrived(*under_way.popleft())
                if not pieces:
                    return
                if pause:
                    yield from host_views([_packed(pieces)])
                    continue
                slab, sent = slabs[turn % 2]
                turn += 1
                with torch.cuda.stream(stream):
                    packed = _packed(pieces).view(torch.uint8)
                    slab[: len(packed)].copy_(packed, non_blocking=True)
                    sent.record(stream)
                under_way.append((slab[: len(packed)], sent))
        finally:
            stream.synchronize()

    def _resources(self) -> tuple[torch.cuda.Stream, list[tuple[Tensor, torch.cuda.Event]]]:
        if not hasattr(self._local, "resources"):
            self._local.resources = (
                torch.cuda.Stream(self._device),  # type: ignore[no-untyped-call]
                [
                    (
                        torch.empty(self._size, dtype=torch.uint8, pin_memory=True),
                        torch.cuda.Event(blocking=True),  # type: ignore[no-untyped-call]
                    )
                    for _ in range(2)
                ],
            )
        found: tuple[torch.cuda.Stream, list[tuple[Tensor, torch.cuda.Event]]] = self._local.resources
        return found


def _arrived(piece: Tensor, sent: torch.cuda.Event) -> memoryview:
    sent.synchronize()
    return memoryview(piece.numpy())  # type: ignore[arg-type]


def _packed(pieces: Sequence[Tensor]) -> Tensor:
    """The elements of ``pieces``, row-major, in one dimension.

    By one call: threads that go in and out of hundreds of small ones wait for the interpreter each time.
    """
    packed: Tensor = _flatten_dense_tensors(pieces)  # type: ignore[no-untyped-call]
    return packed


def _batches(tensors: Iterable[Tensor], size: int) -> Iterator[list[Tensor]]:
    """``tensors``, large ones in pieces, in lists of one device and type each, of at most ``size`` bytes together.

    ``size`` holds an element.
    """
    batch: list[Tensor] = []
    room = size
    for tensor in tensors:
        if batch and (batch[0].dtype != tensor.dtype or batch[0].device != tensor.device):
            yield batch
            batch, room = [], size
        rest, width, left = tensor, tensor.element_size(), tensor.numel()
        while left * width > room:
            fits = room // width
            if fits:
                rest = rest.reshape(-1)
                batch.append(rest[:fits])
                rest, left = rest[fits:], left - fits
            yield batch
            batch, room = [], size
        if left:
            batch.append(rest)
            room -= left * width
    if batch:
        yield batch
