"""Workloads are the same bytes for the same seed, have the declared statistics, and refuse a changed byte."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from loraforge.errors import InputError, IntegrityError
from loraforge.serving.workload import (
    Lengths,
    LoadSpec,
    load_spec,
    make_workload,
    read_workload,
    write_workload,
)

ARRIVALS = [0.26339, 0.435838, 0.480165, 0.72513]
ROUTING = ["a", "b", "a", "b"]
SHA256 = "4f4005d99eea106a4c05c7ffde0536959de5f5e1ffc21a84782eecf88ea9d47b"
LENGTHS: TypeAdapter[Any] = TypeAdapter(Lengths)


def test_the_same_seed_gives_the_same_bytes_in_another_process(tmp_path: Path, make_load: Any) -> None:
    spec = make_load("a", "b", None, each=5)
    write_workload(tmp_path / "here.jsonl", make_workload(spec, 101, 8.0))
    program = (
        "import sys; from pathlib import Path; from loraforge.serving.workload import *;"
        "write_workload(Path(sys.argv[2]), make_workload(LoadSpec.model_validate_json(sys.argv[1]), 101, 8.0))"
    )
    line = [sys.executable, "-c", program, spec.model_dump_json(), str(tmp_path / "there.jsonl")]
    subprocess.run(line, check=True)
    here, there = ((tmp_path / name).read_bytes() for name in ("here.jsonl", "there.jsonl"))
    assert here == there
    other = make_workload(spec, 102, 8.0)
    assert other.sha256 != json.loads(here.split(b"\n")[0])["sha256"]


def test_known_bytes_stay(make_load: Any) -> None:
    """Evidence quotes workloads by hash: a change of the draws has to be seen here."""
    made = make_workload(make_load("a", "b", each=2), 101, 4.0)
    assert [request.arrival_s for request in made.requests] == ARRIVALS
    assert [request.adapter for request in made.requests] == ROUTING
    assert made.sha256 == SHA256


def test_another_rate_scales_arrivals_alone(make_load: Any) -> None:
    spec = make_load("a", "b", "c", each=20)
    slow, fast = make_workload(spec, 7, 2.0), make_workload(spec, 7, 16.0)
    for key in ("requests_sha256", "outputs_sha256"):
        assert slow.header[key] == fast.header[key]
    assert slow.header["arrivals_sha256"] != fast.header["arrivals_sha256"]
    for one, other in zip(slow.requests, fast.requests, strict=True):
        assert one.arrival_s == pytest.approx(8 * other.arrival_s, abs=1e-5)


def test_arrivals_are_poisson(make_load: Any) -> None:
    """Gaps have mean 1/rate, and a coefficient of variation of one; bounds are five standard errors."""
    count, rate = 8_000, 32.0
    made = make_workload(make_load("a", each=count), 3, rate)
    times = [0.0, *(request.arrival_s for request in made.requests)]
    gaps = [later - earlier for earlier, later in pairwise(times)]
    mean = sum(gaps) / count
    deviation = math.sqrt(sum((gap - mean) ** 2 for gap in gaps) / count)
    assert mean * rate == pytest.approx(1, abs=5 / math.sqrt(count))
    assert deviation / mean == pytest.approx(1, abs=5 * math.sqrt(2 / count))
    assert min(gaps) >= 0


def test_even_popularity_is_exact_and_mixed(make_load: Any) -> None:
    made = make_workload(make_load("a", "b", None, each=50), 5, 1.0)
    order = [request.adapter for request in made.requests]
    assert Counter(order) == {"a": 50, "b": 50, None: 50}
    assert len(set(order[:10])) > 1


def test_zipf_popularity(make_load: Any) -> None:
    names = [f"a{i}" for i in range(8)]
    count = 8_000
    made = make_workload(make_load(*names, kind="zipf", requests=count, s=1.0), 11, 1.0)
    counts = sorted(Counter(request.adapter for request in made.requests).values(), reverse=True)
    whole = sum(1 / rank for rank in range(1, 9))
    for rank, got in enumerate(counts, start=1):
        expected = 1 / rank / whole
        assert got / count == pytest.approx(
            expected, abs=5 * math.sqrt(expected / count)
        )  # five standard errors
    flat = make_workload(make_load(*names, kind="zipf", requests=count, s=0.0), 11, 1.0)
    assert max(Counter(request.adapter for request in flat.requests).values()) < 1.15 * count / 8


@given(
    st.one_of(
        st.builds(lambda n: {"kind": "fixed", "tokens": n}, st.integers(1, 99)),
        st.builds(
            lambda low, more: {"kind": "uniform", "low": low, "high": low + more},
            st.integers(1, 99),
            st.integers(0, 99),
        ),
        st.builds(
            lambda low, more, sigma: {
                "kind": "lognormal",
                "mean": 50,
                "sigma": sigma,
                "low": low,
                "high": low + more,
            },
            st.integers(1, 99),
            st.integers(0, 99),
            st.floats(0.01, 4),
        ),
    ),
    st.floats(1e-12, 1, exclude_max=True),
    st.floats(1e-12, 1, exclude_max=True),
)
def test_lengths_stay_in_their_range_and_rise_with_the_quantile(
    declared: dict[str, Any], u: float, v: float
) -> None:
    lengths = LENGTHS.validate_python(declared)
    low, high = sorted((u, v))
    assert declared.get("low", declared.get("tokens")) <= lengths.at(low) <= lengths.at(high)
    assert lengths.at(high) <= declared.get("high", declared.get("tokens"))


def test_a_lognormal_has_its_declared_mean() -> None:
    lengths = LENGTHS.validate_python({"kind": "lognormal", "mean": 200, "sigma": 0.5, "high": 10**6})
    count = 50_000
    mean = sum(lengths.at((place + 0.5) / count) for place in range(count)) / count
    assert mean == pytest.approx(200, rel=2e-3)


@pytest.mark.parametrize(
    "declared",
    [
        {"kind": "uniform", "low": 3, "high": 2},
        {"kind": "fixed", "tokens": 0},
        {"kind": "lognormal", "mean": float("nan"), "sigma": 1, "high": 5},
    ],
)
def test_impossible_lengths_are_refused(declared: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        LENGTHS.validate_python(declared)


def test_round_trip_and_every_changed_byte(tmp_path: Path, make_load: Any) -> None:
    path = tmp_path / "w.jsonl"
    made = make_workload(make_load("a", None, each=2), 1, 4.0)
    write_workload(path, made)
    assert read_workload(path) == made
    lines = path.read_text().splitlines()
    for change, key in (
        (lambda rows: rows[1].update(arrival_s=rows[1]["arrival_s"] + 1e-6), "arrivals_sha256"),
        (lambda rows: rows[2].update(output_tokens=5), "outputs_sha256"),
        (lambda rows: rows[2]["prompt"].append(3), "requests_sha256"),
        (lambda rows: rows.pop(), "count"),
        (lambda rows: rows[0].update(seed=2), "sha256"),
        (lambda rows: rows[0]["load"]["popularity"].update(requests=3), "sha256"),
    ):
        rows = [json.loads(line) for line in lines]
        change(rows)
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        with pytest.raises(IntegrityError, match=f"w.jsonl: {key}: holds .*, its header says "):
            read_workload(path)
    path.write_text("{}\n")
    with pytest.raises(InputError, match="is no workload of schema"):
        read_workload(path)
    path.write_text(lines[0] + '\n{"id": 0}\n')
    with pytest.raises(InputError, match="arrival_s: Field required"):
        read_workload(path)


def test_outputs_of_an_earlier_run(make_load: Any) -> None:
    spec = make_load("a", "b", each=2)
    drawn = make_workload(spec, 1, 4.0)
    matched = make_workload(spec, 1, 4.0, {0: 7, 1: 8, 2: 9, 3: 10}, "f" * 64)
    assert [request.output_tokens for request in matched.requests] == [7, 8, 9, 10]
    assert matched.header["outputs_from"] == "f" * 64
    for key in ("requests_sha256", "arrivals_sha256"):
        assert matched.header[key] == drawn.header[key]
    with pytest.raises(InputError, match="outputs of 1 requests, this workload 4 requests"):
        make_workload(spec, 1, 4.0, {0: 7})


@pytest.mark.parametrize("rate", [0.0, -1.0, math.inf, math.nan])
def test_no_rate(make_load: Any, rate: float) -> None:
    with pytest.raises(InputError, match=r"rate: 1e-320 is no rate; give one under which requests arrive"):
        make_workload(make_load("a"), 1, 1e-320)
    with pytest.raises(InputError, match="is no rate"):
        make_workload(make_load("a"), 1, rate)


def test_prompts_of_a_file(tmp_path: Path) -> None:
    rows = [
        {"prompt": "of a", "adapter": "a", "answer": "x"},
        {"prompt": [5, 6], "adapter": "b"},
        {"prompt": "of any"},
    ]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    load = {
        "fleets": {
            "f": {
                "adapters": ["a", "b", None],
                "prompts": "p.jsonl",
                "output_tokens": {"kind": "fixed", "tokens": 1},
            }
        },
        "popularity": {"kind": "even", "requests": 40},
    }
    (tmp_path / "load.yaml").write_text(yaml.safe_dump(load))
    made = make_workload(load_spec(tmp_path / "load.yaml"), 1, 4.0)
    seen: dict[str | None, set[Any]] = {"a": set(), "b": set(), None: set()}
    for request in made.requests:
        seen[request.adapter].add(request.prompt)
    assert seen == {"a": {"of a", "of any"}, "b": {(5, 6), "of any"}, None: {"of any"}}
    declared = made.header["load"]["fleets"]["f"]["prompts"]
    assert declared.startswith("sha256:")
    assert str(tmp_path) not in json.dumps(made.header)

    (tmp_path / "p.jsonl").write_text(json.dumps(rows[0]) + "\n")
    with pytest.raises(InputError, match=r"p.jsonl: has no prompt for 'b'"):
        make_workload(load_spec(tmp_path / "load.yaml"), 1, 4.0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"popularity": {"kind": "even"}}, r"popularity.even.requests: Field required"),
        ({"fleets": {}}, r"load.yaml: fleets: .*at least 1"),
        ({"rate": 4}, r"rate: Extra inputs"),
    ],
)
def test_bad_loads_name_their_key(
    tmp_path: Path, make_load: Any, change: dict[str, Any], message: str
) -> None:
    load = make_load("a").model_dump(mode="json") | change
    (tmp_path / "load.yaml").write_text(yaml.safe_dump(load))
    with pytest.raises(InputError, match=message):
        load_spec(tmp_path / "load.yaml")


def test_the_documented_load_is_one() -> None:
    example = (LoadSpec.__doc__ or "").partition("yaml\n")[2]
    made = make_workload(LoadSpec.model_validate(yaml.safe_load(example)), 1, 4.0)
    assert len(made.requests) == 1000
    assert {request.adapter for request in made.requests} == {"city_country", "es_conj", None}
    assert all(8 <= request.output_tokens <= 64 for request in made.requests)


def test_a_fleet_needs_one_source_of_prompts_and_no_adapter_twice(make_load: Any) -> None:
    load = make_load("a").model_dump(mode="json")
    load["fleets"]["fleet"]["prompts"] = "p.jsonl"
    with pytest.raises(ValidationError, match="either vocabulary or prompts"):
        LoadSpec.model_validate(load)
    with pytest.raises(ValidationError, match="names an adapter twice"):
        make_load("a", "a")
