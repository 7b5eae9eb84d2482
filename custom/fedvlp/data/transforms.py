"""Images from file to tensor: MONAI transforms decode a file once, torch crops whole batches.

Chest films are grey, [S, S]. Photographs may be in colour, [S, S, 3]: red, green and blue.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from fedvlp.data.radiograph import UnreadableImageError, read_radiograph

if TYPE_CHECKING:
    from monai.transforms import Compose

DECODING = "radiograph-3"  # names what decode() does to a file; change it with the result, so that caches rebuild


@lru_cache
def decode(image_size: int, burned_in: bool = False, colour: bool = False) -> Compose:
    """Transform from a path to uint8 [S, S], in ``colour`` [S, S, 3], S = ``image_size``.

    ``burned_in`` and ``colour`` are those of ``read_radiograph``.

    The longer side is resized to S by area, the shorter side zero-padded on both sides. MONAI wraps every error of a
    transform: call the transform through ``load`` to get the ``UnreadableImageError`` itself. MONAI's own loader is not
    used, because it carries a file's metadata along. Raises ValueError for an ``image_size`` below 8.
    """
    from monai.transforms import Compose

    if image_size < 8:
        raise ValueError(f"decode: image_size must be at least 8 pixels, got {image_size}")
    return Compose(
        [
            lambda path: read_radiograph(Path(path), image_size, burned_in, colour),
            lambda image: square(image, image_size),
        ]
    )


def square(image: np.ndarray, image_size: int) -> np.ndarray:
    """[h, w] in 0..255, neither side above S = ``image_size``, to uint8 [S, S]: zeros on both sides of it.

    An image [h, w, 3] becomes [S, S, 3]. Raises UnreadableImageError for a constant image.
    """
    from monai.transforms import SpatialPad
    from monai.transforms.croppad.functional import pad_nd

    film = torch.from_numpy(image)[None] if image.ndim == 2 else torch.from_numpy(image).permute(2, 0, 1)  # [C, h, w]
    width = SpatialPad((image_size, image_size)).compute_pad_width(film.shape[1:])
    return to_uint8(pad_nd(film, width, "constant", value=0))


def load(path: Path, transform: Compose) -> np.ndarray:
    """uint8 [S, S] or [S, S, 3] of one file. Raises ``UnreadableImageError``, which quotes nothing of the file."""
    try:
        return np.asarray(transform(str(path)))
    except Exception as error:  # MONAI wraps every error of a transform in RuntimeError
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, UnreadableImageError):
            cause = cause.__cause__
        if cause is None:
            raise
        raise cause from None


def to_uint8(image: Tensor) -> np.ndarray:
    """Float [1, S, S] in 0..255 to uint8 [S, S], [3, S, S] to [S, S, 3], rounded.

    Raises UnreadableImageError for a constant image.
    """
    planes = image.round().clamp(0, 255).to(torch.uint8)
    pixels = planes[0].numpy() if len(planes) == 1 else planes.permute(1, 2, 0).contiguous().numpy()
    if pixels.max() == pixels.min():
        raise UnreadableImageError("constant image")
    return pixels


def train_batch(images: Tensor, size: int, generator: torch.Generator) -> Tensor:
    """uint8 [B, S, S] to float32 [B, 1, size, size] in -1..1, each image cropped at random by ``generator``.

    Images in colour, [B, S, S, 3], become [B, 3, size, size]. None is flipped: a chest film has a side. Nothing is
    drawn from the generator where S equals ``size``. Raises ValueError for other images, or where S is below ``size``.
    """
    spare = _spare(images, size)
    if not spare:
        return _normalise(images)
    corners = torch.randint(spare + 1, (2, len(images)), generator=generator, device=generator.device).tolist()
    crops = [image[y : y + size, x : x + size] for image, y, x in zip(images, *corners, strict=True)]
    return _normalise(torch.stack(crops))


def eval_batch(images: Tensor, size: int) -> Tensor:
    """uint8 [B, S, S] to float32 [B, 1, size, size] in -1..1, cropped at the centre.

    Images in colour are taken, and other images refused, as by ``train_batch``.
    """
    start = _spare(images, size) // 2
    return _normalise(images[:, start : start + size, start : start + size])


def _spare(images: Tensor, size: int) -> int:
    """How many pixels the images [B, S, S] or [B, S, S, 3] are wider than ``size``, checked."""
    shaped = images.ndim == 3 or (images.ndim == 4 and images.shape[3] == 3)
    if not shaped or images.shape[1] != images.shape[2] or images.dtype != torch.uint8:
        raise ValueError(
            f"batch: expected uint8 [B, S, S] images, or [B, S, S, 3], got {images.dtype} {list(images.shape)}"
        )
    if not 0 < size <= images.shape[1]:
        raise ValueError(f"batch: cannot crop {size} pixels from images of {images.shape[1]}; decode them larger")
    return images.shape[1] - size


def _normalise(images: Tensor) -> Tensor:
    """(x / 255 - 0.5) / 0.5 of uint8 [B, H, W] as float32 [B, 1, H, W], of [B, H, W, 3] as [B, 3, H, W]."""
    scaled = images.to(torch.float32).mul_(2 / 255).sub_(1)
    return scaled.unsqueeze(1) if images.ndim == 3 else scaled.permute(0, 3, 1, 2).contiguous()
