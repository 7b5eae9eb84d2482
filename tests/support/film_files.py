"""Film files of all kinds that are read: 8 and 16 bits, colour, MONOCHROME1, windows, unlike sides."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np


def dicom(
    path: Path, stored: np.ndarray, photometric: str = "MONOCHROME2", bits: int = 8, syntax: Any = None, **tags: Any
) -> Path:
    from pydicom import Dataset
    from pydicom.dataset import FileMetaDataset
    from pydicom.uid import ExplicitVRLittleEndian

    data = Dataset()
    data.file_meta = FileMetaDataset()
    data.file_meta.TransferSyntaxUID = syntax or ExplicitVRLittleEndian
    data.file_meta.MediaStorageSOPClassUID = data.SOPClassUID = "1.2.840.10008.5.1.4.1.1.1.1"
    data.file_meta.MediaStorageSOPInstanceUID = data.SOPInstanceUID = "1.2.3.4"
    data.PatientName, data.PatientID = "Canary^Name", "CANARY-1"
    data.Rows, data.Columns = stored.shape[-2:]
    data.SamplesPerPixel, data.PhotometricInterpretation, data.PixelRepresentation = 1, photometric, 0
    data.BitsAllocated, data.BitsStored, data.HighBit = 8 * stored.itemsize, bits, bits - 1
    data.PixelData = stored.tobytes()
    for name, value in tags.items():
        setattr(data, name, value)
    data.save_as(path, enforce_file_format=True)
    return path


def write_films(folder: Path) -> list[str]:
    """Nine films of all kinds, of unlike sides: names of their files."""
    from PIL import Image

    rng = np.random.default_rng(1)

    def noise(height: int, width: int, top: int = 256) -> np.ndarray:
        grid = rng.random((height // 8 + 1, width // 8 + 1))
        smooth = np.kron(grid, np.ones((8, 8)))[:height, :width]
        return (smooth * (top - 1)).astype(np.uint8 if top == 256 else np.uint16)

    Image.fromarray(noise(160, 120)).save(folder / "a.png")
    Image.fromarray(noise(70, 200)).save(folder / "b.png")
    Image.fromarray(noise(150, 151, 60000)).save(folder / "c.png")
    Image.fromarray(noise(300, 233)).save(folder / "d.jpg", quality=90)
    Image.fromarray(np.dstack([noise(90, 90)] * 3)).save(folder / "e.png")
    dicom(folder / "f.dcm", noise(128, 100), "MONOCHROME2", 8)
    dicom(folder / "g.dcm", noise(128, 100), "MONOCHROME1", 8)
    dicom(folder / "h.dcm", noise(201, 99, 4096), "MONOCHROME1", 12, WindowCenter=2000, WindowWidth=1500)
    dicom(folder / "i.dcm", noise(64, 190, 65536), "MONOCHROME2", 16, RescaleSlope=2, RescaleIntercept=-100)
    return [
        f"{letter}.{kind}" for letter, kind in zip("abcdefghi", ["png"] * 3 + ["jpg", "png"] + ["dcm"] * 4, strict=True)
    ]
