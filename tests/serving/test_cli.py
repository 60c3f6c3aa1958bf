"""``loraforge bench workload`` and ``serve``, as processes: files, exit codes, and what is said."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from server import CompletionsServer

from loraforge.serving.records import read_run

ROOT = Path(__file__).resolve().parents[2]


def line(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "loraforge", "bench", *map(str, arguments)]


def bench(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(line(*arguments), capture_output=True, text=True, env=environment(), timeout=60)


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT)}


@pytest.fixture
def load(tmp_path: Path, make_load: Any) -> Path:
    path = tmp_path / "load.yaml"
    path.write_text(yaml.safe_dump(make_load("ok", "short", None, each=4).model_dump(mode="json")))
    return path


def test_from_a_load_to_records_and_to_matched_lengths(tmp_path: Path, load: Path) -> None:
    made, matched, records = (tmp_path / name for name in ("w.jsonl", "m.jsonl", "r.jsonl"))
    assert (
        "12 requests, 48 output tokens, sha256 " in bench("workload", load, "--rate", 500, "-o", made).stderr
    )
    with CompletionsServer() as server:
        done = bench(
            "serve",
            "--url",
            server.url,
            "--workload",
            made,
            "-o",
            records,
            "--stop",
            "natural",
            "--warmup",
            2,
        )
    assert done.returncode == 0, done.stderr
    assert "tok_s" in done.stderr
    run = read_run(records)
    assert [request.failure for request in run.requests] == [None] * 12
    assert run.run.untimed == {"warmup": 2}

    done = bench("workload", load, "--rate", 500, "--outputs-from", records, "-o", matched)
    assert "12 requests, 44 output tokens" in done.stderr  # "short" ended a token early, four times
    lines = [json.loads(text) for text in matched.read_text().splitlines()]
    assert {row["adapter"]: row["output_tokens"] for row in lines[1:]} == {"ok": 4, "short": 3, None: 4}

    done = bench("workload", load, "--rate", 500, "--seed", 7, "--outputs-from", records, "-o", matched)
    assert done.returncode == 3
    assert "r.jsonl: is a run of other requests; take a run of this load and this seed" in done.stderr


def test_failures_are_told(tmp_path: Path, load: Path) -> None:
    made, records = tmp_path / "w.jsonl", tmp_path / "r.jsonl"
    bench("workload", load, "--rate", 500, "-o", made)
    with CompletionsServer() as server:
        done = bench("serve", "--url", f"fleet={server.url}", "--workload", made, "-o", records)
    assert done.returncode == 0
    assert "failed: 4 x 3 output tokens in place of 4" in done.stderr


def _replaying(server: CompletionsServer, made: Path, records: Path) -> subprocess.Popen[str]:
    """``bench serve`` in a process of its own, whose first request has come."""
    process = subprocess.Popen(
        line("serve", "--url", server.url, "--workload", made, "-o", records),
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
    )
    deadline = time.monotonic() + 120
    while not server.bodies and time.monotonic() < deadline:
        time.sleep(0.02)
    return process


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupt_leaves_records_that_say_so(
    tmp_path: Path, load: Path, number: signal.Signals, code: int
) -> None:
    made, records = tmp_path / "w.jsonl", tmp_path / "r.jsonl"
    bench("workload", load, "--rate", 4, "-o", made)
    with CompletionsServer() as server:
        process = _replaying(server, made, records)
        process.send_signal(number)
        _, said = process.communicate(timeout=120)
    assert process.returncode == code, said
    assert f"interrupted by {number.name}; " in said
    run = read_run(records)
    assert run.run.ended == f"interrupted by {number.name}"
    assert len(run.requests) == 12


def test_a_killed_server(tmp_path: Path, load: Path) -> None:
    made, records = tmp_path / "w.jsonl", tmp_path / "r.jsonl"
    bench("workload", load, "--rate", 8, "-o", made)
    with CompletionsServer() as server:
        process = _replaying(server, made, records)
        server.close()
        _, said = process.communicate(timeout=120)
    assert process.returncode == 1, said
    assert f"r.jsonl: nobody listens at {server.url}; start the server again, and run again" in said
    assert read_run(records).run.ended == f"nobody listens at {server.url}"


def test_without_aiohttp_the_extra_is_named(tmp_path: Path, load: Path) -> None:
    bench("workload", load, "--rate", 4, "-o", tmp_path / "w.jsonl")
    program = "import sys; sys.modules['aiohttp'] = None; from loraforge.cli import main; main(sys.argv[1:])"
    arguments = (
        "--url",
        "http://127.0.0.1:9",
        "--workload",
        tmp_path / "w.jsonl",
        "-o",
        tmp_path / "r.jsonl",
    )
    done = subprocess.run(
        [sys.executable, "-c", program, "bench", "serve", *map(str, arguments)],
        capture_output=True,
        text=True,
        env=environment(),
    )
    assert done.returncode == 7
    assert done.stderr == "error: aiohttp is not installed; pip install 'loraforge[serving]'\n"


def test_bad_input_has_its_exit_code(tmp_path: Path, load: Path) -> None:
    made = tmp_path / "w.jsonl"
    assert bench("workload", tmp_path / "no.yaml", "--rate", 4, "-o", made).returncode == 3
    assert bench("workload", load, "--rate", 0, "-o", made).returncode == 3
    bench("workload", load, "--rate", 4, "-o", made)
    made.write_text(made.read_text().replace('"output_tokens":4', '"output_tokens":5', 1))
    for url, code in (("http://127.0.0.1:9", 4), ("ftp://h", 4)):
        assert bench("serve", "--url", url, "--workload", made, "-o", tmp_path / "r").returncode == code
    bench("workload", load, "--rate", 4, "-o", made)
    for url, code in (("http://127.0.0.1:9", 3), ("ftp://h", 2)):
        done = bench("serve", "--url", url, "--workload", made, "-o", tmp_path / "r")
        assert done.returncode == code
        assert done.stderr.count("error: ") == 1
    assert not (tmp_path / "r").exists()
