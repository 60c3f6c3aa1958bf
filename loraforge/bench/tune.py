"""The tuner: which of our kernels, and which tiles of the engines', are the fastest where. Timing is passed in.

Candidates whose outputs fail their check come without a time and are never chosen. A shrink and an expand are tuned
apart, for each tile of the plan and each number of split-K sums, which a shrink gains by and an expand pays for; the
best pairs then compete with kernels that do both and with the native path, as whole updates, since launches overlap.

What a case has given is kept in a memo under the case and all that competed, so that a stopped run goes on where it
was, and one with other candidates measures anew.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from loraforge.bench.cases import MAX_RANK, Case, Op, Tuned
from loraforge.bench.journal import Memo
from loraforge.bench.native.tiles import TunedTiles
from loraforge.dispatch.table import Entry
from loraforge.errors import LoraForgeError
from loraforge.files import sha256_text
from loraforge.ops.choice import NATIVE, Choice, Kernel

# (operation, case, choices by name) -> microseconds by name; absent where a check failed. The native path is timed
# under NATIVE_NAME beside the choices of operation lora.
Measure = Callable[[Op, Case, Mapping[str, Choice]], Mapping[str, float]]
NATIVE_NAME = "native"
INCUMBENT = "incumbent"  # what has served so far, among the choices of operation lora
Tiles = Mapping[str, int] | None  # of an engine's kernel; None: what the engine itself would take
Options = Mapping[Op, Sequence[Tiles]]
MeasureTiles = Callable[[Op, Case, Sequence[Tiles]], Sequence[float | None]]
_PRODUCTS: tuple[Op, ...] = ("shrink", "expand")
KEEP = 0.98  # the native path is chosen where its time is below this share of ours, and ours where it is below this
# share of the incumbent's: less is noise


@dataclass(frozen=True)
class Candidates:
    """What competes in a phase, for one tile of the plan: shrinks with their planes, expands, and kernels of both.

    ranks: the least and the greatest at which they do.
    """

    tile: int
    shrinks: tuple[tuple[Kernel, int], ...]
    expands: tuple[Kernel, ...]
    both: tuple[tuple[Kernel, int], ...] = ()
    ranks: tuple[int, int] = (1, MAX_RANK)

    def takes(self, rank: int) -> bool:
        """Whether the group competes at a rank."""
        return self.ranks[0] <= rank <= self.ranks[1]


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


def _wide(*shapes: tuple[int, int, int, int, int, int]) -> tuple[Kernel, ...]:
    """Triton shrinks by block_m, block_n, block_k, stages, warps and columns, for more directions than ``narrow``."""
    names = ("block_m", "block_n", "block_k", "stages", "warps", "columns")
    fixed = {"narrow": 16, "early": 1}
    return _kernels("triton", *(dict(zip(names, shape, strict=True)) | fixed for shape in shapes))


LOW, HIGH = (
    (1, 47),
    (24, MAX_RANK),
)  # ranks up to which rows of B fit a thread's registers, and from which it is tight
SLOWER = 2.0  # a number of sums is left out whose best shrink takes so many times as long as the best of all
_SEGMENTED = _planes(_variants("direct", 11), 1, 2, 3, 4) + _planes(_variants("direct", 12, 16), 1, 2, 4)
_DIRECT = Candidates(
    16,
    _planes(_variants("direct", 1), 1) + _planes(_variants("direct", 5, 7), 1, 2, 4) + _SEGMENTED,
    _variants("row_expand", 4, 5, 6, 7, 8, 16),
    _planes(_variants("fused", 405, 505), 1, 4)
    + _planes(_variants("fused", 611), 1, 2, 4)
    + _planes(_variants("fused", 411, 711, 612, 616), 1)
    + _planes(_variants("fused", 612), 2),
    LOW,
)
# few tokens of high ranks: directions and inputs are spread over many small programs
_SPREAD = _wide((16, 32, 256, 3, 4, 12), (16, 16, 256, 4, 4, 24), (16, 64, 128, 4, 4, 6))
_SHORT = _expands(
    (16, 64, 4, 96, 1), (16, 64, 4, 96, 2), (16, 128, 4, 128, 1), (16, 128, 4, 128, 2), (16, 256, 8, 128, 1)
)
_TALL = _expands((32, 128, 4, 96, 1), (32, 128, 4, 96, 2))
_LONG = _expands(
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
)
CANDIDATES: dict[str, tuple[Candidates, ...]] = {
    "decode": (
        _DIRECT,
        Candidates(
            16,
            _planes(_shrinks((16, 32, 256, 3, 1)), 2, 4, 8),
            _expands((16, 128, 4, 80, 1), (16, 128, 4, 80, 2)),
            ranks=LOW,
        ),
        Candidates(
            16,
            _planes(_variants("direct", 12), 1)
            + _planes(_variants("direct", 7, 12, 16), 2, 4, 8)
            + _planes(_SPREAD, 2, 4, 8)
            + _planes(_shrinks((16, 32, 256, 3, 1)), 8),
            _SHORT + _variants("row_expand", 4, 7),
            _planes(_variants("fused", 405, 612), 1, 2, 4),
            HIGH,
        ),
        Candidates(
            64,
            _planes(_shrinks((64, 32, 64, 4, 1), (64, 16, 128, 4, 1)), 4, 8),
            _expands((16, 128, 4, 80, 1)) + _TALL,
            ranks=LOW,
        ),
        Candidates(
            64,
            _planes(_shrinks((64, 16, 128, 4, 1)), 8) + _planes(_wide((64, 64, 64, 4, 4, 3)), 2, 4, 8),
            _expands((16, 128, 4, 128, 1)) + _TALL,
            ranks=HIGH,
        ),
    ),
    "prefill": (
        Candidates(
            16,
            _planes(_variants("direct", 11), 1, 2) + _planes(_variants("direct", 12), 1),
            _variants("row_expand", 4, 6),
            _planes(_variants("fused", 611), 1, 2),
            LOW,
        ),
        Candidates(
            64,
            _planes(_shrinks((64, 32, 128, 3, 1), (16, 32, 256, 3, 1)), 1, 2, 8)
            + _planes(_shrinks((64, 16, 128, 4, 1)), 2, 4, 8)
            + _planes(_shrinks((64, 32, 64, 4, 1)), 8)
            + _planes(_shrinks((32, 32, 128, 3, 3)), 1, 2, 4),
            _LONG,
            ranks=LOW,
        ),
        Candidates(
            64,
            _planes(_shrinks((64, 16, 128, 4, 1)), 4, 8)
            + _planes(_shrinks((64, 32, 128, 3, 1), (32, 32, 128, 3, 3)), 1, 2, 4)
            + _planes(
                _wide((64, 128, 64, 4, 8, 1), (64, 128, 64, 4, 8, 3), (64, 256, 64, 3, 8, 1)), 1, 2, 4, 8
            )
            + _planes(_wide((64, 32, 64, 3, 4, 12), (64, 32, 128, 3, 4, 12)), 1, 2, 4, 8),
            _LONG,
            ranks=HIGH,
        ),
        Candidates(
            128,
            _planes(_wide((128, 128, 64, 4, 8, 1), (128, 128, 64, 4, 8, 3)), 1, 2, 4),
            _expands((64, 128, 4, 168, 1), (64, 128, 4, 168, 2), (64, 128, 4, 168, 4)),
            ranks=HIGH,
        ),
    ),
}
_NARROW = _shrinks((16, 32, 256, 3, 1))
_TWELVE = _wide((16, 32, 256, 3, 4, 12))
_ROWS = _expands((16, 128, 4, 80, 1), (16, 128, 4, 80, 2), (16, 128, 4, 128, 2))
# fewer, for steps of engines: what the table of an H200 takes, and, for mixed ones, segments of 16 rows for the
# decodes, each of which is a segment by itself
STEP_CANDIDATES: dict[str, tuple[Candidates, ...]] = {
    "decode": (
        Candidates(
            16,
            _planes(_variants("direct", 7), 1, 2, 4)
            + _planes(_variants("direct", 11, 12), 2, 4)
            + _planes(_NARROW, 2, 4, 8)
            + _planes(_TWELVE, 2, 4),
            _variants("row_expand", 4, 7, 8) + _ROWS,
            _planes(_variants("fused", 405), 1, 2, 4)
            + _planes(_variants("fused", 505), 1, 4)
            + _planes(_variants("fused", 611), 1, 2, 4)
            + _planes(_variants("fused", 612), 1, 2)
            + _planes(_variants("fused", 616), 1),
        ),
    ),
    "prefill": (
        Candidates(
            16,
            _planes(_variants("direct", 12), 2, 4) + _planes(_NARROW + _TWELVE, 1, 2, 4, 8),
            _variants("row_expand", 4, 7) + _ROWS + _expands((16, 128, 4, 80, 8), (16, 256, 8, 128, 1)),
        ),
        Candidates(
            64,
            _planes(_shrinks((64, 16, 128, 4, 1)), 2, 4, 8)
            + _planes(_NARROW, 1, 2, 8)
            + _planes(_shrinks((64, 32, 128, 3, 1)), 1, 2)
            + _planes(_shrinks((32, 32, 128, 3, 3)), 2, 4)
            + _planes(_shrinks((64, 32, 64, 4, 1)), 8),
            _expands(
                (16, 128, 4, 80, 1),
                (16, 128, 4, 80, 8),
                (32, 128, 4, 96, 1),
                (32, 128, 4, 96, 2),
                (32, 128, 4, 96, 4),
                (64, 64, 4, 128, 4),
                (64, 64, 8, 80, 2),
                (64, 128, 4, 168, 2),
            ),
        ),
    ),
}


def kernels_of(
    tuned: Tuned, candidates: Mapping[str, Sequence[Candidates]] = CANDIDATES
) -> list[tuple[Op, Choice]]:
    """Every candidate of a case that Triton compiles, with each number of planes it may meet."""
    found: dict[str, tuple[Op, Choice]] = {}
    for group in _competing(candidates, tuned):
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
    cases: Iterable[Tuned],
    measure: Measure,
    candidates: Mapping[str, Sequence[Candidates]] = CANDIDATES,
    *,
    memo: Memo | None = None,
    setting: str = "",
    incumbent: Callable[[Case], Choice] | None = None,
) -> Iterator[Entry]:
    """An entry for every case, from the memo where it has it: under the case, what competes, and ``setting``, which
    says whatever else times depend on, the table that ``incumbent`` goes by included.

    Raises LoraForgeError where nothing passes its check, the native path included, and BudgetEnded as the memo does.
    """
    memo = memo or Memo()
    for tuned in cases:
        groups = _competing(candidates, tuned)

        def measured(tuned: Tuned = tuned, groups: Sequence[Candidates] = groups) -> dict[str, Any]:
            held = None if incumbent is None else incumbent(tuned.case)
            return _tune_case(tuned, measure, groups, held).model_dump(mode="json")

        yield Entry.model_validate(memo.recall(_key("entry", tuned.case, groups, setting), measured))


def is_tuned(
    tuned: Tuned,
    memo: Memo,
    candidates: Mapping[str, Sequence[Candidates]] = CANDIDATES,
    *,
    setting: str = "",
) -> bool:
    """Whether :func:`tune` would take the case's entry from the memo."""
    return _key("entry", tuned.case, _competing(candidates, tuned), setting) in memo


