"""Pairs drawn from hidden vectors, no images and no sentences: word embeddings and two heads learn them in seconds."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass

import numpy as np

from fedvlp.data.cohort import Cohort, digest

VERSION = 1  # raise it whenever a pixel or a word of an unchanged specification changes
HIDDEN, SIDE, COLUMNS, LABELS = 16, 8, 48, 5
GREY, CONTRAST = 128, 32  # of 0, and of 1, in pixels' values
THRESHOLDS = (-1.0, 0.0, 1.0)
LEVELS = "abcd"  # below, between and above them
WORD = "e"  # what every word begins with; so none shares its id with another (``HashTokenizer`` at 4096; tested)


@dataclass(frozen=True)
class LatentCohort:
    """Specification of pairs that share a hidden vector s of 16 standard normal numbers.

    An image is tanh(2 A s) as 8 x 8 pixels. A report is tanh(2 B s) as 48 words, each of which says in which of four
    ranges a number lies. Both have noise of their own; the entries of A and B are drawn from N(0, 1/16). The labels are
    the signs of s_1 to s_5. No patient has two records; an eighth of them is the validation split, and another the test
    split. Equal specifications give equal bytes in every process.

    Raises ValueError for fewer than 16 records, a negative ``seed``, or ``noise`` that is negative or not finite.
    """

    size: int = 4200  # records in total
    seed: int = 0  # of everything that is drawn
    noise: float = 1.0  # standard deviation, beside numbers of -1 to 1

    def __post_init__(self) -> None:
        if self.size < 16:
            raise ValueError(f"latent: {self.size} records; expected at least 16")
        if self.seed < 0:
            raise ValueError(f"latent: seed is {self.seed}; expected 0 or more")
        if not 0 <= self.noise < math.inf:
            raise ValueError(f"latent: noise is {self.noise}; expected 0 or more, and finite")

    def build(self) -> Cohort:
        """The cohort, with its pixels in memory; its records are still to be partitioned over sites."""
        random = np.random.default_rng(self.seed)
        hidden = random.normal(size=(self.size, HIDDEN))
        image, text = self._seen(hidden, SIDE**2, random), self._seen(hidden, COLUMNS, random)
        pixels = (GREY + CONTRAST * image).round().clip(0, 255).astype(np.uint8).reshape(-1, SIDE, SIDE)
        words = [[f"{WORD}{column}{level}" for level in LEVELS] for column in range(COLUMNS)]
        levels = np.digitize(text, THRESHOLDS).tolist()
        reports = tuple(" ".join(word[level] for word, level in zip(words, row, strict=True)) for row in levels)
        labels = (hidden[:, :LABELS] > 0).astype(np.float32)
        spec = f"latent {VERSION} {json.dumps(asdict(self))}"
        eighths = 8 * np.arange(self.size) // self.size
        return Cohort(
            ids=tuple(f"latent-image-{self.seed}-{row:06d}" for row in range(self.size)),
            patients=tuple(f"latent-patient-{self.seed}-{row:06d}" for row in range(self.size)),
            studies=tuple(f"latent-study-{self.seed}-{row:06d}" for row in range(self.size)),
            reports=reports,
            labels=labels,
            label_names=tuple(f"sign {number + 1}" for number in range(LABELS)),
            splits=np.array(["val", "test", *["train"] * 6])[eighths],
            sites=None,
            images=pixels.__getitem__,
            fingerprint=digest(spec, "\n".join(reports), labels.tobytes(), pixels.tobytes()),
        )

    def _seen(self, hidden: np.ndarray, width: int, random: np.random.Generator) -> np.ndarray:
        """tanh(2 A s) with noise, [N, width], of hidden vectors s [N, 16]."""
        projection = random.normal(size=(HIDDEN, width)) / HIDDEN**0.5
        return np.tanh(2 * hidden @ projection) + self.noise * random.normal(size=(len(hidden), width))
