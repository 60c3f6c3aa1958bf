"""Scores of a fleet: every arm of every adapter, one record file a distinct set of weights.

A record's name is a hash of everything its scores depend on, so that an interrupted run resumes, an edited task,
adapter, allocation or harness is scored anew, and arms that leave an adapter the same ranks are scored once.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from loraforge.activation.entries import entries_of, entry_key, require_moments
from loraforge.activation.moments import Moments, load_moments, stated_norm
from loraforge.allocate.allocation import AllocationFile, load_allocation
from loraforge.allocate.policies import RULES
from loraforge.config import Policy, QualityConfig, Split
from loraforge.cts.report import load_report
from loraforge.digest import source_digest
from loraforge.errors import InputError, IntegrityError, UsageError
from loraforge.export.manifest import MANIFEST_FILE, Manifest, load_manifest
from loraforge.factor.engine import Method
from loraforge.files import canonical_json, read_json, sha256_file, sha256_text, write_json
from loraforge.fleet.base_model import tensors_sha256
from loraforge.fleet.lock import FleetLock, load_lock
from loraforge.fleet.peft_io import Adapter, open_adapter
from loraforge.progress import progress
from loraforge.quality import SCORING
from loraforge.quality.arms import (
    BASE,
    ORIGINAL,
    Arm,
    Update,
    arms_of,
    original_updates,
    truncated_updates,
)
from loraforge.quality.harness import LM_EVAL, Harness, resolve_device
from loraforge.quality.tasks import split_file
from loraforge.workers import each

SCHEMA = "loraforge.quality/2"
REFINED = "-refined"  # behind the policy of a compressed fleet that was trained further


@dataclass(frozen=True)
class Settings:
    """What a worker process needs to score adapters; paths as the caller gives them.

    ``moments``: the files that policies were allocated with, one a norm. ``expanded``: folders of ``loraforge cts``
    and ``refine``, each an arm of its own. ``lanes``: arms of one adapter that are decoded at once.
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
    moments: tuple[Path, ...] = ()
    expanded: tuple[Path, ...] = ()
    split: Split = "test"
    lanes: int = 1

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
        policies: Sequence[str] | None = None,
        moments: Sequence[Path] = (),
        expanded: Sequence[Path] = (),
    ) -> Settings:
        """Settings of a configuration's quality section; ``policies`` in place of its own where given."""
        return cls(
            base=base,
            tasks=tasks,
            cache=cache,
            allocations=allocations,
            policies=tuple(config.policies if policies is None else policies),
            budgets=tuple(config.budgets),
            limit=config.limit,
            batch_size=config.batch_size,
            device=resolve_device(config.device),
            method=method,
            moments=tuple(moments),
            expanded=tuple(expanded),
            split=config.split,
            lanes=config.lanes,
        )


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

                def tell(done: int, words: str, name: str = name) -> None:
                    ticker.advance(f"{name} {words}", step=done)

                found[name] = _evaluate_adapter(lock, name, arms, settings, tell)
        else:
            asked = {name: (lock, name, arms, settings) for name in _longest_first(lock, names, settings)}
            for name, records in each(_evaluate_adapter, asked, jobs):
                found[name] = records
                ticker.advance(name, step=len(arms))
    return [record for name in names for record in found[name]]


@dataclass(frozen=True)
class _Plan:
    """One arm of one adapter: where its record lies, what the record says beside its scores, and what to merge."""

    arm: Arm
    path: Path
    about: Mapping[str, Any]
    updates: Callable[[], dict[str, Update] | None]

    @property
    def words(self) -> str:
        return f"{self.arm.name} {self.arm.budget}"


