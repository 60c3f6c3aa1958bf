"""The tuner, with times that are made up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest

from loraforge.bench.cases import MAX_RANK, PROJECTIONS, Case, Tuned, spread_ranks, sweep, tuning
from loraforge.bench.journal import BudgetEnded, Memo
from loraforge.bench.native.tiles import TunedTiles, lookup, read_tiles, write_tiles
from loraforge.bench.tune import CANDIDATES, Candidates, are_tuned, is_tuned, kernels_of, tune, tune_tiles
from loraforge.errors import InputError, LoraForgeError
from loraforge.ops import Choice, Kernel

CASE = Case(PROJECTIONS[0], "decode", 24, 8, 8, 8)
TUNED = Tuned(CASE, 48, None, 8)
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


def timer(native: float, fused: float, pair: float = 5.0, sums: float = 0.0):
    """Variant 1 and tile limit 4 are the fast ones; each further plane costs an expand ``sums``."""

    def measure(op: str, case: Case, choices: Mapping[str, Choice]) -> dict[str, float]:
        found = {}
        for name, choice in choices.items():
            if op == "shrink":
                found[name] = 4.0 - choice.shrink.options.get("variant", 0)
            elif op == "expand":
                assert choice.expand is not None
                found[name] = float(choice.expand.options.get("tile_limit", 16)) + sums * (choice.planes - 1)
            else:
                faster = choice.shrink.options.get("variant", 0) / 1e4
                found[name] = fused if choice.expand is None else pair - faster
        return found | ({"native": native} if op == "lora" else {})

    return measure


def test_the_best_shrink_and_expand_make_the_pair() -> None:
    (entry,) = tune([TUNED], timer(native=10.0, fused=7.0), GROUPS)
    chosen = Choice.from_json(entry.choice)
    assert chosen == Choice(
        Kernel("direct", {"variant": 1}), Kernel("row_expand", {"tile_limit": 4}), planes=2
    )
    assert Choice.from_json(entry.pair) == chosen
    assert (entry.tokens, entry.adapters, entry.rank, entry.speedup) == (48, None, 8, 2.0)


def test_a_pair_of_fewer_split_k_sums_competes_beside_the_fastest_shrink() -> None:
    (entry,) = tune([TUNED], timer(native=10.0, fused=7.0, sums=3.0), GROUPS)
    assert Choice.from_json(entry.pair) == Choice(
        Kernel("direct"), Kernel("row_expand", {"tile_limit": 4}), planes=1
    )


def test_one_kernel_for_both_or_the_native_path_win_where_they_are_faster() -> None:
    (entry,) = tune([TUNED], timer(native=10.0, fused=4.0), GROUPS)
    assert Choice.from_json(entry.choice) == Choice(Kernel("fused"))
    (entry,) = tune([TUNED], timer(native=4.0, fused=9.0), GROUPS)
    assert Choice.from_json(entry.choice).native
    (entry,) = tune([TUNED], timer(native=4.95, fused=9.0), GROUPS)
    assert not Choice.from_json(entry.choice).native, "1 % is noise"


def test_what_fails_its_check_is_never_chosen() -> None:
    def measure(op: str, case: Case, choices: Mapping[str, Choice]) -> dict[str, float]:
        return {"native": 9.0} if op == "lora" else {}

    (entry,) = tune([TUNED], measure, GROUPS)
    assert Choice.from_json(entry.choice).native
    with pytest.raises(LoraForgeError, match="no kernel passes"):
        list(tune([TUNED], lambda op, case, choices: {}, GROUPS))


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
    tuned = [each.case for each in tuning()]
    assert not reported & {(case.projection, case.phase, case.tokens) for case in tuned}


@pytest.mark.parametrize("mean", [4, 8, 16])
def test_many_adapters_are_tuned_at_ranks_that_spread_around_their_mean(mean: int) -> None:
    ranks = spread_ranks(mean, 40)
    assert sum(ranks) / 40 == pytest.approx(mean, rel=0.1)
    assert min(ranks) == 1
    assert 3 * mean < max(ranks) <= MAX_RANK
    assert len({each.case.key for each in tuning()}) == len(list(tuning()))


def test_a_stopped_run_goes_on_where_it_was(tmp_path) -> None:
    cases = [
        Tuned(replace(CASE, tokens=tokens), bound, None, 8) for tokens, bound in ((2, 4), (6, 12), (24, 48))
    ]
    measured: list[Case] = []

    def measure(op: str, case: Case, choices: Mapping[str, Choice]) -> Mapping[str, float]:
        if op == "lora":
            measured.append(case)
            if len(measured) == 3:
                raise KeyboardInterrupt
        return timer(native=10.0, fused=7.0)(op, case, choices)

    path = tmp_path / "tuned" / "table.jsonl"
    with pytest.raises(KeyboardInterrupt):
        list(tune(cases, measure, GROUPS, memo=Memo(path)))
    with path.open("a") as stream:
        stream.write('{"key": "entry torn')
    memo = Memo(path)
    assert [is_tuned(each, memo, GROUPS) for each in cases] == [True, True, False]
    found = list(tune(cases, measure, GROUPS, memo=memo))
    assert measured == [each.case for each in (*cases, cases[2])], "what was finished is not measured again"
    assert found == list(tune(cases, timer(native=10.0, fused=7.0), GROUPS))
    assert [entry.tokens for entry in found] == [4, 12, 48]


def test_other_candidates_or_another_setting_are_measured_anew(tmp_path) -> None:
    memo = Memo(tmp_path / "table.jsonl")
    list(tune([TUNED], timer(native=10.0, fused=7.0), GROUPS, memo=memo, setting="one"))
    fewer = {"decode": (replace(GROUPS["decode"][0], both=()),)}
    assert is_tuned(TUNED, memo, GROUPS, setting="one")
    assert not is_tuned(TUNED, memo, GROUPS, setting="two")
    assert not is_tuned(TUNED, memo, fewer, setting="one")


def test_when_the_budget_ends_nothing_more_is_measured_and_what_is_known_still_given(tmp_path) -> None:
    path = tmp_path / "table.jsonl"
    first = list(tune([TUNED], timer(native=10.0, fused=7.0), GROUPS, memo=Memo(path)))
    late = Memo(path, budget_s=-1.0)
    assert list(tune([TUNED], timer(native=1.0, fused=1.0), GROUPS, memo=late)) == first
    with pytest.raises(BudgetEnded):
        list(
            tune(
                [replace(TUNED, case=replace(CASE, tokens=6))],
                timer(native=10.0, fused=7.0),
                GROUPS,
                memo=late,
            )
        )


def test_native_tiles_are_taken_up_again(tmp_path) -> None:
    tiles = {(op, "decode"): ({"BLOCK_N": 1},) for op in ("shrink", "expand")}
    memo = Memo(tmp_path / "table.jsonl")
    found = tune_tiles("csgmv", [CASE], tiles, lambda op, case, tried: [2.0, 1.0], memo=memo)  # type: ignore[arg-type]
    memo = Memo(tmp_path / "table.jsonl")
    assert are_tuned("csgmv", CASE, tiles, memo)  # type: ignore[arg-type]
    assert not are_tuned("vllm", CASE, tiles, memo)  # type: ignore[arg-type]
    assert tune_tiles("csgmv", [CASE], tiles, lambda *_: 1 / 0, memo=memo) == found  # type: ignore[arg-type]


def test_candidates_compete_at_their_ranks_alone() -> None:
    groups = {"decode": (replace(GROUPS["decode"][0], ranks=(9, 128)), replace(GROUPS["decode"][0], tile=8))}
    (entry,) = tune([TUNED], timer(native=10.0, fused=7.0), groups)
    assert Choice.from_json(entry.choice).tile == 8


@pytest.mark.parametrize("rank", [1, 4, 16, 32, 48, 64, 128])
def test_every_rank_has_candidates_whose_kernels_take_the_tile_of_their_plan(rank: int) -> None:
    for phase, groups in CANDIDATES.items():
        assert any(group.takes(rank) and group.both for group in groups) or phase == "prefill"
        assert kernels_of(Tuned(replace(CASE, phase=phase), 48, None, rank))  # type: ignore[arg-type]
        for group in groups:
            assert group.shrinks
            assert group.expands
            for kernel in [kernel for kernel, _ in group.shrinks] + list(group.expands):
                rows = kernel.options.get("block_m", group.tile)
                assert group.tile % min(rows, group.tile) == 0
                assert group.tile <= 16 or kernel.backend == "triton"
