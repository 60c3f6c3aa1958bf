"""Macro scores, losses and intervals, against numbers that can be worked out by hand."""

from __future__ import annotations

import pytest

from loraforge.errors import UsageError
from loraforge.quality.scores import Sample, count_over, losses, macro, worst
from loraforge.quality.statistics import Resampling, bootstrap, compare


def _exact(hits: int, n: int) -> Sample:
    return Sample("exact_match", [[100.0]] * hits + [[0.0]] * (n - hits))


def test_macro_gives_every_adapter_one_vote() -> None:
    assert macro({"a": 10.0, "b": 40.0, "c": 100.0}) == 50.0
    with pytest.raises(UsageError, match="no scores"):
        macro({})


def test_losses_count_only_what_exceeds_the_threshold() -> None:
    original = {"a": 80.0, "b": 50.0, "c": 0.1 + 0.2 + 5}
    scores = {"a": 74.9, "b": 60.0, "c": 0.3}
    assert losses(scores, original)["b"] == -10.0
    assert worst(scores, original) == ("a", pytest.approx(5.1))
    assert count_over(scores, original) == 1  # a loss of exactly five points is not above five
    assert worst({"a": 81.0}, {"a": 80.0}) == ("a", 0.0)


def test_arms_with_other_adapters_are_refused_by_name() -> None:
    with pytest.raises(UsageError, match="one arm only: b"):
        losses({"a": 1.0}, {"a": 1.0, "b": 2.0})


def test_comparison_of_an_arm_with_itself_is_exactly_zero() -> None:
    arm = {"a": _exact(30, 50), "b": Sample("field_f1", [[2.0, 1.0, 0.0], [0.0, 0.0, 3.0], [1.0, 0.0, 0.0]])}
    found = compare(arm, arm)
    assert (found.delta, found.ci_low, found.ci_high, found.worst_regression, found.over5) == (0, 0, 0, 0, 0)


def test_comparison_states_delta_worst_and_count() -> None:
    original = {"a": _exact(80, 100), "b": _exact(50, 100)}
    arm = {"a": _exact(60, 100), "b": _exact(54, 100)}
    found = compare(arm, original)
    assert found.delta == pytest.approx(-8.0)
    assert (found.worst_adapter, found.worst_regression, found.over5) == ("a", pytest.approx(20.0), 1)
    assert found.ci_low < -8 < found.ci_high


def test_interval_of_one_adapter_matches_the_binomial() -> None:
    low, high = bootstrap({"a": _exact(50, 100)}, {"a": _exact(0, 100)}, draws=20000)
    # a mean of 100 independent draws of 0 or 100 has a standard deviation of 5 points
    assert low == pytest.approx(50 - 1.96 * 5, abs=1.1)
    assert high == pytest.approx(50 + 1.96 * 5, abs=1.1)


def test_interval_widens_with_disagreement_between_adapters() -> None:
    """Adapters are resampled too: two that disagree by far leave the macro mean uncertain."""
    base = {"a": _exact(0, 50), "b": _exact(0, 50)}
    low, high = bootstrap({"a": _exact(0, 50), "b": _exact(50, 50)}, base)
    assert (low, high) == (0.0, 100.0)


def test_interval_depends_on_the_seed_and_not_on_the_order() -> None:
    arm = {"a": _exact(30, 60), "b": _exact(20, 60), "c": _exact(59, 60)}
    other = {"a": _exact(35, 60), "b": _exact(10, 60), "c": _exact(60, 60)}
    again = (dict(reversed(arm.items())), dict(reversed(other.items())))
    assert bootstrap(arm, other) == bootstrap(*again)
    assert bootstrap(arm, other, seed=1) != bootstrap(arm, other, seed=2)


def test_f1_is_micro_averaged_within_a_resample() -> None:
    """Every resample of identical examples has the micro F1 of one of them."""
    arm = {"a": Sample("field_f1", [[1.0, 1.0, 1.0]] * 8)}
    other = {"a": Sample("field_f1", [[0.0, 0.0, 0.0]] * 8)}
    assert bootstrap(arm, other) == (pytest.approx(50.0), pytest.approx(50.0))


def test_different_examples_are_refused() -> None:
    with pytest.raises(UsageError, match="a: the arms were not scored on the same examples"):
        compare({"a": _exact(1, 10)}, {"a": _exact(1, 11)})


def test_intervals_by_what_is_drawn() -> None:
    """Adapters that differ and examples that hardly do: only drawing adapters anew moves the mean far."""
    original = {name: _exact(100, 200) for name in "abcd"}
    arm = {"a": _exact(100, 200), "b": _exact(90, 200), "c": _exact(60, 200), "d": _exact(20, 200)}
    found = Resampling(dict.fromkeys("abcd", 200)).intervals(arm, original)
    widths = {name: high - low for name, (low, high) in vars(found).items()}
    assert widths["examples"] < widths["adapters"] < widths["both"] * 1.05
    for low, high in vars(found).values():
        assert low < -16.25 < high
    assert min(found.adapters) >= -40
    assert max(found.adapters) <= 0


def test_draws_are_shared_by_arms_and_depend_on_no_order() -> None:
    sizes = {"a": 50, "b": 40}
    original = {"a": _exact(40, 50), "b": _exact(30, 40)}
    arm = {"a": _exact(35, 50), "b": _exact(28, 40)}
    backwards = dict(reversed(sizes.items()))
    found = Resampling(sizes).intervals(arm, original)
    assert Resampling(backwards).intervals(dict(reversed(arm.items())), original) == found
    same = Resampling(sizes).intervals(original, original)
    assert (same.examples, same.adapters, same.both) == ((0, 0), (0, 0), (0, 0))
    with pytest.raises(UsageError, match="not scored on the same adapters"):
        Resampling(sizes).intervals({"a": _exact(1, 50)}, {"a": _exact(1, 50)})
    with pytest.raises(UsageError, match="not scored on the same examples"):
        Resampling(sizes).intervals(arm | {"b": _exact(1, 41)}, original)
    with pytest.raises(UsageError, match="no adapters"):
        Resampling({})


def test_shared_draws_agree_with_the_two_stage_bootstrap() -> None:
    original = {name: _exact(70 + place, 100) for place, name in enumerate("abcdef")}
    arm = {name: _exact(60 + 3 * place, 100) for place, name in enumerate("abcdef")}
    found = Resampling(dict.fromkeys(original, 100), draws=4000).intervals(arm, original).both
    for one, other in zip(found, bootstrap(arm, original, draws=4000), strict=True):
        assert one == pytest.approx(other, abs=0.6)
