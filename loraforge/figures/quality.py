"""What compression costs: native task scores of base, original and compressed adapters."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import TYPE_CHECKING

from loraforge.evidence.tables import Row, Table, Value
from loraforge.evidence.targets.quality import BASE, ORIGINAL, Score, by_arm, macro, versus_original
from loraforge.figures import style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DEMO = 100  # examples below which scores are too coarse to compare policies
METRICS = {"exact_match": "exact match", "chrf": "chrF", "field_f1": "field F1"}


def table(records: Sequence[Score]) -> Table:
    """Rows of five panels, in ``value``, all in points of the native metric (0 to 100).

    - ``macro``: mean over ``n`` adapters; ``delta``: its difference to original, with the 95 % paired bootstrap
      interval (``low``, ``high``)
    - ``score``: one adapter's score on ``n`` examples
    - ``worst``: the largest loss of one adapter against original (0 where none loses), and which
    - ``over5``: number of adapters that lose more than 5 points
    """
    rows: Table = []

    def add(panel: str, arm: tuple[str, str], value: float | int, **cells: Value) -> None:
        names = ("adapter", "metric", "n", "low", "high")
        rows.append(
            {
                "panel": panel,
                "arm": arm[0],
                "budget": arm[1],
                **{name: cells.get(name) for name in names},
                "value": value,
            }
        )

    arms = by_arm(records)
    for arm, scores in arms.items():
        add("macro", arm, macro(scores), n=len(scores))
        for adapter, item in sorted(scores.items()):
            add("score", arm, item.score, adapter=adapter, metric=item.metric, n=item.n)
        if arm == ORIGINAL:
            continue
        found = versus_original(arms, arm)
        add("delta", arm, found.delta, low=found.ci_low, high=found.ci_high, n=len(scores))
        add("worst", arm, found.worst_regression, adapter=found.worst_adapter)
        add("over5", arm, found.over5, n=len(scores))
    return rows


def draw(rows: Table, context: style.Context) -> Figure:
    """(a) macro score by budget, (b) worst regression by budget, (c) every adapter at the tightest budget."""
    originals = [row for row in rows if (row["panel"], row["arm"], row["budget"]) == ("score", *ORIGINAL)]
    with style.styled():
        height = max(4.6, 1.8 + 0.155 * len(originals))
        figure = style.new_figure(height)
        cells = figure.add_gridspec(3, 2, width_ratios=(1.0, 1.15), height_ratios=(1.0, 1.0, 0.4 / height))
        policies, budgets = _policies(rows), _budgets(rows)
        _macro(figure.add_subplot(cells[0, 0]), rows, policies, budgets)
        _worst(figure.add_subplot(cells[1, 0]), rows, policies, budgets)
        _adapters(figure.add_subplot(cells[:2, 1]), rows, policies, budgets, originals)
        _legend(figure.add_subplot(cells[2, :]), policies)
        counts = sorted({int(row["n"] or 0) for row in originals})
        examples = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]}–{counts[-1]}"
        style.caption(
            figure,
            context.line(
                f"{style.plural(len(originals), 'adapter')}, {examples} test examples each"
                + (" (demo size)" if counts[0] < DEMO else "")
            )
            + "\n(a) bars: 95 % paired bootstrap interval, over adapters and examples, of the difference to the"
            " original adapters.",
        )
        return figure


def _policies(rows: Table) -> list[str]:
    there = list(dict.fromkeys(str(row["arm"]) for row in rows if row["arm"] not in (BASE[0], ORIGINAL[0])))
    return [arm for arm in style.ARMS if arm in there] + [name for name in there if name not in style.ARMS]


def _budgets(rows: Table) -> list[str]:
    there = {str(row["budget"]) for row in rows if row["arm"] not in (BASE[0], ORIGINAL[0])}
    return sorted(there, key=Fraction)


def _one(rows: Table, panel: str, arm: str, budget: str) -> Row | None:
    return next(
        (row for row in rows if (row["panel"], row["arm"], row["budget"]) == (panel, arm, budget)), None
    )


def _number(row: Row, name: str = "value") -> float:
    return float(row[name] or 0.0)


def _spread(policies: list[str], number: int, step: float) -> float:
    return (number - (len(policies) - 1) / 2) * step


def _macro(axes: Axes, rows: Table, policies: list[str], budgets: list[str]) -> None:
    original, base = _one(rows, "macro", *ORIGINAL), _one(rows, "macro", *BASE)
    reference = _number(original) if original else 0.0
    for number, policy in enumerate(policies):
        look = style.look_of(policy)
        found = [(place, _one(rows, "delta", policy, budget)) for place, budget in enumerate(budgets)]
        points = [(place + _spread(policies, number, 0.12), row) for place, row in found if row is not None]
        values = [reference + _number(row) for _, row in points]
        axes.errorbar(
            [place for place, _ in points],
            values,
            yerr=[
                [max(0.0, _number(row) - _number(row, "low")) for _, row in points],
                [max(0.0, _number(row, "high") - _number(row)) for _, row in points],
            ],
            color=look.colour,
            marker=look.marker,
            linestyle=look.line,
            markeredgecolor=style.INK,
            markeredgewidth=0.4,
            elinewidth=0.9,
            capsize=2.0,
            capthick=0.9,
            zorder=3,
        )
    axes.set_xticks(range(len(budgets)), budgets)
    axes.set_xlim(-0.4, len(budgets) - 0.6)
    _references(axes, original, base)
    axes.set_xlabel("Budget (share of nominal ranks)")
    axes.set_ylabel("Macro score (points)")
    axes.set_title("(a) Mean over adapters")
    style.grid(axes, "y")


def _references(axes: Axes, original: Row | None, base: Row | None) -> None:
    """Limits that fit the curves, a line at the original's score, and a note of the base's, which lies far below."""
    low, high = axes.get_ylim()
    if original is not None:
        high = max(high, _number(original))
    room = max(high - low, 1.0)
    axes.set_ylim(low - 0.3 * room, high + 0.16 * room)  # room for a note below and one above
    if original is not None:
        look = style.ARMS["original"]
        axes.axhline(_number(original), color=look.colour, linestyle=look.line, linewidth=0.9, zorder=1)
        axes.annotate(
            f"original adapters: {_number(original):.1f}",
            (0.02, _number(original)),
            xycoords=("axes fraction", "data"),
            xytext=(0, 1.5),
            textcoords="offset points",
            va="bottom",
            fontsize=6.5,
        )
    notes = ["bars: 95 % interval of the", "difference to the original"]
    if base is not None:
        notes.append(f"↓ base model: {_number(base):.1f}, off the scale")
    axes.text(
        0.99,
        0.02,
        "\n".join(notes),
        transform=axes.transAxes,
        ha="right",
        va="bottom",
        fontsize=6,
        color=style.MUTED,
        zorder=2,
        bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.6},
    )


def _worst(axes: Axes, rows: Table, policies: list[str], budgets: list[str]) -> None:
    thickness = 0.8 / len(policies)
    most = 0.0
    for number, policy in enumerate(policies):
        look = style.look_of(policy)
        for place, budget in enumerate(budgets):
            row, count = _one(rows, "worst", policy, budget), _one(rows, "over5", policy, budget)
            if row is None or count is None:
                continue
            at = place + _spread(policies, number, thickness)
            axes.bar(
                at,
                _number(row),
                width=thickness,
                color=look.colour,
                hatch=look.hatch,
                edgecolor=style.INK,
                linewidth=0.4,
            )
            axes.annotate(
                f"{int(_number(count))}",
                (at, _number(row)),
                xytext=(0, 1.5),
                textcoords="offset points",
                ha="center",
                va="bottom",
                fontsize=6.5,
                zorder=5,
                bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.4},
            )
            most = max(most, _number(row))
    axes.axhline(5.0, color=style.INK, linewidth=0.7, linestyle=(0, (4.0, 2.0)))
    axes.set_xticks(range(len(budgets)), budgets)
    axes.set_xlim(-0.5, len(budgets) - 0.5)
    axes.set_ylim(0, max(6.0, most * 1.42))
    axes.set_xlabel("Budget (share of nominal ranks)")
    axes.set_ylabel("Worst loss of one adapter (points)")
    axes.set_title("(b) Worst regression")
    axes.text(
        0.99,
        0.98,
        "above a bar: how many adapters lose > 5 points\n(dashed line; a loss of exactly 5 does not count)",
        transform=axes.transAxes,
        ha="right",
        va="top",
        fontsize=6,
        color=style.MUTED,
        bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.6},
    )
    style.grid(axes, "y")


def _adapters(axes: Axes, rows: Table, policies: list[str], budgets: list[str], originals: Table) -> None:
    budget = budgets[0]
    order = [str(row["adapter"]) for row in sorted(originals, key=_number)]
    scores: dict[str, dict[str, float]] = {}
    for arm, at in (BASE, ORIGINAL, *((policy, budget) for policy in policies)):
        scores[arm] = {
            str(row["adapter"]): _number(row)
            for row in rows
            if (row["panel"], row["arm"], row["budget"]) == ("score", arm, at)
        }
    for place, name in enumerate(order):
        axes.plot(
            [scores["base"][name], scores["original"][name]],
            [place, place],
            color=style.RULE,
            linewidth=1.6,
            zorder=1,
        )
    lanes = {"base": 0.0, "original": 0.0} | {
        policy: _spread(policies, number, -0.22) for number, policy in enumerate(policies)
    }
    for arm in ("base", "original", *policies):
        if not scores[arm]:
            continue
        look = style.look_of(arm)
        stroke = arm in ("base", "original")
        axes.plot(
            [scores[arm][name] for name in order if name in scores[arm]],
            [place + lanes[arm] for place, name in enumerate(order) if name in scores[arm]],
            linestyle="none",
            marker=look.marker,
            color=look.colour,
            markersize=5.5 if stroke else 3.8,
            markeredgewidth=1.1 if stroke else 0.4,
            markeredgecolor=look.colour if stroke else style.INK,
            zorder=4 if arm == "original" else 3,
        )
    metrics = {str(row["adapter"]): METRICS.get(str(row["metric"]), str(row["metric"])) for row in originals}
    axes.set_yticks(range(len(order)), [f"{name} ({metrics[name]})" for name in order], fontsize=6.2)
    axes.set_ylim(-0.7, len(order) - 0.3)
    axes.set_xlim(-2, 102)
    axes.set_xlabel("Score (points of the native metric)")
    axes.set_title(f"(c) Each adapter, policies at {budget}")
    style.grid(axes, "x")


def _legend(axes: Axes, policies: list[str]) -> None:
    """One key for the three panels: marker and line of a policy, and its bar."""
    from matplotlib.legend_handler import HandlerTuple
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles: list[tuple[Line2D | Patch, ...]] = []
    for arm in ("original", "base", *policies):
        look = style.look_of(arm)
        stroke = arm in ("base", "original")
        line = Line2D(
            [],
            [],
            color=look.colour,
            linestyle="none",
            marker=look.marker,
            markersize=5.5 if stroke else 4,
            markeredgecolor=look.colour if stroke else style.INK,
            markeredgewidth=1.1 if stroke else 0.4,
        )
        if not stroke:
            line.set(linestyle=look.line)
        bar = Patch(facecolor=look.colour, edgecolor=style.INK, hatch=look.hatch, linewidth=0.4)
        handles.append((line,) if stroke else (line, bar))
    axes.axis("off")
    axes.legend(
        handles,
        [style.look_of(arm).label for arm in ("original", "base", *policies)],
        handler_map={tuple: HandlerTuple(ndivide=None, pad=0.4)},
        loc="center",
        ncols=len(handles),
        handlelength=3.4,
        handletextpad=0.6,
        columnspacing=1.8,
        borderaxespad=0.0,
    )
