"""The multi-process service of a run: a daemon before the engines and gone after them, however the run ends.

A stand-in for NVIDIA's program is on PATH, a process that serves a socket as that does; tests/gpu has the real one.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml
from test_engines import exists
from test_sweep import Declare, process, servers, sweep, text, wait_for

from loraforge.errors import InputError, MissingDependencyError, OutputError, UsageError
from loraforge.serving.client import replay
from loraforge.serving.experiment import load_experiment
from loraforge.serving.mps import GPUS, PIPES, TOOL, MpsError, service
from loraforge.serving.points import RECORDS, read_sweep

STAND_IN = Path(__file__).with_name("mps_tool.py")
SHORT: dict[str, Any] = {"protocol": "reduced", "mps": True, "arms": ["original_native"], "warmup": 0}
SHORT |= {"points": [{"rate": 400, "requests": 1, "seeds": [1]}]}
LONG = SHORT | {"points": [{"rate": 50, "requests": 20, "seeds": [1]}]}


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where the daemon's folder will be, short enough for sockets; the stand-in is on PATH."""
    tool = tmp_path / "bin" / TOOL
    tool.parent.mkdir()
    tool.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S "{STAND_IN}" "$@"\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tool.parent}:{os.environ['PATH']}")
    monkeypatch.delenv(GPUS, raising=False)
    folder = Path(f"/tmp/mps-{os.getpid()}")
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr("tempfile.tempdir", None)
    yield folder
    left = list(folder.iterdir())
    shutil.rmtree(folder)
    assert not left


def environment(pid: int) -> dict[str, str]:
    """Of a process that runs."""
    with suppress(OSError):
        items = Path(f"/proc/{pid}/environ").read_text().split("\0")
        return dict(item.split("=", 1) for item in items if "=" in item)
    return {}


def of_daemon(folder: Path) -> list[int]:
    """Processes that have to do with a daemon whose folder is in ``folder``."""
    pids = [int(entry.name) for entry in Path("/proc").glob("[0-9]*")]
    return [pid for pid in pids if environment(pid).get(PIPES, "").startswith(f"{folder}/") and exists(pid)]


def daemons(folder: Path) -> list[int]:
    """Those of them that are one."""
    found = of_daemon(folder)
    return [pid for pid in found if Path(f"/proc/{pid}/cmdline").read_text().endswith("\0-f\0")]


