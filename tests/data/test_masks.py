"""Masks lie on the pixels of their films, whatever the sizes of the files."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest

from fedvlp.data.cohort import Cohort
from fedvlp.data.masks import read_mask
from fedvlp.data.sources.table import TableSource
from fedvlp.data.synthetic.cohort import SyntheticCohort

Image = pytest.importorskip("PIL.Image")


def save(path: Path, pixels: np.ndarray) -> str:
    Image.fromarray(pixels).save(path)
    return path.name


def table(folder: Path, mask: str) -> TableSource:
    """Four films of 40 x 30 with a bright square, and masks of it of twice the size."""
    rows = []
    for number in range(4):
        film = np.random.default_rng(number).integers(0, 60, (40, 30), dtype=np.uint8)
        film[8:24, 5 + number : 15 + number] = 255
        inside = np.zeros((80, 60), np.uint8)
        inside[16:48, 10 + 2 * number : 30 + 2 * number] = 1
        names = save(folder / f"film{number}.png", film), save(folder / f"mask{number}.png", inside)
        rows.append([names[0], names[1] if number else mask, ("train", "val", "test", "test")[number]])
    with (folder / "t.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["image", "lungs", "split"], *rows])
    return TableSource(
        str(folder / "t.csv"), image_size=20, report_column="", min_report_words=0, mask_columns="lungs",
        burned_in="header",
    )  # fmt: skip


def test_a_mask_covers_what_it_is_of(tmp_path: Path) -> None:
    cohort = table(tmp_path, "mask0.png").build()
    assert cohort.masks is not None
    masks = cohort.masks(np.arange(4))["lungs"]
    assert masks.shape == (4, 20, 20)
    assert masks.dtype == bool
    for film, mask in zip(cohort.images(np.arange(4)), masks, strict=True):
        bright = film > 150
        assert (bright & mask).sum() >= 0.8 * bright.sum() > 0
        assert not mask[:, :2].any(), "the padding is in no mask"


def test_masks_follow_their_rows(tmp_path: Path) -> None:
    cohort = table(tmp_path, "mask0.png").build()
    taken = cohort.take(np.array([3, 1])).take(np.array([1, 0]))
    assert taken.masks is not None
    assert cohort.masks is not None
    assert np.array_equal(taken.masks(np.array([1, 0]))["lungs"], cohort.masks(np.array([3, 1]))["lungs"])
    assert taken.masks(np.array([], dtype=np.int64))["lungs"].shape == (0, 20, 20)
    assert Cohort.concat([cohort]).masks is None


def test_an_empty_cell_is_an_empty_mask_and_a_missing_file_an_error(tmp_path: Path) -> None:
    cohort = table(tmp_path, "").build()
    assert cohort.masks is not None
    assert cohort.masks(np.arange(4))["lungs"].any(axis=(1, 2)).tolist() == [False, True, True, True]
    for bad in ("gone-canary.png", "../mask1.png"):
        with pytest.raises(
            ValueError, match=r"table source: masks of 'lungs': (missing image|image outside the root) 1"
        ) as e:
            table(tmp_path, bad).build()
        assert "canary" not in str(e.value)
    (tmp_path / "canary.png").write_bytes(b"no image")
    with pytest.raises(ValueError, match="mask: a file cannot be read") as caught:
        read_mask(tmp_path / "canary.png", 20)
    assert "canary" not in str(caught.value)


def test_half_of_a_pixels_area_is_inside(tmp_path: Path) -> None:
    """4 x 4 to 2 x 2: the upper left has 2 of 4, the upper right 1 of 4, the lower half 4 of 4."""
    pixels = np.array([[9, 9, 0, 9], [0, 0, 0, 0], [1, 1, 1, 1], [1, 1, 1, 1]], np.uint8)
    save(tmp_path / "m.png", pixels)
    assert read_mask(tmp_path / "m.png", 2).tolist() == [[True, False], [True, True]]


def test_the_built_in_cohort_has_masks_of_lungs_and_findings() -> None:
    spec = SyntheticCohort(sites=2, size=40, image_size=32)
    cohort = spec.build()
    assert cohort.masks is not None
    rows = np.array([7, 3])
    assert all(np.array_equal(mask, spec.masks(rows)[name]) for name, mask in cohort.masks(rows).items())
    assert {"lungs", *cohort.label_names} == cohort.masks(rows).keys()
