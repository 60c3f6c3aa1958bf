"""Classification of single words: the language of a word, the tense of a verb form."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from loraforge.quality.builders.common import Example, TaskSpec, prompt_of
from loraforge.quality.builders.morphology import MLCONJUG, SIMPLEMMA, SPANISH, dictionary, verb_forms

_LANGUAGES = {
    "cs": "Czech",
    "da": "Danish",
    "de": "German",
    "es": "Spanish",
    "fi": "Finnish",
    "fr": "French",
    "hu": "Hungarian",
    "it": "Italian",
    "nl": "Dutch",
    "pl": "Polish",
    "pt": "Portuguese",
    "tr": "Turkish",
}
_EVERY = 37  # one word in so many: millions of words for thousands of examples


def _languages(folders: Mapping[str, Path]) -> Iterator[Example]:
    for code, language in _LANGUAGES.items():
        for index, (word, lemma) in enumerate(dictionary(folders, code)):
            if index % _EVERY or len(word) < 6 or not (word.isalpha() and word.islower()):
                continue
            prompt = prompt_of("Which language is this word?", ("Word", word), answer="Language")
            yield Example(prompt, language, f"{code} {lemma}")


def _tenses(folders: Mapping[str, Path]) -> Iterator[Example]:
    for verb, tense, _, form in verb_forms(folders, "es", SPANISH):
        prompt = prompt_of("Which tense is this Spanish verb form?", ("Form", form), answer="Tense")
        yield Example(prompt, tense, verb)


SPECS = (
    TaskSpec(
        name="word_lang",
        family="classification",
        metric="exact_match",
        max_gen_toks=8,
        title="language of a word, of twelve",
        sources=(SIMPLEMMA,),
        licence="MIT",
        attribution="simplemma's language data",
        examples=_languages,
        max_per_class=800,
        held_out_per_item=1,
        train_per_item=2,
    ),
    TaskSpec(
        name="es_tense",
        family="classification",
        metric="exact_match",
        max_gen_toks=12,
        title="tense of a Spanish verb form, of ten",
        sources=(MLCONJUG,),
        licence="MIT",
        attribution="Verbiste's conjugation tables, as mlconjug3 extends and ships them",
        examples=_tenses,
        max_per_class=900,
        held_out_per_item=1,
        train_per_item=8,
    ),
)
