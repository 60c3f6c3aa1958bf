"""Records of serving experiments with the form and the trends of real ones: saturation, queues, loads; all seeded."""

from __future__ import annotations

from typing import Any

import numpy as np

from loraforge.files import sha256_text

HOST = {
    "cpu": "Some CPU", "cores": 2, "memory_gib": 8.0, "gpu": None, "gpus": 0, "os": "Some OS", "python": "3.11.7",
}  # fmt: skip
MIXED = ("original_native", "original_loraforge", "spectral_loraforge", "base_only")
CELLS = tuple(
    f"{weights}_{by}" for weights in ("original", "uniform", "spectral") for by in ("native", "loraforge")
)
ARMS = {
    "mixed_serving_vllm": (*MIXED, "spectral_native"),
    "six_cell": CELLS,
    "fixed_work": ("original_native", "original_loraforge", "spectral_native", "spectral_loraforge", "base_only"),
    "residency": tuple(
        f"{weights}_{by}{room}"
        for weights in ("original", "spectral")
        for by in ("native", "loraforge")
        for room in ("", "_full")
    ),
    "natural_serving": MIXED,
    "cpu_serving": MIXED,
    "mixed_serving_sglang": MIXED,
    "stopping_contract": ("spectral_loraforge", "base_only"),
    "single_fleet": MIXED,
    "adapters_500": ("spectral_loraforge", "spectral_loraforge_x10"),
}  # fmt: skip
STOPS = {"stopping_contract": ("early", "exact", "exact-eos")}
CAPS = {"qwen50": 837, "llama35": 428}
RATES = {
    "mixed_serving_vllm": (16.0, 32.0, 64.0, 128.0, 256.0),
    "mixed_serving_sglang": (4.0, 8.0, 16.0, 32.0, 48.0, 64.0, 128.0), "stopping_contract": (64.0,),
    "single_fleet": (4.0, 8.0, 16.0, 32.0, 48.0, 64.0), "adapters_500": (128.0,),
    "six_cell": (16.0, 32.0), "fixed_work": (64.0, 128.0),
    "residency": (128.0,), "natural_serving": (32.0, 128.0, 512.0), "cpu_serving": (0.5, 1.0, 2.0, 4.0),
}  # fmt: skip
# output tokens a second that an arm reaches, of those of the base model
REACH = {
    "original_native": 0.4, "original_loraforge": 0.45, "uniform_native": 0.6, "uniform_loraforge": 0.93,
    "spectral_native": 0.58, "spectral_loraforge": 0.9, "base_only": 1.0,
}  # fmt: skip
TOKENS = 50  # of an answer


def serving(
    target: str, grid: bool = False, seeds: tuple[int, ...] = (101, 102), stop: str | None = None
) -> list[dict[str, Any]]:
    """A setting, and a start an arm with its points: two rates, or on the ``grid`` all that are reported. Of
    ``single_fleet`` an experiment of each fleet, one after the other."""
    if target == "single_fleet":
        return [
            record
            for fleet in ("qwen50", "llama35")
            for record in experiment(target, [fleet], grid=grid, seeds=seeds, stop=stop)
        ]
    fleets = ["qwen50", "llama35"] if target in PAGED else ["smol" if target in REAL else "qwen50"]
    return experiment(target, fleets, grid=grid, seeds=seeds, stop=stop)


def experiment(
    target: str, fleets: list[str], *, grid: bool, seeds: tuple[int, ...], stop: str | None
) -> list[dict[str, Any]]:
    """One experiment of these fleets."""
    on_cpu, real = target == "cpu_serving", target in REAL
    rates = RATES[target] if grid else RATES[target][:2]
    seeds = (101, 102, 103) if grid else seeds
    stop = stop or ("natural" if real else "exact")
    loads = {(rate, seed): workload(rate, seed) for rate in rates for seed in seeds}
    lengths = {"kind": "lognormal", "mean": TOKENS, "sigma": 0.6, "low": 1, "high": 512}
    vocabulary = None if real else {"low": 0, "high": 1000, "tokens": {"kind": "fixed", "tokens": 256}}
    config = {
        "experiment": target, "stop": stop, "stops": STOPS.get(target),
        "lengths_of": "spectral_loraforge", "decode_steps": 0 if real else 4,
        "fleets": {
            fleet: {
                "output_tokens": lengths, "vocabulary": vocabulary, "budget_gib": None if real else 14.0 - 4 * number,
                "cap_tokens": CAPS.get(fleet) if target in STOPS else None,
                "adapters": {"original": f"fleets/{fleet}", "spectral": f"results/{fleet}/spectral_1-12"},
            }
            for number, fleet in enumerate(fleets)
        },
    }  # fmt: skip
    hashes = {"a": sha256_text("weights of a\n"), "b": sha256_text("weights of b\n")}
    found: list[dict[str, Any]] = [
        {
            "record": "setting", "schema": "loraforge.serving-experiment/1", "experiment": target,
            "protocol": "cpu" if on_cpu else "reduced", "config": config, "host": HOST,
            "engine": "sglang 0.5.22" if target in SGLANG else "vllm 0.26.0",
            "arms": list(ARMS[target]), "workloads": list(loads.values()),
            "adapters": {fleet: {"original": hashes} for fleet in fleets},
        }
    ]  # fmt: skip
    draw = np.random.default_rng(len(target))
    for number, arm in enumerate(ARMS[target]):
        found.append(start(target, arm, number, fleets))
        found += [
            point(
                target,
                arm,
                number,
                load,
                fleets,
                40.0 if on_cpu else 3000.0,
                float(draw.normal(1.0, 0.02)),
                stop,
                way,
            )
            for load in loads.values()
            for way in STOPS.get(target, (None,))
        ]
    return found


