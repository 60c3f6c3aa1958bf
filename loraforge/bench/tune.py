"""The tuner: which of our kernels, and which tiles of the engines', are the fastest where. Timing is passed in.

Candidates whose outputs fail their check come without a time and are never chosen. A shrink and an expand are tuned
apart, for each tile of the plan; the best pairs then compete with kernels that do both and with the native path, as
whole updates, since launches of a pair overlap.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from loraforge.bench.cases import TUNED_DECODE, TUNED_PREFILL, Case, Op
from loraforge.bench.native.tiles import TunedTiles
from loraforge.dispatch.table import Entry
from loraforge.errors import LoraForgeError
from loraforge.ops.choice import NATIVE, Choice, Kernel

# (operation, case, choices by name) -> microseconds by name; absent where a check failed. The native path is timed
# under NATIVE_NAME beside the choices of operation lora.
Measure = Callable[[Op, Case, Mapping[str, Choice]], Mapping[str, float]]
NATIVE_NAME = "native"
KEEP_OURS = 0.98  # the native path is chosen where its time is below this share of ours: less is noise


@dataclass(frozen=True)
class Candidates:
    """What competes in a phase, for one tile of the plan: shrinks with their planes, expands, and kernels of both."""

    tile: int
    shrinks: tuple[tuple[Kernel, int], ...]
    expands: tuple[Kernel, ...]
    both: tuple[tuple[Kernel, int], ...] = ()


def _kernels(backend: str, *options: Mapping[str, int]) -> tuple[Kernel, ...]:
    return tuple(Kernel(backend, dict(each)) for each in options)


# variants as kernels/include/loraforge/lora/shrink.cuh and kernels/csrc/lora/{row_expand,fused}.cu number them
def _planes(kernels: Iterable[Kernel], *planes: int) -> tuple[tuple[Kernel, int], ...]:
    return tuple((kernel, count) for kernel in kernels for count in planes)


def _variants(backend: str, *variants: int) -> tuple[Kernel, ...]:
    return _kernels(backend, *({"variant": variant} for variant in variants))


def _shrinks(*shapes: tuple[int, int, int, int, int]) -> tuple[Kernel, ...]:
    """Triton shrinks by block_m, narrow, block_k, stages and columns."""
    names = ("block_m", "narrow", "block_k", "stages", "columns")
    return _kernels("triton", *(dict(zip(names, shape, strict=True)) | {"early": 1} for shape in shapes))


def _expands(*shapes: tuple[int, int, int, int, int]) -> tuple[Kernel, ...]:
    """Triton expands by block_m, block_n, warps, registers and blocks."""
    names = ("block_m", "block_n", "warps", "registers", "blocks")
    return _kernels("triton", *(dict(zip(names, shape, strict=True)) | {"early": 1} for shape in shapes))


_SEGMENTED = _planes(_variants("direct", 11), 1, 2, 3, 4) + _planes(_variants("direct", 12, 16), 1, 2, 4)
_DECODE = Candidates(
    16,
    _planes(_variants("direct", 1), 1) + _planes(_variants("direct", 5, 7), 1, 2, 4) + _SEGMENTED,
    _variants("row_expand", 4, 5, 6, 7, 8, 16),
    _planes(_variants("fused", 405, 505), 1, 4)
    + _planes(_variants("fused", 611), 1, 2, 4)
    + _planes(_variants("fused", 411, 711, 612, 616), 1)
    + _planes(_variants("fused", 612), 2),
)
CANDIDATES: dict[str, tuple[Candidates, ...]] = {
    "decode": (
        _DECODE,
        Candidates(
            16,
            _planes(_shrinks((16, 32, 256, 3, 1)), 4, 8),
            _expands((16, 128, 4, 80, 1), (16, 128, 4, 80, 2)),
        ),
        Candidates(
            64,
            _planes(_shrinks((64, 32, 64, 4, 1), (64, 16, 128, 4, 1)), 8),
            _expands((16, 128, 4, 80, 1), (32, 128, 4, 96, 1), (32, 128, 4, 96, 2)),
        ),
    ),
    "prefill": (
        Candidates(
            16,
            _planes(_variants("direct", 11), 1, 2) + _planes(_variants("direct", 12), 1),
            _variants("row_expand", 4, 6),
            _planes(_variants("fused", 611), 1, 2),
        ),
        Candidates(
            64,
            _planes(_shrinks((64, 32, 128, 3, 1), (16, 32, 256, 3, 1)), 1, 2, 8)
            + _planes(_shrinks((64, 16, 128, 4, 1)), 2, 4, 8)
            + _planes(_shrinks((64, 32, 64, 4, 1)), 8)
            + _planes(_shrinks((32, 32, 128, 3, 3)), 1, 2, 4),
            _expands(
                (64, 64, 4, 128, 4),
                (64, 64, 4, 128, 8),
                (64, 128, 4, 168, 1),
                (64, 128, 4, 168, 2),
                (64, 128, 4, 168, 4),
                (32, 128, 4, 96, 1),
                (32, 128, 4, 96, 2),
                (32, 128, 4, 96, 4),
                (32, 128, 4, 96, 8),
                (16, 128, 4, 80, 1),
                (16, 128, 4, 80, 8),
                (64, 64, 8, 80, 2),
            ),
        ),
    ),
}


def kernels_of(phase: str) -> list[tuple[Op, Choice]]:
    """Every candidate of a phase that Triton compiles, with each number of planes it may meet."""
    found: dict[str, tuple[Op, Choice]] = {}
    for group in CANDIDATES[phase]:
        counts = sorted({planes for _, planes in group.shrinks})
        jobs: list[tuple[Op, Choice]] = [
            ("shrink", Choice(kernel, group.expands[0], group.tile, planes))
            for kernel, planes in group.shrinks
        ]
        jobs += [
            ("expand", Choice(group.shrinks[0][0], kernel, group.tile, planes))
            for kernel in group.expands
            for planes in counts
        ]
        for op, choice in jobs:
            kernel = choice.shrink if op == "shrink" else choice.expand
            if kernel is not None and kernel.backend == "triton":
                found[f"{op} {choice.to_json()}"] = (op, choice)
    return list(found.values())


def tune(
    cases: Iterable[Case],
    measure: Measure,
    candidates: Mapping[str, Sequence[Candidates]] = CANDIDATES,
) -> list[Entry]:
    """An entry for every case. Raises LoraForgeError where nothing passes its check, the native path included."""
    return [_tune_case(case, measure, candidates[case.phase]) for case in cases]


def _tune_case(case: Case, measure: Measure, candidates: Sequence[Candidates]) -> Entry:
    final: dict[str, Choice] = {}
    for group in candidates:
        label = f"{group.tile}"
        shrinks = {
            f"shrink {index}": Choice(kernel, group.expands[0], group.tile, planes)
            for index, (kernel, planes) in enumerate(group.shrinks)
        }
        first = _fastest(measure("shrink", case, shrinks))
        if first is not None:
            chosen = shrinks[first]
            expands = {
                f"expand {index}": Choice(chosen.shrink, kernel, group.tile, chosen.planes)
                for index, kernel in enumerate(group.expands)
            }
            second = _fastest(measure("expand", case, expands))
            if second is not None:
                final[f"pair {label} {len(final)}"] = expands[second]
        for kernel, planes in group.both:
            final[f"both {label} {len(final)}"] = Choice(kernel, None, group.tile, planes)
    times = dict(measure("lora", case, final))
    native = times.pop(NATIVE_NAME, None)
    best = _fastest(times)
    if best is None and native is None:
        raise LoraForgeError("no kernel passes its check", key=case.key, remedy="run loraforge doctor")
    pairs = {name: time for name, time in times.items() if final[name].expand is not None}
    pair = _fastest(pairs)
    take_native = best is None or (native is not None and native < KEEP_OURS * times[best])
    bounds = TUNED_DECODE if case.phase == "decode" else TUNED_PREFILL
    return Entry(
        phase=case.phase,
        d_in=case.projection.d_in,
        channels=case.projection.channels,
        tokens=bounds.get(case.tokens, case.tokens),
        rank=case.rank,
        choice=(NATIVE if take_native or best is None else final[best]).to_json(),
        pair=(NATIVE if pair is None else final[pair]).to_json(),
        speedup=1.0 if take_native or best is None or native is None else round(native / times[best], 3),
    )


def tune_tiles(
    engine: str,
    cases: Iterable[Case],
    tiles: Mapping[tuple[Op, str], Sequence[Mapping[str, int]]],
    measure: Callable[[Op, Case, Sequence[Mapping[str, int] | None]], Sequence[float | None]],
) -> list[TunedTiles]:
    """The best tiles of an engine's shrink and expand in every case; the engine's own choice is among those tried.

    measure: microseconds of each, None where a check failed. A case in which nothing passes is left out.
    """
    found = []
    for case in cases:
        for op in ("shrink", "expand"):
            tried: list[Mapping[str, int] | None] = [None, *tiles[op, case.phase]]
            times = measure(op, case, tried)
            passed = [(time, index) for index, time in enumerate(times) if time is not None]
            if not passed:
                continue
            best, index = min(passed)
            own = times[0] or best
            chosen = tried[index]
            found.append(
                TunedTiles(
                    engine=engine,
                    op=op,
                    phase=case.phase,
                    model=case.projection.model,
                    projection=case.projection.name,
                    tokens=case.tokens,
                    rank=case.capacity,
                    tiles=None if chosen is None else dict(chosen),
                    speedup=round(own / best, 3),
                )
            )
    return found


def _fastest(times: Mapping[str, float]) -> str | None:
    return min(times, key=lambda name: (times[name], name)) if times else None
