"""Every spelling of one patient is one."""

from __future__ import annotations

from fedvlp.data.record_ids import normalised, one_number


def test_spellings_of_one_patient_are_one() -> None:
    for name in ["AB 12", "ab 12", "  Ab   12\t", "\uff21\uff22 12", "aB\u00a012"]:
        assert normalised(name) == "ab 12"


def test_a_number_is_one_whatever_a_spreadsheet_made_of_it() -> None:
    """Where the column has it plainly: else two systems' "007" and "7" need not be one patient."""
    for written in ["100.0", "100,00", "00100", "'100", '="100"', " 100 ", "\uff11\uff10\uff10", "00100.0"]:
        assert one_number([written, "100", "1000"]) == ["100", "100", "1000"]
        assert one_number(["0007", "008"]) == ["0007", "008"]
