"""The readers of source files, on small files of the real formats, and what the published test sets promise."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from loraforge.files import read_json, read_jsonl
from loraforge.quality.builders import extraction, languages, places, sentiment, wordnet
from loraforge.quality.builders.common import TaskSpec
from loraforge.quality.metrics import field_counts

SPECS = [spec for module in (extraction, languages, places, sentiment, wordnet) for spec in module.SPECS]
PUBLISHED = Path(__file__).parents[2] / "config" / "tasks"


def spec_of(name: str) -> TaskSpec:
    return next(spec for spec in SPECS if spec.name == name)


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def test_labels_of_one_kind_join_and_foreign_labels_drop_the_name(tmp_path: Path) -> None:
    write(
        tmp_path / "probablepeople-0.5.6/name_data/labeled/person_labeled.xml",
        "<NameCollection>"
        "<Name><Surname>Vega</Surname> <Surname>Ruiz,</Surname> <GivenName>Ana</GivenName></Name>"
        "<Name><GivenName>Bo</GivenName> <CorporationName>Ltd</CorporationName></Name>"
        "<Name><GivenName>Bo</GivenName></Name>"
        "</NameCollection>",
    )
    examples = list(spec_of("name_parse").examples({"probablepeople": tmp_path}))
    assert [(e.prompt.split("\n")[1], e.target) for e in examples] == [
        ("Name: Vega Ruiz, Ana", "surname: Vega Ruiz | given: Ana")
    ]


def test_time_values_lose_what_is_unknown_and_wordings_are_used_once(tmp_path: Path) -> None:
    corpus = [
        ("Time[]{2018-03-12 X:X (X/morning)}", "2018-03-07T12:43", ["Montagmorgen"]),
        (
            "Interval[]{2017-03-12 18:40 (X/X) - 2017-03-12 19:45 (X/X)}",
            "2017-02-10T10:59",
            ["12.03. 18:40 - 19:45"],
        ),
        ("Time[]{2019-X-X X:X (X/X)}", "2019-03-07T12:43", ["montagmorgen", "2019"]),
        ("Duration[]{3 days}", "2019-03-07T12:43", ["3 days"]),
    ]
    package = tmp_path / "ctparse-0.3.6/ctparse/time"
    write(package / "corpus.py", f"corpus = {corpus!r}\n")
    write(package / "auto_corpus.py", "raise SystemExit('must not run')\ncorpus = []\n")
    targets = [e.target for e in spec_of("time_expr").examples({"ctparse": tmp_path})]
    assert targets == [
        "date: 2018-03-12 | part: morning",
        "from date: 2017-03-12 | from time: 18:40 | to date: 2017-03-12 | to time: 19:45",
        "date: 2019-X-X",
    ]


def test_antonyms_stay_in_the_pair_of_their_most_frequent_senses(tmp_path: Path) -> None:
    dictionary = tmp_path / "usr/share/wordnet"
    for part in ("noun", "verb", "adv"):
        write(dictionary / f"data.{part}", "  1 licence\n")
        write(dictionary / f"index.{part}", "  1 licence\n")
    write(
        dictionary / "data.adj",
        "  1 licence\n"
        "00000001 00 a 01 good 0 001 ! 00000002 a 0101 | of use\n"
        "00000002 00 a 01 bad(p) 0 001 ! 00000001 a 0101 | of no use\n"
        "00000003 00 a 01 good 1 001 ! 00000004 a 0101 | kind\n"
        "00000004 00 a 01 evil 0 001 ! 00000003 a 0101 | cruel\n",
    )
    write(
        dictionary / "index.adj",
        "good a 2 1 ! 2 0 00000001 00000003\nbad a 1 1 ! 1 0 00000002\nevil a 1 1 ! 1 0 00000004\n",
    )
    examples = list(spec_of("wn_antonym").examples({"wordnet-base": tmp_path}))
    assert {(e.prompt.split("\n")[1], e.target) for e in examples} == {
        ("Word: good", "bad"),
        ("Word: bad", "good"),
    }
    assert len({e.item for e in examples}) == 1


def test_elements_and_isomers(tmp_path: Path) -> None:
    row = "\t".join(["7", "1-1-1", "C2H6O", "46", "s", "i", "k", "ethanol"])
    isomer = "\t".join(["8", "2-2-2", "C2H6O", "46", "s", "i", "k", "methoxymethane"])
    heavy = "\t".join(["9", "3-3-3", "D2O", "20", "s", "i", "k", "heavy water"])
    write(
        tmp_path / "chemicals/Identifiers/chemical identifiers pubchem large.tsv",
        f"{row}\n{isomer}\n{heavy}\n",
    )
    examples = list(spec_of("chem_elements").examples({"chemicals": tmp_path}))
    assert [e.target for e in examples] == ["C H O", "C H O"]
    assert examples[0].item == examples[1].item  # isomers share their answer, so they share a split


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_published_set_is_200_distinct_answerable_lines(spec: TaskSpec) -> None:
    folder = PUBLISHED / spec.name
    records = list(read_jsonl(folder / "test.jsonl"))
    assert len({record["prompt"] for record in records}) == 200
    assert all("\n" not in record["target"] and record["prompt"].endswith(":") for record in records)
    targets = [record["target"] for record in records]
    assert max(targets.count(target) for target in set(targets)) <= 110  # no class makes a good score alone
    assert read_json(folder / "SOURCE.json")["licence"] == spec.licence
    assert (folder / "LICENSE").stat().st_size > 200
    if spec.metric == "field_f1":
        assert all(field_counts(target, target)[0] >= 1 for target in targets)


def test_user_agent_targets_are_json_objects_of_text() -> None:
    for record in read_jsonl(PUBLISHED / "ua_json" / "test.jsonl"):
        answer = json.loads(record["target"])
        assert {"browser", "os", "type"} <= set(answer)
        assert all(isinstance(value, str) for value in answer.values())
