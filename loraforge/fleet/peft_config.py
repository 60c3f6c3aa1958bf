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
from loraforge.fleet.patterns import MAX_PATTERNS, matches
from loraforge.fleet.untrusted_json import read_untrusted_json
from loraforge.fleet.untrusted_path import require_regular

CONFIG_NAME = "adapter_config.json"
WEIGHTS_NAME = "adapter_model.safetensors"

# Kinds of adapters whose update is one thin product a module; and where each states its rank and its alpha.
_KINDS: dict[str, tuple[str, str]] = {
    "LORA": ("r", "lora_alpha"),
    "ADALORA": ("init_r", "lora_alpha"),
    "VERA": ("r", ""),
    "LOHA": ("r", "alpha"),
    "LOKR": ("r", "alpha"),
}
# Options under which the update is not s B A, so that a truncated B A is not a truncated update.
_REFUSED_FLAGS = {
    "use_dora": "DoRA magnitudes are tied to the full update",
    "use_qalora": "QALoRA pools its inputs",
    "use_bdlora": "block-diagonal LoRA factors are not one matrix pair",
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
    "target_parameters": ("a list of strings", str, False),
}
_LARGEST = sys.float_info.max  # JSON integers have no bound
_OUTPUTS = ("lm_head", "embed_out", "output_projection")
_EMBEDDINGS = ("embed_tokens", "lm_head", "wte", "embed_in", "embed_out", "word_embeddings")


@dataclass(frozen=True)
class PeftConfig:
    """A parsed ``adapter_config.json`` of an adapter. ``raw`` is the JSON object as stored."""

    path: Path
    raw: dict[str, Any]

    @property
    def base_model(self) -> str:
        """Base model as the adapter states it; an empty string where it states none."""
        return self.raw.get("base_model_name_or_path") or ""

    @property
    def kind(self) -> str:
        """PEFT's name of the kind: ``LORA``, or one that is converted to it."""
        kind: str = self.raw["peft_type"]
        return kind

    @property
    def r(self) -> int:
        rank: int = self.raw[_KINDS[self.kind][0]]
        return rank

    def rank(self, module: str) -> int:
        """Nominal rank that the configuration gives ``module``."""
        return _positive_int(self._patterned("rank_pattern", module, self.r), self.path, "rank_pattern")

    def scale(self, module: str) -> float:
        """Factor s in ``dW = s B A``: alpha / r, or alpha / sqrt(r) with rsLoRA (arXiv:2312.03732).

        AdaLoRA divides by r + 1e-5, and takes an alpha that is not positive for r.
        """
        option = _KINDS[self.kind][1]
        alpha = self._patterned("alpha_pattern", module, self.raw.get(option, 8))
        if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not abs(alpha) <= _LARGEST:
            raise InputError(f"must be a number, not {alpha!r}", path=self.path, key=option)
        if self.kind == "ADALORA":
            return float(alpha if alpha > 0 else self.r) / (self.r + 1e-5)
        rank = self.rank(module)
        rooted = self.kind == "LORA" and self.raw.get("use_rslora")
        return float(alpha) / (math.sqrt(rank) if rooted else rank)

    def targets(self, module: str) -> bool:
        """Whether PEFT would put LoRA on ``module`` (target, excluded and layer rules)."""
        if self.saves(module) or self._listed("exclude_modules", module):
            return False
        if self.raw.get("ensure_weight_tying") and module.rpartition(".")[2] in _OUTPUTS:
            return True  # which PEFT leaves out of target_modules when it saves
        target = self.raw.get("target_modules")
        if target is None or target == "all-linear":  # resolved from the base model, which is not at hand
            return True
        if isinstance(target, str) or module in target:
            return self._listed("target_modules", module)
        return self._listed("target_modules", module) and self._layer_chosen(module)

    def parameters_of(self, module: str) -> list[str]:
        """Names of the parameters of ``module`` on which PEFT would put LoRA (``target_parameters``), as a stack."""
        parameters = self.raw.get("target_parameters")
        if not parameters or (self.raw.get("target_modules") and self.targets(module)):
            return []
        found = []
        for parameter in parameters:
            owner, _, leaf = parameter.rpartition(".")
            if not owner or _in_names([owner], module):
                found.append(leaf)
        return found

    def saves(self, key: str) -> bool:
        """Whether ``key`` lies in a module that PEFT saves whole (``modules_to_save``)."""
        names = self.raw.get("modules_to_save") or ()
        return any(matches(rf"(.*\.)?{name}(\..*)?", key, self.path, "modules_to_save") for name in names)

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
            return matches(names, module, self.path, option)
        return _in_names(names, module)

    def _patterned(self, option: str, module: str, default: Any) -> Any:
        """Value of the first pattern, in stored order, that is a regular expression for the module's tail."""
        patterns: Mapping[str, Any] = self.raw.get(option) or {}
        for pattern, value in patterns.items():
            if matches(rf"(.*\.)?({pattern})", module, self.path, option):
                return value
        return default


def read_config(folder: Path) -> PeftConfig:
    """Read and check ``folder/adapter_config.json``.

    Raises InputError where the file is missing or malformed, where its kind has no exact LoRA form,
    or where it asks for something that truncating B A would change inexactly.
    """
    path = Path(folder) / CONFIG_NAME
    if path.exists() or path.is_symlink():
        require_regular(path, Path(folder))
    return parse_config(path, read_untrusted_json(path))


def parse_config(path: Path, raw: Any) -> PeftConfig:
    """Check a configuration that has been read already, as :func:`read_config` does; ``path`` is what errors name."""
    if not isinstance(raw, dict):
        raise InputError("not a JSON object", path=path)
    kind = raw.get("peft_type")
    if not isinstance(kind, str) or kind not in _KINDS:
        raise InputError(
            f"is {kind!r}: its update is not one product of two thin matrices a module",
            path=path,
            key="peft_type",
            remedy=f"{', '.join(_KINDS)} can be compressed",
        )
    rank = _KINDS[kind][0]
    if rank not in raw:
        raise InputError("missing", path=path, key=rank, remedy="state the adapter's rank as PEFT does")
    _positive_int(raw[rank], path, rank)
    if not isinstance(raw.get("bias", "none"), str):
        raise InputError("must be a string", path=path, key="bias")
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
        patterns = raw.get(option) or {}
        if not isinstance(patterns, dict):
            raise InputError("not a JSON object", path=path, key=option)
        if len(patterns) > MAX_PATTERNS:
            raise InputError(
                f"holds {len(patterns)} patterns, at most {MAX_PATTERNS} are read", path=path, key=option
            )
    return PeftConfig(path, raw)


def _all_of(elements: Any, kind: type) -> bool:
    return isinstance(elements, list) and all(isinstance(element, kind) for element in elements)


def _positive_int(value: Any, path: Path, key: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InputError(f"must be a positive integer, not {value!r}", path=path, key=key)
    return value


def _in_names(names: Sequence[str], module: str) -> bool:
    """PEFT's rule for a list: each name is the tail of a dotted path."""
    return module in names or module.endswith(tuple([f".{name}" for name in names]))
