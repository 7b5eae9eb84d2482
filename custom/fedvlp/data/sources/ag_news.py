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
    """``train.csv`` and ``test.csv`` without a header: class 1 to 4, title, description. Texts without images."""

    root: str  # the folder of both files
    image_size: int = field(default=72, kw_only=True)  # of images that it has not, so that sources can be joined

    def listing(self) -> Listing:
        """The text is title + " " + description."""
        rows = [(f"{name}-{row}", name, *line) for name in ("train", "test") for row, line in self._read(name)]
        train = [row for row, (_, name, *_) in enumerate(rows) if name == "train"]
        val = set(np.random.default_rng(self.seed).permutation(train)[: round(self.val_fraction * len(train))].tolist())
        return Listing(
            source="ag_news", keys=[key for key, *_ in rows], patients=[key for key, *_ in rows],
            studies=[key for key, *_ in rows], reports=[text for *_, text in rows],
            labels=np.eye(len(TOPICS), dtype=np.float32)[[topic for _, _, topic, _ in rows]], names=TOPICS,
            splits=["val" if row in val else name for row, (_, name, *_) in enumerate(rows)],
        )  # fmt: skip

    def _read(self, name: str) -> list[tuple[int, tuple[int, str]]]:
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
        return [(n, (int(topic) - 1, f"{title} {text}".strip())) for n, (topic, title, text) in enumerate(rows)]
