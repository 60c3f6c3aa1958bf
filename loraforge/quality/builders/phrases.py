"""Short translations: emoji names from the emoji package, interface texts from Django's catalogues."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from loraforge.errors import InputError
from loraforge.files import read_json
from loraforge.quality.builders.common import Example, TaskSpec, one_line, prompt_of
from loraforge.quality.builders.sources import Source

_EMOJI = Source(
    "pypi",
    "emoji",
    "2.16.0",
    "c4230d80640def9071599ff56b1b5950fe13a2a94c0da98c5deab12431b24330",
    "BSD-3-Clause",
    "emoji-*.dist-info/licenses/LICENSE.txt",
)
DJANGO = Source(
    "pypi",
    "Django",
    "5.2.19",
    "5965d974a5218a2b68a11dd1276434707f23886525c23f0598eccedaf4f4ca00",
    "BSD-3-Clause",
    "django-*.dist-info/licenses/LICENSE",
)

_LONGEST = 140  # characters of a text and its translation: about 60 tokens
_PERSON = re.compile(r"\b(man|men|woman|women|person|people)\b")


def _emoji_names(code: str, language: str) -> Callable[[Mapping[str, Path]], Iterator[Example]]:
    def examples(folders: Mapping[str, Path]) -> Iterator[Example]:
        data = folders["emoji"] / "emoji/unicode_codes"
        translations = read_json(data / f"emoji_{code}.json")
        for symbol, entry in read_json(data / "emoji.json").items():
            if symbol not in translations or "skin_tone" in entry["en"]:  # tones multiply one name by five
                continue
            english, translated = _name(entry["en"]), _name(translations[symbol])
            prompt = prompt_of(f"Translate to {language}.", ("English", english), answer=language)
            # "man running" and "woman running" are one item
            yield Example(prompt, translated, one_line(_PERSON.sub("", english)))

    return examples


def _name(code: str) -> str:
    return one_line(code.strip(":").replace("_", " "))


def _interface(code: str, language: str) -> Callable[[Mapping[str, Path]], Iterator[Example]]:
    def examples(folders: Mapping[str, Path]) -> Iterator[Example]:
        for path in sorted((folders["Django"] / "django").rglob(f"locale/{code}/LC_MESSAGES/*.po")):
            for english, translated in catalogue(path):
                if english == translated or max(len(english), len(translated)) > _LONGEST:
                    continue
                prompt = prompt_of(f"Translate to {language}.", ("English", english), answer=language)
                yield Example(prompt, translated, one_line(english).lower().rstrip(".:"))

    return examples


def catalogue(path: Path) -> Iterator[tuple[str, str]]:
    """Message and translation pairs of a gettext .po file; plurals, fuzzy and obsolete entries are left out.

    Raises InputError that names the line where a quoted string cannot be read.
    """
    entry: dict[str, str] = {}
    keyword, fuzzy = "", False

    def done() -> Iterator[tuple[str, str]]:
        if not fuzzy and entry.get("msgid") and entry.get("msgstr"):
            yield entry["msgid"], entry["msgstr"]

    for number, line in enumerate([*path.read_text(encoding="utf-8").splitlines(), ""], start=1):
        text = line.strip()
        if not text:
            yield from done()
            entry, keyword, fuzzy = {}, "", False
        elif text.startswith("#"):
            fuzzy = fuzzy or (text.startswith("#,") and "fuzzy" in text)
        else:
            if not text.startswith('"'):
                keyword, _, text = text.partition(" ")
            try:
                entry[keyword] = entry.get(keyword, "") + str(ast.literal_eval(text))
            except (SyntaxError, ValueError) as error:
                raise InputError(f"not a quoted string at line {number}", path=path) from error


def _emoji_task(code: str, language: str) -> TaskSpec:
    return TaskSpec(
        name=f"emoji_{code}",
        family="rewriting",
        metric="chrf",
        max_gen_toks=32,
        title=f"Emoji names, English to {language}",
        sources=(_EMOJI,),
        licence="BSD-3-Clause",
        attribution="Unicode CLDR short names, as the emoji package ships them",
        examples=_emoji_names(code, language),
    )


SPECS = (
    _emoji_task("de", "German"),
    _emoji_task("fr", "French"),
    TaskSpec(
        name="ui_de",
        family="rewriting",
        metric="chrf",
        max_gen_toks=64,
        title="Interface texts, English to German",
        sources=(DJANGO,),
        licence="BSD-3-Clause",
        attribution="Django's German message catalogues, by its translators",
        examples=_interface("de", "German"),
    ),
)
