"""Figures are drawn from their table alone, byte-stable, without overlaps, and legible without colour."""

from __future__ import annotations

import itertools
import json
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import matplotlib
import pytest
import synthetic
from matplotlib.colors import to_rgb

from loraforge.errors import UsageError
from loraforge.evidence.tables import Table, from_csv, to_csv
from loraforge.evidence.targets import TARGETS
from loraforge.figures import FIGURES, module_of, style, table_of

CONTEXT = style.Context("smol", "cpu2", "Some CPU", "2026-11-29", "cpu")
SIZES: dict[str, tuple[dict[str, Any], ...]] = {
    "spectra": ({"adapters": 24, "layers": 30}, {"adapters": 1, "layers": 1}),
    "allocation": ({"adapters": 24, "layers": 6}, {"adapters": 1, "layers": 1}),
    "quality": (
        {"adapters": 24, "examples": 10, "budgets": synthetic.BUDGETS},
        {"adapters": 1, "budgets": ("1/12",)},
    ),
    "recompression": ({},),
}
CASES = [(name, size) for name in FIGURES for size in SIZES[name]]


def made(name: str, size: dict[str, Any]) -> Table:
    records = TARGETS[name].parse(
        [json.dumps(record) for record in synthetic.MAKERS[name](**size)], "records"
    )
    return from_csv(to_csv(table_of(name, records)), "table")


@pytest.mark.parametrize(("name", "size"), CASES)
def test_same_table_gives_the_same_bytes(name: str, size: dict[str, Any], tmp_path: Path) -> None:
    table = made(name, size)
    seen = set()
    for attempt in range(2):
        svg, png = tmp_path / f"{attempt}.svg", tmp_path / f"{attempt}.png"
        style.save(module_of(name).draw(table, CONTEXT), svg, png)
        seen.add((svg.read_bytes(), png.read_bytes()))
    assert len(seen) == 1


@pytest.mark.parametrize("name", FIGURES)
def test_text_stays_text_and_says_n_host_and_date(name: str, tmp_path: Path) -> None:
    style.save(
        module_of(name).draw(made(name, SIZES[name][0]), CONTEXT), tmp_path / "f.svg", tmp_path / "f.png"
    )
    words = " ".join(ET.parse(tmp_path / "f.svg").getroot().itertext())
    assert "Fleet smol: " in words
    assert "(cpu2), 2026-11-29 · cpu protocol" in words
    assert ("1,234 matrices" if name == "recompression" else "24 adapters") in words


@pytest.mark.parametrize(("name", "size"), CASES)
def test_no_text_overlaps_another_or_leaves_the_page(name: str, size: dict[str, Any]) -> None:
    figure = module_of(name).draw(made(name, size), CONTEXT)
    with style.styled():
        figure.canvas.draw()
    renderer = figure.canvas.get_renderer()
    boxes, unseen = [], off_view(figure)
    for text in figure.findobj(matplotlib.text.Text):
        if text.get_visible() and text.get_text().strip():
            box = text.get_window_extent(renderer)
            if box.width and id(text) not in unseen:
                boxes.append((text.get_text(), box.padded(-2)))
    page = figure.bbox.padded(2)
    for words, box in boxes:
        assert page.x0 <= box.x0, words
        assert box.x1 <= page.x1, words
        assert page.y0 <= box.y0, words
        assert box.y1 <= page.y1, words
    for (one, first), (two, second) in itertools.combinations(boxes, 2):
        assert not first.overlaps(second), f"{one!r} overlaps {two!r}"


def off_view(figure: Any) -> set[int]:
    """Ids of the labels of ticks beyond their axes' limits, which are laid out but not drawn."""
    found = set()
    for axes in figure.axes:
        for axis, ends in ((axes.xaxis, axes.bbox.intervalx), (axes.yaxis, axes.bbox.intervaly)):
            for tick in [*axis.majorTicks, *axis.minorTicks]:
                for label in (tick.label1, tick.label2):
                    box = label.get_window_extent()
                    middle = sum(box.intervalx if axis is axes.xaxis else box.intervaly) / 2
                    if not ends[0] - 3 <= middle <= ends[1] + 3:
                        found.add(id(label))
    return found


@pytest.mark.parametrize("name", FIGURES)
def test_user_settings_do_not_leak_in_or_out(name: str, tmp_path: Path) -> None:
    table = made(name, SIZES[name][-1])
    style.save(module_of(name).draw(table, CONTEXT), tmp_path / "a.svg", tmp_path / "a.png")
    with matplotlib.rc_context({"font.size": 20, "axes.facecolor": "red", "svg.fonttype": "path"}):
        style.save(module_of(name).draw(table, CONTEXT), tmp_path / "b.svg", tmp_path / "b.png")
        assert matplotlib.rcParams["font.size"] == 20
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


def lightness(colour: str) -> float:
    """CIE L* of an sRGB colour."""
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(colour)]
    y = sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))
    return 116 * y ** (1 / 3) - 16 if y > 0.008856 else 903.3 * y


def test_policies_differ_in_lightness_marker_line_and_hatch() -> None:
    looks = [style.ARMS[name] for name in ("uniform", "spectral", "spectral-nofloor")]
    for one, two in itertools.combinations(looks, 2):
        assert abs(lightness(one.colour) - lightness(two.colour)) > 12, (one.label, two.label)
        assert one.marker != two.marker
        assert one.line != two.line
        assert one.hatch != two.hatch
    assert len({look.marker for look in style.ARMS.values()}) == len(style.ARMS)


def test_neighbouring_stages_differ_in_lightness_or_hatch() -> None:
    for (one, hatch), (two, other) in itertools.combinations(style.SERIES, 2):
        assert hatch != other or abs(lightness(one) - lightness(two)) > 12


def test_spectra_table_by_hand() -> None:
    records = TARGETS["spectra"].parse(
        [
            json.dumps(
                {
                    "adapter": "a", "module": "model.layers.3.self_attn.q_proj", "kind": "q_proj", "layer": 3,
                    "rank": 4, "scale": 1.0, "sigma": [2.0, 2.0, 0.5, 0.0], "path": "gram", "action_error": 0.0,
                    "spectrum_error": 0.0,
                }
            )
        ],
        "records",
    )  # fmt: skip
    assert table_of("spectra", records) == [
        {
            "adapter": "a", "module": "model.layers.3.self_attn.q_proj", "kind": "q_proj", "layer": 3, "rank": 4,
            "rank90": 2, "fraction": 0.5,
        }
    ]  # fmt: skip


def test_allocation_shares_sum_to_one() -> None:
    table = made("allocation", {"adapters": 4, "layers": 2})
    for panel in ("adapter", "kind"):
        sums: dict[tuple[Any, Any], float] = {}
        for row in table:
            if row["panel"] == panel:
                arm = row["policy"], row["budget"]
                sums[arm] = sums.get(arm, 0.0) + float(row["value"] or 0)
        assert len(sums) == 12
        assert all(value == pytest.approx(1.0) for value in sums.values())


def test_recompression_stages_add_up_to_the_median_pass() -> None:
    table = made("recompression", {})
    for method in ("florist", "gram"):
        rows = [row for row in table if row["method"] == method]
        total = next(float(row["value"] or 0) for row in rows if row["panel"] == "seconds")
        assert sum(float(row["value"] or 0) for row in rows if row["panel"] == "stage") == pytest.approx(
            total
        )


def test_unknown_figure() -> None:
    with pytest.raises(UsageError, match="choose one of spectra"):
        module_of("speed")
