"""What the launches of the Triton kernels have in common."""

from __future__ import annotations


def launch(warps: int, stages: int, registers: int, early: int) -> dict[str, int]:
    """Launch options: warps, pipeline stages, a bound of registers a thread (0: none), and whether the kernel may start
    while the one before it ends."""
    options = {"num_warps": warps, "num_stages": stages}
    if registers:
        options["maxnreg"] = registers
    if early:
        options["launch_pdl"] = True
    return options
