"""Which kernels serve a projection on a GPU: the device's dispatch tables, asked once a shape of step."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from loraforge.dispatch.table import Phase, Table, choose, covers, load_steps, load_table
from loraforge.ops.choice import Choice, Kernel
from loraforge.runtime.ranks import Projection

_MIDDLING = 16  # a rank that is assumed where none is known
# where a table answers with an engine's own kernels, which do not read a ragged pool
_FALLBACK: dict[Phase, Choice] = {
    "decode": Choice(Kernel("direct"), Kernel("row_expand")),
    "prefill": Choice(Kernel("triton"), Kernel("triton"), tile=64),
}


class Kernels:
    """The choices of one device.

    A step counts as decode while it has no more tokens than the engine runs requests at once (and than the table's
    last bucket of decode): its adapters then have a few rows each. Longer ones hold prompts.
    """

    def __init__(
        self,
        table: Table,
        requests: int,
        ranks: Mapping[str, int],
        greatest: int,
        steps: Table | None = None,
    ) -> None:
        """requests: that the engine runs at once. ranks: mean live rank by a module's last name, where known. greatest:
        rank that an adapter may have. steps: asked first, where it has the projection and buckets for tokens and rank.
        """
        self.table = table
        self.steps = steps
        self._tables = (table,) if steps is None else (steps, table)
        self._requests = requests
        self._ranks = ranks
        self._greatest = greatest
        self._chosen: dict[tuple[bool, int, tuple[int, ...], int, int], Choice] = {}

    @classmethod
    def of(
        cls, device: torch.device | str, requests: int, ranks: Mapping[str, int], greatest: int
    ) -> Kernels:
        """From the tables that ship for a device."""
        name = torch.cuda.get_device_name(device)
        return cls(load_table(name), requests, ranks, greatest, load_steps(name))

    @property
    def source(self) -> str:
        """The device of the table, and the hashes of what is asked."""
        steps = "" if self.steps is None else f", steps {self.steps.sha256[:12]}"
        return f"{self.table.device} (table {self.table.sha256[:12]}{steps})"

    def choose(self, projection: Projection, tokens: int) -> Choice:
        """For a step of ``tokens`` tokens; any choice gives the same sums.

        What lies in the slots has no part in it: captured graphs keep the choice that they were captured with, and all
        choices are compiled before requests come.
        """
        return self._known(projection, tokens, pair=False)

    def pair(self, projection: Projection, tokens: int) -> Choice:
        """As :meth:`choose`, a shrink and an expand of their own, for a caller that needs Z between them."""
        return self._known(projection, tokens, pair=True)

    def _known(self, projection: Projection, tokens: int, *, pair: bool) -> Choice:
        rank = self._ranks.get(projection.name.rpartition(".")[2], 0)
        key = pair, projection.d_in, projection.channels, tokens, rank
        found = self._chosen.get(key)
        if found is None:  # called for every layer of a step that is not captured
            found = self._chosen[key] = self._choose(*key)
        return found

    def _choose(self, pair: bool, d_in: int, channels: tuple[int, ...], tokens: int, rank: int) -> Choice:
        for table in self._tables:
            phase: Phase = "decode" if tokens <= self._decode(table) else "prefill"
            # where nothing is known of the ranks, steps are asked only if adapters of any rank are within
            if table is self.steps and not covers(
                table, phase, d_in, channels, tokens, rank or self._greatest
            ):
                continue
            mean = rank or min(_MIDDLING, self._greatest)
            for of_two in dict.fromkeys((pair, True)):  # where one kernel is not ours, two may be
                found = choose(table, phase, d_in, channels, tokens, mean, pair=of_two)
                if not found.native:
                    return found
        return _FALLBACK[phase]

    def bounds(self, tokens: int) -> list[int]:
        """Lengths of steps, up to ``tokens``, behind each of which another choice may come."""
        known = {entry.tokens for table in self._tables for entry in table.entries}
        known |= {self._decode(table) for table in self._tables} | {tokens}
        return sorted(bound for bound in known if bound <= tokens)

    def tiles(self) -> set[int]:
        """Heights of segments that a choice may ask for."""
        return {choice.tile for _, _, choice in self._choices()}

    def planes(self, tokens: int) -> int:
        """The most planes times tokens that a choice for up to ``tokens`` tokens may ask for."""
        return max(
            min(tokens, max(bound, tokens if bound == _last(self.table, phase) else 0)) * choice.planes
            for phase, bound, choice in self._choices()
        )

    def _decode(self, table: Table) -> int:
        """The most tokens of a step that counts as decode in a table."""
        return min(self._requests, _last(table, "decode"))

    def _choices(self) -> list[tuple[Phase, int, Choice]]:
        found = [
            (entry.phase, entry.tokens, Choice.from_json(value))
            for table in self._tables
            for entry in table.entries
            for value in (entry.choice, entry.pair)
        ]
        return found + [(phase, _last(self.table, phase), choice) for phase, choice in _FALLBACK.items()]


def _last(table: Table, phase: Phase) -> int:
    return max(entry.tokens for entry in table.entries if entry.phase == phase)
