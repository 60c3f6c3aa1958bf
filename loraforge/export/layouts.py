"""The two PEFT layouts of a compressed adapter, as pure functions of names, ranks and configurations.

``ragged``: every module at its true rank; ``rank_pattern`` with an equal ``alpha_pattern``, and r = lora_alpha
elsewhere, so the scale is 1 for a loader that honours the patterns and for one that drops them.
``padded``: every module zero-padded to one r, no patterns: for loaders that know one rank an adapter.

The scale of the original is already in the factors, so rsLoRA is off in both.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch.nn.functional import pad

from loraforge.config import Layout
from loraforge.export.portable import portable
from loraforge.fleet.modules import LoraModule

# How the original was initialised or trained; meaningless, or harmful (a loader that re-initialises the base
# weights as PiSSA does), for factors that are already final.
_TRAINING_ONLY = (
    "arrow_config",
    "corda_config",
    "eva_config",
    "kasa_config",
    "lora_ga_config",
    "loftq_config",
    "megatron_config",
    "megatron_core",
    "monteclora_config",
    "velora_config",
)
_EXPERT_LINEARS = "experts"  # the group of all of them
# what makes a regular expression of more than a text with wild dots
_SPECIAL = re.compile(r"[\\^$*+?{}\[\]()|\n]")


def shared_ranks(modules: Sequence[LoraModule], ranks: Mapping[str, int]) -> dict[str, int]:
    """Retained ranks, raised where one is stored for several modules: what either layout stores at least.

    A stack of experts has one rank, and so have all stacks of one module. Experts that are modules of their own are
    fused into stacks of the configuration's ``r`` when PEFT loads them into a model of transformers 5.
    """
    groups: dict[str, list[str]] = defaultdict(list)
    for module in modules:
        group = module.stack.owner if module.stack else _EXPERT_LINEARS if is_expert(module.name) else None
        if group is not None:
            groups[group].append(module.name)
    shared = dict(ranks)
    for names in groups.values():
        shared |= dict.fromkeys(names, max(ranks[name] for name in names))
    return shared


def is_expert(name: str) -> bool:
    """Whether a module is the linear map of one numbered expert."""
    return re.search(r"\.experts\.\d+\.", name) is not None


def layout_rank(layout: Layout, ranks: Mapping[str, int]) -> int:
    """The adapter's one ``r``: its largest rank (padded); its experts', or its most common one, the larger of a tie
    (ragged)."""
    if layout == "padded":
        return max(ranks.values())
    if expert := next((name for name in ranks if is_expert(name)), None):
        return ranks[expert]
    counts = Counter(ranks.values())
    return max(counts, key=lambda rank: (counts[rank], rank))


def module_ranks(layout: Layout, ranks: Mapping[str, int]) -> Mapping[str, int]:
    """Rows of A that ``layout`` stores, by module."""
    return dict.fromkeys(ranks, layout_rank(layout, ranks)) if layout == "padded" else ranks


def pad_factors(a: torch.Tensor, b: torch.Tensor, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Zero-pad A [k, d_in] and B [d_out, k] to ``rank`` >= k directions; the product is unchanged."""
    k = a.shape[0]
    if k == rank:
        return a, b
    return pad(a, (0, 0, 0, rank - k)), pad(b, (0, rank - k))


def pattern_matches(key: str, name: str) -> bool:
    """PEFT's rule for rank_pattern and alpha_pattern: a regular expression for the name or a dotted suffix of it."""
    return re.match(rf"(.*\.)?({key})$", name) is not None


