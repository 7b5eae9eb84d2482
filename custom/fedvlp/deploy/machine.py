"""What ``fedvlp doctor`` looks at: versions, cores, GPU, disk, and whether FLARE and torch work here."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

NEEDED = ("nvflare", "torch", "torchvision", "monai", "transformers", "timm", "numpy", "safetensors", "tensorboard")
OPTIONAL = {"pydicom": "to read DICOM: pip install 'fedvlp[dicom]'"}
FREE_GB = 5


@dataclass(frozen=True)
class Check:
    """One finding; ``ok`` is None for a mere note."""

    what: str
    ok: bool | None
    found: str


def checks() -> Iterator[Check]:
    """All findings, one after the other."""
    yield Check("python", sys.version_info >= (3, 10), sys.version.split()[0])
    for package in NEEDED:
        try:
            yield Check(package, True, version(package))
        except PackageNotFoundError:
            yield Check(package, False, f"missing; pip install {package}")
    for package, remedy in OPTIONAL.items():
        try:
            yield Check(package, True, version(package))
        except PackageNotFoundError:
            yield Check(package, None, f"missing; needed {remedy}")
    yield _pair()
    yield Check("cores", True, str(os.cpu_count()))
    yield _gpu()
    free = shutil.disk_usage(Path.cwd()).free / 1e9
    yield Check("disk", free > FREE_GB, f"{free:.0f} GB free here (at least {FREE_GB} GB wanted)")


def _pair() -> Check:
    """torch and torchvision must be a matching pair, or importing timm fails."""
    try:
        import torchvision  # noqa: F401
    except Exception as error:
        remedy = "install the torchvision built for this torch"
        return Check("torch and torchvision fit", False, f"{type(error).__name__}; {remedy}")
    return Check("torch and torchvision fit", True, "yes")


def _gpu() -> Check:
    import torch

    if not torch.cuda.is_available():
        return Check("gpu", None, "none; training runs on the CPU")
    card = torch.cuda.get_device_properties(0)
    return Check("gpu", True, f"{torch.cuda.device_count()} x {card.name}, {card.total_memory / 1e9:.0f} GB")
