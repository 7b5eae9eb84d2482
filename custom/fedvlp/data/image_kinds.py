"""An image in files of every kind that is read: what the preparation that is exported with a model is compared on."""

from __future__ import annotations

from importlib.util import find_spec
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np


def write_kinds(folder: Path) -> list[Path]:
    """Writes 13 files into ``folder``, and returns them; 10 where pydicom is not installed.

    PNG of 8 and 16 bits, with alpha, with a palette and in colour; JPEG in grey, colour and CMYK; TIFF in both byte
    orders; DICOM of both photometric interpretations, and compressed by JPEG 2000.
    """
    from PIL import Image

    rows = np.random.default_rng(0).integers(0, 256, (70, 90, 3)).astype(np.uint8)
    grey, colour = Image.fromarray(rows[..., 0]), Image.fromarray(rows)
    values = 16 * rows[..., 0].astype(np.uint16)  # of 12 bits
    deep = Image.fromarray(values)
    images = {
        "8.png": grey,
        "16.png": deep,
        "alpha.png": grey.convert("LA"),
        "palette.png": colour.quantize(64),
        "colour.png": colour,
        "grey.jpg": grey.resize((900, 700)),  # so large that it is decoded at a reduced size
        "colour.jpg": colour,
        "cmyk.jpg": colour.convert("CMYK"),
        "little.tif": deep,
        "big.tif": Image.frombytes("I;16B", deep.size, values.astype(">u2").tobytes()),
    }
    for name, image in images.items():
        image.save(folder / name)
    if find_spec("pydicom"):
        from pydicom.encaps import encapsulate
        from pydicom.uid import ExplicitVRLittleEndian, JPEG2000Lossless

        frame = BytesIO()
        deep.save(frame, "JPEG2000")
        _write_dicom(folder / "1.dcm", values, "MONOCHROME1", ExplicitVRLittleEndian, values.tobytes())
        _write_dicom(folder / "2.dcm", values, "MONOCHROME2", ExplicitVRLittleEndian, values.tobytes())
        _write_dicom(folder / "j2k.dcm", values, "MONOCHROME2", JPEG2000Lossless, encapsulate([frame.getvalue()]))
    return sorted(folder.iterdir())


def _write_dicom(file: Path, values: np.ndarray, photometric: str, syntax: Any, pixels: bytes) -> None:
    from pydicom import Dataset
    from pydicom.dataset import FileMetaDataset

    film = Dataset()
    film.file_meta = FileMetaDataset()
    film.file_meta.TransferSyntaxUID = syntax
    film.file_meta.MediaStorageSOPClassUID = film.SOPClassUID = "1.2.840.10008.5.1.4.1.1.1.1"
    film.file_meta.MediaStorageSOPInstanceUID = film.SOPInstanceUID = "1.2.3.4"
    film.Rows, film.Columns = values.shape
    film.SamplesPerPixel, film.PhotometricInterpretation, film.PixelRepresentation = 1, photometric, 0
    film.BitsAllocated, film.BitsStored, film.HighBit = 16, 12, 11
    film.WindowCenter, film.WindowWidth = 2000, 1500
    film.add_new("PixelData", "OB" if syntax.is_compressed else "OW", pixels)
    film["PixelData"].is_undefined_length = syntax.is_compressed
    film.save_as(file, enforce_file_format=True)
