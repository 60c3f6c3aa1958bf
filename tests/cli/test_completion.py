"""Shells complete the command line: commands, options, their values, and paths."""

from __future__ import annotations

import os
import pty
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import get_args

import pytest

from loraforge.config import Policy

ROOT = Path(__file__).resolve().parents[2]
BASH = shutil.which("bash")


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """One in which ``loraforge`` is a command, and the home of somebody new."""
    root = tmp_path_factory.mktemp("shell")
    command = root / "bin" / "loraforge"
    command.parent.mkdir()
    command.write_text(f"#!{sys.executable}\nfrom loraforge.cli import main\nmain()\n")
    command.chmod(0o755)
    (root / "home").mkdir()
    return {
        "PATH": f"{command.parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "HOME": str(root / "home"),
        "TERM": "dumb",
    }


def script(environment: dict[str, str], shell: str) -> str:
    """What ``--show-completion`` prints in ``shell``."""
    done = subprocess.run(
        ["loraforge", "--show-completion", shell],
        env={**environment, "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return done.stdout


@pytest.fixture(scope="module")
def bash_script(environment: dict[str, str]) -> str:
    return script(environment, "bash")


@pytest.mark.skipif(BASH is None, reason="no bash here")
@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("comp", {"compress"}),
        ("compress --dr", {"--dry-run"}),
        ("compress --policy spec", {"spectral", "spectral-nofloor"}),
        ("compress --policy ", set(get_args(Policy))),
        ("compress --budget 1/1", {"1/12", "1/16"}),
        ("compress --dtype ", {"bfloat16", "float16", "float32", "source"}),
        ("compress --layout p", {"padded"}),
        ("allocate --policy fa", {"fair"}),
        ("fleet ve", {"verify"}),
        ("compress fl", set()),  # a path, which bash completes itself
        ("compress --out fl", set()),
    ],
)
def test_bash(environment: dict[str, str], bash_script: str, typed: str, offered: set[str]) -> None:
    words = ["loraforge", *typed.split(" ")]
    code = (
        f"{bash_script}\n"
        f"COMP_WORDS=({' '.join(word or chr(39) * 2 for word in words)}); COMP_CWORD={len(words) - 1}\n"
        '_loraforge_completion loraforge; printf "%s\\n" "${COMPREPLY[@]}"'
    )
    assert BASH is not None
    done = subprocess.run([BASH, "--norc", "-c", code], env=environment, capture_output=True, text=True)
    assert set(done.stdout.split()) == offered, done.stderr


@pytest.mark.skipif(BASH is None, reason="no bash here")
def test_an_interactive_bash_after_installation(environment: dict[str, str], tmp_path: Path) -> None:
    installed = subprocess.run(
        ["loraforge", "--install-completion", "bash"],
        env={**environment, "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert "bash completion installed" in installed.stdout
    with open(Path(environment["HOME"], ".bashrc"), "a") as stream:
        stream.write("PS1='ready> '\n")
    (tmp_path / "work" / "fleet-of-mine").mkdir(parents=True)
    assert BASH is not None
    process, terminal = pty.fork()
    if process == 0:
        os.chdir(tmp_path / "work")
        os.execve(BASH, ["bash", "-i"], environment)
    try:
        seen = ""

        def see(words: str) -> None:
            nonlocal seen
            stop = time.monotonic() + 30
            while words not in seen:
                assert time.monotonic() < stop, seen
                if select.select([terminal], [], [], 0.1)[0]:
                    seen += os.read(terminal, 4096).decode()

        see("ready> ")
        os.write(terminal, b"loraforge compr\t")
        see("loraforge compress ")
        os.write(terminal, b"fl\t")
        see("fleet-of-mine/")
        os.write(terminal, b" --pol\t")
        see("--policy ")
        os.write(terminal, b"spectral-n\t")
        see("spectral-nofloor ")
    finally:
        os.close(terminal)
        os.kill(process, 9)
        os.waitpid(process, 0)


@pytest.mark.skipif(shutil.which("fish") is None, reason="no fish here")
def test_fish(environment: dict[str, str]) -> None:
    code = f"{script(environment, 'fish')}\ncomplete -C 'loraforge compress --policy spec'"
    done = subprocess.run(
        ["fish", "--no-config", "-c", code], env=environment, capture_output=True, text=True
    )
    assert done.stdout.split() == ["spectral", "spectral-nofloor"], done.stderr


def test_what_zsh_is_told(environment: dict[str, str]) -> None:
    assert "#compdef loraforge" in script(environment, "zsh")
    for typed, told in (
        ("loraforge compress --layout ", ['"ragged"', '"padded"', '"both"']),
        ("loraforge compress --out ", ["_files"]),
    ):
        done = subprocess.run(
            ["loraforge"],
            env={**environment, "_LORAFORGE_COMPLETE": "complete_zsh", "_TYPER_COMPLETE_ARGS": typed},
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        for words in told:
            assert words in done.stdout


def test_completion_imports_no_torch(environment: dict[str, str]) -> None:
    code = "import sys; sys.modules['torch'] = None; from loraforge.cli import main; main()"
    asked = {
        "_LORAFORGE_COMPLETE": "complete_bash",
        "COMP_WORDS": "loraforge compress --dtype ",
        "COMP_CWORD": "3",
    }
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment | asked, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.stdout.split() == ["bfloat16", "float16", "float32", "source"], done.stderr
