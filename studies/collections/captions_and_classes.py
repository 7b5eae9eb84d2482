"""AG News (Zhang et al., 2015, https://arxiv.org/abs/1509.01626): texts with a class and no image."""

from __future__ import annotations

import csv
import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch.nn import functional as F

from fedvlp.data.cache_build import Building
from fedvlp.data.sources.published import Images, Listing, Photographs, Published, require_items
from fedvlp.data.sources.table import BELOW_ROOT

AG_NEWS_FILES = ("train.csv", "test.csv")
AG_NEWS_UNPACKED = "ag_news_csv"
"""The folder in the published archive."""

TOPICS = ("World", "Sports", "Business", "Sci/Tech")


@dataclass(frozen=True)
class AGNewsSource(Published):
    """``train.csv`` and ``test.csv`` without a header: class 1 to 4, title, description. Texts without images.

    Validation texts are drawn from the training file (``val_fraction``, ``seed``); ``test_fraction`` is not used.
    """

    known: ClassVar[str] = "ag_news"
    table: ClassVar[str] = AG_NEWS_FILES[0]
    modalities: ClassVar[tuple[str, ...]] = ("text",)

    root: str  # the folder of both files
    path: str = field(default="", metadata=BELOW_ROOT)  # the same; "" is root
    image_size: int = field(default=72, kw_only=True)  # of the absent (black) images: joined sources must agree on it

    @classmethod
    def layout(cls, root: Path) -> dict[str, str]:
        """Both files, in the folder or in the one that the archive has."""
        folder = root / AG_NEWS_UNPACKED if (root / AG_NEWS_UNPACKED).is_dir() else root
        require_items("ag_news", folder, AG_NEWS_FILES)
        return {"path": str(folder), "root": str(folder)}

    def class_names(self) -> tuple[str, ...]:
        """The names of the classes, of which each text has one."""
        return TOPICS

    def listing(self) -> Listing:
        """One row per text: title + " " + description. Raises ValueError for a file that is not as published."""
        train, test = self._read("train"), self._read("test")
        keys = [f"{name}-{row}" for name, texts in (("train", train), ("test", test)) for row in range(len(texts))]
        topics = [topic for topic, _ in (*train, *test)]
        splits = ["train"] * len(train) + ["test"] * len(test)
        drawn = np.random.default_rng(self.seed).permutation(len(train))[: round(self.val_fraction * len(train))]
        for row in drawn.tolist():
            splits[row] = "val"
        return Listing(
            source="ag_news",
            keys=keys,
            patients=keys,
            studies=keys,
            reports=[text for _, text in (*train, *test)],
            labels=np.eye(len(TOPICS), dtype=np.float32)[topics],
            names=TOPICS,
            splits=splits,
        )

    def _read(self, name: str) -> list[tuple[int, str]]:
        """(index into ``TOPICS``, text) of every row of one file."""
        file = Path(self.path or self.root) / f"{name}.csv"
        if not file.is_file():
            raise ValueError(f"ag_news source: root lacks {file.name}")
        with file.open(encoding="utf-8", newline="") as lines:
            rows = list(csv.reader(lines))
        strange = sum(len(row) != 3 or row[0] not in ("1", "2", "3", "4") for row in rows)
        if strange:
            raise ValueError(
                f"ag_news source: {strange} rows of {file.name} are not class (1 to 4), title, description"
            )
        return [(int(topic) - 1, f"{title} {text}".strip()) for topic, title, text in rows]


# COCO 2014 captions (Chen et al., 2015, https://arxiv.org/abs/1504.00325), and what Flickr30k shares with them.
#
# The split is that of Karpathy & Fei-Fei (2015, https://arxiv.org/abs/1412.2306). One row per caption; the captions of
# an image share its pixels and its study. Images become grey unless ``colour`` is asked for.

SPLIT = {"train": "train", "restval": "train", "val": "val", "test": "test"}


