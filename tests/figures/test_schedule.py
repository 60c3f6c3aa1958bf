"""The drawing of FlashTSQR's schedule: the tree that the kernels walk, and the committed file."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from loraforge.figures import style
from loraforge.figures.schedule import draw, levels, merges

COMMITTED = Path(__file__).resolve().parents[2] / "docs" / "tsqr_schedule.svg"


def test_an_unpaired_node_is_carried_up() -> None:
    assert levels(5) == [
        [(0, 0), (1, 1), (2, 2), (3, 3), (4, 4)],
        [(0, 1), (2, 3), (4, 4)],
        [(0, 3), (4, 4)],
        [(0, 4)],
    ]
    assert [len(merges(levels(5), level)) for level in range(4)] == [5, 2, 1, 1]
    assert levels(1) == [[(0, 0)]]


@pytest.mark.parametrize("leaves", [1, 2, 3, 4, 7, 10, 56])
def test_every_leaf_is_merged_into_the_root_and_slots_are_those_of_the_kernels(leaves: int) -> None:
    tree = levels(leaves)
    assert tree[-1] == [(0, leaves - 1)]
    assert sum(len(merges(tree, level)) for level in range(1, len(tree))) == leaves - 1
    for level, nodes in enumerate(tree):
        # node i of a level lies in slot i << level, so that a carried one is not moved
        assert [first for first, _ in nodes] == [i << level for i in range(len(nodes))]


def test_the_committed_drawing_is_what_the_module_draws(tmp_path: Path) -> None:
    style.save(draw(), tmp_path / "s.svg", tmp_path / "s.png")
    fresh, committed = (words(path) for path in (tmp_path / "s.svg", COMMITTED))
    assert fresh == committed
    assert committed.count("2·M blocks") == 2


def test_it_has_a_background_of_its_own_and_stays_on_the_page() -> None:
    figure = draw()
    with style.styled():
        figure.canvas.draw()
        assert figure.get_facecolor() == (1.0, 1.0, 1.0, 1.0)
        for text in figure.findobj(lambda artist: hasattr(artist, "get_text") and artist.get_text().strip()):
            box = text.get_window_extent()
            assert box.x0 >= figure.bbox.x0, text
            assert box.x1 <= figure.bbox.x1, text
            assert box.y0 >= figure.bbox.y0, text
            assert box.y1 <= figure.bbox.y1, text


def words(path: Path) -> list[str]:
    return [text.strip() for text in ET.parse(path).getroot().itertext() if text.strip()]
