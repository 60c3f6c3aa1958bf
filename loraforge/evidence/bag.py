"""Make and read evidence bags: BagIt folders (RFC 8493) of the records of one run and all that explains them.

<root>/<target>/<YYYYMMDD>-<host>/
    bagit.txt bag-info.txt manifest-sha256.txt tagmanifest-sha256.txt
    data/records.jsonl      what was measured, one JSON object a line
    data/summary.json       headline numbers, recomputed by the audit from the records
    data/validation.json    claims the records must satisfy
    data/figures/NAME.csv   numbers of the target's figures
    data/config.json        the resolved run configuration
    data/inputs.json        {name: sha256} of what was read
    data/system.json packages.txt source.json log.txt
"""

from __future__ import annotations

import datetime
import logging
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, ConfigDict, ValidationError

from loraforge.digest import source_files
from loraforge.errors import InputError, IntegrityError, UsageError
from loraforge.evidence.machine import Protocol, System, anonymise, packages
from loraforge.evidence.tables import to_csv
from loraforge.evidence.targets import Claim, Summary, Target, get_target
from loraforge.figures import table_of
from loraforge.files import atomic_folder, canonical_json, pretty_json, read_json, sha256_file
from loraforge.fleet.lock import FleetLock, load_lock

TAG_FILES = ("bagit.txt", "bag-info.txt", "manifest-sha256.txt", "tagmanifest-sha256.txt")
PAYLOAD = (
    "config.json",
    "inputs.json",
    "log.txt",
    "packages.txt",
    "records.jsonl",
    "source.json",
    "summary.json",
    "system.json",
    "validation.json",
)
_PREFIX = "LoRAForge-"
_NAME = re.compile(r"(\d{8})-([a-z0-9][a-z0-9-]*)")
_SHA256 = re.compile(r"[0-9a-f]{64}")

logging.getLogger("bagit").setLevel(logging.CRITICAL)  # its findings are reported by the audit, once


class Run(BaseModel):
    """What is said about a run in bag-info.txt: which study of what, where, when and how."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    target: str
    fleet: str
    host: str
    date: str  # YYYY-MM-DD, of the run
    protocol: Protocol
    engine: str | None = None

    @property
    def name(self) -> str:
        """The bag's path below a root: ``<target>/<YYYYMMDD>-<host>``."""
        return f"{self.target}/{self.date.replace('-', '')}-{self.host}"

    def info(self) -> dict[str, str]:
        """Fields of bag-info.txt; nothing personal."""
        fields = {
            "Source-Organization": "LoRAForge",
            "External-Identifier": self.name,
            "Bagging-Date": self.date,
            f"{_PREFIX}Target": self.target,
            f"{_PREFIX}Fleet": self.fleet,
            f"{_PREFIX}Host": self.host,
            f"{_PREFIX}Protocol": self.protocol,
        }
        return fields | ({f"{_PREFIX}Engine": self.engine} if self.engine else {})

    @classmethod
    def of_info(cls, info: Mapping[str, Any], path: Path) -> Run:
        """Read bag-info.txt back. Raises InputError where a field is missing or wrong."""
        try:
            return cls(
                target=info[f"{_PREFIX}Target"],
                fleet=info[f"{_PREFIX}Fleet"],
                host=info[f"{_PREFIX}Host"],
                date=info["Bagging-Date"],
                protocol=info[f"{_PREFIX}Protocol"],
                engine=info.get(f"{_PREFIX}Engine"),
            )
        except KeyError as error:
            raise InputError("is missing", path=path, key=str(error.args[0])) from error
        except ValidationError as error:
            first = error.errors()[0]
            raise InputError(first["msg"], path=path, key=str(first["loc"][0])) from error