# experiments of both fleets, whose arms load adapters
PAGED = ("mixed_serving_vllm", "mixed_serving_sglang", "fixed_work", "residency", "stopping_contract")
REAL = ("natural_serving", "cpu_serving")  # the fleet with weights, whose answers end by themselves
SGLANG = ("mixed_serving_sglang", "stopping_contract", "single_fleet", "adapters_500")


def admission(way: str) -> dict[str, Any]:
    """What a scheduler admitted: more at once where it knows that answers are short."""
    more = 1 if way == "early" else 2
    return {
        "window_s": 60.0, "steps": 900, "held": 400, "prefill_steps": 100, "prefill_tokens_mean": 800.0 * more,
        "prefill_requests_mean": 3.0 * more, "decode_requests_mean": 30.0 * more, "decode_requests_peak": 40 * more,
        "running_peak": 44 * more, "waiting_peak": 300,
    }  # fmt: skip


def workload(rate: float, seed: int, lengths: str = "drawn") -> dict[str, Any]:
    """Hashes of the workload of a rate and seed."""
    return {
        "rate": rate, "seed": seed, "requests": 1700, "sha256": sha256_text(f"all {rate} {seed} {lengths}"),
        "requests_sha256": sha256_text(f"asked {seed}"), "arrivals_sha256": sha256_text(f"when {rate} {seed}"),
        "outputs_sha256": sha256_text(f"{lengths} {seed}"),
    }  # fmt: skip


def counters(arm: str, loads: int, gib: float) -> dict[str, Any] | None:
    """A snapshot of an engine's counters; the base model has none."""
    if arm == "base_only":
        return None
    native = "native" in arm
    size = int(gib * 2**30)
    return {
        "execution": "native" if native else "loraforge", "pool": "native" if native else "ragged", "loads": loads,
        "unloads": 0, "source_bytes": loads * 2**28, "moves": 0, "capacity_bytes": size, "live_bytes": size,
        "lora_bytes": size, "peak_allocated_bytes": None, "adapters": 28,
    }  # fmt: skip


def start(target: str, arm: str, number: int, fleets: list[str]) -> dict[str, Any]:
    """A start of an arm's engines."""
    state = {
        "slots": 28,
        "max_rank": 128,
        "pool": None,
        "pool_bytes": None,
        "counters": counters(arm, 0, 1.0),
    }
    return {
        "record": "start", "experiment": target, "arm": arm, "number": number, "started": "2026-11-29T10:00:00+00:00",
        "healthy_s": 80.0, "engines": dict.fromkeys(fleets, state), "failure": None,
    }  # fmt: skip


def point(
    target: str,
    arm: str,
    number: int,
    load: dict[str, Any],
    fleets: list[str],
    base: float,
    luck: float,
    stop: str,
    way: str | None = None,
) -> dict[str, Any]:
    """One rate and seed: a queue once more is offered than the arm reaches, and loads where not all adapters fit."""
    rate, requests = load["rate"], load["requests"]
    paged = target in PAGED and arm.startswith("original") and not arm.endswith("_full")
    reach = (
        base
        * REACH[arm.removesuffix("_full").removesuffix("_x10")]
        * (1.0 if paged or "original" not in arm else 1.4)
        * luck
    )
    offered = rate * TOKENS
    tok_s = offered * reach / (offered**4 + reach**4) ** 0.25
    tokens = requests * TOKENS
    figures = {
        "requests": requests, "completed": requests, "failed": 0, "without_text": 0, "prompt_tokens": 256 * requests,
        "output_tokens": tokens, "wall_s": tokens / tok_s, "requests_s": tok_s / TOKENS, "tok_s": tok_s,
        "ttft_p50_s": 0.05 + max(0.0, tokens / tok_s - requests / rate) / 2, "ttft_p99_s": 1.0,
        "ttft_text_p50_s": 0.06, "ttft_text_p99_s": 1.0, "tpot_p50_ms": 20.0 / luck,
        "tpot_p99_ms": 30.0 + 400.0 * (offered / reach) ** 2 / (4 + (offered / reach) ** 2), "lag_p99_ms": 1.5,
    }  # fmt: skip
    loads = int(800 * luck) if paged else 0
    gib = {"original": 12.0, "uniform": 0.8, "spectral": 0.9, "base": 0.0}[arm.split("_")[0]]
    after = counters(arm, loads, gib)
    window = {"loads": loads, "unloads": loads, "source_bytes": loads * 2**28, "moves": 0, "after": after}
    lora, on_cpu = after is not None, target == "cpu_serving"
    own = stop == "natural" and arm == "base_only"
    return {
        "record": "point", "experiment": target, "arm": arm, "rate": rate, "seed": load["seed"], "start": number,
        "figures": figures, "fleets": dict.fromkeys(fleets, figures), "loads": loads * len(fleets) if lora else None,
        "source_bytes": loads * len(fleets) * 2**28 if lora else None,
        "pool_bytes": int(gib * 2**30) * len(fleets) if lora else None,
        "peak_allocated_bytes": None if on_cpu or not lora else int((20 + gib) * 2**30),
        "windows": dict.fromkeys(fleets, window) if lora else {},
        "workload": workload(rate, load["seed"], "repeated") if own else load,
        "requests": f"requests/{arm}-{way}-{rate:g}-{load['seed']}.jsonl",
        "requests_file_sha256": sha256_text(f"{arm} {load}"),
        "untimed": {"conditioning": requests}, "untimed_failed": 0, "failures": {},
        "started": "2026-11-29T10:02:00.000+00:00", "ended": "2026-11-29T10:03:00.000+00:00", "stopped": None,
    } | ({"stop": way, "admission": {fleet: admission(way) for fleet in fleets}} if way else {})  # fmt: skip
