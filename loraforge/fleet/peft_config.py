"""The rules by which a PEFT ``adapter_config.json`` gives each module its rank, scale and place.

Only the JSON is read here; no tensor and no torch. The rules are those of PEFT 0.21 (``LoraConfig``).
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from loraforge.errors import InputError
from loraforge.files import read_json

CONFIG_NAME = "adapter_config.json"
WEIGHTS_NAME = "adapter_model.safetensors"

# Options under which the update is not s B A, so that a truncated B A is not a truncated update.
_REFUSED_FLAGS = {
    "use_dora": "DoRA magnitudes are tied to the full update",
    "use_qalora": "QALoRA pools its inputs",
    "lora_bias": "the bias of lora_B is scaled with the update",
    "use_bdlora": "block-diagonal LoRA factors are not one matrix pair",
    "target_parameters": "LoRA on bare parameters (expert tensors) is not one matrix pair a module",
    "arrow_config": "Arrow routes between adapters",
    "monteclora_config": "MonteCLoRA samples its factors",
    "kasa_config": "KaSA carries its own singular values",
    "velora_config": "VeLoRA compresses its inputs",
}
# Initialisations that change the base weights unless PEFT converted the adapter when it saved it.
_BASE_CHANGING_INIT = ("pissa", "olora", "corda", "lora_ga")
# Options read here that have one of few JSON forms (or null): what they are called, and whether one element is enough.
_FORMS: dict[str, tuple[str, type, bool]] = {
    "target_modules": ("a string or a list of strings", str, True),
    "exclude_modules": ("a string or a list of strings", str, True),
    "layers_pattern": ("a string or a list of strings", str, True),
    "layers_to_transform": ("an integer or a list of integers", int, True),
    "modules_to_save": ("a list of strings", str, False),
}
_LARGEST = sys.float_info.max  # JSON integers have no bound
_EMBEDDINGS = ("embed_tokens", "lm_head", "wte", "embed_in", "embed_out", "word_embeddings")


@dataclass(frozen=True)
class PeftConfig:
    """A parsed ``adapter_config.json`` of a LoRA adapter. ``raw`` is the JSON object as stored."""

    path: Path
    raw: dict[str, Any]

    @property
    def base_model(self) -> str:
        """Base model as the adapter states it; an empty string where it states none."""
        return self.raw.get("base_model_name_or_path") or ""

    @property
    def r(self) -> int:
        rank: int = self.raw["r"]
        return rank

    def rank(self, module: str) -> int:
        """Nominal rank that the configuration gives ``module``."""
        return _positive_int(self._patterned("rank_pattern", module, self.r), self.path, "rank_pattern")

    def scale(self, module: str) -> float:
        """Factor s in ``dW = s B A``: alpha / r, or alpha / sqrt(r) with rsLoRA (arXiv:2312.03732)."""
        alpha = self._patterned("alpha_pattern", module, self.raw.get("lora_alpha", 8))
        if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not abs(alpha) <= _LARGEST:
            raise InputError(f"must be a number, not {alpha!r}", path=self.path, key="lora_alpha")
        rank = self.rank(module)
        return float(alpha) / (math.sqrt(rank) if self.raw.get("use_rslora") else rank)

    def targets(self, module: str) -> bool:
        """Whether PEFT would put LoRA on ``module`` (target, excluded and layer rules)."""
        if self.saves(module) or self._listed("exclude_modules", module):
            return False
        target = self.raw.get("target_modules")
        if target is None or target == "all-linear":  # resolved from the base model, which is not at hand
            return True
        if isinstance(target, str) or module in target:
            return self._listed("target_modules", module)
        return self._listed("target_modules", module) and self._layer_chosen(module)

    def saves(self, key: str) -> bool:
        """Whether ``key`` lies in a module that PEFT saves whole (``modules_to_save``)."""
        names = self.raw.get("modules_to_save") or ()
        return any(_matches(rf"(.*\.)?{name}(\..*)?", key, self.path, "modules_to_save") for name in names)

    def passes_through(self, key: str) -> bool:
        """Whether a tensor that is not a LoRA factor is one that truncation leaves exact.

        Trained biases, whole modules, resized embeddings and single trained tokens do not depend on the
        factors: the compressed adapter carries them byte for byte.
        """
        module, _, leaf = key.rpartition(".")
        if leaf == "bias":
            return self.raw.get("bias", "none") != "none" or self.saves(key)
        embedding = module.removesuffix(".base_layer").rpartition(".")[2] in _EMBEDDINGS and leaf == "weight"
        return embedding or leaf == "trainable_tokens_delta" or self.saves(key)

    @cached_property
    def _layers(self) -> frozenset[int] | None:
        layers = self.raw.get("layers_to_transform")
        if layers is None or layers == []:
            return None
        return frozenset([layers] if isinstance(layers, int) else layers)

    def _layer_chosen(self, module: str) -> bool:
        if self._layers is None:
            return True
        names = self.raw.get("layers_pattern") or []
        patterns = [rf"(?:^|.*?\.){name}" for name in ([names] if isinstance(names, str) else names)]
        for pattern in patterns or [r".*?\.[^.]*"]:
            if found := re.match(rf"{pattern}\.(\d+)\.", module):
                return int(found.group(1)) in self._layers
        return False

    def _listed(self, option: str, module: str) -> bool:
        """PEFT's name rule: a string is a regular expression for the whole path, a list names its tails."""
        names = self.raw.get(option) or ()
        if isinstance(names, str):
            return _matches(names, module, self.path, option)
        return _in_names(names, module)

    def _patterned(self, option: str, module: str, default: Any) -> Any:
        """Value of the first pattern, in stored order, that is a regular expression for the module's tail."""
        patterns: Mapping[str, Any] = self.raw.get(option) or {}
        for pattern, value in patterns.items():
            if _matches(rf"(.*\.)?({pattern})", module, self.path, option):
                return value
        return default


