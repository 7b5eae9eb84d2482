"""A torch Dataset becomes the cohort that its files would be: pixels, splits, labels, identifiers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import Dataset

from fedvlp.data.images import decode
from fedvlp.data.loader import SiteData
from fedvlp.data.sources.torch_dataset import DatasetSource
from fedvlp.models.tiny import HashTokenizer

PIXELS = np.random.default_rng(0).integers(0, 256, (20, 40, 30)).astype(np.uint8)


class Films(Dataset[dict[str, Any]]):
    """Twenty films of ten patients; ``change`` makes another item of the one that it is given."""

    def __init__(self, change: Callable[[int, dict[str, Any]], dict[str, Any]]) -> None:
        self.change = change

    def __len__(self) -> int:
        return len(PIXELS)

    def __getitem__(self, index: int) -> dict[str, Any]:
        labels = {"Edema": index % 2}
        item = {"image": PIXELS[index], "report": f"no edema in {index % 7} zones", "patient": index // 2}
        return self.change(index, item | {"labels": labels})


@dataclass(frozen=True)
class Mine(DatasetSource):
    change: Callable[[int, dict[str, Any]], dict[str, Any]] = lambda index, item: item
    image_size: int = 40

    def dataset(self) -> Films:
        return Films(self.change)


def test_items_become_rows() -> None:
    cohort = Mine(label_names=("Edema",)).build()
    assert (len(cohort), len(set(cohort.patients)), cohort.label_names) == (20, 10, ("Edema",))
    assert cohort.labels[:, 0].tolist() == [0.0, 1.0] * 10
    assert {split: len(cohort.rows(split)) for split in ("train", "val", "test")} == {"train": 14, "val": 2, "test": 4}
    assert cohort.has_image().all()
    assert cohort.reports[3] == "no edema in 3 zones"
    data = SiteData(cohort, {"train": cohort.rows("train")}, HashTokenizer(64, 16), 32)
    assert next(data.batches("train", 4, drop_last=False))["image"].shape == (4, 1, 32, 32)


def test_one_item_without_an_image_does_not_take_those_of_the_others() -> None:
    """Of whichever item, the first too; where none has one, reports are all there is."""
    cohort = Mine(change=lambda index, item: item | {"image": item["image"] if index else None}).build()
    assert (len(cohort), cohort.has_image().all()) == (19, True)
    assert not Mine(change=lambda index, item: item | {"image": None}).build().has_image().any()


@pytest.mark.parametrize(
    "form",
    [torch.from_numpy, lambda film: torch.from_numpy(film)[None], lambda film: torch.from_numpy(film) / 255,
     Image.fromarray, lambda film: torch.from_numpy(film).expand(3, -1, -1),
     lambda film: torch.from_numpy(film).expand(3, -1, -1) / 255],
)  # fmt: skip
def test_pixels_are_those_of_the_same_film_in_a_file(form: Callable[[np.ndarray], Any], tmp_path: Path) -> None:
    Image.fromarray(PIXELS[5]).save(tmp_path / "film.png")
    cohort = Mine(change=lambda index, item: {**item, "image": form(item["image"])}).build()
    difference = cohort.images(np.array([5]))[0].astype(int) - decode(tmp_path / "film.png", 40)
    assert abs(difference).max() <= 1  # colour to grey is rounded


def test_what_cannot_be_read_is_counted_and_what_changes_is_another_cohort() -> None:
    constant = {3: np.zeros((40, 30), np.uint8), 4: None, 5: torch.zeros(2, 2, 2, 2)}
    changed = Mine(change=lambda index, item: {**item, "image": constant.get(index, item["image"])})
    cohort, summary = changed.prepare()
    assert len(cohort) == 17
    assert {name: count for name, count in summary.items() if name.startswith("skipped")} == {
        "skipped: constant image": 1, "skipped: no image": 1, "skipped: unsupported kind of array": 1,
    }  # fmt: skip
    brighter = Mine(change=lambda index, item: {**item, "image": np.rot90(item["image"])}).build()
    assert brighter.fingerprint != Mine().build().fingerprint


def test_reports_alone_are_records_and_identifiers_are_found() -> None:
    named = Mine(change=lambda index, item: {"patient": index, "report": "seen on 03/04/2021, edema"})
    screened = named.screen()
    assert screened.phi == {"date": 20}
    assert not screened.build().has_image().any()


def test_an_item_without_a_patient_is_refused() -> None:
    nobody = Mine(change=lambda index, item: item if index else {"report": "Mr Smith"})
    with pytest.raises(ValueError, match='1 of 20 items have no "patient"') as told:
        nobody.build()
    assert "Smith" not in str(told.value)
