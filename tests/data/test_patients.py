"""Every spelling of one patient is one."""

from __future__ import annotations

import pytest

from fedvlp.data.record_ids import normalised


@pytest.mark.parametrize("name", ["AB 12", "ab 12", "  Ab   12\t", "\uff21\uff22 12", "aB\u00a012"])
def test_spellings_of_one_patient_are_one(name: str) -> None:
    assert normalised(name) == "ab 12"
