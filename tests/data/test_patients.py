"""Every spelling of one patient is one."""

from __future__ import annotations

import pytest

from fedvlp.data.patients import normalised, one_number


@pytest.mark.parametrize("name", ["AB 12", "ab 12", "  Ab   12\t", "\uff21\uff22 12", "aB\u00a012"])
def test_spellings_of_one_patient_are_one(name: str) -> None:
    assert normalised(name) == "ab 12"


@pytest.mark.parametrize(
    "written", ["100.0", "100,00", "00100", "'100", '="100"', " 100 ", "\uff11\uff10\uff10", "00100.0"]
)
def test_a_number_is_one_whatever_a_spreadsheet_made_of_it(written: str) -> None:
    """Where the column has it plainly: else two systems' "007" and "7" need not be one patient."""
    assert one_number([written, "100", "1000"]) == ["100", "100", "1000"]
    assert one_number(["0007", "008"]) == ["0007", "008"]
