"""Choose a path for every matrix, and accept no result unchecked.

Updates of one shape are factorised together. ``auto`` runs the FP64-Gram path, sends to TSQR the matrices that
it flags or whose result is not accepted, and those alone, and falls back to the FP64 reference last.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar, get_args

import torch
from torch import Tensor

from loraforge.errors import LoraForgeError, UsageError
from loraforge.factor.batch import Batch, Ordered
from loraforge.factor.gram import gram_factors
from loraforge.factor.pool import Pool
from loraforge.factor.reference import reference_factors, reference_spectrum
from loraforge.factor.stages import Stages
from loraforge.factor.tsqr import tsqr_factors
from loraforge.fleet.peft_io import Adapter, LoraModule

Path = Literal["gram", "tsqr", "reference", "whitened", "fisher"]
Method = Literal["auto", "gram", "tsqr", "reference"]
METHODS: tuple[Method, ...] = get_args(Method)

# Acceptance (paper, sections B.2 and B.8).
MAX_ACTION_ERROR = 3e-5
MAX_SPECTRUM_ERROR = 1e-4
PROBES = 8
PROBE_SEED = 20261130

# FP64 working set of a batch: large enough to spread the cost of a call, small enough for the caches.
_BATCH_BYTES = 8 << 20

K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True)
class ModuleFactors:
    """Ordered factors of one module and how they were checked.

    ``s`` float64 [r], ``a`` float32 [r, d_in], ``b`` float32 [d_out, r] as in :class:`Ordered`.
    ``action_error``: the relative error of ``B' (A' P)`` against ``s B (A P)`` in FP64, over the eight Gaussian
    probes in P together: of a module of rank 1 or 2, one probe alone may meet next to nothing.
    ``spectrum_error``: the largest difference of a singular value from that of the FP64 reference (QR of both
    factors, SVD of the core), relative to the largest singular value. On a GPU the
    reference is :func:`loraforge.factor.gpu.check.root_spectrum`.
    """

    s: Tensor
    a: Tensor
    b: Tensor
    path: Path
    action_error: float
    spectrum_error: float


def factorise_adapter(
    adapter: Adapter,
    *,
    method: Method,
    pool: Pool,
    stages: Stages,
    done: Mapping[str, ModuleFactors] | None = None,
) -> dict[str, ModuleFactors]:
    """Ordered factors of every module of ``adapter`` on the CPU, by module name in the adapter's order.

    ``done`` are those that a GPU has made, and are left as they are. Raises InputError for NaN or infinite factors,
    and LoraForgeError that names the module where no path of ``method`` passes acceptance.
    """
    by_name = {module.name: module for module in adapter.modules}
    done = dict(done or {})
    with adapter.reader() as reader:
        factors = {
            module.name: reader.factors(module) for module in adapter.modules if module.name not in done
        }
    groups = group_by_shape(
        (module.name, module.d_in, module.d_out, module.rank)
        for module in adapter.modules
        if module.name not in done
    )

    def run(names: Sequence[str]) -> tuple[dict[str, ModuleFactors], Stages]:
        local = Stages()
        modules = [by_name[name] for name in names]
        pairs = [factors[name] for name in names]
        return _factorise(adapter, modules, pairs, method, local), local

    for results, local in pool.map(run, groups):
        done |= results
        stages.merge(local)
    return {name: done[name] for name in by_name}


def group_by_shape(
    modules: Iterable[tuple[K, int, int, int]], *, max_batch: int | None = None
) -> list[list[K]]:
    """Batches of keys with equal (d_in, d_out, rank), the costliest first so that workers end together.

    ``modules`` gives (key, d_in, d_out, rank). A batch is bounded by its working set, or holds ``max_batch``.
    """
    groups: dict[tuple[int, int, int], list[K]] = defaultdict(list)
    for key, d_in, d_out, rank in modules:
        groups[d_in, d_out, rank].append(key)
    batches: list[tuple[float, list[K]]] = []
    for (d_in, d_out, rank), keys in groups.items():
        # acceptance multiplies with probes, which at small ranks are wider than the factors
        size = max_batch or max(1, _BATCH_BYTES // (8 * max(rank, PROBES) * (d_in + d_out)))
        for start in range(0, len(keys), size):
            batch = keys[start : start + size]
            batches.append((len(batch) * rank**2 * float(d_in + d_out + 20 * rank), batch))
    batches.sort(key=lambda item: -item[0])
    return [batch for _, batch in batches]


def construct(batch: Batch, path: Path, stages: Stages) -> tuple[Ordered, Tensor]:
    """Run one path, unchecked: the factors of the updates it can do, and their indices [n] (int64)."""
    if path == "gram":
        return gram_factors(batch, stages)
    everything = torch.arange(len(batch))
    run: Mapping[Path, Callable[[Batch, Stages], Ordered]] = {
        "tsqr": tsqr_factors,
        "reference": reference_factors,
    }
    return run[path](batch, stages), everything


def paths_of(method: Method) -> tuple[Path, ...]:
    """The paths that ``method`` tries, in order. Raises UsageError for a method that does not exist."""
    if method == "auto":
        return ("gram", "tsqr", "reference")
    if method not in METHODS:
        raise UsageError(
            f"unknown method {method!r}", key="method", remedy=f"choose from {', '.join(METHODS)}"
        )
    return (method,)


def acceptance_probes(d_in: int) -> Tensor:
    """The Gaussian probes [d_in, PROBES] (float64, CPU) that factors of ``d_in`` inputs are accepted by."""
    return torch.randn(d_in, PROBES, dtype=torch.float64, generator=torch.Generator().manual_seed(PROBE_SEED))


def action_errors(batch: Batch, ordered: Ordered) -> Tensor:
    """Relative action error [m] over eight probes together (Frobenius norms), FP64; infinite where not finite."""
    probes = acceptance_probes(batch.a.shape[2]).to(batch.x.device)
    # the gain is divided out of the smaller intermediate, so that neither side leaves the range of FP64
    expected = (batch.b @ (batch.a @ probes)) * batch.sign[:, None, None]
    gain = torch.where(batch.gain > 0, batch.gain, 1.0).sqrt()[:, None, None]
    expected = torch.where(batch.gain[:, None, None] > 0, expected, 0.0)
    hidden = (ordered.a.to(torch.float64) @ probes) / gain
    difference = torch.linalg.vector_norm(ordered.b.to(torch.float64) @ hidden / gain - expected, dim=(1, 2))
    return relative(difference, torch.linalg.vector_norm(expected, dim=(1, 2)))


def spectrum_errors(reference: Tensor, s: Tensor) -> Tensor:
    """Largest difference [m] of ``s`` from ``reference``, both [m, r], relative to the largest reference value."""
    return relative((s - reference).abs().amax(dim=-1), reference[:, 0])


def relative(difference: Tensor, norm: Tensor) -> Tensor:
    """``difference / norm``, elementwise: 0 for 0/0, infinite where it means nothing."""
    ratio = torch.where(norm > 0, difference / torch.where(norm > 0, norm, 1.0), difference / difference)
    ratio = torch.where((norm == 0) & (difference == 0), 0.0, ratio)
    return ratio.nan_to_num(nan=torch.inf)


def _factorise(
    adapter: Adapter,
    modules: Sequence[LoraModule],
    pairs: Sequence[tuple[Tensor, Tensor]],
    method: Method,
    stages: Stages,
) -> dict[str, ModuleFactors]:
    with stages("load"):
        a, b = (torch.stack([pair[side] for pair in pairs]) for side in (0, 1))
        batch = Batch.of(a, b, torch.tensor([module.scale for module in modules], dtype=torch.float64))
    with stages("verify"):
        reference = reference_spectrum(batch)
    done: dict[int, ModuleFactors] = {}
    pending = list(range(len(modules)))
    tried: dict[int, list[str]] = {j: [] for j in pending}
    for path in paths_of(method):
        part = batch.select(torch.tensor(pending))
        ordered, index = construct(part, path, stages)
        with stages("verify"):
            constructed = [pending[i] for i in index.tolist()]
            action = action_errors(part.select(index), ordered).tolist()
            spectrum = spectrum_errors(reference[constructed], ordered.s).tolist()
        for i, j in enumerate(constructed):
            if action[i] < MAX_ACTION_ERROR and spectrum[i] < MAX_SPECTRUM_ERROR:
                done[j] = ModuleFactors(
                    ordered.s[i], ordered.a[i], ordered.b[i], path, action[i], spectrum[i]
                )
            else:
                tried[j].append(f"{path}: action error {action[i]:.1e}, spectrum error {spectrum[i]:.1e}")
        for j in set(pending).difference(constructed):
            tried[j].append(f"{path}: too ill-conditioned")
        pending = [j for j in pending if j not in done]
        if not pending:
            return {modules[j].name: done[j] for j in sorted(done)}
    raise LoraForgeError(
        f"adapter {adapter.name}: no factorisation passes acceptance ({'; '.join(tried[pending[0]])})",
        path=adapter.weights_path,
        key=modules[pending[0]].name,
        remedy="check the values of its factors and its lora_alpha"
        if method == "auto"
        else "use the method auto",
    )
