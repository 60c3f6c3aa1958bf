"""Sentiment tasks: sentences of the VADER study with the mean rating of at least ten people each."""

from __future__ import annotations

import html
import tarfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

from loraforge.quality.builders.common import Example, TaskSpec, one_line, prompt_of
from loraforge.quality.builders.sources import Source

_VADER = Source(
    "pypi-sdist",
    "vaderSentiment",
    "3.3.2",
    "5d7c06e027fc8b99238edb0d53d970cf97066ef97654009890b83703849632f9",
    "MIT",
    "vaderSentiment-*/LICENSE.txt",
)
_STUDY = (
    "C.J. Hutto and E. Gilbert, VADER: A Parsimonious Rule-based Model for Sentiment Analysis of Social Media "
    "Text, ICWSM 2014; data of vaderSentiment, © 2016 C.J. Hutto"
)
_CLEAR = 0.5  # on the study's scale of -4 to 4; nearer to 0 the raters saw neither


def _rated(file: str, noun: str) -> Callable[[Mapping[str, Path]], Iterable[Example]]:
    """Examples of one file of the study, by review where its ids are ``REVIEW_SENTENCE``, else by sentence."""

    def examples(folders: Mapping[str, Path]) -> Iterator[Example]:
        resources = folders["vaderSentiment"] / "vaderSentiment-3.3.2" / "additional_resources"
        with tarfile.open(resources / "hutto_ICWSM_2014.tar.gz") as study:
            member = study.extractfile(f"hutto_ICWSM_2014/{file}_GroundTruth.txt")
            lines = member.read().decode("utf-8-sig").splitlines() if member else []
        for line in lines:
            number, rating, text = line.split("\t", 2)
            if abs(float(rating)) < _CLEAR:
                continue
            prompt = prompt_of(
                "Is the sentiment positive or negative?",
                (noun, one_line(html.unescape(text), 400)),
                answer="Sentiment",
            )
            yield Example(prompt, "positive" if float(rating) > 0 else "negative", number.split("_")[0])

    return examples


SPECS: tuple[TaskSpec, ...] = (
    TaskSpec(
        name="sent_amazon",
        family="classification",
        metric="exact_match",
        max_gen_toks=6,
        title="Sentiment of a sentence from a product review",
        sources=(_VADER,),
        licence="MIT",
        attribution=f"{_STUDY}; sentences of reviews collected by M. Hu and B. Liu (2004), CC BY 4.0.",
        examples=_rated("amazonReviewSnippets", "Review"),
        max_per_class=1230,
        held_out_per_item=12,
        train_per_item=100,
    ),
)
