"""Dictionary forms from simplemma's dictionaries, verb forms from the Verbiste tables in mlconjug3."""

from __future__ import annotations

import lzma
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loraforge.errors import InputError
from loraforge.files import read_json
from loraforge.quality.builders.common import Example, TaskSpec, prompt_of
from loraforge.quality.builders.sources import Source

SIMPLEMMA = Source(
    "pypi",
    "simplemma",
    "2.0.0",
    "db33b15f5aed6485a748ce34d1f510ca760af2633289ab9a8493e2afa785c352",
    "MIT",
    "simplemma-*.dist-info/licenses/LICENSE",
)
MLCONJUG = Source(
    "pypi",
    "mlconjug3",
    "4.0.1",
    "fbac083da0be5ca670bbde736111d0740867c39ae70da2ba345b369a5c9c3136",
    "MIT",
    "mlconjug3-*.dist-info/licenses/LICENSE",
)

_MAGIC = b"SMFC1"
_REVERSED = 1  # header flag: keys and values are stored back to front
_REPEAT, _LITERAL = 254, 255  # trim bytes: the value before; a value written in full


def front_coded(data: bytes, path: Path) -> Iterator[tuple[str, str]]:
    """Word and lemma pairs of simplemma's front-coded stream.

    After the magic, a flag byte and a count, each record is: how many bytes the key shares with the key before,
    the rest of the key, and either how many bytes to trim off its end and what to append for the value, or one
    of two marks. Numbers are little-endian base-128. Raises InputError for a stream of another kind.
    """
    if not data.startswith(_MAGIC):
        raise InputError(
            "not a front-coded dictionary", path=path, remedy="pin the version this builder knows"
        )
    at = len(_MAGIC) + 1

    def number() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = data[at]
            at += 1
            value |= (byte & 127) << shift
            if byte < 128:
                return value
            shift += 7

    def piece() -> bytes:
        nonlocal at
        size = number()
        at += size
        return data[at - size : at]

    key = value = b""
    step = -1 if data[len(_MAGIC)] & _REVERSED else 1
    for _ in range(number()):
        shared = number()
        key = key[:shared] + piece()
        trim = data[at]
        at += 1
        if trim == _LITERAL:
            value = piece()
        elif trim != _REPEAT:
            value = key[: len(key) - trim] + piece()
        yield key[::step].decode(), value[::step].decode()


def dictionary(folders: Mapping[str, Path], code: str) -> Iterator[tuple[str, str]]:
    """Word and lemma pairs of simplemma's dictionary of a language. Raises as :func:`front_coded`."""
    path = folders["simplemma"] / f"simplemma/strategies/dictionaries/data/{code}.plzma"
    return front_coded(lzma.decompress(path.read_bytes()), path)


def _lemmas(code: str, language: str) -> Callable[[Mapping[str, Path]], Iterator[Example]]:
    def examples(folders: Mapping[str, Path]) -> Iterator[Example]:
        for word, lemma in dictionary(folders, code):
            if word == lemma or len(word) < 3 or not (word.isalpha() and lemma.isalpha()):
                continue
            prompt = prompt_of(f"Give the {language} dictionary form.", ("Word", word), answer="Lemma")
            yield Example(prompt, lemma, lemma)

    return examples


@dataclass(frozen=True)
class _Paradigm:
    """Which tenses of a language to ask for, by (mood, tense) of the tables, and what its persons are called.

    Compound tenses are left out: the tables hold only their participle.
    """

    language: str
    tenses: Mapping[tuple[str, str], str]
    persons: Mapping[int, str]
    imperative: Mapping[int, str]


