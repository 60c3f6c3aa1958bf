"""Slots under a budget: the paper's fleets, the three pools, and the command lines that follow."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from adapter_folders import SEVEN, MakeAdapter
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from loraforge.allocate.budget import parse_budget
from loraforge.compress import compress
from loraforge.errors import BudgetError, InputError, UsageError
from loraforge.fleet.shapes import shape_fleet
from loraforge.serving.arms import Arm
from loraforge.serving.engines import command
from loraforge.serving.experiment import Experiment
from loraforge.serving.fleets import engine_config, kv_token_bytes, open_fleets, state
from loraforge.serving.residency import (
    GIB,
    native_slot_bytes,
    ragged_pool_bytes,
    ragged_slots,
    shadow_slot_bytes,
    uniform_slots,
)


def shapes_of(name: str) -> list[tuple[int, int]]:
    fleet = shape_fleet(name)
    unique = dict(
        zip((module for _, module in fleet.names), zip(fleet.d_in, fleet.d_out, strict=True), strict=True)
    )
    return [(int(d_in), int(d_out)) for d_in, d_out in unique.values()]


@pytest.mark.parametrize(("fleet", "gib", "slots"), [("qwen50", 14, 28), ("llama35", 10, 16)])
def test_native_slots_of_the_papers_budgets(fleet: str, gib: int, slots: int) -> None:
    """The paper has 28 and 15 (B.5): Llama's sixteen take 10 GiB to the byte: anything beside them costs one."""
    needs = native_slot_bytes(shapes_of(fleet), 128)
    assert uniform_slots(gib * GIB, needs, 85) == slots
    if fleet == "llama35":
        assert 16 * needs == 10 * GIB
        assert uniform_slots(10 * GIB - 1, needs, 85) == 15


