"""The report in a real browser: it sorts, filters and opens by mouse and keyboard, and asks nobody for anything."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from fleets import HOSTILE, make_fleet

from loraforge.report import report_page

pytest.importorskip("aiohttp", reason="a browser is driven through aiohttp, which is not installed")
from browser import drive, find_browser

if TYPE_CHECKING:
    from browser import Browser

PROGRAM = find_browser()
pytestmark = pytest.mark.skipif(PROGRAM is None, reason="no Chromium on the path")
ROWS = "[...document.querySelectorAll('#table > tbody > tr:not(.detail)')]"
NAMES = f"{ROWS}.filter(row => !row.hidden).map(row => row.cells[0].innerText)"


@pytest.fixture
def browse(tmp_path: Path) -> Callable[[Callable[[Browser], Awaitable[None]]], None]:
    """Run a script with a browser at the report of a fleet with hostile names; nothing may be reported at its end."""
    made = make_fleet(HOSTILE, layers=4)
    seconds, versions = {"factor": 1.0}, {"Python": "3.11"}
    report = tmp_path / "a report.html"
    report.write_text(
        report_page(made.manifest, made.problem, made.uniform, seconds, versions), encoding="utf-8"
    )

    def run(script: Callable[[Browser], Awaitable[None]]) -> None:
        async def whole(browser: Browser) -> None:
            await browser.look(1280, 900)
            await browser.open(report.as_uri())
            await script(browser)
            assert browser.seen("Runtime.exceptionThrown") == []
            assert browser.seen("Runtime.consoleAPICalled") == []
            assert browser.seen("Log.entryAdded") == []  # what the page's own policy refuses is said here
            assert browser.seen("Page.javascriptDialogOpening") == []
            asked = {request["request"]["url"] for request in browser.seen("Network.requestWillBeSent")}
            assert asked == {report.as_uri()}

        assert PROGRAM is not None
        drive(PROGRAM, tmp_path / "profile", whole)

    return run


def test_sorting_and_filters(browse: Callable[[Callable[[Browser], Awaitable[None]]], None]) -> None:
    async def script(browser: Browser) -> None:
        assert len(await browser.run(NAMES)) == len(HOSTILE)
        heads = await browser.run(
            "[...document.querySelectorAll('#table thead th')].map(head => head.innerText)"
        )
        column = heads.index("Energy kept")
        values = f"{ROWS}.map(row => Number(row.cells[{column}].dataset.v))"
        unsorted = await browser.run(values)
        button = f"document.querySelectorAll('#table thead button')[{column}]"
        await browser.run(f"{button}.click()")
        assert await browser.run(values) == sorted(unsorted, reverse=True)
        assert await browser.run(f"{button}.parentNode.getAttribute('aria-sort')") == "descending"
        await browser.run(f"{button}.focus()")
        await browser.key("Enter", 13, "\r")
        assert await browser.run(values) == sorted(unsorted)
        assert await browser.run("document.querySelectorAll('[aria-sort]').length") == 1
        await browser.run("document.querySelector('#table thead button').click()")
        names = await browser.run(NAMES)
        assert names == await browser.run(
            f"[...{NAMES}].sort(new Intl.Collator('en', {{numeric: true}}).compare)"
        )

        await browser.run("document.getElementById('filter-name').focus()")
        await browser.words("SCRIPT>AL")
        assert sorted(await browser.run(NAMES)) == sorted(name for name in HOSTILE if "script>al" in name)
        assert (
            await browser.run("document.getElementById('shown').textContent")
            == f"2 of {len(HOSTILE)} adapters"
        )
        await browser.run("document.getElementById('filter-name').value = ''")
        middle = sorted(unsorted)[len(unsorted) // 2]
        await browser.run("document.getElementById('filter-energy').focus()")
        await browser.words(repr(100 * middle))
        assert len(await browser.run(NAMES)) == sum(value < 100 * middle / 100 for value in unsorted)

    browse(script)


def test_modules_of_an_adapter(browse: Callable[[Callable[[Browser], Awaitable[None]]], None]) -> None:
    async def script(browser: Browser) -> None:
        made = make_fleet(HOSTILE, layers=4)
        name = HOSTILE[2]
        entry = made.manifest.adapters[name]
        opener = f"{ROWS}[2].querySelector('button')"
        await browser.run(f"{opener}.focus()")
        await browser.key(" ", 32, " ")
        assert await browser.run(f"{opener}.getAttribute('aria-expanded')") == "true"
        detail = "document.getElementById('modules-2')"
        assert await browser.run(f"{opener}.getAttribute('aria-controls')") == "modules-2"
        rows = f"[...{detail}.querySelectorAll('.modules tbody tr')]"
        shown = await browser.run(f"{rows}.map(row => [...row.cells].map(cell => cell.innerText))")
        assert [row[0] for row in shown] == list(entry.modules)
        for row, module in zip(shown, entry.modules.values(), strict=True):
            assert row[1:4] == [f"{module.d_in} × {module.d_out}", str(module.r), str(module.k)]
            assert abs(float(row[4][:-1]) / 100 - module.certificate.retained_energy) < 6e-5
            assert abs(float(row[5]) - module.certificate.relative_error) < 6e-5
        assert await browser.run(f"{detail}.querySelectorAll('polyline.thin').length") == 16
        assert await browser.run(f"{detail}.querySelectorAll('rect.heat').length") == 16
        assert entry.weights_sha256 in await browser.run(f"{detail}.innerText")

        await browser.run(f"{detail}.querySelector('input').focus()")
        await browser.words("layers.1.")
        assert await browser.run(f"{rows}.filter(row => !row.hidden).length") == 4
        assert await browser.run(f"{detail}.querySelectorAll('g[visibility=visible]').length") == 4
        select = f"{detail}.querySelector('select')"
        await browser.run(f"{select}.value = '0', {select}.dispatchEvent(new Event('change'))")
        assert await browser.run(f"{rows}.filter(row => !row.hidden).length") == 1

        # it stays below its adapter when the table is sorted, goes with it, and comes back
        await browser.run("document.querySelectorAll('#table thead button')[3].click()")
        after = f"{detail}.previousElementSibling.dataset.i"
        assert await browser.run(after) == "2"
        await browser.run("document.getElementById('filter-name').focus()")
        await browser.words("no such adapter")
        assert await browser.run(f"{detail}.hidden")
        await browser.run("document.getElementById('filter-name').value = ''")
        await browser.run("document.getElementById('controls').dispatchEvent(new Event('input'))")
        assert not await browser.run(f"{detail}.hidden")
        await browser.run(f"{detail}.previousElementSibling.querySelector('button').click()")
        assert await browser.run(f"{detail}.hidden")

    browse(script)


def test_light_dark_narrow_and_paper(
    browse: Callable[[Callable[[Browser], Awaitable[None]]], None], tmp_path: Path
) -> None:
    async def script(browser: Browser) -> None:
        colours = "[getComputedStyle(document.body).backgroundColor, getComputedStyle(document.body).color]"
        light = await browser.run(colours)
        await browser.look(1280, 900, "dark")
        assert await browser.run(colours) == ["rgb(18, 22, 27)", "rgb(230, 234, 239)"]
        assert light == ["rgb(255, 255, 255)", "rgb(27, 31, 36)"]
        await browser.look(400, 800)
        await browser.run(f"{ROWS}[0].querySelector('button').click()")
        wide = await browser.run("document.documentElement.scrollWidth")
        assert wide <= 400, "the page scrolls sideways; only its tables may"
        await browser.look(1280, 900, "dark", "print")
        assert (await browser.run(colours))[0] == "rgb(255, 255, 255)"
        assert await browser.run("getComputedStyle(document.getElementById('controls')).display") == "none"
        await browser.pdf(tmp_path / "report.pdf")
        assert (tmp_path / "report.pdf").read_bytes().startswith(b"%PDF")

    browse(script)
