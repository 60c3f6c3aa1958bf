"""What the launches of the Triton kernels have in common."""

from __future__ import annotations

from loraforge.errors import LoraForgeError


def launch(warps: int, stages: int, registers: int, early: int) -> dict[str, int]:
    """Launch options: warps, pipeline stages, a bound of registers a thread (0: none), and whether the kernel may start
    while the one before it ends."""
    options = {"num_warps": warps, "num_stages": stages}
    if registers:
        options["maxnreg"] = registers
    if early:
        options["launch_pdl"] = True
    return options


def height(tile: int, block_m: int) -> int:
    """Rows a program takes of segments of ``tile`` rows: ``block_m``, or all of a shorter segment.

    Raises LoraForgeError where that is not a power of two of at least 16 that divides the tile.
    """
    rows = min(tile, block_m)
    if rows < 16 or rows & (rows - 1) or tile % rows:
        raise LoraForgeError(
            f"programs of {rows} rows in segments of {tile}",
            key="tile",
            remedy="plan with tile 16, 32, 64 or 128, and give a block_m that divides it",
        )
    return rows
