"""What ``fedvlp doctor`` looks at: versions, cores, GPU, disk, and whether FLARE and torch work here."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

NEEDED = ("nvflare", "torch", "torchvision", "monai", "transformers", "timm", "numpy", "safetensors", "tensorboard")
OPTIONAL = {"pydicom": "to read DICOM: pip install 'fedvlp[dicom]'"}
FREE_GB = 5  # of disk space wanted
HOME = "FEDVLP_HOME"
"""The variable that names the folder of runs, in the place of the kit's own."""
JOBS_SOCKET = "jobs.sock"
"""In a kit: where a second account of the machine starts jobs (flare/job_user.py)."""


@dataclass(frozen=True)
class Check:
    """One result of ``fedvlp doctor``."""

    what: str  # what was checked
    ok: bool | None  # None: a note, neither good nor bad
    found: str  # what was seen there, with the remedy where it is not ok


def checks() -> Iterator[Check]:
    """The results for this machine, each as soon as it is known."""
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
    yield path_check("python's folder", sys.executable)
    yield path_check("this folder", Path.cwd())
    yield _pair()
    yield Check("cores", True, str(os.cpu_count()))
    yield _gpu()
    free = shutil.disk_usage(Path.cwd()).free / 1e9
    yield Check("disk", free > FREE_GB, f"{free:.0f} GB free here (at least {FREE_GB} GB wanted)")


def whole_in_command(path: Path | str) -> bool:
    """Whether ``path`` stays one word in the commands of FLARE's processes: it joins and splits them at blanks."""
    try:
        return shlex.split(str(path), comments=True) == [str(path)]
    except ValueError:  # a quotation mark that nothing closes
        return False


def path_check(what: str, path: Path | str) -> Check:
    """Whether FLARE can start processes with ``path`` in their command."""
    if whole_in_command(path):
        return Check(what, True, "its path is one word")
    return Check(
        what, False, "white space, quotation marks, '#' or '\\' in its path: FLARE's processes do not start; move it"
    )


def _pair() -> Check:
    """Whether torch and torchvision fit each other; importing timm fails if they do not."""
    try:
        import torchvision  # noqa: F401
    except Exception as error:
        remedy = "install the torchvision built for this torch"
        return Check("torch and torchvision fit", False, f"{type(error).__name__}; {remedy}")
    return Check("torch and torchvision fit", True, "yes")


def memory_gb(device: torch.device) -> float:
    """Memory of the GPU; for the CPU, that of the machine or of the container, whichever is less."""
    import torch

    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory / 1e9
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = Path("/sys/fs/cgroup/memory.max")  # "max" where there is none
    said = limit.read_text().strip() if limit.is_file() else ""
    return min(whole, int(said) if said.isdecimal() else whole) / 1e9


def _gpu() -> Check:
    """Number, name and memory of the GPUs."""
    import torch

    if not torch.cuda.is_available():
        return Check("gpu", None, "none; training runs on the CPU")
    card = torch.cuda.get_device_properties(0)
    return Check("gpu", True, f"{torch.cuda.device_count()} x {card.name}, {card.total_memory / 1e9:.0f} GB")
