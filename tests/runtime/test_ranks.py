"""Live ranks from tensors, and their agreement with a manifest."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from adapter_folders import MakeAdapter

from loraforge.allocate.budget import parse_budget
from loraforge.compress import compress
from loraforge.errors import InputError
from loraforge.fleet.peft_io import open_adapter
from loraforge.runtime.ranks import Projection, check_manifest, live_rank, trim


def test_a_padded_adapter_has_the_rank_that_it_was_made_from() -> None:
    a, b = torch.zeros(16, 32), torch.zeros(24, 16)
    a[:5], b[:, :5] = 1.0, 2.0
    assert live_rank(a, b) == 5
    pair = trim(a, b)
    assert pair is not None
    assert torch.equal(pair[1] @ pair[0], b @ a)
    assert pair[0].shape == (5, 32)


def test_a_dead_direction_between_live_ones_stays() -> None:
    a, b = torch.ones(4, 8), torch.ones(8, 4)
    a[1] = 0
    assert live_rank(a, b) == 4


def test_an_untrained_or_empty_adapter_has_rank_zero() -> None:
    assert live_rank(torch.ones(4, 8), torch.zeros(8, 4)) == 0
    assert trim(torch.ones(4, 8), torch.zeros(8, 4)) is None
    assert live_rank(torch.ones(0, 8), torch.ones(8, 0)) == 0


def test_slices_lie_side_by_side() -> None:
    assert Projection("qkv", 8, (6, 2, 2)).slices == ((0, 6), (6, 2), (8, 2))


@pytest.mark.parametrize("layout", ["ragged", "padded"])
def test_exported_tensors_have_the_ranks_of_their_manifest(
    make_adapter: MakeAdapter, tmp_path: Path, layout: str
) -> None:
    source = make_adapter(tmp_path / "fleet" / "one", r=8, dtype=torch.bfloat16)
    make_adapter(tmp_path / "fleet" / "two", r=4, seed=1, dtype=torch.bfloat16)
    compress([tmp_path / "fleet"], parse_budget("1/4"), tmp_path / "out", cache=None)
    folder = tmp_path / "out" / layout / "one"
    adapter = open_adapter(folder)
    ranks = {module.name: live_rank(*adapter.factors(module)) for module in adapter.modules}
    assert check_manifest(folder, ranks)
    assert not check_manifest(source, {})  # no manifest: nothing to disagree with

    name = adapter.modules[0].name
    with pytest.raises(InputError, match=f"{name}.*retains {ranks[name]} directions, the tensors hold 9"):
        check_manifest(folder, {**ranks, name: 9})
    with pytest.raises(InputError, match="retains 0 directions, the tensors hold 1"):
        check_manifest(folder, {**ranks, "model.layers.9.mlp.up_proj": 1})
    del ranks[name]
    with pytest.raises(InputError, match="the tensors hold 0"):
        check_manifest(folder, ranks)
