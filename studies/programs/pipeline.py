"""Images per second and core: from hospital files to a 224-pixel batch, and again from what was kept.

    python studies/programs/pipeline.py [--repetitions 7] [--quick]

One thread, seconds of the processor (other work on the machine hardly counts), variants interleaved, the first pass
thrown away, medians. Inputs are synthetic films of 3056 x 2544 pixels and 12 bits, as raw DICOM (without a VOI window,
and with one that clips), 16-bit PNG and JPEG of about 1.7 MB (and one of 3053 x 2541, which no eighth divides), on a
warm page cache.

First pass: MONAI's default dictionary pipeline (LoadImaged, EnsureChannelFirstd, Resized, ScaleIntensityd,
NormalizeIntensityd; it ignores VOI windows and does not keep proportions) against our decoding; beside it the largest
difference of ours to the area mean of the full image, in grey levels of 255. Afterwards: batches of 64 in random order
from MONAI's PersistentDataset against our cache, as uint8 (normalised on the device) and as cropped, normalised
float32. Then the bytes of both, and what 377,110 images (MIMIC-CXR) would take. About two minutes of processor time.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
import warnings
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import command_line, interleaved, machine, rounded, say, table

from fedvlp.data.burned_in import HEADER
from fedvlp.data.cache_build import Building
from fedvlp.data.images import film, films
from fedvlp.data.loader import train_batch
from fedvlp.data.radiograph import read_radiograph

HEIGHT, WIDTH, SIZE, BATCH, MIMIC = 3056, 2544, 224, 64, 377_110


def synthetic_film(seed: int, height: int, width: int) -> np.ndarray:
    """A bright, blurred thorax with fine structure and grain, uint16 [H, W] of 12 bits."""
    import cv2

    rng = np.random.default_rng(seed)
    y, x = np.mgrid[-1 : 1 : height * 1j, -1 : 1 : width * 1j].astype(np.float32)
    structure = cv2.resize(rng.normal(size=(height // 24, width // 24)).astype(np.float32), (width, height))
    grain = cv2.GaussianBlur(rng.normal(size=(height, width)).astype(np.float32), (0, 0), 1.0)
    pixels = 600 + 2600 * np.exp(-2 * (x**2 + y**2)) + 150 * structure + 190 * grain
    return np.clip(pixels, 0, 4095).astype(np.uint16)


def write_dicom(path: Path, stored: np.ndarray, **tags: Any) -> Path:
    """The stored values as an uncompressed DICOM file of 12 bits."""
    import pydicom
    from pydicom.uid import ExplicitVRLittleEndian

    data = pydicom.Dataset()
    data.file_meta = pydicom.dataset.FileMetaDataset()
    data.file_meta.TransferSyntaxUID = ExplicitVRLittleEndian
    data.file_meta.MediaStorageSOPClassUID = data.SOPClassUID = "1.2.840.10008.5.1.4.1.1.1.1"
    data.file_meta.MediaStorageSOPInstanceUID = data.SOPInstanceUID = "1.2.3.4"
    data.Rows, data.Columns = stored.shape
    data.SamplesPerPixel, data.PhotometricInterpretation, data.PixelRepresentation = 1, "MONOCHROME2", 0
    data.BitsAllocated, data.BitsStored, data.HighBit = 16, 12, 11
    data.PixelData = stored.tobytes()
    for name, value in tags.items():
        setattr(data, name, value)
    data.save_as(path, enforce_file_format=True)
    return path


def inputs(folder: Path, height: int, width: int, count: int = 2) -> dict[str, list[Path]]:
    """The same films in every format."""
    from PIL import Image

    files: dict[str, list[Path]] = {
        name: [] for name in ("raw DICOM", "raw DICOM, window", "16-bit PNG", "JPEG", "JPEG, odd sides")
    }
    for seed in range(count):
        stored = synthetic_film(seed, height, width)
        files["raw DICOM"].append(write_dicom(folder / f"{seed}.dcm", stored))
        window = {"WindowCenter": 2000, "WindowWidth": 2400}
        files["raw DICOM, window"].append(write_dicom(folder / f"{seed}-window.dcm", stored, **window))
        files["16-bit PNG"].append(folder / f"{seed}.png")
        Image.fromarray(stored).save(files["16-bit PNG"][-1])
        files["JPEG"].append(folder / f"{seed}.jpg")
        grey = (stored >> 4).astype(np.uint8)
        Image.fromarray(grey).save(files["JPEG"][-1], quality=95)
        files["JPEG, odd sides"].append(folder / f"{seed}-odd.jpg")
        Image.fromarray(grey[:-3, :-3]).save(files["JPEG, odd sides"][-1], quality=95)
    return files


def monai_pipeline() -> Callable[[Mapping[str, str]], Any]:
    """MONAI's default dictionary pipeline to [1, 224, 224] float32 in -1..1."""
    from monai import transforms as monai

    return monai.Compose(
        [
            monai.LoadImaged("image"),
            monai.EnsureChannelFirstd("image"),
            monai.Resized("image", (SIZE, SIZE)),
            monai.ScaleIntensityd("image"),
            monai.NormalizeIntensityd("image", subtrahend=0.5, divisor=0.5),
        ]
    )


