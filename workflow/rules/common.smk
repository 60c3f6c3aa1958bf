import json
import sys
from pathlib import Path

from loraforge.config import parse_config
from loraforge.digest import source_digest
from loraforge.fleet.lock import load_lock

CONFIG = parse_config(config, "workflow configuration")
LOCK = load_lock(CONFIG.fleet)
RESULTS = f"results/{CONFIG.name}"
CACHE = ".cache/loraforge"
BASE = f"{CACHE}/base/{LOCK.base_model.name}"
FLEET_FILES = [str(file) for file in LOCK.local_files(CONFIG.fleet)]
ADAPTERS = [adapter.name for adapter in LOCK.adapters]
LORAFORGE = f"{sys.executable} -m loraforge"


def chosen(names):
    """The adapters that a section of the configuration asks for."""
    return ADAPTERS if names == "all" else list(names)


def section(*names):
    """The part of the configuration that a stage depends on, as JSON: its parameters and what its bag records."""
    whole = CONFIG.model_dump(mode="json")
    return json.dumps({name: whole[name] for name in ("name", "fleet", "seed", *names)}, sort_keys=True)


def file_name(budget):
    """A budget as part of a file name: 1/12 -> 1-12."""
    return budget.replace("/", "-")


def budget_text(name):
    return name.replace("-", "/")


wildcard_constraints:
    adapter="|".join(ADAPTERS),
    policy="uniform|spectral|spectral-nofloor",
    budget=r"\d+(-\d+)?",
    study="spectra|allocation|recompression|quality",


def closing_words():
    figures = sorted(Path(f"{RESULTS}/figures").glob("*.svg"))
    tables = sorted(Path(f"{RESULTS}/figures").glob("*.csv"))
    fleets = sorted(path.parent for path in Path(f"{RESULTS}/fleet").glob("*/manifest.json"))
    rows = [("figures", figures), ("tables", tables), ("compressed fleet", fleets)]
    return "\n".join(f"{title + ':':<18}{path}" for title, paths in rows for path in paths)
