"""The audit passes on what was made honestly, and names the file and the claim of whatever was tampered with."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import synthetic
from study import Study, invoke

from loraforge.errors import InputError
from loraforge.evidence.targets import TARGETS
from loraforge.figures import FIGURES
from loraforge.files import sha256_file

Remake = Callable[[Path], None]


def flip(path: Path, offset: int) -> None:
    """Change one bit of one byte."""
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(bytes(data))


def failed(study: Study) -> list[str]:
    """The claims that failed; asserts that the audit ended with 1, without a traceback."""
    result = study.audit()
    assert result.exit_code == 1, (result.output, result.exception)
    assert isinstance(result.exception, SystemExit)
    lines = [line for line in result.output.splitlines() if line.startswith("FAILED ")]
    assert lines
    return lines


def test_honest_evidence_passes_and_every_claim_group_is_reported(study: Study) -> None:
    result = study.audit()
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    assert [line[:18].strip() for line in lines[:-1]] == [
        "index", "bag integrity", "schemas", "validation claims", "summaries", "figure tables", "selections",
        "fleet", "drawn figures",
    ]  # fmt: skip
    assert all(line.endswith("ok") for line in lines[:-1])
    assert lines[-1] == "every byte and every claim holds"


# The six that the issue names.


def test_flipped_byte_in_a_record(study: Study) -> None:
    records = study.bag("spectra") / "data/records.jsonl"
    flip(records, 40)
    assert any(str(records) in line and "the manifest says" in line for line in failed(study))


def test_added_file(study: Study) -> None:
    added = study.bag("quality") / "data/extra.json"
    added.write_text("{}")
    assert f"FAILED {added}: file is not in any manifest" in failed(study)


def test_removed_file(study: Study) -> None:
    removed = study.bag("allocation") / "data/system.json"
    removed.unlink()
    assert f"FAILED {removed}: file listed in the manifest is missing" in failed(study)


@pytest.mark.parametrize("how", ["plain", "manifests re-made", "manifests and index re-made"])
def test_edited_summary(study: Study, remake: Remake, how: str) -> None:
    summary = study.bag("quality") / "data/summary.json"
    value = json.loads(summary.read_text())
    value["quality.spectral.1/12.macro"] += 0.5
    summary.write_text(json.dumps(value))
    if how != "plain":
        remake(study.bag("quality"))
    if how == "manifests and index re-made":
        assert invoke("evidence", "index", study.evidence).exit_code == 0
    lines = failed(study)
    assert any(
        line.startswith(f"FAILED {summary}: quality.spectral.1/12.macro: says ")
        and "the records give" in line
        for line in lines
    )
    in_index = any("INDEX.sha256 says" in line for line in lines)
    in_manifest = any("the manifest says" in line for line in lines)
    assert (in_manifest, in_index) == {
        "plain": (True, False), "manifests re-made": (False, True), "manifests and index re-made": (False, False)
    }[how]  # fmt: skip


def test_figure_whose_numbers_do_not_recompute(study: Study) -> None:
    table = study.figures / "spectra.csv"
    lines = table.read_text().splitlines()
    cells = lines[1].split(",")
    cells[-1] = "0.015625"
    table.write_text("\n".join([lines[0], ",".join(cells), *lines[2:]]) + "\n")
    provenance = study.figures / "spectra.json"
    value = json.loads(provenance.read_text())
    value["files"]["spectra.csv"] = sha256_file(table)
    provenance.write_text(json.dumps(value))
    (line,) = failed(study)
    assert line.startswith(f"FAILED {table}: line 2, fraction: says 0.015625, the records give 0.")


def test_adapter_whose_hash_changed(study: Study) -> None:
    weights = study.lock.parent / "smol/etym/adapter_model.safetensors"
    flip(weights, 3)
    (line,) = failed(study)
    assert line.startswith(f"FAILED {weights}: adapter etym: SHA-256 is ")
    assert "smol.lock.json says" in line


# And what a forger would try next.


def test_adapter_replaced_together_with_its_lock(study: Study) -> None:
    adapter = "brown_genre"
    weights = study.lock.parent / f"smol/{adapter}/adapter_model.safetensors"
    flip(weights, 3)
    lock = json.loads(study.lock.read_text())
    digest = sha256_file(weights)
    entry = next(item for item in lock["adapters"] if item["name"] == adapter)
    next(file for file in entry["files"] if file["name"] == weights.name)["sha256"] = digest
    study.lock.write_text(json.dumps(lock))
    lines = failed(study)
    for target in ("spectra", "allocation", "quality", "recompression"):
        inputs = study.bag(target) / "data/inputs.json"
        assert any(line.startswith(f"FAILED {inputs}: adapters/{adapter}/") for line in lines)
    assert any("was scored with other weights" in line for line in lines)


def test_bag_left_out_of_the_index(study: Study) -> None:
    index = study.evidence / "INDEX.sha256"
    index.write_text("".join(line for line in index.read_text().splitlines(True) if "spectra/" not in line))
    assert f"FAILED {study.bag('spectra')}: bag is not in INDEX.sha256" in failed(study)


def test_index_line_without_a_bag(study: Study) -> None:
    shutil.rmtree(study.bag("recompression"))
    index = study.evidence / "INDEX.sha256"
    assert f"FAILED {index}: lists recompression/20261129-cpu2, but there is no such bag" in failed(study)


def test_missing_index_and_stray_file(study: Study) -> None:
    (study.evidence / "INDEX.sha256").unlink()
    (study.evidence / "notes.txt").write_text("best run")
    lines = failed(study)
    assert any("INDEX.sha256: the index is missing" in line for line in lines)
    assert f"FAILED {study.evidence / 'notes.txt'}: file belongs to no bag" in lines


def test_file_beside_the_payload(study: Study) -> None:
    stray = study.bag("spectra") / "README.txt"
    stray.write_text("hello")
    assert failed(study) == [f"FAILED {stray}: file is not in any manifest"]


def test_bag_moved_to_another_day(study: Study) -> None:
    study.bag("spectra").rename(study.bag("spectra").with_name("20261201-cpu2"))
    assert any(
        "describes spectra/20261129-cpu2, but the bag lies at spectra/20261201-cpu2" in x
        for x in failed(study)
    )


def test_edited_picture_and_lost_provenance(study: Study) -> None:
    svg = study.figures / "quality.svg"
    svg.write_text(svg.read_text().replace("Spectral", "Spectrum"))
    (study.figures / "allocation.json").unlink()
    lines = failed(study)
    assert any(line.startswith(f"FAILED {svg}: SHA-256 is ") for line in lines)
    assert f"FAILED {study.figures / 'allocation.json'}: figure has no provenance" in lines


def test_figure_of_a_superseded_record(study: Study, remake: Remake) -> None:
    bag = study.bag("recompression")
    path = bag / "data/log.txt"
    path.write_text("another run\n")
    remake(bag)
    assert invoke("evidence", "index", study.evidence).exit_code == 0
    provenance = study.figures / "recompression.json"
    claim = "was drawn from other bytes than those of the bag recompression/20261129-cpu2"
    assert failed(study) == [f"FAILED {provenance}: {claim}"]


def test_failed_claim_is_found_even_when_everything_was_remade(study: Study, remake: Remake) -> None:
    bag = study.bag("spectra")
    records = bag / "data/records.jsonl"
    first, *rest = records.read_text().splitlines()
    value = json.loads(first)
    value["action_error"] = 1e-3
    records.write_text("\n".join([json.dumps(value), *rest]) + "\n")
    remake(bag)
    assert invoke("evidence", "index", study.evidence).exit_code == 0
    assert f"FAILED {records}: relative action error is 0.001, limit 3e-05" in failed(study)


@pytest.mark.parametrize(
    "name",
    [
        "data/records.jsonl", "data/summary.json", "data/inputs.json", "data/system.json", "data/validation.json",
        "data/config.json", "data/source.json", "data/figures/spectra.csv", "bag-info.txt", "bagit.txt",
        "manifest-sha256.txt", "tagmanifest-sha256.txt",
    ],
)  # fmt: skip
@pytest.mark.parametrize(
    "garbage",
    [
        b"",
        b"\x00\xff\xfe garbage",
        b"{",
        b"[" * 100_000,
        b'{"a": NaN}',
        b"null",
        b'"\\ud800"',
        b"1" * 5000,
        b"a: b\n c",
    ],
    ids=["empty", "binary", "cut", "deep", "nan", "null", "surrogate", "long", "words"],
)
def test_garbage_is_a_failure_line_and_never_a_traceback(study: Study, name: str, garbage: bytes) -> None:
    (study.bag("spectra") / name).write_bytes(garbage)
    assert any("spectra" in line for line in failed(study))


@pytest.mark.parametrize(
    "name", ["data/records.jsonl", "data/summary.json", "data/inputs.json", "data/system.json"]
)
@pytest.mark.parametrize("garbage", [b"{", b"\xff", b"[" * 100_000, b"null", b"[1]", b"1" * 5000])
def test_garbage_that_the_manifests_vouch_for(
    study: Study, remake: Remake, name: str, garbage: bytes
) -> None:
    (study.bag("spectra") / name).write_bytes(garbage)
    remake(study.bag("spectra"))
    assert invoke("evidence", "index", study.evidence).exit_code == 0
    assert any(str(study.bag("spectra")) in line for line in failed(study))


@pytest.mark.parametrize(
    "garbage",
    [b"{", b"\xff", b"[]", b'{"schema": "loraforge.figure/1"}', b"null", b"[" * 100_000, b"1" * 5000],
    ids=["cut", "binary", "list", "schema", "null", "deep", "long"],
)
def test_garbage_in_provenance_and_lock(study: Study, garbage: bytes) -> None:
    (study.figures / "spectra.json").write_bytes(garbage)
    study.lock.write_bytes(garbage)
    lines = failed(study)
    assert any(str(study.figures / "spectra.json") in line for line in lines)
    assert any(str(study.lock) in line for line in lines)


def test_one_bag_can_be_audited_where_it_lies(pristine: Path) -> None:
    result = invoke("audit", pristine / "live/spectra/20261129-cpu2")
    assert result.exit_code == 0, result.output
    assert not result.output.startswith("index")


@pytest.fixture
def repository(study: Study, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Study:
    """The study where a repository keeps it, as working folder; the paths are as the audit prints them."""
    monkeypatch.chdir(tmp_path)
    for old, new in ((study.figures, "docs/figures"), (study.lock.parent, "config/fleets")):
        Path(new).parent.mkdir()
        old.rename(new)
    for provenance in Path("docs/figures").glob("*.json"):  # which names its bag relative to itself
        provenance.write_text(provenance.read_text().replace("../evidence/", "../../evidence/"))
    return Study(Path("evidence"), Path("docs/figures"), Path("config/fleets/smol.lock.json"))


def test_audit_without_options_is_of_everything(repository: Study) -> None:
    result = invoke("audit")
    assert result.exit_code == 0, result.output
    checked = {line[:18].strip(): line.split()[-3] for line in result.output.splitlines()[:-1]}
    assert (checked["fleet"], checked["drawn figures"], checked["bag integrity"]) == (
        "48",
        str(len(FIGURES)),
        str(len(TARGETS)),
    )
    other = repository.lock.with_name("other.lock.json")
    other.write_text(repository.lock.read_text().replace('"name": "smol"', '"name": "other"'))
    lines = invoke("audit").output.splitlines()
    assert [line.split()[-3] for line in lines if line.startswith("fleet")] == ["96"]


@pytest.mark.parametrize("path", [[], ["evidence"]], ids=["default", "spelt out"])
def test_audit_without_options_finds_a_changed_adapter_and_picture(
    repository: Study, path: list[str]
) -> None:
    weights = repository.lock.parent / "smol/etym/adapter_model.safetensors"
    flip(weights, 3)
    flip(repository.figures / "quality.png", 100)
    result = invoke("audit", *path)
    assert result.exit_code == 1
    (first, second) = [line for line in result.output.splitlines() if line.startswith("FAILED ")]
    assert first.startswith(f"FAILED {weights}: adapter etym: SHA-256 is ")
    assert second.startswith(f"FAILED {repository.figures / 'quality.png'}: SHA-256 is ")


def test_a_lost_lock_does_not_pass_for_an_audited_fleet(repository: Study) -> None:
    repository.lock.unlink()
    result = invoke("audit")
    assert isinstance(result.exception, InputError)
    assert str(result.exception).startswith("config/fleets: no fleet lock beside the evidence; ")


def test_options_replace_what_the_audit_would_find(repository: Study, tmp_path: Path) -> None:
    own = synthetic.write_fleet(tmp_path / "own")
    weights = repository.lock.parent / "smol/etym/adapter_model.safetensors"
    flip(weights, 3)
    assert invoke("audit", "--fleet", own).exit_code == 0
    assert invoke("audit", "--fleet", own, "--fleet", repository.lock).exit_code == 1


def test_audit_of_another_root_takes_nothing_from_its_surroundings(repository: Study) -> None:
    flip(repository.lock.parent / "smol/etym/adapter_model.safetensors", 3)
    lines = invoke("audit", repository.evidence.resolve()).output.splitlines()
    assert not [line for line in lines if line.startswith(("fleet", "drawn figures"))]
    assert lines[-1] == "every byte and every claim holds"


def test_empty_root_is_no_evidence(tmp_path: Path) -> None:
    (tmp_path / "INDEX.sha256").write_text("")
    result = invoke("audit", tmp_path)
    assert result.exit_code == 1
    assert "holds no evidence bag" in result.output


@pytest.mark.parametrize("module", ["loraforge.fleet.lock", "loraforge.evidence.audit"])
def test_import_of_what_the_audit_needs_brings_no_torch(module: str) -> None:
    program = f"import sys, {module}; print('torch' in sys.modules, 'matplotlib' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("False False\n", "")


def test_audit_and_figures_never_import_torch(pristine: Path) -> None:
    program = (
        "import sys; from loraforge.cli import main\n"
        "try: main(sys.argv[1:])\n"
        "except SystemExit as end: code = end.code\n"
        "print('torch' in sys.modules, 'matplotlib' in sys.modules)\n"
        "raise SystemExit(code)"
    )
    arguments = ["audit", str(pristine / "evidence"), "--fleet", str(pristine / "fleets/smol.lock.json")]
    arguments += ["--figures", str(pristine / "figures")]
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "False False"
