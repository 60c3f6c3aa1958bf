"""Sweeps that measured arms of one experiment side by side, joined: as one would have left them, or refused."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from adapter_folders import MakeAdapter
from test_sweep import ROOT, Declare, process, sweep

from loraforge.errors import InputError, OutputError
from loraforge.evidence.targets import TARGETS
from loraforge.files import sha256_file, sole_writer
from loraforge.serving.gather import gather_sweeps
from loraforge.serving.points import RECORDS, Sweep, read_sweep
from loraforge.serving.records import read_run

ONE_POINT: dict[str, Any] = {
    "fleets": 1,
    "arms": ["base_only"],
    "points": [{"rate": 400, "requests": 1, "seeds": [1]}],
}


def gather(folder: Path, *parts: str, out: str = "all") -> Sweep:
    return gather_sweeps([folder / part for part in parts], folder / out)


def command(*arguments: object) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "loraforge", "bench", "gather", *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(line, capture_output=True, text=True, timeout=60, env=environment)


def files(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def change(records: Path, place: int, **values: Any) -> None:
    """Replace values of one of the records."""
    rows = [json.loads(line) for line in records.read_text().splitlines()]
    rows[place] |= values
    records.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def begun(declare: Declare, tmp_path: Path) -> Path:
    """A folder with two parts that were begun, ``gpu0`` and ``gpu1``."""
    path = declare(fleets=1)
    for part in ("gpu0", "gpu1"):
        sweep(path, part, budget_s=0.001)  # too little for any engine
    return tmp_path


def test_arms_measured_side_by_side_are_as_one_sweep_leaves_them(declare: Declare, tmp_path: Path) -> None:
    path = declare(engine="sglang", trace=True)
    beside = process(path, "--arms", "spectral_loraforge", "--port-offset", "1", out="gpu1")
    assert sweep(path, "gpu0", arms=["original_native", "base_only"]).left == 0
    assert beside.wait(timeout=120) == 0
    done = command(tmp_path / "gpu1", tmp_path / "gpu0", "-o", tmp_path / "all")
    assert (done.returncode, done.stderr) == (0, "3 starts, 9 points, of which 9 count\n")

    assert sweep(path, "whole").left == 0
    found, whole = read_sweep(tmp_path / "all"), read_sweep(tmp_path / "whole")
    assert found.setting == whole.setting
    assert {point.key: point.workload for point in found.points} == {
        point.key: point.workload for point in whole.points
    }
    assert [start.number for start in found.starts] == [0, 1, 2]
    for records in (found.starts, found.points):
        assert [record.started for record in records] == sorted(record.started for record in records)
    arms = [start.arm for start in found.starts]
    for name in files(tmp_path / "whole"):  # of each, the same under its number here
        kind, _, rest = name.partition("/")
        if rest:
            arm = rest[len("000-") :].split("-")[0]
            assert (tmp_path / "all" / kind / f"{arms.index(arm):03d}{rest[len('000') :]}").is_file()
    assert len(files(tmp_path / "all")) == len(files(tmp_path / "whole")) == 1 + 9 + 3 * 6

    parts = {name: read_sweep(tmp_path / name) for name in ("gpu0", "gpu1")}
    for name, part in parts.items():
        moved = {point.key: point for point in found.points}
        for point in part.points:
            its = moved[point.key]
            assert its.requests.startswith(f"requests/{its.start:03d}-{its.arm}-")
            assert sha256_file(tmp_path / "all" / its.requests) == its.requests_file_sha256
            assert its == point.model_copy(update={"start": its.start, "requests": its.requests})
        for start in part.starts:
            number = arms.index(start.arm)
            assert found.starts[number] == start.model_copy(update={"number": number})
            for kept in ("logs/{:03d}-{}-f0.log", "counters/{:03d}-{}-f1.json", "traces/{:03d}-{}-f0.jsonl"):
                old = tmp_path / name / kept.format(start.number, start.arm)
                assert (tmp_path / "all" / kept.format(number, start.arm)).read_bytes() == old.read_bytes()

    before = (tmp_path / "all" / RECORDS).read_bytes()
    assert sweep(path, "all").left == 0  # nothing is measured again
    assert (tmp_path / "all" / RECORDS).read_bytes() == before


def test_a_sweep_goes_on_in_what_was_gathered(
    declare: Declare, tmp_path: Path, make_adapter: MakeAdapter
) -> None:
    """Where a part was cut off, and with an arm that repeats the answers of another's part."""
    for kind in ("original", "spectral"):
        make_adapter(tmp_path / "fleet0" / kind / "short")
        make_adapter(tmp_path / "fleet0" / kind / "ok")
    (tmp_path / "fleet0" / "base").mkdir()
    path = declare(fleets=1, stop="natural")
    sweep(path, "gpu0", arms=["original_native"])
    sweep(path, "gpu1", arms=["spectral_loraforge"])
    cut = tmp_path / "gpu0" / RECORDS
    cut.write_bytes(torn := cut.read_bytes()[:-40])
    found = gather(tmp_path, "gpu0", "gpu1")
    assert cut.read_bytes() == torn
    assert [start.arm for start in found.starts] == ["original_native", "spectral_loraforge"]
    assert len(found.points) == 5

    assert sweep(path, "all").left == 0
    found = read_sweep(tmp_path / "all")
    assert [(start.number, start.arm) for start in found.starts[2:]] == [
        (2, "original_native"),
        (3, "base_only"),
    ]
    points = {point.key: point for point in found.complete}
    assert len(points) == len(found.points) == 9
    natural, base = (points[arm, 200.0, 2] for arm in ("spectral_loraforge", "base_only"))
    runs = [read_run(tmp_path / "all" / point.requests) for point in (natural, base)]
    assert natural.requests.startswith("requests/001-")
    assert runs[0].outputs() == runs[1].outputs()


