"""The client against a real server: what it sends and when, and what it records of every way to fail."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import AsyncIterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from server import CompletionsServer

from loraforge.errors import InputError, UsageError
from loraforge.serving.client import Options, body, events, parse_urls, replay
from loraforge.serving.metrics import failures, summarise, tpot_s, ttft_s
from loraforge.serving.records import RequestRecord, Run, read_run, write_run
from loraforge.serving.workload import Request, Workload, make_workload

FAST = 2000.0  # requests a second: a few requests then take milliseconds to send


def ask(server: CompletionsServer, workload: Workload, **options: Any) -> Run:
    return replay(workload, {"fleet": server.url}, Options(timeout_s=options.pop("timeout_s", 20), **options))


def only(run: Run) -> RequestRecord:
    (row,) = run.requests
    return row


def test_every_request_is_sent_once_as_the_workload_says(make_load: Any) -> None:
    workload = make_workload(make_load("ok", "crumbs", None, each=10, tokens=3), 1, FAST)
    with CompletionsServer() as server:
        run = ask(server, workload)
    assert run.run.ended is None
    assert failures(run.requests) == {}
    assert [row.id for row in run.requests] == list(range(30))
    assert len(server.bodies) == len(server.peers) == 30  # a connection each
    prompts = sorted(list(request.prompt) for request in workload.requests)
    assert sorted(sent["prompt"] for sent in server.bodies) == prompts
    for request, row in zip(workload.requests, run.requests, strict=True):
        assert row.model == (request.adapter or "base")
        assert (row.prompt_tokens, row.output_tokens, row.counted) == (len(request.prompt), 3, "usage")
        assert row.finish_reason == "length"
        assert row.sent_s is not None
        assert row.scheduled_s <= row.sent_s <= row.first_s == row.text_s <= row.end_s  # type: ignore[operator]
    assert run.run.workload == workload.sha256


def test_times_are_those_of_the_server(make_load: Any) -> None:
    workload = make_workload(make_load("ok", each=3, tokens=5), 1, 20.0)
    with CompletionsServer(first_s=0.2, token_s=0.05) as server:
        run = ask(server, workload)
    for row in run.requests:
        ttft, tpot = ttft_s(row), tpot_s(row)
        assert ttft is not None
        assert tpot is not None
        assert 0.2 <= ttft < 0.6
        assert 0.05 <= tpot < 0.15
    summary = summarise(run)
    assert summary["tok_s"] == pytest.approx(15 / summary["wall_s"])  # type: ignore[operator]


def test_the_loop_is_open(make_load: Any) -> None:
    """Requests go out on time while all before them are still unanswered."""
    workload = make_workload(make_load("ok", each=40, tokens=1), 2, 100.0)
    with CompletionsServer(first_s=2.0) as server:
        run = ask(server, workload)
    sent = [row.sent_s for row in run.requests if row.sent_s is not None]
    first_end = min(row.end_s for row in run.requests if row.end_s is not None)
    assert sum(when < first_end for when in sent) == 40
    gaps = [row.sent_s - row.scheduled_s for row in run.requests if row.sent_s is not None]
    assert max(gaps) < 1.0
    arrived = sorted(server.arrived)
    span = workload.requests[-1].arrival_s - workload.requests[0].arrival_s
    assert arrived[-1] - arrived[0] == pytest.approx(span, abs=1.0)


@pytest.mark.parametrize(
    ("adapter", "failure", "tokens"),
    [
        ("e404", "HTTP 404: The model `e404` does not exist.", None),
        ("e500", "HTTP 500: Internal Server Error", None),
        ("inband", "server: EngineCore died", 1),
        ("reset", "ClientPayloadError: ", 2),
        ("short", "3 output tokens in place of 4", 3),
        ("mistyped", "no event of completions: ", None),
        ("garbage", "no event of completions: [1, 2", None),
        ("cut", "stream ended before [DONE]", 4),
        ("hang", "timeout after 0.3 s", None),
    ],
)
def test_failures_are_recorded_with_their_reason(
    make_load: Any, adapter: str, failure: str, tokens: int | None
) -> None:
    workload = make_workload(make_load(adapter, "ok"), 1, FAST)
    with CompletionsServer() as server:
        run = ask(server, workload, timeout_s=0.3 if adapter == "hang" else 20)
    assert len(server.bodies) == 2  # no second try
    bad, good = sorted(run.requests, key=lambda row: row.adapter == "ok")
    assert good.failure is None
    assert bad.failure is not None
    assert bad.failure.startswith(failure)
    assert bad.output_tokens == tokens
    assert bad.end_s is not None
    assert run.run.ended is None
    summary = summarise(run)
    assert (summary["requests"], summary["failed"], summary["output_tokens"]) == (2, 1, 4)


def test_tokens_are_counted_where_usage_is_not_stated(make_load: Any) -> None:
    with CompletionsServer() as server:
        row = only(ask(server, make_workload(make_load("nousage"), 1, FAST)))
    assert (row.output_tokens, row.counted, row.failure) == (4, "chunks", None)


def test_an_answer_without_text_has_a_first_token(make_load: Any) -> None:
    with CompletionsServer() as server:
        run = ask(server, make_workload(make_load("empty"), 1, FAST))
    row = only(run)
    assert (row.output_tokens, row.text_s, row.failure) == (4, None, None)
    assert row.first_s is not None
    assert summarise(run)["without_text"] == 1


def test_stop_contracts() -> None:
    request = Request(id=0, arrival_s=0, fleet="f", adapter="a", prompt=(1, 2), output_tokens=9)
    exact = body(request, "base", Options())
    assert (exact["min_tokens"], exact["max_tokens"], exact["ignore_eos"]) == (9, 9, True)
    assert exact["skip_special_tokens"] is False
    assert body(request, "base", Options(stop="exact-eos")) == exact | {"ignore_eos": False}
    natural = body(request, "base", Options(stop="natural"))
    assert natural.keys().isdisjoint({"min_tokens", "ignore_eos", "skip_special_tokens"})
    assert natural["max_tokens"] == 9
    assert exact["model"] == "a"
    sglang = body(request, "base", Options(engine="sglang"))
    assert (sglang["model"], sglang["lora_path"]) == ("base", "a")
    assert body(request, "base", Options(base_only=True))["model"] == "base"
    assert "lora_path" not in body(request, "base", Options(engine="sglang", base_only=True))


def test_an_early_end_declares_the_cap_and_tells_the_plugin_the_length() -> None:
    request = Request(id=4, arrival_s=0, fleet="f", adapter="a", prompt=(1, 2), output_tokens=9)
    early = body(request, "base", Options(engine="sglang", stop="early", caps={"f": 837}, copies=3))
    assert (early["max_tokens"], early["custom_params"]) == (837, {"loraforge_stop_at": 9})
    assert early["min_tokens"] == 9  # not before, whatever the model says; no scheduler reckons with it
    assert "ignore_eos" not in early  # as a natural stop has none
    assert early["lora_path"] == "a~1"


def test_a_natural_stop_may_be_shorter(make_load: Any) -> None:
    with CompletionsServer() as server:
        row = only(ask(server, make_workload(make_load("short"), 1, FAST), stop="natural"))
    assert (row.failure, row.output_tokens, row.asked_tokens) == (None, 3, 4)


def test_base_only_asks_the_base_model_and_keeps_the_identity(make_load: Any) -> None:
    with CompletionsServer() as server:
        row = only(ask(server, make_workload(make_load("e500"), 1, FAST), base_only=True))
    assert (row.adapter, row.model, row.failure) == ("e500", "base", None)


def test_untimed_passes_are_sent_and_not_recorded(make_load: Any) -> None:
    workload = make_workload(make_load("ok", "e500", each=4), 1, FAST)
    with CompletionsServer() as server:
        run = replay(workload, {"fleet": server.url}, Options(), warmup=3, conditioning=True)
    assert len(server.bodies) == 3 + 8 + 8
    assert run.run.untimed == {"warmup": 3, "conditioning": 8}
    assert run.run.untimed_failed >= 4
    assert len(run.requests) == 8


def test_a_server_that_goes_away_ends_the_replay(make_load: Any) -> None:
    workload = make_workload(make_load("ok", each=100, tokens=50), 1, 50.0)
    with CompletionsServer(token_s=0.01) as server:

        def close() -> None:
            while len(server.bodies) < 20:
                time.sleep(0.02)
            server.close()

        closer = threading.Thread(target=close)
        closer.start()
        run = ask(server, workload)
        closer.join()
    assert run.run.ended == f"nobody listens at {server.url}"
    summary = summarise(run)
    assert summary["requests"] == 100
    assert summary["failed"] == 100 - summary["completed"]  # type: ignore[operator]
    reasons = failures(run.requests)
    assert any(reason.startswith("ClientConnectorError") for reason in reasons)
    assert reasons[f"not sent: nobody listens at {server.url}"] > 10
    sent = sum(row.sent_s is not None for row in run.requests)
    assert sent <= len(server.bodies) + 10  # it gives up at once


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_replay_with_what_was_seen(make_load: Any, number: signal.Signals) -> None:
    workload = make_workload(make_load("ok", "hang", each=500, tokens=2), 1, 50.0)
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with CompletionsServer() as server:

        def kill() -> None:
            while len(server.ended) < 20:
                time.sleep(0.02)
            os.kill(os.getpid(), number)

        threading.Thread(target=kill, daemon=True).start()
        run = ask(server, workload, timeout_s=60)
    assert run.run.ended == f"interrupted by {number.name}"
    reasons = failures(run.requests)
    assert reasons.keys() == {run.run.ended, f"not sent: {run.run.ended}"}
    summary = summarise(run)
    assert summary["completed"] > 3  # type: ignore[operator]
    assert sum(row.sent_s is None for row in run.requests) > 3
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_no_server_and_no_engine(make_load: Any) -> None:
    workload = make_workload(make_load("ok"), 1, FAST)
    with CompletionsServer() as server:
        address = server.url
        with pytest.raises(InputError, match=r"has no server for fleet 'fleet'; pass --url fleet=http"):
            replay(workload, {"other": address}, Options())
        with pytest.raises(InputError, match=r"no engine answers there \(ClientResponseError: 404"):
            replay(workload, {"fleet": f"{address}/elsewhere"}, Options())
    with pytest.raises(InputError, match=r"no engine answers there \(ClientConnectorError"):
        replay(workload, {"fleet": address}, Options())


def test_records_round_trip(tmp_path: Path, make_load: Any) -> None:
    with CompletionsServer() as server:
        run = ask(server, make_workload(make_load("ok", "e500", None), 1, FAST))
    write_run(tmp_path / "r.jsonl", run)
    assert read_run(tmp_path / "r.jsonl") == run
    assert run.outputs() == {row.id: 4 for row in run.requests if row.failure is None}
    (tmp_path / "r.jsonl").write_text('{"record": "other"}\n')
    with pytest.raises(InputError, match=r"r.jsonl: .*holds no records of a replay"):
        read_run(tmp_path / "r.jsonl")


def test_urls() -> None:
    assert parse_urls(["http://h:1"], ["a", "b"]) == {"a": "http://h:1", "b": "http://h:1"}
    assert parse_urls(["b=http://h:2", "http://h:1"], ["a", "b"]) == {"a": "http://h:1", "b": "http://h:2"}
    assert parse_urls(["http://h:1/?x=y"], ["a"]) == {"a": "http://h:1/?x=y"}
    with pytest.raises(UsageError, match="no fleet 'c'; choose from a, b"):
        parse_urls(["c=http://h:1"], ["a", "b"])
    with pytest.raises(UsageError, match="'h:1' is no address"):
        parse_urls(["h:1"], ["a"])


@given(
    st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\r\n"), min_size=1), max_size=6),
    st.data(),
)
def test_events_however_the_bytes_are_cut(payloads: list[str], data: st.DataObject) -> None:
    raw = "".join(f": ping\n\ndata: {payload}\n\n" for payload in payloads).encode()
    edges = sorted({0, len(raw), *data.draw(st.lists(st.integers(0, len(raw)), max_size=12))})

    async def pieces() -> AsyncIterator[bytes]:
        for start, end in pairwise(edges):
            yield raw[start:end]

    async def collect() -> list[str]:
        return [event async for event in events(pieces())]

    assert asyncio.run(collect()) == payloads
