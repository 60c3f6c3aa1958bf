"""Scores by lm-eval itself: one base model in memory, arms merged into it in turn, one record file an arm.

A record's name is a hash of everything it depends on, so that an interrupted run resumes and an edited task,
adapter, allocation or harness is scored anew.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import platform
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import redirect_stderr
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import yaml

from loraforge.activation.entries import entries_of, entry_key, require_moments
from loraforge.activation.moments import Moments, load_moments
from loraforge.allocate.allocation import AllocationFile, load_allocation
from loraforge.allocate.policies import RULES
from loraforge.config import Policy, QualityConfig
from loraforge.cts.report import REPORT_FILE, load_report
from loraforge.digest import source_digest
from loraforge.errors import InputError, IntegrityError, MissingDependencyError, UsageError
from loraforge.export.manifest import MANIFEST_FILE, load_manifest
from loraforge.factor.engine import Method
from loraforge.files import canonical_json, read_json, sha256_file, sha256_text, write_json
from loraforge.fleet.base_model import tensors_sha256
from loraforge.fleet.lock import load_lock
from loraforge.fleet.peft_io import Adapter, open_adapter
from loraforge.progress import Timer, progress
from loraforge.quality.arms import (
    BASE,
    ORIGINAL,
    Arm,
    MergedModel,
    Update,
    arms_of,
    original_updates,
    truncated_updates,
)

SCHEMA = "loraforge.quality/1"
LM_EVAL = "0.4.13"
_STAGE = ("quality/arms.py", "quality/harness.py", "quality/metrics.py")


@dataclass(frozen=True)
class Settings:
    """What a worker process needs to score adapters; paths as the caller gives them.

    ``moments``: the file that activation policies were allocated with. ``expanded``: folders of ``loraforge cts``,
    each an arm of its own.
    """

    base: Path
    tasks: Path
    cache: Path
    allocations: Path
    policies: tuple[str, ...]
    budgets: tuple[str, ...]
    limit: int | None
    batch_size: int
    device: str
    method: Method = "auto"
    moments: Path | None = None
    expanded: tuple[Path, ...] = ()

    @classmethod
    def of(
        cls,
        config: QualityConfig,
        *,
        base: Path,
        tasks: Path,
        cache: Path,
        allocations: Path,
        method: Method,
        moments: Path | None = None,
        expanded: Sequence[Path] = (),
    ) -> Settings:
        """Settings of a configuration's quality section."""
        return cls(
            base=base,
            tasks=tasks,
            cache=cache,
            allocations=allocations,
            policies=tuple(config.policies),
            budgets=tuple(config.budgets),
            limit=config.limit,
            batch_size=config.batch_size,
            device=resolve_device(config.device),
            method=method,
            moments=moments,
            expanded=tuple(expanded),
        )


def resolve_device(name: str) -> str:
    """``auto`` is CUDA where there is a device, else the CPU; any other name stands for itself."""
    if name != "auto":
        return name
    return "cuda" if torch.cuda.is_available() else "cpu"


@dataclass(frozen=True)
class Result:
    """lm-eval's verdict on one arm: its score in percent and the metric's statistics of every example."""

    metric: str
    score: float
    stats: list[list[float]]
    seconds: float


