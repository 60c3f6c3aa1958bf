"""The commands read alike, and end as their exit codes say."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
import typer
from adapter_folders import MakeAdapter

from loraforge import __version__
from loraforge.cli import EXIT_CODES, app, main
from loraforge.errors import LoraForgeError
from loraforge.evidence.targets import TARGETS
from loraforge.figures import FIGURES

CONFIG = str(Path(__file__).resolve().parents[2] / "config/tiny.yaml")


def commands(command: object, name: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    yield name
    if isinstance(command, typer.core.TyperGroup):
        context = typer.Context(command)
        for child in command.list_commands(context):
            yield from commands(command.get_command(context, child), (*name, child))


ALL = list(commands(typer.main.get_command(app)))


@pytest.mark.parametrize("name", ALL, ids=" ".join)
def test_help_reads_alike(
    name: tuple[str, ...], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERMINAL_WIDTH", "80")
    with pytest.raises(SystemExit) as caught:
        main([*name, "--help"])
    text = capsys.readouterr().out
    assert caught.value.code == 0
    assert text.startswith(" ".join(("Usage: loraforge", *name)))
    assert not re.search(r"[╭│╰]", text)
    assert ("-completion" in text) == (name == ())  # typer adds it to every app that does not decline
    assert ("Exit codes: 0 done" in text) == (name == ())
    for line in re.findall(r"^  (?:-\S+|\S+ <).*?  +(\S.*)", text, re.MULTILINE):
        assert line.startswith(("Show ", "Install ", "JSON", "NAME=")) or line[0].islower(), line
    assert "..." not in text.partition("\nCommands:")[2], "a summary is cut off"


@pytest.mark.parametrize(
    ("command", "names"), [(("evidence", "bag"), TARGETS), (("figure",), FIGURES)], ids=["bag", "figure"]
)
def test_help_names_all_that_there_is(
    command: tuple[str, ...], names: Iterable[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main([*command, "--help"])
    assert " ".join(capsys.readouterr().out.split()).count(", ".join(names)) == 1


def test_every_command_is_covered() -> None:
    assert ("fleet", "train") in ALL
    assert len(ALL) > 20


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            "compres",
            "No such command 'compres'; did you mean 'compress'? `loraforge --help` lists what there is",
        ),
        ("squash", "No such command 'squash'; `loraforge --help` lists what there is"),
        ("compress", "Missing argument 'source'; `loraforge compress --help` lists what there is"),
        ("compress a --ou b", "No such option: --ou"),
        ("compress a --out b --params many", "Invalid value for '--params': "),
        (
            "fleet lok",
            "No such command 'lok'; did you mean 'lock'? `loraforge fleet --help` lists what there is",
        ),
    ],
)
def test_a_command_line_that_is_wrong_gets_one_line(
    arguments: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments.split())
    assert caught.value.code == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert re.fullmatch(rf"error: {re.escape(message)}.*\n", shown.err), shown.err
    assert shown.err.endswith(" --help` lists what there is\n")


def test_an_error_about_an_odd_name_is_one_line_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(
            [
                "compress",
                str(tmp_path / "two\nlines\u202e"),
                "--budget",
                "1/2",
                "--out",
                str(tmp_path / "out"),
            ]
        )
    assert caught.value.code == 3
    shown = capsys.readouterr().err
    assert shown.startswith(f"error: {tmp_path}/two\\u000alines\\u202e: folder not found; ")
    assert shown[:-1].isprintable()


@pytest.mark.parametrize("arguments", [[], ["fleet"]])
def test_a_group_without_a_command_gets_its_help(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert capsys.readouterr().err.startswith(" ".join(("Usage: loraforge", *arguments)))


def test_exit_codes_are_documented() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "compress.md").read_text()
    documented = {int(code) for code in re.findall(r"^\| (\d+) \|", page, re.MULTILINE)}
    kinds = {kind.exit_code for kind in (LoraForgeError, *LoraForgeError.__subclasses__())}
    assert documented == {0, *kinds, 130, 143}
    assert {int(code) for code in re.findall(r"\d+", EXIT_CODES)} == documented


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"loraforge {__version__}\n"


def test_an_index_of_no_folder_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["evidence", "index", str(tmp_path / "nodir")])
    assert caught.value.code == 3
    assert "nodir: folder not found; name a folder of evidence bags" in capsys.readouterr().err
    assert not (tmp_path / "nodir").exists()


def test_a_source_that_cannot_be_looked_at(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    long = tmp_path / ("z" * 300)
    arguments = ["--budget", "1/2", "--out", str(tmp_path / "out")]
    with pytest.raises(SystemExit) as caught:
        main(["compress", str(long), *arguments])
    assert caught.value.code == 3
    told = capsys.readouterr().err
    assert told.startswith(f"error: {long}: cannot be read (File name too long); ")
    assert told.count("\n") == 1


def test_a_closed_standard_error_is_not_put_into_standard_output(
    tmp_path: Path, make_adapter: MakeAdapter
) -> None:
    make_adapter(tmp_path / "a")
    root = str(Path(__file__).resolve().parents[2])
    command = f"exec {sys.executable} -m loraforge compress a --budget 1/2 --out out --json 2>&-"
    told = subprocess.run(
        ["sh", "-c", command], stdout=subprocess.PIPE, timeout=120, check=False, cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": root},
    )  # fmt: skip
    assert told.returncode == 0
    assert json.loads(told.stdout)["dry_run"] is False


def test_names_beyond_the_encoding_of_the_terminal(tmp_path: Path, make_adapter: MakeAdapter) -> None:
    root = str(Path(__file__).resolve().parents[2])
    folder = make_adapter(tmp_path / "\u00e9\u4f60")
    told = subprocess.run(
        [sys.executable, "-m", "loraforge", "compress", str(folder), "--budget", "1/2", "--out", "out", "--dry-run"],
        capture_output=True, text=True, timeout=120, check=False, cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": root, "PYTHONIOENCODING": "latin-1"},
        encoding="latin-1",
    )  # fmt: skip
    assert told.returncode == 0, told.stderr
    assert "\u00e9\\u4f60" in told.stdout


@pytest.mark.parametrize(
    ("out", "message"),
    [
        (".", ": is a folder; name a file in it"),
        ("fleet/adapter_config.json/k", "adapter_config.json is not a folder; "),
    ],
)
def test_an_output_that_cannot_be_is_refused_before_the_work(
    tmp_path: Path, make_adapter: MakeAdapter, capsys: pytest.CaptureFixture[str], out: str, message: str
) -> None:
    make_adapter(tmp_path / "fleet")
    arguments = ("--budget", "1/2", "--cache", str(tmp_path / "cache"), "--out", str(tmp_path / out))
    with pytest.raises(SystemExit) as caught:
        main(["allocate", str(tmp_path / "fleet"), *arguments])
    assert caught.value.code == 5
    assert message in capsys.readouterr().err
    assert not (tmp_path / "cache").exists()


ALLOCATE = ("allocate", "fleet", "--budget", "1/2", "--cache", "cache")
SELECT = ("eval", "select", "scores.jsonl", "--candidates", "fair", "--fleet", "lock")
SCORE = ("eval", "run", "--config", CONFIG, "--base", "base", "--allocations", "ranks")
WRITERS = {
    (*ALLOCATE, "-o"): "allocation file",
    (*ALLOCATE, "-o", "k.json", "--records"): "file of records",
    ("factor", "fleet", "--cache", "cache", "--records"): "file of records",
    ("fleet", "lock", "fleet", "-o"): "fleet lock",
    ("moments", "base", "prompts.json", "-o"): "file of moments",
    (*SELECT, "-o"): "selection of policies",
    (*SCORE, "-o"): "file of scores",
    ("bench", "recompression", "fleet", "-o"): "file of measurements",
    ("bench", "end-to-end", "fleet", "-o"): "file of measurements",
    ("bench", "cpu-ops", "-o"): "file of measurements",
    ("bench", "scale", "-o"): "file of measurements",
    ("bench", "serve", "--url", "http://127.0.0.1:1", "--workload", "load", "-o"): "file of measurements",
    ("bench", "workload", "load.yaml", "--rate", "1", "-o"): "workload",
}
OTHERS = ("fleet/adapter_config.json", "fleet/adapter_model.safetensors", "manifest.json")
OTHERS += ("prompts.json", "prompts.jsonl", "tensors.json")


@pytest.mark.parametrize(
    ("command", "kind", "name"),
    [
        (command, kind, name)
        for command, kind in WRITERS.items()
        for name in OTHERS
        if command[1] != "lock" or name.endswith(".json")  # a lock has no other name
    ],
)
def test_no_file_of_another_kind_is_written_over(
    tmp_path: Path,
    make_adapter: MakeAdapter,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    command: tuple[str, ...],
    kind: str,
    name: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    make_adapter(tmp_path / "fleet")
    (tmp_path / "manifest.json").write_text('{"schema": "loraforge.manifest/1"}')
    for prompts in ("prompts.json", "prompts.jsonl"):
        (tmp_path / prompts).write_text('{"prompt": "a", "answer": "b"}\n')
    (tmp_path / "tensors.json").write_bytes((tmp_path / "fleet/adapter_model.safetensors").read_bytes())
    before = {path: path.read_bytes() for path in tmp_path.rglob("*.*")}
    with pytest.raises(SystemExit) as caught:
        main([*command, name])
    assert caught.value.code == 5
    error = f"error: {name}: exists and is no {kind}; choose another name, or remove it\n"
    assert capsys.readouterr().err == error
    assert {path: path.read_bytes() for path in tmp_path.rglob("*.*")} == before


def test_a_lock_is_written_over(tmp_path: Path, make_adapter: MakeAdapter) -> None:
    make_adapter(tmp_path / "fleet")
    lock = tmp_path / "fleet.lock.json"
    for name in ("first", "second"):
        with pytest.raises(SystemExit) as caught:
            main(["fleet", "lock", str(tmp_path / "fleet"), "--name", name, "-o", str(lock)])
        assert caught.value.code == 0
        assert json.loads(lock.read_text())["name"] == name


def test_outputs_of_their_own_kind_are_written_over(
    tmp_path: Path, make_adapter: MakeAdapter, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, ranks, records = make_adapter(tmp_path / "fleet"), tmp_path / "ranks", tmp_path / "records"
    allocate = ("allocate", folder, "--budget", "1/2", "--cache", tmp_path / "cache", "-o", ranks)
    records.touch()  # an empty file is nobody's
    for command, code in (
        ((*allocate, "--records", records), 0),
        (("factor", folder, "--cache", tmp_path / "cache", "--records", records), 0),
        ((*allocate, "--records", records), 0),
        ((*allocate, "--records", ranks), 2),
    ):
        with pytest.raises(SystemExit) as caught:
            main([str(word) for word in command])
        assert caught.value.code == code
    assert "error: --records: is the allocation file, too; name another file\n" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("number", "code", "words"),
    [(signal.SIGINT, 130, "interrupted; run the same command again to resume"), (signal.SIGTERM, 143, "")],
)
def test_a_stopped_run_leaves_nothing_half_written(
    tmp_path: Path, make_adapter: MakeAdapter, number: signal.Signals, code: int, words: str
) -> None:
    for index in range(60):
        make_adapter(tmp_path / "fleet" / f"adapter{index}", layers=range(12), seed=index)
    results = tmp_path / "results"
    process = subprocess.Popen(
        [sys.executable, "-m", "loraforge", "compress", tmp_path / "fleet", "--budget", "1/2",
         "--out", results / "out", "--cache", tmp_path / "cache"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    while process.poll() is None and not (results.is_dir() and any(results.iterdir())):
        time.sleep(0.005)  # until it writes
    process.send_signal(number)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == code, errors
    assert errors.splitlines()[-1].startswith(words)
    assert list(results.iterdir()) == []
    assert not list((tmp_path / "cache").rglob(".*"))


def test_a_run_that_is_stopped_within_an_import_raises_nothing_there(tmp_path: Path) -> None:
    """As torch does while it starts: what is raised into it never comes back as an exception."""
    (tmp_path / "module.py").write_text(
        "import os, signal\ntry:\n    os.kill(os.getpid(), signal.SIGTERM)\nexcept SystemExit:\n    os.abort()\n"
    )
    code = (
        "import signal, sys\nfrom loraforge.cli import _terminate\nsignal.signal(signal.SIGTERM, _terminate)\n"
        "sys.path.insert(0, sys.argv[1])\nimport module"
    )
    assert subprocess.run([sys.executable, "-c", code, tmp_path], timeout=60).returncode == 143


@pytest.mark.parametrize(
    "how", [["-m", "loraforge"], ["-c", "from {0} import {1}; {1}()"]], ids=["-m", "script"]
)
def test_an_interrupt_within_the_first_imports_is_no_traceback(tmp_path: Path, how: list[str]) -> None:
    (tmp_path / "typer.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n")
    root = Path(__file__).resolve().parents[2]
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    entry = project["scripts"]["loraforge"].split(":")
    done = subprocess.run(
        [sys.executable, *(word.format(*entry) for word in how), "doctor"],
        capture_output=True, text=True, timeout=60, check=False,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{root}"},
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")
