"""The choice of policies: made by a rule from validation scores, written down with a hash, and obeyed by the test run.

A policy is ranked by its adapter-macro score on the validation splits at one budget; equal ones by the smaller worst
loss, then by name. The best go on to the test splits, where nothing is chosen any more. No torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from loraforge.errors import InputError, IntegrityError, UsageError
from loraforge.files import canonical_json, sha256_text, write_text
from loraforge.quality.scores import Sample, count_over, macro, worst

Arm = tuple[str, str]
_EQUAL = 1e-9  # points; a macro of equal scores can differ by the rounding of a sum
_REMEDY = "run `loraforge eval select` again"


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class Candidate(_Strict):
    """A policy on the validation splits, in points; losses are against the original adapters."""

    policy: str
    macro: float
    worst: float = Field(ge=0)
    n_over_5: int = Field(ge=0)


class Selection(_Strict):
    """What was chosen, from what: one line of JSON, a record of the bags of both runs."""

    record: Literal["selection"] = "selection"
    fleet: str
    decide_at: str
    scores_sha256: str = Field(pattern=r"^[0-9a-f]{64}$", description="of the validation scores that decided")
    candidates: tuple[Candidate, ...] = Field(min_length=1, description="best first")
    finalists: tuple[str, ...] = Field(min_length=1, description="policies that go on, best first")
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$", description="of all the rest")

    @property
    def chosen(self) -> str:
        """The best policy."""
        return self.finalists[0]

    def digest(self) -> str:
        """What ``sha256`` must be."""
        return sha256_text(canonical_json(self.model_dump(mode="json", exclude={"sha256"})))

    def confirms(self, stated: Selection) -> bool:
        """Whether ``stated`` makes the same choice of the same scores, but for how sums were rounded."""

        def but_means(selection: Selection) -> dict[str, Any]:
            kept = selection.model_dump(exclude={"sha256"})
            for candidate in kept["candidates"]:
                del candidate["macro"], candidate["worst"]
            return kept

        return but_means(self) == but_means(stated) and all(
            max(abs(own.macro - other.macro), abs(own.worst - other.worst)) < _EQUAL
            for own, other in zip(self.candidates, stated.candidates, strict=True)
        )


def select(
    arms: Mapping[Arm, Mapping[str, Sample]],
    original: Mapping[str, Sample],
    *,
    fleet: str,
    scores_sha256: str,
    candidates: Sequence[str],
    decide_at: str,
    finalists: int,
) -> Selection:
    """Rank ``candidates`` by their validation scores at ``decide_at``.

    Raises UsageError for a candidate without scores, or fewer candidates than finalists.
    """
    before = {name: sample.score for name, sample in original.items()}
    found: list[Candidate] = []
    for policy in dict.fromkeys(candidates):
        if (policy, decide_at) not in arms:
            raise UsageError(
                f"{policy} has no scores at {decide_at}", key="--candidates", remedy="score it first"
            )
        scores = {name: sample.score for name, sample in arms[policy, decide_at].items()}
        found.append(
            Candidate(
                policy=policy,
                macro=macro(scores),
                worst=worst(scores, before)[1],
                n_over_5=count_over(scores, before),
            )
        )
    if finalists > len(found):
        raise UsageError(f"{finalists} finalists of {len(found)} candidates", key="--finalists")
    ranked = sorted(found, key=lambda one: (-round(one.macro / _EQUAL), one.worst, one.policy))
    stated = Selection.model_construct(
        record="selection",
        fleet=fleet,
        decide_at=decide_at,
        scores_sha256=scores_sha256,
        candidates=tuple(ranked),
        finalists=tuple(one.policy for one in ranked[:finalists]),
        sha256="",
    )
    return Selection(**{**dict(stated), "sha256": stated.digest()})


def save_selection(selection: Selection, path: Path) -> None:
    """Write a selection atomically, as one line."""
    write_text(path, canonical_json(selection.model_dump(mode="json")) + "\n")


def load_selection(path: Path) -> Selection:
    """Read a selection. Raises InputError for another file, IntegrityError for one whose contents were changed."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot be read ({error})", path=path, remedy=_REMEDY) from error
    try:
        found = Selection.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"]) or None
        raise InputError(f"not a selection ({first['msg']})", path=path, key=key, remedy=_REMEDY) from error
    if found.digest() != found.sha256:
        raise IntegrityError("was changed after the scores decided", path=path, remedy=_REMEDY)
    return found
