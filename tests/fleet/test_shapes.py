"""The paper's fleets, to the parameter and to the batch."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from loraforge.allocate.problem import Problem
from loraforge.errors import UsageError
from loraforge.fleet.shapes import ShapeFleet, shape_fleet, synthetic_spectra


@pytest.mark.parametrize(
    ("name", "matrices", "parameters", "ranks"),
    [
        ("qwen50", 12_492, 5_946_605_568, {16: 5, 32: 4, 64: 40, 128: 1}),
        ("llama35", 7_840, 5_200_936_960, {16: 4, 32: 4, 64: 26, 128: 1}),
    ],
)
def test_constants(name: str, matrices: int, parameters: int, ranks: dict[int, int]) -> None:
    fleet = shape_fleet(name)
    assert len(fleet.names) == len(set(fleet.names)) == matrices
    assert fleet.n_parameters == parameters
    adapters = dict(zip((adapter for adapter, _ in fleet.names), fleet.rank.tolist(), strict=True))
    assert Counter(adapters.values()) == ranks
    assert (fleet.rank <= np.minimum(fleet.d_in, fleet.d_out)).all()


def test_absent_modules_of_qwen50() -> None:
    fleet = shape_fleet("qwen50")
    present = set(fleet.names)
    adapters = sorted({adapter for adapter, _ in fleet.names})
    tails = [f"self_attn.{kind}_proj" for kind in "qkvo"]
    for layer in range(36):
        absent = [
            (adapter, tail[-6])
            for adapter in adapters
            for tail in tails
            if (adapter, f"model.layers.{layer}.{tail}") not in present
        ]
        assert len(absent) == 3
        assert sum(kind in "kv" for _, kind in absent) == 2
        assert len({adapter for adapter, _ in absent}) >= 2
        assert all(adapter.endswith("r64") for adapter, _ in absent)


def calls(fleet: ShapeFleet, cap: int, *, per_adapter: bool) -> int:
    """Batched factorisation calls when matrices of equal shape go together, ``cap`` at most."""
    shapes = zip(fleet.names, fleet.d_in.tolist(), fleet.d_out.tolist(), fleet.rank.tolist(), strict=True)
    groups = Counter((adapter if per_adapter else "", *shape) for (adapter, _), *shape in shapes)
    return sum(-(-count // cap) for count in groups.values())


@pytest.mark.parametrize(
    ("name", "per_adapter", "expected"),
    [("qwen50", False, 524), ("llama35", False, 334), ("qwen50", True, 596), ("llama35", True, 385)],
)
def test_batches_of_24(name: str, per_adapter: bool, expected: int) -> None:
    assert calls(shape_fleet(name), 24, per_adapter=per_adapter) == expected


@pytest.mark.parametrize("pool", [None, [np.exp(-np.arange(16) / 3), 5 * np.ones(8), np.zeros(4)]])
def test_spectra(pool: list[np.ndarray] | None) -> None:
    fleet = shape_fleet("llama35")
    sigma = synthetic_spectra(fleet, 7, pool)
    Problem(fleet.names, fleet.rank, fleet.cost, sigma)  # finite, non-negative, non-increasing, right length
    assert np.array_equal(sigma, synthetic_spectra(fleet, 7, pool))
    assert not np.array_equal(sigma, synthetic_spectra(fleet, 8, pool))


def test_spectra_come_from_the_pool() -> None:
    fleet = shape_fleet("llama35")
    measured = np.array([8.0, 4.0, 2.0, 1.0])
    sigma = synthetic_spectra(fleet, 0, [measured])
    last = sigma[-128:]  # the r128 adapter's last module: stretched 32 times
    assert last[0] / last[-1] == pytest.approx(8)
    assert last[16] / last[48] == pytest.approx(2, rel=0.05)


def test_bad_requests() -> None:
    with pytest.raises(UsageError, match="'gpt2' is not a shape fleet; choose one of qwen50, llama35"):
        shape_fleet("gpt2")
    with pytest.raises(UsageError, match="holds no spectrum above zero"):
        synthetic_spectra(shape_fleet("llama35"), 0, [np.zeros(4)])
