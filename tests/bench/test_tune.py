"""The tuner, with times that are made up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from loraforge.bench.cases import PROJECTIONS, Case, sweep, tuning
from loraforge.bench.native.tiles import TunedTiles, lookup, read_tiles, write_tiles
from loraforge.bench.tune import Candidates, tune, tune_tiles
from loraforge.errors import InputError, LoraForgeError
from loraforge.ops import Choice, Kernel

CASE = Case(PROJECTIONS[0], "decode", 24, 8, 8, 8)
GROUPS = {
    "decode": (
        Candidates(
            16,
            ((Kernel("direct"), 1), (Kernel("direct", {"variant": 1}), 2)),
            (Kernel("row_expand"), Kernel("row_expand", {"tile_limit": 4})),
            ((Kernel("fused"), 1),),
        ),
    )
}


def timer(native: float, fused: float, pair: float = 5.0):
    """Variant 1 and tile limit 4 are the fast ones."""

    def measure(op: str, case: Case, choices: Mapping[str, Choice]) -> dict[str, float]:
        found = {}
        for name, choice in choices.items():
            if op == "shrink":
                found[name] = 4.0 - choice.shrink.options.get("variant", 0)
            elif op == "expand":
                assert choice.expand is not None
                assert choice.planes == 2, "the expand is tuned on the planes of the shrink that won"
                found[name] = float(choice.expand.options.get("tile_limit", 16))
            else:
                found[name] = fused if choice.expand is None else pair
        return found | ({"native": native} if op == "lora" else {})

    return measure


def test_the_best_shrink_and_expand_make_the_pair() -> None:
    (entry,) = tune([CASE], timer(native=10.0, fused=7.0), GROUPS)
    chosen = Choice.from_json(entry.choice)
    assert chosen == Choice(
        Kernel("direct", {"variant": 1}), Kernel("row_expand", {"tile_limit": 4}), planes=2
    )
    assert (entry.tokens, entry.rank, entry.speedup) == (48, 8, 2.0)


def test_one_kernel_for_both_or_the_native_path_win_where_they_are_faster() -> None:
    (entry,) = tune([CASE], timer(native=10.0, fused=4.0), GROUPS)
    assert Choice.from_json(entry.choice) == Choice(Kernel("fused"))
    (entry,) = tune([CASE], timer(native=4.0, fused=9.0), GROUPS)
    assert Choice.from_json(entry.choice).native
    (entry,) = tune([CASE], timer(native=4.95, fused=9.0), GROUPS)
    assert not Choice.from_json(entry.choice).native, "1 % is noise"


def test_what_fails_its_check_is_never_chosen() -> None:
    def measure(op: str, case: Case, choices: Mapping[str, Choice]) -> dict[str, float]:
        return {"native": 9.0} if op == "lora" else {}

    (entry,) = tune([CASE], measure, GROUPS)
    assert Choice.from_json(entry.choice).native
    with pytest.raises(LoraForgeError, match="no kernel passes"):
        tune([CASE], lambda op, case, choices: {}, GROUPS)


def test_native_tiles_compete_with_the_shipped_ones(tmp_path) -> None:
    def measure(op: str, case: Case, tried: Sequence[Mapping[str, int] | None]) -> list[float | None]:
        return [10.0, None, 4.0] if op == "shrink" else [3.0, 5.0, None]

    tiles = {(op, "decode"): ({"BLOCK_N": 1}, {"BLOCK_N": 2}) for op in ("shrink", "expand")}
    found = tune_tiles("csgmv", [CASE], tiles, measure)  # type: ignore[arg-type]
    assert [(item.op, item.tiles, item.speedup) for item in found] == [
        ("shrink", {"BLOCK_N": 2}, 2.5),
        ("expand", None, 1.0),
    ]
    write_tiles(tmp_path / "t.json", found)
    assert read_tiles(tmp_path / "t.json") == found
    chosen = lookup(found, "csgmv")
    assert chosen("shrink", Case(PROJECTIONS[0], "decode", 200, 8, 64, 64)) == {"BLOCK_N": 2}
    assert chosen("shrink", Case(PROJECTIONS[1], "decode", 24, 8, 8, 8)) is None
    assert lookup(found, "vllm")("shrink", CASE) is None


def test_the_nearest_measured_rank_decides_then_the_tokens() -> None:
    def tiles(rank: int, tokens: int) -> TunedTiles:
        return TunedTiles(
            engine="vllm",
            op="expand",
            phase="decode",
            model=CASE.projection.model,
            projection="qkv",
            tokens=tokens,
            rank=rank,
            tiles={"rank": rank, "tokens": tokens},
            speedup=1.0,
        )

    chosen = lookup([tiles(r, t) for r in (8, 64) for t in (24, 96)], "vllm")
    for rank, tokens, wanted in (
        (12, 1, (8, 24)),
        (48, 256, (64, 96)),
        (128, 60, (64, 96)),
        (1, 40, (8, 24)),
    ):
        got = chosen("expand", Case(PROJECTIONS[0], "decode", tokens, 8, rank, rank))
        assert got == {"rank": wanted[0], "tokens": wanted[1]}


def test_a_file_that_is_no_list_of_tiles_is_refused(tmp_path) -> None:
    path = tmp_path / "t.json"
    path.write_text('[{"engine": "csgmv"}]')
    with pytest.raises(InputError, match=r"0\.op"):
        read_tiles(path)


def test_the_tuner_never_sees_a_batch_of_the_reported_sweep() -> None:
    reported = {(work.case.projection, work.case.phase, work.case.tokens) for work in sweep()}
    assert not reported & {(case.projection, case.phase, case.tokens) for case in tuning()}
