"""The policies by name: which ranks are floors, what is maximised or cut at, and in which norm."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from loraforge.allocate.objectives import (
    Objective,
    absolute,
    adapter_relative,
    blend,
    module_relative,
    tempered,
)
from loraforge.allocate.threshold import Score, cumulative, frobenius, magnitude, position, ratio
from loraforge.config import Policy

Floor = Literal["u", "max(1, ceil(u / 2))", "1", "1 an adapter"]
Norm = Literal["weights", "activations", "fisher"]
HALF: Floor = "max(1, ceil(u / 2))"
FREE: Floor = "1 an adapter"


@dataclass(frozen=True)
class Uniform:
    """The same share of every nominal rank."""


@dataclass(frozen=True)
class Greedy:
    """Most energy as ``objective`` weighs it."""

    objective: Objective


@dataclass(frozen=True)
class Fair:
    """The highest worst retained share of an adapter."""


@dataclass(frozen=True)
class Cut:
    """Every direction whose ``score`` reaches a threshold, of the fleet or of each adapter's own uniform cost."""

    score: Score
    each_adapter: bool = False


@dataclass(frozen=True)
class Rule:
    """A policy: how it chooses, from which floor (u is the uniform rank), and what its singular values measure.

    A floor of 1 an adapter lets modules go altogether, all but the one with the densest direction.

    ``activations`` means the spectra of dW C^1/2, C being the second moments of a module's inputs; ``fisher`` those
    whose squares are twice the divergence of an adapter's answers from its own: see :mod:`loraforge.activation`.
    """

    choose: Uniform | Greedy | Fair | Cut
    floor: Floor = "1"
    norm: Norm = "weights"


_SQRT = tempered(adapter_relative, 0.5)

RULES: dict[Policy, Rule] = {
    "uniform": Rule(Uniform(), "u"),
    "spectral": Rule(Greedy(absolute), HALF),
    "spectral-nofloor": Rule(Greedy(absolute)),
    "module-relative": Rule(Greedy(module_relative)),
    "adapter-relative": Rule(Greedy(adapter_relative)),
    "adapter-sqrt": Rule(Greedy(_SQRT)),
    "blend": Rule(Greedy(blend({absolute: 0.5, adapter_relative: 0.5}))),
    "fair": Rule(Fair()),
    "activation-uniform": Rule(Uniform(), "u", "activations"),
    "activation": Rule(Greedy(absolute), "1", "activations"),
    "activation-relative": Rule(Greedy(adapter_relative), "1", "activations"),
    "activation-sqrt": Rule(Greedy(_SQRT), "1", "activations"),
    "activation-fair": Rule(Fair(), "1", "activations"),
    "fisher-uniform": Rule(Uniform(), "u", "fisher"),
    "fisher": Rule(Greedy(absolute), "1", "fisher"),
    "fisher-nofloor": Rule(Greedy(absolute), FREE, "fisher"),
    "fisher-relative": Rule(Greedy(adapter_relative), "1", "fisher"),
    "fisher-sqrt": Rule(Greedy(_SQRT), "1", "fisher"),
    "fisher-fair": Rule(Fair(), "1", "fisher"),
    "para": Rule(Cut(magnitude, each_adapter=True)),
    "para-fleet": Rule(Cut(magnitude)),
    "fixed-rank": Rule(Cut(position)),
    "sv-ratio": Rule(Cut(ratio)),
    "sv-cumulative": Rule(Cut(cumulative)),
    "sv-fro": Rule(Cut(frobenius)),
}

# The policy where none is named, by what there is to measure with: of the candidates of its norm, the one that
# evidence/quality_selection ranks first by validation scores. No score of a test split has a say in it.
DEFAULT_POLICY: dict[Norm, Policy] = {
    "weights": "adapter-sqrt",
    "activations": "activation",
    "fisher": "fisher-sqrt",
}
