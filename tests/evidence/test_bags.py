"""Bags hold what they must, say nothing personal, and are made, promoted and indexed whole or not at all."""

from __future__ import annotations

import getpass
import hashlib
import json
import os
import platform
import subprocess
from pathlib import Path

import bagit
import pytest
import synthetic
from study import CONFIG, DATE, Study, invoke
from synthetic_serving import SGLANG
from typer.testing import Result

from loraforge.errors import InputError, IntegrityError, LoraForgeError, OutputError
from loraforge.evidence.bag import PAYLOAD, Bag, open_bag
from loraforge.evidence.index import current_bags, write_index
from loraforge.evidence.promote import promote
from loraforge.evidence.targets import TARGETS


def make(tmp_path: Path, target: str, records: Path, *more: object) -> Result:
    lock = tmp_path / "fleets/smol.lock.json"
    if not lock.exists():
        synthetic.write_fleet(tmp_path / "fleets")
    (tmp_path / "config.yaml").write_text(CONFIG)
    return invoke(
        "evidence", "bag", target, "--records", records, "--config", tmp_path / "config.yaml", "--fleet", lock,
        "--protocol", "cpu", "--out", tmp_path / "live", *more,
    )  # fmt: skip


@pytest.mark.parametrize("target", list(TARGETS))
def test_bag_is_valid_bagit_with_exactly_its_payload(pristine: Path, target: str) -> None:
    path = pristine / f"live/{target}/20261129-cpu2"
    bag = bagit.Bag(str(path))
    assert bag.is_valid()
    assert bag.algorithms == ["sha256"]
    wanted = {f"data/{name}" for name in PAYLOAD} | {
        f"data/figures/{name}.csv" for name in TARGETS[target].figures
    }
    assert set(bag.payload_files()) == wanted
    assert bag.info["External-Identifier"] == f"{target}/20261129-cpu2"
    assert bag.info["Bagging-Date"] == DATE


@pytest.mark.parametrize("target", list(TARGETS))
def test_summary_is_flat_and_says_where_and_when(pristine: Path, target: str) -> None:
    path = pristine / f"live/{target}/20261129-cpu2/data/summary.json"
    summary = json.loads(path.read_text())
    assert {
        key: value for key, value in summary.items()
        if isinstance(value, str) and not key.startswith("selection.")  # what was chosen has a name
    } == {
        "host": "cpu2", "date": DATE, "protocol": "cpu", "device": summary["device"],
        **({"engine": "sglang 0.5.22" if target in SGLANG else "vllm 0.26.0"} if target in synthetic.ARMS else {}),
    }  # fmt: skip
    assert all(isinstance(value, str | int | float) for value in summary.values())


def test_summary_keys_that_others_read(pristine: Path) -> None:
    def keys(target: str) -> set[str]:
        return set(json.loads((pristine / f"live/{target}/20261129-cpu2/data/summary.json").read_text()))

    assert {"smol.factor_s", "smol.adapters"} <= keys("spectra")
    assert {"quality.base.0.macro", "quality.original.1.macro", "quality.spectral.1/12.macro"} <= keys(
        "quality"
    )
    names = ("worst_regression", "over5", "ci_low", "ci_high")
    assert {f"quality.uniform.1/4.{name}" for name in names} <= keys("quality")
    assert {f"smol.{name}_s" for name in ("florist", "spectral_transform", "fraq", "tsqr", "gram")} <= keys(
        "recompression"
    )


def test_inputs_are_the_files_of_the_adapters_that_the_records_name(pristine: Path) -> None:
    inputs = json.loads((pristine / "live/quality/20261129-cpu2/data/inputs.json").read_text())
    used = synthetic.NAMES[:3]
    weights = {name: digest for name, digest in inputs.items() if name.endswith(".safetensors")}
    assert weights == {
        f"adapters/{name}/adapter_model.safetensors": hashlib.sha256(
            synthetic.weights(name).encode()
        ).hexdigest()
        for name in used
    }
    assert {f"tasks/{name}" for name in used} | {"model", "fleet.lock.json"} <= inputs.keys()


