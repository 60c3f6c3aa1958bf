"""The one-command runner gets over what an interrupt or a kill leaves, and leaves no process behind."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import runpy
import shutil
import signal
import subprocess
import sys
import sysconfig
import termios
import time
import venv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
RUN = ROOT / "scripts/run.py"
WAIT_S = 240.0

# Takes snakemake's place: starts a job as it does, ends it with itself at SIGINT, and locks and unlocks as it does.
FAKE = """
import os, pathlib, subprocess, sys, time
lock = pathlib.Path(".snakemake/locks/0.input.lock")
if "--unlock" in sys.argv:
    lock.unlink()
    sys.exit()
if lock.exists():
    sys.exit("LockException")
if pathlib.Path("quick").exists():
    sys.exit()
lock.parent.mkdir(parents=True, exist_ok=True)
lock.touch()
job = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
pathlib.Path("pids").write_text(f"{os.getpid()} {job.pid}")
try:
    time.sleep(300)
except KeyboardInterrupt:
    time.sleep(1)  # as long as a job may take to leave; subprocess.call kills after a quarter of it
    lock.unlink()
    sys.exit(1)
"""


def until(found: Callable[[], Any], what: str, seconds: float = WAIT_S) -> Any:
    deadline = time.monotonic() + seconds
    while not (value := found()):
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(0.05)
    return value


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def functions(root: Path) -> dict[str, Any]:
    return runpy.run_path(str(root / "scripts/run.py"), run_name="run")


def environment(root: Path) -> None:
    """A .venv of the checkout ``root`` that run.py takes for its own, with the packages of this one."""
    venv.create(root / ".venv", with_pip=False, symlinks=True)
    site = next((root / ".venv/lib").glob("python*/site-packages"))
    (site / "packages.pth").write_text(f"{root}\n{sysconfig.get_path('purelib')}\n")
    command = root / ".venv/bin/loraforge"
    command.write_text(f"#!{root}/.venv/bin/python\nfrom loraforge.cli import main\nmain()\n")
    command.chmod(0o755)
    inputs = (root / "envs/core.lock", root / "envs/torch.txt", root / "pyproject.toml")
    (root / ".venv/.core.stamp").write_text(functions(root)["digest"](*inputs))


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout with a fake snakemake, all of which is set up."""
    for name in ("scripts/run.py", "envs/core.lock", "envs/torch.txt", "pyproject.toml"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy2(ROOT / name, tmp_path / name)
    (tmp_path / "snakemake").mkdir()
    (tmp_path / "snakemake/__init__.py").touch()
    (tmp_path / "snakemake/__main__.py").write_text(FAKE)
    environment(tmp_path)
    return tmp_path


def start(root: Path, *arguments: str, **options: Any) -> subprocess.Popen[str]:
    environ = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    return subprocess.Popen(
        [sys.executable, root / "scripts/run.py", "figures", *arguments],
        env={**environ, "OMP_NUM_THREADS": "1"},
        text=True,
        **{"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, **options},
    )


def pids(root: Path) -> list[int]:
    """Of the fake snakemake and its job, once they run."""
    file = root / "pids"
    found = until(lambda: file.is_file() and file.read_text().split(), "the fake snakemake")
    file.unlink()
    return [int(pid) for pid in found]


def finish(process: subprocess.Popen[str], seconds: float = WAIT_S) -> tuple[int, str]:
    output, _ = process.communicate(timeout=seconds)
    return process.returncode, output


linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@linux
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_the_run_and_its_jobs(checkout: Path, number: signal.Signals, code: int) -> None:
    process = start(checkout)
    running = pids(checkout)
    process.send_signal(number)
    returncode, output = finish(process)
    assert returncode == code, output
    assert output.splitlines()[-1] == "==> interrupted; run the same command again to resume"
    assert not [pid for pid in running if alive(pid)]
    assert (checkout / ".snakemake/locks/0.input.lock").exists() == (number == signal.SIGTERM)
    again = start(checkout)  # whatever is left of the first, the same command runs
    pids(checkout)
    again.send_signal(signal.SIGINT)
    returncode, output = finish(again)
    assert returncode == 130
    assert "LockException" not in output


@linux
def test_control_c_in_a_terminal(checkout: Path) -> None:
    terminal, other = pty.openpty()
    process = start(
        checkout, stdin=other, stdout=other, stderr=other, start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )  # fmt: skip
    os.close(other)
    running = pids(checkout)
    os.write(terminal, b"\x03")
    assert process.wait(WAIT_S) == 130
    assert b"run the same command again to resume" in os.read(terminal, 65536)
    os.close(terminal)
    assert not [pid for pid in running if alive(pid)]
    assert not (checkout / ".snakemake/locks/0.input.lock").exists()


@linux
def test_a_killed_snakemake_leaves_no_job_and_no_lock(checkout: Path) -> None:
    process = start(checkout)
    snakemake, job = pids(checkout)
    os.kill(snakemake, signal.SIGKILL)
    returncode, _ = finish(process)
    assert returncode == 128 + signal.SIGKILL
    assert not alive(job)
    (checkout / "quick").touch()
    returncode, output = finish(start(checkout))
    assert returncode == 0, output
    assert "removing the lock that a killed run left" in output
    assert not list((checkout / ".snakemake/locks").iterdir())


@linux
def test_two_at_once(checkout: Path) -> None:
    process = start(checkout)
    snakemake, job = pids(checkout)
    returncode, output = finish(start(checkout))
    assert returncode == 1
    assert "another run of scripts/run.py is at work on 'figures' in this checkout" in output
    process.kill()  # snakemake goes on, and holds the lock
    process.wait(WAIT_S)
    returncode, output = finish(start(checkout))
    assert returncode == 1
    assert "is at work on 'figures'" in output
    assert alive(job)
    os.killpg(os.getpgid(snakemake), signal.SIGKILL)


@linux
def test_a_lock_of_a_snakemake_started_by_hand_stays(checkout: Path) -> None:
    by_hand = subprocess.Popen(
        [checkout / ".venv/bin/python", "-m", "snakemake"], cwd=checkout, process_group=0
    )
    pids(checkout)
    try:
        returncode, output = finish(start(checkout))
        assert returncode == 1
        assert f"at work in this checkout (process {by_hand.pid})" in output
        assert (checkout / ".snakemake/locks/0.input.lock").exists()
    finally:
        os.killpg(by_hand.pid, signal.SIGKILL)
        by_hand.wait()


def test_pip_is_told_by_a_few_lines(checkout: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run = functions(checkout)
    lines = "".join(f"Collecting p{n}\n  Downloading p{n}.whl\n" for n in range(25))
    code = f"import sys; print({lines!r} + 'Installing collected packages: a, b, c'); "
    run["call"](sys.executable, "-c", code, count=25)
    assert capfd.readouterr().out.splitlines() == [
        "==>   10 of 25 packages collected",
        "==>   20 of 25 packages collected",
        "==>   25 of 25 packages collected",
        "==>   installing 3 packages",
    ]
    with pytest.raises(SystemExit) as caught:
        run["call"](sys.executable, "-c", code + "print('why', file=sys.stderr); sys.exit(3)", count=25)
    assert caught.value.code == 3
    shown = capfd.readouterr()
    assert shown.err == "why\n"
    assert "  Downloading p24.whl\n" in shown.out


def test_an_environment_without_pip_is_made_again(tmp_path: Path) -> None:
    (tmp_path / "scripts").mkdir()
    shutil.copy2(RUN, tmp_path / "scripts/run.py")
    has_pip = functions(tmp_path)["has_pip"]
    assert not has_pip()
    venv.create(tmp_path / ".venv", with_pip=False)  # what is there when it is interrupted
    assert (tmp_path / ".venv/bin/python").exists()
    assert not has_pip()


BASE = ".cache/loraforge/base/SmolLM2-135M-Instruct"


@linux
@pytest.mark.slow
def test_the_workflow_resumes_after_an_interrupt(tmp_path: Path) -> None:
    pytest.importorskip("snakemake")
    base = [sys.executable, "-m", "loraforge", "fleet", "base", "--out", BASE]
    subprocess.run(base, cwd=ROOT, check=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
    root = tmp_path / "repository"
    shutil.copytree(
        ROOT, root, symlinks=True,
        ignore=lambda folder, names: {
            name for name in names
            if name == "__pycache__" or (Path(folder) == ROOT and name.startswith(".")) or name == "results"
        },
    )  # fmt: skip
    (root / BASE).parent.mkdir(parents=True)
    (root / BASE).symlink_to((ROOT / BASE).resolve())
    environment(root)
    arguments = ("--", "--configfile", "config/tiny.yaml")
    with open(tmp_path / "first.log", "w") as log:
        process = start(root, *arguments, stdout=log)
        evaluation = root / "results/tiny/logs/evaluate_quality.log"
        until(
            lambda: (
                process.poll() is not None
                or (evaluation.exists() and re.search("eval|arm", evaluation.read_text()))
            ),
            "the evaluation",
            300,
        )
        assert process.poll() is None, (tmp_path / "first.log").read_text()
        process.send_signal(signal.SIGINT)
        assert process.wait(WAIT_S) == 130
    first = (tmp_path / "first.log").read_text()
    assert first.endswith("==> interrupted; run the same command again to resume\n")
    assert functions(root)["at_work"]() == []
    assert not list((root / ".snakemake").glob("locks/*"))
    returncode, output = finish(start(root, *arguments), 400)
    assert returncode == 0, output
    assert "figures done in" in output
    assert "cache_factors" not in output.rpartition("Job stats")[2]
    assert (root / "results/tiny/figures/quality.svg").is_file()