FEW_TOKENS = 256  # of a prefill, up to which kernels of decode compete too


def _competing(candidates: Mapping[str, Sequence[Candidates]], tuned: Tuned) -> list[Candidates]:
    groups = list(candidates[tuned.case.phase])
    if tuned.case.phase == "prefill" and tuned.tokens <= FEW_TOKENS:
        groups += [group for group in candidates["decode"] if group not in groups]
    return [group for group in groups if group.takes(tuned.rank) or group.takes(tuned.case.rank)]


def _key(kind: str, case: Case, competing: object, setting: str) -> str:
    return f"{kind} {case.key} {sha256_text(repr((competing, setting)))[:16]}"


def _tune_case(
    tuned: Tuned, measure: Measure, candidates: Sequence[Candidates], incumbent: Choice | None
) -> Entry:
    case = tuned.case
    final: dict[str, Choice] = {} if incumbent is None else {INCUMBENT: incumbent}
    alone: dict[str, float] = {}  # of pairs, the two products one after the other
    for group in candidates:
        for choice, time in _pairs(case, measure, group):
            name = f"pair {len(final)}"
            final[name], alone[name] = choice, time
        for kernel, planes in group.both:
            final[f"both {len(final)}"] = Choice(kernel, None, group.tile, planes)
    times = dict(measure("lora", case, final))
    native = times.pop(NATIVE_NAME, None)
    best, held = _fastest(times), times.get(INCUMBENT)
    if best is not None and held is not None and times[best] >= KEEP * held:
        best = INCUMBENT
    if best is None and native is None:
        raise LoraForgeError("no kernel passes its check", key=case.key, remedy="run loraforge doctor")
    pair = _fastest({name: time for name, time in alone.items() if name in times})
    take_native = best is None or (native is not None and native < KEEP * times[best])
    before = held if native is None else native
    return Entry(
        phase=case.phase,
        d_in=case.projection.d_in,
        channels=case.projection.channels,
        tokens=tuned.tokens,
        adapters=tuned.adapters,
        even=tuned.even,
        rank=tuned.rank,
        choice=(NATIVE if take_native or best is None else final[best]).to_json(),
        pair=(NATIVE if pair is None else final[pair]).to_json(),
        speedup=1.0 if take_native or best is None or before is None else round(before / times[best], 3),
    )


