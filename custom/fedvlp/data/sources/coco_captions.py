"""COCO 2014 captions (Chen et al., 2015, https://arxiv.org/abs/1504.00325), and what Flickr30k shares with them.

The split is that of Karpathy & Fei-Fei (2015, https://arxiv.org/abs/1412.2306). One row per caption; the captions of an
image share its pixels and its study. Images become grey unless ``colour`` is asked for.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from fedvlp.data.sources.published import Listing, Photographs
from fedvlp.data.sources.table import BELOW_ROOT

SPLIT = {"train": "train", "restval": "train", "val": "val", "test": "test"}


@dataclass(frozen=True)
class Captions(Photographs):
    """Images with captions in Karpathy's JSON: what COCO and Flickr30k share."""

    path: str = field(metadata=BELOW_ROOT)  # Karpathy's dataset_coco.json or dataset_flickr30k.json
    root: str  # the folder of the images
    limit: int = 0  # training captions to draw by ``seed``; 0 is all of them (CreamFL: 50,000 of COCO)

    source = "captions"

    @classmethod
    def source_name(cls) -> str:
        """As in ``SOURCES``."""
        return cls.source

    def listing(self) -> Listing:
        """One row per caption, in the order of the file. Raises ValueError for a file that is not Karpathy's."""
        rows = list(self._rows())
        splits = np.array([split for _, _, split, _ in rows])
        train = np.flatnonzero(splits == "train")
        if self.limit:
            drawn = np.random.default_rng(self.seed).permutation(train)[: self.limit]
            rows = [rows[row] for row in np.sort(np.concatenate([np.flatnonzero(splits != "train"), drawn]))]
        return Listing(
            source=self.source,
            keys=[key for key, *_ in rows],
            patients=[str(file) for _, file, _, _ in rows],
            studies=[str(file) for _, file, _, _ in rows],
            reports=[text for *_, text in rows],
            labels=np.zeros((len(rows), 0), dtype=np.float32),
            names=(),
            splits=[split for _, _, split, _ in rows],
            files=[Path(self.root) / file for _, file, _, _ in rows],
        )

    def _rows(self) -> Iterator[tuple[str, Path, str, str]]:
        """(key, image file relative to root, split, caption) of every caption."""
        try:
            images = json.loads(Path(self.path).read_text(encoding="utf-8"))["images"]
            for image in images:
                file, split = self.file_of(image), SPLIT[image["split"]]
                for sentence in image["sentences"]:
                    yield str(sentence["sentid"]), file, split, " ".join(sentence["raw"].split())
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{self.source} source: path is not Karpathy's JSON ({type(error).__name__}); expected images with "
                "filename, split and sentences, each with sentid and raw"
            ) from None

    def file_of(self, image: dict[str, Any]) -> Path:
        """The file of an entry of Karpathy's JSON, relative to ``root``."""
        return Path(Path(image["filename"]).name)


@dataclass(frozen=True)
class CocoCaptionsSource(Captions):
    """COCO 2014: ``train2014/`` and ``val2014/`` under root, or one folder ``allimages/``."""

    table: ClassVar[str] = "dataset_coco.json"
    source = "coco_captions"

    needs: ClassVar[tuple[str, ...]] = ("train2014 or allimages", "val2014 or allimages")

    def file_of(self, image: dict[str, Any]) -> Path:
        """The image's file, relative to ``root``, in one of the folders above."""
        folder = "allimages" if (Path(self.root) / "allimages").is_dir() else Path(image["filepath"]).name
        return folder / super().file_of(image)


@dataclass(frozen=True)
class Flickr30kSource(Captions):
    """Flickr30k (Young et al., 2014, https://aclanthology.org/Q14-1006): photographs with five captions each."""

    table: ClassVar[str] = "dataset_flickr30k.json"
    source = "flickr30k"
    needs: ClassVar[tuple[str, ...]] = ("flickr30k-images or flickr30k_images",)
    published_as: ClassVar[Mapping[str, str]] = {"root": "flickr30k-images or flickr30k_images"}