class Harness:
    """lm-eval over one base model, loaded once; :meth:`score` merges an update, evaluates, and restores."""

    def __init__(self, base: Path, tasks: Path, *, device: str = "cpu", batch_size: int = 64) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="loraforge-eval-")
        _prepare_environment(Path(self._folder.name))
        try:
            import datasets
            import lm_eval
            from lm_eval.models.huggingface import HFLM
            from transformers import AutoModelForCausalLM, AutoTokenizer
            from transformers.utils import logging as transformers_logging
        except ImportError as error:
            raise MissingDependencyError(
                f"{error.name} is not installed", remedy="pip install 'loraforge[quality]'"
            ) from error
        if lm_eval.__version__ != LM_EVAL:
            raise MissingDependencyError(
                f"lm-eval is {lm_eval.__version__}, scores are defined by {LM_EVAL}",
                remedy=f"pip install lm-eval=={LM_EVAL}",
            )
        logging.getLogger("lm_eval").setLevel(logging.ERROR)
        transformers_logging.disable_progress_bar()
        datasets.disable_progress_bars()
        self.model_sha256 = tensors_sha256(base / "model.safetensors")
        self._tasks = tasks
        self._loaded: dict[str, Any] = {}
        # BF16 on every device: it is how the adapters were trained and how the exported fleet is served
        model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16).to(device).eval()
        self._merged = MergedModel(model)
        self._lm = HFLM(
            pretrained=model, tokenizer=AutoTokenizer.from_pretrained(base), batch_size=batch_size
        )

    def score(self, task: str, updates: Mapping[str, Update] | None, limit: int | None = None) -> Result:
        """Score ``task`` (its first ``limit`` examples) with ``updates`` merged, or on the base without."""
        from lm_eval.evaluator import evaluate

        loaded = self._task(task)
        metric = loaded.config.metric_list[0]["metric"]
        try:
            if updates is not None:
                self._merged.merge(updates)
            # lm-eval draws a bar a stage whatever the terminal; ours counts arms
            with Timer() as timer, open(os.devnull, "w") as nowhere, redirect_stderr(nowhere):
                found = evaluate(
                    self._lm,
                    task_dict={"tasks": {task: loaded}},
                    limit=limit,
                    bootstrap_iters=0,
                    log_samples=True,
                )
        finally:
            self._merged.reset()
        samples = sorted(found["samples"][task], key=lambda sample: sample["doc_id"])
        stats = [_statistics(sample[metric]) for sample in samples]
        return Result(metric, float(found["results"][task][f"{metric},none"]), stats, timer.s)

    def _task(self, name: str) -> Any:
        """The loaded task. A wrapper names its data by absolute path, so that any working folder will do."""
        from lm_eval.tasks import TaskManager

        if name not in self._loaded:
            folder = Path(self._folder.name) / "tasks" / name
            folder.mkdir(parents=True)
            source = self._tasks.resolve() / name
            wrapper = {
                "task": name,
                "include": str(source / f"{name}.yaml"),
                "dataset_kwargs": {"data_files": {"test": str(source / "test.jsonl")}},
                "num_fewshot": 0,
            }
            (folder / f"{name}.yaml").write_text(yaml.safe_dump(wrapper), encoding="utf-8")
            manager = TaskManager(include_path=str(folder), include_defaults=False)
            self._loaded[name] = manager.load([name])["tasks"][name]
        return self._loaded[name]