def test_a_slot_by_hand() -> None:
    assert native_slot_bytes([(10, 20), (30, 5)], 8) == 2 * 8 * (10 + 20 + 30 + 5)
    assert shadow_slot_bytes([(10, 20), (30, 5)], 8) == 2 * 8 * (10 + 20 + 30 + 5) + 2 * 8 * (20 + 5)
    with pytest.raises(BudgetError, match=r"budget_gib: one adapter takes 1.000 GiB, the budget is 0.5"):
        uniform_slots(GIB // 2, GIB, 4)


@given(st.lists(st.integers(1, 100), min_size=1, max_size=12), st.integers(1, 800))
def test_any_choice_of_ragged_slots_fits_and_one_more_need_not(needs: list[int], budget: int) -> None:
    if max(needs) > budget:
        with pytest.raises(BudgetError):
            ragged_slots(budget, needs)
        return
    slots = ragged_slots(budget, needs)
    largest = sorted(needs, reverse=True)
    assert sum(largest[:slots]) <= budget
    assert slots == len(needs) or sum(largest[: slots + 1]) > budget
    assert (
        ragged_pool_bytes(budget, slots, needs)
        == sum(largest[:slots])
        == ragged_pool_bytes(None, slots, needs)
    )


@pytest.fixture
def served(tmp_path: Path, make_adapter: MakeAdapter) -> dict[str, Any]:
    """An experiment over a fleet of four adapters and its compressed edition."""
    for seed, rank in enumerate((4, 4, 8, 16)):
        make_adapter(tmp_path / "original" / f"a{seed}", r=rank, targets=SEVEN, seed=seed)
    compress(
        [tmp_path / "original"], parse_budget("1/4"), tmp_path / "spectral", cache=None, policy="spectral"
    )
    (tmp_path / "base").mkdir()
    config = {"num_attention_heads": 4, "hidden_size": 32, "num_hidden_layers": 2, "num_key_value_heads": 2}
    (tmp_path / "base" / "config.json").write_text(json.dumps(config))
    return {
        "experiment": "small",
        "protocol": "cpu",
        "engine": "vllm",
        "python": "env/bin/python",
        "arms": [
            "original_native",
            "original_loraforge",
            "spectral_loraforge",
            "original_native_full",
            "base_only",
        ],
        "points": [{"rate": 1, "requests": 1, "seeds": [1]}],
        "fleets": {
            "f": {
                "base": "base",
                "adapters": {"original": "original", "spectral": "spectral"},
                "port": 8001,
                "context": 64,
                "kv_tokens": 160,
                "vocabulary": {"high": 9, "tokens": {"kind": "fixed", "tokens": 1}},
                "output_tokens": {"kind": "fixed", "tokens": 1},
            }
        },
    }


def test_what_arms_are_started_with(tmp_path: Path, served: dict[str, Any]) -> None:
    per_rank = sum(
        sum(pair) for pair in ((32, 32), (32, 16), (32, 16), (32, 32), (32, 48), (32, 48), (48, 32))
    )
    slot = 2 * 16 * 2 * per_rank  # bytes of two layers at rank 16
    served["fleets"]["f"]["budget_gib"] = 2.5 * slot / GIB
    experiment = Experiment.model_validate(served)
    fleet = open_fleets(experiment, tmp_path)["f"]
    found = {name: state(experiment, fleet, Arm.parse(name)) for name in experiment.arms}
    assert (found["original_native"].slots, found["original_native"].max_rank) == (2, 16)
    assert found["original_native_full"].slots == 4
    assert found["base_only"].slots is None
    ragged = found["original_loraforge"]  # ranks 4 + 4 + 8 + 16 of the 2 * 16 that two native slots have
    assert (ragged.slots, ragged.pool) == (4, "ragged")
    assert ragged.pool_bytes == sum(fleet.weights["original"].live_bytes.values())
    assert ragged.pool_bytes <= 1.05 * 2 * slot
    spectral = found["spectral_loraforge"]
    assert spectral.pool_bytes is not None
    assert spectral.pool_bytes <= 0.35 * ragged.pool_bytes

    served["fleets"]["f"]["max_rank"] = 64
    wider = open_fleets(Experiment.model_validate(served), tmp_path)["f"]
    assert state(experiment, wider, Arm.parse("spectral_loraforge")).max_rank == 64
    del served["fleets"]["f"]["max_rank"]
    served["pool"] = "shadow"
    shadow = state(Experiment.model_validate(served), fleet, Arm.parse("original_loraforge"))
    assert (shadow.slots, shadow.pool, shadow.pool_bytes) == (1, "shadow", None)


def test_command_lines_and_environments_of_arms(tmp_path: Path, served: dict[str, Any]) -> None:
    served |= {"extra": ["--enforce-eager"], "env": {"A": "1"}}
    experiment = Experiment.model_validate(served)
    fleet = open_fleets(experiment, tmp_path)["f"]

    def started(name: str, experiment: Experiment = experiment) -> tuple[str, dict[str, str]]:
        arm = Arm.parse(name)
        config = engine_config(
            experiment, fleet, arm, state(experiment, fleet, arm), tmp_path, tmp_path / "counters.json"
        )
        return " ".join(command(config)), config.env

    line, env = started("spectral_loraforge")
    assert line.startswith(f"{tmp_path}/env/bin/python -m vllm")
    assert (
        "--num-gpu-blocks-override 10 --kv-cache-memory-bytes 20480 " in line
    )  # 160 * 2 * 2 * 2 * 2 * 8 bytes
    assert (
        "--max-loras 4 --max-lora-rank 8 --max-cpu-loras 4 --lora-target-modules down_proj gate_proj k_p"
        in line
    )
    assert f"a0={tmp_path}/spectral/padded/a0 " in line
    options = json.loads(line.partition("--additional-config ")[2])
    assert options["loraforge_pool"] == "ragged"
    assert options["loraforge_pool_bytes"] == sum(fleet.weights["spectral"].live_bytes.values())
    assert options["loraforge_ranks"].keys() == {"qkv_proj", "o_proj", "gate_up_proj", "down_proj"}
    assert 1 <= options["loraforge_ranks"]["qkv_proj"] <= 4
    assert env == {"A": "1", "LORAFORGE_VLLM": "1", "LORAFORGE_COUNTERS": str(tmp_path / "counters.json")}

    line, env = started("original_native")
    assert "--additional-config" not in line
    assert env["LORAFORGE_VLLM"] == "native"
    line, env = started("base_only")
    assert "--enable-lora" not in line
    assert env["LORAFORGE_VLLM"] == "0"
    deferred = Experiment.model_validate(served | {"decode_steps": 4})
    line, env = started("base_only", deferred)
    assert line.endswith('--enforce-eager --additional-config {"loraforge_decode_steps": 4}')
    assert env["LORAFORGE_VLLM"] == "native"

    sglang = Experiment.model_validate(served | {"engine": "sglang"})
    line, env = started("original_loraforge", sglang)
    assert "--max-loras-per-batch 5 --max-lora-rank 16 " in line
    assert "--lora-backend loraforge " in line
    ranks = json.loads(env.pop("LORAFORGE_RANKS"))
    assert ranks.keys() == {"qkv_proj", "o_proj", "gate_up_proj", "down_proj"}
    assert env == {
        "A": "1",
        "LORAFORGE_SGLANG": "1",
        "LORAFORGE_POOL": "ragged",
        "LORAFORGE_POOL_BYTES": str(sum(fleet.weights["original"].live_bytes.values())),
        "LORAFORGE_COUNTERS": str(tmp_path / "counters.json"),
    }
    line, env = started("original_native", sglang)
    assert "--lora-backend csgmv " in line
    assert env.keys() == {"A", "LORAFORGE_SGLANG", "LORAFORGE_COUNTERS"}
    assert env["LORAFORGE_SGLANG"] == "native"
    assert started("base_only", sglang)[1]["LORAFORGE_SGLANG"] == "0"


def test_a_schedule_is_the_same_in_every_arm(tmp_path: Path, served: dict[str, Any]) -> None:
    """Deferral is SGLang's own; traces and early ends are the plugin's, which then is there for the base model too."""
    served["fleets"]["f"]["cap_tokens"] = 9
    served |= {"engine": "sglang", "decode_steps": 4, "stops": ["early", "exact"], "trace": True}
    experiment = Experiment.model_validate(served)
    fleet = open_fleets(experiment, tmp_path)["f"]
    trace = tmp_path / "trace.jsonl"
    for name, said in (("spectral_loraforge", "1"), ("original_native", "native"), ("base_only", "native")):
        arm = Arm.parse(name)
        its = engine_config(
            experiment, fleet, arm, state(experiment, fleet, arm), tmp_path, tmp_path / "counters.json", trace
        )
        assert its.extra[-2:] == ("--prefill-decode-interval", "4")
        assert its.env["LORAFORGE_SGLANG"] == said
        assert its.env["LORAFORGE_ADMISSION_TRACE"] == str(trace)
        assert its.env["LORAFORGE_EARLY_STOP"] == "1"
    vllm = Experiment.model_validate(served | {"engine": "vllm", "stops": None})
    arm = Arm.parse("base_only")
    its = engine_config(
        vllm, fleet, arm, state(vllm, fleet, arm), tmp_path, tmp_path / "counters.json", trace
    )
    assert json.loads(its.extra[-1]) == {"loraforge_admission_trace": str(trace), "loraforge_decode_steps": 4}
    assert its.env["LORAFORGE_VLLM"] == "native"


def test_where_not_all_adapters_fit_in_sglang_the_base_model_has_no_room_of_its_own(
    tmp_path: Path, served: dict[str, Any]
) -> None:
    """The pool holds the largest adapters of as many slots: a batch without the base model takes them all."""
    served |= {"engine": "sglang"}
    fleet = open_fleets(Experiment.model_validate(served), tmp_path)["f"]
    needs = sorted(fleet.weights["original"].live_bytes.values(), reverse=True)
    served["fleets"]["f"]["budget_gib"] = (sum(needs[:2]) + 1) / GIB
    experiment = Experiment.model_validate(served)
    some = state(experiment, open_fleets(experiment, tmp_path)["f"], Arm.parse("original_loraforge"))
    assert (some.slots, some.pool_bytes) == (2, sum(needs[:2]))
    whole = state(experiment, fleet, Arm.parse("original_loraforge_full"))
    assert (whole.slots, whole.pool_bytes) == (5, sum(needs))


def test_several_names_of_an_adapter_take_room_each(tmp_path: Path, served: dict[str, Any]) -> None:
    served |= {"arms": ["spectral_loraforge", "spectral_loraforge_x3"], "engine": "sglang"}
    experiment = Experiment.model_validate(served)
    fleet = open_fleets(experiment, tmp_path)["f"]
    one, three = (state(experiment, fleet, Arm.parse(name)) for name in experiment.arms)
    assert one.pool_bytes is not None
    assert (three.slots, three.pool_bytes) == (13, 3 * one.pool_bytes)
    config = engine_config(
        experiment, fleet, Arm.parse("spectral_loraforge_x3"), three, tmp_path, tmp_path / "counters.json"
    )
    assert config.lora is not None
    assert [name for name in config.lora.adapters if name.startswith("a0")] == ["a0~0", "a0~1", "a0~2"]
    assert len(set(config.lora.adapters.values())) == 4


@pytest.mark.parametrize(
    "name", ["spectral_loraforge_x1", "spectral_loraforge_x03", "base_only_x2", "x", "base_only_full"]
)
def test_names_that_are_no_arm(name: str) -> None:
    with pytest.raises(UsageError, match="is no arm"):
        Arm.parse(name)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"stops": ["early", "exact"]}, "stop early is for SGLang"),
        ({"engine": "sglang", "stops": ["early", "early"]}, "names stop early twice"),
        ({"engine": "sglang", "stop": "early"}, "fleet f needs a cap_tokens of at least 1"),
        ({"stops": ["exact", "natural"]}, "exact repeats natural lengths, which have to precede it"),
        (
            {"stops": ["natural", "exact"], "lengths_of": "uniform_native"},
            "repeats the lengths of uniform_native",
        ),
    ],
)
def test_ways_to_end_that_make_no_sense(
    served: dict[str, Any], changed: dict[str, Any], message: str
) -> None:
    served["arms"] = ["spectral_loraforge"]
    with pytest.raises(ValidationError, match=message):
        Experiment.model_validate(served | changed)


def test_a_base_without_the_numbers_of_its_kv_cache(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"num_attention_heads": 4}')
    with pytest.raises(InputError, match=r"config.json: has no 'hidden_size'; leave kv_tokens out"):
        kv_token_bytes(tmp_path)


def test_names_to_serve(tmp_path: Path, served: dict[str, Any]) -> None:
    served["fleets"]["f"]["only"] = ["a3", "a1"]
    fleet = open_fleets(Experiment.model_validate(served), tmp_path)["f"]
    assert fleet.adapters == ("a3", "a1")
    served["fleets"]["f"]["only"] = ["a9"]
    with pytest.raises(InputError, match=r"original: only: has no adapter 'a9'"):
        open_fleets(Experiment.model_validate(served), tmp_path)
