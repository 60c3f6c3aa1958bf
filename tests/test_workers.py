"""Work in processes: every result once, what one raises ends all, and nobody is left."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from loraforge.errors import InputError, LoraForgeError
from loraforge.workers import each

ROOT = Path(__file__).parents[1]


def _square(number: int) -> tuple[int, int]:
    return os.getpid(), number**2


def _refuse(begun: Path, number: int) -> int:
    (begun / str(number)).touch()
    if number == 3:
        raise InputError("not three", key="number")
    time.sleep(0.1)
    return number


def _die(number: int) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _last(folder: Path, number: int) -> None:
    """Work without an end that says who does it, and tidies up."""
    own = folder / str(number)
    own.write_text(str(os.getpid()))
    try:
        while True:
            time.sleep(0.1)
    finally:
        own.rename(folder / f"{number}.tidied")


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
def test_what_one_raises_ends_all(tmp_path: Path, jobs: int) -> None:
    with pytest.raises(InputError, match="number: not three"):
        list(each(_refuse, {number: (tmp_path, number) for number in range(100)}, jobs))
    assert multiprocessing.active_children() == []
    assert len(list(tmp_path.iterdir())) < 100


def test_a_process_that_dies_is_an_error_of_one_line() -> None:
    with pytest.raises(LoraForgeError, match=r"a worker process died; .* use fewer --jobs"):
        list(each(_die, {number: (number,) for number in range(3)}, 2))
    assert multiprocessing.active_children() == []


_CODE = """
import signal, sys
from pathlib import Path
sys.path.insert(0, "tests")
from test_workers import _last
from loraforge.workers import each

if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    list(each(_last, {number: (Path(sys.argv[1]), number) for number in range(5)}, 2))
"""


@pytest.mark.parametrize(("how", "code"), [(signal.SIGTERM, 143), (signal.SIGKILL, -9)])
def test_nobody_outlives_a_parent_that_is_ended(tmp_path: Path, how: signal.Signals, code: int) -> None:
    (tmp_path / "main.py").write_text(_CODE)
    (work := tmp_path / "work").mkdir()
    parent = subprocess.Popen(
        [sys.executable, tmp_path / "main.py", work], cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    _wait_for(lambda: len(_pids(work)) == 2)
    pids = _pids(work)
    parent.send_signal(how)
    assert parent.wait(timeout=120) == code
    _wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))
    # none but the two was begun, and they ended as exceptions do where anybody could tell them
    assert _names(work) == (["0.tidied", "1.tidied"] if how == signal.SIGTERM else ["0", "1"])


def _pids(work: Path) -> list[int]:
    return [int(text) for path in work.iterdir() if (text := path.read_text())]


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def _wait_for(holds: Callable[[], object]) -> None:
    deadline = time.monotonic() + 120
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)