def _evaluate_adapter(
    lock: Path,
    name: str,
    arms: Sequence[Arm],
    settings: Settings,
    tell: Callable[[int, str], None] = lambda done, words: None,
) -> list[dict[str, Any]]:
    """Records of the arms of one adapter, in their order; ``tell`` hears how many arms are new and which."""
    plans = [_plan(lock, name, arm, settings) for arm in arms]
    missing = {plan.path: plan for plan in plans if not plan.path.is_file()}
    known = sum(plan.path not in missing for plan in plans)
    if known:
        tell(known, "kept from an earlier run")
    waiting = list(missing.values())
    for start in range(0, len(waiting), settings.lanes):
        group = waiting[start : start + settings.lanes]
        harness = _harness(
            settings.base, settings.tasks, settings.device, settings.batch_size, settings.lanes
        )
        task = group[0].about["task"]
        results = harness.score_arms(task, [plan.updates() for plan in group], settings.limit, settings.split)
        for plan, result in zip(group, results, strict=True):
            record = {
                **plan.about,
                "metric": result.metric,
                "score": result.score,
                "n": len(result.stats),
                "stats": result.stats,
                "seconds": round(result.seconds, 3),
            }
            write_json(plan.path, record)
            alike = sum(other.path == plan.path for other in plans)
            tell(alike, f"{plan.words}: {result.score:.1f}")
    # a base record serves every adapter of its task, and one of ranks every arm that leaves them
    return [{**read_json(plan.path), **plan.about} for plan in plans]


def _plan(lock: Path, name: str, arm: Arm, settings: Settings) -> _Plan:
    adapter, task = _adapter(lock, name)
    examples = split_file(settings.tasks, task, settings.split)
    definition = settings.tasks / task / f"{task}.yaml"
    for file in (definition, examples):
        if not file.is_file():
            raise UsageError("no such task file", path=file, remedy=f"run `loraforge tasks publish {task}`")
    digests = {file.name: sha256_file(file) for file in (definition, examples)}
    expanded = _expanded(settings.expanded, arm, name)
    allocation = (
        None if arm in (BASE, ORIGINAL) or expanded is not None else _allocation(settings.allocations, arm)
    )
    moments = None if allocation is None else _moments(settings.moments, allocation.policy)
    ranks = None if allocation is None else allocation.ranks.get(name)
    if allocation is not None and ranks is None:
        raise InputError(f"no ranks of adapter {name}", path=settings.allocations, remedy="allocate again")
    model_sha256 = _model_sha256(settings.base)
    identity: dict[str, Any] = {
        "schema": SCHEMA,
        "task": digests,
        "model": model_sha256,
        "adapter": None if arm == BASE else adapter.weights_sha256,
        "scales": None if arm == BASE else {module.name: module.scale for module in adapter.modules},
        "factors": None if ranks is None else entry_key(adapter, moments=moments, method=settings.method),
        "ranks": ranks,
        "expanded": None if expanded is None else expanded.weights_sha256,
        "limit": settings.limit,
        "batch_size": settings.batch_size,
        "lanes": settings.lanes,
        "device": settings.device.partition(":")[0],
        "machine": platform.machine(),
        "lm_eval": LM_EVAL,
        "source": source_digest(*SCORING),
    }
    about = {
        "adapter": name,
        "task": task,
        "split": settings.split,
        "arm": arm.name,
        "budget": arm.budget,
        "parameters": _parameters(adapter, arm, ranks, expanded),
        "task_sha256": digests[examples.name],
        "adapter_sha256": identity["adapter"],
        "model_sha256": model_sha256,
    }

    def updates() -> dict[str, Update] | None:
        if ranks is not None:
            [cached] = entries_of([adapter], settings.cache, moments=moments, method=settings.method)
            return truncated_updates(adapter, cached, ranks)
        if expanded is not None:
            return original_updates(expanded)
        return original_updates(adapter) if arm == ORIGINAL else None

    path = settings.cache / "quality" / f"{sha256_text(canonical_json(identity))}.json"
    return _Plan(arm, path, about, updates)


