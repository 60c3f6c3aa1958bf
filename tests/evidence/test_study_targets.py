"""The choice of the quality study follows from validation scores alone, and its report is asked where it was made."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import synthetic
from study import Study, invoke

from loraforge.errors import InputError, IntegrityError, UsageError
from loraforge.evidence.targets import TARGETS
from loraforge.evidence.targets.quality import Score
from loraforge.evidence.targets.study import scores_digest, selection_from, selection_of, standings
from loraforge.figures import table_of
from loraforge.files import write_jsonl
from loraforge.quality.selection import load_selection, save_selection

BUDGETS = ("1/12", "1/4")


def parsed(target: str, records: Sequence[dict[str, Any]]) -> list[Any]:
    kind = TARGETS[target]
    found = kind.parse([json.dumps(record) for record in records], "records.jsonl")
    kind.check(found, "records.jsonl")
    return found


def scored(arms: dict[tuple[str, str], list[float]], split: str = "validation") -> list[dict[str, Any]]:
    """Records of two adapters and two examples each; ``arms`` gives the adapters' scores, of 0, 50 or 100."""
    found = []
    for (arm, budget), scores in arms.items():
        for adapter, score in zip(("a", "b"), scores, strict=True):
            found.append(
                {
                    "adapter": adapter, "task": adapter, "split": split, "metric": "exact_match", "arm": arm,
                    "budget": budget, "score": score, "n": 2, "parameters": 10,
                    "stats": [[100.0 if score > 0 else 0.0], [100.0 if score > 50 else 0.0]],
                    "task_sha256": "a" * 64, "adapter_sha256": None if arm == "base" else "b" * 64,
                    "model_sha256": "c" * 64, "seconds": 1.0,
                }
            )  # fmt: skip
    return found


ENDS = {("base", "0"): [0.0, 0.0], ("original", "1"): [100.0, 100.0]}
THREE = {
    **ENDS,
    ("blend", "1/12"): [100.0, 0.0],
    ("fair", "1/12"): [50.0, 50.0],
    ("para", "1/12"): [0.0, 50.0],
}


def chosen(arms: dict[tuple[str, str], list[float]], split: str = "validation", **options: Any) -> Any:
    scores = [Score.model_validate(record) for record in scored(arms, split)]
    settings = {"candidates": ("para", "blend", "fair"), "decide_at": "1/12", "finalists": 2} | options
    return selection_from(scores, fleet="tiny", **settings)


def test_the_best_mean_wins_and_of_equals_the_one_whose_worst_loses_less() -> None:
    found = chosen(THREE)
    assert [one.policy for one in found.candidates] == ["fair", "blend", "para"]
    assert [(one.macro, one.worst, one.n_over_5) for one in found.candidates] == [
        (50.0, 50.0, 2),
        (50.0, 100.0, 1),
        (25.0, 100.0, 2),
    ]
    assert found.finalists == ("fair", "blend")
    assert found.chosen == "fair"
    assert chosen(THREE, candidates=("fair", "blend", "para")).sha256 == found.sha256


def test_a_choice_needs_scores_of_the_validation_split_and_of_every_candidate() -> None:
    with pytest.raises(InputError, match=r"a\.base: scores of the test split may not choose"):
        chosen(THREE, split="test")
    with pytest.raises(UsageError, match="--candidates: uniform has no scores at 1/12"):
        chosen(THREE, candidates=("uniform",))
    with pytest.raises(UsageError, match="4 finalists of 3 candidates"):
        chosen(THREE, finalists=4)
    with pytest.raises(InputError, match="original"):
        chosen({("base", "0"): [0.0, 0.0]})


def test_a_digest_is_of_what_was_scored_and_not_of_its_order_or_time() -> None:
    scores = [Score.model_validate(record) for record in scored(THREE)]
    slower = [item.model_copy(update={"seconds": 9.0}) for item in reversed(scores)]
    assert scores_digest(slower) == scores_digest(scores)
    other = [scores[0].model_copy(update={"task_sha256": "d" * 64}), *scores[1:]]
    assert scores_digest(other) != scores_digest(scores)


