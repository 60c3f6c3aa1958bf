"""Small fleets for tests of allocation, drawn by hypothesis: few distinct values, so that ties are common."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
from hypothesis import strategies as st

from loraforge.allocate.problem import Ints, Problem

VALUES = st.one_of(st.sampled_from([0.0, 0.5, 1.0, 2.0]), st.floats(2**-10, 4, width=32))
KINDS = ("q_proj", "k_proj", "v_proj", "up_proj")


@st.composite
def fleets(
    draw: st.DrawFn, *, adapters: int = 3, modules: int = 3, rank: int = 6, cost: tuple[int, ...] = (3, 5, 8)
) -> Problem:
    """Up to ``adapters`` adapters of up to ``modules`` modules each, of rank at most ``rank``."""
    names: list[tuple[str, str]] = []
    spectra: list[list[float]] = []
    costs: list[int] = []
    for adapter in range(draw(st.integers(1, adapters))):
        for kind in draw(st.lists(st.sampled_from(KINDS), min_size=1, max_size=modules, unique=True)):
            names.append((f"a{adapter}", f"model.layers.0.{kind}"))
            spectra.append(sorted(draw(st.lists(VALUES, min_size=1, max_size=rank)), reverse=True))
            costs.append(draw(st.sampled_from(cost)))
    return problem(names, spectra, costs)


def problem(names: list[tuple[str, str]], spectra: list[list[float]], costs: list[int]) -> Problem:
    return Problem(
        names,
        np.array([len(spectrum) for spectrum in spectra]),
        np.array(costs),
        np.concatenate([np.array(spectrum, dtype=np.float64) for spectrum in spectra]),
    )


def permuted(p: Problem, order: list[int]) -> Problem:
    """The same modules in another order."""
    pieces = np.split(p.sigma, p.offsets[1:-1])
    return problem([p.names[i] for i in order], [pieces[i].tolist() for i in order], p.cost[order].tolist())


def choices(p: Problem, ceiling: int, least: int = 1) -> Iterator[Ints]:
    """Every choice of ranks, from ``least`` on, that costs at most ``ceiling``."""
    for k in itertools.product(*(range(least, r + 1) for r in p.rank.tolist())):
        ranks = np.array(k)
        if p.parameters(ranks) <= ceiling:
            yield ranks
