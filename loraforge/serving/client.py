"""Open-loop client over OpenAI's streaming completions, which vLLM and SGLang both serve (paper B.1, B.4).

Every request is sent when the workload says so, however many are open, over a connection of its own, once. What goes
wrong is recorded with the request; nothing is sent again and nothing is left out.
"""

from __future__ import annotations

import asyncio
import errno
import json
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Literal

from pydantic import BaseModel, Field, ValidationError

from loraforge.errors import InputError, MissingDependencyError, UsageError
from loraforge.progress import Ticker
from loraforge.runtime.sglang import STOP_AT
from loraforge.serving.records import RequestRecord, Run, RunRecord, Stop
from loraforge.serving.workload import Request, Workload, copy_of

try:
    import aiohttp
except ImportError as error:
    raise MissingDependencyError(
        "aiohttp is not installed", remedy="pip install 'loraforge[serving]'"
    ) from error

Engine = Literal["vllm", "sglang"]
_PROBE_S = 30.0  # for the list of models: an engine that is busy may be slow to answer
_HEADERS = {"Content-Type": "application/json", "Connection": "close"}
_QUOTED = 200  # characters of a server's message that a record keeps


@dataclass(frozen=True)
class Options:
    """How a workload is replayed.

    stop: ``exact`` asks for output_tokens whatever the model says; ``exact-eos`` does so without telling the engine to
    ignore EOS, which engines admit otherwise (paper B.7); ``natural`` ends at EOS and has output_tokens as cap;
    ``early`` declares the cap of ``caps``, and has the server end the answer after output_tokens as though EOS came,
    which SGLang with the plugin does. base_only: ask the base model in place of every adapter. copies: names under
    which the server has each adapter, asked for in turn. timeout_s: seconds from sending a request to its end.
    """

    engine: Engine = "vllm"
    stop: Stop = "exact"
    base_only: bool = False
    timeout_s: float = 600.0
    caps: Mapping[str, int] = field(default_factory=dict)
    copies: int = 1


def asked_model(request: Request, base: str, options: Options) -> str:
    """Name that a request asks for: its adapter's, or the base model's."""
    if options.base_only or request.adapter is None:
        return base
    return copy_of(request.adapter, request.id % options.copies, options.copies)


def body(request: Request, base: str, options: Options) -> dict[str, Any]:
    """The JSON of one request. SGLang takes the adapter beside the base model's name, vLLM in its place."""
    model = asked_model(request, base, options)
    asked: dict[str, Any] = {
        "model": base if options.engine == "sglang" else model,
        "prompt": request.prompt if isinstance(request.prompt, str) else list(request.prompt),
        "max_tokens": request.output_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if options.engine == "sglang" and model != base:
        asked["lora_path"] = model
    if options.stop == "early":
        asked |= {
            "max_tokens": options.caps[request.fleet],
            "min_tokens": request.output_tokens,  # a model of random weights may come upon EOS before
            "custom_params": {STOP_AT: request.output_tokens},
            "skip_special_tokens": False,
        }
    elif options.stop != "natural":
        asked |= {
            "min_tokens": request.output_tokens,
            "ignore_eos": options.stop == "exact",
            "skip_special_tokens": False,
        }
    return asked


async def base_model(url: str) -> str:
    """Name of the base model that a server states. Raises InputError where none answers with one."""
    try:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_PROBE_S)) as session,
            session.get(f"{url}/v1/models") as response,
        ):
            response.raise_for_status()
            cards = (await response.json())["data"]
            return str(next(card["id"] for card in cards if card.get("parent") is None))
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        raise InputError(
            f"no engine answers there ({_reason(error)})", path=url, remedy="start one, or name its address"
        ) from error
    except (KeyError, TypeError, AttributeError, StopIteration) as error:
        raise InputError(
            "lists no base model at /v1/models", path=url, remedy="name a server of vLLM or SGLang"
        ) from error


