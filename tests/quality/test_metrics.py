"""Scores against values worked out by hand, and their agreement with sacrebleu and lm-eval's calling convention."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraforge.errors import UsageError
from loraforge.quality import metrics


@pytest.mark.parametrize(
    ("prediction", "score"),
    [
        ("bowdlerise", 100.0),
        (" bowdlerise \nAmerican: next", 100.0),
        ("\n bowdlerise", 100.0),
        ("Bowdlerise", 0.0),
        ("bowdlerise.", 0.0),
        ("", 0.0),
    ],
)
def test_exact_match_takes_the_first_line_and_no_other_liberty(prediction: str, score: float) -> None:
    assert metrics.exact_match({"target": "bowdlerise"}, [prediction]) == {"exact_match": score}


def test_chrf_is_sacrebleus_sentence_score() -> None:
    # worked out for n = 1..6 with beta = 2; n-grams of "abcd" against "abce", blanks ignored:
    # matches 3/4, 2/3, 1/2, 0/1, so precision = recall = F = (3/4 + 2/3 + 1/2 + 0) / 4
    expected = 100 * (3 / 4 + 2 / 3 + 1 / 2 + 0) / 4
    assert metrics.chrf({"target": "abce"}, ["abcd\nignored"])["chrf"] == pytest.approx(expected, abs=1e-6)
    assert metrics.per_example("chrf", "genau gleich", "genau gleich") == [pytest.approx(100.0)]
    assert metrics.per_example("chrf", "", "etwas") == [0.0]


@pytest.mark.parametrize(
    ("prediction", "target", "counts"),
    [
        ("Number: 3 | Street: MAIN", "Number: 3 | Street: MAIN", (2, 0, 0)),
        ("Street: MAIN | Number: 3", "Number: 3 | Street: MAIN", (2, 0, 0)),
        ("Number: 3 | Street: OAK", "Number: 3 | Street: MAIN", (1, 1, 1)),
        ("Number: 3 | nonsense |", "Number: 3 | Street: MAIN", (1, 1, 1)),
        ("Number: 3 | Number: 3", "Number: 3", (1, 1, 0)),
        ("", "Number: 3 | Street: MAIN", (0, 0, 2)),
        ('{"os": "Linux", "v": 5}', '{"v": 5, "os": "Linux"}', (2, 0, 0)),
        ('{"os": "Linux", "v": "5"}', '{"v": 5, "os": "Linux"}', (1, 1, 1)),
        ('{"os": "Linux"', '{"os": "Linux"}', (0, 0, 1)),
        ('["os"]', '{"os": "Linux"}', (0, 0, 1)),
        ('{"os": NaN}', '{"os": "Linux"}', (0, 0, 1)),
        ("C H N", "N C H", (3, 0, 0)),
        ("NOUN NOUN VERB", "NOUN VERB VERB", (2, 1, 1)),
    ],
)
def test_field_counts(prediction: str, target: str, counts: tuple[int, int, int]) -> None:
    assert metrics.field_counts(prediction, target) == counts


def test_micro_f1_weighs_fields_not_examples() -> None:
    stats = [
        metrics.per_example("field_f1", p, t) for p, t in [("A: 1", "A: 1"), ("A: 2", "A: 1 | B: 1 | C: 1")]
    ]
    assert stats == [[1, 0, 0], [0, 1, 3]]
    assert metrics.aggregate("field_f1", stats) == pytest.approx(100 * 2 / (2 + 1 + 3))
    items = [metrics.field_f1({"target": "A: 1"}, ["A: 1"])["field_f1"], (0.0, 1.0, 3.0)]
    assert metrics.aggregate_field_f1(items) == pytest.approx(100 / 3)


def test_means_and_refusals() -> None:
    assert metrics.aggregate("exact_match", [[100.0], [0.0], [0.0], [0.0]]) == 25.0
    assert metrics.aggregate_exact_match([100.0, 0.0]) == 50.0
    assert metrics.aggregate_chrf([10.0, 20.0]) == 15.0
    with pytest.raises(UsageError, match="no predictions"):
        metrics.aggregate("chrf", [])
    for call in (lambda: metrics.per_example("bleu", "a", "a"), lambda: metrics.aggregate("bleu", [[1.0]])):
        with pytest.raises(UsageError, match=r"bleu: no such metric; choose from"):
            call()


@given(st.text(), st.text(alphabet=st.characters(exclude_categories=["Cs"]), min_size=1))
def test_field_scores_stay_in_range_and_a_copy_is_perfect(prediction: str, target: str) -> None:
    hits, spurious, missed = metrics.field_counts(prediction, target)
    assert min(hits, spurious, missed) >= 0
    score = metrics.aggregate("field_f1", [[hits, spurious, missed]])
    assert 0.0 <= score <= 100.0
    assert metrics.field_counts(target, target)[1:] == (0, 0)


def test_the_audit_can_score_without_torch_and_lm_eval() -> None:
    code = (
        "import sys; from loraforge.quality.metrics import per_example, aggregate;"
        "[aggregate(metric, [per_example(metric, 'a', 'b')]) for metric in ('exact_match', 'chrf', 'field_f1')];"
        "sys.exit(any(name.split('.')[0] in ('torch', 'lm_eval') for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
