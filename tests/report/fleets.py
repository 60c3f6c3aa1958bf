"""Compressed fleets that were never factorised: manifests and spectra that agree, with any names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from loraforge.allocate.allocation import BudgetEntry
from loraforge.allocate.budget import parse_budget
from loraforge.allocate.policy import allocate
from loraforge.allocate.problem import Ints, Problem
from loraforge.export.certificate import energy_splits
from loraforge.export.manifest import (
    AdapterEntry,
    Certificate,
    FleetEntry,
    Manifest,
    ModuleEntry,
    Weights,
)

HOSTILE = (
    "<script>alert(1)</script>",
    "</script><script>alert(2)</script>",
    '"><img src=x onerror=alert(3)>',
    "a&amp;b 'c' `d` ${e} $f",
    "abc\u202edef\u2066",
    "two\nlines\x1b[2J",
    "half \udc80",
    "<!--",
    "名前 🦊",
    "x" * 300,
)
SHAPES = (
    ("self_attn.q_proj", 64, 64),
    ("self_attn.v_proj", 64, 32),
    ("mlp.up_proj", 64, 160),
    ("mlp.down_proj", 160, 64),
)


@dataclass(frozen=True)
class Made:
    manifest: Manifest
    problem: Problem
    uniform: Ints


def make_fleet(
    names: Sequence[str],
    *,
    layers: int = 3,
    ranks: Sequence[int] = (4, 8, 16),
    budget: str = "1/4",
    seed: int = 0,
) -> Made:
    """A fleet under the spectral policy; adapter i has rank ``ranks[i % len(ranks)]`` and the energy of 4^-i % 5."""
    draw = np.random.default_rng(seed)
    modules = [
        (f"model.layers.{layer}.{name}", d_in, d_out)
        for layer in range(layers)
        for name, d_in, d_out in SHAPES
    ]
    rank = [ranks[i % len(ranks)] for i in range(len(names))]
    sigma = [
        np.sort(draw.gamma(1.0, 1.0, r) ** 2)[::-1] * 2.0 ** -(i % 5)
        for i, r in enumerate(rank)
        for _ in modules
    ]
    problem = Problem(
        [(name, module) for name in names for module, _, _ in modules],
        np.repeat(np.array(rank, dtype=np.int64), len(modules)),
        np.tile(np.array([d_in + d_out for _, d_in, d_out in modules], dtype=np.int64), len(names)),
        np.concatenate(sigma),
    )
    chosen = allocate(problem, "spectral", parse_budget(budget))
    splits = energy_splits(sigma, chosen.k.tolist())
    entries = iter(
        ModuleEntry(
            k=k,
            r=r,
            scale=2.0,
            d_in=d_in,
            d_out=d_out,
            path="gram",
            certificate=Certificate(action_error=4e-3 * energy, retained_energy=energy, relative_error=lost),
            compact_parameters=k * (d_in + d_out),
            physical_bytes={"ragged": 2 * k * (d_in + d_out)},
        )
        for k, r, (energy, lost), (_, d_in, d_out) in zip(
            chosen.k.tolist(), problem.rank.tolist(), splits, modules * len(names), strict=True
        )
    )
    adapters = {}
    for name, r in zip(names, rank, strict=True):
        own = {module: next(entries) for module, _, _ in modules}
        parameters = sum(r * (d_in + d_out) for _, d_in, d_out in modules)
        size = 2 * sum(entry.compact_parameters for entry in own.values())
        adapters[name] = AdapterEntry(
            weights_sha256=f"{len(adapters):064x}",
            factor_key="f" * 64,
            original_parameters=parameters,
            original_bytes=4 * parameters,
            passthrough=(),
            layouts={"ragged": Weights(rank=r, sha256="a" * 64, bytes=size)},
            modules=own,
        )
    fleet = FleetEntry(
        name="<b>fleet</b>",
        base_model="tiny/<i>base</i>",
        policy="spectral",
        budget=BudgetEntry(kind="fraction", value=budget, params=chosen.ceiling.params),
        floor="max(1, ceil(u / 2))",
        spent=chosen.spent,
        slack=chosen.slack,
        optimality_gap=chosen.gap,
        retained_energy=chosen.retained_energy,
        layouts=("ragged",),
        dtype="bfloat16",
        tool_version="0.1.0",
        allocation_sha256="b" * 64,
        probes=8,
        probe_seed=20261130,
    )
    return Made(Manifest(fleet=fleet, adapters=adapters), problem, chosen.ceiling.uniform)