def replay(
    workload: Workload,
    urls: Mapping[str, str],
    options: Options,
    *,
    warmup: int = 0,
    conditioning: bool = False,
    before: Callable[[], None] | None = None,
    ticker: Ticker | None = None,
) -> Run:
    """Replay a workload and return its records; interrupted or not, whatever was seen is in them.

    urls: fleet -> server. warmup: requests sent first and not recorded. conditioning: send the whole workload once,
    untimed, before the timed replay. before: called after these passes, before the clock starts: for snapshots.
    ticker: advanced once a timed request. SIGINT and SIGTERM end the replay, and so
    does an address where nobody listens any more: ``run.ended`` then says why. Raises InputError where a fleet has no
    server, or no engine answers there.
    """
    if missing := {request.fleet for request in workload.requests} - urls.keys():
        raise InputError(
            f"has no server for fleet {min(missing)!r}",
            key="url",
            remedy=f"pass --url {min(missing)}=http://...",
        )
    return asyncio.run(_passes(workload, urls, options, warmup, conditioning, before, ticker))


async def _passes(
    workload: Workload,
    urls: Mapping[str, str],
    options: Options,
    warmup: int,
    conditioning: bool,
    before: Callable[[], None] | None,
    ticker: Ticker | None,
) -> Run:
    _allow_connections(len(workload.requests))
    used = {request.fleet for request in workload.requests}
    servers = {fleet: urls[fleet].rstrip("/") for fleet in sorted(used)}
    bases = {fleet: await base_model(url) for fleet, url in servers.items()}
    untimed: dict[str, int] = {}
    failed = 0
    stopped = _Stopped()
    with stopped.by_signals():
        passes = {"warmup": workload.first(warmup)} if warmup else {}
        if conditioning:
            passes["conditioning"] = workload
        for name, part in passes.items():
            rows = await _Replay(part, servers, bases, options, stopped).run()
            untimed[name] = len(rows)
            failed += sum(row.failure is not None for row in rows)
        if before is not None:
            before()
        started = datetime.now(UTC).isoformat(timespec="milliseconds")
        rows = await _Replay(workload, servers, bases, options, stopped, ticker).run()
    if stopped.why is None and any(row.failure is not None for row in rows):
        await _missed(servers, stopped)
    header = workload.header
    return Run(
        run=RunRecord(
            workload=workload.sha256,
            requests_sha256=header["requests_sha256"],
            arrivals_sha256=header["arrivals_sha256"],
            outputs_sha256=header["outputs_sha256"],
            engine=options.engine,
            seed=header["seed"],
            rate=header["rate"],
            stop=options.stop,
            base_only=options.base_only,
            caps=dict(options.caps),
            copies=options.copies,
            timeout_s=options.timeout_s,
            urls=servers,
            started=started,
            untimed=untimed,
            untimed_failed=failed,
            ended=stopped.why,
        ),
        requests=tuple(rows),
    )


async def _missed(servers: Mapping[str, str], stopped: _Stopped) -> None:
    """Say so where a server went away after the last request was sent, when nobody was refused any more."""
    for url in servers.values():
        try:
            await base_model(url)
        except InputError:
            stopped.set(f"no engine answers at {url} any more")


class _Stopped:
    """Whether the replay is to end early, and why: the first reason stays."""

    def __init__(self) -> None:
        self.why: str | None = None
        self.event = asyncio.Event()

    def set(self, why: str) -> None:
        self.why = self.why or why
        self.event.set()

    @contextmanager
    def by_signals(self) -> Iterator[None]:
        """Set on SIGINT and SIGTERM; as before afterwards. A thread that gets no signals has nothing to handle."""
        loop = asyncio.get_running_loop()
        previous: dict[signal.Signals, Any] = {}
        try:
            for number in (signal.SIGINT, signal.SIGTERM):
                handler = signal.getsignal(number)
                with suppress(ValueError, RuntimeError):
                    loop.add_signal_handler(number, self.set, f"interrupted by {number.name}")
                    previous[number] = handler
            yield
        finally:
            for number, handler in previous.items():
                loop.remove_signal_handler(number)
                signal.signal(number, handler)


class _Usage(BaseModel):
    prompt_tokens: int | None = Field(None, ge=0)
    completion_tokens: int | None = Field(None, ge=0)


class _Choice(BaseModel):
    text: str | None = None
    finish_reason: str | None = None


class _Event(BaseModel):
    """What is read of an event of the stream."""

    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: Any = None


