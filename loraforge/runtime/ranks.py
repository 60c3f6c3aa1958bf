"""Which directions of an adapter are live, and the projections that they are for (paper, sections 5 and A.2)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from loraforge.errors import InputError
from loraforge.export.manifest import ADAPTER_MANIFEST_FILE, load_adapter_manifest

Factors = tuple[Tensor, Tensor]  # A [r, d_in] and B [channels, r], the scale folded into B


@dataclass(frozen=True)
class Projection:
    """One base layer that adapters change, or a fused group of up to three.

    name: the engine's name of it. d_in: input features. channels: output channels of each slice, side by side.
    """

    name: str
    d_in: int
    channels: tuple[int, ...]

    @property
    def slices(self) -> tuple[tuple[int, int], ...]:
        """(first output channel, channels) of each slice."""
        firsts = (sum(self.channels[:piece]) for piece in range(len(self.channels)))
        return tuple(zip(firsts, self.channels, strict=True))


def live_rank(a: Tensor, b: Tensor) -> int:
    """Directions up to the last one that changes anything: those after it have a zero row of A or column of B.

    So a padded export, and an engine's zero-filled buffer, give the rank that they were made from, without a manifest.
    """
    rank = len(a)
    if rank and bool(a[-1].any()) and bool(b[:, -1].any()):
        return rank  # without padding, a look at the last direction is enough
    for row in reversed(torch.nonzero((a != 0).any(1)).flatten().tolist()):
        if bool(b[:, row].any()):
            return int(row) + 1
    return 0


def trim(a: Tensor, b: Tensor) -> Factors | None:
    """Views of the live directions of A [r, d_in] and B [channels, r]; None where there is none."""
    rank = live_rank(a, b)
    return (a[:rank], b[:, :rank]) if rank else None


def check_manifest(folder: Path, ranks: Mapping[str, int]) -> bool:
    """Whether the adapter in ``folder`` has a retained-rank manifest; ``ranks`` are the live ones of its tensors.

    Raises InputError where the two disagree: served ranks must be those that were certified.
    """
    path = folder / ADAPTER_MANIFEST_FILE
    if not path.is_file():
        return False
    declared = {name: module.k for name, module in load_adapter_manifest(path).adapter.modules.items()}
    for name in sorted(declared.keys() | ranks.keys()):
        # fewer live directions than declared happen where the exported dtype cannot hold the smallest
        if ranks.get(name, 0) > declared.get(name, 0) or name not in ranks:
            raise InputError(
                f"the manifest retains {declared.get(name, 0)} directions, the tensors hold {ranks.get(name, 0)}",
                path=path,
                key=name,
                remedy="export the adapter again, or delete the manifest to take ranks from the tensors",
            )
    return True
