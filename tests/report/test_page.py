"""The report says what the manifest says, shows strangers' words as words, and asks for nothing."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import subprocess
import sys
import time
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fleets import HOSTILE, Made, make_fleet

from loraforge.errors import one_line
from loraforge.report import page, write_report
from loraforge.report.numbers import by_adapter
from loraforge.report.page import report_page
from loraforge.report.text import data_block, packed, shown

SECONDS = {"verify": 0.25, "factor": 1.5}
ELEMENTS = {
    *(
        "html",
        "head",
        "meta",
        "title",
        "style",
        "script",
        "body",
        "header",
        "main",
        "section",
        "h1",
        "h2",
        "h3",
        "p",
        "a",
    ),
    *(
        "dl",
        "div",
        "dt",
        "dd",
        "form",
        "label",
        "input",
        "output",
        "table",
        "thead",
        "tbody",
        "tr",
        "th",
        "td",
        "figure",
    ),
    *(
        "b",
        "bdi",
        "span",
        "small",
        "em",
        "sub",
        "code",
        "svg",
        "g",
        "rect",
        "line",
        "text",
        "tspan",
        "polyline",
        "circle",
    ),
}
VERSIONS = {"Python": "3.11.2", "torch": "<2>"}


class Read(HTMLParser):
    """Elements in order, with attributes and the text directly inside."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self._inside: list[int] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self.texts.append("")
        if tag not in ("meta", "input"):
            self._inside.append(len(self.elements) - 1)

    def handle_endtag(self, tag: str) -> None:
        while self.elements[self._inside.pop()][0] != tag:
            pass

    def handle_data(self, data: str) -> None:
        if self._inside:
            self.texts[self._inside[-1]] += data

    def all(self, tag: str) -> list[tuple[dict[str, str | None], str]]:
        return [
            (attributes, text)
            for (name, attributes), text in zip(self.elements, self.texts, strict=True)
            if name == tag
        ]


def html_of(made: Made, **changes: Any) -> str:
    return report_page(made.manifest, made.problem, made.uniform, SECONDS, VERSIONS, **changes)


def data_of(text: str) -> dict[str, Any]:
    (block,) = [
        body for attributes, body in Read(text).all("script") if attributes.get("type") == "application/json"
    ]
    value: dict[str, Any] = json.loads(block)
    return value


def unpacked(column: dict[str, str]) -> list[float]:
    return np.frombuffer(base64.b64decode(column["data"]), f"<{column['type']}").tolist()


def test_equal_input_gives_equal_bytes_whatever_the_names(tmp_path: Path) -> None:
    made = make_fleet(HOSTILE)
    assert html_of(made) == html_of(make_fleet(HOSTILE))
    for name in ("one.html", "two.html"):
        write_report(tmp_path / name, made.manifest, made.problem, made.uniform, SECONDS)
    assert (tmp_path / "one.html").read_bytes() == (tmp_path / "two.html").read_bytes()
    assert html_of(made) != html_of(make_fleet(HOSTILE, budget="1/2"))


def test_strangers_words_are_shown_and_nothing_else() -> None:
    text = html_of(make_fleet(HOSTILE))
    read = Read(text)
    assert [attributes.get("type") for attributes, _ in read.all("script")] == ["application/json", None]
    assert {tag for tag, _ in read.elements} <= ELEMENTS
    stated = {name for _, attributes in read.elements for name in attributes}
    assert not [name for name in stated if name.startswith("on") or name == "style"]
    rows = [text for attributes, text in read.all("bdi")]
    for name in HOSTILE:
        assert one_line(name) in rows
    assert "two\\u000alines\\u001b[2J" in rows
    assert "half \\udc80" in rows
    assert read.all("h1")[0][0] == {}
    assert "<b>fleet</b>" in rows


def test_the_policy_allows_its_own_style_and_script_alone() -> None:
    text = html_of(make_fleet(("a", "b")))
    read = Read(text)
    (policy,) = [
        a["content"] for a, _ in read.all("meta") if a.get("http-equiv") == "Content-Security-Policy"
    ]
    assert policy is not None
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    body = {"style-src": read.all("style")[0][1], "script-src": read.all("script")[1][1]}
    for rule, inline in body.items():
        assert (
            rules.pop(rule)
            == f"'sha256-{base64.b64encode(hashlib.sha256(inline.encode()).digest()).decode()}'"
        )
    assert rules == {
        "default-src": "'none'",
        "base-uri": "'none'",
        "form-action": "'none'",
        "require-trusted-types-for": "'script'",
        "trusted-types": "'none'",
    }
    assert set(re.findall(r"[a-z]+://[^\s\"']*", text)) == {
        "http://www.w3.org/2000/svg"
    }  # a name, not an address
    assert not re.search(r"innerHTML|insertAdjacent|document\.write|eval\(|\bimport\b|fetch|url\(", text)


def test_the_table_has_the_numbers_of_the_manifest() -> None:
    made = make_fleet(("a", "b", "c"))
    read = Read(html_of(made))
    values = [float(str(attributes["data-v"])) for attributes, _ in read.all("td") if "data-v" in attributes]
    entries = list(made.manifest.adapters.values())
    k = np.array([module.k for entry in entries for module in entry.modules.values()])
    numbers = by_adapter(made.problem, k, made.uniform)
    assert sum(adapter.share for adapter in numbers) == pytest.approx(1)
    assert sum(adapter.uniform for adapter in numbers) <= made.manifest.fleet.budget.params
    rows = np.array(values).reshape(3, -1)
    for row, adapter, entry in zip(rows.tolist(), numbers, entries, strict=True):
        certificates = [module.certificate for module in entry.modules.values()]
        ranks = sorted(module.k for module in entry.modules.values())
        assert row == pytest.approx(
            [
                len(ranks),
                entry.modules["model.layers.0.mlp.up_proj"].r,
                float(np.median(ranks)),
                entry.compact_parameters,
                entry.layouts["ragged"].bytes,
                adapter.energy,
                max(certificate.relative_error for certificate in certificates),
                max(certificate.action_error for certificate in certificates),
                adapter.after
                / adapter.uniform
                * sum(n.uniform for n in numbers)
                / sum(n.after for n in numbers),
            ],
            rel=1e-6,
        )
    energy = sum(
        a.energy * e for a, e in zip(numbers, made.problem.adapter_energy(made.problem.rank), strict=True)
    )
    assert energy / made.problem.energy(made.problem.rank) == pytest.approx(
        made.manifest.fleet.retained_energy
    )


