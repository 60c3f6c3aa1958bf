"""Join folders that sweeps of one experiment left side by side into the one that a single sweep would have left."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path

from loraforge.bench.journal import finished
from loraforge.errors import InputError, OutputError
from loraforge.files import atomic_folder, refuse_non_empty, sha256_file, sole_writer, write_jsonl
from loraforge.serving.points import (
    KEPT,
    RECORDS,
    PointRecord,
    StartRecord,
    Sweep,
    assemble,
    dump,
    kept,
    parse,
    requests_file,
)
from loraforge.serving.setting import difference


@dataclass(frozen=True)
class _Part:
    """A folder and its records."""

    folder: Path
    sweep: Sweep

    @property
    def records(self) -> Path:
        """Where its records are."""
        return self.folder / RECORDS


def gather_sweeps(parts: Sequence[Path], out: Path) -> Sweep:
    """Write to ``out`` what the folders ``parts`` have, and return its records.

    Starts are numbered anew in the order in which they began, and the files of a start and its points are named after
    its new number; nothing else changes. What stopped early is kept. The parts stay as they are.

    Raises InputError for parts of different settings or kinds of machines, one without records or named twice, a point
    or start that two of them have, a file that cannot be read, and one of requests that is not what was measured;
    OutputError for an ``out`` that has something in it or lies in a part, and for a part that another run uses.
    """
    _refuse(parts, out)
    with ExitStack() as held:
        for folder in (*parts, *([out] if out.is_dir() else [])):
            held.enter_context(sole_writer(folder))
        found = [_read(folder) for folder in parts]
        _check(found)
        with atomic_folder(out, force=None) as place:
            return _write(found, place)


def _refuse(parts: Sequence[Path], out: Path) -> None:
    """Raise an error, before anything is read, where the folders named cannot be those of parts and of an output."""
    real = [os.path.realpath(folder) for folder in parts]
    for number, folder in enumerate(parts):
        if real[number] in real[:number]:
            raise InputError("is named twice", path=folder, remedy="name each part once")
        if not (folder / RECORDS).is_file():
            raise _no_records(folder)
    place = Path(os.path.realpath(out))
    for folder, name in zip(parts, real, strict=True):
        if place == Path(name):
            raise OutputError("is one of the parts", path=out, remedy="choose another folder")
        if place.is_relative_to(name):
            raise OutputError(f"lies in {folder}, a part", path=out, remedy="choose another folder")
    refuse_non_empty(out, force=None)  # what was measured is not replaced


def _read(folder: Path) -> _Part:
    if not (rows := finished(folder / RECORDS)):
        raise _no_records(folder)
    return _Part(folder, parse(rows, folder / RECORDS))


def _no_records(folder: Path) -> InputError:
    return InputError(
        "has no records", path=folder / RECORDS, remedy="name folders that loraforge bench sweep made"
    )


def _check(parts: Sequence[_Part]) -> None:
    """Raise InputError where folders are not parts of one sweep."""
    first, *others = parts
    for part in others:
        if (found := difference(first.sweep.setting, part.sweep.setting)) is not None:
            raise InputError(
                f"is {found.other} there, and {found.one} in {first.folder}",
                path=part.records,
                key=found.key,
                remedy="gather sweeps of one setting",
            )
    begun: dict[tuple[str, str], _Part] = {}
    measured: dict[tuple[str, float, int], _Part] = {}
    for part in parts:
        for start in part.sweep.starts:
            if (earlier := begun.setdefault((start.arm, start.started), part)) is not part:
                raise InputError(
                    f"has the start of {start.arm} at {start.started} that {earlier.folder} has",
                    path=part.records,
                    remedy="leave out one of the two",
                )
        for point in part.sweep.complete:
            if (earlier := measured.setdefault(point.key, part)) is not part:
                raise InputError(
                    f"measures {point.case} at rate {point.rate:g}, seed {point.seed}, as {earlier.folder} does",
                    path=part.records,
                    remedy="leave out one of the two",
                )


def _write(parts: Sequence[_Part], place: Path) -> Sweep:
    """Copy what the parts have under new numbers, and write their records last."""
    starts = [(part, start) for part in parts for start in part.sweep.starts]
    starts.sort(key=lambda item: item[1].started)
    records: list[StartRecord | PointRecord] = []
    for number, (part, start) in enumerate(starts):
        for old, new in _left_by(start, number):
            if (part.folder / old).exists():  # not every engine counts, or traces
                _copy(part.folder / old, place / new)
        records.append(start.model_copy(update={"number": number}))
        points = [point for point in part.sweep.points if point.start == start.number]
        records += [_moved(point, number, part.folder, place) for point in points]
    records.sort(key=attrgetter("started"))
    setting = parts[0].sweep.setting
    write_jsonl(place / RECORDS, map(dump, [setting, *records]))
    return assemble([setting, *records], place / RECORDS)


def _left_by(start: StartRecord, number: int) -> Iterator[tuple[str, str]]:
    """Names of the files that engines leave of a start, and those under another number."""
    for folder in KEPT:
        for fleet in start.engines:
            yield kept(folder, start.number, start.arm, fleet), kept(folder, number, start.arm, fleet)


def _moved(point: PointRecord, start: int, folder: Path, place: Path) -> PointRecord:
    """A point of a start with another number, whose requests are copied."""
    name = requests_file(start, point.case, point.rate, point.seed)
    _copy(folder / point.requests, place / name)
    if sha256_file(place / name) != point.requests_file_sha256:
        raise InputError(
            "is not what was measured", path=folder / point.requests, remedy="put the file back as it was"
        )
    return point.model_copy(update={"start": start, "requests": name})


def _copy(file: Path, place: Path) -> None:
    if not (file.is_file() and os.access(file, os.R_OK)):
        raise InputError("is not there, or cannot be read", path=file, remedy="put the file back as it was")
    place.parent.mkdir(exist_ok=True)
    shutil.copyfile(file, place)