def test_what_was_gathered_is_evidence(declare: Declare, tmp_path: Path) -> None:
    target = TARGETS["cpu_serving"]
    path = declare(fleets=1, experiment="cpu_serving", arms=["original_loraforge", "spectral_loraforge"])
    sweep(path, "gpu0", arms=["spectral_loraforge"])
    sweep(path, "gpu1", arms=["original_loraforge"], port_offset=1)
    gather(tmp_path, "gpu1", "gpu0")
    records = tmp_path / "all" / RECORDS
    target.check(target.parse(records.read_text().splitlines(), records), records)


def test_a_point_counts_once_and_what_stopped_is_kept(declare: Declare, tmp_path: Path) -> None:
    path = declare(**ONE_POINT)
    for part in ("gpu0", "gpu1"):
        assert sweep(path, part).left == 0
    said = r"gpu1/records.jsonl: measures base_only at rate 400, seed 1, as .*/gpu0 does; leave out one of the two"
    with pytest.raises(InputError, match=said):
        gather(tmp_path, "gpu0", "gpu1")
    change(tmp_path / "gpu0" / RECORDS, -1, stopped="interrupted by SIGTERM")
    found = gather(tmp_path, "gpu1", "gpu0")
    assert [(point.start, point.stopped) for point in found.points] == [
        (0, "interrupted by SIGTERM"),
        (1, None),
    ]
    assert sweep(path, "all").left == 0
    assert read_sweep(tmp_path / "all") == found


def test_a_copy_of_a_part_is_refused(declare: Declare, tmp_path: Path) -> None:
    """Even where none of its points counts."""
    sweep(declare(**ONE_POINT), "gpu0")
    change(tmp_path / "gpu0" / RECORDS, -1, stopped="interrupted by SIGTERM")
    shutil.copytree(tmp_path / "gpu0", tmp_path / "copy")
    said = r"copy/records.jsonl: has the start of base_only at .* that .*/gpu0 has; leave out one of the two"
    with pytest.raises(InputError, match=said):
        gather(tmp_path, "gpu0", "copy")


def test_a_start_that_failed_and_what_was_left_out_are_kept_apart(declare: Declare, tmp_path: Path) -> None:
    """The log of a start which was not recorded, for lack of time, has the number of the next one."""
    path = declare("--crash-as", "base_only", **ONE_POINT)
    sweep(path, "gpu0")
    (tmp_path / "gpu0" / "logs" / "000-original_native-f0.log").write_text("of an arm abreast")
    found = gather(tmp_path, "gpu0")
    assert found == read_sweep(tmp_path / "gpu0")
    assert found.starts[0].failure is not None
    assert files(tmp_path / "all") == ["logs/000-base_only-f0.log", RECORDS]


