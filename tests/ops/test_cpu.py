"""The operations on the processor against the FP64 reference: compiled for this machine, compiled for any, in torch."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from loraforge import jit, ops
from loraforge.errors import LoraForgeError
from loraforge.ops import Choice, Kernel, cpu, reference
from loraforge.ops import plan as plans
from loraforge.ops.cpu import fallback, native
from loraforge.ops.slots import Slot, SlotTable, bucket

needs_compiler = pytest.mark.skipif(jit.find_compiler(native.COMPILER) is None, reason="no g++ here")
LOAD = jit.load
TOLERANCE = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-10}  # half a spacing and what FP32 sums add


@pytest.fixture(scope="module")
def builds(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The library for this machine, and the one that any x86-64 machine would run."""
    folder = tmp_path_factory.mktemp("kernels")
    flags = jit._FLAGS[native.COMPILER]
    here = jit.build("cpu", folder, kind=native.COMPILER)
    jit._FLAGS[native.COMPILER] = tuple(flag for flag in flags if flag != "-march=native")
    try:
        return {"native": here, "generic": jit.build("cpu", folder, kind=native.COMPILER)}
    finally:
        jit._FLAGS[native.COMPILER] = flags


@pytest.fixture(
    scope="module",
    params=[
        pytest.param("native", marks=needs_compiler),
        pytest.param("generic", marks=needs_compiler),
        "torch",
    ],
)
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    """Runs a test on each way to compute; yields its name."""
    patch = pytest.MonkeyPatch()
    if request.param == "torch":
        patch.setattr(jit, "load", _absent)
    else:
        path = request.getfixturevalue("builds")[request.param]
        patch.setattr(jit, "load", lambda *_, **__: native.ctypes.CDLL(str(path)))
    native.library.cache_clear()
    yield request.param
    patch.undo()
    native.library.cache_clear()


