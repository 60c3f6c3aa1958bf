"""Where a fleet's budget goes: by adapter, module kind and layer, and how concentrated it is."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import TYPE_CHECKING

import numpy as np

from loraforge.evidence.tables import Table, Value
from loraforge.evidence.targets.allocation import Allotment, Choice, choices, gini, lorenz, spent
from loraforge.figures import style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

POINTS = 101  # of a Lorenz curve


def table(records: Sequence[Choice | Allotment]) -> Table:
    """Rows of five panels, in ``value``; ``x`` is used by ``lorenz`` alone.

    - ``adapter``: share of the arm's spent parameters that an adapter gets; ``kind``: the same by module kind
    - ``rank``: mean retained rank over adapters, by layer and module kind
    - ``lorenz``: cumulative share of the budget at cumulative share ``x`` of original parameters
    - ``gini``: Gini coefficient of that curve; ``modules``: their number
    """
    rows: Table = []

    def add(panel: str, arm: tuple[str, str], value: float | int, **cells: Value) -> None:
        rows.append(
            {"panel": panel, "policy": arm[0], "budget": arm[1]}
            | {name: cells.get(name) for name in ("adapter", "kind", "layer", "x")}
            | {"value": value}
        )

    for arm, items in choices(records).items():
        total = max(spent(items), 1)
        adapters = sorted({item.adapter for item in items})
        kinds = style.kind_order({item.kind for item in items})
        add("modules", arm, len(items))
        add("gini", arm, gini(items))
        for adapter in adapters:
            add(
                "adapter",
                arm,
                spent([item for item in items if item.adapter == adapter]) / total,
                adapter=adapter,
            )
        for kind in kinds:
            add("kind", arm, spent([item for item in items if item.kind == kind]) / total, kind=kind)
        kept: dict[tuple[str, int], list[int]] = {}
        for item in items:
            if item.layer is not None:
                kept.setdefault((item.kind, item.layer), []).append(item.k)
        for kind in kinds:
            for layer in sorted({place for name, place in kept if name == kind}):
                add("rank", arm, float(np.mean(kept[kind, layer])), kind=kind, layer=layer)
        x, y = lorenz(items)
        for place in np.linspace(0.0, 1.0, POINTS):
            add("lorenz", arm, float(np.interp(place, x, y)), x=float(place))
    return rows


def draw(rows: Table, context: style.Context) -> Figure:
    """Shares by adapter and kind and the rank map at the tightest budget; Lorenz curves at every budget."""
    budget = min({str(row["budget"]) for row in rows}, key=Fraction)
    at = [row for row in rows if row["budget"] == budget]
    policies = _policies(rows)
    adapters = sorted({str(row["adapter"]) for row in at if row["panel"] == "adapter"})
    with style.styled():
        figure = style.new_figure(max(4.2, 1.7 + 0.135 * len(adapters)))
        cells = figure.add_gridspec(2, 3, width_ratios=(1.25, 1.0, 1.0), height_ratios=(1.0, 1.15))
        _adapters(figure.add_subplot(cells[:, 0]), at, policies, adapters, budget)
        shown = "spectral" if "spectral" in policies else policies[0]
        _map(figure.add_subplot(cells[0, 1:]), [row for row in at if row["policy"] == shown], shown, budget)
        _kinds(figure.add_subplot(cells[1, 1]), at, policies, budget)
        _lorenz(figure.add_subplot(cells[1, 2]), rows, shown)
        modules = next(int(row["value"] or 0) for row in at if row["panel"] == "modules")
        style.caption(
            figure,
            context.line(f"{style.plural(len(adapters), 'adapter')}, {style.plural(modules, 'LoRA module')}")
            + f"\n{_cells(at, shown, modules)}",
        )
        return figure


def _cells(rows: Table, policy: str, modules: int) -> str:
    """What a cell of the map averages; adapters target different modules, so that cells differ in their number."""
    text = "(b) a cell averages only those adapters that have the module"
    at = [row for row in rows if row["policy"] == policy]
    cells = [row for row in at if row["panel"] == "rank"]
    placed = {row["kind"] for row in cells} == {row["kind"] for row in at if row["panel"] == "kind"}
    if not placed:  # some modules lie in no layer, hence in no cell
        return text
    return f"{text}: {modules / len(cells):.1f} on average ({modules:,} modules in {style.plural(len(cells), 'cell')})"


def _policies(rows: Table) -> list[str]:
    there = list(dict.fromkeys(str(row["policy"]) for row in rows))
    return [arm for arm in style.ARMS if arm in there] + [name for name in there if name not in style.ARMS]


def _share(rows: Table, panel: str, policy: str, key: str) -> dict[str, float]:
    return {
        str(row[key]): 100.0 * float(row["value"] or 0.0)
        for row in rows
        if row["panel"] == panel and row["policy"] == policy
    }


def _dots(axes: Axes, shares: dict[str, dict[str, float]], order: list[str], lane: float) -> None:
    """Dots of every policy on one line a name, joined by a rule; ``lane`` keeps equal ones from hiding each other."""
    for place, name in enumerate(order):
        values = [by_name[name] for by_name in shares.values()]
        axes.plot([min(values), max(values)], [place, place], color=style.RULE, linewidth=1.4, zorder=1)
    for number, (policy, by_name) in enumerate(shares.items()):
        look = style.look_of(policy)
        shift = (number - (len(shares) - 1) / 2) * lane
        axes.plot(
            [by_name[name] for name in order],
            [place + shift for place in range(len(order))],
            linestyle="none",
            marker=look.marker,
            color=look.colour,
            markeredgecolor=style.INK,
            markeredgewidth=0.4,
            label=look.label,
            zorder=3,
        )
    axes.set_xlim(left=0)
    style.grid(axes, "x")


def _adapters(axes: Axes, rows: Table, policies: list[str], adapters: list[str], budget: str) -> None:
    shares = {policy: _share(rows, "adapter", policy, "adapter") for policy in policies}
    lead = shares["spectral"] if "spectral" in shares else shares[policies[0]]
    order = sorted(adapters, key=lambda name: (lead[name], name))
    _dots(axes, shares, order, -0.2)
    axes.set_yticks(range(len(order)), order, fontsize=6.2)
    axes.set_ylim(-0.7, len(order) - 0.3)
    axes.set_xlabel(f"Share of the {budget} budget (%)")
    axes.set_title("(a) By adapter")
    axes.legend(
        loc="lower right",
        handletextpad=0.3,
        handlelength=1.2,
        borderaxespad=0.2,
        frameon=True,  # white, so that grid lines do not strike through the text
        facecolor="white",
        edgecolor="none",
        framealpha=1.0,
    )


def _map(axes: Axes, rows: Table, policy: str, budget: str) -> None:
    cells = [row for row in rows if row["panel"] == "rank"]
    kinds = style.kind_order({str(row["kind"]) for row in cells})
    layers = sorted({int(row["layer"] or 0) for row in cells})
    grid = np.full((len(kinds), max(layers) + 1), np.nan)
    for row in cells:
        grid[kinds.index(str(row["kind"])), int(row["layer"] or 0)] = float(row["value"] or 0.0)
    image = axes.imshow(np.ma.masked_invalid(grid), aspect="auto", cmap="cividis", interpolation="nearest")
    axes.set_facecolor("white")
    axes.set_yticks(range(len(kinds)), [style.kind_label(kind) for kind in kinds])
    axes.set_xlabel("Layer")
    axes.spines[:].set_visible(False)
    axes.set_title(f"(b) Mean retained rank, {style.look_of(policy).label.lower()} at {budget}")
    bar = axes.figure.colorbar(image, ax=axes, pad=0.015, aspect=14)
    bar.outline.set_visible(False)
    bar.set_label("Mean rank of the\nadapters that have it")


def _kinds(axes: Axes, rows: Table, policies: list[str], budget: str) -> None:
    shares = {policy: _share(rows, "kind", policy, "kind") for policy in policies}
    kinds = list(shares[policies[0]])
    _dots(axes, shares, kinds, 0.16)
    axes.set_yticks(range(len(kinds)), [style.kind_label(kind) for kind in kinds])
    axes.set_ylim(len(kinds) - 0.5, -0.5)
    axes.set_xlabel(f"Share of the {budget} budget (%)")
    axes.set_title("(c) By module kind")


def _lorenz(axes: Axes, rows: Table, policy: str) -> None:
    budgets = sorted({str(row["budget"]) for row in rows if row["policy"] == policy}, key=Fraction)
    lines: tuple[str | tuple[int, tuple[float, ...]], ...] = (
        "-",
        (0, (5.0, 1.5)),
        (0, (2.0, 1.2)),
        (0, (5.0, 1.2, 1.0, 1.2)),
        (0, (1.0, 1.0)),
    )
    axes.plot([0, 100], [0, 100], color=style.MUTED, linewidth=0.8, label="all alike: 0")
    for number, budget in enumerate(budgets):
        curve = [
            row for row in rows if (row["panel"], row["policy"], row["budget"]) == ("lorenz", policy, budget)
        ]
        coefficient = next(
            float(row["value"] or 0.0)
            for row in rows
            if (row["panel"], row["policy"], row["budget"]) == ("gini", policy, budget)
        )
        tint = number / max(len(budgets) - 1, 1)
        colour = tuple(
            dark + (light - dark) * tint
            for dark, light in zip((0.02, 0.16, 0.36), (0.50, 0.74, 0.93), strict=True)
        )
        axes.plot(
            [100 * float(row["x"] or 0.0) for row in curve],
            [100 * float(row["value"] or 0.0) for row in curve],
            color=colour,
            linestyle=lines[number % len(lines)],
            linewidth=1.1,
            marker="osD^v"[number % 5],
            # curves nearly coincide: each has its markers at places of its own
            markevery=(6 + 5 * number, 20),
            markersize=4.2,
            markeredgecolor=style.INK,
            markeredgewidth=0.4,
            label=f"{budget}: {coefficient:.2f}",
        )
    axes.set_xlim(0, 100)
    axes.set_ylim(0, 100)
    axes.set_xlabel("Original parameters (%),\nleast retained modules first")
    axes.set_ylabel("Budget (%)")
    axes.set_title("(d) Concentration")
    axes.legend(
        loc="upper left",
        title="Budget: Gini",
        title_fontsize=6,
        fontsize=6,
        borderaxespad=0.0,
        handlelength=2.0,
        labelspacing=0.35,
    )
    style.grid(axes, "both")