def test_columns_have_every_module() -> None:
    made = make_fleet(("a", "b", "c"))
    data = data_of(html_of(made))
    entries = [module for entry in made.manifest.adapters.values() for module in entry.modules.values()]
    assert len(data["lists"]) == 1
    assert data["lists"][0]["names"] == list(made.manifest.adapters["a"].modules)
    assert data["lists"][0]["layers"] == [0] * 4 + [1] * 4 + [2] * 4
    assert unpacked(data["k"]) == [module.k for module in entries]
    assert unpacked(data["r"]) == [module.r for module in entries]
    assert unpacked(data["lost"]) == pytest.approx([m.certificate.relative_error for m in entries], rel=1e-6)
    assert unpacked(data["rounding"]) == pytest.approx(
        [m.certificate.action_error for m in entries], rel=1e-6
    )
    first = np.repeat(made.problem.sigma[made.problem.offsets[:-1]], made.problem.rank)
    drawn = first * 10 ** (-data["decades"] * np.array(unpacked(data["levels"])) / 254)
    assert drawn[np.array(unpacked(data["levels"])) < 255] == pytest.approx(
        made.problem.sigma[np.array(unpacked(data["levels"])) < 255], rel=0.03
    )


def test_size_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    made = make_fleet([f"adapter{i}" for i in range(40)], layers=5, ranks=(64,))
    directions = len(made.problem.sigma)
    whole = len(html_of(made))
    monkeypatch.setattr(page, "MAX_LEVELS", directions // 4)
    data = data_of(text := html_of(made))
    assert data["points"] == 16
    assert len(unpacked(data["levels"])) == directions // 4
    assert whole - len(text) == pytest.approx(directions * 3 / 4 * 4 / 3, abs=20)
    monkeypatch.setattr(page, "MAX_MODULES", 799)
    small = html_of(made)
    assert "lists" not in data_of(small)
    assert len(small) < 40 * 2000 + 60_000


@pytest.mark.slow
def test_a_thousand_adapters() -> None:
    made = make_fleet([f"tenant-{i:04d}-of-many" for i in range(1000)], layers=13, ranks=(16, 64, 256))
    assert len(made.problem.sigma) > page.MAX_LEVELS
    started = time.process_time()
    text = html_of(made)
    assert time.process_time() - started < 20
    assert len(text) < 1000 * 2000 + 52_000 * 20 + page.MAX_LEVELS * 4 / 3 + 100_000
    assert data_of(text)["points"] == page.MAX_LEVELS // 52_000
    assert "960 adapters between" in text


def test_zero_updates_and_one_module() -> None:
    made = make_fleet(("only",), layers=1, ranks=(1,), budget="1")
    zero = Made(
        made.manifest,
        type(made.problem)(made.problem.names, made.problem.rank, made.problem.cost, made.problem.sigma * 0),
        made.uniform,
    )
    for fleet in (made, zero):
        text = html_of(fleet)
        assert "nan" not in re.sub(r"<(script|style).*?</\1>", "", text, flags=re.DOTALL).lower()
    assert unpacked(data_of(html_of(zero))["levels"]) == [255] * 4


def test_a_module_that_was_dropped_altogether() -> None:
    made = make_fleet(("a", "b"))
    entry = made.manifest.adapters["a"]
    rest = dict(list(entry.modules.items())[1:])
    adapters = made.manifest.adapters | {"a": entry.model_copy(update={"modules": rest})}
    text = html_of(Made(made.manifest.model_copy(update={"adapters": adapters}), made.problem, made.uniform))
    data = data_of(text)
    assert (unpacked(data["k"])[0], unpacked(data["lost"])[0]) == (0, 1)
    assert data["paths"][int(unpacked(data["path"])[0])] == "dropped"
    assert unpacked(data["k"])[1:] == unpacked(data_of(html_of(made))["k"])[1:]


def test_other_modules_are_refused() -> None:
    made, other = make_fleet(("a", "b")), make_fleet(("a", "c"))
    with pytest.raises(ValueError, match="not of the same modules"):
        report_page(made.manifest, other.problem, made.uniform, SECONDS, VERSIONS)


def test_words() -> None:
    assert shown("<a href='x'>&\u202e") == "&lt;a href=&#x27;x&#x27;&gt;&amp;\\u202e"
    assert data_block({"</script>": "&\u2028"}) == '{"\\u003c/script\\u003e":"\\u0026\\u2028"}'
    for most, kind in ((255, "u1"), (256, "u2"), (65536, "u4")):
        assert packed(np.array([0, most]))["type"] == kind
        assert unpacked(packed(np.array([0, most]))) == [0, most]
    for bad in (np.array([1 << 32]), np.array([-1])):
        with pytest.raises(ValueError, match="32 bits"):
            packed(bad)


def test_needs_no_torch() -> None:
    code = "import sys; sys.modules['torch'] = None; import loraforge.report"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
