"""Ranks of one layer of a spectral 1/12 shape fleet: what mixed-rank cases are made of."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import numpy as np

from loraforge.allocate.problem import Problem
from loraforge.allocate.spectral import half_uniform_floor, spectral
from loraforge.allocate.uniform import uniform
from loraforge.fleet.shapes import Floats, shape_fleet, synthetic_spectra

SEED = 20261130
_TAILS = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "o": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}


def layer_ranks(pool: Sequence[Floats] | None = None, name: str = "qwen50") -> dict[str, list[list[int]]]:
    """Projection -> ranks of each adapter and slice, in the layer of a shape fleet that keeps the median of parameters.

    pool: measured spectra that the fleet's are drawn from (see :func:`loraforge.fleet.shapes.synthetic_spectra`). A
    module that an adapter lacks has rank 0.
    """
    fleet = shape_fleet(name)
    sigma = synthetic_spectra(fleet, SEED, pool)
    kept = uniform(fleet.rank, Fraction(1, 12))
    problem = Problem(fleet.names, fleet.rank, fleet.cost, sigma)
    ranks = spectral(problem, int(kept @ fleet.cost), half_uniform_floor(kept)).k
    found = {
        (adapter, module): int(rank)
        for (adapter, module), rank in zip(fleet.names, ranks.tolist(), strict=True)
    }
    layer_of = np.array([int(module.split(".")[2]) for _, module in fleet.names])
    parameters = np.bincount(layer_of, weights=ranks * fleet.cost)
    layer = int(np.argsort(parameters, kind="stable")[len(parameters) // 2])
    adapters = list(dict.fromkeys(adapter for adapter, _ in fleet.names))
    return {
        projection: [
            [found.get((adapter, f"model.layers.{layer}.{tail}"), 0) for tail in tails]
            for adapter in adapters
        ]
        for projection, tails in _TAILS.items()
    }
