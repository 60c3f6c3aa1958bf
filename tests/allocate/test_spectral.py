"""The greedy rule against a plain reference, its bound against the true optimum, and its promises."""

from __future__ import annotations

import heapq
import itertools
import time
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loraforge.allocate.problem import Problem
from loraforge.allocate.spectral import half_uniform_floor, spectral
from loraforge.allocate.uniform import uniform
from loraforge.fleet.shapes import shape_fleet, synthetic_spectra


def problem(spectra: list[list[float]], cost: list[int]) -> Problem:
    return Problem(
        [("a", f"m{index}") for index in range(len(cost))],
        np.array([len(spectrum) for spectrum in spectra]),
        np.array(cost),
        np.concatenate([np.array(spectrum, dtype=np.float64) for spectrum in spectra]),
    )


def reference(
    spectra: list[list[float]], cost: list[int], ceiling: int, floor: list[int], k_max: int
) -> list[int]:
    """The rule as stated, a direction at a time: densest first, ties to the lower module."""
    cap = [min(len(spectrum), k_max) for spectrum in spectra]
    k = [min(low, high) for low, high in zip(floor, cap, strict=True)]
    slack = ceiling - sum(kept * c for kept, c in zip(k, cost, strict=True))

    def entry(m: int) -> tuple[float, int]:
        return -(np.float64(spectra[m][k[m]]) ** 2) / cost[m], m

    heap = [entry(m) for m in range(len(cost)) if k[m] < cap[m]]
    heapq.heapify(heap)
    while heap:
        _, m = heapq.heappop(heap)
        if cost[m] > slack:
            continue  # the module is dropped
        k[m] += 1
        slack -= cost[m]
        if k[m] < cap[m]:
            heapq.heappush(heap, entry(m))
    return k


def energy(spectra: list[list[float]], k: tuple[int, ...] | list[int]) -> float:
    return sum(value**2 for spectrum, kept in zip(spectra, k, strict=True) for value in spectrum[:kept])


# few distinct values, so that ties are common; zeros included
value = st.one_of(st.sampled_from([0.0, 0.5, 1.0, 2.0]), st.floats(0, 4, width=32))
spectrum = st.lists(value, min_size=1, max_size=8).map(lambda values: sorted(values, reverse=True))


@st.composite
def cases(
    draw: st.DrawFn, modules: int = 8, rank: int = 8
) -> tuple[list[list[float]], list[int], int, list[int]]:
    spectra = [s[:rank] for s in draw(st.lists(spectrum, min_size=1, max_size=modules))]
    cost = [draw(st.sampled_from([3, 5, 5, 8, 13])) for _ in spectra]
    floor = [draw(st.integers(1, len(s))) if draw(st.booleans()) else 1 for s in spectra]
    least = sum(low * c for low, c in zip(floor, cost, strict=True))
    most = sum(len(s) * c for s, c in zip(spectra, cost, strict=True))
    return spectra, cost, draw(st.integers(least, most + 5)), floor


@given(cases(), st.integers(1, 9))
@settings(max_examples=300, deadline=None)
def test_equals_the_reference(case: tuple[list[list[float]], list[int], int, list[int]], k_max: int) -> None:
    spectra, cost, ceiling, floor = case
    chosen = spectral(problem(spectra, cost), ceiling, np.array(floor), cap=k_max)
    assert chosen.k.tolist() == reference(spectra, cost, ceiling, floor, k_max)


@given(cases())
@settings(max_examples=200, deadline=None)
def test_promises(case: tuple[list[list[float]], list[int], int, list[int]]) -> None:
    spectra, cost, ceiling, floor = case
    p = problem(spectra, cost)
    chosen = spectral(p, ceiling, np.array(floor))
    assert chosen.spent == p.parameters(chosen.k) <= ceiling
    assert chosen.slack == ceiling - chosen.spent
    assert (chosen.k >= floor).all()
    assert (chosen.k <= p.rank).all()
    open_modules = chosen.k < p.rank
    assert not open_modules.any() or p.cost[open_modules].min() > chosen.slack  # nothing more fits
    assert p.energy(chosen.k) == pytest.approx(energy(spectra, chosen.k.tolist()))
    assert 0 <= p.retained_energy(chosen.k) <= 1


@given(cases(modules=5, rank=4))
@settings(max_examples=200, deadline=None)
def test_gap_bounds_the_optimum(case: tuple[list[list[float]], list[int], int, list[int]]) -> None:
    spectra, cost, ceiling, floor = case
    chosen = spectral(problem(spectra, cost), ceiling, np.array(floor))
    choices = itertools.product(*(range(low, len(s) + 1) for low, s in zip(floor, spectra, strict=True)))
    best = max(energy(spectra, k) for k in choices if np.dot(k, cost) <= ceiling)
    reached = energy(spectra, chosen.k.tolist())
    assert reached <= best * (1 + 1e-12)
    assert best <= reached + chosen.gap + 1e-9


