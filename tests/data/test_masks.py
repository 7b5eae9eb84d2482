"""Masks lie on the pixels of their images, whatever the sizes of the files."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest

from fedvlp.data.cohort import Cohort
from fedvlp.data.masks import read_mask, read_masks
from fedvlp.data.sources.table import TableSource
from fedvlp.data.synthetic.drawn_cohort import SyntheticCohort

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


def test_a_table_refuses_a_mask_of_other_proportions_than_its_film(tmp_path: Path) -> None:
    source = table(tmp_path, "mask0.png")
    save(tmp_path / "mask2.png", np.ones((60, 60), np.uint8))
    cohort = source.build()
    assert cohort.masks is not None
    with pytest.raises(ValueError, match="60 x 60 pixels has other proportions than its image, which has 30 x 40"):
        cohort.masks(np.array([2]))


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


def square(value: int = 255) -> np.ndarray:
    """16 x 16 pixels inside of 32 x 32."""
    pixels = np.zeros((32, 32), np.uint8)
    pixels[8:24, 8:24] = value
    return pixels


EXPECTED = square() > 0


def test_what_is_not_0_is_inside(tmp_path: Path) -> None:
    """Whatever the depth; so is every structure of several in one file."""
    for mode in ["L", "I;16", "1"]:
        for value in [1, 128, 255]:
            deep = square(value).astype(np.uint16) * (257 if value == 255 else 1)
            pixels = {"L": square(value), "I;16": deep, "1": square(value) > 0}[mode]
            pixels[8, 8] = pixels.max() // 3 or 1
            save(tmp_path / "m.png", pixels)
            assert np.array_equal(read_mask(tmp_path / "m.png", 32), EXPECTED)


def test_what_jpeg_leaves_around_an_edge_is_outside(tmp_path: Path) -> None:
    rows, columns = np.mgrid[:128, :128]
    disc = (rows - 60) ** 2 + (columns - 70) ** 2 < 40**2
    for top in (255, 120):
        Image.fromarray((disc * top).astype(np.uint8)).save(tmp_path / "m.jpg", quality=75)
        stored = np.asarray(Image.open(tmp_path / "m.jpg"))
        assert (stored > 0).sum() > disc.sum() + 100
        assert np.abs(read_mask(tmp_path / "m.jpg", 128).astype(int) - disc).sum() <= 10
    Image.fromarray(np.zeros((32, 32), np.uint8)).save(tmp_path / "m.jpg")
    assert not read_mask(tmp_path / "m.jpg", 32).any()


def test_a_palette_is_no_reason_to_lose_a_structure(tmp_path: Path) -> None:
    for palette, indices in [
        ([0, 0, 0] * 3, (0, 1)),  # a map of structures whose palette was lost
        ([0, 0, 0, 255, 0, 0, 0, 0, 0], (0, 2)),
        ([255, 255, 255, 0, 0, 0], (1, 0)),  # colours that were counted, the most frequent first
    ]:
        mask = Image.fromarray(np.where(EXPECTED, indices[1], indices[0]).astype(np.uint8), mode="P")
        mask.putpalette(palette + [0] * (768 - len(palette)))
        mask.save(tmp_path / "m.png")
        assert np.array_equal(read_mask(tmp_path / "m.png", 32), EXPECTED)


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
def test_what_is_transparent_is_outside(mode: str, tmp_path: Path) -> None:
    """Red or white inside, transparent white outside."""
    opaque = square(255)
    match mode:
        case "RGBA":
            white = np.full((32, 32), 255, np.uint8)
            image = Image.fromarray(np.dstack([white, square(0) + 255 - opaque, 255 - opaque, opaque]))
        case "LA":
            image = Image.fromarray(np.dstack([np.full((32, 32), 255, np.uint8), opaque]))
        case _:
            image = Image.fromarray((opaque == 0).astype(np.uint8), mode="P")
            image.putpalette([255, 0, 0, 255, 255, 255] + [0] * 762)
            image.info["transparency"] = 1
    image.save(tmp_path / "m.png")
    assert np.array_equal(read_mask(tmp_path / "m.png", 32), EXPECTED)


def test_a_mask_of_other_proportions_than_its_film_is_refused(tmp_path: Path) -> None:
    """Films of 200 x 101 pixels and, by its orientation, 101 x 200; a reduction may be rounded by a pixel."""
    film = np.random.default_rng(0).integers(0, 255, (101, 200), dtype=np.uint8)
    save(tmp_path / "canary.png", film)
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.fromarray(film).save(tmp_path / "turned.jpg", exif=exif)
    films = [tmp_path / "canary.png", tmp_path / "turned.jpg"]

    def masks(*shape: int, row: int = 0) -> np.ndarray:
        save(tmp_path / "mask.png", np.ones(shape, np.uint8))
        return read_masks({"lungs": [tmp_path / "mask.png"] * 2}, 40, np.array([row]), films)["lungs"]

    for shape in ((101, 200), (202, 400), (51, 100), (50, 100), (102, 200)):
        assert masks(*shape).any()
    assert masks(200, 101, row=1).any()
    for shape, row in (((128, 128), 0), ((200, 101), 0), ((101, 200), 1), ((104, 200), 0)):
        with pytest.raises(ValueError, match=f"a mask of {shape[1]} x {shape[0]} pixels has other proportions") as e:
            masks(*shape, row=row)
        assert "canary" not in str(e.value)
        assert ("has 200 x 101;" if row == 0 else "has 101 x 200;") in str(e.value)


def test_the_built_in_cohort_has_masks_of_lungs_and_findings() -> None:
    spec = SyntheticCohort(sites=2, size=40, image_size=32)
    cohort = spec.build()
    assert cohort.masks is not None
    rows = np.array([7, 3])
    assert all(np.array_equal(mask, spec.masks(rows)[name]) for name, mask in cohort.masks(rows).items())
    assert {"lungs", *cohort.label_names} == cohort.masks(rows).keys()
