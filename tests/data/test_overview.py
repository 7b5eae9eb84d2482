"""What is shown of a data set before training: counts by hand, a sheet of samples, and nothing of a patient."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fedvlp.data.cohort import Cohort
from fedvlp.data.overview import (
    CAPTION,
    QUANTILES,
    TILE,
    caption,
    contact_sheet,
    label_counts,
    report_lengths,
    split_counts,
    subgroup_counts,
)  # fmt: skip
from fedvlp.report.figures import font_file

nan = np.nan


def cohort() -> Cohort:
    """Six images of four patients; image i is filled with 40 i; one has no report, one no image."""
    return Cohort(
        ids=tuple("abcdef"),
        patients=("p", "p", "q", "r", "s", "s"),
        studies=("1", "1", "2", "3", "4", "5"),
        reports=("one two three", "one", "", "one two", "one two three four", "one two three four five"),
        labels=np.array([[1, nan], [0, nan], [-1, 1], [nan, 0], [1, 0], [1, 1]], dtype=np.float32),
        label_names=("Edema", "Fracture"),
        splits=np.array(["train", "train", "val", "test", "train", "train"]),
        sites=None,
        images=lambda rows: np.repeat(40 * rows.astype(np.uint8), 64).reshape(-1, 8, 8),
        fingerprint="x",
        imaged=np.array([True, True, True, True, True, False]),
    )


def test_counts_by_split() -> None:
    assert split_counts(cohort()) == {
        "train": {"records": 4, "images": 3, "patients": 2, "studies": 3, "reports": 4},
        "val": {"records": 1, "images": 1, "patients": 1, "studies": 1, "reports": 0},
        "test": {"records": 1, "images": 1, "patients": 1, "studies": 1, "reports": 1},
    }


def test_a_caption_has_split_site_view_and_labels() -> None:
    """Cut where the sheet ends; what is not known is left out."""
    plain = cohort()
    assert caption(plain, 0) == "train\nEdema"
    views = replace(plain, sites=("north",) * 6, subgroup_names=("view",), subgroups=np.array([["AP"]] * 5 + [[""]]))
    assert caption(views, 4) == "train north AP\nEdema"
    assert caption(views, 5) == "train north\nEdema, Fracture"
    assert subgroup_counts(views, "view") == {"AP": {"north": 5}, "": {"north": 1}}
    assert subgroup_counts(replace(views, sites=None), "view")["AP"] == {"train": 3, "val": 1, "test": 1}
    long = replace(views, sites=("a hospital with a long name",) * 6)
    assert caption(long, 5) == "train a hospital with a\nlong name\nEdema, Fracture"
    many = replace(
        plain,
        labels=np.ones((6, 4), dtype=np.float32),
        label_names=("Edema", "Fracture", "Pleural Effusion", "Scoliosis"),
    )
    assert caption(many, 0).splitlines() == ["train", "Edema, Fracture, Pleural", "Effusion, Scoliosis"]
    more = replace(many, label_names=("Pleural Effusion", "Pleural Thickening", "Pneumoperitoneum", "Scoliosis"))
    assert caption(more, 0).endswith("…")


def test_counts_by_label() -> None:
    assert label_counts(cohort()) == {
        "Edema": {"positive": 3, "negative": 1, "uncertain": 1, "blank": 1},
        "Fracture": {"positive": 2, "negative": 2, "uncertain": 0, "blank": 2},
    }


def test_lengths_are_of_the_reports_there_are() -> None:
    """1, 2, 3, 4 and 5 words: the median is 3, the lower quartile 2."""
    lengths = report_lengths(cohort())
    assert list(lengths) == list(QUANTILES)
    assert [lengths[q] for q in (0.0, 0.25, 0.5, 1.0)] == [1, 2, 3, 5]
    assert report_lengths(cohort().without(np.ones(6, dtype=bool), np.zeros(6, dtype=bool))) == {}


def test_the_sheet_shows_images_in_order_with_split_and_labels(tmp_path: Path) -> None:
    """Five of six rows have an image: two rows of three tiles."""
    image = pytest.importorskip("PIL.Image")
    assert contact_sheet(cohort(), tmp_path / "sheet.png", 24, columns=3) == 5
    sheet = np.asarray(image.open(tmp_path / "sheet.png"))
    assert sheet.shape == (2 * (TILE + CAPTION), 3 * TILE)
    middle = [
        sheet[TILE // 2 + row * (TILE + CAPTION), TILE // 2 + TILE * column] for row in (0, 1) for column in range(3)
    ]
    assert middle == [0, 40, 80, 120, 160, 255]
    captions = sheet[TILE : TILE + CAPTION]
    assert (captions < 128).any(), "a caption"
    assert not (sheet[2 * TILE + CAPTION :, 2 * TILE :] < 255).any(), "no sixth"


def test_the_sheet_is_for_its_owner_alone(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        contact_sheet(cohort(), tmp_path / "sheet.png", 2)
    finally:
        os.umask(before)
    assert (tmp_path / "sheet.png").stat().st_mode & 0o777 == 0o600


def test_the_sheet_is_a_sample_drawn_by_seed(tmp_path: Path) -> None:
    files = [tmp_path / f"{i}.png" for i in range(3)]
    for file, seed in zip(files, (1, 1, 2), strict=True):
        assert contact_sheet(cohort(), file, 2, seed) == 2
    assert files[0].read_bytes() == files[1].read_bytes() != files[2].read_bytes()


def test_a_caption_has_the_letters_of_other_languages(tmp_path: Path) -> None:
    """Two sites whose names differ in an accent look different; a font without it draws the same box for both."""
    sheets = []
    for name in ("Köln", "Kåln"):
        file = tmp_path / f"{len(sheets)}.png"
        contact_sheet(replace(cohort(), sites=(name,) * 6), file, 1, font=font_file())
        sheets.append(file.read_bytes())
    assert sheets[0] != sheets[1]
