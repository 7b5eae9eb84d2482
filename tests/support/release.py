"""A release as `make release` writes it, made in a moment: the wheel is this package's files in an archive."""

from __future__ import annotations

import hashlib
import shutil
import zipfile
from pathlib import Path

import fedvlp
from fedvlp.deploy import software
from support import lock


def written(folder: Path) -> Path:
    """The release in ``folder``, which is made."""
    folder.mkdir(parents=True)
    package = Path(fedvlp.__file__).parent
    with zipfile.ZipFile(folder / f"fedvlp-{fedvlp.__version__}-py3-none-any.whl", "w") as wheel:
        for path in sorted(package.rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                wheel.write(path, path.relative_to(package.parent))
    shutil.copy(lock.SITE, folder / software.LOCK)
    summed(folder)
    return folder


def summed(folder: Path) -> None:
    """Writes SHA256SUMS as it should be of what lies in ``folder``."""
    names = sorted(path.name for path in folder.iterdir() if path.name not in (software.SUMS, software.SIGNATURE))
    lines = [f"{hashlib.sha256((folder / name).read_bytes()).hexdigest()}  {name}\n" for name in names]
    (folder / software.SUMS).write_text("".join(lines))