@dataclass(frozen=True)
class Captions(Photographs):
    """Images with captions in Karpathy's JSON: what COCO and Flickr30k share."""

    path: str = field(metadata=BELOW_ROOT)  # Karpathy's dataset_coco.json or dataset_flickr30k.json
    root: str  # the folder of the images
    limit: int = 0  # training captions to draw by ``seed``; 0 is all of them (CreamFL: 50,000 of COCO)

    def listing(self) -> Listing:
        """One row per caption, in the order of the file. Raises ValueError for a file that is not Karpathy's."""
        rows = list(self._rows())
        splits = np.array([split for _, _, split, _ in rows])
        train = np.flatnonzero(splits == "train")
        if self.limit:
            drawn = np.random.default_rng(self.seed).permutation(train)[: self.limit]
            rows = [rows[row] for row in np.sort(np.concatenate([np.flatnonzero(splits != "train"), drawn]))]
        return Listing(
            source=self.known,
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
                f"{self.known} source: path is not Karpathy's JSON ({type(error).__name__}); expected images with "
                "filename, split and sentences, each with sentid and raw"
            ) from None

    def file_of(self, image: dict[str, Any]) -> Path:
        """The file of an entry of Karpathy's JSON, relative to ``root``."""
        return Path(Path(image["filename"]).name)


@dataclass(frozen=True)
class CocoCaptionsSource(Captions):
    """COCO 2014: ``train2014/`` and ``val2014/`` under root, or one folder ``allimages/``."""

    table: ClassVar[str] = "dataset_coco.json"
    known: ClassVar[str] = "coco_captions"

    needs: ClassVar[tuple[str, ...]] = ("train2014 or allimages", "val2014 or allimages")

    def file_of(self, image: dict[str, Any]) -> Path:
        """The image's file, relative to ``root``, in one of the folders above."""
        folder = "allimages" if (Path(self.root) / "allimages").is_dir() else Path(image["filepath"]).name
        return folder / super().file_of(image)


@dataclass(frozen=True)
class Flickr30kSource(Captions):
    """Flickr30k (Young et al., 2014, https://aclanthology.org/Q14-1006): photographs with five captions each."""

    table: ClassVar[str] = "dataset_flickr30k.json"
    known: ClassVar[str] = "flickr30k"
    needs: ClassVar[tuple[str, ...]] = ("flickr30k-images or flickr30k_images",)
    published_as: ClassVar[Mapping[str, str]] = {"root": "flickr30k-images or flickr30k_images"}


# CIFAR-100 (Krizhevsky, 2009, https://www.cs.toronto.edu/~kriz/cifar.html): images with a class and no report.

SIDE = 32
RECORD = 2 + 3 * SIDE * SIDE  # bytes: coarse label, fine label, red, green and blue planes
NAMES = "fine_label_names.txt"
CIFAR_FILES = ("train.bin", "test.bin", NAMES)
CIFAR_UNPACKED = "cifar-100-binary"
"""The folder in the published archive."""


@dataclass(frozen=True, eq=False)
class Enlarged:
    """Reader of ``pixels`` [N, C, 32, 32] uint8, C = 1 or 3, enlarged to ``size`` x ``size`` (bilinear)."""

    pixels: np.ndarray
    size: int

    @property
    def skipped(self) -> dict[int, str]:
        """Every image is readable."""
        return {}

    @property
    def checksums(self) -> np.ndarray:
        """CRC-32 of each image before it is enlarged, [N] uint32."""
        return np.array([zlib.crc32(image.data) for image in self.pixels], dtype=np.uint32)

    @property
    def stored(self) -> list[str]:
        """Nobody asks how: they are all alike."""
        return [""] * len(self.pixels)

    def __call__(self, rows: np.ndarray) -> np.ndarray:
        """uint8 [n, size, size], of three channels [n, size, size, 3], of ``rows`` [n]."""
        small = torch.from_numpy(self.pixels[np.asarray(rows, dtype=np.int64)]).float()
        large = F.interpolate(small, size=(self.size, self.size), mode="bilinear", align_corners=False)
        whole = large.round().clamp(0, 255).to(torch.uint8)  # [n, C, size, size]
        if whole.shape[1] == 1:
            return whole[:, 0].numpy()
        return whole.permute(0, 2, 3, 1).contiguous().numpy()