def read_config(folder: Path) -> PeftConfig:
    """Read and check ``folder/adapter_config.json``.

    Raises InputError where the file is missing or malformed, where it is not LoRA, or where it asks for
    something that truncating B A would change inexactly.
    """
    path = Path(folder) / CONFIG_NAME
    return parse_config(path, read_json(path))


def parse_config(path: Path, raw: Any) -> PeftConfig:
    """Check a configuration that has been read already, as :func:`read_config` does; ``path`` is what errors name."""
    if not isinstance(raw, dict):
        raise InputError("not a JSON object", path=path)
    kind = raw.get("peft_type")
    if kind != "LORA":
        raise InputError(
            f"is {kind!r}, not 'LORA'", path=path, key="peft_type", remedy="only LoRA can be compressed"
        )
    if "r" not in raw:
        raise InputError("missing", path=path, key="r", remedy="state the adapter's rank as PEFT does")
    _positive_int(raw["r"], path, "r")
    for option, why in _REFUSED_FLAGS.items():
        if raw.get(option):
            raise InputError(f"cannot be truncated exactly: {why}", path=path, key=option)
    initial = raw.get("init_lora_weights")
    if isinstance(initial, str) and initial.lower().startswith(_BASE_CHANGING_INIT):
        raise InputError(
            f"{initial!r} changes the base weights",
            path=path,
            key="init_lora_weights",
            remedy="save it with PEFT's path_initial_model_for_weight_conversion, which makes it plain LoRA",
        )
    if not isinstance(raw.get("base_model_name_or_path", ""), str | None):
        raise InputError("must be a string", path=path, key="base_model_name_or_path")
    for option, (form, element, alone) in _FORMS.items():
        value = raw.get(option)
        elements = [value] if alone and isinstance(value, element) else value
        if elements is not None and not _all_of(elements, element):
            raise InputError(f"must be {form}, not {value!r}", path=path, key=option)
    for option in ("rank_pattern", "alpha_pattern"):
        if not isinstance(raw.get(option) or {}, dict):
            raise InputError("not a JSON object", path=path, key=option)
    return PeftConfig(path, raw)


def _all_of(elements: Any, kind: type) -> bool:
    return isinstance(elements, list) and all(isinstance(element, kind) for element in elements)


def _positive_int(value: Any, path: Path, key: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InputError(f"must be a positive integer, not {value!r}", path=path, key=key)
    return value


def _in_names(names: Sequence[str], module: str) -> bool:
    """PEFT's rule for a list: each name is the tail of a dotted path."""
    return any(module == name or module.endswith(f".{name}") for name in names)


def _matches(pattern: str, text: str, path: Path, key: str) -> bool:
    """Whether the whole text matches; InputError where the configuration holds no regular expression."""
    try:
        return re.fullmatch(pattern, text) is not None
    except re.error as error:
        raise InputError(f"{pattern!r} is not a regular expression ({error})", path=path, key=key) from error
