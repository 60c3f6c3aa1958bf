"""The index lists every bag, by its hash, and no other."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from loraforge.evidence.bag import hidden
from loraforge.evidence.checks.base import Check, Failure, Scope
from loraforge.evidence.index import INDEX, problems


class IndexCheck(Check):
    """INDEX.sha256 agrees with the bags, and nothing else lies beside them."""

    title: ClassVar = "index"

    def count(self, scope: Scope) -> int:
        return 1 if scope.root else 0

    def run(self, scope: Scope) -> Iterator[Failure]:
        if scope.root is None:
            return
        if not scope.bags:
            yield Failure(scope.root, "holds no evidence bag")
        for path, claim in problems(scope.root):
            yield Failure(path, claim)
        for path in sorted([*scope.root.glob("*"), *scope.root.glob("*/*")]):
            if path.is_file() and path.relative_to(scope.root).as_posix() != INDEX and not hidden(path):
                yield Failure(path, "file belongs to no bag")
