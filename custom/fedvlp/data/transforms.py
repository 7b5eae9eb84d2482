"""Chest radiographs from file to tensor: MONAI transforms decode a file once, pure torch crops whole batches."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from monai.transforms import Compose

DECODING = "radiograph-1"  # names what decode() does to a file; change it with the result, so that caches rebuild
MAX_PIXELS = 64_000_000  # larger images are refused from the header alone (decompression bombs)
MAX_BYTES = 512 * 1024 * 1024  # larger files are refused unread


DICOM_TAGS = (
    "Rows", "Columns", "NumberOfFrames", "SamplesPerPixel", "PlanarConfiguration", "PhotometricInterpretation",
    "BitsAllocated", "BitsStored", "HighBit", "PixelRepresentation", "RescaleSlope", "RescaleIntercept",
    "ModalityLUTSequence", "WindowCenter", "WindowWidth", "VOILUTFunction", "VOILUTSequence", "BurnedInAnnotation",
    "ExtendedOffsetTable", "ExtendedOffsetTableLengths",
)  # fmt: skip
"""What a pixel is made of. No other tag of a DICOM file, and no patient in it, is kept when the file is read."""


class UnreadableImageError(ValueError):
    """A file that is no usable radiograph. ``reason`` is a short category to count by; it never holds a path or tag."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason


class RadiographReader:
    """MONAI image reader for PNG, JPEG and DICOM; ``decode`` registers it as a virtual subclass of ``ImageReader``."""

    def verify_suffix(self, filename: Any) -> bool:
        return True  # files are told apart by content

    def read(self, data: Any, **_: Any) -> np.ndarray:
        (path,) = data if isinstance(data, (tuple, list)) else (data,)
        return read_radiograph(Path(path))

    def get_data(self, img: np.ndarray) -> tuple[np.ndarray, dict[str, Any]]:
        return img, {"original_channel_dim": float("nan"), "spatial_shape": np.asarray(img.shape)}


