"""Dispatch tables: schema, hash, selection between buckets and shapes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from loraforge.dispatch import Entry, Table, choose, load_steps, load_table, steps_path, table_path
from loraforge.dispatch import table as module
from loraforge.dispatch.table import covers
from loraforge.errors import InputError, IntegrityError
from loraforge.ops import NATIVE, Choice, Kernel

DIRECT = Choice(Kernel("direct"), Kernel("row_expand"))
TENSOR = Choice(Kernel("triton"), Kernel("triton"), tile=64, planes=2)
FUSED = Choice(Kernel("fused", {"variant": 3}))


def entry(
    phase: str,
    d_in: int,
    channels: tuple[int, ...],
    tokens: int,
    rank: int,
    choice: Choice,
    adapters: int | None = None,
) -> Entry:
    return Entry.model_validate(
        {
            "adapters": adapters,
            "phase": phase,
            "d_in": d_in,
            "channels": channels,
            "tokens": tokens,
            "rank": rank,
            "choice": choice.to_json(),
            "pair": (DIRECT if choice.expand is None else choice).to_json(),
        }
    )


def table() -> Table:
    return Table.freeze(
        "toy",
        "nothing",
        [
            entry("decode", 2560, (4096, 1024, 1024), 8, 16, FUSED),
            entry("decode", 2560, (4096, 1024, 1024), 8, 64, DIRECT),
            entry("decode", 2560, (4096, 1024, 1024), 256, 16, DIRECT),
            entry("decode", 9728, (2560,), 256, 64, NATIVE),
            entry("decode", 4096, (2560,), 256, 64, DIRECT),
            entry("prefill", 2560, (4096, 1024, 1024), 8192, 64, TENSOR),
        ],
    )


def test_buckets_are_upper_bounds_and_the_last_serves_beyond() -> None:
    shape = (2560, (4096, 1024, 1024))
    assert choose(table(), "decode", *shape, 8, 16) == FUSED
    assert choose(table(), "decode", *shape, 8, 16, pair=True) == DIRECT
    assert choose(table(), "decode", *shape, 1, 17) == DIRECT
    assert choose(table(), "decode", *shape, 8, 128) == DIRECT
    assert choose(table(), "decode", *shape, 9, 1) == DIRECT
    assert choose(table(), "decode", *shape, 100_000, 1) == DIRECT
    assert choose(table(), "prefill", *shape, 1, 1) == TENSOR


def test_adapters_are_told_apart_where_their_number_is_known() -> None:
    shape = (2560, (4096, 1024, 1024))
    cells = [("decode", *shape, 256, rank, choice, some) for rank, choice, some in (
        (16, FUSED, None), (16, DIRECT, 8), (64, TENSOR, None), (64, FUSED, 8)
    )]  # fmt: skip
    found = Table.freeze(
        "toy", "", [*(entry(*cell) for cell in cells), entry("prefill", *shape, 8, 8, TENSOR)]
    )
    assert choose(found, "decode", *shape, 128, 16) == FUSED
    assert choose(found, "decode", *shape, 128, 16, 8) == DIRECT
    assert choose(found, "decode", *shape, 128, 16, 9) == FUSED
    assert choose(found, "decode", *shape, 128, 128, 1) == FUSED
    assert choose(found, "decode", *shape, 128, 128, pair=True) == TENSOR
    with pytest.raises(ValueError, match="one for any"):
        Table.freeze("toy", "", [entry(*cells[1]), entry("prefill", *shape, 8, 8, TENSOR)])


def test_ranks_up_to_twice_their_mean_are_even() -> None:
    shape = (2560, (4096, 1024, 1024))
    cell = entry("decode", *shape, 256, 16, FUSED)
    even = cell.model_copy(update={"even": True, "choice": DIRECT.to_json()})
    few = cell.model_copy(update={"adapters": 8, "choice": TENSOR.to_json()})
    found = Table.freeze("toy", "", [cell, even, few, entry("prefill", *shape, 8, 8, TENSOR)])
    assert choose(found, "decode", *shape, 128, 10, 50, 20) == DIRECT
    assert choose(found, "decode", *shape, 128, 10, 50, 21) == FUSED
    assert choose(found, "decode", *shape, 128, 10) == FUSED, "what is not known is not even"
    assert choose(found, "decode", *shape, 128, 10, 8, 10) == TENSOR
    with pytest.raises(ValueError, match="one for any"):
        Table.freeze("toy", "", [even, entry("prefill", *shape, 8, 8, TENSOR)])


def test_an_unknown_projection_takes_the_nearest_of_as_many_slices() -> None:
    assert choose(table(), "decode", 14336, (4096,), 32, 8) == NATIVE
    assert choose(table(), "decode", 4096, (4096,), 32, 8) == DIRECT
    assert choose(table(), "decode", 4096, (4096, 1024, 1024), 1, 8) == FUSED
    assert choose(table(), "decode", 4096, (14336, 14336), 1, 8) in (FUSED, DIRECT, NATIVE)  # no two slices


def test_a_table_survives_the_disk_and_a_changed_byte_does_not(tmp_path: Path) -> None:
    path = tmp_path / "toy.json"
    table().write(path)
    assert load_table("toy", path) == table()
    value = json.loads(path.read_text())
    value["entries"][0]["tokens"] = 16
    changed = tmp_path / "changed.json"
    changed.write_text(json.dumps(value))
    with pytest.raises(IntegrityError, match="tables are not edited by hand"):
        load_table("toy", changed)


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"choice": {"shrink": {"backend": "magic"}}}, "names no kernel"),
        ({"channels": []}, "at least 1"),
        ({"phase": "warm-up"}, "decode"),
        ({"pair": FUSED.to_json()}, "one kernel"),
        ({"extra": 1}, "not permitted"),
    ],
)
def test_what_is_no_table_is_refused_with_its_place(tmp_path: Path, change: dict, what: str) -> None:
    value = table().model_dump(mode="json")
    value["entries"][2] |= change
    path = tmp_path / "bad.json"
    path.write_text(json.dumps(value))
    with pytest.raises(InputError, match=what) as caught:
        load_table("toy", path)
    assert caught.value.key is not None
    assert caught.value.key.startswith("entries.2")


def test_a_table_serves_both_phases_and_states_a_cell_once() -> None:
    decode = entry("decode", 8, (8,), 8, 8, DIRECT)
    with pytest.raises(ValueError, match="of decode and of prefill"):
        Table.freeze("toy", "", [decode])
    with pytest.raises(ValueError, match="twice"):
        Table.freeze("toy", "", [decode, decode, entry("prefill", 8, (8,), 8, 8, DIRECT)])


def test_shipped_tables_hold_and_a_device_without_one_takes_the_generic() -> None:
    for path in table_path("x").parent.glob("*.json"):
        shipped = load_table("", path)
        assert path in (table_path(shipped.device), steps_path(shipped.device))
        for phase in ("decode", "prefill"):
            assert choose(shipped, phase, 2560, (4096, 1024, 1024), 32, 8).tile >= 16  # type: ignore[arg-type]
    assert load_table("a device of 2040").device == "generic"


def test_a_table_covers_what_it_was_tuned_for_alone() -> None:
    shape = (2560, (4096, 1024, 1024))
    assert covers(table(), "decode", *shape, 8, 64)
    assert covers(table(), "decode", *shape, 256, 16)
    assert not covers(table(), "decode", *shape, 256, 17), "of another bucket of tokens"
    assert not covers(table(), "decode", *shape, 257, 16)
    assert not covers(table(), "decode", 2560, (4096, 1024, 1025), 8, 16)
    assert not covers(table(), "prefill", 9728, (2560,), 8, 16)


def test_a_table_of_steps_is_found_beside_that_of_its_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "FOLDER", tmp_path)
    assert steps_path("A Device 9") == tmp_path / "a-device-9-steps.json"
    assert load_steps("A Device 9") is None
    table().write(steps_path("A Device 9"))
    assert load_steps("A Device 9") == table()
    assert load_steps("A Device 90") is None
    steps_path("A Device 90").write_text("{}")
    with pytest.raises(InputError, match="tune-steps"):
        load_steps("A Device 90")
