"""A torch ``Dataset`` of one's own as a data set: one adapter between its items and the rows of a cohort."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
from torch import Tensor

from fedvlp.data.cache import cached_images
from fedvlp.data.cache_build import Building, shape_of
from fedvlp.data.deid import scan
from fedvlp.data.images import square
from fedvlp.data.radiograph import UnreadableImageError, read_film
from fedvlp.data.report_text import clean_report
from fedvlp.data.sources.published import Images, Listing, Photographs


class Items(Protocol):
    """A map-style torch ``Dataset``, which need not be one by inheritance."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Mapping[str, Any]: ...


@dataclass(frozen=True, kw_only=True)
class DatasetSource(Photographs):
    """Base class of a source whose records are the items of a torch ``Dataset``, which a subclass gives (``dataset``).

    An item is a mapping. It has "patient", and of the following what is known: "image" (a tensor [H, W], [1, H, W] or
    [3, H, W], or whatever ``read_film`` takes: array, PIL image, pydicom ``Dataset``, path), "report" (text), "study",
    "split" ("train", "val" or "test"; otherwise drawn by patient) and "labels" (name -> 1, 0 or -1, uncertain). Items
    are read twice, for their words and for their images, which stay in memory. An item without an image is left out
    where others have one.

    Args:
        label_names: labels that are read, of those that items have.
        min_report_words: reports with fewer words count as absent, at least 1.
    """

    label_names: tuple[str, ...] = ()
    min_report_words: int = 1

    def dataset(self) -> Items:
        """The data set: ``len``, and an item for each index."""
        raise NotImplementedError

    def listing(self) -> Listing:
        """The words of all items. Raises ValueError where an item has no patient."""
        dataset, name = self.dataset(), self.source_name()
        items = [{**dataset[index], "image": None} for index in range(len(dataset))]  # without pixels
        if nobody := sum(not str(item.get("patient", "")) for item in items):
            raise ValueError(
                f'{name} source: {nobody} of {len(items)} items have no "patient"; records are split by patient, so '
                "give each its own"
            )
        raw = [str(item.get("report") or "") for item in items]
        labels = [[(item.get("labels") or {}).get(label, np.nan) for label in self.label_names] for item in items]
        keys = [f"item-{index}" for index in range(len(items))]
        return Listing(
            source=name,
            keys=keys,
            patients=[str(item["patient"]) for item in items],
            studies=[str(item.get("study", key)) for item, key in zip(items, keys, strict=True)],
            reports=[clean_report(report, self.min_report_words) for report in raw],
            labels=np.array(labels, dtype=np.float32).reshape(len(items), len(self.label_names)),
            names=self.label_names,
            splits=[str(item.get("split", "")) for item in items],
            phi=scan(raw),
        )

    def _images(self, listing: Listing, ids: Sequence[str], most: int, building: Building) -> Images | None:
        """The images, in memory: nothing but the pixels themselves would tell a cache on disk that they changed."""
        dataset = self.dataset()
        if all(dataset[index].get("image") is None for index in range(len(dataset))):
            return None
        reading = partial(_film, dataset, self.image_size, self.colour)
        return cached_images(None, "torch-dataset", range(most), reading, shape_of(self.image_size, self.colour))


def _film(dataset: Items, size: int, colour: bool, index: int) -> tuple[np.ndarray, str] | str:
    """The image of an item as uint8 [size, size], in ``colour`` [size, size, 3]; or why it cannot be used."""
    image = dataset[index].get("image")
    if image is None:
        return "no image"
    try:
        return square(read_film(_array(image) if isinstance(image, Tensor) else image, size, colour), size), ""
    except UnreadableImageError as error:
        return error.reason


def _array(image: Tensor) -> np.ndarray:
    """[H, W] of a tensor [1, H, W]; uint8 [H, W, 3] of [3, H, W], whose floats are 0..1 as torchvision's."""
    if image.ndim == 3 and len(image) == 3:
        pixels = (255 * image).round().clamp(0, 255).byte() if image.is_floating_point() else image
        return pixels.permute(1, 2, 0).contiguous().cpu().numpy()
    return image.squeeze(0).cpu().numpy() if image.ndim == 3 else image.cpu().numpy()
