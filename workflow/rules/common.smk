import json
import re
import shlex
import shutil
import sys
from pathlib import Path

from loraforge.config import parse_config
from loraforge.digest import source_digest
from loraforge.evidence import index as evidence_index
from loraforge.fleet.lock import load_lock

CONFIG = parse_config(config, "workflow configuration")
SETTINGS = CONFIG.model_dump(mode="json")
LOCK = str(CONFIG.fleet)
FLEET = load_lock(CONFIG.fleet)
RESULTS = f"results/{CONFIG.name}"

BASE = f".cache/loraforge/base/{FLEET.base_model.name}"
FLEET_FILES = [str(path) for path in FLEET.local_files(CONFIG.fleet)]
INDEX = "evidence/INDEX.sha256"
STUDIES = ["spectra", "allocation", "recompression", "quality"]

# What is scored on a GPU is the reduced protocol (the paper's, on another fleet); the rest runs on the CPU.
ON_GPU = CONFIG.quality.device != "cpu" and shutil.which("nvidia-smi") is not None

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


def figure_files(study):
    """All pictures of a study: of this run, and of every machine with committed evidence."""
    hosts = [host for name, host in EVIDENCE if name == study]
    return [
        f"{RESULTS}/figures/{study}.svg",
        *(f"{RESULTS}/figures/{host}/{study}.svg" for host in hosts),
    ]


def drawn_figures():
    """Folders with figures, drawn by this run or shown in the documentation."""
    folders = [
        Path("docs/figures"),
        Path(RESULTS, "figures"),
        *sorted(Path(RESULTS, "figures").glob("*/")),
    ]
    return [folder for folder in folders if any(folder.glob("*.svg"))]


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
    policy="uniform|spectral|spectral-nofloor",
    budget=r"\d+(-\d+)?",
    study="|".join(STUDIES),
