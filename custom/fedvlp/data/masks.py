"""Masks of structures from image files or boxes, laid on the pixels that ``transforms.decode`` makes of an image."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedvlp.data.radiograph import MAX_PIXELS, grid_of_file, shape_of_file

Box = tuple[float, float, float, float]
"""Left, top, width and height of a rectangle, in shares of the side of a square image."""


OPAQUE = 128
"""Of 255: pixels that are less so are outside of a mask."""


def read_mask(file: Path, size: int, film: Path | None = None) -> np.ndarray:
    """Bool [size, size] of a PNG or JPEG: where at least half of a pixel's area is inside.

    Resized and padded as the image is: the longer side to ``size``, the shorter padded on both sides. With the file of
    its ``film`` the mask has to have its proportions. Raises ValueError, which quotes nothing of the file, for one that
    cannot be read or has others.
    """
    import cv2
    from PIL import Image

    try:
        with Image.open(file, formats=("PNG", "JPEG")) as image:
            if image.width * image.height > MAX_PIXELS:
                raise ValueError("too many pixels")
            inside = _inside(image).astype(np.float32)
    except Exception as error:
        raise ValueError(f"mask: a file cannot be read ({type(error).__name__}); give PNG or JPEG files") from None
    shape: tuple[int, ...] = inside.shape
    if film is not None:
        _check_proportions(inside.shape, grid_of_file(film))
        shape = shape_of_file(film)  # other than the mask's where pixels are not square
    height, width = (max(1, round(side * size / max(shape))) for side in shape)
    share = torch.from_numpy(cv2.resize(inside, (width, height), interpolation=cv2.INTER_AREA))
    above, left = (size - height) // 2, (size - width) // 2
    padding = (left, size - width - left, above, size - height - above)
    return torch.nn.functional.pad(share, padding).numpy() >= 0.5


def _inside(image: Any) -> np.ndarray:
    """Bool [H, W]: the pixels of a PIL image that are not 0, in a JPEG those above half of its maximum, and opaque.

    JPEG leaves small values around an edge. Where index 0 of a palette is black it is the background, whatever colours
    the others have.
    """
    plain = image.mode[0] in "IF" or (image.mode == "P" and list(image.getpalette() or [0])[:3] == [0, 0, 0])
    values = np.asarray(image if plain else image.convert("L"))
    inside: np.ndarray = values > (values.max() / 2 if image.format == "JPEG" else 0)
    if "A" in image.getbands() or "transparency" in image.info:
        inside &= np.asarray(image.convert("RGBA"))[..., 3] >= OPAQUE
    return inside


def _check_proportions(mask: tuple[int, ...], film: tuple[int, int]) -> None:
    """Raises ValueError unless ``mask`` [H, W] and ``film`` [H, W], the larger reduced, differ by a pixel at most.

    That much the sides of a reduction may have been rounded by.
    """
    small, large = sorted((tuple(mask), film), key=max)
    scale = max(small) / max(large)
    if any(abs(side - other * scale) > 1 for side, other in zip(small, large, strict=True)):
        raise ValueError(
            f"mask: a mask of {mask[1]} x {mask[0]} pixels has other proportions than its image, which has {film[1]} x "
            f"{film[0]}; export masks in the size of their images"
        )


def read_masks(
    files: Mapping[str, Sequence[Path | None]], size: int, rows: np.ndarray, films: Sequence[Path | None] | None = None
) -> dict[str, np.ndarray]:
    """By structure, bool [n, size, size] of ``rows`` [n]; ``files`` name those of every row, None has no mask.

    ``films``: those of every row, whose proportions the masks must have.
    """
    empty = np.zeros((size, size), dtype=bool)
    masks_of: dict[str, np.ndarray] = {}
    for name, of_rows in files.items():
        masks = []
        for row in np.asarray(rows).tolist():
            file, film = of_rows[row], None if films is None else films[row]
            masks.append(empty if file is None else read_mask(file, size, film))
        masks_of[name] = np.stack(masks) if masks else np.empty((0, size, size), dtype=bool)
    return masks_of


@dataclass(frozen=True)
class BoxMasks:
    """Reader of masks that are unions of rectangles (spec 10.3), as ``Cohort.masks`` has one."""

    boxes: Mapping[str, Sequence[Sequence[Box]]]  # by structure, those of every row; a row without has an empty mask
    size: int  # pixels of the images

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
