"""Splits as a property, fetching with the real clients offline, builders on small inputs, and what is published."""

from __future__ import annotations

import hashlib
import io
import json
import random
import struct
import tarfile
import zipfile
import zlib
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from loraforge.cli.tasks import app
from loraforge.errors import InputError, IntegrityError, LoraForgeError, UsageError
from loraforge.files import read_jsonl, sha256_file, sha256_text
from loraforge.quality.builders import morphology, phrases
from loraforge.quality.builders.common import (
    HELD_OUT,
    SPLITS,
    Example,
    TaskSpec,
    one_line,
    prompt_of,
    records,
    split,
)
from loraforge.quality.builders.publish import check, publish, task_file
from loraforge.quality.builders.registry import TASKS, task
from loraforge.quality.builders.sources import Source, archive_of, debian, fetch, npm, pypi

ROOT = Path(__file__).resolve().parents[2]
PUBLISHED = ROOT / "config/tasks"


def _spec(**changes: object) -> TaskSpec:
    spec = TaskSpec(
        name="toy",
        family="knowledge",
        metric="exact_match",
        max_gen_toks=8,
        title="Toy",
        sources=(),
        licence="MIT",
        attribution="nobody",
        examples=lambda folders: [],
    )
    return replace(spec, **changes)  # type: ignore[arg-type]


def _pool(items: int, each: int = 1) -> list[Example]:
    return [Example(f"Q: {i}-{j}\nA:", f"t{i % 7}", f"item{i}") for i in range(items) for j in range(each)]


# --- splits ---------------------------------------------------------------------------------------------------


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    items=st.integers(600, 900),
    most=st.integers(1, 9),
    held_out_per_item=st.integers(1, 4),
    train_per_item=st.integers(1, 12),
)
def test_no_item_crosses_and_input_order_has_no_say(
    seed: int, items: int, most: int, held_out_per_item: int, train_per_item: int
) -> None:
    order = random.Random(seed)
    spec = _spec(held_out_per_item=held_out_per_item, train_per_item=train_per_item)
    pool = [Example(f"{i}/{j}", "t", f"i{i}") for i in range(items) for j in range(order.randint(1, most))]
    splits = split(spec, pool)
    by_split = {name: {example.item for example in splits[name]} for name in SPLITS}
    assert not by_split["train"] & by_split["validation"]
    assert not by_split["train"] & by_split["test"]
    assert not by_split["validation"] & by_split["test"]
    assert len(splits["test"]) == HELD_OUT
    assert len(splits["validation"]) == (200 if len(pool) >= 1000 else 100)
    for name, limit in (
        ("test", held_out_per_item),
        ("validation", held_out_per_item),
        ("train", train_per_item),
    ):
        assert max(Counter(example.item for example in splits[name]).values()) <= limit
    order.shuffle(pool)
    assert split(spec, pool + pool[:50]) == splits


def test_train_is_capped_and_records_carry_stable_ids() -> None:
    splits = split(_spec(), _pool(9000))
    assert {name: len(splits[name]) for name in SPLITS} == {"train": 8000, "validation": 200, "test": 200}
    rows = [row for name in SPLITS for row in records(_spec(), splits[name])]
    assert len({row["id"] for row in rows}) == 8400
    assert set(rows[0]) == {"id", "prompt", "target", "item"}
    assert rows[0]["id"] == "toy-" + hashlib.sha256(f"toy\0{rows[0]['prompt']}".encode()).hexdigest()[:12]


def test_conflicting_prompts_go_and_duplicates_stay_once() -> None:
    pool = [
        *_pool(600),
        Example("both?", "yes", "x"),
        Example("both?", "no", "y"),
        Example("twice?", "yes", "z"),
        Example("twice? ", " yes\n", "z"),
        Example("empty?", " ", "w"),
    ]
    kept = Counter(example.prompt for part in split(_spec(), pool).values() for example in part)
    assert kept["both?"] == 0
    assert kept["empty?"] == 0
    assert kept["twice?"] == 1
    assert kept.total() == 601


