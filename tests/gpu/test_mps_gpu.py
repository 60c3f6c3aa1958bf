"""NVIDIA's own MPS daemon: real CUDA processes are clients of a run's daemon, and of no other's."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import torch

from loraforge.serving.mps import PIPES, TOOL, Service, service

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(shutil.which(TOOL) is None, reason=f"needs {TOOL}"),
]

# a sum that no other client has, once when it starts and once more for each line
CLIENT = """
import os, sys, torch
own = torch.arange(1 << 20, device="cuda", dtype=torch.float64) + int(sys.argv[1])
print(os.getpid(), int(own.sum().item()), flush=True)
for _ in sys.stdin:
    print(os.getpid(), int(own.flip(0).sum().item()), flush=True)
"""


class Client:
    """A CUDA process. number: what tells its sums apart from another's."""

    def __init__(self, number: int, environment: Mapping[str, str]) -> None:
        self.number = number
        self.process = subprocess.Popen(
            [sys.executable, "-c", CLIENT, str(number)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **environment},
        )

    def check(self) -> None:
        """Assert that the next sum it says is right."""
        assert self.process.stdout is not None
        count = 1 << 20
        said = self.process.stdout.readline().split()
        assert said == [str(self.process.pid), str(count * (count - 1) // 2 + count * self.number)]

    def work(self) -> None:
        """Ask for one more."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()


@contextmanager
def clients(found: Service, *numbers: int) -> Iterator[list[Client]]:
    """CUDA processes under a daemon, all past their first sum; ended after the block."""
    with ExitStack() as stack:
        started = [Client(number, found.environment) for number in numbers]
        for client in started:
            stack.callback(client.process.wait, 60)
            stack.callback(client.process.communicate)  # closes its input, which ends it
        for client in started:
            client.check()
        yield started
    assert [client.process.returncode for client in started] == [0] * len(started)


def listed(found: Service) -> set[int]:
    """Clients of the one server of a daemon."""
    servers = found.servers()
    assert servers is not None
    (server,) = servers
    done = subprocess.run(
        [TOOL],
        input=f"get_client_list {server}\n",
        capture_output=True,
        text=True,
        check=True,
        timeout=30,
        env={**os.environ, **found.environment},
    )
    return set(map(int, done.stdout.split()))


def test_two_processes_share_a_server_and_compute_what_is_right() -> None:
    with service() as found:
        assert found.servers() == []
        assert found.trouble() == "the MPS daemon has no server: no engine is its client"
        with clients(found, 3, 4) as both:
            assert listed(found) == {client.process.pid for client in both}
            assert found.trouble() is None
            for client in both:
                client.work()  # at once
            for client in both:
                client.check()
        (server,) = found.servers() or []
    assert not Path(found.environment[PIPES]).exists()
    assert not _runs(server)


def test_two_daemons_side_by_side_leave_each_other_alone() -> None:
    with service() as one, clients(one, 5) as (mine,):
        with service() as other, clients(other, 6) as (theirs,):
            assert one.servers() != other.servers()
            assert listed(one) == {mine.process.pid}
            assert listed(other) == {theirs.process.pid}
        mine.work()  # the other daemon has ended
        mine.check()
        assert one.trouble() is None


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