def test_a_selection_that_was_changed_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "selected.json"
    selection = chosen(THREE)
    save_selection(selection, path)
    assert load_selection(path) == selection
    assert path.read_text().count("\n") == 1  # a record as it is
    path.write_text(path.read_text().replace('"finalists":["fair","blend"]', '"finalists":["para"]'))
    with pytest.raises(IntegrityError, match=r"selected\.json: was changed after the scores decided"):
        load_selection(path)
    for text, words in (
        ("{", "not a selection"),
        ("[]", "not a selection"),
        ('{"record":"selection"}', "fleet"),
    ):
        path.write_text(text)
        with pytest.raises(InputError, match=words):
            load_selection(path)
    with pytest.raises(InputError, match="cannot be read"):
        load_selection(tmp_path)


def test_summary_has_the_names_of_the_study_by_hand() -> None:
    selection = chosen(THREE).model_dump(mode="json")
    test = {**ENDS, ("fair", "1/12"): [100.0, 50.0], ("blend", "1/12"): [50.0, 50.0]}
    test |= {
        ("spectral", "1/12"): [50.0, 50.0],
        ("uniform", "1/12"): [0.0, 100.0],
        ("cts", "1/12"): [0.0, 0.0],
    }
    found = parsed("quality_study", [*scored(test, "test"), selection])
    summary = TARGETS["quality_study"].summarise(found, "tiny")
    key = "quality.fair.1/12"
    assert summary[f"{key}.macro"] == 75.0
    assert summary[f"{key}.delta"] == -25.0
    assert summary[f"{key}.worst"] == 50.0
    assert summary[f"{key}.n_over_5"] == 1
    for name in ("ci", "ci.examples", "ci.adapters"):
        assert float(summary[f"{key}.{name}.low"]) <= -25.0 <= float(summary[f"{key}.{name}.high"])
    assert (summary[f"{key}.ci.adapters.low"], summary[f"{key}.ci.adapters.high"]) == (-50.0, 0.0)
    assert summary["selection.policy"] == "fair"
    assert summary["reach.drop"] == 25.0
    assert summary["reach.drop_over_spectral"] == 0.5
    assert summary["reach.worst_over_uniform"] == 0.5
    assert summary["reach.cts_drop_over_drop"] == 4.0
    assert summary["reach.n_over_5"] == 1
    assert "quality.original.1.delta" not in summary
    assert all(claim.passed for claim in TARGETS["quality_study"].claims(found))
    assert TARGETS["quality_study"].inputs(found)["selection"] == selection["sha256"]


def test_reach_says_nothing_where_there_is_no_loss_to_compare_with() -> None:
    selection = chosen(THREE).model_dump(mode="json")
    test = {**ENDS, ("fair", "1/12"): [100.0, 100.0], ("spectral", "1/12"): [100.0, 100.0]}
    found = parsed("quality_study", [*scored(test, "test"), selection])
    summary = TARGETS["quality_study"].summarise(found, "tiny")
    assert {key for key in summary if key.startswith("reach.")} == {
        "reach.drop", "reach.worst", "reach.n_over_5",
    }  # fmt: skip
    failing = [claim for claim in TARGETS["quality_study"].claims(found) if not claim.passed]
    assert [claim.claim for claim in failing] == ["finalists without test scores"]  # blend was not scored


@pytest.mark.parametrize("target", ["quality_selection", "quality_study"])
def test_records_of_the_other_split_or_without_one_selection_are_refused(target: str) -> None:
    records = synthetic.study(target)
    with pytest.raises(InputError, match="holds 0 selections where one is due"):
        parsed(target, records[:-1])
    with pytest.raises(InputError, match="holds 2 selections where one is due"):
        parsed(target, [*records, records[-1]])
    other = {"validation": "test", "test": "validation"}[records[0]["split"]]
    with pytest.raises(InputError, match=f"holds scores of the {other} split"):
        parsed(target, [{**records[0], "split": other}, *records[1:]])
    forged = {**records[-1], "finalists": ["uniform"]}
    with pytest.raises(InputError, match="selection was changed after the scores decided"):
        parsed(target, [*records[:-1], forged])


def test_a_selection_that_the_scores_do_not_make_is_no_evidence() -> None:
    records = synthetic.study("quality_selection")
    stated = selection_of(parsed("quality_selection", records))
    forged = stated.model_copy(update={"finalists": (stated.candidates[-1].policy,)})
    forged = forged.model_copy(update={"sha256": forged.digest()})
    found = parsed("quality_selection", [*records[:-1], forged.model_dump(mode="json")])
    claims = TARGETS["quality_selection"].claims(found)
    assert [claim.passed for claim in claims] == [True, False]
    assert claims[-1].claim == "selections that differ from what the scores decide"


