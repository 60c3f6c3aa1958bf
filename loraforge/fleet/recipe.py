"""Recipes: the YAML that says all there is to know about the training of one adapter."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from loraforge.errors import InputError, UsageError

Linear = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


class Recipe(BaseModel):
    """How one adapter is made. Everything that PEFT names keeps PEFT's meaning."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    task: str = Field(description="task whose train and validation splits are used")
    rank: int = Field(ge=1, description="nominal LoRA rank r")
    alpha: int = Field(ge=1, description="lora_alpha")
    rslora: bool = Field(False, description="scale by alpha / sqrt(r), not alpha / r")
    target_modules: tuple[Linear, ...] = Field(min_length=1, description="linear layers that are adapted")
    layers: tuple[Annotated[int, Field(ge=0)], ...] | None = Field(
        None, description="layers_to_transform; null for all layers"
    )
    rank_pattern: dict[str, Annotated[int, Field(ge=1)]] = Field({}, description="ranks of some modules")
    alpha_pattern: dict[str, Annotated[int, Field(ge=1)]] = Field({}, description="alphas of some modules")
    dropout: float = Field(0.0, ge=0, lt=1, description="dropout on the input of A")
    lr: float = Field(gt=0, le=0.1, description="peak learning rate of AdamW")
    warmup: float = Field(0.05, ge=0, lt=1, description="fraction of the steps with a rising learning rate")
    weight_decay: float = Field(0.0, ge=0, description="decoupled weight decay of A and B")
    batch_size: int = Field(32, ge=1, description="examples a step")
    steps: int | None = Field(None, ge=1, description="optimiser steps; or give epochs")
    epochs: float | None = Field(None, gt=0, description="passes over the training split; or give steps")
    max_length: int = Field(
        256, ge=8, description="tokens of prompt and target; longer prompts lose their start"
    )
    evaluations: int = Field(4, ge=1, description="validations, evenly spaced; the best checkpoint is kept")
    seed: int = Field(
        0, ge=0, description="seed of A's initial values, of dropout and of the order of examples"
    )

    @model_validator(mode="after")
    def _consistent(self) -> Recipe:
        if (self.steps is None) == (self.epochs is None):
            raise ValueError("give steps or epochs, one of the two")
        for name in ("target_modules", "layers"):
            values = getattr(self, name) or ()
            if len(set(values)) != len(values):
                raise ValueError(f"{name} names something twice")
        for pattern in (*self.rank_pattern, *self.alpha_pattern):
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(f"{pattern!r} is not a regular expression ({error})") from error
        return self

    def n_steps(self, n_examples: int) -> int:
        """Optimiser steps for a training split of ``n_examples``."""
        if self.steps is not None:
            return self.steps
        assert self.epochs is not None
        return max(1, round(self.epochs * n_examples / self.batch_size))


def load_recipe(path: Path) -> Recipe:
    """Read a recipe. Raises InputError (unreadable) or UsageError that names the file and the key."""
    try:
        value: Any = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot be read ({error})", path=path) from error
    except yaml.YAMLError as error:
        raise InputError(f"not valid YAML ({str(error).splitlines()[0]})", path=path) from error
    if not isinstance(value, dict):
        raise InputError("not a mapping", path=path)
    try:
        return Recipe.model_validate(value)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        raise UsageError(
            first["msg"], path=path, key=key or None, remedy="see loraforge/fleet/recipe.py"
        ) from error
