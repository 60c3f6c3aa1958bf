"""The page of one compression: a single HTML file that opens from a folder, offline, and asks for nothing.

Everything is inline, and the page's own policy allows nothing else: one style sheet and one script, each named by its
hash, no address of any kind, no markup made by the script. Strangers' words (names of fleets, adapters, modules) go
through :mod:`loraforge.report.text`. What a reader needs first is in the HTML itself; the script sorts, filters and
draws the modules of an adapter on demand from packed columns.

The size is bounded: about 2 kB an adapter; 20 bytes a module up to :data:`MAX_MODULES`, beyond which a page has no
modules, and the names of each distinct list of them once; and of spectra at most :data:`MAX_LEVELS` values (1.4 bytes
each), beyond which each is sampled.
"""

from __future__ import annotations

import base64
import hashlib
import platform
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

import numpy as np

from loraforge.allocate.problem import Ints, Problem
from loraforge.errors import one_line
from loraforge.export.manifest import AdapterEntry, Manifest, ModuleEntry
from loraforge.files import write_text
from loraforge.report.charts import (
    DECADES,
    budget_figure,
    errors_figure,
    kinds_of,
    share_bar,
    spectra_figure,
)
from loraforge.report.numbers import AdapterNumbers, by_adapter
from loraforge.report.text import data_block, name, packed, shown

MAX_MODULES = 400_000
MAX_LEVELS = 4_000_000
FEWEST_LEVELS = 8  # of one spectrum that is sampled
BELOW = 255  # the level of what is zero, or DECADES below the largest value
WORST = 10  # modules that are listed

_DROPPED = "dropped"  # the path of a module of rank 0


def write_report(
    path: Path, manifest: Manifest, problem: Problem, uniform: Ints, seconds: Mapping[str, float]
) -> None:
    """Write :func:`report_page` of a compression that was made here, atomically. Raises OutputError."""
    write_text(path, report_page(manifest, problem, uniform, seconds, versions()))


def versions() -> dict[str, str]:
    """What was used here, by name; nothing of it is a path or a person."""
    used = {package: version(package) for package in ("torch", "numpy", "safetensors")}
    return {
        "Python": platform.python_version(),
        **used,
        "system": f"{platform.system()} {platform.machine()}",
    }


def report_page(
    manifest: Manifest,
    problem: Problem,
    uniform: Ints,
    seconds: Mapping[str, float],
    versions: Mapping[str, str],
) -> str:
    """The page as HTML; equal arguments give equal text.

    Parameters
    ----------
    manifest: what was written.
    problem: modules and spectra of exactly its adapters, in its order.
    uniform: int64 [M], uniform ranks at the same budget.
    seconds: wall-clock seconds by stage.
    versions: of what was used, by name.

    Raises ValueError where manifest and problem are of different modules.
    """
    names = list(problem.names)
    written = {(adapter, module) for adapter, entry in manifest.adapters.items() for module in entry.modules}
    if not written <= set(names) or list(manifest.adapters) != list(problem.adapters):
        raise ValueError("manifest and spectra are not of the same modules in the same order")
    # None for a module that a policy drops altogether, which the manifest does not have
    entries = [manifest.adapters[adapter].modules.get(module) for adapter, module in names]
    k = np.array([entry.k if entry else 0 for entry in entries], dtype=np.int64)
    lost = np.array([entry.certificate.relative_error if entry else 1.0 for entry in entries])
    rounding = np.array([entry.certificate.action_error if entry else 0.0 for entry in entries])
    adapters = by_adapter(problem, k, uniform)
    kinds, kind = kinds_of([module for _, module in names])
    style, script = _part("report.css"), _part("report.js")
    fleet = manifest.fleet
    whitened = any(entry is not None and entry.path not in ("gram", "tsqr", "reference") for entry in entries)
    return Template(_part("template.html")).substitute(
        policy=shown(_policy(style, script)),
        title=shown(f"{fleet.name}: compression report"),
        style=style,
        script=script,
        fleet=name(fleet.name),
        lead=f"over {name(fleet.base_model or 'an unnamed base model')}, {shown(fleet.policy)} policy",
        cards=_cards(manifest, adapters, k, lost, seconds),
        heads=_heads(manifest),
        rows="\n".join(_rows(manifest, adapters, lost, rounding)),
        budget=budget_figure(adapters),
        spectra=spectra_figure(problem, k, kinds, np.array(kind, dtype=np.int64)),
        norm=" Energies are in the norm that the policy measures." if whitened else "",
        probes=str(fleet.probes),
        seed=str(fleet.probe_seed),
        rounding=f"{rounding.max():.1e}",
        errors=errors_figure(lost),
        worst="\n".join(_worst(names, entries, lost)),
        versions=_versions(manifest, versions),
        data=data_block(_data(manifest, problem, kinds, kind, entries)),
    )


def _part(file: str) -> str:
    return files("loraforge.report").joinpath(file).read_text(encoding="utf-8")


