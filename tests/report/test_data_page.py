"""The page of a prepared data set: its counts and curves by hand, and nothing of a patient."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.report_pages import Page

from fedvlp.data import overview
from fedvlp.data.cohort import Cohort
from fedvlp.report.data_page import sentences, share, write
from fedvlp.report.html import ABSENT

SUMMARY = {"rows": 12, "used": 8, "skipped: missing image": 3, "skipped: no report": 1, "skipped: too small": 0}
SKIPPED = {"missing image": ("3", "4", "canary-film.png"), "no report": ("9",)}


def films(rows: np.ndarray) -> np.ndarray:
    """The film of row r has grey level 16 r, and a left half that is black."""
    pixels = np.repeat(16 * np.asarray(rows, dtype=np.uint8), 64).reshape(-1, 8, 8)
    pixels[:, :, :4] = 0
    return pixels


def cohort() -> Cohort:
    """Eight records of eight patients at two sites; rows 0 and 1 share their report, row 7 has neither film nor report.

    "b" has the rows 0 to 5 with Edema in 0, 1, 2; "a" has 6 and 7.
    """
    labels = np.zeros((8, 1), dtype=np.float32)
    labels[:3] = 1
    labels[6] = np.nan
    return Cohort(
        ids=tuple(f"canary-id-{row}" for row in range(8)), patients=tuple(f"canary-patient-{row}" for row in range(8)),
        studies=tuple(f"canary-study-{row}" for row in range(8)), label_names=("Edema",), labels=labels,
        reports=("canary one", "canary one", *(f"canary {'word ' * row}{row}" for row in range(2, 7)), ""),
        splits=np.array(["train"] * 5 + ["val", "test", "test"]), sites=("b",) * 6 + ("a",) * 2, images=films,
        subgroup_names=("view",), subgroups=np.array([["AP"], ["AP"], ["PA"], [""], ["AP"], ["PA"], ["AP"], ["PA"]]),
        fingerprint="x", imaged=np.arange(8) < 7, phi={"date": 2},
    )  # fmt: skip


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Page:
    path = tmp_path_factory.mktemp("data") / "data.html"
    return Page(write(cohort(), SUMMARY, SKIPPED, {"size": "8 x 8 pixels"}, path))


def test_what_is_there_and_what_to_look_into() -> None:
    assert sentences(cohort(), SUMMARY) == [
        "8 records of 8 patients are used: 7 with an image, 7 with a report.",
        "Not used, of 12 rows: missing image (3), no report (1).",
        "Reports seem to identify people: date in 2. Look at them before anything is trained.",
        "Reports that are the same word for word at several patients: 1, in 2 records. Among these, retrieval cannot "
        "know which image is meant.",
    ]
    clean = replace(cohort(), phi={}, reports=tuple(f"text {row}" for row in range(8)))
    assert sentences(clean, {"rows": 8, "used": 8}) == [
        "8 records of 8 patients are used: 7 with an image, 8 with a report."
    ]
    untested = replace(clean, splits=np.array(["train"] * 6 + ["val"] * 2))
    assert sentences(untested, {"rows": 8, "used": 8})[1:] == [
        "No record is in the test split: no run on this data can be measured on patients that it has not seen. "
        'split_column="" draws splits by patient.'
    ]


def test_records_and_labels_by_site(page: Page) -> None:
    assert page.tables["By site"] == [
        ["site", "records", "train", "val", "test", "images", "reports", "patients"],
        ["a", "2", "0", "0", "2", "1", "1", "2"], ["b", "6", "5", "1", "0", "6", "6", "6"],
    ]  # fmt: skip
    assert page.tables["Images by site and view"] == [
        ["site", "images", "AP", "PA", "not known"], ["a", "1", "1", "0", "0"], ["b", "6", "3", "2", "1"],
    ], "a record without an image is not counted"  # fmt: skip
    assert page.tables["Labels"][1] == ["Edema", "3", "4", "0", "1", "0 (0.0 %)", "3 (50.0 %)"]
    drawn = page.tables["Positive records (%), with 95 % intervals"]
    assert drawn[1] == ["Edema", "0", "0", "65.76", "50", "18.76", "81.24"]


def test_films_by_split_and_view_where_records_have_no_site(tmp_path: Path) -> None:
    """And no table of views where there is no film."""
    here = replace(cohort(), sites=None)
    shown = Page(write(here, {}, {}, {}, tmp_path / "data.html")).tables
    assert shown["Images by split and view"] == [
        ["split", "images", "AP", "PA", "not known"], ["train", "5", "3", "1", "1"], ["val", "1", "0", "1", "0"],
        ["test", "1", "1", "0", "0"],
    ]  # fmt: skip
    blind = replace(here, imaged=np.zeros(8, dtype=bool))
    assert "and view" not in Page(write(blind, {}, {}, {}, tmp_path / "data.html")).text


def test_the_interval_of_a_share_by_hand() -> None:
    """3 of 6: z^2 = 3.8415; centre 1/2, half-width 1.96 sqrt(1/24 + 3.8415/144) / (1 + 3.8415/6) = 0.3124."""
    half = share(3, 6)
    assert (half.value, half.low, half.high) == pytest.approx((50, 18.76, 81.24), abs=0.005)
    assert share(0, 4).low == 0
    assert share(4, 4).high == pytest.approx(100)


def test_rows_that_are_not_used_have_numbers_and_no_names(page: Page) -> None:
    assert page.tables["Rows that are not used"] == [
        ["reason", "rows", "numbers of the rows"],
        ["missing image", "3", "3-4; and 1 that have no number"],
        ["no report", "1", "9"],
    ]
    assert page.tables["Identifiers in reports"][1] == ["date", "2"]


def test_words_and_grey_levels_by_site(page: Page) -> None:
    """Of b: two words, two words, then 2 + r words of the rows 2 to 5. Grey: half of each film is 0, half 16 r."""
    words = page.tables["Words in a report (% of the reports)"]
    assert words[0] == ["words", "a", "b"]
    assert {row[0]: row[2] for row in words[1:] if row[2] not in ("0", ABSENT)} == {
        "2": "33.33", "4": "16.67", "5": "16.67", "6": "16.67", "7": "16.67",
    }  # fmt: skip
    grey = {row[0]: row[1:] for row in page.tables["Grey levels (% of the pixels)"][1:]}
    assert grey["0"] == ["50", "58.33"]  # of b five films are black in half, row 0 wholly: (5 / 2 + 1) / 6
    assert grey["96"] == ["50", "0"]
    assert grey["80"] == ["0", "8.333"]


def test_how_files_store_films_by_site(tmp_path: Path) -> None:
    """And a sentence where sites differ; a record without an image is not counted."""
    png, dicom = "PNG, 8 bits, grey", "DICOM, 12 bits, MONOCHROME1"
    unlike = replace(cohort(), stored=(png,) * 4 + (dicom,) * 4)
    page = Page(write(unlike, {}, {}, {}, tmp_path / "data.html"))
    assert page.tables["Image files"] == [["stored as", "a", "b"], [dicom, "1", "2"], [png, "0", "4"]]
    assert "Sites store their images in different containers" in page.text
    for alike in (replace(unlike, stored=(png,) * 8), replace(unlike, sites=None), cohort()):
        assert not any("unlike" in sentence for sentence in sentences(alike, {}))


def test_nothing_of_a_patient_and_nothing_from_outside(page: Page) -> None:
    assert "canary" not in page.source
    assert page.source.count("<script") == 0
    loaded = [attrs["src"] or "" for tag, attrs in page.tags if tag == "img"]
    assert [source for source in loaded if not source.startswith("data:image/svg")] == ["contact-sheet.png"]
    policy = next(attrs["content"] for tag, attrs in page.tags if attrs.get("http-equiv") == "Content-Security-Policy")
    assert policy == "default-src 'none'; img-src data: file:; style-src 'unsafe-inline'"


def test_records_without_sites_labels_reports_and_images(tmp_path: Path) -> None:
    bare = replace(
        cohort(), sites=None, labels=np.zeros((8, 0), dtype=np.float32), label_names=(), reports=("",) * 8,
        imaged=np.zeros(8, dtype=bool), phi={},
    )  # fmt: skip
    page = Page(write(bare, {}, {}, {}, tmp_path / "data.html"))
    assert not page.alts()
    assert "The scan finds none." in page.text
    for heading in ("By site", "Labels", "Reports", "Rows that are not used", "Films"):
        assert f">{heading}<" not in page.source


def test_of_many_films_some_are_drawn_and_always_the_same() -> None:
    of = [overview.grey_levels(cohort(), np.arange(8), bins=16, most=most, seed=seed) for most, seed in
          ((2, 0), (2, 0), (2, 1), (7, 0), (9, 1))]  # fmt: skip
    assert all(shares is not None and shares.sum() == pytest.approx(1) for shares in of)
    one, same, other, whole, again = (shares.tolist() for shares in of if shares is not None)
    assert one == same != other
    assert whole == pytest.approx(again)
    assert overview.grey_levels(cohort(), np.array([7])) is None