@lru_cache(maxsize=64)
def pattern_keys(names: tuple[str, ...]) -> dict[str, str]:
    """The pattern key of each module: its full name, which engines that look keys up as plain text find too.

    PEFT reads keys as regular expressions on suffixes. Where a plain name would also match another of ``names``
    ("proj" beside "block.proj"), the key is escaped and anchored instead. The adapters of a fleet share few lists of
    names: each is worked out once, and its result is not to be changed.
    """
    # in a plain name only dots are wild, so that it matches tails of its own length only
    tails: dict[int, list[tuple[str, str]]] = defaultdict(list)
    for name in names:
        for start in (0, *(dot.end() for dot in re.finditer(r"\.", name))):
            tails[len(name) - start].append((name[start:], name))
    keys: dict[str, str] = {}
    for name in names:
        parts = name.split(".")
        near = (tail for tail, other in tails[len(name)] if tail.endswith(parts[-1]) and other != name)
        plain = _SPECIAL.search(name) is None
        keys[name] = name if plain and not any(_fits(parts, tail) for tail in near) else "^" + re.escape(name)
    return keys


def _fits(parts: Sequence[str], text: str) -> bool:
    """Whether ``parts``, with any one character between two of them, are the beginning of ``text``."""
    start = 0
    for part in parts:
        if not text.startswith(part, start):
            return False
        start += len(part) + 1
    return True


@lru_cache(maxsize=64)
def _grid(names: tuple[str, ...]) -> tuple[set[str], set[str]] | None:
    """(layers, parts of a layer) if ``names`` are exactly every part of every layer, else None."""
    layers: set[str] = set()
    parts: set[str] = set()
    for name in names:
        match = re.fullmatch(r"(.*?\.\d+)\.(.+)", name)
        if match is None:
            return None
        layers.add(match[1])
        parts.add(match[2])
    return (layers, parts) if len(layers) * len(parts) == len(names) else None


def target_fields(config: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Configuration keys that make PEFT rebuild exactly ``names``.

    The original's short list and layer selection are kept where its meaning is certain: a plain list that names
    just the parts which every layer here has. A regular expression, an exclusion, or modules that differ from
    layer to layer give the full module names instead.
    """
    targets = config.get("target_modules")
    grid = _grid(tuple(names))
    if isinstance(targets, list) and grid is not None and not config.get("exclude_modules"):
        kinds = {part.rpartition(".")[2] for part in grid[1]}
        if set(targets) == kinds and len(kinds) == len(grid[1]):
            return {"target_modules": sorted(kinds)}
    return {
        "target_modules": list(names),
        "layers_to_transform": None,
        "layers_pattern": None,
        "exclude_modules": None,
    }


def adapter_config(
    config: Mapping[str, Any],
    layout: Layout,
    ranks: Mapping[str, int],
    modules: Sequence[LoraModule] = (),
) -> dict[str, Any]:
    """adapter_config.json of one layout.

    Parameters
    ----------
    config: the original's configuration; what does not concern ranks, scale or training is kept.
    ranks: stored rank by full module name, before padding.
    modules: those of the adapter, where some are experts in stacks: ``target_parameters`` names those.
    """
    owners = {module.name: module.stack.owner for module in modules if module.stack}
    names = [name for name in ranks if name not in owners]
    r = layout_rank(layout, ranks)
    pattern: dict[str, int] = {}
    if layout == "ragged":
        keys = pattern_keys(tuple(names))
        pattern = {keys[name]: ranks[name] for name in names if ranks[name] != r}
        # PEFT looks up the parameter's path
        pattern |= {
            rf"{re.escape(owner)}\.[^.]+": ranks[name] for name, owner in owners.items() if ranks[name] != r
        }
    kept = portable({key: value for key, value in config.items() if key not in _TRAINING_ONLY})
    return {
        **kept,
        **(target_fields(config, names) if names else {"target_modules": []}),
        "r": r,
        "lora_alpha": r,
        "use_rslora": False,
        "rank_pattern": pattern,
        "alpha_pattern": dict(pattern),
        "init_lora_weights": True,
        # the factors of tied layers are truncated each by themselves, and both are stored
        **({"ensure_weight_tying": False} if config.get("ensure_weight_tying") else {}),
        "inference_mode": True,
    }
