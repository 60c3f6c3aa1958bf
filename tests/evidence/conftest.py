"""Real bags of small synthetic records, made by the command line once and copied for every test that spoils one."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import synthetic
from study import CONFIG, DATE, Study, invoke

from loraforge.evidence.targets import TARGETS


@pytest.fixture(scope="session")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """evidence/ with one bag a target and its index, figures/ drawn from them, and a fleet with its lock."""
    root = tmp_path_factory.mktemp("study")
    lock = synthetic.write_fleet(root / "fleets")
    (root / "config.yaml").write_text(CONFIG)
    (root / "log.txt").write_text(f"started in {Path.cwd()}\n")
    for target in synthetic.MAKERS:
        records = synthetic.write_records(root / f"{target}.jsonl", target)
        made = invoke(
            "evidence", "bag", target, "--records", records, "--config", root / "config.yaml", "--fleet", lock,
            "--protocol", "cpu", "--host", "cpu2", "--date", DATE, "--log", root / "log.txt", "--out", root / "live",
        )  # fmt: skip
        assert made.exit_code == 0, (made.output, made.exception)
        live = Path(made.stdout.split()[-1])
        promoted = invoke("evidence", "promote", live, "--to", root / "evidence")
        assert promoted.exit_code == 0, (promoted.output, promoted.exception)
        for figure in TARGETS[target].figures:
            drawn = invoke(
                "figure", figure, "--bag", Path(promoted.stdout.strip()), "--out", root / "figures"
            )
            assert drawn.exit_code == 0, (drawn.output, drawn.exception)
    return root


@pytest.fixture
def study(pristine: Path, tmp_path: Path) -> Study:
    """A copy to spoil."""
    for name in ("evidence", "figures", "fleets"):
        shutil.copytree(pristine / name, tmp_path / name)
    return Study(tmp_path / "evidence", tmp_path / "figures", tmp_path / "fleets" / "smol.lock.json")


@pytest.fixture
def remake() -> Callable[[Path], None]:
    """Re-make the manifests of a bag after an edit, as a careful forger would."""

    def run(bag: Path) -> None:
        import bagit

        bagit.Bag(str(bag)).save(manifests=True)

    return run
