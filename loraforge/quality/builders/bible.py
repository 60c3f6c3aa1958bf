"""Old to modern English: verses of the King James Version and of the World English Bible.

Both come as SWORD zText modules: blocks of one book each, compressed with zlib, an index of blocks and an
index of verses. Chapters are matched by the OSIS identifier in their heading, verses by their place in it.
"""

from __future__ import annotations

import html
import re
import struct
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path

from loraforge.errors import InputError
from loraforge.quality.builders.common import Example, TaskSpec, one_line, prompt_of
from loraforge.quality.builders.sources import Source

_BLOCK = struct.Struct("<III")  # offset, compressed size, size
_VERSE = struct.Struct("<IIH")  # block, offset in it, size
_CHAPTER = re.compile(r'<chapter [^>]*osisID="([^"]+)"')
_ASIDE = re.compile(r"<(note|title)\b.*?</\1>", re.DOTALL)
_TAG = re.compile(r"<[^>]*>")
_SHORTEST, _LONGEST = 30, 160  # characters of a verse


def _examples(folders: Mapping[str, Path]) -> Iterator[Example]:
    old, new = _chapters(folders["sword-text-kjv"]), _chapters(folders["sword-text-web"])
    for chapter in sorted(old.keys() & new.keys()):
        if len(old[chapter]) != len(new[chapter]):  # the two count verses differently here
            continue
        for before, after in zip(old[chapter], new[chapter], strict=True):
            fits = all(_SHORTEST <= len(text) <= _LONGEST for text in (before, after))
            if fits and before != after:
                prompt = prompt_of("Rewrite in modern English.", ("Old", before), answer="Modern")
                yield Example(prompt, after, chapter)


def _chapters(folder: Path) -> dict[str, list[str]]:
    """Plain verses of every chapter, by OSIS identifier ("Gen.1"), of an unpacked module package."""
    chapters: dict[str, list[str]] = {}
    for data in sorted((folder / "usr/share/sword/modules/texts/ztext").iterdir()):
        for testament in ("ot", "nt"):
            current, book = "", -1
            for block, text in _entries(data, testament):
                heading = _CHAPTER.search(text)
                if heading:
                    current, book = heading[1], block
                    chapters[current] = []
                elif current and block == book:
                    chapters[current].append(_plain(text))
    return chapters


def _entries(data: Path, testament: str) -> Iterator[tuple[int, str]]:
    packed = (data / f"{testament}.bzz").read_bytes()
    try:
        blocks = [
            zlib.decompress(packed[offset : offset + size])
            for offset, size, _ in _BLOCK.iter_unpack((data / f"{testament}.bzs").read_bytes())
        ]
        for block, offset, size in _VERSE.iter_unpack((data / f"{testament}.bzv").read_bytes()):
            yield block, blocks[block][offset : offset + size].decode()
    except (struct.error, zlib.error, IndexError, UnicodeDecodeError) as error:
        raise InputError(f"not a SWORD zText module ({error})", path=data) from error


def _plain(osis: str) -> str:
    return one_line(html.unescape(_TAG.sub("", _ASIDE.sub("", osis)).replace("¶", "")))


SPECS = (
    TaskSpec(
        name="bible_modern",
        family="rewriting",
        metric="chrf",
        max_gen_toks=64,
        title="Bible verses, King James to modern English",
        sources=(
            Source(
                "debian",
                "sword-text-kjv",
                "14.3-1",
                "9f463f28ce665f6f528fc723179722bced880a4c5485f7a41bf742838315de57",
                "LicenseRef-public-domain",
                "usr/share/doc/sword-text-kjv/copyright",
            ),
            Source(
                "debian",
                "sword-text-web",
                "426.0-1",
                "930b23670b352f0829a306501de4bebb5e654a2df02cde2cbe86b802177868e1",
                "LicenseRef-public-domain",
                "usr/share/doc/sword-text-web/copyright",
            ),
        ),
        licence="LicenseRef-public-domain",
        attribution="King James Version and World English Bible, as eBible.org publishes them",
        examples=_examples,
    ),
)