def test_changed_or_missing_requests_are_not_gathered(declare: Declare, tmp_path: Path) -> None:
    sweep(declare(**ONE_POINT), "gpu0")
    file = tmp_path / "gpu0" / read_sweep(tmp_path / "gpu0").points[0].requests
    file.write_text(file.read_text().replace('"failure":null', '"failure":"late"', 1))
    before = files(tmp_path)
    with pytest.raises(InputError, match=rf"{file.name}: is not what was measured; put the file back as"):
        gather(tmp_path, "gpu0")
    assert files(tmp_path) == before
    file.unlink()
    for folder in (False, True):
        if folder:
            file.mkdir()
        with pytest.raises(
            InputError, match=rf"{file.name}: is not there, or cannot be read; put the file ba"
        ):
            gather(tmp_path, "gpu0")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["experiment.yaml", "fleet0", "gpu0"]


def test_parts_of_another_setting_are_refused(begun: Path) -> None:
    path = begun / "experiment.yaml"
    path.write_text(yaml.safe_dump(yaml.safe_load(path.read_text()) | {"warmup": 3}))
    sweep(path, "gpu2", budget_s=0.001)
    done = command(begun / "gpu0", begun / "gpu1", begun / "gpu2", "-o", begun / "all")
    assert done.returncode == 3
    said = f"gpu2/records.jsonl: config.warmup: is 3 there, and 2 in {begun}/gpu0; gather sweeps of one setting\n"
    assert done.stderr.endswith(said)
    assert not (begun / "all").exists()


def test_parts_of_another_kind_of_machine_are_refused(begun: Path) -> None:
    host = read_sweep(begun / "gpu0").setting.host
    change(begun / "gpu1" / RECORDS, 0, host=host.model_dump() | {"cores": host.cores + 1})
    assert (
        gather(begun, "gpu0", "gpu1").setting.host == host
    )  # the same kind, of which a part had other cores
    change(begun / "gpu1" / RECORDS, 0, host=host.model_dump() | {"cpu": "another"})
    with pytest.raises(InputError, match=r"gpu1/records.jsonl: host: is another there, and .* in .*/gpu0"):
        gather(begun, "gpu0", "gpu1", out="other")


def test_parts_without_records_are_refused(begun: Path) -> None:
    (begun / "empty").mkdir()
    (begun / "torn").mkdir()
    (begun / "torn" / RECORDS).write_text('{"record":"setting",')
    for part in ("empty", "torn", "absent"):
        with pytest.raises(InputError, match=rf"{part}/records.jsonl: has no records; name folders that lor"):
            gather(begun, "gpu0", part)
    assert not (begun / "absent").exists()


def test_a_part_is_named_once(begun: Path) -> None:
    (begun / "link").symlink_to(begun / "gpu0")
    for again in ("gpu0", "link", "gpu1/../gpu0"):
        with pytest.raises(InputError, match=rf"{again}: is named twice; name each part once"):
            gather(begun, "gpu0", "gpu1", again)


@pytest.mark.parametrize(
    ("out", "problem"),
    [
        ("gpu1", "is one of the parts; choose another folder"),
        ("gpu1/all", "gpu1/all: lies in .*/gpu1, a part; choose another folder"),
        ("gpu2", "exists and is not empty; choose another folder"),
        (".", "exists and is not empty; choose another folder"),
        ("experiment.yaml", "exists and is not a folder; choose another output"),
    ],
)
def test_nothing_is_replaced(begun: Path, out: str, problem: str) -> None:
    sweep(begun / "experiment.yaml", "gpu2", budget_s=0.001)
    before = {name: (begun / name).read_bytes() for name in files(begun)}
    with pytest.raises(OutputError, match=problem):
        gather(begun, "gpu0", "gpu1", out=out)
    assert {name: (begun / name).read_bytes() for name in files(begun)} == before


@pytest.mark.parametrize("used", ["gpu1", "all"])
def test_folders_that_another_run_uses_are_left_alone(begun: Path, used: str) -> None:
    with (
        sole_writer(begun / used),
        pytest.raises(OutputError, match=rf"{used}: another run writes there; wait for its end"),
    ):
        gather(begun, "gpu0", "gpu1")
    assert gather(begun, "gpu0", "gpu1").points == ()  # into what is empty, too