def test_frequent_targets_are_capped() -> None:
    pool = [Example(f"{i}", "common" if i < 900 else f"rare{i % 5}", f"{i}") for i in range(1600)]
    capped = split(_spec(max_per_class=120), pool)
    counts = Counter(example.target for part in capped.values() for example in part)
    assert counts == {"common": 120} | {f"rare{i}": 120 for i in range(5)}


def test_a_pool_too_small_is_refused_by_name() -> None:
    with pytest.raises(InputError, match=r"toy: 350 examples of 350 items are too few"):
        split(_spec(), _pool(350))


def test_texts_become_one_line() -> None:
    assert one_line(" a\n\tb  c ") == "a b c"
    assert one_line("alpha beta gamma", 10) == "alpha beta"
    assert one_line("alpha beta gamma", 11) == "alpha beta"
    assert one_line("alphabet", 5) == "alpha"
    assert prompt_of("Do.", ("A", "x\ny"), answer="B") == "Do.\nA: x y\nB:"


# --- sources --------------------------------------------------------------------------------------------------


@pytest.fixture
def local_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that pip takes packages from instead of a registry."""
    index = tmp_path / "index"
    index.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    return index


def test_a_source_distribution_is_unpacked_and_its_setup_never_runs(
    local_index: Path, tmp_path: Path
) -> None:
    marker = tmp_path / "ran"
    files = {
        "PKG-INFO": "Metadata-Version: 2.1\nName: toy-data\nVersion: 1.0\n",
        "setup.py": f"open({str(marker)!r}, 'w').close()\nraise SystemExit('setup.py ran')\n",
        "data/words.txt": "colour\n",
    }
    with tarfile.open(local_index / "toy_data-1.0.tar.gz", "w:gz") as packed:
        for name, text in files.items():
            member = tarfile.TarInfo(f"toy_data-1.0/{name}")
            member.size = len(text.encode())
            packed.addfile(member, io.BytesIO(text.encode()))
    folder = pypi("toy-data", "1.0", sdist=True, cache=tmp_path / "cache")
    assert (folder / "toy_data-1.0/data/words.txt").read_text() == "colour\n"
    assert not marker.exists()
    assert archive_of(folder).name == "toy_data-1.0.tar.gz"


def _wheel(path: Path) -> str:
    with zipfile.ZipFile(path, "w") as packed:
        packed.writestr("toy/words.txt", "colour\n")
        packed.writestr("toy-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: toy\nVersion: 1.0\n")
        packed.writestr(
            "toy-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        packed.writestr("toy-1.0.dist-info/RECORD", "")
        packed.writestr("toy-1.0.dist-info/LICENSE", "Do as you like.\n")
    return sha256_file(path)


def test_a_pinned_wheel_is_fetched_once_and_its_hash_checked_every_time(
    local_index: Path, tmp_path: Path
) -> None:
    digest = _wheel(local_index / "toy-1.0-py3-none-any.whl")
    source = Source("pypi", "toy", "1.0", digest, "MIT", "toy-*.dist-info/LICENSE")
    cache = tmp_path / "cache"
    with pytest.raises(IntegrityError, match=f"SHA-256 is {digest}, pinned is 0000"):
        fetch(replace(source, sha256="0" * 64), cache)
    assert not (cache / "pypi/toy-1.0").exists()  # a rejected archive is not kept
    folder = fetch(source, cache)
    assert (folder / "toy/words.txt").read_text() == "colour\n"
    (local_index / "toy-1.0-py3-none-any.whl").unlink()
    assert fetch(source, cache) == folder
    with archive_of(folder).open("ab") as stream:
        stream.write(b"x")
    with pytest.raises(IntegrityError):
        fetch(source, cache)


def test_a_package_that_is_not_there_is_one_line(local_index: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"^no-such-package 9: pip failed: .*; check the network"):
        pypi("no-such-package", "9", cache=tmp_path / "cache")
    assert not list((tmp_path / "cache").rglob("*"))[1:]  # the registry's folder at most, nothing half done


def test_npm_and_debian_archives_come_from_the_cache_unpacked(tmp_path: Path) -> None:
    archive = tmp_path / "npm/scope-toy-1.0/archive/scope-toy-1.0.tgz"
    (tmp_path / "npm/scope-toy-1.0/files/package").mkdir(parents=True)
    archive.parent.mkdir()
    archive.write_bytes(b"tar")
    digest = sha256_file(archive)
    assert npm("@scope/toy", "1.0", sha256=digest, cache=tmp_path) == tmp_path / "npm/scope-toy-1.0/files"
    with pytest.raises(LoraForgeError, match="pinned"):
        npm("@scope/toy", "1.0", sha256="0" * 64, cache=tmp_path)
    (tmp_path / "debian/toy-1_3.0/archive").mkdir(parents=True)
    with pytest.raises(LoraForgeError, match="expected one archive, found 0"):
        debian("toy", "1:3.0", cache=tmp_path)


# --- builders on small inputs ---------------------------------------------------------------------------------


def _examples(name: str, folders: dict[str, Path]) -> dict[str, tuple[str, str]]:
    return {example.prompt: (example.target, example.item) for example in TASKS[name].examples(folders)}


def test_front_coded_dictionaries_are_decoded(tmp_path: Path) -> None:
    # gatas: trim 2 append "o"; gatos: repeat the value; perros: literal
    stream = b"SMFC1\x00\x03" + b"\x00\x05gatas\x02\x01o" + b"\x03\x02os\xfe" + b"\x00\x06perros\xff\x05perro"
    pairs = list(morphology.front_coded(stream, tmp_path))
    assert pairs == [("gatas", "gato"), ("gatos", "gato"), ("perros", "perro")]
    assert list(morphology.front_coded(b"SMFC1\x01\x01\x00\x03sol\xff\x02lo", tmp_path)) == [("los", "ol")]
    with pytest.raises(InputError, match="not a front-coded dictionary"):
        list(morphology.front_coded(b"\x80\x04pickle", tmp_path))


def test_conjugations_keep_finite_forms_of_sound_rows(tmp_path: Path) -> None:
    tables = tmp_path / "mlconjug3/data/conjug_manager"
    tables.mkdir(parents=True)
    verbs = {
        "aimer": {"root": "aim", "template": "aim:er"},
        "wrong": {"root": "wr", "template": "aim:er"},
    }
    template = {
        "Indicatif": {"Présent": [[0, "e"], [1, None]], "Passé Composé": [[0, "é"]]},
        "Imperatif": {"Imperatif Présent": [[0, "e"], [1, "ons"]]},
        "Subjonctif": {"Présent": [[0, "e/is"]]},
        "Infinitif": {"Infinitif Présent": "er"},
    }
    (tables / "verbs-fr.json").write_text(json.dumps(verbs))
    (tables / "conjugation-fr.json").write_text(json.dumps({"aim:er": template}))
    head = "Conjugate the French verb.\nVerb: aimer\nTense: "
    assert _examples("fr_conj", {"mlconjug3": tmp_path}) == {
        head + "present indicative\nPerson: je\nForm:": ("aime", "aimer"),
        head + "imperative\nPerson: tu\nForm:": ("aime", "aimer"),
        head + "imperative\nPerson: nous\nForm:": ("aimons", "aimer"),
    }


def test_catalogue_reads_gettext_entries(tmp_path: Path) -> None:
    path = tmp_path / "django.po"
    path.write_text(
        'msgid ""\nmsgstr "Language: de\\n"\n\n'
        '#, python-format\nmsgid ""\n"Delete "\n"it?"\nmsgstr "\\"Löschen\\"?"\n\n'
        '#, fuzzy\nmsgid "Old"\nmsgstr "Alt"\n\n'
        'msgid "%d day"\nmsgid_plural "%d days"\nmsgstr[0] "%d Tag"\nmsgstr[1] "%d Tage"\n\n'
        '#~ msgid "Gone"\n#~ msgstr "Weg"\n\n'
        'msgctxt "noun"\nmsgid "Save"\nmsgstr "Sichern"\n',
        encoding="utf-8",
    )
    assert list(phrases.catalogue(path)) == [("Delete it?", '"Löschen"?'), ("Save", "Sichern")]
    path.write_text('msgid "open\nmsgstr "x"\n')
    with pytest.raises(InputError, match="line 1"):
        list(phrases.catalogue(path))


def _sword_module(folder: Path, verses: list[str]) -> None:
    data = folder / "usr/share/sword/modules/texts/ztext/toy"
    data.mkdir(parents=True)
    block = "".join(verses).encode()
    packed = zlib.compress(block)
    index, at = b"", 0
    for verse in verses:
        size = len(verse.encode())
        index += struct.pack("<IIH", 0, at, size)
        at += size
    for name in ("ot", "nt"):
        kept = name == "ot"
        (data / f"{name}.bzz").write_bytes(packed if kept else b"")
        (data / f"{name}.bzs").write_bytes(struct.pack("<III", 0, len(packed), len(block)) if kept else b"")
        (data / f"{name}.bzv").write_bytes(index if kept else b"")


def test_verses_are_matched_by_chapter_and_place(tmp_path: Path) -> None:
    one, two = '<chapter n="1" osisID="Gen.1"/>', '<chapter n="2" osisID="Gen.2"/>'
    old = "And God saw the <w lemma='x'>light</w>, that it <note>marg <b>x</b></note>was good &amp; fair."
    _sword_module(tmp_path / "kjv", [one, old, "Short.", two, "And the evening and the morning were a day."])
    new = "God saw the light, and saw that it was good."
    _sword_module(
        tmp_path / "web", [one, new, "Short.", two, "There was evening and there was morning.", "One more."]
    )
    found = _examples(
        "bible_modern", {"sword-text-kjv": tmp_path / "kjv", "sword-text-web": tmp_path / "web"}
    )
    prompt = "Rewrite in modern English.\nOld: And God saw the light, that it was good & fair.\nModern:"
    assert found == {prompt: (new, "Gen.1")}  # chapter 2 has another count of verses


def test_icd_spelling_and_docstrings(tmp_path: Path) -> None:
    data = tmp_path / "icd/simple_icd_10_cm/data"
    data.mkdir(parents=True)
    (data / "tabular.xml").write_text(
        "<t><chapter><desc>Diseases of the eye and adnexa (H00-H59)</desc><section><diag><name>H44</name>"
        "<desc>Disorders of globe</desc><diag><name>H44.4</name><desc>Hypotony\nof eye</desc></diag></diag>"
        "</section></chapter></t>"
    )
    head = "Which ICD-10 chapter?\nDiagnosis: "
    assert _examples("icd_chapter", {"simple-icd-10-cm": tmp_path / "icd"}) == {
        f"{head}Disorders of globe\nChapter:": ("Diseases of the eye and adnexa", "H44"),
        f"{head}Hypotony of eye\nChapter:": ("Diseases of the eye and adnexa", "H44"),
    }

    words = tmp_path / "breame/breame-0.1.2/breame/data/spelling_constants.py"
    words.parent.mkdir(parents=True)
    words.write_text('AMERICAN_ENGLISH_SPELLINGS = {"color": "colour", "pummeled": "pummelling"}\n')
    assert _examples("us_to_uk", {"breame": tmp_path / "breame"}) == {
        "Write the British spelling.\nAmerican: color\nBritish:": ("colour", "color")
    }

    source = tmp_path / "Django/django/utils.py"
    source.parent.mkdir(parents=True)
    source.write_text(
        'def strip_tags(v):\n    """Return the given HTML with all\n    tags stripped.\n\n    More."""\n'
        'def named(v):\n    """Whatever named does it says its own name."""\n'
        'def _private(v):\n    """Return the given HTML with all tags."""\n'
        "def bare(v):\n    return v\n"
    )
    assert _examples("docstring_name", {"Django": tmp_path / "Django"}) == {
        "Name the Python function.\nDocstring: Return the given HTML with all tags stripped.\nName:": (
            "strip_tags",
            "strip_tags",
        )
    }


def test_a_changed_source_names_the_file(tmp_path: Path) -> None:
    words = tmp_path / "breame-0.1.2/breame/data/spelling_constants.py"
    words.parent.mkdir(parents=True)
    words.write_text("OTHER = {}\n")
    with pytest.raises(InputError, match=r"spelling_constants.py: AMERICAN_ENGLISH_SPELLINGS: has no such"):
        _examples("us_to_uk", {"breame": tmp_path})


# --- registry, publishing, command line -----------------------------------------------------------------------


def test_the_registry_has_the_fleets_tasks_and_every_source_is_pinned() -> None:
    recipes = sorted(path.parent.name for path in (ROOT / "config/fleets/smol").glob("*/recipe.yaml"))
    assert sorted(TASKS) == recipes
    for spec in TASKS.values():
        for source in spec.sources:
            assert len(bytes.fromhex(source.sha256)) == 32, spec.name
    with pytest.raises(UsageError, match="no-such: no such task; choose from"):
        task("no-such")


def test_publish_then_check_sees_every_change(local_index: Path, tmp_path: Path) -> None:
    digest = _wheel(local_index / "toy-1.0-py3-none-any.whl")
    source = Source("pypi", "toy", "1.0", digest, "MIT", "toy-*.dist-info/LICENSE")
    spec = _spec(sources=(source,), examples=lambda folders: _pool(1200))
    root, cache = tmp_path / "tasks", tmp_path / "cache"
    assert publish(spec, root, cache) == {"train": 800, "validation": 200, "test": 200}
    assert (root / "toy/LICENSE").read_text() == "Do as you like.\n"
    record = json.loads((root / "toy/SOURCE.json").read_text())
    assert record["sources"][0]["sha256"] == digest
    assert record["splits"] == {"train": 800, "validation": 200, "test": 200}
    check(spec, root, cache)
    for name in ("test.jsonl", "validation.jsonl", "toy.yaml", "SOURCE.json", "LICENSE"):
        path = root / "toy" / name
        kept = path.read_bytes()
        path.write_bytes(kept.replace(b"o", b"0", 1))
        with pytest.raises(IntegrityError, match=f"{name}: differs from its rebuild"):
            check(spec, root, cache)
        path.unlink()
        with pytest.raises(IntegrityError, match=f"{name}: is not published"):
            check(spec, root, cache)
        path.write_bytes(kept)


@pytest.mark.parametrize("name", sorted(TASKS))
def test_published_folder_is_whole(name: str) -> None:
    folder = PUBLISHED / name
    rows = list(read_jsonl(folder / "test.jsonl"))
    assert len(rows) == HELD_OUT
    assert len({row["prompt"] for row in rows}) == HELD_OUT
    assert all("\n" not in row["target"] and row["target"] == row["target"].strip() for row in rows)
    assert all(len(row["prompt"]) < 700 and len(row["target"]) <= 160 for row in rows)
    record = json.loads((folder / "SOURCE.json").read_text(encoding="utf-8"))
    for held_out in ("validation", "test"):
        text = (folder / f"{held_out}.jsonl").read_text(encoding="utf-8")
        assert record[f"{held_out}_sha256"] == sha256_text(text)
        assert record["splits"][held_out] == text.count("\n")
    assert [source["sha256"] for source in record["sources"]] == [s.sha256 for s in TASKS[name].sources]
    assert (folder / f"{name}.yaml").read_text(encoding="utf-8") == task_file(TASKS[name])
    assert (folder / "LICENSE").stat().st_size > 500


def test_lm_eval_loads_published_tasks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(ROOT)  # the task files name their data relative to the repository root
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path))
    tasks = pytest.importorskip("lm_eval.tasks")
    manager = tasks.TaskManager(include_path="config/tasks", include_defaults=False)
    assert set(TASKS) == set(manager.all_tasks)
    loaded = manager.load(["us_to_uk", "emoji_de"])["tasks"]
    for name, metric, right in (("us_to_uk", "exact_match", 100.0), ("emoji_de", "chrf", 100.0)):
        found = loaded[name]
        docs = list(found.test_docs())
        assert len(docs) == HELD_OUT
        assert found.doc_to_text(docs[0]) == docs[0]["prompt"]
        results = [found.process_results(doc, [f" {doc['target']}\nmore"])[metric] for doc in docs]
        assert found.aggregation()[metric](results) == pytest.approx(right)
        assert found.higher_is_better()[metric]


def test_command_line_lists_and_refuses() -> None:
    listed = CliRunner().invoke(app, ["list"])
    assert listed.exit_code == 0
    assert all(name in listed.stdout for name in sorted(TASKS))
    for arguments in (["build"], ["build", "us_to_uk", "--all"], ["publish", "nope"]):
        result = CliRunner().invoke(app, arguments)
        assert isinstance(result.exception, UsageError), arguments