def test_final_slack_is_no_bound() -> None:
    """Why the bound takes the slack at the first rejection: here the final slack is 0, the optimum far off."""
    cost = [1, 10, 9]
    p = problem([[11**0.5] * 2, [10.0] * 2, [3.0] * 2], cost)  # rank 1 is the floor, the second is the choice
    chosen = spectral(p, sum(cost) + 10, np.ones(3, dtype=np.int64))
    assert chosen.k.tolist() == [2, 1, 2]
    assert chosen.slack == 0
    assert chosen.first_rejected_density == pytest.approx(10)
    lead = 100 - (11 + 9)
    assert chosen.gap == pytest.approx(9 * 10 - 9)
    assert chosen.gap >= lead


@given(st.lists(spectrum, min_size=1, max_size=8), st.integers(0, 60), st.integers(0, 60))
@settings(deadline=None)
def test_nested_in_budget_where_costs_are_equal(spectra: list[list[float]], one: int, two: int) -> None:
    p = problem(spectra, [4] * len(spectra))
    low, high = (4 * len(spectra) + extra for extra in sorted((one, two)))
    floor = np.ones(len(spectra), dtype=np.int64)
    assert (spectral(p, low, floor).k <= spectral(p, high, floor).k).all()


def test_ties_go_to_the_lower_module() -> None:
    p = problem([[1.0, 1.0], [1.0, 1.0], [1.0, 1.0]], [2, 2, 2])
    assert spectral(p, 10, np.ones(3, dtype=np.int64)).k.tolist() == [2, 2, 1]


def test_absolute_energy_starves_weak_modules_but_for_the_floor() -> None:
    p = problem([[9.0] * 4, [1.0] * 4], [1, 1])
    assert spectral(p, 5, np.array([1, 1])).k.tolist() == [4, 1]
    assert spectral(p, 5, np.array([2, 2])).k.tolist() == [3, 2]


@pytest.mark.parametrize(("floor", "ceiling"), [([3, 1], 100), ([-1, 1], 100), ([2, 2], 3)])
def test_impossible_floor(floor: list[int], ceiling: int) -> None:
    with pytest.raises(ValueError, match="rank floor"):
        spectral(problem([[1.0, 1.0], [1.0, 1.0]], [1, 1]), ceiling, np.array(floor))


@pytest.mark.parametrize(
    ("spectra", "match"),
    [
        ([[1.0, 2.0]], "non-increasing"),
        ([[-1.0]], "non-negative"),
        ([[float("nan")]], "finite"),
        ([[float("inf")]], "finite"),
    ],
)
def test_bad_spectra(spectra: list[list[float]], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        problem(spectra, [1])


@pytest.mark.parametrize(("name", "floor_cost"), [("qwen50", 275_134_464), ("llama35", 238_551_040)])
def test_shape_fleets(name: str, floor_cost: int) -> None:
    fleet = shape_fleet(name)
    p = Problem(fleet.names, fleet.rank, fleet.cost, synthetic_spectra(fleet, 0))
    for divisor in (12, 8, 4, 2):
        kept = uniform(fleet.rank, Fraction(1, divisor))
        ceiling = p.parameters(kept)
        floor = half_uniform_floor(kept)
        if divisor == 12:
            assert p.parameters(floor) == floor_cost
        chosen = spectral(p, ceiling, floor)
        assert 0 <= chosen.slack < fleet.cost.min()  # 3,584 for qwen50: the cheapest direction no longer fits
        assert p.energy(kept) < p.energy(chosen.k)
        assert chosen.gap < 1e-4 * p.energy(chosen.k)
        free = spectral(p, ceiling, np.ones_like(floor))
        assert p.energy(free.k) + free.gap >= p.energy(chosen.k)


@pytest.mark.slow
def test_speed() -> None:
    """Qwen50 in half a second; 1,000 adapters of 252 modules at rank 64 in ten. Generous: machines differ."""
    fleet = shape_fleet("qwen50")
    seconds = _solve(Problem(fleet.names, fleet.rank, fleet.cost, synthetic_spectra(fleet, 0)))
    print(f"qwen50: {len(fleet.names)} modules, {fleet.rank.sum()} directions: {seconds:.3f} s")
    assert seconds < 0.5
    modules = 1000 * 252
    rank = np.full(modules, 64)
    cost = np.resize(fleet.cost[:252], modules)
    rate = np.random.default_rng(0).uniform(2, 8, modules)
    sigma = np.exp(-np.outer(rate, np.arange(64) / 64)).ravel()
    seconds = _solve(Problem(range(modules), rank, cost, sigma))  # type: ignore[arg-type]
    print(f"1,000 adapters: {modules} modules, {len(sigma)} directions: {seconds:.3f} s")
    assert seconds < 10


def _solve(p: Problem) -> float:
    started = time.perf_counter()
    kept = uniform(p.rank, Fraction(1, 12))
    spectral(p, p.parameters(kept), half_uniform_floor(kept))
    return time.perf_counter() - started
