"""Masks of structures from image files or boxes, laid on the pixels that ``transforms.decode`` makes of a film."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from fedvlp.data.radiograph import MAX_PIXELS

Box = tuple[float, float, float, float]
"""Left, top, width and height of a rectangle, in shares of the side of a square film."""


def read_mask(file: Path, size: int) -> np.ndarray:
    """Bool [size, size] of a PNG or JPEG: where at least half of a pixel's area is not 0.

    Resized and padded as the film is: the longer side to ``size``, the shorter padded on both sides. Raises ValueError,
    which quotes nothing of the file, for one that cannot be read.
    """
    import cv2
    from PIL import Image

    try:
        with Image.open(file, formats=("PNG", "JPEG")) as image:
            if image.width * image.height > MAX_PIXELS:
                raise ValueError("too many pixels")
            inside = (np.asarray(image.convert("L")) > 0).astype(np.float32)
    except Exception as error:
        raise ValueError(f"mask: a file cannot be read ({type(error).__name__}); give PNG or JPEG files") from None
    height, width = (max(1, round(side * size / max(inside.shape))) for side in inside.shape)
    share = torch.from_numpy(cv2.resize(inside, (width, height), interpolation=cv2.INTER_AREA))
    above, left = (size - height) // 2, (size - width) // 2
    padding = (left, size - width - left, above, size - height - above)
    return torch.nn.functional.pad(share, padding).numpy() >= 0.5


def read_masks(files: Mapping[str, Sequence[Path | None]], size: int, rows: np.ndarray) -> dict[str, np.ndarray]:
    """By structure, bool [n, size, size] of ``rows`` [n]; ``files`` name those of every row, None has no mask."""
    empty = np.zeros((size, size), dtype=bool)
    masks_of: dict[str, np.ndarray] = {}
    for name, of_rows in files.items():
        chosen = [of_rows[row] for row in np.asarray(rows).tolist()]
        masks = [empty if file is None else read_mask(file, size) for file in chosen]
        masks_of[name] = np.stack(masks) if masks else np.empty((0, size, size), dtype=bool)
    return masks_of


@dataclass(frozen=True)
class BoxMasks:
    """Reader of masks that are unions of rectangles (spec 10.3), as ``Cohort.masks`` has one."""

    boxes: Mapping[str, Sequence[Sequence[Box]]]  # by structure, those of every row; a row without has an empty mask
    size: int  # pixels of the films

    def __call__(self, rows: np.ndarray) -> dict[str, np.ndarray]:
        """By structure, bool [n, size, size] of ``rows`` [n]."""
        wanted = np.asarray(rows).tolist()
        return {
            name: np.array([union(of_rows[row], self.size) for row in wanted], dtype=bool).reshape(
                -1, *(self.size,) * 2
            )
            for name, of_rows in self.boxes.items()
        }


def union(boxes: Sequence[Box], size: int) -> np.ndarray:
    """Bool [size, size]: where one of the ``boxes`` covers at least half of a pixel."""
    inside = np.zeros((size, size), dtype=bool)
    for left, top, width, height in boxes:
        inside |= np.outer(_covered(top, height, size), _covered(left, width, size)) >= 0.5
    return inside


def _covered(start: float, length: float, size: int) -> np.ndarray:
    """The share [size] of each pixel of a side that lies between ``start`` and ``start + length``, in shares of it."""
    edges = np.arange(size)
    ends = np.minimum(edges + 1, (start + length) * size)
    return np.clip(ends - np.maximum(edges, start * size), 0.0, 1.0)
