"""Images from file to tensor: a file is decoded once, whole batches are cropped. MONAI pipelines can begin with it.

Chest films are grey, [S, S]. Photographs may be in colour, [S, S, 3]: red, green and blue.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from fedvlp.data.radiograph import UnreadableImageError, read_stored

if TYPE_CHECKING:
    from monai.transforms import Compose

DECODING = "radiograph-6"  # names what decode() does to a file; change it with the result, so that caches rebuild


def decode(path: Path, image_size: int, burned_in: bool = False, colour: bool = False) -> np.ndarray:
    """The image in a file as uint8 [S, S], in ``colour`` [S, S, 3], S = ``image_size``.

    ``burned_in`` and ``colour`` are those of ``read_radiograph``. The longer side is resized to S by area, the shorter
    side zero-padded on both sides. Raises UnreadableImageError, which quotes nothing of the file, and ValueError for an
    ``image_size`` below 8.
    """
    return decode_stored(path, image_size, burned_in, colour)[0]


def decode_stored(path: Path, image_size: int, burned_in: bool = False, colour: bool = False) -> tuple[np.ndarray, str]:
    """``decode``, and how the file stores the image (``radiograph.read_stored``)."""
    if image_size < 8:
        raise ValueError(f"decode: image_size must be at least 8 pixels, got {image_size}")
    image, stored = read_stored(path, image_size, burned_in, colour)
    return square(image, image_size), stored


def decoding(image_size: int, burned_in: bool = False, colour: bool = False) -> Compose:
    """``decode`` as the first transform of a MONAI pipeline: from a path to what it returns.

    MONAI wraps every error of a transform in RuntimeError. Its own loader is not used, since it carries a file's
    metadata along; nor is MONAI imported for decoding alone, which would take longer than many a command.
    """
    from monai.transforms import Compose

    return Compose([lambda path: decode(Path(path), image_size, burned_in, colour)])


def square(image: np.ndarray, image_size: int) -> np.ndarray:
    """[h, w] in 0..255, neither side above S = ``image_size``, to uint8 [S, S]: zeros on both sides of it.

    An image [h, w, 3] becomes [S, S, 3]. Raises UnreadableImageError for a constant image.
    """
    film = torch.from_numpy(image)[None] if image.ndim == 2 else torch.from_numpy(image).permute(2, 0, 1)  # [C, h, w]
    spare = [image_size - side for side in film.shape[:0:-1]]  # of width, then of height
    return to_uint8(F.pad(film, [zeros for one in spare for zeros in (one // 2, one - one // 2)]))


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
    return cropped(images, size, random_corners(images, len(images), size, generator))


def random_corners(images: Tensor, count: int, size: int, generator: torch.Generator) -> Tensor | None:
    """Rows and columns [2, count] int64 of the first pixels of crops; None where the images' S equals ``size``.

    ``images`` [B, S, S] or [B, S, S, 3] are those of a batch of ``count`` records, or some of them.
    """
    spare = _spare(images, size)
    return torch.randint(spare + 1, (2, count), generator=generator, device="cpu") if spare else None


def cropped(images: Tensor, size: int, corners: Tensor | None) -> Tensor:
    """What ``train_batch`` makes of images [B, S, S] or [B, S, S, 3] on any device, with ``corners`` [2, B] there.

    The CPU copies each crop's rows; a GPU gathers the pixels of all crops at once. Both give the same numbers.
    """
    if corners is None:
        return _normalise(images)
    return _normalise((_sliced if images.device.type == "cpu" else _gathered)(images, size, corners))


def _sliced(images: Tensor, size: int, corners: Tensor) -> Tensor:
    starts = zip(images, *corners.tolist(), strict=True)
    return torch.stack([image[y : y + size, x : x + size] for image, y, x in starts])


def _gathered(images: Tensor, size: int, corners: Tensor) -> Tensor:
    span = torch.arange(size, device=images.device)
    rows, columns = (start[:, None] + span for start in corners)  # [B, size] each
    film = torch.arange(len(images), device=images.device)[:, None, None]  # [B, 1, 1]
    return images[film, rows[:, :, None], columns[:, None, :]]


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
