"""What the launches of the Triton kernels have in common."""

from __future__ import annotations


def launch(warps: int, stages: int, early: int) -> dict[str, int]:
    """Launch options: warps, pipeline stages, and whether the kernel starts while the one before it ends."""
    options = {"num_warps": warps, "num_stages": stages}
    if early:
        options["launch_pdl"] = True
    return options
