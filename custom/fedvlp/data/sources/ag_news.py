"""AG News (Zhang et al., 2015, https://arxiv.org/abs/1509.01626): texts with a class and no image."""

from __future__ import annotations

import csv
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import numpy as np

from fedvlp.data.sources.published import Listing, Published, require_items
from fedvlp.data.sources.table import BELOW_ROOT

FILES = ("train.csv", "test.csv")
UNPACKED = "ag_news_csv"
"""The folder in the published archive."""

TOPICS = ("World", "Sports", "Business", "Sci/Tech")


@dataclass(frozen=True)
class AGNewsSource(Published):
    """``train.csv`` and ``test.csv`` without a header: class 1 to 4, title, description. Texts without images.

    Validation texts are drawn from the training file (``val_fraction``, ``seed``); ``test_fraction`` is not used.
    """

    table: ClassVar[str] = FILES[0]
    modalities: ClassVar[tuple[str, ...]] = ("text",)

    root: str  # the folder of both files
    path: str = field(default="", metadata=BELOW_ROOT)  # the same; "" is root
    image_size: int = field(default=72, kw_only=True)  # of the absent (black) images: joined sources must agree on it

    @classmethod
    def layout(cls, root: Path) -> dict[str, str]:
        """Both files, in the folder or in the one that the archive has."""
        folder = root / UNPACKED if (root / UNPACKED).is_dir() else root
        require_items("ag_news", folder, FILES)
        return {"path": str(folder), "root": str(folder)}

    def classes(self) -> tuple[str, ...]:
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
