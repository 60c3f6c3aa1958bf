#!/usr/bin/env python3
"""Set up the environment and run the main job or the tests, on a machine with only Python 3.11 and pip.

    python3 scripts/run.py figures     environment, then `snakemake --cores all figures`
    python3 scripts/run.py test        environment with the test tools, then `pytest`
    python3 scripts/run.py setup       the first environment alone
    python3 scripts/run.py setup-dev   the second environment alone

What follows `--` goes to snakemake or pytest. Standard library only: it runs before anything is installed.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import os
import re
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import NoReturn

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
BIN = VENV / "bin"
PYTHON = BIN / "python"
STATE = ROOT / ".snakemake"
GRACE_S = 30.0  # for what outlives its parent to clean up, before it is killed


def say(message: str) -> None:
    print(f"==> {message}", flush=True)


def interrupted(number: int) -> NoReturn:
    say("interrupted; run the same command again to resume")
    sys.exit(128 + number)


def call(
    *command: str | Path, env: Mapping[str, str] | None = None, keep: Sequence[int] = (), count: int = 0
) -> None:
    """Run a command to its end; on failure exit with its code, since its own output has said why.

    It has a process group of its own, to which every signal goes on: a terminal, a scheduler and `kill` then end
    it alike, and nothing that it started outlives it. It is waited for, so that it can release its locks. ``keep``
    are descriptors that it inherits; ``count``, the packages that it is about, where it is pip.
    """
    process: subprocess.Popen[bytes] | None = None
    received: list[int] = []

    def forward(number: int, _frame: FrameType | None) -> None:
        if number != signal.SIGTSTP:
            received.append(number)
        if process is None:
            return
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        if number == signal.SIGTSTP:
            os.kill(os.getpid(), signal.SIGSTOP)  # what follows runs once this is in the foreground again
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGCONT)

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGTSTP)
    before = {  # what is ignored stays so: SIGHUP under nohup
        number: signal.signal(number, forward)
        for number in numbers
        if signal.getsignal(number) != signal.SIG_IGN
    }
    try:
        process = subprocess.Popen(
            [str(part) for part in command],
            cwd=ROOT,
            env=env,
            pass_fds=keep,
            process_group=0,
            stdout=subprocess.PIPE if count else None,
        )
        for number in received:  # while it was being started
            forward(number, None)
        swallowed = count_packages(process, count) if count else ()
        code = process.wait()
        end_group(process.pid)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if received:
        interrupted(received[0])
    if code:
        for line in swallowed:
            print(line, end="")
        say(f"failed (exit code {code}): {' '.join(str(part) for part in command)}")
        sys.exit(code if code > 0 else 128 - code)


def group_lives(group: int) -> bool:
    """Whether a process of the group is left; one that has ended and that nobody waits for is not."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # macOS says so of processes that have ended
        return False
    states = []
    for file in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, _parent, of = file.read_text().rpartition(")")[2].split()[:3]
            if int(of) == group:
                states.append(state)
    return any(state not in "ZX" for state in states) if states else not Path("/proc/self").exists()


def end_group(group: int) -> None:
    """End what a command left running, first politely."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        deadline = time.monotonic() + GRACE_S
        if not group_lives(group):
            return
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(group, number)
        while group_lives(group) and time.monotonic() < deadline:
            time.sleep(0.05)


def count_packages(process: subprocess.Popen[bytes], total: int) -> Sequence[str]:
    """Show pip's progress as a line every ten packages, and give its last lines; its errors come by stderr, whole."""
    last: deque[str] = deque(maxlen=20)
    done = 0
    assert process.stdout is not None
    for raw in process.stdout:
        line = raw.decode(errors="replace")
        last.append(line)
        if line.startswith(("Collecting ", "Requirement already satisfied: ")):
            done += 1
            if done % 10 == 0 or done == total:
                say(f"  {done} of {total} packages collected")
        elif line.startswith("Installing collected packages: "):
            say(f"  installing {line.count(',') + 1} packages")
    return last


@contextmanager
def only_one(name: str) -> Iterator[int]:
    """Hold the lock ``name`` of this checkout and yield its descriptor; exit where another run holds it.

    A process that inherits the descriptor holds the lock too, so that a killed run leaves it to its snakemake.
    """
    STATE.mkdir(exist_ok=True)
    handle = os.open(STATE / f"{name}.lock", os.O_RDWR | os.O_CREAT, 0o666)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(
                f"another run of scripts/run.py is at work on '{name}' in this checkout; wait for it, or end it"
            )
            sys.exit(1)
        yield handle
    finally:
        os.close(handle)


