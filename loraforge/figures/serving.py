"""What the figures of serving share: one table from records, and two drawings of it, curves over rates and bars by arm.

A figure of a serving study is one of the two, or the third of :mod:`loraforge.figures.serving_tables`, with the metrics
that its study compares.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from loraforge.evidence.tables import Row, Table
from loraforge.evidence.targets.serving_study import GIB, Item, Study, Terms, study
from loraforge.figures import style
from loraforge.figures.kernels import number, times
from loraforge.figures.style import Look
from loraforge.serving.arms import Arm
from loraforge.serving.records import Stop
from loraforge.serving.workload import Fixed, Lengths, LogNormal

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Weights by colour. LoRAForge is dark or whole; the engine's own execution is light or broken.
ARMS = {
    "original_native": Look("Original, native", "#4d4d4d", "x", (0, (4.0, 1.5)), "////"),
    "original_loraforge": Look("Original, LoRAForge", "#c45a6c", "D", (0, (5.0, 1.2, 1.0, 1.2)), "xxxx"),
    "uniform_native": Look("Uniform, native", "#fae3bd", "v", (0, (2.0, 1.0)), "////"),
    "uniform_loraforge": Look("Uniform, LoRAForge", "#f0a830", "s", "-", ""),
    "spectral_native": Look("Spectral, native", "#b7d3ea", "^", (0, (2.0, 1.0)), "\\\\\\\\"),
    "spectral_loraforge": Look("Spectral, LoRAForge", "#0b4a8f", "o", "-", ""),
    "base_only": Look("Base model alone", "#9a9a9a", "P", (0, (1.0, 1.5)), "...."),
}
ALL_FIT = "room for all"
# fleets that are module shapes of a model with the paper's ranks (loraforge.fleet.shapes)
SHAPE_FLEETS = ("qwen50", "llama35")


@dataclass(frozen=True)
class Metric:
    """How a panel of averages is called and scaled."""

    title: str
    label: str
    log: bool = False


METRICS = {
    "tok_s": Metric("Throughput", "Output tokens a second"),
    "ttft_p50_s": Metric("TTFT P50", "Seconds", log=True),
    "tpot_p99_ms": Metric("TPOT P99", "Milliseconds", log=True),
    "loads": Metric("Loads", "Adapters"),
    "source_gib": Metric("Copied", "GiB"),
    "pool_gib": Metric("Held for LoRA", "GiB"),
    "peak_gib": Metric("Peak allocated", "GiB"),
}
# those of a figure's table; a printed table has its own
SHOWN = ("tok_s", "ttft_p50_s", "tpot_p99_ms", "loads", "source_gib")
# how answers end, where a study has several ways, as the paper's table 6 calls them
WAYS: dict[Stop, str] = {"natural": "N", "early": "N", "exact": "E-I", "exact-eos": "E-N"}
# what the titles of panels do not say
MEANINGS = {
    "loads": "adapters put on the device in the timed window.",
    "source_gib": "bytes copied from the host for them.",
    "pool_gib": "device memory of all engines.",
    "peak_gib": "high-water mark over an engine's whole life, mean over its starts.",
}
CURVES = ("tok_s", "ttft_p50_s", "tpot_p99_ms")
BRACKETS = "In brackets: output tokens a second over native execution of the same weights."
LINE, LINE_HEIGHT = 138, 0.115  # characters that fit a line of the small print, and inches that it takes
LOG_FROM = 4.0  # greatest over least value from which a panel is logarithmic
HEADLINES = (("spectral_loraforge", "original_native"), ("spectral_loraforge", "base_only"))
CAPTION = ("subject", "sample", "note")
COLUMNS = ("panel", "arm", "name", "rate", "value", "std", "n")


def table(records: Sequence[Item]) -> Table:
    """Rows of these panels:

    - a metric by case (``arm``) and rate: mean, sample standard deviation and number of seeds; ``pool_gib`` and
      ``peak_gib`` are of an arm at all its rates
    - ``gain``: output tokens a second of ``arm`` in times of those of the arm ``name``, geometric mean over seeds
    - ``subject``, ``sample``, ``note``: the caption
    """
    return rows_of(study(records))


def rows_of(found: Study, metrics: Sequence[str] = SHOWN) -> Table:
    """The rows of :func:`table` with these metrics; those of schedulers have the fleet as ``name``."""
    empty: Row = dict.fromkeys(COLUMNS)
    rows: Table = []
    for average in (*found.averages, *found.admissions):
        if average.metric in metrics:
            where: Row = {"panel": average.metric, "arm": average.case, "rate": average.rate}
            over = average.over
            value: Row = {"value": over.mean, "std": over.std, "n": average.seeds, "name": average.fleet}
            rows.append(empty | where | value)
    for panel, held in (("pool_gib", found.pools), ("peak_gib", found.peaks)):
        rows += [empty | {"panel": panel, "arm": arm, "value": size / GIB} for arm, size in held.items()]
    for gain in found.compared("tok_s"):
        where = {"panel": "gain", "arm": gain.case, "name": gain.other, "rate": gain.rate}
        rows.append(empty | where | {"value": gain.value})
    rows.append(empty | {"panel": "subject", "name": _subject(found.setting.engine, found.terms)})
    rows.append(empty | {"panel": "sample", "name": _sample(found)})
    return rows + [empty | {"panel": "note", "name": words} for words in _notes(found)]


def _subject(engine: str, said: Terms) -> str:
    if len(said.fleets) > 1:
        return f"{engine}, fleets {' and '.join(said.fleets)} together"
    return f"{engine}, fleet {next(iter(said.fleets))}"


def _sample(found: Study) -> str:
    """``1,700 requests and 3 seeds a point``; ranges where rates differ in them."""
    loads = found.setting.workloads
    sizes = [load.requests for load in loads]
    seeds = [sum(other.rate == load.rate for other in loads) for load in loads]
    return f"{_range(sizes)} requests and {_range(seeds)} {'seed' if max(seeds) == 1 else 'seeds'} a point"


def _range(values: Sequence[int]) -> str:
    low, high = min(values), max(values)
    return f"{low:,}" if low == high else f"{low:,}–{high:,}"


def _notes(found: Study) -> list[str]:
    """What else a reader has to know: lengths and stopping, fleets without weights, budgets, and what went wrong."""
    said = found.terms
    words = {name: _lengths(fleet.output_tokens) for name, fleet in said.fleets.items()}
    if len(set(words.values())) > 1:
        lengths = "; ".join(f"{text} ({name})" for name, text in words.items())
    else:
        lengths = next(iter(words.values()))
    if said.stops:
        notes = [f"Output lengths are fixed, for all cases alike: {lengths}."]
        if "natural" in said.stops:
            notes = [
                f"N: answers end by themselves, at the latest after {lengths}; exact lengths are theirs."
            ]
        caps = [f"{fleet.cap_tokens:,} ({name})" for name, fleet in said.fleets.items() if fleet.cap_tokens]
        if "early" in said.stops:
            declared = " and ".join(caps)
            notes.append(
                f"N: requests declare {declared} tokens, and the engine ends answers before, as at EOS."
            )
        notes.append("E-I: requests declare exact lengths, EOS ignored; E-N: the same, EOS not ignored.")
    elif said.stop == "natural":
        notes = [f"Answers end by themselves, at the latest after {lengths}."]
        if said.lengths_of is not None:
            notes.append(f"The base model alone repeats the lengths of: {label_of(said.lengths_of)}.")
    else:
        eos = "EOS ignored" if said.stop == "exact" else "EOS not ignored"
        notes = [f"Output lengths are fixed, for all arms alike: {lengths}; {eos}."]
    notes.append("Native: the engine's own LoRA execution.")
    if len(shares := {share for fleet in said.fleets.values() for share in fleet.shares}) == 1:
        notes.append(f"Compressed weights have a budget of {shares.pop()}.")
    shapes = [name for name in said.fleets if name in SHAPE_FLEETS]
    if shapes:
        notes.append(
            "Shape fleets: random base weights, synthetic factors with measured spectra, random prompts."
        )
    budgets = [
        f"{fleet.budget_gib:g} GiB ({name})" for name, fleet in said.fleets.items() if fleet.budget_gib
    ]
    if budgets:
        notes.append(f"Adapters are bounded to {' and '.join(budgets)}.")
    if found.admissions:
        notes.append(
            "Prefill, decode: mean tokens of a step with prompts, largest batch; in a window's first minute."
        )
    if said.decode_steps:
        notes.append(f"Admissions wait for {said.decode_steps} decode steps after a prefill.")
    counts = found.counts
    if counts["failed"]:
        notes.append(f"{counts['failed']:,} of {counts['requests']:,} requests failed and count for nothing.")
    if counts["points"] < counts["points_declared"]:
        missing = counts["points_declared"] - counts["points"]
        notes.append(
            f"{missing} of {counts['points_declared']} points are not shown: seeds were not measured."
        )
    return notes


def _lengths(lengths: Lengths) -> str:
    """``32 tokens``, ``uniform, 8–64 tokens``, ``log-normal, mean 56, 1–512 tokens``."""
    if isinstance(lengths, Fixed):
        return style.plural(lengths.tokens, "token")
    drawn = f"log-normal, mean {lengths.mean:g}" if isinstance(lengths, LogNormal) else "uniform"
    return f"{drawn}, {lengths.low}–{lengths.high} tokens"


def draw_curves(rows: Table, context: style.Context) -> Figure:
    """A panel each for throughput and the two latencies over the offered rate, a line an arm."""
    return draw_curves_of({"": rows}, context)


def draw_curves_of(parts: Mapping[str, Table], context: style.Context) -> Figure:
    """The same for several studies, a row of panels each; their names are in the titles."""
    told = [
        f"{name}: {line}" if name else line
        for name, rows in parts.items()
        for line in (*_gains(rows), *_loads(rows))
    ]
    small = caption(parts, context, told)
    letters = iter("abcdefghijklmnopqrstuvwxyz")
    with style.styled():
        figure = style.new_figure(0.4 + 1.8 * len(parts) + LINE_HEIGHT * len(small))
        panels = figure.subplots(len(parts), len(CURVES), squeeze=False)
        for (part, rows), line in zip(parts.items(), panels, strict=True):
            for name, axes in zip(CURVES, line, strict=True):
                _curves(axes, [row for row in rows if row["panel"] == name], METRICS[name])
                title = METRICS[name].title + (f", {part}" if part else "")
                axes.set_title(f"({next(letters)}) {title}")
                axes.set_xlabel("Offered requests a second")
                axes.set_ylabel(METRICS[name].label)
        handles = panels[0][0].get_legend_handles_labels()[0]
        figure.legend(handles=handles, loc="outside upper center", ncols=5, fontsize=6.5)
        style.caption(figure, "\n".join(small))
        return figure


def draw_bars(rows: Table, context: style.Context, metrics: Sequence[str]) -> Figure:
    """A row of panels an offered rate, a panel a metric, a bar an arm; what an arm has at all rates is shown once."""
    there = [name for name in metrics if any(row["panel"] == name for row in rows)]
    arms = list(dict.fromkeys(str(row["arm"]) for row in rows if row["panel"] == "tok_s"))
    rates = sorted({number(row, "rate") for row in rows if row["panel"] == "tok_s"})
    told = [f"{METRICS[name].title}: {meaning}" for name, meaning in MEANINGS.items() if name in there]
    small = caption({"": rows}, context, [" ".join([BRACKETS, *told]), *_gains(rows)])
    widths = [1.5 if name == "tok_s" else 1.0 for name in there]
    with style.styled():
        figure = style.new_figure((0.2 * len(arms) + 0.6) * len(rates) + LINE_HEIGHT * len(small) + 0.2)
        panels = figure.subplots(len(rates), len(there), squeeze=False, sharey=True, width_ratios=widths)
        letters = iter("abcdefghijklmnopqrstuvwxyz")
        for line, rate in zip(panels, rates, strict=True):
            for axes, name in zip(line, there, strict=True):
                own = [row for row in rows if row["panel"] == name and row["rate"] in (rate, None)]
                if rate != rates[0] and all(row["rate"] is None for row in own):
                    axes.axis("off")
                    continue
                gains = [row for row in rows if row["panel"] == "gain" and row["rate"] == rate]
                _bars(axes, own, arms, gains if name == "tok_s" else [])
                axes.set_title(f"({next(letters)}) {METRICS[name].title}")
                axes.set_xlabel(METRICS[name].label)
            line[0].set_ylabel(f"{rate:g} a second offered")
        style.caption(figure, "\n".join(small))
        return figure


def look_of(case: str) -> Look:
    """The look of a case; room for every adapter, copies and ways to end answers change nothing of it."""
    arm = _arm_of(case)
    return ARMS[replace(arm, full=False, copies=1).name]


def label_of(case: str) -> str:
    """``Original, native``; where every adapter has room ``Original, native, room for all``; and so on."""
    arm, stop = _arm_of(case), case.partition(".")[2]
    parts = [look_of(case).label]
    parts += [ALL_FIT] if arm.full else []
    parts += [f"{arm.copies} names each"] if arm.copies > 1 else []
    parts += [words for way, words in WAYS.items() if way == stop]
    return ", ".join(parts)


def _arm_of(case: str) -> Arm:
    return Arm.parse(case.partition(".")[0])


def _curves(axes: Axes, rows: Table, metric: Metric) -> None:
    from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullFormatter, NullLocator

    rates = sorted({number(row, "rate") for row in rows})
    for arm in dict.fromkeys(str(row["arm"]) for row in rows):
        own = sorted((row for row in rows if row["arm"] == arm), key=lambda row: number(row, "rate"))
        look = look_of(arm)
        axes.errorbar(
            [number(row, "rate") for row in own], [number(row, "value") for row in own],
            yerr=[float(row["std"] or 0) for row in own], label=label_of(arm), color=look.colour, marker=look.marker,
            linestyle=look.line, linewidth=1.2, elinewidth=0.7, ecolor=look.colour, capsize=1.8, capthick=0.7,
        )  # fmt: skip
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(rates))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda at, _: f"{at:g}"))
    axes.xaxis.set_minor_locator(NullLocator())
    if metric.log and _extent(rows) >= LOG_FROM:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda at, _: f"{at:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())
    else:
        axes.set_ylim(bottom=0)
    style.grid(axes, "y")


def _extent(rows: Table) -> float:
    """The greatest value in times of the least; 1 where that is not above 0."""
    values = [number(row, "value") for row in rows]
    return max(values) / min(values) if values and min(values) > 0 else 1.0


def _bars(axes: Axes, rows: Table, arms: Sequence[str], gains: Table) -> None:
    """A bar an arm with its value, whiskers of one standard deviation, and what execution alone gains it."""
    most = max((number(row, "value") for row in rows), default=0.0)
    for row in rows:
        arm, value = str(row["arm"]), number(row, "value")
        place, look = arms.index(arm), look_of(arm)
        axes.barh(
            place,
            value,
            0.74,
            color=look.colour,
            hatch=look.hatch,
            edgecolor=style.INK,
            linewidth=0.5,
            zorder=2,
        )
        reach = float(row["std"] or 0)
        if reach:
            axes.errorbar(
                value, place, xerr=reach, fmt="none", ecolor=style.INK, elinewidth=0.7, capsize=1.8, zorder=3
            )
        words = shown(value)
        for gain in gains:
            if gain["arm"] == arm and _by_execution(arm, str(gain["name"])):
                words += f" ({times(number(gain, 'value'))})"
        axes.annotate(
            words,
            (value + reach, place),
            xytext=(3, 0),
            textcoords="offset points",
            va="center_baseline",
            fontsize=6,
        )
    axes.set_yticks(range(len(arms)), [label_of(arm) for arm in arms])
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(len(arms) - 0.5, -0.5)
    axes.set_xlim(0, (1.8 if gains else 1.55) * most or 1.0)
    axes.locator_params(axis="x", nbins=4)
    style.grid(axes, "x")


def shown(value: float) -> str:
    """``1,234``, ``56``, ``7.8``, ``0.12``, ``0``."""
    if value == 0 or value >= 99.5:
        return f"{value:,.0f}"
    return f"{value:.{0 if value >= 19.95 else 1 if value >= 1.995 else 2}f}"


def _by_execution(case: str, other: str) -> bool:
    """Whether two cases differ by execution alone."""
    one, two = _arm_of(case), _arm_of(other)
    return one != two and replace(one, execution=two.execution) == two


def _is_told(case: str, other: str) -> bool:
    """Whether a gain is named: of the compressed arm over what it is held against, of room for all over room for some,
    and of several names an adapter over one."""
    one, two = _arm_of(case), _arm_of(other)
    if (one.limited.name, two.limited.name) in HEADLINES:
        return True
    return one != two and two in (one.limited, one.single)


def _gains(rows: Table) -> list[str]:
    """The gains in throughput that are named, by rising rates."""
    said: dict[tuple[str, str], list[str]] = {}
    gains = [row for row in rows if row["panel"] == "gain"]
    for row in sorted(gains, key=lambda row: number(row, "rate")):
        case, other = str(row["arm"]), str(row["name"])
        if _is_told(case, other):
            at = f"{times(number(row, 'value'))} at {number(row, 'rate'):g}"
            said.setdefault((case, other), []).append(at)
    if not said:
        return []
    pairs = [f"{label_of(case)} over {label_of(other)} {', '.join(at)}" for (case, other), at in said.items()]
    return [f"Output tokens a second, geometric mean over seeds: {'; '.join(pairs)}."]


def _loads(rows: Table) -> list[str]:
    """Loads at the highest rate, where they are counted."""
    counted = [row for row in rows if row["panel"] == "loads"]
    if not counted:
        return []
    rate = max(number(row, "rate") for row in counted)
    said = [
        f"{label_of(str(row['arm']))} {shown(number(row, 'value'))}" for row in counted if row["rate"] == rate
    ]
    return [f"Adapter loads in the timed window at {rate:g} a second, mean over seeds: {'; '.join(said)}."]


def caption(
    parts: Mapping[str, Table], context: style.Context, lines: Sequence[str], spread: str = "Whiskers"
) -> list[str]:
    """The lines of the small print: what served whom and where, how, and ``lines``; what several studies say alike is
    said once. spread: what shows deviations."""
    told: list[str] = []
    for rows in parts.values():
        said = {panel: [str(row["name"]) for row in rows if row["panel"] == panel] for panel in CAPTION}
        (subject,), (sample,) = said["subject"], said["sample"]
        deviates = any(row["std"] is not None for row in rows)
        deviations = [f"{spread}: standard deviation over seeds."] if deviates else []
        told += [context.line(sample, subject), " ".join([*said["note"], *deviations])]
    return [part for line in dict.fromkeys((*told, *lines)) for part in textwrap.wrap(line, LINE)]