def test_a_selection_may_not_leave_out_a_policy_that_was_scored() -> None:
    records = synthetic.study("quality_selection")
    stated = selection_of(parsed("quality_selection", records))
    fewer = selection_from(
        [Score.model_validate(record) for record in records[:-1]],
        fleet=stated.fleet,
        candidates=[one.policy for one in stated.candidates[1:]],
        decide_at=stated.decide_at,
        finalists=1,
    )
    found = parsed("quality_selection", [*records[:-1], fewer.model_dump(mode="json")])
    assert not TARGETS["quality_selection"].claims(found)[-1].passed


@pytest.mark.parametrize("name", ["macro", "worst"])
@pytest.mark.parametrize(("off", "passes"), [(1e-12, True), (1e-6, False)])
def test_a_mean_may_be_rounded_as_another_version_of_python_does(name: str, off: float, passes: bool) -> None:
    records = synthetic.study("quality_selection")
    stated = selection_of(parsed("quality_selection", records))
    first = stated.candidates[0].model_copy(update={name: getattr(stated.candidates[0], name) + off})
    other = stated.model_copy(update={"candidates": (first, *stated.candidates[1:])})
    other = other.model_copy(update={"sha256": other.digest()})
    found = parsed("quality_selection", [*records[:-1], other.model_dump(mode="json")])
    assert TARGETS["quality_selection"].claims(found)[-1].passed is passes


def test_figures_hold_what_the_standings_say() -> None:
    found = parsed("quality_study", synthetic.study("quality_study"))
    by_arm = standings(found)
    rows = table_of("quality_tables", found)
    for row in rows:
        if row["panel"] == "table8":
            standing = by_arm[str(row["arm"]), str(row["budget"])]
            assert (row["value"], row["n"], row["adapter"]) == (
                -standing.worst,
                standing.n_over_5,
                standing.worst_adapter,
            )
    assert {row["budget"] for row in rows if row["panel"] == "table2"} == {"1/12"}
    shares = table_of("budget_share", found)
    arms = {str(row["arm"]) for row in shares if row["panel"] == "share"}
    assert "cts" not in arms  # what is shared is no adapter's own
    assert {"original", *synthetic.STUDIED} == arms
    for arm in arms:
        kept = [row for row in shares if (row["panel"], row["arm"], row["budget"]) == ("share", arm, "1/12")]
        assert not kept or sum(float(row["value"] or 0) for row in kept) == pytest.approx(1.0)


def test_the_audit_asks_a_report_for_the_scores_that_chose(
    study: Study, remake: Callable[[Path], None]
) -> None:
    assert study.audit().exit_code == 0
    shutil.rmtree(study.bag("quality_selection"))
    index = invoke("evidence", "index", study.evidence)
    assert index.exit_code == 0
    for drawn in study.figures.glob("selection.*"):
        drawn.unlink()
    lines = [line for line in study.audit().output.splitlines() if line.startswith("FAILED ")]
    assert len(lines) == 1, lines
    assert f"{study.bag('quality_study')}/data/records.jsonl: obeys selection " in lines[0]
    assert lines[0].endswith("of which there are no validation scores")


def test_select_on_the_command_line(tmp_path: Path) -> None:
    lock = synthetic.write_fleet(tmp_path / "fleets")
    records = tmp_path / "validation.jsonl"
    write_jsonl(records, scored(THREE))
    out = tmp_path / "selected.json"
    arguments = ("eval", "select", records, "--fleet", lock, "--finalists", 1, "-o", out)
    made = invoke(*arguments, "--candidates", "para,blend,fair")
    assert made.exit_code == 0, made.output
    assert load_selection(out).finalists == ("fair",)
    assert load_selection(out).fleet == "smol"
    refused = invoke(*arguments, "--candidates", "uniform")
    assert isinstance(refused.exception, UsageError)
    config = tmp_path / "c.yaml"
    config.write_text(f"name: x\nfleet: {lock}\nquality: {{split: validation}}\n")
    run = ("--base", tmp_path, "--allocations", tmp_path, "-o", tmp_path / "r.jsonl")
    honest = invoke("eval", "run", "--config", config, "--selected", out, *run)
    assert isinstance(honest.exception, UsageError)
    assert "reported on the test split, not on validation" in str(honest.exception)
