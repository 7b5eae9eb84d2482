"""Chest radiographs from file to tensor: MONAI transforms decode a file once, pure torch crops whole batches."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from fedvlp.data.radiograph import UnreadableImageError, read_radiograph

if TYPE_CHECKING:
    from monai.transforms import Compose

DECODING = "radiograph-3"  # names what decode() does to a file; change it with the result, so that caches rebuild


@dataclass(frozen=True)
class RadiographReader:
    """MONAI image reader for PNG, JPEG and DICOM; ``decode`` registers it as a virtual subclass of ``ImageReader``."""

    longest: int | None = None  # side that the longer one is resized to, pixels

    def verify_suffix(self, filename: Any) -> bool:
        return True  # files are told apart by content

    def read(self, data: Any, **_: Any) -> np.ndarray:
        (path,) = data if isinstance(data, (tuple, list)) else (data,)
        return read_radiograph(Path(path), self.longest)

    def get_data(self, img: np.ndarray) -> tuple[np.ndarray, dict[str, Any]]:
        return img, {"original_channel_dim": float("nan"), "spatial_shape": np.asarray(img.shape)}


@lru_cache
def decode(image_size: int) -> Compose:
    """Transform from a path to uint8 [S, S]: longer side resized to S by area, shorter side zero-padded on both sides.

    MONAI wraps a reader's error; call the transform through ``load`` to get the ``UnreadableImageError`` itself.
    """
    from monai.data.image_reader import ImageReader
    from monai.transforms import Compose, EnsureType, LoadImage, SpatialPad
    from monai.transforms.croppad.functional import pad_nd

    if image_size < 8:
        raise ValueError(f"decode: image_size must be at least 8 pixels, got {image_size}")
    ImageReader.register(RadiographReader)
    # The reader is named per call: readers named at construction fall back to MONAI's own, which check no size.
    with _quiet("monai.data.nvimgcodec_pydicom_plugin"):
        loader = LoadImage(image_only=True, dtype=np.float32, ensure_channel_first=True, expanduser=False)
    square = SpatialPad((image_size, image_size))  # called itself, it would follow metadata that is gone: 1 ms an image
    return Compose(
        [
            partial(loader, reader=RadiographReader(image_size)),  # [1, h, w] in 0..255
            EnsureType(track_meta=False),  # drops the metadata, and the path in it
            lambda image: pad_nd(image, square.compute_pad_width(image.shape[1:]), "constant", value=0),
            to_uint8,
        ]
    )


@contextlib.contextmanager
def _quiet(logger: str) -> Iterator[None]:
    """Silence what MONAI says of its own optional readers, which are never used here."""
    named = logging.getLogger(logger)
    level = named.level
    named.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        named.setLevel(level)


def load(path: Path, transform: Compose) -> np.ndarray:
    """uint8 [S, S] of one file. Raises ``UnreadableImageError``, which names a reason and nothing of the file."""
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
    """Float [1, S, S] in 0..255 to uint8 [S, S], rounded to the nearest."""
    pixels = image[0].round().clamp(0, 255).to(torch.uint8).numpy()
    if pixels.max() == pixels.min():
        raise UnreadableImageError("constant image")
    return pixels


def train_batch(images: Tensor, size: int, generator: torch.Generator) -> Tensor:
    """uint8 [B, S, S] to float32 [B, 1, size, size] in -1..1, each image cropped at random by ``generator`` alone.

    No horizontal flips: a chest film has a side. No draw is made when S equals ``size``.
    """
    spare = _spare(images, size)
    if not spare:
        return _normalise(images)
    corners = torch.randint(spare + 1, (2, len(images)), generator=generator, device=generator.device).tolist()
    crops = [image[y : y + size, x : x + size] for image, y, x in zip(images, *corners, strict=True)]
    return _normalise(torch.stack(crops))


def eval_batch(images: Tensor, size: int) -> Tensor:
    """uint8 [B, S, S] to float32 [B, 1, size, size] in -1..1, cropped at the centre."""
    start = _spare(images, size) // 2
    return _normalise(images[:, start : start + size, start : start + size])


def _spare(images: Tensor, size: int) -> int:
    if images.ndim != 3 or images.shape[1] != images.shape[2] or images.dtype != torch.uint8:
        raise ValueError(f"batch: expected uint8 [B, S, S] images, got {images.dtype} {list(images.shape)}")
    if not 0 < size <= images.shape[1]:
        raise ValueError(f"batch: cannot crop {size} pixels from images of {images.shape[1]}; decode them larger")
    return images.shape[1] - size


def _normalise(images: Tensor) -> Tensor:
    """(x / 255 - 0.5) / 0.5 of uint8 [B, H, W] as float32 [B, 1, H, W]."""
    return images.to(torch.float32).mul_(2 / 255).sub_(1).unsqueeze(1)