def decode(image_size: int) -> Compose:
    """Transform from a path to uint8 [S, S]: longer side resized to S by area, shorter side zero-padded on both sides.

    MONAI wraps a reader's error; call the transform through ``load`` to get the ``UnreadableImageError`` itself.
    """
    from monai.data.image_reader import ImageReader
    from monai.transforms import Compose, EnsureType, LoadImage, Resize, SpatialPad

    if image_size < 8:
        raise ValueError(f"decode: image_size must be at least 8 pixels, got {image_size}")
    ImageReader.register(RadiographReader)
    # The reader is named per call: readers named at construction fall back to MONAI's own, which check no size.
    with _quiet("monai.data.nvimgcodec_pydicom_plugin"):
        loader = LoadImage(image_only=True, dtype=np.float32, ensure_channel_first=True, expanduser=False)
    return Compose(
        [
            partial(loader, reader=RadiographReader()),  # [1, H, W] in 0..255
            EnsureType(track_meta=False),  # drops the metadata, and the path in it
            Resize(image_size, size_mode="longest", mode="area"),
            SpatialPad((image_size, image_size), method="symmetric", mode="constant", value=0),
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


def read_radiograph(path: Path) -> np.ndarray:
    """Grey float32 [H, W] in 0..255, bright = dense (MONOCHROME1 is inverted).

    8-bit images keep their values; deeper ones are stretched from their own minimum and maximum, after the modality
    LUT and the first VOI window. Raises ``UnreadableImageError``; size and frame count are judged before decoding.
    """
    try:
        if not path.is_file():
            raise UnreadableImageError("missing image")
        if path.stat().st_size > MAX_BYTES:
            raise UnreadableImageError("image too large", f"more than {MAX_BYTES} bytes")
        with path.open("rb") as file:
            dicom = file.read(132)[128:] == b"DICM"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # decoders quote the values of tags in warnings
            pixels = _read_dicom(path) if dicom else _read_pil(path)
    except UnreadableImageError:
        raise
    except Exception:  # decoders raise anything on damaged bytes, and quote paths and tags in it
        raise UnreadableImageError("corrupt image") from None
    if not np.isfinite(pixels).all():
        raise UnreadableImageError("corrupt image")
    if pixels.max() == pixels.min():
        raise UnreadableImageError("constant image")
    return np.ascontiguousarray(pixels, dtype=np.float32)


def _check_header(width: int, height: int, frames: int) -> None:
    if frames > 1:
        raise UnreadableImageError("multi-frame image", f"{frames} frames")
    if width * height > MAX_PIXELS:
        raise UnreadableImageError("image too large", f"{width} x {height} pixels, at most {MAX_PIXELS}")
    if min(width, height) < 8 or max(width, height) > 8 * min(width, height):
        raise UnreadableImageError("unsupported image shape", f"{width} x {height} pixels")


def _read_pil(path: Path) -> np.ndarray:
    from PIL import Image, ImageOps, UnidentifiedImageError

    try:
        with Image.open(path, formats=("PNG", "JPEG")) as image:
            _check_header(image.width, image.height, getattr(image, "n_frames", 1))
            upright = ImageOps.exif_transpose(image)
            if upright.mode[0] in "IF":  # 16-bit PNG
                return _stretch(np.asarray(upright, dtype=np.float32))
            return np.asarray(upright.convert("L"), dtype=np.float32)
    except Image.DecompressionBombError:
        raise UnreadableImageError("image too large") from None
    except UnidentifiedImageError:
        raise UnreadableImageError("unsupported image format") from None


def _read_dicom(path: Path) -> np.ndarray:
    from pydicom import dcmread
    from pydicom.filereader import read_file_meta_info
    from pydicom.pixels import apply_modality_lut, apply_voi_lut, pixel_array

    _check_syntax(read_file_meta_info(path).get("TransferSyntaxUID"))
    header = dcmread(path, stop_before_pixels=True, specific_tags=list(DICOM_TAGS))
    _check_header(int(header.Columns), int(header.Rows), int(header.get("NumberOfFrames") or 1))
    if str(header.get("BurnedInAnnotation", "")).upper() == "YES":
        raise UnreadableImageError("burned-in annotation")
    colour = header.PhotometricInterpretation not in ("MONOCHROME1", "MONOCHROME2")
    if int(header.BitsAllocated) not in (8, 16) or (colour and header.PhotometricInterpretation == "PALETTE COLOR"):
        raise UnreadableImageError("unsupported image format")
    dataset = dcmread(path, specific_tags=[*DICOM_TAGS, "PixelData"])
    stored = pixel_array(dataset)  # [H, W] or RGB [H, W, 3]
    if colour:
        if stored.dtype != np.uint8 or stored.ndim != 3:
            raise UnreadableImageError("unsupported image format")
        return stored.astype(np.float32) @ np.array([0.299, 0.587, 0.114], dtype=np.float32)  # ITU-R 601, as PIL
    values = np.asarray(apply_voi_lut(apply_modality_lut(stored, dataset), dataset), dtype=np.float32)
    if stored.dtype != np.uint8 or int(header.BitsStored) != 8 or not np.allclose(values, stored, atol=0.5):
        values = _stretch(values)
    return 255 - values if header.PhotometricInterpretation == "MONOCHROME1" else values


def _check_syntax(uid: Any) -> None:
    from pydicom.pixels import get_decoder
    from pydicom.uid import DeflatedExplicitVRLittleEndian, ExplicitVRBigEndian, ExplicitVRLittleEndian
    from pydicom.uid import ImplicitVRLittleEndian as ImplicitVR

    if uid in (ExplicitVRLittleEndian, ExplicitVRBigEndian, ImplicitVR):
        return
    try:
        usable = uid is not None and uid != DeflatedExplicitVRLittleEndian and get_decoder(uid).is_available
    except NotImplementedError:
        usable = False
    if not usable:  # deflated files inflate without bound before their header can be read
        raise UnreadableImageError("unsupported transfer syntax")


def _stretch(values: np.ndarray) -> np.ndarray:
    low, high = values.min(), values.max()
    if not high > low:
        raise UnreadableImageError("constant image")
    return (values - low) * np.float32(255 / (float(high) - float(low)))


def train_batch(images: Tensor, size: int, generator: torch.Generator) -> Tensor:
    """uint8 [B, S, S] to float32 [B, 1, size, size] in -1..1, each image cropped at random by ``generator`` alone.

    No horizontal flips: a chest film has a side. No draw is made when S equals ``size``.
    """
    spare = _spare(images, size)
    if not spare:
        return _normalise(images)
    corner = torch.randint(spare + 1, (2, len(images)), generator=generator, device=generator.device).to(images.device)
    windows = images.unfold(1, size, 1).unfold(2, size, 1)  # [B, S-size+1, S-size+1, size, size], a view
    return _normalise(windows[torch.arange(len(images), device=images.device), corner[0], corner[1]])


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