def evaluate_fleet(
    lock: Path, names: Sequence[str], settings: Settings, *, jobs: int = 1
) -> list[dict[str, Any]]:
    """Records of every arm of the adapters ``names`` of a locked fleet, in that order; missing ones are made.

    Raises UsageError for an adapter or a task that does not exist, InputError for allocations or factors that
    do, IntegrityError for an adapter that is not the locked one.
    """
    arms = [
        *arms_of(settings.policies, settings.budgets),
        *(expanded_arm(folder) for folder in settings.expanded),
    ]
    jobs = min(jobs, len(names))
    found: dict[str, list[dict[str, Any]]] = {}
    with progress("eval", len(names) * len(arms)) as ticker:
        if jobs <= 1:
            for name in names:
                records: list[dict[str, Any]] = []
                for arm in arms:
                    records.append(_evaluate_arm(lock, name, arm, settings))
                    ticker.advance(f"{name} {arm.name} {arm.budget}: {records[-1]['score']:.1f}")
                found[name] = records
        else:
            context = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
            threads = max(1, (os.cpu_count() or 1) // jobs)
            with ProcessPoolExecutor(jobs, context, torch.set_num_threads, (threads,)) as pool:
                running = {pool.submit(_evaluate_adapter, lock, name, arms, settings): name for name in names}
                for future in as_completed(running):
                    found[running[future]] = future.result()
                    ticker.advance(running[future], step=len(arms))
    return [record for name in names for record in found[name]]


def _evaluate_adapter(lock: Path, name: str, arms: Sequence[Arm], settings: Settings) -> list[dict[str, Any]]:
    return [_evaluate_arm(lock, name, arm, settings) for arm in arms]


def _evaluate_arm(lock: Path, name: str, arm: Arm, settings: Settings) -> dict[str, Any]:
    adapter, task = _adapter(lock, name)
    source = settings.tasks / task
    for file in (source / f"{task}.yaml", source / "test.jsonl"):
        if not file.is_file():
            raise UsageError("no such task file", path=file, remedy=f"run `loraforge tasks publish {task}`")
    expanded = _expanded(settings.expanded, arm, name)
    allocation = (
        None if arm in (BASE, ORIGINAL) or expanded is not None else _allocation(settings.allocations, arm)
    )
    moments = None if allocation is None else _moments(settings, allocation.policy)
    ranks = None if allocation is None else allocation.ranks.get(name)
    if allocation is not None and ranks is None:
        raise InputError(f"no ranks of adapter {name}", path=settings.allocations, remedy="allocate again")
    model_sha256 = _model_sha256(settings.base)
    identity: dict[str, Any] = {
        "schema": SCHEMA,
        "arm": list(arm),
        "task": {file.name: sha256_file(file) for file in (source / f"{task}.yaml", source / "test.jsonl")},
        "model": model_sha256,
        "adapter": None if arm == BASE else adapter.weights_sha256,
        "scales": None if arm == BASE else {module.name: module.scale for module in adapter.modules},
        "factors": None if ranks is None else entry_key(adapter, moments=moments, method=settings.method),
        "ranks": ranks,
        "limit": settings.limit,
        "batch_size": settings.batch_size,
        "device": settings.device.partition(":")[0],
        "machine": platform.machine(),
        "lm_eval": LM_EVAL,
        "source": source_digest(*_STAGE),
    }
    if expanded is not None:
        identity["expanded"] = expanded.weights_sha256
    path = settings.cache / "quality" / f"{sha256_text(canonical_json(identity))}.json"
    if path.is_file():
        record: dict[str, Any] = read_json(path)
        return {**record, "adapter": name}  # a base record serves every adapter of its task
    updates = None
    if ranks is not None:
        [cached] = entries_of([adapter], settings.cache, moments=moments, method=settings.method)
        updates = truncated_updates(adapter, cached, ranks)
    elif expanded is not None:
        updates = original_updates(expanded)
    elif arm == ORIGINAL:
        updates = original_updates(adapter)
    harness = _harness(settings.base, settings.tasks, settings.device, settings.batch_size)
    result = harness.score(task, updates, settings.limit)
    record = {
        "adapter": name,
        "task": task,
        "metric": result.metric,
        "arm": arm.name,
        "budget": arm.budget,
        "score": result.score,
        "n": len(result.stats),
        "stats": result.stats,
        "task_sha256": identity["task"]["test.jsonl"],
        "adapter_sha256": identity["adapter"],
        "model_sha256": model_sha256,
        "seconds": round(result.seconds, 3),
    }
    write_json(path, record)
    return record


@cache
def _harness(base: Path, tasks: Path, device: str, batch_size: int) -> Harness:
    return Harness(base, tasks, device=device, batch_size=batch_size)


@cache
def _model_sha256(base: Path) -> str:
    return tensors_sha256(base / "model.safetensors")


@cache
def _adapter(lock: Path, name: str) -> tuple[Adapter, str]:
    """The adapter ``name`` of the lock, weights as locked, and its task."""
    fleet = load_lock(lock)
    entry = next((entry for entry in fleet.adapters if entry.name == name), None)
    if entry is None:
        known = ", ".join(sorted(entry.name for entry in fleet.adapters))
        raise UsageError("no such adapter in the fleet", path=lock, key=name, remedy=f"choose from {known}")
    if entry.task is None:
        raise InputError(
            "has no task to be scored on", path=lock, key=name, remedy="add a recipe.yaml that names it"
        )
    adapter = open_adapter(fleet.folder(entry, lock), name=name)
    locked = {file.name: file.sha256 for file in entry.files}
    for file in ("adapter_config.json", "adapter_model.safetensors"):
        if sha256_file(adapter.path / file) != locked.get(file):
            raise IntegrityError(
                "is not the locked file", path=adapter.path / file, remedy="restore it, or lock anew"
            )
    return adapter, entry.task


@cache
def _moments(settings: Settings, policy: Policy) -> Moments | None:
    """The moments that ``policy`` measures by; None where it measures weights."""
    if RULES[policy].norm == "weights":
        return None
    require_moments(policy, settings.moments)
    return None if settings.moments is None else load_moments(settings.moments)


@cache
def _expanded(folders: tuple[Path, ...], arm: Arm, name: str) -> Adapter | None:
    """Adapter ``name`` of the folder that holds ``arm``; None where none does."""
    found = next((folder for folder in folders if expanded_arm(folder) == arm), None)
    return None if found is None else open_adapter(found / name)


@cache
def expanded_arm(folder: Path) -> Arm:
    """The arm that a folder of ``loraforge cts`` holds, or a layout of a fleet of ``loraforge refine``.

    Raises InputError for another folder.
    """
    if (folder / REPORT_FILE).is_file() or not (folder.parent / MANIFEST_FILE).is_file():
        report = load_report(folder)
        return Arm(report.arm, report.budget)
    manifest = load_manifest(folder.parent)
    paths = {module.path for entry in manifest.adapters.values() for module in entry.modules.values()}
    if paths != {"refined"}:
        raise InputError("is not refined", path=folder, remedy="name a layout of a refined fleet")
    return Arm(f"{manifest.fleet.policy}-refined", manifest.fleet.budget.value)


@cache
def _allocation(folder: Path, arm: Arm) -> AllocationFile:
    for path in sorted(folder.glob("*.json")):
        allocation = load_allocation(path)
        if (allocation.policy, allocation.budget.value) == arm:
            return allocation
    raise InputError(
        f"no allocation of {arm.name} at {arm.budget}", path=folder, remedy="run `loraforge allocate` for it"
    )


def _statistics(value: Any) -> list[float]:
    """A metric's value of one example as a list of numbers."""
    return [float(part) for part in value] if isinstance(value, list | tuple) else [float(value)]


def _prepare_environment(folder: Path) -> None:
    """Keep the libraries offline and out of the user's home; they read this when imported."""
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE"):
        os.environ[name] = "1"
    os.environ["HF_DATASETS_CACHE"] = str(folder / "datasets")
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
