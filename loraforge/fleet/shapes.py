"""Shape fleets: the paper's two fleets as module shapes and ranks, without weights. NumPy only.

They serve to check constants and to measure speed, never quality. Their spectra are synthetic: drawn from a
pool of measured ones, or from a family of exponentials where no pool is given.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from loraforge.errors import UsageError

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

# spread (standard deviation of the logarithm) of a module's norm between adapters, and within one
_ADAPTER_SPREAD = 0.5
_MODULE_SPREAD = 0.5


@dataclass(frozen=True)
class ShapeFleet:
    """M modules of a fleet without weights: names (adapter, module), and int64 [M] rank, d_in, d_out."""

    name: str
    base_model: str
    names: tuple[tuple[str, str], ...]
    rank: Ints
    d_in: Ints
    d_out: Ints

    @property
    def cost(self) -> Ints:
        """int64 [M], parameters of one direction."""
        return self.d_in + self.d_out

    @property
    def n_parameters(self) -> int:
        return int(self.rank @ self.cost)

    def select(self, index: Ints) -> ShapeFleet:
        """The modules at ``index`` (int64)."""
        names = tuple(self.names[i] for i in index.tolist())
        return ShapeFleet(
            self.name, self.base_model, names, self.rank[index], self.d_in[index], self.d_out[index]
        )


@dataclass(frozen=True)
class _Architecture:
    base_model: str
    layers: int
    hidden: int
    q_out: int
    kv_out: int
    ffn: int

    def modules(self) -> dict[str, tuple[int, int]]:
        """Tail -> (d_in, d_out) of the seven linear maps of a layer."""
        return {
            "self_attn.q_proj": (self.hidden, self.q_out),
            "self_attn.k_proj": (self.hidden, self.kv_out),
            "self_attn.v_proj": (self.hidden, self.kv_out),
            "self_attn.o_proj": (self.q_out, self.hidden),
            "mlp.gate_proj": (self.hidden, self.ffn),
            "mlp.up_proj": (self.hidden, self.ffn),
            "mlp.down_proj": (self.ffn, self.hidden),
        }


@dataclass(frozen=True)
class _Composition:
    architecture: _Architecture
    ranks: tuple[tuple[int, int], ...]  # (adapters, rank)
    absent: frozenset[tuple[int, str]]  # (adapter, tail) that has no LoRA in any layer


_COMPOSITIONS = {
    # Three rank-64 modules are absent in every layer. The paper does not say which; two of k/v and one of q/o,
    # divided between two adapters like this, give all of its parameter, matrix and batch counts.
    "qwen50": _Composition(
        _Architecture("Qwen/Qwen3-4B", layers=36, hidden=2560, q_out=4096, kv_out=1024, ffn=9728),
        ranks=((5, 16), (4, 32), (40, 64), (1, 128)),
        absent=frozenset({(9, "self_attn.q_proj"), (9, "self_attn.k_proj"), (10, "self_attn.v_proj")}),
    ),
    "llama35": _Composition(
        _Architecture("meta-llama/Llama-3.1-8B", layers=32, hidden=4096, q_out=4096, kv_out=1024, ffn=14336),
        ranks=((4, 16), (4, 32), (26, 64), (1, 128)),
        absent=frozenset(),
    ),
}


def shape_fleet(name: str) -> ShapeFleet:
    """The fleet ``qwen50`` (12,492 matrices) or ``llama35`` (7,840). Raises UsageError for another name."""
    composition = _composition(name)
    architecture = composition.architecture
    names: list[tuple[str, str]] = []
    rows: list[tuple[int, int, int]] = []
    ranks = [rank for count, rank in composition.ranks for _ in range(count)]
    for adapter, rank in enumerate(ranks):
        for layer in range(architecture.layers):
            for tail, (d_in, d_out) in architecture.modules().items():
                if (adapter, tail) in composition.absent:
                    continue
                names.append((f"{adapter:02d}-r{rank}", f"model.layers.{layer}.{tail}"))
                rows.append((rank, d_in, d_out))
    rank_, d_in_, d_out_ = np.ascontiguousarray(np.array(rows, dtype=np.int64).T)
    return ShapeFleet(name, architecture.base_model, tuple(names), rank_, d_in_, d_out_)


def repeated_fleet(name: str, adapters: int, rank: int) -> ShapeFleet:
    """A fleet of ``adapters`` alike: rank ``rank`` on all seven maps of every layer of the base of fleet ``name``.

    Raises UsageError for a fleet that does not exist.
    """
    architecture = _composition(name).architecture
    tails = architecture.modules()
    modules = [f"model.layers.{layer}.{tail}" for layer in range(architecture.layers) for tail in tails]
    shapes = np.array(list(tails.values()) * architecture.layers, dtype=np.int64)
    return ShapeFleet(
        f"{architecture.base_model.rpartition('/')[2].lower()}-{adapters}",
        architecture.base_model,
        tuple((f"{adapter:05d}-r{rank}", module) for adapter in range(adapters) for module in modules),
        np.full(adapters * len(modules), rank, dtype=np.int64),
        np.tile(shapes[:, 0], adapters),
        np.tile(shapes[:, 1], adapters),
    )


def _composition(name: str) -> _Composition:
    if name not in _COMPOSITIONS:
        raise UsageError(f"{name!r} is not a shape fleet", remedy=f"choose one of {', '.join(_COMPOSITIONS)}")
    return _COMPOSITIONS[name]


def synthetic_spectra(shapes: ShapeFleet, seed: int, pool: Sequence[Floats] | None = None) -> Floats:
    """Deterministic effective spectra for a shape fleet, float64 [sum of rank], module after module.

    ``pool`` holds measured spectra (each non-increasing, any length and norm). A module draws one of them,
    scaled to unit Frobenius norm and stretched to the module's rank by linear interpolation over relative
    position. Without a pool the shape is ``exp(-t j / r)`` with t uniform in [2, 8]. Norms are log-normal
    between adapters and within each. Say wherever numbers from it appear that the spectra are synthetic, and
    which pool they came from.
    """
    generator = np.random.default_rng(seed)
    adapters = {
        name: index for index, name in enumerate(dict.fromkeys(adapter for adapter, _ in shapes.names))
    }
    owner = np.array([adapters[adapter] for adapter, _ in shapes.names])
    norm = np.exp(
        _ADAPTER_SPREAD * generator.standard_normal(len(adapters))[owner]
        + _MODULE_SPREAD * generator.standard_normal(len(owner))
    )
    position = np.concatenate([(np.arange(r) + 0.5) / r for r in shapes.rank])
    if pool is None:
        rate = generator.uniform(2.0, 8.0, len(owner))
        shape = np.exp(-np.repeat(rate, shapes.rank) * position)
    else:
        shape = _drawn(generator, shapes.rank, pool)
    starts = np.cumsum(shapes.rank) - shapes.rank
    length = np.sqrt(np.add.reduceat(np.square(shape), starts))
    spectra: Floats = shape * np.repeat(norm / length, shapes.rank)
    return spectra


def _drawn(generator: np.random.Generator, ranks: Ints, pool: Sequence[Floats]) -> Floats:
    usable = [spectrum for spectrum in pool if len(spectrum) and spectrum[0] > 0]
    if not usable:
        raise UsageError("the pool of measured spectra holds no spectrum above zero")
    choice = generator.integers(len(usable), size=len(ranks))
    stretched: dict[tuple[int, int], Floats] = {}
    for which, rank in zip(choice.tolist(), ranks.tolist(), strict=True):
        if (which, rank) not in stretched:
            spectrum = usable[which] / usable[which][0]
            at = (np.arange(rank) + 0.5) / rank
            stretched[which, rank] = np.interp(at, (np.arange(len(spectrum)) + 0.5) / len(spectrum), spectrum)
    return np.concatenate([stretched[key] for key in zip(choice.tolist(), ranks.tolist(), strict=True)])
