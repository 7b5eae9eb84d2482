"""The cohort table: what it refuses, what its errors keep to themselves, and how rows are chosen."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from fedvlp.data.record import Cohort, digest

PIXELS = np.arange(4, dtype=np.uint8).reshape(4, 1, 1).repeat(2, 1).repeat(2, 2)


def cohort(**changes) -> Cohort:
    nan = float("nan")
    base = Cohort(
        ids=("a", "b", "c", "d"),
        patients=("Smith", "Smith", "Jones", "Brown"),
        studies=("s1", "s1", "s2", "s3"),
        reports=("No effusion.", "", "Effusion.", "Possible effusion."),
        labels=np.array([[0], [nan], [1], [-1]], dtype=np.float32),
        label_names=("Pleural Effusion",),
        splits=np.array(["train", "train", "val", "test"]),
        sites=("north", "north", "south", "north"),
        images=lambda rows: PIXELS[rows],
        fingerprint="f",
    )
    return replace(base, **changes)


def test_rows_are_chosen_by_split_and_site():
    table = cohort()
    assert len(table) == 4
    assert table.rows("train").tolist() == [0, 1]
    assert table.rows("val", "south").tolist() == [2]
    assert table.rows("val", "north").tolist() == []


def test_rows_refuses_what_is_not_there():
    with pytest.raises(ValueError, match="unknown split"):
        cohort().rows("validate")
    with pytest.raises(ValueError, match="no row at site 'east'"):
        cohort().rows("train", "east")
    with pytest.raises(ValueError, match="partition it first"):
        cohort(sites=None).rows("train", "north")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"reports": ("x",)}, "reports has 1 rows, ids has 4"),
        ({"sites": ("north",)}, "sites has 1 rows"),
        ({"ids": ("a", "a", "a", "d")}, "2 of 4 are repeated"),
        ({"labels": np.zeros((4, 2), np.float32)}, r"shape \(4, 2\), expected \(4, 1\)"),
        ({"labels": np.zeros((4, 1))}, "float64, expected float32"),
        ({"labels": np.full((4, 1), 2, np.float32)}, "4 labels are not 1, 0"),
        ({"splits": np.array(["train", "train", "val", "valid"])}, "1 of 4 rows are in no split of"),
    ],
)
def test_inconsistent_tables_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        cohort(**changes)


def test_a_patient_in_two_splits_is_counted_never_named():
    with pytest.raises(ValueError, match="1 of 3 patients are in more than one split") as error:
        cohort(splits=np.array(["train", "test", "val", "test"]))
    assert "Smith" not in str(error.value)
    assert "ffusion" not in str(error.value)


def test_with_sites_replaces_the_sites_only():
    table = cohort(sites=None).with_sites(["x", "x", "y", "y"])
    assert table.rows("val", "y").tolist() == [2]
    assert table.ids == cohort().ids


def test_take_keeps_rows_and_pixels_together():
    part = cohort().take(np.array([3, 1]))
    assert part.ids == ("d", "b")
    assert part.reports == ("Possible effusion.", "")
    assert part.images(np.array([1, 0]))[:, 0, 0].tolist() == [1, 3]
    assert part.take(np.array([1])).images(np.array([0]))[0, 0, 0] == 1
    assert part.fingerprint != cohort().fingerprint
    with pytest.raises(IndexError, match=r"0\.\.3, got 4\.\.4"):
        cohort().take(np.array([4]))


def test_repr_shows_counts_only():
    assert repr(cohort()) == "Cohort(4 rows, 3 patients, 2 sites, f)"
    assert "unpartitioned" in repr(cohort(sites=None))


def test_an_empty_cohort_is_a_cohort():
    assert len(cohort().take(np.array([], dtype=int)).rows("train")) == 0


def test_digest_frames_its_parts():
    assert digest("ab", "c") != digest("a", "bc")
    assert digest("a") == digest(b"a")
