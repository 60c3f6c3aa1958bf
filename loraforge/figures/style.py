"""The one style of all figures: sizes, fonts, colours that survive greyscale, and byte-stable output.

Colours that stand side by side differ in lightness by at least 15 L* units and each also has its own marker, line
and hatch, so that a grey print and a colour-blind reader lose nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loraforge.files import write_with

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH = 7.0  # inches: the text width of a two-column page
DPI = 300

INK = "#1a1a1a"
MUTED = "#6e6e6e"
RULE = "#d9d9d9"

KINDS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class Look:
    """How one series is drawn everywhere."""

    label: str
    colour: str
    marker: str
    line: str | tuple[int, tuple[float, ...]]
    hatch: str
    filled: bool = True


ARMS = {
    "base": Look("Base model", "#8a8a8a", "|", (0, (1.0, 1.5)), ""),
    "original": Look("Original adapters", INK, "x", "-", ""),
    "uniform": Look("Uniform", "#f0a830", "s", (0, (4.0, 1.5)), "////"),
    "spectral": Look("Spectral", "#0b4a8f", "o", "-", ""),
    "spectral-nofloor": Look("Spectral, no floor", "#35a39a", "^", (0, (5.0, 1.2, 1.0, 1.2)), "...."),
}
# For what has no fixed look: stages of a method and policies to come.
SERIES = (
    ("#6b6b6b", ""),
    ("#8c3b4a", "||||"),
    ("#f2c75c", "////"),
    ("#14345f", ""),
    ("#d9d9d9", "xxxx"),
    ("#e58a72", "----"),
    ("#3f8f8b", "...."),
    ("#b7d3ea", "\\\\\\\\"),
    ("#4d4d4d", "++++"),
    ("#c9b3d9", "oo"),
)

_RC: dict[str, Any] = {
    "figure.dpi": DPI,
    "savefig.dpi": DPI,
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],  # ships with matplotlib: the same layout on every machine
    "mathtext.fontset": "dejavusans",
    "font.size": 7.5,
    "axes.titlesize": 8,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.labelsize": 7.5,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "legend.fontsize": 7,
    "legend.frameon": False,
    "legend.handlelength": 2.6,
    "axes.edgecolor": MUTED,
    "axes.linewidth": 0.6,
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "xtick.major.size": 2.5,
    "ytick.major.size": 2.5,
    "xtick.minor.size": 1.5,
    "ytick.minor.size": 1.5,
    "grid.color": RULE,
    "grid.linewidth": 0.5,
    "lines.linewidth": 1.4,
    "lines.markersize": 4,
    "hatch.linewidth": 0.5,
    "hatch.color": INK,
    "patch.linewidth": 0.5,
    "svg.fonttype": "none",  # text stays text: searchable, and edited in any drawing program
    "svg.hashsalt": "loraforge",  # ids of clip paths are random without it
    "path.simplify": True,
}


@dataclass(frozen=True)
class Context:
    """Where the numbers of a figure come from; printed under it."""

    fleet: str
    host: str
    device: str
    date: str
    protocol: str

    def line(self, sample: str, subject: str | None = None) -> str:
        """The caption line: ``subject`` (the fleet of the run unless given), what was sampled, machine and date."""
        study = "" if self.protocol == "paper" else f" · {self.protocol} protocol"
        of = f"Fleet {self.fleet}" if subject is None else subject
        return f"{of}: {sample} · {self.device} ({self.host}), {self.date}{study}"


@contextmanager
def styled() -> Iterator[None]:
    """Draw inside this block, whatever the user's own matplotlib settings are."""
    import matplotlib

    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_RC)  # type: ignore[arg-type]  # its stubs list every key
        yield


def new_figure(height: float) -> Figure:
    """An empty figure of the page's width, ``height`` inches tall, laid out without overlaps."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def caption(figure: Figure, text: str) -> None:
    """Say in small print below the panels what was measured, where and when."""
    figure.supxlabel(text, x=0.006, ha="left", fontsize=6.5, color=MUTED)


def grid(axes: Axes, which: str) -> None:
    """Faint rules across one direction: ``x``, ``y`` or ``both``."""
    axes.grid(True, axis=which)  # type: ignore[arg-type]
    axes.tick_params(axis="both", which="both", top=False, right=False)


def series(index: int) -> tuple[str, str]:
    """Colour and hatch of the ``index``-th series without a fixed look."""
    return SERIES[index % len(SERIES)]


def look_of(arm: str) -> Look:
    """The look of a policy; one that is not known yet is named as it is."""
    return ARMS.get(arm) or Look(arm, "#8c3b4a", "D", ":", "xxxx")


def kind_label(kind: str) -> str:
    """``q_proj`` -> ``q``."""
    return kind.removesuffix("_proj")


def kind_order(kinds: set[str]) -> list[str]:
    """Kinds in the order in which a layer applies them; others after, by name."""
    return [kind for kind in KINDS if kind in kinds] + sorted(kinds - set(KINDS))


def plural(number: int, noun: str) -> str:
    """``1 adapter``, ``24 adapters``, ``1,234 matrices``."""
    ending = noun if number == 1 else "matrices" if noun == "matrix" else f"{noun}s"
    return f"{number:,} {ending}"


def budget_label(budget: str) -> str:
    """``1/12`` stays; ``1`` is the whole."""
    return "full" if budget == "1" else budget


def save(figure: Figure, svg: Path, png: Path) -> None:
    """Write SVG and PNG atomically; the same figure gives the same bytes."""
    with styled():  # the layout is made, and text and ids are written, when a figure is saved
        write_with(svg, lambda path: figure.savefig(path, format="svg", metadata={"Date": None}))
        write_with(png, lambda path: figure.savefig(path, format="png", metadata={"Software": None}))
