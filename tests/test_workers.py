"""Work in processes: every result once, what one raises ends all, and nobody is left."""

from __future__ import annotations

import os
import time

import pytest

from loraforge.errors import InputError
from loraforge.workers import each


def _square(number: int) -> tuple[int, int]:
    return os.getpid(), number**2


def _refuse(number: int) -> int:
    if number == 3:
        raise InputError("not three", key="number")
    time.sleep(0.05)
    return number


def test_one_job_stays_here_and_in_order() -> None:
    done = list(each(_square, {"b": (2,), "a": (1,)}, 1))
    assert done == [("b", (os.getpid(), 4)), ("a", (os.getpid(), 1))]
    assert list(each(_square, {}, 4)) == []


def test_more_run_elsewhere() -> None:
    done = dict(each(_square, {number: (number,) for number in range(5)}, 2))
    assert {key: square for key, (_, square) in done.items()} == {key: key**2 for key in range(5)}
    pids = {pid for pid, _ in done.values()}
    assert os.getpid() not in pids
    assert len(pids) <= 2


@pytest.mark.parametrize("jobs", [1, 2])
def test_what_one_raises_ends_all(jobs: int) -> None:
    seen: list[int] = []
    done = each(_refuse, {number: (number,) for number in range(100)}, jobs)
    with pytest.raises(InputError, match="number: not three"):
        seen.extend(key for key, _ in done)
    assert len(seen) < 50
