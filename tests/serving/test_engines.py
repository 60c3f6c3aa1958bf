"""Engine processes: started, watched and ended for real; command lines as the engines take them."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from server import CompletionsServer

from loraforge.errors import OutputError, UsageError
from loraforge.serving.client import Options, replay
from loraforge.serving.engines import Engine, EngineConfig, EngineError, command, is_free, starting
from loraforge.serving.listener import stranger
from loraforge.serving.metrics import failures
from loraforge.serving.workload import make_workload

SERVER = Path(__file__).with_name("server.py")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def port() -> int:
    return free_port()


def engine(port: int, log: Path, *arguments: str, **options: Any) -> Engine:
    line = [sys.executable, str(SERVER), "--port", str(port), *arguments]
    return Engine(line, port=port, log=log, **({"start_s": 30.0, "stop_s": 5.0} | options))


def exists(pid: int) -> bool:
    """Whether a process runs: a zombie, which nobody may reap in a container, does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@pytest.fixture
def vanish() -> Iterator[list[int]]:
    """Process ids that must be gone at the end of the test."""
    pids: list[int] = []
    yield pids
    assert pids
    assert not [pid for pid in pids if exists(pid)]


def test_it_serves_inside_the_block_and_is_gone_after_it(
    tmp_path: Path, port: int, vanish: list[int], make_load: Any
) -> None:
    workload = make_workload(make_load("ok", each=5), 1, 200.0)
    with engine(port, tmp_path / "logs" / "engine.log", "--start-s", "0.3") as running:
        assert running.pid is not None
        vanish.append(running.pid)
        assert running.poll() is None
        with pytest.raises(UsageError, match="has been started already"):
            running.start()
        run = replay(workload, {"fleet": running.url}, Options())
    assert failures(run.requests) == {}
    assert running.pid is None
    assert "loading weights" in (tmp_path / "logs" / "engine.log").read_text()
    with engine(port, tmp_path / "again.log"):  # the port is free at once
        pass


def test_a_crash_at_the_start_shows_the_log(tmp_path: Path, port: int) -> None:
    log = tmp_path / "engine.log"
    expected = (
        r"exit status 1 before it was healthy; the end of .*engine.log:\nloading weights\nRuntimeError: out"
    )
    with pytest.raises(EngineError, match=expected), engine(port, log, "--crash"):
        pass


def test_a_start_that_takes_too_long(tmp_path: Path, port: int, vanish: list[int]) -> None:
    slow = engine(port, tmp_path / "engine.log", "--start-s", "60", start_s=1.0)
    slow.start()
    assert slow.pid is not None
    vanish.append(slow.pid)
    with pytest.raises(EngineError, match=r"is not healthy after 1 s; the end of .*:\nloading weights"):
        slow.wait_healthy()
    slow.stop()
    started = time.monotonic()
    with pytest.raises(EngineError, match="is not healthy after 1 s"), slow:
        pass
    assert time.monotonic() - started < 10


def test_what_ignores_sigterm_is_killed_with_its_children(
    tmp_path: Path, port: int, vanish: list[int]
) -> None:
    log = tmp_path / "engine.log"
    with engine(port, log, "--stubborn", stop_s=0.5):
        found = re.search(r"child (\d+) of (\d+)", log.read_text())
        assert found is not None
        vanish += [int(found[1]), int(found[2])]
        assert all(exists(pid) for pid in vanish)


def test_children_of_a_server_that_died_are_ended(tmp_path: Path, port: int, vanish: list[int]) -> None:
    log = tmp_path / "engine.log"
    with engine(port, log, "--stubborn", stop_s=0.5) as running:
        found = re.search(r"child (\d+) of (\d+)", log.read_text())
        assert found is not None
        vanish.append(int(found[1]))
        os.kill(int(found[2]), 9)
        while running.poll() is None:
            time.sleep(0.02)
        assert exists(vanish[0])


