"""Small labelled cohorts whose pixels are given, and a tiny model to probe."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from fedvlp.data.cohort import Cohort
from fedvlp.models.dual_encoder import DualEncoder, ModelConfig

SIZE = 16
SPLITS = ("train",) * 6 + ("val",) * 2 + ("test",) * 4
MODEL = ModelConfig(
    embedding_dim=8, image_size=SIZE, max_tokens=6, vocabulary=50, head_hidden=16, head_norm="layer"
)  # fmt: skip


def model(seed: int = 0) -> DualEncoder:
    """A dual encoder with random weights."""
    return MODEL.build(seed)


def cohort(
    labels: np.ndarray,
    names: Sequence[str],
    splits: Sequence[str],
    pixels: np.ndarray | None = None,
    masks: Callable[[np.ndarray], dict[str, np.ndarray]] | None = None,
) -> Cohort:
    """N images [N, 16, 16] with these labels [N, L]; rows 2 i and 2 i + 1 of a split share a patient and a site."""
    count = len(labels)
    if pixels is None:
        pixels = np.random.default_rng(0).integers(0, 256, (count, SIZE, SIZE), dtype=np.uint8)
    patients = tuple(f"{split}-{row // 2}" for row, split in enumerate(splits))
    more = {} if masks is None else {"masks": masks}
    return Cohort(
        ids=tuple(map(str, range(count))), patients=patients, studies=tuple(map(str, range(count))),
        reports=("",) * count, labels=np.asarray(labels, np.float32), label_names=tuple(names),
        splits=np.array(splits), sites=tuple(f"site-{row // 2 % 2 + 1}" for row in range(count)),
        images=lambda rows: pixels[rows], fingerprint="f" * 64, **more,
    )  # fmt: skip


def shaded(labels: np.ndarray, seed: int = 0, by: int = 110) -> np.ndarray:
    """Noise [N, 16, 16], brighter ``by`` so much in a band of rows for each class of ``labels`` [N, L] that is 1.

    The whole film's brightness is random.
    """
    rng = np.random.default_rng(seed)
    pixels = rng.integers(0, 80, (len(labels), SIZE, SIZE)) + rng.integers(0, 60, (len(labels), 1, 1))
    for column in range(labels.shape[1]):
        pixels[labels[:, column] == 1, 5 * column : 5 * column + 5] += by
    return pixels.astype(np.uint8)


def one_hot(classes: np.ndarray, count: int) -> np.ndarray:
    """[N, count] float32 of class numbers [N]."""
    return np.eye(count, dtype=np.float32)[classes]
