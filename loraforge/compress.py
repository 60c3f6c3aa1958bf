"""The whole chain in one call: verify, factorise, allocate, export."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from loraforge.activation.entries import order_fleet, require_moments
from loraforge.activation.moments import Moments, load_moments
from loraforge.allocate.allocation import AllocationFile, allocation_file
from loraforge.allocate.budget import Budget, floor_warning
from loraforge.allocate.policies import DEFAULT_POLICY
from loraforge.allocate.policy import Spectra, allocate, problem_of
from loraforge.allocate.problem import Ints, Problem
from loraforge.config import Layout, Policy
from loraforge.export.directions import CachedFleet, Source, cached_source
from loraforge.export.manifest import Manifest
from loraforge.export.options import DTYPES, LAYOUTS, parse_dtype
from loraforge.export.writer import export_fleet
from loraforge.factor import gpu
from loraforge.factor.fleet import factorise_fleet
from loraforge.factor.stages import Stages
from loraforge.files import refuse_folder, refuse_to_replace, scratch_folder
from loraforge.fleet.lock import fleet_name
from loraforge.fleet.options import DEFAULT, ReadOptions
from loraforge.fleet.peft_io import Adapter
from loraforge.fleet.source import open_source
from loraforge.garbage import uncollected
from loraforge.progress import say


@dataclass(frozen=True)
class Choice:
    """What a policy keeps of a fleet, and of what.

    Parameters
    ----------
    problem: modules and spectra, in the norm that the policy measures.
    allocation: the ranks that it chose.
    uniform: int64 [M], uniform ranks at the same budget, in the order of the problem.
    """

    problem: Problem
    allocation: AllocationFile
    uniform: Ints


@dataclass(frozen=True)
class Compressed:
    """What :func:`compress` did: the manifest it wrote, what that keeps, and wall-clock seconds by stage."""

    manifest: Manifest
    choice: Choice
    seconds: dict[str, float]


@uncollected()
def compress(
    source: Sequence[Path],
    budget: Budget,
    out: Path,
    *,
    cache: Path | None,
    policy: Policy | None = None,
    layouts: Sequence[Layout] = LAYOUTS,
    dtype: str = "bfloat16",
    force: bool = False,
    devices: Sequence[str] = (),
    options: ReadOptions = DEFAULT,
    moments: Path | None = None,
) -> Compressed:
    """Compress adapter folders, or the fleet of one lock file, under ``budget`` into the folder ``out``.

    ``cache`` keeps all factors, so that another budget costs only allocation and export, which a GPU does where there
    is one. None keeps none: on one GPU only the directions that the budget keeps are then built, and nothing but the
    output is written; elsewhere factors are put beside ``out`` and removed. ``devices``: see
    :func:`~loraforge.factor.fleet.factorise_fleet`. ``options``: what may be read beyond safetensors. ``moments``: the
    file that an activation or a fisher policy measures by; its factors are ordered on the CPU. ``policy``: None for the
    default one of what there is to measure with (:func:`settle_policy`); the manifest names it.

    On the CPU, peak memory is that of a few adapters' factors and the fleet's spectra. Stages are ``verify``, ``hash``
    (of weights that no lock has verified), ``load`` (to a GPU), ``factor``, ``allocate`` and ``export``. Raises every
    :class:`~loraforge.errors.LoraForgeError` that the stages do; ``out`` appears whole or not at all.
    """
    chosen, known, width = check_request(source, out, cache, policy, dtype, force, moments)
    stages = Stages()
    with stages("verify"):
        fleet = open_source(source, options)
        refuse_to_replace(out, [adapter.path for adapter in fleet])
    with _factorised(fleet, cache, out, devices, stages, known) as factors:
        with stages("allocate"):
            choice = choose(fleet_name(source), factors.spectra, chosen, budget, width or widest(fleet))
        # on a GPU, directions are built while they are exported
        before = sum(stages.seconds.values())
        with stages("export"):
            manifest = export_fleet(
                fleet, factors, choice.allocation, out, layouts=layouts, dtype=dtype, force=force
            )
        stages.add("export", before + stages.seconds["export"] - sum(stages.seconds.values()))
    return Compressed(manifest, choice, stages.seconds)


def check_request(
    source: Sequence[Path],
    out: Path,
    cache: Path | None,
    policy: Policy | None,
    dtype: str,
    force: bool,
    moments: Path | None,
) -> tuple[Policy, Moments | None, int | None]:
    """All of a request that can be wrong before its fleet is opened; gives the policy, the moments that it measures by,
    and bytes of an exported parameter (None where each keeps its own dtype).

    Raises UsageError for moments of another norm and an unknown dtype, InputError and IntegrityError for a file of
    moments that is none or has changed, OutputError for an output that cannot be.
    """
    chosen, known = settle_policy(policy, moments)
    width = DTYPES[parse_dtype(dtype)]
    refuse_folder(out, [*source, cache], force=force)
    return chosen, known, width


def settle_policy(policy: Policy | None, moments: Path | None) -> tuple[Policy, Moments | None]:
    """``policy``, and the opened ``moments`` that it measures by; None is the default policy of the norm of these, or
    of weights where there are none (:data:`~loraforge.allocate.policies.DEFAULT_POLICY`).

    Raises UsageError for moments of another norm than ``policy`` measures in, InputError and IntegrityError for a file
    of moments that is none or has changed.
    """
    if policy is not None:
        require_moments(policy, moments)  # by the file's header alone, before all of it is hashed
    known = None if moments is None else load_moments(moments)
    return policy or DEFAULT_POLICY["weights" if known is None else known.norm], known


def choose(
    name: str, spectra: Iterable[Spectra], policy: Policy, budget: Budget, bytes_per_parameter: int
) -> Choice:
    """Ranks by ``policy`` for the fleet called ``name``; says where its rank floor exceeds ``budget``.

    Raises BudgetError as :func:`~loraforge.allocate.policy.allocate` does.
    """
    problem = problem_of(spectra)
    allocation = allocate(problem, policy, budget, bytes_per_parameter=bytes_per_parameter)
    if warning := floor_warning(budget, allocation.ceiling, problem.rank, problem.cost):
        say(warning)
    return Choice(problem, allocation_file(name, problem, allocation), allocation.ceiling.uniform)


@contextmanager
def _factorised(
    fleet: Sequence[Adapter],
    cache: Path | None,
    out: Path,
    devices: Sequence[str],
    stages: Stages,
    moments: Moments | None,
) -> Iterator[Source]:
    if moments is not None:
        with scratch_folder(out.resolve()) as scratch:
            with stages("factor"):
                entries = order_fleet(fleet, scratch if cache is None else cache, moments)
            yield CachedFleet(fleet, entries)
        return
    if cache is not None:
        yield cached_source(
            fleet, factorise_fleet(fleet, cache, devices=devices, stages=stages), stages=stages
        )
        return
    backend = gpu.kernels() if len(devices) <= 1 else None
    with scratch_folder(out.resolve()) as scratch:
        if backend is None:
            yield cached_source(
                fleet, factorise_fleet(fleet, scratch, devices=devices, stages=stages), stages=stages
            )
        else:
            from loraforge.export.deferred import DeferredFleet  # not imported where there is no GPU

            yield DeferredFleet(fleet, backend, scratch, stages)


def widest(fleet: Sequence[Adapter]) -> int:
    """Bytes of the widest stored parameter: what a byte budget counts where each module keeps its own dtype."""
    return max(module.dtype.itemsize for adapter in fleet for module in adapter.modules)
