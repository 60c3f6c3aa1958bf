"""Every bad adapter gives one InputError (exit 3) that names the file, the key and the remedy."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from adapter_folders import MakeAdapter, write_adapter
from safetensors.torch import load_file, save_file

from loraforge.errors import InputError
from loraforge.fleet.options import ReadOptions
from loraforge.fleet.peft_io import open_adapter, open_fleet

Q0 = "base_model.model.model.layers.0.self_attn.q_proj"


def refused(call: Callable[[], object], message: str) -> None:
    with pytest.raises(InputError) as caught:
        call()
    assert str(caught.value) == message
    assert caught.value.exit_code == 3


def edit_tensors(folder: Path, edit: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / "adapter_model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "adapter_model.safetensors")


def edit_config(folder: Path, **changes: object) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    return write_adapter(tmp_path / "a")


def test_missing_weights(adapter: Path) -> None:
    weights = adapter / "adapter_model.safetensors"
    weights.unlink()
    refused(
        lambda: open_adapter(adapter), f"{weights}: file not found; save the adapter with PEFT as safetensors"
    )


@pytest.mark.parametrize("keep", [0, 5, 200, -1])
def test_truncated_weights(adapter: Path, keep: int) -> None:
    weights = adapter / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:keep])
    with pytest.raises(InputError) as caught:
        open_adapter(adapter)
    assert str(caught.value).startswith(f"{weights}: not a whole safetensors file (")
    assert str(caught.value).endswith("; download or save it again")
    assert caught.value.exit_code == 3


def test_pickle_is_refused_and_never_opened(adapter: Path) -> None:
    (adapter / "adapter_model.safetensors").unlink()
    pickle = adapter / "adapter_model.bin"
    pickle.write_bytes(b"cposix\nsystem\n(S'touch " + str(adapter / "ran").encode() + b"'\ntR.")
    refused(
        lambda: open_adapter(adapter),
        f"{pickle}: is a pickle checkpoint, which can run code when opened; pass --allow-pickle to read its "
        "tensors and nothing else, or convert it to safetensors where you trust it: "
        "PeftModel.from_pretrained(base, folder).save_pretrained(folder, safe_serialization=True)",
    )
    with pytest.raises(InputError, match="not an uncompressed archive"):
        open_adapter(adapter, options=ReadOptions(allow_pickle=True))
    assert not (adapter / "ran").exists()


def test_mismatched_base_models(tmp_path: Path, make_adapter: MakeAdapter) -> None:
    one, two = make_adapter(tmp_path / "a", base="org/one"), make_adapter(tmp_path / "b", base="org/two")
    refused(
        lambda: open_fleet([one, two]),
        f"{two / 'adapter_config.json'}: base_model_name_or_path: base model is 'org/two', but {one} has 'org/one'; "
        "compress adapters of one base model at a time",
    )


def test_config_missing(adapter: Path) -> None:
    (adapter / "adapter_config.json").unlink()
    refused(lambda: open_adapter(adapter), f"{adapter / 'adapter_config.json'}: file not found")


def test_config_without_rank(adapter: Path) -> None:
    path = adapter / "adapter_config.json"
    config = json.loads(path.read_text())
    del config["r"]
    path.write_text(json.dumps(config))
    refused(lambda: open_adapter(adapter), f"{path}: r: missing; state the adapter's rank as PEFT does")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"r": 0}, "r: must be a positive integer, not 0"),
        ({"r": "4"}, "r: must be a positive integer, not '4'"),
        ({"lora_alpha": None}, "lora_alpha: must be a number, not None"),
        (
            {"peft_type": "IA3"},
            "peft_type: is 'IA3': its update is not one product of two thin matrices a module; "
            "LORA, ADALORA, VERA, LOHA, LOKR can be compressed",
        ),
        (
            {"use_dora": True},
            "use_dora: cannot be truncated exactly: DoRA magnitudes are tied to the full update",
        ),
        (
            {"init_lora_weights": "pissa_niter_4"},
            "init_lora_weights: 'pissa_niter_4' changes the base weights; save it with PEFT's "
            "path_initial_model_for_weight_conversion, which makes it plain LoRA",
        ),
        ({"rank_pattern": ["q_proj"]}, "rank_pattern: not a JSON object"),
        (
            {"alpha_pattern": {"(": 2}},
            "alpha_pattern: '(.*\\\\.)?(()' is not a regular expression "
            "(missing ), unterminated subpattern at position 7)",
        ),
    ],
)
def test_bad_option(adapter: Path, change: dict[str, object], message: str) -> None:
    edit_config(adapter, **change)
    refused(lambda: open_adapter(adapter), f"{adapter / 'adapter_config.json'}: {message}")


def test_config_is_not_json(adapter: Path) -> None:
    path = adapter / "adapter_config.json"
    path.write_text("{'r': 4}")
    refused(
        lambda: open_adapter(adapter),
        f"{path}: not valid JSON at line 1: Expecting property name enclosed in double quotes",
    )


def test_factor_shapes_disagree(adapter: Path) -> None:
    edit_tensors(adapter, lambda tensors: tensors.update({f"{Q0}.lora_B.weight": torch.zeros(32, 3)}))
    refused(
        lambda: open_adapter(adapter),
        f"{adapter / 'adapter_model.safetensors'}: {Q0}.lora_B.weight: shapes of module "
        "model.layers.0.self_attn.q_proj disagree: lora_A is [4, 32], lora_B is [32, 3]; "
        "lora_A must be [r, d_in] and lora_B [d_out, r]",
    )


def test_rank_disagrees_with_config(adapter: Path) -> None:
    edit_config(adapter, rank_pattern={"layers.0.self_attn.q_proj": 8})
    refused(
        lambda: open_adapter(adapter),
        f"{adapter / 'adapter_model.safetensors'}: {Q0}.lora_A.weight: rank of module "
        "model.layers.0.self_attn.q_proj is 4, but adapter_config.json gives it 8; "
        "make r or rank_pattern agree with the tensors",
    )


def test_rank_above_dimensions(tmp_path: Path, make_adapter: MakeAdapter) -> None:
    folder = make_adapter(tmp_path / "a", r=20, targets=("v_proj",))
    refused(
        lambda: open_adapter(folder),
        f"{folder / 'adapter_model.safetensors'}: {Q0.replace('q_proj', 'v_proj')}.lora_A.weight: rank 20 of module "
        "model.layers.0.self_attn.v_proj exceeds min(d_in, d_out) = 16; train with a smaller r, or leave this "
        "adapter out",
    )


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("side", ["A", "B"])
def test_not_finite(adapter: Path, side: str, value: float) -> None:
    key = f"{Q0}.lora_{side}.weight"
    edit_tensors(adapter, lambda tensors: tensors[key].view(-1).__setitem__(7, value))
    opened = open_adapter(adapter)
    module = next(module for module in opened.modules if module.name == Q0.removeprefix("base_model.model."))
    refused(
        lambda: opened.factors(module),
        f"{adapter / 'adapter_model.safetensors'}: {key}: holds NaN or infinite values; "
        "the training run diverged: retrain, or leave this adapter out",
    )


def test_zero_b_is_valid(tmp_path: Path, make_adapter: MakeAdapter) -> None:
    opened = open_adapter(make_adapter(tmp_path / "a", zero_b=True))
    assert all(not opened.factors(module)[1].any() for module in opened.modules)


def test_b_without_a(adapter: Path) -> None:
    edit_tensors(adapter, lambda tensors: tensors.pop(f"{Q0}.lora_A.weight"))
    refused(
        lambda: open_adapter(adapter),
        f"{adapter / 'adapter_model.safetensors'}: {Q0}.lora_B.weight: module model.layers.0.self_attn.q_proj has "
        "lora_B but no lora_A; the file is incomplete: save the adapter again",
    )


@pytest.mark.parametrize(
    ("key", "message"),
    [
        (
            "base_model.model.model.layers.0.self_attn.q_proj.hada_w1_a",
            "unknown module: neither a LoRA factor nor a tensor that adapter_config.json says is saved; "
            "save the adapter with PEFT, or list the module in modules_to_save",
        ),
        (
            f"{Q0}.bias",
            "unknown module: neither a LoRA factor nor a tensor that adapter_config.json says is saved; "
            "save the adapter with PEFT, or list the module in modules_to_save",
        ),
        (
            f"{Q0}.lora_magnitude_vector",
            "cannot be truncated exactly: a DoRA magnitude is tied to the full update",
        ),
        (
            "base_model.model.model.embed_tokens.lora_embedding_A",
            "module model.embed_tokens has lora_A but no lora_B; the file is incomplete: save the adapter again",
        ),
        (
            f"{Q0}.lora_A.bias",
            "cannot be truncated exactly: a bias of lora_A goes through lora_B",
        ),
        (
            f"{Q0}.lora_B.bias",
            "shape [4] is not that of a bias of 32 outputs",
        ),
    ],
)
def test_unknown_tensor(adapter: Path, key: str, message: str) -> None:
    edit_tensors(adapter, lambda tensors: tensors.update({key: torch.ones(4)}))
    refused(lambda: open_adapter(adapter), f"{adapter / 'adapter_model.safetensors'}: {key}: {message}")


def test_untargeted_module(adapter: Path) -> None:
    edit_config(adapter, target_modules=["v_proj"])
    refused(
        lambda: open_adapter(adapter),
        f"{adapter / 'adapter_model.safetensors'}: {Q0}.lora_A.weight: unknown module: adapter_config.json does not "
        "target model.layers.0.self_attn.q_proj; make target_modules and the tensors agree",
    )


def test_factor_in_another_form(adapter: Path) -> None:
    edit_tensors(adapter, lambda tensors: tensors.update({f"{Q0}.lora_A.weight": torch.zeros(4, 32, 1, 1)}))
    weights = adapter / "adapter_model.safetensors"
    key = f"{Q0}.lora_A.weight"
    refused(
        lambda: open_adapter(adapter), f"{weights}: {key}: shape [4, 32, 1, 1] is not that of a LoRA matrix"
    )
    edit_tensors(adapter, lambda tensors: tensors.update({key: torch.zeros(4, 32, dtype=torch.int8)}))
    refused(
        lambda: open_adapter(adapter),
        f"{weights}: {key}: stored as I8; only F64, F32, BF16, F16 can be factorised; "
        "save the adapter in bfloat16 or wider",
    )


def test_no_factor_at_all(tmp_path: Path, make_adapter: MakeAdapter) -> None:
    folder = make_adapter(tmp_path / "a", layers=())
    refused(
        lambda: open_adapter(folder),
        f"{folder / 'adapter_model.safetensors'}: holds no LoRA factor; check that it is a PEFT LoRA adapter",
    )


def test_duplicate_names(tmp_path: Path, make_adapter: MakeAdapter) -> None:
    one, two = make_adapter(tmp_path / "x" / "a"), make_adapter(tmp_path / "y" / "a")
    refused(
        lambda: open_fleet([one, two]),
        f"{two}: two adapters are named 'a' (the other is {one}); rename one of the folders",
    )
    refused(lambda: open_fleet([tmp_path / "x", one]), f"{one}: is named twice; name it once")


def test_empty_folder(tmp_path: Path) -> None:
    refused(
        lambda: open_fleet([tmp_path]),
        f"{tmp_path}: no PEFT adapter found; each adapter is a folder with adapter_config.json and "
        "adapter_model.safetensors",
    )
    remedy = "name a PEFT adapter folder or a folder of them"
    refused(lambda: open_fleet([tmp_path / "no"]), f"{tmp_path / 'no'}: folder not found; {remedy}")
    (tmp_path / "file").touch()
    refused(lambda: open_fleet([tmp_path / "file"]), f"{tmp_path / 'file'}: is not a folder; {remedy}")
    refused(lambda: open_fleet([]), "the fleet is empty; name at least one PEFT adapter folder")


@pytest.mark.parametrize(
    ("key", "value", "problem"),
    [
        ("base_model_name_or_path", 5, "must be a string"),
        ("target_modules", 5, "must be a string or a list of strings, not 5"),
        ("target_modules", [1], "must be a string or a list of strings, not [1]"),
        ("exclude_modules", 3, "must be a string or a list of strings, not 3"),
        ("layers_pattern", 4, "must be a string or a list of strings, not 4"),
        ("layers_to_transform", [[1]], "must be an integer or a list of integers, not [[1]]"),
        ("modules_to_save", "lm_head", "must be a list of strings, not 'lm_head'"),
        ("lora_alpha", 10**400, f"must be a number, not {10**400}"),
    ],
)
def test_options_of_another_type(adapter: Path, key: str, value: object, problem: str) -> None:
    edit_config(adapter, **{key: value})
    refused(lambda: open_adapter(adapter), f"{adapter / 'adapter_config.json'}: {key}: {problem}")
