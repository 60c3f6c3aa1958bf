"""A task as lm-eval defines it: its prompts encoded once, its answers scored by its own filters and metrics."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from loraforge.config import Split
from loraforge.errors import InputError
from loraforge.quality.decoding import Prompts


@dataclass(frozen=True)
class Result:
    """lm-eval's verdict on one arm: its score in percent and the metric's statistics of every example."""

    metric: str
    score: float
    stats: list[list[float]]
    seconds: float = 0.0


@dataclass(frozen=True)
class Batch:
    """Prompts that are decoded together, and which requests they are."""

    requests: tuple[int, ...]
    prompts: Prompts


class ScoredTask:
    """One split of a task, its first ``limit`` examples.

    Raises InputError for a task that does not generate greedily to one set of stops: nothing else is implemented here.
    """

    def __init__(self, tasks: Path, name: str, split: Split, limit: int | None, folder: Path) -> None:
        source = tasks.resolve() / name
        self._task = _load(source, name, split, folder)
        self._task.build_all_requests(limit=limit, rank=0, world_size=1)
        self._requests: list[Any] = sorted(self._task.instances, key=lambda request: request.doc_id)
        self.metric: str = self._task.config.metric_list[0]["metric"]
        kinds = {request.request_type for request in self._requests}
        options = [request.args[1] for request in self._requests] if kinds == {"generate_until"} else []
        if not options or any(option != options[0] for option in options) or options[0].get("do_sample"):
            raise InputError(
                "is no task of greedy generation",
                path=source / f"{name}.yaml",
                key="output_type",
                remedy="use generate_until with do_sample: false",
            )
        self._options: dict[str, Any] = options[0]

    def __len__(self) -> int:
        return len(self._requests)

    def until(self, lm: Any) -> list[str]:
        """What ends an answer: the task's stops, and the model's end of sequence as text."""
        from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs

        stops = normalize_gen_kwargs(self._options, lm.max_gen_toks).get("until")
        return list(
            handle_stop_sequences(stops, eos=lm.tok_decode(lm.eot_token_id, skip_special_tokens=False))
        )

    def batches(self, lm: Any, size: int) -> list[Batch]:
        """Requests in batches of ``size``, longest prompts first, encoded as lm-eval's own model encodes them."""
        from lm_eval.models.utils import normalize_gen_kwargs

        limit = int(normalize_gen_kwargs(self._options, lm.max_gen_toks)["max_gen_toks"])
        texts = [request.args[0] for request in self._requests]
        order = sorted(range(len(texts)), key=lambda i: (-len(lm.tok_encode(texts[i])), texts[i]))
        found = []
        for start in range(0, len(order), size):
            rows = order[start : start + size]
            ids, mask = lm.tok_batch_encode(
                [texts[row] for row in rows], left_truncate_len=lm.max_length - limit
            )
            found.append(Batch(tuple(rows), Prompts(ids, mask, limit)))
        return found

    def result(self, answers: Sequence[str], seconds: float) -> Result:
        """Score one answer a request, in the order of the examples."""
        for request, answer in zip(self._requests, answers, strict=True):
            request.resps = [answer]
        self._task.apply_filters()
        key = next(iter(self._requests[0].filtered_resps))
        values = [
            self._task.process_results(request.doc, [request.filtered_resps[key]])[self.metric]
            for request in self._requests
        ]
        score = float(self._task.aggregation()[self.metric](values))
        return Result(self.metric, score, [_statistics(value) for value in values], seconds)


def split_file(tasks: Path, task: str, split: Split) -> Path:
    """The examples of a published task's split."""
    return tasks / task / f"{split}.jsonl"


def _load(source: Path, name: str, split: Split, folder: Path) -> Any:
    """The lm-eval task. A wrapper names its data by absolute path, so that any working folder will do."""
    from lm_eval.tasks import TaskManager

    place = folder / "tasks" / split / name
    place.mkdir(parents=True, exist_ok=True)
    wrapper = {
        "task": name,
        "include": str(source / f"{name}.yaml"),
        "dataset_kwargs": {"data_files": {"test": str(split_file(source.parent, name, split))}},
        "num_fewshot": 0,
    }
    (place / f"{name}.yaml").write_text(yaml.safe_dump(wrapper), encoding="utf-8")
    manager = TaskManager(include_path=str(place), include_defaults=False)
    return manager.load([name])["tasks"][name]


def _statistics(value: Any) -> list[float]:
    """A metric's value of one example as a list of numbers."""
    return [float(part) for part in value] if isinstance(value, list | tuple) else [float(value)]
