"""Which chapter of ICD-10-CM a diagnosis belongs to, from the tabular list in simple-icd-10-cm."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from xml.etree import ElementTree

from loraforge.errors import InputError
from loraforge.quality.builders.common import Example, TaskSpec, one_line, prompt_of
from loraforge.quality.builders.sources import Source

_RANGE = re.compile(r"\s*\([A-Z]\d\w-[A-Z]\d\w\)$")
_LONGEST = 300  # characters of a diagnosis
_CATEGORY = 3  # characters of a code that name its category, such as T25


def _examples(folders: Mapping[str, Path]) -> Iterator[Example]:
    for path in sorted((folders["simple-icd-10-cm"] / "simple_icd_10_cm/data").glob("*.xml")):
        try:
            root = ElementTree.parse(path).getroot()
        except ElementTree.ParseError as error:
            raise InputError(f"not valid XML ({error})", path=path) from error
        for chapter in root.iter("chapter"):
            title = _RANGE.sub("", one_line(chapter.findtext("desc", "")))
            for diagnosis in chapter.iter("diag"):
                text = one_line(diagnosis.findtext("desc", ""), _LONGEST)
                prompt = prompt_of("Which ICD-10 chapter?", ("Diagnosis", text), answer="Chapter")
                yield Example(prompt, title, diagnosis.findtext("name", "")[:_CATEGORY])


SPECS = (
    TaskSpec(
        name="icd_chapter",
        family="classification",
        metric="exact_match",
        max_gen_toks=24,
        title="ICD-10-CM chapter of a diagnosis",
        sources=(
            Source(
                "pypi",
                "simple-icd-10-cm",
                "1.5.0",
                "6d461d71dc26aedc530ae65f02cfb578a154e49507c32e8241e75f701d4b7e42",
                "MIT",
                "simple_icd_10_cm-*.dist-info/licenses/LICENSE",
            ),
        ),
        licence="MIT",
        attribution="ICD-10-CM tabular list (public domain), as simple-icd-10-cm ships it",
        examples=_examples,
        max_per_class=800,  # injuries alone are half of all codes
        held_out_per_item=1,
    ),
)