def _policy(style: str, script: str) -> str:
    """The page's Content-Security-Policy: nothing but its own style sheet and script."""

    def source(text: str) -> str:
        return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"

    return (
        f"default-src 'none'; style-src {source(style)}; script-src {source(script)}; base-uri 'none'; "
        "form-action 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
    )


def _cards(
    manifest: Manifest,
    adapters: Sequence[AdapterNumbers],
    k: Ints,
    lost: np.ndarray[Any, np.dtype[np.float64]],
    seconds: Mapping[str, float],
) -> str:
    fleet, entries = manifest.fleet, manifest.adapters.values()
    before = sum(adapter.before for adapter in adapters)
    original = sum(entry.original_bytes for entry in entries)
    asked = (
        fleet.budget.value
        if fleet.budget.kind == "fraction"
        else f"{int(fleet.budget.value):,} {fleet.budget.kind}"
    )
    cards = [
        ("Fleet", f"{len(adapters):,} adapters", f"{len(k):,} modules"),
        ("Budget", asked, f"{fleet.budget.params:,} parameters, {fleet.slack:,} to spare"),
        ("Policy", fleet.policy, f"rank floor {fleet.floor}"),
        ("Parameters", f"{fleet.spent / before:.1%}", f"{before:,} → {fleet.spent:,}"),
    ]
    for layout in fleet.layouts:
        size = sum(entry.layouts[layout].bytes for entry in entries)
        cards.append(
            (
                f"Bytes, {layout}",
                f"{size / original:.1%}",
                f"{_size(original)} → {_size(size)}, {fleet.dtype}",
            )
        )
    cards += [
        (
            "Energy kept",
            f"{fleet.retained_energy:.2%}",
            f"optimality gap {fleet.optimality_gap:.2g}, in the policy's unit",
        ),
        ("Ranks kept", f"{k.min()} to {k.max()}", f"median {np.median(k):g}"),
        ("Lost", f"{np.median(lost):.3f}", f"median module; worst {lost.max():.3f}"),
        (
            "Time",
            f"{sum(seconds.values()):.1f} s",
            ", ".join(f"{shown(stage)} {spent:.1f}" for stage, spent in seconds.items()),
        ),
    ]
    return "\n".join(
        f"<div><dt>{title}</dt><dd><b>{shown(value)}</b><span>{note}</span></dd></div>"
        for title, value, note in ((title, value, note) for title, value, note in cards)
    )


def _size(count: int) -> str:
    """Bytes for people."""
    value = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.0f} B" if unit == "B" else f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:,.2f} TB"


def _heads(manifest: Manifest) -> str:
    heads = [("Adapter", False), ("Modules", True), ("Rank", True), ("Kept: least / median / most", True)]
    heads += [("Parameters", True), *((f"Bytes, {layout}", True) for layout in manifest.fleet.layouts)]
    heads += [("Energy kept", True), ("Lost, worst", True), ("Rounding", True), ("Share / uniform", True)]
    return "".join(f'<th scope="col"{" class=n" if number else ""}>{title}</th>' for title, number in heads)


def _rows(
    manifest: Manifest,
    adapters: Sequence[AdapterNumbers],
    lost: np.ndarray[Any, np.dtype[np.float64]],
    rounding: np.ndarray[Any, np.dtype[np.float64]],
) -> list[str]:
    most = max(max(adapter.share, adapter.uniform_share) for adapter in adapters)
    rows = []
    start = 0
    for number, (adapter, entry) in enumerate(zip(adapters, manifest.adapters.values(), strict=True)):
        own = slice(start, start := start + adapter.modules)
        worst, moved = float(lost[own].max()), float(rounding[own].max())
        cells = [
            (adapter.modules, f"{adapter.modules}"),
            (adapter.rank, f"{adapter.rank}"),
            (adapter.median, f"{adapter.least} / {adapter.median:g} / {adapter.most}"),
            (adapter.after, f"{adapter.after:,} <small>{adapter.after / adapter.before:.1%}</small>"),
            *(
                (entry.layouts[layout].bytes, _bytes_cell(entry, entry.layouts[layout].bytes))
                for layout in manifest.fleet.layouts
            ),
            (adapter.energy, f"{adapter.energy:.2%}"),
            (worst, f"{worst:.3f}"),
            (moved, f"{moved:.1e}"),
            (adapter.ratio, f"{share_bar(adapter.share, adapter.uniform_share, most)} {adapter.ratio:.2f}×"),
        ]
        rows.append(
            f'<tr data-i="{number}"><th scope="row">{name(adapter.name)}</th>'
            + "".join(f'<td class="n" data-v="{value:.9g}">{text}</td>' for value, text in cells)
            + "</tr>"
        )
    return rows


def _bytes_cell(entry: AdapterEntry, size: int) -> str:
    return f"{_size(size)} <small>{size / entry.original_bytes:.1%}</small>"


