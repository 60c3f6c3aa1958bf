"""Reading agrees with PEFT itself: the same modules, ranks, scales and updates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from adapter_folders import MakeAdapter
from safetensors.torch import load_file

from loraforge.files import sha256_file
from loraforge.fleet.peft_io import natural_sorted, open_adapter, open_fleet

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def base() -> Any:
    config = transformers.LlamaConfig(
        vocab_size=40,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    return lambda: transformers.LlamaForCausalLM(config)


@pytest.mark.parametrize(
    "options",
    [
        {"target_modules": ["q_proj", "v_proj"]},
        {"target_modules": ["q_proj", "down_proj"], "use_rslora": True, "lora_alpha": 3},
        {"target_modules": "all-linear", "lora_alpha": 5},
        {"target_modules": r".*\.self_attn\.(q|k)_proj"},
        {"target_modules": ["q_proj", "k_proj"], "layers_to_transform": [0, 2]},
        {"target_modules": ["q_proj"], "layers_to_transform": 1, "layers_pattern": "layers"},
        {
            "target_modules": ["q_proj", "v_proj", "up_proj"],
            "rank_pattern": {
                "layers.1.self_attn.q_proj": 2,
                "q_proj": 6,
                r"model\.layers\.\d\.mlp\.up_proj": 3,
            },
            "alpha_pattern": {"^model.layers.2.self_attn.v_proj": 7, "proj": 9},
        },
        {
            "target_modules": ["q_proj"],
            "rank_pattern": {"layers.[01].self_attn.q_proj": 5},
            "use_rslora": True,
        },
        {"target_modules": ["q_proj", "v_proj"], "exclude_modules": ["layers.1.self_attn.q_proj"]},
        {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    ],
    ids=lambda options: ",".join(str(key) for key in options),
)
@pytest.mark.filterwarnings("ignore")
def test_agrees_with_peft(base: Any, tmp_path: Path, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    lora = peft.LoraConfig(
        **{"r": 4, "lora_alpha": 8, "init_lora_weights": False, "task_type": "CAUSAL_LM"} | options
    )
    model = peft.get_peft_model(base(), lora)
    model.save_pretrained(tmp_path / "a")
    # PEFT sorts the patterns when it saves, and the first that matches wins: what it loads is what counts
    model = peft.PeftModel.from_pretrained(base(), tmp_path / "a", is_trainable=True)
    layers = {
        name.removeprefix("base_model.model."): layer
        for name, layer in model.named_modules()
        if isinstance(layer, peft.tuners.lora.LoraLayer)
    }
    adapter = open_adapter(tmp_path / "a")
    assert {module.name for module in adapter.modules} == set(layers)
    with adapter.reader() as reader:
        for module in adapter.modules:
            layer = layers[module.name]
            assert (module.rank, module.scale) == (
                layer.r["default"],
                pytest.approx(layer.scaling["default"]),
            )
            assert (module.d_out, module.d_in) == tuple(layer.get_base_layer().weight.shape)
            a, b = reader.factors(module)
            torch.testing.assert_close(module.scale * b @ a, layer.get_delta_weight("default"))
    saved = {"base_model.model.lm_head.weight"} if "modules_to_save" in options else set()
    assert set(adapter.passthrough) == saved
    trained = sum(parameter.numel() for name, parameter in model.named_parameters() if "lora_" in name)
    assert adapter.n_parameters == trained


@pytest.mark.filterwarnings("ignore")
def test_biases_pass_through_byte_for_byte(tmp_path: Path) -> None:
    config = transformers.GPT2Config(vocab_size=40, n_embd=32, n_layer=2, n_head=4, n_positions=16)
    lora = peft.LoraConfig(r=4, target_modules=["c_attn"], bias="all", fan_in_fan_out=True)
    model = peft.get_peft_model(transformers.GPT2LMHeadModel(config), lora)
    model.save_pretrained(tmp_path / "a")
    adapter = open_adapter(tmp_path / "a")
    assert (adapter.modules[0].d_in, adapter.modules[0].d_out) == (32, 96)
    stored = load_file(tmp_path / "a" / "adapter_model.safetensors")
    assert set(adapter.passthrough) == {key for key in stored if key.endswith(".bias")} != set()
    with adapter.reader() as reader:
        assert all(torch.equal(reader.tensor(key), stored[key]) for key in adapter.passthrough)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_factors_as_stored(tmp_path: Path, make_adapter: MakeAdapter, dtype: torch.dtype) -> None:
    folder = make_adapter(tmp_path / "a", dtype=dtype)
    adapter = open_adapter(folder)
    stored = load_file(folder / "adapter_model.safetensors")
    for module in adapter.modules:
        a, b = adapter.factors(module)
        assert module.dtype == a.dtype == dtype
        assert torch.equal(a, stored[module.a_key])
        assert torch.equal(b, stored[module.b_key])


def test_adapter_properties(tmp_path: Path, make_adapter: MakeAdapter) -> None:
    adapter = open_adapter(make_adapter(tmp_path / "a", layers=range(12), targets=("q_proj",)))
    assert adapter.name == "a"
    assert adapter.base_model == "tiny/base"
    assert [module.name for module in adapter.modules] == [
        f"model.layers.{i}.self_attn.q_proj" for i in range(12)
    ]
    assert adapter.n_parameters == 12 * 4 * 64
    assert adapter.weights_sha256 == sha256_file(tmp_path / "a" / "adapter_model.safetensors")
    assert open_adapter(tmp_path / "a", name="other").name == "other"


def test_folder_of_adapters_in_natural_order(tmp_path: Path, make_adapter: MakeAdapter) -> None:
    for name in ("a10", "a2", "b"):
        make_adapter(tmp_path / name)
    (tmp_path / "notes").mkdir()
    (tmp_path / "readme.txt").touch()
    assert [adapter.name for adapter in open_fleet([tmp_path])] == ["a2", "a10", "b"]
    assert [adapter.name for adapter in open_fleet([tmp_path / "b", tmp_path / "a2"])] == ["b", "a2"]


def test_natural_order() -> None:
    assert natural_sorted(["l.10.q", "l.9.v", "l.9.q", "a", "10", "9"]) == [
        "9",
        "10",
        "a",
        "l.9.q",
        "l.9.v",
        "l.10.q",
    ]


def test_a_thread_that_reads_on_after_the_block_does_not_hide_what_ended_it(
    tmp_path: Path, make_adapter: MakeAdapter
) -> None:
    adapter = open_adapter(make_adapter(tmp_path / "a"))
    readers = []

    def stop() -> None:
        with adapter.reader() as reader:
            readers.append(reader)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stop()
    a, _ = readers[0].factors(adapter.modules[0])
    assert torch.equal(a, adapter.factors(adapter.modules[0])[0])
