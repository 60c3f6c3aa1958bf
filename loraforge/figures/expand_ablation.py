"""RowExpand's tile limit and staging, and what the compiler made of them (paper, figure 10, table 5, section B.6)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from loraforge.evidence.tables import Row, Table
from loraforge.evidence.targets.expand_ablation import DIRECT, LIMITS, STAGED, arm
from loraforge.evidence.targets.kernels import Cell, Item, Resources, cells, speedups
from loraforge.figures import kernels, style
from loraforge.figures.style import Look

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SCOPES = {"all": "All conditions", "decode": "Decode", "prefill": "Prefill"}
LOOKS = {
    STAGED: Look("Z staged in shared memory", "#0b4a8f", "o", "-", ""),
    DIRECT: Look("Z read directly", "#f0a830", "s", (0, (4.0, 1.5)), ""),
}
BASE = arm(DIRECT, LIMITS[0])  # what limits and staging are held against
# attribute -> (label, factor of its unit)
RESOURCES = {
    "threads": ("threads a block", 1.0),
    "registers": ("registers a thread", 1.0),
    "local_bytes": ("local bytes a thread", 1.0),
    "shared_bytes": ("shared bytes a block", 1.0),
    "blocks_per_sm": ("blocks a multiprocessor", 1.0),
    "occupancy": ("occupancy (%)", 100.0),
}


def table(records: Sequence[Item]) -> Table:
    """Rows of two kinds of panels.

    - all, decode, prefill: quotients over RowExpand with tile limit 1 and Z read directly, by staging (``arm``) and
      tile limit (``at``)
    - ``resources``: the attribute ``name`` of the ablated kernels, by staging and width of a row of B (``at``)
    """
    rows = limit_rows([cell for cell in cells(records) if cell.group == "ablation"], (BASE,))
    for item in records:
        if isinstance(item, Resources):
            for name, (_, factor) in RESOURCES.items():
                where: Row = {
                    "panel": "resources",
                    "arm": STAGED if item.staged else DIRECT,
                    "at": item.width,
                }
                value = factor * float(getattr(item, name))
                rows.append(where | {"name": name, "value": value} | dict.fromkeys(("low", "high", "n")))
    return rows


def limit_rows(ablated: Sequence[Cell], over: Sequence[str]) -> Table:
    """Quotients over arms, by scope, staging and tile limit."""
    rows: Table = []
    for scope in SCOPES:
        found = [cell for cell in ablated if scope in ("all", cell.phase)]
        for staging in LOOKS:
            for limit in LIMITS:
                if values := speedups(found, arm(staging, limit), over):
                    where: Row = {"panel": scope, "arm": staging, "at": limit, "name": None}
                    spread = kernels.spread(values)
                    rows.append(where | {name: spread[name] for name in ("value", "low", "high", "n")})
    return rows


def draw(rows: Table, context: style.Context) -> Figure:
    """Tile limits by scope; below, the attributes of both kernels by width of B."""
    swept = [row for row in rows if row["panel"] in SCOPES]
    resources = [row for row in rows if row["panel"] == "resources"]
    with style.styled():
        if not swept:
            return kernels.nothing(context, "RowExpand's tile limit and staging")
        below = 1.75 if resources else 0.0
        figure = style.new_figure(2.75 + below)
        parts = figure.add_gridspec(
            2 if resources else 1, 3, height_ratios=[1.6, below] if resources else None
        )
        places = [parts[0, column] for column in range(3)]
        handles = draw_limits(figure, places, swept, "Speed over limit 1, direct Z", gain=True)
        figure.legend(handles=handles, loc="outside upper center", ncols=len(handles), fontsize=6.8)
        if resources:
            _resources(figure.add_subplot(parts[1, :]), resources)
        conditions = style.plural(max(int(kernels.number(row, "n")) for row in swept), "condition")
        text = [
            context.line(conditions, "RowExpand alone"),
            "Geometric mean over conditions of the time with tile limit 1 and Z read directly, over that of each"
            " kernel; at the ends, what going from limit 1 to 16 alone brings.",
        ]
        if resources:
            text.append("Resources: a kernel a width of B, as the runtime states them.")
        kernels.caption(figure, *text)
        return figure


def draw_limits(
    figure: Figure, places: Sequence[object], rows: Table, label: str, *, gain: bool
) -> list[Any]:
    """Lines over tile limits, a panel a scope; entries of a legend.

    At the right end of each line stands its last value, or with ``gain`` that over its first.
    """
    from matplotlib.gridspec import SubplotSpec

    first: Axes | None = None
    for letter, (scope, title), place in zip("abc", SCOPES.items(), places, strict=True):
        assert isinstance(place, SubplotSpec)
        each = figure.add_subplot(place, sharey=first)
        each.set_title(f"({letter}) {title}")
        ends: list[tuple[float, float, str]] = []
        for staging, look in LOOKS.items():
            line = {
                int(kernels.number(row, "at")): kernels.number(row, "value")
                for row in rows
                if (row["panel"], row["arm"]) == (scope, staging)
            }
            if line:
                each.plot(
                    list(range(len(line))), list(line.values()), color=look.colour, marker=look.marker,
                    linestyle=look.line, markeredgecolor=style.INK, markeredgewidth=0.4, label=look.label,
                    clip_on=False, zorder=3,
                )  # fmt: skip
                last = list(line.values())[-1]
                shown = last / next(iter(line.values())) if gain else last
                ends.append((len(line) - 1, last, kernels.times(shown)))
        for index, (x, y, words) in enumerate(sorted(ends, key=lambda end: end[1])):
            up = index == len(ends) - 1
            each.annotate(
                words, (x, y), xytext=(0, 5 if up else -5), textcoords="offset points", ha="center",
                va="bottom" if up else "top", fontsize=6.3,
            )  # fmt: skip
        each.set_xticks(range(len(LIMITS)), [str(limit) for limit in LIMITS])
        each.set_xlim(-0.25, len(LIMITS) - 0.6)
        each.set_xlabel("Tile limit (rows)")
        kernels.ratio_axis(each, "y", *kernels.extent(rows, ("value",)), 0.16)
        if first is None:
            each.set_ylabel(label)
            first = each
        else:
            each.tick_params(labelleft=False)
    return [] if first is None else list(first.get_legend_handles_labels()[0])


def _resources(axes: Axes, rows: Table) -> None:
    """Staged / direct, a column a width."""
    from matplotlib.transforms import Bbox

    values = {(row["arm"], row["name"], row["at"]): row["value"] for row in rows}
    widths = sorted({int(kernels.number(row, "at")) for row in rows})
    axes.axis("off")
    axes.set_title("(d) Compiled resources: staged / direct, by width of a row of B")

    def shown(name: str, width: int) -> str:
        pair = [values.get((staging, name, width)) for staging in (STAGED, DIRECT)]
        return " / ".join("–" if value is None else f"{value:,.0f}" for value in pair)

    made = axes.table(
        cellText=[
            [label, *(shown(name, width) for width in widths)] for name, (label, _) in RESOURCES.items()
        ],
        colLabels=["", *(f"width {width}" for width in widths)],
        colWidths=[0.2, *([0.8 / len(widths)] * len(widths))],
        cellLoc="center",
        bbox=Bbox.unit(),
        edges="horizontal",
    )
    made.auto_set_font_size(False)
    made.set_fontsize(6.5)
    for (_, column), cell in made.get_celld().items():
        if column == 0:
            cell.get_text().set_horizontalalignment("left")
        cell.set_edgecolor(style.RULE)
        cell.set_linewidth(0.5)
