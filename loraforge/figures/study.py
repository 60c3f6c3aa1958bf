"""What the figures of the quality study share: order, names and looks of many arms, and their key."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, Any, get_args

from loraforge.config import Policy
from loraforge.evidence.tables import Row, Table, Value
from loraforge.evidence.targets.quality import BASE, ORIGINAL
from loraforge.evidence.targets.study import Record, scores_of, selection_of
from loraforge.figures import style

if TYPE_CHECKING:
    from matplotlib.axes import Axes

DEMO = 100  # examples below which scores are too coarse to compare policies
FIRST = ("cts", "cts-weighted", "cts-diagonal", "uniform", "spectral", "spectral-nofloor", "para")
LABELS = {
    "cts": "CTS, raw",
    "cts-weighted": "CTS, weighted",
    "cts-diagonal": "CTS, diagonal",
    "para": "PARA",
}
# looks of what has none of its own: lists of lengths without a common divisor, so that no two policies share both
_COLOURS = ("#8c3b4a", "#6fa8c9", "#3f6b35", "#c98ab5", "#4d3b7a", "#b5a642", "#1f6f78", "#d07a4a")
_MARKERS = ("D", "v", "P", "X", "<", ">", "h", "p", "d", "*", "8")
_LINES: tuple[tuple[int, tuple[float, ...]], ...] = (
    (0, (6.0, 1.5)),
    (0, (1.0, 1.0)),
    (0, (3.0, 1.0, 1.0, 1.0)),
    (0, (2.0, 2.0)),
    (0, (7.0, 1.0, 1.0, 1.0, 1.0, 1.0)),
)


def sample_rows(records: Sequence[Record]) -> Table:
    """What a caption says of the sample: adapters, and least and most examples of one; the chosen policy as ``arm``."""
    originals = [item for item in scores_of(records) if (item.arm, item.budget) == ORIGINAL]
    counts = [item.n for item in originals]
    selection = selection_of(records)
    about = {"arm": selection.chosen, "budget": selection.decide_at}
    return [
        row("sample", len(counts), n=max(counts), low=min(counts), **about),
        *(row("finalist", place, arm=policy) for place, policy in enumerate(selection.finalists)),
    ]


def row(panel: str, value: float | int, **cells: Value) -> Row:
    """One row of a table of the study; every row has the same columns."""
    names = ("arm", "budget", "adapter", "low", "high", "n")
    return {"panel": panel, **{name: cells.get(name) for name in names}, "value": value}


def sample(rows: Table) -> str:
    """``24 adapters, 200 test examples each``."""
    about = next(item for item in rows if item["panel"] == "sample")
    low, high = number(about, "low"), number(about, "n")
    many = f"{high:.0f}" if low == high else f"{low:.0f}–{high:.0f}"
    demo = " (demo size)" if low < DEMO else ""
    return f"{style.plural(int(number(about)), 'adapter')}, {many} examples each{demo}"


def chosen(rows: Table) -> tuple[str, str]:
    """The policy that validation scores chose, and the budget at which they did."""
    about = next(item for item in rows if item["panel"] == "sample")
    return str(about["arm"]), str(about["budget"])


def number(item: Row, name: str = "value") -> float:
    """A cell as a number, 0 where it is empty."""
    return float(item[name] or 0.0)


def policies(rows: Table, panel: str) -> list[str]:
    """Compressed arms of a panel, in the order of every figure: baselines, then the rest by name."""
    there = {str(item["arm"]) for item in rows if item["panel"] == panel} - {BASE[0], ORIGINAL[0]}
    return [arm for arm in FIRST if arm in there] + sorted(there - set(FIRST))


def budgets(rows: Table, panel: str) -> list[str]:
    """Budgets of a panel's compressed arms, the tightest first."""
    there = {
        str(item["budget"])
        for item in rows
        if item["panel"] == panel and item["arm"] not in (BASE[0], ORIGINAL[0])
    }
    return sorted(there, key=Fraction)


def one(rows: Table, panel: str, arm: str, budget: str) -> Row | None:
    """The row of an arm; None where it was not measured."""
    return next(
        (item for item in rows if (item["panel"], item["arm"], item["budget"]) == (panel, arm, budget)), None
    )


def looks(arms: Sequence[str]) -> dict[str, style.Look]:
    """How every arm is drawn, the same in all figures; no two without a look of their own share marker and colour."""
    refined = [f"{policy}-refined" for policy in get_args(Policy)]
    known = [name for name in dict.fromkeys([*FIRST, *get_args(Policy), *refined]) if name not in style.ARMS]
    found: dict[str, style.Look] = {}
    for arm in arms:
        place = known.index(arm) if arm in known else len(known)
        found[arm] = style.ARMS.get(arm) or style.Look(
            LABELS.get(arm, arm),
            _COLOURS[place % len(_COLOURS)],
            _MARKERS[place % len(_MARKERS)],
            _LINES[place % len(_LINES)],
            "",
        )
    return found


def key(axes: Axes, arms: Sequence[str], *, lines: bool, columns: int = 5) -> None:
    """The key of all arms in a panel of its own."""
    from matplotlib.lines import Line2D

    handles = []
    for look in looks(arms).values():
        handle = Line2D([], [], label=look.label, linestyle="none", **marks(look))
        if lines:
            handle.set(linestyle=look.line)
        handles.append(handle)
    axes.axis("off")
    if handles:
        axes.legend(
            handles=handles,
            loc="center",
            ncols=min(columns, len(handles)),
            handlelength=3.0,
            handletextpad=0.5,
            columnspacing=1.4,
            borderaxespad=0.0,
        )


def key_height(arms: Sequence[str], columns: int = 5) -> float:
    """Inches that :func:`key` takes."""
    return 0.16 + 0.15 * -(-max(1, len(arms)) // columns)


def curves(axes: Axes, rows: Table, panel: str, arms: Sequence[str], budgets: Sequence[str]) -> None:
    """A line an arm of a panel's values over the budgets, which stand side by side, the tightest first."""
    for arm, look in looks(arms).items():
        found = [(place, one(rows, panel, arm, budget)) for place, budget in enumerate(budgets)]
        points = [(place, number(item)) for place, item in found if item is not None]
        axes.plot(
            [place for place, _ in points],
            [value for _, value in points],
            linestyle=look.line,
            linewidth=1.0,
            **marks(look),
        )
    axes.set_xticks(range(len(budgets)), budgets)
    axes.set_xlim(-0.35, len(budgets) - 0.65)


def marks(look: style.Look) -> dict[str, Any]:
    """Marker and colour of an arm, as matplotlib's arguments."""
    stroke = look.marker in ("x", "|")
    return {
        "color": look.colour,
        "marker": look.marker,
        "markersize": 5.0 if stroke else 3.8,
        "markeredgewidth": 1.1 if stroke else 0.4,
        "markeredgecolor": look.colour if stroke else style.INK,
    }