def test_nothing_personal_is_in_a_bag(pristine: Path) -> None:
    words = [str(Path.cwd()), str(pristine), platform.node()]
    words += [name for name in [getpass.getuser(), os.environ.get("HOME", "")] if len(name) > 5]
    for path in (pristine / "live").rglob("*"):
        if path.is_file():
            text = path.read_text()
            assert not [word for word in words if word and word in text], path


def test_date_is_that_of_the_records(tmp_path: Path) -> None:
    records = synthetic.write_records(tmp_path / "r.jsonl", "recompression")
    os.utime(records, (1_700_000_000, 1_700_000_000))  # 2023-11-14 in UTC
    result = make(tmp_path, "recompression", records, "--host", "lab")
    assert result.exit_code == 0, result.output
    assert result.stdout.strip().endswith("recompression/20231114-lab")


def test_the_same_study_in_two_engines_has_two_labels(tmp_path: Path) -> None:
    for engine in ("vllm", "sglang"):
        records = synthetic.write_records(tmp_path / f"{engine}.jsonl", "six_cell")
        result = make(tmp_path, "six_cell", records, "--engine", engine, "--date", DATE)
        assert result.exit_code == 0, result.output
        (bag,) = (tmp_path / "live/six_cell").glob(f"20261129-{engine}-*")
        assert open_bag(bag).run.host.startswith(f"{engine}-cpu")


def test_a_second_bag_of_the_day_needs_force(tmp_path: Path) -> None:
    records = synthetic.write_records(tmp_path / "r.jsonl", "recompression")
    assert make(tmp_path, "recompression", records).exit_code == 0
    assert isinstance(make(tmp_path, "recompression", records).exception, OutputError)
    assert make(tmp_path, "recompression", records, "--force").exit_code == 0


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda record: record.pop("rank"), "line 1, spectrum.rank: Field required"),
        (lambda record: record.update(note="x"), "line 1, spectrum.note: Extra inputs are not permitted"),
        (lambda record: record["sigma"].reverse(), "sigma is not in descending order"),
        (lambda record: record["sigma"].pop(), "sigma holds 15 values at rank 16"),
        (lambda record: record.update(action_error=1e-3), "relative action error is 0.001, limit 3e-05"),
        (
            lambda record: record.update(adapter="stranger"),
            "adapter 'stranger' of the records is not in the fleet lock",
        ),
    ],
)
def test_bad_records_make_no_bag(tmp_path: Path, edit: object, message: str) -> None:
    made = synthetic.spectra(1, 1)
    edit(made[0])  # type: ignore[operator]
    records = tmp_path / "r.jsonl"
    records.write_text("".join(json.dumps(record) + "\n" for record in made))
    result = make(tmp_path, "spectra", records)
    assert isinstance(result.exception, LoraForgeError)
    assert message in str(result.exception)
    assert not [path for path in (tmp_path / "live").rglob("*") if path.is_file()]


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--date", "29.11.2026", "--date: '29.11.2026' is not a date"),
        ("--host", "my host", "--host: 'my host' is not a label"),
        ("--protocol", "fast", "--protocol: no protocol 'fast'"),
        ("--input", "x", "--input: 'x' is not NAME=FILE"),
    ],
)
def test_bad_options(tmp_path: Path, option: str, value: str, message: str) -> None:
    records = synthetic.write_records(tmp_path / "r.jsonl", "recompression")
    result = make(tmp_path, "recompression", records, option, value)
    assert message in str(result.exception)
    assert getattr(result.exception, "exit_code", None) == 2


