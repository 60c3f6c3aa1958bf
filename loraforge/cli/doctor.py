"""``loraforge doctor``: what this machine can run and what is missing. Needs the core dependencies only."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

app = typer.Typer(add_completion=False, rich_markup_mode=None)

_GIB = 1 << 30


@app.command()
def doctor(
    cache: Annotated[Path, typer.Option(help="cache folder whose disk is examined")] = Path(".cache"),
    json_output: Annotated[bool, typer.Option("--json", help="print JSON instead of tables")] = False,
) -> None:
    """Say what this machine can run and what is missing."""
    from loraforge.doctor import examine
    from loraforge.files import pretty_json

    report = examine(cache)
    if json_output:
        typer.echo(pretty_json(report), nl=False)
    else:
        _show(report)


def _size(count: int | None) -> str:
    return "unknown" if count is None else f"{count / _GIB:.1f} GiB"


def _machine(report: dict[str, Any]) -> list[tuple[str, str]]:
    torch, memory, disk = report["torch"], report["memory"], report["disk"]
    build = next((f"{kind} {torch[kind]}" for kind in ("cuda", "rocm") if torch[kind]), "CPU build")
    devices = ", ".join(f"{device['name']} ({_size(device['memory_bytes'])})" for device in torch["devices"])
    limit = memory["cgroup_limit_bytes"]
    rows = [
        ("loraforge", report["loraforge"]),
        ("Python", f"{report['python']} on {report['platform']}"),
        ("torch", f"{torch['version']} ({build})" if torch["version"] else f"missing: {torch['error']}"),
        ("GPU", devices or "none: everything runs on the CPU"),
        ("cores", str(report["cores"])),
        (
            "memory",
            f"{_size(memory['total_bytes'])}, {_size(memory['available_bytes'])} available"
            + (f", limited to {_size(limit)}" if limit else ""),
        ),
        (
            "disk",
            f"{_size(disk['free_bytes'])} free at {disk['cache']}"
            + ("" if disk["writable"] else ", NOT WRITABLE: pass --cache"),
        ),
    ]
    rows += [
        (name, found or "not found (only GPU kernels need it)") for name, found in report["compilers"].items()
    ]
    rows += [(f"GPU kernels ({name})", _kernels(state)) for name, state in report["kernels"].items()]
    rows.append(("CPU kernels", _cpu_kernels(report["cpu_kernels"])))
    rows += [(f"engine ({name})", _engine(found)) for name, found in report["engines"].items()]
    return rows


def _kernels(state: dict[str, Any]) -> str:
    if state["built"]:
        return f"built: {state['path']}"
    if state["problem"]:
        return str(state["problem"])
    return (
        "not built; the first use on a GPU builds them"
        if state["buildable"]
        else "not built, and no nvcc here"
    )


def _engine(found: dict[str, Any]) -> str:
    if not found["installed"]:
        known = ", ".join(f"{name} {'/'.join(versions)}" for name, versions in found["supported"].items())
        return f"not installed: no serving through it from this environment (supported: {known})"
    lines = [
        f"refused: {engine['problem']}"
        if engine["problem"]
        else f"{engine['distribution']} {engine['version']}, supported"
        for engine in found["installed"]
    ]
    problems = [
        found[key] for key in ("plugin_problem", "torchvision_problem", "switched") if found[key] is not None
    ]
    active = not problems and not found["installed"][0]["problem"]
    return "; ".join([*lines, *problems, *(["plugin active"] if active else [])])


def _cpu_kernels(state: dict[str, Any]) -> str:
    if state["built"] or state["problem"]:
        return _kernels(state)
    return (
        "not built; the first use builds them"
        if state["buildable"]
        else "not built, and no g++ here: serving operations run in torch"
    )


def _show(report: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(soft_wrap=not Console().is_terminal)
    table = Table("machine", "", title="This machine", title_justify="left")
    for row in _machine(report):
        table.add_row(*row)
    console.print(table, markup=False)

    table = Table("extra", "package", "wanted", "installed", "", title="Packages", title_justify="left")
    for extra, rows in report["packages"].items():
        for package in rows:
            table.add_row(
                extra,
                package["name"],
                package["requires"] or "any",
                package["version"] or "-",
                "ok" if package["ok"] else f"pip install '{package['name']}{package['requires']}'",
            )
    console.print(table, markup=False)

    table = Table("stage", "can run", title="Stages", title_justify="left")
    for stage in report["stages"]:
        lacking = ", ".join(stage["missing"])
        table.add_row(stage["stage"], "yes" if stage["ok"] else f"no, lacks {lacking}: {stage['remedy']}")
    console.print(table, markup=False)
