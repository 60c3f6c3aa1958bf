"""Every kind of adapter against PEFT itself; and ``docs/formats.md`` says what was found."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("peft")
pytest.importorskip("transformers")

from conformance import REFUSED, TAKEN, Case, check_taken, documented, refusal, row


@pytest.mark.parametrize("case", TAKEN, ids=lambda case: case.name)
def test_exported_is_what_peft_makes_of_the_original(case: Case, tmp_path: Path) -> None:
    check_taken(case, tmp_path)
    assert row(case, "") in documented()


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: case.name)
def test_refused_with_the_reason(case: Case, tmp_path: Path) -> None:
    assert row(case, refusal(case, tmp_path)) in documented()


def test_the_table_has_these_rows_and_no_other() -> None:
    assert [line.split(" | ")[0] for line in documented()] == [
        f"| {case.name}" for case in (*TAKEN, *REFUSED)
    ]
