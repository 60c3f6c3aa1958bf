"""Publish a task for lm-eval: test and validation sets, its task file, where it comes from and under which licence.

Policies are chosen on the validation set, whose prompts moments are collected over; the test set only reports.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from loraforge.errors import InputError, IntegrityError
from loraforge.files import canonical_json, pretty_json, sha256_text, write_text
from loraforge.quality.builders.common import HELD_OUT, SPLITS, Example, TaskSpec, build, records
from loraforge.quality.builders.sources import DEFAULT_CACHE, fetch

PUBLISHED = Path("config/tasks")  # relative to the repository root, as are the paths in the task files

_METRICS_MODULE = "loraforge.quality.metrics"
_TASK_VERSION = 1


def publish(spec: TaskSpec, root: Path = PUBLISHED, cache: Path = DEFAULT_CACHE) -> dict[str, int]:
    """Write ``root/<task>``: task file, both held-out splits, ``SOURCE.json``, ``LICENSE``. Returns split lengths.

    Raises as ``common.build``, and InputError for a source without the licence file that its spec names.
    """
    splits = build(spec, cache)
    for name, text in _files(spec, splits, cache).items():
        write_text(root / spec.name / name, text)
    return {name: len(examples) for name, examples in splits.items()}


def check(spec: TaskSpec, root: Path = PUBLISHED, cache: Path = DEFAULT_CACHE) -> None:
    """Raise IntegrityError for the first published file that differs from a rebuild, or is not there."""
    for name, text in _files(spec, build(spec, cache), cache).items():
        path = root / spec.name / name
        if not path.is_file() or path.read_bytes() != text.encode():
            state = "differs from its rebuild" if path.is_file() else "is not published"
            raise IntegrityError(state, path=path, remedy=f"run `loraforge tasks publish {spec.name}`")


def task_file(spec: TaskSpec) -> str:
    """The lm-eval 0.4 task file (YAML with ``!function`` tags)."""
    return f"""\
# {spec.title}. Written by `loraforge tasks publish`; paths are relative to the repository root.
task: {spec.name}
dataset_path: json
dataset_kwargs:
  data_files:
    test: {PUBLISHED.as_posix()}/{spec.name}/test.jsonl
test_split: test
output_type: generate_until
doc_to_text: "{{{{prompt}}}}"
doc_to_target: "{{{{target}}}}"
target_delimiter: " "
generation_kwargs:
  until: ["\\n"]
  do_sample: false
  max_gen_toks: {spec.max_gen_toks}
process_results: !function {_METRICS_MODULE}.{spec.metric}
metric_list:
  - metric: {spec.metric}
    aggregation: !function {_METRICS_MODULE}.aggregate_{spec.metric}
    higher_is_better: true
metadata:
  version: {_TASK_VERSION}
"""


def _files(spec: TaskSpec, splits: dict[str, list[Example]], cache: Path) -> dict[str, str]:
    if len(splits["test"]) != HELD_OUT:
        raise InputError(f"the test split has {len(splits['test'])} examples, not {HELD_OUT}", key=spec.name)
    held_out = {
        name: "".join(canonical_json(record) + "\n" for record in records(spec, splits[name]))
        for name in ("validation", "test")
    }
    return {
        f"{spec.name}.yaml": task_file(spec),
        **{f"{name}.jsonl": text for name, text in held_out.items()},
        "SOURCE.json": pretty_json(_source_record(spec, splits, held_out)),
        "LICENSE": _licence(spec, cache),
    }


def _source_record(
    spec: TaskSpec, splits: dict[str, list[Example]], held_out: dict[str, str]
) -> dict[str, Any]:
    return {
        "task": spec.name,
        "title": spec.title,
        "family": spec.family,
        "metric": spec.metric,
        "licence": spec.licence,
        "attribution": spec.attribution,
        "sources": [
            {
                "registry": source.registry,
                "name": source.name,
                "version": source.version,
                "sha256": source.sha256,
                "licence": source.licence,
            }
            for source in spec.sources
        ],
        "splits": {name: len(splits[name]) for name in SPLITS},
        **{f"{name}_sha256": sha256_text(text) for name, text in held_out.items()},
    }


def _licence(spec: TaskSpec, cache: Path) -> str:
    """The sources' own licence texts, each under a line that says whose it is if there are several."""
    texts: list[str] = []
    for source in spec.sources:
        folder = fetch(source, cache)
        found: Sequence[Path] = sorted(folder.glob(source.licence_file))
        if not found:
            raise InputError(
                "no licence file", path=f"{source.name} {source.version}", key=source.licence_file
            )
        text = found[0].read_text(encoding="utf-8").strip()
        title = f"{source.name} {source.version} ({source.licence})\n\n" if len(spec.sources) > 1 else ""
        texts.append(f"{title}{text}\n")
    return ("\n" + "-" * 78 + "\n\n").join(texts)