_FRENCH = _Paradigm(
    "French",
    {
        ("Indicatif", "Présent"): "present indicative",
        ("Indicatif", "Imparfait"): "imperfect indicative",
        ("Indicatif", "Futur"): "future indicative",
        ("Indicatif", "Passé Simple"): "simple past",
        ("Conditionnel", "Présent"): "present conditional",
        ("Subjonctif", "Présent"): "present subjunctive",
        ("Subjonctif", "Imparfait"): "imperfect subjunctive",
        ("Imperatif", "Imperatif Présent"): "imperative",
    },
    dict(enumerate(("je", "tu", "il", "nous", "vous", "ils"))),
    dict(enumerate(("tu", "nous", "vous"))),
)
SPANISH = _Paradigm(
    "Spanish",
    {
        ("Indicativo", "Indicativo presente"): "present indicative",
        ("Indicativo", "Indicativo pretérito imperfecto"): "imperfect indicative",
        ("Indicativo", "Indicativo pretérito perfecto simple"): "preterite",
        ("Indicativo", "Indicativo futuro"): "future indicative",
        ("Condicional", "Condicional"): "conditional",
        ("Subjuntivo", "Subjuntivo presente"): "present subjunctive",
        ("Subjuntivo", "Subjuntivo pretérito imperfecto (1)"): "imperfect subjunctive (-ra)",
        ("Subjuntivo", "Subjuntivo pretérito imperfecto (2)"): "imperfect subjunctive (-se)",
        ("Subjuntivo", "Subjuntivo futuro"): "future subjunctive",
        ("Imperativo", "Imperativo"): "imperative",
    },
    dict(enumerate(("yo", "tú", "él", "nosotros", "vosotros", "ellos"))),
    dict(enumerate(("tú", "usted", "nosotros", "vosotros", "ustedes"))),
)


def _conjugations(code: str, paradigm: _Paradigm) -> Callable[[Mapping[str, Path]], Iterator[Example]]:
    def examples(folders: Mapping[str, Path]) -> Iterator[Example]:
        for verb, tense, person, form in verb_forms(folders, code, paradigm):
            prompt = prompt_of(
                f"Conjugate the {paradigm.language} verb.",
                ("Verb", verb),
                ("Tense", tense),
                ("Person", person),
                answer="Form",
            )
            yield Example(prompt, form, verb)

    return examples


def verb_forms(
    folders: Mapping[str, Path], code: str, paradigm: _Paradigm
) -> Iterator[tuple[str, str, str, str]]:
    """Verb, tense, person and form, for every sound cell of a language's tables."""
    tables = folders["mlconjug3"] / "mlconjug3/data/conjug_manager"
    verbs = read_json(tables / f"verbs-{code}.json")
    templates = read_json(tables / f"conjugation-{code}.json")
    for verb, entry in verbs.items():
        template = templates.get(entry["template"])
        ending = entry["template"].partition(":")[2]
        # a row that cannot give its own infinitive is a mistake of the table
        if template is not None and entry["root"] + ending == verb:
            for tense, person, form in _cells(entry["root"], template, paradigm):
                yield verb, tense, person, form


def _cells(root: str, template: Mapping[str, Any], paradigm: _Paradigm) -> Iterator[tuple[str, str, str]]:
    for (mood, tense), title in paradigm.tenses.items():
        persons = paradigm.imperative if title == "imperative" else paradigm.persons
        endings = template.get(mood, {}).get(tense)
        for index, ending in endings if isinstance(endings, list) else ():
            form = root + (ending or "")
            # defective verbs have no ending; a few cells hold alternatives, or the table's own mistakes
            if ending is not None and index in persons and form.isalpha() and form.islower():
                yield title, persons[index], form


def _lemma_task(code: str, language: str) -> TaskSpec:
    return TaskSpec(
        name=f"lemma_{code}",
        family="morphology",
        metric="exact_match",
        max_gen_toks=16,
        title=f"{language} word to its dictionary form",
        sources=(SIMPLEMMA,),
        licence="MIT",
        attribution="simplemma's language data",
        examples=_lemmas(code, language),
        held_out_per_item=1,
        train_per_item=4,
    )


def _conjugation_task(code: str, paradigm: _Paradigm) -> TaskSpec:
    return TaskSpec(
        name=f"{code}_conj",
        family="morphology",
        metric="exact_match",
        max_gen_toks=16,
        title=f"{paradigm.language} verb forms",
        sources=(MLCONJUG,),
        licence="MIT",
        attribution="Verbiste's conjugation tables, as mlconjug3 extends and ships them",
        examples=_conjugations(code, paradigm),
        held_out_per_item=1,
        train_per_item=8,
    )


SPECS = (
    _lemma_task("es", "Spanish"),
    _lemma_task("de", "German"),
    _conjugation_task("es", SPANISH),
    _conjugation_task("fr", _FRENCH),
)
