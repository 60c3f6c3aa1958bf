"""The profiles for clusters, planned by Snakemake with the executors that are installed here."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

pytestmark = pytest.mark.slow
pytest.importorskip("snakemake")

ROOT = Path(__file__).resolve().parents[2]
EXECUTORS = {
    "slurm": ("snakemake_executor_plugin_slurm",),
    "kubernetes": ("snakemake_executor_plugin_kubernetes", "snakemake_storage_plugin_fs"),
}


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The repository under another name, in which nothing has run."""
    for name in ("Snakefile", "workflow", "profiles", "config", "evidence", "docs", "envs"):
        (tmp_path / name).symlink_to(ROOT / name)
    return tmp_path


def dry_run(
    root: Path, *arguments: str, targets: tuple[str, ...] = ("spectra", "allocation")
) -> tuple[dict[str, int], str]:
    """Jobs by rule that Snakemake would run, and all that it said."""
    run = subprocess.run(
        [sys.executable, "-m", "snakemake", *arguments, "--dry-run", "--", *targets],
        cwd=root,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
        capture_output=True,
        text=True,
        timeout=300,
    )
    said = run.stdout + run.stderr
    assert run.returncode == 0, said
    return {name: int(count) for name, count in re.findall(r"^(\w+) +(\d+)$", said, re.MULTILINE)}, said


@pytest.mark.parametrize("name", EXECUTORS)
def test_a_cluster_divides_the_fleet_by_adapter(copy: Path, name: str) -> None:
    for plugin in EXECUTORS[name]:
        if importlib.util.find_spec(plugin) is None:
            pytest.skip(f"{plugin} is not installed")
    # the volume that the profile names is not mounted here
    place = ("--default-storage-prefix", str(copy)) if name == "kubernetes" else ()
    found, said = dry_run(copy, "--profile", f"profiles/{name}", *place)
    assert f"Using profiles profiles/{name} and workflow specific profile profiles/default" in said
    assert found["factorise_part"] == 8
    assert found["cache_factors"] == 1


def test_parts_are_jobs_on_one_machine_too(copy: Path) -> None:
    found, said = dry_run(copy, "--cores", "2", "--config", "factor={parts: 3}", "--printshellcmds")
    assert found["factorise_part"] == 3
    for part in ("1/3", "2/3", "3/3"):
        assert f"--part {part}" in said
    assert "factorise_part" not in dry_run(copy, "--cores", "2")[0]


def test_scale_is_measured_where_sizes_are_named_and_drawn_elsewhere(copy: Path) -> None:
    measured = {"bench_scale", "bag_evidence", "plot_live"}
    named = ("--cores", "2", "--config", "scale={adapters: [10, 20]}")
    assert measured <= dry_run(copy, *named, targets=("scale",))[0].keys()
    assert "bench_scale" not in dry_run(copy, *named, targets=("figures",))[0]
    assert not measured & dry_run(copy, "--cores", "2", targets=("scale",))[0].keys()


@pytest.mark.parametrize("name", EXECUTORS)
def test_profiles_name_a_packaged_executor_and_real_rules(name: str) -> None:
    profile = yaml.safe_load((ROOT / f"profiles/{name}/config.yaml").read_text())
    assert profile["executor"] == name
    rules = {
        rule
        for path in (ROOT / "workflow/rules").glob("*.smk")
        for rule in re.findall(r"^rule (\w+):", path.read_text(), re.MULTILINE)
    }
    assert set(profile["set-resources"]) <= rules
    extras = (ROOT / "pyproject.toml").read_text()
    assert re.search(rf"^{name} = \[.*{EXECUTORS[name][0].replace('_', '-')}", extras, re.MULTILINE)
