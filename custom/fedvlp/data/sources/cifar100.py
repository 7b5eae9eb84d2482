"""CIFAR-100 (Krizhevsky, 2009, https://www.cs.toronto.edu/~kriz/cifar.html): images with a class and no report."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional as F

from fedvlp.data.cohort import Cohort, digest

SIDE = 32
RECORD = 2 + 3 * SIDE * SIDE  # bytes: coarse label, fine label, red, green and blue planes


@dataclass(frozen=True, eq=False)
class Enlarged:
    """Reader of grey images, ``pixels`` [N, 32, 32] uint8, enlarged to ``size`` x ``size`` (bilinear)."""

    pixels: np.ndarray
    size: int

    def __call__(self, rows: np.ndarray) -> np.ndarray:
        """uint8 [n, size, size] of ``rows`` [n]."""
        small = torch.from_numpy(self.pixels[np.asarray(rows, dtype=np.int64)])[:, None].float()
        large = F.interpolate(small, size=(self.size, self.size), mode="bilinear", align_corners=False)
        return large[:, 0].round().clamp(0, 255).to(torch.uint8).numpy()


@dataclass(frozen=True)
class Cifar100Source:
    """The binary version (``cifar-100-binary``): train.bin, test.bin, fine_label_names.txt. Images become grey.

    The Python version of the collection is a pickle, which can run any code when it is loaded. It is not read.
    """

    root: str  # the folder cifar-100-binary
    image_size: int = 72  # side the 32 pixels are enlarged to
    val_fraction: float = 0.1  # of the training images, drawn
    seed: int = 0  # of that draw

    def build(self) -> Cohort:
        """Images without reports, the 100 fine classes as labels; test.bin is the test split.

        Raises ValueError if a file is missing or its length or labels do not fit.
        """
        folder = Path(self.root)
        if missing := [n for n in ("train.bin", "test.bin", "fine_label_names.txt") if not (folder / n).is_file()]:
            raise ValueError(f"cifar100 source: root lacks {', '.join(missing)}; unpack cifar-100-binary.tar.gz")
        names = tuple((folder / "fine_label_names.txt").read_text(encoding="utf-8").split())
        train_labels, train_pixels = self._read(folder / "train.bin", len(names))
        test_labels, test_pixels = self._read(folder / "test.bin", len(names))
        train, test = len(train_labels), len(test_labels)
        fine = np.concatenate([train_labels, test_labels])  # [N]
        pixels = np.concatenate([train_pixels, test_pixels])  # [N, 32, 32]
        keys = [f"train-{row}" for row in range(train)] + [f"test-{row}" for row in range(test)]
        splits = np.array(["train"] * train + ["test"] * test, dtype="<U5")
        splits[np.random.default_rng(self.seed).permutation(train)[: round(self.val_fraction * train)]] = "val"
        ids = tuple(digest("cifar100", key)[:16] for key in keys)
        return Cohort(
            ids=ids,
            patients=ids,
            studies=ids,
            reports=("",) * len(ids),
            labels=np.eye(len(names), dtype=np.float32)[fine],
            label_names=names,
            splits=splits,
            sites=None,
            images=Enlarged(pixels, self.image_size),
            fingerprint=digest("cifar100", str(self.image_size), *splits.tolist(), fine.tobytes(), pixels.tobytes()),
        )

    @staticmethod
    def _read(file: Path, classes: int) -> tuple[np.ndarray, np.ndarray]:
        """Fine labels [n] int64 and grey images [n, 32, 32] uint8 (ITU-R 601)."""
        raw = np.fromfile(file, dtype=np.uint8)
        if not len(raw) or len(raw) % RECORD or raw.reshape(-1, RECORD)[:, 1].max() >= classes:
            raise ValueError(f"cifar100 source: {file.name} is not made of records of {RECORD} bytes with known labels")
        records = raw.reshape(-1, RECORD)
        colours = records[:, 2:].reshape(-1, 3, SIDE, SIDE).astype(np.float32)
        grey = np.tensordot(colours, np.array([0.299, 0.587, 0.114], dtype=np.float32), axes=(1, 0))
        return records[:, 1].astype(np.int64), grey.round().astype(np.uint8)
