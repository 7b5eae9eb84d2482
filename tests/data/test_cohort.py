"""The cohort table: what it refuses, what its errors keep to themselves, and how rows are chosen."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest

from fedvlp.data.cohort import Cohort, digest
from fedvlp.data.deid import PHIError, refuse_phi

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


def test_inconsistent_tables_are_refused():
    for changes, message in [
        ({"reports": ("x",)}, "reports has 1 rows, ids has 4"),
        ({"sites": ("north",)}, "sites has 1 rows"),
        ({"ids": ("a", "a", "a", "d")}, "2 of 4 are repeated"),
        ({"labels": np.zeros((4, 2), np.float32)}, r"shape \(4, 2\), expected \(4, 1\)"),
        ({"labels": np.zeros((4, 1))}, "float64, expected float32"),
        ({"labels": np.full((4, 1), 2, np.float32)}, "4 labels are not 1, 0"),
        ({"splits": np.array(["train", "train", "val", "valid"])}, "1 of 4 rows are in no split of"),
    ]:
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


def full(first: str, site: str, seed: int, **changes) -> Cohort:
    """Two rows in which no field has its default."""
    pixels = np.full((2, 3, 3), seed, dtype=np.uint8)
    values = {
        "ids": (f"{first}1", f"{first}2"), "patients": (f"{first}p", f"{first}q"),
        "studies": (f"{first}s", f"{first}t"),
        "reports": ("Effusion.", ""), "labels": np.array([[1, 0], [0, 1]], dtype=np.float32),
        "label_names": ("Effusion", "Edema"), "splits": np.array(["train", "test"]), "sites": (site, site),
        "images": lambda rows: pixels[rows], "fingerprint": first, "imaged": np.array([True, False]),
        "report_from": ((), (f"{first}1",)), "more_reports": ((), (f"{first} more",)), "phi": {"name": seed},
        "masks": lambda rows: {"lung": pixels[rows] > 0},
        "questions": lambda rows: [() for _ in rows],
        "sentences": lambda report: [(report, np.zeros(2, dtype=np.float32))],
        "subgroups": np.array([["F"], ["M"]]), "subgroup_names": ("sex",),
        "stored": (f"{first} PNG", f"{first} TIFF"), "files": (Path(f"{first}.png"), None),
    }  # fmt: skip
    return Cohort(**{**values, **changes})


def test_what_becomes_of_every_field_when_cohorts_are_joined():
    """Every field is what the cohorts say, but for masks, questions and labels of single sentences, left out."""
    one, other = full("a", "north", 1), full("b", "south", 2)
    both = Cohort.concat([one, other])
    assert {f.name for f in fields(Cohort)} == {
        "ids", "patients", "studies", "reports", "labels", "label_names", "splits", "sites", "images", "fingerprint",
        "imaged", "report_from", "more_reports", "phi", "private", "masks", "questions", "sentences", "channels",
        "subgroups", "subgroup_names", "stored", "files",
    }, "a new field: say below how it is joined"  # fmt: skip
    for name in ("ids", "patients", "studies", "reports", "sites", "report_from", "more_reports", "stored", "files"):
        assert getattr(both, name) == getattr(one, name) + getattr(other, name), name
    for name in ("labels", "splits", "imaged", "subgroups"):
        assert getattr(both, name).tolist() == getattr(one, name).tolist() + getattr(other, name).tolist(), name
    assert both.label_names == one.label_names
    assert both.subgroup_names == ("sex",)
    assert both.images(np.array([3, 0, 2]))[:, 0, 0].tolist() == [2, 1, 2]
    assert both.fingerprint not in (one.fingerprint, other.fingerprint)
    assert both.fingerprint != Cohort.concat([other, one]).fingerprint
    assert both.phi == {"name": 3}
    assert both.masks is None
    assert both.questions is None
    assert both.sentences is None
    assert both.channels == 1
    assert not both.private
    assert Cohort.concat([one, full("b", "south", 2, private=True)]).private


def test_what_is_refused_alone_is_refused_joined():
    """Reports in which identifiers were found stay found; it was lost once, and a refused cohort was trained on."""
    clean, named = full("a", "north", 0, phi={}), full("b", "south", 5)
    with pytest.raises(PHIError, match="name in 5"):
        refuse_phi(Cohort.concat([clean, named]).phi, 4)


def test_labels_that_a_cohort_does_not_know_are_blank_and_missing_columns_stay_missing():
    one = full("a", "north", 1, imaged=None, report_from=None, sites=None)
    other = full("b", "south", 2, label_names=("Edema", "Topic"))
    both = Cohort.concat([one, other])
    assert both.label_names == ("Effusion", "Edema", "Topic")
    blank = -7.0
    assert np.nan_to_num(both.labels, nan=blank).tolist() == [
        [1, 0, blank],
        [0, 1, blank],
        [blank, 1, 0],
        [blank, 0, 1],
    ]
    assert both.imaged is not None
    assert both.imaged.tolist() == [True, True, True, False]
    assert both.report_from == ((), (), (), ("b1",))
    assert both.sites is None
    assert Cohort.concat([one, one.take(np.array([], dtype=int))]).report_from is None


def test_joined_images_have_one_size_and_there_is_something_to_join():
    small = np.zeros((2, 2, 2), dtype=np.uint8)
    both = Cohort.concat([full("a", "north", 1), full("b", "south", 2, images=lambda rows: small[rows])])
    assert both.images(np.array([1])).shape == (1, 3, 3)
    with pytest.raises(ValueError, match="give all one image_size"):
        both.images(np.array([0, 3]))
    with pytest.raises(ValueError, match="at least one cohort"):
        Cohort.concat([])


def test_grey_images_beside_images_in_colour_have_three_equal_channels():
    red = np.zeros((2, 3, 3, 3), dtype=np.uint8)
    red[..., 0] = 9
    both = Cohort.concat([full("a", "north", 1), full("b", "south", 2, images=lambda rows: red[rows], channels=3)])
    assert both.channels == 3
    assert both.images(np.array([2, 0]))[:, 0, 0].tolist() == [[9, 0, 0], [1, 1, 1]]
    assert both.images(np.array([1])).shape == (1, 3, 3, 3), "also in a batch without any in colour"
    assert both.take(np.array([3])).images(np.array([0]))[0, 0, 0].tolist() == [9, 0, 0]