def _worst(
    names: Sequence[tuple[str, str]],
    entries: Sequence[ModuleEntry | None],
    lost: np.ndarray[Any, np.dtype[np.float64]],
) -> list[str]:
    rows = []
    order = np.argsort(-lost, kind="stable").tolist()
    for index in [index for index in order if entries[index] is not None][:WORST]:
        (adapter, module), entry = names[index], entries[index]
        assert entry is not None
        certificate = entry.certificate
        rows.append(
            f'<tr><th scope="row">{name(adapter)}</th><td>{name(module)}</td><td class="n">{entry.k} of {entry.r}</td>'
            f'<td class="n">{certificate.retained_energy:.2%}</td><td class="n">{certificate.relative_error:.4f}</td>'
            f'<td class="n">{certificate.action_error:.1e}</td></tr>'
        )
    return rows


def _versions(manifest: Manifest, versions: Mapping[str, str]) -> str:
    facts = {
        "LoRAForge": manifest.fleet.tool_version,
        **versions,
        "Manifest": manifest.schema_,
        "Allocation, SHA-256": manifest.fleet.allocation_sha256,
        "Layouts": ", ".join(manifest.fleet.layouts),
        "Type of the factors": manifest.fleet.dtype,
    }
    return "\n".join(
        f'<tr><th scope="row">{shown(title)}</th><td><code>{shown(value)}</code></td></tr>'
        for title, value in facts.items()
    )


def _data(
    manifest: Manifest,
    problem: Problem,
    kinds: Sequence[str],
    kind: Sequence[int],
    entries: Sequence[ModuleEntry | None],
) -> dict[str, Any]:
    """What the script reads: adapters, the distinct lists of modules that they have, and columns over all modules."""
    detailed = len(entries) <= MAX_MODULES
    points = _points(problem)
    lists: dict[tuple[Any, ...], int] = {}
    adapters: list[list[Any]] = []
    start = 0
    owners = Counter(adapter for adapter, _ in problem.names)
    for name_, adapter in manifest.adapters.items():
        stop = start + owners[name_]
        key = tuple(
            (one_line(problem.names[index][1]), kind[index], *_shape(entries[index]))
            for index in range(start, stop)
        )
        weights = [
            [layout, weights.rank, weights.bytes, weights.sha256]
            for layout, weights in adapter.layouts.items()
        ]
        adapters.append(
            [
                lists.setdefault(key, len(lists)) if detailed else None,
                adapter.weights_sha256,
                adapter.original_bytes,
                one_line(adapter.factor_key),
                len(adapter.passthrough),
                weights,
            ]
        )
        start = stop
    found: dict[str, Any] = {
        "adapters": adapters,
        "kinds": [one_line(text) for text in kinds],
        "decades": DECADES,
    }
    if not detailed:
        return found
    first = problem.sigma[problem.offsets[:-1]]
    path = [entry.path if entry else _DROPPED for entry in entries]
    paths = sorted(set(path))
    return found | {
        "lists": [
            {
                "names": [m[0] for m in modules],
                "kinds": [m[1] for m in modules],
                "shapes": [[m[2], m[3]] for m in modules],
                "layers": [_layer(m[0]) for m in modules],
            }
            for modules in lists
        ],
        "points": points,
        "paths": paths,
        "k": packed(np.array([entry.k if entry else 0 for entry in entries])),
        "r": packed(problem.rank),
        "lost": packed(np.array([entry.certificate.relative_error if entry else 1.0 for entry in entries])),
        "rounding": packed(np.array([entry.certificate.action_error if entry else 0.0 for entry in entries])),
        "first": packed(first),
        "path": packed(np.array([paths.index(name) for name in path])),
        "levels": packed(_levels(problem, points)),
    }


def _shape(entry: ModuleEntry | None) -> tuple[int, int]:
    return (entry.d_in, entry.d_out) if entry else (0, 0)


def _layer(module: str) -> int | None:
    found = re.search(r"(?:^|\.)(\d{1,4})(?=\.|$)", module)
    return int(found[1]) if found else None


def _points(problem: Problem) -> int:
    """Values that are kept of a spectrum: 0 for all, or at most so many, evenly placed, the first and last of them."""
    if len(problem.sigma) <= MAX_LEVELS:
        return 0
    return max(FEWEST_LEVELS, MAX_LEVELS // len(problem.names))


def _levels(problem: Problem, points: int) -> Ints:
    """Spectra, one after the other, as depths below their largest value: 0 to 254 for :data:`DECADES` decades."""
    first = np.repeat(problem.sigma[problem.offsets[:-1]], problem.rank)
    with np.errstate(divide="ignore", invalid="ignore"):
        depth = -np.log10(problem.sigma / first) / DECADES
    levels = np.where(
        np.isfinite(depth) & (depth <= 1), np.rint(np.clip(depth, 0, 1) * (BELOW - 1)), BELOW
    ).astype(np.int64)
    if not points:
        return levels
    picked = [
        offset + np.arange(rank)
        if rank <= points
        else offset + np.arange(points) * (rank - 1) // (points - 1)
        for offset, rank in zip(problem.offsets[:-1].tolist(), problem.rank.tolist(), strict=True)
    ]
    kept: Ints = levels[np.concatenate(picked)]
    return kept
