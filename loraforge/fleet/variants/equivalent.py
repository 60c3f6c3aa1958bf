"""The LoRA configuration that stands for an adapter of another kind."""

from __future__ import annotations

from typing import Any

# what means the same in all kinds: which modules, of which base model, and what is saved beside the factors
_SHARED = (
    "auto_mapping",
    "base_model_name_or_path",
    "exclude_modules",
    "fan_in_fan_out",
    "layers_pattern",
    "layers_to_transform",
    "modules_to_save",
    "peft_version",
    "revision",
    "target_modules",
    "task_type",
    "trainable_token_indices",
)


def lora_config(raw: dict[str, Any]) -> dict[str, Any]:
    """``adapter_config.json`` of the LoRA adapter into which one with configuration ``raw`` is converted.

    Ranks and scale are left to who writes the factors. A LoRA configuration is returned as it is.
    """
    if raw.get("peft_type") == "LORA":
        return raw
    bias = raw.get("bias", "none")
    return {
        **{key: raw[key] for key in _SHARED if raw.get(key) is not None},
        "peft_type": "LORA",
        "bias": "lora_only" if bias.endswith("_only") else bias,
        "lora_dropout": 0.0,
        "inference_mode": True,
    }