def off_by(file: Path) -> float:
    """The largest difference of our reading to the area mean of the full image, in grey levels."""
    import cv2

    small = read_radiograph(file, SIZE)
    full = cv2.resize(read_radiograph(file), small.shape[::-1], interpolation=cv2.INTER_AREA)
    return float(np.abs(small - full).max())


def first_pass(files: dict[str, list[Path]], repetitions: int) -> dict[str, float]:
    """Rows of the first table; returns our images per second by format."""
    pipeline, rates, rows = monai_pipeline(), {}, []
    variants: dict[str, Callable[[], object]] = {}
    for name, paths in files.items():
        variants[f"monai {name}"] = lambda paths=paths: [pipeline({"image": str(path)}) for path in paths]  # type: ignore[misc]
        variants[f"fedvlp {name}"] = lambda paths=paths: [film(path, SIZE, HEADER) for path in paths]  # type: ignore[misc]
    seconds = interleaved(variants, repetitions, time.process_time)
    for name, paths in files.items():
        theirs, ours = seconds[f"monai {name}"], seconds[f"fedvlp {name}"]
        rates[name] = len(paths) / statistics.median(ours)
        row = {
            "input": name,
            "megabytes": rounded(paths[0].stat().st_size / 1e6),
            "monai_per_s": rounded(len(paths) / statistics.median(theirs)),
            "fedvlp_per_s": rounded(rates[name]),
            "ratio": rounded(statistics.median(a / b for a, b in zip(theirs, ours, strict=True))),
            "grey_levels_off": rounded(max(map(off_by, paths))),
        }
        say({"first_pass": row})
        rows.append(row.values())
    print(table(("input", "MB a file", "MONAI, images/s", "fedvlp, images/s", "x MONAI", "grey levels off"), rows))
    return rates


def afterwards(folder: Path, count: int, repetitions: int) -> None:
    """Rows of the second table: the same items from PersistentDataset and from our cache."""
    from monai.data import PersistentDataset
    from PIL import Image

    paths = [folder / f"item-{place}.jpg" for place in range(count)]
    rng = np.random.default_rng(0)
    for path in paths:
        Image.fromarray(rng.integers(0, 256, (256, 256), dtype=np.uint8)).save(path)
    kept, own = folder / "persistent", folder / "cache"
    persistent = PersistentDataset([{"image": str(path)} for path in paths], monai_pipeline(), cache_dir=kept)
    cache = films("benchmark", [path.name for path in paths], paths, SIZE, str(own), Building(), HEADER)
    crops = films("benchmark", [path.name for path in paths], paths, 256, str(folder / "crops"), Building(), HEADER)
    for place in range(count):
        persistent[place]
    order = rng.permutation(count)
    batches = [order[start : start + BATCH] for start in range(0, count, BATCH)]
    generator = torch.Generator().manual_seed(0)
    passes: dict[str, Callable[[np.ndarray], object]] = {
        "PersistentDataset, float32": lambda rows: torch.stack([persistent[i]["image"] for i in rows]),
        "fedvlp cache, uint8": cache,
        "fedvlp cache, random crops of 256, float32": lambda rows: train_batch(
            torch.from_numpy(crops(rows)), SIZE, generator
        ),
    }
    runs = {name: lambda read=read: deque(map(read, batches), maxlen=0) for name, read in passes.items()}  # type: ignore[misc]
    seconds = interleaved(runs, repetitions, time.process_time)
    theirs = seconds["PersistentDataset, float32"]
    stored = {
        name: sum(f.stat().st_size for f in path.rglob("*") if f.is_file())
        for name, path in {"PersistentDataset, float32": kept, "fedvlp cache, uint8": own}.items()
    }
    rows = []
    for name, spent in seconds.items():
        row = {
            "variant": name,
            "per_s": rounded(count / statistics.median(spent)),
            "ratio": rounded(statistics.median(a / b for a, b in zip(theirs, spent, strict=True))),
            "bytes_an_item": stored[name] // count if name in stored else "",
        }
        say({"afterwards": row})
        rows.append(row.values())
    print(table(("from", "images/s", "x PersistentDataset", "bytes an image"), rows))


def estimates(rates: dict[str, float]) -> None:
    """What MIMIC-CXR would take, from the figures of this call."""
    gigabytes = {size: rounded(MIMIC * size * size / 1e9) for size in (224, 256)}
    hours = {name: rounded(MIMIC / rate / 3600) for name, rate in rates.items()}
    say({"estimate": {"images": MIMIC, "gigabytes": gigabytes, "core_hours": hours}})


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--quick", action="store_true", help="small films, few items, one repetition")
    options = parser.parse_args()
    import cv2

    torch.set_num_threads(1)
    cv2.setNumThreads(1)
    warnings.simplefilter("ignore")
    say(machine() | {"threads": 1})
    height, width = (HEIGHT // 4, WIDTH // 4) if options.quick else (HEIGHT, WIDTH)
    repetitions = 1 if options.quick else options.repetitions
    with tempfile.TemporaryDirectory() as folder:
        rates = first_pass(inputs(Path(folder), height, width), repetitions)
        afterwards(Path(folder), 128 if options.quick else 2048, repetitions)
    if not options.quick:
        estimates(rates)
    say({"load": round(os.getloadavg()[0], 2)})


if __name__ == "__main__":
    main()
