"""The module-tile schedule of FlashTSQR as a drawing (paper, figure 3); no measurement is in it.

python -m loraforge.figures.schedule docs/tsqr_schedule.svg
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loraforge.figures import style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Node = tuple[int, int]  # first and last leaf below
LEAVES = 5
MODULES = (("module 1", 0.0), ("module M", 6.6))  # name, and where its first leaf is drawn
COLOURS = {"leaf": "#b7d3ea", "merge": "#f2c75c", "core": "#d9d9d9"}
CAPTION = (
    "A shaded column is one launch over the tiles of all M modules of one shape and rank. Blue: a block factors, or",
    "applies, a leaf of 256 rows in registers; the last leaf is filled up with zeros (hatched). Yellow: a block merges",
    "two packed r × r triangles. Dashed: a node without a partner is carried to the next level, without work or copy.",
    "Reflectors V stay in the workspace, written on the left and read on the right under the same name, so that Q is",
    "never formed. Grey: the r × r stages, batched over all modules: R with the Gram matrix of the other side, EVD,",
    "and the coefficients c of the directions that are kept.",
)
HALF_WIDTH, HALF_HEIGHT = 0.36, 0.36


def levels(leaves: int) -> list[list[Node]]:
    """Nodes of every level, leaves first: neighbours are merged, and an unpaired last node is carried up as it is."""
    found = [[(leaf, leaf) for leaf in range(leaves)]]
    while len(found[-1]) > 1:
        below = found[-1]
        merged = [(below[i][0], below[i + 1][1]) for i in range(0, len(below) - 1, 2)]
        found.append(merged + below[2 * len(merged) :])
    return found


def merges(tree: list[list[Node]], level: int) -> list[Node]:
    """Nodes of a level that its launch makes; others are carried."""
    return [node for node in tree[level] if level == 0 or node not in tree[level - 1]]


def draw(leaves: int = LEAVES) -> Figure:
    """Two of M modules with ``leaves`` row tiles each: launches from left to right, one a column."""
    tree = levels(leaves)
    top = len(tree) - 1
    up = dict(enumerate(range(top + 1)))  # level -> column
    down = {level: 2 * top + 2 - level for level in up}
    with style.styled():
        figure = style.new_figure(4.7)
        axes = figure.add_subplot()
        axes.axis("off")
        for level in up:
            for column in (up[level], down[level]):
                _launch(axes, column, level, len(merges(tree, level)))
        _launch(axes, top + 1, None, 0)
        _heading(axes, "Factor  X = Q R: up the tree", up[0], up[top])
        _heading(axes, "Apply  Q c: back down", down[top], down[0])
        for name, offset in MODULES:
            _module(axes, tree, up, down, offset)
            axes.text(
                -0.72,
                _height(tree[-1][0]) + offset,
                name,
                rotation=90,
                va="center",
                ha="center",
                weight="bold",
            )
        between = (leaves - 1 + MODULES[1][1]) / 2
        for column in (up[0], top + 1, down[0]):
            axes.text(column, between, "⋮", va="center", ha="center", fontsize=11, color=style.MUTED)
        axes.set_xlim(-0.95, down[0] + 0.55)
        axes.set_ylim(MODULES[1][1] + leaves - 0.3, -3.1)
        style.caption(figure, "\n".join(CAPTION))
        return figure


def _height(node: Node) -> float:
    return (node[0] + node[1]) / 2


def _launch(axes: Axes, column: int, level: int | None, blocks: int) -> None:
    from matplotlib.patches import Rectangle

    start, end = -1.0, MODULES[1][1] + LEAVES - 0.4
    if level is None:
        axes.text(column, -1.25, "core", va="bottom", ha="center")
        return
    axes.add_patch(
        Rectangle((column - 0.45, start), 0.9, end - start, color="#f1f1f1", linewidth=0, zorder=0)
    )
    name = "leaves" if level == 0 else f"level {level}"
    count = "M" if blocks == 1 else f"{blocks}·M"
    axes.text(column, -1.25, f"{name}\n{count} blocks", va="bottom", ha="center", fontsize=6.5)


def _heading(axes: Axes, text: str, first: int, last: int) -> None:
    axes.annotate(
        "",
        (last + 0.45, -2.3),
        (first - 0.45, -2.3),
        arrowprops={"arrowstyle": "->", "color": style.INK, "lw": 0.9},
    )
    axes.text((first + last) / 2, -2.45, text, va="bottom", ha="center", weight="bold")


def _module(
    axes: Axes, tree: list[list[Node]], up: dict[int, int], down: dict[int, int], offset: float
) -> None:
    top = len(tree) - 1
    for level, nodes in enumerate(tree):
        made = merges(tree, level)
        for node in nodes:
            for columns in (up, down):
                x, y = columns[level], _height(node) + offset
                if node in made:
                    _box(
                        axes,
                        x,
                        y,
                        "leaf" if level == 0 else "merge",
                        _name(node),
                        level == 0 and node[1] == LEAVES - 1,
                    )
                else:
                    axes.plot([x - 0.45, x + 0.45], [y, y], **_line(dashed=True))
            for below in (child for child in tree[level - 1] if level and _inside(child, node)):
                carried = below == node
                for columns in (up, down):
                    side = 1 if columns is up else -1
                    one, two = columns[level - 1], columns[level]
                    ends = (
                        one + side * (HALF_WIDTH if below in merges(tree, level - 1) else 0.45),
                        two - side * (0.45 if carried else HALF_WIDTH),
                    )
                    heights = (_height(below) + offset, _height(node) + offset)
                    _arrow(
                        axes, *((ends, heights) if side > 0 else (ends[::-1], heights[::-1])), dashed=carried
                    )
    y = _height(tree[-1][0]) + offset
    _box(axes, top + 1, y, "core", "R → c")
    for first, second in ((up[top], top + 1), (top + 1, down[top])):
        _arrow(axes, (first + HALF_WIDTH, second - HALF_WIDTH), (y, y), dashed=False)


def _inside(child: Node, node: Node) -> bool:
    return node[0] <= child[0] and child[1] <= node[1]


def _name(node: Node) -> str:
    return f"V{node[0]}" if node[0] == node[1] else f"V{node[0]}–{node[1]}"


def _line(*, dashed: bool) -> dict[str, Any]:
    return {
        "color": style.MUTED if dashed else style.INK,
        "linewidth": 0.8,
        "linestyle": (0, (3, 2)) if dashed else "-",
    }


def _arrow(axes: Axes, x: tuple[float, float], y: tuple[float, float], *, dashed: bool) -> None:
    if dashed:
        axes.plot(x, y, **_line(dashed=True))
        return
    axes.annotate(
        "",
        (x[1], y[1]),
        (x[0], y[0]),
        arrowprops={
            "arrowstyle": "->",
            "color": style.INK,
            "lw": 0.8,
            "shrinkA": 0,
            "shrinkB": 0,
            "mutation_scale": 6,
        },
    )


def _box(axes: Axes, x: float, y: float, kind: str, text: str, partial: bool = False) -> None:
    from matplotlib.patches import Rectangle

    corner = (x - HALF_WIDTH, y - HALF_HEIGHT)
    axes.add_patch(
        Rectangle(
            corner,
            2 * HALF_WIDTH,
            2 * HALF_HEIGHT,
            facecolor=COLOURS[kind],
            edgecolor=style.INK,
            linewidth=0.6,
        )
    )
    if partial:  # its last rows are beyond the matrix
        axes.add_patch(
            Rectangle(
                (corner[0], y + HALF_HEIGHT / 2.2), 2 * HALF_WIDTH, HALF_HEIGHT * 1.2 / 2.2, facecolor="white",
                edgecolor=style.INK, linewidth=0.6, hatch="//////",
            )
        )  # fmt: skip
    axes.text(x, y - (0.1 if partial else 0), text, va="center", ha="center", fontsize=6.5)


if __name__ == "__main__":
    style.save(draw(), Path(sys.argv[1]), Path(sys.argv[1]).with_suffix(".png"))
