"""Records of the GPU benchmarks of shape fleets: what ``loraforge bench`` and scripts without it write.

The benchmarks themselves are beside their stages; here a fleet is made, allocated and handed to them.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import torch

from loraforge.allocate.budget import parse_budget
from loraforge.allocate.problem import Problem
from loraforge.allocate.spectral import half_uniform_floor, spectral
from loraforge.allocate.uniform import uniform
from loraforge.errors import InputError, MissingDependencyError, UsageError
from loraforge.factor import gpu
from loraforge.factor.gpu.eigensolvers import benchmark_eigensolvers
from loraforge.factor.gpu.ops import Backend
from loraforge.factor.gpu.recompression import DEFAULT_METHODS, benchmark_device
from loraforge.factor.gpu.scaling import benchmark_scaling
from loraforge.factor.gpu.synthetic import device_fleet, write_fleet
from loraforge.files import read_jsonl, refuse_non_empty
from loraforge.fleet.shapes import Floats, shape_fleet

SEED = 20261130
HEADLINE = Fraction(1, 12)  # the budget of the paper's headline


def device_records(
    name: str,
    methods: Sequence[str] | None = None,
    warmups: int | None = None,
    passes: int | None = None,
    *,
    subset: int | None = None,
    budget: float | None = None,
    spectra: Path | None = None,
) -> list[dict[str, Any]]:
    """Every method on the shape fleet ``name``, on one GPU, after 2 warm-ups in 5 passes unless given.

    ``subset`` and ``budget`` as :func:`loraforge.factor.gpu.recompression.benchmark_device` takes them; ``spectra``: a
    file of measured ones that the fleet draws from. Raises MissingDependencyError without a GPU.
    """
    shapes = shape_fleet(name)
    backend = _backend("--shapes")
    pool = measured_spectra(spectra)

    def ranks(sigma: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        kept = uniform(shapes.rank, HEADLINE)
        problem = Problem(shapes.names, shapes.rank, shapes.cost, sigma.numpy())
        chosen = spectral(problem, int(kept @ shapes.cost), half_uniform_floor(kept))
        return torch.from_numpy(chosen.k), torch.from_numpy(kept)

    found = benchmark_device(
        device_fleet(shapes, backend.device, SEED, pool),
        backend,
        ranks,
        methods=DEFAULT_METHODS if methods is None else methods,
        warmups=2 if warmups is None else warmups,
        passes=5 if passes is None else passes,
        subset=subset,
        budget=budget,
        seed=SEED,
    )
    torch.cuda.empty_cache()  # the next fleet needs the memory whole
    return found


def eigensolver_records() -> list[dict[str, Any]]:
    """Both eigensolvers of the core at orders 16 to 128, on one GPU."""
    return benchmark_eigensolvers(_backend("--shapes").device, seed=SEED)


def scaling_records(
    name: str,
    devices: int,
    warmups: int | None = None,
    passes: int | None = None,
    *,
    spectra: Path | None = None,
) -> list[dict[str, Any]]:
    """The Gram path on a shape fleet divided between 1, 2, 4, ... and ``devices`` GPUs."""
    shapes = shape_fleet(name)
    _backend("--devices")
    return benchmark_scaling(
        shapes,
        [f"cuda:{index}" for index in range(torch.cuda.device_count())],
        [*(1 << step for step in range(devices.bit_length()) if 1 << step < devices), devices],
        warmups=2 if warmups is None else warmups,
        passes=5 if passes is None else passes,
        seed=SEED,
        pool=measured_spectra(spectra),
    )


def end_to_end_records(
    folder: Path,
    shapes: str | None,
    budget: str,
    warmups: int,
    passes: int,
    *,
    arms: Sequence[str] | None = None,
    spectra: Path | None = None,
) -> list[dict[str, Any]]:
    """The chain from files to files on one GPU, in ``arms`` of :mod:`loraforge.bench.end_to_end` or both.

    With ``shapes``, ``folder`` must be absent or empty, and is filled with that fleet first, which stays.
    """
    # needs export and all that it needs, which the others do not
    from loraforge.bench.end_to_end import ARMS, benchmark

    chosen = ARMS if arms is None else tuple(arm for arm in ARMS if arm in arms)
    if arms is not None and len(chosen) != len(arms):
        odd = next(iter(arm for arm in arms if arm not in ARMS), arms[0])
        raise UsageError(
            f"takes no {odd!r}", key="--arms", remedy=f"give some of {', '.join(ARMS)}, each once"
        )
    wanted = parse_budget(budget)
    fleet = None if shapes is None else shape_fleet(shapes)
    backend = _backend("bench end-to-end")
    if fleet is not None:
        refuse_non_empty(folder, force=None)
        write_fleet(fleet, folder, backend.device, SEED, measured_spectra(spectra))
    with tempfile.TemporaryDirectory(dir=folder.resolve().parent, prefix=f".{folder.name}.") as temporary:
        return benchmark(
            shapes or folder.resolve().name,
            [folder],
            wanted,
            Path(temporary) / "out",
            backend,
            warmups=warmups,
            passes=passes,
            arms=chosen,
        )


def _backend(key: str) -> Backend:
    backend = gpu.kernels() if gpu.available() else None
    if backend is None:
        raise MissingDependencyError(
            "is timed on a GPU, and there is none that works here",
            key=key,
            remedy="run loraforge doctor, or give loraforge bench recompression adapter folders",
        )
    return backend


def measured_spectra(spectra: Path | None) -> list[Floats] | None:
    """Measured spectra of a file of records; None for the synthetic family. Raises InputError where it has none."""
    if spectra is None:
        return None
    pool = [np.array(record["sigma"]) for record in read_jsonl(spectra) if "sigma" in record]
    if not pool:
        raise InputError(
            "holds no record with sigma", path=spectra, remedy="give records of loraforge factor"
        )
    return pool