def _pairs(case: Case, measure: Measure, group: Candidates) -> Iterator[tuple[Choice, float]]:
    """The best pair for each number of split-K sums, with microseconds of both products."""
    shrinks = {
        f"shrink {index}": Choice(kernel, group.expands[0], group.tile, planes)
        for index, (kernel, planes) in enumerate(group.shrinks)
    }
    times = measure("shrink", case, shrinks)
    for planes in sorted({choice.planes for choice in shrinks.values()}):
        first = _fastest({name: time for name, time in times.items() if shrinks[name].planes == planes})
        if first is None or times[first] > SLOWER * min(times.values()):
            continue
        chosen = shrinks[first]
        expands = {
            f"expand {index}": Choice(chosen.shrink, kernel, group.tile, chosen.planes)
            for index, kernel in enumerate(group.expands)
        }
        others = measure("expand", case, expands)
        second = _fastest(others)
        if second is not None:
            yield expands[second], times[first] + others[second]


def tune_tiles(
    engine: str,
    cases: Iterable[Case],
    tiles: Mapping[tuple[Op, str], Sequence[Mapping[str, int]]],
    measure: MeasureTiles,
    *,
    memo: Memo | None = None,
    setting: str = "",
) -> list[TunedTiles]:
    """The best tiles of an engine's shrink and expand in every case; the engine's own choice is among those tried.

    measure: microseconds of each, None where a check failed. A case in which nothing passes is left out. memo,
    setting: as in :func:`tune`.
    """
    memo = memo or Memo()
    found: list[TunedTiles] = []
    for case in cases:
        options = _options(case, tiles)

        def measured(case: Case = case, options: Options = options) -> list[dict[str, Any]]:
            return [item.model_dump(mode="json") for item in _tune_tiles(engine, case, options, measure)]

        kept = memo.recall(_key(f"tiles {engine}", case, options, setting), measured)
        found += [TunedTiles.model_validate(item) for item in kept]
    return found


def are_tuned(
    engine: str,
    case: Case,
    tiles: Mapping[tuple[Op, str], Sequence[Mapping[str, int]]],
    memo: Memo,
    *,
    setting: str = "",
) -> bool:
    """Whether :func:`tune_tiles` would take the case's tiles from the memo."""
    return _key(f"tiles {engine}", case, _options(case, tiles), setting) in memo


def _options(case: Case, tiles: Mapping[tuple[Op, str], Sequence[Mapping[str, int]]]) -> Options:
    return {op: [None, *tiles[op, case.phase]] for op in _PRODUCTS}


def _tune_tiles(engine: str, case: Case, options: Options, measure: MeasureTiles) -> list[TunedTiles]:
    found = []
    for op, tried in options.items():
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
