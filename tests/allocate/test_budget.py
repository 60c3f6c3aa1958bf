"""Budgets: exact fractions, exact ceilings, and one clear line for what is no budget."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraforge.allocate.budget import ceiling, floor_warning, parse_budget
from loraforge.allocate.uniform import largest_fraction, uniform
from loraforge.errors import BudgetError, UsageError
from loraforge.fleet.shapes import shape_fleet

GOLDEN = {
    "qwen50": {12: 457_869_312, 8: 743_325_696, 4: 1_486_651_392, 2: 2_973_302_784, 1: 5_946_605_568},
    "llama35": {12: 398_458_880, 8: 650_117_120, 4: 1_300_234_240, 2: 2_600_468_480, 1: 5_200_936_960},
}


@pytest.mark.parametrize("name", GOLDEN)
@pytest.mark.parametrize("divisor", [12, 8, 4, 2, 1])
def test_paper_constants(name: str, divisor: int) -> None:
    fleet = shape_fleet(name)
    expected = GOLDEN[name][divisor]
    by_fraction = ceiling(parse_budget(f"1/{divisor}"), fleet.rank, fleet.cost)
    assert by_fraction.params == by_fraction.uniform @ fleet.cost == expected
    # the same ceiling stated as a number leads to the same ranks
    by_count = ceiling(parse_budget(params=expected), fleet.rank, fleet.cost)
    assert by_count.params == expected
    assert np.array_equal(by_count.uniform, by_fraction.uniform)
    by_bytes = ceiling(parse_budget(bytes_=4 * expected + 3), fleet.rank, fleet.cost, bytes_per_parameter=4)
    assert by_bytes.params == expected
    assert np.array_equal(by_bytes.uniform, by_fraction.uniform)


@pytest.mark.parametrize(
    ("text", "value"),
    [("1/12", Fraction(1, 12)), ("0.25", Fraction(1, 4)), (" 1 ", Fraction(1)), ("3e-1", Fraction(3, 10))],
)
def test_fractions(text: str, value: Fraction) -> None:
    budget = parse_budget(text)
    assert (budget.kind, budget.value, budget.amount) == ("fraction", text.strip(), value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "0",
            "--budget: 0 is not above 0 and at most 1; write a fraction such as 1/12, or pass --params or --bytes",
        ),
        (
            "-1/4",
            "--budget: -1/4 is not above 0 and at most 1; write a fraction such as 1/12, or pass --params or --bytes",
        ),
        (
            "1.01",
            "--budget: 1.01 is not above 0 and at most 1; write a fraction such as 1/12, or pass --params or --bytes",
        ),
        ("nan", "--budget: 'nan' is not a number; write a fraction such as 1/12 or 0.25"),
        ("inf", "--budget: 'inf' is not a number; write a fraction such as 1/12 or 0.25"),
        (
            "1e-999999999",
            "--budget: '1e-999999999' is not a number; write a fraction such as 1/12 or 0.25",
        ),
        ("a third", "--budget: 'a third' is not a number; write a fraction such as 1/12 or 0.25"),
        ("1/0", "--budget: '1/0' is not a number; write a fraction such as 1/12 or 0.25"),
    ],
)
def test_no_fraction(text: str, message: str) -> None:
    with pytest.raises(BudgetError) as caught:
        parse_budget(text)
    assert str(caught.value) == message
    assert caught.value.exit_code == 6


@pytest.mark.parametrize("amount", [0, -5])
def test_no_amount(amount: int) -> None:
    with pytest.raises(BudgetError, match=f"^--params: {amount} is not a budget; pass a positive number$"):
        parse_budget(params=amount)
    with pytest.raises(BudgetError, match=f"^--bytes: {amount} is not a budget; pass a positive number$"):
        parse_budget(bytes_=amount)


def test_exactly_one() -> None:
    with pytest.raises(UsageError, match="pass one of --budget, --params and --bytes"):
        parse_budget()
    with pytest.raises(UsageError, match="pass one of --budget, --params and --bytes"):
        parse_budget("1/2", params=3)


def test_below_the_floor_names_the_least() -> None:
    rank, cost = np.array([4, 8]), np.array([10, 7])
    with pytest.raises(BudgetError) as caught:
        ceiling(parse_budget(params=16), rank, cost)
    assert str(caught.value) == (
        "--params: 16 params is below the rank floor: rank 1 in all 2 modules takes 17; allow at least 17 params"
    )
    with pytest.raises(BudgetError, match="allow at least 34 bytes"):
        ceiling(parse_budget(bytes_=33), rank, cost, bytes_per_parameter=2)
    assert ceiling(parse_budget(bytes_=34), rank, cost, bytes_per_parameter=2).uniform.tolist() == [1, 1]


def test_more_than_everything_keeps_everything() -> None:
    rank, cost = np.array([4, 8]), np.array([10, 7])
    assert ceiling(parse_budget(params=10**12), rank, cost).uniform.tolist() == [4, 8]


modules = st.lists(st.tuples(st.integers(1, 40), st.integers(1, 50)), min_size=1, max_size=12)


@given(modules, st.fractions(min_value=Fraction(1, 10**9), max_value=1))
def test_uniform_is_the_floor_of_the_share(shapes: list[tuple[int, int]], fraction: Fraction) -> None:
    rank = np.array([r for r, _ in shapes])
    assert uniform(rank, fraction).tolist() == [max(1, int(r * fraction)) for r, _ in shapes]


@given(modules, st.fractions(0, 1).filter(bool), st.fractions(0, 1).filter(bool))
def test_uniform_is_monotone(shapes: list[tuple[int, int]], one: Fraction, two: Fraction) -> None:
    rank = np.array([r for r, _ in shapes])
    assert (uniform(rank, min(one, two)) <= uniform(rank, max(one, two))).all()


@given(modules, st.integers(0, 20_000))
def test_largest_fraction_is_the_largest(shapes: list[tuple[int, int]], limit: int) -> None:
    rank, cost = np.array(shapes).T
    found = largest_fraction(rank, cost, limit)
    steps = sorted({Fraction(j, int(r)) for r in rank for j in range(1, r + 1)})
    fitting = [step for step in steps if uniform(rank, step) @ cost <= limit]
    assert found == (fitting[-1] if fitting else None)
    if found is None:
        assert cost.sum() > limit


@pytest.mark.parametrize(
    ("budget", "warned"),
    [("1/4", False), ("1/8", False), ("10/88", False), ("1/9", True), ("1/100", True), (100, False)],
)
def test_a_floor_that_binds_is_said(budget: str | int, warned: bool) -> None:
    rank, cost = np.array([8, 8]), np.array([100, 50])
    wanted = parse_budget(budget) if isinstance(budget, str) else parse_budget(params=1000)
    limit = ceiling(wanted, rank, cost)
    warning = floor_warning(wanted, limit, rank, cost)
    assert (warning is not None) == warned
    if warning is not None:
        assert "of 1,200 parameters" in warning
        assert "up to 150 (12.50%) are kept" in warning
