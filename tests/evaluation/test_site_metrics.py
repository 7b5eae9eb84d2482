"""How a model is measured on held-out records: pairs, captions of shared images, folds, sites that lack a modality."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fedvlp.core.types import Batch, VLOutput
from fedvlp.data.cohort import Cohort
from fedvlp.data.loader import SiteData
from fedvlp.evaluation.retrieval import Retrieval
from fedvlp.models.tiny import HashTokenizer


def data(captions: int, images: int = 5, splits: tuple[str, ...] = ("val",), **columns: Any) -> SiteData:
    """``images`` different images with ``captions`` texts each, in the order of the images; all in all ``splits``."""
    count = captions * images
    names = tuple(map(str, range(count)))

    def pixels(rows: np.ndarray) -> np.ndarray:
        return np.repeat(10 * (np.asarray(rows) // captions).astype(np.uint8), 64).reshape(-1, 8, 8)

    settings: dict[str, Any] = {"reports": tuple(f"text {name}" for name in names), **columns}
    cohort = Cohort(
        ids=names, patients=names, studies=names, labels=np.zeros((count, 0), dtype=np.float32), label_names=(),
        splits=np.array(["val"] * count), sites=None, images=pixels, fingerprint="x", **settings,
    )  # fmt: skip
    rows = {"train": np.arange(0), **{split: np.arange(count) for split in splits}}
    return SiteData(cohort, rows, HashTokenizer(64, 4), 8)


class Told(nn.Module):
    """The vectors [n, d] of images and texts by row."""

    def __init__(self, image: torch.Tensor, text: torch.Tensor) -> None:
        super().__init__()
        self.image, self.text = image, text

    def forward(self, batch: Batch) -> VLOutput:
        return VLOutput(self.image[batch["row"]], self.text[batch["row"]])


def test_captions_share_their_image() -> None:
    """Two captions an image, perfect vectors: as pairs, the second caption's image comes second; as captions, first."""
    vectors = torch.eye(5).repeat_interleave(2, dim=0)
    model, records = Told(vectors, vectors), data(captions=2)
    first, owner = records.shared_images("val")
    assert first.tolist() == [0, 2, 4, 6, 8]
    assert owner.tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    plain = Retrieval(batch_size=4).measure(model, records, "val")
    assert plain["val/all/mean/r1"] == 50.0
    assert "val/mean/r1" in plain
    shared = Retrieval(batch_size=4, captions=True).measure(model, records, "val")
    assert shared["val/all/i2t/r1"] == shared["val/all/t2i/r1"] == 100.0
    assert "val/mean/r1" not in shared, "a batch would hold an image twice"
    one = Retrieval(batch_size=4, captions=True).measure(Told(torch.eye(5), torch.eye(5)), data(captions=1), "val")
    assert one == Retrieval(batch_size=4).measure(Told(torch.eye(5), torch.eye(5)), data(captions=1), "val")


def test_folds_by_hand() -> None:
    """Every image takes its neighbour's vector: over the whole set all are wrong; alone in a fold, all are right."""
    model = Told(torch.eye(5).roll(1, 0), torch.eye(5))
    found = Retrieval(folds=5, captions=True).measure(model, data(captions=1), "val")
    assert found["val/all/mean/r1"] == 0.0
    assert found["val/fold/mean/r1"] == 100.0
    assert not any("/fold/" in name for name in Retrieval(folds=3).measure(model, data(captions=1), "val"))
    assert not any("/fold/" in name for name in Retrieval().measure(model, data(captions=1), "val"))


def test_every_split_is_measured_and_the_paired_cosine_is_a_mean_over_pairs() -> None:
    """Vectors of length 1: the first pair alike, the others at right angles, so 1/5 in either split."""
    records = data(captions=1, splits=("val", "test"))
    text = torch.eye(6)[[0, 2, 3, 4, 5]]
    figures = Retrieval()(SimpleNamespace(model=Told(torch.eye(6)[:5], text), data=records), ("val", "test"))
    assert figures["val/similarity"] == figures["test/similarity"] == pytest.approx(0.2)


def test_a_site_without_a_modality_has_no_figure() -> None:
    model = Told(torch.eye(5), torch.eye(5))
    for columns in ({"reports": ("",) * 5}, {"imaged": np.zeros(5, dtype=bool)}):
        client = SimpleNamespace(model=model, data=data(captions=1, **columns))
        assert Retrieval()(client, ("val",)) == {}
    assert Retrieval()(SimpleNamespace(model=model, data=data(captions=1)), ("val",))["val/all/mean/r1"] == 100.0


def test_a_split_without_a_modality_does_not_hide_the_next() -> None:
    """As where the held-out films of one split have no reports."""
    records = data(captions=1, splits=("val", "test"))
    records.having = lambda split: torch.arange(0 if split == "val" else 5)  # type: ignore[assignment, method-assign]
    client = SimpleNamespace(model=Told(torch.eye(5), torch.eye(5)), data=records)
    assert {name.partition("/")[0] for name in Retrieval()(client, ("val", "test"))} == {"test"}


def test_a_split_of_just_one_batch_has_a_figure_in_batch() -> None:
    for images, there in ((3, False), (4, True)):
        found = Retrieval(batch_size=4).measure(
            Told(torch.eye(4), torch.eye(4)), data(captions=1, images=images), "val"
        )
        assert ("val/mean/r1" in found) == there


def test_a_split_needs_two_records() -> None:
    """With one record every recall would be 100."""
    for images, measured in ((1, False), (2, True)):
        client = SimpleNamespace(model=Told(torch.eye(2), torch.eye(2)), data=data(captions=1, images=images))
        assert bool(Retrieval()(client, ("val", "test"))) == measured