def test_engines_are_clients_of_one_daemon_that_ends_after_them(
    declare: Declare, tmp_path: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = declare(**SHORT | {"arms": ["original_native", "base_only"]})
    monkeypatch.setenv(GPUS, "2,5")
    seen: list[dict[str, str]] = []
    found: list[int] = []

    def watched(*arguments: Any, **options: Any) -> Any:
        seen.extend(environment(pid) for pid in servers(path))
        found.extend(daemons(temporary))
        return replay(*arguments, **options)

    monkeypatch.setattr("loraforge.serving.sweep.replay", watched)
    outcome = sweep(path)
    assert (outcome.problems, outcome.left) == ([], 0)
    assert len(seen) == 4  # two fleets of two arms
    assert {engine[GPUS] for engine in seen} == {"0,1"}  # what the daemon sees, numbered anew
    assert len({engine[PIPES] for engine in seen}) == 1
    assert len(found) == 2
    assert len(set(found)) == 1  # one daemon for both arms
    assert of_daemon(temporary) == []
    assert [start.gpus for start in read_sweep(tmp_path / "out").starts] == ["2,5", "2,5"]


def test_a_daemon_sees_the_gpus_of_the_run_and_answers(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with service() as one, service() as other:
        folder = Path(one.environment[PIPES])
        assert one.environment == {PIPES: str(folder)}  # all GPUs keep their numbers
        assert folder.parent == temporary
        assert folder.stat().st_mode & 0o077 == 0
        assert one.trouble() is other.trouble() is None
        assert one.servers() != other.servers()
        assert len(daemons(temporary)) == 2
        monkeypatch.setenv(GPUS, "GPU-1a,-1,0")
        with service() as third:
            assert third.environment[GPUS] == "0"
            (pid,) = set(daemons(temporary)) - {one._process.pid, other._process.pid}
            assert environment(pid)[GPUS] == "GPU-1a,-1,0"
    assert of_daemon(temporary) == []


def test_it_ends_where_engines_do_not_start(declare: Declare, temporary: Path) -> None:
    outcome = sweep(declare("--crash", **SHORT))
    assert "RuntimeError: out of memory" in outcome.problems[0]
    assert of_daemon(temporary) == []


def test_it_ends_where_the_run_raises(declare: Declare, temporary: Path) -> None:
    path = declare(**SHORT)
    with (
        socket.create_server(("127.0.0.1", load_experiment(path).fleets["f1"].port)),
        pytest.raises(UsageError, match="is in use"),
    ):
        sweep(path)
    assert of_daemon(temporary) == []


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_it_ends_where_the_run_is_ended(
    declare: Declare, tmp_path: Path, temporary: Path, how: signal.Signals
) -> None:
    path = declare(**LONG)
    running = process(path, token_s=60)
    wait_for(lambda: '"record":"start"' in text(tmp_path / "out" / RECORDS))
    assert len(daemons(temporary)) == 1
    assert len(of_daemon(temporary)) == 4  # its server and two engines
    running.send_signal(how)
    _, said = running.communicate(timeout=120)
    assert "Traceback" not in said
    if how == signal.SIGKILL:
        wait_for(lambda: not list(temporary.iterdir()), 30)
    assert of_daemon(temporary) == []


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_it_ends_where_the_run_is_ended_before_it_answers(
    declare: Declare, tmp_path: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch, how: signal.Signals
) -> None:
    monkeypatch.setenv("MPS_TOOL", "mute")
    running = process(declare(**SHORT))
    wait_for(lambda: daemons(temporary))
    running.send_signal(how)
    running.communicate(timeout=120)
    wait_for(lambda: not list(temporary.iterdir()), 30 if how == signal.SIGKILL else 0)
    assert of_daemon(temporary) == []
    assert not (tmp_path / "out").exists()


def test_one_that_minds_nothing_is_killed_with_its_server(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MPS_TOOL", "stubborn")
    with service(stop_s=0.3) as found:
        assert len(of_daemon(temporary)) == 2
        assert found.trouble() is None
    assert of_daemon(temporary) == []


def test_no_such_program(
    declare: Declare, tmp_path: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = declare(**SHORT)
    monkeypatch.setenv("PATH", str(tmp_path / "none"))
    with pytest.raises(MissingDependencyError, match=rf"mps: {TOOL} is not on PATH; put the folder of"):
        sweep(path)
    assert not (tmp_path / "out").exists()


def test_one_that_does_not_come_up(
    declare: Declare, tmp_path: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = declare(**SHORT)
    monkeypatch.setenv("MPS_TOOL", "crash")
    with pytest.raises(
        MpsError, match=r"ended with exit status 1; the end of its log:\nStarting .*\nno CUDA-"
    ):
        sweep(path)
    assert not (tmp_path / "out").exists()
    running = process(path)
    _, said = running.communicate(timeout=60)
    assert running.returncode == 1
    assert "no CUDA-capable device is detected" in said
    assert "Traceback" not in said
    monkeypatch.setenv("MPS_TOOL", "mute")
    with (
        pytest.raises(MpsError, match=r"does not answer after 0.5 s; the end of its log"),
        service(start_s=0.5),
    ):
        pass
    (tmp_path / "bin" / TOOL).write_text("")  # nothing that can be run
    with pytest.raises(MpsError, match=rf"{TOOL}: mps: cannot be run \("), service():
        pass


def test_what_is_wrong_with_the_environment_is_said(
    tmp_path: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(GPUS, "-1")
    with (
        pytest.raises(UsageError, match=rf"{GPUS}: names no GPU, which mps needs; name one, or unset"),
        service(),
    ):
        pass
    monkeypatch.delenv(GPUS)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / ("x" * 60)))
    with (
        pytest.raises(UsageError, match="TMPDIR: is too long a path for sockets; name a shorter one"),
        service(),
    ):
        pass
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "x"))
    with pytest.raises(OutputError, match="cannot be written"), service():
        pass


def test_engines_that_are_no_clients_are_not_measured(
    declare: Declare, tmp_path: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MPS_TOOL", "serverless")
    outcome = sweep(declare(**SHORT))
    failure = "the MPS daemon has no server: no engine is its client"
    assert outcome.problems == [f"original_native: {failure}"]
    found = read_sweep(tmp_path / "out")
    assert [start.failure for start in found.starts] == [failure]
    assert found.points == ()


def test_a_daemon_that_dies_ends_the_run(
    declare: Declare, tmp_path: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = declare(**SHORT | {"arms": ["original_native", "base_only"]})

    def killing(*arguments: Any, **options: Any) -> Any:
        for pid in daemons(temporary):
            os.kill(pid, signal.SIGKILL)
        return replay(*arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr("loraforge.serving.sweep.replay", killing)
        with pytest.raises(
            MpsError, match="mps: the MPS daemon ended with SIGKILL; run the same command again"
        ):
            sweep(path)
    found = read_sweep(tmp_path / "out")
    assert [point.stopped for point in found.points] == ["the MPS daemon ended with SIGKILL"]
    assert [start.arm for start in found.starts] == ["original_native"]  # without it nothing is started
    assert of_daemon(temporary) == []
    assert sweep(path).left == 0


def test_it_is_part_of_the_setting(declare: Declare, tmp_path: Path, temporary: Path) -> None:
    path = declare(**SHORT | {"mps": False})
    assert sweep(path, budget_s=0.001).left == 1
    records = tmp_path / "out" / RECORDS
    setting, *others = records.read_text().splitlines()
    before = json.loads(setting)
    assert before["config"].pop("mps") is False
    records.write_text(
        "\n".join([json.dumps(before), *others]) + "\n"
    )  # as it was recorded before there was any
    assert sweep(path).left == 0
    path.write_text(path.read_text().replace("mps: false", "mps: true"))
    with pytest.raises(InputError, match=r"config.mps: was False when this folder was begun, and is True"):
        sweep(path)


def test_what_it_does_not_go_with_is_refused(declare: Declare) -> None:
    for change, message in (
        ({"protocol": "cpu"}, "mps is for engines on GPUs, and protocol cpu has none"),
        ({"env": {GPUS: "1"}}, "env declares CUDA_VISIBLE_DEVICES, which mps sets for every engine"),
        ({"env": {PIPES: "/tmp/x"}}, "env declares CUDA_MPS_PIPE_DIRECTORY, which mps sets"),
    ):
        path = declare(**SHORT | change)
        with pytest.raises(InputError, match=message):
            load_experiment(path)
        path.write_text(path.read_text().replace("mps: true", "mps: false"))
        load_experiment(path)
    path = declare(**SHORT)
    declared = yaml.safe_load(path.read_text())
    declared["fleets"]["f1"]["env"] = {GPUS: "0"}
    path.write_text(yaml.safe_dump(declared))
    with pytest.raises(InputError, match="fleet f1 declares CUDA_VISIBLE_DEVICES, which mps sets"):
        load_experiment(path)