def at_work() -> list[int]:
    """Processes of snakemake and loraforge, started by hand too, whose folder is this checkout."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            words = (folder / "cmdline").read_bytes().split(b"\0")
            names = {os.path.basename(word) for word in words[:4]}
            if names & {b"snakemake", b"loraforge"} and (folder / "cwd").resolve() == ROOT:
                found.append(int(folder.name))
    return found


def unlock(rest: Sequence[str], env: Mapping[str, str]) -> None:
    """Remove the lock that a killed snakemake left, once nothing is at work here."""
    if not any((STATE / "locks").glob("*.lock")):
        return
    if not Path("/proc/self").exists():
        return  # who is at work cannot be told here; snakemake says what to do
    if busy := at_work():
        say(
            f"snakemake or a job of it is at work in this checkout (process {busy[0]}); wait for it, or end it"
        )
        sys.exit(1)
    say("removing the lock that a killed run left")
    call(PYTHON, "-m", "snakemake", "--cores", "all", "--unlock", *rest, env=env)


def digest(*files: Path) -> str:
    """What the environment was made from: a changed lock makes it again."""
    made_from = hashlib.sha256(sys.version.encode())
    for file in files:
        made_from.update(file.read_bytes())
    return made_from.hexdigest()


def has_pip() -> bool:
    """Whether .venv is whole: one interrupted while it was made has a python, but no pip."""
    quiet = subprocess.DEVNULL
    return PYTHON.is_file() and not subprocess.call(
        [PYTHON, "-m", "pip", "--version"], stdout=quiet, stderr=quiet
    )


def set_up(lock_name: str) -> None:
    """Create or complete .venv from the hashed lock; a stamp per lock makes a second call instant."""
    if sys.version_info < (3, 11):  # noqa: UP036 - an older Python must be told so, not shown a traceback
        sys.exit(f"Python 3.11 or newer is needed; this is {sys.version.split()[0]} ({sys.executable})")
    lock, torch = ROOT / "envs" / f"{lock_name}.lock", ROOT / "envs" / "torch.txt"
    stamp = VENV / f".{lock_name}.stamp"
    wanted = digest(lock, torch, ROOT / "pyproject.toml")
    if stamp.is_file() and stamp.read_text() == wanted:
        return
    with only_one("setup"):
        install(lock, torch)
        stamp.write_text(wanted)


def install(lock: Path, torch: Path) -> None:
    started = time.monotonic()
    if not has_pip():
        say("creating .venv")
        call(sys.executable, "-m", "venv", VENV)
    options = ("--disable-pip-version-check", "--no-input", "--progress-bar", "off")
    pip = (PYTHON, "-m", "pip", "install", *options)
    say("environment 1/3: torch")
    call(*pip, "-q", "-r", torch)
    say(f"environment 2/3: {lock.relative_to(ROOT)} (hash-checked)")
    packages = len(re.findall(r"^[\w.\-\[\]]+==", lock.read_text(), re.MULTILINE))
    call(*pip, "--no-deps", "--require-hashes", "-r", lock, count=packages)
    say("environment 3/3: loraforge, from this checkout")
    call(*pip, "-q", "--no-deps", "--no-build-isolation", "-e", ".")
    call(PYTHON, "-m", "pip", "--disable-pip-version-check", "check")
    say(
        f"environment ready in {time.monotonic() - started:.0f} s; activate it with: source .venv/bin/activate"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("job", choices=("figures", "test", "setup", "setup-dev"))
    parser.add_argument("rest", nargs="*", help="passed on to snakemake or pytest, after --")
    asked = parser.parse_args()
    set_up("dev" if asked.job in ("test", "setup-dev") else "core")
    environment = {
        **os.environ,
        "PATH": f"{BIN}{os.pathsep}{os.environ.get('PATH', '')}",
        "VIRTUAL_ENV": str(VENV),
    }
    if asked.job == "figures":
        started = time.monotonic()
        with only_one("figures") as handle:
            unlock(asked.rest, environment)
            command = (PYTHON, "-m", "snakemake", "--cores", "all", "figures", *asked.rest)
            call(*command, env=environment, keep=(handle,))
        say(f"figures done in {time.monotonic() - started:.0f} s")
    elif asked.job == "test":
        os.chdir(ROOT)
        os.execve(PYTHON, [str(PYTHON), "-m", "pytest", *asked.rest], environment)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:  # between two commands
        interrupted(signal.SIGINT)
