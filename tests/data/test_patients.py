"""Whose names are counted: every spelling of one patient is one, and nobody is one whom the table does not name."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from fedvlp.data.patients import keyed, normalised, patient_names
from fedvlp.data.sources.table import TableSource
from fedvlp.data.synthetic.cohort import SyntheticCohort


@pytest.mark.parametrize("name", ["AB 12", "ab 12", "  Ab   12\t", "\uff21\uff22 12", "aB\u00a012"])
def test_spellings_of_one_patient_are_one(name: str) -> None:
    assert normalised(name) == "ab 12"
    assert keyed([name, "ab 12"], b"key") == keyed(["ab 12"], b"key")


def test_others_stay_apart_and_nobody_is_nobody() -> None:
    assert len(keyed(["ab12", "ab 12", "ab13", "0ab12", "", "  "], b"key")) == 4


def test_a_hash_needs_the_key() -> None:
    """Neither without it, nor under another, is it the same."""
    item = keyed(["ab12"], b"key")[0]
    assert item != keyed(["ab12"], b"other")[0]
    assert item not in {
        hashlib.new(kind, text).hexdigest() for kind in ("sha256", "md5") for text in (b"ab12", b"AB12")
    }
    assert keyed(["b", "a"], b"key") == keyed(["a", "b"], b"key") == sorted(keyed(["a", "b"], b"key"))


def table(folder: Path, text: str) -> TableSource:
    (folder / "people.csv").write_text(text)
    return TableSource(str(folder / "people.csv"))


def test_a_table_needs_no_images_and_its_names_are_as_written(tmp_path: Path) -> None:
    source = table(tmp_path, "patient_id,national,site\nA1,n 7,one\nA2,,two\nA1,N 7,one\n")
    assert patient_names(source) == ["A1", "A2", "A1"]
    assert patient_names(source, column="national") == ["n 7", "", "N 7"]
    assert patient_names(source, site="two") == ["A2"]


@pytest.mark.parametrize(("site", "column"), [(None, "passport"), ("one", "")])
def test_a_column_that_is_not_there_is_refused_and_not_repeated(tmp_path: Path, site: str | None, column: str) -> None:
    with pytest.raises(ValueError, match="1 of the columns of patients and sites are not in the table"):
        patient_names(table(tmp_path, "patient_id\nDOE^JANE\n"), site, column)


def test_another_source_is_built() -> None:
    cohort = SyntheticCohort(sites=2, size=40, image_size=32)
    built = cohort.build()
    assert patient_names(cohort) == list(built.patients)
    assert built.sites is not None
    one = [name for name, site in zip(built.patients, built.sites, strict=True) if site == "site-1"]
    assert 0 < len(one) < 40
    assert patient_names(cohort, "site-1") == one
    with pytest.raises(ValueError, match="no columns to choose from"):
        patient_names(cohort, column="national")