_STARTER = """
import sys, time
from pathlib import Path
from loraforge.serving.engines import Engine
port, server, log = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
engines = [
    Engine([sys.executable, server, "--port", str(port + place), "--stubborn"], port=port + place,
           log=log / f"{place}.log", start_s=30.0, stop_s=0.5)
    for place in range(2)
]
for engine in engines:
    engine.start()
for engine in engines:
    engine.wait_healthy()
print(*(engine.pid for engine in engines), flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGABRT])
def test_a_starter_that_is_killed_leaves_no_engine(
    tmp_path: Path, vanish: list[int], how: signal.Signals
) -> None:
    starter = subprocess.Popen(
        [sys.executable, "-c", _STARTER, str(two_ports()), str(SERVER), str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert starter.stdout is not None
    vanish += map(int, starter.stdout.readline().split())
    logs = [(tmp_path / f"{place}.log").read_text() for place in range(2)]
    vanish += [int(found[1]) for log in logs if (found := re.search(r"child (\d+) of", log))]
    assert len(vanish) == 4
    starter.send_signal(how)
    starter.wait()
    starter.stdout.close()
    deadline = time.monotonic() + 15
    while any(map(exists, vanish)) and time.monotonic() < deadline:
        time.sleep(0.05)


def test_a_server_that_ended_well_is_watched_no_more(tmp_path: Path, port: int, vanish: list[int]) -> None:
    running = engine(port, tmp_path / "engine.log")
    with running:
        assert running.pid is not None
        guard = None if running._process is None else running._process._guard
        assert guard is not None
        assert guard.poll() is None
        vanish += [running.pid, guard.pid]
    assert guard.returncode == 0


def two_ports() -> int:
    """The first of two free ports that follow each other."""
    while True:
        first = free_port()
        if first < 65535 and is_free("127.0.0.1", first + 1):
            return first


def test_an_error_in_the_block_leaves_nothing(tmp_path: Path, port: int, vanish: list[int]) -> None:
    def fail() -> None:
        with engine(port, tmp_path / "engine.log") as running:
            assert running.pid is not None
            vanish.append(running.pid)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()


def test_several_start_at_once_and_end_together(tmp_path: Path, vanish: list[int]) -> None:
    two = [engine(free_port(), tmp_path / f"{place}.log", "--start-s", "1.5") for place in range(2)]
    started = time.monotonic()
    with starting(two):
        for one in two:
            one.wait_healthy()
        vanish += [running.pid for running in two if running.pid is not None]
        assert len(vanish) == 2
        assert all(running.trouble() is None for running in two)
        os.kill(vanish[0], signal.SIGKILL)
        while two[0].poll() is None:
            time.sleep(0.02)
        assert two[0].trouble() == "ended with SIGKILL"
    assert time.monotonic() - started < 60


def test_one_that_does_not_start_leaves_the_others_to_the_block(tmp_path: Path) -> None:
    good = engine(free_port(), tmp_path / "good.log")
    bad = engine(free_port(), tmp_path / "bad.log", "--crash")
    with starting([good, bad]):
        good.wait_healthy()
        with pytest.raises(EngineError, match="ended with exit status 1 before it was healthy"):
            bad.wait_healthy()
        assert good.trouble() is None
    assert good.pid is None


def test_a_signal_waits_until_all_are_gone(tmp_path: Path, vanish: list[int]) -> None:
    stubborn = engine(free_port(), tmp_path / "engine.log", "--stubborn", stop_s=1.0)

    def end() -> None:
        with starting([stubborn]):
            stubborn.wait_healthy()
            assert stubborn.pid is not None
            vanish.append(stubborn.pid)
            threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()  # while it is being ended

    with pytest.raises(KeyboardInterrupt):
        end()
    assert stubborn.pid is None


def test_a_port_in_use(tmp_path: Path) -> None:
    with CompletionsServer() as other:
        port = int(other.url.rpartition(":")[2])
        with (
            pytest.raises(UsageError, match=rf"port {port} is in use; end what listens there, or"),
            engine(port, tmp_path / "engine.log"),
        ):
            pass
        assert not (tmp_path / "engine.log").exists()


def test_another_program_that_takes_the_port_meanwhile_is_not_measured(tmp_path: Path, port: int) -> None:
    late = Engine(
        [sys.executable, "-c", "import time; time.sleep(60)"], port=port, log=tmp_path / "engine.log"
    )
    late.start()
    try:
        with engine(port, tmp_path / "other.log") as other:
            if stranger(0, port) is None:
                pytest.skip("this system hides whose sockets are")
            with pytest.raises(
                EngineError, match=rf"does not listen at port {port}: process {other.pid} answers"
            ):
                late.wait_healthy()
            assert late.trouble() == f"does not listen at port {port}: process {other.pid} answers there"
        assert late.trouble() == "no longer answers at /health"
    finally:
        late.stop()


def test_no_such_program_and_no_log(tmp_path: Path, port: int) -> None:
    absent = Engine([str(tmp_path / "python")], port=port, log=tmp_path / "engine.log")
    with pytest.raises(UsageError, match=r"python: cannot be run \(No such file"), absent:
        pass
    absent.stop()
    with pytest.raises(OutputError, match=r"cannot be written \(Is a directory\)"):
        engine(port, tmp_path).start()
    with pytest.raises(UsageError, match="has not been started"):
        absent.poll()


def test_the_environment_reaches_it(tmp_path: Path, port: int) -> None:
    log = tmp_path / "engine.log"
    line = [sys.executable, "-c", "import os; print(os.environ['POOL'], os.environ['PATH'] != '')"]
    with (
        pytest.raises(EngineError, match="ended with exit status 0"),
        Engine(line, port=port, log=log, env={"POOL": "7"}),
    ):
        pass
    assert log.read_text() == "7 True\n"


def test_numbers_of_threads_are_an_engines_own(
    tmp_path: Path, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        monkeypatch.setenv(name, "16")  # as Snakemake does
    log = tmp_path / "engine.log"
    show = "import os; print(sorted(item for item in os.environ.items() if item[0].endswith('_NUM_THREADS')))"
    with (
        pytest.raises(EngineError, match="ended with exit status 0"),
        Engine([sys.executable, "-c", show], port=port, log=log, env={"MKL_NUM_THREADS": "3"}),
    ):
        pass
    assert log.read_text() == "[('MKL_NUM_THREADS', '3')]\n"


def config(**changed: Any) -> EngineConfig:
    values: dict[str, Any] = {
        "engine": "vllm",
        "model": "/models/base",
        "python": "/venv/bin/python",
        "port": 8123,
        "context": 2048,
        "kv_tokens": 16384,
        "lora": {"adapters": {"a": "/fleet/a", "b": "/fleet/b"}, "slots": 2, "max_rank": 64},
    }
    return EngineConfig(**(values | changed))


def test_the_command_of_vllm() -> None:
    assert " ".join(command(config(extra=("--enforce-eager",)))) == (
        "/venv/bin/python -m vllm.entrypoints.openai.api_server --model /models/base --host 127.0.0.1 --port 8123"
        " --served-model-name base --dtype bfloat16 --max-model-len 2048 --max-num-seqs 256"
        " --block-size 16 --num-gpu-blocks-override 1024 --no-enable-prefix-caching"
        " --enable-lora --max-loras 2 --max-lora-rank 64 --max-cpu-loras 2"
        " --lora-modules a=/fleet/a b=/fleet/b --enforce-eager"
    )
    odd = {"adapters": {"a": "/fleet, a=b/a"}, "slots": 1, "max_rank": 64}
    assert command(config(lora=odd))[-1] == '{"name": "a", "path": "/fleet, a=b/a"}'
    base = command(config(lora=None, kv_tokens=None, prefix_cache=True))
    assert base[-3:] == ["--max-num-seqs", "256", "--enable-prefix-caching"]


def test_the_command_of_sglang() -> None:
    lora = {"adapters": {"a": "/fleet/a"}, "slots": 2, "max_rank": 64, "backend": "csgmv"}
    assert " ".join(command(config(engine="sglang", lora=lora))) == (
        "/venv/bin/python -m sglang.launch_server --model-path /models/base --host 127.0.0.1 --port 8123"
        " --served-model-name base --dtype bfloat16 --context-length 2048 --max-running-requests 256"
        " --max-total-tokens 16384 --disable-radix-cache"
        " --enable-lora --max-loras-per-batch 2 --max-lora-rank 64 --lora-backend csgmv --lora-paths a=/fleet/a"
    )


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"kv_tokens": 100}, "100 is no multiple of kv_block 16"),
        (
            {"lora": {"adapters": {"a": "/a"}, "slots": 1, "max_rank": 8, "backend": "csgmv"}},
            "no such option",
        ),
        ({"lora": {"adapters": {}, "slots": 1, "max_rank": 8}}, "at least 1 item"),
        ({"port": 0}, "greater than or equal to 1"),
        ({"sampler": 1}, "Extra inputs"),
    ],
)
def test_configurations_that_make_no_sense(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        config(**changed)


def test_a_port_of_an_ipv6_address() -> None:
    try:
        listener = socket.create_server(("::1", 0), family=socket.AF_INET6)
    except OSError:
        pytest.skip("no IPv6 here")
    with listener:
        port = listener.getsockname()[1]
        assert not is_free("::1", port)
    assert is_free("::1", port)