@dataclass(frozen=True)
class Bag:
    """A bag on disk, parsed lazily; every property raises LoraForgeError where its file is bad."""

    path: Path

    @cached_property
    def run(self) -> Run:
        """What bag-info.txt says of the run."""
        import bagit

        info = self.path / "bag-info.txt"
        try:
            fields = bagit.Bag(str(self.path)).info
        except (bagit.BagError, OSError, ValueError) as error:
            raise IntegrityError(f"not a BagIt bag ({error})", path=self.path) from error
        return Run.of_info(fields, info)

    @property
    def target(self) -> Target[Any]:
        """The target that the bag belongs to."""
        return get_target(self.run.target)

    @property
    def data(self) -> Path:
        """The payload folder."""
        return self.path / "data"

    @cached_property
    def records(self) -> list[Any]:
        """Validated records."""
        return self.target.read(self.data / "records.jsonl")

    @cached_property
    def system(self) -> System:
        """The machine of the run."""
        path = self.data / "system.json"
        return _model(System, read_json(path), path)

    @cached_property
    def inputs(self) -> dict[str, str]:
        """SHA-256 of inputs by name."""
        path = self.data / "inputs.json"
        value = read_json(path)
        if not isinstance(value, dict) or not all(isinstance(item, str) for item in value.values()):
            raise InputError("not an object of SHA-256 by name", path=path)
        for name, digest in value.items():
            if not _SHA256.fullmatch(digest):
                raise InputError("not a SHA-256", path=path, key=name)
        return value

    @property
    def manifest_sha256(self) -> str:
        """SHA-256 of the tag manifest, which covers every byte of the bag."""
        return sha256_file(self.path / "tagmanifest-sha256.txt")

    def summary(self) -> Summary:
        """The summary, recomputed from the records and the description of the run."""
        return summarise(self.target, self.records, self.run, self.system)

    def claims(self) -> list[Claim]:
        """The claims, recomputed from the records."""
        return self.target.claims(self.records)


def summarise(target: Target[Any], records: Sequence[Any], run: Run, system: System) -> Summary:
    """Numbers of the records, and host, device, date, protocol and engine as strings."""
    words: Summary = {
        "host": run.host,
        "device": system.device(run.protocol),
        "date": run.date,
        "protocol": run.protocol,
    }
    if run.engine:
        words["engine"] = run.engine
    return words | target.summarise(records, run.fleet)


def make_bag(
    root: Path,
    run: Run,
    records: Sequence[Path],
    *,
    config: Mapping[str, Any],
    lock: Path,
    system: System,
    extra_inputs: Mapping[str, str] | None = None,
    package_lines: str | None = None,
    logs: Sequence[Path] = (),
    force: bool = False,
) -> Path:
    """Write a bag at ``root/<run.name>``, whole or not at all.

    Parameters
    ----------
    records: JSON Lines files, joined in this order.
    lock: the fleet's lock; hashes of those of its adapters that the records name become inputs, as do hashes that the
        records themselves state and ``extra_inputs`` (SHA-256 by name).
    package_lines: ``name==version`` lines; those of this interpreter by default.
    logs: text files, joined into log.txt with this machine's folders and names taken out.

    Raises
    ------
    InputError where a record is not valid or a claim does not hold: such a run is no evidence.
    OutputError where the bag exists, unless ``force``.
    """
    import bagit

    target = get_target(run.target)
    parsed = _read_all(target, records)
    claims = target.claims(parsed)
    for claim in claims:
        if not claim.passed:
            raise InputError(
                f"{claim.claim} is {claim.value:.4g}, limit {claim.limit:.4g}",
                path=records[0],
                remedy="a run that fails its own claims is not evidence; mend it and run again",
            )
    destination = Path(root) / run.name
    with atomic_folder(destination, force=force) as folder:
        lines = [canonical_json(item.model_dump(mode="json", by_alias=True)) + "\n" for item in parsed]
        _put(folder / "records.jsonl", "".join(lines))
        _put(folder / "config.json", pretty_json(dict(config)))
        _put(folder / "inputs.json", pretty_json(_inputs(target, parsed, lock) | dict(extra_inputs or {})))
        _put(folder / "system.json", pretty_json(system.model_dump(mode="json")))
        _put(folder / "packages.txt", packages() if package_lines is None else package_lines)
        _put(folder / "source.json", pretty_json(_sources(target)))
        _put(folder / "log.txt", "".join(_log(path) for path in logs))
        _put(folder / "validation.json", pretty_json([claim.model_dump() for claim in claims]))
        _put(folder / "summary.json", pretty_json(summarise(target, parsed, run, system)))
        for name in target.figures:
            _put(folder / "figures" / f"{name}.csv", to_csv(table_of(name, parsed)))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            bagit.make_bag(str(folder), bag_info=run.info(), checksums=["sha256"])
    return destination


def open_bag(path: Path) -> Bag:
    """A bag folder. Raises InputError where it is none."""
    path = Path(path)
    if not (path / "bagit.txt").is_file():
        raise InputError("not an evidence bag (no bagit.txt)", path=path)
    return Bag(path)


