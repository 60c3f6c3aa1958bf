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
import hashlib
import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
BIN = VENV / ("Scripts" if os.name == "nt" else "bin")
PYTHON = BIN / ("python.exe" if os.name == "nt" else "python")


def say(message: str) -> None:
    print(f"==> {message}", flush=True)


def call(*command: str | Path, **options: object) -> None:
    """Run a command; on failure exit with its code, since its own output has said why."""
    code = subprocess.call([str(part) for part in command], cwd=ROOT, **options)  # type: ignore[call-overload]
    if code:
        say(f"failed (exit code {code}): {' '.join(str(part) for part in command)}")
        sys.exit(code)


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
    started = time.monotonic()
    if not has_pip():
        say("creating .venv")
        call(sys.executable, "-m", "venv", VENV)
    pip = (PYTHON, "-m", "pip", "--disable-pip-version-check", "install", "--progress-bar", "off")
    say("environment 1/3: torch")
    call(*pip, "-q", "-r", torch)
    say(f"environment 2/3: {lock.relative_to(ROOT)} (hash-checked)")
    call(*pip, "--no-deps", "--require-hashes", "-r", lock)
    say("environment 3/3: loraforge, from this checkout")
    call(*pip, "-q", "--no-deps", "--no-build-isolation", "-e", ".")
    call(PYTHON, "-m", "pip", "--disable-pip-version-check", "check")
    stamp.write_text(wanted)
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
        call(PYTHON, "-m", "snakemake", "--cores", "all", "figures", *asked.rest, env=environment)
        say(f"figures done in {time.monotonic() - started:.0f} s")
    elif asked.job == "test":
        call(PYTHON, "-m", "pytest", *asked.rest, env=environment)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        say("interrupted; run the same command again to resume")
        sys.exit(130)
