import json
import re
import shlex
import shutil
import sys
from pathlib import Path

from loraforge.config import parse_config
from loraforge import jit
from loraforge.digest import source_digest
from loraforge.evidence import index as evidence_index
from loraforge.evidence.targets import TARGETS
from loraforge.fleet.lock import load_lock

CONFIG = parse_config(config, "workflow configuration")
SETTINGS = CONFIG.model_dump(mode="json")
LOCK = str(CONFIG.fleet)
FLEET = load_lock(CONFIG.fleet)
RESULTS = f"results/{CONFIG.name}"

BASE = f".cache/loraforge/base/{FLEET.base_model.name}"
FLEET_FILES = [str(path) for path in FLEET.local_files(CONFIG.fleet)]
INDEX = "evidence/INDEX.sha256"
HAS_GPU = shutil.which("nvidia-smi") is not None

# What is scored on a GPU is the reduced protocol (the paper's, on another fleet); the rest runs on the CPU.
ON_GPU = CONFIG.quality.device != "cpu" and HAS_GPU

# Serving kernels are timed on a GPU alone, and only where their target is named: `figures` draws them from committed
# evidence. CPU operations are timed where there is an engine to hold them against.
KERNEL_STUDIES = ["shrink_ablation", "expand_ablation", "dispatch"]
LIVE = ["spectra", "allocation", "recompression", "quality"]
LIVE += ["cpu_ops"] if CONFIG.cpu_ops.engine is not None else []
STUDIES = [*dict.fromkeys([*LIVE, "cpu_ops", *KERNEL_STUDIES])]
STUDY_OF = {figure: study for study in STUDIES for figure in TARGETS[study].figures}

# Jobs run the loraforge beside this snakemake, whether or not its environment is activated. A prefix takes the place of
# Snakemake's strict mode, without which a command before `| tee` fails unheard.
shell.prefix(
    f"set -euo pipefail; PATH={shlex.quote(str(Path(sys.executable).parent))}:$PATH; "
)


def section(*names):
    """The part of the configuration that a job depends on, as its parameter, so that a change runs it again."""
    return json.dumps({name: SETTINGS[name] for name in names}, sort_keys=True)


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
    return [f"{RESULTS}/figures/{figure}.svg" for figure in TARGETS[study].figures]


def committed_figures(study):
    """Pictures of a study from every machine with committed evidence."""
    return [
        f"{RESULTS}/figures/{host}/{figure}.svg"
        for name, host in EVIDENCE
        if name == study
        for figure in TARGETS[study].figures
    ]


def figure_files(study):
    """All pictures of a study that its target asks for on this machine."""
    runs_here = study in LIVE or (study in KERNEL_STUDIES and HAS_GPU)
    return [*(live_figures(study) if runs_here else []), *committed_figures(study)]


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
    for (study, host), bag in evidence_index.parse(Path(INDEX).read_text())[1].items()
    if study in STUDIES
}


wildcard_constraints:
    policy="[a-z]+(-[a-z]+)*",
    budget=r"\d+(-\d+)?",
    study="|".join(STUDIES),
    figure="|".join(STUDY_OF),