def test_machine_described_elsewhere(tmp_path: Path) -> None:
    assert invoke("evidence", "machine", "--out", tmp_path / "box").exit_code == 0
    system = json.loads((tmp_path / "box/system.json").read_text())
    (tmp_path / "box/system.json").write_text(json.dumps(system | {"gpu": "NVIDIA H200", "gpus": 1}))
    records = synthetic.write_records(tmp_path / "r.jsonl", "recompression")
    result = make(
        tmp_path,
        "recompression",
        records,
        "--machine",
        tmp_path / "box",
        "--protocol",
        "paper",
        "--date",
        DATE,
    )
    bag = Bag(Path(result.stdout.strip()))
    assert bag.path.name == "20261129-h200"
    assert bag.summary()["device"] == "NVIDIA H200"


def test_index_is_what_sha256sum_reads(study: Study) -> None:
    done = subprocess.run(
        ["sha256sum", "-c", "INDEX.sha256"], cwd=study.evidence, capture_output=True, check=False
    )
    assert done.returncode == 0
    assert done.stdout.count(b": OK") == len(TARGETS)


def test_newer_bag_supersedes(study: Study, tmp_path: Path) -> None:
    records = synthetic.write_records(tmp_path / "r.jsonl", "recompression")
    newer = make(tmp_path, "recompression", records, "--host", "cpu2", "--date", "2026-12-01")
    promote(open_bag(Path(newer.stdout.strip())), study.evidence)
    text = (study.evidence / "INDEX.sha256").read_text()
    assert "# current recompression cpu2 20261201-cpu2\n" in text
    assert "recompression/20261129-cpu2/tagmanifest-sha256.txt" in text
    assert invoke("evidence", "index", study.evidence, "--check").exit_code == 0
    assert study.audit().exit_code == 0


def test_current_bags_need_an_index(study: Study) -> None:
    assert current_bags(study.evidence)["spectra", "cpu2"].endswith("-cpu2")
    index = study.evidence / "INDEX.sha256"
    index.write_text("strange\n")
    with pytest.raises(InputError, match=r"INDEX.sha256: not a readable index \(line 1 is not an entry"):
        current_bags(study.evidence)
    index.unlink()
    remedy = f"or write its index with `loraforge evidence index {study.evidence}`$"
    with pytest.raises(InputError, match=f"INDEX.sha256: the index of the evidence is missing; .*{remedy}"):
        current_bags(study.evidence)


def test_index_check_names_what_is_wrong(study: Study) -> None:
    index = study.evidence / "INDEX.sha256"
    index.write_text(
        index.read_text().replace(
            "# current spectra cpu2 20261129-cpu2", "# current spectra cpu2 20250101-cpu2"
        )
    )
    result = invoke("evidence", "index", study.evidence, "--check")
    assert result.exit_code == 1
    assert "current bag of spectra on cpu2 is 20250101-cpu2, the newest is 20261129-cpu2" in result.output


def test_promotion_is_idempotent_and_refuses_other_bytes_and_bad_bags(study: Study, pristine: Path) -> None:
    live = pristine / "live/spectra/20261129-cpu2"
    before = (study.evidence / "INDEX.sha256").read_bytes()
    promote(open_bag(live), study.evidence)
    assert (study.evidence / "INDEX.sha256").read_bytes() == before
    bag = study.bag("spectra")
    (bag / "data/log.txt").write_text("edited")
    with pytest.raises(IntegrityError, match=r"log\.txt: SHA-256 is"):
        promote(open_bag(bag), study.evidence / "elsewhere")
    assert not (study.evidence / "elsewhere").exists()
    bagit.Bag(str(bag)).save(manifests=True)
    with pytest.raises(OutputError, match="not empty"):
        promote(open_bag(live), study.evidence)


def test_index_ignores_an_unfinished_write(study: Study) -> None:
    before = (study.evidence / "INDEX.sha256").read_bytes()
    (study.evidence / "spectra/.20261130-cpu2.abc.tmp").mkdir()
    write_index(study.evidence)
    assert (study.evidence / "INDEX.sha256").read_bytes() == before
    assert study.audit().exit_code == 0
