"""The operations that the engine is built of: by our kernels on a GPU, or by plain torch in FP64.

Both have the same signatures, so that everything above them is tested without a GPU. A *stack* x is a batch of
factors: layout ``TALL`` [m, d, r], or ``WIDE`` [m, r, d], whose transposes are the tall matrices X.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from loraforge.errors import LoraForgeError, MissingDependencyError
from loraforge.factor.gpu.solver import SyevBatched
from loraforge.jit import DEFAULT_FOLDER, load

TALL, WIDE = 0, 1
DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}


@dataclass(frozen=True)
class ImplicitQ:
    """The orthogonal factors of m tall matrices [d, r], never formed: what ``tsqr_factor`` keeps."""

    workspace: Tensor
    m: int
    d: int
    r: int


class Backend(Protocol):
    """What the engine needs of a device. Every method is asynchronous and repeatable bit for bit."""

    device: torch.device

    def gram(self, x: Tensor, layout: int, out: Tensor) -> None:
        """``out`` [m, r, r] FP64 = X^T X."""

    def apply(self, x: Tensor, layout: int, t: Tensor, out: Tensor) -> None:
        """X t for ``t`` [m, r, k] FP64, FP32 into ``out``: [m, d, k], or its transpose [m, k, d] for WIDE."""

    def tsqr_workspace(self, m: int, d: int, r: int) -> int:
        """Bytes that an :class:`ImplicitQ` of m matrices takes."""

    def tsqr_factor(self, x: Tensor, layout: int, out: Tensor) -> ImplicitQ:
        """X = Q R with ``out`` [m, r, r] FP32 = R, upper triangular."""

    def tsqr_apply(self, q: ImplicitQ, c: Tensor, layout: int, out: Tensor) -> None:
        """Q c for ``c`` [m, r, k] FP32 into ``out`` as ``apply`` does."""

    def eigh(self, g: Tensor) -> tuple[Tensor, Tensor]:
        """Eigenvalues [m, n] descending and eigenvectors [m, n, n] in ROWS, of FP64 ``g``, which may be overwritten."""


def thin(x: Tensor, layout: int) -> tuple[int, int, int]:
    """(m, d, r) of a stack."""
    m, first, second = x.shape
    return (m, first, second) if layout == TALL else (m, second, first)


def fix_signs(rows: Tensor) -> Tensor:
    """Eigenvectors in rows with their entry of largest magnitude positive, as the CPU paths have them."""
    pivot = rows.abs().argmax(dim=-1, keepdim=True)
    return rows * torch.where(rows.gather(-1, pivot) < 0, -1.0, 1.0)


Eigensolver = Literal["fastest", "jacobi", "library"]
# Order up to which the Jacobi kernel beats cusolverDnXsyevBatched: on an H200 it takes 0.2, 0.3 and 0.6 to 0.95 of
# its time at n 16, 32 and 64, by the spectrum's grading, and 2.4 to 4.4 times as long at 128.
JACOBI_UPTO = 64


class Kernels:
    """Our kernels on the current stream of one device, and the vendor's batched EVD where it is found.

    ``eigensolver``: the faster of the two at each order (default), or one of them alone. Raises
    MissingDependencyError without a compiler or GPU.
    """

    def __init__(
        self,
        device: torch.device | None = None,
        *,
        folder: Path = DEFAULT_FOLDER,
        eigensolver: Eigensolver = "fastest",
    ) -> None:
        if not torch.cuda.is_available():
            raise MissingDependencyError("torch sees no GPU", remedy="use the CPU path")
        chosen = device or torch.device("cuda")
        self.device = torch.device(
            "cuda", torch.cuda.current_device() if chosen.index is None else chosen.index
        )
        self._library = load("factor", folder, kind="nvcc" if torch.version.cuda else "hipcc")
        void, number, wide = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64
        for name, arguments in {
            "lf_gram": [void, number, number, void, wide, number, number, void],
            "lf_apply": [void, number, number, void, void, wide, number, number, number, void],
            "lf_jacobi": [void, void, void, void, wide, number, void],
            "lf_tsqr_factor": [void, number, number, void, void, wide, number, number, void],
            "lf_tsqr_apply": [void, void, void, number, wide, number, number, number, void],
        }.items():
            function = getattr(self._library, name)
            function.argtypes, function.restype = arguments, ctypes.c_int
        self._library.lf_tsqr_workspace.argtypes = [wide, number, number]
        self._library.lf_tsqr_workspace.restype = ctypes.c_int64
        self._solver = None if eigensolver == "jacobi" else SyevBatched.find(self.device)
        self._jacobi_upto = 0 if eigensolver == "library" else JACOBI_UPTO

    @property
    def eigensolver(self) -> str:
        """What :meth:`eigh` runs, for records."""
        if self._solver is None:
            return "jacobi"
        return f"jacobi to {self._jacobi_upto}, then syev_batched" if self._jacobi_upto else "syev_batched"

    def gram(self, x: Tensor, layout: int, out: Tensor) -> None:
        m, d, r = self._stack(x, layout)
        self._expect(out, torch.float64, (m, r, r))
        if m:
            self._call("lf_gram", x.data_ptr(), DTYPES[x.dtype], layout, out.data_ptr(), m, d, r)

    def apply(self, x: Tensor, layout: int, t: Tensor, out: Tensor) -> None:
        m, d, r = self._stack(x, layout)
        k = t.shape[-1]
        self._expect(t, torch.float64, (m, r, k))
        self._expect(out, torch.float32, (m, d, k) if layout == TALL else (m, k, d))
        if m and k:
            self._call(
                "lf_apply", x.data_ptr(), DTYPES[x.dtype], layout, t.data_ptr(), out.data_ptr(), m, d, r, k
            )

    def tsqr_workspace(self, m: int, d: int, r: int) -> int:
        size = int(self._library.lf_tsqr_workspace(m, d, r))
        if size < 0:
            raise LoraForgeError(f"lf_tsqr_workspace does not take {m} matrices of {d} x {r}")
        return size

    def tsqr_factor(self, x: Tensor, layout: int, out: Tensor) -> ImplicitQ:
        m, d, r = self._stack(x, layout)
        self._expect(out, torch.float32, (m, r, r))
        workspace = torch.empty(max(1, self.tsqr_workspace(m, d, r)), dtype=torch.uint8, device=self.device)
        if m:
            self._call(
                "lf_tsqr_factor",
                x.data_ptr(),
                DTYPES[x.dtype],
                layout,
                out.data_ptr(),
                workspace.data_ptr(),
                m,
                d,
                r,
            )
        return ImplicitQ(workspace, m, d, r)

    def tsqr_apply(self, q: ImplicitQ, c: Tensor, layout: int, out: Tensor) -> None:
        k = c.shape[-1]
        self._expect(c, torch.float32, (q.m, q.r, k))
        self._expect(out, torch.float32, (q.m, q.d, k) if layout == TALL else (q.m, k, q.d))
        if q.m and k:
            self._call(
                "lf_tsqr_apply",
                q.workspace.data_ptr(),
                c.data_ptr(),
                out.data_ptr(),
                layout,
                q.m,
                q.d,
                q.r,
                k,
            )

    def eigh(self, g: Tensor) -> tuple[Tensor, Tensor]:
        m, n = g.shape[0], g.shape[-1]
        self._expect(g, torch.float64, (m, n, n))
        if self._solver is not None and n > self._jacobi_upto:
            w, rows = self._solver(g)
            return w.flip(-1), fix_signs(rows.flip(-2))
        w = torch.empty((m, n), dtype=torch.float64, device=self.device)
        v = torch.empty((m, n, n), dtype=torch.float64, device=self.device)
        sweeps = torch.empty(max(1, m), dtype=torch.int32, device=self.device)
        if m:
            self._call("lf_jacobi", g.data_ptr(), w.data_ptr(), v.data_ptr(), sweeps.data_ptr(), m, n)
        return w, fix_signs(v.mT)

    def _call(self, name: str, *arguments: Any) -> None:
        with torch.cuda.device(self.device):
            stream = torch.cuda.current_stream(self.device).cuda_stream
            status = getattr(self._library, name)(*arguments, stream)
        if status != 0:
            what = "unsupported arguments" if status == -1 else f"CUDA error {status}"
            raise LoraForgeError(f"{what}", key=name, remedy="use the CPU path, and report the shape")

    def _stack(self, x: Tensor, layout: int) -> tuple[int, int, int]:
        m, d, r = thin(x, layout)
        if x.dtype not in DTYPES or not x.is_contiguous() or x.device != self.device or r > d:
            raise ValueError(f"not a stack of thin matrices: {x.dtype} {tuple(x.shape)} on {x.device}")
        return m, d, r

    def _expect(self, tensor: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        good = tensor.dtype == dtype and tuple(tensor.shape) == shape
        if not (good and tensor.is_contiguous() and tensor.device == self.device):
            raise ValueError(
                f"expected {dtype} {shape}, got {tensor.dtype} {tuple(tensor.shape)} on {tensor.device}"
            )


class Emulated:
    """The same operations by plain torch in FP64, on any device: what the engine is tested with."""

    eigensolver = "torch"

    def __init__(self, device: torch.device | None = None) -> None:
        self.device = device or torch.device("cpu")

    def gram(self, x: Tensor, layout: int, out: Tensor) -> None:
        tall = _tall(x, layout)
        torch.matmul(tall.mT, tall, out=out)

    def apply(self, x: Tensor, layout: int, t: Tensor, out: Tensor) -> None:
        product = _tall(x, layout) @ t
        out.copy_(product if layout == TALL else product.mT)

    def tsqr_workspace(self, m: int, d: int, r: int) -> int:
        return 8 * m * d * r

    def tsqr_factor(self, x: Tensor, layout: int, out: Tensor) -> ImplicitQ:
        m, d, r = thin(x, layout)
        q, upper = torch.linalg.qr(_tall(x, layout).to(torch.float32))
        out.copy_(upper)
        return ImplicitQ(q, m, d, r)

    def tsqr_apply(self, q: ImplicitQ, c: Tensor, layout: int, out: Tensor) -> None:
        product = q.workspace.to(torch.float64) @ c.to(torch.float64)
        out.copy_(product if layout == TALL else product.mT)

    def eigh(self, g: Tensor) -> tuple[Tensor, Tensor]:
        w, v = torch.linalg.eigh(g)
        return w.flip(-1), fix_signs(v.flip(-1).mT)


def _tall(x: Tensor, layout: int) -> Tensor:
    return (x if layout == TALL else x.mT).to(torch.float64)
