"""Every policy keeps its promises on any fleet, and finds the best choice where it says that it does."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import choices, fleets, permuted, problem

from loraforge.allocate import objectives
from loraforge.allocate.budget import parse_budget
from loraforge.allocate.costs import bucketed_bytes, load_microseconds, microseconds, reached, select_by_cost
from loraforge.allocate.fused import fuse
from loraforge.allocate.options import DEFAULTS, Options, load_traffic, parse_cost, parse_share
from loraforge.allocate.policies import FREE, RULES, Cut, Fair, Greedy
from loraforge.allocate.policy import allocate
from loraforge.allocate.problem import Problem
from loraforge.allocate.spectral import spectral
from loraforge.allocate.threshold import threshold
from loraforge.config import Policy
from loraforge.errors import BudgetError, InputError, UsageError

GREEDY: dict[Policy, Greedy] = {
    name: rule.choose for name, rule in RULES.items() if isinstance(rule.choose, Greedy)
}
FAIR: list[Policy] = [name for name, rule in RULES.items() if isinstance(rule.choose, Fair)]
CUTS: dict[Policy, Cut] = {name: rule.choose for name, rule in RULES.items() if isinstance(rule.choose, Cut)}
budgets = st.sampled_from(["1/12", "1/6", "1/4", "1/3", "1/2", "3/4", "1"])
options = st.builds(
    Options,
    k_max=st.none() | st.integers(1, 7),
    adapter_floor=st.none() | st.fractions(0, 1),
    adapter_ceiling=st.none() | st.fractions(1, 3),
    fused=st.booleans(),
    cost=st.none() | st.just(bucketed_bytes([2, 4], 2)) | st.just(microseconds({"q_proj": {1: 1, 4: 2}} | {
        kind: {2: 1.0, 3: 5.0, 6: 5.5} for kind in ("k_proj", "v_proj", "up_proj")
    })),
)  # fmt: skip


def worst(p: Problem, k: np.ndarray) -> float:
    whole = p.adapter_energy(p.rank)
    return float(np.min(np.where(whole > 0, p.adapter_energy(k) / np.where(whole > 0, whole, 1), 1.0)))


def least_kept(policy: Policy, p: Problem, k: np.ndarray) -> bool:
    """One direction in every module, or at least in every adapter."""
    if RULES[policy].floor == FREE:
        return bool((k >= 0).all() and (np.bincount(p.owner, k) >= 1).all())
    return bool((k >= 1).all())


@pytest.mark.parametrize("policy", RULES)
@given(p=fleets(), budget=budgets)
@settings(max_examples=40, deadline=None)
def test_the_budget_holds(policy: Policy, p: Problem, budget: str) -> None:
    chosen = allocate(p, policy, parse_budget(budget))
    assert chosen.spent == p.parameters(chosen.k) <= chosen.ceiling.params
    assert least_kept(policy, p, chosen.k)
    assert (chosen.k <= p.rank).all()
    assert chosen.gap >= 0


@pytest.mark.parametrize("policy", GREEDY)
@given(p=fleets(), budget=budgets, asked=options)
@settings(max_examples=60, deadline=None)
def test_the_budget_holds_with_every_option(policy: Policy, p: Problem, budget: str, asked: Options) -> None:
    if asked.cost is not None:  # a table of times may not allow what adapters are to have at least
        asked = replace(asked, adapter_floor=None)
    chosen = allocate(p, policy, parse_budget(budget), options=asked)
    assert chosen.spent <= chosen.ceiling.params
    assert asked.fused or least_kept(policy, p, chosen.k)
    assert (chosen.k <= np.minimum(p.rank, asked.k_max or 99)).all()
    uniform = p.by_adapter((chosen.ceiling.uniform * p.cost).astype(float))
    spent = p.by_adapter((chosen.k * p.cost).astype(float))
    if asked.adapter_ceiling is not None:
        assert (spent <= float(asked.adapter_ceiling) * uniform + 1e-9).all()
    if asked.fused:
        group = fuse(p).group
        assert all(len(set(chosen.k[group == g].tolist())) == 1 for g in group.tolist())
    if asked.cost is not None:
        reach = asked.cost(p)
        used, allowed = (reached(p, reach, k).sum() for k in (chosen.k, chosen.ceiling.uniform))
        assert used <= allowed + 1e-9


@given(p=fleets(), budget=budgets, share=st.fractions(0, 1))
@settings(max_examples=60, deadline=None)
def test_an_adapter_gets_its_floor(p: Problem, budget: str, share: Fraction) -> None:
    chosen = allocate(p, "spectral-nofloor", parse_budget(budget), options=Options(adapter_floor=share))
    uniform = p.by_adapter((chosen.ceiling.uniform * p.cost).astype(float))
    spent = p.by_adapter((chosen.k * p.cost).astype(float))
    full = p.by_adapter((p.rank * p.cost).astype(float))
    # short of the share by less than the dearest direction, or all that there is
    assert ((spent > float(share) * uniform - 8) | (spent == full)).all()


@pytest.mark.parametrize("policy", [*GREEDY, *FAIR])
@given(p=fleets(cost=(4,)), data=st.data())
@settings(max_examples=40, deadline=None)
def test_more_budget_is_never_worse(policy: Policy, p: Problem, data: st.DataObject) -> None:
    least, most = p.parameters(np.ones_like(p.rank)), p.parameters(p.rank)
    low, high = sorted(data.draw(st.integers(least, most)) for _ in range(2))
    one, two = (allocate(p, policy, parse_budget(params=params)).k for params in (low, high))
    if policy in FAIR:
        assert worst(p, one) <= worst(p, two) + 1e-12
    else:
        measured = objectives.weighed(p, GREEDY[policy].objective)
        assert measured.energy(one) <= measured.energy(two) * (1 + 1e-12) + 1e-12


@pytest.mark.parametrize("policy", CUTS)
@given(p=fleets(), data=st.data())
@settings(max_examples=40, deadline=None)
def test_thresholds_are_nested_in_the_budget(policy: Policy, p: Problem, data: st.DataObject) -> None:
    least, most = p.parameters(np.ones_like(p.rank)), p.parameters(p.rank)
    low, high = sorted(data.draw(st.integers(least, most)) for _ in range(2))
    score = CUTS[policy].score
    assert (threshold(p, score, low) <= threshold(p, score, high)).all()


@pytest.mark.parametrize("policy", RULES)
@given(p=fleets(), budget=budgets, data=st.data())
@settings(max_examples=30, deadline=None)
def test_the_order_of_modules_does_not_matter(
    policy: Policy, p: Problem, budget: str, data: st.DataObject
) -> None:
    # distinct values: ties go to the lower module, which an order does change
    generator = np.random.default_rng(7)
    sigma = np.concatenate([np.sort(generator.uniform(0.5, 1.5, r))[::-1] for r in p.rank])
    p = replace(p, sigma=sigma)
    order = data.draw(st.permutations(range(len(p.names))))
    there = allocate(p, policy, parse_budget(budget)).k
    here = allocate(permuted(p, order), policy, parse_budget(budget)).k
    assert here.tolist() == there[order].tolist()


@pytest.mark.parametrize("policy", GREEDY)
@given(p=fleets(adapters=2, modules=2, rank=4), budget=budgets)
@settings(max_examples=40, deadline=None)
def test_the_gap_bounds_the_optimum(policy: Policy, p: Problem, budget: str) -> None:
    chosen = allocate(p, policy, parse_budget(budget))
    measured = objectives.weighed(p, GREEDY[policy].objective)
    floor = np.maximum(1, (chosen.ceiling.uniform + 1) // 2) if policy == "spectral" else 1
    best = max(measured.energy(k) for k in choices(p, chosen.ceiling.params) if (k >= floor).all())
    assert measured.energy(chosen.k) <= best * (1 + 1e-12) + 1e-12
    assert best <= measured.energy(chosen.k) + chosen.gap + 1e-9


@pytest.mark.parametrize("policy", GREEDY)
@given(p=fleets(adapters=2, modules=2, rank=4, cost=(5,)), budget=budgets)
@settings(max_examples=40, deadline=None)
def test_the_optimum_at_equal_costs(policy: Policy, p: Problem, budget: str) -> None:
    chosen = allocate(p, policy, parse_budget(budget))
    measured = objectives.weighed(p, GREEDY[policy].objective)
    floor = np.maximum(1, (chosen.ceiling.uniform + 1) // 2) if policy == "spectral" else 1
    best = max(measured.energy(k) for k in choices(p, chosen.ceiling.params) if (k >= floor).all())
    assert measured.energy(chosen.k) == pytest.approx(best)


@given(p=fleets(adapters=3, modules=2, rank=3, cost=(5,)), budget=budgets)
@settings(max_examples=100, deadline=None)
def test_fair_is_the_best_worst_case_at_equal_costs(p: Problem, budget: str) -> None:
    chosen = allocate(p, "fair", parse_budget(budget))
    best = max(worst(p, k) for k in choices(p, chosen.ceiling.params))
    assert worst(p, chosen.k) == pytest.approx(best)


@given(p=fleets(adapters=2, modules=2, rank=4), budget=budgets)
@settings(max_examples=60, deadline=None)
def test_linear_costs_lead_near_the_greedy_choice(p: Problem, budget: str) -> None:
    """With the cost of parameters as a table, the general rule is within one direction of the special one."""
    chosen = allocate(p, "spectral-nofloor", parse_budget(budget))
    ones = np.ones_like(p.rank)
    k = select_by_cost(
        p, p.place * np.repeat(p.cost, p.rank).astype(float), chosen.ceiling.params, chosen.ceiling.params, ones,
        p.rank,
    )  # fmt: skip
    assert p.parameters(k) <= chosen.ceiling.params
    assert p.energy(k) <= p.energy(chosen.k) + chosen.gap + 1e-9
    free = (k < p.rank) & (p.cost <= chosen.ceiling.params - p.parameters(k))
    assert not free.any()


def names(*pairs: str) -> list[tuple[str, str]]:
    return [(pair.split("/")[0], f"model.layers.0.{pair.split('/')[1]}") for pair in pairs]


def test_a_large_norm_takes_all_from_absolute_energy_alone() -> None:
    p = problem(names("loud/q_proj", "quiet/q_proj"), [[9.0, 8.0, 7.0, 6.0], [0.4, 0.3, 0.2, 0.1]], [1, 1])
    budget = parse_budget(params=5)
    ranks = {policy: allocate(p, policy, budget).k.tolist() for policy in RULES}
    assert ranks["spectral-nofloor"] == ranks["para-fleet"] == [4, 1]
    assert ranks["adapter-relative"] == ranks["module-relative"] == [3, 2]
    assert ranks["fair"] == [3, 2]
    assert ranks["fixed-rank"] == [2, 2]


def test_weights_of_objectives() -> None:
    p = problem(
        names("a/q_proj", "a/k_proj", "b/q_proj", "b/v_proj"), [[2.0], [1.0], [3.0], [0.0]], [1, 1, 1, 1]
    )
    assert objectives.absolute(p).tolist() == [1, 1, 1, 1]
    assert objectives.module_relative(p) == pytest.approx([1 / 4, 1, 1 / 9, 0])
    assert objectives.adapter_relative(p) == pytest.approx([1 / 5, 1 / 5, 1 / 9, 1 / 9])
    assert objectives.tempered(objectives.adapter_relative, 0.5)(p) == pytest.approx(
        [5**-0.5] * 2 + [1 / 3] * 2
    )
    half = objectives.blend({objectives.absolute: 0.5, objectives.adapter_relative: 0.5})(p)
    assert half == pytest.approx([0.5 / 14 + 0.5 / 10] * 2 + [0.5 / 14 + 0.5 / 18] * 2)
    by_traffic = objectives.traffic_weighted(objectives.absolute, {"a": 3.0, "b": 1.0})(p)
    assert by_traffic.tolist() == [3, 3, 1, 1]
    with pytest.raises(InputError, match="b: fleet and traffic differ"):
        objectives.traffic_weighted(objectives.absolute, {"a": 3.0})(p)


def test_traffic_moves_ranks_to_what_is_asked_for() -> None:
    spectra = [[2.0, 1.5, 1.0], [2.0, 1.5, 1.0]]
    p = problem(names("a/q_proj", "b/q_proj"), spectra, [1, 1])
    for traffic, wanted in (({"a": 9.0, "b": 1.0}, [3, 1]), ({"a": 1.0, "b": 9.0}, [1, 3])):
        k = allocate(p, "adapter-relative", parse_budget(params=4), options=Options(traffic=traffic)).k
        assert k.tolist() == wanted


def test_bytes_of_buckets_fill_buckets() -> None:
    cost = bucketed_bytes([2, 4], 2)
    p = problem(names("a/q_proj", "b/q_proj"), [[3.0] + [2.0] * 7, [3.0] + [1.0] * 7], [10, 10])
    assert cost(p)[:8].tolist() == [40, 40, 80, 80, 160, 160, 160, 160]
    # uniform ranks 2 and 2: 80 bytes; one module of rank 4 would take the bytes of the other
    k = allocate(p, "spectral-nofloor", parse_budget("1/4"), options=Options(cost=cost)).k
    assert k.tolist() == [2, 2]
    assert allocate(p, "spectral-nofloor", parse_budget("1/4")).k.tolist() == [3, 1]


def test_fused_projections_share_a_rank_where_nominal_ranks_do() -> None:
    p = problem(
        names("a/q_proj", "a/k_proj", "a/up_proj", "b/q_proj"),
        [[3.0, 1.0, 0.1], [2.0, 2.0, 2.0], [1.0, 1.0, 1.0], [1.0, 0.5, 0.2]],
        [8, 4, 8, 8],
    )
    fused = fuse(p)
    assert fused.problem.names == [
        (a, f"model.layers.0.{kind}") for a, kind in (("a", "qkv"), ("a", "gate_up"), ("b", "qkv"))
    ]
    assert fused.problem.cost.tolist() == [12, 8, 8]
    assert np.square(fused.problem.sigma[:3]) == pytest.approx([13.0, 5.0, 4.01])
    assert fused.expand(np.array([3, 2, 1])).tolist() == [3, 3, 2, 1]


@pytest.mark.parametrize(
    ("policy", "asked", "message"),
    [
        ("uniform", Options(k_max=3), "--k-max: the uniform policy does not take this option"),
        ("para", Options(fused=True), "--fused: the para policy"),
        ("fair", Options(traffic={"a": 1.0}), "--traffic: the fair policy"),
        ("spectral", Options(k_max=0), "--k-max: 0 is not a rank"),
        ("spectral", Options(adapter_floor=Fraction(2)), "--adapter-floor: 2 is not from 0 to 1"),
        ("spectral", Options(adapter_ceiling=Fraction(1, 2)), "--adapter-ceiling: 1/2 is below 1"),
        ("spectral", Options(cost=microseconds({"v_proj": {8: 1.0}})), "q_proj: no times of this kind"),
    ],
)
def test_options_that_mean_nothing(policy: Policy, asked: Options, message: str) -> None:
    p = problem(names("a/q_proj"), [[2.0, 1.0]], [3])
    with pytest.raises((UsageError, BudgetError, InputError)) as caught:
        allocate(p, policy, parse_budget("1/2"), options=asked)
    assert str(caught.value).startswith(message)


def test_floors_that_a_table_of_times_does_not_allow() -> None:
    p = problem(names("a/q_proj", "a/k_proj"), [[2.0] * 4, [1.0] * 4], [1, 1])
    slow = microseconds({"q_proj": {2: 1.0, 3: 9.0}, "k_proj": {1: 1.0}})
    budget = parse_budget("1/2")
    assert allocate(p, "spectral-nofloor", budget).k.tolist() == [3, 1]
    assert allocate(p, "spectral-nofloor", budget, options=Options(cost=slow)).k.tolist() == [2, 2]
    with pytest.raises(BudgetError, match="--adapter-floor: the floors of adapters cost 10 as --cost counts"):
        allocate(p, "spectral-nofloor", budget, options=Options(cost=slow, adapter_floor=Fraction(1)))


def test_option_texts(tmp_path: Path) -> None:
    table, traffic = tmp_path / "times.json", tmp_path / "traffic.json"
    table.write_text(json.dumps({"q_proj": {"1": 2.0, "3": 1.0, "5": 4.0}}))
    traffic.write_text(json.dumps({"a": 3, "b": 0}))
    p = problem(names("a/q_proj"), [[1.0] * 6], [3])
    assert load_microseconds(table)(p).tolist() == [2.0, 2.0, 2.0, 3.0, 4.0, 4.0]
    assert load_traffic(traffic) == {"a": 3.0, "b": 0.0}
    assert parse_cost("parameters", 2) is None
    made = parse_cost("bytes:4,8", 2)
    assert made is not None
    assert made(p).tolist() == [24.0] * 4 + [48.0] * 2
    assert parse_share("3/2", "--x") == Fraction(3, 2)
    for bad in ("bytes:8,4", "bytes:x", "time"):
        with pytest.raises(UsageError):
            parse_cost(bad, 2)
    with pytest.raises(BudgetError, match="--x: 'half' is not a number"):
        parse_share("half", "--x")
    for text in ("[]", "{}", '{"q_proj": {"1": -1}}', '{"q_proj": {}}', '{"q_proj": 3}'):
        table.write_text(text)
        with pytest.raises(InputError, match="not a table of times"):
            load_microseconds(table)
    for text in ("[]", "{}", '{"a": -1}', '{"a": 0}', '{"a": "x"}'):
        traffic.write_text(text)
        with pytest.raises(InputError, match="not a table of traffic"):
            load_traffic(traffic)


def test_a_fleet_of_zeros_keeps_one_direction_or_more() -> None:
    p = problem(names("a/q_proj", "b/q_proj"), [[0.0, 0.0], [0.0, 0.0]], [3, 3])
    for policy in RULES:
        assert allocate(p, policy, parse_budget("1/2")).spent <= 6
    assert spectral(p, 12, np.array([1, 1])).k.tolist() == [2, 2]


@pytest.mark.slow
def test_every_policy_takes_under_two_seconds() -> None:
    """24 adapters of 210 modules at rank 64: larger than any of the embedded fleet. Spectra are at hand."""
    generator = np.random.default_rng(0)
    kinds = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    pairs = [
        (f"a{a:02d}", f"model.layers.{n}.{kind}") for a in range(24) for n in range(30) for kind in kinds
    ]
    sigma = np.exp(-np.outer(generator.uniform(2, 8, len(pairs)), np.arange(64) / 64)).ravel()
    p = Problem(pairs, np.full(len(pairs), 64), generator.choice([768, 1152, 2112], len(pairs)), sigma)
    for policy in RULES:
        assert allocate(p, policy, parse_budget("1/12")).seconds < 2
    for asked in (Options(fused=True), Options(adapter_floor=Fraction(1, 2), adapter_ceiling=Fraction(2))):
        assert allocate(p, "adapter-relative", parse_budget("1/12"), options=asked).seconds < 2
    bucketed = Options(cost=bucketed_bytes([8, 16, 32, 64], 2))
    started = time.perf_counter()
    assert allocate(p, "adapter-relative", parse_budget("1/4"), options=bucketed).seconds < 2
    assert time.perf_counter() - started < 4
    assert DEFAULTS.cost is None