@pytest.fixture
def unpatched(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The library as a user's process finds it, whichever ``backend`` is still set up."""
    monkeypatch.setattr(jit, "load", LOAD.__wrapped__)
    native.library.cache_clear()
    yield
    native.library.cache_clear()


def _absent(*_: object, **__: object) -> None:
    raise LoraForgeError("no compiler")


@dataclass
class Batch:
    """Operands with NaN wherever nothing may be read, and rows wider than what they hold."""

    x: Tensor
    a: Tensor
    b: Tensor
    table: SlotTable
    plan: plans.Plan
    z: Tensor
    y: Tensor
    slices: list[tuple[int, int]]

    @property
    def live(self) -> Tensor:
        return (self.plan.token_slots >= 0) & (self.plan.token_slots < self.table.slots)

    def run(self, op: str) -> None:
        table = self.table.tensor
        if op == "lora":
            cpu.lora(self.x, self.a, self.b, table, self.plan, self.z, self.y, self.slices)
        else:
            cpu.shrink(self.x, self.a, table, self.plan, self.z)
            cpu.expand(self.z, self.b, table, self.plan, self.y, self.slices)


def make(
    ranks: list[list[int]],
    routing: list[int],
    d_in: int,
    channels: list[int],
    *,
    dtype: torch.dtype = torch.bfloat16,
    width: int | None = None,
    tile: int = 16,
    seed: int = 0,
) -> Batch:
    """ranks: of each slot and slice; width: of every row of B, the bucket of its rank by default."""
    generator = torch.Generator().manual_seed(seed)
    slots, pieces, tokens = len(ranks), len(channels), len(routing)
    capacity = max(1, *(rank for mine in ranks for rank in mine))
    table = SlotTable(slots, pieces)
    a_parts, b_parts = [torch.full((3,), torch.nan)], [torch.full((5,), torch.nan)]  # odd offsets
    a_at, b_at = 3, 5
    for slot, mine in enumerate(ranks):
        rows = []
        for rank, count in zip(mine, channels, strict=True):
            columns = max(width, rank) if width is not None else bucket(rank)
            a = torch.full((rank + 1, d_in), torch.nan)  # a dead direction behind the live ones
            a[:rank] = torch.randn(rank, d_in, generator=generator) / d_in**0.5
            b = torch.full((count, columns), torch.nan)
            b[:, :rank] = torch.randn(count, rank, generator=generator)
            rows.append(Slot(a_at, b_at, rank, columns, 0.5 + slot))
            a_parts.append(a.flatten())
            b_parts.append(b.flatten())
            a_at, b_at = a_at + a.numel(), b_at + b.numel()
        table.set(slot, rows)
    plan = plans.empty_plan(tokens, slots, tile)
    plan.token_slots.copy_(torch.tensor(routing, dtype=torch.int32))
    cpu.fill(plan, slots)
    slices, first = [], 2
    for count in channels:
        slices.append((first, count))
        first += count + 1
    x = torch.full((tokens, d_in + 3), torch.nan).to(dtype)[:, 1 : d_in + 1]
    x.copy_(torch.randn(tokens, d_in, generator=generator))
    y = torch.randn(tokens, first + 5, generator=generator).to(dtype)[:, 1 : first + 4]
    z = torch.full((1, tokens, pieces, capacity + 1), torch.nan)
    return Batch(x, torch.cat(a_parts).to(dtype), torch.cat(b_parts).to(dtype), table, plan, z, y, slices)


def check(batch: Batch, op: str) -> None:
    """Run and compare with the reference, and everything that is not to be written with what was there."""
    before, dtype = batch.y.clone(), batch.y.dtype
    whole = torch.as_strided(
        batch.y, (batch.y.shape[0], batch.y.stride(0)), (batch.y.stride(0), 1), 0
    ).clone()
    batch.run(op)
    z = reference.shrink(batch.x, batch.a, batch.table, batch.plan.token_slots, batch.z.shape[3])
    torch.testing.assert_close(batch.z[0].double(), z, atol=2e-5, rtol=2e-5, equal_nan=True)
    want = reference.expand(z, batch.b, batch.table, batch.plan.token_slots, before, batch.slices)
    torch.testing.assert_close(batch.y.double(), want, atol=1e-4, rtol=TOLERANCE[dtype])
    written = torch.zeros_like(batch.y, dtype=torch.bool)
    for token, slot in enumerate(batch.plan.token_slots.tolist()):
        for piece, (first, count) in enumerate(batch.slices if slot >= 0 else []):
            written[token, first : first + count] = batch.table.row(slot, piece).rank > 0
    assert torch.equal(batch.y[~written], before[~written])
    after = torch.as_strided(batch.y, whole.shape, whole.stride(), 0)
    assert torch.equal(after[:, 0], whole[:, 0])
    assert torch.equal(after[:, 1 + batch.y.shape[1] :], whole[:, 1 + batch.y.shape[1] :])


RANK = st.one_of(
    st.sampled_from([0, 1, 2, 3, 4, 5, 7, 8, 9, 16, 17, 31, 32, 33, 64, 65, 128]), st.integers(0, 128)
)


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    slots, pieces = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    ranks = draw(st.lists(st.lists(RANK, min_size=pieces, max_size=pieces), min_size=slots, max_size=slots))
    routing = draw(st.lists(st.integers(-2, slots - 1), min_size=0, max_size=24))
    width = draw(st.sampled_from([None, None, 1, 6, 24, 64, 160]))
    return make(
        ranks,
        routing,
        draw(st.sampled_from([1, 31, 32, 40, 96, 200])),
        draw(st.lists(st.sampled_from([1, 15, 16, 33, 64, 130, 300]), min_size=pieces, max_size=pieces)),
        dtype=draw(st.sampled_from([torch.bfloat16, torch.float16])),
        width=width,
        tile=draw(st.sampled_from([1, 3, 16])),
        seed=draw(st.integers(0, 99)),
    )


@settings(max_examples=60, deadline=None)
@given(batches(), st.sampled_from(["lora", "two"]))
def test_any_batch_is_the_reference(backend: str, batch: Batch, op: str) -> None:
    check(batch, op)


@pytest.mark.parametrize("rank", [300, 1030])
def test_ranks_beyond_every_bucket(backend: str, rank: int) -> None:
    check(make([[rank, 1]], [0] * 19 + [-1], 64, [70, 16]), "lora")


@given(st.lists(st.integers(-2, 8), max_size=80), st.sampled_from([1, 4, 16]))
def test_a_plan_is_that_of_the_reference(backend: str, routing: list[int], tile: int) -> None:
    found, wanted = (plans.empty_plan(len(routing), 7, tile) for _ in range(2))
    for plan in (found, wanted):
        plan.token_slots.copy_(torch.tensor(routing, dtype=torch.int32))
    cpu.fill(found, 7)
    plans.fill_reference(wanted, 7)
    for name in ("order", "segments", "count"):
        assert torch.equal(getattr(found, name), getattr(wanted, name)), name


def many() -> Batch:
    ranks = [[8, 1, 33], [0, 16, 8], [64, 8, 2], [3, 3, 3], [8, 8, 8]]
    return make(ranks, [(7 * t) % 6 - 1 for t in range(45)], 576, [576, 192, 192])


def test_neither_threads_nor_the_batch_change_a_bit(backend: str) -> None:
    if backend == "torch":
        pytest.skip("matrix products of torch make no such promise")
    found = []
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 3, 7, 1):
            torch.set_num_threads(count)
            batch = many()
            batch.run("lora")
            found.append((batch.y, batch.z))
    finally:
        torch.set_num_threads(threads)
    for y, z in found[1:]:
        assert torch.equal(y, found[0][0])
        assert torch.equal(z.nan_to_num(-7), found[0][1].nan_to_num(-7))
    for token in (1, 17, 44):
        alone = many()
        only = torch.full_like(alone.plan.token_slots, plans.BASE)
        only[token] = alone.plan.token_slots[token]
        alone.plan.token_slots.copy_(only)
        cpu.fill(alone.plan, alone.table.slots)
        alone.run("two")
        assert torch.equal(alone.y[token], found[0][0][token])


