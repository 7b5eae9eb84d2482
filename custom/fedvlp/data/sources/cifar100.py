"""CIFAR-100 (Krizhevsky, 2009, https://www.cs.toronto.edu/~kriz/cifar.html): images with a class and no report."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from torch.nn import functional as F

from fedvlp.data.cache_format import Building
from fedvlp.data.sources.published import Images, Listing, Photographs, require_items
from fedvlp.data.sources.table import BELOW_ROOT

SIDE = 32
RECORD = 2 + 3 * SIDE * SIDE  # bytes: coarse label, fine label, red, green and blue planes
NAMES = "fine_label_names.txt"
FILES = ("train.bin", "test.bin", NAMES)
UNPACKED = "cifar-100-binary"
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

    table: ClassVar[str] = FILES[0]
    modalities: ClassVar[tuple[str, ...]] = ("image",)

    root: str  # the folder cifar-100-binary
    path: str = field(default="", metadata=BELOW_ROOT)  # the same; "" is root
    image_size: int = field(default=72, kw_only=True)  # side the 32 pixels are enlarged to

    @classmethod
    def layout(cls, root: Path) -> dict[str, str]:
        """The three files, in the folder or in the one that the archive has."""
        folder = root / UNPACKED if (root / UNPACKED).is_dir() else root
        require_items("cifar100", folder, FILES)
        return {"path": str(folder), "root": str(folder)}

    def classes(self) -> tuple[str, ...]:
        """The names of the fine classes, of which each image has one. Raises ValueError where their file is missing."""
        require_items("cifar100", self._folder, [NAMES])
        return tuple((self._folder / NAMES).read_text(encoding="utf-8").split())

    def listing(self) -> Listing:
        """The images, train.bin's first. Raises ValueError if a file is missing or its length or labels do not fit."""
        require_items("cifar100", self._folder, FILES)
        names = self.classes()
        train, test = (self._records(name, len(names))[:, 1] for name in FILES[:2])
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
        records = np.concatenate([self._records(name, len(listing.names)) for name in FILES[:2]])[:most]
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
