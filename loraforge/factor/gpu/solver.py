"""cusolverDnXsyevBatched, which torch does not offer: a batched symmetric EVD of FP64 matrices of any order.

On an H200 it takes 3.5 us a matrix of order 64, where torch.linalg.eigh loops over the matrices at 690 us each.
"""

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from loraforge.errors import LoraForgeError

WORKSPACE_BYTES = 2 << 30
_VECTORS, _LOWER, _R64F = 1, 0, 1  # CUSOLVER_EIG_MODE_VECTOR, CUBLAS_FILL_MODE_LOWER, CUDA_R_64F


class SyevBatched:
    """The solver on one device; a handle for every stream, so that work on several streams may overlap."""

    def __init__(self, library: ctypes.CDLL, device: torch.device, workspace_bytes: int) -> None:
        void, wide, size = ctypes.c_void_p, ctypes.c_int64, ctypes.c_size_t
        matrix: list[Any] = [void, void, ctypes.c_int, ctypes.c_int, wide, ctypes.c_int, void, wide]
        matrix += [ctypes.c_int, void, ctypes.c_int]
        library.cusolverDnXsyevBatched_bufferSize.argtypes = [
            *matrix,
            ctypes.POINTER(size),
            ctypes.POINTER(size),
            wide,
        ]
        library.cusolverDnXsyevBatched.argtypes = [*matrix, void, size, void, size, void, wide]
        library.cusolverDnSetStream.argtypes = [void, void]
        self._library, self._device, self._cap = library, device, workspace_bytes
        self._handles: dict[int, ctypes.c_void_p] = {}
        self._sizes: dict[tuple[int, int], tuple[int, int, int]] = {}
        self._parameters = ctypes.c_void_p()
        self._check("cusolverDnCreateParams", ctypes.byref(self._parameters))

    @classmethod
    def find(cls, device: torch.device, workspace_bytes: int = WORKSPACE_BYTES) -> SyevBatched | None:
        """The solver of torch's own libcusolver; None where there is none that has it (ROCm, CUDA before 12.6)."""
        if not torch.version.cuda:
            return None
        for name in _candidates():
            try:
                library = ctypes.CDLL(name)
            except OSError:
                continue
            if hasattr(library, "cusolverDnXsyevBatched"):
                return cls(library, device, workspace_bytes)
        return None

    def __call__(self, g: Tensor) -> tuple[Tensor, Tensor]:
        """Eigenvalues [m, n] ascending and eigenvectors [m, n, n] in rows, of FP64 ``g``, which is overwritten.

        A column of the column-major result is a row of the row-major tensor. A matrix that did not converge has
        eigenvalues NaN, for the caller to see on the device.
        """
        m, n = g.shape[0], g.shape[-1]
        w = torch.empty((m, n), dtype=torch.float64, device=g.device)
        info = torch.zeros(m, dtype=torch.int32, device=g.device)
        start = 0
        with torch.cuda.device(self._device):
            handle = self._handle()
            while start < m:
                count, device_bytes, host_bytes = self._fit(handle, g, w, m - start)
                workspace = torch.empty(max(1, device_bytes), dtype=torch.uint8, device=g.device)
                host = ctypes.create_string_buffer(max(1, host_bytes))
                self._check(
                    "cusolverDnXsyevBatched",
                    *self._matrix(handle, g[start:], w[start:]),
                    workspace.data_ptr(),
                    device_bytes,
                    ctypes.cast(host, ctypes.c_void_p),
                    host_bytes,
                    info[start:].data_ptr(),
                    count,
                )
                start += count
        return torch.where(info[:, None] == 0, w, torch.nan), g

    def _matrix(self, handle: ctypes.c_void_p, g: Tensor, w: Tensor) -> tuple[Any, ...]:
        n = g.shape[-1]
        return (
            handle, self._parameters, _VECTORS, _LOWER, n, _R64F, g.data_ptr(), n, _R64F, w.data_ptr(), _R64F
        )  # fmt: skip

    def _fit(self, handle: ctypes.c_void_p, g: Tensor, w: Tensor, wanted: int) -> tuple[int, int, int]:
        """The largest of ``wanted`` halved whose workspace is within the cap, and its bytes (device, host)."""
        key = (g.shape[-1], wanted)
        if key not in self._sizes:
            count = wanted
            while True:
                device, host = ctypes.c_size_t(), ctypes.c_size_t()
                self._check(
                    "cusolverDnXsyevBatched_bufferSize",
                    *self._matrix(handle, g, w),
                    ctypes.byref(device),
                    ctypes.byref(host),
                    count,
                )
                if device.value <= self._cap or count == 1:
                    break
                count = -(-count // 2)
            self._sizes[key] = count, device.value, host.value
        return self._sizes[key]

    def _handle(self) -> ctypes.c_void_p:
        stream = torch.cuda.current_stream(self._device).cuda_stream
        if stream not in self._handles:
            handle = ctypes.c_void_p()
            self._check("cusolverDnCreate", ctypes.byref(handle))
            self._check("cusolverDnSetStream", handle, ctypes.c_void_p(stream))
            self._handles[stream] = handle
        return self._handles[stream]

    def _check(self, name: str, *arguments: Any) -> None:
        status = getattr(self._library, name)(*arguments)
        if status != 0:
            raise LoraForgeError(
                f"cuSOLVER status {status}", key=name, remedy="use the Jacobi kernel or the CPU"
            )


def _candidates() -> Iterator[str]:
    """Names and places of libcusolver, the one that torch itself loads first."""
    names = ("libcusolver.so.12", "libcusolver.so.11")
    roots: list[Path] = []
    spec = importlib.util.find_spec("nvidia")
    for place in (spec.submodule_search_locations or ()) if spec else ():
        roots += [*sorted(Path(place).glob("cu*/lib"), reverse=True), Path(place) / "cusolver" / "lib"]
    for name in names:
        yield from (str(root / name) for root in roots if (root / name).is_file())
    yield from names
    yield from (str(Path("/usr/local/cuda/lib64") / name) for name in names)