def test_the_public_op_runs_it(backend: str) -> None:
    batch, direct = many(), many()
    ops.lora(
        *(batch.x, batch.a, batch.b, batch.table.tensor, batch.plan, batch.z, batch.y, batch.slices),
        choice=Choice(Kernel("cpu")),
    )
    direct.run("lora")
    assert torch.equal(batch.y, direct.y)
    split = many()
    ops.lora(
        *(split.x, split.a, split.b, split.table.tensor, split.plan, split.z, split.y, split.slices),
        choice=Choice(Kernel("cpu"), Kernel("cpu")),
    )
    assert torch.equal(split.y, direct.y)


def test_operands_that_do_not_fit_are_refused(backend: str) -> None:
    batch = many()
    with pytest.raises(LoraForgeError, match=r"bfloat16 and torch\.float16"):
        cpu.shrink(batch.x, batch.a.half(), batch.table.tensor, batch.plan, batch.z)
    with pytest.raises(LoraForgeError, match="float32"):
        cpu.shrink(batch.x.float(), batch.a.float(), batch.table.tensor, batch.plan, batch.z)
    with pytest.raises(LoraForgeError, match="2 planes"):
        cpu.expand(
            batch.z.expand(2, -1, -1, -1), batch.b, batch.table.tensor, batch.plan, batch.y, batch.slices
        )
    with pytest.raises(LoraForgeError, match="45 dense rows"):
        cpu.shrink(batch.x.T, batch.a, batch.table.tensor, batch.plan, batch.z)


@needs_compiler
def test_one_openmp_runtime_serves_torch_and_the_library(builds: dict[str, Path]) -> None:
    code = (
        "import torch, ctypes, sys; ctypes.CDLL(sys.argv[1]);"
        "print(len({line.split()[-1] for line in open('/proc/self/maps') if 'omp' in line.rsplit('/', 1)[-1]}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, builds["native"]], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "1"


def test_without_a_compiler_torch_does_the_work_and_says_so_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], unpatched: None
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", os.fspath(tmp_path))
    monkeypatch.setitem(jit._COMPILERS, native.COMPILER, ())
    check(make([[8]], [0, -1, 0], 64, [48]), "lora")
    assert native.instructions() == "torch"
    assert capsys.readouterr().err.count("g++ is not found") == 1
    state = jit.state("cpu", tmp_path, kind=native.COMPILER)
    assert (state["built"], state["buildable"], state["problem"]) == (False, False, None)


def test_torch_and_the_compiled_operations_agree(unpatched: None) -> None:
    if native.instructions() == "torch":
        pytest.skip("no compiler here")
    compiled, plain = many(), many()
    compiled.run("lora")
    fallback.shrink(plain.x, plain.a, plain.table.tensor, plain.plan, plain.z)
    fallback.expand(plain.z, plain.b, plain.table.tensor, plain.plan, plain.y, plain.slices)
    torch.testing.assert_close(compiled.y, plain.y, atol=1e-3, rtol=2.0**-7)