def _parameters(
    adapter: Adapter, arm: Arm, ranks: Mapping[str, int] | None, expanded: Adapter | None
) -> int | None:
    """Compact parameters that an arm leaves an adapter; None where bases are shared and no adapter's own."""
    if arm == BASE:
        return 0
    if ranks is not None:
        return sum(ranks[module.name] * (module.d_in + module.d_out) for module in adapter.modules)
    own = adapter if arm == ORIGINAL else expanded if arm.name.endswith(REFINED) else None
    if own is None:
        return None
    return sum(module.rank * (module.d_in + module.d_out) for module in own.modules)


def _longest_first(lock: Path, names: Sequence[str], settings: Settings) -> Iterable[str]:
    """Adapters by falling size of their task's examples, which goes with the time they take: none is begun last."""

    def size(name: str) -> int:
        file = split_file(settings.tasks, _adapter(lock, name)[1], settings.split)
        return file.stat().st_size if file.is_file() else 0

    return sorted(names, key=size, reverse=True)


@cache
def _harness(base: Path, tasks: Path, device: str, batch_size: int, lanes: int) -> Harness:
    return Harness(base, tasks, device=device, batch_size=batch_size, lanes=lanes)


@cache
def _model_sha256(base: Path) -> str:
    return tensors_sha256(base / "model.safetensors")


@cache
def _fleet(lock: Path) -> FleetLock:
    return load_lock(lock)


@cache
def _adapter(lock: Path, name: str) -> tuple[Adapter, str]:
    """The adapter ``name`` of the lock, weights as locked, and its task."""
    fleet = _fleet(lock)
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


def _moments(files: Sequence[Path], policy: Policy) -> Moments | None:
    """The moments that ``policy`` measures by; None where it measures weights."""
    norm = RULES[policy].norm
    if norm == "weights":
        return None
    file = next((file for file in files if stated_norm(file) == norm), None)
    require_moments(policy, file)
    return None if file is None else _opened(file)


@cache
def _opened(file: Path) -> Moments:
    return load_moments(file)


@cache
def _expanded(folders: tuple[Path, ...], arm: Arm, name: str) -> Adapter | None:
    """Adapter ``name`` of the folder that holds ``arm``; None where none does."""
    found = next((folder for folder in folders if expanded_arm(folder) == arm), None)
    if found is None:
        return None
    manifest = _manifest(found)
    return open_adapter(found / (manifest.fleet.layouts[0] if manifest else "") / name)


@cache
def expanded_arm(folder: Path) -> Arm:
    """The arm that a folder of ``loraforge cts`` or ``refine`` holds. Raises InputError for another folder."""
    if manifest := _manifest(folder):
        return Arm(manifest.fleet.policy + REFINED, str(manifest.fleet.budget.value))
    report = load_report(folder)
    return Arm(report.arm, report.budget)


@cache
def _manifest(folder: Path) -> Manifest | None:
    """What a folder of ``loraforge refine`` states; None for one of shared bases.

    Raises InputError for a compressed fleet that was not refined, which is scored by its allocation.
    """
    if not (folder / MANIFEST_FILE).is_file():
        return None
    manifest = load_manifest(folder)
    paths = {module.path for adapter in manifest.adapters.values() for module in adapter.modules.values()}
    if paths != {"refined"}:
        raise InputError(
            "is no refined fleet", path=folder / MANIFEST_FILE, remedy="score its allocation instead"
        )
    return manifest


@cache
def _allocations(folder: Path) -> dict[Arm, AllocationFile]:
    """Every allocation of a folder."""
    found: dict[Arm, AllocationFile] = {}
    for path in sorted(folder.glob("*.json")):
        allocation = load_allocation(path)
        found.setdefault(Arm(allocation.policy, str(allocation.budget.value)), allocation)
    return found


def _allocation(folder: Path, arm: Arm) -> AllocationFile:
    try:
        return _allocations(folder)[arm]
    except KeyError:
        raise InputError(
            f"no allocation of {arm.name} at {arm.budget}",
            path=folder,
            remedy="run `loraforge allocate` for it",
        ) from None
