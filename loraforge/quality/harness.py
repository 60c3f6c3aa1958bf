"""lm-eval's tasks over one base model: loaded once, with the updates of one arm or of several merged into it."""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr
from dataclasses import dataclass
from pathlib import Path

import torch

from loraforge.config import Split
from loraforge.errors import MissingDependencyError, UsageError
from loraforge.progress import Timer
from loraforge.quality.arms import MergedModel, Update
from loraforge.quality.attention import register
from loraforge.quality.decoding import FixedDecoder, Prompts, decode_growing, stop_tokens
from loraforge.quality.lanes import LaneModel
from loraforge.quality.tasks import Batch, Result, ScoredTask

LM_EVAL = "0.4.13"


@dataclass(frozen=True, eq=False)
class _Loaded:
    """A task's split with its prompts encoded. ``stops``: bool [vocabulary]; ``until``: the same as text."""

    scored: ScoredTask
    batches: list[Batch]
    stops: torch.Tensor
    until: list[str]


class Harness:
    """Scores of tasks under updates; the model is the base again after each call.

    With one lane on a processor, updates are merged into the model's own weights and rows leave a batch as they stop.
    With more, or on a GPU, several arms are decoded side by side, at fixed addresses.
    """

    def __init__(
        self, base: Path, tasks: Path, *, device: str = "cpu", batch_size: int = 64, lanes: int = 1
    ) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="loraforge-eval-")
        _prepare_environment(Path(self._folder.name))
        try:
            import datasets
            import lm_eval
            from lm_eval.models.huggingface import HFLM
            from transformers import AutoModelForCausalLM, AutoTokenizer
            from transformers.utils import logging as transformers_logging
        except ImportError as error:
            raise MissingDependencyError(
                f"{error.name} is not installed", remedy="pip install 'loraforge[quality]'"
            ) from error
        if lm_eval.__version__ != LM_EVAL:
            raise MissingDependencyError(
                f"lm-eval is {lm_eval.__version__}, scores are defined by {LM_EVAL}",
                remedy=f"pip install lm-eval=={LM_EVAL}",
            )
        logging.getLogger("lm_eval").setLevel(logging.ERROR)
        transformers_logging.disable_progress_bar()
        datasets.disable_progress_bars()
        self._tasks = tasks
        self._batch_size = batch_size
        # BF16 on every device: it is how the adapters were trained and how the exported fleet is served
        model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16).to(device).eval()
        self._fixed = lanes > 1 or torch.device(device).type == "cuda"
        if self._fixed:
            model.set_attn_implementation(register())
        self._model = model
        self._alone = MergedModel(model) if lanes == 1 else None
        self._side_by_side = LaneModel(model, lanes) if lanes > 1 else None
        self._lanes = lanes
        self._lm = HFLM(
            pretrained=model, tokenizer=AutoTokenizer.from_pretrained(base), batch_size=batch_size
        )
        self._loaded: dict[tuple[str, Split, int | None], _Loaded] = {}
        self._stops: dict[tuple[str, ...], torch.Tensor] = {}
        self._decoder: tuple[tuple[_Loaded, int], FixedDecoder] | None = None

    def score(
        self,
        task: str,
        updates: Mapping[str, Update] | None,
        limit: int | None = None,
        split: Split = "test",
    ) -> Result:
        """Score the first ``limit`` examples of a split with ``updates`` merged, or on the base without."""
        return self.score_arms(task, [updates], limit, split)[0]

    def score_arms(
        self,
        task: str,
        arms: Sequence[Mapping[str, Update] | None],
        limit: int | None = None,
        split: Split = "test",
    ) -> list[Result]:
        """Score up to as many arms as there are lanes, at once; each is given its share of the seconds.

        Raises UsageError for more arms than lanes, InputError for an update that does not fit the base.
        """
        if not 1 <= len(arms) <= self._lanes:
            raise UsageError(f"{len(arms)} arms do not fit {self._lanes} lanes", key="quality.lanes")
        loaded = self._task(task, split, limit)
        try:
            with Timer() as timer:
                if self._side_by_side is not None:
                    self._side_by_side.merge([arm or {} for arm in arms])
                elif self._alone is not None and arms[0] is not None:
                    self._alone.merge(arms[0])
                answers = self._answers(loaded, len(arms))
        finally:
            for model in (self._side_by_side, self._alone):
                if model is not None:
                    model.reset()
        return [loaded.scored.result(lane, timer.s / len(arms)) for lane in answers]

    def _answers(self, loaded: _Loaded, lanes: int) -> list[list[str]]:
        """Texts by lane and request, each up to its first stop, of the first ``lanes``."""
        from lm_eval.models.utils import postprocess_generated_text

        found = [[""] * len(loaded.scored) for _ in range(lanes)]
        for batch in loaded.batches:
            for answers, rows in zip(found, self._decode(loaded, batch), strict=False):
                for request, tokens in zip(batch.requests, rows, strict=True):
                    text = self._lm.tok_decode(tokens)
                    answers[request] = postprocess_generated_text(text, loaded.until, None)
        return found

    def _decode(self, loaded: _Loaded, batch: Batch) -> list[list[list[int]]]:
        """Tokens of a batch by lane and row."""
        if not self._fixed:
            return [decode_growing(self._model, batch.prompts, loaded.stops)]
        first, (ids, mask, limit) = loaded.batches[0], batch.prompts
        rows, width = first.prompts.ids.shape
        moves = 0 if self._side_by_side is None else self._side_by_side.moves
        if self._decoder is None or self._decoder[0] != (loaded, moves):
            self._decoder = None
            if loaded.stops.is_cuda:
                torch.cuda.empty_cache()  # the memory of one at a time; a graph's own is given back only so
            made = FixedDecoder(self._model, rows * self._lanes, width, limit, loaded.stops)
            self._decoder = ((loaded, moves), made)
        # a short batch is filled up with its last prompt, and the lanes see the same prompts
        rows_of = torch.arange(rows).clamp_max(len(ids) - 1).repeat(self._lanes)
        found = self._decoder[1](Prompts(ids[rows_of], mask[rows_of], limit))
        starts = range(0, len(found), rows)
        return [found[start : start + len(ids)] for start in starts]

    def _task(self, name: str, split: Split, limit: int | None) -> _Loaded:
        key = (name, split, limit)
        if key not in self._loaded:
            # lm-eval draws a bar a stage whatever the terminal; ours counts arms
            with open(os.devnull, "w") as nowhere, redirect_stderr(nowhere):
                scored = ScoredTask(self._tasks, name, split, limit, Path(self._folder.name))
            batches, until = scored.batches(self._lm, self._batch_size), scored.until(self._lm)
            self._loaded[key] = _Loaded(scored, batches, self._stop_tokens(until), until)
        return self._loaded[key]

    def _stop_tokens(self, until: Sequence[str]) -> torch.Tensor:
        key = tuple(until)
        if key not in self._stops:
            ends = self._model.generation_config.eos_token_id
            ends = ends if isinstance(ends, list) else [ends]
            found = stop_tokens(self._lm.tokenizer, until, ends, self._model.config.vocab_size)
            self._stops[key] = found.to(self._model.device)
        return self._stops[key]


def resolve_device(name: str) -> str:
    """``auto`` is CUDA where there is a device, else the CPU; any other name stands for itself."""
    if name != "auto":
        return name
    return "cuda" if torch.cuda.is_available() else "cpu"


def _prepare_environment(folder: Path) -> None:
    """Keep the libraries offline and out of the user's home; they read this when imported."""
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE"):
        os.environ[name] = "1"
    os.environ["HF_DATASETS_CACHE"] = str(folder / "datasets")
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