def locked_inputs(lock: FleetLock) -> dict[str, dict[str, str]]:
    """SHA-256 of every locked file by adapter and, within it, by the file's name among the inputs of a bag."""
    return {
        adapter.name: {input_name(adapter.name, file.name): file.sha256 for file in adapter.files}
        for adapter in lock.adapters
    }


def input_name(adapter: str, file: str) -> str:
    """What the file of an adapter is called among the inputs of a bag."""
    return f"adapters/{adapter}/{file}"


def find_bags(root: Path) -> list[Bag]:
    """Every ``<target>/<date>-<host>`` folder below ``root``, valid or not, sorted by path."""
    return [Bag(path) for path in sorted(Path(root).glob("*/*")) if path.is_dir() and not hidden(path)]


def hidden(path: Path) -> bool:
    """Whether a path is a dot file, such as the unfinished folder of an atomic write."""
    return path.name.startswith(".") or path.parent.name.startswith(".")


def split_name(name: str) -> tuple[str, str] | None:
    """``20261130-cpu2`` -> (``20261130``, ``cpu2``); None where the name is not a bag's."""
    match = _NAME.fullmatch(name)
    return (match[1], match[2]) if match else None


def parse_run(target: str, fleet: str, host: str, date: str, protocol: str, engine: str | None) -> Run:
    """Check the words that describe a run. Raises UsageError that names the option."""
    get_target(target)
    if protocol not in get_args(Protocol):
        raise UsageError(f"no protocol {protocol!r}", key="--protocol", remedy="choose cpu, reduced or paper")
    if not _NAME.fullmatch(f"00000000-{host}"):
        raise UsageError(f"{host!r} is not a label of a-z, 0-9 and -", key="--host")
    try:
        day = datetime.date.fromisoformat(date)
    except ValueError as error:
        raise UsageError(f"{date!r} is not a date such as 2026-11-30", key="--date") from error
    return Run.model_validate(
        {
            "target": target,
            "fleet": fleet,
            "host": host,
            "date": day.isoformat(),
            "protocol": protocol,
            "engine": engine,
        }
    )


def date_of(records: Sequence[Path]) -> str:
    """The UTC day on which the newest of the record files was last written: the end of the run."""
    try:
        newest = max(Path(path).stat().st_mtime for path in records)
    except OSError as error:
        raise InputError("records not found", path=error.filename) from error
    return datetime.datetime.fromtimestamp(newest, tz=datetime.UTC).date().isoformat()


def read_machine(folder: Path) -> tuple[System, str]:
    """system.json and packages.txt that ``loraforge evidence machine`` wrote where the run took place."""
    path = folder / "system.json"
    system = _model(System, read_json(path), path)
    try:
        lines = (folder / "packages.txt").read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot be read ({error})", path=folder / "packages.txt") from error
    return system, lines


def _read_all(target: Target[Any], paths: Sequence[Path]) -> list[Any]:
    parsed: list[Any] = []
    for path in paths:
        try:
            lines = Path(path).read_bytes().split(b"\n")
        except OSError as error:
            raise InputError(f"cannot be read ({error.strerror})", path=path) from error
        parsed += target.parse(lines, path)
    target.check(parsed, paths[0])
    return parsed


def _inputs(target: Target[Any], records: Sequence[Any], lock: Path) -> dict[str, str]:
    locked = locked_inputs(load_lock(lock))
    names = target.adapters(records)
    if unknown := sorted(set(names) - locked.keys()):
        raise InputError(f"adapter {unknown[0]!r} of the records is not in the fleet lock", path=lock)
    stated = target.inputs(records) | {"fleet.lock.json": sha256_file(lock)}
    for name in names or locked:  # records that name no adapter are of the whole fleet
        stated |= locked[name]
    return stated


def _model(kind: type[System], value: Any, path: Path) -> System:
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        first = error.errors()[0]
        raise InputError(first["msg"], path=path, key=".".join(map(str, first["loc"])) or None) from error


def _sources(target: Target[Any]) -> dict[str, str]:
    files = source_files(*target.sources)
    return {f"loraforge/{name}": sha256_file(file) for name, file in files.items()}


def _log(path: Path) -> str:
    try:
        text = Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise InputError(f"cannot be read ({error.strerror})", path=path) from error
    text = anonymise(text)
    return text if text.endswith("\n") or not text else text + "\n"


def _put(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text.encode())
