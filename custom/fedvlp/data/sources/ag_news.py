"""AG News (Zhang et al., 2015, https://arxiv.org/abs/1509.01626): texts with a class and no image."""

from __future__ import annotations

import csv
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from fedvlp.data.sources.published import Listing, Published

TOPICS = ("World", "Sports", "Business", "Sci/Tech")


@dataclass(frozen=True)
class AGNewsSource(Published):
    """``train.csv`` and ``test.csv`` without a header: class 1 to 4, title, description. Texts without images.

    Validation texts are drawn from the training file (``val_fraction``, ``seed``); ``test_fraction`` is not used.
    """

    root: str  # the folder of both files
    image_size: int = field(default=72, kw_only=True)  # of the absent (black) images: joined sources must agree on it

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
        file = Path(self.root) / f"{name}.csv"
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
