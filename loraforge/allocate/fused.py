"""Equal ranks for projections that an engine runs as one: query, key and value; gate and up."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from loraforge.allocate.problem import Floats, Ints, Problem

_GROUPS = {"q_proj": "qkv", "k_proj": "qkv", "v_proj": "qkv", "gate_proj": "gate_up", "up_proj": "gate_up"}


@dataclass(frozen=True)
class Fused:
    """A problem over groups of modules, and the group of each module (``group``, int64 [M])."""

    problem: Problem
    group: Ints
    direction: Ints  # int64 [sum of rank]: the group's direction that each module's direction is part of

    def expand(self, k: Ints) -> Ints:
        """Ranks of groups (int64 [groups]) as ranks of modules, int64 [M]."""
        return k[self.group]

    def gather(self, k: Ints) -> Ints:
        """Ranks of modules (int64 [M]) that are equal within each group, as ranks of groups."""
        found = np.zeros_like(self.problem.rank)
        found[self.group] = k
        return found

    def add(self, values: Floats) -> Floats:
        """Values of modules' directions (float64 [sum of rank]) as sums over each group's directions."""
        sums: Floats = np.bincount(self.direction, values).astype(np.float64)
        return sums


def fuse(problem: Problem) -> Fused:
    """Make one module of those that one adapter has in one fused projection at one nominal rank.

    Its j-th direction holds the j-th of each member: energies add, costs add. Others stay as they are.
    """
    keys = []
    for (adapter, module), rank in zip(problem.names, problem.rank.tolist(), strict=True):
        parent, _, kind = module.rpartition(".")
        keys.append((adapter, f"{parent}.{_GROUPS[kind]}" if kind in _GROUPS else module, rank))
    number = {key: index for index, key in enumerate(dict.fromkeys(keys))}
    group = np.array([number[key] for key in keys], dtype=np.int64)
    rank = np.array([key[2] for key in number], dtype=np.int64)
    cost = np.zeros(len(number), dtype=np.int64)
    np.add.at(cost, group, problem.cost)
    start = np.concatenate(([0], np.cumsum(rank)))[:-1]
    direction = np.repeat(start[group], problem.rank) + problem.place - 1
    energy = np.bincount(direction, weights=np.square(problem.sigma))
    return Fused(Problem([key[:2] for key in number], rank, cost, np.sqrt(energy)), group, direction)