@dataclass(frozen=True)
class Cifar100Source(Photographs):
    """The binary version (``cifar-100-binary``): train.bin, test.bin, fine_label_names.txt. One row an image, no text.

    Images become grey unless ``colour`` is asked for. test.bin is the test split; validation images are drawn from
    train.bin (``val_fraction``, ``seed``). ``test_fraction``, ``cache`` and ``burned_in`` are not used: the files are
    small and decoded already. The Python version of the collection is a pickle, which can run any code when it is
    loaded. It is not read.
    """

    known: ClassVar[str] = "cifar100"
    table: ClassVar[str] = CIFAR_FILES[0]
    modalities: ClassVar[tuple[str, ...]] = ("image",)

    root: str  # the folder cifar-100-binary
    path: str = field(default="", metadata=BELOW_ROOT)  # the same; "" is root
    image_size: int = field(default=72, kw_only=True)  # side the 32 pixels are enlarged to

    @classmethod
    def layout(cls, root: Path) -> dict[str, str]:
        """The three files, in the folder or in the one that the archive has."""
        folder = root / CIFAR_UNPACKED if (root / CIFAR_UNPACKED).is_dir() else root
        require_items("cifar100", folder, CIFAR_FILES)
        return {"path": str(folder), "root": str(folder)}

    def class_names(self) -> tuple[str, ...]:
        """The names of the fine classes, of which each image has one. Raises ValueError where their file is missing."""
        require_items("cifar100", self._folder, [NAMES])
        return tuple((self._folder / NAMES).read_text(encoding="utf-8").split())

    def listing(self) -> Listing:
        """The images, train.bin's first. Raises ValueError if a file is missing or its length or labels do not fit."""
        require_items("cifar100", self._folder, CIFAR_FILES)
        names = self.class_names()
        train, test = (self._records(name, len(names))[:, 1] for name in CIFAR_FILES[:2])
        keys = [f"{name}-{row}" for name, of in (("train", train), ("test", test)) for row in range(len(of))]
        splits = np.array(["train"] * len(train) + ["test"] * len(test), dtype="<U5")
        drawn = np.random.default_rng(self.seed).permutation(len(train))[: round(self.val_fraction * len(train))]
        splits[drawn] = "val"
        return Listing(
            source="cifar100",
            keys=keys,
            patients=keys,
            studies=keys,
            reports=[""] * len(keys),
            labels=np.eye(len(names), dtype=np.float32)[np.concatenate([train, test])],
            names=names,
            splits=splits.tolist(),
        )

    @property
    def _folder(self) -> Path:
        return Path(self.path or self.root)

    def _images(self, listing: Listing, ids: Sequence[str], most: int, building: Building) -> Images:
        """The first ``most`` images, as they lie in the files."""
        records = np.concatenate([self._records(name, len(listing.names)) for name in CIFAR_FILES[:2]])[:most]
        planes = records[:, 2:].reshape(-1, 3, SIDE, SIDE)
        return Enlarged(planes if self.colour else _grey(planes), self.image_size)

    def _records(self, name: str, classes: int) -> np.ndarray:
        """The records [n, RECORD] uint8 of one file: coarse label, fine label, planes."""
        raw = np.fromfile(self._folder / name, dtype=np.uint8)
        if not len(raw) or len(raw) % RECORD or raw.reshape(-1, RECORD)[:, 1].max() >= classes:
            raise ValueError(f"cifar100 source: {name} is not made of records of {RECORD} bytes with known labels")
        return raw.reshape(-1, RECORD)


def _grey(planes: np.ndarray) -> np.ndarray:
    """Grey values [n, 1, 32, 32] uint8 (ITU-R 601) of red, green and blue ``planes`` [n, 3, 32, 32]."""
    grey = np.tensordot(planes.astype(np.float32), np.array([0.299, 0.587, 0.114], dtype=np.float32), axes=(1, 0))
    return grey.round().astype(np.uint8)[:, None]