@dataclass
class _Seen:
    """What was seen of one answer so far; times on the clock of the replay."""

    sent_s: float | None = None
    first_s: float | None = None
    text_s: float | None = None
    end_s: float | None = None
    prompt_tokens: int | None = None
    stated: int | None = None
    chunks: int = 0
    finish_reason: str | None = None
    done: bool = False

    def take(self, event: _Event, now: float) -> None:
        """Take one event of the stream. Raises _Failed for an error that the server sends in it."""
        if event.error is not None:
            raise _Failed(f"server: {_quote(event.error)}")
        if event.usage is not None:
            self.prompt_tokens, self.stated = event.usage.prompt_tokens, event.usage.completion_tokens
        for choice in event.choices or ():
            self.first_s = now if self.first_s is None else self.first_s
            self.end_s = now
            self.finish_reason = choice.finish_reason or self.finish_reason
            if choice.text:
                self.text_s = now if self.text_s is None else self.text_s
                self.chunks += 1


class _Failed(Exception):
    """The answer was not had as asked; the text is the reason."""


@dataclass
class _Replay:
    """One pass over a workload."""

    workload: Workload
    servers: Mapping[str, str]
    bases: Mapping[str, str]
    options: Options
    stopped: _Stopped
    ticker: Ticker | None = None
    started: float = field(default_factory=time.perf_counter)

    async def run(self) -> list[RequestRecord]:
        """Send every request at its time; records in order of the workload."""
        bodies = [  # made before the clock starts, since a long prompt takes milliseconds
            json.dumps(body(request, self.bases[request.fleet], self.options)).encode()
            for request in self.workload.requests
        ]
        connector = aiohttp.TCPConnector(limit=0, force_close=True)  # no bound, and no connection twice
        tasks: list[asyncio.Task[RequestRecord]] = []
        async with aiohttp.ClientSession(
            connector=connector, timeout=aiohttp.ClientTimeout(total=self.options.timeout_s)
        ) as session:
            self.started = time.perf_counter()
            for request, data in zip(self.workload.requests, bodies, strict=True):
                await self._wait_until(request.arrival_s)
                if self.stopped.event.is_set():
                    break
                tasks.append(asyncio.create_task(self._ask(session, request, data)))
            await self._drain(tasks)
        rows = [task.result() for task in tasks]
        unsent = self.workload.requests[len(rows) :]
        return rows + [self._record(request, _Seen(), f"not sent: {self.stopped.why}") for request in unsent]

    def _now(self) -> float:
        return time.perf_counter() - self.started

    async def _wait_until(self, when_s: float) -> None:
        left = when_s - self._now()
        if left <= 0:
            await asyncio.sleep(0)  # late: what was sent before gets its turn all the same
            return
        with suppress(TimeoutError):
            await asyncio.wait_for(self.stopped.event.wait(), left)

    async def _drain(self, tasks: list[asyncio.Task[RequestRecord]]) -> None:
        """Wait for every answer, or for the end of the replay, which ends them."""
        stop = asyncio.create_task(self.stopped.event.wait())
        waiting: list[asyncio.Future[Any]] = [stop, asyncio.gather(*tasks)]
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        stop.cancel()
        for task in tasks:
            task.cancel()  # those that ended stay as they are; the others record it
        await asyncio.gather(*tasks)

    async def _ask(self, session: aiohttp.ClientSession, request: Request, data: bytes) -> RequestRecord:
        seen = _Seen()
        failure = None
        try:
            await self._stream(session, request, data, seen)
            failure = self._shortfall(request, seen)
        except asyncio.CancelledError:
            failure = self.stopped.why or "cancelled"
        except _Failed as error:
            failure = str(error)
        except TimeoutError:
            failure = f"timeout after {self.options.timeout_s:g} s"
        except (aiohttp.ClientError, OSError, ValueError) as error:
            failure = _reason(error)
            if isinstance(error, aiohttp.ClientConnectorError) and error.errno == errno.ECONNREFUSED:
                self.stopped.set(f"nobody listens at {self.servers[request.fleet]}")
        if failure is not None:
            seen.end_s = self._now()
        if self.ticker is not None:
            self.ticker.advance()
        return self._record(request, seen, failure)

    async def _stream(
        self, session: aiohttp.ClientSession, request: Request, data: bytes, seen: _Seen
    ) -> None:
        seen.sent_s = self._now()
        url = f"{self.servers[request.fleet]}/v1/completions"
        async with session.post(url, data=data, headers=_HEADERS) as response:
            if response.status != 200:
                raise _Failed(f"HTTP {response.status}: {_quote(_message(await response.text()))}")
            async for event in events(response.content.iter_any()):
                if event == "[DONE]":
                    seen.done = True
                    return
                try:
                    seen.take(_Event.model_validate_json(event), self._now())
                except ValidationError as error:
                    raise _Failed(f"no event of completions: {_quote(event)}") from error

    def _shortfall(self, request: Request, seen: _Seen) -> str | None:
        """Why an answer without an error is not the one asked for, or None."""
        if not seen.done:
            return "stream ended before [DONE]"
        if seen.first_s is None:
            return "stream without an answer"
        if seen.finish_reason == "abort":
            return "server: aborted the request"
        got = seen.chunks if seen.stated is None else seen.stated
        if self.options.stop != "natural" and got != request.output_tokens:
            return f"{got} output tokens in place of {request.output_tokens}"
        return None

    def _record(self, request: Request, seen: _Seen, failure: str | None) -> RequestRecord:
        answered = seen.first_s is not None
        return RequestRecord(
            id=request.id,
            fleet=request.fleet,
            adapter=request.adapter,
            model=asked_model(request, self.bases[request.fleet], self.options),
            asked_tokens=request.output_tokens,
            scheduled_s=request.arrival_s,
            sent_s=seen.sent_s,
            first_s=seen.first_s,
            text_s=seen.text_s,
            end_s=seen.end_s,
            prompt_tokens=seen.prompt_tokens,
            output_tokens=(seen.chunks if seen.stated is None else seen.stated) if answered else None,
            counted=("chunks" if seen.stated is None else "usage") if answered else None,
            finish_reason=seen.finish_reason,
            failure=failure,
        )


