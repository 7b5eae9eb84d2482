"""How images and phrases are prepared for a model: as the records of its run were, which its folder says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedvlp.data.image_kinds import write_kinds
from fedvlp.data.images import DECODING, square
from fedvlp.data.loader import eval_batch
from fedvlp.data.radiograph import ImageAccessError, UnreadableImageError, read_film
from fedvlp.data.report_text import AS_WRITTEN, CLEANED, clean_phrase

FIELDS = ("decoding", "longest_side", "input_size", "reports")
"""What a description must have; all else in it is for people, and for programs other than fedvlp."""

REMEDIES = {
    "missing image": "there is no such file",
    "unsupported image format": "PNG, JPEG, TIFF and DICOM are read",
    "corrupt image": "its content is damaged or incomplete; export it again",
    "empty file": "it has no bytes; copy or export it again",
    "incomplete image": "its lower third or more has one value, as a transfer that broke off leaves it; copy it again",
    "constant image": "all of its pixels are equal",
    "no image": "it is a DICOM report, presentation state or other document; give the image that belongs to it",
    "no pixel data": "it has the header of an image alone; export it with its pixels",
    "needs another decoder": (
        "pip install 'fedvlp[dicom]' reads JPEG Lossless too; nothing here reads JPEG Extended of 12 bits: export it "
        "uncompressed"
    ),
    "unsupported transfer syntax": "export it uncompressed",
    "needs the package pydicom": "pip install 'fedvlp[dicom]'",
}
"""Reason why an image cannot be used -> what to say of it."""


class PreparationError(ValueError):
    """An image cannot be prepared. Names its number among those given, and neither its path nor its content."""


@dataclass(frozen=True)
class Preprocessing:
    """Images to float32 [N, C, S, S] in -1..1 with S = ``input_size``, and phrases to words. Holds no state.

    C is 1, and 3 in ``colour``.

    Raises ValueError unless the image is decoded at least as large as the model sees it.
    """

    longest_side: int  # pixels that the longer side of an image is resized to, and the shorter padded with zeros
    input_size: int  # pixels, side of the square that is cropped at the centre: what the model sees
    reports: str = AS_WRITTEN  # or CLEANED
    decoding: str = DECODING  # version of what decoding does to a file
    colour: bool = False  # red, green and blue, in place of grey

    def __post_init__(self) -> None:
        if not 8 <= self.input_size <= self.longest_side:
            raise ValueError(
                f"preprocessing: cannot crop {self.input_size} pixels from images of {self.longest_side}; expected at "
                "least 8, and no more than the images have"
            )
        if self.reports not in (CLEANED, AS_WRITTEN):
            raise ValueError(f"preprocessing: reports are {self.reports!r}, expected {CLEANED!r} or {AS_WRITTEN!r}")

    def described(self) -> dict[str, Any]:
        """As config.json of a model says it: enough to do the same without fedvlp."""
        said = self._described()
        if self.colour:
            said |= {"colour": True, "channels": "three: red, green, blue; equal where an image is grey"}
            said["grey_levels"] = said["grey_levels"].partition("; colour")[0]
        return said

    def _described(self) -> dict[str, Any]:
        """For grey images."""
        return {
            "decoding": self.decoding,
            "grey_levels": (
                "of any number of bits alike: after the modality LUT and the first VOI window, percentile 0.1 of the "
                "image at a longer side of 256 pixels becomes 0 and percentile 99 becomes 240, and what lies beyond "
                "0..255 is cut off, before the image is resized; rows and columns of one value (a border) and pixels "
                "of a DICOM file's PixelPaddingValue are left out of the percentiles, and the latter are black; colour "
                "to grey by ITU-R 601"
            ),
            "monochrome1": "inverted, so that bright is dense",
            "longest_side": self.longest_side,
            "resize": "the longer side to longest_side, each pixel the mean of the area that it covers",
            "padding": "the shorter side with zeros on both sides, then rounded to whole numbers 0..255",
            "input_size": self.input_size,
            "crop": "at the centre",
            "mean": 0.5,
            "std": 0.5,
            "channels": "one; the image tower repeats it",
            "reports": self.reports,
        }

    @staticmethod
    def read(described: Mapping[str, Any]) -> Preprocessing:
        """What :meth:`described` said. Raises ValueError for anything else."""
        missing = [name for name in FIELDS if name not in described]
        if missing:
            raise ValueError(f"preprocessing: {', '.join(missing)} is missing in config.json; copy the model again")
        sizes = described["longest_side"], described["input_size"]
        if not all(type(size) is int for size in sizes):
            raise ValueError("preprocessing: longest_side and input_size are no whole numbers; copy the model again")
        colour = described.get("colour") is True
        return Preprocessing(*sizes, described["reports"], str(described["decoding"]), colour)

    def films(self, films: Sequence[Any]) -> Tensor:
        """float32 [N, C, S, S] of N images (``radiograph.read_film`` says of what kinds).

        Raises PreparationError for an image that cannot be used, and where this fedvlp decodes otherwise than that
        the model was trained with.
        """
        if self.outdated:
            raise PreparationError(self.outdated)
        if not len(films):
            return torch.empty(0, 3 if self.colour else 1, self.input_size, self.input_size)
        decoded = [self._decoded(film, number, len(films)) for number, film in enumerate(films, start=1)]
        return eval_batch(torch.from_numpy(np.stack(decoded)), self.input_size)

    @property
    def outdated(self) -> str:
        """A sentence where this fedvlp decodes images otherwise than that which the model was trained with; else ""."""
        if self.decoding == DECODING:
            return ""
        return (
            f"this model's images were decoded by {self.decoding[:40]!r}, and this fedvlp decodes by {DECODING!r}; "
            "use the version of fedvlp that the model's README.md names"
        )

    def _decoded(self, film: Any, number: int, count: int) -> np.ndarray:
        """uint8 [L, L] or [L, L, 3], L = ``longest_side``."""
        try:
            return square(read_film(film, self.longest_side, self.colour), self.longest_side)
        except (UnreadableImageError, ImageAccessError) as error:
            which = "the image" if count == 1 else f"image {number} of {count}"
            if isinstance(error, ImageAccessError):
                raise PreparationError(f"{which} cannot be used: {error}") from None
            remedy = REMEDIES.get(error.reason, "")
            raise PreparationError(f"{which} cannot be used: {error}{remedy and f' ({remedy})'}") from None

    def samples(self, folder: Path) -> list[Path]:
        """Writes an image in files of every kind that is read into ``folder``, and returns them."""
        return write_kinds(folder)

    def text(self, phrase: str) -> str:
        """The phrase as the reports were written that the model was trained on."""
        return clean_phrase(phrase) if self.reports == CLEANED else phrase
