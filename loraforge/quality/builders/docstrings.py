"""Name a Python function by its docstring, from the sources of three widely used packages.

Pinned wheels rather than the standard library: the library's docstrings change with every patch release of the
interpreter that happens to run, and then a test set could not be rebuilt.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from loraforge.quality.builders.common import Example, TaskSpec, one_line, prompt_of
from loraforge.quality.builders.phrases import DJANGO
from loraforge.quality.builders.sources import Source

_NAME = re.compile(r"[a-z][a-z0-9_]{3,31}")
_SHORTEST, _LONGEST = 25, 300  # characters of the docstring's first paragraph


def _examples(folders: Mapping[str, Path]) -> Iterator[Example]:
    for source in sorted(folders):
        root = folders[source] / source.lower()
        for path in sorted(root.rglob("*.py")):
            if any(part in ("tests", "testing") for part in path.relative_to(root).parts):
                continue
            for name, docstring in _functions(path):
                prompt = prompt_of("Name the Python function.", ("Docstring", docstring), answer="Name")
                yield Example(prompt, name, name)


def _functions(path: Path) -> Iterator[tuple[str, str]]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or not _NAME.fullmatch(node.name):
            continue
        paragraph = one_line((ast.get_docstring(node) or "").split("\n\n", 1)[0], _LONGEST)
        if len(paragraph) >= _SHORTEST and node.name not in paragraph:
            yield node.name, paragraph


SPECS = (
    TaskSpec(
        name="docstring_name",
        family="rewriting",
        metric="chrf",
        max_gen_toks=24,
        title="Python function names from docstrings",
        sources=(
            DJANGO,
            Source(
                "pypi",
                "networkx",
                "3.4.2",
                "df5d4365b724cf81b8c6a7312509d0c22386097011ad1abe274afd5e9d3bbc5f",
                "BSD-3-Clause",
                "networkx-*.dist-info/LICENSE.txt",
            ),
            Source(
                "pypi",
                "sympy",
                "1.13.3",
                "54612cf55a62755ee71824ce692986f23c88ffa77207b30c1368eda4a7060f73",
                "BSD-3-Clause",
                "sympy-*.dist-info/LICENSE",
            ),
        ),
        licence="BSD-3-Clause",
        attribution="Docstrings of Django, NetworkX and SymPy",
        examples=_examples,
    ),
)