async def events(pieces: AsyncIterator[bytes]) -> AsyncIterator[str]:
    """Data of each server-sent event, however the network cut the bytes. An event without its blank line is none."""
    left = b""
    data: list[str] = []
    async for piece in pieces:
        *lines, left = (left + piece).split(b"\n")
        for line in lines:
            text = line.rstrip(b"\r").decode()
            if text.startswith("data:"):
                data.append(text[5:].removeprefix(" "))
            elif not text and data:
                yield "\n".join(data)
                data = []


def _message(text: str) -> Any:
    """The message of an error's body: both engines wrap it in JSON, each in its own way."""
    try:
        value = json.loads(text)
    except ValueError:
        return text
    if isinstance(value, dict):
        inner = value.get("error", value)
        return inner.get("message", inner) if isinstance(inner, dict) else inner
    return value


def _quote(value: Any) -> str:
    if isinstance(value, dict):
        value = value.get("message", value)
    printable = str(value).encode(errors="replace").decode()  # JSON may hold halves of characters
    return " ".join(printable.split())[:_QUOTED]


def _reason(error: BaseException) -> str:
    """One line for an error whose text may be empty."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:_QUOTED].removesuffix(": ").removesuffix(":")


def _allow_connections(count: int) -> None:
    """Raise this process's limit of open files so that every request may be open at once."""
    try:
        import resource
    except ImportError:  # only POSIX has it
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count + 256
    if soft != resource.RLIM_INFINITY and soft < wanted:
        allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, allowed), hard))


def parse_urls(texts: list[str], fleets: list[str]) -> dict[str, str]:
    """Fleet -> server, of ``URL`` (of every fleet) or ``FLEET=URL``. Raises UsageError for anything else."""
    found: dict[str, str] = {}
    for text in texts:
        fleet, is_one, url = text.partition("=")
        if not is_one or "://" in fleet:
            fleet, url = "", text
        if not url.startswith(("http://", "https://")):
            raise UsageError(f"{text!r} is no address", key="--url", remedy="write http://HOST:PORT")
        if fleet and fleet not in fleets:
            raise UsageError(
                f"the workload has no fleet {fleet!r}", key="--url", remedy=f"choose from {', '.join(fleets)}"
            )
        found |= {fleet: url} if fleet else {name: url for name in fleets if name not in found}
    return found
